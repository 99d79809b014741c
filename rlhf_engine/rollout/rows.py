"""The rows that are being written: what each is, and their state as tensors that a step reads.

A row that ends leaves, and the rows behind it move up. Rows of one slot stand side by side.

Legend: N rows, B blocks of the longest table.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch
from rlhf_kernels.runtime.device_tables import queued

from rlhf_engine.devices import is_gpu
from rlhf_engine.hydra.gate import SlotTable
from rlhf_engine.hydra.kv_cache import BLOCK
from rlhf_engine.rollout.request import FinishReason, SamplingConfig, StopTexts


@dataclass(eq=False, kw_only=True)
class Prompt:
    """Tokens that go into the cache in one call."""

    prompt: tuple[int, ...]
    """Token ids."""
    slot: str | None
    """Slot by which the model reads them, or None: adapter off."""
    blocks: list[int] = field(default_factory=list)
    """Its blocks of the cache, at least one as long as it is alive."""
    cached: int = 0
    """Tokens, from the first on, that were in the blocks already when it was admitted."""


@dataclass(eq=False, kw_only=True)
class AnswerRow(Prompt):
    """One answer: waiting, being written, or finished."""

    index: int
    """Number of its request, counted over the life of the engine."""
    sampling: SamplingConfig
    """Options of its draws."""
    greedy: bool
    """Whether it takes the arg-max."""
    fixed: bool
    """Whether it keeps the weights that it begins with."""
    seed: int
    """Key of its random numbers."""
    keep: bool
    """Whether its blocks stay for a prompt that extends it, and it takes those of an earlier row."""
    then: tuple[tuple[int, ...], ...] = ()
    """Token ids that follow it, each with another answer after it."""
    stop: StopTexts | None = None
    """Texts that end it."""
    tokens: list[int] = field(default_factory=list)
    """Token ids so far, the ending one included."""
    logprobs: list[float] = field(default_factory=list)
    """Log-prob of each token under the distribution it was drawn from."""
    supports: list[torch.Tensor] = field(default_factory=list)
    """int32 numbers of each token's support, see `Supports`; tokens beyond were drawn among all words."""
    versions: list[int] = field(default_factory=list)
    """Version of the policy that drew each token."""
    ahead: int = field(default=0, init=False)
    """Tokens that it has drawn and not noted yet."""
    finish_reason: FinishReason = "length"
    """Of a finished one: eos: an end-of-sequence token; stop: a stop text; length: it reached its most tokens."""
    read_by: object = None
    """What named the slot's weights when it, or the turn before it, was admitted; None before."""

    @property
    def holds(self) -> bool:
        """Whether it has begun and keeps its slot's weights as they are."""
        return self.fixed and self.read_by is not None

    @property
    def left(self) -> int:
        """Most tokens that it may yet draw."""
        return self.sampling.max_completion_length - len(self.tokens) - self.ahead

    @property
    def prefix(self) -> tuple[str | None, tuple[int, ...]]:
        """Slot and prompt, which rows must have in common to share the keys and values of their prompts."""
        return (self.slot, self.prompt)

    @property
    def blocks_needed(self) -> int:
        """Blocks of the cache that it and its next turns may need: the last token that it draws is never read."""
        answer = self.sampling.max_completion_length
        return -(-(len(self.prompt) + answer + sum(len(given) + answer for given in self.then) - 1) // BLOCK)


@dataclass(eq=False)
class RowState:
    """State of N rows that a step reads, on the device."""

    tokens_N: torch.Tensor  # int64, last token of each row, not in the cache yet
    lengths_N: torch.Tensor  # int64, tokens of each row that are in the cache: the position of the next
    seeds_N: torch.Tensor  # int64, key of each row's random numbers
    slots_N: torch.Tensor  # int64, number of each row's slot; −1: none
    greedy_N: torch.Tensor  # bool
    temperatures_N: torch.Tensor  # fp32
    table_NB: torch.Tensor  # int64, the blocks of each row

    @classmethod
    def idle(cls, n: int, columns: int, device: torch.device, *, block: int = 0) -> RowState:
        """Rows that are nobody's: without tokens, all of their blocks the same one."""
        return cls(
            **{name: torch.zeros(n, dtype=torch.int64, device=device) for name in ("tokens_N", "lengths_N", "seeds_N")},
            slots_N=torch.full((n,), -1, device=device),
            greedy_N=torch.zeros(n, dtype=torch.bool, device=device),
            temperatures_N=torch.ones(n, dtype=torch.float32, device=device),
            table_NB=torch.full((n, columns), block, dtype=torch.int64, device=device),
        )

    def at(self, rows: slice | torch.Tensor) -> RowState:
        """Some of the rows: a view for a slice, a copy for indices."""
        return RowState(**{name: getattr(self, name)[rows] for name in _STATE})

    def followed_by(self, other: RowState) -> RowState:
        """These rows and then others."""
        return RowState(**{name: torch.cat([getattr(self, name), getattr(other, name)]) for name in _STATE})

    def load(self, other: RowState) -> None:
        """Overwrite the first rows, in place, with those of another state."""
        for name in _STATE:
            values = getattr(other, name)
            getattr(self, name)[: len(values)].copy_(values)


_STATE = tuple(f.name for f in fields(RowState))


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleGroup:
    """Rows whose tokens one call draws."""

    rows_N: torch.Tensor | None  # int64, their places, slot by slot; None: all rows as they are
    heads: SlotTable  # runs of them by the slot whose LoRA is on the LM head, each slot once
    top_k: int | None
    top_p: float | None
    min_p: float | None
    not_yet: torch.Tensor | None  # int64, ids that would end them too early; None: none
    temperature: float | None  # none: not the same for all of them

    @property
    def truncates(self) -> bool:
        """Whether words are left out by their probability."""
        return self.top_k is not None or (self.top_p or 1.0) < 1.0 or self.min_p is not None


class LiveRows:
    """Rows being written, in the order of their slots, and their state."""

    def __init__(self, device: torch.device) -> None:
        self.rows: list[AnswerRow] = []
        self.state = RowState.idle(0, 0, device)
        self._device = device
        self.slots: dict[str, int] = {}  # numbers of the slots that rows may carry
        self.head_slots: set[str] = set()  # those of them with LoRA on the LM head
        self._settle()

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def columns(self) -> int:
        """Most blocks of a row."""
        return self.state.table_NB.shape[1]

    def widen(self, columns: int) -> None:
        """Make room for rows of so many blocks."""
        self.state.table_NB = torch.nn.functional.pad(self.state.table_NB, (0, columns - self.columns))

    def append(self, rows: Sequence[AnswerRow]) -> None:
        """Rows whose prompts are in the cache."""
        tables = [row.blocks + [0] * (self.columns - len(row.blocks)) for row in rows]
        temperatures = torch.tensor([row.sampling.temperature for row in rows], dtype=torch.float32)
        slots = [-1 if row.slot is None else self.slots[row.slot] for row in rows]
        each = [(0, len(row.prompt), row.seed, slot, row.greedy) for row, slot in zip(rows, slots, strict=True)]
        tokens_N, lengths_N, seeds_N, slots_N, greedy_N = queued(torch.tensor(each).T.contiguous(), self._device)
        others = queued(temperatures, self._device), queued(torch.tensor(tables), self._device)
        new = RowState(tokens_N, lengths_N, seeds_N, slots_N, greedy_N.bool(), *others)
        self.state = self.state.followed_by(new)
        self.rows += rows
        self._settle()

    def keep(self, places: Sequence[int]) -> None:
        """Only the rows at these places go on, in this order."""
        self.rows = [self.rows[i] for i in places]
        self.state = self.state.at(queued(places, self._device))
        self._settle()

    def drop_ended(self) -> None:
        """Only the rows that have blocks go on."""
        self.keep([place for place, row in enumerate(self.rows) if row.blocks])

    def sort_by_slot(self) -> None:
        """Rows of one slot side by side, in the order they are in."""
        names = [row.slot or "" for row in self.rows]
        if names != sorted(names):
            self.keep(sorted(range(len(names)), key=names.__getitem__))

    def _settle(self) -> None:
        """Compute the longest row, the slot table and the draw groups of the rows that are here."""
        self.longest = max((len(row.prompt) + len(row.tokens) + row.ahead for row in self.rows), default=0)
        """Bound of the tokens that a row has in the cache; no row has more."""
        self.slot_table = slot_table([row.slot for row in self.rows], [1] * len(self.rows))
        self._groups = self.draw_groups(self.rows)

    def groups(self, ahead: int = 0) -> list[SampleGroup]:
        """Groups of the rows once they have so many more tokens, by which some may have become long enough to end."""
        if any(group.not_yet is not None for group in self._groups):
            self._groups = self.draw_groups(self.rows, ahead)
        return self._groups

    def draw_groups(self, rows: Sequence[AnswerRow], ahead: int = 0) -> list[SampleGroup]:
        """Rows whose draws differ in more than numbers and heads, apart. ahead: tokens that are drawn before."""
        members: dict[tuple[str | None, int | None, float | None, float | None, tuple[int, ...]], list[int]] = {}
        heads = [row.slot if row.slot in self.head_slots else "" for row in rows]
        for i in sorted(range(len(rows)), key=heads.__getitem__):
            row, how = rows[i], rows[i].sampling
            ends = how.eos_token_ids if len(row.tokens) + row.ahead + ahead < how.min_completion_length - 1 else ()
            apart = heads[i] if is_gpu(self._device) else None  # no GPU has drawn for several heads in one call
            members.setdefault((apart, how.top_k, how.top_p, how.min_p, ends), []).append(i)
        return [
            SampleGroup(
                rows_N=None if places == [*range(len(rows))] else queued(places, self._device),
                heads=slot_table([heads[i] or None for i in places], [1] * len(places)),
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                not_yet=queued(sorted(ends), self._device) if ends else None,
                temperature=t.pop() if len(t := {rows[i].sampling.temperature for i in places}) == 1 else None,
            )
            for (_, top_k, top_p, min_p, ends), places in members.items()
        ]


def slot_table(slots: Sequence[str | None], lengths: Sequence[int]) -> SlotTable:
    """The table of a call with so many rows of each slot, one after another."""
    slot_of, length_of = operator.itemgetter(0), operator.itemgetter(1)
    groups = itertools.groupby(zip(slots, lengths, strict=True), slot_of)
    runs = [(slot, sum(map(length_of, run))) for slot, run in groups]
    ends = tuple(itertools.accumulate(map(length_of, runs)))
    return SlotTable(starts=(0, *ends)[:-1], ends=ends, slots=tuple(map(slot_of, runs)))
