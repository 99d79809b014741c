"""The table of faults survived: `python -m tests.reliability.table` writes docs/reliability.md from what tests counted.

A test takes the fixture `survived` and says what it has tried, `survived("kills", 20, failures)`. Each leaves one
record in runs/reliability, and what several tests count for a row adds up. `make reliability` takes these records into
bench/results/reliability.json, a test's newest in place of its older one, and writes the page from that file alone.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEFT, HELD = ROOT / "runs" / "reliability", ROOT / "bench" / "results" / "reliability.json"
PAGE = ROOT / "docs" / "reliability.md"


class Row(NamedTuple):
    """A promise, and how many cases show it."""

    promise: str
    goal: int  # cases that are tried
    allowed: float = 0.0  # share of them that may fail
    floor: str = ""  # why less is shown, with the note of the attempts; empty where the goal is within reach


ROWS = {
    "properties": Row("Any shapes, strides, offsets, dtypes, sets, threads: kernels give what references do", 100_000),
    "machines": Row("Packing, caches, schedules, options, protocols: what must hold holds after any calls", 3_000),
    "sanitized": Row("The same kernels under ASan and UBSan, called from two Python threads: no report", 20_000),
    "races": Row("Native code with threads under TSan: no report", 14),
    "kernel_mutants": Row("A fault that is put into a kernel is seen by its tests", 240, 0.05),
    "engine_mutants": Row("A fault that is put into the engine's Python is seen by its tests", 120, 0.05),
    "crash_points": Row("A stop at any operation on any file that is written leaves the old or the new", 2_000),
    "kills": Row("A process that is killed at any moment goes on to the same floats", 100),
    "damage": Row("A damaged file is refused, or changes nothing", 140_000),
    "bad_inputs": Row("A wrong input is answered in one line that names argument, expected and got", 300),
    "faults": Row("A fault of a part (hung, silent, lying, full, out of memory) is told, and nothing is lost", 50),
    "bodies": Row("A malformed body of HTTP is answered by 4xx and touches no policy", 10_000),
    "hostile_answers": Row("An answer that cheats, hangs or escapes a reward is not paid, and ends", 50),
    "code_from_files": Row("No file and no peer makes the process run code, unpickle or connect", 30),
    "two_threads": Row("Two Python threads get what one gets", 10_000),
    "lives": Row("Policies that come and go leave memory as it was", 1_000),
    "soak": Row("Steps of PPO, of overlap and of a server leave memory (1 %), threads, handles as at step 50", 6_000),
    "load": Row("Clients that abuse the server lose nothing of others' answers", 10_000),
    "canaries": Row("A fault that is put into a long run is told by the metric that watches it", 6),
}
Survived = Callable[..., None]


def _commit() -> str:
    git = ["git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()


def counting(counted: dict[str, list[int]]) -> Survived:
    """What a test calls with a row, the cases that it tried, and how many of them failed."""

    def count(row: str, cases: int, failures: int = 0) -> None:
        assert cases > 0, "a test that tries nothing shows nothing"
        before = counted.setdefault(row, [0, 0])
        counted[row] = [before[0] + cases, before[1] + failures]
        assert failures <= ROWS[row].allowed * cases, f"{failures} of {cases} cases of {row} failed"

    return count


@pytest.fixture
def survived(request: pytest.FixtureRequest) -> Iterator[Survived]:
    """Count what a test has tried; the counts are left as one record, also where the test fails."""
    counted = dict[str, list[int]]()
    yield counting(counted)
    if counted and (ROOT / ".git").exists():
        LEFT.mkdir(parents=True, exist_ok=True)
        test = request.node.nodeid
        record = {"test": test, "commit": _commit(), "date": datetime.date.today().isoformat(), "counted": counted}
        (LEFT / f"{hashlib.sha256(test.encode()).hexdigest()[:16]}.json").write_text(json.dumps(record))


def folded(held: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows, each with the newest record of every test that counts for it; tests that have gone count no more."""
    rows = {name: dict(tests) for name, tests in held.items()}
    for record in sorted(records, key=lambda record: str(record["date"])):
        for name, counts in record["counted"].items():
            about = {"commit": record["commit"], "date": record["date"]}
            rows.setdefault(name, {})[record["test"]] = {"cases": counts[0], "failures": counts[1], **about}
    return {
        name: {test: entry for test, entry in sorted(rows[name].items()) if _is_there(test)} for name in sorted(rows)
    }


def _is_there(test: str) -> bool:
    file, *_, name = test.partition("[")[0].split("::")
    return (ROOT / file).is_file() and f"def {name}(" in (ROOT / file).read_text()


def rendered(held: Mapping[str, Any]) -> str:
    """The page of the table."""
    lines = [
        "# Reliability", "",
        "What is promised, and what tests have tried of it. `make reliability` writes this page from records that",
        "tests leave. A row is met where enough cases were tried and no more failed than may. Commit and date are",
        "those of its oldest record.", "",
        "| promise | tried | failed | goal | status | commit | date |", "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, row in ROWS.items():
        records = list(held.get(name, {}).values())
        cases, failures = (sum(record[key] for record in records) for key in ("cases", "failures"))
        oldest = min(records, key=lambda record: str(record["date"]), default={"commit": "–", "date": "–"})
        holds = failures <= row.allowed * cases
        status = "met" if cases >= row.goal and holds else "floor" if row.floor and holds else "owed"
        goal = f"{row.goal:,}" + (f", {row.allowed:.0%} may fail" if row.allowed else "")
        lines.append(
            f"| {row.promise} | {cases:,} | {failures:,} | {goal} | {status} | {oldest['commit']} | {oldest['date']} |"
        )
    notes = [f"* {row.promise}: {row.floor}" for row in ROWS.values() if row.floor]
    return "\n".join([*lines, *(["", "## Floors", "", *notes] if notes else []), ""])


def main() -> None:
    """Take up what tests have left, and write the page."""
    held = json.loads(HELD.read_text()) if HELD.is_file() else {}
    held = folded(held, [json.loads(path.read_text()) for path in sorted(LEFT.glob("*.json"))])
    HELD.write_text(json.dumps(held, indent=1) + "\n")
    PAGE.write_text(rendered(held))
    print(f"{PAGE.relative_to(ROOT)}: {rendered(held).count('| met |')} of {len(ROWS)} rows met")


if __name__ == "__main__":
    main()
