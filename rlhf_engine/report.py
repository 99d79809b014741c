"""What a person sees of a run: curves, sample answers, a summary table, and progress while it lasts.

    smoothed_t = Σ_{s≤t} a^{t−s} x_s / Σ_{s≤t} a^{t−s}        a = 0.8

The smoothed line is the exponential mean with its bias at the start taken out; the raw line stays visible
behind it. Values that are null in the metrics file (NaN or infinite when written) are left out.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, NamedTuple

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from rlhf_engine.training.metrics import read_metrics

SMOOTHING = 0.8
SMOOTHED_FROM = 20  # points


class Panel(NamedTuple):
    """One plot: its title, the label of its y axis, and (metric's name, label of the line) per line."""

    title: str
    unit: str
    lines: tuple[tuple[str, str], ...]


PANELS = (
    Panel("Reward", "score per answer", (("reward", "training"), ("eval/reward", "held out"))),
    Panel("KL to the reference", "nats per answer", (("kl", "training"), ("eval/kl", "held out"))),
    Panel("Entropy", "nats per token", (("entropy", "update"), ("entropy_rollout", "rollout"))),
    Panel("Clipped ratios", "fraction of tokens", (("clip_ratio", "policy"), ("value/clip_ratio", "value"))),
    Panel("KL of the update", "approximate, nats per token", (("approx_kl", "policy"),)),
    Panel("Value loss", "squared error", (("value/loss", "value"),)),
    Panel("Explained variance", "1 is perfect", (("value/explained_variance", "value"),)),
    Panel(
        "Answer length",
        "tokens",
        (("completions/mean_length", "mean"), ("completions/max_length", "longest")),
    ),
    Panel("Generation speed", "tokens per second", (("tokens_per_second", "rollout"),)),
    Panel("Age of the answers", "updates", (("staleness/mean", "mean"), ("staleness/max", "most"))),
    Panel("KL of the present to the drawing policy", "nats per token", (("staleness/k3", "k3"),)),
    Panel(
        "At work",
        "share of the time",
        (("async/generator_utilisation", "generator"), ("async/learner_utilisation", "learner")),
    ),
    Panel("Cross-entropy", "nats per token", (("lm_loss", "training"),)),
    Panel("Reward model's loss", "nats per row", (("reward_loss", "training"), ("eval/loss", "held out"))),
    Panel(
        "Reward model's accuracy",
        "fraction of rows",
        (
            ("reward_accuracy", "training"),
            ("eval/accuracy", "held out"),
            ("eval/balanced_accuracy", "held out, balanced"),
        ),
    ),
    Panel("Area under the ROC curve", "0.5 is chance", (("eval/auc", "held out"),)),
    Panel("Reward model's margin", "reward", (("reward_margin", "training"), ("eval/margin", "held out"))),
    Panel("Calibration", "0 is perfect", (("eval/calibration_error", "expected error"), ("eval/brier", "Brier"))),
)


ASYNC_SHOWN = {
    "staleness/max": "age",
    "async/ready_steps": "ready",
    "async/generator_utilisation": "generator",
    "async/learner_utilisation": "learner",
    "async/speedup": "speed-up",
    "async/speedup_bound": "of at most",
}
"""What a run's line of progress shows as well where answers are drawn beside the updates."""


def smooth(values: Sequence[float], decay: float = SMOOTHING) -> list[float]:
    """Exponential mean of what came so far, without the bias towards 0 at the start."""
    total = weight = 0.0
    smoothed = []
    for value in values:
        total, weight = decay * total + value, decay * weight + 1.0
        smoothed.append(total / weight)
    return smoothed


def plot_curves(metrics_jsonl: str | Path, png_path: str | Path) -> list[str]:
    """Draw every panel of `PANELS` that the metrics file has data for; returns their titles.

    A line of fewer than 20 points (evaluations, short runs) is drawn as it is: smoothed, it would only lag.
    """
    # inside: matplotlib takes half a second to import, which commands without a plot need not wait for
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    rows = read_metrics(metrics_jsonl)
    drawn = [(panel, lines) for panel in PANELS if (lines := _lines(panel, rows))]
    if not drawn:
        raise ValueError(f"metrics_jsonl: expected lines with known metrics in {str(metrics_jsonl)!r}, got none")
    columns = min(3, len(drawn))
    n_rows = -(-len(drawn) // columns)
    figure = Figure(figsize=(4.4 * columns, 3.1 * n_rows + 0.3), layout="constrained")
    FigureCanvasAgg(figure)
    smoothed_any = False
    for i, (panel, lines) in enumerate(drawn):
        axes = figure.add_subplot(n_rows, columns, i + 1)
        for j, (label, steps, values) in enumerate(lines):
            colour = f"C{j}"
            if len(values) >= SMOOTHED_FROM:
                smoothed_any = True
                axes.plot(steps, values, color=colour, alpha=0.3, linewidth=1)
                axes.plot(steps, smooth(values), color=colour, linewidth=1.8, label=label)
            else:
                axes.plot(steps, values, "o-", color=colour, markersize=3.5, label=label)
        axes.set_title(panel.title, fontsize=11)
        axes.set_ylabel(panel.unit, fontsize=9)
        axes.set_xlabel("step", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.grid(alpha=0.25)
        if len(lines) > 1:
            axes.legend(fontsize=8, frameon=False)
    if smoothed_any:
        figure.suptitle(f"pale: raw; solid: exponential mean, decay {SMOOTHING:g}", fontsize=9, color="0.35")
    Path(png_path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png_path, dpi=120)
    return [panel.title for panel, _ in drawn]


def samples_markdown(
    prompts: Sequence[str],
    before: Sequence[str],
    after: Sequence[str],
    rewards_before: Sequence[float | None] | None = None,
    rewards_after: Sequence[float | None] | None = None,
    *,
    title: str = "Answers before and after training",
) -> str:
    """Answers to the same prompts, as markdown; texts are fenced, so nothing in them becomes markup."""
    for name, values in {
        "before": before,
        "after": after,
        "rewards_before": rewards_before,
        "rewards_after": rewards_after,
    }.items():
        if values is not None and len(values) != len(prompts):
            raise ValueError(f"{name}: expected {len(prompts)} entries, one per prompt, got {len(values)}")
    parts = [f"# {title}"]
    for i, prompt in enumerate(prompts):
        parts += [f"## {i + 1}", _fenced(prompt)]
        for name, texts, rewards in (("Before", before, rewards_before), ("After", after, rewards_after)):
            note = "" if rewards is None else f" (reward {format_value(rewards[i])})"
            parts += [f"**{name}**{note}", _fenced(texts[i]) if texts[i].strip() else "*an empty answer*"]
    return "\n\n".join(parts) + "\n"


def summary_table(title: str, columns: Sequence[str], rows: Mapping[str, Sequence[Any]]) -> Table:
    """A rich table: one row per name, its values under `columns`, numbers at a readable precision."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    for name, values in rows.items():
        if len(values) != len(columns):
            raise ValueError(f"rows: {name}: expected {len(columns)} values, one per column, got {len(values)}")
        table.add_row(name, *(format_value(value) for value in values))
    return table


def format_value(value: Any) -> str:
    """A number with three decimals or thousands separated; None as a dash; anything else as text."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3f}" if abs(value) >= 0.01 or value == 0 else f"{value:.2e}"


class TrainingProgress:
    """Progress of a run: a live bar on a terminal, one plain line per update elsewhere (files, pipes, CI)."""

    SHOWN: ClassVar = {"reward": "reward", "kl": "kl", "lm_loss": "loss", "tokens_per_second": "tokens/s"}

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
        self.console = console or Console(file=sys.stderr)
        self.plain = not self.console.is_terminal or bool(os.environ.get("CI"))
        self._began, self._first_step = time.monotonic(), step
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=self.plain,
        )
        self._task = self._progress.add_task(title, total=total_steps, completed=step, numbers="")

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """`step` steps are done; those metrics that are to be shown and are there are shown."""
        shown = [f"{label} {format_value(metrics[name])}" for name, label in self.shown.items() if name in metrics]
        numbers = "  ".join(shown)
        if self.plain:
            rate = (time.monotonic() - self._began) / max(1, step - self._first_step)
            line = f"{self.title} {step}/{self.total_steps}  {numbers}  {rate:.2f} s/step"
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            self._progress.update(self._task, completed=step, numbers=numbers)

    def __enter__(self) -> TrainingProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


def _lines(panel: Panel, rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[int], list[float]]]:
    """(label, steps, values) of the panel's lines that have at least one number."""
    found = []
    for name, label in panel.lines:
        points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        if points:
            found.append((label, [step for step, _ in points], [float(value) for _, value in points]))
    return found


def _fenced(text: str) -> str:
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"
