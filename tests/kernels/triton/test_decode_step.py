"""The decoding step in Triton: numbers, bits of rows without an adapter, memory that nobody may read, moves."""

import dataclasses

import pytest
import torch
from rlhf_kernels.decode_step import DecodeStep, Projection, StepAdapter, join, triton as ours
from rlhf_kernels.decode_step.model import side_by_side
from rlhf_kernels.runtime import registry, testing

from tests.kernels.checks import capture, same_bits
from tests.kernels.decode_step_cases import (
    SIZES,
    Call,
    Sizes,
    make_adapter,
    make_adapters,
    make_call,
    make_decoder,
    mapped,
)
from tests.kernels.dense import surrounded

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def _(on_triton, rounds_to_bf16):
    """All tensors are where the kernels run."""


def case(sizes, n, dtype, adapters=None, seed=3):
    """Decoder, slots and call; tensors are made on the CPU, from seeds, and moved."""
    with torch.device("cpu"):
        slots = make_adapters(sizes) if adapters is None else adapters
        made = make_decoder(sizes, dtype), slots, make_call(sizes, n, dtype, len(slots), seed=seed)
    device = torch.empty(0).device
    return tuple(moved(x, device) for x in made)


def moved(x, device):
    if isinstance(x, Call):
        return Call(*(moved(part, device) for part in x))
    return mapped(x, lambda t: t.to(device))


def assert_tiers(decoder, adapters, call):
    exact, eager = call.take_exactly(decoder, adapters), call.take(decoder, adapters, "reference")
    tier = testing.tier1 if decoder.embedding.dtype == FP32 else testing.tier3
    for name, got, truth, plain in zip(
        ("hidden", "keys", "values"), call.take(decoder, adapters, "triton"), exact, eager, strict=True
    ):
        assert got.dtype == plain.dtype
        testing.assert_ok(tier(got, truth, plain), name)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_tiers(dtype, sizes):
    """Biases, norms of heads, windows, slots and none, wild entries of the table, NaN in the caches."""
    assert_tiers(*case(sizes, 18, dtype))


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("sizes", [Sizes(layers=1), SIZES[1]._replace(layers=1)], ids=str)
def test_rounds_where_the_reference_does(dtype, sizes):
    """A layer that rounds at the same places has all but the same bits: sums of other order seldom round otherwise."""
    decoder, adapters, call = case(sizes, 18, dtype)
    for got, plain in zip(
        call.take(decoder, adapters, "triton"), call.take(decoder, adapters, "reference"), strict=True
    ):
        assert (got == plain).double().mean() > 0.98


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_row_without_an_adapter_has_the_bits_of_a_call_without_any(dtype):
    decoder, adapters, call = case(SIZES[1]._replace(layers=1), 18, dtype)
    off = call.slots < 0
    assert 0 < off.sum() < 18
    with_slots, without = call.take(decoder, adapters, "triton"), call._replace(slots=torch.full_like(call.slots, -1))
    same_bits([x[off] for x in with_slots], [x[off] for x in without.take(decoder, [], "triton")])
    same_bits(without.take(decoder, adapters, "triton"), without.take(decoder, [], "triton"))
    assert not torch.equal(with_slots[0][~off], without.take(decoder, [], "triton")[0][~off])


@pytest.mark.parametrize("poison", [torch.inf, torch.nan])
def test_other_rows_adapters_never_leak(poison):
    decoder, adapters, call = case(Sizes(layers=1), 18, FP32)
    clean = call.take(decoder, adapters, "triton")
    adapters[1] = mapped(adapters[1], lambda t: torch.full_like(t, poison))
    poisoned, spared = call.take(decoder, adapters, "triton"), call.slots != 1
    same_bits([x[spared] for x in poisoned], [x[spared] for x in clean])
    assert not poisoned[0][~spared].isfinite().any()


def test_ranks_of_several_tiles_splits_and_dtypes(monkeypatch):
    """A depth of several splits, ranks of several tiles, and A and B of every dtype in one call."""
    monkeypatch.setattr(ours, "SPLIT", 16)
    monkeypatch.setattr(ours, "MAX_SPLITS", 3)
    monkeypatch.setattr(ours, "COLUMNS", 32)
    s = Sizes(layers=1)
    with torch.device("cpu"):
        adapters = [make_adapter(s, FP32, 40), make_adapter(s, BF16, 70, seed=5), make_adapter(s, FP32, 3, seed=6)]
    half = [{name: (A.bfloat16(), B) for name, (A, B) in pairs.items()} for pairs in adapters[2].pairs]
    adapters[2] = StepAdapter(pairs=half, scale=-1.5)
    assert_tiers(*case(s, 18, FP32, adapters))


