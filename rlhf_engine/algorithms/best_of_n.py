"""Best-of-N: of n answers to a prompt keep the one that scores best (arXiv 2009.01325).

At inference the reward chooses among n draws of a fixed policy. As training, the policy learns the chosen answers:

    a* = argmax_i r(x, a_i)        L = −Σ log π(a*_t | x, a*_<t) / Σ T*        supervised, over tokens

π is the policy at the temperature that answers are drawn at, as in every algorithm here: what is learned is to draw a*.

Choosing moves the distribution by at most KL(best-of-n ‖ π) ≤ log n − (n−1)/n nats per answer (arXiv 2401.01879).

Legend: N sequences in groups of one prompt.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from rlhf_engine.algorithms.base import Experience, LogprobAlgorithm, MicroBatch


def best(scores_N: torch.Tensor, groups_N: torch.Tensor) -> list[int]:
    """Index of the best answer of each prompt, in the order of their first answers; the first among equals."""
    chosen: dict[int, int] = {}
    scores = scores_N.tolist()
    for i, group in enumerate(groups_N.tolist()):
        if group not in chosen or scores[i] > scores[chosen[group]]:
            chosen[group] = i
    return list(chosen.values())


class SupervisedLoss(NamedTuple):
    """Cross-entropy of the chosen answers, at the temperature they were drawn at."""

    loss: torch.Tensor  # 0-d


class BestOfN(LogprobAlgorithm):
    """L over the chosen answers."""

    def prepare(self, experience: Experience) -> tuple[Experience, dict[str, float]]:
        chosen = experience.select(best(experience.scores_N, experience.groups_N))
        return chosen, {"reward/best": float(chosen.scores_N.mean())}

    def loss(self, logprobs_M: torch.Tensor, micro: MicroBatch) -> SupervisedLoss:
        return SupervisedLoss(-(logprobs_M * micro.mask_M).sum() / micro.n_tokens)


ALGORITHM = BestOfN
