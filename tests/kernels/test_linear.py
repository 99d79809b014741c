"""`linear`: against float64 on every set, bits of a row in any company, hostile memory, gradients, bad input."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from rlhf_kernels import Segments, lora_linear
from rlhf_kernels.linear import linear, native as cpu, packed, reference
from rlhf_kernels.runtime import native, registry
from rlhf_kernels.runtime.kernel_table import Entry, KernelTable
from rlhf_kernels.runtime.testing import assert_ok, tier1
from rlhf_kernels.runtime.triton_support import INTERPRETED

from .checks import ISAS, each, in_any_company, needs_native, same_bits, threads_change_no_bit, tier_of_dtype
from .dense import surrounded, turned

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


@pytest.fixture(params=ISAS)
def backend(request):
    """A backend that has kernels, on every instruction set."""
    with native.use_isa(request.param):
        yield "cpu"


def make(n, k, m, dtype, seed=0, scale=1.0):
    """x, weight, bias and dy."""
    g, where = torch.Generator().manual_seed(seed), torch.get_default_device()
    draw = lambda *shape: (scale * torch.randn(*shape, generator=g, device="cpu")).to(where, dtype)  # noqa: E731
    return draw(n, k), draw(m, k), draw(m), draw(n, m)


def of(backend):
    return registry.implementation("linear", backend)


def products(implementation, x, weight, bias, dy):
    return (
        implementation.forward(x, weight, bias),
        implementation.input_gradient(dy, weight),
        implementation.weight_gradient(dy, x),
    )


# N, K, M: a few rows and many, whole tiles and ragged ones, a single column, several blocks of rows and of columns
SHAPES = [(1, 32, 64), (5, 33, 70), (32, 64, 65), (33, 96, 100), (77, 130, 31), (200, 257, 129), (800, 40, 70)]
SHAPES += [(40, 800, 1000), (3, 1, 1)]
TRITON_SHAPES = [(1, 32, 64), (5, 33, 70), (129, 40, 130), (2, 200, 31), (3, 1, 1)]


@each(("dtype", "scale"), [(FP32, 1.0), (FP32, 1e-3), (BF16, 1.0), (FP16, 0.1)])
def test_tiers(backend, dtype, scale):
    for shape in TRITON_SHAPES if backend == "triton" else SHAPES:
        given = make(*shape, dtype, scale=scale)
        exact = products(reference, *(t.double() for t in given))
        # in fp16 torch's own products may sum in fp16: theirs are taken from float32, rounded once
        wide = products(reference, *(t.float() for t in given))
        for name, ours, truth, plain in zip(("y", "dx", "dW"), products(of(backend), *given), exact, wide, strict=True):
            assert ours.dtype == dtype
            assert ours.is_contiguous()
            assert_ok(tier_of_dtype(ours, truth, plain.to(dtype)), f"{name} of {shape}")


@each("dtype", [FP32, BF16, FP16])
@each("k", [31, 300])  # one piece of the depth, and several
def test_bits_of_a_row_depend_on_that_row_alone(backend, dtype, k):
    """Few rows take another way through W than many, with the same bits."""
    n, k = (135, min(k, 100)) if INTERPRETED else (300 if backend == "triton" else 130, k)
    x, weight, bias, dy = make(n, k, 70, dtype)

    def run(x, dy):
        return of(backend).forward(x, weight, bias), of(backend).input_gradient(dy, weight)

    order = torch.randperm(n)
    # also from an address that is no multiple of 16 bytes on
    slices = [slice(*ends) for ends in ((0, 1), (3, 30), (7, 39), (7, 72), (120, 130))]
    in_any_company(run, [x, dy], [order, order[:2], order[:15], *slices])


@each("dtype", [FP32, BF16, FP16])
@each("n", [9, 40])
def test_strided_and_surrounded_by_nan(backend, dtype, n):
    """Rows of every matrix with NaN before, between and behind them; every second column; turned matrices."""
    x, weight, bias, dy = make(n, 45, 37, dtype)

    def gaps(t):
        wide = torch.full((t.shape[0], 2 * t.shape[1]), torch.nan, dtype=dtype)
        wide[:, ::2] = t
        return wide[:, ::2]

    expected = products(of(backend), x, weight, bias, dy)
    for change in (surrounded, gaps, turned):
        same_bits(products(of(backend), change(x), change(weight), bias, change(dy)), expected)
    for b in (gaps(bias[None])[0], bias[:1].expand(37)):
        got = linear(x, weight, b, backend=backend)
        assert torch.equal(got, linear(x, weight, b.contiguous(), backend=backend))
    assert torch.equal(linear(x, weight, gaps(bias[None])[0], backend=backend), expected[0])


def test_a_nan_or_infinity_stays_in_its_row(backend):
    x, weight, bias, _ = make(40, 33, 20, FP32)
    clean = of(backend).forward(x, weight, bias)
    for n, value in ((2, torch.nan), (39, torch.inf)):
        x[n, 5] = value
    for rows in (slice(0, 40), slice(0, 3)):  # many, and a few
        y = of(backend).forward(x[rows], weight, bias)
        others = [i for i in range(y.shape[0]) if i not in (2, 39)]
        assert torch.equal(y[others], clean[rows][others])
        assert not any(y[i].isfinite().any() for i in (2, 39) if i < len(y))


@each("shape", [(0, 5, 7), (5, 0, 7), (40, 0, 7), (5, 7, 0)])
def test_empty(backend, shape):
    x, weight, bias, dy = make(*shape, FP32)
    if backend == "triton" and shape[1] == 0:
        pytest.skip("no depth")
    same_bits(products(of(backend), x, weight, bias, dy), (F.linear(x, weight, bias), dy @ weight, dy.t() @ x))


@each("trained", [False, True])
def test_gradients_are_those_of_f_linear(backend, trained):
    leaves = []
    functions = (lambda *a: linear(*a, backend=backend)), (lambda *a: linear(*a, backend="reference")), F.linear
    for function, dtype in zip((*functions, F.linear), (FP32, FP32, FP32, FP64), strict=True):
        x, weight, bias, dy = (t.to(dtype) for t in make(12, 24, 16, FP32))
        x = x.view(3, 4, 24).requires_grad_()
        weight.requires_grad_(trained)
        bias.requires_grad_(trained)
        function(x, weight, bias).backward(dy.view(3, 4, 16))
        leaves.append((x.grad, weight.grad, bias.grad))
    for ours, refs, plain, exact in zip(*leaves, strict=True):
        assert (ours is None) == (refs is None) == (exact is None)
        if ours is not None:
            assert torch.equal(refs, plain)
            assert_ok(tier1(ours, exact, plain))
    x, weight, bias, _ = make(12, 24, 16, FP32)
    linear(x.requires_grad_(), weight, bias, backend=backend).sum().backward()  # an expanded dy
    assert_ok(tier1(x.grad, weight.double().sum(0).expand(12, 24), weight.sum(0).expand(12, 24)))


def test_bits_do_not_depend_on_threads(isa):
    x, weight, bias, dy = make(900, 160, 500, FP32)  # work enough for threads, of twenty rows too
    threads_change_no_bit(lambda: (*products(cpu, x, weight, bias, dy), cpu.forward(x[:20], weight, bias)))


@needs_native
def test_a_frozen_weight_keeps_no_input_for_its_gradient():
    x, weight, bias, _ = make(64, 32, 16, FP32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        linear(x.requires_grad_(), weight, bias, backend="cpu")
    assert (16, 32) in kept
    assert (64, 32) not in kept


@needs_native
def test_auto_takes_the_own_product_only_where_it_was_measured(monkeypatch):
    x, weight, bias, _ = make(6, 8, 4, BF16)
    assert registry.resolve("linear", "auto", x, weight.shape) == "reference"
    ms = {"measured": {"cpu": 1.0, "reference": 8.0}}
    entry = Entry("linear", native.isa(), "bfloat16", (4, 8), "cpu", ms)
    registry.begin_run()
    monkeypatch.setattr(registry, "_table", KernelTable(source="test", entries=(entry,)))
    assert registry.resolve("linear", "auto", x, weight.shape) == "cpu"
    assert registry.resolve("linear", "auto", x.float(), weight.shape) == "reference"
    # off rows of lora_linear are those of linear, whoever multiplies
    A, B = [torch.randn(2, 8)], [torch.randn(4, 2)]
    y = lora_linear(x, weight, bias, A, B, [1.0], Segments(starts=(0, 3), ends=(3, 6), slots=(-1, 0)))
    assert torch.equal(y[:3], linear(x, weight, bias)[:3])
    assert torch.equal(y[:3], cpu.forward(x, weight, bias)[:3])


def test_autocast_is_that_of_f_linear():
    x, weight, bias, _ = make(6, 8, 4, FP32)
    with torch.autocast("cpu", BF16):
        assert torch.equal(linear(x, weight, bias, backend="reference"), F.linear(x, weight, bias))
        if ISAS:
            assert linear(x, weight, bias, backend="cpu").dtype == BF16


@each(
    ("change", "error", "message"),
    [
        (lambda x, w, b: ([1.0, 2.0], w, b), TypeError, "^x: expected a tensor, got"),
        (lambda x, w, b: (x, None, b), TypeError, "^weight: expected a tensor, got"),
        (lambda x, w, b: (x.int(), w, b), TypeError, "x: expected a floating tensor, got torch.int32"),
        (lambda x, w, b: (x[..., :3], w, b), ValueError, r"weight: expected shape \[M, 3\], got \(4, 8\)"),
        (lambda x, w, b: (x, w[0], b), ValueError, r"weight: expected shape \[M, 8\], got \(8,\)"),
        (lambda x, w, b: (x, w, b[:3]), ValueError, r"bias: expected shape \[4\], got \(3,\)"),
        (lambda x, w, b: (x, w.double(), b), TypeError, "weight: expected torch.float32 on cpu like x"),
        (lambda x, w, b: (x, w, b.to("meta")), TypeError, "bias: expected torch.float32 on cpu like x"),
    ],
)
def test_bad_input(change, error, message):
    x, weight, bias, _ = make(6, 8, 4, FP32)
    with pytest.raises(error, match=message):
        linear(*change(x, weight, bias))


# ---- packed copies of frozen weights ---------------------------------------------------------------------------------


@pytest.fixture
def keep():
    """A budget for copies, none of which outlives the test."""
    packed.set_budget(2**24)
    yield
    packed.set_budget(None)


@each("dtype", [FP32, BF16, FP16])
@each("shape", [(5, 33, 70), (40, 96, 300), (200, 257, 129), (40, 800, 1000)])
def test_a_kept_copy_changes_no_bit(isa, keep, dtype, shape):
    _, weight, _, dy = make(*shape, dtype)
    per_call = cpu.input_gradient(dy, weight)
    size = packed.size(dtype, shape[1], shape[2])
    for rows in (slice(None), slice(None), slice(0, 3)):  # the second call makes the copy, the third finds it
        assert torch.equal(cpu.input_gradient(dy[rows], weight), per_call[rows])
    assert packed.held() == size
    assert (size > 0) == (dtype == FP32 or (dtype == BF16 and native.multiplies_bf16()))


@needs_native
def test_copies_stay_within_their_budget(keep):
    _, first, _, dy = make(8, 64, 48, FP32)
    second = first + 1
    packed.set_budget(packed.size(FP32, 64, 48))
    for weight in (first, second, first, second):
        assert torch.equal(cpu.input_gradient(dy, weight), cpu.input_gradient(dy, weight.clone()))
    assert packed.held() == packed.size(FP32, 64, 48) == packed.planned([(FP32, 64, 48)] * 2)
    packed.set_budget(0)
    for _ in range(3):
        cpu.input_gradient(dy, first)
    assert packed.held() == 0


@needs_native
@each("change", ["in place", "through data", "one element through data", "another tensor"])
def test_a_changed_weight_is_packed_anew(keep, change):
    _, weight, _, dy = make(8, 60, 100, FP32)
    for _ in range(3):
        cpu.input_gradient(dy, weight)
    if change == "in place":
        weight[7, 9] += 1.0
    elif change == "another tensor":
        weight = weight + 1.0
    else:
        weight.data[(99, 59) if change == "one element through data" else slice(None)] += 1.0
    for _ in range(3):
        assert torch.equal(cpu.input_gradient(dy, weight), cpu.input_gradient(dy, weight.clone()))


@needs_native
def test_a_copy_goes_with_its_weight_and_trained_ones_have_none(keep):
    _, weight, _, dy = make(8, 64, 48, FP32)
    for _ in range(2):
        cpu.input_gradient(dy, weight)
    assert packed.held() > 0
    del weight
    for _ in range(2):
        cpu.input_gradient(dy, torch.zeros(48, 64, requires_grad=True))
    cpu.input_gradient(dy, torch.zeros(48, 64))  # whoever comes next makes room
    assert packed.held() == 0
    with torch.inference_mode():
        inference = torch.zeros(48, 64)
        for _ in range(3):
            cpu.input_gradient(dy, inference)
    assert packed.held() == 0


@needs_native
@each("part", [(slice(1, None, 2), slice(None)), (slice(None), slice(5, 6)), (slice(None), slice(48, 64))])
@each("k", [80, 1024])  # one turn compares every fifth piece of rows of five, every 64th of 64
def test_changes_of_some_columns_are_seen_at_once(keep, part, k):
    _, weight, _, dy = make(2, k, 4096, FP32)
    for _ in range(2):
        cpu.input_gradient(dy, weight)
    for _ in range(3):
        weight.data[part] += 1.0
        assert torch.equal(cpu.input_gradient(dy, weight), cpu.input_gradient(dy, weight.clone()))


@needs_native
@each("dtype", [FP32, BF16])
def test_a_single_element_is_seen_within_as_many_uses_as_promised(keep, dtype):
    _, weight, _, dy = make(2, 640, 1024, dtype)
    for _ in range(3):
        cpu.input_gradient(dy, weight)
    weight.data[700, 333] += 1.0
    for _ in range(weight.numel() // 65536 + 1):
        found = cpu.input_gradient(dy, weight)
    assert torch.equal(found, cpu.input_gradient(dy, weight.clone()))


@needs_native
@each("dtype", [FP32, BF16])
def test_merging_an_adapter_as_peft_does_packs_anew(keep, isa, dtype):
    """A small delta moves a few of the elements in bf16, and `Tensor.data` counts no change."""
    _, weight, _, dy = make(8, 256, 256, dtype)
    for _ in range(2):
        cpu.input_gradient(dy, weight)
    for _ in range(20):
        before = weight.clone()
        weight.data += (1e-4 * torch.randn(256, 256)).to(dtype)
        assert not torch.equal(before, weight)
        assert torch.equal(cpu.input_gradient(dy, weight), cpu.input_gradient(dy, weight.clone()))


def test_a_bad_budget():
    with pytest.raises(ValueError, match="bytes_: expected a number from 0 on or None, got -1"):
        packed.set_budget(-1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("", "budget 268435456", marks=pytest.mark.long),
        ("3", "budget 3145728"),
        pytest.param("256M", "got '256M'", marks=pytest.mark.long),
    ],
)
def test_the_budget_of_the_environment_is_read_at_import(text, expected):
    code = "from rlhf_kernels.linear import packed; print('budget', packed.budget())"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, packed.ENVIRONMENT_VARIABLE: text},
        capture_output=True,
        text=True,
        check=False,
    )
    assert expected in run.stdout + run.stderr
    assert (run.returncode == 0) == expected.startswith("budget")


@each("power", [-128, -133])
def test_results_below_the_smallest_normal_number_stay(isa, power):
    """But a CPU's own products of bf16 take them for 0."""
    x = torch.full((3, 32), 2.0**-65, dtype=BF16)
    weight = torch.full((48, 32), 2.0 ** (power + 60), dtype=BF16)
    expected = torch.full((3, 48), 0.0 if native.multiplies_bf16() else 2.0**power).to(BF16)
    assert torch.equal(cpu.forward(x, weight, None), expected)
    assert torch.equal(cpu.forward(x.float(), weight.float(), None), torch.full((3, 48), 2.0**power))


# ---- how it is called ------------------------------------------------------------------------------------------------


def test_torch_s_linear_serves_where_the_own_one_cannot():
    """Meta tensors, `torch.func`, and a default that has no linear."""
    x, weight, bias, _ = make(6, 33, 96, FP32)
    assert linear(x.to("meta"), weight.to("meta")).shape == (6, 96)
    ours, torchs = (torch.func.grad(lambda x, f=f: f(x, weight, bias).square().sum())(x) for f in (linear, F.linear))
    assert torch.equal(ours, torchs)
    with registry.use_backend("cuda"):
        assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))


@needs_native
def test_there_is_no_second_derivative():
    x, weight, bias, _ = make(6, 33, 96, FP32)
    x.requires_grad_()
    (dx,) = torch.autograd.grad(linear(x, weight, bias, backend="cpu").square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="linear has no second derivative"):
        dx.square().sum().backward()
