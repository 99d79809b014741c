"""Last lines of a command when its run is over: how the numbers went, and where everything lies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from rlhf_engine.runs.dashboard import WATCHED
from rlhf_engine.runs.folder import RECORD_FILE
from rlhf_engine.runs.headline import headlines
from rlhf_engine.runs.metrics import read_metrics
from rlhf_engine.runs.text import format_score

TOLD = ("reward", "eval/reward", "kl", "lm_loss", "reward_loss")
"""Of `WATCHED`, what is told as first → last."""
_JUDGED = ("Accuracy, held out", "Area under the ROC curve, held out")
"""Headline numbers of a reward model that are told in a line each, with the steps that they are of."""


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
    record = Path(metrics_jsonl).with_name(RECORD_FILE)
    known = headlines(rows, json.loads(record.read_text()), None) if rows and record.is_file() else []
    judged = [f"{h.label} {h.text} ({h.note})" for h in known if h.label in _JUDGED]
    return "\n".join(["; ".join(told), *judged, *(f"{name:{width}} {place}" for name, place in places.items())])
