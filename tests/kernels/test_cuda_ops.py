"""The cuda backend of `gae`, `ppo_loss` and `value_loss`: on a GPU, and its kernels as fibers on the CPU.

Where `device` puts tensors: see conftest.py. Tests of the ops themselves, on any device, are in test_gae.py and
test_ppo_loss.py.
"""

import contextlib

import pytest
import torch
from rlhf_kernels.gae import _gae_backward, gae
from rlhf_kernels.ppo_loss import ppo_loss, value_loss
from rlhf_kernels.runtime import cuda_native, cuda_support, registry
from rlhf_kernels.runtime.testing import assert_ok, tier1

from .checks import each, same_bits
from .test_gae import hold, random_case, run_gae

NAN, INF = float("nan"), float("inf")


# Packs of 4, warps of 128, blocks of up to 2048: ends inside and at the end of each, and rows of several blocks.
@each("T", [1, 3, 4, 127, 128, 516, 1000, 2048, 2049, 4601])
@each("scale", [1.0, 1e-3])
def test_gae_tier1(device, T, scale):
    hold(random_case(3, T, scale=scale), device, "cuda")


@each("holes", [0.0, 0.5, 0.99, 1.0])
@each(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (0.99, 0.0), (0.0, 0.5)])
def test_gae_fp64(device, holes, gamma, lam):
    inputs, knobs = random_case(4, 700, holes=holes), {"gamma": gamma, "lam": lam}
    exact = run_gae(inputs, "cpu", "reference", torch.float64, **knobs)
    for name, actual in run_gae(inputs, device, "cuda", torch.float64, **knobs).items():
        torch.testing.assert_close(actual, exact[name], rtol=1e-12, atol=1e-12, msg=name)


@each("special", [NAN, INF, -INF])
@each("lam", [0.0, 0.1, 0.95])
def test_gae_keeps_what_is_not_finite_where_it_is(device, special, lam):
    """γλ = 0.05 to the hundredth is 0 in fp32, and 0 · ∞ would be NaN where the recurrence has ∞."""
    reward, value, mask, bootstrap = random_case(4, 600)
    mask[0, 550] = mask[1, 300] = True
    reward[0, 550], value[1, 300], reward[2][~mask[2]] = special, special, special
    inputs, knobs = (reward, value, mask, bootstrap), {"gamma": 0.5, "lam": lam}
    hold(inputs, device, "cuda", ("advantage", "ret"), **knobs)
    advantage = run_gae(inputs, device, "cuda", **knobs)["advantage"]
    assert not torch.isfinite(advantage[0, :551][mask[0, :551]]).any()
    assert torch.isfinite(advantage[2:]).all()


LAYOUTS = {
    "row_slice": lambda x: torch.stack([x, torch.full_like(x, 1)], dim=1).flatten(0, 1)[::2],
    "column_slice": lambda x: torch.cat([torch.ones_like(x), x, torch.ones_like(x)], dim=1)[:, 137:274],
    "transposed": lambda x: x.t().contiguous().t(),
    "every_second": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "expanded": lambda x: x[:1].expand(5, 137),
    "aligned": lambda x: x[:, :136],
}


@each("layout", LAYOUTS)
def test_gae_layouts(device, layout):
    views = [LAYOUTS[layout](x.to(device)) for x in random_case(5, 137, dtype=torch.float32)[:3]]
    dense = [x.clone(memory_format=torch.contiguous_format) for x in views]
    knobs = {"gamma": 0.9, "lam": 0.8, "backend": "cuda"}
    for a, b in zip(gae(*views, **knobs), gae(*dense, **knobs), strict=True):
        assert torch.equal(a, b)
        assert a.is_contiguous()
    grads = _gae_backward(*views, 0.9, 0.8, "cuda"), _gae_backward(*dense, 0.9, 0.8, "cuda")
    same_bits(*grads)


@each(("B", "T"), [(0, 5), (3, 0), (0, 0)])
def test_gae_empty(device, B, T):
    reward, value, bootstrap = (torch.zeros(s, device=device, requires_grad=True) for s in ((B, T), (B, T), (B,)))
    mask = torch.ones(B, T, device=device)
    out = gae(reward, value, mask, gamma=0.9, lam=0.8, bootstrap=bootstrap, backend="cuda")
    (out.advantage.sum() + out.ret.sum()).backward()
    assert out.advantage.shape == (B, T)
    assert torch.equal(bootstrap.grad, torch.zeros_like(bootstrap))


