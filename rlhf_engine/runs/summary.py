"""Last lines of a command when its run is over: how the numbers went, and where everything lies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rlhf_engine.runs.dashboard import WATCHED
from rlhf_engine.runs.metrics import read_metrics
from rlhf_engine.runs.text import format_score

TOLD = ("reward", "eval/reward", "kl", "lm_loss", "reward_loss", "eval/accuracy", "eval/auc")
"""Of `WATCHED`, what is told as first → last."""


def exit_summary(metrics_jsonl: str | Path, places: Mapping[str, str | Path]) -> str:
    """Lines of text: numbers of the run, first → last, then what lies where. places: name → path or command."""
    rows = read_metrics(metrics_jsonl)
    told = [f"{rows[-1]['step']:,} steps"] if rows else []
    for name in TOLD:
        values = [row[name] for row in rows if row.get(name) is not None]
        if len(values) > 1:
            told.append(f"{WATCHED[name]} {format_score(values[0])} → {format_score(values[-1])}")
        elif values:
            told.append(f"{WATCHED[name]} {format_score(values[0])}")
    peaks = [float(row["peak_memory_bytes"]) for row in rows if row.get("peak_memory_bytes") is not None]
    if peaks:
        told.append(f"peak memory {max(peaks) / 1e9:.2f} GB")
    width = max(map(len, places)) + 1
    return "\n".join(["; ".join(told), *(f"{name:{width}} {place}" for name, place in places.items())])
