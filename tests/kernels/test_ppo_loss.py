"""PPO policy and value losses: hand-computed cases, derivatives, masked garbage, sums over micro-batches."""

import math

import pytest
import torch
from rlhf_kernels.ppo_loss import explained_variance, ppo_loss, value_loss
from rlhf_kernels.runtime import registry, testing
from rlhf_kernels.runtime.triton_support import INTERPRETED

from .checks import each, same_bits, threads_change_no_bit, traced_alike

LN = math.log


def terms(ref, entropy, rows=slice(None)):
    """Options with every term of the loss."""
    return {"ref_logprob": ref[rows], "kl_coef": 0.2, "entropy": entropy[rows], "entropy_coef": 0.1}


def tokens(n, seed=0, dtype=torch.float64, scale=1.0):
    """new, old, advantage, ref, entropy and mask."""
    g, where = torch.Generator().manual_seed(seed), torch.get_default_device()
    draws = torch.randn(5, n, generator=g, dtype=torch.float64, device="cpu")
    new, old, advantage, ref, entropy = draws.to(where)
    mask = (torch.rand(n, generator=g, device="cpu") > 0.3).to(where)
    small = 0.4 * scale
    return *(x.to(dtype) for x in (small * new, small * old, advantage, small * ref, entropy.abs())), mask


# ratio, advantage, loss, dloss/dnew, clipped low, clipped high; clip_low 0.2, clip_high 0.3, dual_clip 3
HAND_COMPUTED = [
    (1.0, 2.0, -2.0, -2.0, False, False),  # on policy
    (1.1, 2.0, -2.2, -2.2, False, False),  # inside the range
    (1.5, 2.0, -2.6, 0.0, False, True),  # good action, already likelier: bounded at 1.3
    (0.5, 2.0, -1.0, -1.0, False, False),  # good action, less likely: never bounded
    (0.5, -2.0, 1.6, 0.0, True, False),  # bad action, already less likely: bounded at 0.8
    (0.9, -2.0, 1.8, 1.8, False, False),
    (2.0, -2.0, 4.0, 4.0, False, False),  # bad action, likelier: only dual clip bounds it
    (5.0, -2.0, 6.0, 0.0, False, True),  # beyond dual clip: −A · 3
    (5.0, 0.0, 0.0, 0.0, False, False),
]


@each(("ratio", "advantage", "loss", "slope", "low", "high"), HAND_COMPUTED)
def test_every_clip_case_by_hand(backend, ratio, advantage, loss, slope, low, high):
    new = torch.tensor([LN(ratio) - 1.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.0], dtype=torch.float64)
    adv = torch.tensor([advantage], dtype=torch.float64)
    out = ppo_loss(new, old, adv, torch.tensor([True]), denom=1, clip_low=0.2, clip_high=0.3, dual_clip=3.0)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(loss, abs=1e-12)
    assert new.grad.item() == pytest.approx(slope, abs=1e-12)
    assert (bool(out.clip_fraction_low), bool(out.clip_fraction_high)) == (low, high)
    assert out.clip_fraction.item() == float(low or high)
    assert out.ratio_mean.item() == pytest.approx(ratio)
    assert out.ratio_max.item() == pytest.approx(ratio)
    assert out.approx_kl.item() == pytest.approx(ratio - 1 - LN(ratio))


def test_without_dual_clip_the_bad_side_is_unbounded(backend):
    new, old = torch.tensor([LN(5.0)]), torch.zeros(1)
    out = ppo_loss(new, old, torch.tensor([-2.0]), torch.ones(1), denom=1.0)
    assert out.loss.item() == pytest.approx(10.0)
    assert out.clip_fraction.item() == 0


@each("kl, value, slope", [("k1", 0.5, 1.0), ("k2", 0.125, 0.5), ("k3", math.exp(-0.5) - 0.5, 1 - math.exp(-0.5))])
def test_kl_estimators_by_hand(backend, kl, value, slope):
    """new − ref = 0.5; the policy term is silent because the advantage is 0."""
    new = torch.tensor([0.25], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-0.25], dtype=torch.float64)
    zero = torch.zeros(1, dtype=torch.float64)
    out = ppo_loss(new, new.detach(), zero, torch.ones(1), denom=2.0, ref_logprob=ref, kl=kl, kl_coef=0.1)
    out.loss.backward()
    assert out.kl.item() == pytest.approx(value / 2, rel=1e-12)
    assert out.loss.item() == pytest.approx(0.1 * value / 2, rel=1e-12)
    assert new.grad.item() == pytest.approx(0.1 * slope / 2, rel=1e-12)


