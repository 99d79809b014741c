"""Rows of reward models: which of the two kinds they are, their labels and tokens.

pairwise    {"prompt", "chosen", "rejected"}
pointwise   {"prompt", "completion", "label"}     label true or false, 1 or 0
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

from rlhf_engine.config.data import RowOptions
from rlhf_engine.data import (
    Kind,
    Preference,
    Row,
    Tally,
    UnpairedPreference,
    load_rows,
    tokenize_rows,
)
from rlhf_engine.errors import ConfigError

Objective = Literal["pairwise", "pointwise"]
_KINDS: dict[str, tuple[Kind, ...]] = {
    "pairwise": ("preference", "implicit_preference"),
    "pointwise": ("unpaired_preference",),
    "auto": ("preference", "unpaired_preference", "implicit_preference"),
}
_POINTWISE = ("completion", "label")
"""Columns of pointwise rows; they are among the others of pairs that could serve as either."""


@dataclass(frozen=True, kw_only=True)
class RewardExample:
    """One tokenized row."""

    prompt: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]
    """chosen and rejected, or one answer; each ends with the end-of-sequence token."""
    label: bool | None
    """None for a pair."""
    group: str
    """Rows of one group stay on one side of a split."""

    @property
    def tokens(self) -> int:
        """Tokens of all answers, each with its prompt."""
        return sum(len(self.prompt) + len(answer) for answer in self.answers)


def load_examples(
    source: str,
    tally: Tally,
    tokenizer: PreTrainedTokenizerBase,
    objective: str,
    options: RowOptions,
    *,
    max_length: int,
    end_ids: Sequence[int],
    vocabulary: int,
    group_column: str | None = None,
    limit: int | None = None,
) -> list[RewardExample]:
    """Tokenized rows of a source, all of one kind: of the objective, or with `auto` of the kind that its columns show.

    What is bad, dropped or cut is counted in `tally`. Raises ConfigError as `data.load_rows` and
    `data.tokenize_rows`, and with `auto` for rows that could be of either kind. end_ids: tokens that end an answer.
    vocabulary: number of the model's token ids.
    """
    rows = load_rows(source, tally, options, kinds=_KINDS[objective], group_column=group_column, limit=limit)
    if objective == "auto" and all(_has_both(row) for row in rows):
        raise ConfigError(
            f"objective: expected 'pairwise' or 'pointwise' for {tally.argument}, whose rows have the columns of both, "
            "got 'auto'"
        )
    found = tokenize_rows(
        rows,
        tokenizer,
        tally,
        max_length=max_length,
        truncation=options.truncation,
        end_ids=end_ids,
        vocabulary=vocabulary,
    )
    return [
        RewardExample(
            prompt=tuple(tokens.prompt),
            answers=tuple(tuple(answer) for answer in tokens.answers),
            label=_label(tokens.row),
            group=tokens.row.group,
        )
        for tokens in found
    ]


def _has_both(row: Row) -> bool:
    return all(row.columns.get(name) is not None for name in _POINTWISE)


def _label(row: Row) -> bool | None:
    if isinstance(row, UnpairedPreference):
        return row.label
    assert isinstance(row, Preference)
    return None


def count_labels(examples: Sequence[RewardExample]) -> tuple[int, int]:
    """Numbers of rows with label true and with label false."""
    positives = sum(bool(e.label) for e in examples)
    return positives, len(examples) - positives


def digest(*parts: Sequence[RewardExample]) -> str:
    """Names the rows of some sets, in their order."""
    found = hashlib.blake2b(digest_size=8)
    for examples in parts:
        for example in examples:
            found.update(repr((example.prompt, example.answers, example.label)).encode())
        found.update(b"|")
    return found.hexdigest()
