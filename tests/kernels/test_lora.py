"""Multi-slot LoRA: derivatives, untouched off rows, absent and frozen tensors, dropout, mixed dtypes."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from rlhf_kernels.linear import linear
from rlhf_kernels.lora import Dropout, Segments, lora_delta_, lora_linear
from rlhf_kernels.runtime import native, philox, registry, testing

from .checks import REFERENCE, each, same_bits

pytestmark = pytest.mark.usefixtures("backend")


N, K, M = 17, 12, 10
RANKS = (2, 3, 1)
SCALES = (0.5, 2.0, 1.5)
# slot 2 first, slot 0 twice, rows 7-8 off by a run, rows 13-16 off by no run, an empty run, slot 1 absent
SEGMENTS = Segments(starts=(0, 3, 7, 9, 9), ends=(3, 7, 9, 9, 13), slots=(2, 0, -1, 1, 0))
ON = torch.tensor([n in range(0, 7) or n in range(9, 13) for n in range(N)])
SLOT_OF_ROW = [2] * 3 + [0] * 4 + [-1] * 2 + [0] * 4 + [-1] * 4


def work_dtype():
    return torch.float64 if registry.default_backend() == "reference" else torch.float32


def tensors(dtype=None, adapter_dtype=None, *, grad=True, seed=0, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    dtype = dtype or work_dtype()

    def make(*shape, to=dtype):
        return (scale * torch.randn(*shape, generator=g, dtype=torch.float64)).to(to).requires_grad_(grad)

    x, weight, bias = make(N, K), make(M, K), make(M)
    A = [make(r, K, to=adapter_dtype or dtype) for r in RANKS]
    B = [make(M, r, to=adapter_dtype or dtype) for r in RANKS]
    return x, weight, bias, A, B


def dropout(n=N, p=(0.5, 0.0, 0.25)):
    return Dropout(p=p, seed=11, row_ids=torch.arange(n) * 3 + 5, stream=4)


def formula_delta(x, A, B, drop=None):
    """Row by row, with autograd: what the op has to equal."""
    rows = []
    for n, slot in enumerate(SLOT_OF_ROW):
        if slot < 0:
            rows.append(torch.zeros(M, dtype=x.dtype))
            continue
        row = x[n]
        if drop is not None and drop.p[slot]:
            keep = philox.keep_mask(drop.p[slot], torch.tensor(drop.seed), drop.row_ids[n : n + 1], drop.stream, K)[0]
            row = row * keep / (1 - drop.p[slot])
        rows.append(SCALES[slot] * (B[slot] @ (A[slot] @ row)))
    return torch.stack(rows)


@each("drop", [None, dropout()])
def test_linear_equals_the_formula_and_its_gradients(drop):
    x, weight, bias, A, B = tensors()
    y = lora_linear(x, weight, bias, A, B, SCALES, SEGMENTS, dropout=drop)
    expected = F.linear(x, weight, bias) + formula_delta(x, A, B, drop)
    torch.testing.assert_close(y, expected)
    leaves = [x, weight, bias, A[0], A[2], B[0], B[2]]
    dy = torch.randn(N, M, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(x.dtype)
    for got, want in zip(torch.autograd.grad(y, leaves, dy), torch.autograd.grad(expected, leaves, dy), strict=True):
        torch.testing.assert_close(got, want)


@REFERENCE
@each("drop", [None, dropout()])
def test_gradcheck(drop):
    x, weight, bias, A, B = tensors()
    y = torch.randn(N, M, dtype=torch.float64).requires_grad_()

    def linear(x, weight, bias, *AB):
        return lora_linear(x, weight, bias, AB[:3], AB[3:], SCALES, SEGMENTS, dropout=drop)

    def delta(y, x, *AB):
        return lora_delta_(y * 1, x, AB[:3], AB[3:], SCALES, SEGMENTS, dropout=drop)

    assert torch.autograd.gradcheck(linear, (x, weight, bias, *A, *B), fast_mode=True)
    assert torch.autograd.gradcheck(delta, (y, x, *A, *B), fast_mode=True)


@each("shape", [(N,), (1, N), (N, 1)])
def test_delta_equals_linear_and_leading_dims_are_rows(shape):
    x, weight, bias, A, B = tensors()
    x_in = x.view(*shape, K)
    y = F.linear(x_in, weight, bias)
    out = lora_delta_(y, x_in, A, B, SCALES, SEGMENTS, dropout=dropout())
    assert out is y
    torch.testing.assert_close(out, lora_linear(x_in, weight, bias, A, B, SCALES, SEGMENTS, dropout=dropout()))
    grads = torch.autograd.grad(out.square().sum(), [x, A[0], B[2]])
    y2 = lora_linear(x, weight, bias, A, B, SCALES, SEGMENTS, dropout=dropout())
    for got, want in zip(grads, torch.autograd.grad(y2.square().sum(), [x, A[0], B[2]]), strict=True):
        torch.testing.assert_close(got, want)


@each("dtype", [torch.float32, torch.bfloat16, torch.float64])
@each("autocast", [False, True])
@each("shape", [(N,), (1, N)])
def test_off_rows_keep_the_bits_of_the_base(dtype, autocast, shape, backend):
    if dtype == torch.float64 and backend != "reference":
        pytest.skip("float64 is the reference's")
    x, weight, bias, A, B = tensors(dtype, torch.float32, grad=False)
    x = x.view(*shape, K)
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        base = linear(x, weight, bias)
        y = lora_linear(x, weight, bias, A, B, SCALES, SEGMENTS)
        assert backend != "reference" or torch.equal(base, F.linear(x, weight, bias))
    assert y.dtype == base.dtype
    bits, base_bits = (t.reshape(N, M).contiguous().view(torch.uint8) for t in (y, base))
    assert torch.equal(bits[~ON], base_bits[~ON])
    assert not torch.equal(bits[ON], base_bits[ON])


def test_off_rows_keep_minus_zero_and_nan_bits():
    """Adding a zero delta would turn −0.0 into +0.0, and adding anything may change a NaN's payload."""
    x, _, _, A, B = tensors(torch.float32, grad=False)
    y = torch.full((N, M), -0.0)
    y.view(torch.int32)[14] = 0x7FA0BEEF
    before = y.clone()
    lora_delta_(y, x, A, B, SCALES, SEGMENTS)
    assert torch.equal(y.view(torch.int32)[~ON], before.view(torch.int32)[~ON])
    assert (y[ON] != 0).all()


