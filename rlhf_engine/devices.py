"""Names of devices and dtypes in configurations, resolved; memory of devices, and how much of it a pass may take."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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
    if is_gpu(device):
        with capturing:
            torch.get_device_module(device).empty_cache()
    else:
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)


class Memory(NamedTuple):
    """Bytes of a GPU's memory."""

    used: int  # in tensors
    peak: int  # most in tensors since the count began
    free: int  # in no tensor, cached blocks included


earlier_peaks: dict[torch.device, int] = {}
"""Device → highest peak that `read_memory` has ended the count of."""


def read_memory(device: torch.device, *, anew: bool = False) -> Memory | None:
    """Memory of a GPU as it is now; None for a CPU. anew: peaks are counted from now on."""
    if not is_gpu(device):
        return None
    module = torch.get_device_module(device)
    used, peak = module.memory_allocated(device), module.max_memory_allocated(device)
    if anew:
        earlier_peaks[device] = max(peak, earlier_peaks.get(device, 0))
        module.reset_peak_memory_stats(device)
    # no block is given back for this: another thread may be capturing a graph, which that would end
    return Memory(used=used, peak=peak, free=module.mem_get_info(device)[0] + module.memory_reserved(device) - used)


_SHARE = 0.7
"""Share of the free memory that a pass may take: allocators leave gaps, and a rollout's cache may grow."""
_MOST = 2**15
"""Most tokens of a pass, however much is free: as many as a GPU has been measured with, where it no longer waits."""


class Budget:
    """Most tokens of all lanes in one pass of the model, by free memory on a GPU.

    The largest pass of the first step tells what a token takes. Who runs out of memory divides the pass; the budget is
    lowered where two steps running do.
    """

    def __init__(
        self,
        device: torch.device,
        tokens: int | None = None,
        failures: int = 0,
        least: int = 1,
        by_memory: bool = False,
    ) -> None:
        """Take what a checkpoint has, `tokens` None: not chosen. least: of what cannot be divided."""
        self._device, self.failures, self.tokens = device, failures, tokens and max(tokens, least)  # answers may grow
        self.least, self.by_memory = least, by_memory and read_memory(device) is not None
        self._measured, self._bytes, self._tried = 0, 0, math.inf

    @contextlib.contextmanager
    def measured(self, tokens: int) -> Iterator[None]:
        """A block with a pass of so many tokens, which is measured while nothing is chosen."""
        wanted = self.by_memory and self.tokens is None and tokens > self._measured
        before = read_memory(self._device, anew=True) if wanted else None
        yield
        if before is not None and (after := read_memory(self._device)) is not None:
            self._measured, self._bytes = tokens, max(1, after.peak - before.used)

    def divide(self, tokens: int) -> None:
        """Note that memory ran out, and that so many tokens are tried next."""
        self._tried = min(tokens, self._tried)

    def settle(self, gather: Callable[[Any], list[Any]], *, is_whole: bool = True) -> float:
        """Choose or lower the budget at the end of a step, as all ranks do; what has room, where it is chosen now.

        is_whole: whether the step's passes were as large as any that are to come.
        """
        room = math.inf
        if is_whole and self._measured and self.tokens is None and (memory := read_memory(self._device)) is not None:
            fits = int(_SHARE * memory.free * self._measured / self._bytes)
            room = fits - fits % (1 << max(0, fits.bit_length() - 3))  # coarse: the same in runs that are alike
        room, tried = map(min, zip(*gather((room, self._tried)), strict=True))
        self._measured, self._tried, self.failures = 0, math.inf, self.failures + 1 if tried < math.inf else 0
        if room < math.inf or self.failures > 1:
            chosen = min(room, _MOST) if room < math.inf else tried
            self.tokens, self.failures = max(self.least, int(chosen)), 0
        return room
