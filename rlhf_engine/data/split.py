"""Rows for training and rows for judging, with no group on both sides.

    held out  ⇔  hash(seed, group) / 2⁶⁴ < share          hash: BLAKE2b, the same on every machine

Where a row goes depends on its group and the seed alone, so it stays there when rows are added, and a larger share
holds out more. The share is met approximately, as for a coin thrown once per group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from rlhf_engine.errors import ConfigError


class Grouped(Protocol):
    """Row that can be split."""

    @property
    def group(self) -> str:
        """Name of the group, whose rows stay together."""


R = TypeVar("R", bound=Grouped)


@dataclass(frozen=True)
class Split(Generic[R]):
    """Two parts without a group in common."""

    train: list[R]
    """Rows for training."""
    held_out: list[R]
    """Rows for judging."""


def group_fraction(group: str, seed: int) -> float:
    """Place of a group in [0, 1), with 53 random bits: a function of (seed, group)."""
    digest = hashlib.blake2b(f"{seed}\0{group}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53  # 53 bits: exact as a float, and below 1


def split_by_group(rows: Sequence[R], *, share: float, seed: int = 0, argument: str = "share") -> Split[R]:
    """Hold out about a share of the groups, in the rows' order; ConfigError where one side would be empty."""
    if not 0 < share < 1:
        raise ConfigError(f"{argument}: expected a number between 0 and 1, got {share!r}")
    parts: tuple[list[R], list[R]] = ([], [])
    for row in rows:
        parts[group_fraction(row.group, seed) < share].append(row)
    if not all(parts):
        n = len({row.group for row in rows})
        raise ConfigError(
            f"{argument}: expected a share that leaves groups on both sides, got {share:g} with {n} groups of which "
            f"{'all' if parts[1] else 'none'} are held out"
        )
    return Split(*parts)
