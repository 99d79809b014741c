"""The prompts of a step: one for each answer that is to be drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PromptBatch:
    """N prompts, one per answer. The answers to a prompt stand next to each other."""

    rows: tuple[int, ...]
    """N rows of the training data."""
    prompts: tuple[tuple[int, ...], ...]
    """N lists of token ids."""
    groups: tuple[int, ...]
    """N numbers, which prompt of the step an answer belongs to."""
    greedy: tuple[bool, ...]
    """N flags, whether an answer is the greedy one: a baseline that nothing is learned from."""
    sample_ids: tuple[int, ...]
    """N ids that, with the seed, key the random numbers."""

    @classmethod
    def of(
        cls,
        rows: Sequence[int],
        ids: Sequence[Sequence[int]],
        *,
        generations: int,
        with_greedy: bool = False,
        first_id: int = 0,
    ) -> PromptBatch:
        """Repeat some prompts for `generations` answers each.

        Args:
            rows: rows of the training data, one per prompt.
            ids: token ids of every row of the training data.
            generations: answers to each prompt.
            with_greedy: whether the last of them is the greedy one.
            first_id: sample id of the first answer; the others count up from it.

        Returns:
            One entry per answer; the answers to a prompt stand next to each other.

        Raises:
            IndexError: a row that `ids` does not have.
        """
        tokens = [tuple(ids[row]) for row in rows]
        places = [(group, j) for group in range(len(rows)) for j in range(generations)]
        return cls(
            rows=tuple(rows[group] for group, _ in places),
            prompts=tuple(tokens[group] for group, _ in places),
            groups=tuple(group for group, _ in places),
            greedy=tuple(with_greedy and j == generations - 1 for _, j in places),
            sample_ids=tuple(range(first_id, first_id + len(places))),
        )

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def drawn(self) -> list[int]:
        """Places of the answers that are not greedy."""
        return [i for i, greedy in enumerate(self.greedy) if not greedy]

    def part(self, first: int, last: int) -> PromptBatch:
        """Select consecutive answers.

        Args:
            first: place of the first answer.
            last: place after the last answer.

        Returns:
            The answers from `first` up to `last`.
        """
        return PromptBatch(
            rows=self.rows[first:last],
            prompts=self.prompts[first:last],
            groups=self.groups[first:last],
            greedy=self.greedy[first:last],
            sample_ids=self.sample_ids[first:last],
        )
