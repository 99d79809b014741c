"""Sample answers as markdown, numbers at a readable precision, tables for the terminal."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table


def samples_markdown(
    prompts: Sequence[str],
    before: Sequence[str],
    after: Sequence[str],
    rewards_before: Sequence[float | None],
    rewards_after: Sequence[float | None],
) -> str:
    """Answers to the same prompts, as markdown; texts are fenced, so nothing in them becomes markup."""
    parts = ["# Answers before and after training"]
    for i, (prompt, *answers) in enumerate(zip(prompts, before, after, strict=True)):
        parts += [f"## {i + 1}", _fenced(prompt)]
        for name, text, rewards in zip(("Before", "After"), answers, (rewards_before, rewards_after), strict=True):
            shown = _fenced(text) if text.strip() else "*an empty answer*"
            parts += [f"**{name}** (reward {format_value(rewards[i])})", shown]
    return "\n\n".join(parts) + "\n"


def summary_table(
    title: str, columns: Sequence[str], rows: Mapping[str, Sequence[Any]], caption: str | None = None
) -> Table:
    """A rich table: one row per name, its values under `columns`, numbers at a readable precision."""
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    for name, values in rows.items():
        table.add_row(name, *(format_value(value) for value in values))
    return table


def format_value(value: Any) -> str:
    """A number with three decimals, or three digits below 0.01; thousands separated; None as a dash; else as text."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3f}" if abs(value) >= 0.01 or value == 0 else f"{value:.3g}"


def format_score(value: Any) -> str:
    """A reward, KL or loss: as `format_value`, but what is nothing except rounding is 0."""
    return format_value(0.0 if isinstance(value, float) and abs(value) < 1e-6 else value)


def format_duration(seconds: float) -> str:
    """A time to wait: seconds below two minutes, minutes below two hours, then hours and minutes."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _fenced(text: str) -> str:
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


_UNSEEN = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]"
)


def show_controls(text: str) -> str:
    """A text whose invisible characters are shown by their code, so that none can reorder or hide what is around it."""
    return _UNSEEN.sub(lambda match: f"⟨U+{ord(match[0]):04X}⟩", text)
