"""Segments of rows by adapter slot, and the dropout of what enters an adapter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

OFF = -1


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Runs of rows and the slot of each run; rows in no run are off.

    Runs are sorted and do not overlap. A slot may appear in several runs, and a run may be empty.

    Args:
        starts: first row of each run.
        ends: row after the last one of each run, ≥ its start.
        slots: slot of each run, an index into A, B and scales; −1 is off.

    Raises:
        ValueError: lengths differ, runs overlap or are not sorted, or a slot is below −1.
    """

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    slots: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.starts) == len(self.ends) == len(self.slots):
            raise ValueError(
                "Segments: expected starts, ends and slots of one length, "
                f"got {len(self.starts)}, {len(self.ends)} and {len(self.slots)}"
            )
        previous_end = 0
        for j, (start, end, slot) in enumerate(zip(self.starts, self.ends, self.slots, strict=True)):
            if start < previous_end or end < start:
                raise ValueError(
                    f"Segments: expected sorted runs that do not overlap, got run {j} = [{start}, {end}) "
                    f"where the rows before {previous_end} are taken"
                )
            if slot < OFF:
                raise ValueError(f"Segments: expected slots >= -1 (-1 is off), got slots[{j}] = {slot}")
            previous_end = end

    @classmethod
    def single(cls, n_rows: int, slot: int) -> Segments:
        """Segments of one run: all rows under one slot.

        Args:
            n_rows: number of rows, ≥ 0.
            slot: the slot; −1 is off.

        Returns:
            `Segments` with the run [0, n_rows).

        Raises:
            ValueError: n_rows is negative, or slot is below −1.
        """
        return cls(starts=(0,), ends=(n_rows,), slots=(slot,))


@dataclass(frozen=True, kw_only=True, eq=False)
class Dropout:
    """Dropout of the x that enters A, never of the base path. The mask depends on these fields and the column alone.

    Args:
        p: probability per slot, in [0, 1).
        seed: signed 64-bit key of the random numbers.
        row_ids: [N] int64 on x's device, a row's id wherever it is computed, such as sequence · max_length + position.
        stream: id of the layer, in [0, 2³²).

    Raises:
        TypeError: row_ids is not int64 [N].
        ValueError: a number is out of its range.
    """

    p: tuple[float, ...]
    seed: int
    row_ids: Tensor
    stream: int

    def __post_init__(self) -> None:
        for i, p in enumerate(self.p):
            if not 0 <= p < 1:
                raise ValueError(f"Dropout.p: expected 0 <= p < 1, got p[{i}] = {p!r}")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"Dropout.seed: expected a signed 64-bit integer, got {self.seed!r}")
        if not 0 <= self.stream < 2**32:
            raise ValueError(f"Dropout.stream: expected an integer in [0, 2^32), got {self.stream!r}")
        if self.row_ids.dtype != torch.int64 or self.row_ids.dim() != 1:
            raise TypeError(
                f"Dropout.row_ids: expected int64 [N], got {self.row_ids.dtype} of shape {tuple(self.row_ids.shape)}"
            )


class LoraCall(NamedTuple):
    """Adapters and the rows that carry them, as an implementation gets them: runs are on, sorted, and not empty.

    In the order of the ops' arguments. Every slot has a run.
    """

    A: list[Tensor]  # [r_i, K]
    B: list[Tensor]  # [M, r_i]
    scales: list[float]
    starts: list[int]
    ends: list[int]
    slots: list[int]  # per run, an index into A, B, scales and p
    p: list[float]  # dropout
    seed: int
    row_ids: Tensor | None  # int64 [N]; None where nothing is dropped
    stream: int

    def check(self, n_rows: int) -> None:
        """Raise ValueError unless lists have one length each, and runs lie within `n_rows`, in order and of such slots.

        Shapes of A, B and row_ids are not looked at.
        """
        for names, lengths in (
            ("A, B, scales, p", [len(self.A), len(self.B), len(self.scales), len(self.p)]),
            ("starts, ends, slots", [len(self.starts), len(self.ends), len(self.slots)]),
        ):
            if len(set(lengths)) != 1 or lengths[0] == 0:
                raise ValueError(f"{names}: expected the same number of entries, at least 1, got {lengths}")
        at = 0
        for start, end in zip(self.starts, self.ends, strict=True):
            if not at <= start < end <= n_rows:
                raise ValueError(f"starts, ends: expected ascending runs within [{at}, {n_rows}), got [{start}, {end})")
            at = end
        if set(self.slots) != set(range(len(self.A))):
            raise ValueError(f"slots: expected runs of every slot in [0, {len(self.A)}), got {self.slots}")
        for p in self.p:
            if not 0.0 <= p < 1.0:
                raise ValueError(f"p: expected probabilities in [0, 1), got {p}")
        if any(self.p) and self.row_ids is None:
            raise ValueError(f"row_ids: expected them with dropout p={self.p}, got None")

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """(start, end, slot) of every run."""
        return list(zip(self.starts, self.ends, self.slots, strict=True))

    @property
    def n_on(self) -> int:
        """Number of rows that are on."""
        return sum(self.ends) - sum(self.starts)


