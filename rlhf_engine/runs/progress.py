"""Progress of a run on a terminal, the signals that end it, and the last lines of its command."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from array import array
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from rlhf_engine.runs.folder import RECORD_FILE
from rlhf_engine.runs.headline import headlines
from rlhf_engine.runs.metrics import read_columns
from rlhf_engine.runs.text import format_duration, format_score, format_value

WATCHED = {
    "reward": "reward", "eval/reward": "reward, held out", "kl": "KL, nats per answer",
    "entropy": "entropy, nats per token", "clip_ratio": "clipped ratios",
    "value/explained_variance": "explained variance", "completions/mean_length": "tokens per answer",
    "lm_loss": "cross-entropy", "reward_loss": "loss", "reward_accuracy": "accuracy",
    "eval/accuracy": "accuracy, held out", "eval/auc": "AUC, held out",
}  # fmt: skip
"""metric → label of the rows, in this order; a run has the rows that it has numbers for."""
PHASES = {"seconds/generate": "generate", "seconds/score": "score", "seconds/update": "update"}
COURSE_WIDTH = 36  # columns of a course
_BLOCKS = "▁▂▃▄▅▆▇█"


def course(values: array[float]) -> str:
    """A number over the whole run, as at most `COURSE_WIDTH` block elements between the least and the most."""
    numbers = np.array(values.tolist())  # another thread appends, which an array that numpy has a view of refuses
    means = np.array([part.mean() for part in np.array_split(numbers, min(len(numbers), COURSE_WIDTH))])
    height = (means - means.min()) / (np.ptp(means) or 1.0)
    return "".join(_BLOCKS[int(x * (len(_BLOCKS) - 1) + 0.5)] for x in height)


LONG_S = 60.0  # seconds from which on a run says after two steps how long the others will take


class _Console(Console):
    """A console whose closed output does not end the run, as when Ctrl-C ends a `| tee`."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


def _shown(metrics: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    """Metrics in a line, by their labels."""
    return "  ".join(f"{label} {format_score(metrics[name])}" for name, label in labels.items() if name in metrics)


def counting_bar(console: Console, *columns: ProgressColumn, disable: bool = False, by_itself: bool = True) -> Progress:
    """A bar for each task with its name and how much of it is done, before other columns."""
    first = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*first, *columns, console=console, disable=disable, auto_refresh=by_itself)


class TrainingProgress:
    """Progress of a run: a dashboard on a terminal, one plain line per update elsewhere (files, pipes, CI)."""

    SHOWN: ClassVar[dict[str, str]] = {
        "reward": "reward", "kl": "kl", "lm_loss": "loss", "tokens_per_second": "tokens/s", "staleness/max": "age",
        "async/ready_steps": "ready", "async/generator_utilisation": "generator",
        "async/learner_utilisation": "learner", "async/speedup": "speed-up", "async/speedup_bound": "of at most",
    }  # fmt: skip
    """Metrics of a plain line, with their labels; the last ones are of answers that are drawn beside the updates."""

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
        self._has_estimate, self._chosen = False, ""
        self._bar = counting_bar(self.console, TimeElapsedColumn(), TimeRemainingColumn())
        self._task = self._bar.add_task(title, total=total_steps, completed=step)
        # what a run shows beyond the usual comes first: it is why it was asked for; the last line has the speed
        beyond = {name: self.shown[name] for name in self.shown if name not in (*WATCHED, "tokens_per_second")}
        self._watched = {**beyond, **WATCHED}
        self._courses: dict[str, array[float]] = {}
        self._phases: dict[str, float] = {}
        self._latest: dict[str, Any] = {}
        self._live = Live(
            get_renderable=self._dashboard,
            console=self.console,
            refresh_per_second=4,
            redirect_stdout=sys.stdout.isatty(),
        )

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show the metrics of `step`; after the second one also how long the others take, if more than `LONG_S`."""
        self._estimate(step, metrics)
        if (chosen := describe_budgets(metrics)) not in ("", self._chosen):
            self._chosen = chosen
            self.console.print(chosen, markup=False, highlight=False, soft_wrap=True)
        if not self.plain:
            self._remember(metrics)
            self._bar.update(self._task, completed=step)
            return
        rate = (time.monotonic() - self._began) / max(1, step - self._first_step)
        line = f"{self.title} {step}/{self.total_steps}  {_shown(metrics, self.shown)}  {rate:.2f} s/step"
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
        until = time.strftime("%H:%M", time.localtime(time.time() + left))
        line = f"about {format_duration(left)} for the other {self.total_steps - step:,} steps, until {until}"
        if (peak := metrics.get("peak_memory_bytes")) is not None:
            line += f"; peak memory so far {float(peak) / 1e9:.2f} GB"
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _remember(self, metrics: Mapping[str, Any]) -> None:
        """Take what the dashboard shows. What is no finite number has no place in a course, and is shown as it is."""
        self._latest.update(metrics)
        for name in self._watched:
            value = metrics.get(name)
            if isinstance(value, (int, float)) and abs(value) < float("inf"):
                self._courses.setdefault(name, array("d")).append(float(value))
        for name, label in PHASES.items():
            if isinstance(metrics.get(name), (int, float)):
                self._phases[label] = self._phases.get(label, 0.0) + float(metrics[name])

    def _dashboard(self) -> Group:
        """A row per number, as many as leave room for the bar; shares of phases in the time, memory, speed; the bar."""
        names = [name for name in self._watched if name in self._courses]
        if not names:
            return Group(self._bar)
        table = Table(box=None, padding=(0, 2, 0, 0))
        table.add_column("")
        table.add_column("now", justify="right")
        table.add_column("so far", no_wrap=True)
        for name in names[: max(1, self.console.size.height - 5)]:
            blocks = Text(course(self._courses[name]), style="cyan")
            table.add_row(self._watched[name], format_value(self._latest[name]), blocks)
        phases = dict(self._phases)  # another thread may add to it
        total = sum(phases.values())
        facts = [f"{label} {100 * s / total:.0f} %" for label, s in phases.items() if total > 0]
        if (peak := self._latest.get("peak_memory_bytes")) is not None:
            facts.append(f"peak {float(peak) / 1e9:.2f} GB")
        if (speed := self._latest.get("tokens_per_second")) is not None:
            facts.append(f"{format_value(float(speed))} tokens/s")
        return Group(table, Text("   ".join(facts), style="dim", overflow="ellipsis", no_wrap=True), self._bar)

    def __enter__(self) -> TrainingProgress:
        if not self.plain:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if not self.plain:
            self._live.stop()


class SweepProgress(contextlib.ExitStack):
    """Progress of several runs: a line for each on a terminal, one per step elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self._console = _Console(file=sys.stderr, highlight=False, soft_wrap=True)
        self._plain = not self._console.is_terminal or bool(os.environ.get("CI"))
        columns = (TextColumn("{task.fields[shown]}"), TimeRemainingColumn())
        # drawn at each step, not by a thread: a sweep forks
        self._bar = counting_bar(self._console, *columns, disable=self._plain, by_itself=False)
        self._names: dict[str, TaskID] = {}

    def __enter__(self) -> SweepProgress:
        self.enter_context(self._bar)
        return self

    def note(self, name: str, total: int, step: int, metrics: Mapping[str, Any]) -> None:
        """Show a step of so many that a run has made."""
        shown = _shown(metrics, TrainingProgress.SHOWN)
        if name not in self._names:
            self._names[name] = self._bar.add_task(escape(name), total=total, shown="")
        self._bar.update(self._names[name], completed=step, shown=escape(shown), refresh=True)
        if self._plain:
            self.tell(f"{name} {step}/{total}  {shown}")

    def tell(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, markup=False)


