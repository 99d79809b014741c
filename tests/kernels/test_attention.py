"""Packed causal attention: tiers against float64, the bits of decode_attention, families, hostile memory, bad input."""

import math
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from rlhf_kernels.attention import attention, reference
from rlhf_kernels.decode_attention import decode_attention
from rlhf_kernels.runtime import native, registry, testing

from .checks import ISAS, each, needs_native, same_bits, threads_change_no_bit

LENGTHS = (1, 2, 15, 16, 17, 33, 0, 100)
# (query heads, key heads, features): groups of 1, 2, 4 and 7; heads that are and are not whole vectors
HEADS = [(2, 2, 8), (4, 2, 16), (4, 1, 40), (7, 1, 64), (2, 1, 128), (2, 2, 256)]
OPTIONS = {
    "plain": {},
    "window": {"window": 21},
    "short window": {"window": 3},
    "window of a tile": {"window": 16},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "all": {"window": 40, "softcap": 3.0, "sinks": True},
}


@pytest.fixture(params=ISAS)
def backend(request):
    """A backend that has kernels, on every instruction set."""
    with native.use_isa(request.param):
        yield "cpu"


def numbers(*shape, dtype=torch.float32, seed=0):
    draw = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, device="cpu")
    return draw.to(torch.get_default_device(), dtype)


def case(heads, lengths=LENGTHS, dtype=torch.float32, seed=0):
    """q, k, v of packed sequences."""
    n_heads, n_kv, d = heads
    t = sum(lengths)
    return [numbers(t, h, d, dtype=dtype, seed=seed + i) for i, h in enumerate((n_heads, n_kv, n_kv))]


def options_of(name, heads):
    """Options of a call, with a sink for each head: near its scores, above and below them."""
    options = {"scale": heads[2] ** -0.5, **OPTIONS[name]}
    if options.get("sinks"):
        options["sinks"] = torch.tensor([0.7, -3.0, 2.5, 8.0]).repeat(heads[0])[: heads[0]]
    return options


def rows_seen(lengths, parents):
    """For every row the packed rows of the keys that it sees, in order."""
    starts = [0, *accumulate(lengths)]
    seen = []
    for i, parent in enumerate(parents):
        shared = [] if parent < 0 else list(range(starts[parent], starts[parent + 1]))
        seen += [shared + list(range(starts[i], starts[i] + n + 1)) for n in range(lengths[i])]
    return seen


def decoded_rows(q, k, v, lengths, parents, rows, **options):
    """decode_attention for these rows: k and v are a cache of one position per block, so a prompt is shared there."""
    seen = [rows_seen(lengths, parents)[row] for row in rows]
    table = torch.full((len(seen), max(map(len, seen))), 2**40)
    for row, keys in enumerate(seen):
        table[row, : len(keys)] = torch.tensor(keys)
    counts = torch.tensor([len(keys) for keys in seen])
    return decode_attention(q[rows], k[:, None], v[:, None], counts, table, **options)


def with_gradients(tensors, lengths, d_out, dtype=None, **options):
    """Output and gradients for q, k, v and sinks."""
    tensors = [x.to(dtype or x.dtype) for x in (*tensors, *([options.pop("sinks")] if "sinks" in options else []))]
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = attention(*leaves[:3], lengths, sinks=leaves[3] if len(leaves) > 3 else None, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out.to(out.dtype))]


def hold(backend, tier, families, heads, options, tensors_of):
    """Output and gradients of packed sequences, and of such with shared prompts, to float64 by a tier."""
    for lengths, parents in families:
        tensors = tensors_of(lengths)
        d_out = numbers(sum(lengths), heads[0], heads[2], dtype=tensors[0].dtype, seed=9)
        given = options | {"parents": parents}
        ours = with_gradients(tensors, lengths, d_out, backend=backend, **given)
        exact = with_gradients(tensors, lengths, d_out, torch.float64, backend="reference", **given)
        with pytest.MonkeyPatch.context() as patch:
            if tensors[0].dtype != torch.float32:  # every op rounds, as in a model in that dtype
                patch.setattr(reference, "attention", reference.in_its_dtype)
            plain = with_gradients(tensors, lengths, d_out, backend="reference", **given)
        for what, *parts in zip(("out", "dq", "dk", "dv", "dsinks"), ours, exact, plain, strict=False):
            testing.assert_ok(tier(*parts), what)


