#!/usr/bin/env python
"""Wheels of the benchmarks' peers for a GPU machine that reaches no network and brings its own torch.

    python bench/gpu/wheels.py list
    python bench/gpu/wheels.py fetch [--python 3.12] [--pieces runs/wheels]
    python bench/gpu/wheels.py install [--pieces runs/wheels] [--target runs/peers]

`fetch` is for the machine with a network: pip downloads the wheels for that Python on Linux x86-64, and they become one
archive, cut into pieces of at most 48 MiB, beside wheels.json with their checksums. The pieces may travel one by one.

`install` is for the other one. It joins the pieces and lets pip unpack the wheels into a folder of their own, without
an index and without what they depend on. It prints the line for a shell that makes them importable:
eval "$(python bench/gpu/wheels.py install)". The machine's own packages stay as they are; a wheel of torch or triton
is refused.

Nothing is left half-written. Exit code: 0; 2 for bad input, with one line that says what is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from packaging.tags import sys_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from rlhf_bench import PEERS

ROOT = Path(__file__).resolve().parents[2]

PIECE = 48 * 2**20
"""Bytes of a piece at most: 64 MiB travel at a time, the working tree among them."""
INDEX = "wheels.json"
NEEDS = {  # what the peers import and a machine with torch and transformers lacks; QuACK pins the first four
    "nvidia-cutlass-dsl": ("4.6.2", "quack-kernels, liger-kernel on Hopper"),
    "nvidia-cutlass-dsl-libs-base": ("4.6.2", "nvidia-cutlass-dsl"),
    "nvidia-cutlass-dsl-libs-core": ("4.6.2", "nvidia-cutlass-dsl"),
    "nvidia-cutlass-dsl-libs-cu13": ("4.6.2", "nvidia-cutlass-dsl, CUDA 13"),
    "apache-tvm-ffi": ("0.1.15.post2", "quack-kernels, liger-kernel on Hopper"),
    "torch-c-dlpack-ext": ("0.1.5", "quack-kernels"),
    "flash-attn-4": ("4.0.0b36", "the engine's attention; needs what quack-kernels needs"),
    "datasets": ("5.2.0", "trl"),
    "dill": ("0.4.1", "datasets"),
    "multiprocess": ("0.70.19", "datasets"),
}
NO_WHEEL = ("flash-attn",)  # its authors publish source alone
THE_MACHINES_OWN = ("torch", "triton")
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 28, 34)] + ["manylinux2014_x86_64"]


def wheels() -> dict[str, tuple[str, str]]:
    """Distribution → version, and what it is for."""
    peers = {name: (version, "a peer") for name, version in PEERS.items() if name not in NO_WHEEL}
    return peers | NEEDS


# --- cutting and joining ---------------------------------------------------------------------------------------------


def cut(found: Sequence[Path], folder: Path, *, python: str, piece: int = PIECE) -> list[Path]:
    """Put wheels into one archive, in pieces, and describe them.

    Args:
        found: paths of wheels.
        folder: where pieces and index go; replaced if it holds those of an earlier call.
        python: version of Python that the wheels are for.
        piece: bytes of a piece at most.

    Returns:
        The pieces' paths.

    Raises:
        ValueError: two wheels of one name, or a folder that holds something else.
    """
    names = [path.name for path in found]
    if len(set(names)) != len(names):
        raise ValueError(f"wheels: expected each once, got {', '.join(names)}")
    with _replacing(folder) as scratch:
        whole = scratch / "wheels.tar"
        with tarfile.open(whole, "w") as archive:
            for path in sorted(found):
                archive.add(path, path.name)
        pieces = []
        with whole.open("rb") as file:
            while block := file.read(piece):
                part = scratch / f"wheels.tar.{len(pieces):02}"
                part.write_bytes(block)
                digest = hashlib.sha256(block).hexdigest()
                pieces.append({"name": part.name, "bytes": len(block), "sha256": digest})
        whole.unlink()
        index = {"python": python, "wheels": sorted(names), "pieces": pieces}
        (scratch / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return [folder / str(part["name"]) for part in pieces]


def join(folder: Path, into: Path) -> list[Path]:
    """Write the wheels of all pieces into a folder.

    Raises:
        ValueError: the index or a piece is missing or damaged, or a wheel is not for this machine.
    """
    index = _index(folder)
    _check_wheels(index["wheels"])
    for part in index["pieces"]:
        path = folder / part["name"]
        if not path.is_file():
            raise ValueError(f"pieces: expected {len(index['pieces'])} in {folder}, got none called {path.name}")
        if path.stat().st_size != part["bytes"] or _digest(path) != part["sha256"]:
            raise ValueError(f"pieces: expected {path.name} as it was cut, got another size or checksum")
    whole = into / "wheels.tar"
    with whole.open("wb") as target:
        for part in index["pieces"]:
            with (folder / part["name"]).open("rb") as source:
                shutil.copyfileobj(source, target)
    with tarfile.open(whole) as archive:
        archive.extractall(into, filter="data")
    whole.unlink()
    return [into / name for name in index["wheels"]]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        assert isinstance(index["python"], str)
        assert all(Path(part["name"]).name == part["name"] for part in index["pieces"])
        assert all(Path(name).name == name for name in index["wheels"])
    except FileNotFoundError:
        raise ValueError(f"pieces: expected a folder that `fetch` made, got {folder} without {INDEX}") from None
    except (AssertionError, KeyError, TypeError, ValueError):
        raise ValueError(f"pieces: expected {path} as `fetch` wrote it, got something else") from None
    return dict(index)


def _check_wheels(names: Sequence[str]) -> None:
    """Raise ValueError for a wheel that this Python cannot import, or that would hide the machine's torch."""
    supported = set(sys_tags())
    for name in names:
        try:
            distribution, _, _, tags = parse_wheel_filename(name)
        except InvalidWheelFilename:
            raise ValueError(f"wheels: expected names of wheels, got {name!r}") from None
        if distribution in THE_MACHINES_OWN:
            raise ValueError(f"wheels: expected none of {' and '.join(THE_MACHINES_OWN)}, got {name}")
        if supported.isdisjoint(tags):
            this = f"Python {sys.version_info.major}.{sys.version_info.minor} ({next(sys_tags())})"
            raise ValueError(f"wheels: expected ones for {this}, got {name}")


