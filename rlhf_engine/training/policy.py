"""A policy: what one run trains, with everything that belongs to it and to no other policy.

A policy owns the slots and heads of its model, their optimizer, its random numbers, its counters and the metrics of its
updates. The base under its model may serve other policies in the same process, see `HydraModel.beside`: each then makes
the floats that it makes alone. A run has one policy, its data, its folder and the loop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import nn

from rlhf_engine.config.run import TrainingOptions
from rlhf_engine.distributed.process_group import ALONE, World, fingerprint_of_all
from rlhf_engine.generators.work import Snapshot
from rlhf_engine.hydra import HydraModel
from rlhf_engine.policy.optimizer import RoleOptimizer, lr_factor
from rlhf_engine.runs.checkpoint import Counters, load_checkpoint, save_checkpoint
from rlhf_engine.runs.folder import RECORD_FILE
from rlhf_engine.training.data_parallel import require_same_weights, sum_gradients

State = TypeVar("State", bound=Counters)


class Policy(Generic[State]):
    """Model with what is trained of it, its optimizer and its counters."""

    def __init__(
        self,
        config: TrainingOptions,
        model: HydraModel,
        learning_rates: Mapping[str, float],
        state: State,
        *,
        world: World = ALONE,
    ) -> None:
        """Take a model as it is before any step. `state` has the counters of a run that begins.

        Each role has a learning rate of what it alone trains, before any schedule.
        """
        self.config, self.model, self.world = config, model, world
        self.optimizer = RoleOptimizer.configured(model, learning_rates, config, world)
        self.state = state
        """Counters."""
        model.eval()

    def load(self, checkpoint: Path, total_steps: int) -> State:
        """Load a checkpoint into model and optimizer, and return its counters; the policy's own stay as they are.

        ConfigError says that it does not fit or differs from its manifest. `total_steps` of the whole run set the
        schedule.
        """
        state = load_checkpoint(checkpoint, self.model, self.optimizer, type(self.state))
        # a record of an older version, or a damaged one, has no rate to compare with
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            record = json.loads((checkpoint.parent / RECORD_FILE).read_text(encoding="utf-8"))
            runs = (record["config"], record["total_steps"]), (vars(self.config), total_steps)
            before, now = (o["learning_rate"] * _factor(state.step, o, total) for o, total in runs)
            if self.world.is_main and abs(now - before) > 1e-9 * before:
                old, new = (f"{o['lr_scheduler_type']} over {total} steps" for o, total in runs)
                warnings.warn(
                    f"learning_rate: step {state.step + 1} goes on at {now:g}, by {new}; the run of {checkpoint} had "
                    f"{before:g} for it, by {old}",
                    stacklevel=3,
                )
        return state

    # ---- a step ----------------------------------------------------------------------------------------------------

    def schedule_rates(self, total_steps: int) -> float:
        """Set the learning rates of the next step by its place in the schedule; their common factor, in [0, 1]."""
        factor = _factor(self.state.step, vars(self.config), total_steps)
        self.optimizer.set_lr_factor(factor)
        return factor

    def trained(self) -> list[nn.Parameter]:
        """Every parameter that is trained, or this rank's share of it, role by role, each once."""
        return [p for group in self.optimizer.groups.values() for p in group.values()]

    def apply(self) -> dict[str, float]:
        """Make an optimizer step on the gradients of a minibatch, of which each rank has its share.

        The metrics are the norm of each role's gradient before clipping, and 1 or 0 for whether it was clipped. A
        gradient that is not finite raises NonFiniteError, and nothing is applied.
        """
        sum_gradients(self.world, self.optimizer.replicated())
        return self.optimizer.step()

    def advance(self, **counters: Any) -> None:
        """Count a step that is done, and set other counters that it changed."""
        state = self.state
        self.state = dataclasses.replace(state, step=state.step + 1, **counters)  # type: ignore[type-var]  # a dataclass
        self.optimizer.is_whole = True

    def require_same(self, step: int) -> None:
        """Check that ranks hold the same parameters after so many steps; EngineError where they differ.

        They go on with the least token budget among them.
        """
        require_same_weights(self.world, fingerprint_of_all(self.optimizer.replicated()), step)
        self.model.token_budget = min(self.world.gather(self.model.token_budget))

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def save(self, output: Path, *, state: State | None = None, past: Mapping[int, Snapshot] | None = None) -> Path:
        """Write a checkpoint of the policy's counters or `state`, with the `past` policies that the run needs to go on.

        A disk that is full or fails raises CheckpointWriteError.
        """
        keep = self.config.save_total_limit
        state = self.state if state is None else state
        return save_checkpoint(output, self.model, self.optimizer, state, keep=keep, policies=past)


def _factor(step: int, options: Mapping[str, Any], total_steps: int) -> float:
    """`lr_factor` by a run's options."""
    kind, warmup_steps = options["lr_scheduler_type"], options["warmup_steps"]
    return lr_factor(step, kind=kind, warmup_steps=warmup_steps, total_steps=total_steps)
