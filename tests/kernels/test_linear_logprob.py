"""`linear_logprob` against a dense float64 computation: values, gradients, hostile inputs, costs."""

import pytest
import torch
from rlhf_kernels.linear import packed
from rlhf_kernels.linear_logprob import HeadLora, linear_logprob
from rlhf_kernels.runtime.registry import BackendUnavailableError
from rlhf_kernels.runtime.testing import assert_ok, tier1, tier3
from rlhf_kernels.vocab.logits import OUTPUTS, row_chunks

from .checks import REFERENCE, each, largest_allocation, same_bits
from .dense import DIFFERENTIABLE, dense, double, make

pytestmark = pytest.mark.usefixtures("backend")


ALL_OPTIONS = {"temperature": 0.7, "softcap": 3.0, "logit_scale": 1.3}


@REFERENCE
@each("name", DIFFERENTIABLE)
def test_gradcheck_every_output_and_input(name):
    hidden, weight, _ = make(5, 3, 7, dtype=torch.float64, grad=True)
    bias, A, B = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((7,), (2, 3), (7, 2)))
    target = torch.tensor([0, 6, -100, 3, 1])
    temperature = torch.tensor([0.5, 1.0, 1.5, 2.0, 0.8])
    options = ALL_OPTIONS | {"temperature": temperature}

    def f(hidden, weight, bias, A, B):
        lora = HeadLora(A, B, 0.7)
        return getattr(linear_logprob(hidden, weight, target, bias=bias, lora=lora, outputs=(name,), **options), name)

    assert torch.autograd.gradcheck(f, (hidden, weight, bias, A, B))


@REFERENCE
def test_gradcheck_with_the_gradient_ahead():
    hidden, weight, _ = make(5, 3, 7, dtype=torch.float64, grad=True)
    target = torch.tensor([0, 6, -100, 3, 1])
    bias, A, B = (torch.randn(s, dtype=torch.float64) for s in ((7,), (2, 3), (7, 2)))
    temperature = torch.tensor([0.5, 1.0, 1.5, 2.0, 0.8])
    options = ALL_OPTIONS | {"temperature": temperature, "bias": bias, "lora": HeadLora(A, B, 0.7)}

    def f(hidden):
        out = linear_logprob(
            hidden, weight.detach(), target, outputs=("logprob", "lse", "entropy"), detach=("entropy",), **options
        )
        assert not out.entropy.requires_grad
        return out.logprob, out.lse

    assert torch.autograd.gradcheck(f, (hidden,))


@each("with_options", [False, True])
def test_the_gradient_ahead_is_that_of_the_backward(with_options):
    hidden, weight, target = make(40, 16, 300)
    target[3] = -100
    gradient = torch.randn(40)
    options = {}
    if with_options:
        lora = HeadLora(torch.randn(2, 16), torch.randn(300, 2), 0.7)
        options = ALL_OPTIONS | {"temperature": torch.rand(40) + 0.5, "bias": torch.randn(300), "lora": lora}
    made = []
    for outputs, detach in ((("logprob", "entropy"), ("entropy",)), (("logprob", "entropy"), ())):
        h = hidden.clone().requires_grad_()
        linear_logprob(h, weight, target, outputs=outputs, detach=detach, **options).logprob.backward(gradient)
        made.append(h.grad)
    torch.testing.assert_close(*made, rtol=1e-4, atol=1e-5)
    assert (made[0][3] == 0).all()


@each(("detach", "error"), [(("lse",), ValueError), (("rank",), ValueError), ("logprob", TypeError)])
def test_detach_refuses(detach, error):
    with pytest.raises(error, match="detach: expected"):
        linear_logprob(*make(2, 3, 5), outputs=("logprob", "entropy"), detach=detach)


