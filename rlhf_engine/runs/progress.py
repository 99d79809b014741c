"""Progress of a run while it lasts."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, ClassVar

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from rlhf_engine.runs.dashboard import WATCHED, Dashboard
from rlhf_engine.runs.text import format_duration, format_score

_OF_ASYNC = {
    "staleness/max": "age",
    "async/ready_steps": "ready",
    "async/generator_utilisation": "generator",
    "async/learner_utilisation": "learner",
    "async/speedup": "speed-up",
    "async/speedup_bound": "of at most",
}
"""Metrics of a run whose answers are drawn beside the updates, with their labels."""
LONG_S = 60.0
"""Seconds from which on a run says after two steps how long the others will take."""
_FACTS = {"tokens_per_second": "tokens/s"}
"""Shown by a dashboard in its last line anyway."""


def how_long(seconds: float, steps: int, which: str = "the") -> str:
    """Say how long some steps will take, as in "about 12 min for the 100 steps, until 14:20".

    `seconds` are those of all of them; `which` is their article.
    """
    until = time.strftime("%H:%M", time.localtime(time.time() + seconds))
    return f"about {format_duration(seconds)} for {which} {steps:,} steps, until {until}"


class _Console(Console):
    """A console whose closed output does not end the run, as when Ctrl-C ends a `| tee`."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class TrainingProgress:
    """Progress of a run: a dashboard on a terminal, one plain line per update elsewhere (files, pipes, CI)."""

    SHOWN: ClassVar = {"reward": "reward", "kl": "kl", "lm_loss": "loss", "tokens_per_second": "tokens/s", **_OF_ASYNC}

    def __init__(
        self,
        total_steps: int,
        *,
        title: str = "training",
        console: Console | None = None,
        step: int = 0,
        shown: Mapping[str, str] | None = None,
    ) -> None:
        """step: how many steps are done already (after a resume). shown: metric → label, in place of `SHOWN`."""
        if total_steps < 1:
            raise ValueError(f"total_steps: expected an integer >= 1, got {total_steps}")
        self.total_steps, self.title = total_steps, title
        self.shown = dict(self.SHOWN if shown is None else shown)
        # standard output belongs to results (--json), so progress goes to standard error
        self.console = console or _Console(file=sys.stderr)
        self.plain = not self.console.is_terminal or bool(os.environ.get("CI"))
        self._began, self._first_step = time.monotonic(), step
        self._last: tuple[int, float] | None = None  # the step before and its time, until there is an estimate
        self._has_estimate = False
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
        )
        self._task = self._bar.add_task(title, total=total_steps, completed=step)
        # what a run shows beyond the usual comes first: it is why it was asked for
        self._dashboard = Dashboard(
            {**{name: label for name, label in self.shown.items() if name not in WATCHED | _FACTS}, **WATCHED}
        )
        self._live = Live(
            Group(self._dashboard, self._bar),
            console=self.console,
            refresh_per_second=4,
            redirect_stdout=sys.stdout.isatty(),
        )

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """`step` steps are done; those metrics that are to be shown and are there are shown.

        After the second of them a line says how long the others will take, if that is more than `LONG_S`.
        """
        self._estimate(step, metrics)
        if not self.plain:
            self._dashboard.update(metrics)
            self._bar.update(self._task, completed=step)
            return
        shown = [f"{label} {format_score(metrics[name])}" for name, label in self.shown.items() if name in metrics]
        rate = (time.monotonic() - self._began) / max(1, step - self._first_step)
        line = f"{self.title} {step}/{self.total_steps}  {'  '.join(shown)}  {rate:.2f} s/step"
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _estimate(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Say once how long the run will take. The first step of a process is left out: it compiles and allocates."""
        now, before = time.monotonic(), self._last
        self._last = step, now
        if before is None or self._has_estimate or step <= before[0]:
            return
        self._has_estimate = True
        left = (now - before[1]) / (step - before[0]) * (self.total_steps - step)
        if left <= LONG_S:
            return
        peak = metrics.get("peak_memory_bytes")
        memory = "" if peak is None else f"; peak memory so far {float(peak) / 1e9:.2f} GB"
        line = f"{how_long(left, self.total_steps - step, 'the other')}{memory}"
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> TrainingProgress:
        if not self.plain:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.plain:
            self._live.stop()
