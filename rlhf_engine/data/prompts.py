"""Prompts that a policy is to answer: read, tokenized, and short enough to leave room for an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_engine.data.read import Tally
from rlhf_engine.data.tokenize import Truncation, tokenize_rows
from rlhf_engine.data.types import PromptOnly, Row, Text

_TAKEN = ("prompts", "completion", "completions", "completion_ids")
"""Columns that reward functions do not get, as in TRL: arguments of theirs, and the data's own answer."""


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """Prompts, tokenized."""

    rows: list[Row]  # rows that the prompts come from
    prompts: list[str]  # text that the model reads, without what was cut; messages as the chat template writes them
    ids: list[list[int]]  # token ids of the prompts

    def columns(self, indices: list[int]) -> dict[str, list[Any]]:
        """Other columns of the rows at some places, for reward functions; None where a row lacks the column."""
        names = dict.fromkeys(name for row in self.rows for name in row.columns if name not in _TAKEN)
        return {name: [self.rows[i].columns.get(name) for i in indices] for name in names}

    def written(self, indices: list[int]) -> list[Text]:
        """Prompts of the rows at some places as the data have them, strings or messages, for reward functions."""
        return [self.prompts[i] if isinstance(self.rows[i].prompt, str) else self.rows[i].prompt for i in indices]


def plain_prompts(texts: Mapping[int, str], source: str) -> list[Row]:
    """Make rows of prompts that are there as strings, by number in the source. Each is a group of its own."""
    return [PromptOnly(prompt=text, group=text, place=f"{source}:{i}") for i, text in texts.items()]


def tokenize_prompts(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    tally: Tally,
    *,
    context_length: int,
    max_completion_length: int,
    max_prompt_length: int | None = None,
    truncation: Truncation = "error",
    vocabulary: int | None = None,
) -> PromptSet:
    """Tokenize rows as prompts that leave room for an answer; `vocabulary` None: ids are not checked."""
    longest = context_length - max_completion_length
    limit_name = f"tokens (context {context_length} − max_completion_length {max_completion_length})"
    if max_prompt_length is not None and max_prompt_length <= longest:
        longest, limit_name = max_prompt_length, "tokens (max_prompt_length)"
    tokenized = tokenize_rows(
        rows, tokenizer, tally, max_length=longest, truncation=truncation, limit_name=limit_name, vocabulary=vocabulary
    )
    return PromptSet(
        rows=[tokens.row for tokens in tokenized],
        prompts=[tokens.text for tokens in tokenized],
        ids=[tokens.prompt for tokens in tokenized],
    )
