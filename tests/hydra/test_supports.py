"""Supports: what is stored of the words that a token was drawn among, and log-probs over them."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from rlhf_kernels.runtime import registry
from torch.nn import functional as F

from rlhf_engine.hydra import (
    HydraModel,
    LmLoss,
    LogprobLoss,
    LogprobPair,
    Logprobs,
    PackedBatch,
    PolicyLoss,
    SlotConfig,
    hydra_roles as roles,
)
from rlhf_engine.hydra.gate import LmHead
from rlhf_engine.hydra.supports import Supports, logprobs, pack_bits, pair
from tests.conftest import VOCAB, build, random_batch, randomise, tiny_llama


def random_mask(n: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    """Supports of one word up to all of them."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.rand(n, 1, generator=generator) ** 4
    mask = torch.rand(n, vocabulary, generator=generator) < share
    mask[torch.arange(n), torch.randint(vocabulary, (n,), generator=generator)] = True
    mask[0] = True
    return mask


def from_mask(mask: torch.Tensor) -> Supports:
    """Supports with the words that a mask [M, V] keeps."""
    return Supports.from_bits(pack_bits(mask), mask.shape[1])


def test_a_mask_comes_back(monkeypatch):
    for vocabulary in (1, 7, 31, 32, 33, 64, 1203):
        mask = random_mask(40, vocabulary)
        found = from_mask(mask)
        assert torch.equal(found.mask(), mask), vocabulary
        assert torch.equal(found.sizes, mask.sum(1)), vocabulary
        most = -(-vocabulary // 32)
        assert torch.equal(found.lengths, mask.sum(1).clamp_max(most))  # ids, or bits where those are fewer
        assert int(found.lengths[0]) == most  # all words are still a support: computed like any other
        assert found.words.nbytes <= 40 * 4 * most
        assert found.n_bytes == 4 * int(found.lengths.sum()) + 8 * 41
    mask = random_mask(9, 77)
    for tile in (1, 100, 2**22):  # made in several pieces
        monkeypatch.setattr("rlhf_kernels.vocab.logits.TILE_ELEMENTS", tile)
        found = Supports.from_bits(torch.cat([pack_bits(mask), torch.zeros(1, 3, dtype=torch.int32)]), 77)
        assert torch.equal(found.mask(), torch.cat([mask, torch.ones(1, 77, dtype=torch.bool)])), tile
        assert found.sizes.tolist() == [*mask.sum(1).tolist(), 77]
        assert int(found.lengths[-1]) == 0


def test_selecting_and_joining():
    mask = random_mask(20, 200)
    found = from_mask(mask)
    rows = torch.tensor([3, 3, 19, 0, 7])
    assert torch.equal(found.select(rows).mask(), mask[rows])
    part = found.select(slice(4, 9))
    assert torch.equal(part.mask(), mask[4:9])
    assert part.words.untyped_storage().data_ptr() == found.words.untyped_storage().data_ptr()
    assert len(found.select(slice(4, 4))) == len(found.select(rows[:0])) == 0
    joined = Supports.join([(None, 2), (part, 5), (Supports.whole(3, 200), 3)])
    expected = torch.cat([torch.ones(2, 200, dtype=torch.bool), mask[4:9], torch.ones(3, 200, dtype=torch.bool)])
    assert torch.equal(joined.mask(), expected)
    assert joined.lengths.tolist() == [0, 0, *part.lengths.tolist(), 0, 0, 0]
    assert Supports.join([(None, 2), (None, 0)]) is None
    rows = [found.select(slice(i, i + 1)).words for i in range(3)]
    assert torch.equal(Supports.of_rows(rows, 5, 200).mask()[:3], mask[:3])
    again = Supports.of_lengths(found.words, found.lengths.int(), 200).to("cpu")
    assert torch.equal(again.mask(), mask)


def test_what_is_no_support_is_refused():
    words = torch.zeros(3, dtype=torch.int32)
    for lengths in ([1, 1], [3], [4, -1]):
        with pytest.raises(ValueError, match="offsets: expected steps of 0 to 2 from 0 to the 3 numbers"):
            Supports.of_lengths(words, torch.tensor(lengths), 40)
    with pytest.raises(TypeError, match="words: expected int32"):
        Supports.of_lengths(words.long(), torch.tensor([1, 2]), 40)
    with pytest.raises(ValueError, match="one vocabulary, got vocabularies of"):
        Supports.concat([Supports.whole(1, 4), Supports.whole(1, 5)])
    with pytest.raises(ValueError, match="supports: expected those of 18 completion tokens, got 3"):
        dataclasses.replace(random_batch(), supports=Supports.whole(3, VOCAB))
    batch = dataclasses.replace(random_batch(), supports=Supports.whole(18, VOCAB + 1))
    with pytest.raises(ValueError, match=f"supports: expected those of the head's {VOCAB} words, got of {VOCAB + 1}"):
        build()(batch, (Logprobs(),))
    batch = dataclasses.replace(random_batch(), supports=from_mask(torch.ones(18, VOCAB, dtype=torch.bool)))
    with pytest.raises(ValueError, match=r"temperature: expected a finite number > 0, got 0\.0"):
        build()(batch, (Logprobs(temperature=0.0),))
    with pytest.raises(ValueError, match=r"outputs: expected none of the whole vocabulary .* got 'mean_logit'"):
        build()(batch, (Logprobs(outputs=("mean_logit",)),))


def with_supports(batch: PackedBatch, *, whole: tuple[int, ...] = ()) -> PackedBatch:
    """A batch with random supports, which hold its tokens; those of some tokens are left out."""
    mask = random_mask(batch.n_completion_tokens, VOCAB, seed=3)
    mask[torch.arange(len(mask)), batch.targets_M] = True
    bits = pack_bits(mask)
    bits[list(whole)] = 0
    return dataclasses.replace(batch, supports=Supports.from_bits(bits, VOCAB))


def test_a_batch_keeps_its_supports():
    batch = with_supports(random_batch())
    mask = batch.supports.mask()
    part = batch.select([2, 0])
    rows = batch.select_completion_rows([2, 0])
    assert torch.equal(part.supports.mask(), mask[rows])
    assert torch.equal(batch.to("cpu").supports.mask(), mask)
    joined = PackedBatch.concat([part, random_batch(), batch])
    assert torch.equal(joined.supports.mask()[: len(rows)], mask[rows])
    assert torch.equal(joined.supports.mask()[-len(mask) :], mask)
    assert joined.select([2, 3]).supports.lengths.tolist() == [0] * 7
    assert PackedBatch.concat([random_batch(), random_batch()]).supports is None


class Full:
    """log p of every word, over a mask, of actor and reference: [M, V] in plain torch."""

    roles = ("actor", "reference")

    def __init__(self, mask: torch.Tensor, temperature: float) -> None:
        self.mask, self.temperature = mask, temperature

    def compute(self, states):
        found = []
        for role in self.roles:
            head = states.lm_head(role)
            z = F.linear(states.predicting(role), head.weight)
            if head.lora is not None:
                z = z + head.lora.scale * F.linear(F.linear(states.predicting(role), head.lora.A), head.lora.B)
            found.append((z / self.temperature).masked_fill(~self.mask, -torch.inf).log_softmax(-1))
        return found


def build_double(*targets: str) -> HydraModel:
    slots = {"actor": SlotConfig(r=3, alpha=6.0, **({"target_modules": targets} if targets else {}))}
    model = HydraModel.from_pretrained(
        tiny_llama(dtype=torch.float64), roles=roles(), slots=slots, adapter_dtype=torch.float64
    )
    randomise(model, "actor")
    return model.eval()


@pytest.mark.parametrize(
    ("whole", "targets", "tile"),
    [((), (), 200), ((0, 5, 6, 17), ("q_proj", "lm_head"), 200), ((0, 5, 6, 17), (), 2**22)],
)
def test_every_output_and_gradient_is_over_the_support(whole, targets, tile, monkeypatch):
    """In float64, beside torch's log_softmax of masked logits."""
    monkeypatch.setattr("rlhf_kernels.vocab.logits.TILE_ELEMENTS", tile)
    model, batch, temperature = build_double(*targets), with_supports(random_batch(), whole=whole), 0.7
    weights = list(model.trainable_parameters("actor").values())
    mask, target = batch.supports.mask(), batch.targets_M[:, None]
    ((log_p, log_r),) = model(batch, (Full(mask, temperature),))
    logprob, ref_logprob = (x.gather(1, target)[:, 0] for x in (log_p, log_r))
    p = log_p.exp()
    entropy = -(p * log_p.masked_fill(~mask, 0.0)).sum(-1)
    kl = (p * (log_p.masked_fill(~mask, 0.0) - log_r.masked_fill(~mask, 0.0))).sum(-1)

    def near(found, expected):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)

    def same_gradients(found, expected):
        for x, y in zip(*(torch.autograd.grad(z, weights, retain_graph=True) for z in (found, expected)), strict=True):
            near(x, y)

    names = ("logprob", "entropy", "is_top1", "lse")
    single, both, reference = model(
        batch,
        (
            Logprobs(temperature=temperature, outputs=names),
            LogprobPair(temperature=temperature) if not targets else Logprobs(temperature=temperature, outputs=names),
            Logprobs(role="reference", temperature=temperature),
        ),
    )
    near(single.logprob, logprob)
    near(single.entropy, entropy)
    near(single.is_top1, (log_p.argmax(-1) == batch.targets_M).double())
    near(reference.logprob, ref_logprob)
    c = torch.linspace(-1.0, 2.0, len(logprob), dtype=torch.float64)
    same_gradients((c * single.logprob).sum() + (single.entropy * c**2).sum(), (c * logprob + c**2 * entropy).sum())
    if not targets:
        for found, expected in zip(both, (logprob, ref_logprob, kl, entropy), strict=True):
            near(found, expected)
        same_gradients((c * both.kl).sum(), (c * kl).sum())
    with torch.no_grad():
        scores = model.score(batch, ("actor", "reference"), temperature=temperature, exact_kl=True, token_budget=9)
    near(scores.kl_M, kl.detach())
    near(scores.logprobs_M, logprob.detach())

    old, advantage = logprob.detach() + c / 5, c.flip(0)
    keep = torch.arange(len(c)) % 4 != 2
    options = {"old_logprob_M": old, "advantage_M": advantage, "mask_M": keep, "denom": 9.0, "kl_coef": 0.1}
    (loss,) = model(
        batch, (PolicyLoss(**options, ref_logprob_M=ref_logprob.detach(), entropy_coef=0.3, temperature=temperature),)
    )
    ratio = (logprob - old).exp()
    clipped = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
    k3 = (ref_logprob - logprob).expm1() - (ref_logprob - logprob)
    expected = ((clipped + 0.1 * k3 - 0.3 * entropy) * keep).sum() / 9
    near(loss.loss, expected)
    near(loss.logprob, logprob.detach() * keep)
    near(loss.entropy, (entropy * keep).sum().detach() / 9)
    same_gradients(loss.loss, expected)

    def weighted(logprob):
        return SimpleNamespace(loss=(c * logprob).sum())

    (found,) = model(batch, (LogprobLoss(loss=weighted, temperature=temperature, entropy_coef=0.2, denom=2.0),))
    expected = (c * logprob).sum() - 0.1 * entropy.sum()
    near(found.loss, expected)
    same_gradients(found.loss, expected)
    (found,) = model(batch, (LmLoss(role="actor", denom=3.0, rows_M=torch.tensor([2, 0, 9])),))
    ((log_p, _),) = model(batch, (Full(mask, 1.0),))
    near(found, -log_p.gather(1, target)[[2, 0, 9], 0].sum() / 3)


