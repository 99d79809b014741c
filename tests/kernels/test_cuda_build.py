"""Compiling, finding and loading the CUDA library; what its machine code needs; its arithmetic under the sanitizers."""

import ctypes
import ctypes.util
import logging
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from rlhf_kernels.runtime import aot, cuda_native, cuda_support, registry

from . import native_build
from .native_build import ROOT


def _nvcc():
    try:
        return cuda_native.find_nvcc()
    except cuda_native.BuildError:
        return None


needs_nvcc = pytest.mark.skipif(_nvcc() is None, reason="needs nvcc")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


# --- machine code ---------------------------------------------------------------------------------------------------


@needs_nvcc
@pytest.mark.long
@pytest.mark.parametrize("target", ["90a", "80", "90"])
def test_machine_code(target):
    """No spills, no local memory, and registers that let a multiprocessor hold all blocks that its threads allow."""
    kernels = {}
    for unit in (ROOT / "csrc/cuda").glob("*.cu"):
        kernels |= aot.ptxas_usage(unit, f"arch=compute_{target},code=sm_{target}")
    names = "gae_forward_kernel gae_backward_kernel "
    names += "policy_kernel policy_statistics_kernel policy_gradient_kernel value_kernel value_statistics_kernel"
    for name in names.split():
        for letter in "fd":  # float, double: as C++ mangles a template's argument
            assert any(re.search(rf"\d+{name}I{letter}", kernel) for kernel in kernels), f"{name}<{letter}> is missing"
    for kernel, usage in kernels.items():
        assert usage["spills"] == usage["stack"] == 0, f"{kernel}: {usage}"
        # 65536 registers: two blocks of 512 threads (gae) or two of 256, the latter in fp64 only
        most = 64 if "gae" in kernel else 128
        assert usage["registers"] <= most, f"{kernel}: {usage}"


# --- arithmetic on the CPU ------------------------------------------------------------------------------------------


def test_common_code_under_sanitizers(tmp_path):
    flags = ("-O1", "-g1", *native_build.SANITIZE, *native_build.CUDA_ON_HOST)
    program = tmp_path / "program"
    sources = ROOT / "tests/kernels/cuda_common_main.cpp"
    native_build.run([*native_build.linking(tmp_path, "g++", *flags), sources, "-o", program])
    assert native_build.run([program]).strip() == "common code is clean"


@pytest.mark.long
def test_kernels_on_the_cpu_under_sanitizers(sanitized):
    """Compared with the CPU's own code, so it is linked with csrc/cpu."""
    program = sanitized.program(ROOT / "tests/kernels/cuda_main.cpp", *native_build.CUDA_ON_HOST)
    assert native_build.run([program]).strip() == "cuda code is clean"


# --- the library ----------------------------------------------------------------------------------------------------


@needs_nvcc
@pytest.mark.long  # compiles for three targets
def test_built_library(tmp_path):
    """What the command makes, with this machine's nvcc and no GPU."""
    command = [sys.executable, "-W", "error", "-m", "rlhf_kernels.runtime.cuda_native", "--build", tmp_path]
    built = Path(native_build.run(command, PYTHONPATH=str(ROOT / "kernels")).strip())
    assert list(tmp_path.iterdir()) == [built]
    library = cuda_native.load(built)  # every one of `functions` is there
    assert library.rlhf_workspace(0) == library.rlhf_workspace(1024) < library.rlhf_workspace(1025)
    symbols = native_build.run(["nm", "-D", "--defined-only", built])
    exported = {line.split()[-1] for line in symbols.splitlines()}
    about = {"rlhf_source_key", "rlhf_error_string", "rlhf_probe", "rlhf_workspace"}
    assert exported == about | cuda_native.functions().keys()
    linked = native_build.run(["ldd", built])
    assert "cuda" not in linked.replace(str(built), "")  # the runtime is inside, the driver is opened when it is needed
    assert library.rlhf_gae_forward_float32(*[0] * 10, -1, 4, 1.0, 1.0, 0, 0, 0) == 1  # cudaErrorInvalidValue
    assert library.rlhf_gae_forward_float32(*[0] * 10, 0, 4, 1.0, 1.0, 0, 0, 0) == 0  # nothing to do
    assert library.rlhf_error_string(1) == b"invalid argument"
    if not torch.cuda.is_available():
        assert library.rlhf_probe() != 0
        buffer = ctypes.create_string_buffer(64)
        address = ctypes.addressof(buffer)
        rows = (address, 4, 1, address, 4, 1, address, 4, 1, 0)
        code = library.rlhf_gae_forward_float32(*rows, 1, 4, 1.0, 1.0, address, address, 0)
        assert code not in (0, 1)  # a launch without a driver says so
    # one of other sources is refused
    key = cuda_native.source_key(ROOT / "csrc")
    changed = tmp_path / "changed.so"
    changed.write_bytes(built.read_bytes().replace(key.encode(), b"0123456789abcdef"))
    with pytest.raises(cuda_native.BuildError, match=f"from other sources \\(0123456789abcdef; here: {key}\\)"):
        cuda_native.load(changed)


def test_what_is_no_library_is_refused(tmp_path):
    with pytest.raises(cuda_native.BuildError, match="does not load"):
        cuda_native.load(tmp_path / "nothing.so")
    with pytest.raises(cuda_native.BuildError, match="is no library of rlhf_kernels"):
        cuda_native.load(Path(ctypes.util.find_library("m") or "libm.so.6"))


# --- a compiler that is not there, fails, or races: a shell script stands in for nvcc --------------------------------


