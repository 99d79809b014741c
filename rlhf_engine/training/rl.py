"""The RL loop: rollout → experience → update, until done; everything can stop and go on at a step.

One step draws `generation_batch_size` answers in the actor's lane, scores them with all lanes at once, and updates
what the algorithm trains: the actor, and a critic where it has one. Data order, sampling seeds and minibatches are
functions of (seed, step), so a resumed run makes the same floats as one that never stopped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_kernels.runtime import registry

from rlhf_engine.config import TrainConfig
from rlhf_engine.data.tokenizer import eos_token_ids
from rlhf_engine.devices import ALONE, World, earlier_peaks
from rlhf_engine.generators.sources import AnswerSource, Connect, PastState, make_source
from rlhf_engine.generators.work import StepPrompts, gather_rollout
from rlhf_engine.hydra import HydraModel, save_pretrained
from rlhf_engine.hydra.build import BEHAVIOUR, PAST, build_policy_model
from rlhf_engine.rollout import PromptBatch, SamplingConfig, exactness
from rlhf_engine.rollout.backend import Rollouts, make_rollouts
from rlhf_engine.runs.checkpoint import TrainerState, load_policies
from rlhf_engine.runs.folder import FINAL_FOLDER, clear_later_steps, write_final
from rlhf_engine.runs.metrics import Clock, peak_memory_bytes
from rlhf_engine.scoring.experience import Scoring
from rlhf_engine.training.data_parallel import require_served
from rlhf_engine.training.evaluation import Evaluator
from rlhf_engine.training.rl_policy import RlPolicy, load_inputs
from rlhf_engine.training.run import Run


class RlTrainer(Run[TrainerState]):
    """RL by any algorithm. Construction finds everything that can be wrong with the request; `run` spends the time."""

    config: TrainConfig
    """Options of the run."""
    policy: RlPolicy
    """Policy that is trained."""

    def __init__(
        self,
        config: TrainConfig,
        world: World = ALONE,
        *,
        connect: Connect | None = None,
        base: HydraModel | None = None,
    ) -> None:
        """Find everything that can be wrong with the request; `connect` starts generators, `base` gives backbones."""
        require_served(config, world)
        self.world, self._connect = world, connect
        if world.size > 1:
            shares = config.shard_base or config.method == "full_ppo"
            config = replace(config, device=str(world.device), shard_base=shares)
        self.config, self.title = config, config.algorithm
        self.output = Path(config.output_dir).absolute()  # a reward function may change the folder
        self.kernels = registry.effective().anew()
        with self.kernels.used():
            with world.together("the start of the run"):
                model = self._load(base)
            self._share_out(model, rows=self.train_set.ids, step=self._inputs.resumed_step)
            with world.together("the start of the run"):
                self.policy = RlPolicy(self.config, model, self._inputs, world)
            with self.whole_base(), world.together("the start of the run"):
                self._prepare(model)
        if world.size > 1:
            self.policy.require_same(self.state.step)

    def _load(self, base: HydraModel | None) -> HydraModel:
        """Load the data, and the model as it is before any step."""
        self._inputs = inputs = load_inputs(self.config, rank=self.world.rank)
        self.total_steps, self.reports = inputs.total_steps, inputs.reports
        self.config = replace(self.config, max_steps=self.total_steps)
        self.tokenizer, self.scorer = inputs.tokenizer, inputs.scorer
        self.train_set, self.eval_set = inputs.train_set, inputs.eval_set
        return build_policy_model(self.config, base)

    def _prepare(self, model: HydraModel) -> None:
        config, inputs, state = self.config, self._inputs, self.state
        if inputs.resume is None:
            exactness.settle(config.exact, model.role_backbone("actor"))
        self.rollouts = self._make_rollouts()
        sampling, world = self._sampling(config.seed), self.world
        self._prompts = StepPrompts(
            config, self.train_set, sampling, step=state.step, samples=state.samples, world=world
        )
        budget = self.policy.budgets["scoring_tokens"]
        self._scoring = Scoring(model, self.scorer, self.tokenizer, self.train_set, self.world, budget)
        self.scorer.trainer_state.max_steps = self.total_steps
        self._note_progress()
        self.source = self._make_source(inputs.resume)
        """Answers to learn from."""
        # a checkpoint's alone: the source knows them from here on
        self.state = replace(self.state, policies_after={}, drawn_by={})
        self.evaluation = Evaluator(self.policy, inputs, self.rollouts, self._sampling, self.whole_base, self.output)
        """Answers of the policy as it is now, their scores and KL."""

    def resources(self) -> contextlib.AbstractContextManager[object]:
        """Backend that draws answers, closed at the end of the run."""
        return contextlib.closing(self.rollouts)

    def steps(self) -> contextlib.AbstractContextManager[object]:
        """The source of answers, closed after the last step."""
        return contextlib.closing(self.source)

    def begin(self) -> None:
        """Make the output folder ready; answers before the first step, for samples."""
        step = self.state.step
        clear_later_steps(self.output, step=step, total_steps=self.total_steps)
        # samples of this step are from before its checkpoint, or are drawn again now
        self.evaluation.forget_samples_from(step + 1 if 0 < step < self.total_steps else step)
        self.write_record()
        if step == 0:
            self.evaluation.note_samples()

    def look(self) -> dict[str, float]:
        """Evaluate before the first step, and after every `eval_steps` steps, which note samples too."""
        step, every = self.state.step, self.config.eval_steps
        if not every or step % every:
            return {}
        metrics = self.evaluation.evaluate()
        if step == 0:  # no checkpoint to keep, and `begin` has noted samples
            return metrics
        self._note_best(metrics.get("eval/reward"))
        if not self._is_last():
            with self.whole_base(), self.world.together("samples"):
                if self.world.is_main:
                    self.evaluation.note_samples()
        return metrics

    def saves_now(self) -> bool:
        """Whether a checkpoint is due: every `save_steps` steps, after the last one, after the best evaluation."""
        return super().saves_now() or self.state.best_step == self.state.step

    def end(self) -> None:
        """Write the final model, and samples if there are any."""
        write_final(self.output, self._write_model)
        self.evaluation.note_samples()
        self.evaluation.write_samples()

    def describe(self) -> dict[str, Any]:
        """Hash of a frozen base, for the run's record; one that is trained has none that would mean something later."""
        backbone = self.model.backbone()
        return {"base_hash": backbone.base_hash() if backbone.frozen else None}

    def finished(self) -> bool:
        """Whether every step is done and the final model is written."""
        return self._is_last() and (self.output / FINAL_FOLDER).is_dir()

    def save(self, past: PastState | None = None) -> Path:
        """Write a checkpoint of the current step on the main rank, `past` None: as it is now; its folder."""
        if not self.world.is_main:
            return self.output / f"checkpoint-{self.state.step}"
        past = self.source.state() if past is None else past
        state = replace(
            self.state,
            policies_after={str(done): policy.version for done, policy in past.policies.items()},
            drawn_by={str(step): version for step, version in past.drawn_by.items()},
        )
        policies = {policy.version: policy for policy in past.policies.values()}
        folder = self.policy.save(self.output, state=state, past=policies)
        self._saved_step = self.state.step
        return folder

    def make_saver(self) -> Callable[[], object]:
        """Make a function that writes a checkpoint with the source of answers as it is now, before a draw fails."""
        done, past = self.state.step, self.source.state()
        return lambda: self.save(past if self.state.step == done else None)

    def next_prompts(self) -> PromptBatch:
        """Choose the prompts of the next step that this rank draws answers to, one per answer."""
        return self._prompts.own(self.state.step)

    def step(self) -> dict[str, float]:
        """Make one rollout and its update; metrics by name. A failure is an EngineError; nothing on disk changes."""
        config, state, world = self.policy.options, self.state, self.world
        clock, version = Clock(self.model.device, with_peaks=config.dry_run), state.policy_version
        prompts, own = self._prompts.of_step(state.step), self._prompts.own(state.step)
        with self.kernels.used(), self.whole_base():
            if config.shard_base:
                clock.lap("gather_base")
            with world.together("drawing answers"):
                share, drawn = self.source.draw(state.step, version, clock.lap)
            rollout = gather_rollout(world, share)
            experience = self._scoring.experience(share, own, config, version, (rollout, prompts))
        clock.lap("score")
        with self.kernels.used():
            learned = self.policy.learn(experience, n_answers=len(prompts))
        self._note_progress()
        clock.lap("update")
        published = self.source.learned(self.state.step, self.state.policy_version)
        if config.is_async:
            clock.lap("publish")
        tokens, device = rollout.batch.n_completion_tokens, self.model.device
        memory = float(max(peak_memory_bytes(device), earlier_peaks.get(device, 0)))
        most = world.most({**clock.metrics(), "generate": share.stats.seconds, "peak_memory_bytes": memory})
        generate_seconds = most.pop("generate")
        return {
            **experience.metrics,
            **drawn,
            **published,
            **learned,
            **most,
            "tokens_per_second": tokens / generate_seconds,
            "samples_per_second": len(prompts) / most["seconds/step"],
            "samples": float(self.state.samples),
            "policy_version": float(self.state.policy_version),
        }

    def _note_progress(self) -> None:
        """Let reward functions know how many steps are done."""
        progress, done = self.scorer.trainer_state, self.state.step
        progress.global_step, progress.epoch = done, done * self.config.prompts_per_step / len(self.train_set.rows)

    def _write_model(self, folder: Path) -> None:
        save_pretrained(self.model, folder)
        self.tokenizer.save_pretrained(folder)

    def _note_best(self, reward: float | None) -> None:
        """Remember the step with the highest reward on held-out prompts, whose checkpoint is kept."""
        best = self.state.best_reward
        if reward is not None and (best is None or reward > best):
            self.state = replace(self.state, best_step=self.state.step, best_reward=reward)

    def _sampling(self, seed: int) -> SamplingConfig:
        ends = () if self.config.dry_run else eos_token_ids(self.tokenizer, self.model.backbone().model)
        return SamplingConfig.of(self.config, ends, seed=seed)

    def _make_rollouts(self, role: str = "actor", compared: str | None = None) -> Rollouts:
        given = (self.config, self.model, self._inputs.server, self._inputs.all_prompts)
        return make_rollouts(*given, role=role, compared=compared, rank=self.world.rank)

    def _make_source(self, resume: Path | None) -> AnswerSource:
        state = self.state
        held = {} if resume is None else load_policies(resume)
        past = PastState(
            policies={int(done): held[version] for done, version in state.policies_after.items()},
            drawn_by={int(step): version for step, version in state.drawn_by.items()},
        )
        return make_source(
            self._make_rollouts(BEHAVIOUR, PAST) if self.config.is_async else self.rollouts,
            self._prompts,
            past,
            version=state.policy_version,
            reward=self.scorer.uses_reward_model,
            connect=self._connect,
        )
