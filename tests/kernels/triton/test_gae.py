"""The Triton `gae` and `whiten`: tiers, blocks of T with a carry, masked garbage, layouts, given moments."""

import pytest
import torch
from rlhf_kernels.gae import gae, masked_moments, whiten
from rlhf_kernels.gae import triton as ours
from rlhf_kernels.runtime.testing import assert_ok, tier1, tier2

from tests.kernels.checks import each
from tests.kernels.test_gae import hold, random_case, run_gae

NAN = float("nan")


@pytest.fixture(params=[32, ours.BLOCK_T], ids=["blocks of 32", "one block"])
def block_t(request, monkeypatch):
    monkeypatch.setattr(ours, "BLOCK_T", request.param)


@pytest.mark.usefixtures("block_t")
@pytest.mark.parametrize("scale", [1.0, 1e-3])
@pytest.mark.parametrize(("B", "T"), [(1, 1), (2, 129), (3, 64), (5, 127)])
def test_gae_tier1(device, B, T, scale):
    inputs = random_case(B, T, scale=scale)
    inputs[2][-1] = True
    hold(inputs, device, "triton")


@pytest.mark.parametrize("with_bootstrap", [False, True])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (0.99, 0.0), (0.99, 1.0), (0.0, 0.5)])
def test_gae_coefficients(device, gamma, lam, with_bootstrap):
    hold(random_case(3, 33), device, "triton", gamma=gamma, lam=lam, with_bootstrap=with_bootstrap)


def test_gae_several_rows_per_program(device, monkeypatch):
    monkeypatch.setattr(ours, "_rows", lambda x: (2, 4, 16, 1))
    hold(random_case(7, 40), device, "triton")


@pytest.mark.usefixtures("block_t")
def test_gae_masked_garbage_and_empty_rows(device):
    reward, value, mask, bootstrap = random_case(4, 70)
    mask[0], mask[1], mask[2, 32:] = False, True, False  # nothing, everything, a whole block of 32 masked
    outputs = []
    for fill in (0.0, NAN, float("inf")):
        hidden = [torch.where(mask, x, fill) for x in (reward, value)]
        outputs.append(run_gae([*hidden, mask, bootstrap], device, "triton"))
    for name, expected in outputs[0].items():
        assert expected.isfinite().all()
        assert torch.equal(outputs[1][name], expected), name
        assert torch.equal(outputs[2][name], expected), name
        if expected.dim() == 2:
            assert (expected.cpu()[~mask] == 0).all()
    hold([torch.where(mask, x, 0.0) for x in (reward, value)] + [mask, bootstrap], device, "triton")


def test_gae_layouts_and_dtypes(device):
    reward, value, mask, bootstrap = random_case(6, 10)
    expected = run_gae((reward, value, mask, bootstrap), "cpu", "reference")
    spread = [
        torch.full((6, 23), NAN).index_copy_(1, torch.arange(10), reward)[:, :10],  # a row stride
        value.T.contiguous().T,  # transposed
        torch.stack([mask, ~mask], 2)[:, :, 0],  # an inner stride
        bootstrap.repeat_interleave(2)[::2],
    ]
    for name, x in run_gae(spread, device, "triton").items():
        torch.testing.assert_close(x.cpu(), expected[name], rtol=1e-5, atol=1e-6)
    half = gae(
        reward.half().to(device), value.to(device), mask.float().to(device), gamma=0.9, lam=0.9, backend="triton"
    )
    wanted = gae(reward.half(), value, mask, gamma=0.9, lam=0.9, backend="reference")
    torch.testing.assert_close(half.advantage.cpu(), wanted.advantage, rtol=1e-5, atol=1e-6)


@each("shape", [(0, 5), (3, 0)])
def test_gae_without_elements(device, shape):
    empty = torch.zeros(shape, device=device, requires_grad=True)
    last = torch.ones(shape[0], device=device, requires_grad=True)
    out = gae(empty, empty, torch.ones(shape, device=device), gamma=0.9, lam=0.9, bootstrap=last, backend="triton")
    assert out.advantage.shape == shape
    (out.advantage.sum() + out.ret.sum()).backward()
    assert torch.equal(last.grad, torch.zeros_like(last))


def run_whiten(x, mask, device, backend, *, moments=None, **options):
    x, mask = x.to(device).clone().requires_grad_(), mask.to(device)
    moments = None if moments is None else moments.to(device)
    y = whiten(x, mask, moments=moments, backend=backend, **options)
    (grad,) = torch.autograd.grad((y * torch.linspace(-1, 2, y.numel(), device=device).reshape(y.shape)).sum(), x)
    return y.detach().cpu(), grad.cpu()


def whiten_case(*shape, scale=1.0, shift=0.5):
    g = torch.Generator().manual_seed(5)
    x = (scale * (torch.randn(shape, generator=g, dtype=torch.float64) + shift)).float()
    return x, torch.rand(shape, generator=g) >= 0.3


