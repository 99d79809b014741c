"""Work items to draw for a step: a function of (data, seed, step), whoever draws them and whenever."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlhf_engine.config import TrainConfig
from rlhf_engine.data import PromptSet, batch_indices
from rlhf_engine.distributed.process_group import ALONE, World
from rlhf_engine.hydra import PackedBatch, Scores
from rlhf_engine.hydra.model import join_scores
from rlhf_engine.hydra.supports import Supports
from rlhf_engine.rollout import PromptBatch, Rollout, SamplingConfig
from rlhf_engine.rollout.request import RolloutStats


@dataclass(frozen=True, kw_only=True)
class WorkItem:
    """Answers for a generator to draw: those of a step, or a share of them."""

    step: int
    """They are learned from in that step, counted from 0."""
    share: int
    """Number of the share among those of the step, from 0."""
    n_shares: int
    version: int
    """Version of the policy that is to draw them."""
    prompts: PromptBatch
    sampling: SamplingConfig

    @property
    def name(self) -> str:
        """A name for messages."""
        part = f", share {self.share + 1} of {self.n_shares}" if self.n_shares > 1 else ""
        return f"the answers of step {self.step + 1}{part}"


class StepPrompts:
    """The prompts of every step of a run, and the work items that they make."""

    def __init__(
        self,
        config: TrainConfig,
        prompts: PromptSet,
        sampling: SamplingConfig,
        *,
        step: int,
        samples: int,
        world: World = ALONE,
    ) -> None:
        """Take the data, and how far the run is: steps done and answers drawn when it began or was taken up."""
        self._config, self._prompts, self._sampling = config, prompts, sampling
        self._step, self._samples, self._world = step, samples, world

    def prompts(self, step: int) -> PromptBatch:
        """All prompts of a step."""
        config = self._config
        n_answers = config.prompts_per_step * config.generations
        return PromptBatch.of(
            batch_indices(len(self._prompts.rows), config.prompts_per_step, step, config.seed),
            self._prompts.ids,
            generations=config.generations,
            with_greedy=config.facts.with_greedy,
            first_id=self._samples + (step - self._step) * n_answers,
        )

    def own(self, prompts: PromptBatch) -> PromptBatch:
        """This rank's share of the prompts of a step. prompts: all of them."""
        return self._shares(prompts, self._world.size)[self._world.rank]

    def items(self, step: int, version: int, n_shares: int = 1) -> list[WorkItem]:
        """The work items of this rank's share of a step: so many, or one for each prompt."""
        own = self.own(self.prompts(step))
        n_shares = min(n_shares, len(own) // self._config.generations)
        return [
            WorkItem(step=step, share=i, n_shares=n_shares, version=version, prompts=share, sampling=self._sampling)
            for i, share in enumerate(self._shares(own, n_shares))
        ]

    def _shares(self, prompts: PromptBatch, n_shares: int) -> list[PromptBatch]:
        """Prompts in so many nearly equal shares; the answers to a prompt stay together."""
        n = self._config.generations
        bounds = [round(i * (len(prompts) // n) / n_shares) * n for i in range(n_shares + 1)]
        return [prompts.part(a, b) for a, b in itertools.pairwise(bounds)]


def join(shares: Sequence[Rollout]) -> Rollout:
    """The shares of a step, in their order, as one. Frozen scores stay where every share has them."""
    if len(shares) == 1:
        return shares[0]
    frozen = [share.frozen for share in shares if share.frozen is not None]
    return Rollout(
        batch=PackedBatch.concat([share.batch for share in shares]),
        logprobs_M=torch.cat([share.logprobs_M for share in shares]),
        versions_M=torch.cat([share.versions_M for share in shares]),
        finish_reasons=tuple(reason for share in shares for reason in share.finish_reasons),
        filtered=any(share.filtered for share in shares),
        stats=shares[0].stats.beside(*(share.stats for share in shares[1:])),
        frozen=join_scores(frozen) if len(frozen) == len(shares) else None,
    )


def gather_rollout(world: World, rollout: Rollout) -> Rollout:
    """The answers of all ranks, in the ranks' order, as one rollout, without frozen scores."""
    if world.size == 1:
        return rollout
    plain, tensors = take_apart(dataclasses.replace(rollout, frozen=None))
    parts = zip(world.gather(plain), world.gather_tensors(tensors), strict=True)
    return join([put_together(values, received) for values, received in parts])


_FROZEN = "frozen/"
"""Prefix of the names of frozen scores among the tensors of a rollout."""
_WORDS, _LENGTHS = "supports/words", "supports/lengths"
"""Names of the parts of supports among them."""


def take_apart(rollout: Rollout) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Plain values and tensors of a rollout, by name, to be sent."""
    batch, frozen = rollout.batch, rollout.frozen
    plain = {
        "cu_seqlens": batch.cu_seqlens,
        "prompt_lens": batch.prompt_lens,
        "sample_ids": batch.sample_ids,
        "finish_reasons": rollout.finish_reasons,
        "filtered": rollout.filtered,
        "stats": dataclasses.asdict(rollout.stats),
        "has_frozen": frozen is not None,
        "vocabulary": None if batch.supports is None else batch.supports.vocabulary,
    }
    tensors = {"tokens": batch.tokens_T, "logprobs": rollout.logprobs_M, "versions": rollout.versions_M}
    if batch.supports is not None:
        tensors |= {_WORDS: batch.supports.words, _LENGTHS: batch.supports.lengths.int().to(batch.device)}
    scores = {} if frozen is None else {f"{_FROZEN}{name}": x for name, x in frozen.items()}
    return plain, {**tensors, **scores}


def put_together(plain: Mapping[str, Any], tensors: Mapping[str, Any]) -> Rollout:
    """The rollout that `take_apart` was given; what else is among the values or tensors is left alone."""
    scores = {name.removeprefix(_FROZEN): x for name, x in tensors.items() if name.startswith(_FROZEN)}
    supports = None
    if plain["vocabulary"] is not None:
        supports = Supports.of_lengths(tensors[_WORDS], tensors[_LENGTHS], plain["vocabulary"])
    return Rollout(
        batch=PackedBatch(
            tokens_T=tensors["tokens"],
            cu_seqlens=tuple(plain["cu_seqlens"]),
            prompt_lens=tuple(plain["prompt_lens"]),
            sample_ids=tuple(plain["sample_ids"]),
            supports=supports,
        ),
        logprobs_M=tensors["logprobs"],
        versions_M=tensors["versions"],
        finish_reasons=tuple(plain["finish_reasons"]),
        filtered=plain["filtered"],
        stats=RolloutStats(**plain["stats"]),
        frozen=Scores(**scores) if plain["has_frozen"] else None,
    )
