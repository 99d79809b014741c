"""`gae` against hand-computed numbers, the definition (a mixture of n-step returns), and hostile inputs."""

import pytest
import torch
from rlhf_kernels.gae import _gae_backward, gae
from rlhf_kernels.runtime import registry
from rlhf_kernels.runtime.testing import assert_ok, tier1
from rlhf_kernels.runtime.triton_support import INTERPRETED

from .checks import BACKENDS, each, needs_native, same_bits, with_threads

NAN = float("nan")


@pytest.fixture(params=BACKENDS)
def backend(request):
    with registry.use_backend(request.param):
        yield request.param


def definition(reward, value, mask, gamma, lam, bootstrap=None):
    """A = (1 − λ) Σ_n λ^(n−1) G⁽ⁿ⁾ + λ^(N−1) G⁽ᴺ⁾ − V, on unmasked positions: no recursion, no δ."""
    advantage = torch.zeros(reward.shape, dtype=torch.float64)
    ret = torch.zeros_like(advantage)
    for b in range(reward.shape[0]):
        kept = [t for t in range(reward.shape[1]) if mask[b, t]]
        r = [float(reward[b, t]) for t in kept]
        v = [float(value[b, t]) for t in kept] + [0.0 if bootstrap is None else float(bootstrap[b])]
        for i, t in enumerate(kept):
            left = len(kept) - i
            n_step = [
                sum(gamma**k * r[i + k] for k in range(n)) + gamma**n * v[i + n] for n in range(1, left + 1)
            ]  # G⁽¹⁾ … G⁽ᴺ⁾
            mixture = sum((1 - lam) * lam**n * g for n, g in enumerate(n_step[:-1])) + lam ** (left - 1) * n_step[-1]
            advantage[b, t] = mixture - v[i]
            ret[b, t] = mixture
    return advantage, ret


def random_case(B, T, *, dtype=torch.float32, scale=1.0, holes=0.3, seed=0):
    """reward, value, mask and bootstrap."""
    generator, where = torch.Generator().manual_seed(seed), torch.get_default_device()
    draw = lambda *shape: scale * torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")  # noqa: E731
    reward, value, mask = *draw(2, B, T), torch.rand(B, T, generator=generator, device="cpu") >= holes
    return *(x.float().to(where, dtype) for x in (reward, value)), mask.to(where), draw(B).float().to(where, dtype)


def run_gae(inputs, backend="auto", dtype=torch.float32, *, gamma=0.99, lam=0.95, with_bootstrap=True):
    """Outputs and gradients by name."""
    reward, value, mask, bootstrap = (x.to(dtype) if x.is_floating_point() else x for x in inputs)
    leaves = [x.clone().requires_grad_() for x in (reward, value, bootstrap)][: 3 if with_bootstrap else 2]
    out = gae(*leaves[:2], mask, gamma=gamma, lam=lam, bootstrap=(*leaves, None)[2], backend=backend)
    weight = torch.linspace(-1, 1, reward.numel(), dtype=torch.float64).reshape(reward.shape)
    loss = (out.advantage.double() * weight).sum() + (out.ret.double() * weight.square()).sum()
    names = ("advantage", "ret", "d_reward", "d_value", "d_bootstrap")
    return dict(zip(names, (x.detach() for x in (*out, *torch.autograd.grad(loss, leaves))), strict=False))


def hold(inputs, names=None, **knobs):
    """All of `run_gae`, or these of it, in float32 by tier 1."""
    exact, plain = (run_gae(inputs, "reference", dtype, **knobs) for dtype in (torch.float64, torch.float32))
    for name, actual in run_gae(inputs, **knobs).items():
        assert actual.dtype == torch.float32
        if name in (names or exact):
            assert_ok(tier1(actual, exact[name], plain[name]), name)


def test_hand_computed(backend):
    # γ = λ = ½. Row 0: δ₂ = 4 + 0 − 2 = 2, δ₁ = 0 + 1 − 4 = −3, δ₀ = 1 + 2 − 2 = 1;
    # A₂ = 2, A₁ = −3 + ¼·2 = −2½, A₀ = 1 − ⅝ = ⅜. Row 1: position 1 is skipped, so V_next at 0 is V₂ = 6:
    # δ₂ = 2 + ½·8 − 6 = 0, δ₀ = 1 + 3 − 2 = 2; A₂ = 0, A₀ = 2.
    reward = torch.tensor([[1.0, 0.0, 4.0], [1.0, NAN, 2.0]])
    value = torch.tensor([[2.0, 4.0, 2.0], [2.0, NAN, 6.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 1]])
    out = gae(reward, value, mask, gamma=0.5, lam=0.5, bootstrap=torch.tensor([0.0, 8.0]))
    assert out.advantage.tolist() == [[0.375, -2.5, 2.0], [2.0, 0.0, 0.0]]
    assert out.ret.tolist() == [[2.375, 1.5, 4.0], [4.0, 0.0, 6.0]]