def test_kl_is_reported_but_not_trained_on_with_coefficient_zero(backend):
    new, old, adv, ref, _, mask = tokens(20)
    plain = ppo_loss(new, old, adv, mask, denom=20)
    watched = ppo_loss(new, old, adv, mask, denom=20, ref_logprob=ref)
    assert watched.kl > 0
    assert plain.kl == 0
    assert torch.equal(plain.loss, watched.loss)


@each("kl", ["k1", "k2", "k3"])
@each("dual_clip", [None, 1.5])
def test_gradcheck(backend, kl, dual_clip):
    new, old, adv, ref, entropy, mask = tokens(23)
    new.requires_grad_()
    entropy.requires_grad_()

    def loss(new, entropy):
        return ppo_loss(new, old, adv, mask, denom=7.0, dual_clip=dual_clip, kl=kl, **terms(ref, entropy)).loss

    assert torch.autograd.gradcheck(loss, (new, entropy))


def test_loss_and_gradient_agree_with_autograd_of_the_formula(backend):
    new, old, adv, ref, _, _ = tokens(200, seed=3)
    ours, plain = (new.clone().requires_grad_() for _ in range(2))
    keep = torch.ones(200, dtype=torch.bool)
    clips = {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.6}
    out = ppo_loss(ours, old, adv, keep, denom=1.0, **clips, ref_logprob=ref, kl="k3", kl_coef=0.4)
    out.loss.backward()
    ratio = (plain - old).exp()
    policy = torch.maximum(-adv * ratio, -adv * ratio.clamp(0.9, 1.3))
    policy = torch.where(adv < 0, torch.minimum(policy, -adv * 1.6), policy)
    loss = (policy + 0.4 * ((ref - plain).exp() - 1 - (ref - plain))).sum()
    loss.backward()
    torch.testing.assert_close(out.loss.detach(), loss.detach())
    torch.testing.assert_close(ours.grad, plain.grad)
    assert out.clip_fraction_low > 0
    assert out.clip_fraction_high > 0


@each("n", [1, 21, 5000])
def test_largest_ratio_is_that_of_a_live_token(backend, n):
    """All below 1, which is the ratio of whatever pads a vector."""
    old = torch.linspace(-1, 0, n)
    new = old - 1 - torch.linspace(0, 1, n)
    mask = torch.arange(n) % 3 == 0
    out = ppo_loss(new, old, torch.ones(n), mask, denom=n)
    assert out.ratio_max.item() == pytest.approx(math.exp(-1), rel=1e-6)


def test_micro_batches_add_up_to_the_whole_batch(backend):
    new, old, adv, ref, entropy, mask = tokens(64, seed=5)
    denom = mask.sum()

    def run(rows):
        leaf = new[rows].clone().requires_grad_()
        out = ppo_loss(leaf, old[rows], adv[rows], mask[rows], denom=denom, **terms(ref, entropy, rows))
        out.loss.backward()
        return out, leaf.grad

    whole, whole_grad = run(slice(0, 64))
    # uneven on purpose: a mean per micro-batch would get these wrong
    parts = [run(rows) for rows in (slice(0, 5), slice(5, 50), slice(50, 64))]
    for name in ("loss", *whole.NAMES):
        values = [getattr(out, name) for out, _ in parts]
        total = torch.stack(values).max() if name == "ratio_max" else torch.stack(values).sum()
        torch.testing.assert_close(total, getattr(whole, name), msg=name)
    torch.testing.assert_close(torch.cat([grad for _, grad in parts]), whole_grad)


