"""`linear_logprob` against a dense float64 computation: values, gradients, hostile inputs, costs.

A test with `backend` is a property of every one; triton/test_linear_logprob.py has those of the Triton kernels' paths.
"""

import itertools
import math
import resource
import subprocess
import sys

import pytest
import torch
from rlhf_kernels import BackendUnavailableError, HeadLora, linear_logprob, linear_logprob_pair, linear_ppo_loss, sample
from rlhf_kernels.linear import packed
from rlhf_kernels.runtime.testing import assert_ok, tier1, tier3
from rlhf_kernels.vocab.logits import OUTPUTS, row_chunks

from .checks import alike, each, in_any_company, largest_allocation, needs_native, same_bits, threads_change_no_bit
from .dense import DIFFERENTIABLE, dense, double, every_gradient, make, make_all, red_zone, surrounded, turned

ALL_OPTIONS = {"temperature": 0.7, "softcap": 3.0, "logit_scale": 1.3}
INPUTS = ("hidden", "weight", "bias", "A", "B")


def ours(*args, **options):
    return linear_logprob(*args, **{"outputs": OUTPUTS} | options)


def assert_tier1(out, exact, plain, names):
    for name in names:
        assert out[name].dtype == torch.float32
        assert_ok(tier1(out[name], exact[name], plain[name]), name)


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
def test_the_gradient_ahead_is_that_of_the_backward(backend, with_options):
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


SHAPES = [(1, 3, 2), (2, 8, 17), (2, 17, 17), (15, 64, 511), (33, 70, 512), (127, 33, 513), (129, 96, 1200)]
SHAPES += [(40, 560, 100), (300, 20, 40)]  # the depth, and the rows of a gradient of weights, in several pieces


@each(("options", "scale"), [("none", 1.0), ("all", 1e-3), ("temperatures", 1.0)])
def test_tier1_of_every_output_input_and_option(backend, options, scale):
    if backend == "triton" and options == "none":
        pytest.skip("the interpreter is slow")
    for n, h, v in [(70, 37, 300)] if backend == "triton" else SHAPES:
        tensors, target = make_all(n, h, v, scale=scale, grad=True)
        if n > 6:
            target[5] = -100
        given = {} if options == "none" else ALL_OPTIONS | {}
        if options == "temperatures":
            given["temperature"] = torch.rand(n) + 0.5
        tensors = tensors[:2] if options == "none" else tensors
        cotangent = {name: torch.randn(n) for name in DIFFERENTIABLE}
        out, grads = every_gradient(ours, tensors, target, cotangent, **given)
        exact, grads64 = every_gradient(dense, double(*tensors), target, cotangent, **given)
        plain, grads32 = every_gradient(dense, tensors, target, cotangent, **given)
        assert_tier1(out, exact, plain, OUTPUTS)
        for name, g, g64, g32 in zip(INPUTS, grads, grads64, grads32, strict=False):
            assert_ok(tier1(g, g64, g32), f"d_{name} of {n}, {h}, {v}")


TRITON_SIZES = [(1, 1), (129, 1), (2, 17), (127, 17), (15, 517), (1, 4131), (15, 1031)]


def test_ragged_sizes(backend):
    """With a gradient that is made in the forward."""
    wanted = ("logprob", "entropy", "lse")
    sizes = [*itertools.product([0, 1, 2, 15, 127, 129], [1, 17]), (2, 32001), (15, 32001)]
    for n, v in TRITON_SIZES if backend == "triton" else sizes:
        hidden, weight, target = make(n, 20, v)
        tensors = hidden.requires_grad_(), weight
        cotangent = {"logprob": torch.randn(n), "lse": torch.ones(n)}
        out, (grad,) = every_gradient(ours, tensors, target, cotangent, outputs=wanted, detach=("entropy",))
        exact, (g64,) = every_gradient(dense, double(*tensors), target, cotangent)
        plain, (g32,) = every_gradient(dense, tensors, target, cotangent)
        assert_tier1(out, exact, plain, wanted)
        assert_ok(tier1(grad, g64, g32), f"d_hidden of {n}, {v}")


