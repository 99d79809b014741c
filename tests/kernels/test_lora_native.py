"""LoRA's C++ on every instruction set: numeric tiers, ragged and hostile inputs, dropout's words, fixed sums."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from rlhf_kernels.linear import linear
from rlhf_kernels.lora import DecodeLinear, Dropout, LoraCall, Segments, lora_delta_, lora_linear, reference
from rlhf_kernels.lora.segments import make_call
from rlhf_kernels.runtime import native, registry, testing

from .checks import each, same_bits, threads_change_no_bit, tier_of_dtype
from .dense import surrounded, turned

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
if native.missing() is None:
    from rlhf_kernels.linear import native as linear_native
    from rlhf_kernels.lora import native as cpu

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
NEEDS_ALL = (True, False, False, [True, True], [True, True])


def case(n, k, m, ranks, dtype=BF16, adapter=BF16, *, scale=1.0, p=0.0, seed=0):
    """x, weight, dy and the lanes; slot 0 in two runs, slot 1 between them, off rows before the last run."""
    g = torch.Generator().manual_seed(seed)
    make = lambda *shape: scale * torch.randn(*shape, generator=g)  # noqa: E731
    x, weight, dy = make(n, k).to(dtype), (make(m, k) / k**0.5).to(dtype), make(n, m).to(dtype)
    A = [(make(r, k) / k**0.5).to(adapter) for r in ranks]
    B = [(make(m, r) / r**0.5).to(adapter) for r in ranks]
    cuts = [n // 5, n // 2, n * 4 // 5]
    row_ids = torch.arange(n) * 7 + 2**33 if p else None
    runs = [0, cuts[0], cuts[2]], [cuts[0], cuts[1], n], [0, 1, 0]
    return x, weight, dy, LoraCall(A, B, [0.5, 1.5], *runs, [p, p / 2], 99, row_ids, 3)


def results(backend, x, weight, dy, lanes):
    y = backend.linear_forward(x, weight, None, lanes)
    return [y, *backend.linear_backward(dy, x, weight, lanes, *NEEDS_ALL)]


def wide(values):
    """With every tensor in float64."""
    if isinstance(values, (list, tuple)):
        return [wide(value) for value in values]
    return values.double() if isinstance(values, torch.Tensor) else values


def exactly(x, weight, dy, lanes):
    lanes = lanes._replace(A=wide(lanes.A), B=wide(lanes.B))
    return results(reference, *wide((x, weight, dy)), lanes)


def in_place(x, dy, y, dx, lanes):
    """y and dx, to which their parts are added, and the gradients of all adapters."""
    cpu._forward(x, y, True, lanes, cpu._in_place(lanes))
    return [y, dx, *cpu._backward(dy, x, dx, lanes, cpu._in_place(lanes), [True] * 2, [True] * 2)]


@each("p", [0.0, 0.5])
@each("dtype", [FP32, BF16])
@each("shape", [(77, 53, 131, (16, 3)), (300, 256, 96, (40, 7)), (5, 1, 1, (1, 1)), (33, 333, 65, (8, 100))])
def test_nothing_around_is_read_or_written(isa, dtype, shape, p):
    x, weight, dy, lanes = case(*shape, dtype, BF16, p=p)
    base, dbase = F.linear(x, weight), dy @ weight
    want = in_place(x, dy, base.clone(), dbase.clone(), lanes)
    lanes = lanes._replace(A=[surrounded(a) for a in lanes.A], B=[surrounded(b) for b in lanes.B])
    y, dx = surrounded(base, -0.0), surrounded(dbase, -0.0)  # adding a zero to -0.0 changes its bits
    before = y._base.clone(), dx._base.clone()
    same_bits(in_place(surrounded(x), surrounded(dy), y, dx, lanes), want)
    bits = torch.int16 if dtype == BF16 else torch.int32
    for t, old in zip((y, dx), before, strict=True):
        old[2:-2, 3:-4] = t
        assert torch.equal(t._base.view(bits), old.view(bits))


@each(("dtype", "adapter"), [(FP32, FP32), (BF16, BF16), (BF16, FP32)])
def test_threads_change_no_bit(isa, dtype, adapter):
    x, _, dy, lanes = case(2000, 200, 150, (16, 24), dtype, adapter, p=0.1)  # enough work for the parallel loops
    out = lambda n: torch.zeros(2000, n, dtype=dtype)  # noqa: E731
    threads_change_no_bit(lambda: in_place(x, dy, out(150), out(200), lanes))


def test_other_slots_change_no_bit(isa):
    x, weight, dy, lanes = case(600, 64, 48, (16, 40))
    together = cpu.linear_backward(dy, x, weight, lanes, *NEEDS_ALL)
    of_slot = {name: getattr(lanes, name)[:1] for name in ("A", "B", "scales", "p")}
    of_slot |= {name: getattr(lanes, name)[::2] for name in ("starts", "ends", "slots")}
    alone = lanes._replace(**of_slot)
    dx, dA, dB = cpu.linear_backward(dy, x, weight, alone, True, False, False, [True], [True])
    same_bits([dA, dB], together[1::2])
    for start, end, _ in alone.runs:
        assert torch.equal(dx[start:end], together[0][start:end])


@each("dtype", [FP32, BF16])
def test_infinities_and_nan_stay_where_they_are(isa, dtype):
    x, weight, dy, lanes = case(60, 64, 96, (16, 3), dtype, dtype)
    x[3, 5], x[20, 0], dy[50, 7] = float("inf"), float("nan"), float("-inf")
    got, exact = results(cpu, x, weight, dy, lanes), exactly(x, weight, dy, lanes)
    for name, one, want in zip(("y", "dx"), got, exact, strict=False):
        assert torch.equal(one.isnan(), want.isnan()), name
        assert torch.equal(one.isinf(), want.isinf()), name
    for one, want in zip(got[2:], exact[2:], strict=True):
        assert torch.equal(one.isfinite(), want.isfinite())  # two bf16 parts make a NaN of an infinite x


def test_bf16_results_are_rounded_to_even_and_nan_stays(isa):
    """Of two bf16 numbers as near, the one whose last bit is 0; and no NaN whose upper bits would round to a number."""
    g = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (1000,), generator=g) & ~0x7C0000FF  # two bf16 parts hold such a number
    bits |= 0x3C000000  # of moderate size
    bits[::3] = bits[::3] & ~0xFFFF | 0x8000  # half way, next to odd numbers and to even ones
    bits[::7] = 0x7FFFFF00
    values = torch.where(bits < 2**31, bits, bits - 2**32).to(torch.int32).view(FP32)
    x, weight = torch.ones(3, 1, dtype=BF16), torch.zeros(1000, 1, dtype=BF16)
    A, B = torch.ones(1, 1), values[:, None].contiguous()
    y = lora_linear(x, weight, None, (A,), (B,), (1.0,), Segments.single(3, 0), backend="cpu")
    assert values.isnan().sum() == 143
    torch.testing.assert_close(y, values.bfloat16().expand(3, 1000), rtol=0, atol=0, equal_nan=True)


def test_nothing_is_computed_for_what_is_frozen(monkeypatch):
    x, weight, dy, lanes = case(40, 30, 20, (4, 3))
    seen = []

    class Spy:
        @staticmethod
        def lora_backward(dy, x, dx, K, M, slots, *rest):
            seen.append((dx[0], [(slot[5], slot[6]) for slot in slots]))

    monkeypatch.setattr(native, "_extension", Spy)
    for needed in itertools.product([False, True], repeat=5):
        need_x, need_A, need_B = needed[0], list(needed[1:3]), list(needed[3:])
        seen.clear()
        with torch.autograd.profiler.profile(record_shapes=True) as profile:
            found = cpu.linear_backward(dy, x, weight, lanes, need_x, False, False, need_A, need_B)
        products = [event.input_shapes[:2] for event in profile.function_events if event.name == "aten::mm"]
        assert products == [[[40, 20], [20, 30]]] * need_x  # dy W, and no dW
        assert len(found) == sum(needed)
        if not any(needed):
            assert not seen  # no call at all
            continue
        ((dx, gradients),) = seen
        assert (dx != 0) == need_x
        assert [(a != 0, b != 0) for a, b in gradients] == list(zip(need_A, need_B, strict=True))


@each("needed", list(itertools.product([False, True], repeat=3)))
def test_gradients_do_not_depend_on_what_else_is_needed(isa, needed):
    x, weight, dy, lanes = case(80, 70, 45, (16, 3), p=0.2)
    full = cpu.linear_backward(dy, x, weight, lanes, *NEEDS_ALL)
    need_x, need_A, need_B = needed
    part = cpu.linear_backward(dy, x, weight, lanes, need_x, False, False, [need_A] * 2, [need_B] * 2)
    want = full[: int(need_x)] + full[1 : 1 + 2 * need_A] + full[3 : 3 + 2 * need_B]
    assert len(part) == len(want)
    same_bits(part, want)


@each("p", [0.0, 0.25])
@each("function", ["linear", "delta"])
def test_eager_and_compiled_calls_have_the_same_bits(function, p):
    x, weight, dy, lanes = case(30, 20, 12, (4, 3), p=p)
    A, B = lanes.A, lanes.B
    segments = Segments(starts=tuple(lanes.starts), ends=tuple(lanes.ends), slots=tuple(lanes.slots))
    drop = Dropout(p=(p, p), seed=3, row_ids=torch.arange(30), stream=1) if p else None

    def call(x, *adapters):
        if function == "linear":
            return lora_linear(x, weight, None, adapters[:2], adapters[2:], (1.0, 2.0), segments, dropout=drop)
        y = F.linear(x, weight)
        return lora_delta_(y, x, adapters[:2], adapters[2:], (1.0, 2.0), segments, dropout=drop)

    found = []
    with registry.use_backend("cpu"):
        for run in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
            leaves = [t.clone().requires_grad_() for t in (x, *A, *B)]
            y = run(*leaves)
            found.append([y, *torch.autograd.grad(y, leaves, dy)])
    same_bits(*found)


def test_cpp_refuses_what_makes_no_sense():
    x, y, adapter = torch.zeros(4, 3), torch.zeros(4, 2), torch.zeros(3, 3)
    good = {"x": (x.data_ptr(), 3, 0), "y": (y.data_ptr(), 2, 0), "add": True, "K": 3, "M": 2}
    good["slots"] = [((adapter.data_ptr(), 3, 0), (adapter.data_ptr(), 1, 0), 1, 1.0, 0.0, 0, 0)]
    good |= {"runs": [(0, 0, 4, 0)], "dropout": (0, 0, 0), "threads": 1}
    slot = good["slots"][0]
    native.extension().lora_forward(*good.values())
    for change, message in (
        ({"x": (0, 3, 0)}, "x.data: expected an address, got a null pointer"),
        ({"y": (0, 2, 0)}, "y.data: expected an address"),
        ({"x": (x.data_ptr(), 3, 2)}, "type: expected 0 or 1, got 2"),
        ({"K": -1}, "K: expected a size of at least 0, got -1"),
        ({"threads": 0}, "threads: expected 1 to 4096, got 0"),
        ({"runs": [(0, 0, 4, 1)]}, "runs: expected a slot that exists, got 1"),
        ({"runs": [(-1, 0, 4, 0)]}, "runs: expected rows of at least 0"),
        ({"slots": [((0, 3, 0), *slot[1:])]}, "slot.A.data: expected an address"),
        ({"slots": [(*slot[:2], -1, *slot[3:])]}, "rank: expected at least 0, got -1"),
        ({"slots": [(*slot[:4], 0.5, 0, 0)]}, "row_ids: expected an address"),
        ({"slots": [(*slot[:4], 1.0, 0, 0)]}, "p: expected 0 <= p < 1, got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            native.extension().lora_forward(*(good | change).values())


# ---- the next tokens of a few sequences ------------------------------------------------------------------------------


def few_rows(n, k, m, dtype=FP32, adapter=FP32, *, seed=0):
    """x [n, 1, k], weight, bias, A, B, scales and segments: slot 1 on the first third of the rows, else slot 0."""
    g = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    A = [(make(r, k) / k**0.5).to(adapter) for r in (16, 5)]
    B = [(make(m, r) / r**0.5).to(adapter) for r in (16, 5)]
    segments = Segments(starts=(0, n // 3), ends=(n // 3, n), slots=(1, 0))
    return make(n, 1, k).to(dtype), (make(m, k) / k**0.5).to(dtype), make(m).to(dtype), A, B, [0.5, 1.5], segments


def decoded(x, *rest):
    return DecodeLinear(*rest, backend="cpu")(x)


@pytest.fixture
def decode_calls(monkeypatch):
    """How often the kernel ran."""
    calls = []
    run = cpu.Decoder.__call__
    monkeypatch.setattr(cpu.Decoder, "__call__", lambda *arguments: calls.append(1) or run(*arguments))
    return calls


@torch.no_grad()
@each("with_bias", [True, False])
@each("shape", [(4, 32, 1), (16, 64, 33), (17, 96, 130), (33, 352, 64), (64, 512, 300)])
@each(("dtype", "adapter"), itertools.product([FP32, BF16], [FP32, BF16, FP16]))
def test_tiers_of_decoding(isa, dtype, adapter, shape, with_bias, decode_calls):
    decode_calls.clear()
    x, weight, bias, *rest = few_rows(*shape, dtype, adapter)
    arguments = x, weight, bias if with_bias else None, *rest
    y = decoded(*arguments)
    assert (len(decode_calls), y.dtype) == (1, dtype)
    eager = lora_linear(*arguments, backend="reference")
    testing.assert_ok(tier_of_dtype(y, lora_linear(*wide(arguments), backend="reference"), eager), "y")


@torch.no_grad()
@each("n_rows", [9, 40])
@each("dtype", [FP32, BF16])
def test_a_row_s_bits_do_not_depend_on_its_company_or_on_threads(isa, dtype, n_rows):
    """Up to more threads than there are ranks; first with several, so that nothing lies where one has put it."""
    x, weight, bias, A, B, scales, segments = few_rows(n_rows, 512, 1024, dtype)  # work enough for threads
    given = weight, bias, A, B, scales, segments
    threads_change_no_bit(lambda: (decoded(x, *given), decoded(-x, *given)), 3, 30, 2, 1)
    at = n_rows // 3
    some = decoded(x[at : at + 5], weight, bias, A, B, scales, Segments(starts=(0,), ends=(5,), slots=(0,)))
    assert torch.equal(some, decoded(x, *given)[at : at + 5])


@torch.no_grad()
@each("dtype", [FP32, BF16])
def test_rows_of_many_slots_decode_as_each_slot_alone(isa, dtype):
    """One to four rows of each of 24 slots, some rows off in between."""
    (x, weight, bias, *_), g = few_rows(64, 96, 70, dtype), torch.Generator().manual_seed(1)
    ranks = [(4, 5, 8, 16, 32)[i % 5] for i in range(24)]
    A, B = [torch.randn(r, 96, generator=g) for r in ranks], [torch.randn(70, r, generator=g).to(dtype) for r in ranks]
    ends = list(itertools.accumulate(1 + i % 4 for i in range(24)))
    starts = [0, *(end + int(i % 6 == 0) for i, end in enumerate(ends[:-1]))]
    runs = [(a, b, i) for i, (a, b) in enumerate(zip(starts, ends, strict=True)) if a < b]
    columns = [tuple(column) for column in zip(*runs, strict=True)]
    with registry.use_op_backend("linear", "cpu"):
        y = decoded(x, weight, bias, A, B, [0.5] * 24, Segments(starts=columns[0], ends=columns[1], slots=columns[2]))
        for start, end, slot in runs:
            one = Segments(starts=(start,), ends=(end,), slots=(0,))
            assert torch.equal(
                decoded(x, weight, bias, A[slot:][:1], B[slot:][:1], [0.5], one)[start:end], y[start:end]
            )


@torch.no_grad()
def test_decoding_rounds_where_training_does(isa):
    """bf16: the product, then the sum. Sums of another order flip a rounding here and there, no more."""
    arguments = few_rows(40, 96, 300, BF16)
    differ = decoded(*arguments) != lora_linear(*arguments, backend="cpu")
    assert differ.float().mean() < 0.03


@torch.no_grad()
def test_decoding_with_strides_and_nan_beside(isa, decode_calls):
    x, weight, bias, A, B, scales, segments = few_rows(9, 64, 40)
    expected = decoded(x, weight, bias, A, B, scales, segments)
    spread = torch.full((9, 1, 130), torch.nan)
    spread[..., 1:129:2] = x
    got = decoded(spread[..., 1:129:2], surrounded(weight), bias, [turned(a) for a in A], B, scales, segments)
    assert torch.equal(got, expected)
    x[2] = torch.nan
    hurt = decoded(x, weight, bias, A, B, scales, segments)
    assert hurt[2].isnan().all()
    assert torch.equal(hurt[[0, 1, *range(3, 9)]], expected[[0, 1, *range(3, 9)]])
    x, *_ = few_rows(9, 64, 40)
    B[1][7] = torch.inf  # of the slot on the first three rows
    hurt = decoded(x, weight, bias, A, B, scales, segments)
    assert torch.equal(hurt[3:], expected[3:])
    assert not hurt[:3, :, 7].isfinite().any()
    assert len(decode_calls) == 4


@torch.no_grad()
@each("dtype", [FP32, BF16])
@each(("n_rows", "K", "M", "with_bias"), [(4, 32, 33, True), (9, 544, 70, False), (40, 256, 96, True)])
def test_off_rows_of_decoding_keep_the_bits_of_linear(isa, dtype, n_rows, K, M, with_bias, decode_calls, monkeypatch):
    """One call for on and off rows where `linear` multiplies in C++, too; on rows as they are among on rows alone."""
    decode_calls.clear()
    monkeypatch.setattr(cpu, "product_for", lambda x, weight: linear_native)  # whatever the kernel table says
    x, weight, bias, A, B, scales, _ = few_rows(n_rows, K, M, dtype)
    bias = bias if with_bias else None
    some_off = Segments(starts=(2,), ends=(n_rows - 1,), slots=(1,))
    got = decoded(x, weight, bias, A, B, scales, some_off)
    off = [0, 1, n_rows - 1]
    assert torch.equal(got[off], linear(x, weight, bias, backend="cpu")[off])
    all_on = decoded(x, weight, bias, A, B, scales, Segments(starts=(0,), ends=(n_rows,), slots=(1,)))
    assert torch.equal(got[2:-1], all_on[2:-1])
    assert not torch.equal(got[off], all_on[off])
    assert len(decode_calls) == 2


def test_where_decoding_runs_as_everything_else(decode_calls):
    """Off rows keep F.linear's bits; gradients, autocast, other depths and many rows take the usual way."""
    x, weight, bias, A, B, scales, segments = few_rows(9, 64, 40)
    off = Segments(starts=(3,), ends=(9,), slots=(0,))
    with torch.no_grad():
        assert torch.equal(decoded(x, weight, bias, A, B, scales, off)[:3], F.linear(x, weight, bias)[:3])
        decoded(x[..., :63], weight[:, :63], bias, [a[:, :63] for a in A], B, scales, segments)
        decoded(x[:1], weight, bias, A, B, scales, Segments(starts=(0,), ends=(1,), slots=(0,)))
        decoded(x.repeat(8, 1, 1), weight, bias, A, B, scales, Segments(starts=(0,), ends=(72,), slots=(0,)))
        with torch.autocast("cpu", torch.bfloat16):
            assert decoded(x, weight, bias, A, B, scales, segments).dtype == BF16
    A[0].requires_grad_()
    decoded(x, weight, bias, A, B, scales, segments).sum().backward()
    assert A[0].grad is not None
    assert decode_calls == []


