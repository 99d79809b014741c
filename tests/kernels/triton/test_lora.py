"""The Triton LoRA: tiers against fp64, untouched off rows, frozen and absent slots, dropout's very bits, layouts."""

import itertools

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from rlhf_kernels.lora import DecodeLinear, Dropout, Segments, lora_delta_, lora_linear, tables
from rlhf_kernels.lora import triton as ours
from rlhf_kernels.runtime import philox, registry
from rlhf_kernels.runtime.testing import NumericReport, assert_ok, tier1, tier3
from rlhf_kernels.runtime.triton_support import INTERPRETED

from tests.kernels.checks import each
from tests.kernels.cuda_graph import detached, repeated_and_captured

NAN = float("nan")
SCALES = (0.5, 2.0, 1.5)


def segments(n):
    """Slot 2 first, slot 0 twice, an off run, an empty run of the absent slot 1, rows in no run at the end."""
    cuts = [0, n // 5, n // 2, n // 2 + n // 10, n // 2 + n // 10, n - n // 10]
    return Segments(starts=tuple(cuts[:-1]), ends=tuple(cuts[1:]), slots=(2, 0, -1, 1, 0))


def on_rows(segs, n):
    on = torch.zeros(n, dtype=torch.bool)
    for start, end, slot in zip(segs.starts, segs.ends, segs.slots, strict=True):
        on[start:end] = slot >= 0
    return on


class Case:
    """x [n, k], weight [m, k], adapters of the given ranks; the same numbers in every dtype."""

    def __init__(self, n=50, k=40, m=33, ranks=(2, 3, 5), *, dtype=torch.float32, adapter=None, scale=1.0, drop=False):
        g = torch.Generator().manual_seed(n + k)

        def make(*shape, to=dtype):
            return (scale * torch.randn(*shape, generator=g, dtype=torch.float64)).to(to)

        self.x, self.weight, self.bias, self.dy = make(n, k), make(m, k), make(m), make(n, m)
        self.A = [make(r, k, to=adapter or dtype) for r in ranks]
        self.B = [make(m, r, to=adapter or dtype) for r in ranks]
        self.segments = segments(n)
        row_ids = torch.arange(n) * 2**31 + 7
        self.dropout = Dropout(p=(0.5, 0.0, 0.25), seed=-11, row_ids=row_ids, stream=4) if drop else None

    def run(self, device, backend, *, wide=False, delta=False, frozen=()):
        """y and the gradients of everything not in `frozen`, on the CPU, by name."""
        n_slots = len(self.A)
        tensors = {"x": self.x, "weight": self.weight, "bias": self.bias}
        tensors |= {f"A{i}": w for i, w in enumerate(self.A)} | {f"B{i}": w for i, w in enumerate(self.B)}
        t = {name: (w.double() if wide else w).to(device, copy=True) for name, w in tensors.items()}
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

    def check(self, device, tier=tier1, **options):
        exact, plain = self.run("cpu", "reference", wide=True, **options), self.run("cpu", "reference", **options)
        actual = self.run(device, "triton", **options)
        assert actual.keys() == plain.keys()
        for name, value in actual.items():
            assert value.dtype == plain[name].dtype
            assert_ok(tier(value, exact[name], plain[name]), name)
        return actual


@triton.jit
def _mask_kernel(row_ids, out, seed, stream, threshold, n, D: tl.constexpr, BN: tl.constexpr):
    rows = tl.arange(0, BN).to(tl.int64)
    live = rows < n
    seed, stream, threshold = tl.load(seed), tl.load(stream), tl.load(threshold)
    for first in range(0, D, 16):
        keep = ours._keep(row_ids, rows, live, first, seed, stream, threshold, BN, 16)
        tl.store(out + rows[:, None] * D + first + tl.arange(0, 16)[None, :], keep.to(tl.uint8), mask=live[:, None])


@pytest.mark.parametrize("seed", [0, 11, -1, 2**62 + 5, -(2**63)])
@pytest.mark.parametrize("stream", [0, 7, 2**32 - 1])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.999])
def test_dropout_has_the_bits_of_philox(device, seed, stream, p):
    row_ids = torch.tensor([0, 1, 2**32 - 1, 2**32, 2**63 - 1, -3], device=device)
    out = torch.zeros(len(row_ids), 48, dtype=torch.uint8, device=device)
    numbers = [torch.tensor(x, device=device) for x in (seed, stream, int(p * 2**32))]
    _mask_kernel[(1,)](row_ids, out, *numbers, len(row_ids), D=48, BN=16)
    expected = philox.keep_mask(p, torch.tensor(seed, device=device), row_ids, stream, 48)
    assert torch.equal(out.bool(), expected)


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_tier1(device, scale, drop, delta):
    actual = Case(scale=scale, drop=drop).check(device, delta=delta)
    assert "grad A1" not in actual  # the absent slot
    assert {"grad A0", "grad B0", "grad A2", "grad B2"} < actual.keys()


