"""The Triton LoRA: properties of every backend, splits and chunks, work left out, tables, exact mode, graphs."""

import itertools

import pytest
import torch
from rlhf_kernels.lora import DecodeLinear, Dropout, Segments, lora_linear, tables, triton as ours
from rlhf_kernels.runtime import registry

from tests.kernels.checks import detached, repeated_and_captured, same_bits
from tests.kernels.test_lora import (  # noqa: F401
    SCALES,
    Case,
    test_an_expanded_gradient_and_a_strided_y,
    test_any_layout_and_adapters_of_several_dtypes,
    test_dropout_draws_the_words_of_philox,
    test_frozen_tensors_get_no_gradient,
    test_garbage_in_off_rows_stays_there,
    test_many_runs_equal_one_run,
    test_nan_of_one_slot_does_not_reach_another,
    test_off_rows_keep_minus_zero_and_nan_bits,
    test_off_rows_keep_the_bits_of_the_base,
    test_tier1,
    test_tiers_of_half_types,
)


def test_splits_and_chunks(on_triton, monkeypatch):
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
    Case(n=100, k=130, m=130, ranks=(40, 3, 5)).check()  # two reads of dy: splits of M
    Case(n=100, k=70, m=70, drop=True).check()
    layouts = [table for table in tables.BATCHES.tables() if isinstance(table, tables.Layout)]
    tables.BATCHES.clear()  # made for another number of programs
    assert max(n_splits) > 1
    assert any(layout.n_tiles > layout.n_chunks > len(layout.folds) for layout in layouts)


def test_nothing_is_computed_that_nobody_needs(on_triton, monkeypatch):
    called = []
    for name in ("shrink", "expand", "columns"):
        method = getattr(ours._Call, name)

        def spy(self, *args, method=method, **kwargs):
            called.append(method.__name__)
            return method(self, *args, **kwargs)

        monkeypatch.setattr(ours._Call, name, spy)
    everything = ("weight", "bias", "A0", "A1", "A2", "B0", "B1", "B2")
    case = Case()
    with torch.autograd.profiler.profile(record_shapes=True) as profile, registry.use_backend("auto"):
        case.run("triton", frozen=everything)  # and torch's product, as without exact mode
    products = [event.input_shapes[:2] for event in profile.function_events if event.name == "aten::mm"]
    assert products == [[[50, 33], [33, 40]]]  # dy W, and no dW
    assert called == ["shrink", "expand", "shrink", "expand"]  # forward, then dh and dx
    called.clear()
    case.run(frozen=("weight", "bias", "x", "A0", "A1", "A2"))
    assert called == ["shrink", "expand", "shrink", "columns"]  # forward, then h and dB
    called.clear()
    case.run(frozen=("weight", "bias"))
    assert called == ["shrink", "expand", "shrink", "columns", "columns", "expand"]


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


def test_old_tables_make_room(on_triton, monkeypatch):
    for cache in (tables.ADAPTERS, tables.BATCHES):
        monkeypatch.setattr(cache, "entries", 2)
        cache.clear()
    for n in (20, 30, 40):
        Case(n=n).check()
    assert max(len(tables.ADAPTERS.tables()), len(tables.BATCHES.tables())) <= 2


def test_what_it_refuses(device):
    x, weight = torch.zeros(4, 8, device=device), torch.zeros(8, 8, device=device)
    A, B = torch.zeros(129, 8, device=device), torch.zeros(8, 129, device=device)
    for a, b, message in ((A, B, "at most 128"), (A[:2].double(), B[:, :2].double(), r"not in torch.float64")):
        with pytest.raises(ValueError, match=message):
            lora_linear(x, weight, None, [a], [b], [1.0], Segments.single(4, 0), backend="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k", "m", "rank"), [(8192, 4096, 1024, 16), (3000, 1000, 4096, 64), (64, 4096, 4096, 8)])
def test_large_same_bits_every_time_and_in_a_graph(on_triton, dtype, n, k, m, rank):
    case = Case(n, k, m, (rank, 8, rank), dtype=dtype, adapter=torch.float32, scale=0.1, drop=True)
    case.check()
    first = case.run(frozen=("weight", "bias"))
    for _ in range(10):
        same_bits(case.run(frozen=("weight", "bias")).values(), first.values())


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
    n, k, m, ranks = 50, 264, 100, (5, 40, 16)
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
