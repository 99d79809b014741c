"""Turns a rollout into what an update learns from: a scoring pass over all lanes, rewards, KL, and metrics.

What the reference, the reward model and the policy that drew an answer say of it is the same whenever it is asked. Such
frozen roles have a pass of their own where answers are drawn beside the updates: whoever has the time makes it, the
generator or the learner, with the same bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
from rlhf_kernels.runtime import registry
from transformers import PreTrainedTokenizerBase

from rlhf_engine.algorithms.base import Experience
from rlhf_engine.algorithms.ppo import token_kl
from rlhf_engine.algorithms.sequences import Mode, importance_weights, sequence_sums, weight_metrics
from rlhf_engine.config import TrainConfig
from rlhf_engine.data import PromptSet
from rlhf_engine.data.tokenize import warn_of_unknown
from rlhf_engine.data.types import Text
from rlhf_engine.devices import ALONE, Budget, World, is_out_of_memory, release_memory
from rlhf_engine.errors import ConfigError, MemoryLimitError, MismatchError, NonFiniteError
from rlhf_engine.hydra import HydraModel, PackedBatch, Scores
from rlhf_engine.hydra.build import PAST
from rlhf_engine.hydra.model import join_scores
from rlhf_engine.hydra.roles import fold_lanes
from rlhf_engine.rollout import PromptBatch, Rollout
from rlhf_engine.scoring.rewards import ENVIRONMENT, AnswerScorer, ScoredAnswers, mean_or_none

CHECKED_EVERY = 8
"""One in so many answers is scored in exact mode by the policy that drew it; others keep those of the draw."""


def score(
    model: HydraModel,
    batch: PackedBatch,
    roles: Sequence[str],
    budget: Budget,
    *,
    temperature: float,
    exact_kl: bool = False,
    most: int | None = None,
) -> Scores:
    """Score as `HydraModel.score` does, in groups of at most `most` tokens; one that does not fit, in smaller ones."""
    most = most or budget.tokens or model.token_budget
    options: dict[str, Any] = {"temperature": temperature, "exact_kl": exact_kl}
    lanes = max(Counter(map(itemgetter(0), fold_lanes(model.roles, roles))).values())  # of one backbone
    parts: list[Scores] = []
    for part in model.parts(batch, most):
        rows = model.count_rows(part)
        rows = lanes * rows if lanes * rows <= most else rows
        try:
            with budget.measured(rows):
                parts.append(model.score(part, roles, token_budget=most, **options))
            continue
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, MemoryLimitError) or not is_out_of_memory(error):
                raise
            if rows <= max(part.lengths):
                raise MemoryLimitError(
                    "scoring a single sequence does not fit into memory; shorten answers (max_completion_length) or "
                    "use a smaller model"
                ) from error
        release_memory(model.device)  # here rather than above, where the error still holds the failed pass's tensors
        budget.divide(rows // 2)
        parts.append(score(model, part, roles, budget, most=rows // 2, **options))
    return join_scores(parts)


def score_some(
    model: HydraModel, drawn: Rollout, role: str, budget: Budget, *, temperature: float, turn: int
) -> Scores:
    """Score one in `CHECKED_EVERY` answers by the policy that drew it, as at this `turn`."""
    n = drawn.batch.n_sequences
    checked = list(range(turn % min(n, CHECKED_EVERY), n, CHECKED_EVERY))
    scores = score(model, drawn.batch.select(checked), [role], budget, temperature=temperature)
    name = next(name for name, _ in scores.items() if name.endswith("logprobs_M"))
    logprobs_M = drawn.logprobs_M.clone()
    logprobs_M[drawn.batch.select_completion_rows(checked)] = getattr(scores, name)
    return dataclasses.replace(scores, **{name: logprobs_M})


class FrozenRoles:
    """Scores of answers by the roles that no update changes, in exact mode also by the policy that drew."""

    def __init__(
        self, model: HydraModel, config: TrainConfig, *, past: str | None, reward: bool, budget: Budget | None = None
    ) -> None:
        """Choose the roles: the reference is left to the present policy's pass where the exact KL needs both."""
        self._model, self._temperature = model, config.temperature
        reference = [] if config.kl_estimator == "exact" else ["reference"]
        self._past, self._roles = past, [*reference, *(["reward"] if reward else [])]
        self._budget = Budget(model.device) if budget is None else budget

    def __call__(self, drawn: Rollout) -> Scores | None:
        """Score answers, or None where there is no such role."""
        past, roles, few = self._past, self._roles, Scores()
        given: dict[str, Any] = {"budget": self._budget, "temperature": self._temperature}
        if past is not None and registry.is_exact():
            few = score_some(self._model, drawn, past, turn=drawn.policy_version, **given)
        elif past is not None:
            roles = [past, *roles]
        scores = score(self._model, drawn.batch, roles, **given) if roles else Scores()
        return dataclasses.replace(scores, **dict(few.items())) if past is not None or roles else None


