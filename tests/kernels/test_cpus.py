"""Other compilers and other CPUs: csrc/cpu built by gcc and clang, run under emulators, and for aarch64.

Every test here compiles csrc/cpu or runs an emulator, so all of them are `long`. A test whose tool is absent is skipped
and names the tool. Debian has them in clang, libomp-dev, qemu-user and g++-aarch64-linux-gnu.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rlhf_kernels.runtime import native

from . import native_case_file, native_cases
from .native_build import CLEAN, DRIVERS, ROOT, Build, build, needs, run
from .native_case_file import Case

pytestmark = pytest.mark.long
on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="needs an x86-64 CPU")

# Optimised less than the extension: compiling is most of the work here.
OPENMP, NO_OPENMP = ("-O1", "-fopenmp"), ("-O1", "-Wno-unknown-pragmas")
HOST_BUILDS = {
    "gcc": ("g++", *OPENMP),
    "gcc_without_openmp": ("g++", *NO_OPENMP),
    "clang": ("clang++", *OPENMP),
    "clang_without_openmp": ("clang++", *NO_OPENMP),
}
# Static, so that no aarch64 libraries are looked for; clang finds those of gcc, without libomp.
AARCH64_BUILDS = {
    "gcc": ("aarch64-linux-gnu-g++", "-O3", "-fopenmp", "-static"),
    "clang": ("clang++", "--target=aarch64-linux-gnu", *NO_OPENMP, "-static"),
}

# Models of qemu and the instruction sets that the native code must find there. Emulators have no AVX-512.
X86_CPUS = {
    "qemu64": ["portable"],  # SSE3, which is less than torch needs
    "Nehalem": ["portable"],  # SSE4.2
    "SandyBridge": ["portable"],  # AVX without AVX2
    "Haswell": ["portable", "avx2"],
    "EPYC-Milan": ["portable", "avx2"],
}
AARCH64_CPUS = {
    "cortex-a72": ["portable", "neon"],  # ARMv8.0
    "max": ["portable", "neon", "neon_bf16"],  # all that the emulator knows
}


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Build]:
    """Objects of csrc/cpu for a compiler and flags, made once."""
    made: dict[tuple[str, ...], Build] = {}

    def get(*command: str) -> Build:
        if command not in made:
            made[command] = build(tmp_path_factory.mktemp("csrc_cpu"), *command)
        return made[command]

    return get


@pytest.fixture(scope="session")
def case_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cases of every op with their answers in float64."""
    path = tmp_path_factory.mktemp("cases") / "cases"
    native_cases.write(path)
    return path


def sets_of(output: str) -> list[str]:
    """The instruction sets that `native_cases_main` names in its first line."""
    name, *sets = output.splitlines()[0].split()
    assert name == "sets"
    return sets


def spoiled(case: Case, name: str) -> Case:
    """Return the case with twice the largest number in its answer `name`, which its label then ends with."""
    want = case.wants[name]
    flat = want.exact.flatten().clone()
    largest = torch.where(flat.isfinite(), flat, 0).abs().argmax()
    flat[largest] = 2 * flat[largest] if flat[largest] else 1
    wrong = want._replace(exact=flat.view(want.exact.shape))
    return case._replace(label=f"{case.label}/{name}", wants={**case.wants, name: wrong})


@on_x86
@pytest.mark.parametrize("name", HOST_BUILDS)
def test_every_compiler_agrees_with_float64(built, case_file, name):
    """On every instruction set of this machine, by the tiers; then two drivers whose threads wait for each other."""
    made = built(*HOST_BUILDS[name])
    output = run([made.driver("cases"), case_file])
    if native.missing() is None:
        assert sets_of(output) == native.isas()
    for driver in ("decode_step", "head"):
        assert run([made.driver(driver)]).strip() == CLEAN


@on_x86
def test_the_cases_find_a_wrong_answer(built, tmp_path):
    """The program names every wrong answer, of every op and on every set.

    It gets each case of a seed once for each of its answers, of which one number is another.
    """
    program = built(*HOST_BUILDS["gcc"]).driver("cases")
    wrong = [spoiled(case, name) for case in native_cases.cases(0) for name in case.wants]
    native_case_file.write(tmp_path / "wrong", wrong)
    done = subprocess.run([program, tmp_path / "wrong"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")
    found = re.findall(r"^FAILED (\S+) (\S+) (\S+): (\S+), ", done.stdout, re.MULTILINE)
    sets = sets_of(done.stdout)
    expected = [(isa, case.op, case.label, case.label.split("/")[1]) for isa in sets for case in wrong]
    assert sorted(found) == sorted(expected)
    assert "had cases" not in done.stdout, "an op is missing"


@on_x86
@pytest.mark.parametrize("cpu", X86_CPUS)
def test_no_illegal_instruction(built, case_file, cpu):
    """Every op by the tiers on older CPUs. The emulator ends a process at an instruction that its model lacks."""
    needs("qemu-x86_64")
    program = built(*HOST_BUILDS["gcc"]).driver("cases")
    assert sets_of(run(["qemu-x86_64", "-cpu", cpu, program, case_file])) == X86_CPUS[cpu]


@on_x86
@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
@pytest.mark.parametrize("cpu", [cpu for cpu in X86_CPUS if cpu != "qemu64"])
def test_no_illegal_instruction_in_the_extension(cpu):
    """The installed extension under torch, as setup.py compiles it; torch itself does not run on qemu64."""
    needs("qemu-x86_64")
    environment = {"OMP_NUM_THREADS": "1"}
    if cpu == "Nehalem":
        environment["OPENBLAS_CORETYPE"] = cpu  # numpy's library takes qemu's Nehalem for a Haswell
    sets = X86_CPUS[cpu]
    command = ["qemu-x86_64", "-cpu", cpu, sys.executable, "-m", "tests.kernels.native_once", *sets]
    output = run(command, cwd=ROOT, **environment)
    for name in sets:
        assert f"{name} agrees with the reference in linear_logprob" in output


@pytest.mark.parametrize("cpu", AARCH64_CPUS)
@pytest.mark.parametrize("name", AARCH64_BUILDS)
def test_aarch64_agrees_with_float64(built, case_file, name, cpu):
    """Every op by the tiers, with the answers of this machine."""
    needs("qemu-aarch64")
    output = run(["qemu-aarch64", "-cpu", cpu, built(*AARCH64_BUILDS[name]).driver("cases"), case_file])
    assert sets_of(output) == AARCH64_CPUS[cpu]


@pytest.mark.parametrize("driver", DRIVERS)
def test_drivers_on_aarch64(built, driver):
    """The drivers that check themselves, ragged sizes and refusals included, on every set."""
    needs("qemu-aarch64")
    program = built(*AARCH64_BUILDS["gcc"]).driver(driver)
    assert run(["qemu-aarch64", "-cpu", "max", program]).strip() == CLEAN
