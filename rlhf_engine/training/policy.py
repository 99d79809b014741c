"""A policy: what one RL run trains, with everything that belongs to it and to no other policy.

A policy owns the slots and heads of its model, their optimizer, its random numbers, its counters and the metrics of its
updates. The base under its model may serve other policies in the same process, see `HydraModel.beside`: each then makes
the floats that it makes alone. A run has one policy, its data, its folder and the loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from torch import nn

from rlhf_engine.algorithms.base import Algorithm, Experience, find_algorithm
from rlhf_engine.algorithms.kl_controller import next_beta
from rlhf_engine.config import TrainConfig
from rlhf_engine.distributed.process_group import ALONE, World, fingerprint, fingerprint_of_all
from rlhf_engine.errors import EngineError
from rlhf_engine.generators.policy_store import Snapshot
from rlhf_engine.hydra import HydraModel
from rlhf_engine.policy.optimizer import RoleOptimizer, lr_factor
from rlhf_engine.runs.checkpoint import TrainerState, load_checkpoint, save_checkpoint
from rlhf_engine.scoring.experience import MISMATCH_MAX_FACTOR, mismatch_bound
from rlhf_engine.training.data_parallel import Ranks, require_same_weights, sum_gradients
from rlhf_engine.training.rl_inputs import resumed_state
from rlhf_engine.training.update import Schedule, nothing_learned, update


class Policy:
    """Policy that an RL run trains. Every random number is a function of (seed, step), so no stream is saved."""

    def __init__(
        self, config: TrainConfig, model: HydraModel, state: TrainerState, *, resume: Path | None, world: World = ALONE
    ) -> None:
        """Take a model as it is before any step, or go on where a checkpoint is.

        Args:
            config: options of the run.
            model: the roles of the policy, on a base that other models may share.
            state: counters of a run that begins with these options.
            resume: a checkpoint to go on from; None: begin.
            world: the ranks that learn together.

        Raises:
            ConfigError: a checkpoint of another model, optimizer or prompts, or a folder without one.
            CorruptCheckpointError: a checkpoint that differs from its manifest. It is a ConfigError.
            ValueError: a trained parameter that no role has.
        """
        self.config, self.model, self.world = config, model, world
        rates = {"actor": config.learning_rate}
        if config.has_critic:
            critic_rate = config.critic_learning_rate
            rates["critic"] = critic_rate if critic_rate is not None else config.learning_rate
        self.optimizer = RoleOptimizer.configured(model, rates, config)
        model.eval()
        self.state = state
        """Counters."""
        if resume is not None:
            found: TrainerState = load_checkpoint(resume, model, self.optimizer)
            self.state = resumed_state(found, state, resume)
        self._token_budget = model.token_budget
        if self.state.token_budget is not None:
            model.token_budget = self.state.token_budget
        # the actor starts as the reference unless it brings weights of its own
        self._starts_as_reference = config.actor_adapter is None or config.actor_adapter == config.reference_adapter
        self._unmoved = {role for role in self.optimizer.groups if not self.optimizer.has_stepped(role)}
        """Roles of which no update has been seen to change anything yet."""

    @property
    def is_reference(self) -> bool:
        """Whether the actor still is what the reference is."""
        return self._starts_as_reference and self.state.policy_version == 0

    @property
    def options(self) -> TrainConfig:
        """The options of the next step: with the KL coefficient that is adapted, where one is."""
        beta = self.state.beta
        return self.config if beta is None else dataclasses.replace(self.config, beta=beta)

    # ---- learning --------------------------------------------------------------------------------------------------

    def learn(self, experience: Experience, *, n_answers: int) -> dict[str, float]:
        """Make one step: all epochs over the answers of an experience, and the counters.

        Args:
            experience: answers of all ranks that can be learned from.
            n_answers: number of answers drawn in the step, those included that nothing is learned from.

        Returns:
            Metrics of the update, by name.

        Raises:
            EngineError: an update that changed nothing, or left ranks with different weights.
            NonFiniteError: a loss or a gradient is NaN or infinite; nothing of that minibatch was applied.
            MismatchError: log-probs of the first forward differ from those of scoring by more than the bound.
            MemoryLimitError: the update of a single answer does not fit into memory.
        """
        state, options = self.state, self.options
        train_actor = state.step >= options.critic_warmup_steps
        algorithm = make_algorithm(options, train_actor=train_actor)
        learned, metrics = algorithm.learn_from(experience)
        factor = lr_factor(
            state.step,
            kind=options.lr_scheduler_type,
            warmup_steps=options.warmup_steps,
            total_steps=options.max_steps,
        )
        self.optimizer.set_lr_factor(factor)
        before = self._fingerprints()
        self.model.train()
        schedule = self._schedule()
        found = nothing_learned(schedule)
        if learned is not None:
            seed = options.seed * 1_000_003 + state.step
            ranks = None if self.world.size == 1 else Ranks(self.world, in_step=options.shard_base)
            found = update(self.model, algorithm, learned, schedule, self.apply, seed=seed, ranks=ranks)
        self.model.eval()
        self._check_moved(before, found)
        if options.has_critic:
            self.model.trained_heads.add("value")
        if self.world.size > 1:
            self.require_same(state.step + 1)
        self.state = dataclasses.replace(
            state,
            step=state.step + 1,
            samples=state.samples + n_answers,
            policy_version=state.policy_version + int(train_actor and found["optimizer_steps"] > 0),
            micro_batch_size=_if_lowered(int(found["micro_batch_size"]), options.per_device_train_batch_size),
            token_budget=_if_lowered(self.model.token_budget, self._token_budget),
            beta=self._next_beta(experience.metrics["kl"], n_answers),
        )
        self.optimizer.is_whole = True
        adapted = {} if state.beta is None else {"beta": state.beta}
        return {**metrics, **found, **adapted, "learning_rate": options.learning_rate * factor}

    def trained(self) -> list[nn.Parameter]:
        """Every parameter that is trained.

        Returns:
            The parameters, role by role, each once.
        """
        return [p for group in self.optimizer.groups.values() for p in group.values()]

    def apply(self) -> dict[str, float]:
        """Make an optimizer step on the gradients of a minibatch, of which each rank has its share.

        Returns:
            Norm of each role's gradient before clipping, and 1 or 0 for whether it was clipped, by name.

        Raises:
            NonFiniteError: a gradient is NaN or infinite; nothing was applied.
        """
        sum_gradients(self.world, self.trained())
        return self.optimizer.step()

    def require_same(self, step: int) -> None:
        """Check that ranks hold the same parameters. They go on with the least token budget among them.

        Args:
            step: number of steps done, for the message.

        Raises:
            EngineError: ranks with different weights.
        """
        require_same_weights(self.world, fingerprint_of_all(self.trained()), step)
        self.model.token_budget = min(self.world.gather(self.model.token_budget))

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def save(self, output: Path, state: TrainerState, past: Mapping[int, Snapshot]) -> Path:
        """Write a checkpoint.

        Args:
            output: folder of the run.
            state: counters, with what the run knows of answers to come.
            past: version → policy as it was, of those that the run needs to go on.

        Returns:
            Folder of the checkpoint.

        Raises:
            CheckpointWriteError: the disk is full or fails.
            ValueError: PEFT would load another function from a slot's folder.
        """
        keep = self.config.save_total_limit
        return save_checkpoint(output, self.model, self.optimizer, state, keep=keep, policies=past)

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _schedule(self) -> Schedule:
        config = self.config
        return Schedule(
            num_epochs=config.epochs,
            num_mini_batches=config.mini_batches,
            micro_batch_size=self.state.micro_batch_size or config.per_device_train_batch_size,
            max_tokens=config.max_tokens_per_micro_batch,
            # dropout masks are the update's alone
            max_mismatch=None if config.lora_dropout else MISMATCH_MAX_FACTOR * mismatch_bound(self.model, config),
            target_kl=config.target_kl,
        )

    def _next_beta(self, kl: float, n_answers: int) -> float | None:
        """The KL coefficient after a step with a mean KL of `kl` nats; None where it does not adapt."""
        config, beta = self.config, self.state.beta
        if beta is None or config.kl_target is None:
            return None
        return next_beta(beta, kl, target=config.kl_target, horizon=config.kl_horizon, n_answers=n_answers)

    def _fingerprints(self) -> dict[str, list[int]]:
        """Fingerprints of the trained weights of every role that no update has been seen to change yet."""
        return {role: [fingerprint(w) for w in self.optimizer.weights(role)] for role in sorted(self._unmoved)}

    def _check_moved(self, before: dict[str, list[int]], found: dict[str, float]) -> None:
        """A role's first update with a gradient and a learning rate must have changed some tensor."""
        for role, tensors in before.items():
            if self.optimizer.learning_rates[role] == 0 or found.get(f"grad_norm/{role}", 0.0) == 0.0:
                continue
            if [fingerprint(w) for w in self.optimizer.weights(role)] == tensors:
                raise EngineError(
                    f"{role}: its gradient was not zero, yet the first update changed none of its tensors"
                )
            self._unmoved.remove(role)


def make_algorithm(config: TrainConfig, *, train_actor: bool = True) -> Algorithm:
    """Make the algorithm of a run with its options.

    Args:
        config: options of the run.
        train_actor: False while only a critic warms up.

    Returns:
        The algorithm, at the temperature that answers are drawn at.

    Raises:
        ValueError: an algorithm that is not known.
    """
    return find_algorithm(config.algorithm)(
        config,
        temperature=config.temperature,
        max_completion_length=config.max_completion_length,
        train_actor=train_actor,
    )


def _if_lowered(found: int, configured: int) -> int | None:
    return found if found < configured else None