@contextlib.contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """A new folder that takes the place of `folder` at the end, or vanishes if an error comes before.

    Raises:
        ValueError: `folder` holds something else than what this program wrote.
    """
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / INDEX).is_file())):
        raise ValueError(f"expected a new folder, or one that this program wrote, got {folder}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise ValueError(f"expected a folder that can be written, got {folder}: {error.strerror}") from None
    try:
        yield scratch
        scratch.chmod(0o755)  # mkdtemp makes it its owner's alone
        if folder.exists():
            shutil.rmtree(folder)
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


# --- pip -------------------------------------------------------------------------------------------------------------


def fetch(folder: Path, python: str) -> list[Path]:
    """Download all `wheels()` for a version of Python and cut them; the pieces' paths. Raises ValueError."""
    if not re.fullmatch(r"3\.\d+", python):
        raise ValueError(f"--python: expected a version such as 3.12, got {python!r}")
    wanted = [f"{name}=={version}" for name, (version, _) in wheels().items()]
    options = ["--implementation", "cp", "--python-version", python]
    for platform in PLATFORMS:
        options += ["--platform", platform]
    with tempfile.TemporaryDirectory() as scratch:
        _pip("download", "--no-deps", "--only-binary=:all:", *options, "--dest", scratch, *wanted)
        return cut(sorted(Path(scratch).glob("*.whl")), folder, python=python)


def install(pieces: Path, target: Path) -> list[str]:
    """Join the pieces and unpack their wheels; the folders for PYTHONPATH. Raises ValueError."""
    with _replacing(target) as scratch, tempfile.TemporaryDirectory() as joined:
        found = join(pieces, Path(joined))
        _pip("install", "--no-deps", "--no-index", "--no-compile", "--target", str(scratch), *map(str, found))
        shutil.copyfile(pieces / INDEX, scratch / INDEX)
    return [str(target), *_more_paths(target)]


def _more_paths(target: Path) -> list[str]:
    """Folders that .pth files in `target` add. Python reads such files in site-packages, not on PYTHONPATH."""
    program = "import site, sys; site.addsitedir(sys.argv[1]); print('\\n'.join(sys.path))"
    environment = os.environ | {"PYTHONPATH": str(target)}
    done = subprocess.run(
        [sys.executable, "-c", program, str(target)], env=environment, capture_output=True, text=True, check=True
    )
    return [path for path in done.stdout.splitlines() if Path(path).is_relative_to(target) and path != str(target)]


def _pip(*arguments: str) -> None:
    """Run pip. Raises ValueError with its last error."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        raise ValueError(f"pip {arguments[0]}: {errors[-1] if errors else f'exit code {done.returncode}'}")


# --- the command -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="name the wheels and what they are for")
    fetching = commands.add_parser("fetch", help="download the wheels and cut them into pieces; needs a network")
    fetching.add_argument("--python", default="3.12", metavar="VERSION", help="of the GPU machine (default: 3.12)")
    installing = commands.add_parser("install", help="join the pieces and unpack the wheels into a folder")
    for command in (fetching, installing):
        command.add_argument("--pieces", type=Path, default=ROOT / "runs" / "wheels", metavar="DIR")
    installing.add_argument("--target", type=Path, default=ROOT / "runs" / "peers", metavar="DIR")
    options = parser.parse_args(arguments)
    try:
        if options.command == "list":
            for name, (version, purpose) in wheels().items():
                print(f"{name:32}{version:16}{purpose}")
        elif options.command == "fetch":
            for path in fetch(options.pieces.resolve(), options.python):
                print(f"{path}  {path.stat().st_size / 2**20:.1f} MiB")
        else:
            paths = install(options.pieces.resolve(), options.target.resolve())
            print(f"export PYTHONPATH={os.pathsep.join(paths)}${{PYTHONPATH:+:$PYTHONPATH}}")
    except (OSError, ValueError) as error:
        print(f"gpu_wheels: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
