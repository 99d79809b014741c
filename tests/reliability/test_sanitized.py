"""Random calls of every op under ASan and UBSan, from two Python threads at once, each call with threads of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rlhf_kernels.runtime import native

from tests.kernels import native_build
from tests.kernels.checks import ISAS
from tests.kernels.native_build import ROOT, SANITIZE
from tests.reliability.properties import MAKERS
from tests.reliability.sanitizers import sanitized
from tests.reliability.table import Survived

SEED = int(os.environ.get("RELIABILITY_SEED", "0"))
FLAGS = ("-O0", "-g1", "-fPIC", "-fopenmp", *SANITIZE)
CALLS = 8_000  # of a shard


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the kernels whose extension is under the sanitizers."""
    folder = tmp_path_factory.mktemp("sanitized")
    ignored = shutil.ignore_patterns("_native*", "__pycache__")
    shutil.copytree(ROOT / "kernels/rlhf_kernels", folder / "rlhf_kernels", ignore=ignored)
    shutil.move(sanitized(folder, "address", *FLAGS).extension(), folder / "rlhf_kernels")
    return folder


def ended(package: Path, isa: str, seed: int, n: int) -> subprocess.CompletedProcess[str]:
    """`sanitized_calls` in a process of its own."""
    # libstdc++ must be there when libasan looks for what it wraps, and Python itself does not bring it
    names = ("libasan.so", "libubsan.so", "libstdc++.so")
    libraries = [native_build.run(["g++", f"-print-file-name={name}"]).strip() for name in names]
    command = [sys.executable, "-m", "tests.reliability.sanitized_calls"]
    command += [str(package / "rlhf_kernels/_native.so"), isa, str(seed), str(n)]
    own = {
        "PYTHONPATH": os.pathsep.join(map(str, (package, ROOT))),
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1",  # leaks: of Python and torch at exit
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "PYTHONMALLOC": "malloc",
    }
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **own}, capture_output=True, text=True)


@pytest.mark.long
@pytest.mark.parametrize("isa", ISAS)
def test_no_call_of_two_threads_is_reported(package: Path, isa: str, survived: Survived) -> None:
    planted = ended(package, isa, SEED, 0)
    assert planted.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in planted.stderr
    done = ended(package, isa, SEED + native.isas().index(isa), CALLS)
    assert done.returncode == 0, f"seed {SEED}\n{done.stdout}{done.stderr[-8000:]}"
    told = json.loads(done.stdout)
    assert not told["faults"]
    counts = told["counts"]
    print(f"seed {SEED}:", counts)
    assert set(counts) == {maker.__name__[1:] for maker in MAKERS}
    assert sum(counts.values()) == CALLS
    survived("sanitized", CALLS)
