"""Numbers that need a model's forward pass: rewards and exact KL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlhf_engine.errors import NonFiniteError
from rlhf_engine.hydra.batch import PackedBatch
from rlhf_engine.hydra.model import HydraModel
from rlhf_engine.hydra.outputs import LogprobPair, Output, Rewards

Tokens = Sequence[Sequence[int]]


def rewards(model: HydraModel, prompts: Tokens, completions: Tokens) -> torch.Tensor:
    """Rewards of N answers by the role `reward`, fp32 [N] on the host. Raises NonFiniteError for NaN or infinity."""
    found = [part.float().cpu() for _, part in _in_parts(model, prompts, completions, Rewards(role="reward"))]
    rewards_N = torch.cat(found)
    bad = ~rewards_N.isfinite()
    if bad.any():
        place = int(bad.int().argmax())
        raise NonFiniteError(f"reward of answer {place} is {float(rewards_N[place])}")
    return rewards_N


def divergences(model: HydraModel, role: str, prompts: Tokens, completions: Tokens) -> list[float]:
    """KL(role ‖ reference) over the whole vocabulary at each token, in nats, summed per answer, at temperature 1."""
    sums: list[float] = []
    for batch, result in _in_parts(model, prompts, completions, LogprobPair(role=role, reference="reference")):
        lengths = [length - prompt for length, prompt in zip(batch.lengths, batch.prompt_lens, strict=True)]
        sums += [float(part.sum(dtype=torch.float64)) for part in result.kl.split(lengths)]
    return sums


@torch.no_grad()
def _in_parts(model: HydraModel, prompts: Tokens, completions: Tokens, output: Output) -> list[tuple[PackedBatch, Any]]:
    """An output of groups of consecutive sequences within the model's token budget."""
    batch = PackedBatch.from_lists(prompts, completions, device=model.device)
    return [(part, found) for part, (found,) in model.in_parts(batch, (output,))]
