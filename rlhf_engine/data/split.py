"""Parts of a data set for training and for judging, with no group in two of them.

    held out  ⇔  hash(seed, group) / 2⁶⁴ < share          hash: BLAKE2b, the same on every machine

Where a row goes depends on its group and the seed alone, so it stays there when rows are added. The share is met
approximately, as for a coin thrown once per group; `Split` says what came of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rlhf_engine.data.report import shown
from rlhf_engine.data.types import Row
from rlhf_engine.errors import ConfigError

R = TypeVar("R", bound=Row)


@dataclass(frozen=True, kw_only=True)
class Split(Generic[R]):
    """Two parts without a group in common."""

    train: list[R]
    held_out: list[R]
    asked: float
    """The share of groups that was to be held out."""

    @property
    def share(self) -> float:
        """The share of rows that is held out."""
        return len(self.held_out) / (len(self.train) + len(self.held_out))

    def text(self) -> str:
        """One line, without markup."""
        groups = [len({row.group for row in part}) for part in (self.train, self.held_out)]
        return (
            f"{len(self.train)} rows of {groups[0]} groups to train on, {len(self.held_out)} of {groups[1]} held out "
            f"({100 * self.share:.1f} % of rows, {100 * self.asked:.1f} % of groups asked for)"
        )


def group_fraction(group: str, seed: int) -> float:
    """Where a group stands in [0, 1): a function of (seed, group)."""
    digest = hashlib.blake2b(f"{seed}\0{group}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53  # 53 bits: exact as a float, and below 1


def split_by_group(rows: Sequence[R], *, share: float, seed: int = 0) -> Split[R]:
    """Hold out about `share` of the groups, in the rows' order.

    Raises ConfigError for no rows, for a share outside (0, 1), and if one side would be empty.
    """
    if not 0 < share < 1:
        raise ConfigError(f"share: expected a number between 0 and 1, got {share!r}")
    parts: tuple[list[R], list[R]] = ([], [])
    for row in rows:
        parts[group_fraction(row.group, seed) < share].append(row)
    if not all(parts):
        n = len({row.group for row in rows})
        raise ConfigError(f"share: expected rows on both sides, got {n} groups all on one with {share!r}, seed {seed}")
    return Split(train=parts[0], held_out=parts[1], asked=share)


def split_by_column(rows: Sequence[R], column: str, *, disjoint: bool = True) -> dict[str, list[R]]:
    """Parts by the values of a column, such as `split` with `train` and `test`, in the order of their first rows.

    Raises ConfigError, with the row's place, for a value that is not a string, and for a group in two parts unless
    `disjoint` is false.
    """
    parts: dict[str, list[R]] = {}
    seen: dict[str, tuple[str, str]] = {}
    for row in rows:
        value = row.columns.get(column)
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{row.place}: expected a string in column {column!r}, got {shown(value)}")
        before, place = seen.setdefault(row.group, (value, row.place))
        if disjoint and before != value:
            raise ConfigError(
                f"{row.place}: expected group {shown(row.group)} in one part, got it in {value!r} and, at {place}, in "
                f"{before!r}"
            )
        parts.setdefault(value, []).append(row)
    return parts
