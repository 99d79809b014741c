"""Folders that appear under their final name, and disappear from it, whole or not at all; files that grow by lines.

A folder may hold a list of its files, with sizes and SHA-256, in `manifest.json`: what was changed since it was written
is not loaded. There is one way to write the list, so that a change of the list itself is noticed, too. A checkpoint is
never read without its list. A folder in it that loads alone has a list of its own, which goes along when it is copied.
A model's or an adapter's folder may have none: PEFT and transformers write none, and whoever edits such a folder on
purpose deletes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from rlhf_engine.errors import CheckpointWriteError, ConfigError, CorruptCheckpointError


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise CheckpointWriteError, which names the output folder, where the block cannot write this file or folder."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointWriteError(f"output_dir: expected to write {str(path)!r}, got: {error}") from error


@contextlib.contextmanager
def replacing(final: Path) -> Iterator[Path]:
    """Write a folder at the path given, and give it its final name once it is whole; else CheckpointWriteError."""
    temporary = final.with_name(f".{final.name}.tmp")
    try:
        with writing(final):
            delete(temporary)
            yield temporary
            put_in_place(temporary, final)
    finally:
        with contextlib.suppress(OSError):
            delete(temporary)  # a full disk would stay full


def delete(path: Path) -> None:
    """Remove what is there: a file, a folder with all that is in it, or a link, but not what that names."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def no_link(path: str | Path, flags: int) -> int:
    """Open a file that grows in a run's folder: OSError for a link, which may name any other file. An `opener`."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def lock(descriptor: int, kind: int, place: str, without: str) -> None:
    """Lock an open file or folder; a warning says what is so without, on a file system that has no locks."""
    try:
        fcntl.flock(descriptor, kind)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        warnings.warn(f"{place} is on a file system without locks ({error.strerror}); {without}", stacklevel=4)


def put_in_place(temporary: Path, final: Path) -> None:
    """Give a written folder its final name; one that had it is there until then."""
    _flush(temporary)
    finish_replacement(final)
    replaced = _replaced(final)
    if os.path.lexists(final):
        os.rename(final, replaced)
    os.rename(temporary, final)
    _flush_directory(final.parent)
    delete(replaced)


def finish_replacement(final: Path) -> None:
    """Finish a replacement that was stopped half-way: the new folder stays if it is in place, else the old one."""
    replaced = _replaced(final)
    if final.exists():
        with contextlib.suppress(OSError):
            delete(replaced)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.rename(replaced, final)


def finish_replacements(root: Path, names: str) -> None:
    """Finish what a stop left of replacements and removals of folders in `root` whose name matches the pattern."""
    for removed in root.glob(_removed(Path(names)).name):
        with contextlib.suppress(OSError):
            delete(removed)
    for replaced in root.glob(_replaced(Path(names)).name):
        finish_replacement(root / replaced.name.removeprefix(".").removesuffix(_REPLACED))


MANIFEST_FILE = "manifest.json"
MODEL_FILES = (
    MANIFEST_FILE, "*.safetensors", "*.safetensors.index.json", "adapter_config.json", "config.json",
    "generation_config.json", "rlhf_engine.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "vocab.*", "merges.txt",
)  # fmt: skip
"""Names of a model's or adapter's files."""


def put_model_in_place(temporary: Path, final: Path) -> None:
    """Move a model folder to where another was, of which nothing stays; the config goes first and comes last."""
    if not final.exists() or not any(final.iterdir()):
        put_in_place(temporary, final)
        return
    _flush(temporary)
    remove_model(final)
    for path in sorted(temporary.iterdir(), key=is_config):
        os.replace(path, final / path.name)
    temporary.rmdir()
    _flush_directory(final)


def remove_model(folder: Path) -> None:
    """Remove a model's files from a folder, if it holds one, the config first; files of other kinds stay."""
    old = {path for pattern in MODEL_FILES for path in folder.glob(pattern) if path.is_file()}
    for path in sorted(old, key=is_config, reverse=True):
        path.unlink()


def is_config(path: Path) -> bool:
    """Whether a file is one without which its folder is no model or adapter."""
    return path.name in ("config.json", "adapter_config.json")


def remove(folder: Path) -> None:
    """Remove a folder, if it is there: whole or not at all, as others see it."""
    aside = _removed(folder)
    delete(aside)  # of a removal that was stopped
    if os.path.lexists(folder):
        os.rename(folder, aside)
        _flush_directory(folder.parent)  # or a power cut could leave half of it under its own name
        delete(aside)


_REPLACED, _REMOVED = ".replaced", ".removed"


def _replaced(final: Path) -> Path:
    return final.with_name(f".{final.name}{_REPLACED}")


def _removed(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}{_REMOVED}")


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


def read_json(folder: Path, name: str, argument: str) -> dict[str, Any]:
    """The object in a folder's JSON file. Raises ValueError, naming the argument, where there is none."""
    path = folder / name
    if not path.is_file():
        raise ValueError(f"{argument}: expected a folder with {name}, got {str(folder)!r} which has none")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: expected JSON, got {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


class LineFile:
    """JSONL file that grows by a line at a time, each with a digest; a line that was cut short is written again."""

    def __init__(self, path: Path) -> None:
        """Name the file, which need not be there."""
        self.path = path

    def read(self, argument: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """Iterate over (number from 1 on, values), less an unfinished line; ConfigError for a line of others."""
        if not self.path.exists():
            return
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:whole].splitlines(), start=1):
            try:
                values = json.loads(line)
                is_whole = values.pop("digest", None) == json_digest(values, 16)
            except (ValueError, AttributeError):  # no JSON, or no object
                is_whole = False
            if not is_whole:
                raise ConfigError(f"{argument}: {self.path}:{number}: expected a line as it was written, got another")
            yield number, values
        if whole < len(data):
            with self.path.open("r+b") as file:
                file.truncate(whole)

    def add(self, row: Mapping[str, Any]) -> None:
        """Add one line, which is in the file when this returns."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**row, "digest": json_digest(row, 16)}, ensure_ascii=False) + "\n")


def json_digest(value: Any, digits: int = 12) -> str:
    """Name plain values by hexadecimal digits of the SHA-256 of their JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:digits]


# ---- manifests -------------------------------------------------------------------------------------------------------

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
        was, now = (f"{e['bytes']:,} bytes with SHA-256 {str(e['sha256'])[:12]}…" for e in (entry, current))
        raise CorruptCheckpointError(f"{path}: expected the file as it was written, {was}, got {now}")


def _files(folder: Path) -> list[str]:
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if name != MANIFEST_FILE)


def _entry(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": file.tell()}


def _text(files: _Files) -> bytes:
    return (json.dumps({"files": files, "format": 1}, indent=1, sort_keys=True) + "\n").encode()


def _read(folder: Path) -> _Files:
    path = folder / MANIFEST_FILE
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, IsADirectoryError):
        raise CorruptCheckpointError(f"{folder}: expected {MANIFEST_FILE}, which is not there") from None
    try:
        files: _Files = json.loads(raw)["files"]
        as_written = _text(files) == raw
    except (ValueError, TypeError, KeyError, RecursionError):
        as_written = False
    if not as_written or not all(set(entry) == {"bytes", "sha256"} for entry in files.values()):
        raise CorruptCheckpointError(f"{path}: expected the list of files as it was written, got another text")
    return files