def test_off_rows_of_linear_have_the_bits_of_linear_where_products_underflow(backend):
    """A sum that underflows from below is −0.0 in some products, +0.0 in others; an off row is what `linear` makes."""
    for depth in (1, K, 64):
        A = [torch.randn(r, depth) for r in RANKS]
        B = [torch.randn(M, r) for r in RANKS]
        x, weight = torch.full((N, depth), -1e-30), torch.full((M, depth), 1e-30)
        base = linear(x, weight)
        assert (base == 0).all()
        y = lora_linear(x, weight, None, A, B, SCALES, SEGMENTS)
        assert torch.equal(y[~ON].view(torch.int32), base[~ON].view(torch.int32))
        if backend == "reference":
            assert torch.equal(base.view(torch.int32), F.linear(x, weight).view(torch.int32))
        elif depth == 64 and native.isa() in ("avx2", "avx512"):  # multiply-adds in one rounding, all lanes in use
            assert base.signbit().all()


def test_garbage_in_off_rows_stays_there():
    x, weight, bias, A, B = tensors()
    dirty = torch.where(ON[:, None], x.detach(), float("nan")).requires_grad_()
    y = lora_linear(dirty, weight, bias, A, B, SCALES, SEGMENTS, dropout=dropout())
    y[ON].sum().backward()
    clean = torch.autograd.grad(
        lora_linear(x, weight, bias, A, B, SCALES, SEGMENTS, dropout=dropout())[ON].sum(), [A[0], B[0], A[2], B[2]]
    )
    assert y[~ON].isnan().all()
    same_bits((A[0].grad, B[0].grad, A[2].grad, B[2].grad), clean)


