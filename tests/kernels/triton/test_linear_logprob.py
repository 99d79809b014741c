"""The Triton `linear_logprob` on its paths: properties of every backend, certain targets, work left out, bits."""

import itertools

import pytest
import torch
from rlhf_kernels import BackendUnavailableError, linear_logprob
from rlhf_kernels.runtime.testing import assert_ok, tier1, tier3
from rlhf_kernels.runtime.triton_support import INTERPRETED
from rlhf_kernels.vocab import cost, triton_sweep as sweep
from rlhf_kernels.vocab.logits import OUTPUTS

from tests.kernels.checks import detached, repeated_and_captured
from tests.kernels.dense import DIFFERENTIABLE, dense, double, make
from tests.kernels.test_linear_logprob import (  # noqa: F401
    test_all_rows_ignored_and_empty_batches,
    test_any_layout_and_ignored_rows_that_hold_nan,
    test_half_precision_is_tier3_and_its_logprob_is_not_rounded,
    test_hostile_rows,
    test_masked_vocabulary_columns_have_no_nan,
    test_mixed_dtypes,
    test_ragged_sizes,
    test_tier1_of_every_output_input_and_option,
    test_top1_first_maximum_wins,
)

OPS = torch.ops.rlhf_kernels


def force(monkeypatch, path):
    """Make every call take one path: fused; tiled, one tile or some; small tiles with several row chunks."""
    rows = 2**20 if path == "fused" else 0
    monkeypatch.setattr(sweep, "FUSED_ROWS", dict.fromkeys(sweep.FUSED_ROWS, rows))
    if path == "small tiles":
        sizes = {
            "TILE_ROWS": 64,
            "TILE_COLUMNS": 128,
            "MIN_TILE_ROWS": 64,
            "MIN_TILE_COLUMNS": 128,
            "SMALL_TILE": 2**13,
        }
        for name, size in sizes.items():
            monkeypatch.setattr(cost, name, size)
    if path == "fused":
        monkeypatch.setattr(sweep, "FUSED_PROGRAMS", 3)


@pytest.fixture(params=["fused", "tiled", "small tiles"])
def backend(request, monkeypatch, on_triton):
    force(monkeypatch, request.param)
    return on_triton


def nearly_certain(n, h, v, dtype, temperature):
    """hidden, weight and the arg-max as target, of rows in which it has a probability from 0.999 to 0.9999."""
    weight = make(n, h, v)[1].to(dtype)
    rows = weight[torch.arange(n) % v].double() + 0.1 * torch.randn(n, h).double()
    z = rows @ weight.double().T / temperature
    low, high = torch.zeros(n, 1, dtype=torch.float64), torch.ones(n, 1).double()
    certainty = torch.linspace(0.9992, 0.9999, n)
    for _ in range(50):
        middle = (low + high) / 2
        enough = (torch.softmax(middle * z, -1).amax(-1) > certainty)[:, None]
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    hidden = (high * rows).to(dtype)
    p, target = torch.softmax(hidden.double() @ weight.double().T / temperature, -1).max(-1)
    assert p.min() > 0.999
    return hidden.requires_grad_(), weight, target


def eager_gradient(hidden, weight, target, temperature, on_logprob, on_lse=0.0, on_kl=0.0, hidden_r=None):
    """d_hidden by its equation: products in the inputs' dtype, softmax between them in fp32 (fp64 if they are)."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    a, r = (
        torch.log_softmax((h @ weight.T).to(wide) / temperature, -1)
        for h in (hidden, hidden if hidden_r is None else hidden_r)
    )
    p, apart = a.exp(), a - r
    is_target = torch.nn.functional.one_hot(target, weight.shape[0])
    g = on_logprob * (is_target - p) + on_lse * p + on_kl * p * (apart - (p * apart).sum(-1, keepdim=True))
    return (g / temperature).to(weight.dtype) @ weight


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tier3_where_the_target_is_nearly_certain(backend, dtype):
    """Its own column, rounded in a tile of probabilities, would be an error far above the gradient's size."""
    n = 65
    hidden, weight, target = nearly_certain(n, 48, 300, dtype, 0.7)
    cotangents = torch.randn(2, n, 1)
    # With the gradient of lse d_hidden is as large as W and its last rounding decides; the interpreter truncates bf16
    for count in (1,) if INTERPRETED and dtype == torch.bfloat16 else (1, 2):
        out = linear_logprob(hidden, weight, target, temperature=0.7, outputs=("logprob", "lse"))
        loss = sum((c[:, 0] * x).sum() for c, x in zip(cotangents[:count], (out.logprob, out.lse), strict=False))
        got = torch.autograd.grad(loss, hidden)[0]
        on = (cotangents[0], cotangents[1] * (count - 1))
        exact = eager_gradient(*double(hidden, weight), target, 0.7, *(c.double() for c in on))
        assert_ok(tier3(got, exact, eager_gradient(hidden, weight, target, 0.7, *on)), f"d_hidden of {count}")