def bits_of_families(tensors, lengths, d_out, **options):
    """Forward and backward of [three sequences, one] have the bits of either alone, and of both the other way round."""
    parents = (-1, 0, 0, -1)
    whole = with_gradients(tensors, lengths, d_out, parents=parents, **options)
    n = sum(lengths[:3])
    for part, sizes, above in ((slice(0, n), lengths[:3], parents[:3]), (slice(n, None), lengths[3:], None)):
        alone = with_gradients([x[part] for x in tensors], sizes, d_out[part], parents=above, **options)
        same_bits(alone, [y[part] for y in whole])
    turned = [torch.cat([x[n:], x[:n]]) for x in (*tensors, d_out)]  # and behind an empty sequence
    sizes, above = (0, lengths[3], *lengths[:3]), (-1, -1, -1, 2, 2)
    moved = with_gradients(turned[:3], sizes, turned[3], parents=above, **options)
    same_bits([torch.cat([x[-n:], x[:-n]]) for x in moved], whole)
    return whole


FAMILIES = (17, 20, 0, 33, 5, 16, 40, 1)
PARENTS = (-1, 0, -1, -1, 0, 3, 3, 2)


@each("name", OPTIONS)
@each("dtype", [torch.float32, torch.bfloat16])
@each("shared", [False, True])
def test_every_row_has_the_bits_of_decode_attention(isa, dtype, name, shared):
    lengths, parents = (FAMILIES, PARENTS) if shared else (LENGTHS, (-1,) * len(LENGTHS))
    for heads in HEADS:
        tensors, options, rows = case(heads, lengths, dtype), options_of(name, heads), list(range(sum(lengths)))
        with registry.use_backend("cpu"):
            got = attention(*tensors, lengths, parents=parents, **options)
            assert torch.equal(got, decoded_rows(*tensors, lengths, parents, rows, **options)), heads


