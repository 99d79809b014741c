"""`decode_step`: against float64, against transformers, bits of a row in any company, hostile memory, bad input."""

import contextlib
import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers
from rlhf_kernels.attention import attention
from rlhf_kernels.decode_step import LINEARS, Decoder, DecoderLayer, DecodeStep, Projection, StepAdapter
from rlhf_kernels.linear import linear
from rlhf_kernels.llama_ops import rms_norm, rotary, swiglu
from rlhf_kernels.lora import Segments, lora_linear
from rlhf_kernels.runtime import native, registry, testing
from torch import Tensor

from .checks import ISAS, each, in_any_company, needs_native, same_bits, threads_change_no_bit
from .decode_step_cases import SIZES, Call, Sizes, make_adapter, make_adapters, make_call, make_decoder, mapped
from .dense import surrounded

FP32, BF16 = torch.float32, torch.bfloat16
PATHS = [(isa, dtype) for isa in ISAS for dtype in (FP32, BF16)]


@pytest.fixture(params=PATHS, ids=lambda path: f"{path[0]}-{path[1]}")
def dtype(request):
    """A dtype, on an instruction set in use."""
    isa, dtype = request.param
    with native.use_isa(isa):
        yield dtype


def assert_tiers(decoder, adapters, call, what=""):
    exact = call.take_exactly(decoder, adapters)
    eager = call.take(decoder, adapters, "reference")
    tier = testing.tier1 if decoder.embedding.dtype == FP32 else testing.tier3
    for name, ours, truth, plain in zip(
        ("hidden", "keys", "values"), call.take(decoder, adapters), exact, eager, strict=True
    ):
        assert ours.dtype == plain.dtype
        testing.assert_ok(tier(ours, truth, plain), f"{name} {what}")


# ---- numbers ---------------------------------------------------------------------------------------------------------


@needs_native
@each("sizes", SIZES)
@each("n", [15, 33])
def test_tiers(dtype, sizes, n):
    assert_tiers(make_decoder(sizes, dtype), make_adapters(sizes), make_call(sizes, n, dtype, 3))


@needs_native
@each("n", [1, 2, 16, 17, 64, 130])
def test_tiers_of_any_number_of_rows(dtype, n):
    s = Sizes(layers=1)
    assert_tiers(make_decoder(s, dtype), make_adapters(s, dtype), make_call(s, n, dtype, 3))


@needs_native
@each("sizes", [Sizes(layers=1), SIZES[1]._replace(layers=1)])
def test_rounds_where_the_reference_does(dtype, sizes):
    """A layer that rounds at the same places has all but the same bits: sums of other order seldom round otherwise."""
    if dtype == FP32:
        pytest.skip("float32 is not rounded on the way")
    decoder, adapters, call = make_decoder(sizes, dtype), make_adapters(sizes), make_call(sizes, 64, dtype, 3)
    for ours, plain in zip(call.take(decoder, adapters), call.take(decoder, adapters, "reference"), strict=True):
        assert (ours == plain).double().mean() > 0.99


@needs_native
def test_no_rows_and_no_adapters(dtype):
    s = Sizes()
    hidden, *_ = make_call(s, 0, dtype, 0).take(make_decoder(s, dtype), [])
    assert hidden.shape == (0, s.H)
    assert_tiers(make_decoder(s, dtype), [], make_call(s, 5, dtype, 0))


@needs_native
def test_strided_weights_and_caches(dtype):
    """Rows of weights, adapters and embedding with NaN between them; a dense cache of another order."""
    s = SIZES[1]
    decoder, adapters, call = make_decoder(s, dtype), make_adapters(s), make_call(s, 9, dtype, 3)
    around = lambda t: surrounded(t) if t.dim() == 2 else t  # noqa: E731
    same_bits(call.dense().take(mapped(decoder, around), mapped(adapters, around)), call.take(decoder, adapters))


