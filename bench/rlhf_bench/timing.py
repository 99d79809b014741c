"""Interleaved timing: A/B/C, A/B/C, …, the median of each, so that a busy moment of the machine meets all of them.

CUDA: events around every call; before each, a buffer larger than the L2 cache is overwritten, so no candidate finds its
inputs there. What a rollout captures is timed as the replay of a CUDA graph: kernels of microseconds, launched one by
one from Python, would be timed by their launches. CPU: wall clock of one call; freeing the results is not timed. The
garbage collector is off meanwhile. A rehearsal of a measurement on a GPU takes one round, and a clock stands in for the
events.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch

from rlhf_bench.case import Run
from rlhf_engine.runs.metrics import is_rehearsal

FLUSH_BYTES = 256 * 2**20  # five times the L2 of an H100


def interleaved(functions: Mapping[str, Run], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Milliseconds of every call by name, `rounds` each; every round calls all functions in the mapping's order.

    One round before the first is not counted. Callers have called every function once already (compilation).
    """
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        if is_rehearsal():
            return _on_cuda(functions, 1, torch.device("cpu"))
        return _on_cuda(functions, rounds, device) if device.type == "cuda" else _on_cpu(functions, rounds)
    finally:
        if enabled:
            gc.enable()


def replay_of(function: Run) -> Run:
    """Replay of a CUDA graph of `function`, which has run before. Raises RuntimeError where it cannot be captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()

    def replay() -> Any:
        graph.replay()
        return results

    return replay


def medians(samples: Mapping[str, list[float]]) -> dict[str, float]:
    """Median milliseconds by name."""
    return {name: statistics.median(values) for name, values in samples.items()}


def _on_cpu(functions: Mapping[str, Run], rounds: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(rounds + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            result = function()
            elapsed = time.perf_counter() - start
            del result
            if number > 0:
                samples[name].append(1e3 * elapsed)
    return samples


class _Clock:
    """Stand-in for a CUDA event."""

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: _Clock) -> float:
        """Milliseconds."""
        return 1e3 * (end.seconds - self.seconds)


def _on_cuda(functions: Mapping[str, Run], rounds: int, device: torch.device) -> dict[str, list[float]]:
    on_gpu = device.type == "cuda"
    event = (lambda: torch.cuda.Event(enable_timing=True)) if on_gpu else _Clock
    flush = torch.empty(FLUSH_BYTES // 4 if on_gpu else 1, dtype=torch.int32, device=device)
    events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in functions}
    for number in range(rounds + 1):
        for name, function in functions.items():
            pair = event(), event()
            flush.zero_()
            pair[0].record()
            function()
            pair[1].record()
            if number > 0:
                events[name].append(pair)
        if on_gpu:
            torch.cuda.synchronize()  # a round at a time: the queue of launches must not run full
    return {name: [start.elapsed_time(end) for start, end in pairs] for name, pairs in events.items()}
