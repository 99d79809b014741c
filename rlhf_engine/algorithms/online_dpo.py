"""Online DPO: of K answers to a prompt, the best against the worst (arXiv 2402.04792; loss of arXiv 2305.18290).

With w the best and l the worst answer by score, and π_ref the reference,

    h = [log π(w) − log π_ref(w)] − [log π(l) − log π_ref(l)]        log π(a) = Σ_t log π(a_t | x, a_<t)

    sigmoid    L = −(1/n) Σ log σ(β h)                log 2 where π = π_ref
    ipo        L = (1/n) Σ (h − 1/(2β))²              arXiv 2310.12036

A prompt whose best and worst answer score the same says nothing and is left out: n counts the other pairs. An answer
that never ends keeps its score less a penalty (`missing_eos_penalty`), and loses to answers that score more than that.

Legend: N sequences in groups of one prompt, P pairs; a batch of pairs holds w and l of each pair next to each other.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, cast

import torch
from torch.nn import functional as F

from rlhf_engine.algorithms import sequences
from rlhf_engine.algorithms.base import Experience, LogprobAlgorithm, MicroBatch
from rlhf_engine.algorithms.sequences import sequence_sums
from rlhf_engine.hydra import PackedBatch

DpoLoss = Literal["sigmoid", "ipo"]


def best_and_worst(scores_N: torch.Tensor, groups_N: torch.Tensor) -> list[tuple[int, int]]:
    """(best, worst) answer of each prompt, the first among equals; without prompts whose answers all score the same."""
    pairs = sequences.best_and_worst(scores_N, groups_N)
    return [(best, worst) for best, worst in pairs if scores_N[best] > scores_N[worst]]


class DpoOutputs(NamedTuple):
    """Loss and what it was made of."""

    loss: torch.Tensor  # 0-d
    chosen_P: torch.Tensor  # β (log π(w) − log π_ref(w)), the implicit reward [P], without a gradient
    rejected_P: torch.Tensor  # the same of l


def dpo_loss(
    logprobs_M: torch.Tensor,
    ref_logprobs_M: torch.Tensor,
    batch: PackedBatch,
    *,
    n_pairs: float,
    beta: float,
    loss_type: DpoLoss = "sigmoid",
) -> DpoOutputs:
    """L of a batch of pairs w, l, w, l, …, divided by `n_pairs` of the whole minibatch; ValueError for other rows."""
    if batch.n_sequences % 2:
        raise ValueError(f"batch: expected pairs of answers, got {batch.n_sequences} answers")
    ratio_P2 = sequence_sums(logprobs_M - ref_logprobs_M, batch).view(-1, 2)
    h_P = ratio_P2[:, 0] - ratio_P2[:, 1]
    if loss_type == "sigmoid":
        loss_P = -F.logsigmoid(beta * h_P)
    elif loss_type == "ipo":
        loss_P = (h_P - 1 / (2 * beta)).square()
    else:
        raise ValueError(f"loss_type: expected 'sigmoid' or 'ipo', got {loss_type!r}")
    implicit_P2 = beta * ratio_P2.detach()
    return DpoOutputs(loss=loss_P.sum() / n_pairs, chosen_P=implicit_P2[:, 0], rejected_P=implicit_P2[:, 1])


class OnlineDpo(LogprobAlgorithm):
    """L over pairs, whose answers are next to each other in the batch: the better one first."""

    answers_per_unit = 2

    def prepare(self, experience: Experience) -> tuple[Experience | None, dict[str, float]]:
        pairs = best_and_worst(experience.scores_N, experience.groups_N)
        prompts = len(set(experience.groups_N.tolist()))
        metrics = {"pairs/tied_ratio": 1 - len(pairs) / prompts}
        if not pairs:
            return None, metrics
        gap = [float(experience.scores_N[w] - experience.scores_N[l]) for w, l in pairs]
        chosen = experience.select([i for pair in pairs for i in pair])
        return chosen, {**metrics, "pairs/score_gap": sum(gap) / len(gap)}

    def loss(self, logprobs_M: torch.Tensor, micro: MicroBatch) -> DpoOutputs:
        assert micro.ref_logprobs_M is not None
        return dpo_loss(
            logprobs_M,
            micro.ref_logprobs_M,
            micro.batch,
            n_pairs=micro.n_answers / 2,
            beta=self.options.beta,
            loss_type=cast(DpoLoss, self.options.chosen_loss_type),
        )

    def more_sums(self, micro: MicroBatch, result: Any) -> dict[str, torch.Tensor]:
        n, margin_P = micro.n_answers / 2, result.chosen_P - result.rejected_P
        return {
            "rewards/chosen": result.chosen_P.sum() / n,
            "rewards/rejected": result.rejected_P.sum() / n,
            "rewards/accuracies": (margin_P > 0).sum() / n,
            "rewards/margins": margin_P.sum() / n,
        }


ALGORITHM = OnlineDpo
