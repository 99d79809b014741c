"""Interleaved timing: A/B/C, A/B/C, …, the median of each, so that a busy moment of the machine meets all of them.

CUDA: events around every call; before each, a buffer larger than the L2 cache is overwritten, so no candidate finds its
inputs there. CPU: wall clock of one call; freeing the results is not timed. The garbage collector is off meanwhile.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping

import torch

from rlhf_engine.bench.case import Run

FLUSH_BYTES = 256 * 2**20  # five times the L2 of an H100


def interleaved(functions: Mapping[str, Run], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Milliseconds of every call by name, `rounds` each; every round calls all functions in the mapping's order.

    One round before the first is not counted. Callers have called every function once already (compilation).
    """
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        return (_on_cuda if device.type == "cuda" else _on_cpu)(functions, rounds)
    finally:
        if enabled:
            gc.enable()


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


def _on_cuda(functions: Mapping[str, Run], rounds: int) -> dict[str, list[float]]:
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in functions}
    for number in range(rounds + 1):
        for name, function in functions.items():
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            flush.zero_()
            pair[0].record()
            function()
            pair[1].record()
            if number > 0:
                events[name].append(pair)
        torch.cuda.synchronize()  # a round at a time: the queue of launches must not run full
    return {name: [start.elapsed_time(end) for start, end in pairs] for name, pairs in events.items()}
