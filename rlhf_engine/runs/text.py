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


def _fenced(text: str) -> str:
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


_UNSEEN = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]"
)


def show_controls(text: str) -> str:
    """A text whose invisible characters are shown by their code, so that none can reorder or hide what is around it."""
    return _UNSEEN.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", text)