def test_gae_opcheck_and_gradcheck(device):
    reward, value, mask, last = (x.to(device) for x in random_case(3, 6, dtype=torch.float64))
    leaves = [x.clone().requires_grad_() for x in (reward, value, last)]
    ops = torch.ops.rlhf_kernels
    torch.library.opcheck(ops.gae.default, (*leaves[:2], mask, leaves[2], 0.9, 0.8, "cuda"))
    torch.library.opcheck(ops.gae.default, (*leaves[:2], mask, None, 0.9, 0.8, "cuda"))
    torch.library.opcheck(ops.gae_backward.default, (reward, value, mask, 0.9, 0.8, "cuda"))

    def advantage_and_return(r, v, b):
        return tuple(gae(r, v, mask, gamma=0.9, lam=0.8, bootstrap=b, backend="cuda"))

    assert torch.autograd.gradcheck(advantage_and_return, leaves)


def test_reductions_have_the_same_bits_for_unaligned_memory(device):
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(5, 4004, generator=generator).to(device)
    mask = (torch.rand(4004, generator=generator) > 0.3).to(device)
    results = []
    for start in (0, 1):
        # Slices that start one element later hold the same numbers at addresses that no vector load may use.
        memory = torch.cat([wide[:, :start], wide[:, :4001]], dim=1)
        new, old, advantage, ref, entropy = (row[start : start + 4001] for row in memory)
        keep = torch.cat([mask[:start], mask[:4001]])[start:]
        new = new.detach().requires_grad_()
        out = ppo_loss(
            new, old, advantage, keep, denom=9, ref_logprob=ref, kl_coef=0.1, entropy=entropy, backend="cuda"
        )
        value = value_loss(new, old, advantage, keep, denom=9, clip=0.2, backend="cuda")
        (out.loss + value.loss).backward()
        results.append([*out, *value, new.grad])
    same_bits(*results)


# --- losses ---------------------------------------------------------------------------------------------------------