# ---- experience ------------------------------------------------------------------------------------------------------


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
    tokenizer: PreTrainedTokenizerBase, rollout: Rollout, prompts: Sequence[Text], texts: Sequence[str]
) -> tuple[list[Text], list[str | list[Any]]]:
    """Prompts and answers for reward functions: texts, or messages where the tokenizer can tell their parts.

    Of conversations with tools they are all messages, with what an environment has added to the prompt.
    """
    if rollout.talks is not None:
        return [tuple(talk.prompt) for talk in rollout.talks], [talk.answer for talk in rollout.talks]
    batch, replies = rollout.batch, list[str | list[Any]](texts)
    for i, prompt in enumerate(prompts if getattr(tokenizer, "response_template", None) else ()):
        if not isinstance(prompt, str):
            with contextlib.suppress(ValueError, TypeError):  # of an answer without the template's form: its text
                parts = dict(tokenizer.parse_response(batch.completion_tokens(i), prefix=batch.prompt_tokens(i)))
                replies[i] = [{**parts, "content": (parts.get("content") or "").removesuffix(tokenizer.eos_token)}]
    return list(prompts), replies


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
        share: Rollout,
        own: PromptBatch,
        config: TrainConfig,
        version: int,
        whole: tuple[Rollout, PromptBatch] | None = None,
    ) -> Experience:
        """Score answers, leave out those without a reward, and correct those of another policy or engine.

        share, own: answers and prompts of this rank. version: updates of the policy by now. whole: those of all ranks,
        which the experience has; None: `share` and `own`.
        """
        model, world, temperature = self._model, self._world, config.temperature
        drawn, exact_kl = _drawn(share, own), config.kl_estimator == "exact"
        with world.together("scoring answers"):
            frozen, known, has_reward = share.frozen, Scores(), self._scorer.uses_reward_model
            critic, reward = (["critic"] if config.has_critic else []), (["reward"] if has_reward else [])
            roles = ["actor", "reference", *critic, *reward]
            if config.is_async:
                roles = ["actor", *(["reference"] if exact_kl else []), *critic]
                if frozen is None:
                    past = None if config.async_policy == "in_flight" else PAST
                    budget = self._budget if config.vllm_servers else None  # else who makes it would show in its bits
                    frozen = FrozenRoles(model, config, past=past, reward=has_reward, budget=budget)(drawn)
            if registry.is_exact() and not exact_kl and bool((drawn.versions_M == version).all()):
                roles.remove("actor")
                known = score_some(model, drawn, "actor", self._budget, temperature=temperature, turn=version)
            scores = Scores()
            if roles:
                scores = score(model, drawn.batch, roles, self._budget, temperature=temperature, exact_kl=exact_kl)
            scores = replace(scores, **dict(known.items()), **dict(() if frozen is None else frozen.items()))
            _require_finite(scores, share.logprobs_M)
            texts, ids = decode_answers(self._tokenizer, share.batch)
            twins = _twins(ids, own, alike=share.talks is None)
            rewards_N = self._rewards_of_all(share.batch, own, scores.rewards_N, twins, temperature)
        if world.size > 1:
            scores = join_scores([Scores(**part) for part in world.gather_tensors(vars(scores))])
        rollout, prompts = whole or (share, own)
        drawn = drawn if world.size == 1 else _drawn(rollout, prompts)
        assert scores.logprobs_M is not None
        behind_M = version - rollout.versions_M
        is_behind = bool((behind_M > 0).any())
        # where policies took turns within an answer, none of them can say again what it said
        past_logprobs_M = drawn.logprobs_M if scores.past_logprobs_M is None else scores.past_logprobs_M
        log_ratio_M = (past_logprobs_M if is_behind else scores.logprobs_M) - drawn.logprobs_M
        _check_agreement(model, config, scores, log_ratio_M, version)
        with world.together("rewards"):
            scored = self._reward(share, own, rewards_N, twins, texts, ids)
        if world.size > 1:
            scored = gather_answers(world, scored)
        kept = _kept(scored.totals, prompts, least=config.facts.least_drawn)
        made = _make(drawn, kept, prompts, scores, scored, config)
        rows_M = drawn.batch.select_completion_rows(kept) if kept else slice(None)
        if config.vllm_servers:
            made = correct_engine(made, log_ratio_M[rows_M], rollout.filtered, config)
        if is_behind:
            made = correct_age(made, past_logprobs_M[rows_M], config)
        metrics = _metrics(model, drawn, scores, log_ratio_M, behind_M, config)
        rewards = {name: sum(values) / len(values) for name, values in scored.logged.items()}
        skipped = {"completions/skipped": float(drawn.batch.n_sequences - len(kept))}
        sources = _source_metrics(scored, prompts.drawn)
        return replace(made, metrics={**rewards, **metrics, **skipped, **sources, **made.metrics})

    def _rewards_of_all(
        self,
        batch: PackedBatch,
        prompts: PromptBatch,
        drawn_N: torch.Tensor | None,
        twins: Mapping[int, int | None],
        temperature: float,
    ) -> torch.Tensor | None:
        """Rewards [N] of the reward role, those of greedy answers as well; None without the role."""
        if drawn_N is None or not twins:
            return drawn_N
        rewards_N = drawn_N.new_empty(batch.n_sequences)
        rewards_N[prompts.drawn] = drawn_N
        others = [i for i, twin in twins.items() if twin is None]
        if others:
            scores = score(self._model, batch.select(others), ["reward"], self._budget, temperature=temperature)
            assert scores.rewards_N is not None
            _require_finite(scores)
            rewards_N[others] = scores.rewards_N
        for i, twin in twins.items():
            if twin is not None:
                rewards_N[i] = rewards_N[twin]
        return rewards_N

    def _reward(
        self,
        rollout: Rollout,
        prompts: PromptBatch,
        rewards_N: torch.Tensor | None,
        twins: Mapping[int, int | None],
        texts: Sequence[str],
        ids: Sequence[Sequence[int]],
    ) -> ScoredAnswers:
        """Scores of all answers; a greedy one with the tokens of a drawn one has its score, to the bit."""
        rows = list(prompts.rows)
        written, replies = as_replies(self._tokenizer, rollout, self._data.written(rows), texts)
        scored = self._scorer(
            written, replies, ids, self._data.columns(rows), rollout.finished, rewards_N, rollout.environment_rewards
        )
        for i, twin in twins.items():
            if twin is not None:
                scored.totals[i] = scored.totals[twin]
        return scored


