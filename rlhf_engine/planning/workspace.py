"""Memory that a call of an op takes above its inputs and results, in bytes.

A trace sees what goes into an op and what comes out. Formulas for the inside of the engine's own ops lie beside their
kernels (`rlhf_kernels.runtime.cost`). Where the reference in plain torch serves, its own trace says it. Attention on
CUDA adds what its backward kernel accumulates in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from rlhf_kernels.runtime import cost, registry
from rlhf_kernels.runtime.cost import Traced, round_up


def workspace_bytes(func: Any, args: Sequence[Any], out: Any, device_type: str) -> int:
    """Bytes that op `func` needs while it runs, beyond `args` and `out`, on a device."""
    if func.namespace == "rlhf_kernels":

        def served_by(op: str, dtype: torch.dtype, shape: Sequence[int] | None) -> str:
            return backend_of(op, device_type, dtype, shape)

        needed = cost.workspace(func._opname, args, served_by)
        return _traced(func._opname, args, device_type, needed) if isinstance(needed, Traced) else needed
    if device_type == "cuda" and func._opname.endswith("flash_attention_for_cpu_backward"):
        return _flash_backward(args)
    return 0


def backend_of(op: str, device_type: str, dtype: torch.dtype, shape: Sequence[int] | None = None) -> str:
    """The backend that serves an op where the plan is for: on CUDA, also if there is none here. shape: as `resolve`."""
    if device_type == "cuda":
        offered = registry.report("cuda")[op]
        return next(b for b in ("cuda", "triton", "reference") if not offered[b].endswith(f"no {b} implementation"))
    return registry.resolve_for(op, "auto", "cpu", dtype, shape)


_traces: dict[tuple[Any, ...], int] = {}


def _traced(name: str, args: Sequence[Any], device_type: str, call: Traced) -> int:
    """Peak of a call in plain torch without data, less its results; the same call is traced once."""
    described = ((tuple(a.shape), a.stride(), a.dtype) if isinstance(a, torch.Tensor) else a for a in args)
    key = (name, device_type, *described)
    if key not in _traces:
        from rlhf_engine.planning.tracing import Tracker  # it imports this module

        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        tracker = Tracker(tensors, device_type="cpu", answers=call.reads)
        with torch.no_grad(), tracker:
            call.function(*call.args)
        _traces[key] = tracker.timeline.peak
    return _traces[key]


def _flash_backward(args: Sequence[Any]) -> int:
    """dq in fp32, and dk, dv of every query head before heads that share keys are added up."""
    query, key = args[1], args[2]
    n, heads, length, d = query.shape
    rounded = n * heads * round_up(length, 128) * (round_up(d, 32) * 4 + 4)
    shared = 0 if heads == key.shape[1] else 2 * n * heads * length * d * query.element_size()
    return rounded + shared
