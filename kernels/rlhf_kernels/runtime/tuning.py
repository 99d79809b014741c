"""Tiles, warps, stages and splits of the Triton kernels: the defaults, or what a sweep on this very GPU has chosen.

A `Site` is a place that launches kernels with settings that are free. It stands beside its kernels and lists the values
that a sweep (`bench/gpu/tune.py`) may try. A tuned table has the choices of one device, by

    op, site, dtype and size class; a class is every size of the weight, rounded up to a power of two.

The number of rows is no part of it: a row's bits would depend on its neighbours. What is not in the table has the
default. Nothing is measured at run time.

Bits: a setting that a site does not list as `neutral` can change the bits of a result. In this order there decide:

    1. exact mode (`registry.is_exact`): the defaults
    2. the checkpoint that the run resumed from
    3. the table

Neutral settings come from the table wherever its other settings of the same entry are in force: they were measured, and
fit into the GPU, together.

The table is the one that RLHF_ENGINE_TUNED_TABLE names, else tuned/<device>.json of the package where there is one. A
table of another layout, device, version of Triton or of the kernels' sources, or one that was rehearsed, is never used:
`TunedTableError` where it was named, a warning of one line where it is the package's.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rlhf_kernels.runtime import registry
from rlhf_kernels.runtime.triton_support import INTERPRETED

FORMAT = 1
ENVIRONMENT_VARIABLE = "RLHF_ENGINE_TUNED_TABLE"
FOLDER = Path(__file__).with_name("tuned")
INTERPRETER = "Triton's interpreter"
"""Name of the device that tensors on a CPU have."""

Settings = dict[str, int]
Measured = Mapping[str, Mapping[str, float]]
"""Case → "default" and "chosen" → milliseconds."""


class TunedTableError(ValueError):
    """A tuned table that this version, on this device, must not use; the message is one line."""


class Key(NamedTuple):
    """The key of a choice."""

    op: str
    site: str
    dtype: str
    """One name, or two with a comma between them where the operands differ."""
    sizes: tuple[int, ...]
    """Powers of two, at least the sizes of the weight."""

    def __str__(self) -> str:
        return f"{self.op}.{self.site} {self.dtype} {'x'.join(map(str, self.sizes)) or '-'}"


@dataclass(frozen=True, kw_only=True)
class Site:
    """A place that launches kernels with free settings. Making one registers it.

    Args:
        op: folder of the op that declares it.
        name: unique within the op.
        candidates: setting → values that a sweep tries. None of them takes more workspace than `rlhf-engine plan`
            counts for the default.
        neutral: settings that change no bit of any result.
    """

    op: str
    name: str
    candidates: Mapping[str, tuple[int, ...]]
    neutral: tuple[str, ...] = ("num_stages",)

    def __post_init__(self) -> None:
        _SITES[self.op, self.name] = self

    def choose(
        self, default: Settings, device: torch.device, dtypes: Sequence[torch.dtype], sizes: Sequence[int]
    ) -> Settings:
        """Settings of a launch: the default's, and over them what is in force.

        Args:
            default: a value for every setting of the site; depends on the dtypes and size classes alone.
            device: of the launch's tensors.
            dtypes: of the operands, where two differ both.
            sizes: of the weight, never the number of rows.
        """
        key = Key(self.op, self.name, _names(tuple(dtypes)), tuple(map(size_class, sizes)))
        if _watched is not None:
            _watched.setdefault(key, dict(default))
        found = (_in_force(device) if _trial is None else _trial).get(key)
        return {**default, **found} if found else default

    def changes_bits(self, settings: Iterable[str]) -> bool:
        """Whether one of the settings can change a bit of a result."""
        return any(name not in self.neutral for name in settings)


_SITES: dict[tuple[str, str], Site] = {}


def sites() -> Mapping[tuple[str, str], Site]:
    """Every site by op and name. Imports Triton."""
    from rlhf_kernels.runtime.aot import OPS

    for op in OPS:
        importlib.import_module(f"rlhf_kernels.{op}.triton")
    return _SITES


@functools.cache
def size_class(size: int) -> int:
    """The size, rounded up to a power of two."""
    return 1 << max(0, int(size) - 1).bit_length()


@functools.cache
def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ",".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(dtypes))


# ---- tables ----------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """Settings of one key that differ from the default; none where the default was kept."""

    key: Key
    settings: Settings

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**self.key._asdict(), "sizes": list(self.key.sizes), "settings": self.settings}

    def bits(self) -> Row | None:
        """The part that can change bits; None where there is none."""
        neutral = _SITES[self.key.op, self.key.site].neutral
        found = {name: value for name, value in self.settings.items() if name not in neutral}
        return Row(self.key, found) if found else None


class Entry(NamedTuple):
    """The result of a sweep for one key."""

    row: Row
    default: Settings
    ms: Measured
    left_out: Mapping[str, str]
    """Candidate → why it was not timed."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**self.row.to_dict(), "default": self.default, "ms": self.ms, "left_out": self.left_out}


