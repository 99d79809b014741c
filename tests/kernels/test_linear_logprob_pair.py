"""`linear_logprob_pair` against a dense float64 computation and against two calls of `linear_logprob`."""

import pytest
import torch
from rlhf_kernels.linear_logprob import HeadLora, linear_logprob
from rlhf_kernels.linear_logprob_pair import PairOutputs, linear_logprob_pair
from rlhf_kernels.runtime.testing import assert_ok, tier1

from .checks import REFERENCE, each
from .dense import heated, logits

pytestmark = pytest.mark.usefixtures("backend")


def dense(hidden_a, hidden_r, weight, target, *, temperature=1.0, lora=None, **head):
    a, r = (
        torch.log_softmax(heated(logits(hidden, weight, lora=own, **head), temperature), -1)
        for hidden, own in ((hidden_a, lora), (hidden_r, None))
    )
    index = target.clamp_min(0)[:, None]
    rows = (a.gather(1, index)[:, 0], r.gather(1, index)[:, 0], (a.exp() * (a - r)).sum(-1))
    return PairOutputs(*(torch.where(target != -100, x, 0.0) for x in (*rows, -(a.exp() * a).sum(-1))))


def make(n, h, v, *, scale=1.0, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    hidden_a = (scale * torch.randn(n, h, generator=g)).to(dtype).requires_grad_()
    hidden_r = (hidden_a.detach() + 0.3 * scale * torch.randn(n, h, generator=g).to(dtype)).detach()
    return (hidden_a, hidden_r, torch.randn(v, h, generator=g).to(dtype), torch.randint(0, v, (n,), generator=g))


@REFERENCE
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


@REFERENCE
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


def test_the_gradient_ahead_is_that_of_the_backward():
    hidden_a, hidden_r, weight, target = make(40, 16, 300, scale=0.3)
    target[3] = -100
    lora = HeadLora(torch.randn(2, 16), 0.1 * torch.randn(300, 2), 0.7)
    options = {"temperature": torch.rand(40) + 0.5, "softcap": 3.0, "logit_scale": 1.3, "lora": lora}
    on_logprob, on_kl = torch.randn(2, 40)
    made = []
    for detach in (("entropy",), ()):
        out = linear_logprob_pair(hidden_a, hidden_r, weight, target, detach=detach, **options)
        loss = (on_logprob * out.logprob_a).sum() + (on_kl * out.kl).sum()
        made.append(torch.autograd.grad(loss, hidden_a)[0])
    torch.testing.assert_close(*made, rtol=1e-4, atol=1e-5)


@each("scale", [1.0, 1e-3])
@each(("n", "vocab"), [(1, 1), (2, 17), (127, 517), (15, 32001)])
def test_tier1_values_and_gradient(n, vocab, scale):
    inputs = make(n, 20, vocab, scale=scale)
    target = inputs[3]
    cotangent = torch.randn(3, n)

    def run(function, hidden_a, hidden_r, weight):
        out = function(hidden_a, hidden_r, weight, target, temperature=0.8, softcap=5.0)
        loss = sum((c.to(hidden_a.dtype) * x).sum() for c, x in zip(cotangent, (out[0], out[2], out[3]), strict=True))
        return (*out, torch.autograd.grad(loss, hidden_a)[0])

    doubles = [x.detach().double() for x in inputs[:3]]
    exact = run(dense, doubles[0].requires_grad_(), *doubles[1:])
    ours, plain = run(linear_logprob_pair, *inputs[:3]), run(dense, *inputs[:3])
    for name, x, x64, x32 in zip((*PairOutputs._fields, "d_hidden"), ours, exact, plain, strict=True):
        # The KL of nearly equal rows is a difference of numbers near 1: judge it on their scale
        if name == "kl":
            assert (x.double() - x64).abs().max() <= 4 * (x32.double() - x64).abs().max() + 1e-6
        else:
            assert_ok(tier1(x, x64, x32), name)


def test_same_bits_as_two_single_sweeps():
    hidden_a, hidden_r, weight, target = make(129, 8, 32001)
    target[3] = -100
    lora = HeadLora(torch.randn(2, 8), torch.randn(32001, 2), 0.3)
    pair = linear_logprob_pair(hidden_a, hidden_r, weight, target, lora=lora, temperature=0.9)
    a = linear_logprob(hidden_a, weight, target, lora=lora, temperature=0.9, outputs=("logprob", "entropy"))
    r = linear_logprob(hidden_r, weight, target, temperature=0.9)
    assert torch.equal(pair.logprob_a, a.logprob)
    assert torch.equal(pair.entropy, a.entropy)
    assert torch.equal(pair.logprob_r, r.logprob)


def test_equal_rows_have_zero_kl_and_no_gradient():
    hidden_a, _, weight, target = make(15, 8, 100)
    out = linear_logprob_pair(hidden_a, hidden_a.detach(), weight, target)
    assert (out.kl == 0).all()
    assert (torch.autograd.grad(out.kl.sum(), hidden_a)[0] == 0).all()


def test_all_logits_far_below_zero():
    hidden_a, hidden_r, weight, target = make(15, 8, 257)
    low = torch.full((257,), -200.0)
    ours = linear_logprob_pair(hidden_a, hidden_r, weight, target, bias=low)
    wide = (x.detach().double() for x in (hidden_a, hidden_r, weight))
    for x, y in zip(ours, dense(*wide, target, bias=low.double()), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-4)


def test_temperature_acts_on_both_sides():
    hidden_a, hidden_r, weight, target = make(8, 6, 40)
    temperature = torch.rand(8) + 0.5
    ours = linear_logprob_pair(hidden_a, hidden_r, weight, target, temperature=temperature)
    scaled = linear_logprob_pair(hidden_a / temperature[:, None], hidden_r / temperature[:, None], weight, target)
    for x, y in zip(ours, scaled, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def test_ignored_rows_may_hold_nan_on_either_side():
    hidden_a, hidden_r, weight, target = make(5, 4, 9)
    target[1], target[3] = -100, -100
    with torch.no_grad():
        hidden_a[1] = torch.nan
    hidden_r[3] = torch.nan
    out = linear_logprob_pair(hidden_a, hidden_r, weight, target)
    assert all((x[[1, 3]] == 0).all() and torch.isfinite(x).all() for x in out)
    grad = torch.autograd.grad((out.logprob_a + out.kl + out.entropy).sum(), hidden_a)[0]
    assert (grad[[1, 3]] == 0).all()
    assert torch.isfinite(grad).all()


def test_padded_vocabulary_and_bf16():
    hidden_a, hidden_r, weight, target = make(15, 64, 101, dtype=torch.bfloat16)
    bias = torch.zeros(101)
    bias[90:] = -torch.inf
    target.clamp_max_(89)
    ours = linear_logprob_pair(hidden_a, hidden_r, weight, target, bias=bias)
    exact = dense(hidden_a.detach().double(), hidden_r.double(), weight[:90].double(), target)
    for x, y in zip(ours, exact, strict=True):
        assert x.dtype == torch.float32
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)
    assert torch.autograd.grad(ours.kl.sum(), hidden_a)[0].dtype == torch.bfloat16


def test_empty_batch():
    out = linear_logprob_pair(
        torch.zeros(0, 4), torch.zeros(0, 4), torch.zeros(3, 4), torch.zeros(0, dtype=torch.int64)
    )
    assert all(x.shape == (0,) for x in out)


@each("name", ["hidden_r", "weight", "bias", "lora.A", "lora.B"])
def test_only_hidden_a_may_require_grad(name):
    hidden_a, hidden_r, weight, target = make(3, 4, 5)
    tensors = {
        "hidden_r": hidden_r,
        "weight": weight,
        "bias": torch.zeros(5),
        "lora.A": torch.zeros(2, 4),
        "lora.B": torch.zeros(5, 2),
    }
    tensors[name].requires_grad_()

    def call():
        return linear_logprob_pair(
            hidden_a,
            hidden_r,
            weight,
            target,
            bias=tensors["bias"],
            lora=HeadLora(tensors["lora.A"], tensors["lora.B"], 1.0),
        )

    with pytest.raises(ValueError, match=f"{name}: expected one that needs no gradient"):
        call()
    with torch.no_grad():
        assert call().kl.shape == (3,)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="hidden_r: expected shape"):
        linear_logprob_pair(torch.zeros(3, 4), torch.zeros(2, 4), torch.zeros(5, 4), torch.zeros(3, dtype=torch.int64))
