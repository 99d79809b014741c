"""`attention` in C++ (csrc/cpu/attention.cpp): outputs, addresses and strides. Same function as `reference`.

Heads are read where they are, whatever the strides of rows and heads. They are copied only if features of a head are
not neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_kernels.runtime import native

_TYPES = (torch.float32, torch.bfloat16)


def unsupported(device_type: str, dtype: torch.dtype) -> str | None:
    """Reason why the native code cannot serve such tensors, or None."""
    reason = native.unsupported(device_type, torch.float32)
    if reason is None and dtype not in _TYPES:
        return f"it reads {' or '.join(map(str, _TYPES))}, not {dtype}"
    return reason


class _Call:
    """Arguments that both passes share, and what keeps their memory."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        lengths: Sequence[int],
        parents: Sequence[int],
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> None:
        t, n_heads, d = q.shape
        self.bf16 = native.type_number("q", q.dtype, _TYPES) == 1
        self.kept: list[Tensor] = []
        self.sizes = (t, len(lengths), n_heads, k.shape[1], d)
        self.dtype = q.dtype
        self.inputs = [self.heads("q", q, n_heads), self.heads("k", k, k.shape[1]), self.heads("v", v, k.shape[1])]
        self.packing = [
            self._indices(name, values, len(lengths)) for name, values in (("lengths", lengths), ("parents", parents))
        ]
        sinks = None if sinks is None else self._keep(sinks.detach().to(torch.float32).contiguous())
        self.options = (
            scale,
            0 if window is None else window,
            0.0 if softcap is None else softcap,
            0 if sinks is None else native.dense("sinks", sinks, torch.float32, (n_heads,)),
        )

    def _keep(self, x: Tensor) -> Tensor:
        self.kept.append(x)
        return x

    def _indices(self, name: str, values: Sequence[int], count: int) -> int:
        return native.dense(name, self._keep(torch.tensor(values, dtype=torch.int64)), torch.int64, (count,))

    def heads(self, name: str, x: Tensor, n_heads: int) -> tuple[int, int, int]:
        """Address of heads [T, n_heads, D], and strides of rows and heads."""
        t, d = self.sizes[0], self.sizes[4]
        x = self._keep(native.unit_inner_stride(x))
        return native.address(name, x, self.dtype, (t, n_heads, d)), x.stride(0), x.stride(1)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    lengths: Sequence[int],
    parents: Sequence[int],
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Output [T, Hq, D], dense; largest score and sum of exponentials, float32 [T, Hq, 2]."""
    call = _Call(q, k, v, sinks, lengths, parents, scale, window, softcap)
    out, totals = torch.empty(q.shape, dtype=q.dtype), torch.empty((*q.shape[:2], 2), dtype=torch.float32)
    native.extension().attention(
        call.bf16,
        call.sizes,
        *call.inputs,
        *call.packing,
        call.options,
        out.data_ptr(),
        totals.data_ptr(),
        native.threads(),
    )
    return out, totals


def attention_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    totals: Tensor,
    lengths: Sequence[int],
    parents: Sequence[int],
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, dense, and of sinks; those of absent sinks are float32 [0]."""
    call = _Call(q, k, v, sinks, lengths, parents, scale, window, softcap)
    d_q, d_k, d_v = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
    d_sinks = torch.empty(0 if sinks is None else q.shape[1], dtype=torch.float32)
    out, totals = out.contiguous(), totals.contiguous()
    native.extension().attention_gradient(
        call.bf16,
        call.sizes,
        call.heads("d_out", d_out, q.shape[1]),
        *call.inputs,
        *call.packing,
        call.options,
        native.dense("out", out, q.dtype, q.shape),
        native.dense("totals", totals, torch.float32, (*q.shape[:2], 2)),
        d_q.data_ptr(),
        d_k.data_ptr(),
        d_v.data_ptr(),
        d_sinks.data_ptr(),
        native.threads(),
    )
    return d_q, d_k, d_v, d_sinks if sinks is None else d_sinks.to(sinks.dtype)
