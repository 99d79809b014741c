"""Turns a rollout into what an update learns from: a scoring pass over all lanes, rewards, KL, and metrics."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from rlhf_kernels.runtime import registry
from transformers import PreTrainedTokenizerBase

from rlhf_engine.algorithms.base import Experience
from rlhf_engine.algorithms.ppo import token_kl
from rlhf_engine.algorithms.sequences import Mode, importance_weights, sequence_sums, weight_metrics
from rlhf_engine.config import TrainConfig
from rlhf_engine.data import PromptSet
from rlhf_engine.data.types import Text
from rlhf_engine.devices import Budget
from rlhf_engine.distributed.process_group import ALONE, World
from rlhf_engine.errors import ConfigError, MismatchError, NonFiniteError
from rlhf_engine.hydra import HydraModel, PackedBatch, Scores
from rlhf_engine.hydra.model import join_scores
from rlhf_engine.policy.build import PAST
from rlhf_engine.rollout import PromptBatch, Rollout
from rlhf_engine.scoring.rewards import AnswerScorer, ScoredAnswers, mean_or_none
from rlhf_engine.scoring.score import FrozenRoles, score, score_some
from rlhf_engine.tokenizing import warn_of_unknown

MISMATCH_BOUND = {torch.float32: 1e-4, torch.bfloat16: 0.03}
"""Largest mean |log ratio| per token between rollout and training forward at equal weights, by the backbone's dtype.
The mean tells faults from rounding, the maximum of thousands of bf16 tokens does not; figures in docs/decisions."""

MISMATCH_MAX_FACTOR = 100
"""No single token may be further off than this many times the bound of the mean: one wrong token hides in a mean."""

STEP0_KL_BOUND = {torch.float32: 1e-3, torch.bfloat16: 0.5}
"""Largest |log π − log π_ref| of a token before the first update, where the actor starts as the reference."""


def decode_answers(tokenizer: PreTrainedTokenizerBase, batch: PackedBatch) -> tuple[list[str], list[list[int]]]:
    """(texts without special tokens, token ids) of the N completions."""
    ids = [batch.completion_tokens(i) for i in range(batch.n_sequences)]
    warn_of_unknown(tokenizer, ids)
    return [str(tokenizer.decode(row, skip_special_tokens=True)) for row in ids], ids


def as_replies(
    tokenizer: PreTrainedTokenizerBase, batch: PackedBatch, prompts: Sequence[Text], texts: Sequence[str]
) -> list[str | list[Any]]:
    """Answers for reward functions: texts, or messages where the tokenizer can tell their parts, as thoughts."""
    replies: list[str | list[Any]] = list(texts)
    for i, prompt in enumerate(prompts if getattr(tokenizer, "response_template", None) else ()):
        if not isinstance(prompt, str):
            with contextlib.suppress(ValueError, TypeError):  # of an answer without the template's form: its text
                parts = dict(tokenizer.parse_response(batch.completion_tokens(i), prefix=batch.prompt_tokens(i)))
                replies[i] = [{**parts, "content": (parts.get("content") or "").removesuffix(tokenizer.eos_token)}]
    return replies


class Scoring:
    """Makes experiences of the rollouts of a run: one scoring pass of all roles, rewards, KL, and what they tell."""

    def __init__(
        self,
        model: HydraModel,
        scorer: AnswerScorer,
        tokenizer: PreTrainedTokenizerBase,
        data: PromptSet,
        world: World = ALONE,
        budget: Budget | None = None,
    ) -> None:
        """Take what scores. `PromptBatch.rows` are rows of `data`; each rank scores its share of the answers.

        budget: tokens of a pass, measured and lowered by its owner; None: the model's.
        """
        self._model, self._scorer, self._tokenizer, self._data, self._world = model, scorer, tokenizer, data, world
        self._budget = Budget(model.device) if budget is None else budget

    def experience(
        self,
        rollout: Rollout,
        prompts: PromptBatch,
        config: TrainConfig,
        *,
        policy_version: int,
        is_reference: bool,
        of_all: tuple[Rollout, PromptBatch] | None = None,
    ) -> Experience:
        """The answers of a rollout that can be learned from, scored, of all ranks."""
        world = self._world
        own = _drawn(rollout, prompts)
        own_scores = world.run_on_all_ranks("scoring answers", self._score, rollout, own, config, policy_version)
        scores = gather_scores(world, own_scores)
        all_rollout, all_prompts = of_all or (rollout, prompts)
        drawn = own if world.size == 1 else _drawn(all_rollout, all_prompts)
        assert scores.logprobs_M is not None
        assert scores.ref_logprobs_M is not None
        behind_M = policy_version - all_rollout.versions_M
        is_behind = bool((behind_M > 0).any())
        # where policies took turns within an answer, none of them can say again what it said
        past_logprobs_M = drawn.logprobs_M if scores.past_logprobs_M is None else scores.past_logprobs_M
        log_ratio_M = (past_logprobs_M if is_behind else scores.logprobs_M) - drawn.logprobs_M
        to_reference_M = scores.ref_logprobs_M - scores.logprobs_M if is_reference else None
        _check_agreement(self._model, config, log_ratio_M, to_reference_M)
        answers = rollout, prompts, own_scores.rewards_N
        own_scored = world.run_on_all_ranks("rewards", self._score_answers, *answers, config)
        scored = gather_answers(world, own_scored)
        kept = _kept(scored.totals, all_prompts, least=config.facts.least_drawn)
        metrics = {
            **{name: sum(values) / len(values) for name, values in scored.logged.items()},
            **_draw_metrics(drawn, scores, log_ratio_M, skipped=drawn.batch.n_sequences - len(kept)),
            **_shared_metrics(self._model, drawn.batch),
            **_support_metrics(drawn.batch),
            **(_age_metrics(behind_M) if config.is_async else {}),
            **_source_metrics(scored, all_prompts.drawn),
        }
        is_scored = bool(kept)
        if not is_scored:
            warnings.warn(_nothing_left(config), stacklevel=2)
            kept = list(range(drawn.batch.n_sequences))
        kept_rows_M = drawn.batch.select_completion_rows(kept)
        corrected: Corrected = (scores.logprobs_M[kept_rows_M], None, {})
        batch = drawn.batch.select(kept) if len(kept) < drawn.batch.n_sequences else drawn.batch
        if config.vllm_servers:
            corrected = correct_engine(corrected[0], log_ratio_M[kept_rows_M], batch, all_rollout.filtered, config)
        if is_behind:
            corrected = both(corrected, correct_age(corrected[0], past_logprobs_M[kept_rows_M], batch, config))
        made = _make(batch, kept, kept_rows_M, all_prompts, scores, scored, corrected, config)
        made = replace(made, is_scored=is_scored)
        return replace(made, metrics={**metrics, **corrected[2], **_score_metrics(made, config)})

    def _score(self, rollout: Rollout, drawn: Rollout, config: TrainConfig, policy_version: int) -> Scores:
        """Scores of the drawn answers by all roles; NonFiniteError names the role."""
        model, frozen, t = self._model, rollout.frozen, config.temperature
        has_reward = self._scorer.uses_reward_model
        critic, reward = (["critic"] if config.has_critic else []), (["reward"] if has_reward else [])
        exact_kl = config.kl_estimator == "exact"
        roles = ["actor", "reference", *critic, *reward]
        if config.is_async:
            roles = ["actor", *(["reference"] if exact_kl else []), *critic]
            if frozen is None:
                past = None if config.async_policy == "in_flight" else PAST
                budget = self._budget if config.vllm_servers else None  # else who makes it would show in its bits
                frozen = FrozenRoles(model, config, past=past, reward=has_reward, budget=budget)(drawn)
        present = bool((drawn.versions_M == policy_version).all())
        few = Scores()
        if registry.is_exact() and present and not exact_kl:
            roles.remove("actor")
            few = score_some(model, drawn, "actor", self._budget, temperature=t, turn=policy_version)
        given: dict[str, Any] = {"temperature": t, "exact_kl": exact_kl}
        scores = score(model, drawn.batch, roles, self._budget, **given) if roles else Scores()
        for more in (few, frozen or Scores()):
            scores = replace(scores, **dict(more.items()))
        _require_finite(rollout.logprobs_M, scores)
        return scores

    def _score_answers(
        self,
        rollout: Rollout,
        prompts: PromptBatch,
        drawn_rewards_N: torch.Tensor | None,
        config: TrainConfig,
    ) -> ScoredAnswers:
        """Scores of all answers; a greedy one with the tokens of a drawn one has its score, to the bit."""
        texts, ids = decode_answers(self._tokenizer, rollout.batch)
        places = {(prompts.groups[i], tuple(ids[i])): i for i in prompts.drawn}
        same = {i: places.get((prompts.groups[i], tuple(ids[i]))) for i, greedy in enumerate(prompts.greedy) if greedy}
        twins = {i: twin for i, twin in same.items() if twin is not None}
        reward_model_N = drawn_rewards_N
        if drawn_rewards_N is not None and same:
            reward_model_N = drawn_rewards_N.new_empty(rollout.batch.n_sequences)
            reward_model_N[prompts.drawn] = drawn_rewards_N
            others = [i for i, twin in same.items() if twin is None]
            if others:
                chosen = rollout.batch.select(others)
                scores = score(self._model, chosen, ["reward"], self._budget, temperature=config.temperature)
                assert scores.rewards_N is not None
                if not scores.rewards_N.isfinite().all():
                    raise NonFiniteError(
                        "scores of the reward role are not finite; no update was made from this rollout"
                    )
                reward_model_N[others] = scores.rewards_N
            for i, twin in twins.items():
                reward_model_N[i] = reward_model_N[twin]
        rows = list(prompts.rows)
        written = self._data.written(rows)
        replies = as_replies(self._tokenizer, rollout.batch, written, texts)
        scored = self._scorer(written, replies, ids, self._data.columns(rows), rollout.finished, reward_model_N)
        return replace(scored, totals=[scored.totals[twins.get(i, i)] for i in range(len(ids))])


def _drawn(rollout: Rollout, prompts: PromptBatch) -> Rollout:
    """The answers that are not greedy."""
    drawn = prompts.drawn
    return rollout if len(drawn) == len(prompts) else rollout.select(drawn)


def mismatch_bound(model: HydraModel, config: TrainConfig) -> float:
    """Largest mean |log ratio| per token at equal weights, by the configuration or the dtype; 0 in exact mode."""
    if config.rollout_mismatch_bound is not None and not config.vllm_servers:  # else it is the server's
        return config.rollout_mismatch_bound
    if config.exact:
        return 0.0
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
    for name, tensor in named.items():
        if tensor is not None and not tensor.isfinite().all():
            raise NonFiniteError(f"{name} are not finite; no update was made from this rollout")


def _check_agreement(
    model: HydraModel, config: TrainConfig, log_ratio_M: torch.Tensor, to_reference_M: torch.Tensor | None
) -> None:
    """Rollout and training forward agree, and before the first update so do actor and reference where they must."""
    if not config.vllm_servers:
        _check_mismatch(log_ratio_M.abs(), model, config)
    if to_reference_M is not None:
        _check_step0(to_reference_M, _rounding_dtype(model))


def _make(
    batch: PackedBatch,
    kept: Sequence[int],
    rows_M: torch.Tensor,
    prompts: PromptBatch,
    scores: Scores,
    scored: ScoredAnswers,
    corrected: Corrected,
    config: TrainConfig,
) -> Experience:
    """The experience of the answers that are kept: places among the drawn ones. scored: greedy ones included."""
    assert scores.logprobs_M is not None
    assert scores.ref_logprobs_M is not None
    drawn = prompts.drawn
    places = [drawn[i] for i in kept]
    kl_M = token_kl(scores.logprobs_M, scores.ref_logprobs_M, config.kl_estimator, scores.kl_M)[rows_M]
    device = batch.device
    totals = [0.0 if total is None else total for total in scored.totals]  # None where nothing is learned at all
    scores_N = torch.tensor([totals[i] for i in places], dtype=torch.float32, device=device)
    if not scores_N.isfinite().all() or not kl_M.isfinite().all():
        culprit = "score" if not scores_N.isfinite().all() else "KL"
        raise NonFiniteError(f"{culprit} of an answer is not finite; no update was made from it")
    greedy_scores_N = None
    if any(prompts.greedy):
        by_group = {prompts.groups[i]: totals[i] for i, greedy in enumerate(prompts.greedy) if greedy}
        greedy_scores = [by_group[prompts.groups[i]] for i in places]
        greedy_scores_N = torch.tensor(greedy_scores, dtype=torch.float32, device=device)
    return Experience(
        batch=batch,
        groups_N=torch.tensor([prompts.groups[i] for i in places], device=device),
        scores_N=scores_N,
        greedy_scores_N=greedy_scores_N,
        logprobs_M=scores.logprobs_M[rows_M],
        old_logprobs_M=corrected[0],
        ref_logprobs_M=scores.ref_logprobs_M[rows_M],
        kl_M=kl_M,
        values_M=None if scores.values_M is None else scores.values_M[rows_M],
        weights_M=corrected[1],
    )


def _kept(totals: Sequence[float | None], prompts: PromptBatch, *, least: int) -> list[int]:
    """Places of the drawn answers with a score, also of the greedy one, whose prompt has at least `least`."""
    answers = list(zip(prompts.groups, prompts.greedy, totals, strict=True))
    spoiled = {group for group, greedy, total in answers if greedy and total is None}
    drawn = [(group, total) for group, greedy, total in answers if not greedy]
    good = [i for i, (group, total) in enumerate(drawn) if total is not None and group not in spoiled]
    counts = Counter(drawn[i][0] for i in good)
    return [i for i in good if counts[drawn[i][0]] >= least]


def _nothing_left(config: TrainConfig) -> str:
    """Reason why no answer of a step can be learned from, the same for every step."""
    needed = (
        "a drawn answer and the greedy one"
        if config.facts.with_greedy
        else f"{config.facts.least_drawn} of its answers"
    )
    return (
        f"reward_funcs: no prompt of a step has rewards for {needed}, which {config.algorithm} needs; nothing is "
        "learned in such a step"
    )


def _draw_metrics(drawn: Rollout, scores: Scores, log_ratio_M: torch.Tensor, *, skipped: int) -> dict[str, float]:
    assert scores.entropies_M is not None
    mismatch_M = log_ratio_M.abs()
    lengths = torch.tensor(drawn.batch.completion_lens, dtype=torch.float32)
    return {
        "entropy_rollout": float(scores.entropies_M.mean()),
        "completions/unfinished_ratio": 1 - sum(drawn.finished) / len(drawn.finished),
        "completions/skipped": float(skipped),
        "mismatch/rollout_max": float(mismatch_M.max()),
        "mismatch/rollout_mean": float(mismatch_M.mean()),
        "completions/mean_length": float(lengths.mean()),
        "completions/max_length": float(lengths.max()),
    }


def _shared_metrics(model: HydraModel, batch: PackedBatch) -> dict[str, float]:
    """Share of the tokens that are copies of a prompt, and go through a backbone once for all."""
    shared = model.shared_rows(batch)
    return {} if shared is None else {"shared_prompt_ratio": 1 - len(shared.rows) / batch.n_tokens}


def _support_metrics(batch: PackedBatch) -> dict[str, float]:
    """Mean number of words that a token was drawn among, and the bytes that they take, where they are not all."""
    supports = batch.supports
    if supports is None or not len(supports):
        return {}
    return {"support/mean": float(supports.sizes.double().mean()), "support/bytes": float(supports.n_bytes)}


def _age_metrics(behind_M: torch.Tensor) -> dict[str, float]:
    return {"staleness/mean": float(behind_M.float().mean()), "staleness/max": float(behind_M.max())}


def _source_metrics(scored: ScoredAnswers, drawn: Sequence[int]) -> dict[str, float]:
    """Mean reward of each source over the drawn answers, where there are several."""
    means = {name: mean_or_none([values[i] for i in drawn]) for name, values in scored.sources.items()}
    return {f"rewards/{name}": mean for name, mean in means.items() if mean is not None} if len(means) > 1 else {}


def _score_metrics(experience: Experience, config: TrainConfig) -> dict[str, float]:
    kl_N = sequence_sums(experience.kl_M, experience.batch)
    reward, reward_std = float(experience.scores_N.mean()), float(experience.scores_N.std(correction=0))
    metrics = {"reward": reward, "reward_std": reward_std} if experience.is_scored else {}
    metrics |= {"kl": float(kl_N.mean()), "kl_per_token": float(experience.kl_M.mean())}
    if experience.is_scored and config.reward_weight is not None:
        metrics["objective"] = float((config.reward_weight * experience.scores_N - config.beta * kl_N).mean())
    if experience.is_scored and experience.greedy_scores_N is not None:
        metrics["reward/greedy"] = float(experience.greedy_scores_N.mean())
    if experience.values_M is not None:
        metrics["value/mean"] = float(experience.values_M.mean())
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


# ---- gather ----------------------------------------------------------------------------------------------------------


def gather_scores(world: World, scores: Scores) -> Scores:
    """Scores of the answers of all ranks."""
    if world.size == 1:
        return scores
    return join_scores([Scores(**part) for part in world.gather_tensors(vars(scores))])


def gather_answers(world: World, scored: ScoredAnswers) -> ScoredAnswers:
    """Scores of the answers of all ranks."""
    if world.size == 1:
        return scored
    parts = world.gather(scored)
    logged = sorted({name for part in parts for name in part.logged})
    return ScoredAnswers(
        totals=[total for part in parts for total in part.totals],
        sources={name: [value for part in parts for value in part.sources[name]] for name in scored.sources},
        logged={name: [value for part in parts for value in part.logged.get(name, [])] for name in logged},
    )


# ---- off policy ------------------------------------------------------------------------------------------------------


Corrected: TypeAlias = tuple[torch.Tensor, torch.Tensor | None, dict[str, float]]
"""Log-probs [M] that the loss takes for the policy before the update, weights [M] of its advantages, and metrics."""


def correct_engine(
    logprobs_M: torch.Tensor, log_ratio_M: torch.Tensor, batch: PackedBatch, filtered: bool, config: TrainConfig
) -> Corrected:
    """Correct another engine's answers by the training forward's ratio to it; MismatchError if not finite."""
    if filtered:
        raise ConfigError(
            "top_k, top_p, min_p: expected none with answers from another engine, which does not report the words that "
            "they leave, so that no ratio to its distribution can be made"
        )
    _require_finite_ratios(log_ratio_M, "training to rollout probabilities")
    correction, clip_max = config.server_correction, config.off_policy_clip_max
    mode: Mode = "token_truncate" if correction == "none" else correction
    figures = weight_metrics(log_ratio_M, batch, mode=mode, clip_max=clip_max)
    metrics = {f"mismatch/{'rollout_k3' if name == 'k3' else name}": value for name, value in figures.items()}
    if correction != "none":
        weights_M = importance_weights(log_ratio_M, batch, mode=mode, clip_max=clip_max)
    else:
        weights_M = torch.ones_like(log_ratio_M)
    return logprobs_M, weights_M, metrics


def correct_age(
    logprobs_M: torch.Tensor, past_logprobs_M: torch.Tensor, batch: PackedBatch, config: TrainConfig
) -> Corrected:
    """Correct answers of an older policy. Raises MismatchError for a token's ratio that is not finite."""
    log_ratio_M = logprobs_M - past_logprobs_M
    _require_finite_ratios(log_ratio_M, "the present policy's to the drawing one's probabilities")
    correction = config.correction
    mode: Mode = "sequence_truncate" if correction == "sequence_truncate" else "token_truncate"
    clip_max = config.off_policy_clip_max if correction.endswith("truncate") else math.inf
    figures = weight_metrics(log_ratio_M, batch, mode=mode, clip_max=clip_max)
    metrics = {f"staleness/{name}": value for name, value in figures.items()}
    if correction == "behaviour":
        return past_logprobs_M, None, metrics
    if correction == "none":
        return logprobs_M, None, metrics
    return logprobs_M, importance_weights(log_ratio_M, batch, mode=mode, clip_max=clip_max), metrics


def both(engine: Corrected, age: Corrected) -> Corrected:
    """Corrections of another engine's answers by an older policy: π_old of the age, and both weights' product."""
    (_, weights_M, metrics), (old_logprobs_M, more_M, more_metrics) = engine, age
    if more_M is not None:
        weights_M = more_M if weights_M is None else weights_M * more_M
    return old_logprobs_M, weights_M, {**metrics, **more_metrics}


def _require_finite_ratios(log_ratio_M: torch.Tensor, what: str) -> None:
    finite_M = log_ratio_M.isfinite() & log_ratio_M.exp().isfinite()
    if not finite_M.all():
        raise MismatchError(
            f"ratios of {what}: expected finite ones, got log ratios of {log_ratio_M[~finite_M][:4].tolist()} for "
            f"{int((~finite_M).sum())} of {len(log_ratio_M)} tokens; no update was made from this rollout"
        )
