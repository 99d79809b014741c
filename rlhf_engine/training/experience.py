"""From a rollout to experience: one scoring pass over all lanes, scores, token rewards, advantages; and its metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_engine.algorithms.importance import importance_weights, mismatch_metrics
from rlhf_engine.algorithms.ppo import Experience, advantages, token_kl, token_rewards
from rlhf_engine.config import PPOConfig
from rlhf_engine.devices import is_out_of_memory, release_memory
from rlhf_engine.errors import ConfigError, MemoryLimitError, MismatchError, NonFiniteError
from rlhf_engine.hydra import HydraModel, PackedBatch, Scores
from rlhf_engine.rollout import Rollout
from rlhf_engine.training.scoring import AnswerScorer, mean_or_none

MISMATCH_BOUND = {torch.float32: 1e-4, torch.bfloat16: 0.03}
"""Largest mean |log ratio| per token between rollout and training forward at equal weights, by the backbone's dtype.
The mean tells faults from rounding, the maximum of thousands of bf16 tokens does not; figures in docs/decisions."""

MISMATCH_MAX_FACTOR = 100
"""No single token may be further off than this many times the bound of the mean: one wrong token hides in a mean."""

STEP0_KL_BOUND = {torch.float32: 1e-3, torch.bfloat16: 0.5}
"""Largest |log π − log π_ref| of a token before the first update, where the actor starts as the reference."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoredRollout:
    """A rollout after the scoring pass."""

    experience: Experience
    metrics: dict[str, float]


def decode_answers(tokenizer: PreTrainedTokenizerBase, batch: PackedBatch) -> tuple[list[str], list[list[int]]]:
    """(texts without special tokens, token ids) of the N completions."""
    ids = [batch.completion_tokens(i) for i in range(batch.n_sequences)]
    return [str(tokenizer.decode(row, skip_special_tokens=True)) for row in ids], ids


def make_experience(
    model: HydraModel,
    rollout: Rollout,
    scorer: AnswerScorer,
    tokenizer: PreTrainedTokenizerBase,
    config: PPOConfig,
    prompts: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
    *,
    first_step_from_reference: bool,
) -> ScoredRollout:
    """Score a rollout and turn it into experience.

    first_step_from_reference: the policy has not been updated yet and started as the reference, so their log-probs must
    agree. Raises MismatchError if they or rollout and training log-probs do not, NonFiniteError for a score that is not
    finite, ConfigError if every answer was left out by a None reward.
    """
    batch = rollout.batch
    roles = ["actor", "reference", "critic", *(["reward"] if scorer.uses_lane else [])]
    scores = _score_in_memory(model, batch, roles, config)
    logprobs_M, ref_logprobs_M, all_values_M = scores.logprobs_M, scores.ref_logprobs_M, scores.values_M
    assert logprobs_M is not None
    assert ref_logprobs_M is not None
    assert all_values_M is not None
    assert scores.entropies_M is not None
    named = {
        "log-probs of the rollout": rollout.logprobs_M,
        "log-probs of the actor": logprobs_M,
        "log-probs of the reference": ref_logprobs_M,
        "values of the critic": all_values_M,
        "scores of the reward role": scores.rewards_N,
    }
    for name, found in named.items():
        if found is not None and not found.isfinite().all():
            raise NonFiniteError(f"{name} are not finite; no update was made from this rollout")
    base = model.backbone("base")
    # quantised products round as coarsely as bf16, 8-bit ones by the batch that a row is in
    dtype = torch.bfloat16 if base.quantized else base.dtype
    log_ratio_M = logprobs_M - rollout.logprobs_M
    mismatch = log_ratio_M.abs()
    if config.rollout_backend == "local":
        _check_mismatch(mismatch, dtype, config.rollout_mismatch_bound)
    if first_step_from_reference:
        _check_step0(logprobs_M, ref_logprobs_M, dtype)
    texts, ids = decode_answers(tokenizer, batch)
    scored = scorer(prompts, texts, ids, columns, rollout.finished, scores.rewards_N)
    kept = [i for i, total in enumerate(scored.totals) if total is not None]
    if not kept:
        raise ConfigError("reward_funcs: expected a reward for at least one answer of the batch, got None for all")
    rows = batch.select_completion_rows(kept)
    kept_batch = batch.select(kept) if len(kept) < batch.n_sequences else batch
    kl_M = token_kl(logprobs_M, ref_logprobs_M, config.kl_estimator, scores.kl_M)[rows]
    scores_N = torch.tensor([scored.totals[i] for i in kept], dtype=torch.float32, device=batch.device)
    if not scores_N.isfinite().all() or not kl_M.isfinite().all():
        culprit = "score" if not scores_N.isfinite().all() else "KL"
        raise NonFiniteError(f"{culprit} of an answer is not finite; no update was made from it")
    values_M = all_values_M[rows]
    advantages_M, returns_M = advantages(
        token_rewards(kl_M, scores_N, kept_batch, config.beta),
        values_M,
        kept_batch,
        gamma=config.gamma,
        lam=config.lam,
        whiten_rewards=config.whiten_rewards,
        whiten_advantages=config.whiten_advantages,
    )
    correction: dict[str, float] = {}
    if config.rollout_backend != "local":
        weights_M, correction = _correct(log_ratio_M[rows], kept_batch, rollout, config)
        advantages_M = advantages_M * weights_M
    experience = Experience(
        batch=kept_batch,
        old_logprobs_M=logprobs_M[rows],
        old_values_M=values_M,
        advantages_M=advantages_M,
        returns_M=returns_M,
    )
    lengths = torch.tensor(batch.completion_lens, dtype=torch.float32)
    kl_N = torch.zeros(len(kept), device=batch.device).index_add_(0, kept_batch.sequence_of_M, kl_M)
    metrics = {
        "reward": float(scores_N.mean()),
        "reward_std": float(scores_N.std(correction=0)),
        "kl": float(kl_N.mean()),
        "kl_per_token": float(kl_M.mean()),
        "objective": float((scores_N - config.beta * kl_N).mean()),
        "entropy_rollout": float(scores.entropies_M.mean()),
        "completions/mean_length": float(lengths.mean()),
        "completions/max_length": float(lengths.max()),
        "completions/unfinished_ratio": 1 - sum(rollout.finished) / batch.n_sequences,
        "completions/skipped": float(batch.n_sequences - len(kept)),
        "value/mean": float(values_M.mean()),
        "mismatch/rollout_max": float(mismatch.max()),
        "mismatch/rollout_mean": float(mismatch.mean()),
        **correction,
    }
    if len(scored.sources) > 1:
        for name, values in scored.sources.items():
            mean = mean_or_none(values)
            if mean is not None:
                metrics[f"rewards/{name}"] = mean
    return ScoredRollout(experience=experience, metrics=metrics)


