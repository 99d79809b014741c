"""What a call of an op computes and moves: FLOPs and bytes, by a formula of each kind of op.

    kind                       FLOPs                                        bytes
    mm (aten)                  torch.utils.flop_counter                     inputs and results
    linear                     2 N K M, backward the same per gradient      inputs and results
    lora                       2 n r (K + M), backward up to five halves    x, and y read and written
    head                       2 N H V per product, see `_head_products`    W once per product, hidden, rows
    sample                     2 N H V                                      W, hidden
    attention                  4 N h L S D, half of it under a causal mask; backward 2.5 times as many
    decode_attention           4 N h S D                                    keys and values once
    everything else            none                                         inputs and results

Symbols: N rows, K → M a linear, r rank, n rows that are adapted, H hidden size, V words; h heads of D features, L
queries, S keys. An op that only makes a view moves nothing. One that looks up rows of a table moves what it found.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

GEMMS, ELEMENTWISE, LORA, ATTENTION = "base GEMMs", "norms, RoPE, activations, sums", "LoRA", "attention"
HEADS, SAMPLING = "log-prob and loss heads", "sampling"

_MOVED_ROWS = frozenset(
    ("embedding", "index_select", "index", "gather", "index_copy_", "index_add", "index_add_", "slice_backward")
)
"""Ops that move as much as their smallest tensor of numbers, twice, whatever the size of the table."""
_ALLOCATE = ("empty", "new_empty", "empty_like", "new_empty_strided", "empty_strided")
_CURVED = frozenset(("tanh", "tanh_backward", "silu", "silu_backward", "gelu", "gelu_backward", "exp", "sin", "cos"))
_OWN_PASSES = frozenset(("rms_norm", "rms_norm_gradient", "rotary", "rotary_gradient", "swiglu", "swiglu_gradient"))
_LORA_ARGUMENTS = {"lora_linear": 3, "lora_linear_backward": 3, "lora_delta": 1, "lora_delta_backward": 2}
"""Place of the list of A among an op's arguments; B, scales, starts and ends follow."""


@dataclass(frozen=True)
class Work:
    """One kind of work in a call of an op."""

    kind: str
    """What it is like, for a machine's ceilings."""
    part: str
    """What of a step it belongs to."""
    flops: float = 0.0
    bytes: float = 0.0
    rows: int = 0
    """Rows of a product; 0 where the bytes say how large the call is."""
    dtype: torch.dtype = torch.float32
    """Of the largest input."""
    launches: int = 1
    """Kernels that a GPU starts; 0 for a view."""
    calls: int = 1
    """Calls of ops on the host; 0 for further work in the same call."""


def work_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Work]:
    """The work of one call of op `func` below autograd; tensors may be without data."""
    name = func._opname
    if func.namespace == "rlhf_kernels":
        own = _own(name, args, out)
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
        return [Work("mm", GEMMS, flops, _bytes(tensors + results), rows, dtype)]
    if name.startswith("_scaled_dot_product") or name.startswith("_flash_attention"):
        return [_attention(name, args, kwargs, tensors, results)]
    if name in _MOVED_ROWS:
        numbers = [t for t in tensors + results if t.is_floating_point()]
        return [Work("elementwise", ELEMENTWISE, 0.0, 2.0 * min(map(_size, numbers or results)), 0, dtype)]
    kind = name if name in _OWN_PASSES else "curved" if name in _CURVED else "elementwise"
    kind = "norm" if "layer_norm" in name else kind
    return [Work(kind, ELEMENTWISE, 0.0, _bytes(tensors + results), 0, dtype)]


def optimizer_work(numels: Sequence[int], state_bytes: int, gradient_bytes: int, weight_bytes: int) -> list[Work]:
    """One optimizer step: norm, clipping and AdamW, each over all tensors in a few calls; rounded copies written."""
    moved = 2.0 * state_bytes + 4.0 * gradient_bytes + 2.0 * weight_bytes
    return [Work("optimizer", "optimizer", 15.0 * sum(numels), moved, 0, launches=12, calls=12)]


# ---- the engine's own ops --------------------------------------------------------------------------------------------


