"""Admission of requests: they wait in their order until a row is free and the cache can hold them to their end.

No row ever has to give way. Requests with the same prompt and slot stand next to each other; their prompt goes through
the model once, and their rows share its full blocks. What is left of it in a block of its own is copied for each row
but the last, which takes the block over.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rlhf_engine.hydra.kv_cache import BLOCK, BlockPool
from rlhf_engine.rollout.rows import AnswerRow
from rlhf_engine.rollout.steps.transformers import Prompt

_PrefixKey = tuple[str | None, tuple[int, ...]]


@dataclass(eq=False)
class _Prefix:
    """A prompt that several requests share, for as long as some of them wait."""

    blocks: list[int]
    waiting: int
    """Requests that have not been admitted yet."""
    hidden: torch.Tensor | None = None
    """[H], of the last token, once the prompt is in the cache."""


class _New(NamedTuple):
    prompt: Prompt
    prefix: _Prefix | None


class Admitted(NamedTuple):
    """Rows that start together."""

    rows: list[AnswerRow]
    new: list[_New]
    """Prompts among theirs that are not in the cache yet."""
    copies: list[tuple[int, int]]
    """Blocks to copy once the prompts are in the cache: (from, to)."""

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts that are not in the cache yet."""
        return [new.prompt for new in self.new]


class Admission:
    """The requests that wait, and the blocks of the cache."""

    def __init__(self, rows: Sequence[AnswerRow], *, most_rows: int, most_blocks: int | None, most_tokens: int) -> None:
        """most_rows: alive at once. most_blocks: None for as many as those may need. most_tokens: prompts of one call.

        Raises ValueError if one row alone may need more than `most_blocks`.
        """
        groups: dict[_PrefixKey, list[AnswerRow]] = {}
        for row in rows:
            groups.setdefault(row.prefix, []).append(row)
        self._waiting = deque(row for members in groups.values() for row in members)
        self._sharing = {prefix: len(members) for prefix, members in groups.items() if len(members) > 1}
        self._prefixes: dict[_PrefixKey, _Prefix] = {}
        self._most_tokens = most_tokens
        blocks = self._blocks_needed(rows, most_rows)
        largest = self.most_of_one(rows)
        if most_blocks is not None and most_blocks < largest:
            raise ValueError(f"most_blocks: expected at least {largest}, which one row may need, got {most_blocks}")
        self.pool = BlockPool(blocks if most_blocks is None else min(blocks, most_blocks))

    def __len__(self) -> int:
        return len(self._waiting)

    def next_rows(self, most: int) -> Admitted:
        """The next rows that fit, up to so many, with their blocks."""
        admitted = Admitted([], [], [])
        tokens = 0
        while self._waiting and len(admitted.rows) < most:
            row = self._waiting[0]
            arrives = row.prefix not in self._prefixes
            if arrives and tokens and tokens + len(row.prompt) > self._most_tokens:
                break
            if not self._take_blocks(row, admitted.copies):
                break
            if arrives:
                prefix = self._prefixes.get(row.prefix)
                blocks = row.blocks if prefix is None else prefix.blocks
                admitted.new.append(_New(Prompt(tokens=row.prompt, slot=row.slot, blocks=blocks), prefix))
                tokens += len(row.prompt)
            admitted.rows.append(self._waiting.popleft())
        return admitted

    def last_states(self, admitted: Admitted, hidden: torch.Tensor | None) -> torch.Tensor:
        """Hidden states [N, H] of the rows' last prompt tokens; `hidden` has those of the new prompts."""
        if hidden is not None and len(admitted.new) == len(admitted.rows) and not self._prefixes:
            return hidden
        states: dict[_PrefixKey, torch.Tensor] = {}
        for i, new in enumerate(admitted.new):
            assert hidden is not None
            states[new.prompt.slot, new.prompt.tokens] = hidden[i]
            if new.prefix is not None:
                new.prefix.hidden = hidden[i]
        for row in admitted.rows:
            prefix = self._prefixes.get(row.prefix)
            if prefix is not None and prefix.hidden is not None:
                states[row.prefix] = prefix.hidden
                if prefix.waiting == 0:
                    del self._prefixes[row.prefix], self._sharing[row.prefix]
        return torch.stack([states[row.prefix] for row in admitted.rows])

    def release(self, row: AnswerRow) -> None:
        """A row has ended."""
        self.pool.give_back(row.blocks)

    def _take_blocks(self, row: AnswerRow, copies: list[tuple[int, int]]) -> bool:
        """Give a row its blocks if there are enough, and note what has to be copied into them."""
        pool, need = self.pool, row.blocks_needed
        if row.prefix not in self._sharing:
            if need > pool.free:
                return False
            row.blocks = pool.take(need)
            return True
        full, held = len(row.prompt) // BLOCK, -(-len(row.prompt) // BLOCK)
        prefix = self._prefixes.get(row.prefix)
        if prefix is None:
            if held + need - full > pool.free:
                return False
            prefix = _Prefix(blocks=pool.take(held), waiting=self._sharing[row.prefix])
            self._prefixes[row.prefix] = prefix
        kept = held if prefix.waiting == 1 else full
        if need - kept > pool.free:
            return False
        own = pool.take(need - kept)
        row.blocks = prefix.blocks[:kept] + own
        if prefix.waiting > 1:
            pool.share(prefix.blocks[:full])
            if held > full:
                copies.append((prefix.blocks[full], own[0]))
        prefix.waiting -= 1
        return True

    @staticmethod
    def most_of_one(rows: Sequence[AnswerRow]) -> int:
        """Blocks that must be there for any of these rows to be admitted alone."""
        return max(_blocks_of_each(rows))

    def _blocks_needed(self, rows: Sequence[AnswerRow], most_rows: int) -> int:
        """Blocks that the rows alive at once may need."""
        shared = sum(len(prompt) // BLOCK * (n - 1) for (_, prompt), n in self._sharing.items())
        largest = sorted(_blocks_of_each(rows), reverse=True)[:most_rows]
        return min(sum(row.blocks_needed for row in rows) - shared, sum(largest))


def _blocks_of_each(rows: Sequence[AnswerRow]) -> list[int]:
    """Blocks of every row, and one more where a part of a shared prompt stands beside the row's copy of it."""
    counts = Counter(row.prefix for row in rows)
    return [row.blocks_needed + int(counts[row.prefix] > 1 and len(row.prompt) % BLOCK > 0) for row in rows]
