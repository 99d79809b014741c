"""Shrink and expand of a decoding step in one CUDA launch (csrc/cuda/lora_decode.cu), added onto the base product.

Equations: see the package docstring. x and y are fp32, bf16 or fp16, adapters fp32 or bf16, all of one dtype and of
ranks up to 128. Everything accumulates in fp32 and y is rounded once more when the delta is added, as `linear_forward`
of the other backends does. Rows that are off are neither read nor written.

A row's bits depend on nothing but its own x, its slot and whether the device has clusters: not on the other rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_kernels.lora.segments import LoraCall
from rlhf_kernels.lora.tables import row_slots_of, slots_of
from rlhf_kernels.runtime import autocast, cuda_support
from rlhf_kernels.runtime.registry import BackendUnavailableError

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ADAPTERS = (torch.float32, torch.bfloat16)
MAX_ROWS = 256
MAX_RANK = 128
MAX_RANK_ALONE = 32  # without clusters every block reads all of A: above this two launches are expected to be faster


def unsupported(device_type: str, dtype: torch.dtype) -> str | None:
    """Reason why the kernel cannot serve such tensors, or None. dtype: the widest of x and the adapters."""
    reason = cuda_support.unsupported(device_type, dtype)
    if reason is None and dtype not in _TYPES:
        return f"it takes {', '.join(map(str, _TYPES))}, not {dtype}"
    return reason


def has_clusters(device: torch.device) -> bool:
    """Whether blocks can share their memory: from compute capability 9.0 on."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


def refusal(x: Tensor, A: Sequence[Tensor], B: Sequence[Tensor]) -> str | None:
    """Reason why the kernel does not serve these rows x [N, K] and adapters, or None."""
    dtypes = {t.dtype for t in (*A, *B)}
    if x.shape[0] > MAX_ROWS:
        return f"it is for up to {MAX_ROWS} rows, not {x.shape[0]}"
    if x.dtype not in _TYPES:
        return f"x is {x.dtype}"
    if len(dtypes) != 1 or not dtypes <= set(_ADAPTERS):
        return f"it takes adapters of one dtype, float32 or bfloat16, not {sorted(map(str, dtypes))}"
    ranks = [a.shape[0] for a in A]
    if min(ranks) < 1 or max(ranks) > MAX_RANK:
        return f"it takes ranks from 1 to {MAX_RANK}, not {sorted(set(ranks))}"
    if not all(t.is_contiguous() for t in (*A, *B)):
        return "an adapter is not contiguous"
    return None


def serves(x: Tensor, A: Sequence[Tensor], B: Sequence[Tensor]) -> bool:
    """Whether `auto` takes the kernel for `decode_delta_`: it can, and is expected to be faster than plain torch."""
    if refusal(x, A, B) is not None:
        return False
    return max(a.shape[0] for a in A) <= MAX_RANK_ALONE or has_clusters(x.device)


def delta_(
    y: Tensor, x: Tensor, A: Sequence[Tensor], B: Sequence[Tensor], scales: Sequence[float], row_slot: Tensor
) -> None:
    """y [N, M] += s_i B_i A_i x for the slot i of each row; row_slot [N] int32 or int64, negative or ≥ slots: off."""
    reason = refusal(x, A, B)
    if reason is not None:
        raise BackendUnavailableError(f"backend='cuda' cannot serve this decode: {reason}")
    if y.stride(1) != 1 and y.shape[1] > 1:
        raise ValueError(f"y: expected neighbouring features (stride 1), got strides {y.stride()}")
    if x.stride(1) != 1:
        x = x.contiguous()
    slots = slots_of(list(A), list(B), scales, [0.0] * len(A))
    cuda_support.call(
        "lora_decode",
        None,
        x.device,
        *cuda_support.matrix("x", x, x.dtype)[:2],
        *cuda_support.matrix("y", y, x.dtype)[:2],
        _TYPES[x.dtype],
        x.shape[0],
        x.shape[1],
        y.shape[1],
        cuda_support.address("row_slot", row_slot.contiguous(), row_slot.dtype),
        row_slot.dtype == torch.int64,
        cuda_support.address("slots", slots.table, torch.int64),
        len(A),
        _ADAPTERS.index(A[0].dtype),
        slots.aligned,
        has_clusters(x.device),
    )


class Decoder:
    """`linear_forward` for x of one shape and dtype, without dropout; off rows keep the bits of F.linear.

    It reads its tensors wherever they lie when it is called; a graph that captures a call reads them where they lay.
    """

    lasting = True
    """Whether the decoder sees later changes of its tensors: true, because none of them is a copy."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, lora_call: LoraCall) -> None:
        self._weight, self._bias, self._lora_call = weight, bias, lora_call
        self._shape, self._dtype = x.shape, x.dtype

    @staticmethod
    def refusal(x: Tensor, weight: Tensor, bias: Tensor | None, lora_call: LoraCall) -> str | None:
        """Reason why there is no decoder for such an x and such a call without dropout, or None."""
        if any(t is not None and (t.dtype, t.device) != (x.dtype, x.device) for t in (weight, bias)):
            return f"weight and bias are not {x.dtype} on {x.device} like x"
        return refusal(x.reshape(-1, x.shape[-1]), lora_call.A, lora_call.B)

    def takes(self, x: Tensor) -> bool:
        """Whether x has the shape and dtype it was made for."""
        return x.shape == self._shape and x.dtype == self._dtype and x.device == self._weight.device

    def __call__(self, x: Tensor) -> Tensor:
        """x [.., K] → y [.., M], dense."""
        lora_call = self._lora_call
        with autocast.off(x):
            y = F.linear(x, self._weight, self._bias).contiguous()
        n_rows = math.prod(x.shape[:-1])
        row_slot = row_slots_of(lora_call.starts, lora_call.ends, lora_call.slots, n_rows, x.device).table
        delta_(y.view(n_rows, -1), x.reshape(n_rows, -1), lora_call.A, lora_call.B, lora_call.scales, row_slot)
        return y