def _score_in_memory(model: HydraModel, batch: PackedBatch, roles: Sequence[str], config: PPOConfig) -> Scores:
    """`HydraModel.score`, with the model's token budget halved until it fits."""
    while True:
        try:
            return model.score(batch, roles, temperature=config.temperature, exact_kl=config.kl_estimator == "exact")
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


def _correct(
    log_ratio_M: torch.Tensor, batch: PackedBatch, rollout: Rollout, config: PPOConfig
) -> tuple[torch.Tensor, dict[str, float]]:
    """Weights [M] of the advantages of answers from another engine (1 without correction), and mismatch metrics.

    Raises MismatchError for a token's ratio that is not finite, ConfigError for answers of another distribution.
    """
    if rollout.filtered:
        raise ConfigError("top_k, top_p: expected none with answers from another engine, whose ratios they bias")
    finite_M = log_ratio_M.isfinite() & log_ratio_M.exp().isfinite()
    if not finite_M.all():
        raise MismatchError(
            "ratios of training to rollout probabilities: expected finite ones, got log ratios of "
            f"{log_ratio_M[~finite_M][:4].tolist()} for {int((~finite_M).sum())} of {len(log_ratio_M)} tokens; no "
            "update was made from this rollout"
        )
    mode, clip_max = config.vllm_importance_sampling_mode, config.vllm_importance_sampling_clip_max
    metrics = mismatch_metrics(log_ratio_M, batch, mode=mode, clip_max=clip_max)
    if not config.vllm_importance_sampling_correction:
        return torch.ones_like(log_ratio_M), metrics
    return importance_weights(log_ratio_M, batch, mode=mode, clip_max=clip_max), metrics


def _check_mismatch(mismatch: torch.Tensor, dtype: torch.dtype, bound: float | None) -> None:
    """Bound the |log ratio| [M] of training forward and rollout at equal weights."""
    limit = bound if bound is not None else MISMATCH_BOUND[dtype]
    mean, worst = float(mismatch.mean()), float(mismatch.max())
    if not (mean <= limit and worst <= MISMATCH_MAX_FACTOR * limit):  # also catches NaN
        raise MismatchError(
            f"rollout and training log-probs differ by {mean:.3g} on average, {worst:.3g} at most, at equal weights; "
            f"expected at most {limit:g} and {MISMATCH_MAX_FACTOR * limit:g} in {dtype} (rollout_mismatch_bound)"
        )


def _check_step0(actor_M: torch.Tensor, reference_M: torch.Tensor, dtype: torch.dtype) -> None:
    gap = float((actor_M - reference_M).abs().max())
    if not gap <= STEP0_KL_BOUND[dtype]:
        raise MismatchError(
            f"the actor started as the reference, but before any update their log-probs differ by up to {gap:.3g}; "
            "is the reference the model that the actor was trained from (reference_adapter)?"
        )
