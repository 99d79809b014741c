"""Division of a run's steps among ranks, so that its floats are those of one process except for rounding.

Of a supervised step, each rank has a share of the rows, and gradients and metrics are summed. Of an RL step:

    draw, ask the lanes, call reward functions    each rank for its share of the prompts
    advantages, whitening, minibatches, metrics   every rank over all answers: they are gathered, a few numbers a token
    gradients of a minibatch                      each rank for its share of the units, whoever drew them; then summed

Means over a minibatch are taken over the whole of it, because every rank knows all of it. A rank without a share of a
small minibatch adds zeros. The same sums of gradients go into the same optimizer on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rlhf_engine.config import TrainConfig
from rlhf_engine.config.launch import versions
from rlhf_engine.config.run import TrainingOptions
from rlhf_engine.devices import World
from rlhf_engine.errors import ConfigError, EngineError
from rlhf_engine.runs.checkpoint import digest

# ---- before the first step -------------------------------------------------------------------------------------------

_PATHS = (
    "model_name_or_path", "actor_adapter", "reference_adapter", "reward_model_path", "dataset_name",
    "eval_dataset_name", "output_dir", "resume_from_checkpoint",
)  # fmt: skip
"""Options that machines may spell differently; what is found there is compared instead."""


def require_same_options(config: TrainingOptions, world: World) -> None:
    """Raise ConfigError for options that differ between ranks, a device that is no rank's, or shares for one alone."""
    if world.size == 1:
        if config.shard_base:
            raise ConfigError("shard_base: expected several processes to share the base, got one")
        return
    own = config.to_dict().items()
    options = {name: value for name, value in own if name not in _PATHS or isinstance(value, float)}
    _require_same(world, {**versions(), **options})
    if config.device not in ("auto", "cpu", "cuda"):
        raise ConfigError(
            f"device: expected auto, cpu or cuda in a run of {world.size} processes, of which each has its own, got "
            f"{config.device}"
        )


def require_shared_state(config: TrainingOptions, world: World) -> None:
    """Raise ConfigError for options that a whole base, trained in shares, does not have."""
    if config.optim != "adamw":
        raise ConfigError(
            f"optim: expected 'adamw' where {world.size} processes train a whole base in shares, got {config.optim!r}"
        )


def require_served(config: TrainConfig, world: World) -> None:
    """Raise ConfigError for what several ranks cannot do together, and for different options on different ranks."""
    require_same_options(config, world)
    if len(config.vllm_servers) > world.size:
        raise ConfigError(
            f"vllm_server_base_url: expected at most {world.size} addresses, one for each process, got "
            f"{len(config.vllm_servers)}"
        )
    if world.size == 1:
        return
    where = f"in a run of {world.size} processes"
    if config.method == "full_ppo":
        require_shared_state(config, world)
    if config.prompts_per_step < world.size:
        raise ConfigError(
            f"generation_batch_size: expected at least {world.size * config.generations} {where}, a prompt of "
            f"{config.generations} answers for each, got {config.generation_batch_size}"
        )


def require_same_start(world: World, *, weights: str, rows: Any, step: int) -> None:
    """Raise ConfigError where ranks have found other weights, data or checkpoints. rows: plain values."""
    if world.size == 1:
        return
    _require_same(world, {"model_name_or_path": weights}, "weights of model and adapters")
    _require_same(world, {"dataset_name": digest(rows)}, "rows")
    _require_same(world, {"resume_from_checkpoint": step}, "steps done")


def _require_same(world: World, options: Mapping[str, Any], what: str = "") -> None:
    """Raise ConfigError for an option whose value, or `what` was found there, differs between ranks."""
    everyone = world.gather(options)
    for name, first in everyone[0].items():
        for rank, other in enumerate(everyone):
            if other.get(name) != first:
                expected = f"the same {what} on every rank" if what else "the same on every rank"
                raise ConfigError(
                    f"{name}: expected {expected}, got {first!r} on rank 0 and {other.get(name)!r} on rank {rank}"
                )


def sum_gradients(world: World, parameters: Sequence[nn.Parameter]) -> None:
    """Add up the gradients of a minibatch's shares; a parameter without one on any rank stays without."""
    held = world.gather([p.grad is not None for p in parameters])
    chosen = [p for p, flags in zip(parameters, zip(*held, strict=True), strict=True) if any(flags)]
    for p in chosen:
        if p.grad is None:
            p.grad = torch.zeros_like(p, dtype=p.grad_dtype)
    world.sum([p.grad for p in chosen if p.grad is not None])


def require_same_weights(world: World, own: str, step: int) -> None:
    """Raise EngineError where ranks no longer hold the same parameters. own: fingerprint of this rank's."""
    others = world.gather(own)
    apart = [rank for rank, other in enumerate(others) if other != others[0]]
    if apart:
        raise EngineError(f"step {step}: expected the same parameters on every rank, ranks {apart} differ from rank 0")
