"""The policy of an RL run: how it learns from answers, beside what every policy has.

Every random number of an update is a function of (seed, step), so no stream is saved.
"""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import replace
from pathlib import Path

from rlhf_engine.algorithms.base import Algorithm, Experience, find_algorithm, next_beta
from rlhf_engine.config import TrainConfig
from rlhf_engine.data import PromptSet
from rlhf_engine.devices import ALONE, Budget, World, fingerprint, read_memory
from rlhf_engine.errors import ConfigError, EngineError
from rlhf_engine.hydra import HydraModel
from rlhf_engine.runs.checkpoint import TrainerState, digest
from rlhf_engine.scoring.experience import MISMATCH_MAX_FACTOR, mismatch_bound
from rlhf_engine.training.run import Policy
from rlhf_engine.training.update import Ranks, Schedule, nothing_learned, update

_ANY = 2**62  # more tokens than there are


def new_state(config: TrainConfig, train_set: PromptSet, eval_set: PromptSet | None) -> TrainerState:
    """Counters of a run that begins. eval_set: held-out prompts."""
    beta = None if config.kl_target is None else config.beta
    judged_by = None
    if eval_set is not None:  # what an evaluation's reward is measured by
        rewards = [config.to_dict()["reward_funcs"], config.reward_weights, *config.unfinished]
        judged_by = digest([*rewards, eval_set.ids])
    return TrainerState(
        step=0,
        seed=config.seed,
        algorithm=config.algorithm,
        samples=0,
        policy_version=0,
        beta=beta,
        begun_with_beta=beta,
        prompts=digest(train_set.ids),
        judged_by=judged_by,
        generation_batch_size=config.generation_batch_size,
        num_generations=config.num_generations,
    )


def resumed_state(held: TrainerState, state: TrainerState, resume: Path) -> TrainerState:
    """Counters of a run that goes on; ConfigError for other prompts, a warning for another β or other rewards."""
    if held.prompts is not None and held.prompts != state.prompts:
        raise ConfigError(f"dataset_name: expected the prompts of the run of {resume}, got others")
    beta = held.beta if state.beta is not None and held.beta is not None else state.beta
    if state.beta is not None and held.begun_with_beta not in (None, state.beta):
        warnings.warn(
            f"beta: the run began with {held.begun_with_beta} and adapts it to kl_target; it goes on with "
            f"{beta}, not with {state.beta}",
            stacklevel=3,
        )
    best = (held.best_step, held.best_reward)
    if held.best_step is not None and held.judged_by not in (None, state.judged_by):
        warnings.warn(
            f"rewards or held-out prompts are others than in {resume}: its best evaluation, of step "
            f"{held.best_step}, is not compared with later ones",
            stacklevel=3,
        )
        best = (None, None)
    return replace(
        held,
        algorithm=state.algorithm,
        beta=beta,
        begun_with_beta=held.begun_with_beta if held.beta is not None else state.begun_with_beta,
        best_step=best[0],
        best_reward=best[1],
        judged_by=state.judged_by,
        prompts=state.prompts,
        generation_batch_size=state.generation_batch_size,
        num_generations=state.num_generations,
    )


