"""Native code under TSan: all units whose work is shared among threads, also when two threads call at once."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.kernels import native_build, native_cases
from tests.kernels.native_build import ROOT
from tests.reliability.sanitizers import sanitized
from tests.reliability.table import Survived

FLAGS = ("-O1", "-g1", "-fPIC", "-fopenmp", "-fsanitize=thread")
OPENMP = str(Path(__file__).with_name("openmp_in_sight.cpp"))
SHARES = re.compile(r"#pragma omp|^(?!.*\bvoid run_together).*\brun_together\(", re.MULTILINE)
UNITS = {path.name for path in (ROOT / "csrc/cpu").iterdir() if path.is_file() and SHARES.search(path.read_text())}
"""Files in which several threads are asked for."""


def reports(program: Path, *arguments: Path) -> tuple[set[str], list[str]]:
    """Units that a program has run on several threads, and the places of races that TSan has seen."""
    assert "GOMP_" not in native_build.run(["nm", "-u", program]), "a part of libgomp, which TSan sees nothing of"
    command = [str(program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={"TSAN_OPTIONS": "exitcode=0"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert native_build.CLEAN in done.stdout
    frames = re.findall(r"^at (\w+)$", done.stdout, re.MULTILINE)
    places = native_build.run(["addr2line", "-i", "-e", program, *frames])
    races = re.findall(r"^SUMMARY: ThreadSanitizer: (.+)$", done.stderr, re.MULTILINE)
    return {name for name in re.findall(r"([\w.]+):\d+", places) if name in UNITS}, races


def test_a_team_does_not_race_and_one_that_orders_nothing_is_told(tmp_path: Path) -> None:
    """Teams alone, as they need one file of csrc; the same with each of its orders relaxed, which is the plant."""
    native_build.needs("g++", "addr2line", "nm")
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


@pytest.mark.long
def test_no_unit_with_threads_races(tmp_path: Path, survived: Survived) -> None:
    """By the drivers, which check themselves, then by every op called from two threads at once.

    TSan does not see what intrinsics store under a mask; the same loops run as plain C++ in the set `portable`.
    """
    native_cases.write(tmp_path / "cases", (0,))
    build = sanitized(tmp_path, "thread", *FLAGS)
    sources = [ROOT / f"tests/kernels/native_{name}_main.cpp" for name in native_build.DRIVERS]
    found = {source.stem: reports(build.program(source, OPENMP)) for source in sources}
    callers = build.program(Path(__file__).with_name("two_callers.cpp"), OPENMP)
    found["two callers"] = reports(callers, tmp_path / "cases")
    print({name: sorted(units) for name, (units, _) in found.items()})
    races = {name: seen for name, (_, seen) in found.items() if seen}
    assert set.union(*(units for units, _ in found.values())) == UNITS
    survived("races", len(UNITS), sum(any(unit in found[name][0] for name in races) for unit in UNITS))
    assert not races
