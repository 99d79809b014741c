"""Curves of a run's metrics, as a picture.

    smoothed_t = Σ_{s≤t} a^{t−s} x_s / Σ_{s≤t} a^{t−s}        a = 0.8

The smoothed line is the exponential mean with its bias at the start taken out; the raw line stays visible
behind it. Values that are null in the metrics file (NaN or infinite when written) are left out.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rlhf_engine.runs.metrics import Columns, read_columns, write_atomic

SMOOTHING = 0.8
SMOOTHED_FROM = 20  # points


class Panel(NamedTuple):
    """One plot: its title, the label of its y axis, and (metric's name, label of the line) per line."""

    title: str
    unit: str
    lines: tuple[tuple[str, str], ...]


_OUTCOMES = (
    Panel("Reward", "score per answer", (("reward", "training"), ("eval/reward", "held out"))),
    Panel("KL to the reference", "nats per answer", (("kl", "training"), ("eval/kl", "held out"))),
    Panel("Cross-entropy", "nats per token", (("lm_loss", "training"),)),
    Panel(
        "Reward model's accuracy",
        "fraction of rows",
        (
            ("reward_accuracy", "training"),
            ("eval/accuracy", "held out"),
            ("eval/balanced_accuracy", "held out, balanced"),
        ),
    ),
    Panel("Reward model's margin", "reward", (("reward_margin", "training"), ("eval/margin", "held out"))),
    Panel("Reward model's loss", "nats per row", (("reward_loss", "training"), ("eval/loss", "held out"))),
    Panel("Area under the ROC curve", "0.5 is chance", (("eval/auc", "held out"),)),
    Panel("Calibration", "0 is perfect", (("eval/calibration_error", "expected error"), ("eval/brier", "Brier"))),
)
"""Panels of what a run is for, of whichever kind it is."""
PANELS = (
    *_OUTCOMES,
    Panel("Entropy", "nats per token", (("entropy", "update"), ("entropy_rollout", "rollout"))),
    Panel("Clipped ratios", "fraction of tokens", (("clip_ratio", "policy"), ("value/clip_ratio", "value"))),
    Panel("KL of the update", "approximate, nats per token", (("approx_kl", "policy"),)),
    Panel("Value loss", "squared error", (("value/loss", "value"),)),
    Panel("Explained variance", "1 is perfect", (("value/explained_variance", "value"),)),
    Panel("Answer length", "tokens", (("completions/mean_length", "mean"), ("completions/max_length", "longest"))),
    Panel(
        "Rollout against training",
        "largest difference of a log-prob",
        (("mismatch/rollout_max", "scoring"), ("mismatch/update_max", "update")),
    ),
    Panel("Words that a token is drawn among", "mean number of words", (("support/mean", "rollout"),)),
    Panel("Prompts that answers share", "fraction of tokens saved", (("shared_prompt_ratio", "scoring"),)),
    Panel("Turns and calls of tools", "per answer", (("turns/mean", "turns"), ("tools/calls", "calls"))),
    Panel("Calls that failed", "fraction", (("tools/failures", "failed"),)),
    Panel("Age of the answers", "updates", (("staleness/mean", "mean"), ("staleness/max", "most"))),
    Panel("KL of the present to the drawing policy", "nats per token", (("staleness/k3", "k3"),)),
    Panel(
        "At work",
        "share of the time",
        (("async/generator_utilisation", "generator"), ("async/learner_utilisation", "learner")),
    ),
    Panel("Speed", "tokens per second", (("tokens_per_second", "all"),)),
)


def has_signal(panel: Panel, lines: Sequence[Sequence[float]]) -> bool:
    """Whether a panel with these numbers is drawn: one of outcomes always, others unless each line is flat."""
    if panel in _OUTCOMES:
        return any(lines)
    return any(len(line) in (1, 2) or len(set(line)) > 1 for line in lines)


def smooth(values: Sequence[float], decay: float = SMOOTHING) -> list[float]:
    """Exponential mean of what came so far, without the bias towards 0 at the start."""
    total = weight = 0.0
    smoothed = []
    for value in values:
        total, weight = decay * total + value, decay * weight + 1.0
        smoothed.append(total / weight)
    return smoothed


def plot_curves(metrics_jsonl: str | Path, png_path: str | Path) -> list[str]:
    """Draw every panel of `PANELS` that has a signal; their titles. On a full disk there is only a warning."""
    # inside: matplotlib takes half a second to import, which commands without a plot need not wait for
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    read = read_columns(metrics_jsonl)
    panels = ((panel, _lines(panel, read)) for panel in PANELS)
    drawn = [(panel, lines) for panel, lines in panels if has_signal(panel, [values for _, _, values in lines])]
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
    png_path = Path(png_path)
    try:
        picture = io.BytesIO()
        figure.savefig(picture, dpi=120, format="png")
        write_atomic(png_path, picture.getvalue())
    except OSError as error:
        warnings.warn(f"{png_path}: the curves were not drawn: {error.strerror}", stacklevel=2)
    return [panel.title for panel, _ in drawn]


def _lines(panel: Panel, columns: Columns) -> list[tuple[str, list[int], list[float]]]:
    """(label, steps, values) of the panel's lines that have at least one number."""
    lines = []
    for name, label in panel.lines:
        if points := columns.numbers(name):
            lines.append((label, [step for step, _ in points], [value for _, value in points]))
    return lines