def test_absent_slot_has_no_gradient():
    for function in ("linear", "delta"):
        x, weight, bias, A, B = tensors()
        if function == "linear":
            y = lora_linear(x, weight, bias, A, B, SCALES, SEGMENTS)
        else:
            y = lora_delta_(F.linear(x, weight, bias), x, A, B, SCALES, SEGMENTS)
        y.sum().backward()
        assert A[1].grad is None
        assert B[1].grad is None
        assert all(t.grad is not None for t in (x, weight, bias, A[0], A[2], B[0], B[2]))


def test_all_off_is_plain_linear():
    x, weight, bias, A, B = tensors()
    off = Segments.single(N, -1)
    assert torch.equal(lora_linear(x, weight, bias, A, B, SCALES, off), linear(x, weight, bias))
    y = F.linear(x, weight, bias)
    before = y.clone()
    assert torch.equal(lora_delta_(y, x, A, B, SCALES, off), before)
    lora_linear(x, weight, bias, A, B, SCALES, off).sum().backward()
    assert all(t.grad is None for t in A + B)
    assert weight.grad is not None


def matmul_shapes_of_backward(y):
    """Result shapes of all matrix products of y's backward pass. A dispatch mode does not see into custom ops."""
    loss = y.sum()
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        loss.backward()
    products = [event.input_shapes for event in profile.function_events if event.name == "aten::mm"]
    return [(left[0], right[1]) for left, right, *_ in products]


@REFERENCE
def test_nothing_is_computed_for_what_is_frozen():
    x, weight, bias, A, B = tensors()
    y = lora_linear(x, weight, bias, A, B, SCALES, SEGMENTS)
    trained = matmul_shapes_of_backward(y)
    assert trained.count((M, K)) == 1  # dW
    assert trained.count((N, K)) == 1  # the base path of dx
    x, weight, bias, A, B = tensors()
    weight.requires_grad_(False)
    x.requires_grad_(False)
    A[2].requires_grad_(False)
    y = lora_linear(x, weight, bias, A, B, SCALES, SEGMENTS)
    frozen = matmul_shapes_of_backward(y)
    assert frozen, "the spy saw no product at all"
    assert (M, K) not in frozen
    assert not any(shape[0] in (N, 3, 4) and shape[1] == K for shape in frozen)  # no dx, whole or per run
    assert (RANKS[2], K) not in frozen  # no dA of the frozen A
    assert (RANKS[0], K) in frozen
    assert weight.grad is None
    assert A[2].grad is None
    assert B[2].grad is not None


def test_frozen_slot_still_passes_gradient_to_x():
    x, weight, bias, A, B = tensors()
    for t in (weight, bias, *A, *B):
        t.requires_grad_(False)
    (dx,) = torch.autograd.grad(lora_linear(x, weight, bias, A, B, SCALES, SEGMENTS).sum(), x)
    (want,) = torch.autograd.grad((F.linear(x, weight, bias) + formula_delta(x, A, B)).sum(), x)
    torch.testing.assert_close(dx, want)


def test_dropout_never_touches_the_base_path():
    x, weight, bias, A, B = tensors()
    zero = [torch.zeros_like(a).requires_grad_() for a in A]
    y = lora_linear(x, weight, bias, zero, B, SCALES, SEGMENTS, dropout=dropout(p=(0.9, 0.9, 0.9)))
    assert torch.equal(y, linear(x, weight, bias))
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx, weight.sum(0).expand(N, K))