@each("scale", [1.0, 1e-3])
def test_tier1_fp32_values_and_gradients(scale):
    hidden, weight, target = make(33, 70, 517, scale=scale, grad=True)
    target[5] = -100
    A, B = torch.randn(4, 70), 0.1 * torch.randn(517, 4)
    bias = torch.randn(517)
    cotangent = {name: torch.randn(33) for name in DIFFERENTIABLE}

    def run(function, hidden, weight, bias, A, B):
        out = function(hidden, weight, bias, HeadLora(A, B, 0.5))
        loss = sum((cotangent[name].to(hidden.dtype) * out[name]).sum() for name in DIFFERENTIABLE)
        return out, torch.autograd.grad(loss, (hidden, weight))

    def ours(hidden, weight, bias, lora):
        return linear_logprob(hidden, weight, target, bias=bias, lora=lora, outputs=OUTPUTS, **ALL_OPTIONS)._asdict()

    def theirs(hidden, weight, bias, lora):
        return dense(hidden, weight, target, bias=bias, lora=lora, **ALL_OPTIONS)

    out, grads = run(ours, hidden, weight, bias, A, B)
    out32, grads32 = run(theirs, hidden, weight, bias, A, B)
    out64, grads64 = run(theirs, *double(hidden, weight, bias, A, B))
    for name in OUTPUTS:
        assert out[name].dtype == torch.float32
        assert_ok(tier1(out[name], out64[name], out32[name]), name)
    for name, g, g64, g32 in zip(("hidden", "weight"), grads, grads64, grads32, strict=True):
        assert_ok(tier1(g, g64, g32), name)


@each("vocab", [1, 17, 32001])
@each("n", [0, 1, 2, 15, 127, 129])
def test_ragged_sizes(n, vocab):
    hidden, weight, target = make(n, 9, vocab)
    if n:
        target[-1] = vocab - 1  # the last, partial block of columns
    out = linear_logprob(hidden, weight, target, outputs=("logprob", "entropy"))
    exact = dense(*double(hidden, weight), target)
    plain = dense(hidden, weight, target)
    for name in ("logprob", "entropy"):
        assert getattr(out, name).shape == (n,)
        assert_ok(tier1(getattr(out, name), exact[name], plain[name]), name)


def test_several_row_chunks_with_gradients():
    n, vocab = 75, 129920
    assert len(list(row_chunks(n, vocab))) == 3
    hidden, weight, target = make(n, 4, vocab, grad=True)
    temperature = torch.rand(n) + 0.5  # must be cut at the same borders as the rows
    cotangent = torch.randn(n)

    def gradients(function, hidden, weight):
        logprob = function(hidden, weight, target, temperature=temperature)
        logprob = logprob["logprob"] if isinstance(logprob, dict) else logprob.logprob
        return torch.autograd.grad(logprob, (hidden, weight), cotangent.to(hidden.dtype))

    exact, plain = gradients(dense, *double(hidden, weight)), gradients(dense, hidden, weight)
    for name, g, g64, g32 in zip(
        ("hidden", "weight"), gradients(linear_logprob, hidden, weight), exact, plain, strict=True
    ):
        assert_ok(tier1(g, g64, g32), name)


@each("rows", ["peaked", "uniform", "all_minus_200", "all_below_zero", "all_equal_plus"])
def test_hostile_rows(rows):
    hidden, weight, target = make(15, 8, 257)
    if rows == "peaked":
        hidden = 30 * hidden
    elif rows == "all_below_zero":
        hidden, weight = hidden.abs(), -weight.abs()
        target[::2] = (hidden @ weight.T).argmax(-1)[::2]
    else:
        hidden = torch.zeros_like(hidden)
        hidden[:, 0] = {"uniform": 0.0, "all_minus_200": -200.0, "all_equal_plus": 500.0}[rows]
        weight[:, 0] = 1.0
    out = linear_logprob(hidden, weight, target, outputs=OUTPUTS)
    exact, plain = dense(*double(hidden, weight), target), dense(hidden, weight, target)
    for name in OUTPUTS:
        assert_ok(tier1(getattr(out, name), exact[name], plain[name]), name)


def test_masked_vocabulary_columns_have_no_nan():
    hidden, weight, target = make(6, 4, 9, grad=True)
    bias = torch.zeros(9)
    bias[7:] = -torch.inf  # padding columns of the head
    target.clamp_max_(6)
    out = linear_logprob(hidden, weight, target, bias=bias, outputs=("logprob", "entropy"))
    short = linear_logprob(hidden, weight[:7], target, outputs=("logprob", "entropy"))
    torch.testing.assert_close(out.logprob, short.logprob)
    torch.testing.assert_close(out.entropy, short.entropy)
    grad = torch.autograd.grad((out.logprob + out.entropy).sum(), hidden)[0]
    torch.testing.assert_close(grad, torch.autograd.grad((short.logprob + short.entropy).sum(), hidden)[0])


