"""Paged decode attention: against SDPA row by row, hostile cache content, tables, strides, on every backend here."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from rlhf_kernels.decode_attention import decode_attention, reference
from rlhf_kernels.runtime import registry, testing
from rlhf_kernels.runtime.triton_support import INTERPRETED

from .checks import alike, each, threads_change_no_bit, tier_of_dtype

# heads, cache heads, features: the reference takes its packed path for the small case, and not for the large one
SMALL, LARGE = (4, 2, 8), (4, 2, 160)


def work_dtype():
    """What tests compute in where they do not say: the native code has no float64."""
    return torch.float32 if registry.default_backend() in ("cpu", "triton") else torch.float64


def case(heads=SMALL, *, lengths=(5, 1, 12, 9), block=4, dtype=None, seed=0, garbage=float("nan")):
    """q, caches, lengths, table: every row's blocks are scattered, everything unused is garbage."""
    n_heads, n_kv, d = heads
    dtype = dtype or work_dtype()
    g = torch.Generator().manual_seed(seed)
    n, per_row = len(lengths), -(-max(lengths, default=0) // block) + 1
    blocks = n * per_row + 2
    with torch.device("cpu"):
        q = torch.randn(n, n_heads, d, generator=g, dtype=torch.float64).to(dtype)
        k_cache, v_cache = (torch.full((blocks, block, n_kv, d), garbage, dtype=dtype) for _ in range(2))
        table = torch.randperm(blocks, generator=g)[: n * per_row].view(n, per_row)
        for row, length in enumerate(lengths):
            for s in range(length):
                for cache in (k_cache, v_cache):
                    one = torch.randn(n_kv, d, generator=g, dtype=torch.float64)
                    cache[table[row, s // block], s % block] = one.to(dtype)
        tensors = q, k_cache, v_cache, torch.tensor(lengths), table
    return [x.to(torch.get_default_device()) for x in tensors]


def by_row(q, k_cache, v_cache, lengths, table, *, scale, window=None, softcap=None, sinks=None):
    """One row at a time on its own positions only, so that nothing unused is ever read."""
    out, block = [], k_cache.shape[1]
    group = q.shape[1] // k_cache.shape[2]
    for n, length in enumerate(lengths.tolist()):
        if length == 0:
            out.append(torch.zeros_like(q[n]))
            continue
        lo = 0 if window is None else max(0, length - window)
        where = [(table[n, s // block], s % block) for s in range(lo, length)]
        k, v = (torch.stack([c[at] for at in where], 1).repeat_interleave(group, 0) for c in (k_cache, v_cache))
        # [Hq, L, D]
        if softcap is None and sinks is None:
            out.append(F.scaled_dot_product_attention(q[n][:, None], k, v, scale=scale)[:, 0])
        else:
            z = scale * torch.einsum("hd,hsd->hs", q[n], k)
            z = z if softcap is None else softcap * torch.tanh(z / softcap)
            share = 1.0 if sinks is None else torch.sigmoid(z.logsumexp(-1) - sinks.to(z.dtype))[:, None]
            out.append(torch.einsum("hs,hsd->hd", z.softmax(-1), v) * share)
    return torch.stack(out)


def sinks_of(q, values=(0.7, -3.0, 2.5, 60.0, -60.0)):
    """A sink for each head of q [N, Hq, D]: near its scores, far above and far below them."""
    n_heads = q.shape[1]
    return torch.tensor(values, device=q.device).repeat(-(-n_heads // len(values)))[:n_heads].to(q.dtype)


HEADS = [SMALL, LARGE, (3, 3, 8), (6, 1, 80), (1, 1, 1), (20, 1, 16), (8, 1, 64)]
OPTIONS = list(itertools.product((None, 1, 3, 70, 1000), (None, 1.5), (False, True), (1.0, 1e-3)))
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def exactly(q, k_cache, v_cache, lengths, table, **options):
    options = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    return by_row(q.double(), k_cache.double(), v_cache.double(), lengths, table, **{"scale": 0.3} | options)


def test_tier1(backend):
    """Every window, softcap, sink and scale with every number of heads; the interpreter takes the heads in turn."""
    taken = itertools.product(HEADS, OPTIONS)
    if backend == "triton":
        taken = zip(itertools.cycle(HEADS), OPTIONS[::2] + OPTIONS[1::8], strict=False)
    for heads, (window, softcap, has_sinks, size) in taken:
        q, k_cache, v_cache, lengths, table = case(heads, dtype=torch.float32, lengths=(5, 1, 65, 130, 0, 64), block=16)
        args = (q * size, k_cache, v_cache * size, lengths, table)
        options = {"scale": 0.3, "window": window, "softcap": softcap}
        if has_sinks:
            options["sinks"] = sinks_of(q, (0.7, -3.0, 2.5))
        out = decode_attention(*args, **options)
        testing.assert_ok(testing.tier1(out, exactly(*args, **options), by_row(*args, **options)), f"{heads} {options}")
        assert (out[4] == 0).all()


@each("heads", [SMALL, LARGE, (7, 1, 64)])
@each(("dtype", "autocast"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)])
def test_half_precision_is_rounded_once(backend, heads, dtype, autocast):
    """fp32 inside and one rounding at the end, under autocast too."""
    if backend == "cpu" and dtype == torch.float16:
        pytest.skip("float16 is the reference's")
    args = case(heads, lengths=(5, 1, 65, 130), block=16, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got = decode_attention(*args, scale=0.3)
    want = exactly(*args)
    assert got.dtype == dtype
    testing.assert_ok(tier_of_dtype(got, want, by_row(*args, scale=0.3)), "decode_attention")
    if dtype == torch.float16 or not INTERPRETED:
        kept = want.abs() > 0.01  # where values cancel, fp32's error is large in units of the small result
        testing.assert_ok(testing.tier2(got[kept], want[kept]), "decode_attention")


def test_sinks_far_from_the_scores(backend):
    args = case((5, 1, 16), lengths=(5, 0, 130), block=16)
    sinks = sinks_of(args[0])
    got = decode_attention(*args, scale=0.3, sinks=sinks)
    torch.testing.assert_close(got.double(), exactly(*args, sinks=sinks), **CLOSE)


@each("heads", [SMALL, LARGE, (10, 2, 64)])
def test_a_sink_of_minus_infinity_is_none(backend, heads):
    """Bit for bit, in the reference as far as its softmax has one order of sums."""
    args = case(heads, lengths=(5, 1, 40, 0, 17))
    none = torch.full(args[0].shape[1:2], -torch.inf)
    plain = decode_attention(*args, scale=0.3)
    found = decode_attention(*args, scale=0.3, sinks=none)
    alike(backend, [found], [plain])
    some = none.index_fill(0, torch.tensor([0]), 1.0)
    one = decode_attention(*args, scale=0.3, sinks=some)
    torch.testing.assert_close(one[:, 1:], plain[:, 1:])
    assert (one[[0, 1, 2, 4], 0] != plain[[0, 1, 2, 4], 0]).any(-1).all()


@each("heads", [SMALL, LARGE])
@each("sink", [float("nan"), float("inf")])
def test_a_sink_that_is_not_finite_stays_in_its_head(backend, heads, sink):
    args = case(heads, lengths=(5, 1, 0, 9), garbage=0.0)
    sinks = sinks_of(args[0])
    want = decode_attention(*args, scale=0.3, sinks=sinks)
    out = decode_attention(*args, scale=0.3, sinks=sinks.index_fill(0, torch.tensor([1]), sink))
    assert out[[0, 1, 3], 1].isnan().all()
    assert (out[2] == 0).all()
    rest = [0, 2, 3]
    torch.testing.assert_close(out[:, rest], want[:, rest])


def test_a_sink_far_above_all_scores(backend):
    """The maximum is the sink: scores of −1000 must not overflow, and their weights vanish."""
    q, k_cache, v_cache, lengths, table = case((2, 1, 16), lengths=(20, 3), garbage=0.0)
    q[..., 0], k_cache[..., 0] = -100.0, 10.0
    args = (q, k_cache, v_cache, lengths, table)
    assert (decode_attention(*args, scale=1.0, sinks=torch.tensor([0.0, 50.0])).abs() < 1e-30).all()
    near = torch.tensor([-990.0, -1010.0])
    got = decode_attention(*args, scale=1.0, sinks=near)
    assert got.isfinite().all()
    torch.testing.assert_close(got, by_row(*args, scale=1.0, sinks=near), rtol=1e-3, atol=1e-3)


def test_scores_of_minus_infinity_leave_all_to_the_sink(backend):
    q, k_cache, v_cache, lengths, table = case((2, 1, 16), lengths=(20,), block=32, garbage=0.0)
    q[:, :, 0] = 1.0
    k_cache[table[0, 0], :20, 0, 0] = -float("inf")
    out = decode_attention(q, k_cache, v_cache, lengths, table, scale=0.3, sinks=torch.tensor([0.0, -float("inf")]))
    assert (out[0, 0].abs() < 1e-30).all()
    assert out[0, 1].isnan().all()


@each("dtype", [torch.float32, torch.bfloat16])
def test_sinks_of_either_dtype_and_any_stride(backend, dtype):
    args = case((5, 1, 20), lengths=(5, 1, 40), dtype=dtype)
    sinks = sinks_of(args[0])
    want = decode_attention(*args, scale=0.3, sinks=sinks)
    spread = torch.stack([sinks, torch.full_like(sinks, float("nan"))], 1)[:, 0]
    trained = torch.nn.Parameter(sinks.float())
    assert torch.equal(decode_attention(*args, scale=0.3, sinks=spread), want)
    with pytest.raises(ValueError, match="inference only"):
        decode_attention(*args, scale=0.3, sinks=trained)
    with torch.no_grad():
        assert torch.equal(decode_attention(*args, scale=0.3, sinks=trained), want)


@each("heads", [SMALL, LARGE])
@each("garbage", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_unused_cache_never_leaks(backend, heads, garbage):
    lengths = (5, 70, 0, 129)
    clean, dirty = (case(heads, lengths=lengths, block=8, garbage=x) for x in (1.0, garbage))
    alike(backend, [decode_attention(*dirty, scale=0.3)], [decode_attention(*clean, scale=0.3)])
    _, k_cache, v_cache, lengths, table = dirty
    for row, length in enumerate(lengths.tolist()):  # nor from behind the window
        for position in range(max(0, length - 20)):
            for cache in (k_cache, v_cache):
                cache[table[row, position // 8], position % 8] = garbage
    got, want = (decode_attention(*args, scale=0.3, window=20) for args in (dirty, clean))
    alike(backend, [got], [want])


def test_used_nan_stays_in_its_row_and_head(backend):
    q, k_cache, v_cache, lengths, table = case(lengths=(5, 1, 70, 9), block=8, garbage=0.0)
    want = decode_attention(q, k_cache, v_cache, lengths, table, scale=0.3)
    v_cache[table[2, 8], 1, 1] = torch.nan  # row 2, position 65, cache head 1: query heads 2 and 3
    out = decode_attention(q, k_cache, v_cache, lengths, table, scale=0.3)
    assert out[2, 2:].isnan().all()
    out[2, 2:] = want[2, 2:]
    alike(backend, [out], [want])


def test_empty_rows_batches_and_tables(backend):
    q, k_cache, v_cache, lengths, table = args = case(lengths=(0, 3, 0, 6))
    out = decode_attention(*args, scale=0.5)
    assert (out[[0, 2]] == 0).all()
    assert (out[[1, 3]] != 0).all()
    assert decode_attention(q[:0], k_cache, v_cache, lengths[:0], table[:0], scale=1.0).shape == (0, 4, 8)
    for columns in (table, table[:, :0]):
        nothing = decode_attention(q, k_cache, v_cache, torch.zeros_like(lengths), columns, scale=1.0)
        assert torch.equal(nothing, torch.zeros_like(q))


@each("index_dtype", [torch.int32, torch.int64])
def test_wild_table_entries_are_never_used(backend, index_dtype):
    q, k_cache, v_cache, lengths, table = case(lengths=(5, 1, 70, 9), block=8)
    position = torch.arange(table.shape[1]) * 8
    for window in (None,) if backend == "reference" else (None, 16):
        want = decode_attention(q, k_cache, v_cache, lengths, table, scale=0.3, window=window)
        used = position < lengths[:, None]
        if window is not None:
            used &= position + 8 > lengths[:, None] - window
        wild = torch.where(used, table, torch.full_like(table, 2**30)).to(index_dtype)
        wild[:, -1] = -7
        got = decode_attention(q, k_cache, v_cache, lengths.to(index_dtype), wild, scale=0.3, window=window)
        assert torch.equal(got, want)


@each("order", [(0, 1, 2), (2, 0, 1), (1, 1, 1)])
def test_the_engine_s_layout(backend, order):
    """One block per row, [blocks, Hkv, block, D] seen transposed; also shared rows. A block is longer than a split."""
    for heads, dim in ((4, 16), (4, 160)):
        buffers = [torch.randn(5, 2, 140, dim) for _ in range(2)]
        k_cache, v_cache = (b.transpose(1, 2)[:, :130] for b in buffers)
        assert not k_cache.is_contiguous()
        table = torch.tensor(order)[:, None]
        args = (torch.randn(3, heads, dim), k_cache, v_cache, torch.tensor([130, 7, 99]), table)
        for window in (None, 50):
            got = decode_attention(*args, scale=0.3, window=window)
            torch.testing.assert_close(got.double(), exactly(*args, window=window), **CLOSE)


def test_peaked_and_very_negative_scores(backend):
    """Scores of ± thousands: the softmax has to subtract its maximum, which may be near −1000."""
    q, k_cache, v_cache, lengths, table = case(lengths=(20, 100), dtype=torch.float32, garbage=0.0)
    args = (1000 * q, k_cache, v_cache, lengths, table)
    got = decode_attention(*args, scale=30.0)
    torch.testing.assert_close(got.double(), exactly(*args, scale=30.0), rtol=1e-3, atol=1e-3)
    q[..., 0], k_cache[..., 0] = -100.0, 10.0
    args = (q, k_cache, v_cache, lengths, table)
    got = decode_attention(*args, scale=1.0)
    torch.testing.assert_close(got.double(), exactly(*args, scale=1.0), rtol=1e-3, atol=1e-3)


@each("dtype", [torch.float32, torch.bfloat16])
def test_any_strides(backend, dtype):
    """Features that are not neighbours, positions behind each other, heads outermost; q, table and lengths likewise."""
    q, k_cache, v_cache, lengths, table = case((4, 2, 16), lengths=(5, 100, 12), block=8, dtype=dtype)
    want = decode_attention(q, k_cache, v_cache, lengths, table, scale=0.3)
    spread = torch.full((*k_cache.shape, 3), torch.nan, dtype=dtype)
    spread[..., 1] = k_cache
    over = v_cache.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)
    wide_q = q.transpose(1, 2).contiguous().transpose(1, 2)
    every_other = torch.stack([lengths, torch.full_like(lengths, 2**40)], 1)[:, 0]
    got = decode_attention(wide_q, spread[..., 1], over, every_other, table.T.contiguous().T, scale=0.3)
    alike(backend, [got], [want])
    assert got.is_contiguous()


def test_scores_that_are_not_finite(backend):
    """An infinite score, all scores −inf, NaN in a key: as softmax has it, and in that row and head alone."""
    q, k_cache, v_cache, lengths, table = case((2, 1, 16), lengths=(100,) * 4, block=128, garbage=0.0)
    q[:, :, 0] = 1.0
    k_cache[table[0, 0], 70, 0, 0] = torch.inf
    k_cache[table[1, 0], :100, 0, 0] = -torch.inf
    k_cache[table[2, 0], 18, 0, 3] = torch.nan
    out = decode_attention(q, k_cache, v_cache, lengths, table, scale=0.3)
    assert out[:3].isnan().all()
    assert out[3].isfinite().all()
    k_cache[table[1, 0], 80, 0, 0] = 0.5  # one position is left
    out = decode_attention(q, k_cache, v_cache, lengths, table, scale=0.3)
    torch.testing.assert_close(out[1], v_cache[table[1, 0], 80].expand(2, 16))


def test_threads_and_the_rest_of_the_batch_do_not_change_the_bits(backend):
    lengths = (300, 20, 177, 256, 1)
    q, k_cache, v_cache, lengths, table = case((8, 4, 64), lengths=lengths, block=16, dtype=torch.float32)
    for options in ({"scale": 0.3}, {"scale": 0.3, "sinks": sinks_of(q)}):

        def run(rows=slice(None), options=options):
            return decode_attention(q[rows], k_cache, v_cache, lengths[rows], table[rows], **options)

        if backend == "cpu":
            threads_change_no_bit(lambda run=run: [run()])
        for n in range(5):
            alike(backend, [run(slice(n, n + 1))[0]], [run()[n]])


def test_identity_table_reads_the_cache_in_place():
    cache = torch.randn(4, 16, 2, 8)
    lengths, own = torch.tensor([16, 3, 0, 9]), torch.arange(4)[:, None]
    k, v = reference._gather(cache, cache + 1, lengths, own, 0, 16)
    assert k.data_ptr() == cache.data_ptr()
    assert torch.equal(v, cache + 1)
    copied, _ = reference._gather(cache, cache, torch.full((4,), 16), own.flip(0), 0, 16)
    assert copied.data_ptr() != cache.data_ptr()
    assert torch.equal(copied, cache.flip(0))


def test_the_op_itself_refuses_sinks_of_another_dtype(backend):
    args = case(dtype=torch.float32, garbage=0.0)
    message = r"sinks: expected the dtype of q \(torch.float32\) or float32, got torch.float64"
    with pytest.raises(TypeError, match=message):
        torch.ops.rlhf_kernels.decode_attention(*args, 0.3, None, None, sinks_of(args[0]).double(), backend)


@each(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(2, 4)}, ValueError, r"q: expected shape \[N, Hq, D\], got \(2, 4\)"),
        ({"q": torch.zeros(2, 3, 8)}, ValueError, "q: expected a multiple of the cache's 2 heads, got 3"),
        ({"q": torch.zeros(2, 4, 8, dtype=torch.bfloat16)}, TypeError, "k_cache: expected the dtype of q"),
        ({"q": torch.zeros(2, 4, 8, dtype=torch.int32)}, TypeError, "q: expected a floating dtype"),
        ({"k_cache": torch.zeros(3, 4, 2, 7)}, ValueError, r"k_cache: expected shape \[blocks, block, Hkv, 8\]"),
        ({"v_cache": torch.zeros(3, 5, 2, 8)}, ValueError, "v_cache: expected the shape of k_cache"),
        ({"lengths": torch.ones(2)}, TypeError, "lengths: expected int32 or int64, got torch.float32"),
        ({"lengths": torch.ones(3, dtype=torch.int64)}, ValueError, "lengths: expected 1 dims with 2 rows"),
        ({"lengths": torch.tensor([1, 9])}, ValueError, r"lengths: .* 0 to 8 \(what block_table can hold\), got 9"),
        ({"lengths": torch.tensor([1, -1])}, ValueError, "lengths: expected 0 to 8 .*, got -1"),
        ({"block_table": torch.zeros(2, dtype=torch.int64)}, ValueError, "block_table: expected 2 dims with 2 rows"),
        ({"block_table": torch.tensor([[0, 1], [3, 0]])}, ValueError, "block_table: .* indices below 3, got 3"),
        ({"block_table": torch.tensor([[-2, 1], [0, 1]])}, ValueError, "block_table: .* indices below 3, got -2"),
        ({"window": 0}, ValueError, r"window: expected None or an integer from 1 to 2\^56, got 0"),
        ({"window": 2**70}, ValueError, r"window: expected None or an integer from 1 to 2\^56, got 1180591620"),
        ({"window": 2.5}, TypeError, "window: expected None or an integer, got 2.5"),
        ({"softcap": 0.0}, ValueError, "softcap: expected None or a number > 0, got 0.0"),
        ({"sinks": torch.zeros(2)}, ValueError, r"sinks: expected shape \[4\], .* head of q, got \(2,\)"),
        ({"sinks": torch.zeros(1, 4)}, ValueError, r"sinks: expected shape \[4\]"),
        ({"sinks": torch.zeros(4).double()}, TypeError, r"sinks: expected the dtype of q .*, got torch\.float64"),
        ({"sinks": torch.zeros(4, dtype=torch.int64)}, TypeError, r"sinks: expected the dtype of q"),
        ({"sinks": torch.zeros(4, device="meta")}, ValueError, r"sinks: expected the device of q \(cpu\), got meta"),
        ({"backend": "triton"}, registry.BackendUnavailableError, "cannot serve decode_attention"),
    ],
)
def test_bad_input(change, error, message):
    good = {"q": torch.zeros(2, 4, 8), "k_cache": torch.zeros(3, 4, 2, 8), "v_cache": torch.zeros(3, 4, 2, 8)}
    good |= {"lengths": torch.tensor([5, 2]), "block_table": torch.tensor([[0, 1], [2, 0]]), "scale": 1 / math.sqrt(8)}
    assert decode_attention(**good).shape == (2, 4, 8)
    with pytest.raises(error, match=message):
        decode_attention(**(good | change))


def test_refuses_gradients_but_serves_no_grad(backend):
    q, *rest = case()
    q.requires_grad_()
    with pytest.raises(ValueError, match="inference only"):
        decode_attention(q, *rest, scale=0.3)
    with torch.no_grad():
        assert not decode_attention(q, *rest, scale=0.3).requires_grad


@each("heads", [(1, 1, 1), (5, 1, 20), (8, 2, 64), (3, 3, 80), (10, 2, 128)])
def test_every_length(backend, heads):
    """Tiles of positions that are full, partial, and cut by blocks; heads that are and are not whole vectors."""
    for block, dtype in itertools.product((1, 7, 16), (torch.float32, torch.bfloat16)):
        args = case(heads, lengths=(*range(0, 35), 63, 64, 65), block=block, dtype=dtype)
        for window in (None, 17):
            got = decode_attention(*args, scale=0.3, window=window)
            exact = (x.double() for x in args[:3])
            want = decode_attention(*exact, *args[3:], scale=0.3, window=window, backend="reference").float()
            tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 5e-3, "atol": 1e-4}
            torch.testing.assert_close(got.float(), want, **tolerance)
