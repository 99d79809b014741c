"""From a rollout to what an update learns from: one scoring pass over all lanes, scores, KL; and their metrics."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_engine.algorithms.base import Experience
from rlhf_engine.algorithms.ppo import token_kl
from rlhf_engine.algorithms.sequences import sequence_sums
from rlhf_engine.config import TrainConfig
from rlhf_engine.distributed.process_group import ALONE, World
from rlhf_engine.errors import ConfigError, MismatchError, NonFiniteError
from rlhf_engine.hydra import HydraModel, PackedBatch, Scores
from rlhf_engine.policy.build import PAST
from rlhf_engine.rollout import Rollout
from rlhf_engine.scoring.gather import gather_answers, gather_scores
from rlhf_engine.scoring.off_policy import Corrected, correct_age, correct_engine
from rlhf_engine.scoring.rewards import AnswerScorer, ScoredAnswers, mean_or_none
from rlhf_engine.scoring.score import FrozenScores, score_frozen, score_in_memory

MISMATCH_BOUND = {torch.float32: 1e-4, torch.bfloat16: 0.03}
"""Largest mean |log ratio| per token between rollout and training forward at equal weights, by the backbone's dtype.
The mean tells faults from rounding, the maximum of thousands of bf16 tokens does not; figures in docs/decisions."""

MISMATCH_MAX_FACTOR = 100
"""No single token may be further off than this many times the bound of the mean: one wrong token hides in a mean."""

STEP0_KL_BOUND = {torch.float32: 1e-3, torch.bfloat16: 0.5}
"""Largest |log π − log π_ref| of a token before the first update, where the actor starts as the reference."""


class Layout(NamedTuple):
    """Which answers of a rollout belong together."""

    groups: list[int]
    """which prompt of the step an answer belongs to"""
    greedy: list[bool]
    """whether it is the greedy answer, a baseline that nothing is learned from"""

    @classmethod
    def of(cls, prompts: int, generations: int, *, with_greedy: bool) -> Layout:
        """`generations` answers to each prompt next to each other, the last one greedy where asked for."""
        return cls(
            [i for i in range(prompts) for _ in range(generations)],
            [with_greedy and j == generations - 1 for _ in range(prompts) for j in range(generations)],
        )


class Joint(NamedTuple):
    """What all ranks together have drawn for a step, each a share."""

    world: World
    rollout: Rollout
    layout: Layout


def decode_answers(tokenizer: PreTrainedTokenizerBase, batch: PackedBatch) -> tuple[list[str], list[list[int]]]:
    """(texts without special tokens, token ids) of the N completions."""
    ids = [batch.completion_tokens(i) for i in range(batch.n_sequences)]
    return [str(tokenizer.decode(row, skip_special_tokens=True)) for row in ids], ids


def score_rollout(
    model: HydraModel,
    rollout: Rollout,
    layout: Layout,
    scorer: AnswerScorer,
    tokenizer: PreTrainedTokenizerBase,
    config: TrainConfig,
    prompts: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
    *,
    policy_version: int,
    frozen: FrozenScores | None = None,
    past: bool = False,
    first_step_from_reference: bool,
    joint: Joint | None = None,
) -> Experience:
    """Score a rollout.

    prompts, columns: of each answer, as `layout` has them. policy_version: of the present policy. frozen: what the
    generator has asked the frozen lanes; where it has not, past: the slot `past` holds the policy that drew the
    answers. first_step_from_reference: the policy has not been updated yet and started as the reference, so their
    log-probs must agree. joint: where the rollout is one rank's share, all of it, which is what comes back scored.

    Raises MismatchError if those log-probs or those of rollout and training do not agree, NonFiniteError for a score
    that is not finite, ConfigError if a None reward left no answer to learn from.
    """
    joint = joint or Joint(ALONE, rollout, layout)
    world, own = joint.world, _drawn(rollout, layout)
    asked = world.run_on_all_ranks(
        "scoring answers",
        lambda: _ask_lanes(model, rollout, own.batch, scorer, config, frozen=frozen, past=past),
    )
    scores = gather_scores(world, asked)
    drawn = own if world.size == 1 else _drawn(joint.rollout, joint.layout)
    assert scores.logprobs_M is not None
    assert scores.ref_logprobs_M is not None
    compared = _compare(scores, scores.logprobs_M, drawn, policy_version - joint.rollout.versions_M)
    to_reference_M = scores.ref_logprobs_M - scores.logprobs_M if first_step_from_reference else None
    _check_agreement(model, config, compared.log_ratio_M, to_reference_M)
    own_scored = world.run_on_all_ranks(
        "rewards",
        lambda: _score_answers(model, rollout, layout, scorer, tokenizer, prompts, columns, asked.rewards_N, config),
    )
    return _to_learn_from(joint, drawn, scores, compared, gather_answers(world, own_scored), config)


class _Drawn(NamedTuple):
    """The answers of a rollout that are not greedy."""

    indices: list[int]
    """their places in the rollout"""
    batch: PackedBatch
    logprobs_M: torch.Tensor
    """of the rollout"""


def _drawn(rollout: Rollout, layout: Layout) -> _Drawn:
    drawn = [i for i, greedy in enumerate(layout.greedy) if not greedy]
    if len(drawn) == rollout.batch.n_sequences:
        return _Drawn(drawn, rollout.batch, rollout.logprobs_M)
    rows_M = rollout.batch.select_completion_rows(drawn)
    return _Drawn(drawn, rollout.batch.select(drawn), rollout.logprobs_M[rows_M])


class _Compared(NamedTuple):
    """Drawn answers as those saw them who drew them: another engine, or an older policy."""

    behind_M: torch.Tensor
    """updates since the policy that drew a token; of greedy answers as well"""
    is_behind: bool
    """whether any is behind"""
    past_logprobs_M: torch.Tensor
    """of the policy that drew, by the training forward where one policy drew all of an answer"""
    log_ratio_M: torch.Tensor
    """between training forward and rollout, by the same policy"""


def _compare(scores: Scores, logprobs_M: torch.Tensor, drawn: _Drawn, behind_M: torch.Tensor) -> _Compared:
    is_behind = bool((behind_M > 0).any())
    # where policies took turns within an answer, none of them can say again what it said
    past_logprobs_M = scores.past_logprobs_M if scores.past_logprobs_M is not None else drawn.logprobs_M
    log_ratio_M = (past_logprobs_M if is_behind else logprobs_M) - drawn.logprobs_M
    return _Compared(behind_M, is_behind, past_logprobs_M, log_ratio_M)


def _ask_lanes(
    model: HydraModel,
    rollout: Rollout,
    batch: PackedBatch,
    scorer: AnswerScorer,
    config: TrainConfig,
    *,
    frozen: FrozenScores | None,
    past: bool,
) -> Scores:
    """What all lanes say of the drawn answers. Raises NonFiniteError, naming the role, for what is not finite."""
    critic, reward = (["critic"] if config.has_critic else []), (["reward"] if scorer.uses_reward_model else [])
    exact_kl = config.kl_estimator == "exact"
    roles = ["actor", "reference", *critic, *reward]
    if config.is_async:
        roles = ["actor", *(["reference"] if exact_kl else []), *critic]
        if frozen is None:
            frozen = score_frozen(model, batch, config, past=PAST if past else None, reward=scorer.uses_reward_model)
    scores = score_in_memory(model, batch, roles, temperature=config.temperature, exact_kl=exact_kl)
    if frozen is not None:
        known = {name: tensor for name, tensor in frozen._asdict().items() if tensor is not None}
        scores = dataclasses.replace(scores, **known)
    _require_finite(rollout.logprobs_M, scores)
    return scores


def mismatch_bound(model: HydraModel, config: TrainConfig) -> float:
    """Largest mean |log ratio| per token of two computations at equal weights, by the configuration or the dtype."""
    if config.rollout_mismatch_bound is not None:
        return config.rollout_mismatch_bound
    return MISMATCH_BOUND[_rounding_dtype(model)]


def _rounding_dtype(model: HydraModel) -> torch.dtype:
    """Quantised products round as coarsely as bf16, 8-bit ones by the batch that a row is in."""
    base = model.backbone("base")
    return torch.bfloat16 if base.quantized else base.dtype


def _require_finite(rollout_logprobs_M: torch.Tensor, scores: Scores) -> None:
    named = {
        "log-probs of the rollout": rollout_logprobs_M,
        "log-probs of the actor": scores.logprobs_M,
        "log-probs of the reference": scores.ref_logprobs_M,
        "log-probs of the policy that drew": scores.past_logprobs_M,
        "values of the critic": scores.values_M,
        "scores of the reward role": scores.rewards_N,
    }
    for name, found in named.items():
        if found is not None and not found.isfinite().all():
            raise NonFiniteError(f"{name} are not finite; no update was made from this rollout")


def _check_agreement(
    model: HydraModel, config: TrainConfig, log_ratio_M: torch.Tensor, to_reference_M: torch.Tensor | None
) -> None:
    """Rollout and training forward agree, and before the first update so do actor and reference where they must."""
    if config.rollout_backend == "local":
        _check_mismatch(log_ratio_M.abs(), model, config)
    if to_reference_M is not None:
        _check_step0(to_reference_M, _rounding_dtype(model))


def _score_answers(
    model: HydraModel,
    rollout: Rollout,
    layout: Layout,
    scorer: AnswerScorer,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
    drawn_rewards_N: torch.Tensor | None,
    config: TrainConfig,
) -> ScoredAnswers:
    """Scores of all answers, greedy ones included. drawn_rewards_N: of the reward role for the drawn ones.

    A greedy answer that has the tokens of a drawn one to its prompt has its score, to the bit.
    """
    texts, ids = decode_answers(tokenizer, rollout.batch)
    drawn = {
        (group, tuple(row)): i
        for i, (group, row) in enumerate(zip(layout.groups, ids, strict=True))
        if not layout.greedy[i]
    }
    same = {i: drawn.get((layout.groups[i], tuple(ids[i]))) for i, greedy in enumerate(layout.greedy) if greedy}
    reward_model_N = drawn_rewards_N
    if drawn_rewards_N is not None and same:
        reward_model_N = drawn_rewards_N.new_empty(rollout.batch.n_sequences)
        reward_model_N[[i for i, greedy in enumerate(layout.greedy) if not greedy]] = drawn_rewards_N
        others = [i for i, twin in same.items() if twin is None]
        if others:
            chosen = rollout.batch.select(others)
            found = score_in_memory(model, chosen, ["reward"], temperature=config.temperature).rewards_N
            assert found is not None
            if not found.isfinite().all():
                raise NonFiniteError("scores of the reward role are not finite; no update was made from this rollout")
            reward_model_N[others] = found
        for i, twin in same.items():
            if twin is not None:
                reward_model_N[i] = reward_model_N[twin]
    scored = scorer(prompts, texts, ids, columns, rollout.finished, reward_model_N)
    for i, twin in same.items():
        if twin is not None:
            scored.totals[i] = scored.totals[twin]
    return scored


def _to_learn_from(
    joint: Joint, drawn: _Drawn, scores: Scores, compared: _Compared, scored: ScoredAnswers, config: TrainConfig
) -> Experience:
    """The drawn answers that are kept. scored: all answers, greedy ones included."""
    rollout, layout = joint.rollout, joint.layout
    logprobs_M, ref_logprobs_M = scores.logprobs_M, scores.ref_logprobs_M
    assert logprobs_M is not None
    assert ref_logprobs_M is not None
    kept = _kept(scored.totals, layout, least=config.least_drawn)
    if not kept:
        raise ConfigError(_nothing_left(scored.totals, config))
    places = [drawn.indices[i] for i in kept]
    rows_M = drawn.batch.select_completion_rows(kept)
    batch = drawn.batch.select(kept) if len(kept) < drawn.batch.n_sequences else drawn.batch
    kl_M = token_kl(logprobs_M, ref_logprobs_M, config.kl_estimator, scores.kl_M)[rows_M]
    device = batch.device
    scores_N = torch.tensor([scored.totals[i] for i in places], dtype=torch.float32, device=device)
    if not scores_N.isfinite().all() or not kl_M.isfinite().all():
        culprit = "score" if not scores_N.isfinite().all() else "KL"
        raise NonFiniteError(f"{culprit} of an answer is not finite; no update was made from it")
    corrected = Corrected(logprobs_M[rows_M], None, {})
    if config.rollout_backend != "local":
        corrected = correct_engine(logprobs_M[rows_M], compared.log_ratio_M[rows_M], batch, rollout, config)
    elif compared.is_behind:
        corrected = correct_age(logprobs_M[rows_M], compared.past_logprobs_M[rows_M], batch, config)
    greedy_scores_N = None
    if any(layout.greedy):
        by_group = {layout.groups[i]: scored.totals[i] for i, greedy in enumerate(layout.greedy) if greedy}
        found = [by_group[layout.groups[i]] for i in places]
        greedy_scores_N = torch.tensor(found, dtype=torch.float32, device=device)
    result = Experience(
        batch=batch,
        groups_N=torch.tensor([layout.groups[i] for i in places], device=device),
        scores_N=scores_N,
        greedy_scores_N=greedy_scores_N,
        logprobs_M=logprobs_M[rows_M],
        old_logprobs_M=corrected.old_logprobs_M,
        ref_logprobs_M=ref_logprobs_M[rows_M],
        kl_M=kl_M,
        values_M=None if scores.values_M is None else scores.values_M[rows_M],
        weights_M=corrected.weights_M,
        metrics={
            **_draw_metrics(rollout, drawn, scores, compared, skipped=len(drawn.indices) - len(kept)),
            **corrected.metrics,
            **(_age_metrics(compared.behind_M) if config.is_async else {}),
            **_source_metrics(scored, drawn.indices),
        },
    )
    result.metrics.update(_score_metrics(result, config))
    return result


def _kept(totals: Sequence[float | None], layout: Layout, *, least: int) -> list[int]:
    """Which drawn answers to learn from, counted among the drawn: those with a score, whose greedy answer has one too,
    and whose prompt has at least so many of them."""
    answers = list(zip(layout.groups, layout.greedy, totals, strict=True))
    spoiled = {group for group, greedy, total in answers if greedy and total is None}
    drawn = [(group, total) for group, greedy, total in answers if not greedy]
    good = [i for i, (group, total) in enumerate(drawn) if total is not None and group not in spoiled]
    counts = Counter(drawn[i][0] for i in good)
    return [i for i in good if counts[drawn[i][0]] >= least]


def _nothing_left(totals: Sequence[float | None], config: TrainConfig) -> str:
    """Why no answer can be learned from."""
    missing = sum(total is None for total in totals)
    if missing == len(totals):
        return "reward_funcs: expected a reward for at least one answer of the batch, got None for all"
    needed = "both of its answers" if config.facts.with_greedy else f"{config.least_drawn} of its answers"
    return (
        f"reward_funcs: expected for {config.algorithm} rewards of at least one prompt for {needed}, got None for "
        f"{missing} of {len(totals)} answers and no such prompt"
    )


def _draw_metrics(
    rollout: Rollout, drawn: _Drawn, scores: Scores, compared: _Compared, *, skipped: int
) -> dict[str, float]:
    assert scores.entropies_M is not None
    mismatch_M = compared.log_ratio_M.abs()
    lengths = torch.tensor(drawn.batch.completion_lens, dtype=torch.float32)
    return {
        "entropy_rollout": float(scores.entropies_M.mean()),
        "completions/unfinished_ratio": 1 - sum(rollout.finished[i] for i in drawn.indices) / len(drawn.indices),
        "completions/skipped": float(skipped),
        "mismatch/rollout_max": float(mismatch_M.max()),
        "mismatch/rollout_mean": float(mismatch_M.mean()),
        "completions/mean_length": float(lengths.mean()),
        "completions/max_length": float(lengths.max()),
    }


def _age_metrics(behind_M: torch.Tensor) -> dict[str, float]:
    return {"staleness/mean": float(behind_M.float().mean()), "staleness/max": float(behind_M.max())}


def _source_metrics(scored: ScoredAnswers, drawn: Sequence[int]) -> dict[str, float]:
    """Mean reward of each source over the drawn answers, where there are several."""
    means = {name: mean_or_none([values[i] for i in drawn]) for name, values in scored.sources.items()}
    return {f"rewards/{name}": mean for name, mean in means.items() if mean is not None} if len(means) > 1 else {}


def _score_metrics(found: Experience, config: TrainConfig) -> dict[str, float]:
    kl_N = sequence_sums(found.kl_M, found.batch)
    metrics = {
        "reward": float(found.scores_N.mean()),
        "reward_std": float(found.scores_N.std(correction=0)),
        "kl": float(kl_N.mean()),
        "kl_per_token": float(found.kl_M.mean()),
    }
    if config.reward_weight is not None:
        metrics["objective"] = float((config.reward_weight * found.scores_N - config.beta * kl_N).mean())
    if found.greedy_scores_N is not None:
        metrics["reward/greedy"] = float(found.greedy_scores_N.mean())
    if found.values_M is not None:
        metrics["value/mean"] = float(found.values_M.mean())
    return metrics


def _check_mismatch(mismatch: torch.Tensor, model: HydraModel, config: TrainConfig) -> None:
    """Bound the |log ratio| [M] of training forward and rollout at equal weights."""
    limit = mismatch_bound(model, config)
    mean, worst = float(mismatch.mean()), float(mismatch.max())
    if not (mean <= limit and worst <= MISMATCH_MAX_FACTOR * limit):  # also catches NaN
        raise MismatchError(
            f"rollout and training log-probs differ by {mean:.3g} on average, {worst:.3g} at most, at equal weights; "
            f"expected at most {limit:g} and {MISMATCH_MAX_FACTOR * limit:g} in {_rounding_dtype(model)} "
            "(rollout_mismatch_bound)"
        )


def _check_step0(difference_M: torch.Tensor, dtype: torch.dtype) -> None:
    gap = float(difference_M.abs().max())
    if not gap <= STEP0_KL_BOUND[dtype]:
        raise MismatchError(
            f"the actor started as the reference, but before any update their log-probs differ by up to {gap:.3g}; "
            "is the reference the model that the actor was trained from (reference_adapter)?"
        )
