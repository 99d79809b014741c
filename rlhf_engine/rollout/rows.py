"""The rows that wait or are being written: blocks of the cache, state as tensors that a step reads, draws of tokens.

A row that ends leaves, and the rows behind it move up. Rows of one slot stand side by side.

Draws among all words are one sweep of the vocabulary, no logits kept. Draws among some make the logits of a few rows at
a time by the function that scoring has (`hydra.supports`), and give the words that each token was drawn among.

Legend: N rows, B blocks of the longest table.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import operator
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import torch
from rlhf_kernels.gather_logprob import gather_logprob
from rlhf_kernels.runtime.device_tables import queued
from rlhf_kernels.sample import sample
from rlhf_kernels.sample.reference import choose, filter_
from rlhf_kernels.vocab.logits import row_chunks
from rlhf_kernels.vocab.runs import HeadLoras, is_one_sweep

from rlhf_engine.devices import is_gpu
from rlhf_engine.hydra.attention import BLOCK, BlockPool
from rlhf_engine.hydra.backbone import Backbone
from rlhf_engine.hydra.gate import LmHead, SlotTable
from rlhf_engine.hydra.supports import OUTSIDE, head_options, pack_bits, wide_logits
from rlhf_engine.rollout.request import FinishReason, SamplingConfig, StopTexts

PREFILL_TOKENS = 8192  # most prompt tokens that are admitted in one call; a longer prompt is a call of its own


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


class Admission:
    """The requests that wait, and the blocks of the cache."""

    def __init__(self, weights: Callable[[str | None], object]) -> None:
        """weights: gives what is the same for a slot as long as its weights are."""
        self.pool = BlockPool()
        self.waiting = deque[AnswerRow]()
        self._weights = weights
        self._members: Counter[tuple[str | None, tuple[int, ...]]] = Counter()
        """Number of waiting rows by slot and prompt."""
        self._prefixes: dict[tuple[str | None, tuple[int, ...]], list[int]] = {}
        """Blocks of prompts that several requests share, for as long as some of them wait."""
        self._hidden: dict[tuple[str | None, tuple[int, ...]], torch.Tensor] = {}
        """Hidden states [H] of their last tokens, once they are in the cache."""
        self._read_by: dict[str | None, object] = {}
        """Weights by which the slots' blocks were written."""
        self.kept: OrderedDict[bytes, tuple[str | None, int]] = OrderedDict()
        """Slot and block by what is in the block and before it, the least recently used first. A block that is not
        full goes to the first row that goes on from it, which writes behind what is kept."""

    def add(self, rows: Sequence[AnswerRow]) -> None:
        """Let rows wait; those with a prompt in common follow each other."""
        groups: dict[object, list[AnswerRow]] = {}
        for row in rows:
            groups.setdefault(row.prefix, []).append(row)
            self._members[row.prefix] += 1
        self.waiting.extend(itertools.chain(*groups.values()))

    def remove(self, row: AnswerRow) -> None:
        """A waiting row goes."""
        self.waiting.remove(row)
        self._leave(row)
        if not self._members[row.prefix] and row.prefix in self._prefixes:
            self._drop([row.prefix])

    def next_rows(
        self, most: int, held: Set[str | None], *, alone: bool
    ) -> tuple[list[AnswerRow], list[AnswerRow], list[tuple[int, int]]]:
        """The next rows that fit, up to so many; those of them whose prompts are not in the cache; blocks to copy then.

        held: slots that no answer may begin with now. alone: no row is alive. Blocks of older weights are forgotten.
        """
        self._forget_old()
        rows, new, copies, tokens = list[AnswerRow](), list[AnswerRow](), list[tuple[int, int]](), 0
        while len(rows) < most:
            row = next((row for row in self.waiting if row.holds or not held & {row.slot, None}), None)
            if row is None:
                break
            arrives = row.prefix not in self._prefixes
            if arrives and tokens and tokens + len(row.prompt) > PREFILL_TOKENS:
                break
            if not self._take_blocks(row, copies):
                if rows or not alone or not self._prefixes:
                    break
                self._drop(list(self._prefixes))  # else nobody would ever give a block back
                continue
            if arrives:
                new.append(row)
                tokens += len(row.prompt)
            self.waiting.remove(row)
            rows.append(row)
            self._leave(row)
        return rows, new, copies

    def last_states(
        self, rows: Sequence[AnswerRow], new: Sequence[AnswerRow], hidden: torch.Tensor | None
    ) -> torch.Tensor:
        """Hidden states [N, H] of the rows' last prompt tokens; `hidden` has those of the new prompts."""
        if hidden is not None and len(new) == len(rows) and not self._prefixes:
            return hidden
        own = {} if hidden is None else {row.prefix: hidden[i] for i, row in enumerate(new)}
        self._hidden |= {prefix: state for prefix, state in own.items() if prefix in self._prefixes}
        states = self._hidden | own
        every = dict.fromkeys(row.prefix for row in rows)
        self._drop([prefix for prefix in every if prefix in self._hidden and not self._members[prefix]])
        return torch.stack([states[row.prefix] for row in rows])

    def release(self, row: AnswerRow) -> None:
        """A row has ended. What it keeps stays until the room is needed, or the weights change."""
        if row.keep and row.read_by == self._weights(row.slot):
            written = (*row.prompt, *row.tokens)[:-1]
            for key, block in reversed(list(zip(_chain(row.slot, written), row.blocks, strict=False))):
                if key not in self.kept:
                    self.pool.share([block])
                    self.kept[key] = row.slot, block
                self.kept.move_to_end(key)  # blocks before it are used later than it is: it goes first
        self.pool.give_back(row.blocks)
        row.blocks = []

    def blocks_needed(self, most_rows: int) -> int:
        """Blocks that so many waiting rows may need at once."""
        shared = sum(len(prompt) // BLOCK * (n - 1) for (_, prompt), n in self._members.items())
        every = sum(row.blocks_needed for row in self.waiting) - shared
        if len(self.waiting) <= most_rows:  # else each `submit` would read all prompts that wait
            return every
        return min(every, sum(sorted(blocks_of_each(self.waiting), reverse=True)[:most_rows]))

    def forget(self, slot: str | None) -> None:
        """Drop what is kept of a slot."""
        self._read_by.pop(slot, None)
        self._drop([prefix for prefix in self._prefixes if prefix[0] == slot])
        for key in [key for key, (owner, _) in self.kept.items() if owner == slot]:
            self.pool.give_back([self.kept.pop(key)[1]])

    def _leave(self, row: AnswerRow) -> None:
        self._members[row.prefix] -= 1
        if not self._members[row.prefix]:
            del self._members[row.prefix]

    def _drop(self, prefixes: Sequence[tuple[str | None, tuple[int, ...]]]) -> None:
        for prefix in prefixes:
            self.pool.give_back(self._prefixes.pop(prefix))
            self._hidden.pop(prefix, None)

    def _forget_old(self) -> None:
        """Forget what slots have written by other weights than they have now."""
        for slot in {slot for slot, _ in self._members}:
            now = self._weights(slot)
            if self._read_by.get(slot, now) != now:
                self.forget(slot)
            self._read_by[slot] = now

    def _take_blocks(self, row: AnswerRow, copies: list[tuple[int, int]]) -> bool:
        """Give a row its blocks if there are enough, and note what has to be copied into them."""
        prefix, need = self._prefixes.get(row.prefix), row.blocks_needed
        full, held = len(row.prompt) // BLOCK, -(-len(row.prompt) // BLOCK)
        names = self._found(row) if prefix is None else []
        blocks = self._take([self.kept[name][1] for name in names] if prefix is None else prefix[:full], need)
        if blocks is None:
            return False
        if names and row.cached % BLOCK and names[-1] in self.kept:
            self.pool.give_back([self.kept.pop(names[-1])[1]])
        row.blocks, row.read_by = blocks, self._read_by[row.slot]
        if prefix is None and self._members[row.prefix] > 1:
            self._prefixes[row.prefix] = blocks[:held]
            self.pool.share(blocks[:held])
        elif prefix is not None and held > full:  # with what the first row may have written behind the prompt
            copies.append((prefix[full], blocks[full]))
        return True

    def _take(self, held: list[int], need: int) -> list[int] | None:
        """Blocks in use, with one more holder each, and free ones up to `need`; None where not so many are free."""
        self.pool.share(held)
        own = need - len(held)
        while own > self.pool.free and self.kept:
            self.pool.give_back([self.kept.popitem(last=False)[1][1]])
        if own > self.pool.free:
            self.pool.give_back(held)
            return None
        return [*held, *self.pool.take(own)]

    def _found(self, row: AnswerRow) -> list[bytes]:
        """Names of the blocks that are kept of a row's prompt, whose last token always goes through again."""
        names, tokens, name, row.cached = list[bytes](), row.prompt[:-1], repr(row.slot).encode(), 0
        while row.keep and row.cached % BLOCK == 0:
            rest = tokens[row.cached : row.cached + BLOCK]
            named = {_name(name, rest[:n]): n for n in range(len(rest), 0, -1)}
            found = next((name for name in named if name in self.kept), None)
            if found is None:
                break
            row.cached += named[found]
            names.append(name := found)
        for name in reversed(names):
            self.kept.move_to_end(name)
        return names


def _name(before: bytes, tokens: Sequence[int]) -> bytes:
    """Name of a block of tokens behind a block of this name."""
    return hashlib.sha256(before + array("q", tokens).tobytes()).digest()


def _chain(slot: str | None, tokens: Sequence[int]) -> Iterator[bytes]:
    """Names of the blocks of tokens: the slot, and every token up to the block's last."""
    name = repr(slot).encode()
    for i in range(0, len(tokens), BLOCK):
        yield (name := _name(name, tokens[i : i + BLOCK]))


def blocks_of_each(rows: Iterable[AnswerRow]) -> list[int]:
    """Blocks of every row, and one more where a part of a shared prompt stands beside the row's copy of it."""
    counts = Counter(row.prefix for row in rows)
    return [row.blocks_needed + int(counts[row.prefix] > 1 and len(row.prompt) % BLOCK > 0) for row in rows]


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

    def to(self, device: torch.device) -> RowState:
        """These rows on a device."""
        return RowState(**{name: getattr(self, name).to(device) for name in _STATE})

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

    def forget(self, slot: str) -> None:
        """Give up the number of a slot that no row carries; the slots behind it move up."""
        self.slots = {name: i for i, name in enumerate(name for name in self.slots if name != slot)}
        self.head_slots.discard(slot)
        numbers = [-1 if row.slot is None else self.slots[row.slot] for row in self.rows]
        self.state.slots_N = queued(torch.tensor(numbers, dtype=torch.int64), self._device)

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
        """Rows whose draws differ in more than numbers and heads, apart. ahead: tokens that are drawn before."""
        members: dict[
            tuple[str | None, int | None, float | None, float | None, tuple[int, ...]], tuple[list[int], set[float]]
        ] = {}
        heads = [row.slot if row.slot in self.head_slots else "" for row in rows]
        for i in sorted(range(len(rows)), key=heads.__getitem__):
            row, how = rows[i], rows[i].sampling
            ends = how.eos_token_ids if len(row.tokens) + row.ahead + ahead < how.min_completion_length - 1 else ()
            apart = heads[i] if is_gpu(self._device) and not is_one_sweep() else None  # by default: no GPU has run it
            places, temperatures = members.setdefault((apart, how.top_k, how.top_p, how.min_p, ends), ([], set()))
            places.append(i)
            temperatures.add(how.temperature)
        return [
            SampleGroup(
                rows_N=None if places == [*range(len(rows))] else queued(places, self._device),
                heads=slot_table([heads[i] or None for i in places], [1] * len(places)),
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                not_yet=queued(sorted(ends), self._device) if ends else None,
                temperature=temperatures.pop() if len(temperatures) == 1 else None,
            )
            for (_, top_k, top_p, min_p, ends), (places, temperatures) in members.items()
        ]


def slot_table(slots: Sequence[str | None], lengths: Sequence[int]) -> SlotTable:
    """The table of a call with so many rows of each slot, one after another."""
    slot_of, length_of = operator.itemgetter(0), operator.itemgetter(1)
    groups = itertools.groupby(zip(slots, lengths, strict=True), slot_of)
    runs = [(slot, sum(map(length_of, run))) for slot, run in groups]
    ends = tuple(itertools.accumulate(map(length_of, runs)))
    return SlotTable(starts=(0, *ends)[:-1], ends=ends, slots=tuple(map(slot_of, runs)))


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
        self._head = functools.cache(backbone.lm_head_in)

    def __call__(self, hidden: torch.Tensor, state: RowState, groups: Sequence[SampleGroup]) -> NextTokens:
        """The next tokens of rows with these hidden states [N, H]."""
        parts = []
        for group in groups:
            own_hidden, own, heads = hidden, state, group.heads
            if group.rows_N is not None:
                own_hidden, own = hidden[group.rows_N], state.at(group.rows_N)
            runs = list(zip(map(self._head, heads.slots), heads.starts, heads.ends, strict=True))
            if group.truncates or group.not_yet is not None:
                parts.append(_sample_among_some(own_hidden, runs, own, group))
                continue
            head, options = runs[0][0], head_options(runs[0][0])
            if len(runs) > 1:
                options["lora"] = HeadLoras.of_runs(heads.starts, heads.ends, [head.lora for head, *_ in runs])
            drawn = sample(
                own_hidden,
                head.weight,
                temperature=own.temperatures_N if group.temperature is None else group.temperature,
                seed=own.seeds_N,
                position=own.lengths_N,
                greedy=own.greedy_N,
                **options,
            )
            assert drawn.token is not None
            assert drawn.logprob is not None
            parts.append(NextTokens(drawn.token, drawn.logprob))
        return parts[0] if groups[0].rows_N is None else _joined(parts, groups, len(hidden))


def _sample_among_some(
    hidden: torch.Tensor, runs: Sequence[tuple[LmHead, int, int]], state: RowState, group: SampleGroup
) -> NextTokens:
    """The same where words are left out. Ends that come too early go first, then the filters follow."""
    parts = []
    for head, start, end in runs:
        for chunk in row_chunks(end - start, len(head.weight)):
            rows = slice(start + chunk.start, start + chunk.stop)
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
