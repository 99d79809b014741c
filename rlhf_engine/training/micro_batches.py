"""Micro-batches by the tokens that go through the model: a prompt of several answers counts once where they share it.

A unit is what stays together: an answer, a pair or a group of answers to one prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_engine.data import pack
from rlhf_engine.hydra import HydraModel, PackedBatch


def divide(
    model: HydraModel,
    batch: PackedBatch,
    units: Sequence[Sequence[int]],
    *,
    max_rows: int,
    max_tokens: int | None,
) -> list[list[int]]:
    """Divide units, sequences with one prompt each, into micro-batches as `data.pack` does; places of the units.

    The model is in the mode that it will run in: whether prompts are shared is its own decision. A unit of more than
    `max_tokens` (None: any number) raises ValueError.
    """
    shared = None
    if model.shares(batch):
        shared = [(batch.prompts_N[unit[0]], batch.prompt_lens[unit[0]]) for unit in units]
    return pack(unit_lengths(model, batch, units), max_rows=max_rows, max_tokens=max_tokens, shared=shared)


def unit_lengths(model: HydraModel, batch: PackedBatch, units: Sequence[Sequence[int]]) -> list[int]:
    """Count the tokens of each unit, those of a prompt once where the model shares it in its present mode."""
    shares = model.shares(batch)
    copies = [(len(unit) - 1) * batch.prompt_lens[unit[0]] if shares else 0 for unit in units]
    return [sum(batch.lengths[i] for i in unit) - more for unit, more in zip(units, copies, strict=True)]
