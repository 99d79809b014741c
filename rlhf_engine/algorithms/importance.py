"""Truncated importance weights: answers drawn by another engine than the one that trains, and how far the two differ.

Two engines at the same weights do not compute the same probabilities. Let t go over the tokens of an answer. π_roll is
the distribution that the answer was drawn from, as the engine that drew it reports it. π_old is the training forward's
before the update, both at the same weights:

    token_truncate:     w_t = min(π_old(t) / π_roll(t), C)
    sequence_truncate:  w_t = min(Π_s π_old(s) / π_roll(s), C)   the same for all tokens of an answer
    L_policy = Σ_t w_t · max(−A_t ρ_t, −A_t clip(ρ_t, 1−ε, 1+ε)) / n      ρ_t = π / π_old

Since w ≥ 0, weighting the loss is weighting A. Values and returns are not weighted. Truncating trades a bias for a
finite variance: an untruncated weight is unbiased, and one token may dominate a batch.

Sources: E. L. Ionides, "Truncated Importance Sampling", J. Comput. Graph. Stat. 17(2), 2008, pp. 295-311; F. Yao,
L. Liu, D. Zhang, C. Dong, J. Shang, J. Gao, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training",
2025, which has the token-level weight.

Legend: N sequences, M completion tokens packed. log_ratio_M = log π_old − log π_roll, fp32 [M].
"""

from __future__ import annotations

from typing import Literal

import torch

from rlhf_engine.algorithms.sequences import sequence_sums
from rlhf_engine.hydra import PackedBatch

Mode = Literal["token_truncate", "sequence_truncate"]


def sequence_log_ratio(log_ratio_M: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """Σ_t log ratio of each answer, [N]."""
    _check(log_ratio_M, batch)
    return sequence_sums(log_ratio_M, batch)


def importance_weights(log_ratio_M: torch.Tensor, batch: PackedBatch, *, mode: Mode, clip_max: float) -> torch.Tensor:
    """w [M], each in [0, clip_max]."""
    _check(log_ratio_M, batch)
    if not clip_max > 0:
        raise ValueError(f"clip_max: expected a positive number, got {clip_max}")
    if mode == "token_truncate":
        log_weight_M = log_ratio_M
    elif mode == "sequence_truncate":
        log_weight_M = sequence_log_ratio(log_ratio_M, batch)[batch.sequence_of_M]
    else:
        raise ValueError(f"mode: expected 'token_truncate' or 'sequence_truncate', got {mode!r}")
    return log_weight_M.exp().clamp(max=clip_max)


def weight_metrics(log_ratio_M: torch.Tensor, batch: PackedBatch, *, mode: Mode, clip_max: float) -> dict[str, float]:
    """Metrics of how far the two distributions differ, and of what is left of the batch under the weights.

    k3: mean of ratio − 1 − log ratio, Schulman's unbiased estimate of KL(π_roll ‖ π_old) per token.
    worst_sequence: largest |log ratio| of a whole answer. truncated_ratio: share of weights that are truncated, and
    effective_sample_size: (Σ w)² / (n Σ w²), both over tokens, or over answers in mode sequence_truncate.
    """
    weights = importance_weights(log_ratio_M, batch, mode=mode, clip_max=clip_max)
    per_sequence = sequence_log_ratio(log_ratio_M, batch)
    raw = log_ratio_M
    if mode == "sequence_truncate":
        raw, weights = per_sequence, per_sequence.exp().clamp(max=clip_max)
    weights = weights.double()
    return {
        "k3": float((torch.expm1(log_ratio_M) - log_ratio_M).mean()),
        "worst_sequence": float(per_sequence.abs().max()),
        "truncated_ratio": float((raw.exp() > clip_max).float().mean()),
        "effective_sample_size": float(weights.sum() ** 2 / (len(weights) * weights.square().sum())),
        "importance_weight_mean": float(weights.mean()),
    }


def _check(log_ratio_M: torch.Tensor, batch: PackedBatch) -> None:
    if log_ratio_M.shape != (batch.n_completion_tokens,):
        raise ValueError(
            f"log_ratio_M: expected one number per completion token, [{batch.n_completion_tokens}], got "
            f"{list(log_ratio_M.shape)}"
        )