@each("with_bootstrap", [False, True])
@each(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (0.99, 0.0), (0.99, 1.0), (0.0, 0.5)])
def test_equals_definition_in_fp64(backend, with_bootstrap, gamma, lam):
    reward, value, mask, bootstrap = random_case(6, 13, dtype=torch.float64)
    mask[0], mask[1] = True, False  # a full row and an empty one
    bootstrap = bootstrap if with_bootstrap else None
    advantage, ret = definition(reward, value, mask, gamma, lam, bootstrap)
    out = gae(reward, value, mask, gamma=gamma, lam=lam, bootstrap=bootstrap)
    torch.testing.assert_close(out.advantage, advantage, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out.ret, ret, rtol=1e-12, atol=1e-12)


SIZES = {"triton": [(1, 1), (2, 129), (3, 64), (5, 127)]}
# Packs of 4, warps of 128, blocks of up to 2048: ends inside and at the end of each, and rows of several blocks
SIZES["cuda"] = [(3, T) for T in (1, 3, 4, 127, 128, 516, 1000, 2048, 2049, 4601)]


@each("scale", [1.0, 1e-3])
def test_tier1(backend, scale):
    for B, T in SIZES.get(backend, [(1, 1), (2, 129), (15, 64), (64, 127)]):
        hold(random_case(B, T, scale=scale))


@each("with_bootstrap", [False, True])
@each(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (0.99, 0.0), (0.99, 1.0), (0.0, 0.5), (1.0, 1.0)])
def test_coefficients(backend, gamma, lam, with_bootstrap):
    for holes in (0.3,) if backend == "triton" else (0.3, 0.0, 0.99):
        hold(random_case(3, 33, holes=holes), gamma=gamma, lam=lam, with_bootstrap=with_bootstrap)


@needs_native
@each("dtype", [torch.float32, torch.float64])
def test_cpu_has_the_references_bits(dtype):
    reward, value, mask, bootstrap = random_case(67, 501, dtype=dtype)  # a group of rows cut short, parallel loop
    leaves = [x.requires_grad_() for x in (reward, value, bootstrap)]

    def run(backend="cpu"):
        out = gae(reward, value, mask, gamma=0.99, lam=0.95, bootstrap=bootstrap)
        return [*out, *torch.autograd.grad((out.advantage.square() + out.ret).sum(), leaves)]

    for result in with_threads(run, 1, 3):
        same_bits(result, run("reference"))


def test_gradcheck(backend):
    reward, value, mask, bootstrap = random_case(3, 6, dtype=torch.float64)
    mask[1] = False
    inputs = [x.requires_grad_() for x in (reward, value, bootstrap)]

    def both(r, v, last):
        return tuple(gae(r, v, mask, gamma=0.9, lam=0.8, bootstrap=last))

    assert torch.autograd.gradcheck(both, inputs)
    assert torch.autograd.gradcheck(lambda r, v: both(r, v, None)[0], inputs[:2])  # ret unused: no gradient arrives


def test_only_wanted_gradients(backend):
    reward, value, mask, bootstrap = random_case(2, 5)
    value.requires_grad_()
    gae(reward, value, mask, gamma=0.9, lam=0.8, bootstrap=bootstrap).ret.sum().backward()
    assert value.grad is not None
    assert reward.grad is None
    assert bootstrap.grad is None


@each("garbage", [NAN, float("inf"), float("-inf")])
def test_masked_inputs_reach_nothing(backend, garbage):
    reward, value, mask, bootstrap = random_case(4, 70)
    mask[0], mask[1], mask[2, 32:] = False, True, False  # nothing, everything, a whole block of 32 masked
    results = []
    for fill in (0.0, garbage):
        r, v = (x.masked_fill(~mask, fill).requires_grad_() for x in (reward, value))
        last = bootstrap.clone()
        last[0] = fill  # a row without positions has no use for it
        out = gae(r, v, mask, gamma=0.9, lam=0.8, bootstrap=last)
        torch.autograd.backward(out, [torch.ones_like(x).masked_fill(~mask, fill) for x in out])
        results.append([*out, r.grad, v.grad])
    same_bits(*results)
    assert all(x.isfinite().all() and (x[~mask] == 0).all() for x in results[1])


def test_nan_spreads_backwards_in_its_own_row_only(backend):
    reward, value, mask, _ = random_case(3, 6, holes=0.0)
    reward[1, 3] = NAN
    advantage = gae(reward, value, mask, gamma=0.9, lam=0.8).advantage
    expected = torch.zeros(3, 6, dtype=torch.bool)
    expected[1, :4] = True
    assert torch.equal(advantage.isnan(), expected)