class RlPolicy(Policy[TrainerState]):
    """Policy that an RL run trains."""

    config: TrainConfig

    def __init__(
        self,
        config: TrainConfig,
        model: HydraModel,
        state: TrainerState,
        *,
        longest: int,
        resume: Path | None = None,
        world: World = ALONE,
    ) -> None:
        """Take a model as it is before any step, or go on from a checkpoint; ConfigError where that does not fit.

        state: counters of a run that begins. longest: most tokens that stay together in a micro-batch. resume:
        checkpoint to go on from.
        """
        rates = {"actor": config.learning_rate}
        if config.has_critic:
            critic_rate = config.critic_learning_rate
            rates["critic"] = critic_rate if critic_rate is not None else config.learning_rate
        super().__init__(config, model, rates, state, world=world)
        if resume is not None:
            self.state = resumed_state(self.load(resume, config.max_steps), self.state, resume)
        _require_memory(model, longest // config.facts.answers_together)
        named = config.per_device_train_batch_size or config.max_tokens_per_micro_batch
        kinds = {"micro_batch_tokens": (longest, named is None), "scoring_tokens": (1, True)}
        tokens, failures, old = self.state.budgets, self.state.budget_failures, self.state.token_budget
        self.budgets = {
            name: Budget(model.device, tokens.get(name, old), failures.get(name, 0), *rest)
            for name, rest in kinds.items()
        }
        """Tokens of a forward of the model, by the metric that tells them."""
        self._unmoved = {role for role in self.optimizer.groups if not self.optimizer.has_stepped(role)}
        """Roles of which no update has been seen to change anything yet."""

    @property
    def options(self) -> TrainConfig:
        """The options of the next step: with the KL coefficient that is adapted, where one is."""
        beta = self.state.beta
        return self.config if beta is None else dataclasses.replace(self.config, beta=beta)

    def learn(self, experience: Experience, *, n_answers: int) -> dict[str, float]:
        """Make one step: all epochs over an experience; metrics by name. A minibatch that fails is not applied."""
        state, options = self.state, self.options
        algorithm = make_algorithm(options)
        learned, metrics = algorithm.learn_from(experience)
        factor = self.schedule_rates(options.max_steps)
        # of every role that no update has been seen to change yet
        before = {role: [fingerprint(w) for w in self.optimizer.weights(role)] for role in sorted(self._unmoved)}
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
            policy_version=state.policy_version + int(measured["optimizer_steps"] > 0),
            **self._settle_budgets(),
            beta=self._next_beta(experience.mean_kl, n_answers),
        )
        adapted = {} if state.beta is None else {"beta": state.beta}
        return {**metrics, **measured, **self.state.budgets, **adapted, "learning_rate": options.learning_rate * factor}

    def _settle_budgets(self) -> dict[str, dict[str, int]]:
        """Choose and lower budgets at the end of a step, see `Budget.settle`; counters of a checkpoint."""
        chosen, failures = {}, {}
        for name, budget in self.budgets.items():
            room = budget.settle(self.world.gather)
            if room < budget.least and self.world.is_main:
                warnings.warn(
                    f"max_completion_length: expected prompts and answers of at most {room} tokens together, for which "
                    f"an update has free memory, got up to {budget.least}; long ones may not fit, unless you lower it "
                    "or lora_r, or switch gradient_checkpointing on",
                    stacklevel=3,
                )
            if budget.tokens is not None:
                chosen[name] = budget.tokens
            failures[name] = budget.failures
        return {"budgets": chosen, "budget_failures": failures}

    def _schedule(self) -> Schedule:
        config, budget = self.config, self.budgets["micro_batch_tokens"]
        rows: int | None = self.state.micro_batch_size or config.per_device_train_batch_size or 16
        tokens = min(config.max_tokens_per_micro_batch or _ANY, budget.tokens or _ANY)
        if budget.by_memory and budget.tokens is None:
            tokens = max(budget.least, self.model.token_budget)
        elif budget.by_memory:
            rows = None
        return Schedule(
            num_epochs=config.epochs,
            num_mini_batches=config.mini_batches,
            micro_batch_size=rows,
            max_tokens=tokens if tokens < _ANY else None,
            budget=budget,
            # dropout masks are the update's alone
            max_mismatch=None if config.lora_dropout else MISMATCH_MAX_FACTOR * mismatch_bound(self.model, config),
        )

    def _next_beta(self, kl: float, n_answers: int) -> float | None:
        """The KL coefficient after a step with a mean KL of `kl` nats; None where it does not adapt."""
        config, beta = self.config, self.state.beta
        if beta is None or config.kl_target is None:
            return None
        return next_beta(beta, kl, target=config.kl_target, n_answers=n_answers)

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


def _require_memory(model: HydraModel, longest: int) -> None:
    """Raise ConfigError where no update of the `longest` prompt and answer, in tokens, fits into a GPU."""
    memory, backbone = read_memory(model.device), model.role_backbone("actor")
    a_token = len(backbone.blocks) * backbone.hidden_size * backbone.dtype.itemsize  # every block keeps its input
    if memory is not None and longest * a_token > memory.free:
        raise ConfigError(
            f"max_completion_length: expected prompt and answer of at most {memory.free // a_token} tokens, for whose "
            f"update {memory.free / 1e9:.2f} GB of free memory could do, got up to {longest}"
        )


def make_algorithm(config: TrainConfig) -> Algorithm:
    """Make the algorithm of a run with its options."""
    kind, most = find_algorithm(config.algorithm), config.max_completion_length
    return kind(config, temperature=config.temperature, max_completion_length=most)