@each("n", [1, 2, 15, 127, 129, 400])  # 400: tiles of 64 rows
def test_row_counts(device, n):
    case = Case(n=n, drop=True)
    case.segments = Segments(starts=(0, n // 2), ends=(n // 2, n), slots=(1, 0))
    case.check(device)


@each(("ranks", "k", "m"), [((1,), 16, 1), ((16, 17), 65, 130), ((33, 64), 31, 48), ((128,), 48, 70)])
def test_ranks_and_ragged_columns(device, ranks, k, m):
    case = Case(n=37, k=k, m=m, ranks=ranks)
    case.segments = Segments(starts=(0, 11, 20), ends=(11, 20, 35), slots=(0, len(ranks) - 1, 0))
    case.check(device)


def test_splits_and_chunks(device, monkeypatch):
    """Several splits of K and M, and slots whose rows are cut into several chunks of several tiles."""
    n_splits = set()
    shrink = ours._Call.shrink

    def spy(self, *args, **kwargs):
        result = shrink(self, *args, **kwargs)
        n_splits.add(result.shape[0])
        return result

    monkeypatch.setattr(ours._Call, "shrink", spy)
    monkeypatch.setattr(ours, "_config", lambda *_: {"BD": 16, "num_warps": 4})
    monkeypatch.setattr(ours, "TARGET_PROGRAMS", 20)
    monkeypatch.setattr(tables, "TARGET_PROGRAMS", 20)
    tables.BATCHES.clear()
    Case(n=100, k=130, m=130, ranks=(40, 3, 5)).check(device)  # two reads of dy: splits of M
    Case(n=100, k=70, m=70, drop=True).check(device)
    layouts = [table for table in tables.BATCHES.tables() if isinstance(table, tables.Layout)]
    tables.BATCHES.clear()  # made for another number of programs
    assert max(n_splits) > 1
    assert any(layout.n_tiles > layout.n_chunks > len(layout.folds) for layout in layouts)


def tier3_or_truncated(actual, exact, eager):
    """T3. The interpreter cuts fp32 down to bf16 instead of rounding, which may cost an ulp, at most 2⁻⁷ |x|."""
    if not (INTERPRETED and actual.dtype == torch.bfloat16):
        return tier3(actual, exact, eager)
    error = ((actual.double() - exact).abs() - exact.abs() * 2**-7).max().item()
    bound = 2 * (eager.double() - exact).abs().max().item()
    return NumericReport(tier="T3", error=error, bound=bound, ok=error <= bound)


def sums_in_tier1(actual, exact, eager):
    """T1 for what fp32 sums of exact products are, adapters' gradients; T3 for the rest."""
    return tier1(actual, exact, eager) if actual.dtype == torch.float32 else tier3_or_truncated(actual, exact, eager)


HALVES = [
    (torch.float16, torch.float16),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
]


@pytest.mark.parametrize(("dtype", "adapter"), HALVES)
@pytest.mark.parametrize("delta", [False, True])
def test_tier3_with_half_types(device, dtype, adapter, delta):
    Case(n=60, dtype=dtype, adapter=adapter, scale=0.3, drop=True).check(device, sums_in_tier1, delta=delta)


FROZEN = [
    ("weight", "bias"),
    ("weight", "bias", "x"),
    ("weight", "bias", "A0", "A2"),
    ("weight", "bias", "x", "A0", "A2"),
    ("weight", "bias", "B0", "B2"),
    ("weight", "bias", "x", "B0", "B2"),
    ("weight", "bias", "A2", "B2"),
    ("weight", "bias", "x", "A2", "B0"),
    ("x", "A0", "A1", "A2", "B0", "B1", "B2"),
    ("weight", "bias", "A0", "A1", "A2", "B0", "B1", "B2"),
]


@pytest.mark.parametrize("frozen", FROZEN, ids=lambda names: "-".join(names))
@pytest.mark.parametrize("ranks", [(2, 3, 5), (40, 3, 5)], ids=["one read of dy", "two reads"])
def test_frozen_tensors_get_no_gradient(device, frozen, ranks):
    actual = Case(ranks=ranks).check(device, frozen=frozen)
    assert not {f"grad {name}" for name in frozen} & actual.keys()


def test_nothing_is_computed_that_nobody_needs(device, monkeypatch):
    called = []
    for name in ("shrink", "expand", "columns"):
        method = getattr(ours._Call, name)

        def spy(self, *args, method=method, **kwargs):
            called.append(method.__name__)
            return method(self, *args, **kwargs)

        monkeypatch.setattr(ours._Call, name, spy)
    everything = ("weight", "bias", "A0", "A1", "A2", "B0", "B1", "B2")
    case = Case()
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        case.run(device, "triton", frozen=everything)
    products = [event.input_shapes[:2] for event in profile.function_events if event.name == "aten::mm"]
    assert products == [[[50, 33], [33, 40]]]  # dy W, and no dW
    assert called == ["shrink", "expand", "shrink", "expand"]  # forward, then dh and dx
    called.clear()
    case.run(device, "triton", frozen=("weight", "bias", "x", "A0", "A1", "A2"))
    assert called == ["shrink", "expand", "shrink", "columns"]  # forward, then h and dB
    called.clear()
    case.run(device, "triton", frozen=("weight", "bias"))
    assert called == ["shrink", "expand", "shrink", "columns", "columns", "expand"]


@pytest.mark.parametrize("shape", [(50,), (1, 50), (5, 10)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_off_rows_keep_the_bits_of_the_base(device, shape, dtype):
    case = Case(dtype=dtype, adapter=torch.float32)
    x, weight, bias = (t.to(device) for t in (case.x, case.weight, case.bias))
    A, B = [a.to(device) for a in case.A], [b.to(device) for b in case.B]
    x = x.view(*shape, -1)
    base = F.linear(x, weight, bias)
    y = lora_linear(x, weight, bias, A, B, SCALES, case.segments, backend="triton")
    assert y.shape == base.shape
    bits, base_bits = (t.reshape(50, -1).contiguous().view(torch.uint8).cpu() for t in (y, base))
    on = on_rows(case.segments, 50)
    assert torch.equal(bits[~on], base_bits[~on])
    assert (bits[on] != base_bits[on]).any(1).all()


def test_delta_leaves_off_rows_alone(device):
    case = Case()
    off = ~on_rows(case.segments, 50)
    y = torch.full((50, 33), -0.0)
    y.view(torch.int32)[off.nonzero()[0]] = 0x7FA0BEEF
    changed = lora_delta_(
        y.to(device, copy=True), case.x.to(device), [a.to(device) for a in case.A], [b.to(device) for b in case.B],
        SCALES, case.segments, backend="triton",
    )  # fmt: skip
    assert torch.equal(changed.cpu().view(torch.int32)[off], y.view(torch.int32)[off])
    assert (changed.cpu()[~off] != 0).all()


def test_garbage_in_off_rows_stays_there(device):
    case = Case(drop=True)
    on = on_rows(case.segments, 50)
    case.dy[~on] = 0
    clean = case.run(device, "triton", frozen=("weight", "bias"))
    case.x = torch.where(on[:, None], case.x, NAN)
    dirty = case.run(device, "triton", frozen=("weight", "bias"))
    assert dirty["y"][~on].isnan().all()
    for name in ("grad A0", "grad B0", "grad A2", "grad B2", "grad x"):
        assert torch.equal(dirty[name], clean[name]), name


def test_nan_of_one_slot_does_not_reach_another(device):
    case = Case()
    case.A[2].fill_(NAN)
    actual, expected = case.run(device, "triton"), case.run("cpu", "reference")
    for name, value in expected.items():
        assert torch.equal(actual[name].isnan(), value.isnan()), name
    assert actual["grad A0"].isfinite().all()


def test_dropped_inf_is_gone(device):
    case = Case(drop=True)
    keep = philox.keep_mask(0.25, torch.tensor(-11), case.dropout.row_ids[:1], 4, 40)[0]
    case.x[0, int((~keep).nonzero()[0])] = float("inf")  # row 0 carries slot 2
    A, B = ([w.to(device, copy=True).requires_grad_() for w in ws] for ws in (case.A, case.B))
    drop = Dropout(p=case.dropout.p, seed=-11, row_ids=case.dropout.row_ids.to(device), stream=4)
    x = case.x.to(device).requires_grad_()
    y = torch.zeros(50, 33, device=device)
    y = lora_delta_(y, x, A, B, SCALES, case.segments, dropout=drop, backend="triton")
    y.backward(case.dy.to(device))
    assert all(t.isfinite().all() for t in (y, x.grad, A[2].grad, B[2].grad))


def test_layouts(device):
    """Rows and adapters that are strided, dy expanded, adapters of several dtypes."""
    case = Case(n=30, k=20, m=12)
    expected = case.run("cpu", "reference")
    wide_x = torch.full((30, 50), NAN, device=device)
    wide_x[:, 3:43:2] = case.x.to(device)
    weight, bias = case.weight.to(device), case.bias.to(device)
    A = [a.to(device).T.contiguous().T for a in case.A]
    B = [b.to(device).T.contiguous().T for b in case.B]
    for x in (wide_x[:, 3:43:2], wide_x[:, 3:43:2].T.contiguous().T):
        y = lora_linear(x, weight, bias, A, B, SCALES, case.segments, backend="triton")
        torch.testing.assert_close(y.cpu(), expected["y"], rtol=1e-5, atol=1e-5)
    x = case.x.to(device, copy=True).requires_grad_()
    lora_linear(x, weight, bias, A, B, SCALES, case.segments, backend="triton").sum().backward()
    case.dy = torch.ones(30, 12)
    torch.testing.assert_close(x.grad.cpu(), case.run("cpu", "reference")["grad x"], rtol=1e-5, atol=1e-5)
    case.A[2], case.B[0] = case.A[2].half(), case.B[0].bfloat16()
    mixed, plain = case.run(device, "triton"), case.run("cpu", "reference")
    for name, value in plain.items():
        assert mixed[name].dtype == value.dtype
        torch.testing.assert_close(mixed[name], value, rtol=1e-5 if value.dtype == torch.float32 else 1e-2, atol=1e-5)


def test_many_runs_equal_one_run(device):
    case = Case(n=24)
    case.segments = Segments.single(24, 0)
    whole = case.run(device, "triton")
    case.segments = Segments(
        starts=tuple(range(24)), ends=tuple(range(1, 25)), slots=tuple(0 if n % 3 else -1 for n in range(24))
    )
    some, on = case.run(device, "triton"), on_rows(case.segments, 24)
    torch.testing.assert_close(some["y"][on], whole["y"][on], rtol=1e-5, atol=1e-5)
    case.check(device)


def test_tables_are_made_once(device, monkeypatch):
    case = Case()
    x, weight = case.x.to(device), case.weight.to(device)
    A, B = [a.to(device) for a in case.A], [b.to(device) for b in case.B]

    def forward():
        return lora_linear(x, weight, None, A, B, SCALES, case.segments, backend="triton")

    expected = forward()
    monkeypatch.setattr(tables, "upload", None)  # a second upload would fail
    assert torch.equal(forward(), expected)
    A[0].mul_(2)  # a table holds addresses, not numbers
    assert not torch.equal(forward(), expected)


def test_old_tables_make_room(device, monkeypatch):
    for cache in (tables.ADAPTERS, tables.BATCHES):
        monkeypatch.setattr(cache, "entries", 2)
        cache.clear()
    for n in (20, 30, 40):
        Case(n=n).check(device)
    assert max(len(tables.ADAPTERS.tables()), len(tables.BATCHES.tables())) <= 2


def test_what_it_refuses(device):
    x, weight = torch.zeros(4, 8, device=device), torch.zeros(8, 8, device=device)
    A, B = torch.zeros(129, 8, device=device), torch.zeros(8, 129, device=device)
    with pytest.raises(ValueError, match="at most 128"):
        lora_linear(x, weight, None, [A], [B], [1.0], Segments.single(4, 0), backend="triton")
    with pytest.raises(ValueError, match=r"not in torch.float64"):
        lora_linear(
            x, weight, None, [A[:2].double()], [B[:, :2].double()], [1.0], Segments.single(4, 0), backend="triton"
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k", "m", "rank"), [(8192, 4096, 1024, 16), (3000, 1000, 4096, 64), (64, 4096, 4096, 8)])
def test_large_same_bits_every_time_and_in_a_graph(device, dtype, n, k, m, rank):
    case = Case(n, k, m, (rank, 8, rank), dtype=dtype, adapter=torch.float32, scale=0.1, drop=True)
    case.check(device, tier1 if dtype == torch.float32 else sums_in_tier1)
    first = case.run(device, "triton", frozen=("weight", "bias"))
    for _ in range(10):
        again = case.run(device, "triton", frozen=("weight", "bias"))
        assert all(torch.equal(again[name], value) for name, value in first.items())


@pytest.mark.gpu
def test_in_a_graph(device):
    case = Case(512, 256, 384, (16, 8, 32), dtype=torch.bfloat16, adapter=torch.float32, drop=True)
    x, weight, dy = case.x.to(device).requires_grad_(), case.weight.to(device), case.dy.to(device)
    A, B = ([w.to(device).requires_grad_() for w in ws] for ws in (case.A, case.B))
    drop = Dropout(p=(0.5, 0.0, 0.25), seed=3, row_ids=torch.arange(512, device=device), stream=1)

    def step():
        y = lora_linear(x, weight, None, A, B, SCALES, case.segments, dropout=drop, backend="triton")
        return detached(y, *torch.autograd.grad(y, [x, A[0], A[2], B[0], B[2]], dy))

    repeated_and_captured(step, step())
    fresh = Segments(starts=(3,), ends=(500,), slots=(1,))
    with pytest.raises(RuntimeError, match="run the step once before"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        lora_linear(x, weight, None, A, B, SCALES, fresh, backend="triton")


@pytest.mark.parametrize(
    ("dtype", "adapter"),
    [(torch.bfloat16, torch.float32), pytest.param(torch.float32, torch.float32, marks=pytest.mark.long)],
)
def test_exact_mode_gives_a_slot_the_bits_of_its_own_rows(device, monkeypatch, dtype, adapter):
    """In any company: rows of other slots with larger ranks, off rows, other places; in decoding, too."""
    torch.manual_seed(0)
    for module in (ours, tables):  # so that the number of tiles would decide at once
        monkeypatch.setattr(module, "TARGET_PROGRAMS", 4)
    n, k, m, ranks = 50, 520, 100, (5, 40, 16)
    x, dy = (torch.randn(n, size, device=device, dtype=dtype) for size in (k, m))
    weight = torch.randn(m, k, device=device, dtype=dtype)
    adapters = [[torch.randn(*size, device=device, dtype=adapter) for size in ((r, k), (m, r))] for r in ranks]

    def run(runs, rows):
        """y, dx and the gradients of each slot's pair; runs: (slot, rows) one after another."""
        leaves = [x[rows].clone().requires_grad_(), *(w.clone().requires_grad_() for pair in adapters for w in pair)]
        ends = list(itertools.accumulate(size for _, size in runs))
        starts = [0, *ends[:-1]]
        segs = Segments(starts=tuple(starts), ends=tuple(ends), slots=tuple(slot for slot, _ in runs))
        call = (weight, None, leaves[1::2], leaves[2::2], [0.5, 2.0, 1.5], segs)
        y = lora_linear(leaves[0], *call, backend="triton")
        grads = torch.autograd.grad(y, leaves, dy[rows], allow_unused=True)
        with torch.no_grad():
            assert torch.equal(DecodeLinear(*call, backend="triton")(x[rows]), y)
            if len(rows) > 20:
                first = len(rows) - 1  # one row of the last run, as a step decodes it
                alone = Segments(starts=(0,), ends=(1,), slots=(runs[-1][0],))
                assert torch.equal(DecodeLinear(*call[:-1], alone, backend="triton")(x[rows[first:]]), y[first:])
        return y.detach(), *grads

    order = list(range(n))
    with registry.use_exact(), registry.use_backend("triton"):  # the base product's too, as on a GPU
        whole = run([(0, 18), (-1, 3), (1, 12), (2, 17)], order)
        for slot, rows in ((0, order[:18]), (1, order[21:33]), (2, order[33:])):
            alone = run([(slot, len(rows))], rows)
            for got, want in zip(alone[:2], whole[:2], strict=True):
                assert torch.equal(got, want[rows])
            for i in (2 + 2 * slot, 3 + 2 * slot):
                assert torch.equal(alone[i], whole[i])
        moved = run([(1, 12), (0, 18)], order[21:33] + order[:18])
        assert torch.equal(moved[0], whole[0][order[21:33] + order[:18]])
        assert all(torch.equal(moved[i], whole[i]) for i in (2, 3, 4, 5))


def test_exact_mode_refuses_adapters_of_two_dtypes(device):
    x, weight = torch.randn(4, 8, device=device), torch.randn(6, 8, device=device)
    A = [torch.randn(2, 8, device=device), torch.randn(2, 8, device=device, dtype=torch.bfloat16)]
    B = [torch.randn(6, 2, device=device), torch.randn(6, 2, device=device, dtype=torch.bfloat16)]
    segs = Segments(starts=(0, 2), ends=(2, 4), slots=(0, 1))
    with registry.use_exact(), pytest.raises(TypeError, match="A: expected adapters of one dtype in exact mode"):
        lora_linear(x, weight, None, A, B, [1.0, 1.0], segs, backend="triton")