def tokens(n, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    new, old, advantage, ref, entropy = torch.randn(5, n, generator=generator) * scale
    return 0.4 * new, 0.4 * old, advantage, 0.4 * ref, entropy.abs(), torch.rand(n, generator=generator) > 0.3


def losses_and_gradients(inputs, device, dtype, backend, options):
    options = dict(options)
    new, old, advantage, ref, entropy = (x.to(device, dtype) for x in inputs[:5])
    mask = (inputs[5] * options.pop("weight", 1)).to(device, options.pop("mask_dtype", torch.bool))
    new, entropy, value = (x.clone().requires_grad_() for x in (new, entropy, new))
    denom = torch.tensor(float(max(1, int(inputs[5].sum()))), dtype=dtype, device=device)
    clip = options.pop("value_clip", None)
    if options.pop("with_ref", False):
        options |= {"ref_logprob": ref}
    if options.get("entropy_coef"):
        options |= {"entropy": entropy}
    policy = ppo_loss(new, old, advantage, mask, denom=denom, backend=backend, **options)
    critic = value_loss(value, old, advantage, mask, denom=denom, clip=clip, backend=backend)
    leaves = (new, value, entropy) if "entropy" in options else (new, value)
    gradients = torch.autograd.grad(2 * policy.loss + critic.loss, leaves)
    return [x.detach().cpu() for x in (*policy, *critic, *gradients)]


OPTIONS = [
    {},
    {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.5, "value_clip": 0.3},
    {"with_ref": True, "kl": "k1", "kl_coef": 0.1},
    {"with_ref": True, "kl": "k2", "kl_coef": 0.1, "mask_dtype": torch.int64},
    {"with_ref": True, "kl": "k3", "kl_coef": 0.2, "mask_dtype": torch.float32, "weight": 0.5},
    {"with_ref": True, "kl_coef": 0.0, "entropy_coef": 0.05, "value_clip": 0.1},
]


@each("options", OPTIONS)
@each("n", [1, 3, 1024, 5003])
def test_losses_tier1(device, options, n):
    for scale in (1.0, 1e-3):
        inputs = tokens(n, seed=n, scale=scale)
        exact = losses_and_gradients(inputs, "cpu", torch.float64, "reference", options)
        plain = losses_and_gradients(inputs, "cpu", torch.float32, "reference", options)
        actual = losses_and_gradients(inputs, device, torch.float32, "cuda", options)
        double = losses_and_gradients(inputs, device, torch.float64, "cuda", options)
        for index, (a, e, p, d) in enumerate(zip(actual, exact, plain, double, strict=True)):
            assert_ok(tier1(a, e, p), f"result {index}")
            torch.testing.assert_close(d, e, rtol=1e-11, atol=1e-13, msg=f"result {index} in fp64")


@each("garbage", [NAN, INF, -INF])
def test_losses_never_see_masked_garbage(device, garbage):
    *clean, mask = tokens(31)
    options = {"with_ref": True, "kl_coef": 0.1, "entropy_coef": 0.1, "value_clip": 0.2}
    dirty = [torch.where(mask, x, garbage) for x in clean]
    results = [losses_and_gradients((*x, mask), device, torch.float32, "cuda", options) for x in (clean, dirty)]
    same_bits(*results)


@each("live", [NAN, INF, -INF])
def test_losses_show_what_is_not_finite_as_the_reference_does(device, live):
    """Also with advantage 0 and where a bound takes over: 0 · ∞ and max(NaN, x) are NaN there."""
    new, old, advantage, ref, entropy, mask = tokens(12)
    mask[:] = True
    for at, sign in ((1, 1.0), (2, -1.0), (3, 0.0)):
        broken = new.clone()
        broken[at], advantage[at] = live, sign
        inputs = broken, old, advantage, ref, entropy, mask
        options = {"dual_clip": 2.0, "with_ref": True, "kl_coef": 0.0, "value_clip": 0.2}
        want = losses_and_gradients(inputs, "cpu", torch.float32, "reference", options)
        got = losses_and_gradients(inputs, device, torch.float32, "cuda", options)
        torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-5, atol=1e-6)


def test_losses_empty_and_nothing_live(device):
    for n in (0, 6):
        x = torch.randn(3, n, device=device)
        mask = torch.zeros(n, device=device)
        new = x[0].clone().requires_grad_()
        out = ppo_loss(new, x[1], x[2], mask, denom=3, ref_logprob=x[1], kl_coef=0.1, entropy=x[2], backend="cuda")
        value = value_loss(new, x[1], x[2], mask, denom=3, clip=0.2, backend="cuda")
        (out.loss + value.loss).backward()
        assert not any(x.any() for x in (*out, *value))
        assert (new.grad == 0).all()


@each("dtype", [torch.bfloat16, torch.float16])
def test_losses_take_narrow_and_strided_inputs(device, dtype):
    columns = torch.stack([x.to(dtype) for x in tokens(100)[:3]], dim=1).to(device)  # each input has stride 3
    mask = tokens(100)[5].to(device)
    new = columns[:, 0].detach().requires_grad_()
    out = ppo_loss(new, columns[:, 1], columns[:, 2], mask, denom=70, backend="cuda")
    out.loss.backward()
    wide = columns[:, 0].float().detach().requires_grad_()
    expected = ppo_loss(wide, columns[:, 1].float(), columns[:, 2].float(), mask, denom=70, backend="reference")
    expected.loss.backward()
    assert out.loss.dtype == torch.float32
    torch.testing.assert_close(out.loss, expected.loss)
    torch.testing.assert_close(new.grad, wide.grad.to(dtype))


