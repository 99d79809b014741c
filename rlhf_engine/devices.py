"""Devices and dtypes by name, their memory and how much of it a pass may take, phases of a step, the ranks of a run.

A run has one process, or the ranks that `torchrun` or `accelerate launch` has started. Ranks hold the same weights and
go through a run in step. What can fail on one of them alone is work between two exchanges (`together`):
afterwards every rank hears of it, so that none waits for one that has given up. Alone, all of this is the identity, and
nothing of torch.distributed is touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import math
import os
import re
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from rlhf_kernels.runtime.registry import is_gpu as is_gpu
from torch import distributed as dist

from rlhf_engine.config.launch import launched
from rlhf_engine.errors import ConfigError, RankError

T = TypeVar("T")

CLEAR_REFS = Path("/proc/self/clear_refs")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_device(name: str) -> torch.device:
    """`auto` is the first CUDA device if there is one, else the CPU. Raises ConfigError for one that is absent."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device: expected one that is present (cpu), got {name!r}")
    return torch.device(name)


_stands_in: ContextVar[bool] = ContextVar("stands_in", default=False)


def is_eager() -> bool:
    """Whether code for the CPU may run: not under torch.compile, nor where tests let the CPU stand in for a GPU."""
    # compilation first: a compiler stops here, and does not trace context variables
    return not torch.compiler.is_compiling() and not _stands_in.get()


@contextlib.contextmanager
def stand_in(active: bool = True) -> Iterator[None]:
    """A block in which the CPU runs what a graph or another device would run."""
    token = _stands_in.set(active)
    try:
        yield
    finally:
        _stands_in.reset(token)


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


earlier_peaks: dict[torch.device, int] = {}  # device → highest peak that `read_memory` has ended the count of


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


_SHARE = 0.7  # share of the free memory that a pass may take: allocators leave gaps, and a rollout's cache may grow
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

    def settle(self, gather: Callable[[Any], list[Any]]) -> float:
        """Choose or lower the budget at the end of a step, as all ranks do; what has room, where it is chosen now."""
        room = math.inf
        if self._measured and self.tokens is None and (memory := read_memory(self._device)) is not None:
            fits = int(_SHARE * memory.free * self._measured / self._bytes)
            room = fits - fits % (1 << max(0, fits.bit_length() - 3))  # coarse: the same in runs that are alike
        room, tried = map(min, zip(*gather((room, self._tried)), strict=True))
        self._measured, self._tried, self.failures = 0, math.inf, self.failures + 1 if tried < math.inf else 0
        if room < math.inf or self.failures > 1:
            chosen = min(room, _MOST) if room < math.inf else tried
            self.tokens, self.failures = max(self.least, int(chosen)), 0
        return room


def peak_memory_bytes(device: torch.device | str = "cpu") -> int:
    """Most memory used so far: torch's allocations on a CUDA device, the process's resident set elsewhere."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux kibibytes


def reset_peak_memory(device: torch.device | str) -> None:
    """Let `peak_memory_bytes` count from now on; where a CPU's system cannot, it goes on counting from the start."""
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif os.access(CLEAR_REFS, os.W_OK):
        CLEAR_REFS.write_text("5")


class Clock:
    """Seconds by phase of a step, from its construction on. with_peaks: bytes at the peak of each phase as well."""

    def __init__(self, device: torch.device, *, with_peaks: bool = False) -> None:
        self.seconds: dict[str, float] = {}  # phase → seconds
        self._peaks: dict[str, int] | None = {} if with_peaks else None
        self._device = device
        if with_peaks:
            reset_peak_memory(device)
        self._began = self._last = self._now()

    def _now(self) -> float:
        if self._device.type == "cuda":
            # once per phase, or the next phase would be charged for this one; a generator's stream is not waited for
            torch.cuda.current_stream(self._device).synchronize()
        return time.perf_counter()

    def lap(self, phase: str) -> None:
        """Time since the last lap belongs to `phase`."""
        now = self._now()
        self.seconds[phase] = now - self._last
        if self._peaks is not None:
            self._peaks[phase] = peak_memory_bytes(self._device)
            reset_peak_memory(self._device)
        self._last = now

    def add(self, seconds: dict[str, float]) -> None:
        """Time since the last lap belongs to these phases."""
        self.seconds |= seconds
        self._last = self._now()

    def metrics(self) -> dict[str, float]:
        """Seconds, and bytes where they are measured, by metric name."""
        seconds = {f"seconds/{phase}": value for phase, value in self.seconds.items()}
        peaks = {f"peak_memory_bytes/{phase}": float(n) for phase, n in (self._peaks or {}).items()}
        return {**seconds, "seconds/step": self._last - self._began, **peaks}


# ---- ranks -----------------------------------------------------------------------------------------------------------

SECONDS = 1800.0  # seconds that a process waits for the others before it gives the run up


