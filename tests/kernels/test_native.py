"""The extension itself: addresses, absence, a build without a compiler, its C++ under the sanitizers."""

import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import zipfile

import pytest
import torch
from rlhf_kernels.runtime import native

from . import native_build
from .checks import ISAS, each, needs_native
from .native_build import ROOT


@pytest.mark.skipif(
    not os.environ.get("CI") or shutil.which("g++") is None or os.environ.get("RLHF_ENGINE_NATIVE") == "0",
    reason="only `make test` promises that the extension is built, and only where there is a compiler",
)
def test_the_extension_is_there():
    assert native.missing() is None  # or every test of the cpu backend would be skipped without a word


def test_addresses():
    x = torch.arange(12.0).reshape(3, 4)
    assert native.dense("x", x, torch.float32) == x.data_ptr()
    assert native.rows("x", x[1:, 1:], torch.float32) == (x.data_ptr() + 5 * 4, 4)
    assert native.rows("x", x[:, ::4], torch.float32) == (x.data_ptr(), 4)  # one column: no inner stride
    assert native.dense("x", x[:0], torch.float32) >= 0


@each(
    ("call", "error", "message"),
    [
        (lambda x: native.address("x", x, torch.float64), TypeError, "x: .* dtype torch.float64, got torch.float32"),
        (lambda x: native.address("x", x.to("meta"), x.dtype), ValueError, "x: expected a CPU tensor, got one on meta"),
        (lambda x: native.dense("x", x.t(), x.dtype), ValueError, "x: expected a contiguous tensor"),
        (lambda x: native.rows("x", x.t(), x.dtype), ValueError, r"x: expected inner stride 1, got strides \(1, 4\)"),
        (lambda x: native.rows("x", x[0], x.dtype), ValueError, r"x: expected 2 dimensions, got shape \(4,\)"),
    ],
)
def test_addresses_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(torch.zeros(3, 4))


def test_tensor_without_memory_of_its_own_is_refused():
    class Wrapper(torch.Tensor):  # what a DTensor is: a shape and a device, with the numbers elsewhere
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            raise NotImplementedError(function)

    with pytest.raises(TypeError, match="x: expected a tensor with memory of its own, got Wrapper"):
        native.address("x", Wrapper(torch.zeros(3)), torch.float32)


def test_unsupported_says_why():
    if native.missing() is None:
        assert native.unsupported("cpu", torch.float32) is None
        assert native.unsupported("cuda", torch.float32) == "it needs CPU tensors, not cuda"
        assert "not in torch.int8" in native.unsupported("cpu", torch.int8)
    else:
        assert native.unsupported("cpu", torch.float32) == native.missing()


@needs_native
def test_the_gil_is_released():
    n = 1 << 24  # tens of milliseconds of work
    x, mask, out = torch.zeros(n), torch.ones(n, dtype=torch.bool), torch.zeros(3, dtype=torch.float64)
    moments = native.function("masked_moments", torch.float32)

    def runs_meanwhile():
        started, finished = threading.Event(), threading.Event()

        def work():
            started.set()
            moments(x.data_ptr(), mask.data_ptr(), n, 1, out.data_ptr())
            finished.set()

        worker = threading.Thread(target=work)
        worker.start()
        started.wait()
        meanwhile = not finished.is_set()  # with the lock held throughout, this line always comes after the work
        worker.join()
        return meanwhile

    interval = sys.getswitchinterval()
    sys.setswitchinterval(10.0)  # the lock is not taken from a thread; it has to be given up
    try:
        assert any(runs_meanwhile() for _ in range(50))  # a busy machine may give this thread no core for a while
    finally:
        sys.setswitchinterval(interval)
    assert out.tolist() == [n, 0.0, 0.0]


# An editable install adds a finder of its own, which would find the checkout's extension for the copied package.
FORGET_CHECKOUT = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if getattr(f, "__name__", "") != "_EditableFinder"]
"""


def _run_beside(folder, code, *others):
    """Standard output of `code`, for which packages are those in `folder`, then those in `others`."""
    path = os.pathsep.join(map(str, (folder, *others)))
    return native_build.run([sys.executable, "-c", FORGET_CHECKOUT + code], cwd=folder, PYTHONPATH=path)


def _unpacked(wheel, folder):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


REFERENCE_SERVES = """
import torch
from rlhf_kernels.runtime import native, registry
from rlhf_kernels.gae import gae
report = registry.report("cpu")["gae"]
assert (report["auto"], report["reference"], report["cpu"]) == ("reference", "available", native.missing()), report
x = torch.ones(1, 2)
assert gae(x, x, x, gamma=1.0, lam=1.0).ret.tolist() == [[2.0, 1.0]]
try:
    gae(x, x, x, gamma=1.0, lam=1.0, backend="cpu")
except registry.BackendUnavailableError as error:
    print(error)