def families():
    common = dict(
        vocab_size=61, hidden_size=48, intermediate_size=90, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-6, tie_word_embeddings=False,
    )  # fmt: skip
    return [
        transformers.LlamaConfig(**common, attention_bias=True),
        transformers.Qwen2Config(**common),
        transformers.Qwen3Config(**common, head_dim=16),
        transformers.MistralConfig(**common, sliding_window=6),
    ]


@each("config", families())
@each("dtype", [FP32, BF16])
@pytest.mark.parametrize("on", [*ISAS, "reference"])
def test_steps_repeat_a_forward_of_transformers(config, on, dtype):
    """A sequence fed token by token, rows at different places, gives the hidden states of one full forward pass."""
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.15 if p.dim() == 2 else 1.0)
    model.to(dtype)
    n, length, block = 5, 14, 4
    tokens = torch.randint(0, config.vocab_size, (n, length))
    with torch.no_grad():
        expected = model(tokens, use_cache=False).last_hidden_state
        exact = model.double()(tokens, use_cache=False).last_hidden_state
        cos, sin = model.rotary_emb(torch.zeros(1), torch.arange(length)[None])
    cos, sin = cos[0].to(dtype), sin[0].to(dtype)
    decoder = decoder_of(model.to(dtype), config)
    shape = (n * 4, block, decoder.n_kv_heads, decoder.head_dim)
    keys, values = ([torch.full(shape, torch.nan, dtype=dtype) for _ in decoder.layers] for _ in range(2))
    table, off = torch.randperm(n * 4).view(n, 4), torch.full((n,), -1)
    step = DecodeStep(mapped(decoder, lambda t: t.detach()), [], backend="reference" if on == "reference" else "cpu")
    starts = torch.arange(n) % 3  # rows run up to two steps behind each other
    hidden = torch.zeros_like(expected)
    for t in range(length + 2):
        rows = ((t - starts >= 0) & (t - starts < length)).nonzero()[:, 0]
        at = t - starts[rows]
        args = tokens[rows, at], at, off[rows], cos, sin, keys, values, table[rows]
        with contextlib.nullcontext() if on == "reference" else native.use_isa(on):
            hidden[rows, at] = step(*args)
    testing.assert_ok((testing.tier1 if dtype == FP32 else testing.tier3)(hidden, exact, expected))


def decoder_of(model, config) -> Decoder:
    def projection(linear) -> Projection:
        return Projection(weight=linear.weight, bias=linear.bias)

    layers = []
    for layer in model.layers:
        linears = {name: projection(getattr(layer.self_attn, f"{name}_proj")) for name in "qkvo"}
        linears |= {name: projection(getattr(layer.mlp, f"{name}_proj")) for name in ("gate", "up", "down")}
        norms = {"input_norm": layer.input_layernorm.weight, "mlp_norm": layer.post_attention_layernorm.weight}
        norms |= {name: x.weight for name in ("q_norm", "k_norm") if (x := getattr(layer.self_attn, name, None))}
        layers.append(DecoderLayer(**linears, **norms, window=getattr(config, "sliding_window", None)))
    attention = model.layers[0].self_attn
    return Decoder(
        embedding=model.embed_tokens.weight,
        layers=layers,
        final_norm=model.norm.weight,
        eps=config.rms_norm_eps,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        scale=attention.scaling,
    )


# ---- bits ------------------------------------------------------------------------------------------------------------

BIG = Sizes(H=160, heads=10, kv_heads=5, D=16, mlp=352, windows=(None, 7))  # enough for threads to share


@needs_native
@each("sizes", [SIZES[0], BIG])
def test_a_row_s_bits_do_not_depend_on_its_company(dtype, sizes):
    decoder, adapters, call = make_decoder(sizes, dtype), make_adapters(sizes), make_call(sizes, 70, dtype, 3)
    shuffled = torch.randperm(70, generator=torch.Generator().manual_seed(0))
    companies = [shuffled, torch.arange(33), shuffled[:16], shuffled[16:33], *(torch.tensor([i]) for i in (0, 31, 69))]
    companies += [(call.slots == slot).nonzero()[:, 0] for slot in (-1, 1)]

    def run(tokens, positions, slots, table):
        some = call._replace(tokens=tokens, positions=positions, slots=slots, table=table)
        return some.take(decoder, adapters)

    in_any_company(run, [call.tokens, call.positions, call.slots, call.table], companies)


