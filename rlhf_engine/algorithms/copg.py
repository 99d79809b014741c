"""CoPG, contrastive policy gradient: two answers to a prompt are each other's baseline (arXiv 2406.19185).

With the score R less the KL of a whole answer, both of the policy as it is now,

    R_a = r(x, a) − β [log π(a) − log π_ref(a)]        log π(a) = Σ_t log π(a_t | x, a_<t)
    g = −(1/n) Σ ½ (R_a − R_b) ∇[log π(a) − log π(b)]

over n pairs (a, b). It is the gradient of (R_a − R_b)² / 4β. Answers of any policy will do: the gradient of a pair is 0
for every pair where π ∝ π_ref exp(r / β). Where π itself has drawn both, it is that of RLOO with two answers, whose
baseline is then of the present policy too.

Of more than two answers to a prompt the best and the worst are a pair.

Legend: N sequences in groups of one prompt, P pairs; a batch of pairs holds a and b of each pair next to each other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from rlhf_engine.algorithms import sequences
from rlhf_engine.algorithms.base import Experience, LogprobAlgorithm, MicroBatch
from rlhf_engine.algorithms.sequences import group_sizes, sequence_sums, spread
from rlhf_engine.hydra import PackedBatch


def best_and_worst(scores_N: torch.Tensor, groups_N: torch.Tensor) -> list[tuple[int, int]]:
    """(best, worst) answer of each prompt, the first and the last at equal scores; ValueError for one alone."""
    if (group_sizes(groups_N) < 2).any():
        raise ValueError("groups_N: expected at least two answers per prompt, got one")
    return sequences.best_and_worst(scores_N, groups_N)


class CopgOutputs(NamedTuple):
    """Loss and what it was made of."""

    loss: torch.Tensor  # 0-d, of which the gradient is g; its value means nothing
    gap_P: torch.Tensor  # R_a − R_b [P], without a gradient


def copg_loss(
    logprobs_M: torch.Tensor,
    ref_logprobs_M: torch.Tensor,
    scores_N: torch.Tensor,
    batch: PackedBatch,
    *,
    n_pairs: float,
    beta: float,
) -> CopgOutputs:
    """Loss and gaps, with gradient g, of a batch of pairs whose answers are neighbours; ValueError for others."""
    if batch.n_sequences % 2:
        raise ValueError(f"batch: expected pairs of answers, got {batch.n_sequences} answers")
    regularised_N = scores_N - beta * sequence_sums(logprobs_M.detach() - ref_logprobs_M, batch)
    logprob_P2, regularised_P2 = sequence_sums(logprobs_M, batch).view(-1, 2), regularised_N.view(-1, 2)
    gap_P = regularised_P2[:, 0] - regularised_P2[:, 1]
    loss_P = -0.5 * gap_P * (logprob_P2[:, 0] - logprob_P2[:, 1])
    return CopgOutputs(loss=loss_P.sum() / n_pairs, gap_P=gap_P)


class Copg(LogprobAlgorithm):
    """g over pairs, whose answers are next to each other in the batch: the better one first."""

    answers_per_unit = 2

    def prepare(self, experience: Experience) -> tuple[Experience | None, dict[str, float]]:
        pairs = best_and_worst(experience.scores_N, experience.groups_N)
        chosen = experience.select([i for pair in pairs for i in pair])
        gap = (chosen.scores_N[::2] - chosen.scores_N[1::2]).mean()
        # scores travel to the loss at every token of their answer
        return replace(chosen, advantages_M=spread(chosen.scores_N, chosen.batch)), {"pairs/score_gap": float(gap)}

    def loss(self, logprobs_M: torch.Tensor, micro: MicroBatch) -> CopgOutputs:
        assert micro.ref_logprobs_M is not None
        assert micro.advantages_M is not None
        return copg_loss(
            logprobs_M,
            micro.ref_logprobs_M,
            micro.advantages_M[micro.batch.last_completion_rows_N],
            micro.batch,
            n_pairs=micro.n_answers / 2,
            beta=self.options.beta,
        )

    def more_sums(self, micro: MicroBatch, result: Any) -> dict[str, torch.Tensor]:
        return {"pairs/regularised_gap": result.gap_P.abs().sum() * 2 / micro.n_answers}


ALGORITHM = Copg
