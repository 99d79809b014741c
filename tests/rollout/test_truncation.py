"""Draws among some words: what is drawn, with which log-probs, among which words, and that scoring says the same."""

import dataclasses
import itertools

import pytest
import torch
from rlhf_kernels.runtime import native, registry
from rlhf_kernels.sample.reference import filter_
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_engine.hydra import HydraModel, LogprobLoss, PackedBatch, PolicyLoss, SlotConfig, hydra_roles
from rlhf_engine.hydra.supports import Supports
from rlhf_engine.rollout import EngineOptions, Request, RolloutEngine, SamplingConfig, generate, generate_requests
from rlhf_engine.rollout.generate import collect
from tests.conftest import VOCAB, build, randomise, tiny_llama
from tests.hydra.test_supports import from_mask

ENDS = (2, 5, 9, 11, 13, 17)
FILTERS = {
    "top_k": {"top_k": 7}, "top_p": {"top_p": 0.8, "temperature": 0.7}, "min_p": {"min_p": 0.05, "temperature": 1.3},
    "all": {"top_k": 20, "top_p": 0.9, "min_p": 0.02}, "least": {"min_completion_length": 5},
    "least and top_k": {"min_completion_length": 5, "top_k": 4},
}  # fmt: skip
STEPS = ("native", "transformers")


def sampling(**changes) -> SamplingConfig:
    return SamplingConfig(**{"max_completion_length": 14, "eos_token_ids": ENDS, "seed": 3, **changes})


def prompts(n: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(18, VOCAB, (1 + i % 9,), generator=generator).tolist() for i in range(n)]


def make(dtype: torch.dtype) -> HydraModel:
    model = HydraModel.from_pretrained(
        tiny_llama(dtype=dtype), roles=hydra_roles(), slots={"actor": SlotConfig(r=4, alpha=8.0)}, dtype=dtype
    )
    randomise(model, "actor")
    return model.eval()


def needs(step: str) -> None:
    if step == "native" and native.missing() is not None:
        pytest.skip(str(native.missing()))


def logits_of(model: HydraModel, rollout) -> torch.Tensor:
    """[M, V] of the actor before each completion token."""
    from rlhf_engine.hydra.gate import head_logits

    class Logits:
        roles = ("actor",)

        def compute(self, states):
            return head_logits(states.predicting("actor"), states.lm_head("actor"))

    with torch.no_grad():
        (logits,) = model(rollout.batch, (Logits(),))
    return logits