def test_shapes_dtypes_and_statistics(backend):
    new, old, adv, *_, mask = tokens(24)
    flat = ppo_loss(new, old, adv, mask, denom=24)
    folded = ppo_loss(*(x.view(2, 3, 4).transpose(0, 2) for x in (new, old, adv, mask)), denom=24)
    torch.testing.assert_close(tuple(flat), tuple(folded))
    leaf = new.bfloat16().requires_grad_()
    out = ppo_loss(leaf, leaf.detach(), adv.bfloat16(), mask, denom=torch.tensor(24))
    out.loss.backward()
    assert out.loss.dtype == torch.float32
    assert leaf.grad.dtype == torch.bfloat16
    assert out.ratio_max == 1
    assert out.approx_kl == 0
    assert out.clip_fraction == 0
    assert out.loss.requires_grad
    assert not out.statistics.requires_grad


@each("sign", [1, -1])
def test_value_loss_by_hand(backend, sign):
    """v, old, R with clip 0.5: inside, outside and worse, outside but better than its clipped self; mirrored."""
    value = sign * torch.tensor([1.2, 2.0, 3.0], dtype=torch.float64)
    value.requires_grad_()
    old = sign * torch.tensor([1.0, 1.0, 1.0], dtype=torch.float64)
    ret = sign * torch.tensor([2.0, 0.0, 3.5], dtype=torch.float64)
    out = value_loss(value, old, ret, torch.ones(3, dtype=torch.bool), denom=3, clip=0.5)
    out.loss.backward()
    # squared errors: 0.8²;  max(2², 1.5²) = 4;  max(0.5², (1.5 − 3.5)²) = 4, clipped, so without a gradient
    assert out.loss.item() == pytest.approx((0.64 + 4 + 4) / 6)
    torch.testing.assert_close(value.grad, sign * torch.tensor([-0.8, 2.0, 0.0], dtype=torch.float64) / 3)
    assert out.clip_fraction.item() == pytest.approx(1 / 3)
    assert (out.count.item(), out.sum_ret.item()) == (3, pytest.approx(sign * 5.5))
    assert out.sum_error.item() == pytest.approx(sign * (0.8 - 2 + 0.5))
    assert out.sum_error_sq.item() == pytest.approx(0.64 + 4 + 0.25)
    assert out.sum_ret_sq.item() == pytest.approx(4 + 0 + 12.25)


def test_rounding_of_the_clipped_value_cuts_no_gradient(backend):
    """old + (v − old) is not v in fp32; inside the range that must not look like a clip."""
    value, old, ret = (x.float().requires_grad_() for x in tokens(500)[:3])
    old = old.detach() * 100
    assert (old + (value - old) != value).any()
    out = value_loss(value, old, ret, torch.ones(500), denom=500, clip=1e4)
    out.loss.backward()
    assert out.clip_fraction == 0
    torch.testing.assert_close(value.grad, ((value - ret) / 500).detach())


@each("clip", [None, 0.3])
def test_value_gradcheck_and_garbage(backend, clip):
    value, old, ret, *_, mask = tokens(29, seed=2)
    value.requires_grad_()
    assert torch.autograd.gradcheck(lambda v: value_loss(v, old, ret, mask, denom=9, clip=clip).loss, (value,))
    dirty = [torch.where(mask, x.detach(), float("nan")).requires_grad_() for x in (value, old, ret)]
    out = value_loss(*dirty, mask, denom=9, clip=clip)
    out.loss.backward()
    clean = value_loss(value, old, ret, mask, denom=9, clip=clip)
    clean.loss.backward()
    same_bits(out, clean)
    assert torch.equal(dirty[0].grad, value.grad)
    assert dirty[1].grad is None  # the old value and the return are constants
    assert dirty[2].grad is None
    assert (clean.clip_fraction > 0) == (clip is not None)


def test_explained_variance_from_micro_batch_sums(backend):
    value, _, ret, *_, mask = tokens(60, seed=4)
    ret = value + 0.5 * ret
    parts = [value_loss(value[s], None, ret[s], mask[s], denom=60) for s in (slice(0, 7), slice(7, 60))]
    names = ("count", "sum_error", "sum_error_sq", "sum_ret", "sum_ret_sq")
    got = explained_variance(**{name: sum(getattr(part, name) for part in parts) for name in names})
    v, r = value[mask], ret[mask]
    expected = 1 - (r - v).var(correction=0) / r.var(correction=0)
    torch.testing.assert_close(got, expected)
    one = torch.ones(())
    constant = explained_variance(count=4 * one, sum_error=one, sum_error_sq=one, sum_ret=4 * one, sum_ret_sq=4 * one)
    assert constant.isnan()


