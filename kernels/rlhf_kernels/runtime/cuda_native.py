"""The CUDA kernels of csrc/cuda: compile them once per machine, load them, say why they are missing.

The library has a plain C interface (addresses, sizes, strides, a stream; see csrc/cuda/launch.cuh), knows no torch and
carries its CUDA runtime in it, so one build serves every Python and every torch. On a machine with a GPU and without a
library, the first call of an op compiles one with nvcc into `$XDG_CACHE_HOME/rlhf-engine/cuda` (or ~/.cache/…). Its
name depends on the sources, nvcc's version and the flags. Several processes may do so at once: each compiles beside the
cache and renames a whole file into it.

`RLHF_ENGINE_CUDA_LIBRARY` names a library built elsewhere, from the same sources, by

    python -m rlhf_kernels.runtime.cuda_native --build DIR
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

ENVIRONMENT_VARIABLE = "RLHF_ENGINE_CUDA_LIBRARY"
LIBRARY_NAME = "librlhf_kernels_cuda.so"
SYSTEM_NVCC = "/usr/local/cuda/bin/nvcc"
DTYPES = ("float32", "float64")

FLAGS = ("-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall,-Wextra")
# Machine code for A100 (and all of 8.x) and for H100 and H200; PTX, which the driver compiles, for what is newer.
TARGETS = ("arch=compute_80,code=sm_80", "arch=compute_90a,code=sm_90a", "arch=compute_90,code=compute_90")

# Arguments of the C functions before the stream: p address, n size or stride, f flag or choice, d number.
SIGNATURES = {
    "gae_forward": "pnn pnn pnn p nn dd pp",
    "gae_backward": "pnn pnn pnn nn dd ppp",
    "ppo_loss_forward": "ppp pf p pp n ddd f dd p ppp",
    "ppo_loss_backward": "pp pf p d n pp",
    "value_loss_forward": "ppp pf p n d p ppp",
}
_C_TYPES = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "f": ctypes.c_int, "d": ctypes.c_double}

_log = logging.getLogger(__name__)


class BuildError(RuntimeError):
    """Error where there is no library and none can be made; the message gives the reason."""


# --- sources and compiler -------------------------------------------------------------------------------------------


def source_folder() -> Path:
    """The folder that holds cuda/ and common/: csrc/ of the checkout, or its copy inside an installed package."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "csrc", package.parents[1] / "csrc"):
        if (folder / "cuda" / "library.cu").is_file():
            return folder
    raise BuildError(f"the CUDA sources are neither in {package / 'csrc'} nor in {package.parents[1] / 'csrc'}")


