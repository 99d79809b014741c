"""Scores of all ranks' answers, gathered on every rank."""

from __future__ import annotations

import dataclasses

import torch

from rlhf_engine.distributed.process_group import World
from rlhf_engine.hydra import Scores
from rlhf_engine.scoring.rewards import ScoredAnswers


def gather_scores(world: World, scores: Scores) -> Scores:
    """Scores of the answers of all ranks."""
    if world.size == 1:
        return scores
    parts = world.gather_tensors({field.name: getattr(scores, field.name) for field in dataclasses.fields(scores)})
    joined: dict[str, torch.Tensor | None] = {}
    for name in parts[0]:
        shares = [part[name] for part in parts]
        joined[name] = None if shares[0] is None else torch.cat([part for part in shares if part is not None])
    return Scores(**joined)


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
