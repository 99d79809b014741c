"""The Triton decode attention: row by row in fp64, hostile caches and tables, strides, splits, a row's own bits."""

import pytest
import torch
from rlhf_kernels.decode_attention import decode_attention
from rlhf_kernels.decode_attention import triton as ours
from rlhf_kernels.runtime.testing import assert_ok, tier1, tier2, tier3

from tests.kernels import test_decode_attention as definition
from tests.kernels.checks import each
from tests.kernels.cuda_graph import capture
from tests.kernels.test_decode_attention import LARGE, SMALL, by_row, sinks_of
from tests.kernels.triton.test_lora import tier3_or_truncated

NAN, INF = float("nan"), float("inf")
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
# numpy speaks of −inf − (−inf) and 0 / 0 in rows that the interpreter computes and nobody reads
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(params=[256, 64], ids=["one split", "splits"])
def split(request, monkeypatch):
    """Positions per split; 64 are one tile."""
    monkeypatch.setattr(ours, "SPLIT", request.param)
    return request.param


def case(device, heads=SMALL, *, dtype=torch.float32, **options):
    return [x.to(device) for x in definition.case(heads, dtype=dtype, **options)]


def run(*args, **options):
    return decode_attention(*args, backend="triton", **{"scale": 0.3} | options)


def exact(q, k_cache, v_cache, lengths, table, **options):
    return by_row(q.double(), k_cache.double(), v_cache.double(), lengths, table, **{"scale": 0.3} | options)


@pytest.mark.parametrize("heads", [SMALL, LARGE, (3, 3, 8), (6, 1, 80), (1, 1, 1), (20, 1, 16)])
@pytest.mark.parametrize("window", [None, 1, 70, 1000])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_tier1(device, split, heads, window, softcap):
    args = case(device, heads, lengths=(5, 1, 65, 130, 0, 64), block=16)
    options = {"window": window, "softcap": softcap}
    plain = by_row(*args, scale=0.3, **options)
    assert_ok(tier1(run(*args, **options), exact(*args, **options), plain), "decode_attention")


@pytest.mark.parametrize("heads", [SMALL, LARGE, (20, 1, 16)])
@pytest.mark.parametrize("window", [None, 1, 70])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_sinks_join_the_denominator(device, split, heads, window, softcap):
    args = case(device, heads, lengths=(5, 1, 65, 130, 0, 64), block=16)
    options = {"window": window, "softcap": softcap, "sinks": sinks_of(args[0], (0.7, -3.0, 2.5))}
    plain, wide = by_row(*args, scale=0.3, **options), exact(*args, **options)
    assert_ok(tier1(run(*args, **options), wide, plain), "decode_attention")


def test_sinks_far_from_the_scores_and_not_finite(device, split):
    args = case(device, (5, 1, 16), lengths=(5, 0, 130), block=16)
    far = sinks_of(args[0])
    torch.testing.assert_close(run(*args, sinks=far).double(), exact(*args, sinks=far), **CLOSE)
    assert torch.equal(run(*args, sinks=torch.full_like(far, -INF)), run(*args))
    for sink in (NAN, INF):
        one = far.clone()
        one[1] = sink
        out, want = run(*args, sinks=one), run(*args, sinks=far)
        assert out[[0, 2], 1].isnan().all()
        assert (out[1] == 0).all()
        assert torch.equal(out[:, [0, 2, 3, 4]], want[:, [0, 2, 3, 4]])
    q, k_cache, v_cache, lengths, table = case(device, (2, 1, 16), lengths=(100,), block=128, garbage=0.0)
    q[:, :, 0] = 1.0
    k_cache[table[0, 0], :100, 0, 0] = -INF
    sinks = torch.tensor([0.0, -INF], device=device)
    out = run(q, k_cache, v_cache, lengths, table, sinks=sinks)
    assert (out[0, 0] == 0).all()
    assert out[0, 1].isnan().all()


