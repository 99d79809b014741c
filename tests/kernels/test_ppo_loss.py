"""PPO policy and value losses: hand-computed cases, derivatives, masked garbage, sums over micro-batches."""

import math

import pytest
import torch
from rlhf_kernels import registry, testing
from rlhf_kernels.ppo_loss import explained_variance, ppo_loss, ppo_token_terms, value_loss

LN = math.log


def tokens(n, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    new, old, advantage, ref, entropy = (torch.randn(n, generator=g, dtype=torch.float64).to(dtype) for _ in range(5))
    mask = torch.rand(n, generator=g) > 0.3
    return 0.4 * new, 0.4 * old, advantage, 0.4 * ref, entropy.abs(), mask


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


@pytest.mark.parametrize(("ratio", "advantage", "loss", "slope", "low", "high"), HAND_COMPUTED)
def test_every_clip_case_by_hand(ratio, advantage, loss, slope, low, high):
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


def test_without_dual_clip_the_bad_side_is_unbounded():
    new, old = torch.tensor([LN(5.0)]), torch.zeros(1)
    out = ppo_loss(new, old, torch.tensor([-2.0]), torch.ones(1), denom=1.0)
    assert out.loss.item() == pytest.approx(10.0)
    assert out.clip_fraction.item() == 0


@pytest.mark.parametrize(
    ("kl", "value", "slope"),
    [("k1", 0.5, 1.0), ("k2", 0.125, 0.5), ("k3", math.exp(-0.5) - 1 + 0.5, 1 - math.exp(-0.5))],
)
def test_kl_estimators_by_hand(kl, value, slope):
    """new − ref = 0.5; the policy term is silent because the advantage is 0."""
    new = torch.tensor([0.25], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-0.25], dtype=torch.float64)
    zero = torch.zeros(1, dtype=torch.float64)
    out = ppo_loss(new, new.detach(), zero, torch.ones(1), denom=2.0, ref_logprob=ref, kl=kl, kl_coef=0.1)
    out.loss.backward()
    assert out.kl.item() == pytest.approx(value / 2, rel=1e-12)
    assert out.loss.item() == pytest.approx(0.1 * value / 2, rel=1e-12)
    assert new.grad.item() == pytest.approx(0.1 * slope / 2, rel=1e-12)


def test_kl_is_reported_but_not_trained_on_with_coefficient_zero():
    new, old, adv, ref, _, mask = tokens(20)
    plain = ppo_loss(new, old, adv, mask, denom=20)
    watched = ppo_loss(new, old, adv, mask, denom=20, ref_logprob=ref)
    assert watched.kl > 0
    assert plain.kl == 0
    assert torch.equal(plain.loss, watched.loss)


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
@pytest.mark.parametrize("dual_clip", [None, 1.5])
def test_gradcheck(kl, dual_clip):
    new, old, adv, ref, entropy, mask = tokens(23)
    new.requires_grad_()
    entropy.requires_grad_()

    def loss(new, entropy):
        return ppo_loss(
            new,
            old,
            adv,
            mask,
            denom=7.0,
            dual_clip=dual_clip,
            ref_logprob=ref,
            kl=kl,
            kl_coef=0.3,
            entropy=entropy,
            entropy_coef=0.2,
        ).loss

    assert torch.autograd.gradcheck(loss, (new, entropy))


def test_token_terms_agree_with_autograd_of_the_formula():
    new, old, adv, ref, _, _ = tokens(200, seed=3)
    new.requires_grad_()
    terms = ppo_token_terms(
        new.detach(),
        old,
        adv,
        clip_low=0.1,
        clip_high=0.3,
        dual_clip=1.6,
        ref_logprob=ref,
        kl="k3",
        kl_coef=0.4,
    )
    ratio = (new - old).exp()
    policy = torch.maximum(-adv * ratio, -adv * ratio.clamp(0.9, 1.3))
    policy = torch.where(adv < 0, torch.minimum(policy, -adv * 1.6), policy)
    loss = policy + 0.4 * ((ref - new).exp() - 1 - (ref - new))
    loss.sum().backward()
    torch.testing.assert_close(terms.loss, loss.detach())
    torch.testing.assert_close(terms.dloss_dnew_logprob, new.grad)
    assert terms.clipped_low.any()
    assert terms.clipped_high.any()
    assert not (terms.clipped_low & terms.clipped_high).any()


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32, torch.int64])
def test_masked_garbage_is_never_seen(garbage, mask_dtype):
    *clean, mask = tokens(31)
    results = []
    for fill in (0.0, garbage):
        new, old, adv, ref, entropy = (torch.where(mask, x, fill) for x in clean)
        new.requires_grad_()
        entropy.requires_grad_()
        out = ppo_loss(
            new,
            old,
            adv,
            mask.to(mask_dtype),
            denom=5,
            ref_logprob=ref,
            kl_coef=0.2,
            entropy=entropy,
            entropy_coef=0.1,
        )
        out.loss.backward()
        results.append([*out, new.grad, entropy.grad])
        assert (new.grad[~mask] == 0).all()
        assert (entropy.grad[~mask] == 0).all()
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_live_nan_is_not_hidden():
    new, old, adv, *_ = tokens(4)
    new[2] = float("nan")
    assert ppo_loss(new, old, adv, torch.ones(4), denom=4).loss.isnan()