def describe_budgets(metrics: Mapping[str, Any]) -> str:
    """Say what a run has chosen by its free memory; empty where it has not."""
    names = {"micro_batch_tokens": "micro-batches", "scoring_tokens": "scoring"}
    most = [f"{label} of up to {int(metrics[name]):,} tokens" for name, label in names.items() if name in metrics]
    return f"by free memory: {', '.join(most)}" if most else ""


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_SHOW_CURSOR = b"\x1b[?25h"


class StopSignals(contextlib.ExitStack):
    """While entered, the first signal of a kind is a request, `asked`, and the second ends the process."""

    def __init__(self) -> None:
        super().__init__()
        self.received: signal.Signals | None = None  # the first one, if any came
        self._seen: set[int] = set()

    def asked(self) -> bool:
        """Whether the run is to stop."""
        return self.received is not None

    @property
    def exit_code(self) -> int:
        """128 and the signal's number, as a shell has it; 143, SIGTERM's, where another rank was asked."""
        return 128 + (self.received or signal.SIGTERM)

    def __enter__(self) -> StopSignals:
        handled = [s for s in _SIGNALS if s.name != "SIGHUP" or signal.getsignal(s) != signal.SIG_IGN]
        for number in handled:
            self.callback(signal.signal, number, signal.signal(number, self._handle))
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number in self._seen:
            if sys.stderr.isatty():
                _tell(_SHOW_CURSOR)  # a progress bar hides it
            os._exit(128 + number)
        self._seen.add(number)
        self.received = self.received or signal.Signals(number)
        _tell(b"\nstopping after this step, with a checkpoint; once more to stop at once\n")


def _tell(text: bytes) -> None:
    """Write to standard error, if anybody reads it: Ctrl-C ends a `| tee` as well. A signal may interrupt a print."""
    with contextlib.suppress(OSError):
        os.write(2, text)


TOLD = ("reward", "eval/reward", "kl", "lm_loss", "reward_loss")  # of `WATCHED`, what is told as first → last
_JUDGED = ("Accuracy, held out", "Area under the ROC curve, held out")
"""Headline numbers of a reward model that are told in a line each, with the steps that they are of."""


def exit_summary(metrics_jsonl: str | Path, places: Mapping[str, str | Path]) -> str:
    """Lines of text: numbers of the run, first → last, then what lies where. places: name → path or command."""
    columns = read_columns(metrics_jsonl)
    told = [f"{columns.steps[-1]:,} steps"] if columns.steps else []
    for name in TOLD:
        values = [format_score(value) for _, value in columns.numbers(name)]
        if values:
            told.append(f"{WATCHED[name]} {' → '.join([values[0], *values[1:][-1:]])}")
    if peaks := [value for _, value in columns.numbers("peak_memory_bytes")]:
        told.append(f"peak memory {max(peaks) / 1e9:.2f} GB")
    width = max(map(len, places)) + 1
    record = Path(metrics_jsonl).with_name(RECORD_FILE)
    known = headlines(columns, json.loads(record.read_text()), None) if columns.steps and record.is_file() else []
    judged = [f"{h.label} {h.text} ({h.note})" for h in known if h.label in _JUDGED]
    return "\n".join(["; ".join(told), *judged, *(f"{name:{width}} {place}" for name, place in places.items())])