def test_strided_and_transposed_inputs():
    base_h, base_w, target = make(15, 16, 34)
    hidden, weight = base_h[::2, ::2], base_w.T.contiguous().T[::2, ::2]
    wide_target = torch.stack([target, target.flip(0)], 1).clamp_max(16)
    strided = linear_logprob(hidden, weight, wide_target[::2, 0], outputs=OUTPUTS)
    packed = linear_logprob(hidden.contiguous(), weight.contiguous(), wide_target[::2, 0].contiguous(), outputs=OUTPUTS)
    for a, b in zip(strided, packed, strict=True):
        torch.testing.assert_close(a, b)


@each("shift", [0.0, 200.0])  # exp(200) overflows: 0 · inf must not appear in ignored rows
def test_ignored_rows_may_hold_nan(shift):
    hidden, weight, target = make(6, 5, 11)
    target[torch.tensor([1, 4])] = -100
    clean = hidden.clone()
    hidden[1], hidden[4] = torch.nan, torch.inf
    temperature = torch.ones(6)
    temperature[1] = torch.nan
    bias = torch.full((11,), shift)
    hidden.requires_grad_()
    weight.requires_grad_()
    out = linear_logprob(hidden, weight, target, bias=bias, temperature=temperature, outputs=OUTPUTS)
    for x in out:
        assert x[1] == 0
        assert x[4] == 0
    grads = torch.autograd.grad(sum(getattr(out, n).sum() for n in DIFFERENTIABLE), (hidden, weight))
    keep = target != -100
    expected = linear_logprob(clean[keep], weight, target[keep], bias=bias, outputs=OUTPUTS)
    d_weight = torch.autograd.grad(sum(getattr(expected, n).sum() for n in DIFFERENTIABLE), weight)[0]
    assert (grads[0][~keep] == 0).all()
    torch.testing.assert_close(grads[1], d_weight, rtol=1e-4, atol=1e-5)


def test_all_rows_ignored():
    hidden, weight, _ = make(3, 4, 5, grad=True)
    out = linear_logprob(hidden, weight, torch.full((3,), -1), ignore_index=-1, outputs=OUTPUTS)
    assert all((x == 0).all() for x in out)
    grads = torch.autograd.grad(out.logprob.sum(), (hidden, weight))
    assert all((g == 0).all() for g in grads)


def test_top1_first_maximum_wins():
    weight = torch.tensor([[1.0], [2.0], [2.0]])
    out = linear_logprob(torch.ones(3, 1), weight, torch.tensor([0, 1, 2]), outputs=("is_top1",))
    assert out.is_top1.tolist() == [0.0, 1.0, 0.0]
    assert not out.is_top1.requires_grad
    assert out.logprob is None


def test_bf16_logits_are_never_rounded():
    hidden, weight, target = make(64, 128, 1000, dtype=torch.bfloat16, grad=True)
    out = linear_logprob(hidden, weight, target, outputs=("logprob", "entropy"))
    exact = dense(*double(hidden, weight), target)
    upcast = dense(hidden.float(), weight.float(), target)
    rounded = dense(hidden, weight, target)
    for name in ("logprob", "entropy"):
        assert_ok(tier1(getattr(out, name), exact[name], upcast[name]), name)
    # The same criterion refuses logits that went through bf16
    assert not tier1(rounded["logprob"].float(), exact["logprob"], upcast["logprob"]).ok
    cotangent = torch.randn(64)
    grads = torch.autograd.grad(out.logprob, (hidden, weight), cotangent)
    eager = torch.autograd.grad(rounded["logprob"], (hidden, weight), cotangent.bfloat16())
    hidden64, weight64 = double(hidden, weight)
    true = torch.autograd.grad(dense(hidden64, weight64, target)["logprob"], (hidden64, weight64), cotangent.double())
    for g, g64, g16 in zip(grads, true, eager, strict=True):
        assert g.dtype == torch.bfloat16
        assert_ok(tier3(g, g64, g16))


def test_autocast_does_not_change_a_bit():
    hidden, weight, target = make(8, 32, 100, grad=True)
    plain = linear_logprob(hidden, weight, target).logprob
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = linear_logprob(hidden, weight, target).logprob
        cast_grad = torch.autograd.grad(cast.sum(), hidden)[0]
    assert torch.equal(plain, cast)
    assert torch.equal(cast_grad, torch.autograd.grad(plain.sum(), hidden)[0])


