"""The Triton PPO and value losses: every clip and KL branch, masked garbage, tiers, one program and many."""

import pytest
import torch
from rlhf_kernels.ppo_loss import ppo_loss, value_loss
from rlhf_kernels.ppo_loss import triton as ours
from rlhf_kernels.ppo_loss.triton import BLOCK, ONE_PROGRAM
from rlhf_kernels.runtime.testing import assert_ok, tier1

from tests.kernels.checks import each

NAN, INF = float("nan"), float("inf")
SIZES = [1, 2, 15, 127, 129, ONE_PROGRAM, ONE_PROGRAM + 1, 3 * BLOCK + 17]


def tokens(n, *, dtype=torch.float32, scale=1.0, seed=0):
    g = torch.Generator().manual_seed(seed)
    new, old, advantage, ref, entropy = (torch.randn(n, generator=g, dtype=torch.float64).to(dtype) for _ in range(5))
    mask = torch.rand(n, generator=g) > 0.3
    return 0.6 * scale * new, 0.6 * scale * old, advantage, 0.6 * scale * ref, entropy.abs(), mask


def run_ppo(inputs, device, backend, *, full=True, **options):
    """Loss, statistics and gradients, on the CPU."""
    new, old, advantage, ref, entropy, mask = (x.to(device) for x in inputs)
    new, entropy = new.clone().requires_grad_(), entropy.clone().requires_grad_()
    knobs = dict(denom=mask.sum().clamp(min=1), clip_low=0.2, clip_high=0.3, **options)
    if full:
        knobs |= dict(ref_logprob=ref, kl_coef=0.1, entropy=entropy, entropy_coef=0.05)
    out = ppo_loss(new, old, advantage, mask, backend=backend, **knobs)
    (3 * out.loss).backward()
    grads = [new.grad, entropy.grad] if full else [new.grad]
    return {**out._asdict(), **{f"grad {i}": g for i, g in enumerate(grads)}}


def compare(inputs, device, run, **options):
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    exact, plain = run(wide, "cpu", "reference", **options), run(inputs, "cpu", "reference", **options)
    for name, actual in run(inputs, device, "triton", **options).items():
        assert actual.dtype == plain[name].dtype
        assert_ok(tier1(actual.detach().cpu(), exact[name].detach(), plain[name].detach()), name)


@each("n", SIZES)
def test_ppo_tier1(device, n):
    compare(tokens(n), device, run_ppo, dual_clip=1.5)


@pytest.mark.parametrize("scale", [1.0, 1e-3])  # 1e-3: k3 and approx_kl are what is left of a cancellation
@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
@pytest.mark.parametrize("dual_clip", [None, 1.5])
def test_ppo_options(device, scale, kl, dual_clip):
    compare(tokens(300, scale=scale, seed=1), device, run_ppo, kl=kl, dual_clip=dual_clip)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_ppo_half_inputs(device, full, dtype):
    inputs = tokens(200, dtype=dtype)
    results = [
        run_ppo(inputs, where, backend, full=full) for where, backend in (("cpu", "reference"), (device, "triton"))
    ]
    for name, expected in results[0].items():
        actual = results[1][name].cpu()
        assert actual.dtype == expected.dtype
        tolerance = 1e-5 if expected.dtype == torch.float32 else torch.finfo(dtype).eps
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("n", [31, ONE_PROGRAM + 500])
@pytest.mark.parametrize("garbage", [NAN, INF, -INF])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32, torch.int64])
def test_masked_garbage_is_never_seen(device, n, garbage, mask_dtype):
    *clean, mask = tokens(n)
    clean_run, dirty_run = (
        run_ppo([*(torch.where(mask, x, fill) for x in clean), mask.to(mask_dtype)], device, "triton", dual_clip=1.5)
        for fill in (0.0, garbage)
    )
    for name, expected in clean_run.items():
        assert torch.equal(dirty_run[name], expected), name
        assert dirty_run[name].isfinite().all()


