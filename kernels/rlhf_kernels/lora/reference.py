"""Multi-slot LoRA in plain torch. Equations and symbols: see the package docstring.

The low-rank product is formed in fp32 (fp64 if x or an adapter is), whatever the adapter's dtype, and rounded once
when added to y.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_kernels.lora.segments import LoraCall
from rlhf_kernels.runtime import autocast
from rlhf_kernels.runtime.philox import keep_mask


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """fp64 if any tensor is, else fp32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def _keep(lora_call: LoraCall, start: int, end: int, slot: int) -> Tensor | None:
    """The dropout mask of rows [start, end), [n, K], or None where there is no dropout."""
    p, row_ids = lora_call.p[slot], lora_call.row_ids
    if p == 0 or row_ids is None:
        return None
    rows = row_ids[start:end]
    seed = torch.full((), lora_call.seed, dtype=torch.int64, device=rows.device)
    return keep_mask(p, seed, rows, lora_call.stream, lora_call.A[slot].shape[1])


def _dropped(x: Tensor, keep: Tensor | None, p: float) -> Tensor:
    """x with inverted dropout; where, not a product, so that an inf in a dropped place is gone too."""
    if keep is None:
        return x
    return torch.where(keep, x * (1 / (1 - p)), torch.zeros((), dtype=x.dtype, device=x.device))


def forward(x: Tensor, lora_call: LoraCall) -> Tensor:
    """The delta of the on rows, compact and in row order: [Σ(ends − starts), M] in the compute dtype."""
    A, B, scales, p = lora_call.A, lora_call.B, lora_call.scales, lora_call.p
    dtype = compute_dtype(x, *A, *B)
    delta = x.new_empty((lora_call.n_on, B[0].shape[0]), dtype=dtype)
    at = 0
    with autocast.off(x):
        for start, end, i in lora_call.runs:
            h = _dropped(x[start:end].to(dtype), _keep(lora_call, start, end, i), p[i]) @ A[i].to(dtype).T  # [n, r]
            torch.mm(h * scales[i], B[i].to(dtype).T, out=delta[at : at + end - start])
            at += end - start
    return delta


def backward(
    ddelta: Tensor,
    x: Tensor,
    lora_call: LoraCall,
    need_x: bool,
    need_A: list[bool],
    need_B: list[bool],
) -> list[Tensor]:
    """Needed gradients among dx [N,K], then dA, then dB, each in its tensor's dtype. ddelta is compact."""
    dx = torch.zeros_like(x, memory_format=torch.contiguous_format) if need_x else None
    compact = list(ddelta.split([end - start for start, end, _ in lora_call.runs]))
    grads = _low_rank_backward(compact, x, lora_call, dx, need_A, need_B)
    return grads if dx is None else [dx, *grads]


def linear_forward(x: Tensor, weight: Tensor, bias: Tensor | None, lora_call: LoraCall) -> Tensor:
    """F.linear on all rows in one call and in x's own shape (for off rows' bits), then the deltas."""
    A, B, scales, p = lora_call.A, lora_call.B, lora_call.scales, lora_call.p
    dtype = compute_dtype(x, *A, *B)
    x_rows = x.flatten(0, -2)
    with autocast.off(x):
        y = F.linear(x, weight, bias).contiguous()
        y_rows = y.flatten(0, -2)
        for start, end, i in lora_call.runs:
            h = (
                _dropped(x_rows[start:end].to(dtype), _keep(lora_call, start, end, i), p[i]) @ A[i].to(dtype).T
            )  # [n, r]
            if y.dtype == dtype:  # no delta in memory
                y_rows[start:end].addmm_(h * scales[i], B[i].to(dtype).T)
            else:  # the sum is taken in the wider dtype and rounded once
                y_rows[start:end].add_((h * scales[i]) @ B[i].to(dtype).T)
    return y


def linear_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    lora_call: LoraCall,
    need_x: bool,
    need_weight: bool,
    need_bias: bool,
    need_A: list[bool],
    need_B: list[bool],
) -> list[Tensor]:
    """Needed gradients among dx (x's shape), dW, db, then dA, then dB."""
    dy_rows, x_rows = dy.flatten(0, -2), x.flatten(0, -2)
    grads: list[Tensor] = []
    dx_rows = None
    with autocast.off(x):
        if need_x:
            dx_rows = dy_rows @ weight  # [N, K], the base path: no dropout here
            grads.append(dx_rows.view(x.shape))
        if need_weight:
            grads.append(dy_rows.T @ x_rows)
        if need_bias:
            grads.append(dy_rows.sum(0))
    runs = [dy_rows[start:end] for start, end, _ in lora_call.runs]
    return grads + _low_rank_backward(runs, x_rows, lora_call, dx_rows, need_A, need_B)


def _low_rank_backward(
    dy_runs: list[Tensor],
    x: Tensor,
    lora_call: LoraCall,
    dx: Tensor | None,
    need_A: list[bool],
    need_B: list[bool],
) -> list[Tensor]:
    """Adds to dx [N,K] in place; returns the needed dA and dB. Runs are summed in row order."""
    A, B, scales, p = lora_call.A, lora_call.B, lora_call.scales, lora_call.p
    dtype = compute_dtype(x, *A, *B)
    dA: dict[int, Tensor] = {}
    dB: dict[int, Tensor] = {}
    with autocast.off(x):
        for dy_run, (start, end, i) in zip(dy_runs, lora_call.runs, strict=True):
            if dx is None and not need_A[i] and not need_B[i]:
                continue
            keep = _keep(lora_call, start, end, i)
            dy, a = dy_run.to(dtype), A[i].to(dtype)
            if need_A[i] or need_B[i]:
                x_in = _dropped(x[start:end].to(dtype), keep, p[i])  # [n, K]
            if need_B[i]:
                part = dy.T @ ((x_in @ a.T) * scales[i])
                dB[i] = dB[i] + part if i in dB else part
            if need_A[i] or dx is not None:
                dh = (dy @ B[i].to(dtype)) * scales[i]  # [n, r]
            if need_A[i]:
                part = dh.T @ x_in
                dA[i] = dA[i] + part if i in dA else part
            if dx is not None:
                dx[start:end].add_(_dropped(dh @ a, keep, p[i]))
    return [dA[i].to(A[i].dtype) for i in sorted(dA)] + [dB[i].to(B[i].dtype) for i in sorted(dB)]