def test_dropout_keeps_the_mean_and_drops_the_right_share():
    n, k, p = 4000, 8, 0.3
    x = torch.ones(n, k, dtype=work_dtype())
    eye = [torch.eye(k, dtype=work_dtype())]
    drop = Dropout(p=(p,), seed=3, row_ids=torch.arange(n), stream=0)
    y = torch.zeros(n, k, dtype=work_dtype())
    lora_delta_(y, x, eye, eye, (1.0,), Segments.single(n, 0), dropout=drop)
    assert sorted(y.unique().tolist()) == [0.0, pytest.approx(1 / (1 - p))]
    # 32,000 draws: the standard deviation of the share is 0.0026; six of them
    assert abs((y == 0).double().mean().item() - p) < 0.016
    assert abs(y.mean().item() - 1) < 0.023


def test_dropout_mask_does_not_depend_on_the_rest_of_the_batch():
    x, weight, bias, A, B = tensors()
    drop = dropout()
    whole = lora_linear(x, weight, bias, A, B, SCALES, SEGMENTS, dropout=drop)
    alone = Dropout(p=drop.p, seed=drop.seed, row_ids=drop.row_ids[10:12], stream=drop.stream)
    rows = lora_linear(x[10:12], weight, bias, A, B, SCALES, Segments.single(2, 0), dropout=alone)
    torch.testing.assert_close(rows, whole[10:12])
    for other in (
        Dropout(p=drop.p, seed=drop.seed + 1, row_ids=drop.row_ids, stream=drop.stream),
        Dropout(p=drop.p, seed=drop.seed, row_ids=drop.row_ids + 1, stream=drop.stream),
        Dropout(p=drop.p, seed=drop.seed, row_ids=drop.row_ids, stream=drop.stream + 1),
    ):
        changed = lora_linear(x, weight, bias, A, B, SCALES, SEGMENTS, dropout=other)
        assert not torch.allclose(changed[ON], whole[ON])
        assert torch.equal(changed[~ON], whole[~ON])


@each(("base", "adapter"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("float32", "float64")])
def test_mixed_dtypes(base, adapter, backend):
    base, adapter = getattr(torch, base), getattr(torch, adapter)
    x, weight, bias, A, B = tensors(base, adapter)
    if adapter == torch.float64 and backend != "reference":
        with pytest.raises(registry.BackendUnavailableError, match=r"not in torch\.float64"):
            lora_linear(x, weight, bias, A, B, SCALES, SEGMENTS)
        registry.set_default_backend("auto")  # which knows what to do
    y = lora_linear(x, weight, bias, A, B, SCALES, SEGMENTS, dropout=dropout())
    assert y.dtype == base
    y.sum().backward()
    for t in (x, weight, bias, A[0], A[2], B[0], B[2]):
        assert t.grad.dtype == t.dtype


@each("dtype", [torch.bfloat16, torch.float16])
def test_delta_is_rounded_once(dtype, backend):
    """T2: y plus the exact delta, rounded once to y's dtype."""
    if dtype == torch.float16 and backend != "reference":
        pytest.skip("float16 is the reference's")
    x, weight, bias, A, B = tensors(dtype, grad=False, scale=0.5)
    y = F.linear(x, weight, bias)
    exact = y.double() + formula_delta(x.double(), [a.double() for a in A], [b.double() for b in B])
    # A sum that cancels amplifies the fp32 error of its terms, in units of the small result.
    exact_kept = exact.abs() > 0.1
    lora_delta_(y, x, A, B, SCALES, SEGMENTS)
    testing.assert_ok(testing.tier2(y[exact_kept], exact[exact_kept]), "lora_delta_")


