"""csrc under sanitizers, each compiled once for all tests and processes that want it: minutes on one core."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from pathlib import Path

from tests.kernels import native_build
from tests.kernels.native_build import ROOT, Build

KEPT = ROOT / "runs" / "sanitizers"


def sanitized(folder: Path, name: str, *flags: str) -> Build:
    """csrc/cpu compiled with these flags; objects stay for later sessions until a source is another.

    folder: of the programs and extensions that are made of them.
    """
    native_build.needs("g++")
    command = native_build.linking(folder, "g++", *flags)
    digest = hashlib.sha256(repr(flags).encode())
    for path in sorted((ROOT / "csrc").rglob("*.*")):
        digest.update(path.read_bytes())
    objects = KEPT / f"{name}-{digest.hexdigest()[:12]}"
    KEPT.mkdir(parents=True, exist_ok=True)
    with (KEPT / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not objects.is_dir():
            for other in KEPT.glob(f"{name}-*"):
                shutil.rmtree(other)
            part = KEPT / f"{name}-part"
            part.mkdir()
            native_build.compiled(command, native_build.sources(), part)
            part.replace(objects)  # all of them, or none
    return Build(command=command, objects=sorted(objects.glob("*.o")), folder=folder)