@needs_native
def test_rows_of_many_slots_have_the_bits_of_each_slot_alone(dtype):
    """32 slots of several ranks, types and targets, in the order that the engine keeps and in none."""
    s, n, targets = SIZES[0], 150, (LINEARS, ("q", "v"), ("k", "o", "gate"), ("up", "down"), ("down",))
    adapters = [
        make_adapter(s, (FP32, BF16)[i % 2], (4, 5, 8, 16, 32)[i % 5], targets[i // 5 % 5], seed=i) for i in range(32)
    ]
    decoder, call = make_decoder(s, dtype), make_call(s, n, dtype, 32)
    for some in (call._replace(slots=call.slots.sort().values), call):
        together = some.take(decoder, adapters)
        for slot in range(-1, 32):
            own = (some.slots == slot).nonzero()[:, 0]
            for rows in (own, own[-1:]):
                assert len(rows)
                alone = Call(*(x[rows] if isinstance(x, Tensor) and len(x) == n else x for x in some))
                alone = alone._replace(slots=torch.full_like(rows, min(slot, 0)))
                same_bits(alone.take(decoder, adapters[max(slot, 0) : slot + 1]), [x[rows] for x in together])


@needs_native
def test_bits_do_not_depend_on_blocks_or_other_slots(dtype):
    s = SIZES[0]
    decoder, adapters, call = make_decoder(s, dtype), make_adapters(s), make_call(s, 20, dtype, 3)
    expected = call.take(decoder, adapters)
    order = torch.randperm(call.keys[0].shape[0])
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    valid = (call.table >= 0) & (call.table < len(order))
    moved = call._replace(
        keys=[t[order] for t in call.keys],
        values=[t[order] for t in call.values],
        table=torch.where(valid, place[call.table.clamp(0, len(order) - 1)], call.table),
    )
    relabelled = call._replace(slots=torch.where(call.slots >= 0, 2 - call.slots, -1))
    for other, slots in ((moved, adapters), (relabelled, adapters[::-1])):
        same_bits(other.take(decoder, slots), expected)


@needs_native
def test_shapes_that_change_in_place_are_seen(dtype):
    """Tensors that stay the same object at the same address, with other bounds than those that were bound."""
    s = SIZES[0]
    for inference in (False, True):
        with torch.inference_mode(inference):
            decoder, call = make_decoder(s, dtype), make_call(s, 20, dtype, 3).dense()
            step = DecodeStep(decoder, make_adapters(s), backend="cpu")
            expected = step(*call).clone()
            for tensors, fewer, said in (
                ([*call.keys, *call.values], 1, "table"),
                ([decoder.embedding], int(call.tokens.max()), "tokens"),
            ):
                shape = tensors[0].shape
                for t in tensors:
                    t.resize_(fewer, *shape[1:])
                with pytest.raises(ValueError, match=said):
                    step(*call)
                for t in tensors:
                    t.resize_(shape)
                assert torch.equal(step(*call), expected)
            decoder.layers[0].gate.weight.resize_(s.mlp - 1, s.H)
            with pytest.raises(ValueError, match=r"layers\[0\].up.weight: expected shape \(171, 64\), got \(172, 64\)"):
                step(*call)


@needs_native
@each("sizes", [SIZES[1], BIG])
def test_a_prompt_in_one_call_is_its_tokens_one_by_one(dtype, sizes):
    one_by_one, *together = prompts_in_calls(sizes, dtype, "cpu")
    for results in together:
        same_bits(results, one_by_one)


@each(("kind", "tolerance"), [(FP32, 1e-4), (BF16, 0.3)])
def test_a_prompt_in_one_call_of_the_reference(kind, tolerance):
    one_by_one, *together = prompts_in_calls(SIZES[1], kind, "reference")
    for results in together:
        torch.testing.assert_close(results, one_by_one, rtol=0, atol=tolerance)


@needs_native
@each("sizes", [*SIZES, BIG])
def test_a_step_has_the_bits_of_the_ops_that_train(dtype, sizes):
    """Hidden states of prompts, by the ops of a training forward and by steps: one rule for every sum of a row."""
    decoder, adapters = make_decoder(sizes, dtype), make_adapters(sizes)
    lengths, slots = [37, 1, 20, 16], [1, -1, 0, 2]
    row = torch.arange(4).repeat_interleave(torch.tensor(lengths))
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, sizes.V, (sum(lengths),), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths])
    like = make_call(sizes, 1, dtype, 3, longest=60)
    keys, values = ([t.new_full((60, *t.shape[1:]), torch.nan) for t in like.keys] for _ in range(2))
    table = torch.randperm(60, generator=generator)[: 4 * 15].view(4, 15)[row]
    step = DecodeStep(decoder, adapters, backend="cpu")
    stepped = torch.empty(sum(lengths), sizes.H, dtype=dtype)
    for rows in (torch.arange(40), torch.arange(40, len(row))):
        at = tokens[rows], positions[rows], torch.tensor(slots)[row[rows]]
        stepped[rows] = step(*at, like.cos, like.sin, keys, values, table[rows])
    with registry.use_exact():  # for the base of lora_linear, which has no backend of its own
        trained = by_ops(decoder, adapters, tokens, positions, lengths, slots, like.cos, like.sin)
    assert torch.equal(stepped, trained)


