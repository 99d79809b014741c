#!/usr/bin/env python
"""Tables of recorded measurements in the documentation.

    python bench/tables/doc_tables.py [--check] [RESULTS.jsonl]

RESULTS.jsonl is what `rlhf-engine bench --json` appends to, bench/results/avx2/kernels/results.jsonl unless given, for
docs/benchmarks.md: a row per op and dtype, ours beside the fastest of the others. Of several records of a case the
last one counts. Between the marks `<!-- table: bench/results/….md -->` and `<!-- /table -->` comes the first table of
that file, as its benchmark wrote it. --check writes nothing and exits with 1 if a page differs.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
QUOTING = tuple(sorted((ROOT / "docs" / "guides").glob("*.md")))
"""Pages that quote tables of other benchmarks."""
RESULTS = ROOT / "bench" / "results" / "avx2" / "kernels" / "results.jsonl"
BEGIN, END = "<!-- bench-table -->\n", "<!-- /bench-table -->"
QUOTED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- /table -->)", re.DOTALL)
HEADER = (
    "| op | dtype | cases | of its floor | × faster than the fastest other | behind in | error, % of allowed |\n"
    "|---|---|---|---|---|---|---|\n"
)
_OP_NAMES = {"block": "llama_ops", "ppo_losses": "ppo_loss"}
"""Today's names of ops in older records."""


def table(records: list[dict[str, Any]]) -> str:
    """Markdown rows of the `cpu` backend, one for each op and dtype."""
    last = {(_OP_NAMES.get(r["op"], r["op"]), r["dtype"], r["case"]): r for r in records if r["backend"] == "cpu"}
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for (op, dtype, _), record in last.items():
        groups.setdefault((op, dtype), []).append(record)
    return HEADER + "".join(_row(op, dtype, groups[op, dtype]) for op, dtype in sorted(groups))


def _row(op: str, dtype: str, cases: list[dict[str, Any]]) -> str:
    """The range of an op's cases, and those in which a library is faster."""
    factors = {r["case"]: r["baseline_ms"] / r["ms"] for r in cases if r["baseline"] is not None}
    behind = ", ".join(f"{case} ({factor:.2f})" for case, factor in factors.items() if factor < 0.995)
    errors = [100 * r["error"] / r["error_bound"] for r in cases if r["error"] is not None]
    cells = (f"`{op}`", dtype, str(len(cases)), _range([r["ms"] / r["floor_ms"] for r in cases]))
    return f"| {' | '.join(cells)} | {_range(factors.values())} | {behind} | {max(errors):.0f} |\n"


def _range(numbers: Collection[float]) -> str:
    """The least and the largest."""
    return f"{min(numbers):.2f}–{max(numbers):.2f}" if numbers else "–"


def with_table(text: str, rows: str) -> str:
    """`text` with everything between the two marks replaced."""
    head, found, rest = text.partition(BEGIN)
    _, closed, tail = rest.partition(END)
    if not found or not closed:
        raise ValueError(f"page: expected the marks {BEGIN.strip()} and {END}")
    return f"{head}{BEGIN}{rows}{END}{tail}"


def first_table(path: Path) -> str:
    """The lines of a Markdown file's first table."""
    found = re.search(r"(?:^\|.*\n)+", path.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise ValueError(f"table: expected a table in {path}, got none")
    return found.group()


def with_quoted(text: str) -> str:
    """`text` with the tables that it takes from the results of benchmarks."""
    return QUOTED.sub(lambda found: found[1] + first_table(ROOT / found[2]) + found[3], text)


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0, or 1 if --check finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, default=RESULTS)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(argv)
    differs = False
    for page, results in ((BENCHMARKS, options.results), *((page, None) for page in QUOTING)):
        before = page.read_text(encoding="utf-8")
        after = with_quoted(before)
        if results is not None:
            records = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
            after = with_table(after, table(records))
        differs |= before != after
        if not options.check:
            page.write_text(after, encoding="utf-8")
    return int(options.check and differs)


if __name__ == "__main__":
    sys.exit(main())