@pytest.fixture
def no_packed_copies():
    """A kept copy of W is as large as dW."""
    packed.set_budget(0)
    yield
    packed.set_budget(None)


def test_frozen_weight_has_no_dw_and_logits_never_exist(no_packed_copies):
    hidden, weight, target = make(4, 512, 1024, grad=True)  # dW: 2 MiB, one tile: 16 KiB
    frozen = weight.detach()
    size = weight.numel() * 4
    trained = largest_allocation(lambda: linear_logprob(hidden, weight, target).logprob.sum().backward())
    assert trained >= size
    for outputs in (("logprob",), ("logprob", "entropy")):  # the gradient ahead, and the one by recomputing

        def train(outputs=outputs):
            out = linear_logprob(hidden, frozen, target, outputs=outputs)
            sum(getattr(out, name).sum() for name in outputs).backward()

        assert largest_allocation(train) < size, outputs
    # [N, V] would be 64 MiB; a tile is 16 MiB
    hidden, weight, target = make(4096, 2, 4096, grad=True)
    largest = largest_allocation(lambda: linear_logprob(hidden, weight, target).logprob.sum().backward())
    assert largest <= 2**22 * 4


def test_only_the_inputs_that_need_it_get_a_gradient():
    hidden, weight, target = make(4, 3, 5)
    lora = HeadLora(torch.randn(2, 3, requires_grad=True), torch.randn(5, 2), 1.0)
    linear_logprob(hidden, weight, target, lora=lora).logprob.sum().backward()
    assert lora.A.grad is not None
    assert hidden.grad is weight.grad is lora.B.grad is None


def test_same_inputs_same_bits():
    hidden, weight, target = make(129, 17, 32001)
    first = linear_logprob(hidden, weight, target, outputs=OUTPUTS)
    second = linear_logprob(hidden.clone(), weight.clone(), target, outputs=OUTPUTS)
    same_bits(first, second)


@each(
    ("change", "error", "message"),
    [
        ({"target": torch.tensor([0, 5])}, ValueError, "target: expected values in"),
        ({"target": torch.tensor([0, -1])}, ValueError, "target: expected values in"),
        ({"target": torch.tensor([0])}, ValueError, r"target: expected shape \[2\]"),
        ({"target": torch.tensor([0, 1], dtype=torch.int32)}, TypeError, "target: expected int64"),
        ({"weight": torch.randn(5, 4)}, ValueError, "weight: expected shape"),
        ({"hidden": torch.randn(3)}, ValueError, "hidden: expected shape"),
        ({"bias": torch.randn(4)}, ValueError, "bias: expected shape"),
        ({"temperature": 0.0}, ValueError, "temperature: expected a finite number"),
        ({"temperature": torch.tensor([1.0, -1.0])}, ValueError, "temperature: expected values > 0"),
        ({"temperature": torch.ones(2, requires_grad=True)}, ValueError, "temperature: not differentiable"),
        ({"softcap": -1.0}, ValueError, "softcap"),
        ({"logit_scale": float("nan")}, ValueError, "logit_scale"),
        ({"outputs": ("logits",)}, ValueError, "outputs: expected one or more of"),
        ({"outputs": "logprob"}, TypeError, "outputs: expected a tuple"),
        ({"lora": HeadLora(torch.randn(2, 3), torch.randn(5, 3), 1.0)}, ValueError, "lora.B"),
        ({"backend": "cuda"}, BackendUnavailableError, "cuda"),
    ],
)
def test_bad_arguments_are_named(change, error, message):
    arguments = {"hidden": torch.randn(2, 3), "weight": torch.randn(5, 3), "target": torch.tensor([0, 1])} | change
    with pytest.raises(error, match=message):
        linear_logprob(**arguments)


def test_entropy_gradient_at_minus_infinity_is_zero():
    hidden, weight, target = make(3, 4, 6, grad=True)
    bias = torch.tensor([0.0, 0.0, -torch.inf, 0.0, 0.0, -torch.inf])
    target = torch.tensor([0, 1, 3])
    out = linear_logprob(hidden, weight, target, bias=bias, outputs=("logprob", "entropy"))
    d_hidden, d_weight = torch.autograd.grad((out.entropy * 1.5e6).sum(), (hidden, weight))
    assert d_hidden.isfinite().all()
    assert (d_weight[[2, 5]] == 0).all()
    assert (d_weight[0] != 0).any()
