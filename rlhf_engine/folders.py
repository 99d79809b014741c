"""Folders that appear under their final name whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def put_in_place(temporary: Path, final: Path) -> None:
    """Give a written folder its final name, once all of it is on disk."""
    _flush(temporary)
    if final.exists():
        shutil.rmtree(final)
    os.rename(temporary, final)
    _flush_directory(final.parent)


def _flush(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as f:
                os.fsync(f.fileno())
        else:
            _flush_directory(path)
    _flush_directory(folder)


def _flush_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
