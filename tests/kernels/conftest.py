"""Where tests of the CUDA kernels run: on a GPU, and as fibers on the CPU.

The `host` runs build csrc/cuda with g++ and tests/kernels/cuda_on_host/cuda_runtime.h in place of NVIDIA's header. All
but the device is as on a GPU: kernels, C functions, argument lists, public functions.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path

import pytest
from rlhf_kernels import cuda_native, cuda_support

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def host_library(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    library = tmp_path_factory.mktemp("cuda_on_host") / "library.so"
    key = cuda_native.source_key(ROOT / "csrc")
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    include = ["-I", str(ROOT / "tests/kernels/cuda_on_host"), "-I", str(ROOT / "csrc")]
    units = sorted(map(str, (ROOT / "csrc/cuda").glob("*.cu")))
    command = ["g++", *flags, *include, f'-DRLHF_SOURCE_KEY="{key}"', "-x", "c++", *units, "-o", str(library)]
    build = subprocess.run(command, capture_output=True, text=True)
    assert build.returncode == 0, build.stderr
    return cuda_native.load(library)


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Where tensors go so that backend="cuda" serves them."""
    if request.param == "cuda":
        assert cuda_native.missing() is None
        yield "cuda"
        return
    library = request.getfixturevalue("host_library")
    with pytest.MonkeyPatch.context() as patch:  # the driver is what is missing here
        patch.setattr(cuda_native, "library", lambda: (library, None))
        patch.setattr(cuda_support, "DEVICE_TYPE", "cpu")
        patch.setattr(cuda_support, "stream_of", lambda device: contextlib.nullcontext(0))
        yield "cpu"
