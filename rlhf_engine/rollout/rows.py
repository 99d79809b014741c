"""The rows that are being written: what each is, their state as tensors that a step reads, and how tokens are drawn.

A row that ends leaves, and the rows behind it move up. Rows of one slot stand side by side.

Draws among all words are one sweep of the vocabulary, no logits kept. Draws among some make the logits of a few rows at
a time by the function that scoring has (`hydra.supports`), and give the words that each token was drawn among.

Legend: N rows, B blocks of the longest table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import torch
from rlhf_kernels.gather_logprob import gather_logprob
from rlhf_kernels.runtime.device_tables import queued
from rlhf_kernels.sample import sample
from rlhf_kernels.sample.reference import choose, filter_
from rlhf_kernels.vocab.logits import row_chunks

from rlhf_engine.hydra.attention import BLOCK
from rlhf_engine.hydra.backbone import Backbone
from rlhf_engine.hydra.gate import LmHead, SlotTable
from rlhf_engine.hydra.supports import OUTSIDE, pack_bits, wide_logits
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

    def __post_init__(self) -> None:
        self.prefix = self.slot, self.prompt
        """Slot and prompt, which rows must have in common to share the keys and values of their prompts."""
        answers = (1 + len(self.then)) * self.sampling.max_completion_length
        self.blocks_needed = -(-(len(self.prompt) + answers + sum(map(len, self.then)) - 1) // BLOCK)
        """Blocks of the cache that it and its next turns may need: the last token that it draws is never read."""


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


@dataclass(frozen=True, kw_only=True)
class SampleGroup:
    """Rows whose tokens one call draws."""

    places: tuple[int, ...]
    rows_N: torch.Tensor | None = field(compare=False)  # int64, the places; None: all
    slot: str | None  # slot with LoRA on the LM head, or None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    not_yet: torch.Tensor | None = field(compare=False)  # int64, ids that would end them too early; None: none
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
        each, temperatures = list[list[int]](), list[float]()
        for row in rows:
            slot = -1 if row.slot is None else self.slots[row.slot]
            table = row.blocks + [0] * (self.columns - len(row.blocks))
            each.append([0, len(row.prompt), row.seed, slot, row.greedy, *table])
            temperatures.append(row.sampling.temperature)
        columns = queued(torch.tensor(each).T.contiguous(), self._device)
        tokens_N, lengths_N, seeds_N, slots_N, greedy_N = columns[:5]
        temperatures_N = queued(torch.tensor(temperatures, dtype=torch.float32), self._device)
        self.state = self.state.followed_by(
            RowState(tokens_N, lengths_N, seeds_N, slots_N, greedy_N.bool(), temperatures_N, columns[5:].T)
        )
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
        """Rows whose draws differ in more than numbers per row, apart. ahead: tokens that are drawn before."""
        members: dict[
            tuple[str | None, int | None, float | None, float | None, tuple[int, ...]], tuple[list[int], set[float]]
        ] = {}
        for i, row in enumerate(rows):
            slot, how = row.slot if row.slot in self.head_slots else None, row.sampling
            ends = how.eos_token_ids if len(row.tokens) + row.ahead + ahead < how.min_completion_length - 1 else ()
            places, temperatures = members.setdefault((slot, how.top_k, how.top_p, how.min_p, ends), ([], set()))
            places.append(i)
            temperatures.add(how.temperature)
        return [
            SampleGroup(
                places=tuple(places),
                rows_N=None if len(members) == 1 else queued(places, self._device),
                slot=slot,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                not_yet=queued(sorted(ends), self._device) if ends else None,
                temperature=temperatures.pop() if len(temperatures) == 1 else None,
            )
            for (slot, top_k, top_p, min_p, ends), (places, temperatures) in members.items()
        ]


def slot_table(slots: Sequence[str | None], lengths: Sequence[int]) -> SlotTable:
    """The table of a call with so many rows of each slot, one after another."""
    starts, ends, segments, end = list[int](), list[int](), list[str | None](), 0
    for slot, length in zip(slots, lengths, strict=True):
        if not segments or slot != segments[-1]:
            starts.append(end)
            ends.append(end)
            segments.append(slot)
        end += length
        ends[-1] = end
    return SlotTable(starts=tuple(starts), ends=tuple(ends), slots=tuple(segments))


# ---- draws -----------------------------------------------------------------------------------------------------------


class NextTokens(NamedTuple):
    """Tokens that one step drew for N rows."""

    tokens: torch.Tensor  # int64 [N]
    logprobs: torch.Tensor  # fp32 [N], log-probs under the distribution that a token was drawn from
    bits: torch.Tensor | None = None
    """int32 [N, W], words that it was drawn among, as `pack_bits` packs them; no bit, or None: all words"""


class Sampler:
    """Draws for rows of one backbone, whose head stays where it is meanwhile."""

    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        self._heads: dict[str | None, LmHead] = {}

    def __call__(self, hidden: torch.Tensor, state: RowState, groups: Sequence[SampleGroup]) -> NextTokens:
        """The next tokens of rows with these hidden states [N, H]."""
        parts = []
        for group in groups:
            rows_N, own_hidden, own = group.rows_N, hidden, state
            if rows_N is not None:
                own_hidden, own = hidden[rows_N], state.at(rows_N)
            if group.slot not in self._heads:
                self._heads[group.slot] = self._backbone.lm_head_in(group.slot)
            head = self._heads[group.slot]
            if group.truncates or group.not_yet is not None:
                parts.append(self._sample_among_some(own_hidden, head, own, group))
                continue
            drawn = sample(
                own_hidden,
                head.weight,
                temperature=own.temperatures_N if group.temperature is None else group.temperature,
                seed=own.seeds_N,
                position=own.lengths_N,
                greedy=own.greedy_N,
                softcap=head.softcap,
                logit_scale=head.logit_scale,
                bias=head.bias,
                lora=head.lora,
            )
            assert drawn.token is not None
            assert drawn.logprob is not None
            parts.append(NextTokens(drawn.token, drawn.logprob))
        return parts[0] if len(parts) == 1 else _joined(parts, groups, len(hidden))

    def _sample_among_some(self, hidden: torch.Tensor, head: LmHead, state: RowState, group: SampleGroup) -> NextTokens:
        """The same where words are left out. Ends that come too early go first, then the filters follow."""
        parts = []
        for rows in row_chunks(len(hidden), len(head.weight)):
            own, logits = state.at(rows), wide_logits(hidden[rows], head)
            filtered = logits.clone()
            if group.not_yet is not None:
                filtered[:, group.not_yet] = -torch.inf
            greedy = (own.greedy_N, filtered.argmax(-1))  # before the temperature could round two onto each other
            filtered /= own.temperatures_N[:, None]
            if group.truncates:
                filtered = filter_(filtered, group.top_k or 0, group.top_p or 1.0, group.min_p or 0.0)
            kept = filtered > -torch.inf
            z = (logits / own.temperatures_N[:, None]).masked_fill_(~kept, OUTSIDE)
            tokens = choose(z, own.seeds_N, own.lengths_N, greedy, kept)
            logprobs = gather_logprob(z, tokens).logprob
            assert logprobs is not None
            parts.append((tokens, logprobs, pack_bits(kept)))
        return NextTokens(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _joined(parts: Sequence[NextTokens], groups: Sequence[SampleGroup], n: int) -> NextTokens:
    """Put what was drawn for groups of n rows into the rows' order."""
    tokens_N, logprobs_N = parts[0].tokens.new_empty(n), parts[0].logprobs.new_empty(n, dtype=torch.float32)
    bits = next((part.bits.new_zeros(n, part.bits.shape[1]) for part in parts if part.bits is not None), None)
    for part, group in zip(parts, groups, strict=True):
        assert group.rows_N is not None
        tokens_N[group.rows_N], logprobs_N[group.rows_N] = part.tokens, part.logprobs.to(logprobs_N.dtype)
        if part.bits is not None and bits is not None:
            bits[group.rows_N] = part.bits
    return NextTokens(tokens_N, logprobs_N, bits)