@pytest.fixture
def fake_nvcc(tmp_path, monkeypatch):
    """Installs a script as the only nvcc, in an empty cache; it is given what follows `nvcc`."""
    home = tmp_path / "toolkit"
    (home / "bin").mkdir(parents=True)

    def install(body, version="release 99.0"):
        script = home / "bin" / "nvcc"
        script.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo "{version}"; exit 0; fi\n{body}\n')
        script.chmod(0o755)

    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(cuda_native.ENVIRONMENT_VARIABLE, raising=False)
    return install


LAST_ARGUMENT = 'for last in "$@"; do :; done'


def test_build_replaces_whole_files(fake_nvcc, tmp_path):
    fake_nvcc(f"{LAST_ARGUMENT}\necho one > $last")
    folder = tmp_path / "out"
    library = cuda_native.build(folder)
    with library.open() as loaded:  # a process that has it mapped keeps it
        fake_nvcc(f"{LAST_ARGUMENT}\necho two > $last")
        cuda_native.build(folder)
        assert (loaded.read(), library.read_text()) == ("one\n", "two\n")
    fake_nvcc(f"{LAST_ARGUMENT}\necho half > $last\necho broken code >&2\nexit 2")
    with pytest.raises(cuda_native.BuildError, match=r"nvcc failed \(.*-gencode.*\): broken code"):
        cuda_native.build(folder)
    assert library.read_text() == "two\n"  # a failed build leaves the one that is there
    assert [path.name for path in folder.iterdir()] == [cuda_native.LIBRARY_NAME]


def test_builds_that_race_agree(fake_nvcc, tmp_path):
    fake_nvcc(f"{LAST_ARGUMENT}\nsleep 0.2\necho whole > $last")
    with ThreadPoolExecutor(2) as pool:
        made = set(pool.map(cuda_native.build, [tmp_path / "out"] * 2))
    assert made == {tmp_path / "out" / cuda_native.LIBRARY_NAME}
    assert (tmp_path / "out" / cuda_native.LIBRARY_NAME).read_text() == "whole\n"
    assert len(list((tmp_path / "out").iterdir())) == 1


def test_cache_depends_on_compiler_and_sources(fake_nvcc, tmp_path, monkeypatch):
    fake_nvcc("exit 1")
    one = cuda_native.cache_folder()
    assert one == cuda_native.cache_folder()
    assert one.is_relative_to(tmp_path / "cache" / "rlhf-engine" / "cuda")
    fake_nvcc("exit 1", version="release 99.1")
    two = cuda_native.cache_folder()
    sources = shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    (sources / "common" / "affine_map.h").open("a").write("// changed\n")
    monkeypatch.setattr(cuda_native, "source_folder", lambda: sources)
    assert len({one, two, cuda_native.cache_folder()}) == 3


def test_missing_names_every_reason(fake_nvcc, tmp_path, monkeypatch, caplog):
    def reason():
        cuda_native.library.cache_clear()
        return cuda_native.missing()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    try:
        assert reason() == "there is no CUDA device (torch.cuda.is_available() is False)"
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.version, "cuda", None)
        assert "torch was not built for CUDA" in reason()
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        fake_nvcc("echo no such flag >&2; exit 1")
        with caplog.at_level(logging.WARNING):
            assert "nvcc failed" in reason()
        assert "compiling the CUDA kernels into" in caplog.text
        assert "no such flag" in cuda_native.missing()
        fake_nvcc(f"{LAST_ARGUMENT}\necho text > $last")
        assert "does not load" in reason()
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        assert "cannot be written to" in reason()
        monkeypatch.setenv(cuda_native.ENVIRONMENT_VARIABLE, str(tmp_path / "elsewhere.so"))
        assert f"the CUDA library {tmp_path / 'elsewhere.so'} does not load" in reason()
        monkeypatch.delenv(cuda_native.ENVIRONMENT_VARIABLE)
        for name in ("CUDA_HOME", "CUDA_PATH"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(cuda_native, "SYSTEM_NVCC", str(tmp_path / "nowhere"))
        monkeypatch.setenv("PATH", str(tmp_path))
        assert "there is no CUDA compiler" in reason()
        monkeypatch.setattr(cuda_native, "__file__", str(tmp_path / "site" / "rlhf_kernels" / "cuda_native.py"))
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
        assert "the CUDA sources are neither in" in reason()
    finally:
        cuda_native.library.cache_clear()


@without_gpu
def test_without_a_gpu_nothing_is_compiled(fake_nvcc, tmp_path):
    fake_nvcc(f"touch {tmp_path / 'called'}")
    cuda_native.library.cache_clear()
    assert cuda_support.unsupported("cpu", torch.float32) == "it needs CUDA tensors, not cpu"
    assert "not torch.int8" in cuda_support.unsupported("cuda", torch.int8)
    assert registry.report("cuda")["gae"]["cuda"] == "there is no CUDA device (torch.cuda.is_available() is False)"
    with pytest.raises(RuntimeError, match="the CUDA kernels are missing: there is no CUDA device"):
        cuda_support.call("gae_forward", torch.float32, torch.device("cpu"))
    assert not (tmp_path / "called").exists()


def test_command_says_what_is_wrong(fake_nvcc, tmp_path, capsys):
    fake_nvcc("echo wrong >&2; exit 1")
    with pytest.raises(SystemExit) as stopped:
        cuda_native.main(["--build", str(tmp_path / "out")])
    assert stopped.value.code == 1
    assert capsys.readouterr().err.startswith("python -m rlhf_kernels.runtime.cuda_native: nvcc failed")