"""
NOT_BUILT = "backend='cpu' cannot serve gae: the native extension was not built; reinstall with"


def test_an_extension_that_does_not_load_says_why(tmp_path):
    ignored = shutil.ignore_patterns("_native*", "__pycache__")
    package = shutil.copytree(ROOT / "kernels/rlhf_kernels", tmp_path / "rlhf_kernels", ignore=ignored)
    (package / "_native.so").write_bytes(b"not a library")
    output = _run_beside(tmp_path, "from rlhf_kernels.runtime import native; print(native.missing())")
    assert output.startswith("the native extension does not load: ")


# No run is in the default lane: a file of variants/ holds every op, so the cheapest driver compiles all of csrc/cpu.
@pytest.mark.long
@each("name", native_build.DRIVERS)
def test_cpp_under_sanitizers(sanitized, name):
    assert native_build.run([sanitized.driver(name)]).strip() == native_build.CLEAN


@pytest.mark.parametrize("openmp", [True, False])
def test_a_late_or_slow_thread_holds_up_one_piece(tmp_path, openmp):
    """The driver of teams needs one file of csrc/cpu, so that it is compiled alone."""
    native_build.needs("g++")
    program = tmp_path / "team"
    sources = (ROOT / "tests/kernels/native_team_main.cpp", ROOT / "csrc/cpu/team.cpp")
    flags = ["-O1", "-fopenmp"] if openmp else ["-O1", "-Wno-unknown-pragmas"]
    native_build.run(["g++", *native_build.FLAGS, *flags, *sources, "-o", program])
    assert native_build.run([program]).strip() == native_build.CLEAN


@pytest.fixture
def checkout(tmp_path):
    """What a build reads, in a folder of its own: building leaves files behind."""
    pytest.importorskip("pybind11", reason="the build needs pybind11, which pip would fetch")
    target = tmp_path / "checkout"
    target.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "_native*")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, target)
    shutil.copytree(ROOT / "csrc", target / "csrc")
    for name in ("kernels/rlhf_kernels", "rlhf_engine", "bench/rlhf_bench"):
        shutil.copytree(ROOT / name, target / name, ignore=ignored)
    return target


def _build(checkout, command, **environment):
    """Run one build backend hook the way pip does, without its download of the build requirements."""
    code = f"from setuptools import build_meta; print(build_meta.{command}('out'))"
    (checkout / "out").mkdir(exist_ok=True)
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=checkout, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return checkout / "out" / run.stdout.strip().splitlines()[-1], run.stdout + run.stderr


def _without_openmp(path, rest):
    """A compiler that refuses -fopenmp, and else does `rest`."""
    path.write_text(f'#!/bin/sh\ncase " $* " in *" -fopenmp "*) exit 1 ;; esac\n{rest}\n')
    path.chmod(0o755)
    return str(path)


_FALSE = shutil.which("false") or "/bin/false"
NO_COMPILER = {"CC": _FALSE, "CXX": _FALSE}


@pytest.mark.parametrize(
    ("command", "environment"),
    [
        pytest.param("build_wheel", NO_COMPILER, id="wheel"),
        pytest.param("build_editable", {"RLHF_ENGINE_NATIVE": "0"}, id="editable-skipped"),
        pytest.param("build_editable", NO_COMPILER, id="editable", marks=pytest.mark.long),
        pytest.param("build_wheel", {"RLHF_ENGINE_NATIVE": "0"}, id="wheel-skipped", marks=pytest.mark.long),
    ],
)
def test_installs_without_a_compiler(checkout, tmp_path, command, environment):
    wheel, log = _build(checkout, command, **environment)
    names = zipfile.ZipFile(wheel).namelist()
    assert not any("/_native" in name for name in names)
    assert ('building extension "rlhf_kernels._native" failed' in log) == (environment is NO_COMPILER)
    if command == "build_wheel":
        assert {"rlhf_engine/__init__.py", "rlhf_bench/runner.py", "rlhf_kernels/gae/__init__.py"} <= set(names)
        assert not any(name.startswith(("kernels/", "tests/", "bench/", "csrc/")) for name in names)
        assert {"rlhf_kernels/csrc/cuda/gae.cu", "rlhf_kernels/csrc/common/affine_map.h"} <= set(names)
        assert "rlhf_kernels/runtime/kernel_table.json" in names
        if environment is NO_COMPILER:
            installed = _unpacked(wheel, tmp_path / "installed")
            assert _run_beside(installed, REFERENCE_SERVES).startswith(NOT_BUILT)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere OpenMP is never asked for")
def test_a_compiler_without_openmp_builds_the_extension(checkout, tmp_path):
    """By a compiler that makes empty files: which flags it gets is the point."""
    empty = 'while [ $# -gt 1 ]; do if [ "$1" = -o ]; then : > "$2"; fi; shift; done'
    compiler = _without_openmp(tmp_path / "compiler", empty)
    wheel, log = _build(checkout, "build_wheel", CC=compiler, CXX=compiler)
    assert "native code will use one thread" in log
    assert "-Wno-unknown-pragmas" in log
    assert any(name.startswith("rlhf_kernels/_native.") for name in zipfile.ZipFile(wheel).namelist())


@pytest.mark.long  # compiles the extension
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_wheel_from_sdist_has_the_extension(checkout):
    sdist, _ = _build(checkout, "build_sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(checkout / "unpacked")
    (unpacked,) = (checkout / "unpacked").iterdir()
    wheel, _ = _build(unpacked, "build_wheel")
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.startswith("rlhf_kernels/_native.") for name in names)
    assert {"rlhf_kernels/csrc/cuda/launch.cuh", "rlhf_kernels/csrc/common/ppo_terms.h"} <= set(names)
    assert "rlhf_kernels/runtime/kernel_table.json" in names


@pytest.mark.long  # compiles the extension
@pytest.mark.skipif(sys.platform != "linux", reason="names clang's own OpenMP library")
@pytest.mark.parametrize("openmp", [True, False])
def test_clang_builds_the_extension(checkout, tmp_path, openmp):
    """The wheel's extension agrees with the reference in every op, on every set of this machine."""
    native_build.needs("clang", "clang++")
    compilers = {"CC": "clang", "CXX": "clang++"}
    if not openmp:  # clang as it is where its library is not installed
        for variable, name in compilers.items():
            compilers[variable] = _without_openmp(tmp_path / name, f'exec {name} "$@"')
    wheel, log = _build(checkout, "build_wheel", **compilers)
    assert re.findall(r"csrc/\S+: (?:warning|error): .*", log) == []
    one_thread = "native code will use one thread" in log
    if openmp and one_thread:
        pytest.skip("needs clang's OpenMP library, which is in libomp-dev")
    assert one_thread == (not openmp)
    installed = _unpacked(wheel, tmp_path / "installed")
    (extension,) = (installed / "rlhf_kernels").glob("_native.*")
    content = extension.read_bytes()
    assert b"clang version" in content
    assert (b"libomp.so" in content) == openmp
    code = "import tests.kernels.native_once as once, rlhf_kernels; once.main([]); print(rlhf_kernels.__file__)"
    output = _run_beside(installed, code, ROOT)
    assert str(tmp_path) in output.splitlines()[-1]


