"""Attention for packed rows, as one function in transformers' AttentionInterface, and the keys and values it keeps.

A backbone call sees one row of tokens [1, T] that holds many sequences. The plan of the call (ambient, see `gate`) says
how they attend:

* `PackedPlan`: every sequence attends causally to itself, and to a prompt that it shares with others. On a CPU, and on
  a GPU in exact mode, that is the op `attention`, whose rows have the bits of decoding's; elsewhere on a GPU `varlen`
  chooses who serves it without padding, also with shared prompts.
  Elsewhere sequences of similar length go through one SDPA call, the shorter ones padded on the right; under a causal
  mask no real query sees that padding, so no mask tensor exists. With `new`, keys and values are also written into a
  cache (prefill).
* `DecodePlan`: one new token per row; keys and values are appended to the cache and the op `decode_attention` reads it.

In SDPA, a sliding window (Mistral) bounds the keys by a band mask per length, never by one over all T rows, and long
sequences go in blocks of queries. A softcap on the scores (Gemma 2) then runs in plain torch, block by block, in the
order of operations of transformers' eager attention: SDPA cannot express it. So do sinks (gpt-oss), one logit per head
that joins the softmax's denominator and has no value. A keyword that is not served is refused by name.

Keys and values of the tokens so far lie in blocks that rows take and give back. A row's table lists its blocks in
order: position p lies at entry p % block of the block table[p // block]. Rows may share blocks, such as those of a
common prompt; a block goes back when the last of them lets go of it. Where heads of keys and of values differ in size
(multi-head latent attention), the smaller ones are filled up with zeros, because the kernels of `decode_attention` take
one size. Zeros change no score, and the outputs' are cut off.

Legend: T rows, N sequences, H query heads, K key/value heads, D head size (in the cache the larger one), S cache
length, B blocks of a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from rlhf_kernels.attention import attention as attention_in_order
from rlhf_kernels.decode_attention import decode_attention
from rlhf_kernels.lora import DecodeLinear
from rlhf_kernels.runtime import autocast, registry
from rlhf_kernels.runtime.eager import eager
from torch import nn
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlhf_engine.devices import is_eager, is_gpu
from rlhf_engine.errors import UnsupportedModelError
from rlhf_engine.hydra import gate, varlen
from rlhf_engine.hydra.varlen import ScoreRule, Sequences

BLOCK = 32  # positions per block


class BlockPool:
    """Pool of blocks: which are free, and how many holders each of the others has."""

    def __init__(self, blocks: int = 0) -> None:
        self._free: list[int] = []
        self._holders: list[int] = []
        self.most_used = 0  # most blocks in use at once so far
        self.grow(blocks)

    def grow(self, blocks: int) -> None:
        """Have so many blocks in all; those that are held stay."""
        self._free = [*range(blocks - 1, self.size - 1, -1), *self._free]
        self._holders += [0] * (blocks - self.size)

    @property
    def size(self) -> int:
        """Blocks in all."""
        return len(self._holders)

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def take(self, n: int) -> list[int]:
        """n blocks for one holder. Raises ValueError if fewer are free."""
        if n > len(self._free):
            raise ValueError(f"n: expected at most {len(self._free)} blocks, which are free, got {n}")
        taken = [self._free.pop() for _ in range(n)]
        for block in taken:
            self._holders[block] = 1
        self.most_used = max(self.most_used, self.size - self.free)
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """One more holder for each of the blocks."""
        for block in blocks:
            if self._holders[block] == 0:
                raise ValueError(f"blocks: expected blocks in use, got {block}, which is free")
            self._holders[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """One holder less for each of the blocks."""
        for block in blocks:
            if self._holders[block] == 0:
                raise ValueError(f"blocks: expected blocks in use, got {block}, which is free")
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free.append(block)


@dataclass(eq=False)
class KVCache:
    """Keys and values of every layer, [blocks, K, block, D] each, allocated when a layer first writes.

    The tokens of one head lie side by side, in the order in which decoding reads them. What no row has written is not
    initialised.
    """

    blocks: int
    block: int = BLOCK
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)

    def allocate(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Room for a layer whose keys and values are like these, [T, K, ≤ D] each; nothing if it is there already."""
        size = max(key.shape[2], value.shape[2])
        for like, layers in ((key, self.keys), (value, self.values)):
            if layer not in layers:
                layers[layer] = like.new_empty((self.blocks, like.shape[1], self.block, size))

    def grow(self, blocks: int) -> None:
        """Have so many blocks, with what the present ones hold; one layer at a time is there twice."""
        for layers in (self.keys, self.values) if blocks > self.blocks else ():
            for layer, old in layers.items():
                layers[layer] = old.new_empty((blocks, *old.shape[1:]))
                layers[layer][: len(old)] = old
        self.blocks = blocks

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, [blocks, block, K, D] each, as `decode_attention` takes them."""
        return self.keys[layer].transpose(1, 2), self.values[layer].transpose(1, 2)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks in every layer."""
        for layers in (self.keys, self.values):
            for x in layers.values():
                x[list(targets)] = x[list(sources)]