@each(
    ("change", "error", "message"),
    [
        ({"old_logprob": torch.zeros(3)}, ValueError, r"old_logprob: expected the shape of new_.* \(4,\), got \(3,\)"),
        ({"mask": torch.ones(4, 1)}, ValueError, "mask: expected the shape"),
        ({"advantage": torch.zeros(4, dtype=torch.long)}, TypeError, "advantage: expected a floating dtype"),
        ({"old_logprob": None}, TypeError, "old_logprob: expected a tensor, got NoneType"),
        ({"denom": 0.0}, ValueError, "denom: expected a finite number > 0, got 0.0"),
        ({"denom": torch.tensor(0.0)}, ValueError, "denom: expected a finite number > 0, got 0.0"),
        ({"denom": torch.ones(1)}, ValueError, r"denom: expected a number or a 0-d tensor, got shape \(1,\)"),
        ({"clip_low": -0.1}, ValueError, "clip_low: expected a number >= 0"),
        ({"clip_high": float("nan")}, ValueError, "clip_high: expected a number >= 0"),
        ({"dual_clip": 1.0}, ValueError, "dual_clip: expected None or a number > 1"),
        ({"kl": "k4"}, ValueError, "kl: expected one of"),
        ({"kl_coef": 0.1}, ValueError, "kl_coef: 0.1 needs ref_logprob"),
        ({"entropy_coef": 0.1}, ValueError, "entropy_coef: 0.1 needs entropy"),
        ({"entropy_coef": float("inf")}, ValueError, "entropy_coef: expected a finite number"),
        ({"backend": "cuda"}, registry.BackendUnavailableError, "cannot serve ppo_loss"),
    ],
)
def test_bad_input(change, error, message):
    arguments = dict.fromkeys(("new_logprob", "old_logprob", "advantage"), torch.zeros(4))
    arguments |= {"mask": torch.ones(4), "denom": 4.0}
    with pytest.raises(error, match=message):
        ppo_loss(**(arguments | change))


@each(
    ("change", "error", "message"),
    [
        ({"ret": torch.zeros(3)}, ValueError, "ret: expected the shape of value"),
        ({"clip": 0.0}, ValueError, "clip: expected None or a number > 0"),
        ({"clip": 0.2}, ValueError, "clip: 0.2 needs old_value"),
        ({"denom": -1}, ValueError, "denom: expected a finite number > 0"),
    ],
)
def test_bad_value_input(change, error, message):
    arguments = {"value": torch.zeros(4), "old_value": None, "ret": torch.zeros(4), "mask": torch.ones(4), "denom": 4.0}
    with pytest.raises(error, match=message):
        value_loss(**(arguments | change))


# ---- everything at once ----------------------------------------------------------------------------------------------


def guarded(x):
    """x in the middle of a buffer of NaN, with every second element of it between its own."""
    fill = torch.nan if x.is_floating_point() else 1
    buffer = torch.full((2 * x.numel() + 64,), fill, dtype=x.dtype, device=x.device)
    view = buffer[32 : 32 + 2 * x.numel() : 2]
    view.copy_(x)
    return view


