"""Metrics of a reward model on held-out rows. Pure functions in float64; no order of the rows is preferred by ties.

    accuracy            (#{right side of 0} + ½ #{at 0}) / N
    balanced accuracy   ½ (accuracy on label 1 + accuracy on label 0)
    ROC AUC             (#{s_i > s_j} + ½ #{s_i = s_j}) / (n₁ n₀)      i over label 1, j over label 0  (Mann–Whitney)
    pairwise accuracy   (#{m > 0} + ½ #{m = 0}) / P                    m = r_w − r_l
    Brier               mean (q − p)²                                  q probability, p outcome
    calibration error   Σ_b (N_b / N) |mean_b q − mean_b p|            bins b of equal counts in the order of q

Legend: N single answers, P pairs, r rewards, s any scores, p labels (0, 1), w the weight of label 1 in training.
Undefined values (a class is missing) are None, never a number. Scores that are not finite are a ValueError.
Pure counts (accuracies, AUC) are made of integers, so that they are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from rlhf_engine.runs.statistics import interval_by_prompt, ratio_by_prompt

CALIBRATION_BINS = 10
LOWER_IS_BETTER = frozenset({"loss", "brier", "calibration_error"})
"""Names of `pointwise_metrics` and `pairwise_metrics` of which the best is the smallest."""
POINTWISE_METRICS = ("loss", "auc", "accuracy", "balanced_accuracy", "margin", "brier", "calibration_error")
PAIRWISE_METRICS = ("loss", "accuracy", "margin", "brier", "calibration_error")


def _weighted_auc(score_N: torch.Tensor, p_N: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """AUC [R] as a function of weights [R, N] of the rows; NaN where a label has no weight."""
    levels, level_N = score_N.unique(return_inverse=True)

    def auc(weights_RN: torch.Tensor) -> torch.Tensor:
        none_RG = torch.zeros(len(weights_RN), len(levels), dtype=torch.float64)
        ones_RG, zeros_RG = (none_RG.index_add(1, level_N, weights_RN * of_N) for of_N in (p_N, 1 - p_N))
        below_RG = zeros_RG.cumsum(1) - zeros_RG
        return (ones_RG * (below_RG + zeros_RG / 2)).sum(1) / (ones_RG.sum(1) * zeros_RG.sum(1))

    return auc


def calibration_error(probability_N: torch.Tensor, outcome_N: torch.Tensor, *, bins: int = CALIBRATION_BINS) -> float:
    """Expected calibration error with equal-count bins: Σ_b (N_b / N) |mean_b q − mean_b p|. float64 [N].

    Rows are sorted by probability and cut into `bins` parts whose sizes differ by at most 1, larger ones first (fewer
    parts where there are fewer rows). Where a cut falls among equal probabilities, each of these rows takes the mean
    outcome of all of them: no order of the rows is preferred, and none changes the result.
    """
    level_G, group_N, count_G = probability_N.unique(return_inverse=True, return_counts=True)
    # sorted within the groups as well, so that sums of fractional outcomes round alike in any order of rows
    p_sorted_N, order_N = outcome_N.sort()
    mean_G = torch.zeros_like(level_G).index_add_(0, group_N[order_N], p_sorted_N) / count_G
    level_N, mean_N = level_G.repeat_interleave(count_G), mean_G.repeat_interleave(count_G)
    parts = zip(level_N.tensor_split(bins), mean_N.tensor_split(bins), strict=True)
    return sum(abs(float(q_b.sum() - p_b.sum())) for q_b, p_b in parts) / len(probability_N)


def pointwise_metrics(
    reward_N: torch.Tensor, label_N: torch.Tensor, *, pos_weight: float = 1.0
) -> dict[str, float | None]:
    """`POINTWISE_METRICS` of single answers: rewards [N], labels [N] (bool, or 0 and 1).

    loss is the training objective −mean[w p log σ(r) + (1 − p) log σ(−r)]. Its minimum is at the log-odds plus log w,
    so the probability that Brier and calibration judge is σ(r − log w).
    """
    r_N, p_N = _finite("reward_N", reward_N), torch.as_tensor(label_N).detach().cpu()
    if p_N.shape != r_N.shape:
        raise ValueError(f"label_N: expected {len(r_N)} labels like rewards, got shape {tuple(p_N.shape)}")
    if not ((p_N == 0) | (p_N == 1)).all():
        raise ValueError("label_N: expected only 0 and 1 (or booleans), got other values")
    p_N = p_N.bool()
    liked, disliked = r_N[p_N], r_N[~p_N]
    auc = balanced = margin = None
    if len(liked) and len(disliked):
        auc = float(_weighted_auc(r_N, p_N.double())(torch.ones(1, len(r_N), dtype=torch.float64)))
        balanced = 0.5 * (_share_above_0(liked) + _share_above_0(-disliked))
        margin = float(liked.mean() - disliked.mean())
    loss_N = torch.where(p_N, pos_weight * _softplus(-r_N), _softplus(r_N))
    q_N = torch.sigmoid(r_N - math.log(pos_weight))
    return {
        "loss": float(loss_N.mean()),
        "auc": auc,
        "accuracy": _share_above_0(torch.where(p_N, r_N, -r_N)),
        "balanced_accuracy": balanced,
        "margin": margin,
        "brier": float((q_N - p_N.double()).square().mean()),
        "calibration_error": calibration_error(q_N, p_N.double()),
    }


def pairwise_metrics(
    chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, center: float = 0.0, margin_P: torch.Tensor | float = 0.0
) -> dict[str, float | None]:
    """`PAIRWISE_METRICS` of pairs: rewards [P] of chosen and of rejected answers.

    loss is the training objective mean[−log σ(m − margin) + center (r_w + r_l)²]. Every pair's outcome is 1 by the way
    it is written down, which would make any probability below 1 look badly calibrated. So calibration looks at the pair
    as a judge does who is not told which answer was chosen: the probability that the answer with the higher reward is
    the chosen one, q = σ(|m|), against whether it was (½ for a tie, whose q is ½). Brier is mean (σ(m) − 1)², the same
    from either side.
    """
    r_w, r_l = _finite("chosen_P", chosen_P), _finite("rejected_P", rejected_P)
    if r_w.shape != r_l.shape:
        raise ValueError(f"rejected_P: expected {len(r_w)} rewards like chosen_P, got {len(r_l)}")
    m_P = r_w - r_l
    loss_P = _softplus(margin_P - m_P) + center * (r_w + r_l).square()
    right_P = (m_P > 0).double() + 0.5 * (m_P == 0).double()
    return {
        "loss": float(loss_P.mean()),
        "accuracy": _share_above_0(m_P),
        "margin": float(m_P.mean()),
        "brier": float((torch.sigmoid(m_P) - 1).square().mean()),
        "calibration_error": calibration_error(torch.sigmoid(m_P.abs()), right_P),
    }


def intervals(score_N: torch.Tensor, label_N: torch.Tensor | None, groups: Sequence[str]) -> dict[str, float | None]:
    """95 % intervals of accuracy and AUC by a bootstrap over groups; pairs (r_w − r_l) have no labels."""
    places = {group: i for i, group in enumerate(dict.fromkeys(groups))}
    group_N = torch.tensor([places[group] for group in groups])
    score_N = _finite("score_N", score_N)
    p_N = torch.ones_like(score_N) if label_N is None else label_N.double()
    signed_N = (2 * p_N - 1) * score_N
    right_G = torch.bincount(group_N, weights=(signed_N > 0).double() + 0.5 * (signed_N == 0).double())
    by_name = {"accuracy": ratio_by_prompt(right_G.tolist(), torch.bincount(group_N).tolist())}
    if 0 < float(p_N.sum()) < len(p_N):
        auc = _weighted_auc(score_N, p_N)
        by_name["auc"] = interval_by_prompt(lambda weights_RG: auc(weights_RG[:, group_N]), len(places))
    return {f"{name}_{edge}": getattr(of, edge) for name, of in by_name.items() for edge in ("low", "high")}


def _share_above_0(x_N: torch.Tensor) -> float:
    """Share of numbers above 0, of which each 0 counts half."""
    return (2 * int((x_N > 0).sum()) + int((x_N == 0).sum())) / (2 * len(x_N))


def _softplus(x: torch.Tensor) -> torch.Tensor:
    return -torch.nn.functional.logsigmoid(-x)


def _finite(name: str, x_N: torch.Tensor) -> torch.Tensor:
    x_N = torch.as_tensor(x_N).detach().cpu().double()
    if x_N.dim() != 1 or len(x_N) == 0:
        raise ValueError(f"{name}: expected at least one number in a tensor [N], got shape {tuple(x_N.shape)}")
    if not x_N.isfinite().all():
        raise ValueError(f"{name}: expected finite numbers, got {int((~x_N.isfinite()).sum())} that are not")
    return x_N