@each("dtype", [torch.float32, torch.float16])
def test_sinks_of_either_dtype_and_any_stride(device, split, dtype):
    args = case(device, (5, 1, 20), lengths=(5, 1, 100), dtype=dtype, block=16)
    sinks = sinks_of(args[0], (0.5, -3.0, 2.5))
    want = run(*args, sinks=sinks)
    assert torch.equal(run(*args, sinks=torch.stack([sinks, torch.full_like(sinks, NAN)], 1)[:, 0]), want)
    assert torch.equal(run(*args, sinks=sinks.float()), want)


@each("scale", [1.0, 1e-3])
def test_tier1_at_two_scales(device, split, scale):
    q, k_cache, v_cache, lengths, table = case(device, LARGE, lengths=(33, 7, 250, 21), block=16)
    args = (q * scale, k_cache, v_cache * scale, lengths, table)
    assert_ok(tier1(run(*args), exact(*args), by_row(*args, scale=0.3)), "decode_attention")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [SMALL, (7, 1, 64)])
def test_half_precision_is_rounded_once(device, split, heads, dtype):
    args = case(device, heads, lengths=(5, 1, 65, 130), block=16, dtype=dtype)
    got, want = run(*args), exact(*args)
    assert got.dtype == dtype
    assert_ok(tier3_or_truncated(got, want, by_row(*args, scale=0.3)), "decode_attention")
    if dtype == torch.float16 or not ours.INTERPRETED:
        kept = want.abs() > 0.01  # where values cancel, fp32's error is large in units of the small result
        assert_ok(tier2(got[kept], want[kept]), "decode_attention")


