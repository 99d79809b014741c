"""The Triton `linear_ppo_loss`: properties of every backend, certain targets, rows without a gradient, large sizes."""

import pytest
import torch
from rlhf_kernels import linear_logprob, linear_ppo_loss, ppo_loss
from rlhf_kernels.runtime.testing import assert_ok, tier3
from rlhf_kernels.vocab import triton_sweep as sweep

from tests.kernels.checks import detached, repeated_and_captured
from tests.kernels.dense import dense as dense_logprob
from tests.kernels.test_linear_ppo_loss import (  # noqa: F401
    NO_ENTROPY,
    dense,
    exact_and_eager,
    make,
    run,
    test_every_input_and_option,
    test_half_precision_is_tier3,
    test_hostile_rows,
    test_logprob_is_that_of_linear_logprob_and_ratio_is_exactly_one,
    test_masked_rows_hold_anything_between_red_zones,
    test_no_grad_and_empty_batches,
    test_ragged_sizes,
    test_tier1,
)
from tests.kernels.triton.test_linear_logprob import eager_gradient, force, nearly_certain

OPS = torch.ops.rlhf_kernels


@pytest.fixture(params=["fused", "tiled", "small tiles"])
def backend(request, monkeypatch, on_triton):
    force(monkeypatch, request.param)
    return on_triton


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tier3_where_the_target_is_nearly_certain(backend, dtype):
    n = 65
    hidden, weight, target = nearly_certain(n, 48, 300, dtype, 0.7)
    h64, w64 = hidden.detach().double(), weight.double()
    logprob = dense_logprob(h64, w64, target, temperature=0.7)["logprob"].requires_grad_()
    old, ref = (logprob.detach() + 0.1 * torch.randn(n) for _ in range(2))
    advantage, mask = torch.randn(n), (torch.rand(n) < 0.8).float()
    options = {"denom": 4.0, "ref_logprob": ref, **NO_ENTROPY}
    out = linear_ppo_loss(hidden, weight, target, old, advantage, mask, temperature=0.7, **options)
    got = torch.autograd.grad(out.loss, hidden)[0]
    loss = ppo_loss(logprob, old, advantage, mask, entropy=logprob.detach(), backend="reference", **options).loss
    coefficient = torch.autograd.grad(loss, logprob)[0][:, None]
    exact = eager_gradient(h64, w64, target, 0.7, coefficient)
    assert_ok(tier3(got, exact, eager_gradient(hidden, weight, target, 0.7, coefficient)), "d_hidden")


def test_both_products_are_the_library_s_and_rows_without_a_gradient_get_none(backend, monkeypatch):
    products = []
    original = sweep.gemm_

    def recorded(out, a, b, **options):
        products.append((tuple(a.shape), tuple(b.shape)))
        original(out, a, b, **options)

    monkeypatch.setattr(sweep, "gemm_", recorded)
    n, h, v = 32, 20, 100
    hidden, weight, target = torch.randn(n, h).requires_grad_(), torch.randn(v, h), torch.arange(n)
    old = linear_logprob(hidden.detach(), weight, target).logprob
    advantage, mask = torch.ones(n), torch.ones(n)
    advantage[:8], mask[8:16] = 0.0, 0.0
    target[16] = -100
    old[17:20] -= 1.0  # ratio e > 1.2 with a positive advantage: clipped

    def gradient(**options):
        products.clear()
        out = linear_ppo_loss(hidden, weight, target, old, advantage, mask, denom=8.0, **options)
        return torch.autograd.grad(out.loss, hidden)[0]

    grad = gradient()
    rows = sum(a[0] * (b[1] if a[1] == h else a[1]) for a, b in products)
    assert rows == 2 * n * v, products  # of the logits and of E; every row is in both
    assert (grad[:20] == 0).all()
    assert (grad[20:] != 0).any(1).all()
    moved = gradient(ref_logprob=old, kl_coef=0.1)  # a KL term moves rows without advantage
    assert (moved[8:17] == 0).all()
    assert (moved[17:] != 0).any(1).all()
    mask.zero_()
    assert (gradient() == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("n", [100, 2000])
def test_bits_capture_and_values_in_bf16(on_triton, n):
    batch, ref = make(n, 1024, 50264, dtype=torch.bfloat16, scale=0.1)
    options = {"denom": 50.0, **NO_ENTROPY}
    hidden, weight, target, *tokens = batch
    weight = weight.detach()

    def step():
        out = linear_ppo_loss(hidden, weight, target, *tokens, ref_logprob=ref, **options)
        return detached(*out, torch.autograd.grad(out.loss, hidden)[0])

    got = step()
    exact, _ = run(dense, torch.float64, batch, ref, False, **options)
    plain, _ = run(dense, torch.float32, batch, ref, False, **options)
    slack = 2e-6 + 5e-7 * n / options["denom"]  # on the scale of a sum's terms, as in `judge`
    assert abs(got[0].item() - exact.loss.item()) <= 4 * abs(plain.loss.item() - exact.loss.item()) + slack
    assert_ok(tier3(got[-1], *exact_and_eager(batch, ref, **options)), "d_hidden")
    repeated_and_captured(step, got)
    old = linear_logprob(hidden.detach(), weight, target).logprob
    first = linear_ppo_loss(hidden, weight, target, old, *tokens[1:], **options | {"kl_coef": 0.0})
    assert first.ratio_max == 1
    assert first.approx_kl == 0
