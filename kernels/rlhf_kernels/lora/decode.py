"""`lora_delta_` for the few rows of a decoding step, with the rows' slots in a table on the device.

    y_n += s_i B_i (A_i x_n),  i = row_slot[n];   i < 0: the row is off and keeps its bits

The table is read where it lies, so that a CUDA graph replays with whatever rows carry which slot by then. The `cuda`
backend does it in one launch (csrc/cuda/lora_decode.cu); every other device takes `reference`, plain torch without a
read back. Inference only: no gradient, no dropout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_kernels.lora import cuda
from rlhf_kernels.lora.reference import compute_dtype
from rlhf_kernels.lora.segments import check_adapter
from rlhf_kernels.runtime import autocast, registry

__all__ = ["decode_delta_"]


def decode_delta_(
    y: Tensor,
    x: Tensor,
    A: Sequence[Tensor],
    B: Sequence[Tensor],
    scales: Sequence[float],
    row_slot: Tensor,
    *,
    backend: str = "auto",
) -> Tensor:
    """Add each row's low-rank delta to y in place, by the equation of the module's docstring; off rows are not touched.

    Inference only. `auto` takes `cuda` where it is expected to be the fastest.

    Args:
        y: [N, M], of x's dtype and device.
        x: [N, K], floating.
        A: per slot [r_i, K], floating, on x's device.
        B: per slot [M, r_i], floating, on x's device.
        scales: factor of the delta per slot.
        row_slot: [N] int32 or int64 on x's device, slot of each row. A negative slot is off, and so is one beyond the
            last: its values are not read back.
        backend: `auto` or the name of a backend, see `rlhf_kernels.runtime.registry`.

    Returns:
        y itself.

    Raises:
        TypeError: an adapter is not floating.
        ValueError: a shape, dtype, device or number of entries does not fit, or backend is unknown.
        ValueError: a tensor requires grad while gradients are enabled.
        BackendUnavailableError: the named backend cannot serve the call, such rows or such adapters.
    """
    for name, rows in (("x", x), ("y", y)):
        if rows.dim() != 2 or not rows.is_floating_point():
            raise ValueError(f"{name}: expected floating rows of shape [N, features], got {tuple(rows.shape)}")
    if y.shape[0] != x.shape[0] or y.dtype != x.dtype or y.device != x.device:
        raise ValueError(
            f"y: expected {x.shape[0]} rows of {x.dtype} on {x.device} like x, "
            f"got {y.shape[0]} of {y.dtype} on {y.device}"
        )
    if row_slot.shape != x.shape[:1] or row_slot.dtype not in (torch.int32, torch.int64) or row_slot.device != x.device:
        raise ValueError(
            f"row_slot: expected int32 or int64 [{x.shape[0]}] on {x.device}, "
            f"got {row_slot.dtype} {list(row_slot.shape)} on {row_slot.device}"
        )
    if not len(A) == len(B) == len(scales):
        raise ValueError(f"A, B, scales: expected one entry per slot, got {len(A)}, {len(B)} and {len(scales)} entries")
    for i, (a, b) in enumerate(zip(A, B, strict=True)):
        check_adapter(i, a, b, x, x.shape[1], y.shape[1])
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, y, *A, *B)):
        raise ValueError("requires_grad: expected tensors without it, or torch.no_grad(); decoding has no gradient")
    if not A or x.shape[0] == 0:
        return y
    wide = next((t for t in (*A, *B) if t.dtype == torch.float64), x)
    chosen = registry.resolve("lora_decode_delta", backend, wide)
    if chosen == "cuda" and backend == registry.default_backend() == "auto" and not cuda.serves(x, A, B):
        chosen = "reference"
    if chosen == "cuda":
        cuda.delta_(y, x, A, B, scales, row_slot)
    else:
        _reference(y, x, A, B, scales, row_slot)
    return y


def _reference(
    y: Tensor, x: Tensor, A: Sequence[Tensor], B: Sequence[Tensor], scales: Sequence[float], row_slot: Tensor
) -> None:
    dtype = compute_dtype(x, *A, *B)
    with autocast.off(x):
        for i, (a, b, scale) in enumerate(zip(A, B, scales, strict=True)):
            delta = ((x.to(dtype) @ a.to(dtype).T) * scale) @ b.to(dtype).T
            y.copy_(torch.where((row_slot == i)[:, None], (y + delta).to(y.dtype), y))