def make_call(
    x: Tensor,
    n_out: int,
    A: list[Tensor],
    B: list[Tensor],
    scales: list[float],
    segments: Segments,
    dropout: Dropout | None,
) -> LoraCall:
    """Check all against x [.., K] and n_out = M, then drop absent slots: their gradient has to stay None.

    Slots are renumbered, runs that are off or empty left out.
    """
    n_rows, n_in = math.prod(x.shape[:-1]), x.shape[-1]
    if not len(A) == len(B) == len(scales):
        raise ValueError(f"A, B, scales: expected one entry per slot, got {len(A)}, {len(B)} and {len(scales)} entries")
    if segments.ends and segments.ends[-1] > n_rows:
        raise ValueError(f"segments: expected runs within the {n_rows} rows of x, got end {segments.ends[-1]}")
    if segments.slots and max(segments.slots) >= len(A):
        raise ValueError(f"segments: expected slots below {len(A)} (the number of A), got {max(segments.slots)}")
    if dropout is not None:
        if not isinstance(dropout, Dropout):
            raise TypeError(f"dropout: expected Dropout or None, got {type(dropout).__name__}")
        if len(dropout.p) != len(A):
            raise ValueError(f"Dropout.p: expected one p per slot ({len(A)}), got {len(dropout.p)}")
        if dropout.row_ids.shape[0] != n_rows:
            raise ValueError(f"Dropout.row_ids: expected {n_rows} ids, got {dropout.row_ids.shape[0]}")
        if dropout.row_ids.device != x.device:
            raise ValueError(f"Dropout.row_ids: expected device {x.device}, got {dropout.row_ids.device}")
    runs = [run for run in zip(segments.starts, segments.ends, segments.slots, strict=True) if run[1] > run[0]]
    runs = [run for run in runs if run[2] != OFF]
    present = sorted({slot for _, _, slot in runs})
    for i in present:
        check_adapter(i, A[i], B[i], x, n_in, n_out)
    p = [dropout.p[i] if dropout is not None else 0.0 for i in present]
    active = dropout if dropout is not None and any(p) else None
    return LoraCall(
        A=[A[i] for i in present],
        B=[B[i] for i in present],
        scales=[float(scales[i]) for i in present],
        starts=[start for start, _, _ in runs],
        ends=[end for _, end, _ in runs],
        slots=[present.index(slot) for _, _, slot in runs],
        p=p,
        seed=active.seed if active is not None else 0,
        row_ids=active.row_ids if active is not None else None,
        stream=active.stream if active is not None else 0,
    )


def check_adapter(i: int, a: Tensor, b: Tensor, x: Tensor, n_in: int, n_out: int) -> None:
    """Raise unless A and B of slot i are [r, n_in] and [n_out, r], floating, and on x's device."""
    for name, w in ((f"A[{i}]", a), (f"B[{i}]", b)):
        if not w.is_floating_point():
            raise TypeError(f"{name}: expected a floating dtype, got {w.dtype}")
        if w.device != x.device:
            raise ValueError(f"{name}: expected the device of x ({x.device}), got {w.device}")
        if w.dim() != 2:
            raise ValueError(f"{name}: expected two dimensions, got shape {tuple(w.shape)}")
    if a.shape[1] != n_in:
        raise ValueError(f"A[{i}]: expected shape [r, {n_in}], got {tuple(a.shape)}")
    if tuple(b.shape) != (n_out, a.shape[0]):
        raise ValueError(f"B[{i}]: expected shape [{n_out}, {a.shape[0]}], got {tuple(b.shape)}")