@each("scale", [1.0, 1e-3])
def test_tier1(scale):
    inputs = tensors(torch.float32, scale=scale)
    exact_inputs = [
        [t.detach().double().requires_grad_() for t in x]
        if isinstance(x, list)
        else x.detach().double().requires_grad_()
        for x in inputs
    ]

    def run(x, weight, bias, A, B):
        y = lora_linear(x, weight, bias, A, B, SCALES, SEGMENTS, dropout=dropout())
        return [y, *torch.autograd.grad(y.square().sum(), [x, weight, bias, A[0], B[0]])]

    def eager(x, weight, bias, A, B):
        y = F.linear(x, weight, bias) + formula_delta(x, A, B, dropout())
        return [y, *torch.autograd.grad(y.square().sum(), [x, weight, bias, A[0], B[0]])]

    names = ("y", "dx", "dW", "db", "dA", "dB")
    for name, got, exact, plain in zip(names, run(*inputs), eager(*exact_inputs), eager(*inputs), strict=True):
        testing.assert_ok(testing.tier1(got.detach(), exact.detach(), plain.detach()), name)


def test_tier3_bf16():
    inputs = tensors(torch.bfloat16)
    exact_inputs = [[t.detach().double() for t in x] if isinstance(x, list) else x.detach().double() for x in inputs]
    got = lora_linear(*inputs, SCALES, SEGMENTS)
    x, weight, bias, A, B = exact_inputs
    exact = F.linear(x, weight, bias) + formula_delta(x, A, B)
    x, weight, bias, A, B = inputs
    eager = F.linear(x, weight, bias) + formula_delta(x, A, B)
    testing.assert_ok(testing.tier3(got.detach(), exact, eager.detach()), "lora_linear")


def test_strided_inputs_and_results_are_bitwise_repeatable():
    x, weight, bias, A, B = tensors(torch.float32)
    wide = torch.randn(K, 2 * N).T[::2]
    assert not wide.is_contiguous()
    y = lora_linear(wide, weight.detach().T.contiguous().T, bias, A, B, SCALES, SEGMENTS)
    torch.testing.assert_close(y, F.linear(wide, weight, bias) + formula_delta(wide, A, B))
    strided_y = torch.zeros(N, 2 * M)[:, ::2]
    lora_delta_(strided_y, wide, [a.detach() for a in A], [b.detach() for b in B], SCALES, SEGMENTS)
    torch.testing.assert_close(strided_y, formula_delta(wide, A, B).detach())
    runs = []
    for _ in range(2):
        out = lora_linear(x, weight, bias, A, B, SCALES, SEGMENTS, dropout=dropout())
        runs.append([out, *torch.autograd.grad(out.square().sum(), [x, A[0], B[0]])])
    same_bits(*runs)


def test_backward_under_autocast_keeps_adapter_precision():
    x, weight, bias, A, B = tensors(torch.float32)
    weight.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        y = lora_linear(x, weight, bias, A, B, SCALES, SEGMENTS)
        dA = torch.autograd.grad(y.float().sum(), A[0])[0]
    half = x.detach().bfloat16().float()
    want = SCALES[0] * (B[0].sum(0)[:, None] * half[torch.tensor(SLOT_OF_ROW) == 0].sum(0))
    torch.testing.assert_close(dA, want.detach(), rtol=1e-5, atol=1e-5)


def test_empty_batch():
    _, weight, bias, A, B = tensors()
    x = torch.zeros(0, K, dtype=work_dtype())
    for segments in (Segments(starts=(), ends=(), slots=()), Segments.single(0, 1)):
        assert lora_linear(x, weight, bias, A, B, SCALES, segments).shape == (0, M)
        assert lora_delta_(torch.zeros(0, M), x, A, B, SCALES, segments).shape == (0, M)


@REFERENCE
@each(
    ("runs", "message"),
    [
        (((0, 4), (5, 6), (0, 1)), r"run 1 = \[4, 6\) where the rows before 5 are taken"),
        (((4, 0), (6, 2), (0, 1)), "expected sorted runs"),
        (((3,), (2,), (0,)), "expected sorted runs"),
        (((-1,), (2,), (0,)), "expected sorted runs"),
        (((0,), (2, 4), (0,)), "of one length, got 1, 2 and 1"),
        (((0,), (2,), (-2,)), r"slots >= -1 \(-1 is off\), got slots\[0\] = -2"),
    ],
)
def test_bad_segments(runs, message):
    with pytest.raises(ValueError, match=message):
        Segments(starts=runs[0], ends=runs[1], slots=runs[2])


