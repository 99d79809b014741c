"""A folder's own list of its files, with sizes and SHA-256: what was changed since it was written is not loaded.

`manifest.json` is the list. There is one way to write it, so that a change of the list itself is noticed, too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from rlhf_engine.errors import CorruptCheckpointError

MANIFEST_FILE = "manifest.json"
_CHUNK = 1 << 20


def write_manifest(folder: Path) -> None:
    """List every file of a folder that is being written; the last file to be written."""
    (folder / MANIFEST_FILE).write_bytes(_text({name: _entry(folder / name) for name in _files(folder)}))


def check_manifest(folder: Path, names: Iterable[str] | None = None) -> None:
    """Raise CorruptCheckpointError unless a folder holds what its manifest lists, no less and no more.

    names: compare the content of these files alone, as paths within the folder; None: of all.
    """
    listed = _read(folder)
    there = set(_files(folder))
    for what, wrong in (("not there", set(listed) - there), ("not listed", there - set(listed))):
        if wrong:
            raise CorruptCheckpointError(
                f"{folder}: expected the {len(listed)} files of {MANIFEST_FILE}, got {sorted(wrong)[:3]} {what}"
            )
    for name in sorted(listed) if names is None else names:
        if name not in listed:
            raise CorruptCheckpointError(f"{folder}: expected {name} in {MANIFEST_FILE}, which lists {sorted(listed)}")
        found = _entry(folder / name)
        if found != listed[name]:
            raise CorruptCheckpointError(
                f"{folder / name}: expected the file as it was written, {_shown(listed[name])}, got {_shown(found)}"
            )


def _files(folder: Path) -> list[str]:
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if name != MANIFEST_FILE)


def _entry(path: Path) -> dict[str, int | str]:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return {"bytes": size, "sha256": digest.hexdigest()}


def _text(files: dict[str, dict[str, int | str]]) -> bytes:
    return (json.dumps({"files": files, "format": 1}, indent=1, sort_keys=True) + "\n").encode()


def _read(folder: Path) -> dict[str, dict[str, int | str]]:
    path = folder / MANIFEST_FILE
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise CorruptCheckpointError(f"{folder}: expected {MANIFEST_FILE}, which is not there") from None
    try:
        files: dict[str, dict[str, int | str]] = json.loads(raw)["files"]
        as_written = _text(files) == raw
    except (ValueError, TypeError, KeyError, RecursionError):
        as_written = False
    if not as_written or not all(set(entry) == {"bytes", "sha256"} for entry in files.values()):
        raise CorruptCheckpointError(f"{path}: expected the list of files as it was written, got another text")
    return files


def _shown(entry: dict[str, int | str]) -> str:
    return f"{entry['bytes']:,} bytes with SHA-256 {str(entry['sha256'])[:12]}…"
