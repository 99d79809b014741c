"""The rows that are being written: what each is, and their state as tensors that a step reads.

A row that ends leaves, and the rows behind it move up. Rows of one slot stand side by side.

Legend: N rows, B blocks of the longest table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from rlhf_engine.hydra.gate import SlotTable
from rlhf_engine.hydra.kv_cache import BLOCK
from rlhf_engine.rollout.request import SamplingConfig


@dataclass(eq=False)
class Row:
    """One answer, waiting or being written."""

    index: int
    prompt: tuple[int, ...]
    slot: str | None
    sampling: SamplingConfig
    greedy: bool
    seed: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)

    @property
    def prefix(self) -> tuple[str | None, tuple[int, ...]]:
        """What rows must have in common to share the keys and values of their prompts."""
        return (self.slot, self.prompt)

    @property
    def blocks_needed(self) -> int:
        """Blocks of the cache that it may need: the last token that it draws is never read."""
        return -(-(len(self.prompt) + self.sampling.max_completion_length - 1) // BLOCK)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Tokens that go into the cache in one call."""

    tokens: tuple[int, ...]
    slot: str | None
    blocks: list[int]


@dataclass(frozen=True, kw_only=True)
class DrawGroup:
    """Rows whose tokens one call draws."""

    places: tuple[int, ...]
    rows_N: torch.Tensor | None
    """int64, the places; None: all."""
    slot: str | None
    """Slot with LoRA on the LM head, or None."""
    top_k: int | None
    top_p: float | None
    temperature: float | None
    """None: not the same for all of them."""


class LiveRows:
    """Rows being written, in the order of their slots, and their state."""

    def __init__(
        self, device: torch.device, table_columns: int, slots: Sequence[str], head_slots: frozenset[str]
    ) -> None:
        """slots: those that rows may carry. head_slots: slots with LoRA on the LM head."""
        self.rows: list[Row] = []
        self.device = device
        self._head_slots = head_slots
        self._slot_numbers = {slot: i for i, slot in enumerate(slots)}
        self._columns = table_columns
        integers = {"dtype": torch.int64, "device": device}
        self.tokens_N = torch.empty(0, **integers)  # type: ignore[call-overload]
        """Last token of each row, not in the cache yet."""
        self.lengths_N = torch.empty(0, **integers)  # type: ignore[call-overload]
        """Tokens of each row that are in the cache: the position of the next."""
        self.seeds_N = torch.empty(0, **integers)  # type: ignore[call-overload]
        self.slots_N = torch.empty(0, **integers)  # type: ignore[call-overload]
        """Place of each row's slot among `slots`; −1: none."""
        self.greedy_N = torch.empty(0, dtype=torch.bool, device=device)
        self.temperatures_N = torch.empty(0, dtype=torch.float32, device=device)
        self.table_NB = torch.empty((0, table_columns), **integers)  # type: ignore[call-overload]
        self.slot_table = SlotTable.uniform(None, 0)
        self.longest = 0
        """At least the most tokens that a row has in the cache."""
        self.any_minimum = False
        """Whether a row may not end before it has some number of tokens."""
        self.groups: list[DrawGroup] = []

    def __len__(self) -> int:
        return len(self.rows)

    def append(self, rows: Sequence[Row]) -> None:
        """Rows whose prompts are in the cache."""
        device = self.device
        tables = [row.blocks + [0] * (self._columns - len(row.blocks)) for row in rows]
        new = {
            "tokens_N": torch.zeros(len(rows), dtype=torch.int64, device=device),
            "lengths_N": torch.tensor([len(row.prompt) for row in rows], device=device),
            "seeds_N": torch.tensor([row.seed for row in rows], device=device),
            "slots_N": torch.tensor([self._number(row.slot) for row in rows], device=device),
            "greedy_N": torch.tensor([row.greedy for row in rows], device=device),
            "temperatures_N": torch.tensor(
                [row.sampling.temperature for row in rows], dtype=torch.float32, device=device
            ),
            "table_NB": torch.tensor(tables, device=device),
        }
        for name, values in new.items():
            setattr(self, name, torch.cat([getattr(self, name), values]))
        self.rows += rows
        self._settle()

    def _number(self, slot: str | None) -> int:
        return -1 if slot is None else self._slot_numbers[slot]

    def keep(self, places: Sequence[int]) -> None:
        """Only the rows at these places go on, in this order."""
        at = torch.tensor(places, dtype=torch.int64, device=self.device)
        self.rows = [self.rows[i] for i in places]
        for name in _STATE:
            setattr(self, name, getattr(self, name).index_select(0, at))
        self._settle()

    def sort_by_slot(self) -> None:
        """Rows of one slot side by side, in the order they are in."""
        names = [row.slot or "" for row in self.rows]
        if names != sorted(names):
            self.keep(sorted(range(len(names)), key=names.__getitem__))

    def _settle(self) -> None:
        """What follows from who is here."""
        self.longest = max((len(row.prompt) + len(row.tokens) for row in self.rows), default=0)
        self.any_minimum = any(row.sampling.min_completion_length > 1 for row in self.rows)
        self.slot_table = slot_table([row.slot for row in self.rows], [1] * len(self.rows))
        self.groups = self.draw_groups(self.rows)

    def draw_groups(self, rows: Sequence[Row]) -> list[DrawGroup]:
        """Rows whose draws differ in more than numbers per row, apart."""
        members: dict[tuple[str | None, int | None, float | None], list[int]] = {}
        for i, row in enumerate(rows):
            slot = row.slot if row.slot in self._head_slots else None
            members.setdefault((slot, row.sampling.top_k, row.sampling.top_p), []).append(i)
        return [
            DrawGroup(
                places=tuple(places),
                rows_N=None if len(members) == 1 else torch.tensor(places, device=self.device),
                slot=slot,
                top_k=top_k,
                top_p=top_p,
                temperature=_common([rows[i].sampling.temperature for i in places]),
            )
            for (slot, top_k, top_p), places in members.items()
        ]


_STATE = ("tokens_N", "lengths_N", "seeds_N", "slots_N", "greedy_N", "temperatures_N", "table_NB")


def _common(numbers: Sequence[float]) -> float | None:
    return numbers[0] if all(x == numbers[0] for x in numbers) else None


def slot_table(slots: Sequence[str | None], lengths: Sequence[int]) -> SlotTable:
    """The table of a call with so many rows of each slot, one after another."""
    starts: list[int] = []
    ends: list[int] = []
    found: list[str | None] = []
    end = 0
    for slot, length in zip(slots, lengths, strict=True):
        if not found or slot != found[-1]:
            starts.append(end)
            ends.append(end)
            found.append(slot)
        end += length
        ends[-1] = end
    return SlotTable(starts=tuple(starts), ends=tuple(ends), slots=tuple(found))
