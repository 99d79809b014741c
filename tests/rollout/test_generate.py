"""Rollouts: tokens of transformers' generate, log-probs of the training forward, stop texts, blocks of the cache."""

import copy
import random

import pytest
import torch
from rlhf_kernels.lora import native as lora_cpu
from rlhf_kernels.runtime import native

from rlhf_engine.hydra import HydraModel, hydra_roles
from rlhf_engine.hydra.attention import BlockPool, KVCache, NewTokens
from rlhf_engine.rollout import EngineOptions, SamplingConfig, generate
from rlhf_engine.rollout.request import StopTexts
from rlhf_engine.scoring.experience import MISMATCH_BOUND, MISMATCH_MAX_FACTOR
from tests.conftest import build, randomise, tiny_llama

PROMPTS = [[5, 9, 11], [7], [20, 21, 22, 23, 24, 25], [4, 4]]


def sampling(**changes) -> SamplingConfig:
    return SamplingConfig(**{"max_completion_length": 12, "eos_token_ids": (2,), "seed": 3, **changes})


def test_greedy_rows_equal_transformers_generate():
    """Beside the plain model with the adapter multiplied into a copy of its weights."""
    model, plain = build(), tiny_llama()
    for path, pair in model.backbone().slot("actor").items():
        with torch.no_grad():
            plain.get_submodule(path).weight += model.backbone().slot("actor").config.scale * pair.B @ pair.A
    rollout = generate(model, PROMPTS, sampling(), greedy=[True] * 4)
    for i, prompt in enumerate(PROMPTS):
        expected = plain.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=2, pad_token_id=0
        )
        assert rollout.batch.completion_tokens(i) == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize(("dtype", "temperature"), [(torch.float32, 0.7), (torch.bfloat16, 1.0)])
def test_log_probs_are_those_of_the_training_forward(dtype, temperature):
    model = build() if dtype == torch.float32 else build_bf16()
    prompts = [p * 3 for p in PROMPTS] * 4
    rollout = generate(model, prompts, sampling(temperature=temperature, max_completion_length=30))
    scores = model.score(rollout.batch, ("actor",), temperature=temperature)
    difference = (scores.logprobs_M - rollout.logprobs_M).abs()
    gap = difference.max().item()
    assert difference.mean() <= MISMATCH_BOUND[dtype]
    assert gap <= MISMATCH_MAX_FACTOR * MISMATCH_BOUND[dtype]
    other = model.score(rollout.batch, ("actor",), temperature=2 * temperature)
    assert (other.logprobs_M - rollout.logprobs_M).abs().max() > 10 * gap


@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_goes_through_its_kernel_and_keeps_the_log_probs(dtype, monkeypatch):
    """Errors are those against a float64 copy: they may not exceed the training forward's by more than a quarter.

    Against the training forward, fp32 steps on torch look better than they are: they round as its products do.
    """
    calls = []
    run = lora_cpu.Decoder.__call__
    monkeypatch.setattr(lora_cpu.Decoder, "__call__", lambda *arguments: calls.append(1) or run(*arguments))
    plain = tiny_llama(dtype=dtype, width=4)  # the kernel wants a depth that 32 divides
    exact = HydraModel.from_pretrained(copy.deepcopy(plain).double(), roles=hydra_roles()).eval()
    model = HydraModel.from_pretrained(plain, roles=hydra_roles()).eval()
    randomise(model, "actor")
    slots = [m.backbone().slot("actor").parameters() for m in (exact, model)]
    for wide, narrow in zip(*slots, strict=True):
        wide.data = narrow.detach().double()
    prompts = [p * 3 for p in PROMPTS] * 4
    plain_steps = EngineOptions(decode_step="transformers")

    def rms(x: torch.Tensor) -> float:
        return x.square().mean().sqrt().item()

    def errors() -> tuple[float, float, float]:
        """RMS error of the steps' log-probs, RMS error of the training forward's, mean distance of the two."""
        rollout = generate(model, prompts, sampling(max_completion_length=30, eos_token_ids=()), options=plain_steps)
        steps = rollout.logprobs_M.double()
        training, truth = (m.score(rollout.batch, ("actor",)).logprobs_M.double() for m in (model, exact))
        return rms(steps - truth), rms(training - truth), (steps - training).abs().mean().item()

    ours, training, apart = errors()
    linears = len(model.backbone().slot("actor").pairs)
    assert len(calls) == 29 * linears  # all but the prefill
    assert ours <= 1.25 * training
    calls.clear()
    with monkeypatch.context() as patch:
        patch.setattr(lora_cpu.Decoder, "serves", lambda *arguments: False)
        plainly, _, plainly_apart = errors()
    assert calls == []
    assert ours <= 1.25 * plainly
    if dtype == torch.bfloat16:  # rounds where the training forward does, so that most errors are the same
        assert apart <= 1.25 * plainly_apart
    generate(model, prompts, sampling(), role="reference", options=plain_steps)
    assert calls == []  # OFF rows have the plain model's bits


def build_bf16() -> HydraModel:
    model = HydraModel.from_pretrained(tiny_llama(dtype=torch.bfloat16), roles=hydra_roles())
    return model.eval()