def test_several_row_chunks_with_gradients(backend):
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


KINDS = ["random", "peaked", "uniform", "all_equal", "all_minus_200"]


def test_half_precision_is_tier3_and_its_logprob_is_not_rounded(backend):
    """With the gradient ahead, and the one by recomputing."""
    cases = itertools.product([(2, 32, 17), (33, 64, 700), (64, 96, 4099), (290, 64, 130)], KINDS, [torch.bfloat16])
    if backend == "triton":
        cases = itertools.product([(65, 48, 300)], ["random"], [torch.bfloat16, torch.float16])
    for (n, h, v), kind, dtype in cases:
        hidden, weight, target = make(n, h, v, dtype=dtype)
        options = {"softcap": 20.0} if kind == "random" else {}
        if kind == "peaked":
            hidden *= 30.0 / h**0.5
            target = (hidden.float() @ weight.float().T).argmax(-1)  # rounding a p near 1 would ruin the gradient
        elif kind == "all_equal":
            weight[:] = weight[0]
        elif kind != "random":
            hidden.zero_()
            options["bias"] = torch.full((v,), -200.0 if kind == "all_minus_200" else 0.0)
        cotangent = {"logprob": torch.randn(n)}
        for frozen in (True, False):
            tensors = [hidden.clone().requires_grad_(), weight.clone().requires_grad_(not frozen)]
            outputs = ("logprob",) if frozen else ("logprob", "lse", "entropy")
            out, grads = every_gradient(ours, tensors, target, cotangent, outputs=outputs, **options)
            exact, grads64 = every_gradient(dense, double(*tensors), target, cotangent, **options)
            eager, grads16 = every_gradient(dense, tensors, target, cotangent, **options)
            wide = [x.detach().float() for x in tensors]
            fp32 = dense(*wide, target, **options)
            assert_tier1(out, exact, fp32, outputs)
            for name, g, g64, g16 in zip(INPUTS, grads, grads64, grads16, strict=False):
                assert g.dtype == dtype
                assert_ok(tier3(g, g64, g16), f"d_{name} of {n}, {h}, {v}, {kind}, frozen={frozen}")
        if kind == "random" and n > 2:  # the same criterion refuses logits that went through bf16
            assert not tier1(eager["logprob"].float(), exact["logprob"], fp32["logprob"]).ok


@each("rows", ["peaked", "uniform", "all_minus_200", "all_below_zero", "all_equal_plus", "rising"])
def test_hostile_rows(backend, rows):
    """With the gradient made again, and made in the forward."""
    v = 300 if backend == "triton" else 1100
    hidden, weight, target = make(15, 20, v)
    if rows == "peaked":
        hidden *= 30
    elif rows == "rising":  # every tile moves the maximum
        hidden[:], hidden[:, 0] = 0.0, 1.0
        weight[:, 0] = torch.linspace(-60, 100, v)
    elif rows == "all_below_zero":
        hidden, weight = hidden.abs(), -weight.abs()
        target[::2] = (hidden @ weight.T).argmax(-1)[::2]
    else:
        hidden[:], hidden[:, 0] = 0.0, {"uniform": 0.0, "all_minus_200": -200.0, "all_equal_plus": 500.0}[rows]
        weight[:, 0] = 1.0
    cotangent = {"logprob": torch.ones(15)}
    for ahead in (False, True):
        tensors = [hidden.clone().requires_grad_(), weight.clone().requires_grad_(not ahead)]
        out, (grad, *_) = every_gradient(ours, tensors, target, cotangent, detach=DIFFERENTIABLE[1:])
        exact, (g64, *_) = every_gradient(dense, double(*tensors), target, cotangent)
        plain, (g32, *_) = every_gradient(dense, tensors, target, cotangent)
        assert_tier1(out, exact, plain, OUTPUTS)
        # p cancels against 1[v = t] where a row is peaked: judged on the scale of a row of W. Made again, p is
        # e^(z − lse) with a z and an lse that were rounded to fp32, which matters at lse = 500
        rounding = 0.0 if ahead and backend != "reference" else 2 * 2**-24 * out["lse"].abs().max().item()
        error, other = (grad.double() - g64).abs().max().item(), (g32.double() - g64).abs().max().item()
        assert error <= 4 * other + (1e-6 + rounding) * weight.abs().max().item(), ahead


