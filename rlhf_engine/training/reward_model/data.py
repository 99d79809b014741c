"""Rows of reward models: which of the two kinds they are, their labels and tokens.

pairwise    {"prompt", "chosen", "rejected"}      and "margin", by which the better answer is to be ahead in reward
pointwise   {"prompt", "completion", "label"}     label true or false, 1 or 0
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_engine.config.run import RowOptions
from rlhf_engine.data import Kind, RowError, Tally, Tokenized, UnpairedPreference, load_rows, tokenize_rows
from rlhf_engine.data.types import shown
from rlhf_engine.errors import ConfigError

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
    answers: tuple[tuple[int, ...], ...]  # chosen and rejected, or one answer; each ends with the end-of-sequence token
    label: bool | None  # none for a pair
    group: str  # rows of one group stay on one side of a split
    margin: float = 0.0  # difference of rewards that a pair is to exceed

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
) -> list[RewardExample]:
    """Tokenized rows of a source, of the objective's kind or with `auto` of its columns'; the tally counts others."""
    rows = load_rows(source, tally, options, kinds=_KINDS[objective], group_column=group_column)
    if objective == "auto" and all(row.columns.get(name) is not None for row in rows for name in _POINTWISE):
        raise ConfigError(
            f"objective: expected 'pairwise' or 'pointwise' for {tally.argument}, whose rows have the columns of both, "
            "got 'auto'"
        )
    tokenized = tokenize_rows(
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
            prompt=tuple(t.prompt),
            answers=tuple(map(tuple, t.answers)),
            label=t.row.label if isinstance(t.row, UnpairedPreference) else None,
            group=t.row.group,
            margin=margin,
        )
        for t, margin in with_margins(tokenized, tally)
    ]


def with_margins(rows: Sequence[Tokenized], tally: Tally) -> list[tuple[Tokenized, float]]:
    """Rows, each with the number in its column `margin`, 0 without one; ConfigError for too many bad rows."""
    has_column = any(row.row.columns.get("margin") is not None for row in rows)
    usable = []
    for row in rows:
        value = row.row.columns.get("margin") if has_column and len(row.answers) == 2 else 0.0
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            tally.refuse(row.row.place, RowError("a finite number in column 'margin'", shown(value)))
        else:
            usable.append((row, float(value)))
    tally.check()
    return usable


def drop_same(argument: str, examples: Sequence[Any]) -> tuple[list[Any], list[str]]:
    """Leave out pairs of the same answer twice; what stays, and notes on the rest. ConfigError if nothing stays."""
    different = [e for e in examples if len(e.answers) == 1 or e.answers[0] != e.answers[1]]
    if not different:
        raise ConfigError(f"{argument}: expected pairs of different answers, got the same answer twice in all")
    n = len(examples) - len(different)
    return different, [f"{argument}: {n} pairs left out, whose two answers are the same"] if n else []


def count_labels(examples: Sequence[RewardExample]) -> tuple[int, int]:
    """Numbers of rows with label true and with label false."""
    positives = sum(bool(e.label) for e in examples)
    return positives, len(examples) - positives


def digest(*parts: Sequence[RewardExample]) -> str:
    """Names the rows of some sets, in their order."""
    blake = hashlib.blake2b(digest_size=8)
    for examples in parts:
        for example in examples:
            named = (example.prompt, example.answers, example.label, *filter(None, [example.margin]))
            blake.update(repr(named).encode())
        blake.update(b"|")
    return blake.hexdigest()