@REFERENCE
@each(
    ("change", "message"),
    [
        ({"p": (1.0,)}, r"0 <= p < 1, got p\[0\] = 1.0"),
        ({"seed": 2**63}, "signed 64-bit"),
        ({"stream": -1}, "Dropout.stream"),
        ({"row_ids": torch.arange(3, dtype=torch.int32)}, r"int64 \[N\], got torch.int32"),
    ],
)
def test_bad_dropout(change, message):
    good = {"p": (0.1,), "seed": 0, "row_ids": torch.arange(3), "stream": 0}
    with pytest.raises((ValueError, TypeError), match=message):
        Dropout(**(good | change))


@REFERENCE
@each(
    ("change", "error", "message"),
    [
        ({"segments": Segments.single(N + 1, 0)}, ValueError, "within the 17 rows of x, got end 18"),
        ({"segments": Segments.single(N, 3)}, ValueError, r"slots below 3 \(the number of A\), got 3"),
        ({"scales": (1.0,)}, ValueError, "one entry per slot, got 3, 3 and 1"),
        ({"A": [torch.zeros(2, K + 1)] * 3}, ValueError, r"A\[0\]: expected shape \[r, 12\], got \(2, 13\)"),
        ({"B": [torch.zeros(M, 9)] * 3}, ValueError, r"B\[0\]: expected shape \[10, 2\], got \(10, 9\)"),
        ({"A": [torch.zeros(2, K, dtype=torch.int64)] * 3}, TypeError, r"A\[0\]: expected a floating dtype"),
        ({"weight": torch.zeros(M, K + 1)}, ValueError, r"weight: expected shape \[M, 12\]"),
        ({"weight": torch.zeros(M, K, dtype=torch.bfloat16)}, TypeError, "weight: expected torch.float64 on cpu"),
        ({"bias": torch.zeros(M + 1)}, ValueError, r"bias: expected shape \[10\]"),
        ({"x": torch.zeros(K)}, ValueError, "x: expected rows"),
        ({"x": torch.zeros(N, K, dtype=torch.int64)}, TypeError, "x: expected a floating tensor"),
        ({"dropout": dropout(p=(0.1,))}, ValueError, r"one p per slot \(3\), got 1"),
        ({"dropout": dropout(n=N - 1)}, ValueError, "Dropout.row_ids: expected 17 ids, got 16"),
        ({"backend": "cuda"}, registry.BackendUnavailableError, "cannot serve lora"),
        ({"backend": "fast"}, ValueError, "backend: expected 'auto' or one of"),
    ],
)
def test_bad_input(change, error, message):
    x, weight, bias, A, B = tensors()
    good = {"x": x, "weight": weight, "bias": bias, "A": A, "B": B, "scales": SCALES, "segments": Segments.single(N, 0)}
    with pytest.raises(error, match=message):
        lora_linear(**(good | change))


@REFERENCE
def test_bad_y():
    x, _, _, A, B = tensors()
    one = Segments.single(N, 0)
    with pytest.raises(ValueError, match=r"y: expected the rows of x \(17,\), got \(16,\)"):
        lora_delta_(torch.zeros(N - 1, M), x, A, B, SCALES, one)
    with pytest.raises(ValueError, match="y: expected contiguous memory with 3 dims"):
        lora_delta_(torch.zeros(1, M, N).transpose(1, 2), x[None], A, B, SCALES, one)
    with pytest.raises(RuntimeError, match="leaf"):
        lora_delta_(torch.zeros(N, M, dtype=torch.float64, requires_grad=True), x, A, B, SCALES, one)
