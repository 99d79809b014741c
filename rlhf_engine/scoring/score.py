"""Scoring passes over answers: all that memory holds at once, and the lanes that no update of a run changes.

What the reference, the reward model and the policy that drew an answer say of it is the same whenever it is asked. Such
frozen lanes have a pass of their own where answers are drawn beside the updates: whoever has the time makes it, the
generator or the learner, with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from rlhf_engine.config import TrainConfig
from rlhf_engine.devices import is_out_of_memory, release_memory
from rlhf_engine.errors import MemoryLimitError
from rlhf_engine.hydra import HydraModel, PackedBatch, Scores


class FrozenScores(NamedTuple):
    """Of N answers with M tokens; None for what was not asked."""

    past_logprobs_M: torch.Tensor | None
    """fp32 [M], of the policy that drew them, by the training forward"""
    ref_logprobs_M: torch.Tensor | None
    """fp32 [M], of the reference"""
    rewards_N: torch.Tensor | None
    """fp32 [N], of the reward role"""

    @classmethod
    def concat(cls, parts: Sequence[FrozenScores]) -> FrozenScores:
        """Of consecutive answers as of all of them."""
        columns = zip(*parts, strict=True)
        return cls(*(None if column[0] is None else torch.cat(column) for column in columns))


def score_frozen(
    model: HydraModel, batch: PackedBatch, config: TrainConfig, *, past: str | None, reward: bool
) -> FrozenScores | None:
    """past: role of the policy that drew the answers, where one did. reward: ask the reward role. None for nothing.

    The reference is left to the present policy's pass where the exact KL needs both in one sweep of the vocabulary.
    """
    roles = [*([past] if past else []), *(["reference"] if config.kl_estimator != "exact" else [])]
    roles += ["reward"] if reward else []
    if not roles:
        return None
    scores = score_in_memory(model, batch, roles, temperature=config.temperature)
    return FrozenScores(scores.past_logprobs_M, scores.ref_logprobs_M, scores.rewards_N)


def score_in_memory(
    model: HydraModel, batch: PackedBatch, roles: Sequence[str], *, temperature: float, exact_kl: bool = False
) -> Scores:
    """`HydraModel.score`, with the model's token budget halved until it fits."""
    while True:
        try:
            return model.score(batch, roles, temperature=temperature, exact_kl=exact_kl)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            # a larger budget than all lanes of all tokens, one between that and a single lane of them, or a smaller one
            # than one sequence, changes nothing
            together = len(roles) * batch.n_tokens
            budget = together if model.token_budget >= together else min(model.token_budget, batch.n_tokens)
            if budget <= max(batch.lengths):
                raise MemoryLimitError(
                    "scoring a single sequence does not fit into memory; shorten answers or use a smaller model"
                ) from error
        release_memory(model.device)  # here rather than above, where the error still holds the failed pass's tensors
        model.token_budget = budget // 2
