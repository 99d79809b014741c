"""Attention for packed rows, as one function in transformers' AttentionInterface.

A trunk call sees one row of tokens [1, T] that holds many sequences. The plan of the call (ambient, see `gate`) says
how they attend:

* `PackedPlan`: every sequence attends causally to itself. Sequences of similar length go through one SDPA call, the
  shorter ones padded on the right; under a causal mask no real query sees that padding, so no mask tensor exists.
  With `cache`, keys and values are also written into it (prefill).
* `DecodePlan`: one new token per row; keys and values are appended to the cache and the op `decode_attention` reads it.

Legend: T rows, N sequences, H query heads, K key/value heads, D head size, S cache length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rlhf_kernels.decode_attention import decode_attention
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlhf_engine.hydra import gate

ATTENTION_NAME = "rlhf_engine"
_PADDING_WASTE = 1.25
_REFUSED = ("softcap", "position_bias", "s_aux")


@dataclass(frozen=True, kw_only=True, eq=False)
class Bucket:
    """Sequences that share one SDPA call."""

    length: int
    """Length they are padded to."""
    rows: torch.Tensor | slice
    """Source rows of the padded [n · length] grid (pad entries repeat a real row); a slice where nothing is padded."""
    n_sequences: int
    valid: torch.Tensor | None
    """int64 places in the padded grid that are real, or None where all are."""
    targets: torch.Tensor | slice
    """Rows that the real places go back to."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedPlan:
    """Causal attention within each packed sequence."""

    buckets: tuple[Bucket, ...]
    max_length: int
    cache: KVCache | None = None
    cache_rows_T: torch.Tensor | None = None
    """int64 [T], cache row of each token (with `cache`)."""
    positions_T: torch.Tensor | None = None
    """int64 [T], cache position of each token (with `cache`)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodePlan:
    """One new token per row against the cache."""

    cache: KVCache
    rows_N: torch.Tensor
    """int64 [N], cache row of each batch row."""
    positions_N: torch.Tensor
    """int64 [N], position of the new token = tokens already cached in that row."""
    max_length: int
    """Longest row including the new token, known on the host."""


AttentionPlan = PackedPlan | DecodePlan


@dataclass(eq=False)
class KVCache:
    """Keys and values of every layer, [rows, capacity, K, D] each, allocated when a layer first writes."""

    rows: int
    capacity: int
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)

    def write(
        self, layer: int, rows: torch.Tensor, positions: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Store key/value [n, K, D] at (rows[n], positions[n]) of a layer."""
        if layer not in self.keys:
            shape = (self.rows, self.capacity, *key.shape[1:])
            self.keys[layer], self.values[layer] = key.new_zeros(shape), value.new_zeros(shape)
        self.keys[layer][rows, positions] = key
        self.values[layer][rows, positions] = value


def plan_packed(
    lengths: Sequence[int],
    device: torch.device,
    *,
    cache: KVCache | None = None,
    positions_T: torch.Tensor | None = None,
) -> PackedPlan:
    """Plan for sequences of the given lengths, packed one after another; with `cache`, row i of it gets sequence i."""
    starts = [0]
    for n in lengths:
        starts.append(starts[-1] + n)
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    groups: list[list[int]] = []
    for i in order:
        if groups and lengths[groups[-1][0]] <= _PADDING_WASTE * lengths[i]:
            groups[-1].append(i)
        else:
            groups.append([i])
    buckets = tuple(_bucket(sorted(group), lengths, starts, device) for group in groups)
    cache_rows_T = None
    if cache is not None:
        cache_rows_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
    return PackedPlan(
        buckets=buckets,
        max_length=max(lengths),
        cache=cache,
        cache_rows_T=cache_rows_T,
        positions_T=positions_T,
    )