@pytest.mark.parametrize("sizes", [Sizes(layers=1), SIZES[1]._replace(layers=1)], ids=str)
def test_groups_that_lie_side_by_side_are_one_product(sizes):
    decoder, adapters, call = case(sizes, 18, FP32)
    apart = call.take(decoder, adapters, "triton")
    held = [getattr(decoder.layers[0], name).weight for name in ("q", "k", "v")]
    before = [t.clone() for t in held]
    join(decoder)
    addresses = [t.data_ptr() for t in held]
    join(decoder)
    assert addresses == [t.data_ptr() for t in held], "what lies side by side stays where it is"
    same_bits(held, before)
    assert len({t.untyped_storage().data_ptr() for t in held}) == 1
    assert held[0].untyped_storage().nbytes() == sum(t.nbytes for t in held)
    for names, groups in (("qkv", 1), (("gate", "up"), 1), ("qo", 2)):
        linears = [getattr(decoder.layers[0], name) for name in names]
        assert len(side_by_side([(p.weight, p.bias) for p in linears])) == groups
    for x, y in zip(call.take(decoder, adapters, "triton"), apart, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    assert_tiers(decoder, adapters, call)


def test_a_group_of_which_one_linear_has_a_bias_is_no_group():
    decoder, adapters, call = case(SIZES[1], 18, FP32)
    layer = decoder.layers[0]
    layers = [dataclasses.replace(layer, k=Projection(weight=layer.k.weight)), *decoder.layers[1:]]
    decoder = dataclasses.replace(decoder, layers=layers)
    join(decoder)
    assert_tiers(decoder, adapters, call)


def test_strided_weights_caches_and_tables():
    """Rows of weights, adapters and embedding with NaN between them; a dense cache of another order."""
    decoder, adapters, call = case(SIZES[1], 18, FP32)
    around = lambda t: surrounded(t) if t.dim() == 2 else t  # noqa: E731
    wide = torch.stack([call.table, torch.full_like(call.table, -7)], -1)[..., 0]
    strided = call.dense()._replace(table=wide, slots=call.slots.int(), tokens=call.tokens.repeat_interleave(2)[::2])
    results = [
        call.take(decoder, adapters, "triton"),
        strided.take(mapped(decoder, around), mapped(adapters, around), "triton"),
    ]
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_updates_and_moves_are_seen_and_only_new_entries_written():
    decoder, adapters, call = case(SIZES[1], 18, FP32)
    step = DecodeStep(decoder, adapters, backend="triton")
    caches = [t.clone() for t in (*call.keys, *call.values)]
    before = step(*call)
    page = call.table.gather(1, (call.positions // 4)[:, None])[:, 0]
    for cache, old in zip((*call.keys, *call.values), caches, strict=True):
        old[page, call.positions % 4] = cache[page, call.positions % 4]
        assert torch.equal(cache.nan_to_num(7.0), old.nan_to_num(7.0))
    for pair in adapters[0].pairs[1].values():
        pair[1].neg_()
    updated, on = step(*call), call.slots == 0
    assert torch.equal(updated, call.take(decoder, adapters, "triton")[0])
    assert not torch.equal(updated[on], before[on])
    assert torch.equal(updated[~on], before[~on])
    for t in (decoder.layers[0].q.weight, adapters[1].pairs[0]["down"][1]):
        t.data = t.data.clone().mul_(-1)
    moved_once = step(*call)
    assert torch.equal(moved_once, call.take(decoder, adapters, "triton")[0])
    assert not torch.equal(moved_once, updated)
    join(decoder)
    torch.testing.assert_close(step(*call), moved_once, rtol=1e-5, atol=1e-5)


def test_no_rows_no_adapters_and_slots_beyond_the_last():
    decoder, _, call = case(SIZES[0], 18, FP32, [])
    none = call._replace(
        tokens=call.tokens[:0], positions=call.positions[:0], slots=call.slots[:0], table=call.table[:0]
    )
    assert none.take(decoder, [], "triton")[0].shape == (0, SIZES[0].H)
    assert_tiers(decoder, [], call)
    beyond = call._replace(slots=torch.full_like(call.slots, 99))
    same_bits(beyond.take(decoder, [], "triton"), call.take(decoder, [], "triton"))


def test_what_it_does_not_serve():
    decoder, adapters, _ = case(SIZES[0], 1, FP32)
    with registry.use_exact(), pytest.raises(registry.BackendUnavailableError, match="exact mode: its products"):
        DecodeStep(decoder, adapters, backend="triton")
    double = mapped(decoder, lambda t: t.double())
    with pytest.raises(registry.BackendUnavailableError, match=r"not in torch\.float64"):
        DecodeStep(double, [], backend="triton")
    adapters[0] = mapped(adapters[0], lambda t: t.double())
    with pytest.raises(TypeError, match=r"adapters\[0\].pairs\[0\]\['q'\]: expected one of .*, got torch.float64"):
        DecodeStep(decoder, adapters, backend="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_in_a_graph_rows_change_their_slots(dtype):
    """What was captured with every row off serves rows of any slots, tokens and positions."""
    sizes = Sizes(H=512, heads=8, kv_heads=2, D=64, mlp=1024, bias=True)
    decoder, adapters, call = case(sizes, 40, dtype)
    join(decoder)
    step, slots = DecodeStep(decoder, adapters, backend="triton"), call.slots.clone()
    call.slots.fill_(-1)
    step(*call)
    graph, captured = capture(lambda: step(*call))
    for rows in (slots, slots.flip(0)):
        call.slots.copy_(rows)
        graph.replay()
        torch.cuda.synchronize()
        replayed = captured.clone()
        assert torch.equal(replayed, step(*call))
    assert_tiers(decoder, adapters, call)