def _drawn(rollout: Rollout, prompts: PromptBatch) -> Rollout:
    """The answers that are not greedy."""
    drawn = prompts.drawn
    return rollout if len(drawn) == len(prompts) else rollout.select(drawn)


def _twins(ids: Sequence[Sequence[int]], prompts: PromptBatch, *, alike: bool) -> dict[int, int | None]:
    """Place of each greedy answer → that of a drawn one to its prompt with the same tokens; None without one.

    alike: whether answers of the same tokens are worth the same, which environments of their own need not say.
    """
    if not any(prompts.greedy):
        return {}
    greedy = [i for i, is_greedy in enumerate(prompts.greedy) if is_greedy]
    places = {(prompts.groups[i], *ids[i]): i for i in prompts.drawn}
    return {i: places.get((prompts.groups[i], *ids[i])) if alike else None for i in greedy}


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


def _require_finite(scores: Scores, rollout_logprobs_M: torch.Tensor | None = None) -> None:
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
    model: HydraModel, config: TrainConfig, scores: Scores, log_ratio_M: torch.Tensor, version: int
) -> None:
    """Rollout and training forward agree, and before the first update so do actor and reference where they must."""
    dtype = _rounding_dtype(model)
    if not config.vllm_servers:
        limit = mismatch_bound(model, config)
        mean, worst = float(log_ratio_M.abs().mean()), float(log_ratio_M.abs().max())
        if not (mean <= limit and worst <= MISMATCH_MAX_FACTOR * limit):  # also catches NaN
            raise MismatchError(
                f"rollout and training log-probs differ by {mean:.3g} on average, {worst:.3g} at most, at equal "
                f"weights; expected at most {limit:g} and {MISMATCH_MAX_FACTOR * limit:g} in {dtype} "
                "(rollout_mismatch_bound)"
            )
    if version > 0 or config.actor_adapter not in (None, config.reference_adapter):  # which brings weights of its own
        return
    assert scores.logprobs_M is not None
    assert scores.ref_logprobs_M is not None
    gap = float((scores.ref_logprobs_M - scores.logprobs_M).abs().max())
    if not gap <= STEP0_KL_BOUND[dtype]:
        raise MismatchError(
            f"the actor started as the reference, but before any update their log-probs differ by up to {gap:.3g}; "
            "is the reference the model that the actor was trained from (reference_adapter)?"
        )