def by_ops(decoder, adapters, tokens, positions, lengths, slots, cos, sin) -> Tensor:
    """The decoder made of the ops that a training forward runs; sequences of so many tokens under these slots."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    starts = [end - n for end, n in zip(ends, lengths, strict=True)]

    def project(x: Tensor, layer: int, name: str) -> Tensor:
        projection = getattr(decoder.layers[layer], name)
        kept = [(a, b, s) for a, b, s in zip(starts, ends, slots, strict=True) if s >= 0]
        kept = [run for run in kept if name in adapters[run[2]].pairs[layer]]
        if not kept:
            return linear(x, projection.weight, projection.bias, backend="cpu")
        present = sorted({s for _, _, s in kept})
        pairs = [adapters[s].pairs[layer][name] for s in present]
        segments = Segments(
            starts=tuple(run[0] for run in kept),
            ends=tuple(run[1] for run in kept),
            slots=tuple(present.index(run[2]) for run in kept),
        )
        A, B = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        scales = [adapters[s].scale for s in present]
        return lora_linear(x, projection.weight, projection.bias, A, B, scales, segments, backend="cpu")

    def norm(x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else rms_norm(x, weight, eps=decoder.eps, backend="cpu")

    angles = cos[positions][None], sin[positions][None]
    x = decoder.embedding[tokens]
    for i, layer in enumerate(decoder.layers):
        u = norm(x, layer.input_norm)
        q, k, v = (project(u, i, name).unflatten(-1, (-1, decoder.head_dim)) for name in "qkv")
        q, k = norm(q, layer.q_norm), norm(k, layer.k_norm)
        q, k = rotary(q.transpose(0, 1)[None], k.transpose(0, 1)[None], *angles, backend="cpu")
        q, k = (y[0].transpose(0, 1) for y in (q, k))
        attended = attention(q, k, v, lengths, scale=decoder.scale, window=layer.window, backend="cpu")
        x = x + project(attended.flatten(1), i, "o")
        u = norm(x, layer.mlp_norm)
        x = x + project(swiglu(project(u, i, "gate"), project(u, i, "up"), backend="cpu"), i, "down")
    return norm(x, decoder.final_norm)


def prompts_in_calls(sizes: Sizes, dtype: torch.dtype, backend: str) -> list[list[Tensor]]:
    """Prompts of 37 and 20 tokens, one token a call; then as rows of one call, in two orders; then of two calls."""
    decoder, adapters = make_decoder(sizes, dtype), make_adapters(sizes)
    like = make_call(sizes, 1, dtype, 3, longest=60)  # for its angles and the shape of its caches
    blocks, row = 10, torch.arange(2).repeat_interleave(torch.tensor([37, 20]))
    generator = torch.Generator().manual_seed(5)
    table = torch.randperm(3 * blocks, generator=generator)[: 2 * blocks].view(2, blocks)[row]
    tokens = torch.randint(0, sizes.V, (57,), generator=generator)
    positions, slots = torch.cat([torch.arange(37), torch.arange(20)]), torch.tensor([1, -1])[row]

    def run(calls: list[Tensor]) -> list[Tensor]:
        keys, values = ([t.new_full((3 * blocks, *t.shape[1:]), torch.nan) for t in like.keys] for _ in range(2))
        step = DecodeStep(decoder, adapters, backend=backend)
        hidden = torch.empty(57, sizes.H, dtype=dtype)
        for rows in calls:
            at = tokens[rows], positions[rows], slots[rows]
            hidden[rows] = step(*at, like.cos, like.sin, keys, values, table[rows])
        page = table.gather(1, (positions // 4)[:, None])[:, 0]
        return [hidden, *(t[page, positions % 4] for t in (*keys, *values))]

    shuffled = torch.randperm(57, generator=generator)
    splits = (
        [torch.tensor([i]) for i in range(57)],
        [torch.arange(57)],
        [shuffled],
        [torch.arange(19), torch.arange(19, 57)],
    )
    return [run(calls) for calls in splits]


@needs_native
@each("n", [3, 40])
def test_bits_do_not_depend_on_threads(dtype, n):
    sizes = BIG._replace(layers=8 if n == 3 else 3)
    decoder, adapters, call = make_decoder(sizes, dtype), make_adapters(sizes), make_call(sizes, n, dtype, 3)
    threads_change_no_bit(lambda: call.take(decoder, adapters), 1, 2, 3, 5)


@needs_native
def test_threads_that_share_a_step_take_turns(dtype):
    """Each has caches of its own, so that every call of one binds what the other has bound away."""
    sizes = SIZES[0]
    decoder, adapters = make_decoder(sizes, dtype), make_adapters(sizes)
    calls = [make_call(sizes, 6, dtype, 3, seed=seed) for seed in (3, 4)]
    expected = [call.take(decoder, adapters)[0] for call in calls]
    step = DecodeStep(decoder, adapters, backend="cpu")

    def steps(number: int) -> int:
        call = calls[number]
        return sum(
            not torch.equal(step(*call[:5], call.keys, call.values, call.table), expected[number]) for _ in range(200)
        )

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(steps, (0, 1))) == [0, 0]


@needs_native
@each("poison", [torch.inf, torch.nan])
def test_other_rows_adapters_never_leak(dtype, poison):
    s = SIZES[0]
    decoder, adapters, call = make_decoder(s, dtype), make_adapters(s), make_call(s, 20, dtype, 3)
    clean = call.take(decoder, adapters)
    adapters[1] = mapped(adapters[1], lambda t: torch.full_like(t, poison))
    poisoned = call.take(decoder, adapters)
    spared = call.slots != 1
    for ours, want in zip(poisoned, clean, strict=True):
        assert torch.equal(ours[spared], want[spared])
    assert not poisoned[0][~spared].isfinite().any()


# ---- what changes between calls --------------------------------------------------------------------------------------


@needs_native
def test_updates_and_moves_are_seen(dtype):
    s = SIZES[1]
    decoder, adapters, call = make_decoder(s, dtype), make_adapters(s), make_call(s, 17, dtype, 3)
    step = DecodeStep(decoder, adapters, backend="cpu")
    run = lambda: step(*call)  # noqa: E731  # writes the same entries every time
    before = run()
    with torch.no_grad():
        for A, B in adapters[0].pairs[1].values():
            A.mul_(1.5)
            B.neg_()
    updated = run()
    assert torch.equal(updated, call.take(decoder, adapters)[0])
    on = call.slots == 0
    assert not torch.equal(updated[on], before[on])
    assert torch.equal(updated[~on], before[~on])
    for t in (decoder.layers[0].q.weight, adapters[1].pairs[0]["down"][1]):
        t.data = t.data.clone().mul_(-1)  # the memory is another one, the tensor is not
    assert torch.equal(run(), call.take(decoder, adapters)[0])
    caches = [[t.clone() for t in caches] for caches in (call.keys, call.values)]
    assert torch.equal(step(*call[:5], *caches, call.table), run())  # other caches


@needs_native
def test_only_new_entries_are_written(dtype):
    s = SIZES[1]
    decoder, call = make_decoder(s, dtype), make_call(s, 17, dtype, 0)
    before = [t.clone() for t in (*call.keys, *call.values)]
    DecodeStep(decoder, [], backend="cpu")(*call)
    page = call.table.gather(1, (call.positions // 4)[:, None])[:, 0]
    for cache, old in zip((*call.keys, *call.values), before, strict=True):
        old[page, call.positions % 4] = cache[page, call.positions % 4]
        assert torch.equal(cache.nan_to_num(7.0), old.nan_to_num(7.0))


# ---- bad input -------------------------------------------------------------------------------------------------------

BACKENDS = ["reference"] if native.missing() else ["cpu", "reference"]


def at(x: Tensor, index: Any, value: int) -> Tensor:
    x = x.clone()
    x[index] = value
    return x


@pytest.mark.parametrize("backend", BACKENDS)
@each(
    ("change", "error", "message"),
    [
        (lambda c: {"tokens": at(c.tokens, 2, 50)}, ValueError, "tokens: expected .* to 49, got 50"),
        (lambda c: {"tokens": at(c.tokens, 2, -1)}, ValueError, "tokens: expected .*, got -1"),
        (lambda c: {"tokens": c.tokens.int()}, TypeError, "tokens: expected torch.int64"),
        (lambda c: {"slots": at(c.slots, 0, 3)}, ValueError, "slots: expected .* to 2, got 3"),
        (lambda c: {"slots": at(c.slots, 0, -2)}, ValueError, "slots: expected .*, got -2"),
        (lambda c: {"slots": c.slots[:2]}, ValueError, "slots: expected shape"),
        (lambda c: {"positions": at(c.positions, 1, -1)}, ValueError, "positions: expected .*, got -1"),
        (lambda c: {"positions": at(c.positions, 1, 21)}, ValueError, "positions: expected .* to 20, got 21"),
        (lambda c: {"table": c.table[:, :1]}, ValueError, "positions: expected .* to 3, got"),
        (lambda c: {"table": at(c.table, (slice(None), 0), 10**6)}, ValueError, ".*: expected .*, got 1000000"),
        (lambda c: {"table": c.table[0]}, ValueError, "table: expected 2 dims"),
        (lambda c: {"cos": c.cos.double()}, TypeError, "cos: expected torch.float32"),
        (lambda c: {"sin": c.sin[:, :4]}, ValueError, r"sin: expected contiguous \[positions, 8\]"),
        (lambda c: {"sin": c.sin[:9]}, ValueError, "sin: expected the shape of cos"),
        (lambda c: {"keys": c.keys[:1]}, ValueError, "keys: expected 2 caches"),
        (lambda c: {"values": [*c.values, c.values[0]]}, ValueError, "values: expected 2 caches"),
        (lambda c: {"values": [c.values[0], c.values[0].half()]}, TypeError, r"values\[1\]: expected torch.float32"),
        (lambda c: {"keys": [c.keys[0], c.keys[0][:-1]]}, ValueError, r"keys\[1\]: expected the shape of keys\[0\]"),
        (lambda c: {"keys": [t.transpose(2, 3) for t in c.keys]}, ValueError, r"keys\[0\]: expected shape"),
        (lambda c: {"cos": c.cos.clone().requires_grad_()}, ValueError, "requires_grad: expected"),
    ],
)
def test_bad_calls(backend, change, error, message):
    s = SIZES[0]
    call = make_call(s, 5, FP32, 3)
    call = call._replace(positions=call.positions.clamp(4, 20))
    step = DecodeStep(make_decoder(s, FP32), make_adapters(s), backend=backend)
    with pytest.raises(error, match=f"^{message}"):
        step(*call._replace(**change(call)))


def with_layer(**kwargs):
    return lambda d: dataclasses.replace(d, layers=[d.layers[0], dataclasses.replace(d.layers[1], **kwargs)])


def with_q(weight=None, **kwargs):
    weight = torch.zeros(64, 64) if weight is None else weight
    return with_layer(q=Projection(weight=weight, **kwargs))


@each(("change", "error", "message"), [
        (lambda d: dataclasses.replace(d, n_kv_heads=3), ValueError, "n_heads: expected a multiple"),
        (lambda d: dataclasses.replace(d, head_dim=7), ValueError, "head_dim: expected an even number"),
        (lambda d: dataclasses.replace(d, layers=[]), ValueError, "layers: expected at least 1"),
        (lambda d: dataclasses.replace(d, eps=-1.0), ValueError, "eps: expected"),
        (lambda d: dataclasses.replace(d, final_norm=d.final_norm[:5]), ValueError, r"final_norm: expected .* \[64\]"),
        (lambda d: dataclasses.replace(d, embedding=d.embedding.long()), TypeError, "embedding: expected"),
        (with_layer(window=0), ValueError, r"layers\[1\].window: expected"),
        (with_layer(window=2.5), TypeError, r"layers\[1\].window: expected None or an integer, got 2.5"),
        (with_q(torch.zeros(64, 63)), ValueError, r"layers\[1\].q.weight: expected shape \(64, 64\)"),
        (with_q(torch.zeros(64, 64).t()), ValueError, r"layers\[1\].q.weight: expected inner stride 1"),
        (with_q(torch.zeros(64, 64).double()), TypeError, r"layers\[1\].q.weight: expected the dtype of embedding"),
        (with_q(bias=torch.zeros(63)), ValueError, r"layers\[1\].q.bias: expected a contiguous \[64\]"),
    ])  # fmt: skip
def test_bad_decoders(change, error, message):
    with pytest.raises(error, match=f"^{message}"):
        DecodeStep(change(make_decoder(Sizes(), FP32)), [])


def test_bad_adapters():
    s = Sizes()
    good, decoder = make_adapter(s, FP32, 4), make_decoder(s, FP32)
    A, B = good.pairs[0]["q"]

    def refused(error, message, pairs, **kwargs):
        with pytest.raises(error, match=message):
            DecodeStep(decoder, [StepAdapter(pairs=pairs, scale=1.0)], **kwargs)

    refused(ValueError, r"adapters\[0\].pairs: expected 2 layers, got 1", good.pairs[:1])
    refused(ValueError, r"pairs\[0\]: expected names among .*, got 'head'", [{"head": (A, B)}, {}])
    refused(ValueError, r"\['q'\]\[1\]: expected shape \(64, 4\), got \(64, 3\)", [{"q": (A, B[:, :3])}, {}])
    refused(ValueError, r"\['q'\]\[0\]: expected shape \(1, 64\), got \(0, 64\)", [{"q": (A[:0], B[:, :0])}, {}])
    refused(TypeError, r"\['q'\]\[0\]: expected a floating dtype", [{"q": (A.int(), B)}, {}])
    if native.missing() is None:
        half = [{"q": (A.half(), B)}, {}]
        refused(TypeError, r"\['q'\]: expected torch.float32 or torch.bfloat16", half, backend="cpu")
