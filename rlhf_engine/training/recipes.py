"""From scored answers to the objective of an update: one recipe per algorithm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from rlhf_engine.algorithms import best_of_n, grpo, online_dpo, reinforce, remax, rloo
from rlhf_engine.algorithms.best_of_n import BestObjective
from rlhf_engine.algorithms.grpo import GrpoObjective
from rlhf_engine.algorithms.online_dpo import DpoObjective
from rlhf_engine.algorithms.policy_gradient import PolicyGradientObjective
from rlhf_engine.algorithms.policy_objective import PolicySample
from rlhf_engine.algorithms.ppo import Experience, PpoObjective, PpoOptions, advantages, token_rewards
from rlhf_engine.algorithms.reinforce import ReinforceObjective
from rlhf_engine.algorithms.rloo import ProximalObjective
from rlhf_engine.algorithms.sequences import spread
from rlhf_engine.algorithms.update import Objective
from rlhf_engine.config import TrainConfig
from rlhf_engine.hydra import PackedBatch
from rlhf_engine.training.experience import ScoredRollout


class Lesson(NamedTuple):
    """What an update learns."""

    objective: Objective | None
    """None where a step's answers teach nothing: all ties"""
    metrics: dict[str, float]


def make_lesson(config: TrainConfig, scored: ScoredRollout, *, train_actor: bool = True) -> Lesson:
    """The configured algorithm's objective for these answers. train_actor: False while only a critic warms up."""
    if config.has_critic:
        return _WITH_CRITIC[config.algorithm](config, scored, train_actor)
    return _RECIPES[config.algorithm](config, scored)


def ppo_experience(config: TrainConfig, scored: ScoredRollout) -> Experience:
    """Advantages and returns by PPO's token rewards."""
    assert scored.values_M is not None
    advantages_M, returns_M = advantages(
        token_rewards(scored.kl_M, scored.scores_N, scored.batch, config.beta),
        scored.values_M,
        scored.batch,
        gamma=config.gamma,
        lam=config.lam,
        whiten_rewards=config.whiten_rewards,
        whiten_advantages=config.whiten_advantages,
    )
    return Experience(
        batch=scored.batch,
        old_logprobs_M=scored.old_logprobs_M,
        old_values_M=scored.values_M,
        advantages_M=_weighted(advantages_M, scored),
        returns_M=returns_M,
        before_logprobs_M=scored.logprobs_M,
    )


def _ppo(config: TrainConfig, scored: ScoredRollout, train_actor: bool) -> Lesson:
    options = PpoOptions(
        cliprange=config.cliprange,
        cliprange_value=config.cliprange_value,
        vf_coef=config.vf_coef,
        entropy_coef=config.entropy_coef,
        temperature=config.temperature,
        train_actor=train_actor,
    )
    return Lesson(PpoObjective(ppo_experience(config, scored), options), {})


def _reinforce(config: TrainConfig, scored: ScoredRollout, train_actor: bool) -> Lesson:
    assert scored.values_M is not None
    returns_M = reinforce.returns(scored.scores_N, scored.kl_M, scored.batch, beta=config.beta, gamma=config.gamma)
    objective = ReinforceObjective(
        _sample(config, scored),
        _weighted(returns_M - scored.values_M, scored),
        scored.values_M,
        returns_M,
        vf_coef=config.vf_coef,
        train_actor=train_actor,
    )
    return Lesson(objective, {})


def _remax(config: TrainConfig, scored: ScoredRollout) -> Lesson:
    assert scored.greedy_scores_N is not None
    advantages_M = remax.advantages(
        scored.scores_N,
        scored.greedy_scores_N,
        scored.kl_M,
        scored.batch,
        beta=config.beta,
        kl_in=config.kl_in,
        gamma=config.gamma,
        clip=config.advantage_clip,
    )
    objective = PolicyGradientObjective(
        _sample(config, scored),
        _weighted(advantages_M, scored),
        divide_by_own_length=config.divide_by_own_length,
        kl_coef=config.beta if config.kl_in == "loss" else 0.0,
        ref_logprobs_M=scored.ref_logprobs_M,
    )
    return Lesson(objective, {"advantage_std": float((scored.scores_N - scored.greedy_scores_N).std(correction=0))})


