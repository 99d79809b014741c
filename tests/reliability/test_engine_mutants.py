"""Seeded faults of the engine: each of `mutants.MUTANTS` goes into a copy of the package, where tests then fail.

A process per room has imported what takes seconds, and forks for each mutant, so that its tests run in a process of
their own on the copy. The tests of a room have to pass on the untouched copy. `pytest -s` prints rate and survivors.
"""

from __future__ import annotations

import collections
import gc
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.reliability import table
from tests.reliability.mutants import MUTANTS, Mutant

ROOMS = tuple(dict.fromkeys(mutant.path.partition("/")[0] for mutant in MUTANTS))
SLOW = ("torch.distributed.tensor", "transformers.models.llama", "datasets", "peft", "scipy.stats", "matplotlib.pyplot")
SECONDS = 300  # after which the tests of a mutant count as hung: an error, as nobody knows whether they see it


def test_every_mutant_fits_its_source_and_names_tests() -> None:
    sources, tests = dict[Path, str](), dict[str, str]()
    for mutant in MUTANTS:
        path = table.ROOT / "rlhf_engine" / mutant.path
        source = sources.setdefault(path, path.read_text(encoding="utf-8"))
        compile(mutant.applied(source), path, "exec")  # raises where the quoted text does not stand there once
        for test in mutant.tests:
            file, _, name = test.partition("::")
            text = tests.setdefault(file, (table.ROOT / file).read_text(encoding="utf-8"))
            assert re.search(rf"\bdef {name.partition('[')[0]}\b", text), f"{mutant}: {test} is no test"
    assert len(set(MUTANTS)) == len(MUTANTS) >= 120


class Forks:
    """A process that has imported what is slow to import, and runs tests on a copy of the package in its forks."""

    def __init__(self, folder: Path) -> None:
        self.copy = folder / "copy"
        shutil.copytree(table.ROOT / "rlhf_engine", self.copy / "rlhf_engine")
        paths = [str(self.copy), *(str(table.ROOT / name) for name in ("kernels", "bench", "."))]
        environment = {**os.environ, "PYTHONPATH": ":".join(paths), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, __file__, str(self.copy)]
        self.process = subprocess.Popen(
            command, cwd=table.ROOT, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def run(self, tests: Sequence[str], *options: str, mutated: str = "") -> tuple[Any, list[list[str]]]:
        """Exit status of pytest, or what came instead, and the reports of failures: test, phase, message."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([mutated, *options, *tests]) + "\n")
        self.process.stdin.flush()
        status, failures = json.loads(self.process.stdout.readline())
        return status, failures

    def mutate(self, mutant: Mutant) -> tuple[Any, list[list[str]]]:
        """The same with a mutant in the copy, up to the first failure."""
        path = self.copy / "rlhf_engine" / mutant.path
        before = path.read_text(encoding="utf-8")
        for old in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            old.unlink()  # sources of one size that change within a second look the same to it
        path.write_text(mutant.applied(before), encoding="utf-8")
        try:
            return self.run(mutant.tests, "-x", mutated=mutant.path)
        finally:
            path.write_text(before, encoding="utf-8")


@pytest.fixture
def forks(tmp_path: Path) -> Iterator[Forks]:
    made = Forks(tmp_path)
    yield made
    made.process.communicate()  # no more jobs end it


@pytest.mark.long
@pytest.mark.parametrize("room", ROOMS)
def test_tests_see_what_is_wrong(room: str, forks: Forks, survived: table.Survived) -> None:
    asked = [mutant for mutant in MUTANTS if mutant.path.partition("/")[0] == room]
    tests = dict.fromkeys(test for mutant in asked for test in mutant.tests)
    status, failures = forks.run(list(tests))
    assert status == 0, f"tests fail without a mutant: {failures}"
    survivors, seen = list[Mutant](), collections.Counter[str]()
    for mutant in asked:
        status, failures = forks.mutate(mutant)
        assert status in (0, 1), f"{mutant}: pytest ended with {status}: {failures}"
        assert all(phase != "collect" for _, phase, _ in failures), f"{mutant}: tests are not found: {failures}"
        seen.update(test.partition("[")[0] for test, *_ in failures[:1])
        survivors += [] if failures else [mutant]
    print(f"\n{room}: {len(asked) - len(survivors)} of {len(asked)} mutants are seen,", end=" ")
    print(
        f"{1 - len(survivors) / len(asked):.1%}, by {len(seen)} tests", *(f"survivor: {m}" for m in survivors), sep="\n"
    )
    survived("engine_mutants", len(asked), len(survivors))


class _Failures:
    def __init__(self) -> None:
        self.rows: list[tuple[str, str, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.rows.append((report.nodeid, report.when, str(report.longrepr)[-500:]))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.rows.append((report.nodeid, "collect", str(report.longrepr)[-500:]))


def _in_fork(copy: Path, mutated: str, arguments: Sequence[str], answer: int) -> None:
    """Run tests and write how they ended; never returns."""
    quiet, seen, status = os.open(os.devnull, os.O_WRONLY), _Failures(), "no status"
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    signal.alarm(SECONDS)
    sys.path.insert(0, str(copy))
    sys.dont_write_bytecode = bool(mutated)
    table.LEFT = copy.parent / "records"  # what tests count on a mutant is no record
    try:
        # pytest puts the checkout before the copy; the package that was imported stays the copy's
        assert Path(str(importlib.import_module("rlhf_engine").__file__)).is_relative_to(copy)
        common = ["-q", "--no-showlocals", "-p", "no:cacheprovider", f"--basetemp={copy.parent / 'tmp'}"]
        status = int(pytest.main([*common, "-m", "not gpu", *arguments], plugins=[seen]))
    except BaseException as error:
        status = f"{type(error).__name__}: {error}"
    finally:
        os.write(answer, json.dumps([status, seen.rows]).encode())
        os._exit(0)


def main(copy: Path) -> None:
    for name in SLOW:
        importlib.import_module(name)
    gc.freeze()
    for line in sys.stdin:
        mutated, *arguments = json.loads(line)
        reads, writes = os.pipe()
        if os.fork() == 0:
            _in_fork(copy, mutated, arguments, writes)
        os.close(writes)
        with os.fdopen(reads) as answer:
            text = answer.read()  # ends with the fork
        _, ended = os.wait()
        print(text or json.dumps([f"ended by {ended}", []]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
