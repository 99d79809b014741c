"""`linear_logprob_pair` against a dense float64 computation and against two calls of `linear_logprob`."""

import pytest
import torch
from rlhf_kernels import HeadLora, PairOutputs, linear_logprob, linear_logprob_pair
from rlhf_kernels.runtime.testing import assert_ok, tier1, tier3

from .checks import alike, each, same_bits
from .dense import dense as dense_logprob, double, heated, logits, red_zone


def dense(hidden_a, hidden_r, weight, target, *, temperature=1.0, lora=None, **head):
    a, r = (
        torch.log_softmax(heated(logits(hidden, weight, lora=own, **head), temperature), -1)
        for hidden, own in ((hidden_a, lora), (hidden_r, None))
    )
    index = target.clamp_min(0)[:, None]
    rows = (a.gather(1, index)[:, 0], r.gather(1, index)[:, 0], (a.exp() * (a - r)).sum(-1))
    return PairOutputs(*(torch.where(target != -100, x, 0.0) for x in (*rows, -(a.exp() * a).sum(-1))))


def make(n, h, v, *, scale=1.0, dtype=torch.float32, apart=0.3):
    """hidden_a, which needs a gradient, hidden_r, weight and target."""
    g, where = torch.Generator().manual_seed(0), torch.get_default_device()
    hidden_a, more, weight = (
        s * torch.randn(*shape, generator=g, device="cpu")
        for s, shape in ((scale, (n, h)), (apart * scale, (n, h)), (1, (v, h)))
    )
    target = torch.randint(0, v, (n,), generator=g, device="cpu").to(where)
    target[-1:] = v - 1
    a, r, w = (x.to(where, dtype) for x in (hidden_a, hidden_a + more, weight))
    return a.requires_grad_(), r, w, target


def run(function, cotangent, hidden_a, *rest, **options):
    """Outputs and the gradient of the outputs that `cotangent` [k, n] is for: logprob_a, kl, entropy in this order."""
    out = function(hidden_a, *rest, **options)
    wanted = (out[0], out[2], out[3])[: len(cotangent)]
    loss = sum((c.to(x.dtype) * x).sum() for c, x in zip(cotangent, wanted, strict=True))
    return (*out, torch.autograd.grad(loss, hidden_a)[0])


NAMES = (*PairOutputs._fields, "d_hidden")
EVERY_DETACH = ((), ("entropy",), ("kl", "entropy"))


def judge(got, exact, plain):
    for name, x, x64, x32 in zip(NAMES, got, exact, plain, strict=True):
        # The KL of nearly equal rows is a difference of numbers near 1: judge it on their scale
        if name == "kl":
            assert (x.double() - x64).abs().max() <= 4 * (x32.double() - x64).abs().max() + 1e-6
        else:
            assert_ok(tier1(x, x64, x32), name)


def test_gradcheck_every_output():
    hidden_a, hidden_r, weight, _ = make(5, 3, 7, dtype=torch.float64)
    target = torch.tensor([0, 6, -100, 3, 1])
    options = {
        "bias": torch.randn(7, dtype=torch.float64),
        "lora": HeadLora(torch.randn(2, 3, dtype=torch.float64), torch.randn(7, 2, dtype=torch.float64), 0.7),
        "temperature": torch.tensor([0.5, 1.0, 1.5, 2.0, 0.8]),
        "softcap": 3.0,
        "logit_scale": 1.3,
    }
    for name in ("logprob_a", "kl", "entropy"):
        assert torch.autograd.gradcheck(
            lambda x, name=name: getattr(linear_logprob_pair(x, hidden_r, weight, target, **options), name), (hidden_a,)
        ), name


@each("detach", [("entropy",), ("kl", "entropy")])
def test_gradcheck_with_the_gradient_ahead(detach):
    hidden_a, hidden_r, weight, target = (x.double() if x.is_floating_point() else x for x in make(5, 3, 7))
    target[2] = -100
    lora = HeadLora(torch.randn(2, 3, dtype=torch.float64), torch.randn(7, 2, dtype=torch.float64), 0.7)
    options = {"temperature": 0.7, "softcap": 3.0, "logit_scale": 1.3, "lora": lora, "detach": detach}

    def f(x):
        out = linear_logprob_pair(x, hidden_r, weight, target, **options)
        assert not out.entropy.requires_grad
        return tuple(getattr(out, name) for name in ("logprob_a", "kl") if name not in detach)

    assert torch.autograd.gradcheck(f, (hidden_a.detach().requires_grad_(),))


