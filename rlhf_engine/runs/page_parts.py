"""Parts of a page that need no JavaScript: headline numbers, the comparison of runs, a picture, answers.

Every text of a run passes `html.escape`.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rlhf_engine.runs.curves import Panel
from rlhf_engine.runs.headline import Headline
from rlhf_engine.runs.text import format_value, show_controls

COLOURS = ("#2f6fde", "#d9590f", "#1c9a5b", "#a23bc4", "#b8860b", "#c2185b", "#00838f", "#8a6a5c")
"""Colours of runs, in their order; the script draws with the same."""
_PLACES = ("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "report_to")
"""Options that say where a run writes; they differ between any two."""
_FEW = 4
"""Most options that stand before the numbers in a comparison."""
_DASHES = ("", "7 4", "2 3")


def policy(script: str) -> str:
    """Element of a page's head that lets the page run this script alone and load nothing."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:"
    return f"""<meta http-equiv="Content-Security-Policy" content="{allowed}; base-uri 'none'; form-action 'none'">"""


def cards(found: Sequence[Headline]) -> str:
    """Headline numbers of one run, each as a card."""
    return (
        '<dl id="headline">'
        + "".join(
            f'<div><dt>{escape(h.label)} <span class="unit">{escape(h.unit)}</span></dt>'
            f'<dd class="figure">{escape(h.text)}</dd><dd class="unit">{escape(h.note)}</dd></div>'
            for h in found
            if not h.is_minor
        )
        + "</dl>"
    )


def comparison(names: Sequence[str], configs: Sequence[Mapping[str, Any]], found: Sequence[Sequence[Headline]]) -> str:
    """Table with a row per run: the options in which runs differ, then their headline numbers, the best ones marked.

    configs, found: options and headline numbers of each run. Cells hold their value for sorting in `data-value`.
    """
    options = differing_options(configs)
    by_label = [{h.label: h for h in one} for one in found]
    named = {h.label for one in found for h in one if not h.is_minor}
    shown = {h.label: h for one in found for h in one if h.label in named}
    best = {label: _best([one.get(label) for one in by_label], h.better) for label, h in shown.items()}
    options_head = "".join(f'<th scope="col">{escape(option)}</th>' for option in options)
    numbers_head = "".join(
        f'<th scope="col" class="number">{escape(h.label)} <span class="unit">{escape(h.unit)}</span></th>'
        for h in shown.values()
    )
    # a few options name a run; many would push its numbers out of sight
    is_short = len(options) <= _FEW
    head, body = options_head + numbers_head if is_short else numbers_head + options_head, ""
    for i, name in enumerate(names):
        swatch = f'<span class="swatch" style="background:{COLOURS[i % len(COLOURS)]}"></span>'
        body += f'<tr><th scope="row" data-value="{i}">{swatch}{escape(show_controls(name))}</th>'
        chosen = "".join(f"<td{_sort_key(configs[i][o])}>{escape(_as_text(configs[i][o]))}</td>" for o in options)
        reached = "".join(_cell(by_label[i].get(label), best[label]) for label in shown)
        body += (chosen + reached if is_short else reached + chosen) + "</tr>"
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Comparison of runs"><table id="comparison"><thead>'
        f'<tr><th scope="col">run</th>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        '<p class="unit">Options are those in which runs differ. ★ marks the best of a column.</p>'
    )


def differing_options(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the options that all runs have, with values that differ, except for where a run writes."""
    shared = [name for name in configs[0] if all(name in config for config in configs)]
    return [name for name in shared if name not in _PLACES and len({repr(config[name]) for config in configs}) > 1]


def _best(found: Sequence[Headline | None], better: int) -> float | None:
    values = [h.value for h in found if h is not None]
    if not better or len(set(values)) < 2:
        return None
    return max(values) if better > 0 else min(values)


def _cell(h: Headline | None, best: float | None) -> str:
    if h is None:
        return '<td class="number">–</td>'
    star = ' <b title="best of the runs">★<span class="hidden"> best</span></b>' if h.value == best else ""
    return f'<td class="number" data-value="{h.value!r}">{escape(format_value(h.value))}{star}</td>'


def _sort_key(value: Any) -> str:
    if isinstance(value, (int, float)):
        return f' data-value="{float(value)!r}"'
    return ""


def _as_text(value: Any) -> str:
    return "–" if value is None else show_controls(str(value))


def picture(panel: Panel, runs: Sequence[Mapping[str, Any]]) -> str:
    """A panel as a drawing, for browsers without JavaScript; empty where no run has numbers for it."""
    width, height, left, bottom = 440, 200, 56, 20
    lines = [
        (i, dash, *run["curves"][name][:2])
        for i, run in enumerate(runs)
        for dash, (name, _) in enumerate(panel.lines)
        if name in run["curves"]
    ]
    if not lines:
        return ""
    (x0, x1), (y0, y1) = (_range([v for line in lines for v in line[part]]) for part in (2, 3))
    drawn = ""
    for i, dash, xs, ys in lines:
        points = " ".join(
            f"{left + (width - left) * (x - x0) / (x1 - x0):.1f},{(height - bottom) * (y1 - y) / (y1 - y0):.1f}"
            for x, y in zip(xs, ys, strict=True)
        )
        look = f'stroke="{COLOURS[i % len(COLOURS)]}" stroke-dasharray="{_DASHES[dash]}" stroke-width="1.6"'
        drawn += f'<polyline points="{points}" fill="none" {look}/>'
    marks = "".join(
        f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(format_value(value))}</text>'
        for x, y, anchor, value in (
            (left - 4, 12, "end", y1),
            (left - 4, height - bottom, "end", y0),
            (left, height - 4, "start", round(x0)),
            (width, height - 4, "end", round(x1)),
        )
    )
    styles = ("solid", "dashed", "dotted")
    key = "; ".join(f"{styles[dash]}: {panel.lines[dash][1]}" for dash in sorted({line[1] for line in lines}))
    title = f'<h3>{escape(panel.title)}</h3><div class="unit">{escape(panel.unit)}, by step. {escape(key)}</div>'
    svg = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(panel.title)}">{drawn}{marks}</svg>'
    return f'<div class="card">{title}{svg}</div>'


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    pad = 0.5 * (abs(low) or 1.0) if high - low <= 1e-9 * max(abs(low), abs(high)) else 0.0
    return low - pad, high + pad


def answers(name: str, looks: Sequence[Mapping[str, Any]]) -> str:
    """First and last answers of a run to the prompts of its last look, for browsers without JavaScript."""
    if not looks:
        return ""
    last = looks[-1]
    shown = ""
    for i, prompt in enumerate(last["prompts"]):
        first = next(look for look in looks if prompt in look["prompts"])
        shown += f'<div class="card"><pre dir="auto">{escape(show_controls(prompt))}</pre>'
        for look, j in ((first, first["prompts"].index(prompt)), (last, i)):
            score = format_value(look["scores"][j])
            text = escape(show_controls(look["completions"][j])) or "(an empty answer)"
            shown += f'<div class="answer"><div class="unit">step {look["step"]}, reward {score}</div>'
            shown += f'<pre dir="auto">{text}</pre></div>'
        shown += "</div>"
    return f'<h2>Answers of {escape(show_controls(name))}</h2><div class="grid">{shown}</div>'