def source_key(folder: Path) -> str:
    """Short hash of everything that is compiled; a library knows its own."""
    digest = hashlib.sha256()
    for path in sorted((*(folder / "cuda").glob("*.cu*"), *(folder / "common").glob("*.h"))):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def find_nvcc() -> str:
    """nvcc of $CUDA_HOME or $CUDA_PATH, on PATH, or of /usr/local/cuda."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    for candidate in (*(Path(home) / "bin" / "nvcc" for home in homes), shutil.which("nvcc"), SYSTEM_NVCC):
        if candidate and Path(candidate).is_file():
            return str(candidate)
    raise BuildError(
        "there is no CUDA compiler (looked for nvcc in CUDA_HOME, CUDA_PATH, PATH and /usr/local/cuda); "
        f"install the CUDA toolkit, or set {ENVIRONMENT_VARIABLE} to a library built elsewhere"
    )


def nvcc_version(nvcc: str) -> str:
    """Output of `nvcc --version`."""
    run = subprocess.run([nvcc, "--version"], capture_output=True, text=True)
    if run.returncode != 0:
        raise BuildError(f"{nvcc} --version failed: {run.stderr.strip()}")
    return run.stdout


def build(folder: Path) -> Path:
    """Compile csrc/cuda/*.cu into `folder`; returns the library. Replaces one that is there in a single step."""
    nvcc, sources = find_nvcc(), source_folder()
    targets = [word for target in TARGETS for word in ("-gencode", target)]
    define = f'-DRLHF_SOURCE_KEY="{source_key(sources)}"'
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as scratch:
        output = Path(scratch) / LIBRARY_NAME
        units = [str(path) for path in sorted((sources / "cuda").glob("*.cu"))]
        command = [nvcc, *FLAGS, *targets, define, "-I", str(sources), "-shared", "-cudart", "static", "--threads", "0"]
        run = subprocess.run([*command, *units, "-o", str(output)], capture_output=True, text=True, cwd=scratch)
        if run.returncode != 0:
            raise BuildError(f"nvcc failed ({' '.join(command)}): {(run.stderr or run.stdout).strip()}")
        return output.replace(folder / LIBRARY_NAME)


def cache_folder() -> Path:
    """Folder for the library of these sources, this nvcc and these flags."""
    key = hashlib.sha256("\0".join((nvcc_version(find_nvcc()), *FLAGS, *TARGETS)).encode()).hexdigest()[:16]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "rlhf-engine" / "cuda" / f"{source_key(source_folder())}-{key}"


# --- loading --------------------------------------------------------------------------------------------------------


def functions() -> dict[str, str]:
    """Arguments of every C function that queues work, by its full name."""
    return {f"rlhf_{name}_{dtype}": letters for name, letters in SIGNATURES.items() for dtype in DTYPES}


def load(path: Path) -> ctypes.CDLL:
    """A library with its functions' types declared. Refuses one that was built from other sources."""
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"the CUDA library {path} does not load: {error}") from error
    try:
        loaded.rlhf_source_key.restype = ctypes.c_char_p
    except AttributeError as error:
        raise BuildError(f"{path} is no library of rlhf_kernels: {error}") from error
    built_from, here = loaded.rlhf_source_key().decode(), source_key(source_folder())
    if built_from != here:
        raise BuildError(f"the CUDA library {path} was built from other sources ({built_from}; here: {here})")
    loaded.rlhf_error_string.restype = ctypes.c_char_p
    loaded.rlhf_error_string.argtypes = [ctypes.c_int]
    loaded.rlhf_workspace.restype = ctypes.c_int64
    loaded.rlhf_workspace.argtypes = [ctypes.c_int64]
    for name, letters in functions().items():
        function = getattr(loaded, name)
        function.argtypes = [*(_C_TYPES[x] for x in letters.replace(" ", "")), ctypes.c_void_p]
        function.restype = ctypes.c_int
    return loaded


def _find_or_build() -> Path:
    given = os.environ.get(ENVIRONMENT_VARIABLE)
    if given:
        return Path(given)
    folder = cache_folder()
    if not (folder / LIBRARY_NAME).is_file():
        _log.warning("compiling the CUDA kernels into %s, once for this machine", folder)
        try:
            build(folder)
        except OSError as error:  # a cache that cannot be written
            raise BuildError(f"the CUDA library cannot be written to {folder}: {error}") from error
    return folder / LIBRARY_NAME


@functools.cache
def library() -> tuple[ctypes.CDLL | None, str | None]:
    """The library and None, or None and the reason why there is none. Compiles it where it can and must."""
    if not torch.cuda.is_available():
        return None, "there is no CUDA device (torch.cuda.is_available() is False)"
    if torch.version.cuda is None:
        return None, "torch was not built for CUDA, and these kernels run on NVIDIA devices only"
    try:
        loaded = load(_find_or_build())
    except BuildError as error:
        return None, str(error)
    code = loaded.rlhf_probe()
    if code != 0:
        return None, f"the CUDA library does not work with this driver: {loaded.rlhf_error_string(code).decode()}"
    return loaded, None


def missing() -> str | None:
    """Reason why there are no CUDA kernels in this process, or None if there are."""
    return library()[1]


# --- command line -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m rlhf_kernels.runtime.cuda_native",
        description="Compile the CUDA kernels; needs nvcc and no GPU.",
    )
    parser.add_argument("--build", type=Path, metavar="DIR", required=True, help="where to put the library")
    options = parser.parse_args(arguments)
    try:
        print(build(options.build))
    except (BuildError, OSError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