def _own(name: str, args: Sequence[Any], out: Any) -> list[Work] | None:
    if name in ("linear", "linear_backward"):
        weight, x = args[2 if name != "linear" else 1], args[0]
        products = sum(args[3:5]) if name != "linear" else 1
        return [_linear(name, x, weight, products, out)]
    if name in _LORA_ARGUMENTS:
        return _lora(name, args, out)
    if name.startswith(("linear_logprob", "linear_ppo_loss")):
        weight = args[2] if "pair" in name else args[1]
        products = _head_products(name, args)
        moved = products * (_size(weight) + 2.0 * _size(args[0]))
        flops = 2.0 * products * args[0].shape[0] * weight.numel()
        return [Work("head", HEADS, flops, moved, args[0].shape[0], weight.dtype, 2 * products)]
    if name == "sample":
        hidden, weight = args[:2]
        flops = 2.0 * hidden.shape[0] * weight.numel()
        return [Work("sample", SAMPLING, flops, _bytes(args[:2]), hidden.shape[0], weight.dtype, 2)]
    if name == "decode_attention":
        q, keys, _, _, table, _, window = args[:7]
        positions = table.shape[1] * keys.shape[1]
        positions = positions if window is None else min(positions, window)
        moved = 2.0 * q.shape[0] * positions * keys.shape[2] * keys.shape[3] * keys.element_size()
        return [Work("decode_attention", ATTENTION, 4.0 * q.numel() * positions, moved, 0, q.dtype, 2)]
    if name in ("value_loss", "value_loss_backward", "ppo_loss", "ppo_loss_backward", "gather_logprob"):
        return [Work("elementwise", HEADS, 0.0, _bytes(args), 0)]
    return None


def _linear(kind: str, x: torch.Tensor, weight: torch.Tensor, products: int, out: Any) -> Work:
    rows = x.numel() // max(1, x.shape[-1])
    moved = products * _size(weight) + _bytes([x, *tree_leaves(out)])
    return Work(kind, GEMMS, 2.0 * products * rows * weight.numel(), moved, rows, weight.dtype, products)


def _lora(name: str, args: Sequence[Any], out: Any) -> list[Work]:
    """The base product, where the op has one, and what is added to the adapted rows."""
    at = _LORA_ARGUMENTS[name]
    A, B, _, starts, ends, slots = args[at : at + 6]
    backward = name.endswith("_backward")
    found = []
    if name.startswith("lora_linear"):
        weight = args[2 if backward else 1]
        products = sum(args[-6:-4]) if backward else 1  # need_x, need_weight
        found.append(_linear("linear_backward" if backward else "linear", args[0], weight, products, out))
    k, m, e = A[0].shape[1], B[0].shape[0], args[0].element_size()
    halves: float = 2.0
    if backward:  # dh and h again, then dx, dA and dB where they are needed
        need_A, need_B = args[-3:-1]
        need_x = args[-6] if name.startswith("lora_linear") else args[-4]
        halves = 2.0 + need_x + any(need_A) + any(need_B)
    ranks = [(end - start) * A[slot].shape[0] for slot, start, end in zip(slots, starts, ends, strict=True)]
    n_on = sum(ends) - sum(starts)
    kind = "lora_backward" if backward else "lora" if name.startswith("lora_linear") else "lora_delta"
    moved = n_on * e * ((2.0 * k + m) * (1.0 + backward) if backward else k + 2.0 * m) + _bytes([*A, *B])
    calls = 0 if found else 1
    found.append(Work(kind, LORA, halves * sum(ranks) * (k + m), moved, n_on, args[0].dtype, int(halves), calls))
    return found


def _head_products(name: str, args: Sequence[Any]) -> int:
    """Products of N · H · V in a call; the arguments before the backend say which gradients it makes.

    Forward makes the logits. A gradient with respect to hidden alone comes out of the same sweep. Every other one takes
    a second sweep, which makes the logits again.
    """
    if name == "linear_logprob":
        return 1 + bool(args[-2])
    if name == "linear_logprob_backward":
        ahead = isinstance(args[16], torch.Tensor) and args[16].numel() > 0
        return 0 if ahead else 1 + len(args[-2].split(","))
    if name == "linear_ppo_loss":
        needs = [need for need in args[-2].split(",") if need]
        second = needs != ["hidden"] or args[-3] != 0.0
        return 1 + len(needs) + (1 if second and needs else 0)
    if name == "linear_logprob_pair":
        return 2 + len([ahead for ahead in args[-2].split(",") if ahead])
    return 3  # the pair's backward pass without gradients made ahead


def _attention(
    name: str, args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor], results: Any
) -> Work:
    backward = name.endswith("_backward")
    query, key = (args[1], args[2]) if backward else (args[0], args[1])
    flags = [a for a in args if isinstance(a, bool)]
    causal = kwargs.get("is_causal", flags[0] if flags else False)
    flops = 4.0 * query.numel() * key.shape[2] * (0.5 if causal else 1.0) * (2.5 if backward else 1.0)
    kind = "attention_backward" if backward else "attention"
    moved = _bytes([*tensors, *results])
    return Work(kind, ATTENTION, flops, moved, query.shape[2], query.dtype, 3 if backward else 1)


def _size(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


def _bytes(values: Sequence[Any]) -> float:
    return float(sum(_size(x) for x in values if isinstance(x, torch.Tensor)))


def _widest(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """The dtype of the largest tensor of numbers."""
    numbers = [t for t in tensors if t.is_floating_point()]
    return max(numbers, key=torch.Tensor.numel).dtype if numbers else torch.float32
