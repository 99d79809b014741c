"""Supports of answers as columns of TRL's rollouts, which are shuffled, cut up and saved by rows of tensors.

    support_lens   int32 [N, C], stored numbers of each token, right-padded like the answers
    support_words  int32 [N, K], the stored numbers of each answer, right-padded to the most of an answer

Legend: N answers, C the longest answer, see `rlhf_engine.hydra.supports` for what is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from rlhf_engine.hydra import PackedBatch
from rlhf_engine.hydra.supports import Supports


def to_columns(batch: PackedBatch, padded: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Spread the supports of a batch over rows.

    Args:
        batch: N answers.
        padded: spreads numbers [M] over right-padded rows [N, C], as the columns beside have them.

    Returns:
        The columns on the batch's device, by name; none where tokens were drawn among all words.
    """
    supports = batch.supports
    if supports is None:
        return {}
    sizes = supports.offsets[torch.tensor(batch.completion_cu)].diff()
    return {
        "support_lens": padded(supports.lengths.int().to(batch.device)),
        "support_words": pad_sequence(supports.words.split(sizes.tolist()), batch_first=True),
    }


def from_columns(columns: Mapping[str, Any], answer_NC: torch.Tensor, vocabulary: int) -> Supports | None:
    """Take the supports of some answers out of columns.

    Args:
        columns: columns that `to_columns` made, or some rows of them.
        answer_NC: bool [N, C], True for an answer's tokens.
        vocabulary: V, number of words.

    Returns:
        Supports of the answers' tokens, in the order of `answer_NC`; None where there are no such columns.
    """
    if "support_lens" not in columns:
        return None
    lens_NC, words_NK = columns["support_lens"] * answer_NC, columns["support_words"]
    stored_NK = torch.arange(words_NK.shape[1], device=words_NK.device) < lens_NC.sum(1)[:, None]
    return Supports.of_lengths(words_NK[stored_NK], lens_NC[answer_NC], vocabulary)