@dataclass(frozen=True, kw_only=True)
class World:
    """The ranks of a run, seen from one of them."""

    rank: int = 0
    size: int = 1
    device: torch.device | None = None
    """Device of this rank; None where a process is alone and takes the device that it is told."""
    _before_exchange: list[Callable[[], None]] = field(default_factory=list, repr=False, compare=False)
    """Called by this rank before each exchange, see `while_waiting`."""

    @classmethod
    def from_environment(cls, device: str = "auto", *, timeout: float = SECONDS) -> World:
        """World that the launcher set up. device: as configured; timeout: seconds that a rank waits for the others."""
        if launched() == 1:
            return ALONE
        from accelerate import PartialState  # half a second to import, which a process alone need not wait for

        if not dist.is_initialized():
            # tensors of each kind of device by their own backend; small values always go through the host
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and device != "cpu" else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
        # without a GPU it would take this process for one that is alone, unless the CPU is named
        state = PartialState(cpu=device == "cpu" or not torch.cuda.is_available())
        own_device = state.device if is_gpu(state.device) else torch.device("cpu")  # not cpu:1
        return cls(rank=dist.get_rank(), size=dist.get_world_size(), device=own_device)

    @property
    def is_main(self) -> bool:
        """Whether this rank writes what a run leaves behind."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Small plain values of all ranks, in their order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        with self._talking():
            dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]  # all of them are there

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """A block of each rank's own work, which all end together; RankError with the message of one that failed."""
        if self.size == 1:
            yield
            return
        try:
            with self.in_step():  # it may be drawing from a sharded base
                yield
        except Exception as error:  # whatever it is: it is raised again, once the others know
            with contextlib.suppress(RankError):  # of others that are gone by then: this one is what is to be told
                self.gather(f"{type(error).__name__}: {error}")
            raise
        failed = {rank: text for rank, text in enumerate(self.gather("")) if text}
        if failed:
            listed = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
            raise RankError(f"{what}: another rank could not go on, {listed}")

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """A block made of exchanges; where one rank fails, others get RankError once its connections close."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or _OF_GLOO.search(str(error)):
                raise self._lost(error) from error
            raise

    def gather_tensors(self, tensors: Mapping[str, torch.Tensor | None]) -> list[dict[str, torch.Tensor | None]]:
        """Tensors of all ranks in their order, on every rank; None where one has none. Shapes alone may differ."""
        if self.size == 1:
            return [dict(tensors)]
        there = {name: tensor.detach().contiguous() for name, tensor in tensors.items() if tensor is not None}
        shapes = self.gather({name: list(tensor.shape) for name, tensor in there.items()})
        dtypes = {name: tensor.dtype for name, tensor in there.items()}
        device = next(iter(there.values())).device
        own = torch.cat([tensor.view(-1).view(torch.uint8) for tensor in there.values()])
        sizes = [sum(_bytes(shape, dtypes[name]) for name, shape in by_name.items()) for by_name in shapes]
        longest = max(sizes)
        padded = torch.cat([own, own.new_zeros(longest - len(own))])
        received = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(self.size)]
        with self._talking():
            dist.all_gather(received, padded)
        by_rank = []
        for by_name, data in zip(shapes, received, strict=True):
            parts: dict[str, torch.Tensor | None] = dict.fromkeys(tensors)
            start = 0
            for name, shape in by_name.items():
                end = start + _bytes(shape, dtypes[name])
                # a copy, because a dtype's elements have to be aligned
                parts[name] = data[start:end].clone().view(dtypes[name]).view(shape)
                start = end
            by_rank.append(parts)
        return by_rank

    @torch.no_grad()
    def sum(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each by its sum over the ranks, the same bits on all of them. In float32 or wider."""
        if self.size == 1:
            return
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            chosen = [tensor for tensor in tensors if tensor.dtype == dtype]
            wide = torch.promote_types(dtype, torch.float32)
            flat = torch.cat([tensor.reshape(-1).to(wide) for tensor in chosen])
            with self._talking():
                dist.all_reduce(flat)
            for tensor, summed in zip(chosen, flat.split([tensor.numel() for tensor in chosen]), strict=True):
                tensor.copy_(summed.view_as(tensor))

    def most(self, figures: Mapping[str, float]) -> dict[str, float]:
        """The largest of all ranks, by name."""
        if self.size == 1:
            return dict(figures)
        everyone = self.gather(dict(figures))
        return {name: max(theirs[name] for theirs in everyone) for name in figures}

    def close(self) -> None:
        """Leave the group."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    @contextlib.contextmanager
    def while_waiting(self, work: Callable[[], None]) -> Iterator[None]:
        """A block in which `work` is done before every exchange: it returns once all ranks have come to that one."""
        self._before_exchange.append(work)
        try:
            yield
        finally:
            self._before_exchange.remove(work)

    @contextlib.contextmanager
    def _talking(self) -> Iterator[None]:
        try:
            for work in self._before_exchange:
                work()
            yield
        except RuntimeError as error:  # torch's: a connection was closed, or nothing came for too long
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> RankError:
        return RankError(
            f"rank {self.rank} of {self.size} has lost another one, which ended without saying why or was silent "
            f"for too long: {' '.join(str(error).split())[:200]}"
        )


ALONE = World()
_OF_GLOO = re.compile(r"\bgloo\b")  # words of gloo's errors, which have no class of their own in torch


def share(n: int, rank: int, size: int) -> range:
    """Places among n that are a rank's: consecutive ones, nearly as many for each."""
    return range(round(rank * n / size), round((rank + 1) * n / size))


def balanced(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Places by rank, so that ranks have sums of sizes as equal as largest-first makes them; places in order."""
    loads = [0] * ranks
    by_rank: list[list[int]] = [[] for _ in range(ranks)]
    for place in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        rank = min(range(ranks), key=lambda r: (loads[r], len(by_rank[r]), r))
        loads[rank] += sizes[place]
        by_rank[rank].append(place)
    return [sorted(places) for places in by_rank]


def fingerprint(tensor: torch.Tensor) -> int:
    """Sum of a tensor's bit patterns: no copy, and no update leaves it the same in every tensor of a role."""
    return int(_bit_sum(tensor))


def fingerprint_of_all(tensors: Iterable[torch.Tensor]) -> str:
    """One short name of the bits of many tensors on one device, in their order."""
    bit_sums = [_bit_sum(tensor) for tensor in tensors]
    sums = torch.stack(bit_sums).tolist() if bit_sums else []
    return hashlib.sha256(repr(sums).encode()).hexdigest()[:16]


def _bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().contiguous().view(integers).sum(dtype=torch.int64)


def _bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize
