"""LoRA on a head by runs of rows: the record that callers fill, what ops take of it, and one head after another.

The vocabulary is swept once for all rows by `cpu`, which takes a `HeadRuns` as it is. Other backends know one LoRA per
call; `HeadRuns.heads` gives them one slot's rows after another, so there each slot costs a sweep. In Triton
`use_variant` lets slots whose rows have the same tiles share one. In every way the bits of a row, and of a slot's
gradients, are those of a call with that slot's rows alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_kernels.lora.segments import OFF, Segments
from rlhf_kernels.runtime import registry
from rlhf_kernels.vocab.logits import HeadGrads, HeadLora, HeadOptions, check_tensor

RUNS = "run_A: float[r_i, H], run_B: float[V, r_i]"
"""Tensors of `HeadRuns` in the signature of an op."""


Together = Callable[[int, int | None], Hashable | None]
"""A slot's number of rows and rank (None: no LoRA) to what slots of one sweep have in common; None: its own sweep."""


def use_variant(*, one_sweep: bool = False) -> contextlib.AbstractContextManager[None]:
    """Let `sample` and `linear_logprob` take another way through several LoRAs in Triton, which no GPU has run.

    It is that of this thread, and of the backward of what is called meanwhile. One LoRA, or none, is not concerned.

    Args:
        one_sweep: rows of several slots share a sweep of the vocabulary, as on a CPU. No bit changes.

    Returns:
        A context manager, for a `with` block; what was on before it comes back at its end.
    """
    return registry.use_ways("head_runs", *["one_sweep"] * one_sweep)


def is_one_sweep() -> bool:
    """Return whether `use_variant` has let rows of several slots share a sweep."""
    return "one_sweep" in registry.ways("head_runs")


class HeadLoras(NamedTuple):
    """Rank-r additions to a head, each for the rows of its own runs; rows of no run have none."""

    segments: Segments
    """runs of rows, and of each the index of its LoRA; −1 is none"""
    loras: tuple[HeadLora, ...]
    """ranks, scales and dtypes may differ"""

    @classmethod
    def of_runs(cls, starts: Sequence[int], ends: Sequence[int], loras: Sequence[HeadLora | None]) -> HeadLoras:
        """Give each run of rows a LoRA of its own.

        Args:
            starts: first row of each run, sorted.
            ends: row after the last one of each run.
            loras: addition for the rows of each run; None: no addition.

        Returns:
            `HeadLoras` with a slot for each run that has a LoRA.

        Raises:
            ValueError: lengths differ, or runs overlap or are not sorted.
        """
        on = [lora for lora in loras if lora is not None]
        numbers = iter(range(len(on)))
        slots = tuple(OFF if lora is None else next(numbers) for lora in loras)
        return cls(Segments(starts=tuple(starts), ends=tuple(ends), slots=slots), tuple(on))


class HeadRuns(NamedTuple):
    """The same as ops take it: runs are on, sorted and not empty; every slot has one. Other rows: see `HeadOptions`."""

    run_A: list[Tensor]  # [r_i, H]
    run_B: list[Tensor]  # [V, r_i]
    run_scales: list[float]
    run_starts: list[int]
    run_ends: list[int]
    run_slots: list[int]  # per run, an index into the first three

    @classmethod
    def none(cls) -> HeadRuns:
        """No run at all."""
        return cls([], [], [], [], [], [])

    def check(self, n_rows: int) -> None:
        """Raise ValueError unless lists have one length each, and runs lie within `n_rows`, in order and of such slots.

        Shapes of A and B are not looked at.
        """
        for names, lists in (("A, run_B, run_scales", self[:3]), ("starts, run_ends, run_slots", self[3:])):
            lengths = [len(x) for x in lists]
            if len(set(lengths)) != 1:
                raise ValueError(f"run_{names}: expected the same number of entries, got {lengths}")
        at = 0
        for start, end in zip(self.run_starts, self.run_ends, strict=True):
            if not at <= start < end <= n_rows:
                raise ValueError(
                    f"run_starts, run_ends: expected ascending runs within [{at}, {n_rows}), got [{start}, {end})"
                )
            at = end
        if set(self.run_slots) != set(range(len(self.run_A))):
            raise ValueError(f"run_slots: expected runs of every slot in [0, {len(self.run_A)}), got {self.run_slots}")

    def stretches(self, n_rows: int) -> dict[int, list[tuple[int, int]]]:
        """(start, end) of every slot, slots in the order of their first rows; rows of no run are those of slot −1."""
        found: dict[int, list[tuple[int, int]]] = {}
        at = 0
        for start, end, slot in zip(self.run_starts, self.run_ends, self.run_slots, strict=True):
            if start > at:
                found.setdefault(OFF, []).append((at, start))
            found.setdefault(slot, []).append((start, end))
            at = end
        if n_rows > at or not found:
            found.setdefault(OFF, []).append((at, n_rows))
        return found

    def heads(
        self, head: HeadOptions, n_rows: int, device: torch.device, together: Together | None = None
    ) -> list[OneHead]:
        """One slot after another, and the rows of no run: what calls of one LoRA each need; or some `together`."""
        groups: dict[Hashable, list[int]] = {}
        stretches = self.stretches(n_rows)
        for slot, runs in stretches.items():
            rank = None if slot == OFF else self.run_A[slot].shape[0]
            key = None if together is None else together(sum(end - start for start, end in runs), rank)
            groups.setdefault((slot,) if key is None else key, []).append(slot)
        found = []
        for slots in groups.values():
            runs = [run for slot in slots for run in stretches[slot]]
            rows: slice | Tensor = slice(runs[0][0], runs[-1][1])
            if any(end != start for (_, end), (start, _) in pairwise(runs)):
                rows = torch.cat([torch.arange(*run, device=device) for run in runs])
            column = None if head.row_temperature is None else head.row_temperature[rows]
            one = head._replace(row_temperature=column)
            if len(slots) > 1:
                found.append(OneHead(rows, one, OFF, self._side_by_side(slots, stretches)))
                continue
            slot = slots[0]
            if slot != OFF:
                lora = (self.run_A[slot], self.run_B[slot], self.run_scales[slot])
                one = one._replace(lora_A=lora[0], lora_B=lora[1], lora_scale=lora[2])
            found.append(OneHead(rows, one, slot, None))
        return found

    def _side_by_side(self, slots: list[int], stretches: dict[int, list[tuple[int, int]]]) -> HeadRuns:
        """The runs of these slots alone, one for each, where their rows follow each other."""
        lines: list[tuple[Tensor, Tensor, float, int, int, int]] = []
        at = 0
        for slot in slots:
            end = at + sum(end - start for start, end in stretches[slot])
            if slot > OFF:
                lines.append((self.run_A[slot], self.run_B[slot], self.run_scales[slot], at, end, len(lines)))
            at = end
        return HeadRuns(*map(list, zip(*lines, strict=True)))


class OneHead(NamedTuple):
    """Rows that share a head, or a sweep."""

    rows: slice | Tensor  # or int64 indices
    head: HeadOptions  # of these rows
    slot: int  # −1: that of no run
    runs: HeadRuns | None  # of several slots, in place of `slot`

    def needs(self, names: set[str]) -> str:
        """Those gradients of a call with one LoRA, comma-separated, that a call with runs needs, by `slot_names`."""
        own = (*HeadGrads.names[:3], *slot_names(self.slot))
        return ",".join(name for name, its in zip(HeadGrads.names, own, strict=True) if its in names)


def slot_names(slot: int) -> tuple[str, str]:
    """Names of the gradients of a slot's A and B, where gradients are named; −1: of the LoRA of `HeadOptions`."""
    return ("lora_A", "lora_B") if slot == OFF else (f"run_A{slot}", f"run_B{slot}")


def joined(heads: Sequence[OneHead], parts: Sequence[Tensor], n_rows: int) -> Tensor:
    """Put together for all rows what each head's rows have; what was not made stays empty."""
    if parts[0].shape[0] == 0:
        return parts[0]
    out = parts[0].new_empty(n_rows, *parts[0].shape[1:])
    for one, part in zip(heads, parts, strict=True):
        out[one.rows] = part
    return out


def check_runs(lora: HeadLora | HeadLoras | None, hidden: Tensor, weight: Tensor) -> tuple[HeadLora | None, HeadRuns]:
    """The LoRA that all rows have, if there is one, and the runs of rows that have one each.

    Slots without rows are left out: their gradient has to stay None.
    """
    if not isinstance(lora, HeadLoras):
        return lora, HeadRuns.none()
    segments, loras = lora
    if not isinstance(segments, Segments):
        raise TypeError(f"lora.segments: expected Segments, got {type(segments).__name__}")
    n_rows = hidden.shape[0]
    if segments.ends and segments.ends[-1] > n_rows:
        raise ValueError(
            f"lora.segments: expected runs within the {n_rows} rows of hidden, got end {segments.ends[-1]}"
        )
    if segments.slots and max(segments.slots) >= len(loras):
        raise ValueError(
            f"lora.segments: expected slots below {len(loras)} (the number of lora.loras), got {max(segments.slots)}"
        )
    runs = zip(segments.starts, segments.ends, segments.slots, strict=True)
    on = [(start, end, slot) for start, end, slot in runs if end > start and slot != OFF]
    present = sorted({slot for _, _, slot in on})
    for i in present:
        one = loras[i]
        check_tensor(f"lora.loras[{i}].A", one.A, (None, hidden.shape[1]), hidden)
        check_tensor(f"lora.loras[{i}].B", one.B, (weight.shape[0], one.A.shape[0]), hidden)
    if on and len(present) == 1 and sum(end - start for start, end, _ in on) == n_rows:
        return loras[present[0]], HeadRuns.none()
    return None, HeadRuns(
        run_A=[loras[i].A for i in present],
        run_B=[loras[i].B for i in present],
        run_scales=[float(loras[i].scale) for i in present],
        run_starts=[start for start, _, _ in on],
        run_ends=[end for _, end, _ in on],
        run_slots=[present.index(slot) for _, _, slot in on],
    )