def test_masked_vocabulary_columns_have_no_nan(backend):
    """Padding of the head; the first tile has no finite column."""
    hidden, weight, target = make(6, 20, 300)
    bias = torch.zeros(300)
    bias[:130], bias[290:] = -torch.inf, -torch.inf
    target = 130 + target % 160
    cotangent = {"logprob": torch.ones(6), "entropy": torch.ones(6)}
    for detach in ((), ("entropy",)):
        wanted = {name: x for name, x in cotangent.items() if name not in detach}
        tensors = hidden.clone().requires_grad_(), weight.requires_grad_(not detach)
        out, (grad, *_) = every_gradient(
            ours, tensors, target, wanted, bias=bias, outputs=tuple(cotangent), detach=detach
        )
        short = tensors[0], tensors[1][130:290]
        exact, plain = dense(*double(*short), target - 130), dense(*short, target - 130)
        assert_tier1(out, exact, plain, cotangent)
        loss = sum(plain[name].sum() for name in wanted)
        torch.testing.assert_close(grad, torch.autograd.grad(loss, tensors[0])[0])


@each(("layout", "shift"), [(red_zone, 0.0), (surrounded, 200.0), (turned, 0.0)])
def test_any_layout_and_ignored_rows_that_hold_nan(backend, layout, shift):
    """shift: exp(200) overflows, and 0 · inf must not appear in ignored rows."""
    n, v = 70, 301
    (hidden, weight, bias, *lora), target = make_all(n, 20, v, grad=True)
    if layout is turned:
        lora = [turned(x) for x in lora]
    tensors = hidden, weight, (bias.detach() + shift).requires_grad_(), *lora
    ignored = torch.tensor([1, 4, 69])
    target[ignored] = -100
    temperature = torch.ones(n)
    cotangent = {name: torch.randn(n) for name in DIFFERENTIABLE}
    clean, clean_grads = every_gradient(ours, tensors, target, cotangent, temperature=temperature)
    temperature[1] = torch.nan
    for x in cotangent.values():
        x[1] = torch.nan
    with torch.no_grad():
        hidden[1], hidden[4] = torch.nan, torch.inf
    zoned = [layout(hidden), layout(weight), *tensors[2:]]
    between = torch.stack([target, target.flip(0)], 1)[:, 0]
    out, grads = every_gradient(ours, zoned, between, cotangent, temperature=temperature)
    assert all((x[ignored] == 0).all() for x in (*out.values(), grads[0]))
    alike(backend, [out[name] for name in OUTPUTS], [clean[name] for name in OUTPUTS])
    alike(backend, grads, clean_grads, rtol=1e-4, atol=1e-5)
    frozen = [zoned[0], *(x.detach() for x in zoned[1:])]
    wanted = {"logprob": cotangent["logprob"]}
    _, (grad,) = every_gradient(ours, frozen, target, wanted, outputs=("logprob",), temperature=temperature)
    assert grad.isfinite().all()
    assert (grad[ignored] == 0).all()


def test_all_rows_ignored_and_empty_batches(backend):
    for n, ignore in ((3, -1), (0, -100)):
        tensors, target = make_all(n, 20, 50, grad=True)
        cotangent = {name: torch.ones(n) for name in DIFFERENTIABLE}
        given = {"ignore_index": ignore}
        out, grads = every_gradient(ours, tensors, torch.full_like(target, ignore), cotangent, **given)
        assert all((x == 0).all() for x in out.values())
        assert [g.shape for g in grads] == [x.shape for x in tensors]
        assert all((g == 0).all() for g in grads)
    assert linear_logprob(tensors[0], tensors[1].detach(), target).logprob.shape == (0,)