@pytest.mark.parametrize("heads", [SMALL, LARGE])
@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 3e38])
def test_unused_cache_is_never_read(device, split, heads, garbage):
    lengths = (5, 70, 0, 129)
    clean, dirty = (case(device, heads, lengths=lengths, block=8, garbage=x) for x in (1.0, garbage))
    assert torch.equal(run(*dirty), run(*clean))
    q, k_cache, v_cache, lengths, table = dirty
    want = run(*clean, window=20)
    for row, length in enumerate(lengths.tolist()):
        for position in range(max(0, length - 20)):
            for cache in (k_cache, v_cache):
                cache[table[row, position // 8], position % 8] = garbage
    assert torch.equal(run(q, k_cache, v_cache, lengths, table, window=20), want)


@each("index_dtype", [torch.int32, torch.int64])
def test_wild_table_entries_are_never_used(device, split, index_dtype):
    q, k_cache, v_cache, lengths, table = case(device, lengths=(5, 1, 70, 9), block=8)
    position = torch.arange(table.shape[1], device=device) * 8
    for window in (None, 16):
        want = run(q, k_cache, v_cache, lengths, table, window=window)
        used = position < lengths[:, None]
        if window is not None:
            used &= position + 8 > lengths[:, None] - window
        wild = torch.where(used, table, torch.full_like(table, 2**30)).to(index_dtype)
        wild[:, -1] = -7
        assert torch.equal(run(q, k_cache, v_cache, lengths.to(index_dtype), wild, window=window), want)


def test_what_is_joined_was_written(device, monkeypatch):
    """Splits past a row's length leave their places as they were, and those are never read."""
    monkeypatch.setattr(ours, "SPLIT", 64)
    args = case(device, lengths=(5, 0, 200, 64), block=8)
    for window in (None, 30):
        want = run(*args, window=window)
        with monkeypatch.context() as patch:
            patch.setattr(ours.torch, "empty", lambda *shape, **knobs: torch.full(*shape, NAN, **knobs))
            assert torch.equal(run(*args, window=window), want)


def test_used_nan_stays_in_its_row_and_head(device, split):
    q, k_cache, v_cache, lengths, table = case(device, lengths=(5, 1, 70, 9), block=8, garbage=0.0)
    want = run(q, k_cache, v_cache, lengths, table)
    v_cache[table[2, 8], 1, 1] = NAN  # row 2, position 65, cache head 1: query heads 2 and 3
    out = run(q, k_cache, v_cache, lengths, table)
    assert out[2, 2:].isnan().all()
    want[2, 2:] = NAN
    torch.testing.assert_close(out, want, rtol=0, atol=0, equal_nan=True)


def test_scores_that_are_not_finite(device, split):
    """An infinite score, all scores −inf, NaN in a key: as softmax has it, and in that row and head alone."""
    q, k_cache, v_cache, lengths, table = case(device, (2, 1, 16), lengths=(100,) * 4, block=128, garbage=0.0)
    q[:, :, 0] = 1.0
    k_cache[table[0, 0], 70, 0, 0] = INF
    k_cache[table[1, 0], :100, 0, 0] = -INF
    k_cache[table[2, 0], 18, 0, 3] = NAN
    out = run(q, k_cache, v_cache, lengths, table)
    assert out[:3].isnan().all()
    assert out[3].isfinite().all()
    k_cache[table[1, 0], 80, 0, 0] = 0.5  # one position is left
    out = run(q, k_cache, v_cache, lengths, table)
    torch.testing.assert_close(out[1], v_cache[table[1, 0], 80].expand(2, 16))


def test_peaked_and_very_negative_scores(device, split):
    q, k_cache, v_cache, lengths, table = case(device, lengths=(20, 100), garbage=0.0)
    args = (1000 * q, k_cache, v_cache, lengths, table)
    torch.testing.assert_close(run(*args, scale=30.0).double(), exact(*args, scale=30.0), rtol=1e-3, atol=1e-3)
    q[..., 0], k_cache[..., 0] = -100.0, 10.0  # near −1000: a maximum that starts from 0 would leave nothing
    args = (q, k_cache, v_cache, lengths, table)
    torch.testing.assert_close(run(*args, scale=1.0).double(), exact(*args, scale=1.0), rtol=1e-3, atol=1e-3)


def test_empty_rows_batches_and_tables(device, split):
    args = case(device, lengths=(0, 3, 0, 6))
    out = run(*args)
    assert (out[[0, 2]] == 0).all()
    assert (out[[1, 3]] != 0).all()
    q, k_cache, v_cache, lengths, table = args
    assert run(q[:0], k_cache, v_cache, lengths[:0], table[:0]).shape == (0, 4, 8)
    nothing = run(q, k_cache, v_cache, torch.zeros_like(lengths), table[:, :0])
    assert torch.equal(nothing, torch.zeros_like(q))


@each("dtype", [torch.float32, torch.float16])
def test_any_strides(device, split, dtype):
    """Features that are not neighbours, positions behind each other, heads outermost; q, table and lengths likewise."""
    q, k_cache, v_cache, lengths, table = case(device, (4, 2, 16), lengths=(5, 100, 12), block=8, dtype=dtype)
    want = run(q, k_cache, v_cache, lengths, table)
    spread = torch.full((*k_cache.shape, 3), NAN, dtype=dtype, device=device)
    spread[..., 1] = k_cache
    turned = v_cache.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)
    wide_q = q.transpose(1, 2).contiguous().transpose(1, 2)
    every_other = torch.stack([lengths, torch.full_like(lengths, 2**40)], 1)[:, 0]
    got = run(wide_q, spread[..., 1], turned, every_other, table.T.contiguous().T)
    assert torch.equal(got, want)
    assert got.is_contiguous()


@each("order", [(0, 1, 2), (2, 0, 1), (1, 1, 1)])
def test_the_engine_s_layout(device, split, order):
    """One block per row, [blocks, Hkv, block, D] seen transposed; also shared rows. A block is longer than a split."""
    buffers = [torch.randn(5, 2, 140, 16, device=device) for _ in range(2)]
    k_cache, v_cache = (b.transpose(1, 2)[:, :130] for b in buffers)
    table = torch.tensor(order, device=device)[:, None]
    args = (torch.randn(3, 4, 16, device=device), k_cache, v_cache, torch.tensor([130, 7, 99], device=device), table)
    for window in (None, 50):
        torch.testing.assert_close(run(*args, window=window).double(), exact(*args, window=window), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 90])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_neither_batch_nor_table_change_a_row_s_bits(device, monkeypatch, dtype, window, has_sinks):
    monkeypatch.setattr(ours, "SPLIT", 64)
    lengths = (200, 20, 130, 128, 1, 0)
    q, k_cache, v_cache, lengths, table = case(device, (4, 2, 16), lengths=lengths, block=16, dtype=dtype)
    sinks = sinks_of(q) if has_sinks else None
    whole = run(q, k_cache, v_cache, lengths, table, window=window, sinks=sinks)
    for rows in ([0], [4, 2], [5, 0, 1], [3, 3]):
        got = run(q[rows], k_cache, v_cache, lengths[rows], table[rows], window=window, sinks=sinks)
        assert torch.equal(got, whole[rows])
    for n, length in enumerate(lengths.tolist()):  # no wider than it must be, and much wider
        narrow = table[n : n + 1, : max(1, -(-length // 16))]
        wide = torch.cat([table[n : n + 1], torch.full((1, 70), -1, device=device)], 1)
        for own in (narrow, wide):
            got = run(q[n : n + 1], k_cache, v_cache, lengths[n : n + 1], own, window=window, sinks=sinks)
            assert torch.equal(got, whole[n : n + 1])


def test_splits_grow_with_the_table_alone(monkeypatch):
    monkeypatch.setattr(ours, "SPLIT", 64)
    monkeypatch.setattr(ours, "MAX_SPLITS", 4)
    assert [ours.split_size(n) for n in (1, 64, 256, 257, 512, 513)] == [64, 64, 64, 128, 128, 256]
    args = case("cpu" if ours.INTERPRETED else "cuda", lengths=(300, 20), block=8)
    torch.testing.assert_close(run(*args).double(), exact(*args), **CLOSE)


def test_a_length_beyond_the_table_reads_no_further(device):
    q, k_cache, v_cache, lengths, table = case(device, lengths=(12, 12), block=4)
    table = table[:, :3].contiguous()
    want = run(q, k_cache, v_cache, lengths, table)
    assert torch.equal(run(q, k_cache, v_cache, lengths + 2**33, table), want)
    assert torch.equal(run(q, k_cache, v_cache, -lengths, table), torch.zeros_like(q))


def test_opcheck(device):
    op = torch.ops.rlhf_kernels.decode_attention.default
    for window, softcap in ((None, None), (3, 5.0)):
        torch.library.opcheck(op, (*case(device, garbage=0.0), 0.3, window, softcap, None, "triton"))
    args = case(device, garbage=0.0)
    torch.library.opcheck(op, (*args, 0.3, None, None, sinks_of(args[0]), "triton"))


def big(n=32, longest=4096, heads=(32, 8, 128), dtype=torch.bfloat16):
    """q, caches in the engine's layout, ragged lengths, table."""
    n_heads, n_kv, d = heads
    q = torch.randn(n, n_heads, d, device="cuda", dtype=dtype)
    k_cache, v_cache = (torch.randn(n, n_kv, longest, d, device="cuda", dtype=dtype).transpose(1, 2) for _ in "kv")
    lengths = longest - torch.arange(n, device="cuda") * longest // (n + 1)
    return q, k_cache, v_cache, lengths, torch.randperm(n, device="cuda")[:, None]


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(32, 8, 128), (14, 2, 64), (16, 16, 80), (8, 4, 256)], ids=str)
@pytest.mark.parametrize("window", [None, 1000])
def test_at_size(heads, window):
    args = big(8, 2500, heads)
    options = {"scale": heads[2] ** -0.5, "window": window}
    want = exact(*args, **options)
    assert_ok(tier3(run(*args, **options), want, by_row(*args, **options)), "decode_attention")


@pytest.mark.gpu
def test_bits_at_size_whatever_the_batch_in_ten_runs():
    q, k_cache, v_cache, lengths, table = big()
    whole = run(q, k_cache, v_cache, lengths, table, scale=0.1)
    for n in (1, 2, 15, 17, *[32] * 10):
        assert torch.equal(run(q[:n], k_cache, v_cache, lengths[:n], table[:n], scale=0.1), whole[:n]), n


@pytest.mark.gpu
def test_graph_replay_with_longer_rows():
    q, k_cache, v_cache, lengths, table = big(16, 1024)
    lengths.fill_(3)
    graph, captured = capture(lambda: run(q, k_cache, v_cache, lengths, table, scale=0.1))
    for length in (4, 255, 256, 1000):
        lengths.fill_(length)
        q.copy_(torch.randn_like(q))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, run(q, k_cache, v_cache, lengths, table, scale=0.1))