def test_micro_batches_add_up_to_the_whole_batch():
    new, old, adv, ref, entropy, mask = tokens(64, seed=5)
    denom = mask.sum()

    def run(rows):
        leaf = new[rows].clone().requires_grad_()
        out = ppo_loss(
            leaf,
            old[rows],
            adv[rows],
            mask[rows],
            denom=denom,
            ref_logprob=ref[rows],
            kl_coef=0.1,
            entropy=entropy[rows],
            entropy_coef=0.1,
        )
        out.loss.backward()
        return out, leaf.grad

    whole, whole_grad = run(slice(0, 64))
    # uneven on purpose: a mean per micro-batch would get these wrong
    parts = [run(rows) for rows in (slice(0, 5), slice(5, 50), slice(50, 64))]
    for name in whole._fields:
        values = [getattr(out, name) for out, _ in parts]
        total = torch.stack(values).max() if name == "ratio_max" else torch.stack(values).sum()
        torch.testing.assert_close(total, getattr(whole, name), msg=name)
    torch.testing.assert_close(torch.cat([grad for _, grad in parts]), whole_grad)


def test_shapes_dtypes_and_statistics():
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
    assert not any(x.requires_grad for x in out[1:])


def test_float_mask_weighs():
    new, old, adv, *_ = tokens(2)
    halves = ppo_loss(new, old, adv, torch.tensor([0.5, 0.0]), denom=1).loss
    assert halves.item() == pytest.approx(0.5 * ppo_loss(new, old, adv, torch.tensor([1.0, 0.0]), denom=1).loss.item())


def test_nothing_live_and_empty():
    new, old, adv, *_ = tokens(6)
    new.requires_grad_()
    out = ppo_loss(new, old, adv, torch.zeros(6), denom=3)
    out.loss.backward()
    assert all(x == 0 for x in out)
    assert (new.grad == 0).all()
    assert all(x == 0 for x in ppo_loss(new[:0], old[:0], adv[:0], torch.zeros(0), denom=3))
    value = value_loss(new[:0], old[:0], adv[:0], torch.zeros(0), denom=3, clip=0.2)
    assert all(x == 0 for x in value)


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_tier1(scale):
    exact_in = [x * scale for x in tokens(1000, seed=7)[:4]]
    mask = tokens(1000, seed=7)[5]

    def run(dtype):
        new, old, adv, ref = (x.float().to(dtype) for x in exact_in)
        new.requires_grad_()
        out = ppo_loss(new, old, adv, mask, denom=700, ref_logprob=ref, kl_coef=0.1, backend="reference")
        out.loss.backward()
        return torch.stack(list(out)).detach(), new.grad

    def eager32():
        new, old, adv, ref = (x.float() for x in exact_in)
        new.requires_grad_()
        ratio = (new - old).exp()
        policy = torch.maximum(-adv * ratio, -adv * ratio.clamp(0.8, 1.2))
        kl = (ref - new).exp() - 1 - (ref - new)
        loss = ((policy + 0.1 * kl) * mask).sum() / 700
        loss.backward()
        return loss.detach(), new.grad

    (stats32, grad32), (stats64, grad64), (loss_eager, grad_eager) = (
        run(torch.float32),
        run(torch.float64),
        eager32(),
    )
    testing.assert_ok(testing.tier1(stats32[0], stats64[0], loss_eager), "loss")
    testing.assert_ok(testing.tier1(grad32, grad64, grad_eager), "gradient")