@dataclass(frozen=True, kw_only=True)
class TunedTable:
    """The choices of one device and what they hold for."""

    device: str
    triton: str
    sources: str
    """`kernel_sources` at the time of the sweep."""
    commit: str = "unknown"
    torch: str = ""
    rehearsed: bool = False
    """Made without a GPU by a timer that measures nothing: for tests of the sweep, and never used."""
    entries: tuple[Entry, ...] = field(default=())

    def of(self, key: Key) -> Entry | None:
        """The entry of a key."""
        return next((entry for entry in self.entries if entry.row.key == key), None)


def new_table(device: str, *, commit: str = "unknown", rehearsed: bool = False) -> TunedTable:
    """A table without entries for this version."""
    return TunedTable(
        device=device,
        triton=triton_version(),
        sources=kernel_sources(),
        commit=commit,
        torch=str(torch.__version__),
        rehearsed=rehearsed,
    )


def triton_version() -> str:
    """Version of the installed Triton, "none" without one."""
    return importlib.metadata.version("triton") if importlib.util.find_spec("triton") else "none"


@functools.cache
def kernel_sources() -> str:
    """Short hash of the Triton kernels' sources and of what decides their launches."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted({*root.rglob("*triton*.py"), *root.rglob("cost.py"), root / "lora" / "tables.py"}):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def device_name(device: torch.device) -> str:
    """Name of the device as tables have it."""
    return _cuda_name(device.index) if device.type == "cuda" else INTERPRETER


@functools.cache
def _cuda_name(index: int | None) -> str:
    return torch.cuda.get_device_name(index)


def slug(device: str) -> str:
    """A file's name for a device."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def dump(table: TunedTable) -> str:
    """The text of a table's file, in one order whatever the order of the entries."""
    content: dict[str, Any] = {"format": FORMAT, **{name: getattr(table, name) for name in _HEAD}}
    content["entries"] = [entry.to_dict() for entry in sorted(table.entries, key=lambda e: e.row.key)]
    return json.dumps(content, indent=1) + "\n"


def write(path: Path, table: TunedTable) -> None:
    """Write a table; at every moment the file is the old one or the new one, whole."""
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_text(dump(table), encoding="utf-8")
    scratch.replace(path)


_HEAD = {"device": str, "triton": str, "sources": str, "commit": str, "torch": str, "rehearsed": bool}