# ---- instruction sets ------------------------------------------------------------------------------------------------

ORDER = (
    ["portable", "neon", "neon_bf16"]
    if platform.machine() == "aarch64"
    else ["portable", "avx2", "avx512", "avx512_bf16", "amx_bf16"]
)


@needs_native
def test_the_environment_holds_a_process_to_a_set(monkeypatch):
    before = native.isa()
    assert before == native.isas()[-1] or os.environ.get("RLHF_ENGINE_ISA")
    assert native.isas() == ORDER[: len(native.isas())]
    with native.use_isa(before):  # which puts back what was in use
        for name in native.isas():
            monkeypatch.setenv("RLHF_ENGINE_ISA", name)
            assert native._load() == (native.extension(), None)
            assert native.extension().isa() == name
        monkeypatch.setenv("RLHF_ENGINE_ISA", "auto")
        native._load()
        assert native.extension().isa() == native.isas()[-1]


@needs_native
def test_a_block_ends_with_the_set_that_it_found():
    before = native.isa()
    with native.use_isa("portable"):
        assert native.isa() == "portable"
        with pytest.raises(ZeroDivisionError), native.use_isa(native.isas()[-1]):
            raise ZeroDivisionError
        assert native.isa() == "portable"
    assert native.isa() == before


@needs_native
@each("name", ["avx1024", "AVX2", "", " portable", "avx2" if "neon" in ORDER else "neon", *ORDER[len(ISAS) :][:1]])
def test_an_unknown_set_is_refused_with_those_that_are_there(name):
    """As are sets of another architecture and those that this CPU lacks; what was in use stays in use."""
    before = native.isa()
    expected = re.escape(f"isa: expected {', '.join(['auto', *native.isas()])}, got {name}")
    with pytest.raises(ValueError, match=f"^{expected}$"):
        native.extension().set_isa(name)
    with pytest.raises(ValueError, match=f"^{expected}$"), native.use_isa(name):
        pass
    assert native.isa() == before


@needs_native
def test_an_unknown_set_in_the_environment_ends_the_import():
    code = """
try:
    import rlhf_kernels.runtime.native
except ValueError as error:
    print(error)
"""
    listed = ", ".join(["auto", *native.isas()])
    output = native_build.run([sys.executable, "-c", code], RLHF_ENGINE_ISA="sse9")
    assert output.strip() == f"RLHF_ENGINE_ISA: isa: expected {listed}, got sse9"
