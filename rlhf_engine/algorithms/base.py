"""Interface that every algorithm has in common: the answers that it learns from, its losses, and its lookup by name.

An algorithm is one module of this package. It has the equations, a class derived from `Algorithm`, the constant
`ALGORITHM` that names this class; `config.algorithm.ALGORITHMS` has its facts for options, loops and TRL's trainers.
Its class says what a token is worth (`prepare`), which losses the model computes (`terms`) and what is logged
(`measure`). The loops do the rest.

Denominators are those of a whole minibatch, so that micro-batches add up to its exact gradient.

Legend: N answers, M completion tokens packed.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Protocol, cast

import torch

from rlhf_engine.algorithms.sequences import sequence_sums, whitened
from rlhf_engine.config.algorithm import ALGORITHMS, AlgorithmOptions
from rlhf_engine.hydra import LogprobLoss, Output, PackedBatch


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenValues:
    """Answers with what is known of each of their tokens. Nothing has a gradient."""

    batch: PackedBatch
    """Prompts and answers, N sequences."""
    old_logprobs_M: torch.Tensor
    """fp32 [M], log-probs that ratios are to: the training forward's, of the present policy or of the one that drew"""
    logprobs_M: torch.Tensor | None = None
    """fp32 [M], log π before the update, which its KL is measured from; None: `old_logprobs_M`"""
    ref_logprobs_M: torch.Tensor | None = None
    """fp32 [M], log π_ref"""
    values_M: torch.Tensor | None = None
    """fp32 [M], of the critic, where there is one"""
    advantages_M: torch.Tensor | None = None
    """fp32 [M], as the algorithm prepared them; None for one that has no advantages"""
    returns_M: torch.Tensor | None = None
    """fp32 [M], what values are taught; None without a critic"""

    @property
    def before_logprobs_M(self) -> torch.Tensor:
        """fp32 [M], log π before the update."""
        return self.old_logprobs_M if self.logprobs_M is None else self.logprobs_M

    def token_values(self) -> dict[str, torch.Tensor]:
        """Values that are known of each token.

        Returns:
            Field → fp32 [M], of the fields that are not None.
        """
        return {name: values for name in TOKEN_FIELDS if (values := getattr(self, name)) is not None}


