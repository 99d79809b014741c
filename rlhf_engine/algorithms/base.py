"""What every algorithm has in common: the experience that it learns from, and how its objective is found.

An algorithm is a module of this package: its equations, advantages, losses, metrics, and `make_objective`. What the
options have to know of it is its entry in `rlhf_engine.config.algorithm.ALGORITHMS`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from rlhf_engine.algorithms.objective import Objective
from rlhf_engine.algorithms.policy_objective import PolicySample
from rlhf_engine.config import TrainConfig
from rlhf_engine.config.algorithm import ALGORITHMS
from rlhf_engine.hydra import PackedBatch


@dataclass(frozen=True, kw_only=True, eq=False)
class Experience:
    """The answers of a rollout that can be learned from: N drawn ones, M completion tokens. Nothing has a gradient."""

    batch: PackedBatch
    groups_N: torch.Tensor
    """int64 [N], which prompt of the step an answer belongs to"""
    scores_N: torch.Tensor
    """fp32 [N], what is maximised"""
    greedy_scores_N: torch.Tensor | None
    """fp32 [N], of the greedy answer to the same prompt, where there is one"""
    logprobs_M: torch.Tensor
    """fp32 [M], log π of the present policy, from the training forward"""
    old_logprobs_M: torch.Tensor
    """fp32 [M], log-probs that ratios are to: the training forward's, of the present policy or of the one that drew"""
    ref_logprobs_M: torch.Tensor
    """fp32 [M], log π_ref"""
    kl_M: torch.Tensor
    """fp32 [M], KL(π ‖ π_ref) by the configured estimator"""
    values_M: torch.Tensor | None
    """fp32 [M], of the critic, where there is one"""
    weights_M: torch.Tensor | None
    """fp32 [M], importance weights of answers from another engine or an older policy"""
    metrics: dict[str, float]


Made = tuple[Objective | None, dict[str, float]]
"""An objective, None where a step's answers teach nothing because all of them tie, and metrics of its making."""


class Algorithm(Protocol):
    """What a module of an algorithm has."""

    def make_objective(self, options: TrainConfig, experience: Experience, *, train_actor: bool) -> Made:
        """The objective of an update.

        Args:
            options: of the run.
            experience: what is learned from.
            train_actor: False while only a critic warms up; always True for an algorithm without one.
        """


def find_algorithm(name: str) -> Algorithm:
    """The module of an algorithm. Raises ValueError for one that is not known."""
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm: expected one of {', '.join(ALGORITHMS)}, got {name!r}")
    return cast(Algorithm, importlib.import_module(f"rlhf_engine.algorithms.{name}"))


def policy_sample(options: TrainConfig, experience: Experience, chosen: list[int] | None = None) -> PolicySample:
    """The answers of an experience as policy objectives take them. chosen: which of them; None for all."""
    batch: PackedBatch = experience.batch
    old_M, before_M = experience.old_logprobs_M, experience.logprobs_M
    if chosen is not None:
        rows_M = batch.select_completion_rows(chosen)
        old_M, before_M = old_M[rows_M], before_M[rows_M]
        batch = batch.select(chosen)
    return PolicySample(
        batch=batch,
        old_logprobs_M=old_M,
        before_logprobs_M=before_M,
        temperature=options.temperature,
        entropy_coef=options.entropy_coef,
    )


def weighted(advantages_M: torch.Tensor, experience: Experience) -> torch.Tensor:
    """Advantages times the importance weights, where there are some."""
    return advantages_M if experience.weights_M is None else advantages_M * experience.weights_M
