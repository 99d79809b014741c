"""The Triton decode attention: properties of every backend, one split and several, a row's own bits, large sizes."""

import itertools

import pytest
import torch
from rlhf_kernels.decode_attention import decode_attention, triton as ours
from rlhf_kernels.runtime.testing import assert_ok, tier3

from tests.kernels.checks import capture, each, in_any_company, same_bits
from tests.kernels.test_decode_attention import (  # noqa: F401
    CLOSE,
    LARGE,
    SMALL,
    by_row,
    case,
    exactly,
    sinks_of,
    test_a_sink_far_above_all_scores,
    test_a_sink_of_minus_infinity_is_none,
    test_a_sink_that_is_not_finite_stays_in_its_head,
    test_any_strides,
    test_empty_rows_batches_and_tables,
    test_half_precision_is_rounded_once,
    test_peaked_and_very_negative_scores,
    test_scores_of_minus_infinity_leave_all_to_the_sink,
    test_scores_that_are_not_finite,
    test_sinks_far_from_the_scores,
    test_sinks_of_either_dtype_and_any_stride,
    test_the_engine_s_layout,
    test_tier1,
    test_unused_cache_never_leaks,
    test_used_nan_stays_in_its_row_and_head,
    test_wild_table_entries_are_never_used,
)


@pytest.fixture(params=[256, 64], ids=["one kernel", "splits"])
def backend(request, monkeypatch, on_triton):
    """Positions per split; 64 are one tile. Where one split is all, the kernel that joins splits is not there."""
    monkeypatch.setattr(ours, "SPLIT", request.param)
    with ours.use_variant(whole=request.param == 256):
        yield on_triton


def run(*args, **options):
    return decode_attention(*args, backend="triton", **{"scale": 0.3} | options)


def bits(x):
    """Of numbers, −0 apart from 0; NaN is NaN."""
    return torch.where(x.isnan(), 0.0, x).view(torch.int16 if x.dtype.itemsize == 2 else torch.int32), x.isnan()


@each("dtype", [torch.float32, torch.bfloat16])
def test_one_kernel_has_the_bits_of_two(on_triton, monkeypatch, dtype):
    """Whatever the sinks and the table's width; numbers that are not finite and values of −0 included."""
    kinds = itertools.product((SMALL, (7, 1, 80)), (None, 9), (None, 1.5), (None, (0.7, -torch.inf, 90.0, torch.nan)))
    for heads, window, softcap, sinks in kinds:
        q, k_cache, v_cache, lengths, table = case(heads, lengths=(60, 0, 1, 17, 33), block=8, dtype=dtype)
        options = {"window": window, "softcap": softcap, "sinks": None if sinks is None else sinks_of(q, sinks)}
        v_cache[table[2, 0]], k_cache[table[3, 0]], k_cache[table[4, 4]] = -0.0, torch.inf, -torch.inf
        args = [q, k_cache, v_cache, lengths, table]
        want = run(*args, **options)
        wide = torch.cat([table, torch.full((5, 40), -1, device=table.device)], 1)  # two splits
        with ours.use_variant(whole=True):
            same_bits(bits(run(*args[:4], wide, **options)), bits(want))
            with monkeypatch.context() as patch:
                patch.setattr(ours, "join_kernel", None)
                same_bits(bits(run(*args, **options)), bits(want))
        assert (want[1] == 0).all()


@each("heads", [SMALL, LARGE, (7, 1, 64)])
def test_rounded_weights_err_as_plain_attention_of_their_dtype(on_triton, rounds_to_bf16, monkeypatch, heads):
    """T3, in one kernel and joined, next to sinks and without; values of fp32 keep the bits."""
    monkeypatch.setattr(ours, "SPLIT", 64)
    for dtype, some in itertools.product((torch.bfloat16, torch.float16, torch.float32), (-torch.inf, 0.7)):
        args = case(heads, lengths=(60, 1, 33, 64), block=16, dtype=dtype)
        sinks = {"sinks": torch.full_like(args[0][0, :, 0], some)}
        for table in (args[4][:, :4], args[4]):  # 4 blocks are a split
            plain = run(*args[:4], table, **sinks)
            with ours.use_variant(rounded=True, whole=True):
                got = run(*args[:4], table, **sinks)
            assert torch.equal(got, plain) == (dtype == torch.float32)
            if dtype != torch.float32:
                eager = by_row(*args, scale=0.3, **sinks)
                assert_ok(tier3(got, exactly(*args, **sinks), eager), f"{dtype}, {some}")