def test_float64_is_refused(on_triton):
    hidden, weight, target = make(2, 20, 7)
    with pytest.raises(BackendUnavailableError, match=r"not in torch\.float64"):
        linear_logprob(hidden, weight.double(), target)


def test_the_gradient_ahead_and_outputs_do_not_change_a_bit(backend):
    hidden, weight, target = make(65, 20, 300, grad=True)
    frozen = weight.detach()
    plain = linear_logprob(hidden.detach(), frozen, target)
    ahead = linear_logprob(hidden, frozen, target)
    every = linear_logprob(hidden, weight, target, outputs=OUTPUTS)
    assert torch.equal(plain.logprob, ahead.logprob)
    assert torch.equal(plain.logprob, every.logprob)


def test_a_frozen_head_gets_no_product(backend, monkeypatch):
    shapes = []
    original = sweep.gemm_

    def recorded(out, a, b, **options):
        shapes.append((*a.shape, b.shape[1]))
        original(out, a, b, **options)

    monkeypatch.setattr(sweep, "gemm_", recorded)
    n, h, v = 40, 20, 100
    hidden, weight, target = make(n, h, v, grad=True)
    linear_logprob(hidden, weight.detach(), target).logprob.sum().backward()
    assert shapes == [(n, h, v), (n, v, h)]
    shapes.clear()
    linear_logprob(hidden.detach(), weight, target).logprob.sum().backward()
    forward = [] if max(sweep.FUSED_ROWS.values()) else [(n, h, v)]
    assert shapes == [*forward, (n, h, v), (v, n, h)]
    shapes.clear()
    made = []
    gradients = sweep.Sweep.sweeping_gradients

    def watched(*args, **options):
        made.append((yield from gradients(*args, **options)))
        return made[-1]

    monkeypatch.setattr(sweep.Sweep, "sweeping_gradients", watched)
    linear_logprob(hidden, weight.detach(), target, outputs=("entropy",)).entropy.sum().backward()
    assert shapes == [*forward, (n, h, v), (n, v, h)]
    assert [set(x) for x in made] == [{"hidden"}]


def test_temporaries_are_an_eighth_of_the_logits():
    for n, v in itertools.product((129, 512, 1000, 8192, 32768), (32001, 50264, 129920, 151936)):
        rows, columns = cost.tile_shape(n, v)
        assert rows * columns * 16 <= max(n * v * 4 / 8, 16 * cost.SMALL_TILE), (n, v)


BIG = [(2048, 32001), (1024, 50264), (64, 129920), (1024, 151936)]


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "vocab"), BIG)
def test_ragged_vocabularies_in_bf16(on_triton, n, vocab):
    hidden, weight, target = make(n, 1024, vocab, scale=0.1, dtype=torch.bfloat16)
    hidden.requires_grad_()
    cotangent = torch.randn(n)

    def run(function, hidden, weight):
        out = function(hidden, weight, target)
        out = out["logprob"] if isinstance(out, dict) else out.logprob
        return out, torch.autograd.grad(out, hidden, cotangent.to(out.dtype))[0]

    got, g = run(linear_logprob, hidden, weight)
    exact, g64 = run(dense, *double(hidden, weight))
    plain, _ = run(dense, hidden.detach().float().requires_grad_(), weight.float())
    _, g16 = run(dense, hidden, weight)
    assert_ok(tier1(got, exact, plain), "logprob")
    assert_ok(tier3(g, g64, g16), "d_hidden")


@pytest.mark.gpu
@pytest.mark.parametrize("n", [100, 2000])
def test_ten_runs_and_a_graph_have_the_same_bits(on_triton, n):
    hidden, weight, target = make(n, 1024, 50264, scale=0.1, dtype=torch.bfloat16, grad=True)

    def step():
        out = linear_logprob(hidden, weight, target, outputs=OUTPUTS)
        loss = sum(getattr(out, name).sum() for name in DIFFERENTIABLE)
        ahead = linear_logprob(hidden, weight.detach(), target).logprob
        grads = torch.autograd.grad(loss, (hidden, weight))
        return detached(*out, *grads, *torch.autograd.grad(ahead.sum(), hidden), ahead)

    expected = step()
    assert torch.equal(expected[0], expected[-1])
    repeated_and_captured(step, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [32001, 151936])
@pytest.mark.parametrize("trained", [False, True])
def test_memory_is_an_eighth_of_the_logits(on_triton, vocab, trained):
    n, h = 8192, 1024
    hidden, weight, target = make(n, h, vocab, scale=0.1, dtype=torch.bfloat16, grad=True)
    weight = weight if trained else weight.detach()

    def run():
        linear_logprob(hidden, weight, target).logprob.sum().backward()

    run()
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    # beside the gradients themselves and an fp32 sum of d_hidden's size
    results = n * h * 6 + (vocab * h * 2 if trained else 0)
    assert torch.cuda.max_memory_allocated() - before - results <= n * vocab * 4 / 8 + 2**22
