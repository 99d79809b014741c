"""Memory that a kernel takes inside one call, above its inputs and results, in bytes.

A trace sees what goes into an op and what comes out. Inside, our ops work in tiles: these formulas say how much that
is, per backend, and are read off the implementations. `sample` and `decode_attention` are traced themselves where the
reference in plain torch serves them, and counted as nothing where C++ does (tiles per thread). Attention on CUDA adds
what its backward kernel accumulates in fp32.

Symbols: N rows, H hidden size, V vocabulary, r rank, K → M a linear, e bytes per element.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from rlhf_kernels import native, registry
from rlhf_kernels.decode_attention import reference as attention
from rlhf_kernels.logits import TILE_ELEMENTS, HeadOptions
from rlhf_kernels.sample import reference as sampling

_PLAIN_TORCH: dict[str, Any] = {"sample": sampling.forward, "decode_attention": attention.forward}
_NATIVE_BLOCK, _NATIVE_PANEL, _NATIVE_ROWS = 512, 32, 16  # csrc/cpu/head.h: rows of W, rows of hidden, rows of scratch


def workspace_bytes(func: Any, args: Sequence[Any], out: Any, device_type: str) -> int:
    """Bytes that op `func` needs while it runs, beyond `args` and `out`, on a device."""
    if func.namespace == "rlhf_kernels":
        return _own_op(func._opname, args, device_type)
    if device_type == "cuda" and func._opname.endswith("flash_attention_for_cpu_backward"):
        return _flash_backward(args)
    return 0


def backend_of(op: str, device_type: str, dtype: torch.dtype, shape: Sequence[int] | None = None) -> str:
    """The backend that serves an op where the plan is for: on CUDA, also if there is none here. shape: as `resolve`."""
    if device_type == "cuda":
        offered = registry.report("cuda")[op]
        return next(b for b in ("cuda", "triton", "reference") if not offered[b].endswith(f"no {b} implementation"))
    return registry.resolve_for(op, "auto", "cpu", dtype, shape)


def _plain_backend(name: str, args: Sequence[Any], device_type: str) -> str:
    """`backend_of` an op in `_PLAIN_TORCH`: by the head's weight, or the size of an attention head."""
    shape = args[1].shape if name == "sample" else args[0].shape[-1:]
    return backend_of(name, device_type, args[0].dtype, shape)


def _own_op(name: str, args: Sequence[Any], device_type: str) -> int:
    base = name.removesuffix("_backward")
    if name in _PLAIN_TORCH:
        if _plain_backend(name, args, device_type) == "triton":
            return _partial_states(name, args)
        return _traced_reference(name, args, device_type)
    if base in ("lora_linear", "lora_delta"):
        return _lora(name, args, device_type)
    if base in ("linear_logprob", "linear_ppo_loss"):
        return _head(name, args, device_type)
    if base == "linear":
        return _linear(args, backward=base != name)
    return 0  # the losses of values per token: nothing that grows with the model


# ---- heads -----------------------------------------------------------------------------------------------------------