def test_a_logit_of_one_word_has_no_gradient_and_no_entropy():
    model, batch = build(), random_batch()
    alone = F.one_hot(batch.targets_M, VOCAB).bool()
    (found,) = model(dataclasses.replace(batch, supports=from_mask(alone)), (Logprobs(outputs=("logprob", "entropy")),))
    assert torch.equal(found.logprob.detach(), torch.zeros(18))
    assert torch.equal(found.entropy.detach(), torch.zeros(18))
    for g in torch.autograd.grad(
        found.logprob.sum() + found.entropy.sum(), model.trainable_parameters("actor").values()
    ):
        assert not g.any()


@pytest.mark.parametrize(
    ("dtype", "head_options"),
    [(torch.float32, {"softcap": 3.0}), (torch.float32, {"logit_scale": 0.3}), (torch.bfloat16, {})],
)
def test_all_words_as_a_support_are_all_words(dtype, head_options):
    """Of the same rows: what the fused sweep gives, except for rounding, which in bf16 is the logits' own."""
    torch.manual_seed(0)
    hidden, other = torch.randn(2, 7, 24, dtype=dtype).unbind()
    head = LmHead(
        **{"weight": torch.randn(50, 24, dtype=dtype), "bias": None, "softcap": None, "logit_scale": None}
        | head_options
    )
    target = torch.randint(50, (7,))
    every = from_mask(torch.ones(7, 50, dtype=torch.bool))
    atol = 1e-5 if dtype == torch.float32 else 0.06
    for found, expected in zip(
        (*_both(hidden, other, head, target, every),), (*_both(hidden, other, head, target, None),), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def _both(hidden, other, head, target, supports):
    single = logprobs(hidden, head, target, supports, temperature=0.8, outputs=("logprob", "entropy"))
    both = pair(hidden, head, other, head, target, supports, temperature=0.8)
    return single.logprob, single.entropy, *both


def test_equal_states_have_no_kl_to_the_bit():
    torch.manual_seed(0)
    hidden = torch.randn(9, 24)
    head = LmHead(weight=torch.randn(50, 24), bias=torch.randn(50), softcap=None, logit_scale=None)
    supports = from_mask(random_mask(9, 50))
    target = supports.mask().int().argmax(1)
    for exact in (True, False):
        with registry.use_exact(exact):
            found = pair(hidden, head, hidden.clone(), head, target, supports, temperature=0.8)
        assert torch.equal(found.kl, torch.zeros(9))
        assert torch.equal(found.logprob_a, found.logprob_r)