def test_bits_of_decode_attention_over_pages(isa):
    """Blocks of 32 positions in any order, and a window whose first tile is behind unreadable blocks."""
    q, k, v = case((4, 2, 64), (150,))
    blocks = [torch.full((7, 32, 2, 64), math.nan) for _ in "kv"]
    table = torch.tensor([3, 0, 6, 2, 5])
    for block, x in zip(blocks, (k, v), strict=True):
        for i in range(150):
            block[table[i // 32], i % 32] = x[i]
    for window in (None, 50, 70):
        with registry.use_backend("cpu"):
            got = attention(q, k, v, [150], scale=0.1, window=window)
            for i in (0, 31, 32, 77, 149):
                used = torch.arange(5) >= (0 if window is None else max(0, i + 1 - window) // 32)
                pages = torch.where(used, table, 2**40)[None]
                one = decode_attention(q[i : i + 1], *blocks, torch.tensor([i + 1]), pages, scale=0.1, window=window)
                assert torch.equal(one[0], got[i])


@each("dtype", [torch.float32, torch.bfloat16])
def test_bits_depend_on_nothing_beside_a_family(isa, dtype):
    """Alone, between others, with one and two threads; forward and backward."""
    lengths = (40, 70, 33, 100)
    tensors = case((4, 2, 64), lengths, dtype)
    d_out = numbers(sum(lengths), 4, 64, seed=9)
    with registry.use_backend("cpu"):
        threads_change_no_bit(lambda: bits_of_families(tensors, lengths, d_out, scale=0.125, window=90), 1, 2)


@each("name", ["plain", "window", "all"])
@each("prompt", [16, 21])
def test_a_shared_prompt_gives_the_bits_of_copies(isa, name, prompt):
    heads = (4, 2, 40)
    q, k, v = case(heads, (prompt, 30, 18))
    options = options_of(name, heads)
    with registry.use_backend("cpu"):
        shared = attention(q, k, v, [prompt, 30, 18], parents=[-1, 0, 0], **options)
        for begin, end in ((prompt, prompt + 30), (prompt + 30, prompt + 48)):
            copies = [torch.cat([x[:prompt], x[begin:end]]) for x in (q, k, v)]
            alone = attention(*copies, [len(copies[0])], **options)
            assert torch.equal(alone[:prompt], shared[:prompt])
            assert torch.equal(alone[prompt:], shared[begin:end])


@each("heads", HEADS)
@each(("name", "size"), [("plain", 1.0), ("window", 1e-3), ("all", 1.0)])
def test_tier1(isa, heads, name, size):
    given = ((LENGTHS, None), (FAMILIES, PARENTS)), heads, options_of(name, heads)
    hold("cpu", testing.tier1, *given, lambda lengths: [x * size for x in case(heads, lengths)])


@each("heads", HEADS)
@each("name", ["plain", "all"])
def test_tier3_bf16(isa, heads, name):
    given = ((LENGTHS, None), (FAMILIES, PARENTS)), heads, options_of(name, heads)
    hold("cpu", testing.tier3, *given, lambda lengths: case(heads, lengths, torch.bfloat16))


@needs_native
def test_long_sums_are_tier1():
    heads = (4, 1, 64)
    hold("cpu", testing.tier1, [((300, 200), (-1, 0))], heads, {"scale": 1 / 8}, lambda lengths: case(heads, lengths))


@needs_native
def test_bits_of_decode_attention_where_blocks_are_small():
    """So many scores that a block has fewer queries."""
    q, k, v = case((1, 1, 8), (8200,))
    got = attention(q, k, v, [8200], scale=0.3, backend="cpu")
    rows = torch.tensor([0, 15, 16, 4000, 8190, 8199])
    table = torch.zeros(len(rows), 1, dtype=torch.int64)
    one = decode_attention(q[rows], k[None], v[None], rows + 1, table, scale=0.3, backend="cpu")
    assert torch.equal(one, got[rows])


@each("heads", [(4, 2, 16), (2, 1, 40)])
def test_nan_stays_where_it_belongs(isa, heads):
    """NaN in a neighbour, in later rows, before the window and around the heads reaches no other row."""
    lengths, parents = [20, 50, 40, 12], [-1, -1, -1, 0]
    q, k, v = case(heads, lengths)
    options = {"scale": 0.2, "window": 18, "parents": parents, "backend": "cpu"}
    want = attention(q, k, v, lengths, **options)
    spread = [F.pad(x, (0, 3, 0, 1, 1, 1), value=math.nan)[1:-1, :-1, :-3] for x in (q, k, v)]
    assert torch.equal(attention(*spread, lengths, **options), want)
    dirty_q, dirty_k, dirty_v = (x.clone() for x in (q, k, v))
    dirty_q[45], dirty_k[45], dirty_v[45] = math.nan, math.nan, math.inf  # sequence 1, position 25
    dirty_k[75], dirty_v[75] = math.inf, math.nan  # sequence 2, position 5
    got = attention(dirty_q, dirty_k, dirty_v, lengths, **options)
    touched = torch.zeros(len(q), dtype=torch.bool)
    touched[45:63] = touched[75:93] = True
    assert torch.equal(got[~touched], want[~touched])
    assert got[touched].isnan().flatten(1).any(1).all()


def test_views_of_a_projection(backend):
    """Heads of one wide row, and heads before rows: the same bits, and nothing is copied."""
    t, d = 60, 16
    wide = numbers(t, (4 + 2 + 2) * d)
    q, k, v = (x.unflatten(1, (-1, d)) for x in wide.split([4 * d, 2 * d, 2 * d], 1))
    d_out = numbers(4, t, d, seed=1).transpose(0, 1)
    options = {"scale": 0.25, "backend": backend}
    plain = with_gradients([x.contiguous() for x in (q, k, v)], [40, 20], d_out.contiguous(), **options)
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    for views in ((q, k, v), turned, [torch.stack([x, x], -1)[..., 0] for x in (q, k, v)]):
        assert not any(x.is_contiguous() for x in views)
        leaves = [x.detach().requires_grad_() for x in views]
        out = attention(*leaves, [40, 20], **options)
        same_bits([out, *torch.autograd.grad(out, leaves, d_out)], plain)


@pytest.mark.parametrize("on", ["reference", pytest.param("cpu", marks=needs_native)])
def test_empty_batches(on):
    for lengths in ([], [0], [0, 0]):
        q, k, v = (torch.zeros(0, h, 8, requires_grad=True) for h in (4, 2, 2))
        out = attention(q, k, v, lengths, scale=1.0, backend=on)
        assert out.shape == (0, 4, 8)
        assert [g.shape[0] for g in torch.autograd.grad(out.sum(), (q, k, v))] == [0, 0, 0]
    for shape in ((0, 8), (4, 0)):
        q, k, v = torch.ones(3, *shape), torch.ones(3, 2, shape[1]), torch.ones(3, 2, shape[1])
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, [3], scale=1.0, backend=on)
        assert out.shape == (3, *shape)
        assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), leaves, materialize_grads=True))
    q, k, v = case((4, 2, 8), (3,))
    behind_nothing = attention(q, k, v, [0, 3], scale=1.0, parents=[-1, 0], backend=on)
    assert torch.equal(behind_nothing, attention(q, k, v, [3], scale=1.0, backend=on))


def test_a_sink_of_minus_infinity_is_none(backend):
    tensors, d_out = case((4, 2, 16)), numbers(sum(LENGTHS), 4, 16, seed=9)
    options = {"scale": 0.25, "backend": backend}
    plain = with_gradients(tensors, LENGTHS, d_out, **options)
    none = with_gradients(tensors, LENGTHS, d_out, sinks=torch.full((4,), -math.inf), **options)
    same_bits(none[:4], plain)
    assert (none[4] == 0).all()