def _make(
    rollout: Rollout,
    kept: Sequence[int],
    prompts: PromptBatch,
    scores: Scores,
    scored: ScoredAnswers,
    config: TrainConfig,
) -> Experience:
    """The experience of the answers that are kept: places among the drawn ones. scored: greedy ones included."""
    assert scores.logprobs_M is not None
    assert scores.ref_logprobs_M is not None
    is_scored, batch = bool(kept), rollout.batch
    if not is_scored:
        warnings.warn(_nothing_left(config), stacklevel=3)
        kept = range(batch.n_sequences)
    turn_rewards_M = _turn_rewards(rollout)
    if turn_rewards_M is not None and config.reward_weights is not None:  # as they are in the scores
        turn_rewards_M = turn_rewards_M * config.reward_weights[config.reward_funcs.index(ENVIRONMENT)]
    rows_M = batch.select_completion_rows(kept)
    batch = batch.select(kept) if len(kept) < batch.n_sequences else batch
    drawn = prompts.drawn
    places = [drawn[i] for i in kept]
    kl_M = token_kl(scores.logprobs_M, scores.ref_logprobs_M, config.kl_estimator, scores.kl_M)[rows_M]
    device = batch.device
    totals = [0.0 if total is None else total for total in scored.totals]  # None where nothing is learned at all
    scores_N = torch.tensor(totals, dtype=torch.float32)[places].to(device)
    if not scores_N.isfinite().all() or not kl_M.isfinite().all():
        culprit = "score" if not scores_N.isfinite().all() else "KL"
        raise NonFiniteError(f"{culprit} of an answer is not finite; no update was made from it")
    greedy_scores_N = None
    if any(prompts.greedy):
        by_group = {prompts.groups[i]: totals[i] for i, greedy in enumerate(prompts.greedy) if greedy}
        greedy_scores = [by_group[prompts.groups[i]] for i in places]
        greedy_scores_N = torch.tensor(greedy_scores, dtype=torch.float32, device=device)
    kl_N = sequence_sums(kl_M, batch)
    metrics = {}
    if is_scored:
        metrics = {"reward": float(scores_N.mean()), "reward_std": float(scores_N.std(correction=0))}
        if config.reward_weight is not None:
            metrics["objective"] = float((config.reward_weight * scores_N - config.beta * kl_N).mean())
        if greedy_scores_N is not None:
            metrics["reward/greedy"] = float(greedy_scores_N.mean())
    metrics |= {"kl": float(kl_N.mean()), "kl_per_token": float(kl_M.mean())}
    values_M = None if scores.values_M is None else scores.values_M[rows_M]
    if values_M is not None:
        metrics["value/mean"] = float(values_M.mean())
    return Experience(
        batch=batch,
        groups_N=torch.tensor(prompts.groups)[places].to(device),
        scores_N=scores_N,
        is_scored=is_scored,
        greedy_scores_N=greedy_scores_N,
        logprobs_M=scores.logprobs_M[rows_M],
        old_logprobs_M=scores.logprobs_M[rows_M],
        ref_logprobs_M=scores.ref_logprobs_M[rows_M],
        kl_M=kl_M,
        mean_kl=metrics["kl"],
        values_M=values_M,
        turn_rewards_M=None if turn_rewards_M is None else turn_rewards_M[rows_M],
        metrics=metrics,
    )


