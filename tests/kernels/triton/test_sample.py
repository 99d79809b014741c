"""The Triton draw: properties of every backend, the reference's words and noise, exact mode, memory, large sizes."""

import pytest
import torch
import triton
import triton.language as tl
from rlhf_kernels import BackendUnavailableError, linear_logprob, linear_logprob_pair, linear_ppo_loss, sample
from rlhf_kernels.runtime import philox, philox_triton, registry
from rlhf_kernels.sample import triton as ours
from rlhf_kernels.sample.reference import STREAM
from rlhf_kernels.vocab import cost

from tests.kernels.checks import capture, each, in_any_company, same_bits
from tests.kernels.test_sample import (  # noqa: F401
    ALL,
    check,
    every_option,
    make,
    test_any_strides_mixed_dtypes_and_red_zones,
    test_every_column_a_new_best,
    test_every_option,
    test_first_of_equal_maxima_across_strips_and_chunks,
    test_greedy_is_the_first_maximum_before_the_temperature,
    test_lora_on_a_bf16_head_is_not_rounded_to_bf16,
    test_sizes_and_hostile_rows,
    test_some_rows_never_draw_what_is_forbidden,
    test_the_rest_of_the_batch_does_not_change_the_bits,
    test_tokens_are_the_references,
    test_tokens_of_a_flat_head,
    test_values_that_are_not_finite,
)

STREAM_WORD = tl.constexpr(STREAM)


@pytest.fixture(params=[132, 3], ids=["a tile per share", "several"])
def backend(request, monkeypatch, on_triton):
    monkeypatch.setattr(ours, "PROGRAMS", request.param)
    return on_triton


@triton.jit
def _noise_kernel(seed, row, out, n, BN: tl.constexpr, BD: tl.constexpr):
    rows = tl.arange(0, BN)
    seeds = tl.load(seed + rows, mask=rows < n, other=0)[:, None]
    ids = tl.load(row + rows, mask=rows < n, other=0)[:, None]
    for first in tl.static_range(0, 2 * BD, BD):
        words = philox_triton.random_words(seeds, ids, STREAM_WORD, first, BN, BD)
        at = rows[:, None] * 2 * BD + first + tl.arange(0, BD)[None, :]
        tl.store(out + at, words.to(tl.int64), mask=(rows < n)[:, None])


@triton.jit
def _gumbel_kernel(words, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, philox_triton.gumbel(tl.load(words + at, mask=at < n, other=0).to(tl.uint32)), mask=at < n)


def test_words_are_those_of_philox(on_triton):
    seed = torch.tensor([0, 11, -1, 2**62 + 5, -(2**63)])
    row = torch.tensor([2**32 - 1, 0, 2**32, 2**63 - 1, -3])
    out = torch.zeros(5, 64, dtype=torch.int64)
    _noise_kernel[(1,)](seed, row, out, 5, BN=8, BD=32)
    assert torch.equal(out, philox.random_words(seed, row, STREAM, 64))


def test_gumbel_is_that_of_its_word(on_triton, monkeypatch):
    """Both ends, where one logarithm or the other is of a number near 1, and words that fp32 has to round."""
    ranges = (0, 2000), (2**32 - 2000, 2**32), (2**24 - 1000, 2**24 + 1000)
    word = torch.cat([*(torch.arange(*ends) for ends in ranges), torch.randint(0, 2**32, (20_000,))])
    out = torch.empty(len(word))
    _gumbel_kernel[(triton.cdiv(len(word), 1024),)](word, out, len(word), BLOCK=1024)
    monkeypatch.setattr(philox, "random_words", lambda *_: word)
    u = ((word.double() + 0.5) * 2.0**-32).float().clamp_max(1 - 2.0**-24).double()
    exact = -torch.log(-torch.log1p(-u))
    eager = (philox.gumbel(None, None, 0, 0).double() - exact).abs().max()
    assert (out.cpu().double() - exact).abs().max() <= 2 * eager


@each(("options", "dtype"), [("none", torch.float32), ("all", torch.bfloat16)])
def test_exact_mode_scores_a_token_with_the_bits_that_it_was_drawn_with(on_triton, dtype, options):
    """By linear_logprob, the pair and the loss's ratio, whatever the number of rows."""
    n, h, v = 36, 24, 150
    hidden, weight, seed, position = make(n, h, v, dtype=dtype)
    knobs = {} if options == "none" else every_option(n, h, v)
    drawn = sample(hidden, weight, seed=seed, position=position, outputs=ALL, **knobs)
    knobs.pop("greedy", None)
    with registry.use_exact():
        for rows in (slice(None), [3], list(range(14, 31))):
            own = {k: x[rows] if k == "temperature" else x for k, x in knobs.items()}
            token = drawn.token[rows]
            scored = linear_logprob(hidden[rows], weight, token, outputs=("logprob", "entropy"), **own)
            assert torch.equal(scored.logprob, drawn.logprob[rows])
            assert torch.equal(scored.entropy, drawn.entropy[rows])
            pair = linear_logprob_pair(hidden[rows], hidden[rows].flip(0), weight, token, **own)
            assert torch.equal(pair.logprob_a, drawn.logprob[rows])
            ones = torch.ones(len(token))
            loss = linear_ppo_loss(
                hidden[rows], weight, token, drawn.logprob[rows], ones, ones.bool(), denom=1.0, **own
            )
            assert torch.equal(loss.logprob, drawn.logprob[rows])
            assert loss.ratio_max == 1


