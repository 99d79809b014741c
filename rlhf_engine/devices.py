"""Names of devices and dtypes in configurations, resolved."""

from __future__ import annotations

import ctypes
import gc
import threading

import torch
from rlhf_kernels.runtime.registry import is_gpu as is_gpu

from rlhf_engine.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_device(name: str) -> torch.device:
    """`auto` is the first CUDA device if there is one, else the CPU. Raises ConfigError for one that is absent."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device: expected one that is present (cpu), got {name!r}")
    return torch.device(name)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _PIECE_BYTES = 2**30, 2**18


def keep_freed_memory() -> None:
    """Keep what tensors on the CPU free: each step takes the same memory again, page by page. With glibc alone."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    # setting either ends glibc's own adapting, so the second only with the first; old versions allow 32 MiB at most
    if libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES) or libc.mallopt(_M_MMAP_THRESHOLD, 2**25):
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def return_freed_memory() -> None:
    """Give back at once what tensors on the CPU free: weights of many sizes make a heap grow. With glibc alone."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _PIECE_BYTES)
    release_memory(torch.device("cpu"))


_OUT_OF_MEMORY = ("DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory")
"""Parts of the message of a RuntimeError when the CPU, cuBLAS or the driver finds no memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that an allocation failed; torch has a class of its own for one of the ways only."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)
    )


capturing = threading.RLock()
"""Held while a CUDA graph is captured: the allocator gives nothing back meanwhile, to no thread."""


def release_memory(device: torch.device) -> None:
    """Give cached blocks back before an allocation is tried again."""
    gc.collect()
    if device.type == "cuda":
        with capturing:
            torch.cuda.empty_cache()
    else:
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)