@each(("B", "T"), [(0, 5), (3, 0), (0, 0)])
def test_empty(backend, B, T):
    reward, value, bootstrap = (torch.zeros(s, requires_grad=True) for s in ((B, T), (B, T), (B,)))
    out = gae(reward, value, torch.ones(B, T), gamma=0.9, lam=0.8, bootstrap=bootstrap)
    assert out.advantage.shape == out.ret.shape == (B, T)
    (out.advantage.sum() + out.ret.sum()).backward()
    assert torch.equal(bootstrap.grad, torch.zeros(B))


LAYOUTS = {
    "row_slice": lambda x: torch.stack([x, torch.full_like(x, 1)], dim=1).flatten(0, 1)[::2],
    "column_slice": lambda x: torch.cat([torch.ones_like(x), x, torch.ones_like(x)], dim=1)[:, len(x[0]) : -len(x[0])],
    "transposed": lambda x: x.t().contiguous().t(),
    "every_second": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "expanded": lambda x: x[:1].expand_as(x),
    "flipped": lambda x: x.flip(0),
    "aligned": lambda x: x[:, :-1],
}


@each("layout", LAYOUTS)
def test_layouts(backend, layout):
    """Bits of dense memory, forward and backward."""
    views = [LAYOUTS[layout](x) for x in random_case(*((2, 69) if INTERPRETED else (5, 137)))[:3]]
    results = []
    for reward, value, mask in (views, [x.clone(memory_format=torch.contiguous_format) for x in views]):
        out = gae(reward, value, mask, gamma=0.9, lam=0.8)
        assert out.advantage.is_contiguous()
        on = registry.resolve("gae", "auto", reward)
        results.append([*out, *_gae_backward(reward, value, mask, 0.9, 0.8, on)])
    same_bits(*results)


@each("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_accumulate_and_come_out_in_fp32(backend, dtype):
    reward, value, mask, _ = random_case(4, 40, dtype=dtype)
    value.requires_grad_()
    out = gae(reward, value, mask, gamma=0.99, lam=0.95)
    expected = gae(reward.float(), value.float(), mask, gamma=0.99, lam=0.95)
    assert out.advantage.dtype == out.ret.dtype == torch.float32
    assert torch.equal(out.advantage, expected.advantage)
    mixed = gae(reward, value.float(), mask.float(), gamma=0.99, lam=0.95)
    assert torch.equal(mixed.advantage, expected.advantage)
    out.advantage.sum().backward()
    assert value.grad.dtype == dtype


def test_mask_dtypes_agree():
    reward, value, mask, _ = random_case(3, 8)
    expected = gae(reward, value, mask, gamma=0.9, lam=0.8)
    for other in (mask.float(), mask.long(), mask.to(torch.uint8), mask.bfloat16()):
        assert torch.equal(gae(reward, value, other, gamma=0.9, lam=0.8).advantage, expected.advantage)


@each("named", ["cuda", "triton"])
def test_named_backend_never_falls_back(named):
    x = torch.zeros(2, 3)
    with pytest.raises(registry.BackendUnavailableError, match=f"backend='{named}' cannot serve gae"):
        gae(x, x, x, gamma=1.0, lam=1.0, backend=named)


@each(
    ("change", "error", "message"),
    [
        ({"reward": torch.zeros(3)}, ValueError, r"reward: expected shape \[B, T\], got \(3,\)"),
        ({"reward": [[0.0]]}, TypeError, "reward: expected a tensor, got list"),
        ({"reward": torch.zeros(2, 3, dtype=torch.long)}, TypeError, "reward: expected a floating point dtype"),
        ({"value": torch.zeros(2, 4)}, ValueError, r"value: expected shape \(2, 3\), got \(2, 4\)"),
        ({"value": torch.zeros(2, 3, device="meta")}, ValueError, "value: expected a tensor on cpu, got one on meta"),
        ({"mask": torch.ones(2, 1)}, ValueError, r"mask: expected shape \(2, 3\), got \(2, 1\)"),
        ({"mask": None}, TypeError, "mask: expected a tensor, got NoneType"),
        ({"bootstrap": torch.zeros(3)}, ValueError, r"bootstrap: expected shape \(2,\), got \(3,\)"),
        ({"gamma": 1.5}, ValueError, r"gamma: expected a number in \[0, 1\], got 1.5"),
        ({"lam": NAN}, ValueError, r"lam: expected a number in \[0, 1\], got nan"),
        ({"backend": "fast"}, ValueError, "backend: expected 'auto' or one of"),
    ],
)
def test_bad_input(change, error, message):
    good = {"reward": torch.zeros(2, 3), "value": torch.zeros(2, 3), "mask": torch.ones(2, 3), "gamma": 1.0, "lam": 1.0}
    with pytest.raises(error, match=message):
        gae(**{**good, **change})
