#!/usr/bin/env python
"""Tables of recorded measurements in the documentation.

    python bench/tables/doc_tables.py [--check] [RESULTS.jsonl]

RESULTS.jsonl is what `rlhf-engine bench --json` appends to, bench/results/cpu/kernels/results.jsonl unless given, for
docs/benchmarks.md; docs/cpus.md has those of bench/results/avx2. Of several records of a case the last one counts: a
row per case, ours beside the fastest of the others. Between the marks
`<!-- table: bench/results/….md -->` and `<!-- /table -->` comes the first table of that file, as its benchmark wrote
it. --check writes nothing and exits with 1 if a page differs.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
QUOTING = tuple(sorted((ROOT / "docs" / "guides").glob("*.md")))
"""Pages that quote tables of other benchmarks."""
RESULTS = ROOT / "bench" / "results" / "cpu" / "kernels" / "results.jsonl"
CPUS = ROOT / "docs" / "cpus.md"
AVX2 = ROOT / "bench" / "results" / "avx2" / "kernels" / "results.jsonl"
BEGIN, END = "<!-- bench-table -->\n", "<!-- /bench-table -->"
QUOTED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- /table -->)", re.DOTALL)
HEADER = (
    "| op | case | ms | of its floor | fastest other that computes the same | × faster | MiB | error (allowed) |\n"
    "|---|---|---|---|---|---|---|---|\n"
)


_OP_NAMES = {"block": "llama_ops", "ppo_losses": "ppo_loss"}
"""Today's names of ops in older records."""


def table(records: list[dict[str, Any]]) -> str:
    """Markdown rows of the `cpu` backend, ops and their cases in the order in which they first came."""
    last = {(r["op"], r["case"], r["dtype"]): r for r in records if r["backend"] == "cpu"}
    ops = list(dict.fromkeys(op for op, _, _ in last))
    mixed = len({dtype for _, _, dtype in last}) > 1
    rows = sorted(last.values(), key=lambda r: ops.index(r["op"]))
    return HEADER + "".join(_row(r, f"{r['case']}, {r['dtype']}" if mixed else r["case"]) for r in rows)


def _row(r: dict[str, Any], case: str) -> str:
    other, factor = "–", "–"
    if r["baseline"] is not None:
        other, factor = f"{r['baseline']}, {_ms(r['baseline_ms'])} ms", f"{r['baseline_ms'] / r['ms']:.2f}"
    mib = "–" if r["peak_bytes"] is None else f"{r['peak_bytes'] / 2**20:.1f}"
    error = "–" if r["error"] is None else f"{r['error']:.1e} ({r['error_bound']:.1e})"
    times = f"{r['ms'] / r['floor_ms']:.2f} ×"
    op = _OP_NAMES.get(r["op"], r["op"])
    return f"| `{op}` | {case} | {_ms(r['ms'])} | {times} | {other} | {factor} | {mib} | {error} |\n"


def _ms(ms: float) -> str:
    return f"{ms:.3f}" if ms < 1 else f"{ms:.2f}" if ms < 10 else f"{ms:.1f}" if ms < 100 else f"{ms:.0f}"


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
    for page, results in ((BENCHMARKS, options.results), (CPUS, AVX2), *((page, None) for page in QUOTING)):
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
