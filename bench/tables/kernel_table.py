#!/usr/bin/env python
"""The kernel table of the package, kernels/rlhf_kernels/runtime/kernel_table.json, from recorded measurements.

    rlhf-engine bench --device cpu --dtype fp32 --isa avx2 --json bench/results/avx2/kernels/results.jsonl
    rlhf-engine bench --device cpu --dtype bf16 --isa avx2 --json bench/results/avx2/kernels/results.jsonl
    python bench/tables/kernel_table.py [--check] [RESULTS.jsonl …]

RESULTS.jsonl: all of bench/results/<instruction set>/kernels/*.jsonl unless given. The entries of every instruction set
that they name are made anew, those of the others stay. --check writes nothing and exits with 1 if the table differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rlhf_bench.isa import SETS
from rlhf_bench.kernel_table import from_records
from rlhf_kernels.runtime import kernel_table, registry

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"


def recorded() -> list[Path]:
    """Files of records that are committed, by instruction set."""
    return [path for isa in SETS for path in sorted((RESULTS / isa / "kernels").glob("*.jsonl"))]


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0, 1 if --check finds a difference, 2 for records that no table can be made of."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--table", type=Path, default=kernel_table.COMMITTED, help="another file than the package's")
    options = parser.parse_args(argv)
    lines = [line for path in options.results or recorded() for line in path.read_text(encoding="utf-8").splitlines()]
    try:
        made = from_records(json.loads(line) for line in lines)
    except ValueError as error:
        print(f"kernel_table: {error}", file=sys.stderr)
        return 2
    others, machines = [], dict(made.machines)
    if options.table.is_file():
        before = kernel_table.read(options.table, registry.ops())
        others = [entry for entry in before.entries if entry.isa not in made.machines]
        machines = {isa: before.machines[isa] for isa in {e.isa for e in others}} | made.machines
    text = kernel_table.dump([*others, *made.entries], machines)
    if options.check:
        return int(not options.table.is_file() or options.table.read_text(encoding="utf-8") != text)
    options.table.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