@each("n", [31, ONE_PROGRAM + 500])
def test_live_nan_and_inf_show_where_the_reference_shows_them(device, n):
    for index, value in ((0, NAN), (0, 200.0), (2, INF), (3, NAN)):
        inputs = list(tokens(n))
        inputs[5][:] = True
        inputs[index][n // 2] = value
        exact, actual = run_ppo(inputs, "cpu", "reference"), run_ppo(inputs, device, "triton")
        for name, expected in exact.items():
            for test in (torch.isnan, torch.isposinf, torch.isneginf):
                assert torch.equal(test(actual[name].cpu()), test(expected)), (name, index, value)


@each("n", [0, 5, ONE_PROGRAM + 1])
def test_nothing_unmasked(device, n):
    *inputs, mask = (x.to(device) for x in tokens(n))
    new, old, advantage, ref, entropy = inputs
    new.requires_grad_()
    out = ppo_loss(
        new, old, advantage, torch.zeros_like(mask), denom=1.0, ref_logprob=ref, kl_coef=0.1, entropy=entropy,
        entropy_coef=0.1, backend="triton",
    )  # fmt: skip
    out.loss.backward()
    assert not any(x.any() for x in out)
    assert (new.grad == 0).all()


def test_float_mask_is_a_weight_and_layout_does_not_matter(device):
    inputs = [x.to(device) for x in tokens(64)]
    weight = torch.rand(64, generator=torch.Generator().manual_seed(3)).to(device)
    expected = run_ppo([*(x.cpu() for x in inputs[:5]), weight.cpu()], "cpu", "reference")
    spread = [torch.stack([x, torch.full_like(x, NAN)], 1)[:, 0].reshape(8, 8) for x in (*inputs[:5], weight)]
    actual = run_ppo(spread, device, "triton")
    for name, value in expected.items():
        torch.testing.assert_close(actual[name].cpu().reshape(value.shape), value, rtol=1e-5, atol=1e-7)
    # one advantage per sequence, expanded over its tokens
    rows = [x.reshape(8, 8) for x in inputs]
    rows[2] = rows[2][:, :1].expand(8, 8)
    wanted = run_ppo([x.cpu() for x in rows], "cpu", "reference")
    for name, value in run_ppo(rows, device, "triton").items():
        torch.testing.assert_close(value.cpu(), wanted[name], rtol=1e-5, atol=1e-7)


def test_many_partial_sums(device, monkeypatch):
    """More blocks than the folding program adds at a time."""
    monkeypatch.setattr(ours, "ONE_PROGRAM", 64)
    monkeypatch.setattr(ours, "BLOCK", 64)
    monkeypatch.setattr(ours, "FOLD", 8)
    compare(tokens(64 * 20 + 3), device, run_ppo, dual_clip=1.5)
    compare(tokens(64 * 20 + 3), device, run_value)


def run_value(inputs, device, backend, *, clip=0.3):
    value, old, ret, _, _, mask = (x.to(device) for x in inputs)
    value = value.clone().requires_grad_()
    out = value_loss(
        value, None if clip is None else old, ret, mask, denom=mask.sum().clamp(min=1), clip=clip, backend=backend
    )
    (3 * out.loss).backward()
    return {**out._asdict(), "grad": value.grad}


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("n", SIZES)
def test_value_tier1(device, n, clip):
    compare(tokens(n, seed=2), device, run_value, clip=clip)


@each("n", [31, ONE_PROGRAM + 500])
def test_value_masked_garbage(device, n):
    *clean, mask = tokens(n)
    expected = run_value([*clean, mask], device, "triton")
    for garbage in (NAN, INF, -INF):
        actual = run_value([*(torch.where(mask, x, garbage) for x in clean), mask], device, "triton")
        for name, value in expected.items():
            assert torch.equal(actual[name], value), name


def test_value_half_and_empty(device):
    inputs = tokens(200, dtype=torch.bfloat16)
    expected, actual = run_value(inputs, "cpu", "reference"), run_value(inputs, device, "triton")
    for name, value in expected.items():
        torch.testing.assert_close(actual[name].cpu(), value, rtol=1e-2 if name == "grad" else 1e-5, atol=1e-6)
    empty = torch.zeros(0, device=device)
    out = value_loss(empty, None, empty, empty, denom=1.0, backend="triton")
    assert not any(x.any() for x in out)


@pytest.mark.gpu
def test_same_bits_every_time_and_in_a_graph(device):
    new, old, advantage, ref, entropy, mask = (x.to(device) for x in tokens(200_000))
    denom = mask.sum().float()

    def step():
        out = ppo_loss(
            new, old, advantage, mask, denom=denom, ref_logprob=ref, kl_coef=0.1, entropy=entropy, entropy_coef=0.1,
            backend="triton",
        )  # fmt: skip
        value = value_loss(new, old, ref, mask, denom=denom, clip=0.2, backend="triton")
        return torch.cat([x.reshape(-1) for x in (*out, *value)])

    expected = step()
    assert all(torch.equal(step(), expected) for _ in range(10))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, expected)
