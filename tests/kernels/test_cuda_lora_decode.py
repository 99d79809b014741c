"""Decoding through the cuda backend of LoRA: on a GPU, and its kernel as fibers on the CPU, in clusters and without."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from rlhf_kernels.lora import DecodeLinear, Segments, cuda, decode_delta_, lora_linear, tables
from rlhf_kernels.runtime import registry
from rlhf_kernels.runtime.testing import assert_ok, tier1, tier2

from .checks import capture, each, in_any_company

NAN, INF = float("nan"), float("inf")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True, params=[True, False], ids=["clusters", "alone"])
def clusters(request, monkeypatch):
    """Every test with blocks that share their memory and with blocks that do not."""
    real = cuda.has_clusters
    monkeypatch.setattr(cuda, "has_clusters", lambda at: request.param and (at.type != "cuda" or real(at)))
    return request.param


class Case:
    """x [n, k], y [n, m], a slot per rank, and the slot of every row: mixed, some off."""

    def __init__(
        self, device, n=11, k=200, m=75, ranks=(4, 9), *, dtype=torch.float32, adapter=torch.float32, scale=1.0
    ):
        g = torch.Generator().manual_seed(n + k + m)

        def make(*shape, to):
            return (scale * torch.randn(*shape, generator=g, dtype=torch.float64)).to(to).to(device)

        self.x, self.y = make(n, k, to=dtype), make(n, m, to=dtype)
        self.A = [make(r, k, to=adapter) for r in ranks]
        self.B = [make(m, r, to=adapter) for r in ranks]
        self.scales = [0.5 + i for i in range(len(ranks))]
        self.slots = ((torch.arange(n) * 7 + 1) % (len(ranks) + 1) - 1).to(device)

    def run(self, *, x=None, row_slot=None):
        return self.rows(self.y, self.x if x is None else x, self.slots if row_slot is None else row_slot)[0]

    def rows(self, y, x, row_slot):
        return [self.added_to(y.clone(), x, row_slot)]

    @torch.no_grad()
    def added_to(self, y, x, row_slot):
        return decode_delta_(y, x, self.A, self.B, self.scales, row_slot, backend="cuda")

    def expected(self, dtype):
        """y + delta in `dtype`, on the CPU."""
        y = self.y.cpu().to(dtype)
        for n, slot in enumerate(self.slots.tolist()):
            if slot >= 0:
                a, b = self.A[slot].cpu().to(dtype), self.B[slot].cpu().to(dtype)
                y[n] += b @ (a @ self.x[n].cpu().to(dtype)) * self.scales[slot]
        return y


RANKS = [(1,), (8, 16), (3, 30, 5), (128, 64)]
SHAPES = [(1, 1, 1), (2, 128, 32), (8, 129, 33), (3, 1030, 300), (17, 64, 40)]


@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.long)])
def test_tier1(device, half):
    """Every second pair per push, which has all ranks and all shapes."""
    for ranks, shape in list(itertools.product(RANKS, SHAPES))[half::2]:
        case = Case(device, *shape, ranks, scale=1e-3 if shape == SHAPES[-1] else 1.0)
        got, exact, plain = case.run().cpu(), case.expected(torch.float64), case.expected(torch.float32)
        assert_ok(tier1(got, exact, plain), f"{ranks} {shape}")


@each("dtype", DTYPES)
@each("adapter", [torch.float32, torch.bfloat16])
def test_y_is_rounded_once(device, dtype, adapter):
    case = Case(device, 12, 256, 64, (16, 8), dtype=dtype, adapter=adapter, scale=0.3)
    got, exact = case.run().cpu(), case.expected(torch.float64)
    assert got.dtype == dtype
    kept = exact.abs() > 0.05  # where base and delta cancel, fp32's error is large in units of the small result
    fp32 = dtype == torch.float32
    assert_ok(tier1(got, exact, case.expected(dtype)) if fp32 else tier2(got[kept], exact[kept]), "y")


def test_neither_the_other_rows_nor_their_order_change_a_row_s_bits(device):
    case = Case(device, 40, 130, 40, (16, 5, 40))
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0)).to(device)
    parts = [part for n in (1, 15, 17) for part in (slice(n), slice(n, None))]
    in_any_company(case.rows, [case.y, case.x, case.slots], [slice(None), *parts, order])


@each("dtype", DTYPES)
def test_off_rows_are_neither_read_nor_written(device, dtype):
    case = Case(device, 12, dtype=dtype)
    off = case.slots < 0
    want = case.run()
    integers = torch.int32 if dtype == torch.float32 else torch.int16
    case.y.view(integers)[off] = torch.randint(-(2**15), 2**15, case.y.shape, dtype=integers).to(device)[off]
    case.x[off] = NAN
    before = case.y.clone()
    got = case.run()
    assert torch.equal(got[~off], want[~off])
    assert torch.equal(got[off].view(integers), before[off].view(integers))
    nobody = case.run(row_slot=torch.full_like(case.slots, -1))
    assert torch.equal(nobody.view(integers), before.view(integers))


def test_slots_that_are_not_there_are_off(device):
    case = Case(device)
    case.slots[:4] = torch.tensor([2, 99, -5, 2**31 - 1], device=device)
    got = case.run()
    assert torch.equal(got[:4], case.y[:4])
    assert torch.equal(case.run(row_slot=case.slots.int()), got)


def test_what_is_not_finite_stays_in_its_row_and_slot(device):
    case = Case(device, 12, 140, 40, (5, 9))
    want = case.run()
    case.x[2, 130], case.x[5, 3] = NAN, INF
    got, exact = case.run().cpu(), case.expected(torch.float64)
    assert torch.equal(got.isnan(), exact.isnan())
    assert torch.equal(got.isinf(), exact.isinf())
    kept = [n for n in range(12) if n not in (2, 5)]
    assert torch.equal(got[kept], want.cpu()[kept])
    case.A[1][3, 7] = NAN
    got, one = case.run().cpu(), (case.slots == 1).cpu()
    assert got[one].isnan().all()
    zero = (case.slots == 0).cpu()
    zero[[2, 5]] = False
    assert torch.equal(got[zero], want.cpu()[zero])


def test_any_rows_between_red_zones(device):
    """Strided rows that are and are not aligned, features that are not neighbours, addresses off by one element."""
    case = Case(device, 11, 64, 32, (8, 16))
    want = case.run()
    for start, stride in ((0, 68), (1, 67), (3, 80)):
        x, y = (torch.full((11, stride), NAN, device=device) for _ in "xy")
        x[:, start : start + 64], y[:, start : start + 32] = case.x, case.y
        got = case.added_to(y[:, start : start + 32], x[:, start : start + 64], case.slots)
        assert torch.equal(got, want)
        assert y[:, :start].isnan().all()
        assert y[:, start + 32 :].isnan().all()
    assert torch.equal(case.run(x=case.x.T.contiguous().T), want)
    for weights in (case.A, case.B):
        for i, w in enumerate(weights):
            shifted = torch.full((w.numel() + 1,), NAN, device=device)
            shifted[1:] = w.flatten()
            weights[i] = shifted[1:].view(w.shape)
    assert torch.equal(case.run(), want)


def test_the_reference_writes_into_y_and_leaves_off_rows_alone():
    case = Case("cpu", 20, 100, 50, (4, 8, 12))
    y = case.y.clone()
    assert decode_delta_(y, case.x, case.A, case.B, case.scales, case.slots, backend="reference") is y
    torch.testing.assert_close(y, case.expected(torch.float32), rtol=2e-5, atol=2e-5)
    off = case.slots < 0
    assert torch.equal(y[off], case.y[off])


# --- DecodeLinear -----------------------------------------------------------------------------------------------------


def linear(case, device, segments):
    """Arguments of `DecodeLinear`."""
    weight = torch.randn(case.y.shape[1], case.x.shape[1], generator=torch.Generator().manual_seed(1))
    weight, bias = weight.to(device, case.x.dtype), case.y[0].clone()
    return (weight, bias, case.A, case.B, case.scales, segments)


MIXED = Segments(starts=(0, 3, 5, 9), ends=(3, 5, 9, 10), slots=(1, -1, 0, 1))


@each(("shape", "dtype"), [((11,), torch.float32), ((11, 1), torch.bfloat16), ((1, 11), torch.float16)])
def test_decode_linear(device, dtype, shape):
    """Off rows keep the bits of the base; tensors may change in place, and move."""
    case = Case(device, dtype=dtype, scale=0.3)
    given = linear(case, device, MIXED)
    decode = DecodeLinear(*given, backend="cuda")
    x = case.x.view(*shape, -1)
    for _ in range(2):  # the second call goes straight to the kernel
        got = decode(x)
        assert decode._decoder is not None
        want = lora_linear(x, *given, backend="reference")
        tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(got, want, **tolerance)
        off = [3, 4, 10]
        base = F.linear(x, *given[:2])
        assert torch.equal(got.view(11, -1)[off], base.view(11, -1)[off])
        x = (x * 0.5).contiguous()
        given[2][0].mul_(0.9)  # tensors may change in place
    for tensor in (*case.A, *case.B, given[0]):
        tensor.data = (tensor + 0.25).clone()
    torch.testing.assert_close(decode(x), lora_linear(x, *given, backend="reference"), **tolerance)
    decode.__init__(given[0], None, *given[2:], backend="cuda")
    torch.testing.assert_close(decode(x), lora_linear(x, given[0], None, *given[2:], backend="reference"), **tolerance)


def test_decode_linear_says_what_it_cannot_do(device, clusters):
    case = Case(device, 5, 40, 20, (4, 200))
    segments = Segments(starts=(0,), ends=(5,), slots=(1,))
    given = linear(case, device, segments)
    mixed = [case.A[0], case.A[1].half()]
    one_slot = case.y, case.x, case.A[:1], case.B[:1], [1.0], case.slots
    for message, call in (
        (
            "'cuda' cannot serve this decode: .*ranks from 1 to 128",
            lambda: DecodeLinear(*given, backend="cuda")(case.x),
        ),
        ("adapters of one dtype", lambda: DecodeLinear(*given[:2], mixed, *given[3:], backend="cuda")(case.x)),
        ("this decode: it is for up to 256 rows, not 257", lambda: Case(device, 257, 4, 4, (2,)).run()),
        ("lora_decode_delta has no triton implementation", lambda: decode_delta_(*one_slot, backend="triton")),
    ):
        with pytest.raises(registry.BackendUnavailableError, match=message):
            call()
    small, large = Case(device, ranks=(32,)), Case(device, ranks=(64,))
    assert cuda.serves(small.x, small.A, small.B)
    assert cuda.serves(large.x, large.A, large.B) == clusters


@each(
    ("change", "error", "message"),
    [
        ({"x": torch.zeros(3)}, ValueError, "x: expected floating rows of shape"),
        ({"y": torch.zeros(4, 5)}, ValueError, "y: expected 3 rows of torch.float32"),
        ({"y": torch.zeros(3, 5).double()}, ValueError, "y: expected 3 rows of torch.float32"),
        ({"row_slot": torch.zeros(3)}, ValueError, r"row_slot: expected int32 or int64 \[3\]"),
        ({"row_slot": torch.zeros(2, dtype=torch.int64)}, ValueError, r"row_slot: expected int32 or int64 \[3\]"),
        ({"scales": []}, ValueError, "A, B, scales: expected one entry per slot"),
        ({"A": [torch.zeros(2, 5)]}, ValueError, r"A\[0\]: expected shape \[r, 4\]"),
        ({"B": [torch.zeros(5, 3)]}, ValueError, r"B\[0\]: expected shape \[5, 2\]"),
        ({"x": torch.zeros(3, 4, requires_grad=True)}, ValueError, "decoding has no gradient"),
    ],
)
def test_bad_arguments_are_named(change, error, message):
    good = {"y": torch.zeros(3, 5), "x": torch.zeros(3, 4), "A": [torch.zeros(2, 4)], "B": [torch.zeros(5, 2)]}
    good |= {"scales": [1.0], "row_slot": torch.zeros(3, dtype=torch.int64)}
    assert decode_delta_(**good) is good["y"]
    with pytest.raises(error, match=message):
        decode_delta_(**(good | change))


# --- what only a GPU shows --------------------------------------------------------------------------------------------


def big(n, rank, dtype=torch.bfloat16):
    return Case("cuda", n, 4096, 4096, (rank, 8), dtype=dtype, scale=0.05)


@pytest.mark.gpu
@each("n", [1, 16, 256])
@each("rank", [16, 128])
def test_at_size(n, rank):
    case = big(n, rank, torch.float32)
    assert_ok(tier1(case.run().cpu(), case.expected(torch.float64), case.expected(torch.float32)), "y")


@pytest.mark.gpu
def test_bits_at_size_in_ten_runs_whatever_the_batch():
    case = big(64, 32)
    companies = [slice(n) for n in (1, 2, 15, 17, *[64] * 10)]
    in_any_company(case.rows, [case.y, case.x, case.slots], companies)


@pytest.mark.gpu
def test_graph_replay_with_other_slots():
    case = big(32, 16)
    y = torch.empty_like(case.y)

    def step():
        case.added_to(y.copy_(case.y), case.x, case.slots)

    graph, _ = capture(step)
    for shift in (1, 2):
        case.slots.copy_((case.slots + 1 + shift) % 3 - 1)
        case.x.copy_(torch.randn_like(case.x))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, case.run())


@pytest.mark.gpu
def test_graph_of_decode_linear():
    case = big(16, 16)
    given = linear(case, "cuda", Segments(starts=(0, 8), ends=(6, 16), slots=(1, 0)))
    decode = DecodeLinear(*given, backend="cuda")
    graph, captured = capture(lambda: decode(case.x))
    assert isinstance(decode._decoder, cuda.Decoder)
    case.x.copy_(torch.randn_like(case.x))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, decode(case.x))
    fresh = DecodeLinear(*given[:5], Segments(starts=(3,), ends=(9,), slots=(1,)), backend="cuda")
    with pytest.raises(RuntimeError, match="run the step once before"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        fresh(case.x)
    assert tables.ADAPTERS.tables(of_graphs=True)
    assert tables.BATCHES.tables(of_graphs=True)