def test_peaked_and_very_negative_scores(backend):
    q, k, v = case((2, 1, 16), (40,))
    begins = ((q, -100.0), (k, 10.0))
    low, ten = (torch.cat([torch.full_like(x[..., :1], value), x[..., 1:]], -1) for x, value in begins)
    for given in ((1000 * q, k, v), (low, ten, v)):
        got = attention(*given, [40], scale=1.0, backend=backend)
        want = attention(*(x.double() for x in given), [40], scale=1.0, backend="reference")
        torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-3)


@each("name", ["plain", "all"])
def test_gradcheck_of_the_reference(name):
    heads = (4, 2, 3)
    tensors = [x.requires_grad_() for x in case(heads, (4, 3, 2), torch.float64)]
    options = options_of(name, heads)
    sinks = options.pop("sinks", None)
    if sinks is not None:
        tensors.append(sinks.double().requires_grad_())
        options["window"] = 3

    def run(q, k, v, sinks=None):
        return attention(q, k, v, [4, 3, 2], parents=[-1, 0, -1], sinks=sinks, backend="reference", **options)

    torch.autograd.gradcheck(run, tensors)


@needs_native
def test_there_is_no_second_derivative():
    q, k, v = (x.requires_grad_() for x in case((2, 1, 8), (5,)))
    out = attention(q, k, v, [5], scale=0.3, backend="cpu")
    grad = torch.autograd.grad(out.sum(), q, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()


@each(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(5, 4)}, ValueError, r"q: expected shape \[T, Hq, D\], got \(5, 4\)"),
        ({"q": torch.zeros(5, 3, 8)}, ValueError, "q: expected a multiple of the 2 heads of k, got 3"),
        ({"q": torch.zeros(5, 4, 8, dtype=torch.int32)}, TypeError, "q: expected a floating dtype"),
        ({"k": torch.zeros(5, 2, 7)}, ValueError, r"k: expected shape \[5, Hkv, 8\], got \(5, 2, 7\)"),
        ({"k": torch.zeros(5, 2, 8).double()}, TypeError, "k: expected the dtype of q"),
        ({"v": torch.zeros(5, 1, 8)}, ValueError, "v: expected the shape of k"),
        ({"v": torch.zeros(4, 2, 8)}, ValueError, r"v: expected shape \[5, Hkv, 8\]"),
        ({"lengths": [2, 2]}, ValueError, "lengths: expected integers >= 0 that add up to the 5 rows of q"),
        ({"lengths": [6, -1]}, ValueError, "lengths: expected integers >= 0"),
        ({"lengths": [2.0, 3.0]}, TypeError, "lengths: expected a list of integers"),
        ({"lengths": torch.tensor([2, 3])}, TypeError, "lengths: expected a list of integers"),
        ({"parents": [-1]}, ValueError, "parents: expected one integer for each of 2 sequences, got 1"),
        ({"parents": [-1, 1]}, ValueError, "parents: expected -1 or an earlier sequence .*, got 1 for sequence 1"),
        ({"parents": [-2, -1]}, ValueError, "parents: expected -1 or an earlier sequence .*, got -2 for sequence 0"),
        ({"lengths": [2, 2, 1], "parents": [-1, 0, 1]}, ValueError, ".* without a parent, got 1 for sequence 2"),
        ({"window": 0}, ValueError, r"window: expected None or an integer from 1 to 2\^56, got 0"),
        ({"window": 2**70}, ValueError, r"window: expected None or an integer from 1 to 2\^56, got 1180591620"),
        ({"window": 2.5}, TypeError, "window: expected None or an integer, got 2.5"),
        ({"softcap": 0.0}, ValueError, "softcap: expected None or a number > 0, got 0.0"),
        ({"sinks": torch.zeros(2)}, ValueError, r"sinks: expected shape \[4\], .* head of q, got \(2,\)"),
        ({"sinks": torch.zeros(4).double()}, TypeError, r"sinks: expected the dtype of q .*, got torch\.float64"),
        ({"sinks": torch.zeros(4, device="meta")}, ValueError, r"sinks: expected the device of q \(cpu\), got meta"),
        ({"backend": "triton"}, registry.BackendUnavailableError, "cannot serve attention"),
        ({"backend": "fast"}, ValueError, r"backend: expected 'auto' or one of .*, got 'fast'"),
    ],
)
def test_bad_input(change, error, message):
    good = {"q": torch.zeros(5, 4, 8), "k": torch.zeros(5, 2, 8), "v": torch.zeros(5, 2, 8), "lengths": [2, 3]}
    good |= {"scale": 0.3, "parents": [-1, 0]}
    assert attention(**good).shape == (5, 4, 8)
    with pytest.raises(error, match=message):
        attention(**(good | change))