def read(path: Path, *, device: str | None, rehearsed: bool = False) -> TunedTable:
    """The table in a file.

    Args:
        path: the file.
        device: name that the table must be of; None: any will do.
        rehearsed: whether it must come from a rehearsal or must not.

    Raises:
        TunedTableError: the file is damaged or of another version, device or kind.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # a text that is no UTF-8 is a ValueError
        raise TunedTableError(f"expected a JSON file, got {type(error).__name__}") from error
    version = content.get("format") if isinstance(content, dict) else None
    if type(version) is not int or version != FORMAT:
        raise TunedTableError(f"format: expected {FORMAT}, got {version!r}")
    for name, kind in _HEAD.items():
        if not isinstance(content.get(name), kind):
            raise TunedTableError(f"{name}: expected {kind.__name__}, got {content.get(name)!r}")
    expected = {"rehearsed": rehearsed, "triton": triton_version(), "sources": kernel_sources()}
    for name, value in (expected if device is None else {**expected, "device": device}).items():
        if content[name] != value:
            raise TunedTableError(f"{name}: expected {value!r}, got {content[name]!r}; sweep again (bench/gpu/tune.py)")
    entries = content.get("entries")
    if not isinstance(entries, list):
        raise TunedTableError(f"entries: expected a list, got {type(entries).__name__}")
    made = tuple(_entry(f"entries[{i}]", given) for i, given in enumerate(entries))
    if len({entry.row.key for entry in made}) != len(made):
        raise TunedTableError("entries: expected one of each key, got a key twice")
    return TunedTable(**{name: content[name] for name in _HEAD}, entries=made)


def _entry(where: str, given: Any) -> Entry:
    row = row_of(where, given, more=("default", "ms", "left_out"))
    default, ms, left_out = (given[name] for name in ("default", "ms", "left_out"))
    if not _is_settings(default):
        raise TunedTableError(f"{where}.default: expected a number for each setting, got {default!r}")
    if not isinstance(ms, dict) or not all(isinstance(times, dict) for times in ms.values()):
        raise TunedTableError(f"{where}.ms: expected times by case, got {ms!r}")
    if not isinstance(left_out, dict):
        raise TunedTableError(f"{where}.left_out: expected reasons by candidate, got {left_out!r}")
    return Entry(row, default, ms, left_out)


def row_of(where: str, given: Any, *, more: Sequence[str] = ()) -> Row:
    """A row from plain values.

    Args:
        where: what the error calls it.
        given: what `Row.to_dict` made.
        more: other names that it has to have.

    Raises:
        TunedTableError: it is damaged, or names a site, setting or value that there is not.
    """
    names = {*Key._fields, "settings", *more}
    if not isinstance(given, dict) or set(given) != names:
        got = sorted(given) if isinstance(given, dict) else type(given).__name__
        raise TunedTableError(f"{where}: expected {sorted(names)}, got {got}")
    sizes = given["sizes"]
    if not isinstance(sizes, list) or not all(type(n) is int and n > 0 and size_class(n) == n for n in sizes):
        raise TunedTableError(f"{where}.sizes: expected powers of two, got {sizes!r}")
    if not all(isinstance(given[name], str) for name in ("op", "site", "dtype")):
        raise TunedTableError(f"{where}: expected names of op, site and dtype, got {given!r}")
    if not _is_settings(given["settings"]):
        raise TunedTableError(f"{where}.settings: expected a number for each setting, got {given['settings']!r}")
    row = Row(Key(given["op"], given["site"], given["dtype"], tuple(sizes)), given["settings"])
    if importlib.util.find_spec("triton") is not None:  # without it no site can be used
        site = sites().get(row.key[:2])
        if site is None:
            raise TunedTableError(f"{where}: expected a site of the kernels, got {row.key.op}.{row.key.site}")
        for name, value in row.settings.items():
            if value not in site.candidates.get(name, ()):
                known = {setting: list(values) for setting, values in site.candidates.items()}
                raise TunedTableError(f"{where}.settings: expected of {known}, got {name} = {value}")
    return row


def _is_settings(given: Any) -> bool:
    return isinstance(given, dict) and all(type(value) is int and value > 0 for value in given.values())


# ---- what is in force ------------------------------------------------------------------------------------------------

_lock = threading.RLock()
"""Held while it is found out, and while what it depends on changes."""
_named = os.environ.get(ENVIRONMENT_VARIABLE)
_tables: dict[str, TunedTable | None] = {}
_overlays: dict[tuple[str, bool], dict[Key, Settings]] = {}
"""By device, and whether the process is in exact mode."""
_held: list[Row] | None = None
"""Bit-changing settings of the checkpoint that the run resumed from; None: there is no checkpoint."""
_trial: Mapping[Key, Settings] | None = None
_watched: dict[Key, Settings] | None = None


def table_of(device: str) -> TunedTable | None:
    """The table for a device; None where there is none.

    Raises:
        TunedTableError: the one that RLHF_ENGINE_TUNED_TABLE names cannot be used.
    """
    with _lock:
        if device not in _tables:
            _tables[device] = _find_table(device)
        return _tables[device]


def _find_table(device: str) -> TunedTable | None:
    if _named:
        return _read_named(device)
    path = FOLDER / f"{slug(device)}.json"
    if not path.is_file():
        return None
    try:
        return read(path, device=device)
    except TunedTableError as error:
        warnings.warn(f"tuned table: {path} is not used: {error}", stacklevel=5)
        return None


def _read_named(device: str | None) -> TunedTable:
    try:
        return read(Path(str(_named)), device=device)
    except TunedTableError as error:
        raise TunedTableError(f"{ENVIRONMENT_VARIABLE}: {_named} cannot be used: {error}") from error


def check_named() -> None:
    """Read the table that RLHF_ENGINE_TUNED_TABLE names, if it does, before anything is computed.

    Raises:
        TunedTableError: it cannot be used. Where there is no CUDA device its own may be any.
    """
    if _named:
        _read_named(device_name(torch.device("cuda", 0)) if torch.cuda.is_available() else None)


def _in_force(device: torch.device) -> Mapping[Key, Settings]:
    name = device_name(device)
    key = (name, registry.is_exact())
    found = _overlays.get(key)
    if found is None:
        with _lock:
            found = _overlays[key] = _overlay(table_of(name))
    return found


def _overlay(table: TunedTable | None) -> dict[Key, Settings]:
    rows = {entry.row.key: entry.row for entry in (table.entries if table else ())}
    if _held is None and not registry.is_exact():
        return {key: row.settings for key, row in rows.items() if row.settings}
    held = {row.key: row.settings for row in (() if registry.is_exact() else _held or ())}
    for key, row in rows.items():
        bits = row.bits()
        if ({} if bits is None else bits.settings) == held.get(key, {}):
            held[key] = row.settings
    return {key: settings for key, settings in held.items() if settings}


def begin_run(held: Iterable[Row] | None = None) -> None:
    """Settle which choices that change bits are in force from now on, in this process.

    Args:
        held: of the checkpoint that a run resumes from; None: the table's.

    Raises:
        TunedTableError: the table that the environment names cannot be used. Nothing has changed.
    """
    global _held
    check_named()
    with _lock:
        _held = None if held is None else list(held)
        _overlays.clear()


def choices() -> list[Row]:
    """The tuned choices in force that change bits, for a checkpoint; those that are not here have the default."""
    if registry.is_exact():
        return []
    if _held is not None:
        return list(_held)
    if torch.cuda.is_available():
        table = table_of(device_name(torch.device("cuda", torch.cuda.current_device())))
    else:
        table = table_of(INTERPRETER) if INTERPRETED else None
    found = (entry.row.bits() for entry in (table.entries if table else ()))
    return [row for row in found if row is not None]


@contextlib.contextmanager
def use_table(path: str | os.PathLike[str]) -> Iterator[None]:
    """Use the table in a file within a `with` block; as RLHF_ENGINE_TUNED_TABLE does for a process."""
    global _named
    before = _named
    _named = os.fspath(path)
    _forget()
    try:
        yield
    finally:
        _named = before
        _forget()


def _forget() -> None:
    with _lock:
        _tables.clear()
        _overlays.clear()


# ---- for a sweep -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def trial(settings: Mapping[Key, Settings]) -> Iterator[None]:
    """Launch some keys with given settings and all others with their defaults, in every thread of the process."""
    global _trial
    before, _trial = _trial, settings
    try:
        yield
    finally:
        _trial = before


@contextlib.contextmanager
def watched() -> Iterator[dict[Key, Settings]]:
    """The keys that are looked up within the block, each with its default."""
    global _watched
    before, _watched = _watched, {}
    try:
        yield _watched
    finally:
        _watched = before
