"""Builds of csrc under sanitizers, each compiled once for all tests and processes that want it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from tests.kernels import native_build
from tests.kernels.native_build import ROOT, Build

BUILDS = ROOT / "runs" / "sanitizers"


def _digest(flags: tuple[str, ...]) -> str:
    """What the objects are made from."""
    digest = hashlib.sha256(repr(flags).encode())
    for path in sorted(path for folder in ("csrc", "tests") for path in (ROOT / folder).rglob("*.[ch]*")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


@contextlib.contextmanager
def held(name: str, *flags: str) -> Iterator[Build]:
    """csrc/cpu compiled with these flags, in this process alone for the length of the block.

    It stays for later blocks, until sources are others.
    """
    native_build.needs("g++")
    folder = BUILDS / f"{name}-{_digest(flags)}"
    folder.mkdir(parents=True, exist_ok=True)
    with (BUILDS / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for other in BUILDS.glob(f"{name}-*"):
            if other != folder:
                shutil.rmtree(other)
        command = native_build.linking(folder, "g++", *flags)
        objects = sorted((folder / "objects").glob("*.o"))
        if not objects:
            part = folder / "part"
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            native_build.compiled(command, native_build.sources(), part)
            part.replace(folder / "objects")  # all of them, or none
            objects = sorted((folder / "objects").glob("*.o"))
        yield Build(command=command, objects=objects, folder=folder)