@torch.no_grad()
@pytest.mark.parametrize("adapter", [FP32, FP16])
def test_decoding_follows_its_tensors(adapter, decode_calls, monkeypatch):
    """Weights that change between two tokens, in place or by moving, and an x that is not what it was."""
    made = []
    make = cpu.Decoder.__init__
    monkeypatch.setattr(cpu.Decoder, "__init__", lambda *arguments: made.append(1) or make(*arguments))
    x, weight, bias, A, B, scales, segments = few_rows(9, 64, 40, adapter=adapter)
    weight, A = torch.nn.Parameter(weight, requires_grad=False), [torch.nn.Parameter(a, requires_grad=False) for a in A]
    linear = DecodeLinear(weight, bias, A, B, scales, segments, backend="cpu")

    def check(x):
        arguments = x, weight, bias, A, B, scales, segments
        exact, eager = (lora_linear(*given, backend="reference") for given in (wide(arguments), arguments))
        testing.assert_ok(tier_of_dtype(linear(x), exact, eager), "y")

    check(x)
    B[0].mul_(2)
    weight[3].neg_()
    check(x)
    check(-x)
    assert len(made) == (1 if adapter == FP32 else 3)  # bound once, unless adapters have to be converted
    weight.data, A[1].data = weight.data.clone() + 1, A[1].data.clone() * 3
    check(x)
    check(x.transpose(0, 1))
    check(x.view(1, 9, 64).transpose(0, 1))  # contiguous, with strides (64, 576, 1)
    check(torch.randn(9, 1, 65)[..., 1:])
    assert len(made) == (4 if adapter == FP32 else 7)
    assert len(decode_calls) == 7
    with pytest.raises(TypeError, match=r"^weight: expected torch.bfloat16"):
        linear(x.bfloat16())
    with pytest.raises(ValueError, match=r"^segments: expected runs within the 8 rows"):
        linear(x[:8])
    with pytest.raises(ValueError, match=r"^weight: expected shape \[M, 32\]"):
        linear(x[..., :32])