@dataclass(frozen=True, kw_only=True, eq=False)
class NewTokens:
    """Places in a cache for the tokens of one call."""

    cache: KVCache
    blocks_T: torch.Tensor  # int64 [T], block of each token
    entries_T: torch.Tensor  # int64 [T], entry of each token in its block
    _places: dict[int, torch.Tensor] = field(init=False, default_factory=dict)

    @classmethod
    def of_rows(cls, cache: KVCache, table_NB: torch.Tensor, positions_N: torch.Tensor) -> NewTokens:
        """One new token per row: at its position in its row's blocks."""
        column = torch.div(positions_N, cache.block, rounding_mode="floor")
        blocks = table_NB.gather(1, column[:, None])[:, 0]
        return cls(cache=cache, blocks_T=blocks, entries_T=positions_N - column * cache.block)

    @classmethod
    def of_prompts(
        cls, cache: KVCache, tables: Sequence[Sequence[int]], lengths: Sequence[int], device: torch.device
    ) -> NewTokens:
        """The first `lengths[i]` positions of each row, one row after another."""
        positions = [torch.arange(n) for n in lengths]
        blocks = [torch.tensor(table)[p // cache.block] for table, p in zip(tables, positions, strict=True)]
        entries = torch.cat(positions) % cache.block
        return cls(cache=cache, blocks_T=torch.cat(blocks).to(device), entries_T=entries.to(device))

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store keys and values [T, K, ≤ D] of a layer."""
        self.cache.allocate(layer, key, value)
        for new, layers in ((key, self.cache.keys), (value, self.cache.values)):
            held = layers[layer]
            new = filled_up(new, held.shape[3])
            held.view(-1, held.shape[3]).index_copy_(0, self._places_of(new.shape[1]), new.reshape(-1, held.shape[3]))

    def _places_of(self, heads: int) -> torch.Tensor:
        """int64 [T · heads], index of each vector in the cache of a layer; made once per call."""
        if heads not in self._places:
            head = torch.arange(heads, device=self.blocks_T.device)
            first = self.blocks_T[:, None] * heads + head
            self._places[heads] = (first * self.cache.block + self.entries_T[:, None]).flatten()
        return self._places[heads]


def filled_up(heads: torch.Tensor, size: int) -> torch.Tensor:
    """[…, D] with zeros behind what heads [… , ≤ D] have; the same tensor where nothing is missing."""
    missing = size - heads.shape[-1]
    return torch.nn.functional.pad(heads, (0, missing)) if missing else heads


# ---- plans and kernels -----------------------------------------------------------------------------------------------


ATTENTION_NAME = "rlhf_engine"
_PADDING_WASTE = 1.25
_WINDOW_BLOCK = 1024  # queries per SDPA call of a sequence that is longer than twice its window (and than twice this)
_PLAIN_BLOCK = 512  # queries whose scores exist at a time in plain torch
_WITHOUT_EFFECT = frozenset(
    {"position_ids", "use_cache", "cache_position", "return_dict", "output_router_logits", "logits_to_keep"}
)
"""Keywords that models hand through and that change nothing about who attends to whom: the plan says that."""


Bucket = tuple[int, int]  # sequences that share one SDPA call: the length that they are padded to, and their number

Grid = tuple[torch.Tensor, torch.Tensor]
"""Places of packed rows in the padded rows of all buckets, one bucket after another: int64 [places], the row of each
place, where one of padding repeats the first row of its sequence; and int64 [T], the place of each row."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedPlan:
    """Causal attention within each packed sequence."""

    lengths: tuple[int, ...]
    device: torch.device
    parents: tuple[int, ...] | None = None
    """Parent of each sequence, whose keys come before its own, by its number; −1: none. None: no sequence has one."""
    new: NewTokens | None = None  # place where keys and values are kept for decoding (prefill); None: nowhere
    bands: dict[tuple[int, int, int], torch.Tensor] = field(default_factory=dict)
    """Band masks of this call's layers, made once: (first query, keys, window) → bool [1, 1, queries, keys]."""

    @cached_property
    def max_length(self) -> int:
        """Keys of the row that has most."""
        if self.parents is None:
            return max(self.lengths)
        pairs = zip(self.lengths, self.parents, strict=True)
        return max(n if p < 0 else n + self.lengths[p] for n, p in pairs)

    @cached_property
    def sequences(self) -> Sequences:
        """Bounds of the sequences, for attention without padding."""
        return Sequences(lengths=self.lengths, device=self.device, parents=self.parents)

    @cached_property
    def layout(self) -> tuple[tuple[Bucket, ...], Grid | None]:
        """Buckets, for SDPA, and the grid: None where rows lie as the buckets take them, being of one length."""
        return _in_layout(self.lengths, self.device)


Linears = dict[tuple[object, gate.SlotTable], DecodeLinear]
"""Linears of layers for the few rows of a decoding step, by layer and slot table."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodePlan:
    """One new token per row against the cache."""

    new: NewTokens  # place of each row's new token; its position is the number of tokens before it
    max_length: int  # longest row including the new token, known on the host
    lengths_N: torch.Tensor  # int64 [N], tokens of each row with the new one
    table_NB: torch.Tensor  # int64 [N, B], the blocks of each row
    linears: Linears  # linears that layers have prepared; the steps of one generation share them


AttentionPlan = PackedPlan | DecodePlan


def plan_packed(
    lengths: Sequence[int], device: torch.device, *, parents: Sequence[int] | None = None, new: NewTokens | None = None
) -> PackedPlan:
    """Plan for sequences of the given lengths packed one after another, with `parents` as in `PackedPlan`."""
    plan = PackedPlan(
        lengths=tuple(lengths), device=device, parents=None if parents is None else tuple(parents), new=new
    )
    _ = plan.max_length  # torch.compile enters no cached property
    if not is_gpu(device) and parents is None:  # elsewhere the first layer that needs it makes it
        _ = plan.layout
    return plan


def _in_layout(lengths: Sequence[int], device: torch.device) -> tuple[tuple[Bucket, ...], Grid | None]:
    starts = [0, *itertools.accumulate(lengths)]
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    groups: list[list[int]] = []
    for i in order:
        if groups and lengths[groups[-1][0]] <= _PADDING_WASTE * lengths[i]:
            groups[-1].append(i)
        else:
            groups.append([i])
    buckets, places_in_order, widths = list[Bucket](), list[int](), list[int]()
    for group in groups:  # whose first sequence is the longest
        buckets.append((lengths[group[0]], len(group)))
        places_in_order += sorted(group)
        widths += [lengths[group[0]]] * len(group)
    in_order, padded = torch.tensor(places_in_order), torch.tensor(widths)
    begin = torch.tensor(starts[:-1])[in_order].repeat_interleave(padded)
    offsets = torch.arange(len(begin)) - (padded.cumsum(0) - padded).repeat_interleave(padded)
    real = offsets < torch.tensor(lengths)[in_order].repeat_interleave(padded)
    rows = torch.where(real, begin + offsets, begin)
    if torch.equal(rows, torch.arange(starts[-1])):
        return tuple(buckets), None
    places = torch.empty(starts[-1], dtype=torch.int64)
    places[rows[real]] = real.nonzero().squeeze(1)
    return tuple(buckets), (rows.to(device), places.to(device))


SHARING = ("cpu",)
"""Device types on which prompts are shared unless a model says otherwise. No GPU has run it, in exact mode or outside:
bench/results/nvidia-h200/share.json has copies alone."""
LEAST_SAVED = 0.15
"""Share of a batch's rows that shared prompts save at least on a GPU, else they are copies: sharing costs time, too."""


def can_share(tokens_T: torch.Tensor, dtype: torch.dtype, head_size: int) -> bool:
    """Whether sequences of tokens_T may go on from a prompt that they share: a kernel or FlexAttention has to serve."""
    if not eager(tokens_T):
        return False
    device_type = tokens_T.device.type
    return _kernel(device_type, dtype) is not None or varlen.can_share(device_type, dtype, head_size)


def _kernel(device_type: str, dtype: torch.dtype) -> str | None:
    """Backend that may attend in the order of decoding; None: attention of packed rows is others' affair."""
    if not is_eager() or registry.leaves_to_torch("attention"):
        return None
    backend = registry.asked("attention")
    if backend == "auto":
        if is_gpu(device_type) and not registry.is_exact():
            return None
        backend = "triton" if is_gpu(device_type) else "cpu"
    return backend if registry.unsupported("attention", backend, device_type, dtype) is None else None


def _runs_in_order(query: torch.Tensor) -> bool:
    """Whether attention of packed rows with such queries does run in the order of decoding."""
    backend = _kernel(query.device.type, query.dtype)
    return backend is not None and registry.resolve("attention", "auto", query, (query.shape[-1],)) == backend


def plan_decode(
    cache: KVCache, table_NB: torch.Tensor, positions_N: torch.Tensor, max_length: int, linears: Linears
) -> DecodePlan:
    """Plan for one new token per row; with the `linears` of the step before, layers need not prepare again."""
    return DecodePlan(
        new=NewTokens.of_rows(cache, table_NB, positions_N),
        max_length=max_length,
        lengths_N=positions_N + 1,
        table_NB=table_NB,
        linears=linears,
    )


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature. query [1, H, T, D]; key, value [1, K, T, D]; returns ([1, T, H, D], None).

    Raises RuntimeError outside a backbone call, and ValueError for a keyword or a mask that it does not serve: ignoring
    one would be silently wrong.
    """
    call = gate.current()
    if call is None:
        raise RuntimeError(
            "attention ran outside a backbone call: this backbone belongs to a HydraModel; go through its forward, "
            "score or generate"
        )
    plan = call.attention
    longest = plan.max_length
    window, softcap = kwargs.pop("sliding_window", None), kwargs.pop("softcap", None)
    sinks = kwargs.get("s_aux")
    sinks = kwargs.pop("s_aux") if isinstance(sinks, torch.Tensor) and sinks.shape == query.shape[1:2] else None
    if call.windows is not None:
        call.windows.append(window)
    _refuse_unserved(kwargs, attention_mask, dropout)
    bites = window is not None and window < longest
    rule = ScoreRule(scaling=scaling, window=window if bites else None, softcap=softcap, sinks=sinks)
    if isinstance(plan, DecodePlan):
        return _decode(module, query, key, value, rule, plan), None
    if plan.new is not None:
        plan.new.write(_layer_index(module), key[0].transpose(0, 1), value[0].transpose(0, 1))
    packed = varlen.choose(query, value, rule, shared=plan.parents is not None)
    if packed is not None:
        query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        return packed(query, key, value, plan.sequences, rule)[None], None
    query, key, value = autocast.converted(query, key, value)  # as SDPA would
    if plan.parents is not None or _runs_in_order(query):
        return _in_order(query, key, value, rule, plan)[None], None
    attend = _sdpa if softcap is None and sinks is None else _plain
    buckets = zip(*(_in_buckets(x, plan) for x in (query, key, value)), strict=True)
    parts = [attend(module, q, k, v, rule, plan).flatten(0, 1) for q, k, v in buckets]  # each [n · length, H, D]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    grid = plan.layout[1]
    return (out if grid is None else out.index_select(0, grid[1]))[None], None


def _in_order(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: ScoreRule, plan: PackedPlan
) -> torch.Tensor:
    """[T, H, E], with the bits that a decoding step gives a row over the same keys. Heads of two sizes are padded."""
    scale = query.shape[-1] ** -0.5 if rule.scaling is None else rule.scaling
    size, value_size = query.shape[-1], value.shape[-1]
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if size != value_size:
        widest = max(size, value_size)
        query, key, value = (nn.functional.pad(x, (0, widest - x.shape[-1])) for x in (query, key, value))
    out = attention_in_order(
        query, key, value, plan.lengths, scale=scale, window=rule.window, softcap=rule.softcap, sinks=rule.sinks,
        parents=plan.parents,
    )  # fmt: skip
    return out[..., :value_size]


def _in_buckets(x: torch.Tensor, plan: PackedPlan) -> list[torch.Tensor]:
    """[n, heads, length, D] of each bucket, for the rows [1, heads, T, D]."""
    rows = x.squeeze(0).transpose(0, 1)
    buckets, grid = plan.layout
    if grid is not None:
        rows = _Padded.apply(rows, *grid)  # type: ignore[no-untyped-call]
    parts = rows.split([length * n for length, n in buckets])
    return [part.unflatten(0, (n, -1)).transpose(1, 2) for part, (_, n) in zip(parts, buckets, strict=True)]


class _Padded(torch.autograd.Function):
    """Rows in the places of a grid. Padding leaves no gradient: nothing that counts has read it."""

    @staticmethod
    def forward(x: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.index_select(0, rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:  # type: ignore[override]
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


def _sdpa(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: ScoreRule, plan: PackedPlan
) -> torch.Tensor:
    """[n, length, H, D], through the very SDPA call that transformers makes, in blocks where a window allows it."""
    length = query.shape[2]
    window = rule.window if rule.window is not None and rule.window < length else None
    block = length if window is None else max(window, _WINDOW_BLOCK)
    if length <= 2 * block:
        block = length
    parts = []
    for first, end, begin in _query_blocks(length, window, block):
        band = None if window is None else _band(plan, first, end, begin, window, query.device)
        rows = query[:, :, first:end], key[:, :, begin:end], value[:, :, begin:end]
        out, _ = sdpa_attention_forward(
            module, *rows, band, dropout=0.0, scaling=rule.scaling, is_causal=band is None and length > 1
        )
        parts.append(out)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _plain(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: ScoreRule, plan: PackedPlan
) -> torch.Tensor:
    """[n, length, H, D] with a softcap or sinks: transformers' eager attention, a block of queries at a time."""
    n_groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, n_groups), repeat_kv(value, n_groups)
    scaling = rule.scaling if rule.scaling is not None else query.shape[-1] ** -0.5
    length = query.shape[2]
    parts = []
    for first, end, begin in _query_blocks(length, rule.window, min(length, _PLAIN_BLOCK)):
        seen = _band(plan, first, end, begin, rule.window or length, query.device)
        score = torch.matmul(query[:, :, first:end], key[:, :, begin:end].transpose(2, 3)) * scaling
        if rule.softcap is not None:
            score = torch.tanh(score / rule.softcap) * rule.softcap
        score = score.masked_fill(~seen, torch.finfo(score.dtype).min)
        weight = _softmax(score, rule.sinks).to(query.dtype)
        parts.append(torch.matmul(weight, value[:, :, begin:end]).transpose(1, 2))
    return torch.cat(parts, dim=1)


def _softmax(score: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Weights of the keys for scores [n, H, queries, keys]; with sinks [H] in gpt-oss's order of operations."""
    if sinks is None:
        return torch.softmax(score, dim=-1, dtype=torch.float32)
    score = torch.cat([score, sinks.view(1, -1, 1, 1).expand(*score.shape[:-1], 1)], dim=-1)
    score = score - score.max(dim=-1, keepdim=True).values
    return torch.softmax(score, dim=-1)[..., :-1]


def _query_blocks(length: int, window: int | None, block: int) -> Iterator[tuple[int, int, int]]:
    """(first query, end of queries and keys, first key) of each block of queries."""
    for first in range(0, length, block):
        begin = 0 if window is None else max(0, first - window + 1)
        yield first, min(first + block, length), begin


def _band(plan: PackedPlan, first: int, end: int, begin: int, window: int, device: torch.device) -> torch.Tensor:
    """bool [1, 1, end − first, end − begin]: query i sees keys i − window + 1 … i."""
    key = (first - begin, end - begin, window)
    if key not in plan.bands:
        query = torch.arange(first - begin, end - begin, device=device)[:, None]
        seen = torch.arange(end - begin, device=device)[None, :]
        plan.bands[key] = ((seen <= query) & (seen > query - window))[None, None]
    return plan.bands[key]


def _decode(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: ScoreRule, plan: DecodePlan
) -> torch.Tensor:
    layer = _layer_index(module)
    plan.new.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
    keys, values = plan.new.cache.read(layer)
    out = decode_attention(
        filled_up(query[0].transpose(0, 1), keys.shape[3]),
        keys,
        values,
        plan.lengths_N,
        plan.table_NB,
        scale=rule.scaling if rule.scaling is not None else query.shape[-1] ** -0.5,
        window=rule.window,
        softcap=rule.softcap,
        sinks=rule.sinks,
    )
    return out[None, :, :, : value.shape[3]]


def _layer_index(module: nn.Module) -> int:
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        raise UnsupportedModelError(
            f"{type(module).__name__} has no layer_idx, so its keys and values have no place in a cache"
        )
    return index


def _refuse_unserved(kwargs: dict[str, Any], attention_mask: torch.Tensor | None, dropout: float) -> None:
    for name, value in kwargs.items():
        harmless = value is None or name in _WITHOUT_EFFECT or (name == "is_causal" and value)
        # output_attentions and its like: asked for, they could not be given
        if not harmless and not (name.startswith("output_") and not value):
            given = f"a tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise UnsupportedModelError(f"attention keyword {name}={given} is not served by rlhf-engine's attention")
    if attention_mask is not None:
        raise UnsupportedModelError(
            "attention_mask: expected None, because the packed batch says who attends to whom, got a mask "
            f"{tuple(attention_mask.shape)}"
        )
    if dropout:
        raise ValueError(f"attention dropout: expected 0 (a HydraModel switches base dropout off), got {dropout}")


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, packed_attention)