TOKEN_FIELDS = tuple(f.name for f in fields(TokenValues) if f.name.endswith("_M"))
"""Fields of `TokenValues` with a number per token."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Experience(TokenValues):
    """The answers of a rollout that can be learned from."""

    groups_N: torch.Tensor
    """int64 [N], which prompt of the step an answer belongs to"""
    scores_N: torch.Tensor
    """fp32 [N], what is maximised"""
    is_scored: bool = True
    """Whether there are scores; without any, nothing is learned."""
    greedy_scores_N: torch.Tensor | None = None
    """fp32 [N], of the greedy answer to the same prompt, where there is one"""
    kl_M: torch.Tensor
    """fp32 [M], KL(π ‖ π_ref) by the configured estimator"""
    mean_kl: float = 0.0
    """KL of an answer in nats, the mean of those that were scored together; what `kl_target` steers β by"""
    weights_M: torch.Tensor | None = None
    """fp32 [M], importance weights of answers from another engine or an older policy"""
    turn_rewards_M: torch.Tensor | None = None
    """fp32 [M], rewards of turns at their last tokens, which `scores_N` has in it; None: no turn has one of its own"""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the rollout and its scores, by name"""

    @property
    def rewards_M(self) -> torch.Tensor:
        """fp32 [M], the score where it was earned: at the ends of turns, and the rest at the last token."""
        ends_N, turns_M = self.batch.last_completion_rows_N, self.turn_rewards_M
        if turns_M is None:
            return torch.zeros_like(self.kl_M).index_add(0, ends_N, self.scores_N.to(self.kl_M.dtype))
        return turns_M.index_add(0, ends_N, (self.scores_N - sequence_sums(turns_M, self.batch)).to(turns_M.dtype))

    def select(self, chosen: Sequence[int]) -> Experience:
        """Select some of the answers.

        Args:
            chosen: places of the answers, 0 to N−1, in the order wanted; at least one.

        Returns:
            The selected answers, in the given order.

        Raises:
            ValueError: no places.
            IndexError: a place of N or more.
        """
        rows_M = self.batch.select_completion_rows(chosen)
        at_N = torch.tensor(list(chosen), dtype=torch.int64, device=self.scores_N.device)
        picked: dict[str, Any] = {name: values[rows_M] for name, values in self.token_values().items()}
        if self.greedy_scores_N is not None:
            picked["greedy_scores_N"] = self.greedy_scores_N[at_N]
        for name in ("weights_M", "turn_rewards_M"):
            if (values_M := getattr(self, name)) is not None:
                picked[name] = values_M[rows_M]
        return replace(
            self,
            batch=self.batch.select(chosen),
            groups_N=self.groups_N[at_N],
            scores_N=self.scores_N[at_N],
            kl_M=self.kl_M[rows_M],
            **picked,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch(TokenValues):
    """Answers of one forward and backward, and the denominators of the minibatch that they are a part of."""

    mask_M: torch.Tensor
    """bool [M], tokens to learn from"""
    n_tokens: float
    """Tokens of the minibatch that are learned from, whichever process has them."""
    n_answers: float
    """Answers of the minibatch that are learned from, whichever process has them."""

    @property
    def keep_N(self) -> torch.Tensor:
        """bool [N], which answers are learned from."""
        return self.mask_M[self.batch.last_completion_rows_N]


class Term(NamedTuple):
    """A loss that the model computes, and its weight in what is minimised."""

    output: Output
    """Output that the model computes; its result has a `loss`."""
    weight: float
    """Factor of the loss in what is minimised."""


@dataclass(kw_only=True)
class Measured:
    """Numbers that micro-batches give beside their gradients, by name; 0-d tensors."""

    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    """Shares of the minibatch's numbers, which add up."""
    most: dict[str, torch.Tensor] = field(default_factory=dict)
    """Numbers of which the largest counts."""

    def add(self, other: Measured) -> None:
        """Take in the numbers of another micro-batch.

        Args:
            other: its numbers, whose sums are added and whose maxima are compared.
        """
        for name, share in other.sums.items():
            self.sums[name] = self.sums[name] + share if name in self.sums else share
        for name, value in other.most.items():
            self.most[name] = torch.maximum(self.most[name], value) if name in self.most else value

    def floats(self) -> dict[str, float]:
        """Copy all numbers to the host.

        Returns:
            Name → number, sums and maxima together.
        """
        return {name: float(value) for name, value in (self.sums | self.most).items()}


class Algorithm(ABC):
    """An algorithm with its options: the answers that it learns from, and its losses."""

    answers_per_unit: int = 1
    """So many answers next to each other stay together in a micro-batch."""

    def __init__(self, options: AlgorithmOptions, *, temperature: float = 1.0, max_completion_length: int = 1) -> None:
        """Hold the options, and of the answers the temperature > 0 and the most tokens."""
        self.options, self.temperature, self.max_completion_length = options, temperature, max_completion_length

    @abstractmethod
    def prepare(self, experience: Experience) -> tuple[Experience | None, dict[str, float]]:
        """Choose the answers to learn from, with advantages and returns as far as the algorithm has them.

        Advantages are neither whitened nor weighed by importance weights: `learn_from` does both.

        Args:
            experience: scored answers of a rollout that can be learned from.

        Returns:
            The answers, or None where they teach nothing because all of them tie; and metrics by name.
        """

    @abstractmethod
    def terms(self, micro: MicroBatch) -> list[Term]:
        """Name the losses of a micro-batch, over denominators of the whole minibatch.

        Args:
            micro: answers of one forward and backward, as `prepare` returned them.

        Returns:
            Losses and their weights, whose weighted sum is minimised.
        """

    @abstractmethod
    def measure(self, micro: MicroBatch, results: Sequence[Any]) -> Measured:
        """Take metrics of a micro-batch from the results of its terms.

        `mismatch` is the largest difference of a token's log-prob to that before the update. `approx_kl` is the mean of
        ratio − 1 − log ratio per token.

        Args:
            micro: answers of the micro-batch.
            results: results of its terms, in their order.

        Returns:
            Shares of the minibatch's numbers, and numbers of which the largest counts, 0-d each.
        """

    def summarise(self, measured: Measured) -> dict[str, float]:
        """Make the metrics of a whole minibatch.

        Args:
            measured: numbers of all its micro-batches.

        Returns:
            Metrics by name.
        """
        return measured.floats()

    def learn_from(self, experience: Experience) -> tuple[Experience | None, dict[str, float]]:
        """Prepare the answers to learn from, with whitened and weighed advantages.

        Advantages are whitened where the options say so, then multiplied by the importance weights where there are
        some.

        Args:
            experience: scored answers of a rollout that can be learned from.

        Returns:
            The answers, or None where they teach nothing; and metrics by name. See `prepare`.
        """
        prepared, metrics = self.prepare(experience) if experience.is_scored else (None, {})
        if prepared is None or prepared.advantages_M is None:
            return prepared, metrics
        advantages_M = prepared.advantages_M
        if self.options.whitens_advantages:
            advantages_M = whitened(advantages_M, prepared.batch)
        if prepared.weights_M is not None:
            advantages_M = advantages_M * prepared.weights_M
        return replace(prepared, advantages_M=advantages_M), metrics


def find_algorithm(name: str) -> type[Algorithm]:
    """Find the class of an algorithm.

    Args:
        name: name of a module of `rlhf_engine.algorithms` with facts in `ALGORITHMS`.

    Returns:
        The class.

    Raises:
        ValueError: a name that is not known.
    """
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm: expected one of {', '.join(ALGORITHMS)}, got {name!r}")
    return cast(type[Algorithm], importlib.import_module(f"rlhf_engine.algorithms.{name}").ALGORITHM)


_LARGEST_ERROR = 0.2
_HORIZON = 10_000
"""Answers over which an error of 1 would double the coefficient; a step of more doubles it at once."""


def next_beta(beta: float, kl: float, *, target: float, n_answers: int) -> float:
    """The coefficient after a step, larger where the KL to the reference was above its target (Ziegler et al. 2019).

    Args:
        beta: the coefficient before, at least 0.
        kl: mean KL to the reference, nats per answer.
        target: KL wanted, nats per answer.
        n_answers: answers of the step.

    Returns:
        The coefficient after, at least 0.
    """
    error = min(max(kl / target - 1, -_LARGEST_ERROR), _LARGEST_ERROR)
    return beta * (1 + error * n_answers / max(_HORIZON, n_answers))


class Loss(Protocol):
    """Result of a loss function."""

    @property
    def loss(self) -> torch.Tensor:
        """The loss, 0-d."""


class LogprobAlgorithm(Algorithm):
    """A loss of log-probs, with an entropy bonus that is a mean over tokens."""

    @abstractmethod
    def loss(self, logprobs_M: torch.Tensor, micro: MicroBatch) -> Loss:
        """Share of a micro-batch in the loss of its minibatch.

        Args:
            logprobs_M: [M], float32; log-probs of the answers' tokens, with a gradient.
            micro: the micro-batch.

        Returns:
            The loss [] and what it has beside.
        """

    def more_sums(self, micro: MicroBatch, result: Any) -> dict[str, torch.Tensor]:
        """Further sums of the algorithm's own.

        Args:
            micro: the micro-batch.
            result: what `loss` returned.

        Returns:
            The sums [] by metric.
        """
        return {}

    def terms(self, micro: MicroBatch) -> list[Term]:
        output = LogprobLoss(
            loss=lambda logprobs_M: self.loss(logprobs_M, micro),
            temperature=self.temperature,
            entropy_coef=self.options.entropy_coef,
            denom=micro.n_tokens,
            mask_M=micro.mask_M,
        )
        return [Term(output, 1.0)]

    def measure(self, micro: MicroBatch, results: Sequence[Any]) -> Measured:
        policy, n = results[0], micro.n_tokens
        log_ratio_M = (policy.logprob - micro.before_logprobs_M) * micro.mask_M
        sums = {
            "policy/loss": policy.result.loss.detach(),
            "entropy": (policy.entropy * micro.mask_M).sum() / n,
            "approx_kl": (torch.expm1(log_ratio_M) - log_ratio_M).sum() / n,
        }
        return Measured(sums=sums | self.more_sums(micro, policy.result), most={"mismatch": log_ratio_M.abs().max()})