@torch.no_grad()
def test_a_bound_linear_heeds_the_process_s_backend(decode_calls):
    x, *given = few_rows(9, 64, 40)
    linear = DecodeLinear(*given)
    for asked in (registry.use_backend("reference"), registry.use_op_backend("lora_decode", "reference")):
        linear(x)
        with asked:
            assert torch.equal(linear(x), lora_linear(x, *given))
    assert len(decode_calls) == 2


@torch.no_grad()
def test_what_no_decoder_serves_is_asked_once(monkeypatch):
    asked = []
    serves = cpu.Decoder.serves
    monkeypatch.setattr(cpu.Decoder, "serves", lambda *arguments: asked.append(1) or serves(*arguments))
    x, weight, bias, A, B, scales, _ = few_rows(9, 64, 40)
    some_off = Segments(starts=(3,), ends=(9,), slots=(0,))
    linear = DecodeLinear(weight, bias, A, B, scales, some_off, backend="cpu")
    for factor in (1.0, 2.0, 3.0):
        expected = lora_linear(factor * x, weight, bias, A, B, scales, some_off, backend="cpu")
        assert torch.equal(linear(factor * x), expected)
    assert len(asked) == 1
    on_gpu = weight.to("meta")  # stands for any other device: its memory is not read
    all_on = make_call(x, 40, A, B, scales, Segments(starts=(0,), ends=(9,), slots=(0,)), None)
    assert serves(x, weight, bias, all_on)
    assert not serves(x, on_gpu, bias, all_on)
