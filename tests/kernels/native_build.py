"""Builds of csrc/cpu for the tests, without Python bindings: objects once per compiler and flags, then any driver.

A driver is `native_<name>_main.cpp` beside this file. Every driver links the same objects.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ["-std=c++17", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-I", str(ROOT / "csrc")]
DRIVERS = tuple(
    sorted(path.stem[7:-5] for path in Path(__file__).parent.glob("native_*_main.cpp") if "cases" not in path.stem)
)
"""Drivers that check themselves and print `CLEAN`."""
CLEAN = "native code is clean"
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
CUDA_ON_HOST = ("-Wno-unknown-pragmas", "-I", str(ROOT / "tests/kernels/cuda_on_host"))
"""Flags for CUDA code as fibers of one CPU thread."""


def sources() -> list[Path]:
    """All of csrc/cpu."""
    return [path for folder in ("cpu", "cpu/variants") for path in sorted((ROOT / "csrc" / folder).glob("*.cpp"))]


def needs(*tools: str) -> None:
    """Skip the running test if a program is absent."""
    for tool in tools:
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")


def run(command: Sequence[str | Path], cwd: Path | None = None, **environment: str) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


@dataclass(frozen=True, kw_only=True)
class Build:
    """csrc/cpu as objects of one compiler."""

    command: list[str]  # compiler and flags
    objects: list[Path]
    folder: Path

    def driver(self, name: str) -> Path:
        """The program `native_<name>_main.cpp`."""
        return self.program(ROOT / f"tests/kernels/native_{name}_main.cpp")

    def program(self, source: Path, *flags: str) -> Path:
        """`source` as a program, linked with all of csrc/cpu."""
        target = self.folder / source.stem
        if not target.exists():
            run([*self.command, *flags, source, *self.objects, "-o", target])
        return target

    def extension(self) -> Path:
        """The Python extension of these objects. Its bindings go without UBSan, which doubles their compiling."""
        pybind11 = pytest.importorskip("pybind11")
        folders = (pybind11.get_include(), sysconfig.get_paths()["include"])
        include = [word for folder in folders for word in ("-isystem", folder)]
        units = [ROOT / "csrc/bindings.cpp", *sorted((ROOT / "csrc/bindings").glob("*.cpp"))]
        flags = ["-fPIC", "-fvisibility=hidden", "-fno-sanitize=undefined", *include]
        objects = compiled([*self.command, *flags], units, self.folder)
        target = self.folder / "_native.so"
        run([*self.command, "-shared", *self.objects, *objects, "-o", target])
        return target


def compiled(command: list[str], units: Sequence[Path], folder: Path) -> list[Path]:
    """An object in `folder` for each source, compiled on every core."""

    def compile_one(source: Path) -> Path:
        target = folder / f"{source.parent.name}_{source.stem}.o"
        run([*command, "-c", source, "-o", target])
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_one, units))


def build(folder: Path, compiler: str, *flags: str) -> Build:
    """Compile csrc/cpu with `compiler` into `folder`."""
    command = linking(folder, compiler, *flags)
    return Build(command=command, objects=compiled(command, sources(), folder), folder=folder)


def linking(folder: Path, compiler: str, *flags: str) -> list[str]:
    """A command that compiles and links; skips the running test if compiler or a library is absent."""
    needs(compiler)
    command = [compiler, *FLAGS, *flags]
    probe = folder / "probe.cpp"
    probe.write_text("int main() { return 0; }\n")
    tried = subprocess.run([*command, str(probe), "-o", str(folder / "probe")], capture_output=True, text=True)
    if tried.returncode != 0:
        pytest.skip(f"{compiler} {' '.join(flags)} cannot link here: {tried.stderr.strip().splitlines()[-1]}")
    return command