@pytest.mark.parametrize("shift_mean", [True, False])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(("shape", "scale"), [((2,), 1.0), ((15, 127), 1e-3), ((3, 5, 7), 1e3), ((5, 1000), 1.0)])
def test_whiten_rounds_once(device, shape, scale, shift_mean, given):
    x, mask = whiten_case(*shape, scale=scale)
    mask.view(-1)[:2] = True
    moments = masked_moments(x.double(), mask, backend="reference") if given else None
    exact = run_whiten(x.double(), mask, "cpu", "reference", moments=moments, shift_mean=shift_mean)
    plain = run_whiten(x, mask, "cpu", "reference", moments=moments, shift_mean=shift_mean)
    y, grad = run_whiten(x, mask, device, "triton", moments=moments, shift_mean=shift_mean)
    assert_ok(tier2(y, exact[0]), "whiten")
    assert_ok(tier1(grad, exact[1], plain[1]), "gradient")


def test_whiten_far_from_zero(device):
    """Mean 1e4 with spread 1: sums of squares in one pass would lose the variance in float32."""
    x, mask = whiten_case(40, 100, shift=1e4)
    exact = run_whiten(x.double(), mask, "cpu", "reference")
    y, grad = run_whiten(x, mask, device, "triton")
    assert_ok(tier2(y, exact[0]), "whiten")
    torch.testing.assert_close(grad.double(), exact[1], rtol=1e-5, atol=1e-6)


@each("n", [1, 129, 3000])
def test_moments_and_statistics_in_float64(device, monkeypatch, n):
    monkeypatch.setattr(ours, "BLOCK", 128)
    monkeypatch.setattr(ours, "PROGRAMS", 8)  # ranges of several blocks
    x, mask = whiten_case(n)
    moments = masked_moments(x.to(device), mask.to(device), backend="triton").cpu()
    torch.testing.assert_close(moments, masked_moments(x, mask, backend="reference"), rtol=1e-14, atol=0)
    _, stats = ours.whiten_forward(x.to(device), mask.to(device), None, True, 1e-8)
    kept = x.double()[mask]
    mean, squares = kept.sum() / max(1, kept.numel()), (kept - kept.sum() / max(1, kept.numel())).square().sum()
    rstd = (squares / max(1, kept.numel() - 1) + 1e-8).rsqrt()
    expected = torch.stack([torch.tensor(kept.numel(), dtype=torch.float64), mean, rstd])
    torch.testing.assert_close(stats.cpu(), expected, rtol=1e-13, atol=0)


def test_whiten_hostile(device):
    x, mask = whiten_case(7, 300)
    dirty = torch.where(mask, x, NAN)
    for clean_result, dirty_result in zip(
        run_whiten(x, mask, device, "triton"), run_whiten(dirty, mask, device, "triton"), strict=True
    ):
        assert torch.equal(clean_result, dirty_result)
        assert (dirty_result[~mask] == 0).all()
    for nothing in (torch.full((4, 3), NAN), torch.zeros(0)):
        keep = torch.zeros(nothing.shape, dtype=torch.bool)
        y, grad = run_whiten(nothing, keep, device, "triton")
        assert torch.equal(y, torch.zeros_like(y))
        assert torch.equal(grad, torch.zeros_like(grad))
        assert masked_moments(nothing.to(device), keep.to(device), backend="triton").tolist() == [0, 0, 0]
    same = torch.full((50,), 3.0)
    y, _ = run_whiten(same, torch.ones(50), device, "triton")
    assert torch.equal(y, torch.zeros(50))
    x[0, 0], mask[0, 0] = NAN, True
    assert run_whiten(x, mask, device, "triton")[0][mask].isnan().all()
    transposed, keep = whiten_case(12, 10)
    wanted = run_whiten(transposed.T, keep.T, "cpu", "reference")
    for actual, expected in zip(run_whiten(transposed.T, keep.T, device, "triton"), wanted, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize(("B", "T"), [(64, 512), (4096, 50), (3, 5000)])
def test_large_same_bits_every_time_and_in_a_graph(device, B, T):
    inputs = random_case(B, T)
    hold(inputs, device, "triton")
    reward, value, mask, bootstrap = (x.to(device) for x in inputs)

    def step():
        out = gae(reward, value, mask, gamma=0.99, lam=0.95, bootstrap=bootstrap, backend="triton")
        white = whiten(out.advantage, mask, backend="triton")
        moments = masked_moments(out.advantage, mask, backend="triton")
        return torch.stack([*out, white, whiten(out.ret, mask, moments=moments, backend="triton")])

    expected = step()
    assert all(torch.equal(step(), expected) for _ in range(10))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, expected)
