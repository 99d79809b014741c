"""Rows of reward models: which of the two kinds they are, their labels and tokens, and a split that keeps groups whole.

    pairwise    {"prompt", "chosen", "rejected"}
    pointwise   {"prompt", "completion", "label"}     label true or false, 1 or 0

A group (a conversation, a prompt) is held out as a whole: if u(seed, group) < share, where u is the first 64 bits of
SHA-256 over both as a number in [0, 1). So a row's side depends on nothing but its own group: not on order,
not on the other rows, and more data of the same kind leave it where it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from rlhf_engine.errors import ConfigError
from rlhf_engine.tokenizing import encode_completion, encode_prompt
from rlhf_engine.training.data import Row

Objective = Literal["pairwise", "pointwise"]
COLUMNS: dict[Objective, tuple[str, ...]] = {
    "pairwise": ("chosen", "rejected"),
    "pointwise": ("completion", "label"),
}


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
        """Tokens that go through the model, a pair's prompt twice."""
        return sum(len(self.prompt) + len(answer) for answer in self.answers)


def find_objective(rows: Sequence[Row], asked: str, *, argument: str) -> Objective:
    """The kind of all rows: the one asked for, or with `auto` the one whose columns every row has.

    Raises ConfigError, naming the first row that does not fit, for rows of both kinds, of neither, or of another kind
    than the one asked for.
    """
    kinds = [[kind for kind, columns in COLUMNS.items() if all(c in row for c in columns)] for row in rows]
    if asked == "auto":
        if all(len(found) == 2 for found in kinds):
            raise ConfigError(
                f"objective: expected 'pairwise' or 'pointwise' for {argument}, whose rows have the columns of both, "
                "got 'auto'"
            )
        asked = next((found[0] for found in kinds if len(found) == 1), "either")
    for i, found in enumerate(kinds):
        if not found or (asked in COLUMNS and asked not in found):
            wanted = [asked] if asked in COLUMNS else sorted(COLUMNS)
            expected = " or ".join(f"{COLUMNS[kind]} ({kind})" for kind in wanted)  # type: ignore[index]
            raise ConfigError(
                f"{argument}: row {i}: expected the columns {expected} like the other rows, got {sorted(rows[i])}"
            )
    return "pairwise" if asked == "pairwise" else "pointwise"


def read_label(value: Any, where: str) -> bool:
    """A label: true or false, 1 or 0. Raises ConfigError, naming the place, for anything else."""
    if isinstance(value, bool) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise ConfigError(f"{where}: expected true or false (or 1 or 0) in column 'label', got {value!r}")


def tokenize(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    objective: Objective,
    *,
    argument: str,
    max_length: int,
    group_column: str | None = None,
) -> list[RewardExample]:
    """Rows as token ids. Prompts and answers must be strings already.

    Raises ConfigError, naming argument and row, for labels that are none, a prompt without tokens, more than max_length
    tokens of prompt and answer, or a group that is missing or neither text nor integer.
    """
    examples = []
    for i, row in enumerate(rows):
        where = f"{argument}: row {i}"
        names = ("chosen", "rejected") if objective == "pairwise" else ("completion",)
        example = RewardExample(
            prompt=tuple(encode_prompt(tokenizer, row["prompt"])),
            answers=tuple(tuple(encode_completion(tokenizer, row[name])) for name in names),
            label=read_label(row["label"], where) if objective == "pointwise" else None,
            group=_group(row, group_column, where),
        )
        if not example.prompt:
            raise ConfigError(f"{where}: expected a prompt of at least one token, got {row['prompt']!r}")
        longest = len(example.prompt) + max(map(len, example.answers))
        if longest > max_length:
            raise ConfigError(f"{where}: expected at most {max_length} tokens of prompt and answer, got {longest}")
        examples.append(example)
    return examples


def _group(row: Row, column: str | None, where: str) -> str:
    if column is None:
        return str(row["prompt"])
    if column not in row:
        raise ConfigError(f"group_column: expected a column of every row, got {column!r}, which {where} has not")
    value = row[column]
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ConfigError(f"group_column: {where}: expected text or an integer in {column!r}, got {value!r}")
    return str(value)


def held_out(group: str, *, share: float, seed: int) -> bool:
    """Whether a group is held out: a function of (seed, group) and the share alone."""
    digest = hashlib.sha256(f"{seed}\n{group}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < share


def split(
    examples: Sequence[RewardExample], *, share: float, seed: int
) -> tuple[list[RewardExample], list[RewardExample]]:
    """(training rows, held-out rows), each in the order given. Raises ConfigError if one of the two is empty."""
    train = [e for e in examples if not held_out(e.group, share=share, seed=seed)]
    held = [e for e in examples if held_out(e.group, share=share, seed=seed)]
    if not train or not held:
        n = len({e.group for e in examples})
        raise ConfigError(
            f"eval_share: expected a share that leaves groups on both sides, got {share:g} with {n} groups of which "
            f"{'all' if held else 'none'} are held out"
        )
    return train, held


def count_labels(examples: Sequence[RewardExample]) -> tuple[int, int]:
    """(rows with label true, rows with label false)"""
    positives = sum(bool(e.label) for e in examples)
    return positives, len(examples) - positives
