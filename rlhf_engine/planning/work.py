"""FLOPs and bytes of an op's call: a formula for each kind of torch's own ops.

    kind                       FLOPs                                        bytes
    mm (aten)                  torch.utils.flop_counter                     inputs and results
    attention                  4 N h L S D, half of it under a causal mask; backward 2.5 times as many
    everything else            none                                         inputs and results

Formulas of the engine's own ops lie beside their kernels (`rlhf_kernels.runtime.cost`).

Symbols: N rows, h heads of D features, L queries, S keys. An op that only makes a view moves nothing. One that looks up
rows of a table moves what it found.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from rlhf_kernels.runtime import cost
from rlhf_kernels.runtime.cost import ATTENTION, ELEMENTWISE, GEMMS, Work, all_bytes, tensor_bytes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_MOVED_ROWS = frozenset(
    ("embedding", "index_select", "index", "gather", "index_copy_", "index_add", "index_add_", "slice_backward")
)
"""Ops that move as much as their smallest tensor of numbers, twice, whatever the size of the table."""
_ALLOCATE = ("empty", "new_empty", "empty_like", "new_empty_strided", "empty_strided")
_CURVED = frozenset(("tanh", "tanh_backward", "silu", "silu_backward", "gelu", "gelu_backward", "exp", "sin", "cos"))


def work_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Work]:
    """The work of one call of op `func` below autograd; tensors may be without data."""
    name = func._opname
    if func.namespace == "rlhf_kernels":
        own = cost.work(name, args, out)
        if own is not None:
            return own
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    results = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
    dtype = _widest(tensors or results)
    if getattr(func, "is_view", False) or name in _ALLOCATE or not results:
        return [Work("view", ELEMENTWISE, dtype=dtype, launches=0)]
    if func.overloadpacket in flop_registry and tensors:
        flops = float(flop_registry[func.overloadpacket](*args, **kwargs, out_val=out))
        rows = math.prod(results[0].shape[:-1])
        return [Work("mm", GEMMS, flops, all_bytes(tensors + results), rows, dtype)]
    if name.startswith("_scaled_dot_product") or name.startswith("_flash_attention"):
        return [_attention(name, args, kwargs, tensors, results)]
    if name in _MOVED_ROWS:
        numbers = [t for t in tensors + results if t.is_floating_point()]
        return [Work("elementwise", ELEMENTWISE, 0.0, 2.0 * min(map(tensor_bytes, numbers or results)), 0, dtype)]
    kind = "curved" if name in _CURVED else "elementwise"
    kind = "norm" if "layer_norm" in name else kind
    return [Work(kind, ELEMENTWISE, 0.0, all_bytes(tensors + results), 0, dtype)]


def optimizer_work(numels: Sequence[int], state_bytes: int, gradient_bytes: int, weight_bytes: int) -> list[Work]:
    """One optimizer step: norm, clipping and AdamW, each over all tensors in a few calls; rounded copies written."""
    moved = 2.0 * state_bytes + 4.0 * gradient_bytes + 2.0 * weight_bytes
    return [Work("optimizer", "optimizer", 15.0 * sum(numels), moved, 0, launches=12, calls=12)]


def _attention(
    name: str, args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor], results: Any
) -> Work:
    backward = name.endswith("_backward")
    query, key = (args[1], args[2]) if backward else (args[0], args[1])
    flags = [a for a in args if isinstance(a, bool)]
    causal = kwargs.get("is_causal", flags[0] if flags else False)
    flops = 4.0 * query.numel() * key.shape[2] * (0.5 if causal else 1.0) * (2.5 if backward else 1.0)
    kind = "attention_backward" if backward else "attention"
    moved = all_bytes([*tensors, *results])
    return Work(kind, ATTENTION, flops, moved, query.shape[2], query.dtype, 3 if backward else 1)


def _widest(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """The dtype of the largest tensor of numbers."""
    numbers = [t for t in tensors if t.is_floating_point()]
    return max(numbers, key=torch.Tensor.numel).dtype if numbers else torch.float32