def _bucket(group: list[int], lengths: Sequence[int], starts: Sequence[int], device: torch.device) -> Bucket:
    length = max(lengths[i] for i in group)
    if all(lengths[i] == length for i in group) and group == list(range(group[0], group[0] + len(group))):
        rows = slice(starts[group[0]], starts[group[-1] + 1])
        return Bucket(length=length, rows=rows, n_sequences=len(group), valid=None, targets=rows)
    offsets = torch.arange(length)
    begin = torch.tensor([starts[i] for i in group])[:, None]
    size = torch.tensor([lengths[i] for i in group])[:, None]
    real = offsets[None, :] < size
    source = torch.where(real, begin + offsets[None, :], begin)  # a pad place repeats the sequence's first row
    valid = real.flatten().nonzero().squeeze(1)
    return Bucket(
        length=length,
        rows=source.flatten().to(device),
        n_sequences=len(group),
        valid=valid.to(device),
        targets=source.flatten()[valid].to(device),
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

    Raises RuntimeError outside a trunk call, and ValueError for a keyword that it does not serve: ignoring a sliding
    window or a softcap would be silently wrong.
    """
    call = gate.current()
    if call is None:
        raise RuntimeError(
            "attention ran outside a trunk call: this backbone belongs to a HydraModel; go through its forward, "
            "score or generate"
        )
    plan = call.attention
    _refuse_unserved(kwargs, dropout, plan.max_length)
    if isinstance(plan, DecodePlan):
        return _decode(module, query, key, value, scaling, plan), None
    if plan.cache is not None and plan.cache_rows_T is not None and plan.positions_T is not None:
        layer = _layer_index(module)
        plan.cache.write(layer, plan.cache_rows_T, plan.positions_T, key[0].transpose(0, 1), value[0].transpose(0, 1))
    if len(plan.buckets) == 1 and plan.buckets[0].valid is None:
        out = _bucket_attention(module, query, key, value, scaling, plan.buckets[0])  # [T, H, D]
        return out[None], None
    out = query.new_empty((query.shape[2], query.shape[1], value.shape[3]))  # [T, H, D]
    for bucket in plan.buckets:
        part = _bucket_attention(module, query, key, value, scaling, bucket)
        if isinstance(bucket.targets, slice):
            out[bucket.targets] = part
        else:
            out.index_copy_(0, bucket.targets, part)
    return out[None], None


def _bucket_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    bucket: Bucket,
) -> torch.Tensor:
    """Outputs [real places, H, D] of one bucket, through the very SDPA call that transformers makes."""

    def grid(x: torch.Tensor) -> torch.Tensor:  # [1, heads, T, D] -> [n, heads, length, D]
        taken = x[0][:, bucket.rows] if isinstance(bucket.rows, slice) else x[0].index_select(1, bucket.rows)
        return taken.unflatten(1, (bucket.n_sequences, bucket.length)).transpose(0, 1)

    out, _ = sdpa_attention_forward(
        module,
        grid(query),
        grid(key),
        grid(value),
        None,
        dropout=0.0,
        scaling=scaling,
        is_causal=bucket.length > 1,
    )  # [n, length, H, D]
    out = out.flatten(0, 1)
    return out if bucket.valid is None else out.index_select(0, bucket.valid)


def _decode(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    plan: DecodePlan,
) -> torch.Tensor:
    layer = _layer_index(module)
    plan.cache.write(layer, plan.rows_N, plan.positions_N, key[0].transpose(0, 1), value[0].transpose(0, 1))
    out = decode_attention(
        query[0].transpose(0, 1),
        plan.cache.keys[layer][:, : plan.max_length],
        plan.cache.values[layer][:, : plan.max_length],
        plan.positions_N + 1,
        plan.rows_N[:, None],
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
    )
    return out[None]


def _layer_index(module: nn.Module) -> int:
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        raise ValueError(f"{type(module).__name__} has no layer_idx, so its keys and values have no place in a cache")
    return index


def _refuse_unserved(kwargs: dict[str, Any], dropout: float, max_length: int) -> None:
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise ValueError(f"attention keyword {name}={kwargs[name]!r} is not served by rlhf-engine's attention")
    window = kwargs.get("sliding_window")
    if window is not None and window < max_length:
        raise ValueError(f"sliding_window={window}: expected at least the longest sequence ({max_length} tokens)")
    if dropout:
        raise ValueError(f"attention dropout: expected 0 (a HydraModel switches base dropout off), got {dropout}")


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, packed_attention)
