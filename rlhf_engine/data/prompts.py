"""Prompts that a policy is to answer: read, tokenized, and short enough to leave room for an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_engine.data.tally import Tally
from rlhf_engine.data.tokenize import Truncation, plain_text, tokenize_rows
from rlhf_engine.data.types import PromptOnly, Row

_TAKEN = ("prompts", "completions", "completion_ids")
"""Arguments of reward functions that are not columns."""


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """Prompts, tokenized."""

    rows: list[Row]
    prompts: list[str]
    """As text: of messages, what the chat template makes of them. Whole, even where tokens were cut."""
    ids: list[list[int]]

    def columns(self, indices: list[int]) -> dict[str, list[Any]]:
        """The data's other columns of some rows, for reward functions; None where a row lacks one."""
        names = dict.fromkeys(name for row in self.rows for name in row.columns if name not in _TAKEN)
        return {name: [self.rows[i].columns.get(name) for i in indices] for name in names}

    def texts(self, indices: list[int]) -> list[str]:
        """Prompts of some rows."""
        return [self.prompts[i] for i in indices]


def plain_prompts(texts: Mapping[int, str], source: str) -> list[Row]:
    """Rows of prompts that are there as strings. texts: by their numbers in the source, for messages."""
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
    """Rows as prompts of at most max_prompt_length tokens, and few enough for an answer of max_completion_length.

    What is bad, dropped or cut is counted in `tally`. vocabulary, and what is raised: as for `tokenize_rows`.
    """
    longest = context_length - max_completion_length
    limit_name = f"tokens (context {context_length} − max_completion_length {max_completion_length})"
    if max_prompt_length is not None and max_prompt_length <= longest:
        longest, limit_name = max_prompt_length, "tokens (max_prompt_length)"
    found = tokenize_rows(
        rows,
        tokenizer,
        tally,
        max_length=longest,
        truncation=truncation,
        limit_name=limit_name,
        vocabulary=vocabulary,
    )
    return PromptSet(
        rows=[tokens.row for tokens in found],
        prompts=[plain_text(tokenizer, tokens.row.prompt) for tokens in found],
        ids=[tokens.prompt for tokens in found],
    )