def _head(name: str, args: Sequence[Any], device_type: str) -> int:
    """One sweep of the vocabulary; for a trained head (`needs` beyond hidden) also the gradient's."""
    hidden, weight = args[0], args[1]
    if name == "linear_logprob_backward":
        needs, ahead = args[-2], False
    elif name == "linear_ppo_loss":
        needs = args[-2]
        ahead = needs == "hidden" and args[-3] == 0.0
    else:
        needs, ahead = "", args[-2]
    second = bool(needs) and not ahead
    backend = backend_of(name.removesuffix("_backward"), device_type, hidden.dtype, weight.shape)
    (n, h), v, e = hidden.shape, weight.shape[0], hidden.element_size()
    summed = n * h * 4 if ahead and name == "linear_ppo_loss" else 0  # E, of which the gradient is made
    if backend == "triton":
        rows, columns = _triton_tile(n, v)
        tile = min(rows, n) * columns
        gradient = (n * h * e + columns * h * 4 if "weight" in needs else 0) if second else 0
        return summed + tile * 4 + (tile * e if (ahead or second) and e != 4 else tile * 4 if ahead else 0) + gradient
    if backend == "cpu":
        e = 2 if hidden.dtype == weight.dtype == torch.bfloat16 and native.multiplies_bf16() else 4
        block = 2 * _NATIVE_BLOCK * h * e  # of W: one is multiplied with while the next is packed
        rows = 0 if weight.element_size() == e and h % 32 == 0 else block  # as they are multiplied with hidden
        packed = _up(n, _NATIVE_PANEL) * h * e + rows + (block if ahead or second else 0)
        scratch = native.threads() * _NATIVE_ROWS * h * e
        own_sums = _up(n, _NATIVE_PANEL) * h * 4 if ahead or second else 0
        gathered = n * h * e if summed and e != 4 else 0  # rows of W at the targets
        return max(summed + packed + scratch + own_sums - (n * h * 4 if summed else 0), summed + gathered)
    tile = max(1, min(n, TILE_ELEMENTS // v)) * v
    upcast = v * h * 4 if weight.dtype != torch.float32 else 0
    return summed + upcast + 4 * (tile * (5 if needs else 4) + n * h)


def _triton_tile(n_rows: int, n_vocab: int) -> tuple[int, int]:
    """`tile_shape` of the Triton sweep, which cannot be imported where there is no Triton."""
    rows, columns = min(4096, _power(n_rows)), min(8192, _power(n_vocab))
    while rows * columns > max(2**20, n_rows * n_vocab // 32):
        if rows > 1024 or columns <= 2048:
            rows //= 2
        else:
            columns //= 2
    return rows, columns


# ---- linears ---------------------------------------------------------------------------------------------------------

_LINEAR_COLUMNS, _LINEAR_PACKED, _LINEAR_STRIP = 16, 2048, 32  # csrc/cpu/linear_body.inc.h: columns of sixteen lanes


def _linear(args: Sequence[Any], *, backward: bool) -> int:
    """The own product: lanes of one side as tiles, and per thread a strip of the other side and its sums.

    x is packed forward, W backward. The tiles of a weight that is kept packed are counted as state besides.
    """
    rows, weight = args[0], args[2 if backward else 1]
    n, (m, k) = rows.numel() // max(rows.shape[-1], 1), weight.shape
    lanes, depth = (k, m) if backward else (n, k)
    tiles = max(_up(depth, 16) // 16, 1)
    at_once = min(_up(lanes, 16) // 16, _up(-(-_LINEAR_PACKED // tiles), _LINEAR_COLUMNS))
    scratch = _LINEAR_STRIP * (_LINEAR_COLUMNS + 1) * 64 + _LINEAR_COLUMNS * _LINEAR_STRIP * 64
    return at_once * tiles * 1024 + native.threads() * scratch


# ---- LoRA ------------------------------------------------------------------------------------------------------------


_LORA_ARGUMENTS = {
    "lora_linear": (0, 3),
    "lora_linear_backward": (1, 3),
    "lora_delta": (0, 1),
    "lora_delta_backward": (1, 2),
}
"""Places of x and of the list of A among the arguments of each op; B, scales, starts and ends follow A."""


def _lora(name: str, args: Sequence[Any], device_type: str) -> int:
    """h and dh [rows that are on, r] and partial sums of dA and dB."""
    at_x, at_A = _LORA_ARGUMENTS[name]
    x, (A, B, _, starts, ends) = args[at_x], args[at_A : at_A + 5]
    backward = name.endswith("_backward")
    n_on, rank = sum(ends) - sum(starts), max(a.shape[0] for a in A)
    k, m = A[0].shape[1], B[0].shape[0]
    backend = backend_of("lora", device_type, x.dtype, (m, k))
    if backend == "triton":
        rank = max(16, _power(rank))
        if not backward:
            return n_on * rank * 4
        # up to rank 32, dh is made from the read of dy that makes dB: one share per tile of 256 columns
        shares = -(-m // 256) * n_on * rank * 4 if rank <= 32 else n_on * rank * 4
        return 2 * n_on * rank * 4 + shares
    if backend == "cpu":
        sums = (k + m) * _up(rank, 16) * 4
        return sums * (len(A) + native.threads()) if backward else sums
    wide = 0 if x.element_size() == 4 else 4
    return n_on * (k + m) * wide + n_on * rank * 8


# ---- decoding in Triton ----------------------------------------------------------------------------------------------

_SPLIT, _MOST_SPLITS = 256, 64
"""Positions of a split of `decode_attention` in Triton, and most splits."""
_SHARES, _FIELDS = 132, 6
"""Shares of the vocabulary of `sample` in Triton, and numbers that each leaves per row."""


def _partial_states(name: str, args: Sequence[Any]) -> int:
    """What programs leave for those that join them, fp32."""
    if name == "sample":
        return 4 * _SHARES * _FIELDS * args[0].shape[0]
    (n, heads, d), positions = args[0].shape, args[1].shape[1] * args[4].shape[1]
    return 4 * n * heads * min(_MOST_SPLITS, -(-positions // _SPLIT)) * (d + 2)


# ---- what plain torch serves -----------------------------------------------------------------------------------------

_traces: dict[tuple[Any, ...], int] = {}


def _traced_reference(name: str, args: Sequence[Any], device_type: str) -> int:
    """Peak of the reference without data, less its results."""
    if _plain_backend(name, args, device_type) != "reference":
        return 0
    described = ((tuple(a.shape), a.stride(), a.dtype) if isinstance(a, torch.Tensor) else a for a in args)
    key = (name, device_type, *described)
    if key not in _traces:
        _traces[key] = _trace_reference(name, args)
    return _traces[key]


def _trace_reference(name: str, args: Sequence[Any]) -> int:
    from rlhf_engine.planning.tracing import Tracker  # it imports this module

    if name == "sample":
        inputs = [*args[:5], None, HeadOptions(*args[7:15]), *args[15:-1]]
        # False: not every row is greedy
        tracker = Tracker([a for a in args if isinstance(a, torch.Tensor)], device_type="cpu", answers={bool: False})
    else:
        inputs = list(args[:-1])
        positions = args[1].shape[1] * args[4].shape[1]  # every row is as long as its table allows
        read = itertools.chain((positions, positions), itertools.repeat(0))  # lengths; then the table
        known = [a for a in args if isinstance(a, torch.Tensor)]
        tracker = Tracker(known, device_type="cpu", answers={int: lambda: next(read)})
    with torch.no_grad(), tracker:
        _PLAIN_TORCH[name](*inputs)
    return tracker.timeline.peak


# ---- attention on CUDA -----------------------------------------------------------------------------------------------


def _flash_backward(args: Sequence[Any]) -> int:
    """dq in fp32, and dk, dv of every query head before heads that share keys are added up."""
    query, key = args[1], args[2]
    n, heads, length, d = query.shape
    rounded = n * heads * _up(length, 128) * (_up(d, 32) * 4 + 4)
    shared = 0 if heads == key.shape[1] else 2 * n * heads * length * d * query.element_size()
    return rounded + shared


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _power(n: int) -> int:
    return 2 ** max(0, math.ceil(math.log2(max(1, n))))
