"""Every file operation of a checkpoint fails in turn; one that loads, of this step or the last, is always left.

Real operations of real processes fail: `faults.cpp` stands between them and the C library.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="preloading is done here as on Linux"),
    pytest.mark.skipif(COMPILER is None, reason="needs g++ for the library that makes operations fail"),
]


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    library = tmp_path_factory.mktemp("faults") / "faults.so"
    command = [COMPILER, "-std=c++17", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library]
    subprocess.run([*command, HERE / "faults.cpp", "-ldl"], check=True)
    return library


@pytest.fixture(
    scope="module",
    params=[(201, "next"), *(pytest.param((1, name), marks=pytest.mark.long) for name in ("next", "same"))],
    ids=lambda param: f"{param[1]}-{param[0]}",
)
def outcomes(request, tmp_path_factory, faults):
    """Which operations failed, each so-many-th, and what a process that met them found in a scenario."""
    every, scenario = request.param
    root = HERE.parents[1]
    environment = {**os.environ, "LD_PRELOAD": str(faults), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(root), *sys.path])
    folder = tmp_path_factory.mktemp("crashes")
    command = [sys.executable, "-m", "tests.training.crash_driver", str(folder), str(every), scenario]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    return every, json.loads(done.stdout)[scenario]


def test_a_checkpoint_always_remains(outcomes, survived):
    every, found = outcomes
    survived("crash_points", sum(sum(ends.values()) for ends in found["fates"].values()), len(found["wrong"]))
    assert found["wrong"] == []
    operations = found["operations"]
    assert operations["write"] >= 10  # the library saw what there is to see: also those of safetensors, in Rust
    assert operations["fsync"] >= 10
    assert operations["rename"] == 2  # into place, and the old one aside
    for fate, ends in found["fates"].items():
        assert sum(ends.values()) >= sum(operations.values()) // every, fate
        if every > 1:
            continue
        assert any(end.endswith("new") for end in ends), fate
        assert any(end.endswith("old") for end in ends), fate
