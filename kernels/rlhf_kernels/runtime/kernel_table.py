"""The table by which `auto` chooses between `cpu` and `reference`: what was measured, and how a shape is looked up.

An entry belongs to an op, an instruction set, a dtype and the shape of the op's weight. Where an op has no weight the
shape is the size of a head or of the vocabulary, and None where it has neither. The number of rows is no part of it:
a row's bits would depend on its neighbours.

An entry keeps the milliseconds of every case that was measured, for each candidate. `fastest` makes the choice of them:

    speed(b) = mean over cases of log(ms of the fastest candidate / ms of b),   the choice has the largest

A shape that is not listed takes the entry of the nearest one, by Σ |log₂(a_i / b_i)|; of equally near ones the first in
the order of tuples. The file is JSON: {"format": 1, "machines": {…}, "entries": […]}.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

FORMAT = 1
CANDIDATES = ("cpu", "reference")
"""Backends among which the table chooses, in the order that decides between equals."""
DTYPES = ("float32", "bfloat16", "float16", "float64")
COMMITTED = Path(__file__).with_name("kernel_table.json")
ENVIRONMENT_VARIABLE = "RLHF_ENGINE_KERNEL_TABLE"

Shape = tuple[int, ...] | None
Times = Mapping[str, Mapping[str, float]]
"""Case → candidate → milliseconds."""


class KernelTableError(ValueError):
    """A file is no table that this version can read; the message is one line."""


class Entry(NamedTuple):
    """Measurements of one op, and the choice that follows."""

    op: str
    isa: str
    dtype: str
    shape: Shape
    backend: str
    ms: Times

    @property
    def ratio(self) -> float:
        """Speed-up of the choice over the other candidate, as a geometric mean over the cases."""
        other = next(b for b in CANDIDATES if b != self.backend)
        logs = [math.log(times[other] / times[self.backend]) for times in self.ms.values()]
        return math.exp(sum(logs) / len(logs))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**self._asdict(), "shape": None if self.shape is None else list(self.shape)}


@dataclass(frozen=True, kw_only=True)
class KernelTable:
    """Entries of one file."""

    source: str
    """Where they come from, for people."""
    entries: tuple[Entry, ...]
    machines: Mapping[str, str] = field(default_factory=dict)
    """Instruction set → what its entries were measured on."""

    def of(self, op: str, isa: str | None, dtype: str) -> list[Entry]:
        """Entries of an op, in the order of their shapes."""
        entries = [e for e in self.entries if (e.op, e.isa, e.dtype) == (op, isa, dtype)]
        return sorted(entries, key=lambda e: e.shape or ())

    def find(self, op: str, isa: str | None, dtype: str, shape: Shape) -> Entry | None:
        """The entry that decides for a shape: its own or the nearest; None where nothing comparable is listed."""
        alike = [e for e in self.of(op, isa, dtype) if len(e.shape or ()) == len(shape or ())]
        return min(alike, key=lambda e: _distance(e.shape, shape), default=None)


def _distance(a: Shape, b: Shape) -> float:
    return sum(abs(math.log2(max(1, m) / max(1, n))) for m, n in zip(a or (), b or (), strict=True))


def fastest(ms: Times) -> str:
    """The candidate that is fastest on the whole: every case has the same weight, however long it takes."""

    def slowness(backend: str) -> float:
        return sum(math.log(times[backend] / min(times.values())) for times in ms.values())

    return min(CANDIDATES, key=slowness)


def read(path: Path, ops: Collection[str], *, isa: str | None = None) -> KernelTable:
    """The table in a file.

    Args:
        path: the file.
        ops: names that entries may have.
        isa: an instruction set that some entry must be of; None: any will do.

    Raises:
        KernelTableError: the file is damaged, of another format, or of other instruction sets only.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # a text that is no UTF-8 is a ValueError
        raise KernelTableError(f"expected a JSON file, got {type(error).__name__}") from error
    version = content.get("format") if isinstance(content, dict) else None
    if version != FORMAT:
        raise KernelTableError(f"format: expected {FORMAT}, got {version!r}")
    entries = content.get("entries")
    if not isinstance(entries, list):
        raise KernelTableError(f"entries: expected a list, got {type(entries).__name__}")
    machines = content.get("machines")
    if not isinstance(machines, dict):
        raise KernelTableError(f"machines: expected a name per instruction set, got {type(machines).__name__}")
    made = tuple(_entry(i, e, ops) for i, e in enumerate(entries))
    table = KernelTable(source=str(path), entries=made, machines=machines)
    sets = sorted({e.isa for e in table.entries})
    if isa is not None and isa not in sets:
        raise KernelTableError(f"isa: expected entries for {isa}, got {sets}")
    return table


def write(path: Path, entries: Sequence[Entry], machines: Mapping[str, str]) -> None:
    """Write a table, as `dump` has it."""
    path.write_text(dump(entries, machines), encoding="utf-8")


def dump(entries: Sequence[Entry], machines: Mapping[str, str]) -> str:
    """The text of a table's file, in one order whatever the order of the entries."""
    ordered = sorted(entries, key=lambda e: (e.isa, e.op, e.dtype, e.shape or ()))
    content = {
        "format": FORMAT,
        "machines": dict(sorted(machines.items())),
        "entries": [entry.to_dict() for entry in ordered],
    }
    return json.dumps(content, indent=1) + "\n"


def _entry(place: int, given: Any, ops: Collection[str]) -> Entry:
    where = f"entries[{place}]"
    if not isinstance(given, dict) or set(given) != set(Entry._fields):
        got = sorted(given) if isinstance(given, dict) else type(given).__name__
        raise KernelTableError(f"{where}: expected {sorted(Entry._fields)}, got {got}")
    for name, known in (("op", ops), ("dtype", DTYPES), ("backend", CANDIDATES)):
        if given[name] not in tuple(known):  # what was given may have no hash
            raise KernelTableError(f"{where}.{name}: expected one of {sorted(known)}, got {given[name]!r}")
    shape, ms = given["shape"], given["ms"]
    if shape is not None and not (isinstance(shape, list) and shape and all(type(n) is int and n > 0 for n in shape)):
        raise KernelTableError(f"{where}.shape: expected null or sizes of at least 1, got {shape!r}")
    if not isinstance(given["isa"], str) or not isinstance(ms, dict) or not ms:
        raise KernelTableError(f"{where}: expected the name of a set and times by case, got {given['isa']!r}, {ms!r}")
    for case, times in ms.items():
        if not isinstance(times, dict) or set(times) != set(CANDIDATES) or not all(map(_is_time, times.values())):
            raise KernelTableError(f"{where}.ms[{case!r}]: expected a time for each of {CANDIDATES}, got {times!r}")
    return Entry(**{**given, "shape": None if shape is None else tuple(shape)})


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < 1e12  # refuses NaN, and integers that no float holds
