"""The Triton attention: tiers against float64, the bits of decode_attention in exact mode, families."""

from itertools import accumulate

import pytest
import torch
from rlhf_kernels import attention
from rlhf_kernels.attention import triton as ours
from rlhf_kernels.runtime import registry, testing

from tests.kernels.checks import each, tier_of_dtype
from tests.kernels.test_attention import (  # noqa: F401
    bits_of_families,
    case,
    decoded_rows,
    hold,
    numbers,
    options_of,
    test_a_sink_of_minus_infinity_is_none,
    test_peaked_and_very_negative_scores,
    test_views_of_a_projection,
    with_gradients,
)

HEADS = [(2, 2, 8), (4, 2, 40), (7, 1, 64)]
"""Groups of 1, 2 and 7 heads, of sizes that do and do not fill their tile."""
LENGTHS = (1, 32, 0, 67)
SHARED, PARENTS = (17, 20, 0, 33, 7), (-1, 0, -1, -1, 0)
FAMILIES = (LENGTHS, None), (SHARED, PARENTS)


def decoded(*given, **options):
    """decode_attention in exact mode for these rows."""
    with registry.use_exact():
        return decoded_rows(*given, backend="triton", **options)


@pytest.mark.parametrize("heads", [*HEADS, (66, 1, 16)], ids=str)
@pytest.mark.parametrize(
    ("name", "shared", "dtype"),
    [
        ("plain", False, torch.bfloat16),
        ("window", True, torch.bfloat16),
        ("short window", False, torch.float32),
        ("all", True, torch.float32),
    ],
)
def test_rows_have_the_bits_of_decode_attention(on_triton, heads, name, shared, dtype):
    """Of the first and last queries of sequences and of tiles."""
    lengths, parents = (SHARED, PARENTS) if shared else (LENGTHS, (-1,) * len(LENGTHS))
    ends = list(accumulate(lengths))
    rows = sorted({row for end in ends for row in (end - 1, end, end + 32) if row < ends[-1]})
    options, tensors = options_of(name, heads), case(heads, lengths, dtype)
    got = attention(*tensors, lengths, parents=parents, backend="triton", **options)
    assert torch.equal(got[rows], decoded(*tensors, lengths, parents, rows, **options))


@each("dtype", [torch.float32, torch.bfloat16])
def test_bits_depend_on_nothing_beside_a_family(on_triton, dtype):
    """Alone and between others, forward and backward; a shared prompt gives forward the bits of copies."""
    lengths, options = (20, 33, 5, 40), {"scale": 0.25, "window": 35, "backend": "triton"}
    tensors = case((2, 1, 16), lengths, dtype)
    whole = bits_of_families(tensors, lengths, numbers(sum(lengths), 2, 16, seed=9), **options)
    for begin, end in ((20, 53), (53, 58)):
        copies = [torch.cat([x[:20], x[begin:end]]) for x in tensors]
        assert torch.equal(attention(*copies, [len(copies[0])], **options)[20:], whole[0][begin:end])


@pytest.mark.parametrize(
    ("heads", "name", "size"),
    [
        ((4, 2, 40), "all", 1.0),
        ((7, 1, 64), "window", 1e-3),
        pytest.param((2, 2, 8), "plain", 1.0, marks=pytest.mark.long),
        pytest.param((1, 1, 128), "softcap", 1.0, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_tier1(on_triton, heads, name, size):
    given = FAMILIES, heads, options_of(name, heads)
    hold("triton", testing.tier1, *given, lambda lengths: [x * size for x in case(heads, lengths)])


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.bfloat16, "all"), pytest.param(torch.float16, "window", marks=pytest.mark.long)]
)
def test_half_precision(on_triton, dtype, name):
    heads = (4, 2, 40)
    given = FAMILIES, heads, options_of(name, heads)
    hold("triton", tier_of_dtype, *given, lambda lengths: case(heads, lengths, dtype))


def test_what_is_not_seen_is_not_read(on_triton):
    """NaN in other families; keys behind a window, in blocks that no query of a tile sees."""
    lengths, n = (20, 100, 20), 120
    q, k, v = case((2, 1, 16), lengths)
    d_out = numbers(sum(lengths), 2, 16, seed=9)
    options = {"scale": 0.3, "window": 5, "backend": "triton"}
    want = with_gradients([q, k, v], lengths, d_out, **options)
    for x in (q, k, v):
        x[:20] = x[n:] = x[20:40] = torch.nan
    got = with_gradients([q, k, v], lengths, d_out, **options)
    seen = slice(20 + 64, n)  # whose tiles begin after what the broken keys can reach
    assert all(torch.equal(x[seen], y[seen]) for x, y in zip(got, want, strict=True))
    assert got[0][:20].isnan().all()


def test_nothing(on_triton):
    for lengths in ((), (0, 0)):
        tensors = case((4, 2, 8), lengths)
        got = with_gradients(tensors, lengths, torch.zeros(0, 4, 8), scale=1.0, backend="triton")
        assert [x.shape[0] for x in got] == [0] * 4


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(32, 8, 128), (14, 2, 64), (16, 16, 80), (8, 4, 256)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_decoding_at_size(on_triton, heads, dtype):
    lengths, parents = (500, 900, 120, 1), (-1, -1, 0, 0)
    tensors, options = case(heads, lengths, dtype), {"scale": heads[2] ** -0.5}
    got = attention(*tensors, lengths, parents=parents, backend="triton", **options)
    rows = [0, 31, 32, 63, 64, 499, 500, 1399, 1400, 1519, 1520]
    assert torch.equal(got[rows], decoded(*tensors, lengths, parents, rows, **options))


def test_tiles_are_made_once(on_triton, monkeypatch):
    made = []
    upload = ours.upload
    monkeypatch.setattr(ours, "upload", lambda rows, *more: made.append(rows) or upload(rows, *more))
    ours._TILES.clear()
    tensors = case((2, 1, 8), (5, 3))
    for _ in range(3):
        attention(*tensors, (5, 3), scale=1.0, parents=(-1, 0), backend="triton")
    assert made == [[[0, 0, 0, 0, 5], [5, 5, 0, 0, 3]]]
    q = tensors[0].requires_grad_()
    for _ in range(3):
        attention(*tensors, (5, 3), scale=1.0, parents=(-1, 0), backend="triton").sum().backward()
    assert made[1:] == [[[0, 0, 0, 5, 0, 2], [5, 5, 0, 3, 2, 3]], [[0, 0, 5], [5, 5, 3], [5, 5, 3]]]
    assert q.grad is not None
