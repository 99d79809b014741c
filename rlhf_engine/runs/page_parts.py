"""Values for the templates of pages: the comparison of runs, pictures, and the page around them.

Every text of a run is escaped by jinja2. A page runs one script, by its hash, and loads nothing.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import resources
from typing import Any

import jinja2

from rlhf_engine.runs.curves import Panel
from rlhf_engine.runs.headline import Headline
from rlhf_engine.runs.text import format_value, show_controls

COLOURS = ("#2f6fde", "#d9590f", "#1c9a5b", "#a23bc4", "#b8860b", "#c2185b", "#00838f", "#8a6a5c")
"""Colours of runs, in their order; the script draws with the same."""
_PLACES = ("output_dir", "resume_from_checkpoint", "report_to")
"""Options that say where a run writes; they differ between any two."""
_FEW = 4
"""Most options that stand before the numbers in a comparison."""
_STYLES = (("", "solid"), ("7 4", "dashed"), ("2 3", "dotted"))

TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("rlhf_engine", "."),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters |= {"visible": show_controls, "number": format_value}
TEMPLATES.tests["contains"] = lambda texts, text: text in texts
TEMPLATES.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "allow_nan": False}


def render(
    template: str, scripts: Iterable[str], styles: Iterable[str], *, written: int, refresh: float | None, **values: Any
) -> str:
    """A page. scripts, styles: files of the package; written: time; refresh: seconds until it reads itself again."""
    script, style = ("\n".join(["", *map(_read, scripts)]), "".join(map(_read, styles)))
    return TEMPLATES.get_template(template).render(
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=style,
        written=datetime.fromtimestamp(written, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        refresh=None if refresh is None else f"{refresh:.0f}",
        **values,
    )


def _read(name: str) -> str:
    return resources.files("rlhf_engine").joinpath(name).read_text(encoding="utf-8")


def comparison(
    names: Sequence[str], configs: Sequence[Mapping[str, Any]], found: Sequence[Sequence[Headline]]
) -> dict[str, Any]:
    """Columns and rows of the table that compares runs: options in which they differ, then headline numbers.

    configs, found: options and headline numbers of each run.
    """
    options = differing_options(configs)
    by_label = [{h.label: h for h in one} for one in found]
    named = {h.label for one in found for h in one if not h.is_minor}
    shown = {h.label: h for one in found for h in one if h.label in named}
    best = {label: _best([one.get(label) for one in by_label], h.better) for label, h in shown.items()}

    def in_order(chosen: list[Any], reached: list[Any]) -> list[Any]:
        # a few options name a run; many would push its numbers out of sight
        return chosen + reached if len(options) <= _FEW else reached + chosen

    heads = [{"label": option, "is_option": True} for option in options]
    rows = [
        {
            "name": name,
            "colour": COLOURS[i % len(COLOURS)],
            "cells": in_order(
                [_option(configs[i][option]) for option in options],
                [_number(by_label[i].get(label), best[label]) for label in shown],
            ),
        }
        for i, name in enumerate(names)
    ]
    numbers = [{"label": h.label, "unit": h.unit, "is_option": False} for h in shown.values()]
    return {"columns": in_order(heads, numbers), "rows": rows}


def differing_options(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the options that all runs have, with values that differ, except for where a run writes."""
    shared = [name for name in configs[0] if all(name in config for config in configs)]
    return [name for name in shared if name not in _PLACES and len({repr(config[name]) for config in configs}) > 1]


def _best(found: Sequence[Headline | None], better: int) -> float | None:
    values = [h.value for h in found if h is not None]
    if not better or len(set(values)) < 2:
        return None
    return max(values) if better > 0 else min(values)


def _number(h: Headline | None, best: float | None) -> dict[str, Any]:
    if h is None:
        return {"text": "–", "sort": None, "is_best": False, "is_option": False}
    return {"text": format_value(h.value), "sort": repr(h.value), "is_best": h.value == best, "is_option": False}


def _option(value: Any) -> dict[str, Any]:
    sort = repr(float(value)) if isinstance(value, (int, float)) else None
    return {"text": "–" if value is None else str(value), "sort": sort, "is_best": False, "is_option": True}


def picture(panel: Panel, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Lines and marks of a panel's drawing, for browsers without JavaScript; None where no run has numbers for it."""
    width, height, left, bottom = 440, 200, 56, 20
    lines = [
        (i, dash, *run["curves"][name][:2])
        for i, run in enumerate(runs)
        for dash, (name, _) in enumerate(panel.lines)
        if name in run["curves"]
    ]
    if not lines:
        return None
    (x0, x1), (y0, y1) = (_range([v for line in lines for v in line[part]]) for part in (2, 3))

    def place(x: float, y: float) -> str:
        return f"{left + (width - left) * (x - x0) / (x1 - x0):.1f},{(height - bottom) * (y1 - y) / (y1 - y0):.1f}"

    drawn = [
        {
            "points": " ".join(map(place, xs, ys)),
            "colour": COLOURS[i % len(COLOURS)],
            "dash": _STYLES[dash][0],
        }
        for i, dash, xs, ys in lines
    ]
    marks = (
        (left - 4, 12, "end", format_value(y1)),
        (left - 4, height - bottom, "end", format_value(y0)),
        (left, height - 4, "start", format_value(round(x0))),
        (width, height - 4, "end", format_value(round(x1))),
    )
    key = "; ".join(f"{_STYLES[dash][1]}: {panel.lines[dash][1]}" for dash in sorted({line[1] for line in lines}))
    size = {"width": width, "height": height}
    return {"title": panel.title, "unit": panel.unit, "key": key, "lines": drawn, "marks": marks, **size}


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    pad = 0.5 * (abs(low) or 1.0) if high - low <= 1e-9 * max(abs(low), abs(high)) else 0.0
    return low - pad, high + pad
