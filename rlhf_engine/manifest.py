"""A folder's own list of its files, with sizes and SHA-256: what was changed since it was written is not loaded.

`manifest.json` is the list. There is one way to write it, so that a change of the list itself is noticed, too. A
checkpoint is never read without its list. A folder in it that loads alone has a list of its own, which goes along when
it is copied. A model's or an adapter's folder may have none: PEFT and transformers write none, and whoever edits such
a folder on purpose deletes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from rlhf_engine.errors import CorruptCheckpointError
from rlhf_engine.io import MANIFEST_FILE, MODEL_FILES, is_config

_CHUNK = 1 << 20
_PARENTS = 2
"""Folders above one of a model whose manifest may list it: `slots/NAME` and `backbones/NAME` lie two levels down."""
_Files = dict[str, dict[str, int | str]]


def write_manifest(folder: Path) -> None:
    """List every file of a folder that is being written, last; before it, of each folder in it that loads alone."""
    root = folder.absolute()
    files = {name: _entry(root / name) for name in _files(root)}
    alone = {path.parent for path in root.rglob("*config.json") if is_config(path)}
    for each in sorted(alone | {root}, reverse=True):  # inner ones first
        path = each / MANIFEST_FILE
        path.write_bytes(_text(_within(each, root, files)))
        files[path.relative_to(root).as_posix()] = _entry(path)


def check_manifest(folder: Path, names: Iterable[str] | None = None) -> None:
    """Raise CorruptCheckpointError unless a folder holds what its manifest lists; of `names` alone, where given."""
    listed = _read(folder)
    there = set(_files(folder))
    _require_none(folder, listed, set(listed) - there, "not there")
    _require_none(folder, listed, there - set(listed), "not listed")
    for name in sorted(listed) if names is None else names:
        if name not in listed:
            raise CorruptCheckpointError(f"{folder}: expected {name} in {MANIFEST_FILE}, which lists {sorted(listed)}")
        _compare(folder / name, listed[name])


def check_model(folder: str | os.PathLike[str], names: Iterable[str] | None = None, *, weights: bool = True) -> None:
    """Check a model's or adapter's folder, and of `names` the content, against the manifest of its files."""
    folder = Path(folder)
    root = _manifest_of(folder)
    if root is None:
        return
    try:
        files = _within(folder, root, _read(root))
        _require_none(folder, files, {name for name in files if not (folder / name).is_file()}, "not there")
        parents = {(folder / name).parent for name in files}
        beside = (path for parent in parents for pattern in MODEL_FILES for path in parent.glob(pattern))
        added = {path.relative_to(folder).as_posix() for path in beside if path.is_file()} - {*files, MANIFEST_FILE}
        _require_none(folder, files, added, "not listed")
        wanted = files if names is None else set(names) & set(files)
        for name in sorted(wanted):
            if weights or not name.endswith(".safetensors"):
                _compare(folder / name, files[name])
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{error}; delete {root / MANIFEST_FILE} if this was done on purpose") from error


def _manifest_of(folder: Path) -> Path | None:
    """The folder of the manifest that lists the files of `folder`; None without one."""
    if (folder / MANIFEST_FILE).is_file() and not _is_foreign(folder / MANIFEST_FILE):
        return folder
    for root in list(folder.absolute().parents)[:_PARENTS]:
        if (root / MANIFEST_FILE).is_file():
            with contextlib.suppress(CorruptCheckpointError):
                if _within(folder, root, _read(root)):
                    return root
    return None


def _within(folder: Path, root: Path, files: _Files) -> _Files:
    """Entries of `root` for `folder`, which is the same or lies in it, as paths within it, but its own manifest."""
    place = "" if folder == root else f"{folder.absolute().relative_to(root).as_posix()}/"
    entries = {name.removeprefix(place): entry for name, entry in files.items() if name.startswith(place)}
    return {name: entry for name, entry in entries.items() if name != MANIFEST_FILE}


def _is_foreign(path: Path) -> bool:
    """Whether a manifest is JSON that this package does not write, even if one place in it were changed."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return False
    return not isinstance(content, dict) or not {"files", "format"} & set(content)


def _require_none(folder: Path, listed: _Files, wrong: set[str], what: str) -> None:
    if wrong:
        raise CorruptCheckpointError(
            f"{folder}: expected the {len(listed)} files of {MANIFEST_FILE}, got {sorted(wrong)[:3]} {what}"
        )


def _compare(path: Path, entry: dict[str, int | str]) -> None:
    current = _entry(path)
    if current != entry:
        raise CorruptCheckpointError(
            f"{path}: expected the file as it was written, {_shown(entry)}, got {_shown(current)}"
        )


def _files(folder: Path) -> list[str]:
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if name != MANIFEST_FILE)


def _entry(path: Path) -> dict[str, int | str]:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return {"bytes": size, "sha256": digest.hexdigest()}


def _text(files: _Files) -> bytes:
    return (json.dumps({"files": files, "format": 1}, indent=1, sort_keys=True) + "\n").encode()


def _read(folder: Path) -> _Files:
    path = folder / MANIFEST_FILE
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise CorruptCheckpointError(f"{folder}: expected {MANIFEST_FILE}, which is not there") from None
    try:
        files: _Files = json.loads(raw)["files"]
        as_written = _text(files) == raw
    except (ValueError, TypeError, KeyError, RecursionError):
        as_written = False
    if not as_written or not all(set(entry) == {"bytes", "sha256"} for entry in files.values()):
        raise CorruptCheckpointError(f"{path}: expected the list of files as it was written, got another text")
    return files


def _shown(entry: dict[str, int | str]) -> str:
    return f"{entry['bytes']:,} bytes with SHA-256 {str(entry['sha256'])[:12]}…"
