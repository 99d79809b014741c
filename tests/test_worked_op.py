"""The op that docs/guides/add-an-op.md builds: written into a copy of the kernels, it passes its own tests."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernels import native_build

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "guides" / "add-an-op.md"
PYTEST = ("-m", "pytest", "-p", "no:cacheprovider")


def files_of_the_page() -> Iterator[tuple[str, bool, str]]:
    """Path of each block's file as its first line has it, whether the block is added to a file, and the rest of it."""
    text = PAGE.read_text(encoding="utf-8")
    for block in re.findall(r"^```(?:python|cpp)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        first, rest = block.split("\n", 1)
        found = re.fullmatch(r"(?:#|//) (add to )?(\S+)", first)
        assert found, first
        yield found[2], found[1] is not None, rest


def write(root: Path, *, of_cpp: bool) -> None:
    """Write the page's files: those of the C++ backend, or the others."""
    for path, is_added, text in files_of_the_page():
        is_native = path.endswith("/native.py") or text.startswith("from rlhf_kernels.softmax_entropy import native\n")
        if of_cpp != (is_native or path.startswith("csrc/")):
            continue
        target = root / path
        assert target.exists() == is_added, path
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("a", encoding="utf-8") as file:
            file.write(text)


def run(root: Path, *words: str, **environment: str) -> str:
    """Output of a Python command that imports the copy in `root`, and must succeed."""
    path = os.pathsep.join(map(str, (root / "kernels", root / "bench", root, ROOT)))
    command = [sys.executable, *words]
    variables = {**os.environ, "PYTHONPATH": path, **environment}
    done = subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_tests(root: Path, *words: str, **environment: str) -> None:
    """Tests of the copy, none of which may be skipped."""
    output = run(root, *PYTEST, *words, **environment)
    assert " passed" in output
    assert " skipped" not in output


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """The kernels, their benchmarks and tests, with all of the page's op except its C++."""
    root = tmp_path_factory.mktemp("op")
    for name in ("kernels/rlhf_kernels", "bench/rlhf_bench", "tests/kernels", "tests/bench"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("tests/__init__.py", "tests/conftest.py", "tests/curves.py", "pyproject.toml"):
        shutil.copy(ROOT / name, root / name)
    write(root, of_cpp=False)
    return root


def test_the_package_has_no_such_op():
    paths = {path for path, is_added, _ in files_of_the_page() if not is_added}
    assert len(paths) == 11
    assert not [path for path in paths if (ROOT / path).exists()]


def test_it_passes_its_tests(copy):
    """And its cost is found: the same process says so before them."""
    code = """
import sys
import pytest
import torch
from rlhf_kernels.runtime import aot, cost
x = torch.zeros(2, 8)
print(cost.workspace("softmax_entropy", (x, "auto"), lambda *_: "reference").function.__module__)
print("softmax_entropy" in aot.OPS)
sys.exit(pytest.main(sys.argv[1:]))
"""
    files = ("tests/kernels/test_softmax_entropy.py", "tests/kernels/test_direct_calls.py")
    chosen = "softmax_entropy and not cpu or every_op_is_here"
    first, second, *output = run(copy, "-c", code, *PYTEST[2:], *files, "-k", chosen).splitlines()
    assert (first, second) == ("rlhf_kernels.softmax_entropy.reference", "True")
    assert " passed" in output[-1]
    assert " skipped" not in output[-1]


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton comes with Linux only")
def test_it_runs_on_triton(copy):
    run_tests(copy, "tests/kernels/triton/test_softmax_entropy.py", TRITON_INTERPRET="1")
    compiled = ("-m", "rlhf_kernels.runtime.aot", "--arch", "90", "--op", "softmax_entropy")
    _, *rows = run(copy, *compiled, TRITON_INTERPRET="0").splitlines()
    assert [row.split()[4] for row in rows] == ["0", "0"]  # no kernel spills


@pytest.mark.long
def test_its_seeded_bug_is_caught(copy, tmp_path):
    root = shutil.copytree(copy, tmp_path / "op")
    code = "from tests.kernels.mutations import MUTATIONS; print(*MUTATIONS[-1][2:5], sep='\\n')"
    path, old, new = run(root, "-c", code).splitlines()
    source = (root / path).read_text(encoding="utf-8")
    assert source.count(old) == 1
    (root / path).write_text(source.replace(old, new), encoding="utf-8")
    with pytest.raises(AssertionError, match="1 failed"):
        run_tests(root, "tests/kernels/test_softmax_entropy.py", "-k", "hostile_rows")


@pytest.mark.long
def test_it_runs_in_cpp(copy, tmp_path):
    """Its C++ beside what every extension has, and no other op: that compiles within a minute."""
    native_build.needs("g++")
    pybind11 = pytest.importorskip("pybind11")
    root = shutil.copytree(copy, tmp_path / "op")
    csrc = shutil.copytree(ROOT / "csrc", root / "csrc")
    write(root, of_cpp=True)
    package = root / "kernels" / "rlhf_kernels"
    for extension in package.glob("_native.*"):
        extension.unlink()
    units = ["bindings.cpp", *(f"{d}/{name}.cpp" for d in ("bindings", "cpu") for name in ("isa", "softmax_entropy"))]
    include = [f"-I{path}" for path in (csrc, pybind11.get_include(), sysconfig.get_paths()["include"])]
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-fopenmp", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
    made = package / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    native_build.run(["g++", *flags, *include, *(csrc / unit for unit in units), "-o", made])
    files = ("tests/kernels/test_softmax_entropy.py", "tests/kernels/test_direct_calls.py")
    run_tests(root, *files, "-k", "softmax_entropy")