@each("scale", [1.0, 1e-3])
@each("detach", EVERY_DETACH)
def test_tier1_with_every_option(backend, scale, detach):
    """The gradient made again, and ahead."""
    n, v = 70, 300 if backend == "triton" else 517
    inputs = make(n, 37, v, scale=scale)
    inputs[3][5] = -100
    bias, A, B = (torch.randn(s) for s in ((v,), (4, 37), (v, 4)))
    cotangent = torch.randn(3 - len(detach), n)

    def options(dtype):
        lora = HeadLora(A.to(dtype), 0.1 * B.to(dtype), 0.5)
        return {"temperature": torch.linspace(0.5, 1.5, n), "softcap": 5.0, "bias": bias.to(dtype), "lora": lora}

    got = run(linear_logprob_pair, cotangent, *inputs, **options(torch.float32), detach=detach)
    exact = run(dense, cotangent, *double(*inputs), **options(torch.float64))
    judge(got, exact, run(dense, cotangent, *inputs, **options(torch.float32)))


def test_ragged_sizes(backend):
    sizes = [(1, 1), (2, 17), (127, 1), (129, 300), (5, 2100)]
    for n, v in sizes if backend == "triton" else [*sizes, (127, 517), (15, 32001)]:
        inputs = make(n, 20, v)
        for detach in EVERY_DETACH[:2]:
            cotangent = torch.randn(3 - len(detach), n)
            *got, d_hidden = run(linear_logprob_pair, cotangent, *inputs, detach=detach)
            exact, plain = run(dense, cotangent, *double(*inputs)), run(dense, cotangent, *inputs)
            if v == 1:  # p = 1 and no gradient; products that are made again in another order give 1 ± their rounding
                assert d_hidden.abs().max() <= 1e-5 * cotangent.abs().max() * inputs[2].abs().max()
                d_hidden = plain[4]
            judge((*got, d_hidden), exact, plain)


