"""Headline numbers of a run, in the order in which a person wants them, by the kind of run.

A number of training is a mean over the first and over the last tenth of the logged steps, of 20 at most: single steps
are noisy. A held-out number is that of the first and of the last evaluation. A reward model keeps the best one's model,
so that its numbers are those of that step once the run is done.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from statistics import fmean
from typing import Any, NamedTuple

from rlhf_engine.runs.metrics import Columns
from rlhf_engine.runs.text import format_duration, format_score, format_value

MOST_AVERAGED = 20  # most logged steps that a number of training is a mean of
RL, REWARD_MODEL, SUPERVISED = "rl", "reward model", "supervised"


class Headline(NamedTuple):
    """One number: its label and unit, where it stands now, and a note on where it comes from."""

    label: str
    unit: str
    value: float  # the number now, by which runs are compared
    text: str  # the number as it is shown: first → now where both are known
    note: str
    better: int  # 1 where more is better, -1 where less is, 0 where neither is
    is_minor: bool = False
    """Whether it matters only beside runs that have nothing better: the run has a held-out number as well."""


class _Ending(NamedTuple):
    label: str
    unit: str
    held_out: str | None  # metric of the held-out rows or prompts
    training: str | None  # metric of the rows or answers that are trained on
    better: int


_OUTCOMES = {
    RL: (
        _Ending("Reward", "score per answer", "eval/reward", "reward", 1),
        _Ending("KL to the reference", "nats per answer", "eval/kl", "kl", 0),
    ),
    REWARD_MODEL: (
        _Ending("Accuracy", "fraction of rows", "eval/accuracy", "reward_accuracy", 1),
        _Ending("Margin", "reward", "eval/margin", "reward_margin", 1),
        _Ending("Area under the ROC curve", "0.5 is chance", "eval/auc", None, 1),
        _Ending("Loss", "nats per row", "eval/loss", "reward_loss", -1),
    ),
    SUPERVISED: (
        _Ending("Cross-entropy", "nats per token", None, "lm_loss", -1),
        _Ending("Reward head's accuracy", "fraction of pairs", None, "reward_accuracy", 1),
    ),
}


def kind_of_run(names: Set[str]) -> str | None:
    """Kind of a run by the metrics that it has; None for one of no known kind."""
    if names & {"reward", "kl"}:
        return RL
    if "lm_loss" in names:
        return SUPERVISED
    return REWARD_MODEL if names & {"reward_loss", "eval/accuracy"} else None


def headlines(columns: Columns, record: Mapping[str, Any], state: str | None) -> list[Headline]:
    """Headline numbers of a run from its metrics and run.json; `state` is running, done, stopped or None."""
    kind = kind_of_run(columns.names.keys())
    shown = []
    for outcome in _OUTCOMES.get(kind or "", ()):
        held_out, training = _held_out(outcome, columns, record), _training(outcome, columns)
        shown += [] if held_out is None else [held_out]
        shown += [] if training is None else [training._replace(is_minor=held_out is not None)]
    if kind == SUPERVISED and shown and shown[0].value < 100:
        perplexity = math.exp(shown[0].value)
        text = format_value(perplexity)
        shown.insert(1, Headline("Perplexity", "of a token", perplexity, text, shown[0].note, -1))
    return [*shown, _steps(columns, total_steps(record), state), *_resources(columns, kind)]


def total_steps(record: Mapping[str, Any]) -> int | None:
    """Steps that a run is to make, where its record says so."""
    total = record.get("total_steps", record.get("config", {}).get("max_steps"))
    return total if isinstance(total, int) else None


def _held_out(outcome: _Ending, columns: Columns, record: Mapping[str, Any]) -> Headline | None:
    if outcome.held_out is None:
        return None
    test = outcome.held_out.replace("eval/", "test/")  # of rows that choose no step, where there are such
    name = test if columns.numbers(test) else outcome.held_out
    points = dict(columns.numbers(name))
    if not points:
        return None
    first, last = min(points), max(points)
    kept = record.get("result", {}).get("final_step")
    now = kept if kept in points else last
    steps = dict.fromkeys((first, now))
    text = " → ".join(format_score(points[step]) for step in steps)
    note = f"step {' → '.join(f'{step:,}' for step in steps)}{', which was kept' if now == kept else ''}"
    if now != last:
        note += f"; last, step {last:,}: {format_score(points[last])}"
    best = max(points, key=lambda step: outcome.better * points[step])
    if outcome.better and best not in steps:
        note += f"; best, step {best:,}: {format_score(points[best])}"
    edges = [dict(columns.numbers(f"{name}_{edge}")).get(now) for edge in ("low", "high")]
    if None not in edges:
        text += f" [{', '.join(map(format_score, edges))}]"
        note += "; [low, high]: 95 % by group"
    if kept is not None and name != test:
        note += "; the same rows chose the step"
    return Headline(f"{outcome.label}, held out", outcome.unit, points[now], text, note, outcome.better)


def _training(outcome: _Ending, columns: Columns) -> Headline | None:
    values = [value for _, value in columns.numbers(outcome.training)]
    if not values:
        return None
    n = max(1, min(MOST_AVERAGED, len(values) // 10))
    first, now = fmean(values[:n]), fmean(values[-n:])
    note = "last step" if n == 1 else f"means of {n} steps"
    text = format_score(now) if len(values) == 1 else f"{format_score(first)} → {format_score(now)}"
    return Headline(f"{outcome.label}, training", outcome.unit, now, text, note, outcome.better)


def _steps(columns: Columns, total: int | None, state: str | None) -> Headline:
    done = columns.steps[-1]
    text = f"{done:,}" if total is None else f"{done:,} of {total:,}"
    seconds = [value for _, value in columns.numbers("seconds/step")][-MOST_AVERAGED:]
    note = state or ""
    if state == "running" and total is not None and seconds and total > done:
        note = f"running, about {format_duration(fmean(seconds) * (total - done))} of steps left"
    return Headline("Steps", "", done, text, note, 0)


def _resources(columns: Columns, kind: str | None) -> list[Headline]:
    resources = []
    seconds = [value for _, value in columns.numbers("seconds/step")]
    if seconds:
        steps = columns.steps[-1] - columns.numbers("seconds/step")[0][0] + 1
        note = f"mean; all steps {format_duration(fmean(seconds) * steps)}"
        resources.append(Headline("Time of a step", "seconds", fmean(seconds), format_value(fmean(seconds)), note, -1))
    speeds = [value for _, value in columns.numbers("tokens_per_second")][-MOST_AVERAGED:]
    if speeds:
        label = "Generation" if kind == RL else "Training speed"
        shown = format_value(fmean(speeds))
        resources.append(
            Headline(label, "tokens per second", fmean(speeds), shown, f"mean of the last {len(speeds)}", 1)
        )
    peaks = [value / 1e9 for _, value in columns.numbers("peak_memory_bytes")]
    if peaks:
        resources.append(Headline("Peak memory", "GB", max(peaks), f"{max(peaks):.2f}", "main process", -1))
    return resources
