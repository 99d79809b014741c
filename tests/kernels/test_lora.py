"""Multi-slot LoRA: derivatives, untouched off rows, absent and frozen tensors, dropout, mixed dtypes."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from rlhf_kernels import Dropout, Segments, linear, lora_delta_, lora_linear
from rlhf_kernels.runtime import native, philox, registry, testing

from .checks import alike, each, tier_of_dtype
from .dense import surrounded, turned

N, K, M = 17, 12, 10
RANKS = (2, 3, 1)
SCALES = (0.5, 2.0, 1.5)
# slot 2 first, slot 0 twice, rows 7-8 off by a run, rows 13-16 off by no run, an empty run, slot 1 absent
SEGMENTS = Segments(starts=(0, 3, 7, 9, 9), ends=(3, 7, 9, 9, 13), slots=(2, 0, -1, 1, 0))
ON = torch.tensor([n in range(0, 7) or n in range(9, 13) for n in range(N)])
SLOT_OF_ROW = [2] * 3 + [0] * 4 + [-1] * 2 + [0] * 4 + [-1] * 4


def work_dtype():
    return torch.float32 if registry.default_backend() in ("cpu", "triton") else torch.float64


def tensors(dtype=None, adapter_dtype=None, *, grad=True, seed=0, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    dtype = dtype or work_dtype()

    def make(*shape, to=dtype):
        draw = torch.randn(*shape, generator=g, dtype=torch.float64, device="cpu")
        return (scale * draw).to(torch.get_default_device(), to).requires_grad_(grad)

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
def test_linear_equals_the_formula_and_its_gradients(backend, drop):
    x, weight, bias, A, B = tensors()
    y = lora_linear(x, weight, bias, A, B, SCALES, SEGMENTS, dropout=drop)
    expected = F.linear(x, weight, bias) + formula_delta(x, A, B, drop)
    torch.testing.assert_close(y, expected)
    leaves = [x, weight, bias, A[0], A[2], B[0], B[2]]
    dy = torch.randn(N, M, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(x.dtype)
    for got, want in zip(torch.autograd.grad(y, leaves, dy), torch.autograd.grad(expected, leaves, dy), strict=True):
        torch.testing.assert_close(got, want)


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
def test_delta_equals_linear_and_leading_dims_are_rows(backend, shape):
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


@each("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@each("autocast", [False, True])
@each("shape", [(N,), (1, N)])
def test_off_rows_keep_the_bits_of_the_base(dtype, autocast, shape, backend):
    if (backend, dtype) in (("cpu", torch.float16), ("cpu", torch.float64), ("triton", torch.float64)):
        pytest.skip("it is the reference's")
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


def test_off_rows_keep_minus_zero_and_nan_bits(backend):
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


def test_all_off_is_plain_linear(backend):
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


def test_dropout_never_touches_the_base_path(backend):
    x, weight, bias, A, B = tensors()
    zero = [torch.zeros_like(a).requires_grad_() for a in A]
    y = lora_linear(x, weight, bias, zero, B, SCALES, SEGMENTS, dropout=dropout(p=(0.9, 0.9, 0.9)))
    assert torch.equal(y, linear(x, weight, bias))
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx, weight.sum(0).expand(N, K))


@each(("base", "adapter"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("float32", "float64")])
def test_mixed_dtypes(base, adapter, backend):
    base, adapter = getattr(torch, base), getattr(torch, adapter)
    x, weight, bias, A, B = tensors(base, adapter)
    if adapter == torch.float64 and backend != "reference":
        with pytest.raises(registry.BackendUnavailableError, match=r"not in torch\.float64"):
            lora_linear(x, weight, bias, A, B, SCALES, SEGMENTS)
        backend = "auto"  # which knows what to do
    with registry.use_backend(backend):
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


def test_backward_under_autocast_keeps_adapter_precision(backend):
    x, weight, bias, A, B = tensors(torch.float32)
    weight.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        y = lora_linear(x, weight, bias, A, B, SCALES, SEGMENTS)
        dA = torch.autograd.grad(y.float().sum(), A[0])[0]
    half = x.detach().bfloat16().float()
    want = SCALES[0] * (B[0].sum(0)[:, None] * half[torch.tensor(SLOT_OF_ROW) == 0].sum(0))
    torch.testing.assert_close(dA, want.detach(), rtol=1e-5, atol=1e-5)


def test_empty_batch(backend):
    _, weight, bias, A, B = tensors()
    x = torch.zeros(0, K, dtype=work_dtype())
    for segments in (Segments(starts=(), ends=(), slots=()), Segments.single(0, 1)):
        assert lora_linear(x, weight, bias, A, B, SCALES, segments).shape == (0, M)
        assert lora_delta_(torch.zeros(0, M), x, A, B, SCALES, segments).shape == (0, M)


# ---- of any size, dtype and need -------------------------------------------------------------------------------------


def segments_of(n):
    """Slot 2 first, slot 0 twice, an off run, an empty run of the absent slot 1, rows in no run at the end."""
    cuts = [0, n // 5, n // 2, n // 2 + n // 10, n // 2 + n // 10, n - n // 10]
    return Segments(starts=tuple(cuts[:-1]), ends=tuple(cuts[1:]), slots=(2, 0, -1, 1, 0))


class Case:
    """x [n, k], weight [m, k], adapters of the given ranks; the same numbers in every dtype."""

    def __init__(self, n=50, k=40, m=33, ranks=(2, 3, 5), *, dtype=torch.float32, adapter=None, scale=1.0, drop=False):
        g = torch.Generator().manual_seed(n + k)

        def make(*shape, to=dtype):
            return (scale * torch.randn(*shape, generator=g, dtype=torch.float64, device="cpu")).to(to)

        self.x, self.weight, self.bias, self.dy = make(n, k), make(m, k), make(m), make(n, m)
        self.A = [make(r, k, to=adapter or dtype) for r in ranks]
        self.B = [make(m, r, to=adapter or dtype) for r in ranks]
        self.segments = segments_of(n)
        self.on = torch.zeros(n, dtype=torch.bool, device="cpu")
        for start, end, slot in zip(self.segments.starts, self.segments.ends, self.segments.slots, strict=True):
            self.on[start:end] = slot >= 0
        row_ids = torch.arange(n, device="cpu") * 2**31 + 7
        self.dropout = Dropout(p=(0.5, 0.0, 0.25), seed=-11, row_ids=row_ids, stream=4) if drop else None

    def run(self, backend="auto", *, wide=False, delta=False, frozen=(), layout=lambda t: t):
        """y and the gradients of everything not in `frozen`, on the CPU, by name."""
        n_slots, device = len(self.A), "cpu" if backend == "reference" else torch.get_default_device()
        tensors = {"x": self.x, "weight": self.weight, "bias": self.bias}
        tensors |= {f"A{i}": w for i, w in enumerate(self.A)} | {f"B{i}": w for i, w in enumerate(self.B)}
        t = {name: layout((w.double() if wide else w).to(device, copy=True)) for name, w in tensors.items()}
        for name, w in t.items():
            w.requires_grad_(name not in frozen)
        A, B = [t[f"A{i}"] for i in range(n_slots)], [t[f"B{i}"] for i in range(n_slots)]
        drop = self.dropout
        if drop is not None:
            drop = Dropout(p=drop.p, seed=drop.seed, row_ids=drop.row_ids.to(device), stream=drop.stream)
        knobs = {"dropout": drop, "backend": backend}
        if delta:
            y = F.linear(t["x"].detach(), t["weight"], t["bias"])
            y = lora_delta_(y, t["x"], A, B, SCALES[:n_slots], self.segments, **knobs)
        else:
            y = lora_linear(t["x"], t["weight"], t["bias"], A, B, SCALES[:n_slots], self.segments, **knobs)
        y.backward((self.dy.double() if wide else self.dy).to(device))
        grads = {f"grad {name}": w.grad.cpu() for name, w in t.items() if w.grad is not None}
        return {"y": y.detach().cpu(), **grads}

    def check(self, **options):
        """By the tier of each dtype. The yardstick is the reference in the same dtypes, whose products are fp32."""
        exact, plain = self.run("reference", wide=True, **options), self.run("reference", **options)
        actual = self.run(**options)
        assert actual.keys() == plain.keys()
        for name, value in actual.items():
            assert value.dtype == plain[name].dtype
            testing.assert_ok(tier_of_dtype(value, exact[name], plain[name]), name)
        return actual


SHAPES = {  # rows, K, M, ranks
    "reference": [(50, 40, 33, (2, 3, 5))],
    "cpu": [
        (77, 53, 131, (16, 2, 3)),
        (300, 256, 96, (40, 2, 7)),
        (5, 1, 1, (1, 2, 1)),
        (33, 333, 65, (8, 2, 100)),
        (129, 17, 1000, (1, 2, 256)),
        (1200, 64, 33, (17, 2, 32)),  # several groups of rows
    ],
    "triton": [
        (50, 40, 33, (2, 3, 5)),
        *((n, 40, 33, (2, 3, 5)) for n in (1, 15, 129, 400)),  # 400: tiles of 64 rows
        (37, 16, 1, (1, 1, 1)),
        (37, 65, 130, (16, 2, 17)),
        (37, 31, 48, (33, 2, 64)),
        (37, 48, 70, (128, 2, 128)),
    ],
}


@each(("scale", "drop", "delta"), [(1.0, True, False), (1.0, False, True), (1e-3, False, False), (1e-3, True, True)])
def test_tier1(backend, scale, drop, delta):
    for shape in SHAPES[backend] if backend != "triton" or not (delta or scale < 1) else SHAPES[backend][:1]:
        actual = Case(*shape, scale=scale, drop=drop).check(delta=delta)
        if shape[0] > 4:
            assert "grad A1" not in actual  # the absent slot
            assert {"grad A0", "grad B0", "grad A2", "grad B2"} < actual.keys()


FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@each(("dtype", "adapter"), [(FP16, FP16), (FP16, FP32), (BF16, BF16), (BF16, FP32), (FP32, BF16), (BF16, FP16)])
@each("delta", [False, True])
def test_tiers_of_half_types(backend, dtype, adapter, delta):
    if dtype == FP16 and backend == "cpu":
        pytest.skip("float16 is the reference's")
    for shape in SHAPES[backend][:1] if backend == "triton" else SHAPES[backend]:
        Case(*shape, dtype=dtype, adapter=adapter, scale=0.3, drop=True).check(delta=delta)


FROZEN = ["", "x", "A0 A2", "x A0 A2", "B0 B2", "x B0 B2", "A2 B2", "x A2 B0", "A0 A1 A2 B0 B1 B2"]
FROZEN = [("weight", "bias", *names.split()) for names in FROZEN] + [("x", "A0", "A1", "A2", "B0", "B1", "B2")]


@each("frozen", FROZEN)
@each("ranks", [(2, 3, 5), (40, 3, 5)])  # one read of dy, and two
def test_frozen_tensors_get_no_gradient(backend, frozen, ranks):
    actual = Case(ranks=ranks).check(frozen=frozen)
    assert not {f"grad {name}" for name in frozen} & actual.keys()


def test_garbage_in_off_rows_stays_there(backend):
    """Between runs that end in the middle of every tile."""
    case = Case(100, 64, 96, (16, 3, 5), drop=True)  # for 70, say, oneDNN's bf16 product reads on into the next row
    case.dy[~case.on] = 0
    frozen = ("weight", "bias")
    clean = case.run(frozen=frozen)
    case.x = torch.where(case.on[:, None], case.x, torch.nan)
    dirty = case.run(frozen=frozen)
    assert dirty["y"][~case.on].isnan().all()
    for name in ("grad A0", "grad B0", "grad A2", "grad B2", "grad x"):
        assert torch.equal(dirty[name], clean[name]), name


def test_nan_of_one_slot_does_not_reach_another(backend):
    case = Case()
    case.A[2].fill_(torch.nan)
    actual, expected = case.run(), case.run("reference")
    for name, value in expected.items():
        assert torch.equal(actual[name].isnan(), value.isnan()), name
    assert actual["grad A0"].isfinite().all()


def test_any_layout_and_adapters_of_several_dtypes(backend):
    case = Case(n=30, k=20, m=12)
    plain = case.run()
    for layout in (surrounded, turned):
        got = case.run(layout=lambda t, layout=layout: layout(t) if t.dim() == 2 else t)
        alike(backend, got.values(), plain.values(), rtol=1e-5, atol=1e-5)
    case.A[2], case.B[0] = case.A[2].half(), case.B[0].bfloat16()
    mixed, plain = case.run(), case.run("reference")
    for name, value in plain.items():
        assert mixed[name].dtype == value.dtype
        torch.testing.assert_close(mixed[name], value, rtol=1e-5 if value.dtype == FP32 else 1e-2, atol=1e-5)


def test_an_expanded_gradient_and_a_strided_y(backend):
    case = Case(n=30, k=20, m=12)
    x, A, B = ([w.to(torch.get_default_device(), copy=True) for w in ws] for ws in ([case.x], case.A, case.B))
    y = torch.zeros(30, 24)[:, ::2]
    lora_delta_(y, x[0], A, B, SCALES, case.segments)
    plain = lora_delta_(torch.zeros(30, 12), x[0].requires_grad_(), A, B, SCALES, case.segments)
    torch.testing.assert_close(y, plain.detach())
    plain.sum().backward()
    case.dy = torch.ones(30, 12, device="cpu")
    want = case.run("reference", delta=True)["grad x"]
    torch.testing.assert_close(x[0].grad.cpu(), want, rtol=1e-5, atol=1e-5)


def test_many_runs_equal_one_run(backend):
    case = Case(n=24)
    case.segments = Segments.single(24, 0)
    whole = case.run()
    slots = tuple(0 if n % 3 else -1 for n in range(24))
    case.segments = Segments(starts=tuple(range(24)), ends=tuple(range(1, 25)), slots=slots)
    some, on = case.check(), torch.tensor([slot == 0 for slot in slots], device="cpu")
    torch.testing.assert_close(some["y"][on], whole["y"][on], rtol=1e-5, atol=1e-5)


@each("k", [1, 63, 64, 65, 120])
@each("dtype", [FP32, BF16])
def test_dropout_draws_the_words_of_philox(backend, dtype, k):
    """And what is dropped may be anything, forward and backward."""
    if backend == "triton" and k not in (1, 65):
        pytest.skip("the interpreter is slow")
    n = 40
    row_ids = torch.tensor([0, -1, 2**40 + 3, -(2**62), 5] * 8) + torch.arange(n) * 2**31
    eye = [torch.eye(k, dtype=dtype)]
    for seed, stream, p in ((0, 0, 0.37), (-5, 2**32 - 1, 0.1), (2**62 + 1, 7, 0.999), (-(2**63), 7, 0.5)):
        drop = Dropout(p=(p,), seed=seed, row_ids=row_ids, stream=stream)
        keep = philox.keep_mask(p, torch.tensor(seed), row_ids, stream, k)
        x = torch.where(keep, 1.0, torch.inf).to(dtype).requires_grad_()
        out = lora_delta_(torch.zeros(n, k), x, eye, eye, (1.0,), Segments.single(n, 0), dropout=drop)
        kept = torch.where(keep, 1 / (1 - p), 0.0)
        torch.testing.assert_close(out.detach(), kept)
        out.sum().backward()
        torch.testing.assert_close(x.grad.float(), kept, rtol=1e-2 if dtype == BF16 else 1e-5, atol=0)


# ---- bad input -------------------------------------------------------------------------------------------------------


@each(
    ("kind", "fields", "message"),
    [
        (Segments, ((0, 4), (5, 6), (0, 1)), r"run 1 = \[4, 6\) where the rows before 5 are taken"),
        (Segments, ((4, 0), (6, 2), (0, 1)), "expected sorted runs"),
        (Segments, ((3,), (2,), (0,)), "expected sorted runs"),
        (Segments, ((-1,), (2,), (0,)), "expected sorted runs"),
        (Segments, ((0,), (2, 4), (0,)), "of one length, got 1, 2 and 1"),
        (Segments, ((0,), (2,), (-2,)), r"slots >= -1 \(-1 is off\), got slots\[0\] = -2"),
        (Dropout, ((1.0,), 0, torch.arange(3), 0), r"0 <= p < 1, got p\[0\] = 1.0"),
        (Dropout, ((0.1,), 2**63, torch.arange(3), 0), "signed 64-bit"),
        (Dropout, ((0.1,), 0, torch.arange(3), -1), "Dropout.stream"),
        (Dropout, ((0.1,), 0, torch.arange(3).int(), 0), r"int64 \[N\], got torch.int32"),
    ],
)
def test_bad_segments_and_dropout(kind, fields, message):
    names = ("starts", "ends", "slots") if kind is Segments else ("p", "seed", "row_ids", "stream")
    with pytest.raises((ValueError, TypeError), match=message):
        kind(**dict(zip(names, fields, strict=True)))


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


def test_bad_y():
    x, _, _, A, B = tensors()
    one = Segments.single(N, 0)
    with pytest.raises(ValueError, match=r"y: expected the rows of x \(17,\), got \(16,\)"):
        lora_delta_(torch.zeros(N - 1, M), x, A, B, SCALES, one)
    with pytest.raises(ValueError, match="y: expected contiguous memory with 3 dims"):
        lora_delta_(torch.zeros(1, M, N).transpose(1, 2), x[None], A, B, SCALES, one)
    with pytest.raises(RuntimeError, match="leaf"):
        lora_delta_(torch.zeros(N, M, dtype=torch.float64, requires_grad=True), x, A, B, SCALES, one)
