"""The RL loop: rollout → experience → update, until done; everything can stop and go on at a step.

One step draws `generation_batch_size` answers in the actor's lane, scores them with all lanes at once, and updates
what the algorithm trains: the actor, and a critic where it has one. Data order, sampling seeds and minibatches are
functions of (seed, step), so a resumed run makes the same floats as one that never stopped.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from rlhf_engine.algorithms.base import Algorithm, find_algorithm
from rlhf_engine.algorithms.kl_controller import next_beta
from rlhf_engine.config import TrainConfig
from rlhf_engine.data import PromptSet
from rlhf_engine.distributed.process_group import ALONE, World, fingerprint, fingerprint_of_all
from rlhf_engine.errors import CheckpointWriteError, EngineError
from rlhf_engine.generators.build import Connect, make_source
from rlhf_engine.generators.policy_store import put
from rlhf_engine.generators.sources import PastState, Source
from rlhf_engine.generators.work import StepOrders, gather_rollout
from rlhf_engine.hydra import HydraModel, save_pretrained
from rlhf_engine.io import put_in_place
from rlhf_engine.manifest import write_manifest
from rlhf_engine.policy.build import PAST, build_policy_model, shard_base
from rlhf_engine.policy.optimizer import RoleOptimizer, lr_factor
from rlhf_engine.rollout import Rollout, SamplingConfig
from rlhf_engine.rollout.build import make_rollouts
from rlhf_engine.runs.checkpoint import TrainerState, load_checkpoint, load_policies, save_checkpoint
from rlhf_engine.runs.clock import Clock
from rlhf_engine.runs.folder import FINAL_FOLDER, clear_later_steps
from rlhf_engine.runs.metrics import peak_memory_bytes
from rlhf_engine.scoring.experience import MISMATCH_MAX_FACTOR, Joint, mismatch_bound, score_rollout
from rlhf_engine.tokenizing import eos_token_ids
from rlhf_engine.training.data_parallel import (
    Ranks,
    require_same_start,
    require_same_weights,
    require_served,
    sum_gradients,
)
from rlhf_engine.training.evaluation import Answers, Evaluation
from rlhf_engine.training.rl_inputs import load_inputs, new_state, resumed_state
from rlhf_engine.training.run import Run
from rlhf_engine.training.update import Schedule, nothing_learned
from rlhf_engine.training.update import update as learn


class RlTrainer(Run):
    """RL by any algorithm. Construction finds everything that can be wrong with the request; `run` spends the time."""

    config: TrainConfig
    state: TrainerState

    def __init__(self, config: TrainConfig, world: World = ALONE, *, connect: Connect | None = None) -> None:
        """world: the ranks of the run, of which this is one. connect: starts generators in other processes, for an
        `async_mode` that has them.
        """
        require_served(config, world)
        self.world, self._connect = world, connect
        self.config = config if world.size == 1 else replace(config, device=str(world.device))
        self.output, self.total_steps = Path(config.output_dir), config.max_steps
        world.run_on_all_ranks("the start of the run", self._load)
        if world.size > 1:
            weights = fingerprint_of_all(self.model.parameters())
            require_same_start(world, weights=weights, prompts=self.train_set.ids, step=self._inputs.resumed_step)
        self._whole_base: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        if config.shard_base:
            self._whole_base = shard_base(self.model, self.config, world).whole
        with self.whole_base():
            world.run_on_all_ranks("the start of the run", self._prepare)
        if world.size > 1:
            self._check_same(self.state.step)

    def _load(self) -> None:
        """Data, and the model as it is before any step."""
        self._inputs = load_inputs(self.config)
        self.tokenizer, self.scorer = self._inputs.tokenizer, self._inputs.scorer
        self.train_set, self.eval_set, self.reports = (
            self._inputs.train_set,
            self._inputs.eval_set,
            self._inputs.reports,
        )
        self.model: HydraModel = build_policy_model(self.config)

    def _prepare(self) -> None:
        """What works on the model, and where the run stands."""
        config, inputs = self.config, self._inputs
        self.rollouts = make_rollouts(config, self.model, inputs.server, inputs.all_prompts())
        rates = {"actor": config.learning_rate}
        if config.has_critic:
            critic_rate = config.critic_learning_rate
            rates["critic"] = critic_rate if critic_rate is not None else config.learning_rate
        self.optimizer = RoleOptimizer.configured(self.model, rates, config)
        self.model.eval()
        self.state = new_state(config, inputs)
        if inputs.resume is not None:
            found: TrainerState = load_checkpoint(inputs.resume, self.model, self.optimizer)
            self.state = resumed_state(found, self.state, inputs.resume)
        self._token_budget = self.model.token_budget
        if self.state.token_budget is not None:
            self.model.token_budget = self.state.token_budget
        self._orders = StepOrders(
            config, self.train_set, self._sampling(config.seed), step=self.state.step, samples=self.state.samples
        )
        self.source = self._make_source(inputs.resume)
        """Answers to learn from."""
        # a checkpoint's alone: the source knows them from here on
        self.state = replace(self.state, policies_after={}, drawn_by={})
        self._evaluation = Evaluation(
            config, inputs, self.model, self.rollouts, self._sampling, self.world, self.whole_base, self.output
        )
        # the actor starts as the reference unless it brings weights of its own
        self._starts_as_reference = config.actor_adapter is None or config.actor_adapter == config.reference_adapter
        self._unmoved = {role for role in self.optimizer.groups if not self.optimizer.has_stepped(role)}
        """Roles of which no update has been seen to change anything yet."""

    # ---- around the loop -------------------------------------------------------------------------------------------

    def whole_base(self) -> contextlib.AbstractContextManager[None]:
        """Within it, all of the base is on every rank; all ranks enter it together."""
        return self._whole_base()

    def resources(self) -> contextlib.AbstractContextManager[object]:
        """What draws answers, closed at the end of the run."""
        return contextlib.closing(self.rollouts)

    def steps(self) -> contextlib.AbstractContextManager[object]:
        """The source of answers, closed after the last step."""
        return contextlib.closing(self.source)

    def begin(self) -> None:
        """Make the output folder ready; answers before the first step, for samples."""
        step = self.state.step
        clear_later_steps(self.output, step=step, total_steps=self.total_steps)
        # samples of this step are from before its checkpoint, or are drawn again now
        self._evaluation.forget_samples_from(step + 1 if 0 < step < self.total_steps else step)
        self.write_record()
        if step == 0:
            self._note_samples()

    def look(self) -> dict[str, float]:
        """An evaluation, and samples, after every `eval_steps` steps."""
        if not self.config.eval_steps or self.state.step % self.config.eval_steps:
            return {}
        found = self.evaluate()
        self._note_best(found.get("eval/reward"))
        if self.config.num_samples and not self._is_last():
            with self.whole_base():
                self.world.on_main("samples", self._note_samples)
        return found

    def saves_now(self) -> bool:
        """After every `save_steps` steps, after the last one, and after the best evaluation so far."""
        return super().saves_now() or self.state.best_step == self.state.step

    def end(self) -> None:
        """The final model, and samples if there are any."""
        self._save_final()
        self._note_samples()
        self._evaluation.write_samples()

    def describe(self) -> dict[str, Any]:
        """The base, and the ranks if there are several."""
        processes = {"processes": self.world.size} if self.world.size > 1 else {}
        return {"base_hash": self.model.backbone().base_hash(), **processes}

    def finished(self) -> bool:
        """Whether every step is done and the final model is written."""
        return self._is_last() and (self.output / FINAL_FOLDER).is_dir()

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def save(self, past: PastState | None = None) -> Path:
        """Write a checkpoint of the current step, where this is the main rank; its folder.

        past: what is known of the answers to come; None for what their source holds now.
        """
        if not self.world.is_main:
            return self.output / f"checkpoint-{self.state.step}"
        past = self.source.state() if past is None else past
        state = replace(
            self.state,
            policies_after={str(done): policy.version for done, policy in past.policies.items()},
            drawn_by={str(step): version for step, version in past.drawn_by.items()},
        )
        policies = {policy.version: policy for policy in past.policies.values()}
        keep = self.config.save_total_limit
        folder = save_checkpoint(self.output, self.model, self.optimizer, state, keep=keep, policies=policies)
        self._saved_step = self.state.step
        return folder

    def make_saver(self) -> Callable[[], object]:
        """`save`, which finds the source as it is now: a draw that fails may have taken answers out of it."""
        done, past = self.state.step, self.source.state()
        return lambda: self.save(past if self.state.step == done else None)

    # ---- a step ----------------------------------------------------------------------------------------------------

    def step(self) -> dict[str, float]:
        """One rollout and its update. Nothing of a failed step is applied to what is on disk."""
        config, state, world = self.config, self.state, self.world
        if state.beta is not None:
            config = replace(config, beta=state.beta)
        clock = Clock(self.model.device)
        questions = self._orders.questions(state.step)
        own = self._orders.shares(questions, world.size)[world.rank]
        with self.whole_base():
            if config.shard_base:
                clock.lap("gather_base")
            sampled = world.run_on_all_ranks(
                "drawing answers", lambda: self.source.draw(state.step, state.policy_version)
            )
            rollout = gather_rollout(world, sampled.rollout)
            clock.add(sampled.seconds)
            indices = own.indices
            if sampled.policy is not None and sampled.frozen is None:
                put(sampled.policy, self.model.role_backbone(PAST).slot(PAST))
            experience = score_rollout(
                self.model,
                sampled.rollout,
                own.layout,
                self.scorer,
                self.tokenizer,
                config,
                self.train_set.texts(indices),
                self.train_set.columns(indices),
                policy_version=state.policy_version,
                frozen=sampled.frozen,
                past=sampled.policy is not None,
                first_step_from_reference=self._starts_as_reference and state.policy_version == 0,
                joint=Joint(world, rollout, questions.layout),
            )
        train_actor = state.step >= config.critic_warmup_steps
        algorithm = make_algorithm(config, train_actor=train_actor)
        learned, algorithm_metrics = algorithm.learn_from(experience)
        clock.lap("score")
        factor = lr_factor(
            state.step,
            kind=config.lr_scheduler_type,
            warmup_steps=config.warmup_steps,
            total_steps=config.max_steps,
        )
        self.optimizer.set_lr_factor(factor)
        before = self._fingerprints()
        self.model.train()
        schedule = self._schedule()
        update = nothing_learned(schedule)
        if learned is not None:
            seed = config.seed * 1_000_003 + state.step
            ranks = None if world.size == 1 else Ranks(world, in_step=config.shard_base)
            update = learn(self.model, algorithm, learned, schedule, self._apply, seed=seed, ranks=ranks)
        self.model.eval()
        self._check_moved(before, update)
        if config.has_critic:
            self.model.trained_heads.add("value")
        clock.lap("update")
        if world.size > 1:
            self._check_same(state.step + 1)
        n_answers = len(questions.indices)
        self.state = replace(
            state,
            step=state.step + 1,
            samples=state.samples + n_answers,
            policy_version=state.policy_version + int(train_actor and update["optimizer_steps"] > 0),
            micro_batch_size=self._if_lowered(int(update["micro_batch_size"]), config.per_device_train_batch_size),
            token_budget=self._if_lowered(self.model.token_budget, self._token_budget),
            beta=self._next_beta(experience.metrics["kl"], n_answers),
        )
        self.optimizer.is_whole = True
        published = self.source.learned(self.state.step, self.state.policy_version)
        if config.is_async:
            clock.lap("publish")
        tokens = rollout.batch.n_completion_tokens
        memory = float(peak_memory_bytes(self.model.device))
        most = world.most({**clock.metrics(), "generate": sampled.generate_seconds, "peak_memory_bytes": memory})
        generate_seconds = most.pop("generate")
        return {
            **experience.metrics,
            **algorithm_metrics,
            **sampled.metrics,
            **published,
            **update,
            **most,
            **({} if state.beta is None else {"beta": state.beta}),
            "learning_rate": config.learning_rate * factor,
            "tokens_per_second": tokens / generate_seconds,
            "samples_per_second": n_answers / most["seconds/step"],
            "samples": float(self.state.samples),
            "policy_version": float(self.state.policy_version),
        }

    # ---- looking at the policy -------------------------------------------------------------------------------------

    def answer(
        self,
        prompts: PromptSet,
        indices: list[int],
        *,
        role: str = "actor",
        seed: int = 0,
        sample_ids: list[int] | None = None,
    ) -> Answers:
        """`Evaluation.answer` with the policy as it is now."""
        version = self.state.policy_version
        return self._evaluation.answer(
            prompts, indices, policy_version=version, role=role, seed=seed, sample_ids=sample_ids
        )

    def kl_to_reference(self, rollout: Rollout) -> float:
        """Mean over answers of Σ_t exact KL(actor ‖ reference), nats per answer."""
        return self._evaluation.kl_to_reference(rollout)

    def evaluate(self) -> dict[str, float]:
        """Mean score and exact KL per answer on the held-out prompts, of which each rank answers a share."""
        return self._evaluation.evaluate(self.state.policy_version)

    def _note_samples(self) -> None:
        self._evaluation.note_samples(self.state.step, self.state.policy_version)

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _save_final(self) -> None:
        """final/ appears whole or not at all, as checkpoints do."""
        temporary, final = self.output / f".{FINAL_FOLDER}.tmp", self.output / FINAL_FOLDER
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            save_pretrained(self.model, temporary)
            self.tokenizer.save_pretrained(temporary)
            write_manifest(temporary)
            put_in_place(temporary, final)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointWriteError(f"output_dir: expected to write {str(final)!r}, got: {error}") from error

    def _note_best(self, reward: float | None) -> None:
        """Remember the step with the highest reward on held-out prompts, whose checkpoint is kept."""
        best = self.state.best_reward
        if reward is not None and (best is None or reward > best):
            self.state = replace(self.state, best_step=self.state.step, best_reward=reward)

    def _next_beta(self, kl: float, n_answers: int) -> float | None:
        """After a step of so many answers with a mean KL of `kl` nats; None where it does not adapt."""
        config, beta = self.config, self.state.beta
        if beta is None or config.kl_target is None:
            return None
        return next_beta(beta, kl, target=config.kl_target, horizon=config.kl_horizon, n_answers=n_answers)

    @staticmethod
    def _if_lowered(found: int, configured: int) -> int | None:
        return found if found < configured else None

    def _sampling(self, seed: int) -> SamplingConfig:
        return SamplingConfig(
            max_completion_length=self.config.max_completion_length,
            eos_token_ids=eos_token_ids(self.tokenizer, self.model.backbone().model),
            temperature=self.config.temperature,
            seed=seed,
        )

    def _make_source(self, resume: Path | None) -> Source:
        state = self.state
        held = {} if resume is None else load_policies(resume)
        past = PastState(
            policies={int(done): held[version] for done, version in state.policies_after.items()},
            drawn_by={int(step): version for step, version in state.drawn_by.items()},
        )
        return make_source(
            self.config,
            self.model,
            self.rollouts,
            self._orders,
            past,
            step=state.step,
            policy_version=state.policy_version,
            reward=self.scorer.uses_reward_model,
            world=self.world,
            connect=self._connect,
        )

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

    def _trained(self) -> list[torch.nn.Parameter]:
        return [p for group in self.optimizer.groups.values() for p in group.values()]

    def _apply(self) -> dict[str, float]:
        """An optimizer step on the gradients of a minibatch, of which each rank has its share."""
        sum_gradients(self.world, self._trained())
        return self.optimizer.step()

    def _check_same(self, step: int) -> None:
        """Ranks hold the same parameters after so many steps, and go on with the memory that all of them have."""
        require_same_weights(self.world, fingerprint_of_all(self._trained()), step)
        self.model.token_budget = min(self.world.gather(self.model.token_budget))

    def _fingerprints(self) -> dict[str, list[int]]:
        """Of the trained weights of every role that no update has been seen to change yet."""
        return {role: [fingerprint(w) for w in self.optimizer.weights(role)] for role in sorted(self._unmoved)}

    def _check_moved(self, before: dict[str, list[int]], update: dict[str, float]) -> None:
        """A role's first update with a gradient and a learning rate must have changed some tensor."""
        for role, tensors in before.items():
            if self.optimizer.learning_rates[role] == 0 or update.get(f"grad_norm/{role}", 0.0) == 0.0:
                continue
            if [fingerprint(w) for w in self.optimizer.weights(role)] == tensors:
                raise EngineError(
                    f"{role}: its gradient was not zero, yet the first update changed none of its tensors"
                )
            self._unmoved.remove(role)


def make_algorithm(config: TrainConfig, *, train_actor: bool = True) -> Algorithm:
    """The algorithm of a run with its options. train_actor: False while only a critic warms up."""
    return find_algorithm(config.algorithm)(
        config,
        temperature=config.temperature,
        max_completion_length=config.max_completion_length,
        train_actor=train_actor,
    )