@each("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_tier3(backend, dtype):
    inputs = make(65, 48, 300 if backend == "triton" else 1100, dtype=dtype, scale=0.3)
    floats = [x.detach().float() if x.is_floating_point() else x for x in inputs]
    floats[0].requires_grad_()
    for detach in EVERY_DETACH:
        cotangent = torch.randn(3 - len(detach), 65)
        got = run(linear_logprob_pair, cotangent, *inputs, detach=detach)
        exact, plain = run(dense, cotangent, *double(*inputs)), run(dense, cotangent, *floats)
        judge((*got[:4], plain[4]), exact, plain)
        assert got[0].dtype == torch.float32
        assert got[4].dtype == dtype
        assert_ok(tier3(got[4], exact[4], run(dense, cotangent, *inputs)[4]), f"d_hidden, {detach} detached")


@each("rows", ["peaked", "uniform", "all_minus_200", "rising", "both_rising", "shifted"])
def test_hostile_rows(backend, rows):
    v = 2000 if backend == "cpu" else 300
    hidden_a, hidden_r, weight, target = make(15, 20, v)
    with torch.no_grad():
        if rows == "peaked":
            hidden_a *= 30
        elif rows == "shifted":  # every logit of r is 50 higher: nothing but the centre keeps D's digits
            hidden_r, weight[:, 0] = hidden_a.detach() + 0.1 * torch.randn_like(hidden_a), 1.0
            hidden_r[:, 0] += 50.0
        else:  # rising: every block has a higher maximum than the one before
            hidden_a[:, 1:], hidden_r[:, 1:] = 0.0, 0.0
            hidden_a[:, 0], hidden_r[:, 0] = (1.0, -1.0) if rows == "rising" else (1.0, 2.0)
            weight[:, 0] = {"uniform": 0.0, "all_minus_200": -200.0}.get(rows, torch.linspace(-60, 60, v))
    inputs, cotangent = (hidden_a, hidden_r, weight, target), torch.randn(2, 15)
    for detach in (("entropy",), ()):
        got = run(linear_logprob_pair, cotangent, *inputs, detach=detach)
        exact, plain = run(dense, cotangent, *double(*inputs)), run(dense, cotangent, *inputs)
        for name, x, x64, x32 in zip(NAMES, got, exact, plain, strict=True):
            # Sums of terms that cancel, judged on the scale of the terms: logits, and for d_hidden logits · W
            scale = max(exact[2].max(), 60.0) * weight.abs().max() if name == "d_hidden" else 60.0
            allowed = 4 * (x32.double() - x64).abs().max() + 1e-6 * (1.0 + x64.abs().max() + scale)
            if name == "d_hidden":
                # Products made again in another order round otherwise than those of lse: p is off by that, relative to
                # itself, and d_hidden by that times W. Their rounding is the error that fp32 makes in logprob
                rounding = (plain[0].double() - exact[0]).abs().max()
                allowed += 4 * rounding * cotangent.abs().max() * weight.abs().max()
            assert (x.double() - x64).abs().max() <= allowed, (name, detach)


def test_equal_rows_have_no_kl_and_masked_columns_no_nan(backend):
    hidden_a, hidden_r, weight, target = make(20, 20, 300)
    same = linear_logprob_pair(hidden_a, hidden_a.detach(), weight, target)
    assert (same.kl == 0).all()
    assert torch.equal(same.logprob_a, same.logprob_r)
    assert (torch.autograd.grad(same.kl.sum(), hidden_a)[0].abs() <= 1e-6).all()
    bias = torch.zeros(300)
    bias[:130], bias[290:] = -torch.inf, -torch.inf
    target = 130 + target % 160
    for detach in ((), ("entropy",)):
        out = linear_logprob_pair(hidden_a, hidden_r, weight, target, bias=bias, detach=detach)
        short = dense(hidden_a, hidden_r, weight[130:290], target - 130)
        for x, y in zip(out, short, strict=True):
            torch.testing.assert_close(x, y)
        got = torch.autograd.grad((out.logprob_a + out.kl).sum(), hidden_a)[0]
        torch.testing.assert_close(got, torch.autograd.grad((short.logprob_a + short.kl).sum(), hidden_a)[0])


def test_bits_are_those_of_linear_logprob(backend):
    for n, h, v in ((16, 20, 300), (70, 20, 300)) if backend == "triton" else ((16, 20, 517), (129, 8, 32001)):
        hidden_a, hidden_r, weight, target = make(n, h, v)
        target[3] = -100
        lora = HeadLora(torch.randn(3, h), torch.randn(v, 3), 0.5)
        options = {"temperature": 0.8, "softcap": 4.0}
        a = linear_logprob(hidden_a.detach(), weight, target, outputs=("logprob", "entropy"), lora=lora, **options)
        r = linear_logprob(hidden_r, weight, target, **options)
        for detach in ((), ("entropy",)):
            pair = linear_logprob_pair(hidden_a, hidden_r, weight, target, lora=lora, detach=detach, **options)
            same_bits((pair.logprob_a, pair.entropy, pair.logprob_r), (a.logprob, a.entropy, r.logprob))


def test_ignored_rows_hold_nan_between_red_zones(backend):
    hidden_a, hidden_r, weight, target = make(70, 20, 301)
    ignored = torch.tensor([1, 4, 69])
    target[ignored] = -100
    for detach in ((), ("entropy",)):
        cotangent = torch.randn(3 - len(detach), 70)
        clean = run(linear_logprob_pair, cotangent, hidden_a, hidden_r, weight, target, detach=detach)
        dirty_a, dirty_r = hidden_a.detach().clone(), hidden_r.clone()
        dirty_a[1], dirty_a[4], dirty_r[4], dirty_r[69] = torch.nan, torch.inf, torch.nan, -torch.inf
        zoned = [red_zone(x) for x in (dirty_a.requires_grad_(), dirty_r, weight)]
        got = run(linear_logprob_pair, cotangent, *zoned, target, detach=detach)
        alike(backend, got, clean, rtol=1e-5, atol=1e-6)
        assert all((x[ignored] == 0).all() for x in got)


def test_the_wider_side_is_not_rounded(backend):
    hidden, _, weight, target = make(20, 24, 300, dtype=torch.bfloat16)
    other = hidden.detach().float() + 0.01 * torch.randn(20, 24)  # what bf16 would lose
    pair = linear_logprob_pair(hidden, other, weight, target)
    exact = dense_logprob(other.double(), weight.double(), target)["logprob"]
    torch.testing.assert_close(pair.logprob_r.double(), exact, rtol=1e-5, atol=1e-5)


def test_empty_batch(backend):
    inputs = make(0, 20, 30)
    for detach in ((), ("entropy",)):
        got = run(linear_logprob_pair, torch.zeros(2, 0), *inputs, detach=detach)
        assert [x.shape for x in got] == [(0,)] * 4 + [(0, 20)]


@each("name", ["hidden_r", "weight", "bias", "lora.A", "lora.B"])
def test_only_hidden_a_may_require_grad(name):
    hidden_a, hidden_r, weight, target = make(3, 4, 5)
    bias, A, B = torch.zeros(5), torch.zeros(2, 4), torch.zeros(5, 2)
    tensors = {"hidden_r": hidden_r, "weight": weight, "bias": bias, "lora.A": A, "lora.B": B}
    tensors[name].requires_grad_()

    def call():
        return linear_logprob_pair(hidden_a, hidden_r, weight, target, bias=bias, lora=HeadLora(A, B, 1.0))

    with pytest.raises(ValueError, match=f"{name}: expected one that needs no gradient"):
        call()
    with torch.no_grad():
        assert call().kl.shape == (3,)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="hidden_r: expected shape"):
        linear_logprob_pair(torch.zeros(3, 4), torch.zeros(2, 4), torch.zeros(5, 4), torch.zeros(3, dtype=torch.int64))