def _turn_rewards(rollout: Rollout) -> torch.Tensor | None:
    """Rewards [M] of turns at their last tokens; None where turns have none of their own."""
    talks, batch = rollout.talks or (), rollout.batch
    if not any(talk.turn_rewards for talk in talks):
        return None
    rewards_M = torch.zeros(batch.n_completion_tokens)
    assert batch.turns is not None
    for talk, turns, at in zip(talks, batch.turns, batch.completion_cu, strict=False):
        for reward, (first, end) in zip(talk.turn_rewards, turns, strict=True):
            at += end - first
            rewards_M[at - 1] += reward
    return rewards_M.to(batch.device)


def _kept(totals: Sequence[float | None], prompts: PromptBatch, *, least: int) -> list[int]:
    """Places of the drawn answers with a score, also of the greedy one, whose prompt has at least `least`."""
    counts, spoiled, drawn = Counter[int](), set[int](), prompts.drawn
    for group, greedy, total in zip(prompts.groups, prompts.greedy, totals, strict=True):
        counts[group] += not greedy and total is not None
        if greedy and total is None:
            spoiled.add(group)
    good = [totals[i] is not None and counts[g] >= least and g not in spoiled for i, g in enumerate(prompts.groups)]
    return [place for place, i in enumerate(drawn) if good[i]]


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


def _metrics(
    model: HydraModel,
    drawn: Rollout,
    scores: Scores,
    log_ratio_M: torch.Tensor,
    behind_M: torch.Tensor,
    config: TrainConfig,
) -> dict[str, float]:
    """Metrics of the drawn answers, apart from those of their rewards."""
    assert scores.entropies_M is not None
    batch, mismatch_M, supports = drawn.batch, log_ratio_M.abs(), drawn.batch.supports
    lengths = torch.tensor(batch.completion_lens, dtype=torch.float32)
    metrics = {
        "entropy_rollout": float(scores.entropies_M.mean()),
        "completions/unfinished_ratio": 1 - sum(drawn.finished) / len(drawn.finished),
        "mismatch/rollout_max": float(mismatch_M.max()),
        "mismatch/rollout_mean": float(mismatch_M.mean()),
        "completions/mean_length": float(lengths.mean()),
        "completions/max_length": float(lengths.max()),
    }
    if drawn.talks is not None:
        calls, failures = (sum(getattr(talk, name) for talk in drawn.talks) for name in ("calls", "failures"))
        assert batch.turns is not None
        metrics |= {
            "turns/mean": sum(map(len, batch.turns)) / batch.n_sequences,
            "tools/calls": calls / batch.n_sequences,
            "tools/failures": failures / max(1, calls),
        }
    if (shared := model.shared_rows(batch)) is not None:  # of tokens, those that are copies of a prompt
        metrics["shared_prompt_ratio"] = 1 - len(shared.rows) / batch.n_tokens
    if supports is not None and len(supports):  # words that a token was drawn among, where they are not all
        metrics |= {"support/mean": float(supports.sizes.double().mean()), "support/bytes": float(supports.n_bytes)}
    if config.is_async:
        metrics |= {"staleness/mean": float(behind_M.float().mean()), "staleness/max": float(behind_M.max())}
    return metrics


