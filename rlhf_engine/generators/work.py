"""What is to be drawn for a step: a function of (data, seed, step), whoever draws it and whenever."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from rlhf_engine.config import TrainConfig
from rlhf_engine.data import PromptSet, batch_indices
from rlhf_engine.distributed.process_group import World
from rlhf_engine.hydra import PackedBatch
from rlhf_engine.rollout import Rollout, SamplingConfig
from rlhf_engine.rollout.request import RolloutStats
from rlhf_engine.scoring.experience import Layout
from rlhf_engine.scoring.score import FrozenScores


class Questions(NamedTuple):
    """The answers that a step learns from."""

    indices: list[int]
    """Row of the training data of each answer."""
    layout: Layout
    sample_ids: range


@dataclass(frozen=True, kw_only=True)
class Order:
    """Answers to draw: those of a step, or a share of them."""

    step: int
    """They are learned from in that step, counted from 0."""
    share: int
    """Which share of the step."""
    n_shares: int
    version: int
    """Of the policy that is to draw them."""
    prompts: tuple[tuple[int, ...], ...]
    greedy: tuple[bool, ...]
    sample_ids: tuple[int, ...]
    sampling: SamplingConfig

    @property
    def name(self) -> str:
        """For messages."""
        part = f", share {self.share + 1} of {self.n_shares}" if self.n_shares > 1 else ""
        return f"the answers of step {self.step + 1}{part}"


class Answered(NamedTuple):
    """What a generator makes of an order."""

    rollout: Rollout
    frozen: FrozenScores | None
    """Of the answers that are learned from; None where that is left to the learner"""


class StepOrders:
    """Questions and orders of every step of a run."""

    def __init__(
        self, config: TrainConfig, prompts: PromptSet, sampling: SamplingConfig, *, step: int, samples: int
    ) -> None:
        """step, samples: how far the run was when it began or was taken up: steps done, answers drawn."""
        self._config, self._prompts, self._sampling = config, prompts, sampling
        self._step, self._samples = step, samples

    def questions(self, step: int) -> Questions:
        """Of a step."""
        config = self._config
        rows = batch_indices(len(self._prompts.rows), config.prompts_per_step, step, config.seed)
        layout = Layout.of(len(rows), config.generations, with_greedy=config.facts.with_greedy)
        indices = [rows[group] for group in layout.groups]
        first = self._samples + (step - self._step) * len(indices)
        return Questions(indices, layout, range(first, first + len(indices)))

    def shares(self, questions: Questions, n_shares: int) -> list[Questions]:
        """A step's questions in so many nearly equal shares; the answers to a prompt stay together."""
        indices, layout, ids = questions
        n_prompts = self._config.prompts_per_step
        bounds = [round(i * n_prompts / n_shares) * self._config.generations for i in range(n_shares + 1)]
        return [
            Questions(indices[a:b], Layout(layout.groups[a:b], layout.greedy[a:b]), ids[a:b])
            for a, b in itertools.pairwise(bounds)
        ]

    def orders(self, step: int, version: int, n_shares: int = 1) -> list[Order]:
        """A step's answers in so many `shares`, or one for each prompt."""
        n_shares = min(n_shares, self._config.prompts_per_step)
        return [
            Order(
                step=step,
                share=i,
                n_shares=n_shares,
                version=version,
                prompts=tuple(tuple(self._prompts.ids[j]) for j in share.indices),
                greedy=tuple(share.layout.greedy),
                sample_ids=tuple(share.sample_ids),
                sampling=self._sampling,
            )
            for i, share in enumerate(self.shares(self.questions(step), n_shares))
        ]


def join(shares: Sequence[Answered]) -> Answered:
    """The shares of a step, in their order, as one."""
    if len(shares) == 1:
        return shares[0]
    rollouts = [share.rollout for share in shares]
    scored = [share.frozen for share in shares if share.frozen is not None]
    first = rollouts[0]
    rollout = Rollout(
        batch=PackedBatch.concat([rollout.batch for rollout in rollouts]),
        logprobs_M=torch.cat([rollout.logprobs_M for rollout in rollouts]),
        versions_M=torch.cat([rollout.versions_M for rollout in rollouts]),
        finish_reasons=tuple(reason for rollout in rollouts for reason in rollout.finish_reasons),
        filtered=any(rollout.filtered for rollout in rollouts),
        stats=first.stats.beside(*(rollout.stats for rollout in rollouts[1:])),
    )
    return Answered(rollout, FrozenScores.concat(scored) if len(scored) == len(shares) else None)


def gather_rollout(world: World, rollout: Rollout) -> Rollout:
    """The answers of all ranks, in the ranks' order, as one rollout."""
    if world.size == 1:
        return rollout
    plain, tensors = take_apart(rollout)
    parts = zip(world.gather(plain), world.gather_tensors(tensors), strict=True)
    return join([Answered(put_together(values, found), None) for values, found in parts]).rollout


def take_apart(rollout: Rollout) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Plain values and tensors of a rollout, by name, to be sent."""
    batch = rollout.batch
    plain = {
        "cu_seqlens": batch.cu_seqlens,
        "prompt_lens": batch.prompt_lens,
        "sample_ids": batch.sample_ids,
        "finish_reasons": rollout.finish_reasons,
        "filtered": rollout.filtered,
        "stats": dataclasses.asdict(rollout.stats),
    }
    return plain, {"tokens": batch.tokens_T, "logprobs": rollout.logprobs_M, "versions": rollout.versions_M}


def put_together(plain: Mapping[str, Any], tensors: Mapping[str, Any]) -> Rollout:
    """The rollout that `take_apart` was given; what else is among the values or tensors is left alone."""
    return Rollout(
        batch=PackedBatch(
            tokens_T=tensors["tokens"],
            cu_seqlens=tuple(plain["cu_seqlens"]),
            prompt_lens=tuple(plain["prompt_lens"]),
            sample_ids=tuple(plain["sample_ids"]),
        ),
        logprobs_M=tensors["logprobs"],
        versions_M=tensors["versions"],
        finish_reasons=tuple(plain["finish_reasons"]),
        filtered=plain["filtered"],
        stats=RolloutStats(**plain["stats"]),
    )
