"""Numbers that need a model's forward pass: rewards, exact KL, and log-probs of texts that are there already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlhf_engine.errors import NonFiniteError
from rlhf_engine.hydra.batch import PackedBatch
from rlhf_engine.hydra.model import HydraModel
from rlhf_engine.hydra.outputs import LogprobPair, Logprobs, Output, Rewards

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
    return _sums(model, prompts, completions, LogprobPair(role=role, reference="reference"), "kl")


def surprises(model: HydraModel, role: str, prompts: Tokens, completions: Tokens) -> list[float]:
    """−Σ log p(token) of each text under a role, in nats, at temperature 1."""
    return [-value for value in _sums(model, prompts, completions, Logprobs(role=role), "logprob")]


@torch.no_grad()
def _in_parts(model: HydraModel, prompts: Tokens, completions: Tokens, output: Output) -> list[tuple[PackedBatch, Any]]:
    """An output of groups of consecutive sequences within the model's token budget."""
    batch = PackedBatch.from_lists(prompts, completions, device=model.device)
    return [(part, found) for part, (found,) in model.in_parts(batch, (output,))]


def _sums(model: HydraModel, prompts: Tokens, completions: Tokens, output: Output, name: str) -> list[float]:
    """One result of an output, summed over the tokens of each completion."""
    found: list[float] = []
    for batch, result in _in_parts(model, prompts, completions, output):
        lengths = [length - prompt for length, prompt in zip(batch.lengths, batch.prompt_lens, strict=True)]
        found += [float(part.sum(dtype=torch.float64)) for part in getattr(result, name).split(lengths)]
    return found
