"""Folders that appear under their final name, and disappear from it, whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def put_in_place(temporary: Path, final: Path) -> None:
    """Give a written folder its final name, once all of it is on disk."""
    _flush(temporary)
    remove(final)
    os.rename(temporary, final)
    _flush_directory(final.parent)


MODEL_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "adapter_config.json",
    "config.json",
    "generation_config.json",
    "engine.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.*",
    "merges.txt",
)
"""Names of a model's or adapter's files."""


def put_model_in_place(temporary: Path, final: Path) -> None:
    """Move a written model folder to where another was: nothing of that one stays, files of other kinds do."""
    if not final.exists() or not any(final.iterdir()):
        put_in_place(temporary, final)
        return
    _flush(temporary)
    for pattern in MODEL_FILES:
        for old in final.glob(pattern):
            if old.is_file():
                old.unlink()
    for new in temporary.iterdir():
        os.replace(new, final / new.name)
    temporary.rmdir()
    _flush_directory(final)


def remove(folder: Path) -> None:
    """Remove a folder, if it is there: whole or not at all, as others see it."""
    aside = folder.with_name(f".{folder.name}.removed")
    shutil.rmtree(aside, ignore_errors=True)  # of a removal that was stopped
    if folder.exists():
        os.rename(folder, aside)
        shutil.rmtree(aside)


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