def everything(case, mask, dtype, layout=lambda x: x, on="auto", with_ref=True, clip=0.2, entropy_coef=0.1, **options):
    """All statistics of both losses and all gradients, in one dict."""
    new, old, adv, ref, entropy = (layout(x.to(dtype)) for x in case)
    mask, denom = layout(mask), torch.full((), 37.0, dtype=torch.promote_types(dtype, torch.float32))
    new, entropy, value = (x.detach().requires_grad_() for x in (new, entropy, new))
    options = {"dual_clip": 1.5, "backend": on, "denom": denom} | options
    options |= {"kl_coef": 0.2, "ref_logprob": ref} | options if with_ref else {}
    options |= {"entropy": entropy, "entropy_coef": entropy_coef} if entropy_coef else {}
    out = ppo_loss(new, old, adv, mask, **options)
    values = value_loss(value, None if clip is None else old, ref, mask, denom=denom, clip=clip, backend=on)
    leaves = {"d_new": new, "d_value": value} | ({"d_entropy": entropy} if entropy_coef else {})
    grads = torch.autograd.grad(2 * out.loss + values.loss, list(leaves.values()))
    results = {f"ppo.{k}": v.detach() for k, v in out._asdict().items()}
    results |= {f"value.{k}": v.detach() for k, v in values._asdict().items()}
    return results | dict(zip(leaves, (g.reshape(-1) for g in grads), strict=True))


def hold(n, scale=1.0, layout=guarded, weight=None, **options):
    """By tier 1: inputs in strided memory that NaN surround, masked places that hold NaN."""
    *case, mask = tokens(n, seed=n, dtype=torch.float32, scale=scale)
    case = [torch.where(mask, x, torch.nan) for x in case]
    mask = mask if weight is None else weight * mask
    got = everything(case, mask, torch.float32, layout, **options)
    exact, plain = (everything(case, mask, d, on="reference", **options) for d in (torch.float64, torch.float32))
    for name, value in got.items():
        testing.assert_ok(testing.tier1(value, exact[name], plain[name]), f"{name}, n={n}, {options}")
    if registry.default_backend() == "cuda":
        for name, value in everything(case, mask, torch.float64, layout, **options).items():
            torch.testing.assert_close(value, exact[name], rtol=1e-11, atol=1e-13, msg=f"{name} in fp64")


# one program of Triton's and several, with blocks of 1024; CUDA's blocks
SIZES = {"triton": [1, 2, 15, 127, 129, 2048, 2049, 3089], "cuda": [1, 3, 1024, 5003]}


@each("scale", [1.0, 1e-3])  # 1e-3: k3 and approx_kl are what is left of a cancellation
def test_tier1_of_everything(backend, scale):
    for n in SIZES.get(backend, [1, 2, 15, 16, 17, 127, 1000, 1023, 1024, 1025, 4100]):
        hold(n, scale)


OPTIONS = [
    {"with_ref": False, "entropy_coef": 0.0, "dual_clip": None, "clip": None},
    {"clip_low": 0.1, "clip_high": 0.3, "with_ref": False, "entropy_coef": 0.0, "clip": 0.3},
    {"kl": "k1", "kl_coef": 0.1},
    {"kl": "k2", "kl_coef": 0.1, "dual_clip": None, "weight": torch.tensor(3)},
    {"kl": "k3", "kl_coef": 0.2, "dual_clip": None, "weight": torch.tensor(0.5)},
    {"kl_coef": 0.0, "entropy_coef": 0.05, "clip": 0.1, "layout": lambda x: x},
]


@each("options", OPTIONS)
@each("scale", [1.0, 1e-3])
def test_tier1_of_every_option(backend, options, scale):
    hold(300, scale, **options)


def test_one_advantage_for_a_sequence(backend):
    """Expanded over its tokens."""
    *case, mask = (x.reshape(8, 8) for x in tokens(64, dtype=torch.float32))
    case[2] = case[2][:, :1].expand(8, 8)
    got, want = (everything(case, mask, torch.float32, on=on) for on in ("auto", "reference"))
    for name, value in got.items():
        torch.testing.assert_close(value, want[name], rtol=1e-5, atol=1e-6)


