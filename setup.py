"""Builds `rlhf_kernels._native` from csrc/ with pybind11 alone: neither torch nor its headers are needed.

The extension is optional. Without a working compiler the package installs all the same and runs on Triton or
the reference; `rlhf_kernels.runtime.native.missing()` says why. `RLHF_ENGINE_NATIVE=0` skips it on purpose.
The CUDA sources travel as they are, in rlhf_kernels/csrc, and are compiled where there is a GPU (`cuda_native`).
The description on a package index is README.md. Everything else about the project stands in pyproject.toml.
"""

import os
import re
import sys
import tempfile
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError, LinkError

ROOT = Path(__file__).resolve().parent

# The wheel must run on any CPU of its architecture, so no -march=native. Without -ffp-contract=off the
# compiler may fuse a multiply and an add where the CPU can, and results would differ between machines.
COMPILE = ["-O3", "-ffp-contract=off", "-Wall", "-Wextra"]
OPENMP = ["-fopenmp"] if sys.platform.startswith("linux") else []  # Apple's clang has none
NO_OPENMP = ["-Wno-unknown-pragmas"]  # its pragmas are then ignored, and native code uses one thread


def readme() -> str:
    """README.md with links that lead somewhere on a package index, too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address = f"{project['urls']['Repository']}/blob/main/"
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"\]\((?!https?:|#)", f"]({address}", text)


def native_extensions() -> list:
    choice = os.environ.get("RLHF_ENGINE_NATIVE", "1")
    if choice not in ("0", "1"):
        raise SystemExit(f"RLHF_ENGINE_NATIVE: expected 0 or 1, got {choice!r}")
    if choice == "0":
        return []
    # not needed, and perhaps not there, when skipped
    from pybind11.setup_helpers import ParallelCompile, Pybind11Extension

    ParallelCompile(default=0).install()  # on every core

    sources = [
        ROOT / "csrc" / "bindings.cpp",
        *(p for d in ("bindings", "cpu", "cpu/variants") for p in sorted((ROOT / "csrc" / d).glob("*.cpp"))),
    ]
    headers = sorted((ROOT / "csrc").rglob("*.h"))
    return [
        Pybind11Extension(
            "rlhf_kernels._native",
            # setuptools wants paths relative to setup.py
            [str(path.relative_to(ROOT)) for path in sources],
            depends=[str(path.relative_to(ROOT)) for path in headers],
            include_dirs=[str(ROOT / "csrc")],
            cxx_std=17,
            extra_compile_args=[*COMPILE, *(OPENMP or NO_OPENMP)],
            extra_link_args=OPENMP,
            optional=True,
        )
    ]


class BuildExtOpenMpOrNot(build_ext):
    """Builds without OpenMP where the compiler has none: on Linux, clang without its libomp."""

    def build_extensions(self) -> None:
        if OPENMP and not self._links_openmp():
            self.warn("the compiler has no OpenMP, so native code will use one thread (clang needs libomp)")
            for extension in self.extensions:
                extension.extra_compile_args = [x for x in extension.extra_compile_args if x not in OPENMP] + NO_OPENMP
                extension.extra_link_args = [x for x in extension.extra_link_args if x not in OPENMP]
        super().build_extensions()

    def _links_openmp(self) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "openmp.cpp"
            source.write_text("#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }\n")
            try:
                objects = self.compiler.compile([str(source)], output_dir=folder, extra_postargs=OPENMP)
                program = str(Path(folder) / "openmp")
                self.compiler.link_executable(objects, program, extra_postargs=OPENMP, target_lang="c++")
            except (CompileError, LinkError):
                return False
        return True


class BuildPyWithCudaSources(build_py):
    """Copies csrc/cuda and csrc/common into the package; an editable install finds them in the checkout."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for source in self._cuda_sources():
                target = Path(self.build_lib) / "rlhf_kernels" / source
                self.mkpath(str(target.parent))
                self.copy_file(source, str(target))

    def get_source_files(self) -> list:  # what a source distribution takes along
        return [*super().get_source_files(), *self._cuda_sources()]

    def _cuda_sources(self) -> list:
        found = [*(ROOT / "csrc" / "cuda").glob("*.cu*"), *(ROOT / "csrc" / "common").glob("*.h")]
        return [str(path.relative_to(ROOT)) for path in sorted(found)]


setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    ext_modules=native_extensions(),
    cmdclass={"build_ext": BuildExtOpenMpOrNot, "build_py": BuildPyWithCudaSources},
)
