"""Native code under TSan: all units whose work is shared among threads, also when two threads call at once."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.kernels import native_build, native_cases
from tests.kernels.native_build import ROOT

from tests.reliability.sanitizers import held
from tests.reliability.table import Survived

FLAGS = ("-O1", "-g1", "-fopenmp", "-fsanitize=thread")
OPENMP = str(Path(__file__).with_name("openmp_in_sight.cpp"))
SHARES = re.compile(r"#pragma omp|^(?!.*\bvoid run_together).*\brun_together\(", re.MULTILINE)
UNITS = {path.name for path in (ROOT / "csrc/cpu").iterdir() if path.is_file() and SHARES.search(path.read_text())}
"""Files in which several threads are asked for."""


def reports(program: Path, *arguments: Path) -> tuple[set[str], list[str]]:
    """Units that a program has run on several threads, and the places of races that TSan has seen."""
    command = [str(program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={"TSAN_OPTIONS": "exitcode=0"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert native_build.CLEAN in done.stdout
    frames = re.findall(r"^at (\w+)$", done.stdout, re.MULTILINE)
    places = native_build.run(["addr2line", "-i", "-e", program, *frames])
    races = re.findall(r"^SUMMARY: ThreadSanitizer: (.+)$", done.stderr, re.MULTILINE)
    return {name for name in re.findall(r"([\w.]+):\d+", places) if name in UNITS}, races


def test_what_threads_of_a_call_share_is_ordered_and_a_team_that_orders_nothing_is_told(
    tmp_path: Path, survived: Survived
) -> None:
    """Teams alone, as they need one file of csrc; the same with each of its orders relaxed, which is the plant."""
    native_build.needs("g++", "addr2line")
    command = native_build.linking(tmp_path, "g++", *FLAGS)
    team = ROOT / "csrc/cpu/team.cpp"
    relaxed = tmp_path / "team.cpp"
    relaxed.write_text(re.sub(r"__ATOMIC_(?:ACQ_REL|ACQUIRE|SEQ_CST)", "__ATOMIC_RELAXED", team.read_text()))
    found = {}
    for source in (team, relaxed):
        driver = ROOT / "tests/kernels/native_team_main.cpp"
        native_build.run([*command, driver, source, OPENMP, "-o", tmp_path / "driver"])
        found[source] = reports(tmp_path / "driver")
    assert found[team] == ({"team.cpp"}, [])
    assert found[relaxed][1], "a race went by unseen"
    survived("races", 1)


@pytest.mark.long
def test_no_unit_with_threads_races(tmp_path: Path, survived: Survived) -> None:
    """By the drivers, which check themselves, then by every op called from two threads at once."""
    native_cases.write(tmp_path / "cases", (0,))
    with held("thread", *FLAGS) as build:
        found = {name: reports(build.program(ROOT / f"tests/kernels/native_{name}_main.cpp", OPENMP))
                 for name in native_build.DRIVERS}  # fmt: skip
        callers = build.program(Path(__file__).with_name("two_callers.cpp"), OPENMP)
        found["two callers"] = reports(callers, tmp_path / "cases")
    print({name: sorted(units) for name, (units, _) in found.items()})
    races = {name: seen for name, (_, seen) in found.items() if seen}
    assert set.union(*(units for units, _ in found.values())) == UNITS
    survived("races", len(UNITS), sum(any(unit in found[name][0] for name in races) for unit in UNITS))
    assert not races
