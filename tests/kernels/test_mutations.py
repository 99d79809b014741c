"""Seeded bugs: each of `MUTATIONS` goes into a copy of the sources, where its tests then have to fail.

A surviving bug means that the tests have a hole. The copy has the kernels, csrc and tests/kernels; its extension is
compiled once, and for a bug in C++ only the units that it touches are compiled again. A control run of every selection
on the untouched copy must pass, so that a failure is the bug's. `pytest -s` prints the share of an op's bugs that is
caught, which test caught what, and its lane: one of every push, of the interpreter, or long.
"""

import collections
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from rlhf_kernels.runtime import native

from . import mutations, mutations_gpu, mutations_sets
from .mutations import Mutation

ROOT = Path(__file__).resolve().parents[2]
MUTATIONS = [*mutations.MUTATIONS, *mutations_gpu.MUTATIONS, *mutations_sets.MUTATIONS]
# What a numeric test fails with. Anything else (NameError, CompilationError, ...) would be a bug of the mutation.
FAILED_NUMERICALLY = re.compile(r"AssertionError|assert |Failed: DID NOT RAISE|\S*GradcheckError")
WITH_COMPILER = shutil.which("g++") is not None
# The copy has no tests/conftest.py, whose helpers are for tests of the engine.
CONFTEST = """
import json, os, pathlib, re
import rlhf_kernels
from rlhf_kernels.runtime import kernel_table, native, registry

# sets between the first and the last are for the long lane, as tests/conftest.py has it
BETWEEN = set(native.isas()[1:-1]) if native.missing() is None else set()

def pytest_sessionstart():
    assert pathlib.Path(rlhf_kernels.__file__).is_relative_to(pathlib.Path(__file__).parent.parent)
    registry._table = kernel_table.KernelTable(source="none", entries=())  # as tests/conftest.py has it

def pytest_runtest_logreport(report):
    crash = getattr(report.longrepr, "reprcrash", None)
    message = "" if report.passed else crash.message if crash else str(report.longrepr)
    is_long = "long" in report.keywords or BETWEEN & set(re.split(r"[-\\[\\]]", report.nodeid))
    lane = "long" if is_long else "interpreter" if "/triton/" in report.nodeid else "push"
    with open(os.environ["MUTATION_REPORT"], "a") as file:
        print(json.dumps([report.nodeid, report.when, report.outcome, message, lane]), file=file)
"""


