"""`whiten` and `masked_moments` against hand-computed numbers, fp64 formulas, and on hostile inputs."""

import pytest
import torch
from rlhf_kernels.gae import masked_moments, whiten
from rlhf_kernels.runtime import registry
from rlhf_kernels.runtime.testing import assert_ok, tier1, tier2
from rlhf_kernels.runtime.triton_support import INTERPRETED

from .checks import BACKENDS, each, needs_native, same_bits, threads_change_no_bit, traced_alike

NAN = float("nan")


@pytest.fixture(params=BACKENDS)
def backend(request):
    with registry.use_backend(request.param):
        yield request.param


def random_case(*shape, dtype=torch.float32, scale=1.0, shift=0.5, seed=0):
    generator, where = torch.Generator().manual_seed(seed), torch.get_default_device()
    x = scale * (torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") + shift)
    return x.to(where, dtype), (torch.rand(shape, generator=generator, device="cpu") >= 0.3).to(where)


def plainly(x, mask, shift_mean, eps):
    """The formula on the compacted elements, with torch's own mean and unbiased variance, in fp64."""
    kept = x.double()[mask]
    y = (kept - kept.mean()) / (kept.var(unbiased=True) + eps).sqrt() + (0.0 if shift_mean else kept.mean())
    return torch.zeros(x.shape, dtype=torch.float64).masked_scatter(mask, y)


def test_hand_computed(backend):
    # 1, 3, 5, 7: mean 4, unbiased variance (9 + 1 + 1 + 9) / 3 = 20/3; s = √0.15. The rest is masked.
    x = torch.tensor([[1.0, NAN, 3.0], [5.0, 7.0, 100.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    s = 0.15**0.5
    y = whiten(x, mask, eps=0.0)
    expected = torch.tensor([[-3 * s, 0.0, -s], [s, 3 * s, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(y, expected, rtol=1e-15, atol=0)
    y = whiten(x, mask, shift_mean=False, eps=0.0)
    torch.testing.assert_close(y, expected + 4 * mask, rtol=1e-15, atol=0)
    assert masked_moments(x, mask).tolist() == [4.0, 16.0, 84.0]


@each("shift_mean", [True, False])
@each(("shape", "scale"), [((2,), 1.0), ((15, 127), 1e-3), ((3, 5, 7), 1e3), ((129, 1000), 1.0)])
def test_one_final_rounding(backend, shift_mean, scale, shape):
    """With the elements' own moments and with given ones; the gradient by tier 1."""
    x, mask = random_case(*((9, 300) if INTERPRETED and shape[0] == 129 else shape), scale=scale)
    mask.view(-1)[:2] = True
    weight = torch.linspace(-1, 2, x.numel(), dtype=torch.float64).reshape(x.shape)

    def run(x, on, moments):
        leaf = x.clone().requires_grad_()
        y = whiten(leaf, mask, shift_mean=shift_mean, moments=moments, backend=on)
        return y.detach(), torch.autograd.grad((y * weight.to(y.dtype)).sum(), leaf)[0]

    for moments in (None, masked_moments(x, mask)):
        y, grad = run(x, "auto", moments)
        assert y.dtype == torch.float32
        assert_ok(tier2(y, plainly(x, mask, shift_mean, 1e-8)), "whiten")
        assert_ok(tier1(grad, run(x.double(), "reference", moments)[1], run(x, "reference", moments)[1]), "gradient")


def test_moments_add_over_ranks(backend):
    x, mask = random_case(8, 33, shift=-2.0)
    ranks = list(zip(x.split(3), mask.split(3), strict=True))
    moments = sum(masked_moments(part, keep) for part, keep in ranks)
    parts = [whiten(part, keep, moments=moments) for part, keep in ranks]
    whole = whiten(x, mask)
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-6, atol=1e-7)
    assert abs(parts[0][mask[:3]].mean().item()) > 1e-3  # a part is not centred by itself


def test_fp32_moments_are_accepted(backend):
    x, mask = random_case(4, 9)
    moments = masked_moments(x, mask)
    assert moments.dtype == torch.float64
    y = whiten(x, mask, moments=moments.float())
    torch.testing.assert_close(y, whiten(x, mask), rtol=1e-5, atol=1e-5)


@each("shift_mean", [True, False])
@each("given", [True, False])
def test_gradcheck(backend, shift_mean, given):
    x, mask = random_case(3, 4, dtype=torch.float64)
    moments = masked_moments(*random_case(5, 5, dtype=torch.float64, seed=1)) if given else None

    def function(x):
        return whiten(x, mask, shift_mean=shift_mean, moments=moments, eps=0.1)

    assert torch.autograd.gradcheck(function, [x.requires_grad_()])


@each("garbage", [NAN, float("inf")])
def test_masked_inputs_reach_nothing(backend, garbage):
    x, mask = random_case(5, 9)
    results = []
    for fill in (0.0, garbage):
        filled = x.masked_fill(~mask, fill).requires_grad_()
        y = whiten(filled, mask, shift_mean=False)
        y.backward(x.square().masked_fill(~mask, fill))
        results.append([y.detach(), filled.grad, masked_moments(filled, mask)])
    same_bits(*results)
    assert (results[1][0][~mask] == 0).all()
    assert (results[1][1][~mask] == 0).all()


@each("n_kept", [0, 1])
@each("given", [True, False])
def test_too_few_elements_for_a_variance(backend, n_kept, given):
    x, mask = torch.tensor([[3.0, NAN]], requires_grad=True), torch.tensor([[n_kept, 0]])
    moments = masked_moments(x, mask) if given else None
    assert whiten(x, mask, moments=moments).tolist() == [[0.0, 0.0]]
    y = whiten(x, mask, shift_mean=False, moments=moments)
    assert y.tolist() == [[3.0 * n_kept, 0.0]]
    y.sum().backward()
    assert torch.isfinite(x.grad).all()


def test_large_mean_keeps_its_digits(backend):
    # Σ x² − (Σ x)²/n in fp32 has no digit left here: the mean is 1000 times the spread.
    x, mask = random_case(64, 100, shift=1000.0, dtype=torch.float32)
    assert_ok(tier2(whiten(x, mask), plainly(x, mask, True, 1e-8)), "whiten")


def test_all_equal_is_zero(backend):
    y = whiten(torch.full((7, 11), 0.1), torch.ones(7, 11))
    # The fp64 mean of equal numbers may be off by an ulp, and dividing by √eps makes that 1e4 times larger.
    assert y.abs().max() < 1e-10


def test_empty(backend):
    x = torch.zeros(0, 5, requires_grad=True)
    y = whiten(x, torch.ones(0, 5))
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, 5)
    assert masked_moments(x, torch.ones(0, 5)).tolist() == [0.0, 0.0, 0.0]


def test_strided_and_narrow_inputs(backend):
    x, mask = random_case(6, 10, dtype=torch.bfloat16)
    expected = whiten(x.float(), mask, backend="reference")
    for view in (lambda v: v.t().contiguous().t(), lambda v: torch.cat([v, v], dim=1)[:, :10]):
        y = whiten(view(x), view(mask))
        assert y.dtype == torch.float32
        assert y.is_contiguous()
        # Both round an fp64 result once, and the fp64 sums differ in their last digits: an ulp apart at most.
        torch.testing.assert_close(y, expected, rtol=1.2e-7, atol=0)


@needs_native
def test_threads_do_not_change_the_bits():
    x, mask = random_case(600, 512)

    def run():
        leaf = x.clone().requires_grad_()
        y = whiten(leaf, mask, backend="cpu")
        return [y, *torch.autograd.grad(y, leaf, x.square()), masked_moments(x, mask, backend="cpu")]

    threads_change_no_bit(run)


def test_named_backend_never_falls_back():
    with pytest.raises(registry.BackendUnavailableError, match="backend='cuda' cannot serve whiten"):
        whiten(torch.zeros(2), torch.ones(2), backend="cuda")
    if registry.unsupported("whiten", "triton", "cpu", torch.float32) is None:
        return  # under its interpreter Triton serves the CPU
    with pytest.raises(registry.BackendUnavailableError, match="backend='triton' cannot serve whiten"):
        masked_moments(torch.zeros(2), torch.ones(2), backend="triton")


@each(
    ("change", "error", "message"),
    [
        ({"x": torch.zeros(2, 3, dtype=torch.int32)}, TypeError, "x: expected a floating point dtype, got torch.int32"),
        ({"mask": torch.ones(3, 2)}, ValueError, r"mask: expected shape \(2, 3\), got \(3, 2\)"),
        ({"moments": torch.zeros(2)}, ValueError, r"moments: expected shape \(3,\), got \(2,\)"),
        ({"moments": (1.0, 2.0, 3.0)}, TypeError, "moments: expected a tensor, got tuple"),
        ({"eps": -1.0}, ValueError, "eps: expected a number of at least 0, got -1.0"),
    ],
)
def test_bad_input(change, error, message):
    with pytest.raises(error, match=message):
        whiten(**{"x": torch.zeros(2, 3), "mask": torch.ones(2, 3), **change})


@each("shift_mean", [True, False])
@each("n", [2, 3, 7, 8, 9, 15, 16, 17, 31, 4095, 4096, 4097, 8200])
def test_ragged_sizes_on_every_instruction_set(isa, shift_mean, n):
    """Each size ends in another part of a vector; NaN stand before, behind and between the elements."""
    x, mask = random_case(n, seed=n)
    mask[:2] = True
    buffer = torch.full((2 * n + 40,), NAN)
    buffer[20 : 20 + 2 * n : 2] = torch.where(mask, x, NAN)
    guarded = buffer[20 : 20 + 2 * n : 2].requires_grad_()
    exact = x.double().requires_grad_()
    grad = random_case(n, seed=n + 1)[0].masked_fill(~mask, NAN)
    y = whiten(guarded, mask, shift_mean=shift_mean, backend="cpu")
    (d_x,) = torch.autograd.grad(y, guarded, grad)
    moments = masked_moments(guarded, mask, backend="cpu")
    y64 = whiten(exact, mask, shift_mean=shift_mean, backend="reference")
    (d_x64,) = torch.autograd.grad(y64, exact, grad.double())
    assert_ok(tier2(y, y64.detach()), "whiten")
    assert_ok(tier2(d_x, d_x64), "gradient") if n > 3 else torch.testing.assert_close(d_x, d_x64.float())
    kept = x.double()[mask]
    expected = torch.stack([mask.sum().double(), kept.sum(), kept.square().sum()])
    torch.testing.assert_close(moments, expected, rtol=1e-14, atol=1e-12)


def test_eager_calls_and_the_registered_op_agree_bit_for_bit(backend):
    (x, mask), (grad, _) = random_case(5, 9), random_case(5, 9, seed=1)

    def both(x):
        y = whiten(x, mask)
        return y, torch.autograd.grad(y, x, grad)[0]

    traced_alike(both, [x.requires_grad_()], {"whiten", "whiten_backward"})
