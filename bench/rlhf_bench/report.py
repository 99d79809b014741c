"""Views of results for a person and for a program: a table per case, one JSON object per line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import IO, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf_bench.runner import CaseResult, Measured

# every record starts with these, in this order
KEYS = (
    "op",
    "case",
    "dtype",
    "backend",
    "ms",
    "floor_ms",
    "baseline",
    "baseline_ms",
    "peak_bytes",
    "error",
    "error_bound",
)


def write_records(records: Sequence[dict[str, Any]], file: IO[str]) -> None:
    """One JSON object per line, flushed."""
    for record in records:
        file.write(json.dumps(record, allow_nan=False) + "\n")
    file.flush()


def print_results(results: Sequence[CaseResult], console: Console) -> None:
    """A table per op, then who was not measured and why."""
    for op in dict.fromkeys(result.case.op for result in results):
        mine = [result for result in results if result.case.op == op]
        console.print(_table(op, mine))
        for reason, cases in _missing(mine).items():
            label, why = reason
            where = "" if len(cases) == len(mine) else f" [{', '.join(cases)}]"
            console.print(f"  not measured: {label}: {why}{where}", markup=False, highlight=False, soft_wrap=True)
        console.print()
    console.print(
        "% floor: time of the bare GEMMs (or copy) over this time. × base: time of the fastest baseline "
        "that computes the same (*) over this time. MiB: peak above the inputs. error / bound: against float64, of the "
        "result that is closest to what its tier allows; ! is above it.",
        style="dim",
        highlight=False,
    )


def _table(op: str, results: Sequence[CaseResult]) -> Table:
    table = Table(title=op, title_justify="left")
    table.add_column("case, by", min_width=18)  # labels wrap; without a floor rich would take all of it for the numbers
    for name in ("ms", "% floor", "× base", "MiB", "error / bound"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        table.add_row(f"{result.case.name}: floor", _ms(result.floor_ms), "100", "", "", "", style="dim")
        best = result.baseline
        for row in result.rows:
            numbers = _numbers(row, result.floor_ms, best)
            table.add_row(_label(row, best), *numbers, style=None if row.backend else "dim")
        table.add_section()
    return table


def _label(row: Measured, best: Measured | None) -> Text:
    note = " *" if row is best else "" if row.same else " (not the same)"
    return Text(row.label + note, style="bold" if row.backend else "")


def _numbers(row: Measured, floor_ms: float, best: Measured | None) -> tuple[str, str, str, str, str]:
    accuracy = row.accuracy
    error = "–" if accuracy is None else f"{accuracy.error:.1e} / {accuracy.bound:.1e}{'' if accuracy.ok else ' !'}"
    return (
        _ms(row.ms),
        f"{100 * floor_ms / row.ms:.0f}",
        "–" if best is None else f"{best.ms / row.ms:.2f}",
        "–" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:.1f}",
        error,
    )


def _ms(ms: float) -> str:
    return f"{ms:.3f}" if ms < 10 else f"{ms:.1f}" if ms < 1000 else f"{ms:.0f}"


def _missing(results: Sequence[CaseResult]) -> dict[tuple[str, str], list[str]]:
    """(who, why) → cases."""
    found: dict[tuple[str, str], list[str]] = {}
    for result in results:
        for label, why in result.missing.items():
            found.setdefault((label, why), []).append(result.case.name)
    return found
