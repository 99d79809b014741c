"""Where tests of the CUDA kernels run: on a GPU, and as fibers on the CPU; where those of the Triton kernels run.

The `host` runs build csrc/cuda with g++ and tests/kernels/cuda_on_host/cuda_runtime.h in place of NVIDIA's header. All
but the device is as on a GPU: kernels, C functions, argument lists, public functions.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import pytest
import torch
from rlhf_kernels.runtime import cuda_native, cuda_support, native, registry

from tests.kernels import native_build
from tests.kernels.checks import ISAS
from tests.kernels.interpreter import TEST, InterpretedTests

ROOT = Path(__file__).resolve().parents[2]
_running: list[InterpretedTests] = []


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the interpreter's tests before the first test if one of this session asks for their result.

    Not in each of several processes that share a session: there whoever runs that test starts them.
    """
    if hasattr(session.config, "workerinput"):
        return
    wanted = [item for item in session.items if item.name == TEST]
    if wanted and len(session.items) > len(wanted) and not session.config.option.collectonly:
        skipped = [mark for mark in wanted[0].iter_markers("skipif") if mark.args[0]]
        if not skipped:
            _running.append(InterpretedTests())


def pytest_sessionfinish() -> None:
    """A session that is stopped leaves nothing behind."""
    while _running:
        _running.pop().end()


@pytest.fixture
def interpreted() -> InterpretedTests:
    """The interpreter's tests, started now unless they are under way."""
    if not _running:
        _running.append(InterpretedTests())
    return _running[0]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(params=["reference", *ISAS])
def backend(request):
    """The reference, and the native code with each instruction set."""
    if request.param == "reference":
        with registry.use_backend("reference"):
            yield "reference"
    else:
        with registry.use_backend("cpu"), native.use_isa(request.param):
            yield "cpu"


@pytest.fixture(params=ISAS)
def isa(request):
    """An instruction set in use."""
    with native.use_isa(request.param):
        yield request.param


@pytest.fixture(scope="session")
def host_library(tmp_path_factory):
    """The CUDA kernels for the CPU, compiled once even where several processes share a session."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    import fcntl  # there is none on Windows

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all processes
    # its sources in the name: a seeded bug's session may have the folder of all sessions
    library = folder / f"cuda_on_host_{cuda_native.source_key(ROOT / 'csrc')}.so"
    with (folder / "cuda_on_host.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            build_host_library(library)
    return cuda_native.load(library)


def build_host_library(library: Path) -> None:
    """Compile csrc/cuda with g++; the file is there once it is complete."""
    key = cuda_native.source_key(ROOT / "csrc")
    flags = ["-O1", "-fPIC", "-shared", *native_build.CUDA_ON_HOST, f'-DRLHF_SOURCE_KEY="{key}"', "-x", "c++"]
    units = sorted(map(str, (ROOT / "csrc/cuda").glob("*.cu")))
    made = library.with_suffix(".part")
    native_build.run(["g++", *native_build.FLAGS, *flags, *units, "-o", made])
    made.replace(library)


@pytest.fixture(scope="session")
def sanitized(tmp_path_factory):
    """csrc/cpu under ASan and UBSan: minutes of compiling, once for all programs and for the extension."""
    flags = ("-O0", "-g1", "-fPIC", "-fopenmp", *native_build.SANITIZE)
    return native_build.build(tmp_path_factory.mktemp("sanitized"), "g++", *flags)


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