def test_top1_first_maximum_wins(backend):
    """Across tiles and blocks."""
    weight, target = torch.zeros(1200, 16), torch.tensor([0, 70, 140, 600, 1199])
    weight[target[1:], 0] = 2.0
    out = linear_logprob(torch.ones(5, 16), weight, target, outputs=("is_top1",))
    assert out.is_top1.tolist() == [0.0, 1.0, 0.0, 0.0, 0.0]
    weight[70, 0] = 1.0
    assert linear_logprob(torch.ones(5, 16), weight, target, outputs=("is_top1",)).is_top1.tolist()[2] == 1.0
    assert not out.is_top1.requires_grad
    assert out.logprob is None


@each("weight_dtype", [torch.float32, torch.float16, torch.bfloat16])
@each("hidden_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_mixed_dtypes(backend, hidden_dtype, weight_dtype):
    hidden, weight, target = make(20, 24, 300)
    hidden, weight = hidden.to(hidden_dtype).requires_grad_(), weight.to(weight_dtype).requires_grad_()
    logprob = linear_logprob(hidden, weight, target).logprob
    assert logprob.dtype == torch.float32
    exact = dense(hidden.double(), weight.double(), target)["logprob"]
    torch.testing.assert_close(logprob.double(), exact, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(logprob.sum(), (hidden, weight))
    assert [g.dtype for g in grads] == [hidden_dtype, weight_dtype]


@pytest.fixture
def no_packed_copies():
    """A kept copy of W is as large as dW."""
    packed.set_budget(0)
    yield
    packed.set_budget(None)


def test_frozen_weight_has_no_dw_and_logits_never_exist(backend, no_packed_copies):
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


def test_only_the_inputs_that_need_it_get_a_gradient(backend):
    hidden, weight, target = make(4, 3, 5)
    lora = HeadLora(torch.randn(2, 3, requires_grad=True), torch.randn(5, 2), 1.0)
    linear_logprob(hidden, weight, target, lora=lora).logprob.sum().backward()
    assert lora.A.grad is not None
    assert hidden.grad is weight.grad is lora.B.grad is None


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


def test_entropy_gradient_at_minus_infinity_is_zero(backend):
    hidden, weight, target = make(3, 4, 6, grad=True)
    bias = torch.tensor([0.0, 0.0, -torch.inf, 0.0, 0.0, -torch.inf])
    target = torch.tensor([0, 1, 3])
    out = linear_logprob(hidden, weight, target, bias=bias, outputs=("logprob", "entropy"))
    d_hidden, d_weight = torch.autograd.grad((out.entropy * 1.5e6).sum(), (hidden, weight))
    assert d_hidden.isfinite().all()
    assert (d_weight[[2, 5]] == 0).all()
    assert (d_weight[0] != 0).any()


# ---- what surrounds a call -------------------------------------------------------------------------------------------


def every_head(hidden, weight, target, lora):
    """Outputs of all ops that sweep the vocabulary, and the gradients of two."""
    hidden = hidden.detach().requires_grad_()
    ones = torch.ones(hidden.shape[0], dtype=torch.float32)
    options = {"lora": lora}
    single = linear_logprob(hidden, weight, target, outputs=("logprob", "entropy"), **options)
    frozen = HeadLora(lora.A.detach(), lora.B.detach(), lora.scale)
    pair = linear_logprob_pair(hidden, hidden.detach() + 1, weight, target, lora=frozen)
    loss = linear_ppo_loss(hidden, weight, target, -ones, ones, ones, denom=ones.sum(), **options)
    rows = torch.arange(hidden.shape[0])
    wanted = ("token", "logprob", "entropy")
    with torch.no_grad():
        drawn = sample(hidden, weight, seed=rows, position=rows, outputs=wanted, **options)
    gradients = torch.autograd.grad(single.logprob.sum() + pair.kl.sum() + loss.loss, [hidden, lora.A, lora.B])
    outputs = [single.logprob, single.entropy, pair.logprob_a, pair.kl, loss.logprob, drawn.logprob, drawn.entropy]
    return [x.detach() for x in (*outputs, loss.loss, drawn.token, *gradients)]


@each("around", ["default dtype", "autocast"])
def test_what_surrounds_a_call_changes_no_bit(backend, around):
    hidden, weight, target = make(9, 40, 100)
    lora = HeadLora(torch.randn(4, 40, requires_grad=True), torch.randn(100, 4, requires_grad=True), 0.5)
    plain = every_head(hidden, weight, target, lora)
    if around == "default dtype":
        torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=around == "autocast"):
            results = every_head(hidden, weight, target, lora)
    finally:
        torch.set_default_dtype(torch.float32)
    assert [x.dtype for x in results] == [x.dtype for x in plain]
    same_bits(results, plain)


# ---- the native sweep ------------------------------------------------------------------------------------------------


@each("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_a_row_depend_on_that_row_alone(isa, dtype):
    n = 140  # five panels: one thread takes two of them at a time, two threads one each
    hidden, weight, target = make(n, 1024, 1500, dtype=dtype)
    gradient = torch.randn(n)
    lora = HeadLora(torch.randn(16, 1024), torch.randn(1500, 16), 0.1)

    def run(hidden, target, gradient, lora=None):
        h = hidden.clone().requires_grad_()
        detach = OUTPUTS[1:2] + OUTPUTS[3:]
        out = linear_logprob(h, weight, target, lora=lora, outputs=OUTPUTS, detach=detach, backend="cpu")
        out.logprob.backward(gradient)
        return [*(x.detach() for x in out), h.grad]

    rows = [hidden, target, gradient]
    in_any_company(run, rows, [torch.randperm(n)[:37]])
    in_any_company(lambda *some: run(*some, lora)[:6], rows, ([0], [3, 4], list(range(5, 130))))
    threads_change_no_bit(lambda: run(*rows), 1, 2)
    with torch.no_grad():  # scoring and training see the same log-probs
        scored = linear_logprob(hidden, weight, target, backend="cpu").logprob
    assert torch.equal(scored, run(*rows)[0])


@each("dtype", [torch.float32, torch.bfloat16])
def test_head_lora_is_not_rounded(isa, dtype):
    n, h, v, r = 40, 64, 600, 5
    hidden, weight, target = make(n, h, v, dtype=dtype)
    cotangent = torch.randn(n)
    for adapter in (torch.float32, dtype):
        A, B = torch.randn(r, h).to(adapter), torch.randn(v, r).to(adapter)

        def run(backend, wide, A=A, B=B):
            tensors = [x.detach().to(wide or x.dtype).requires_grad_() for x in (hidden, weight, A, B)]
            out = linear_logprob(tensors[0], tensors[1], target, lora=HeadLora(*tensors[2:], 0.5), backend=backend)
            return out.logprob.detach(), torch.autograd.grad(out.logprob, tensors, cotangent.to(wide or torch.float32))

        (logprob, grads), (exact, exact_grads) = run("cpu", None), run("reference", torch.float64)
        error = (logprob - exact).abs().max() / exact.abs().max()
        assert error < 1e-5, error  # 4e-3 with the low-rank activations or B rounded to bf16
        tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
        for name, g, g64 in zip(("hidden", "weight", "A", "B"), grads, exact_grads, strict=True):
            relative = (g.double() - g64).norm() / g64.norm()
            assert relative < tolerance, (name, relative)


@each("row", [0, 7, 8, 15, 23, 31])
def test_one_row_with_rising_logits(isa, row):
    """Of all lanes of a vector one alone needs another reference, without which its exponentials overflow."""
    hidden, weight, target = make(32, 8, 1100, scale=0.1)
    hidden[:, 0], weight[:, 0] = 0.0, torch.linspace(-150, 150, 1100)
    hidden[row, 0] = 1.0
    out = linear_logprob(hidden, weight, target, outputs=OUTPUTS, backend="cpu")
    exact, plain = dense(hidden.double(), weight.double(), target), dense(hidden, weight, target)
    for name in ("logprob", "lse", "entropy"):
        assert_ok(tier1(getattr(out, name), exact[name], plain[name]), name)


def test_a_nan_reaches_all_of_its_row_and_no_other(isa):
    hidden, weight, target = make(20, 16, 600)
    bias = torch.zeros(600)

    def run():
        return linear_logprob(hidden, weight, target, bias=bias, outputs=OUTPUTS, backend="cpu")._asdict()

    clean = run()
    hidden[3, 1] = torch.nan
    hurt = run()
    others = torch.arange(20) != 3
    for name in DIFFERENTIABLE:
        assert hurt[name][3].isnan(), name
        assert torch.equal(hurt[name][others], clean[name][others]), name
    bias[555] = torch.nan
    for name, x in run().items():
        assert x.isnan().all() or name == "is_top1", name


@each("vocab", [20, 5000])
def test_no_piece_overtakes_what_it_builds_on(isa, vocab):
    """One panel or two, so that threads meet at every block. One thread last: its results lie where it has been."""
    for seed in range(5):
        hidden, weight, target = make(20 + 20 * (seed % 2), 512 if vocab == 20 else 32, vocab, seed=seed)

        def run(hidden=hidden, weight=weight, target=target):
            h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
            ahead = linear_logprob(h, weight, target, backend="cpu").logprob
            again = linear_logprob(h, w, target, outputs=("logprob", "entropy"), backend="cpu")
            loss = again.logprob.sum() + again.entropy.sum()
            return [ahead, *again[:2], *torch.autograd.grad(ahead.sum(), h), *torch.autograd.grad(loss, (h, w))]

        threads_change_no_bit(run, 2, 3, 8, 1)


MEMORY = """
import resource, sys, torch
from rlhf_kernels import linear_logprob
torch.manual_seed(0)
N, H, V = 512, 256, 65536
h = torch.randn(N, H).bfloat16().requires_grad_()
W, t = torch.randn(V, H).bfloat16(), torch.randint(0, V, (N,))
linear_logprob(h[:32], W[:512], t[:32] % 512, backend="cpu").logprob.sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
linear_logprob(h, W, t, backend="cpu").logprob.sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, 4 * N * V)
"""


@needs_native
def test_memory_is_an_eighth_of_the_logits():
    run = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    extra, logits = map(int, run.stdout.split())
    assert resource.getpagesize() <= logits  # the figures are bytes
    assert extra <= logits / 8, (extra, logits)


@each("dtype", [torch.float32, torch.bfloat16])
def test_without_depth_every_word_is_equally_likely(isa, dtype):
    for _ in range(3):
        torch.full((4, 32), 7.0)  # memory that is not zero
        out = linear_logprob(
            torch.zeros(4, 0, dtype=dtype), torch.zeros(32, 0, dtype=dtype), torch.arange(4), backend="cpu"
        )
        assert torch.allclose(out.logprob, torch.full((4,), -math.log(32)))


@needs_native
def test_outputs_without_gradient_cost_the_loss_no_memory():
    hidden, weight, target = make(4, 64, 4096)
    weight.requires_grad_()
    ones = torch.ones(4)
    loss = linear_ppo_loss(hidden, weight, target, -ones, ones, ones, denom=torch.tensor(4.0), backend="cpu").loss
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as p:
        loss.backward()
    large = [e for e in p.events() if e.self_cpu_memory_usage >= weight.numel() * 4]
    assert len(large) <= 1, large  # the gradient times that of the loss
