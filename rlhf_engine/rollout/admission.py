"""Rows that wait for a place among the live ones, and the blocks of the cache."""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set

import torch

from rlhf_engine.hydra.kv_cache import BLOCK, BlockPool
from rlhf_engine.rollout.rows import AnswerRow
from rlhf_engine.rollout.steps.transformers import PREFILL_TOKENS


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
        """Slot and block by what is in the block and before it, the least recently used first."""

    def add(self, rows: Sequence[AnswerRow]) -> None:
        """Let rows wait; those with a prompt in common follow each other."""
        groups: dict[object, list[AnswerRow]] = {}
        for row in rows:
            groups.setdefault(row.prefix, []).append(row)
        self.waiting += [row for members in groups.values() for row in members]
        self._members.update(row.prefix for row in rows)

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

    def forget(self, slot: str) -> None:
        """Drop what is kept of a slot that has no rows any more."""
        self._read_by.pop(slot, None)
        self._give_up({slot})

    def _give_up(self, slots: Set[str | None]) -> None:
        self._drop([prefix for prefix in self._prefixes if prefix[0] in slots])
        for key in [key for key, (slot, _) in self.kept.items() if slot in slots]:
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
        slots = {slot for slot, _ in self._members}
        now = {slot: self._weights(slot) for slot in slots}
        old = {slot for slot in slots if self._read_by.get(slot, now[slot]) != now[slot]}
        self._read_by |= now
        self._give_up(old)

    def _take_blocks(self, row: AnswerRow, copies: list[tuple[int, int]]) -> bool:
        """Give a row its blocks if there are enough, and note what has to be copied into them."""
        prefix, need = self._prefixes.get(row.prefix), row.blocks_needed
        full, held = len(row.prompt) // BLOCK, -(-len(row.prompt) // BLOCK)
        blocks = self._take(self._found(row) if prefix is None else prefix[:full], need)
        if blocks is None:
            return False
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

    def _found(self, row: AnswerRow) -> list[int]:
        """The blocks that are kept of a row's prompt, from the first on; its last token always goes through again."""
        keys = list(itertools.takewhile(self.kept.__contains__, _chain(row.slot, row.prompt[:-1]))) if row.keep else []
        for key in reversed(keys):
            self.kept.move_to_end(key)
        row.cached = len(keys) * BLOCK
        return [self.kept[key][1] for key in keys]


def _chain(slot: str | None, tokens: Sequence[int]) -> Iterator[bytes]:
    """Names of whole blocks of tokens: the slot, and every token up to the block's last."""
    digest = repr(slot).encode()
    for i in range(0, len(tokens) - BLOCK + 1, BLOCK):
        digest = hashlib.sha256(digest + array("q", tokens[i : i + BLOCK]).tobytes()).digest()
        yield digest


def blocks_of_each(rows: Iterable[AnswerRow]) -> list[int]:
    """Blocks of every row, and one more where a part of a shared prompt stands beside the row's copy of it."""
    counts = Counter(row.prefix for row in rows)
    return [row.blocks_needed + int(counts[row.prefix] > 1 and len(row.prompt) % BLOCK > 0) for row in rows]