def test_what_is_joined_was_written(on_triton, monkeypatch):
    """Splits past a row's length leave their places as they were, and those are never read."""
    monkeypatch.setattr(ours, "SPLIT", 64)
    args = case(lengths=(5, 0, 200, 64), block=8)
    for window in (None, 30):
        want = run(*args, window=window)
        with monkeypatch.context() as patch:
            patch.setattr(ours.torch, "empty", lambda *shape, **knobs: torch.full(*shape, torch.nan, **knobs))
            assert torch.equal(run(*args, window=window), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 90])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_neither_batch_nor_table_change_a_row_s_bits(on_triton, monkeypatch, dtype, window, has_sinks):
    monkeypatch.setattr(ours, "SPLIT", 64)
    lengths = (200, 20, 130, 128, 1, 0)
    q, k_cache, v_cache, lengths, table = case((4, 2, 16), lengths=lengths, block=16, dtype=dtype)
    sinks = sinks_of(q) if has_sinks else None

    def taken(q, lengths, table):
        return [run(q, k_cache, v_cache, lengths, table, window=window, sinks=sinks)]

    (whole,) = taken(q, lengths, table)
    in_any_company(taken, [q, lengths, table], ([0], [4, 2], [5, 0, 1], [3, 3]))
    for n, length in enumerate(lengths.tolist()):  # no wider than it must be, and much wider
        narrow = table[n : n + 1, : max(1, -(-length // 16))]
        wide = torch.cat([table[n : n + 1], torch.full((1, 70), -1)], 1)
        for own in (narrow, wide):
            assert torch.equal(taken(q[n : n + 1], lengths[n : n + 1], own)[0], whole[n : n + 1])


def test_splits_grow_with_the_table_alone(on_triton, monkeypatch):
    monkeypatch.setattr(ours, "SPLIT", 64)
    monkeypatch.setattr(ours, "MAX_SPLITS", 4)
    assert [ours.split_size(n) for n in (1, 64, 256, 257, 512, 513)] == [64, 64, 64, 128, 128, 256]
    args = case(lengths=(300, 20), block=8)
    torch.testing.assert_close(run(*args).double(), exactly(*args), **CLOSE)


def test_a_length_beyond_the_table_reads_no_further(on_triton):
    q, k_cache, v_cache, lengths, table = case(lengths=(12, 12), block=4)
    table = table[:, :3].contiguous()
    want = run(q, k_cache, v_cache, lengths, table)
    assert torch.equal(run(q, k_cache, v_cache, lengths + 2**33, table), want)
    assert torch.equal(run(q, k_cache, v_cache, -lengths, table), torch.zeros_like(q))


def big(n=32, longest=4096, heads=(32, 8, 128), dtype=torch.bfloat16):
    """q, caches in the engine's layout, ragged lengths, table."""
    n_heads, n_kv, d = heads
    q = torch.randn(n, n_heads, d, dtype=dtype)
    k_cache, v_cache = (torch.randn(n, n_kv, longest, d, dtype=dtype).transpose(1, 2) for _ in "kv")
    lengths = longest - torch.arange(n) * longest // (n + 1)
    return q, k_cache, v_cache, lengths, torch.randperm(n)[:, None]


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(32, 8, 128), (14, 2, 64), (16, 16, 80), (8, 4, 256)], ids=str)
@pytest.mark.parametrize("window", [None, 1000])
def test_at_size(on_triton, heads, window):
    args = big(8, 2500, heads)
    options = {"scale": heads[2] ** -0.5, "window": window}
    want = exactly(*args, **options)
    assert_ok(tier3(run(*args, **options), want, by_row(*args, **options)), "decode_attention")


@pytest.mark.gpu
def test_bits_at_size_whatever_the_batch_in_ten_runs(on_triton):
    q, k_cache, v_cache, lengths, table = big()
    taken = lambda q, lengths, table: [run(q, k_cache, v_cache, lengths, table, scale=0.1)]  # noqa: E731
    in_any_company(taken, [q, lengths, table], [slice(n) for n in (1, 2, 15, 17, *[32] * 10)])


@pytest.mark.gpu
def test_graph_replay_with_longer_rows(on_triton):
    q, k_cache, v_cache, lengths, table = big(16, 1024)
    lengths.fill_(3)
    graph, captured = capture(lambda: run(q, k_cache, v_cache, lengths, table, scale=0.1))
    for length in (4, 255, 256, 1000):
        lengths.fill_(length)
        q.copy_(torch.randn_like(q))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, run(q, k_cache, v_cache, lengths, table, scale=0.1))