def test_rows_stop_on_their_own_end_token():
    model = build()
    lengths = set()
    for eos in range(3, 40, 3):
        rollout = generate(model, PROMPTS, sampling(eos_token_ids=(eos,)))
        for i, done in enumerate(rollout.finished):
            tokens = rollout.batch.completion_tokens(i)
            assert eos not in tokens[:-1]
            assert done == (tokens[-1] == eos)
            assert done or len(tokens) == 12
        lengths.add(rollout.batch.completion_lens)
    assert len(lengths) > 3  # rows of one batch did stop at different places


def test_bad_requests():
    for prompts, options, message in [
        ([], {}, "batch of size 0"),
        ([[5], []], {}, r"prompts\[1\]: expected at least one token, got an empty prompt"),
        ([[5] * 60], {}, r"prompts\[0\]: expected at most 52 tokens .*got 60"),
        ([[5]], {"role": "teacher"}, "role: expected one of .*got 'teacher'"),
        ([[5]], {"role": "critic"}, "expected one with an LM head, got 'critic'"),
        ([[5]], {"greedy": [True, False]}, "expected 1 entries like prompts, got 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            generate(build(), prompts, sampling(), **options)


def test_bad_sampling():
    with pytest.raises(ValueError, match="temperature: expected a positive number"):
        sampling(temperature=0.0)
    with pytest.raises(ValueError, match="max_completion_length: expected at least 1 token, got 0"):
        sampling(max_completion_length=0)


def fallback(tokens) -> str:
    """As byte-fallback tokenizers decode: bytes that are no character spoil all bytes next to them."""
    text, run = "", b""
    for token in [*tokens, None]:
        if isinstance(token, int):
            run += bytes([token])
            continue
        if run:
            try:
                text += run.decode()
            except UnicodeDecodeError:
                text += "\ufffd" * len(run)
            run = b""
        text += token or ""
    return text


def plainly(tokens, stops) -> int | None:
    """Tokens up to the first stop text by decoding everything each time."""
    for n in range(1, len(tokens) + 1):
        if any(stop in fallback(tokens[:n]) for stop in stops):
            return n
    return None


def found(tokens, stops) -> int | None:
    texts = StopTexts(stops, fallback)
    return next((n for n in range(1, len(tokens) + 1) if texts.completed_by(tokens[:n])), None)


def test_found_where_decoding_everything_finds_it():
    rng = random.Random(0)
    pieces = ["a", "b", "ab", "\n", "\u6211", "\U0001f600", "ba\n", " "]
    stops = ["\n", "ab", "\u6211a", "b\u6211", "a\U0001f600"]
    hits = 0
    for _ in range(400):
        tokens: list = []
        for _ in range(rng.randint(1, 14)):
            piece = rng.choice(pieces)
            tokens += list(piece.encode()) if rng.random() < 0.6 else [piece]
        chosen = rng.sample(stops, rng.randint(1, 3))
        expected = plainly(tokens, chosen)
        assert found(tokens, chosen) == expected, (tokens, chosen)
        hits += expected is not None
    assert hits > 100


def test_cut_and_what_may_still_become_a_stop_text():
    texts = StopTexts(["END", "a\u6211"], fallback)
    assert texts.cut("one END two a\u6211") == "one "
    assert texts.cut("nothing") == "nothing"
    assert [texts.may_begin(text) for text in ("xE", "xEN", "x", "ENx", "ha", "")] == [1, 2, 0, 0, 1, 0]


def test_blocks_go_round():
    pool = BlockPool(4)
    first = pool.take(3)
    assert pool.free == 1
    pool.share(first[:1])
    pool.give_back(first)
    assert pool.free == 3  # one is still held
    second = pool.take(3)
    assert first[0] not in second
    assert pool.most_used == 4
    pool.give_back(first[:1])
    assert pool.take(1) == first[:1]


def test_misuse_of_a_pool_is_refused():
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="n: expected at most 2 blocks, which are free, got 3"):
        pool.take(3)
    with pytest.raises(ValueError, match="blocks: expected blocks in use, got 0"):
        pool.give_back([0])
    with pytest.raises(ValueError, match="blocks: expected blocks in use, got 1"):
        pool.share([1])


def test_tokens_lie_where_the_table_says():
    cache = KVCache(blocks=5, block=4)
    tables, lengths = [[3, 1], [4]], [6, 2]
    key, value = torch.arange(8.0)[:, None, None].expand(8, 2, 3).clone(), -torch.arange(24.0).view(8, 1, 3)
    key[:, 1] += 100
    NewTokens.of_prompts(cache, tables, lengths, torch.device("cpu")).write(0, key, value)
    k, v = cache.read(0)
    assert k.shape == (5, 4, 2, 3)
    assert v.shape == (5, 4, 1, 3)
    assert torch.equal(torch.cat([k[3], k[1, :2]]), key[:6])
    assert torch.equal(v[4, :2], value[6:])
    table = torch.tensor([[3, 1], [4, 0]])
    NewTokens.of_rows(cache, table, torch.tensor([6, 2])).write(0, key[:2] + 50, value[:2] + 50)
    assert torch.equal(k[1, 2], key[0] + 50)
    assert torch.equal(v[4, 2], value[1] + 50)


def test_copies_take_every_layer():
    cache = KVCache(blocks=3, block=2)
    for layer in range(2):
        cache.allocate(layer, torch.empty(1, 2, 4), torch.empty(1, 2, 4))
        cache.keys[layer].normal_()
        cache.values[layer].normal_()
    cache.copy([0], [2])
    for layers in (cache.keys, cache.values):
        assert all(torch.equal(x[0], x[2]) for x in layers.values())