@each("options", ["none", "all"])
def test_exact_mode_gives_a_row_the_gradient_of_itself(on_triton, monkeypatch, options):
    """Through linear_logprob, the pair and the loss, alone and among other rows."""
    monkeypatch.setattr(cost, "SMALL_TILE", 2**10)  # so that the number of rows would decide about tiles at once
    monkeypatch.setattr(cost, "MIN_TILE_COLUMNS", 64)
    n, h, v = 24, 24, 150
    hidden, weight, *_ = make(n, h, v, dtype=torch.bfloat16)
    target = torch.arange(n) % v
    knobs = {} if options == "none" else every_option(n, h, v)
    knobs.pop("greedy", None)

    def run(rows):
        own = {k: x[rows] if k == "temperature" else x for k, x in knobs.items()}
        x, y = hidden[rows].clone().requires_grad_(), target[rows]
        gradients = []
        scored = linear_logprob(x, weight, y, outputs=("logprob", "entropy"), **own)
        gradients += torch.autograd.grad(scored.logprob.sum(), x, retain_graph=True)
        gradients += torch.autograd.grad(scored.entropy.sum(), x)
        pair = linear_logprob_pair(x, hidden[rows].flip(1), weight, y, **own)
        gradients += torch.autograd.grad((pair.logprob_a + pair.kl).sum(), x)
        ones = torch.ones(len(y))
        loss = linear_ppo_loss(
            x, weight, y, -4 * ones, ones, ones.bool(), denom=1.0, clip_low=9.0, clip_high=9e9, **own
        )
        return [*gradients, *torch.autograd.grad(loss.loss, x)]

    with registry.use_exact():
        whole = run(list(range(n)))
        for rows in ([17], [23, 2, 11]):
            for alone, among in zip(run(rows), whole, strict=True):
                assert alone.abs().max() > 0
                assert torch.equal(alone, among[rows])


def test_nothing_as_large_as_the_logits(on_triton, monkeypatch):
    shapes = []
    empty = ours.HeadInputs.empty
    monkeypatch.setattr(
        ours.HeadInputs, "empty", lambda self, *shape, **kw: shapes.append(shape) or empty(self, *shape, **kw)
    )
    hidden, weight, seed, position = make(16, 8, 3000, dtype=torch.bfloat16)
    sample(hidden, weight, seed=seed, position=position, outputs=ALL)
    assert max(torch.Size(shape).numel() for shape in shapes) <= 4 * 16 * 24  # shares of 128 columns


def test_what_it_leaves_to_the_reference(on_triton):
    hidden, weight, seed, position = make(3, 8, 40)
    rows = {"seed": seed, "position": position}
    for filters in ({"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}):
        with pytest.raises(BackendUnavailableError, match="'triton' cannot serve sample: top_k, top_p and min_p"):
            sample(hidden, weight, **filters, **rows)
    assert sample(hidden, weight, top_k=40, top_p=1.0, **rows).token.shape == (3,)
    with pytest.raises(BackendUnavailableError, match=r"not in torch\.float64"):
        sample(hidden.double(), weight, **rows)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 4096, 128256), (64, 2048, 151936), (200, 896, 50264)])
def test_at_size(on_triton, shape):
    check(*make(*shape, dtype=torch.bfloat16, scale=shape[1] ** -0.5))


@pytest.mark.gpu
def test_bits_at_size_whatever_the_batch_in_ten_runs(on_triton):
    hidden, weight, seed, position = make(300, 2048, 32001, dtype=torch.bfloat16, scale=0.02)

    run = lambda hidden, *keys: sample(hidden, weight, seed=keys[0], position=keys[1], outputs=ALL)  # noqa: E731
    companies = [slice(n) for n in (1, 2, 15, 16, 17, 64, 65, 128, *[300] * 10)]
    in_any_company(run, [hidden, seed, position], companies)


@pytest.mark.gpu
def test_graph_replay_with_other_rows(on_triton):
    hidden, weight, seed, position = make(32, 1024, 32001, dtype=torch.bfloat16, scale=0.03)
    greedy = torch.arange(32) % 4 == 0
    temperature = torch.rand(32) + 0.5

    def step():
        rows = {"seed": seed, "position": position, "greedy": greedy, "temperature": temperature}
        return sample(hidden, weight, outputs=ALL, **rows)

    graph, captured = capture(step)
    for _ in range(2):
        hidden.copy_(torch.randn_like(hidden))
        position.add_(1)
        graph.replay()
        torch.cuda.synchronize()
        same_bits(captured, step())
