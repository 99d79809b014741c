"""Terminal view of a run while it lasts: the numbers that matter, each with its course, and where time goes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from rlhf_engine.runs.text import format_value

WATCHED = {
    "reward": "reward",
    "eval/reward": "reward, held out",
    "kl": "KL, nats per answer",
    "entropy": "entropy, nats per token",
    "clip_ratio": "clipped ratios",
    "value/explained_variance": "explained variance",
    "completions/mean_length": "tokens per answer",
    "lm_loss": "cross-entropy",
    "reward_loss": "loss",
    "reward_accuracy": "accuracy",
    "eval/accuracy": "accuracy, held out",
    "eval/auc": "AUC, held out",
}
"""metric → label of the rows, in this order; a run has the rows that it has numbers for."""
PHASES = {"seconds/generate": "generate", "seconds/score": "score", "seconds/update": "update"}
COURSE_WIDTH = 36
"""Columns of a course."""
_BLOCKS = "▁▂▃▄▅▆▇█"


class Course:
    """A number over the whole run in at most `width` means: as a run grows, neighbours are merged."""

    def __init__(self, width: int = COURSE_WIDTH) -> None:
        self.last: float | None = None
        self._width, self._per_mean = width, 1
        self._means: list[float] = []
        self._sum, self._count = 0.0, 0

    def add(self, value: float) -> None:
        self.last = value
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count < self._per_mean:
            return
        self._means.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0
        if len(self._means) == 2 * self._width:
            self._means = _halved(self._means)
            self._per_mean *= 2

    def blocks(self) -> str:
        """A line of block elements between the least and the most."""
        means = [*self._means, *([self._sum / self._count] if self._count else [])]
        while len(means) > self._width:
            means = _halved(means)
        if not means:
            return ""
        least, most = min(means), max(means)
        if most == least:
            return _BLOCKS[0] * len(means)
        return "".join(_BLOCKS[int((x - least) / (most - least) * (len(_BLOCKS) - 1) + 0.5)] for x in means)


def _halved(means: list[float]) -> list[float]:
    pairs = [(a + b) / 2 for a, b in zip(means[::2], means[1::2], strict=False)]
    return [*pairs, *means[len(means) - len(means) % 2 :]]


class Dashboard:
    """A rich renderable: a row per number, then the share of each phase in the time, memory and speed."""

    def __init__(self, watched: Mapping[str, str]) -> None:
        """watched: metric → label."""
        self.watched = dict(watched)
        self._courses: dict[str, Course] = {}
        self._phases: dict[str, float] = {}
        self._latest: dict[str, Any] = {}

    def update(self, metrics: Mapping[str, Any]) -> None:
        """The metrics of one step. What is not a finite number has no place in a course, and is shown as it is."""
        self._latest.update(metrics)
        for name in self.watched:
            value = metrics.get(name)
            if isinstance(value, (int, float)) and abs(value) < float("inf"):
                self._courses.setdefault(name, Course()).add(float(value))
        for name, label in PHASES.items():
            if isinstance(metrics.get(name), (int, float)):
                self._phases[label] = self._phases.get(label, 0.0) + float(metrics[name])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Taller terminals show all, others as much as leaves room for the bar."""
        if not self._courses:
            return
        table = Table(box=None, padding=(0, 2, 0, 0))
        table.add_column("")
        table.add_column("now", justify="right")
        table.add_column("so far", no_wrap=True)
        rows = [name for name in self.watched if name in self._courses]
        for name in rows[: max(1, console.size.height - 5)]:
            course = self._courses[name]
            table.add_row(self.watched[name], format_value(self._latest[name]), Text(course.blocks(), style="cyan"))
        yield table
        yield Text(self._facts(), style="dim", overflow="ellipsis", no_wrap=True)

    def _facts(self) -> str:
        phases = dict(self._phases)  # another thread may add to it
        total = sum(phases.values())
        facts = [f"{label} {100 * s / total:.0f} %" for label, s in phases.items() if total > 0]
        if (peak := self._latest.get("peak_memory_bytes")) is not None:
            facts.append(f"peak {float(peak) / 1e9:.2f} GB")
        if (speed := self._latest.get("tokens_per_second")) is not None:
            facts.append(f"{format_value(float(speed))} tokens/s")
        return "   ".join(facts)
