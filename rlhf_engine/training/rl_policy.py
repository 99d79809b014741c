"""The policy of an RL run: how it learns from answers, beside what every policy has.

Every random number of an update is a function of (seed, step), so no stream is saved.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rlhf_engine.algorithms.base import Algorithm, Experience, find_algorithm
from rlhf_engine.algorithms.kl_controller import next_beta
from rlhf_engine.config import TrainConfig
from rlhf_engine.distributed.process_group import ALONE, World, fingerprint
from rlhf_engine.errors import EngineError
from rlhf_engine.hydra import HydraModel
from rlhf_engine.runs.checkpoint import TrainerState
from rlhf_engine.scoring.experience import MISMATCH_MAX_FACTOR, mismatch_bound
from rlhf_engine.training.policy import Policy
from rlhf_engine.training.rl_inputs import resumed_state
from rlhf_engine.training.update import Ranks, Schedule, nothing_learned, update


class RlPolicy(Policy[TrainerState]):
    """Policy that an RL run trains."""

    config: TrainConfig

    def __init__(
        self, config: TrainConfig, model: HydraModel, state: TrainerState, *, resume: Path | None, world: World = ALONE
    ) -> None:
        """Take a model as it is before any step, or go on from the checkpoint `resume`.

        `state` has the counters of a run that begins. A checkpoint that does not fit, or that differs from its
        manifest, raises ConfigError.
        """
        rates = {"actor": config.learning_rate}
        if config.has_critic:
            critic_rate = config.critic_learning_rate
            rates["critic"] = critic_rate if critic_rate is not None else config.learning_rate
        super().__init__(config, model, rates, state, world=world)
        if resume is not None:
            self.state = resumed_state(self.load(resume, config.max_steps), state, resume)
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
        """Make one step: all epochs over the answers of an experience, and the counters; metrics by name.

        `n_answers` were drawn in the step, those included that nothing is learned from. Every failure is an
        EngineError; a loss or gradient that is not finite raises before anything of its minibatch is applied.
        """
        state, options = self.state, self.options
        train_actor = state.step >= options.critic_warmup_steps
        algorithm = make_algorithm(options, train_actor=train_actor)
        learned, metrics = algorithm.learn_from(experience)
        factor = self.schedule_rates(options.max_steps)
        before = self._fingerprints()
        self.model.train()
        schedule = self._schedule()
        measured = nothing_learned(schedule)
        if learned is not None:
            seed = options.seed * 1_000_003 + state.step
            ranks = None if self.world.size == 1 else Ranks(self.world, in_step=bool(options.shard_base))
            measured = update(self.model, algorithm, learned, schedule, self.apply, seed=seed, ranks=ranks)
        self.model.eval()
        self._check_moved(before, measured)
        if options.has_critic:
            self.model.trained_heads.add("value")
        if self.world.size > 1:
            self.require_same(state.step + 1)
        self.advance(
            samples=state.samples + n_answers,
            policy_version=state.policy_version + int(train_actor and measured["optimizer_steps"] > 0),
            micro_batch_size=_if_lowered(int(measured["micro_batch_size"]), options.per_device_train_batch_size),
            token_budget=_if_lowered(self.model.token_budget, self._token_budget),
            beta=self._next_beta(experience.metrics["kl"], n_answers),
        )
        adapted = {} if state.beta is None else {"beta": state.beta}
        return {**metrics, **measured, **adapted, "learning_rate": options.learning_rate * factor}

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
        )

    def _next_beta(self, kl: float, n_answers: int) -> float | None:
        """The KL coefficient after a step with a mean KL of `kl` nats; None where it does not adapt."""
        config, beta = self.config, self.state.beta
        if beta is None or config.kl_target is None:
            return None
        return next_beta(beta, kl, target=config.kl_target, n_answers=n_answers)

    def _fingerprints(self) -> dict[str, list[int]]:
        """Fingerprints of the trained weights of every role that no update has been seen to change yet."""
        return {role: [fingerprint(w) for w in self.optimizer.weights(role)] for role in sorted(self._unmoved)}

    def _check_moved(self, before: dict[str, list[int]], measured: dict[str, float]) -> None:
        """A role's first update with a gradient and a learning rate must have changed some tensor."""
        for role, tensors in before.items():
            if self.optimizer.learning_rates[role] == 0 or measured.get(f"grad_norm/{role}", 0.0) == 0.0:
                continue
            if [fingerprint(w) for w in self.optimizer.weights(role)] == tensors:
                raise EngineError(
                    f"{role}: its gradient was not zero, yet the first update changed none of its tensors"
                )
            self._unmoved.remove(role)


def make_algorithm(config: TrainConfig, *, train_actor: bool = True) -> Algorithm:
    """Make the algorithm of a run with its options, at the temperature that answers are drawn at.

    `train_actor` is False while only a critic warms up.
    """
    return find_algorithm(config.algorithm)(
        config,
        temperature=config.temperature,
        max_completion_length=config.max_completion_length,
        train_actor=train_actor,
    )


def _if_lowered(used: int, configured: int) -> int | None:
    return used if used < configured else None