@each("dtype", [torch.bfloat16, torch.float16])
@each("mask_dtype", [torch.bool, torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_half_inputs_and_any_mask(backend, dtype, mask_dtype):
    """Half inputs count as exact; results are fp32, gradients are rounded once more."""
    for n in (3, 1030):
        *case, mask = tokens(n, seed=1, dtype=dtype)
        mask = (mask * 3).to(mask_dtype) if mask_dtype != torch.bool else mask
        got = everything(case, mask, dtype)
        exact, plain = (everything(case, mask, d, on="reference") for d in (torch.float64, torch.float32))
        for name, value in got.items():
            if name.startswith("d_"):
                assert value.dtype == dtype
                if dtype == torch.bfloat16 and not INTERPRETED:
                    testing.assert_ok(testing.tier2(value, exact[name]), name)
                eps = torch.finfo(dtype).eps
                torch.testing.assert_close(value.double(), exact[name], rtol=eps, atol=1e-6)
            else:
                testing.assert_ok(testing.tier1(value, exact[name], plain[name]), name)


@each("garbage", [torch.nan, torch.inf, -torch.inf])
@each("mask_dtype", [torch.bool, torch.float32, torch.int64])
def test_masked_garbage_is_never_seen(backend, garbage, mask_dtype):
    for n in (31, 2548):
        *clean, mask = tokens(n, dtype=torch.float32)
        results = []
        for fill in (0.0, garbage):
            case = [torch.where(mask, x, fill) for x in clean]
            results.append(everything(case, mask.to(mask_dtype), torch.float32))
        same_bits(*(result.values() for result in results))
        assert all(x.isfinite().all() for x in results[1].values())
        assert all((results[1][name][~mask] == 0).all() for name in ("d_new", "d_entropy", "d_value"))


def test_nothing_live_and_empty(backend):
    for n in (0, 6, 2049):
        *case, mask = tokens(n, dtype=torch.float32)
        assert not any(x.any() for x in everything(case, mask & False, torch.float32).values())


def test_inputs_of_different_dtypes(backend):
    new, old, adv, ref, entropy, mask = tokens(40, dtype=torch.float32)
    mixed = (old.half(), adv.bfloat16(), mask)
    out = ppo_loss(new, *mixed, denom=9.0, ref_logprob=ref.double(), kl_coef=0.1, entropy=entropy.bfloat16())
    same = (old.half().float(), adv.bfloat16().float(), mask)
    plain = ppo_loss(new, *same, denom=9.0, ref_logprob=ref, kl_coef=0.1, entropy=entropy.bfloat16().float())
    torch.testing.assert_close(tuple(out), tuple(plain))


def test_extreme_values_as_in_the_reference(backend):
    """Overflow, underflow, infinities and live NaN end where the formulas put them, in gradients too."""
    inf, nan = torch.inf, torch.nan
    new = torch.tensor([0.0, 120, -120, 88.5, -30, -100, inf, -inf, nan, 0, 0, 1e-30, -90, nan, -inf, inf])
    old = torch.tensor([0.0, 0, 0, 0, 0, 3, 0, 0, 0, -inf, 0, 0, 0, 0, 0, 0])
    adv = torch.tensor([1.0, -1, 1, -1, -1, 0, 0, 1, 1, -1, nan, 2, inf, 0, -1, -1])
    close = {"rtol": 1e-5, "atol": 1e-6} if backend in ("triton", "cuda") else {"rtol": 1e-6, "atol": 1e-37}
    for i in range(len(new)):
        case = new[i : i + 1], old[i : i + 1], adv[i : i + 1], old[i : i + 1], torch.ones(1)
        got, want = (everything(case, torch.ones(1), torch.float32, on=on) for on in ("auto", "reference"))
        for name, value in got.items():
            torch.testing.assert_close(value, want[name], equal_nan=True, msg=f"{name} {i}", **close)


def test_small_kl_keeps_its_digits(backend):
    """e^d − 1 − d near 0 is about d²/2: from e^d it would be noise; from e^d − 1 an error of an ulp of d is left."""
    for size in (1e-6, -1e-5, 1e-4, -1e-3, 0.1, -0.3):
        x = torch.tensor([size])
        out = ppo_loss(x, torch.zeros(1), torch.zeros(1), torch.ones(1), denom=1.0, ref_logprob=2 * x)
        exact = math.expm1(x.item()) - x.item()
        expected = pytest.approx(exact, rel=1e-6, abs=0.0 if backend == "cpu" else 2e-7 * abs(size))
        assert out.approx_kl.item() == expected
        assert out.kl.item() == expected


def test_threads_do_not_change_the_bits(backend):
    *case, mask = tokens(200_000, seed=9, dtype=torch.float32)
    if backend == "cpu":  # torch's own sums are not ours to promise
        threads_change_no_bit(lambda: everything(case, mask, torch.float32).values())


def test_eager_calls_and_the_registered_op_agree_bit_for_bit(backend):
    new, old, adv, ref, entropy, mask = tokens(50, dtype=torch.float32)

    def both(new, entropy, value):
        shaped = [x.view(5, 10) for x in (new, old, adv, mask, ref, entropy)]
        policy = ppo_loss(*shaped[:4], denom=9.0, **terms(*shaped[4:]))
        values = value_loss(value, old, adv, mask, denom=torch.tensor(9.0), clip=0.2)
        return (*policy, *values, *torch.autograd.grad(policy.loss + 0.3 * values.loss, (new, entropy, value)))

    leaves = [x.clone().requires_grad_() for x in (new, entropy, ref)]
    traced_alike(both, leaves, {"ppo_loss", "ppo_loss_backward", "value_loss", "value_loss_backward"})


def test_compiled_without_a_graph_break(backend):
    new, old, adv, ref, _, mask = tokens(50, dtype=torch.float32)

    def step(new, value):
        policy = ppo_loss(new, old, adv, mask, denom=9.0, ref_logprob=ref, kl_coef=0.1)
        values = value_loss(value, old, adv, mask, denom=9.0, clip=0.2)
        return policy.loss + values.loss, policy.approx_kl

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        leaves = [x.clone().requires_grad_() for x in (new, ref)]
        out = function(*leaves)
        results.append([*out, *torch.autograd.grad(out[0], leaves)])
    same_bits(*results)


def test_gradients_behave_as_of_any_op(backend):
    new, old, adv, _, entropy, mask = tokens(12, dtype=torch.float32)
    new.requires_grad_()
    call = {"denom": 5.0, "entropy": entropy, "entropy_coef": 0.1}
    with torch.no_grad():
        assert not ppo_loss(new, old, adv, mask, **call).loss.requires_grad
    assert not ppo_loss(new.detach(), old, adv, mask, **call).loss.requires_grad
    out = ppo_loss(new, old, adv, mask, **call)
    (once,) = torch.autograd.grad(out.loss, new, torch.tensor(2.0), retain_graph=True)
    (twice,) = torch.autograd.grad(2 * out.loss, new)
    assert torch.equal(once, twice)
    out = ppo_loss(new, old, adv, mask, **call)
    out.loss.div_(2).backward()  # the loss may be scaled in place
    assert torch.equal(4 * new.grad, once)
    assert out.loss.grad_fn is not None
    only_entropy = ppo_loss(new.detach(), old, adv, mask, **(call | {"entropy": entropy.clone().requires_grad_()}))
    assert only_entropy.loss.requires_grad
    shaped = new.detach().view(3, 4).t().requires_grad_()
    constants = [x.view(3, 4).t() for x in (old, adv, mask, entropy)]
    ppo_loss(shaped, *constants[:3], denom=5.0, entropy=constants[3], entropy_coef=0.1).loss.backward()
    assert torch.equal(shaped.grad.t().reshape(-1), 2 * new.grad)


def test_a_gradient_that_was_written_to_is_not_handed_out_again(backend):
    """With a gradient of 1, backward returns what it saved; a second backward must notice a change of that."""
    new, old, adv, ref, entropy, mask = tokens(12, dtype=torch.float32)
    new, entropy = new.requires_grad_(), entropy.requires_grad_()
    policy = ppo_loss(new, old, adv, mask, denom=5.0, entropy=entropy, entropy_coef=0.1)
    for loss in (policy.loss, value_loss(new, old, ref, mask, denom=5.0, clip=0.2).loss):
        scaled = torch.autograd.grad(3 * loss, new, retain_graph=True)[0]
        loss.backward(retain_graph=True)  # new.grad is a tensor of its own
        loss.backward(retain_graph=True)
        torch.testing.assert_close(new.grad * 1.5, scaled)
        new.grad = None
        (grad,) = torch.autograd.grad(loss, new, retain_graph=True)
        torch.testing.assert_close(3 * grad, scaled)
        grad.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        new.grad = None
    assert (entropy.grad != 0).any()
