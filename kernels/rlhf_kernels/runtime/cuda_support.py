"""Helpers that the CUDA backends share: whether they can run here, tensors as addresses, calls on the current stream.

The library behind the calls is found, or compiled, by `cuda_native` when a CUDA tensor first needs it.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import torch

DEVICE_TYPE = "cuda"
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # the last two are computed in float32
_NAMES = {torch.float32: "float32", torch.float64: "float64"}


def unsupported(device_type: str, dtype: torch.dtype) -> str | None:
    """Reason why the CUDA kernels cannot serve such tensors, or None if they can (see `registry`).

    Looks for the library only when everything else is right: without CUDA tensors nothing is ever compiled.
    """
    if device_type != DEVICE_TYPE:
        return f"it needs CUDA tensors, not {device_type}"
    if dtype not in DTYPES:
        return f"it takes {', '.join(map(str, DTYPES))}, not {dtype}"
    from rlhf_kernels.runtime import cuda_native  # here, because it is a command too: python -m would import it twice

    return cuda_native.missing()


def _library() -> ctypes.CDLL:
    from rlhf_kernels.runtime import cuda_native

    loaded, reason = cuda_native.library()
    if loaded is None:
        raise RuntimeError(f"the CUDA kernels are missing: {reason}")
    return loaded


@contextlib.contextmanager
def stream_of(device: torch.device) -> Iterator[int]:
    """Make `device` current and give the handle of its current stream."""
    with torch.cuda.device(device):
        yield torch.cuda.current_stream(device).cuda_stream


def call(name: str, dtype: torch.dtype, device: torch.device, *arguments: int | float | bool) -> None:
    """Queue the C function `name` for `dtype` on the current stream of `device`; see `cuda_native.SIGNATURES`.

    The caller keeps the tensors behind the addresses alive until this returns; the caching allocator hands their
    memory out again in stream order.
    """
    library = _library()
    function = getattr(library, f"rlhf_{name}_{_NAMES[dtype]}")
    with stream_of(device) as stream:
        code = function(*arguments, stream)
    if code != 0:
        raise RuntimeError(f"{name}: CUDA error {code}: {library.rlhf_error_string(code).decode()}")


def workspace(count: int, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scratch memory for a reduction over `count` elements."""
    return torch.empty(_library().rlhf_workspace(count), dtype=dtype, device=like.device)


def address(argument: str, tensor: torch.Tensor | None, dtype: torch.dtype) -> int:
    """Address of a contiguous tensor's first element, 0 for None."""
    if tensor is None:
        return 0
    if not tensor.is_contiguous():
        raise ValueError(f"{argument}: expected a contiguous tensor, got strides {tensor.stride()}")
    return _address(argument, tensor, dtype)


def matrix(argument: str, tensor: torch.Tensor, dtype: torch.dtype) -> tuple[int, int, int]:
    """Address, row stride and column stride (in elements) of a [B, T] tensor with any strides."""
    if tensor.dim() != 2:
        raise ValueError(f"{argument}: expected 2 dimensions, got shape {tuple(tensor.shape)}")
    return _address(argument, tensor, dtype), tensor.stride(0), tensor.stride(1)


def _address(argument: str, tensor: torch.Tensor, dtype: torch.dtype) -> int:
    if tensor.device.type != DEVICE_TYPE:
        raise ValueError(f"{argument}: expected a CUDA tensor, got one on {tensor.device}")
    if tensor.dtype != dtype:
        raise TypeError(f"{argument}: expected dtype {dtype}, got {tensor.dtype}")
    pointer = tensor.data_ptr()
    if pointer == 0 and tensor.numel() > 0:
        raise TypeError(f"{argument}: expected a tensor with memory of its own, got {type(tensor).__name__}")
    return pointer
