"""A clock for the phases of a step."""

from __future__ import annotations

import time

import torch


class Clock:
    """Seconds by phase of a step, from its construction on."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        """phase → seconds"""
        self._device = device
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
        """Seconds by metric name."""
        return {**{f"seconds/{k}": v for k, v in self.seconds.items()}, "seconds/step": self.total}