@pytest.mark.parametrize(
    ("filters", "step"), [(kept, STEPS[i % len(STEPS)]) for i, kept in enumerate(FILTERS.values())], ids=FILTERS
)
def test_supports_are_the_words_that_the_filters_keep(filters, step):
    needs(step)
    model, how = make(torch.float32), sampling(**filters)
    rollout = generate(model, prompts(30), how, options=EngineOptions(decode_step=step, max_rows=11))
    supports = rollout.batch.supports
    z = logits_of(model, rollout)
    is_short = rollout.batch.completion_position_M < how.min_completion_length - 1
    z[:, list(ENDS)] = torch.where(is_short[:, None], -torch.inf, z[:, list(ENDS)])
    z = z / how.temperature
    expected = filter_(z.clone(), how.top_k or 0, how.top_p or 1.0, how.min_p or 0.0) > -torch.inf
    found = supports.mask()
    # a probability at the very border may fall on the other side, since decoding rounds differently
    assert int((found != expected).any(1).sum()) <= 1
    assert bool(found.gather(1, rollout.batch.targets_M[:, None]).all())
    log_p = z.masked_fill(~found, -torch.inf).log_softmax(-1)
    torch.testing.assert_close(
        rollout.logprobs_M, log_p.gather(1, rollout.batch.targets_M[:, None])[:, 0], rtol=0, atol=1e-4
    )
    truncates = bool({"top_k", "top_p", "min_p"} & filters.keys())
    assert torch.equal(supports.lengths > 0, torch.full_like(is_short, True) if truncates else is_short)
    assert supports.words.nbytes <= len(supports) * 4 * -(-VOCAB // 32)
    if how.min_completion_length:
        assert min(rollout.batch.completion_lens) == 5  # the fifth token may be the end
    assert not rollout.filtered


@pytest.mark.parametrize(
    ("filters", "step", "dtype"),
    [
        pytest.param(kept, step, dtype, marks=[pytest.mark.long] * ((i + j) % 2))
        for i, kept in enumerate(FILTERS.values())
        for j, (step, dtype) in enumerate((("native", torch.bfloat16), ("transformers", torch.float32)))
    ],
)
def test_in_exact_mode_scoring_has_the_bits_of_the_rollout(filters, step, dtype):
    """Of many rows at once; and each row has the same tokens, bits and supports alone."""
    needs("native")
    model, how, asked = make(dtype), sampling(**filters), prompts(12)
    with registry.use_exact():
        rollout = generate(model, asked, how, options=EngineOptions(decode_step=step))
        assert rollout.stats.most_rows == 12
        score = {"roles": ("actor", "reference"), "temperature": how.temperature}
        scores = model.score(rollout.batch, **score)
        assert torch.equal(rollout.logprobs_M, scores.logprobs_M)
        assert torch.equal(scores.logprobs_M, model.score(rollout.batch, token_budget=1, **score).logprobs_M)
        assert torch.equal(scores.logprobs_M, model.score(rollout.batch, exact_kl=True, **score).logprobs_M)
        for i in (0, 7, 11):
            alone = generate(model, [asked[i]], how, sample_ids=[i], options=EngineOptions(decode_step=step))
            part, rows_M = rollout.batch.select([i]), rollout.batch.select_completion_rows([i])
            assert torch.equal(alone.batch.tokens_T, part.tokens_T)
            assert torch.equal(alone.logprobs_M, rollout.logprobs_M[rows_M])
            assert torch.equal(alone.batch.supports.mask(), part.supports.mask())
    assert rollout.logprobs_M.numel() > 40


@pytest.mark.parametrize("step", STEPS)
def test_requests_of_every_kind_share_a_batch(step):
    """Each has the supports of its own options, those without have none, and all have the bits of scoring."""
    needs("native")
    model, asked = make(torch.bfloat16), prompts(21)
    own = [{}, *FILTERS.values()] * 3
    requests = [
        Request(prompt=tuple(p), sample_id=i, greedy=i > 17, **{k: v for k, v in options.items() if k != "temperature"})
        for i, (p, options) in enumerate(zip(asked, own, strict=True))
    ]
    with registry.use_exact():
        mixed = generate_requests(model, requests, sampling(), options=EngineOptions(decode_step=step))
        assert torch.equal(mixed.logprobs_M, model.score(mixed.batch, ("actor",)).logprobs_M)
        lengths = mixed.batch.supports.lengths
        for i, request in enumerate(requests):
            (a, b), alone = mixed.batch.completion_cu[i : i + 2], generate_requests(model, [request], sampling())
            assert alone.batch.completion_tokens(0) == mixed.batch.completion_tokens(i)
            assert torch.equal(alone.logprobs_M, mixed.logprobs_M[a:b])
            assert (alone.batch.supports is None) == (not own[i])
            if not own[i]:
                assert not lengths[a:b].any()
            else:
                assert torch.equal(alone.batch.supports.mask(), mixed.batch.supports.select(slice(a, b)).mask())


def test_rows_that_may_end_within_a_burst_have_all_words_from_then_on():
    """A GPU draws a few tokens between two looks at them."""
    model, how = make(torch.float32), sampling(min_completion_length=6)
    requests = [Request(prompt=tuple(p), sample_id=i) for i, p in enumerate(prompts(9))]
    found = []
    for burst in (1, 4):
        engine = RolloutEngine(model)
        engine.submit(requests, how)
        engine._burst, engine._ahead = burst, 12 - 3 * burst  # with 4, the next burst is queued before one is read
        found.append(collect(engine, requests, list(engine.run())))
    assert torch.equal(found[0].batch.tokens_T, found[1].batch.tokens_T)
    assert torch.equal(found[0].batch.supports.mask(), found[1].batch.supports.mask())
    assert set(found[0].batch.supports.sizes.tolist()) == {VOCAB - len(ENDS), VOCAB}
    assert 6 in found[0].batch.completion_lens


def test_a_filter_that_keeps_every_word_is_a_support_like_any_other():
    """Scoring then takes the path of the draw, whose bits it needs."""
    needs("native")
    model = make(torch.bfloat16)
    with registry.use_exact():
        rollout = generate(model, prompts(6), sampling(min_p=1e-30))
        assert torch.equal(rollout.logprobs_M, model.score(rollout.batch, ("actor",)).logprobs_M)
    supports = rollout.batch.supports
    assert set(supports.sizes.tolist()) == {VOCAB}
    assert set(supports.lengths.tolist()) == {2}


@pytest.mark.parametrize(("exact", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_ratios_are_one_at_equal_weights(stories, dtype, exact):
    """A real model under top_p 0.8; over all words the mean ratio would be far from 1."""
    needs("native")
    model = HydraModel.from_pretrained(stories, roles=hydra_roles(), dtype=dtype).eval()
    with registry.use_exact(exact):
        rollout = generate(
            model, [[1, 403, 407], [1, 261]] * 8, sampling(top_p=0.8, max_completion_length=48, eos_token_ids=())
        )
        scores = model.score(rollout.batch, ("actor", "reference"), exact_kl=True)
        whole = model.score(dataclasses.replace(rollout.batch, supports=None), ("actor",)).logprobs_M
        ones, mask = torch.ones_like(whole), torch.ones_like(whole, dtype=torch.bool)
        loss = PolicyLoss(old_logprob_M=rollout.logprobs_M, advantage_M=ones, mask_M=mask, denom=float(len(whole)))
        (made,) = model(rollout.batch, (loss,))
    ratio = float((scores.logprobs_M - rollout.logprobs_M).double().exp().mean())
    if exact:
        assert torch.equal(scores.logprobs_M, rollout.logprobs_M)
        assert ratio == 1.0
        assert torch.equal(made.logprob, rollout.logprobs_M)
        assert float(made.loss.detach()) == -1.0
    bound = 1e-5 if dtype == torch.float32 else 0.03
    assert abs(ratio - 1) < bound
    assert float((scores.logprobs_M - rollout.logprobs_M).abs().mean()) < bound
    assert torch.equal(scores.kl_M, torch.zeros_like(whole))  # the actor is the reference here
    assert torch.equal(scores.logprobs_M, scores.ref_logprobs_M)
    assert abs(float((whole - rollout.logprobs_M).double().exp().mean()) - 1) > 0.05


WORDS = 7


@pytest.fixture
def enumerated():
    """A model of seven words in float64, its answers of two tokens under top_p 0.8, and a reward for each."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=WORDS, max_position_embeddings=16, initializer_range=0.15, tie_word_embeddings=False,
    )  # fmt: skip
    plain = LlamaForCausalLM(config).double().eval()
    model = HydraModel.from_pretrained(
        plain, roles=hydra_roles(), slots={"actor": SlotConfig(r=3, alpha=6.0)}, adapter_dtype=torch.float64
    )
    randomise(model, "actor")
    every = PackedBatch.from_lists([[1, 4]] * WORDS**2, [list(a) for a in itertools.product(range(WORDS), repeat=2)])
    return model.eval(), every


def test_the_policy_gradient_is_that_of_the_truncated_policy(enumerated):
    """∇ E[r] over every answer of the truncated policy, its supports held fixed, beside the losses of the engine."""
    model, every = enumerated
    how = sampling(top_p=0.8, max_completion_length=2, eos_token_ids=())
    weights = list(model.trainable_parameters("actor").values())

    class LogP:
        roles = ("actor",)

        def compute(self, states):
            return torch.nn.functional.linear(states.predicting("actor"), states.lm_head("actor").weight)

    (z,) = model(every, (LogP(),))
    kept = filter_(z.detach().clone(), 0, 0.8, 0.0) > -torch.inf
    log_p = z.masked_fill(~kept, -torch.inf).log_softmax(-1).gather(1, every.targets_M[:, None]).view(-1, 2)
    possible = kept.gather(1, every.targets_M[:, None]).view(-1, 2).all(1).nonzero()[:, 0]
    p_N = log_p[possible].sum(1).exp()
    assert 4 < len(possible) < 36
    torch.testing.assert_close(p_N.sum().detach(), torch.ones((), dtype=torch.float64), rtol=0, atol=1e-12)
    reward_N = torch.randn(len(possible), dtype=torch.float64)
    exact = torch.autograd.grad((p_N * reward_N).sum(), weights)

    # the engine finds the same supports, and draws every answer that is possible
    drawn = generate(model, [[1, 4]] * 400, how)
    supports_of = {}
    for i in range(400):
        rows = drawn.batch.select_completion_rows([i])
        supports_of[tuple(drawn.batch.completion_tokens(i))] = drawn.batch.supports.select(rows).mask()
    answers = [every.completion_tokens(i) for i in possible.tolist()]
    assert supports_of.keys() == {tuple(a) for a in answers}
    for i, answer in zip(possible.tolist(), answers, strict=True):
        assert torch.equal(supports_of[tuple(answer)], kept[2 * i : 2 * i + 2])

    supports = Supports.concat([from_mask(supports_of[tuple(answer)]) for answer in answers])
    batch = PackedBatch.from_lists([[1, 4]] * len(answers), answers, supports=supports)
    p_M, reward_M = (x.detach()[batch.sequence_of_M] for x in (p_N, reward_N))
    old_M = log_p[possible].detach().flatten()

    class Weighed:
        def __init__(self, logprob):
            self.loss = -(p_M * reward_M * logprob).sum()

    def gradients(batch):
        fused = PolicyLoss(old_logprob_M=old_M, advantage_M=reward_M, mask_M=p_M, denom=1.0)
        for output in (LogprobLoss(loss=Weighed), fused):
            (found,) = model(batch, (output,))
            yield torch.cat([g.flatten() for g in torch.autograd.grad(-found.loss, weights)])

    expected = torch.cat([g.flatten() for g in exact])
    for found in gradients(batch):
        torch.testing.assert_close(found, expected, rtol=0, atol=float(1e-12 * expected.abs().max()))
    # over all words it is the gradient of something else
    for found in gradients(dataclasses.replace(batch, supports=None)):
        assert float((found - expected).norm() / expected.norm()) > 0.05


def test_greedy_rows_have_supports_of_what_could_have_been_drawn():
    model = build()
    greedy = generate(model, prompts(6), sampling(top_k=3), greedy=[True] * 6)
    plain = generate(model, prompts(6), sampling(), greedy=[True] * 6)
    assert torch.equal(greedy.batch.tokens_T, plain.batch.tokens_T)
    assert set(greedy.batch.supports.sizes.tolist()) == {3}
    scores = model.score(greedy.batch, ("actor",))
    torch.testing.assert_close(greedy.logprobs_M, scores.logprobs_M, rtol=0, atol=1e-5)