def test_losses_opcheck_and_gradcheck(device):
    ops = torch.ops.rlhf_kernels
    *floats, mask = (x.to(device) for x in tokens(9))
    new, old, advantage, ref, entropy = (x.double() for x in floats)
    new, entropy = new.requires_grad_(), entropy.requires_grad_()
    denom, coef = torch.tensor(9.0, device=device), torch.randn(9, device=device)
    knobs = (0.2, 0.2, 3.0, "k3", 0.1, 0.1, "cuda")
    torch.library.opcheck(ops.ppo_loss.default, (new, old, advantage, mask, denom, ref, entropy, *knobs))
    torch.library.opcheck(ops.value_loss.default, (new, old, advantage, mask, denom, 0.2, "cuda"))
    two = torch.tensor(2.0, device=device)
    for needs in ((True, False), (False, True)):
        torch.library.opcheck(ops.ppo_loss_backward.default, (two, coef, mask, denom, 0.1, *needs, "cuda"))
    torch.library.opcheck(ops.value_loss_backward.default, (two, coef, "cuda"))

    def both(new, entropy):
        options = {"dual_clip": 1.5, "ref_logprob": ref, "kl": "k3", "kl_coef": 0.3, "entropy_coef": 0.2}
        policy = ppo_loss(new, old, advantage, mask, denom=7.0, entropy=entropy, backend="cuda", **options)
        return policy.loss + value_loss(new, old, advantage, mask, denom=7.0, clip=0.3, backend="cuda").loss

    assert torch.autograd.gradcheck(both, (new, entropy))


# --- errors ---------------------------------------------------------------------------------------------------------


def test_errors_reach_python(device):
    x = torch.zeros(4, device=device)
    p = x.data_ptr()
    ppo = (p, p, p, p, False, p, 0, 0, 4, 0.8, 1.2, 0.0, 3, 0.0, 0.0, p, p, p, p)
    for name, arguments in (
        ("gae_forward", (p, 4, 1, p, 4, 1, p, 4, 1, 0, -1, 4, 1.0, 1.0, 0, 0)),
        ("gae_backward", (0, 4, 1, p, 4, 1, p, 4, 1, 1, 4, 1.0, 1.0, 0, 0, p)),
        ("ppo_loss_forward", (*ppo[:8], -1, *ppo[9:])),
        ("ppo_loss_forward", (*ppo[:12], 4, *ppo[13:])),  # no such KL estimator
        ("ppo_loss_forward", (0, *ppo[1:])),
    ):
        with pytest.raises(RuntimeError, match=f"{name}: CUDA error 1: invalid argument"):
            cuda_support.call(name, torch.float32, x.device, *arguments)


def test_a_refused_launch_reaches_python(host_library, monkeypatch):
    monkeypatch.setattr(cuda_native, "library", lambda: (host_library, None))
    monkeypatch.setattr(cuda_support, "DEVICE_TYPE", "cpu")
    monkeypatch.setattr(cuda_support, "stream_of", lambda device: contextlib.nullcontext(0))
    x = torch.ones(2, 3)
    for function in (
        lambda: gae(x, x, x, gamma=1.0, lam=1.0, backend="cuda"),
        lambda: ppo_loss(x, x, x, x, denom=1.0, backend="cuda"),
        lambda: value_loss(x, x, x, x, denom=1.0, backend="cuda"),
    ):
        host_library.on_host_fail_next_launch(9)
        with pytest.raises(RuntimeError, match="CUDA error 9: refused"):
            function()
        function()


def test_addresses_refused(device):
    x = torch.zeros(3, 4, device=device)
    with pytest.raises(ValueError, match="x: expected a contiguous tensor"):
        cuda_support.address("x", x.t(), x.dtype)
    with pytest.raises(TypeError, match=r"x: expected dtype torch.float64, got torch.float32"):
        cuda_support.address("x", x, torch.float64)
    with pytest.raises(ValueError, match="x: expected a CUDA tensor, got one on meta"):
        cuda_support.matrix("x", x.to("meta"), x.dtype)
    with pytest.raises(ValueError, match=r"x: expected 2 dimensions, got shape \(4,\)"):
        cuda_support.matrix("x", x[0], x.dtype)
    assert cuda_support.address("x", None, x.dtype) == 0
    assert cuda_support.matrix("x", x.t(), x.dtype) == (x.data_ptr(), 1, 4)


def test_backend_is_there_and_chosen_on_cuda_tensors(device):
    x = torch.zeros(2, device=device)
    for op in ("gae", "ppo_loss"):
        assert registry.unsupported(op, "cuda", device, torch.float32) is None
        assert registry.resolve(op, "cuda", x) == "cuda"
        assert "not torch.int64" in registry.unsupported(op, "cuda", device, torch.int64)
