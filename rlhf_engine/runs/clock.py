"""A clock for the phases of a step, which can measure their memory as well."""

from __future__ import annotations

import time

import torch

from rlhf_engine.runs.metrics import peak_memory_bytes, reset_peak_memory


class Clock:
    """Seconds by phase of a step, from its construction on. with_peaks: bytes at the peak of each phase as well."""

    def __init__(self, device: torch.device, *, with_peaks: bool = False) -> None:
        self.seconds: dict[str, float] = {}
        """phase → seconds"""
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

    @property
    def total(self) -> float:
        """Seconds up to the end of the last phase."""
        return self._last - self._began

    def metrics(self) -> dict[str, float]:
        """Seconds, and bytes where they are measured, by metric name."""
        peaks = {f"peak_memory_bytes/{phase}": float(n) for phase, n in (self._peaks or {}).items()}
        return {**{f"seconds/{k}": v for k, v in self.seconds.items()}, "seconds/step": self.total, **peaks}
