"""Corrections for answers that another distribution drew than the one that learns from them.

Two reasons: another engine drew them at the same weights (vLLM), or an older policy did. Log-probs of the training
forward: π of the present policy, π_past of the one that drew. With ratios to π_old and weights w of the advantages:

    behaviour            π_old = π_past    w = 1              the clip holds the policy near the one that drew
    decoupled            π_old = π         w_t = π / π_past   near the present one (Hilton et al., arXiv 2110.00641)
    token_truncate       π_old = π         w_t = min(π / π_past, C)
    sequence_truncate    π_old = π         w = min(Π_t π / π_past, C)
    none                 π_old = π         w = 1              as if the present policy had drawn them: biased

The KL to the reference is the present policy's in all of them: E_π[R − β log π/π_ref] has no other in it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from rlhf_engine.algorithms.importance import Mode, importance_weights, weight_metrics
from rlhf_engine.config import TrainConfig
from rlhf_engine.errors import ConfigError, MismatchError
from rlhf_engine.hydra import PackedBatch


class Corrected(NamedTuple):
    """Log-probs that the loss takes for the policy before the update, and the weights of its advantages."""

    old_logprobs_M: torch.Tensor
    weights_M: torch.Tensor | None
    metrics: dict[str, float]


def correct_engine(
    logprobs_M: torch.Tensor, log_ratio_M: torch.Tensor, batch: PackedBatch, filtered: bool, config: TrainConfig
) -> Corrected:
    """Correct answers from another engine.

    log_ratio_M: training forward to engine, at equal weights. filtered: whether draws left out some of the vocabulary
    that nobody knows.

    Raises MismatchError for a token's ratio that is not finite, ConfigError for answers of another distribution.
    """
    if filtered:
        raise ConfigError(
            "top_k, top_p, min_p: expected none with answers from another engine, which does not report the words that "
            "they leave, so that no ratio to its distribution can be made"
        )
    _require_finite(log_ratio_M, "training to rollout probabilities")
    correction, clip_max = config.server_correction, config.off_policy_clip_max
    mode: Mode = "token_truncate" if correction == "none" else correction
    figures = weight_metrics(log_ratio_M, batch, mode=mode, clip_max=clip_max)
    metrics = {f"mismatch/{'rollout_k3' if name == 'k3' else name}": value for name, value in figures.items()}
    if correction != "none":
        weights_M = importance_weights(log_ratio_M, batch, mode=mode, clip_max=clip_max)
    else:
        weights_M = torch.ones_like(log_ratio_M)
    return Corrected(logprobs_M, weights_M, metrics)


def correct_age(
    logprobs_M: torch.Tensor, past_logprobs_M: torch.Tensor, batch: PackedBatch, config: TrainConfig
) -> Corrected:
    """Correct answers of an older policy. Raises MismatchError for a token's ratio that is not finite."""
    log_ratio_M = logprobs_M - past_logprobs_M
    _require_finite(log_ratio_M, "the present policy's to the drawing one's probabilities")
    correction = config.correction
    mode: Mode = "sequence_truncate" if correction == "sequence_truncate" else "token_truncate"
    clip_max = config.off_policy_clip_max if correction.endswith("truncate") else math.inf
    figures = weight_metrics(log_ratio_M, batch, mode=mode, clip_max=clip_max)
    metrics = {f"staleness/{name}": value for name, value in figures.items()}
    if correction == "behaviour":
        return Corrected(past_logprobs_M, None, metrics)
    if correction == "none":
        return Corrected(logprobs_M, None, metrics)
    return Corrected(logprobs_M, importance_weights(log_ratio_M, batch, mode=mode, clip_max=clip_max), metrics)


def both(engine: Corrected, age: Corrected) -> Corrected:
    """Corrections of answers that another engine drew by an older policy: π_old of the age, and the product of weights.

    The engine's ratio is between two engines at the weights that drew, the age's between two policies on one engine.
    """
    weights_M = engine.weights_M
    if age.weights_M is not None:
        weights_M = age.weights_M if weights_M is None else weights_M * age.weights_M
    return Corrected(age.old_logprobs_M, weights_M, {**engine.metrics, **age.metrics})


def _require_finite(log_ratio_M: torch.Tensor, what: str) -> None:
    finite_M = log_ratio_M.isfinite() & log_ratio_M.exp().isfinite()
    if not finite_M.all():
        raise MismatchError(
            f"ratios of {what}: expected finite ones, got log ratios of {log_ratio_M[~finite_M][:4].tolist()} for "
            f"{int((~finite_M).sum())} of {len(log_ratio_M)} tokens; no update was made from this rollout"
        )