def _source_metrics(scored: ScoredAnswers, drawn: Sequence[int]) -> dict[str, float]:
    """Mean reward of each source over the drawn answers, where there are several."""
    if len(scored.sources) == 1:
        return {}
    means = {name: mean_or_none([values[i] for i in drawn]) for name, values in scored.sources.items()}
    return {f"rewards/{name}": mean for name, mean in means.items() if mean is not None}


# ---- gather ----------------------------------------------------------------------------------------------------------


def gather_answers(world: World, scored: ScoredAnswers) -> ScoredAnswers:
    """Scores of the answers of all ranks."""
    parts = world.gather(scored)
    logged = sorted({name for part in parts for name in part.logged})
    return ScoredAnswers(
        totals=[total for part in parts for total in part.totals],
        sources={name: [value for part in parts for value in part.sources[name]] for name in scored.sources},
        logged={name: [value for part in parts for value in part.logged.get(name, [])] for name in logged},
    )


# ---- off policy ------------------------------------------------------------------------------------------------------


def correct_engine(
    experience: Experience, log_ratio_M: torch.Tensor, filtered: bool, config: TrainConfig
) -> Experience:
    """Weigh another engine's answers by the training forward's ratio to it; MismatchError if it is not finite."""
    if filtered:
        raise ConfigError(
            "top_k, top_p, min_p: expected none with answers from another engine, which does not report the words that "
            "they leave, so that no ratio to its distribution can be made"
        )
    _require_finite_ratios(log_ratio_M, "training to rollout probabilities")
    batch, correction, clip_max = experience.batch, config.server_correction, config.off_policy_clip_max
    mode: Mode = "token_truncate" if correction == "none" else correction
    figures = weight_metrics(log_ratio_M, batch, mode=mode, clip_max=clip_max)
    metrics = {f"mismatch/{'rollout_k3' if name == 'k3' else name}": value for name, value in figures.items()}
    if correction != "none":
        weights_M = importance_weights(log_ratio_M, batch, mode=mode, clip_max=clip_max)
    else:
        weights_M = torch.ones_like(log_ratio_M)
    return replace(experience, weights_M=weights_M, metrics={**experience.metrics, **metrics})


def correct_age(experience: Experience, past_logprobs_M: torch.Tensor, config: TrainConfig) -> Experience:
    """Correct answers of an older policy. Raises MismatchError for a token's ratio that is not finite.

    Ratios of the loss are to that policy, or its weights are multiplied with those that answers have already.
    """
    log_ratio_M = experience.before_logprobs_M - past_logprobs_M
    _require_finite_ratios(log_ratio_M, "the present policy's to the drawing one's probabilities")
    batch, correction = experience.batch, config.correction
    mode: Mode = correction if correction in ("turn_truncate", "sequence_truncate") else "token_truncate"
    clip_max = config.off_policy_clip_max if correction.endswith("truncate") else math.inf
    figures = weight_metrics(log_ratio_M, batch, mode=mode, clip_max=clip_max)
    made = replace(
        experience, metrics={**experience.metrics, **{f"staleness/{name}": value for name, value in figures.items()}}
    )
    if correction == "behaviour":
        return replace(made, old_logprobs_M=past_logprobs_M)
    if correction == "none":
        return made
    weights_M = importance_weights(log_ratio_M, batch, mode=mode, clip_max=clip_max)
    return replace(made, weights_M=weights_M if made.weights_M is None else made.weights_M * weights_M)


def _require_finite_ratios(log_ratio_M: torch.Tensor, what: str) -> None:
    finite_M = log_ratio_M.isfinite() & log_ratio_M.exp().isfinite()
    if not finite_M.all():
        raise MismatchError(
            f"ratios of {what}: expected finite ones, got log ratios of {log_ratio_M[~finite_M][:4].tolist()} for "
            f"{int((~finite_M).sum())} of {len(log_ratio_M)} tokens; no update was made from this rollout"
        )