def test_value_loss_by_hand():
    """v, old, R with clip 0.5: inside, outside and worse, outside but better than its clipped self."""
    value = torch.tensor([1.2, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([1.0, 1.0, 1.0], dtype=torch.float64)
    ret = torch.tensor([2.0, 0.0, 3.5], dtype=torch.float64)
    out = value_loss(value, old, ret, torch.ones(3, dtype=torch.bool), denom=3, clip=0.5)
    out.loss.backward()
    # squared errors: 0.8²;  max(2², 1.5²) = 4;  max(0.5², (1.5 − 3.5)²) = 4, clipped, so without a gradient
    assert out.loss.item() == pytest.approx((0.64 + 4 + 4) / 6)
    torch.testing.assert_close(value.grad, torch.tensor([-0.8, 2.0, 0.0], dtype=torch.float64) / 3)
    assert out.clip_fraction.item() == pytest.approx(1 / 3)
    assert (out.count.item(), out.sum_ret.item()) == (3, pytest.approx(5.5))
    assert out.sum_error.item() == pytest.approx(0.8 - 2 + 0.5)
    assert out.sum_error_sq.item() == pytest.approx(0.64 + 4 + 0.25)
    assert out.sum_ret_sq.item() == pytest.approx(4 + 0 + 12.25)


def test_rounding_of_the_clipped_value_cuts_no_gradient():
    """old + (v − old) is not v in fp32; inside the range that must not look like a clip."""
    value, old, ret = (x.float().requires_grad_() for x in tokens(500)[:3])
    old = old.detach() * 100
    assert (old + (value - old) != value).any()
    out = value_loss(value, old, ret, torch.ones(500), denom=500, clip=1e4)
    out.loss.backward()
    assert out.clip_fraction == 0
    torch.testing.assert_close(value.grad, ((value - ret) / 500).detach())


@pytest.mark.parametrize("clip", [None, 0.3])
def test_value_gradcheck_and_garbage(clip):
    value, old, ret, *_, mask = tokens(29, seed=2)
    value.requires_grad_()
    assert torch.autograd.gradcheck(lambda v: value_loss(v, old, ret, mask, denom=9, clip=clip).loss, (value,))
    dirty = [torch.where(mask, x.detach(), float("nan")).requires_grad_() for x in (value, old, ret)]
    out = value_loss(*dirty, mask, denom=9, clip=clip)
    out.loss.backward()
    clean = value_loss(value, old, ret, mask, denom=9, clip=clip)
    clean.loss.backward()
    assert all(torch.equal(a, b) for a, b in zip(out, clean, strict=True))
    assert torch.equal(dirty[0].grad, value.grad)
    assert dirty[1].grad is None  # the old value and the return are constants
    assert dirty[2].grad is None
    assert (clean.clip_fraction > 0) == (clip is not None)


def test_explained_variance_from_micro_batch_sums():
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


def test_opcheck():
    ops = torch.ops.rlhf_kernels
    new, old, adv, ref, entropy, mask = tokens(9, dtype=torch.float32)
    denom = torch.tensor(9.0)
    new.requires_grad_()
    entropy.requires_grad_()
    knobs = (0.2, 0.2, 3.0, "k3", 0.1, 0.1, "reference")
    torch.library.opcheck(ops.ppo_loss.default, (new, old, adv, mask, denom, ref, entropy, *knobs))
    torch.library.opcheck(ops.ppo_loss.default, (new, old, adv, mask, denom, None, None, *knobs[:2], None, *knobs[3:]))
    torch.library.opcheck(ops.value_loss.default, (new, old, adv, mask, denom, 0.2, "reference"))
    torch.library.opcheck(ops.value_loss.default, (new, None, adv, mask, denom, None, "reference"))
    coef = torch.randn(9)
    torch.library.opcheck(
        ops.ppo_loss_backward.default, (torch.tensor(2.0), coef, mask, denom, 0.1, True, False, "reference")
    )
    torch.library.opcheck(
        ops.ppo_loss_backward.default, (torch.tensor(2.0), coef, mask, denom, 0.1, False, True, "reference")
    )
    torch.library.opcheck(ops.value_loss_backward.default, (torch.tensor(2.0), coef, "reference"))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"old_logprob": torch.zeros(3)},
            ValueError,
            r"old_logprob: expected the shape of new_logprob \(4,\), got \(3,\)",
        ),
        ({"mask": torch.ones(4, 1)}, ValueError, "mask: expected the shape"),
        ({"advantage": torch.zeros(4, dtype=torch.long)}, TypeError, "advantage: expected a floating dtype"),
        ({"old_logprob": None}, TypeError, "old_logprob: expected a tensor, got NoneType"),
        ({"denom": 0.0}, ValueError, "denom: expected a finite number > 0, got 0.0"),
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
    arguments = {
        "new_logprob": torch.zeros(4),
        "old_logprob": torch.zeros(4),
        "advantage": torch.zeros(4),
        "mask": torch.ones(4),
        "denom": 4.0,
    }
    with pytest.raises(error, match=message):
        ppo_loss(**(arguments | change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"ret": torch.zeros(3)}, ValueError, "ret: expected the shape of value"),
        ({"clip": 0.0}, ValueError, "clip: expected None or a number > 0"),
        ({"clip": 0.2}, ValueError, "clip: 0.2 needs old_value"),
        ({"denom": -1}, ValueError, "denom: expected a finite number > 0"),
    ],
)
def test_bad_value_input(change, error, message):
    arguments = {
        "value": torch.zeros(4),
        "old_value": None,
        "ret": torch.zeros(4),
        "mask": torch.ones(4),
        "denom": 4.0,
    }
    with pytest.raises(error, match=message):
        value_loss(**(arguments | change))