class Tree:
    """A copy of what the kernels' tests need, and the commands that compile its extension."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.objects = folder, folder / "build"
        self.package = folder / "kernels" / "rlhf_kernels"
        self.objects.mkdir(parents=True)
        ignored = shutil.ignore_patterns("__pycache__", "_native*")
        for name in ("kernels/rlhf_kernels", "csrc", "tests/kernels"):
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", folder)
        (folder / "tests" / "__init__.py").touch()
        (folder / "tests" / "conftest.py").write_text(CONFTEST)
        self.extension = self.package / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
        if WITH_COMPILER:
            units = [
                path
                for folder in ("", "bindings", "cpu", "cpu/variants")
                for path in (self.csrc / folder).glob("*.cpp")
            ]
            self.all_objects = [self.compile(unit, self.objects) for unit in sorted(units)]
            self.link(self.all_objects, self.extension)

    @property
    def csrc(self) -> Path:
        return self.folder / "csrc"

    def compile(self, unit: Path, into: Path) -> Path:
        """As setup.py does, but with less optimisation: compiling is most of the work here."""
        import pybind11

        built = into / f"{unit.parent.name}_{unit.stem}.o"
        flags = ["-std=c++17", "-Og", "-ffp-contract=off", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-w"]
        include = [f"-I{path}" for path in (self.csrc, pybind11.get_include(), sysconfig.get_path("include"))]
        command(["g++", *flags, *include, "-c", str(unit), "-o", str(built)])
        return built

    def link(self, objects: list[Path], extension: Path) -> None:
        command(["g++", "-shared", "-fopenmp", *map(str, objects), "-o", str(extension)])

    def apply(self, mutation: Mutation) -> "Applied":
        return Applied(self, mutation)

    def run(self, tests: list[str], report: Path, *options: str) -> tuple[int, list[list[str]], str]:
        """Exit status, reports (test, phase, outcome, message, lane) and output of pytest on tests of the copy."""
        interpret = {test.startswith("triton/") for test in tests}
        assert len(interpret) == 1, f"a process interprets Triton kernels or does not: {tests}"
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment |= {"PYTHONPATH": f"{self.folder / 'kernels'}:{self.folder}", "MUTATION_REPORT": str(report)}
        # Sources of one size that change within a second look the same to a .pyc
        environment |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        if interpret.pop():
            environment["TRITON_INTERPRET"] = "1"
        selected = [f"tests/kernels/{test}" for test in tests]
        common = ["-p", "no:cacheprovider", "--tb=short", "-m", "not gpu"]
        run = subprocess.run(
            [sys.executable, "-m", "pytest", *common, *options, *selected],
            cwd=self.folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600,
        )  # fmt: skip
        lines = report.read_text().splitlines() if report.exists() else []
        return run.returncode, [json.loads(line) for line in lines], run.stdout


class Applied:
    """A mutated tree inside `with`, the untouched one after it."""

    def __init__(self, tree: Tree, mutation: Mutation) -> None:
        self.tree, self.mutation = tree, mutation
        self.path = tree.folder / mutation.file
        self.saved = tree.folder / "saved.so"

    def __enter__(self) -> None:
        self.before = self.path.read_text()
        self.path.write_text(mutated(self.before, self.mutation))
        units = [self.tree.csrc / unit for unit in self.mutation.units]
        if units:
            new = self.tree.folder / "mutated"
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir()
            names = {built.name: built for built in (self.tree.compile(unit, new) for unit in units)}
            self.tree.extension.replace(self.saved)
            self.tree.link([names.get(built.name, built) for built in self.tree.all_objects], self.tree.extension)

    def __exit__(self, *exception: object) -> None:
        self.path.write_text(self.before)
        if self.saved.exists():
            self.saved.replace(self.tree.extension)


def command(arguments: list[str]) -> None:
    run = subprocess.run(arguments, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert run.returncode == 0, run.stdout[-3000:]


def mutated(source: str, mutation: Mutation) -> str:
    found = source.count(mutation.old)
    assert found == 1, (
        f"the seeded bug {mutation} no longer fits {mutation.file}: its text was found {found} times, not once; "
        f"rewrite it in tests/kernels/mutations.py for the code as it is now:\n{mutation.old}"
    )
    return source.replace(mutation.old, mutation.new)


def test_every_bug_still_fits_the_sources():
    for mutation in MUTATIONS:
        source = (ROOT / mutation.file).read_text()
        assert mutated(source, mutation) != source
        for unit in mutation.units:
            assert (ROOT / "csrc" / unit).is_file()
        for test in mutation.tests:
            name = test.partition("::")[2].partition("[")[0]
            assert re.search(rf"\b{name}\b", (ROOT / "tests/kernels" / test.partition("::")[0]).read_text()), test


def test_names_are_unique():
    assert len({str(mutation) for mutation in MUTATIONS}) == len(MUTATIONS)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    if WITH_COMPILER:
        pytest.importorskip("pybind11", reason="compiling the extension needs pybind11")
    return Tree(tmp_path_factory.mktemp("mutations") / "tree")


def control(tree: Tree, asked: list[Mutation]) -> set[str]:
    """Names of the tests of bugs that pass on the untouched copy; none may fail."""
    names = set()
    for interpreted in (False, True):
        tests = {test for mutation in asked for test in mutation.tests if test.startswith("triton/") == interpreted}
        if tests:
            report = tree.folder / f"control_{interpreted}.jsonl"
            report.unlink(missing_ok=True)
            status, reports, output = tree.run(sorted(tests), report)
            assert status == 0, output[-6000:]
            names |= {name for name, phase, outcome, *_ in reports if (phase, outcome) == ("call", "passed")}
    return names


def serves(mutation: Mutation) -> bool:
    """Whether this machine has what a bug is tried on."""
    sets = {Path(unit).stem for unit in mutation.units if Path(unit).parent.name == "variants"}
    return (mutation.backend not in ("cpu", "cuda") or WITH_COMPILER) and not (sets and sets.isdisjoint(native.isas()))


@pytest.mark.long
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the copy's tests run on the CPU, in the interpreter and on fibers"
)
@pytest.mark.parametrize("op", dict.fromkeys(mutation.op for mutation in MUTATIONS))
def test_the_suite_catches(op, tree, tmp_path, survived):
    asked = [mutation for mutation in MUTATIONS if mutation.op == op and serves(mutation)]
    if not asked:
        pytest.skip("needs g++, or instruction sets that this CPU lacks")
    passing, rows, survivors = control(tree, asked), list[tuple[str, str, str, str]](), list[str]()
    for i, mutation in enumerate(asked):
        with tree.apply(mutation):
            status, reports, output = tree.run(list(mutation.tests), tmp_path / f"{i}.jsonl", "-x")
        assert status in (0, 1), f"pytest ended with {status}:\n{output[-4000:]}"
        caught = [
            (name, phase, message, lane) for name, phase, outcome, message, lane in reports if outcome == "failed"
        ]
        if not caught:
            survivors.append(f"{mutation} survives: {', '.join(mutation.tests)} pass with it")
            continue
        for name, phase, message, _ in caught:
            assert phase == "call", f"{name} did not get to its assertions: {message}\n{output[-4000:]}"
            assert FAILED_NUMERICALLY.match(message), f"{name} failed for another reason: {message}\n{output[-4000:]}"
            assert name in passing, f"{name} does not pass without the bug either"
        name, *_, lane = caught[0]
        rows.append((f"{op}: {mutation.name}", mutation.backend, lane, name.removeprefix("tests/kernels/")))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print("", *("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows), sep="\n")
    print("caught by lane:", dict(collections.Counter(lane for _, _, lane, _ in rows)))
    print(f"{op}: {len(rows)} of {len(asked)} bugs are caught, {len(rows) / len(asked):.1%}", *survivors, sep="\n")
    survived("kernel_mutants", len(asked), len(survivors))
    assert not survivors
