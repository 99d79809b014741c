"""Split of rows into training and judging, their order, and which go through the model together.

    held out  ⇔  hash(seed, group) / 2⁶⁴ < share          hash: BLAKE2b, the same on every machine

Where a row goes depends on its group and the seed alone, so it stays there when rows are added, and a larger share
holds out more. The share is met approximately, as for a coin thrown once per group.

`batch_indices` walks through shuffled epochs in batches of so many rows, the rows of an optimizer step. `pack` divides
these into micro-batches of at most so many tokens: in a `PackedBatch`, which has no padding, tokens are what costs. The
sum over micro-batches is the step's loss and gradient however they are divided.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch

from rlhf_engine.errors import ConfigError


class Grouped(Protocol):
    """Row that can be split."""

    @property
    def group(self) -> str:
        """Name of the group, whose rows stay together."""


R = TypeVar("R", bound=Grouped)


def group_fraction(group: str, seed: int) -> float:
    """Place of a group in [0, 1), with 53 random bits: a function of (seed, group)."""
    digest = hashlib.blake2b(f"{seed}\0{group}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53  # 53 bits: exact as a float, and below 1


def split_by_group(
    rows: Sequence[R], *, share: float, seed: int = 0, argument: str = "share"
) -> tuple[list[R], list[R]]:
    """Rows for training and about a share of the groups for judging, in order; ConfigError where one is empty."""
    parts: tuple[list[R], list[R]] = ([], [])
    for row in rows:
        parts[group_fraction(row.group, seed) < share].append(row)
    if not all(parts):
        n = len({row.group for row in rows})
        raise ConfigError(
            f"eval_dataset_name: expected a share that leaves groups on both sides, got {share:g} with {n} groups of "
            f"which {'all' if parts[1] else 'none'} are held out"
        )
    return parts


def epoch_order(n: int, seed: int, epoch: int) -> list[int]:
    """Order of n rows in an epoch: a function of (seed, epoch) alone, so that a resumed run goes on in it."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(n, generator=generator).tolist()


def batch_indices(n: int, batch_size: int, step: int, seed: int) -> list[int]:
    """Rows of batch number `step`: consecutive places of the endless sequence of shuffled epochs."""
    first, offset = divmod(step * batch_size, n)
    rows: list[int] = []
    while len(rows) < offset + batch_size:
        rows += epoch_order(n, seed, first + len(rows) // n)
    return rows[offset : offset + batch_size]


def side_by_side(keys: Sequence[int]) -> list[int]:
    """Order places such that equal keys are neighbours, each key where it first appears."""
    first: dict[int, int] = {}
    for place, key in enumerate(keys):
        first.setdefault(key, place)
    return sorted(range(len(keys)), key=lambda place: first[keys[place]])


def pack(
    lengths: Sequence[int],
    *,
    max_rows: int,
    max_tokens: int | None = None,
    shared: Sequence[tuple[int, int]] | None = None,
) -> list[list[int]]:
    """Divide rows into micro-batches of at most max_rows rows and max_tokens tokens; places of rows. O(n log n).

    Each row goes into the first micro-batch that has room for it (first fit); with `shared`, to the row before it with
    the same key, if there is room. Without max_tokens these are consecutive runs of max_rows. `lengths` are tokens of
    all sequences of a row. `shared` has each row's key, and how many of its tokens count once in a micro-batch for all
    rows of this key. A row that no micro-batch can hold raises ValueError.
    """
    for name, bound in (("max_rows", max_rows), ("max_tokens", max_tokens)):
        if bound is not None and bound < 1:
            raise ValueError(f"{name}: expected at least 1, got {bound}")
    n, most = len(lengths), sum(lengths) if max_tokens is None else max_tokens
    for i, length in enumerate(lengths):
        if length < 1 or length > most:
            bounds = "at least 1 token" if length < 1 else f"at most {most} tokens, those of a micro-batch"
            raise ValueError(f"lengths[{i}]: expected {bounds}, got {length}")
    leaves = 1 << max(0, n - 1).bit_length()
    # room[leaves + b]: of micro-batch b, all of them empty at first; above, the most of both halves
    room = [most] * (2 * leaves)
    batches: list[list[int]] = []
    latest: dict[int, int] = {}  # the leaf of the micro-batch that holds the row before with a key
    for row, length in enumerate(lengths):
        node = 1
        if shared is not None:
            key, once = shared[row]
            beside = latest.get(key)
            if beside is not None and room[beside] >= max(1, length - once):
                node, length = beside, length - once
        while node < leaves:
            node = 2 * node if room[2 * node] >= length else 2 * node + 1
        if shared is not None:
            latest[key] = node
        if node - leaves == len(batches):
            batches.append([])
        batches[node - leaves].append(row)
        room[node] = room[node] - length if len(batches[node - leaves]) < max_rows else 0
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return batches


def require_room(longest: int, max_tokens: int | None) -> None:
    """Check that micro-batches have room for the `longest` tokens that stay together: a row, or a whole pair."""
    if max_tokens is not None and longest > max_tokens:
        raise ConfigError(
            f"max_tokens_per_micro_batch: expected at least {longest}, the tokens of the longest row (of both "
            f"answers of a pair), got {max_tokens}"
        )