def _rloo(config: TrainConfig, scored: ScoredRollout) -> Lesson:
    returns_N = rloo.returns(scored.scores_N, scored.kl_M, scored.batch, beta=config.beta)
    advantages_N = rloo.leave_one_out(returns_N, scored.groups_N)
    metrics = {"advantage_std": float(advantages_N.std(correction=0))}
    sample = _sample(config, scored)
    if config.chosen_loss_type == "vanilla":
        return Lesson(PolicyGradientObjective(sample, _weighted(spread(advantages_N, scored.batch), scored)), metrics)
    if scored.weights_M is not None:  # one ratio per answer, as the configuration asks for
        advantages_N = advantages_N * scored.weights_M[scored.batch.last_completion_rows_N]
    clip = config.cliprange
    return Lesson(ProximalObjective(sample, advantages_N, clip_low=clip, clip_high=clip), metrics)


def _grpo(config: TrainConfig, scored: ScoredRollout) -> Lesson:
    advantages_N = grpo.advantages(scored.scores_N, scored.groups_N, scale_rewards=config.scale_rewards)
    objective = GrpoObjective(
        _sample(config, scored),
        _weighted(spread(advantages_N, scored.batch), scored),
        scored.ref_logprobs_M,
        loss_type=config.chosen_loss_type,  # type: ignore[arg-type]
        max_completion_length=config.max_completion_length,
        beta=config.beta,
        clip_low=config.cliprange,
        clip_high=config.cliprange,
    )
    return Lesson(objective, {"advantage_std": float(advantages_N.std(correction=0))})


def _online_dpo(config: TrainConfig, scored: ScoredRollout) -> Lesson:
    pairs = online_dpo.best_and_worst(scored.scores_N, scored.groups_N)
    prompts = len(set(scored.groups_N.tolist()))
    metrics = {"pairs/tied_ratio": 1 - len(pairs) / prompts}
    if not pairs:
        return Lesson(None, metrics)
    chosen = [i for pair in pairs for i in pair]
    rows_M = scored.batch.select_completion_rows(chosen)
    objective = DpoObjective(
        _sample(config, scored, chosen),
        scored.ref_logprobs_M[rows_M],
        beta=config.beta,
        loss_type=config.chosen_loss_type,  # type: ignore[arg-type]
    )
    gap = [float(scored.scores_N[w] - scored.scores_N[l]) for w, l in pairs]
    return Lesson(objective, {**metrics, "pairs/score_gap": sum(gap) / len(gap)})


def _best_of_n(config: TrainConfig, scored: ScoredRollout) -> Lesson:
    chosen = best_of_n.best(scored.scores_N, scored.groups_N)
    best_N = scored.scores_N[chosen]
    return Lesson(BestObjective(_sample(config, scored, chosen)), {"reward/best": float(best_N.mean())})


_WITH_CRITIC: Mapping[str, Callable[[TrainConfig, ScoredRollout, bool], Lesson]] = {
    "ppo": _ppo,
    "reinforce": _reinforce,
}
_RECIPES: Mapping[str, Callable[[TrainConfig, ScoredRollout], Lesson]] = {
    "remax": _remax,
    "rloo": _rloo,
    "grpo": _grpo,
    "online_dpo": _online_dpo,
    "best_of_n": _best_of_n,
}


def _sample(config: TrainConfig, scored: ScoredRollout, chosen: list[int] | None = None) -> PolicySample:
    batch: PackedBatch = scored.batch
    old_M, before_M = scored.old_logprobs_M, scored.logprobs_M
    if chosen is not None:
        rows_M = batch.select_completion_rows(chosen)
        old_M, before_M = old_M[rows_M], before_M[rows_M]
        batch = batch.select(chosen)
    return PolicySample(
        batch=batch,
        old_logprobs_M=old_M,
        before_logprobs_M=before_M,
        temperature=config.temperature,
        entropy_coef=config.entropy_coef,
    )


def _weighted(advantages_M: torch.Tensor, scored: ScoredRollout) -> torch.Tensor:
    return advantages_M if scored.weights_M is None else advantages_M * scored.weights_M
