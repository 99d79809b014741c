"""`gather_logprob` in C++ (csrc/cpu/gather_logprob.cpp): outputs, addresses; functions as in `reference`.

Logits of any strides are read and written where they are. Rows whose elements are not neighbours (a transposed
tensor) go through one row of scratch memory per thread.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlhf_kernels.runtime import native
from rlhf_kernels.vocab.logits import OUTPUTS, accumulation_dtype

_PER_ROW = (
    *("d_logprob", "d_entropy", "d_lse", "d_mean_logit", "d_log_sum_sq_prob"),
    *("lse", "entropy", "log_sum_sq_prob"),
)
_STORAGE = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16"}


def unsupported(device_type: str, dtype: torch.dtype) -> str | None:
    """Reason why the native code cannot serve such logits, or None if it can."""
    if dtype not in _STORAGE:
        return f"it reads {', '.join(map(str, _STORAGE))}, not {dtype}"
    return native.unsupported(device_type, torch.float64 if dtype == torch.float64 else torch.float32)


def _function(name: str, dtype: torch.dtype) -> Callable[..., None]:
    if dtype not in _STORAGE:
        raise TypeError(f"logits: expected {', '.join(map(str, _STORAGE))}, got {dtype}")
    return getattr(native.extension(), f"gather_logprob_{name}_{_STORAGE[dtype]}")  # type: ignore[no-any-return]


def _rows(argument: str, x: Tensor, n_rows: int) -> tuple[Tensor | None, tuple[int, int, int, int]]:
    """Starts of the rows of x [..., V]: (offsets to be kept alive, (address, their address or 0, strides))."""
    if x.dim() < 2 or x.numel() != n_rows * x.shape[-1]:
        raise ValueError(f"{argument}: expected {n_rows} rows as in target, got shape {tuple(x.shape)}")
    address, inner = native.address(argument, x, x.dtype), x.stride(-1) if x.shape[-1] > 1 else 1
    if x.dim() == 2 or x.is_contiguous():
        return None, (address, 0, x.stride(-2), inner)
    offsets = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        offsets = offsets[..., None] + torch.arange(size) * stride
    offsets = offsets.contiguous()
    return offsets, (address, offsets.data_ptr(), 0, inner)


def _options(
    target: Tensor, row_temperature: Tensor | None, temperature: float, ignore_index: int, dtype: torch.dtype
) -> tuple[tuple[Tensor, Tensor | None], tuple[int, int, float, int]]:
    """(tensors to be kept alive, (addresses of target and temperatures, and the two numbers))."""
    target, n = target.contiguous(), target.numel()
    column = None if row_temperature is None else row_temperature.to(dtype).contiguous()
    return (target, column), (
        native.dense("target", target, torch.int64, (n,)),
        0 if column is None else native.dense("row_temperature", column, dtype, (n,)),
        temperature,
        ignore_index,
    )


def forward(
    logits: Tensor,
    target: Tensor,
    row_temperature: Tensor | None,
    temperature: float,
    ignore_index: int,
    outputs: str,
) -> tuple[Tensor, ...]:
    """Statistics [N] in the order of `OUTPUTS`, empty where not wanted; lse is always made, for backward."""
    dtype, n_rows = accumulation_dtype(logits), target.numel()
    made = {"logprob", "lse", *outputs.split(",")}
    results = tuple(torch.empty(n_rows if name in made else 0, dtype=dtype) for name in OUTPUTS)
    offsets, rows = _rows("logits", logits, n_rows)
    kept, options = _options(target, row_temperature, temperature, ignore_index, dtype)
    _function("forward", logits.dtype)(
        *rows,
        *options,
        n_rows,
        logits.shape[-1],
        native.threads(),
        *(x.data_ptr() if name in made else 0 for name, x in zip(OUTPUTS, results, strict=True)),
    )
    del offsets, kept
    return results


def backward(
    logits: Tensor,
    target: Tensor,
    row_temperature: Tensor | None,
    temperature: float,
    ignore_index: int,
    saved: tuple[Tensor, Tensor, Tensor],
    grads: tuple[Tensor | None, ...],
    d_logits: Tensor,
) -> None:
    """Write dL/d(logits) into `d_logits`, which may be `logits` itself.

    saved: lse, entropy, log_sum_sq_prob. grads: those of logprob, entropy, lse, mean_logit, log_sum_sq_prob
    (or None).
    """
    if d_logits.shape != logits.shape or d_logits.dtype != logits.dtype:
        raise ValueError(
            f"d_logits: expected {logits.dtype} {tuple(logits.shape)} like logits, "
            f"got {d_logits.dtype} {tuple(d_logits.shape)}"
        )
    if any(size > 1 and stride == 0 for size, stride in zip(d_logits.shape, d_logits.stride(), strict=True)):
        raise RuntimeError("d_logits: expected elements with memory of their own, got an expanded tensor")
    dtype, n_rows = accumulation_dtype(logits), target.numel()
    offsets, rows = _rows("logits", logits, n_rows)
    d_offsets, d_rows = _rows("d_logits", d_logits, n_rows)
    kept, options = _options(target, row_temperature, temperature, ignore_index, dtype)
    values = [None if x is None else x.to(dtype).contiguous() for x in (*grads, *saved)]
    _function("backward", logits.dtype)(
        *rows,
        *options,
        n_rows,
        logits.shape[-1],
        native.threads(),
        *(
            # an empty one was not made; C++ refuses it where it is read
            0 if x is None or x.numel() == 0 else native.dense(name, x, dtype, (n_rows,))
            for name, x in zip(_PER_ROW, values, strict=True)
        ),
        *d_rows,
    )
    del offsets, d_offsets, kept
