"""The RL loop: rollout → experience → update, until done; everything can stop and go on at a step.

One step draws `generation_batch_size` answers in the actor's lane, scores them with all lanes at once, and updates
what the algorithm trains: the actor, and a critic where it has one. Data order, sampling seeds and minibatches are
functions of (seed, step), so a resumed run makes the same floats as one that never stopped.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rlhf_kernels import registry
from safetensors import SafetensorError

from rlhf_engine.algorithms.kl_controller import next_beta
from rlhf_engine.algorithms.online_dpo import DpoObjective
from rlhf_engine.algorithms.update import Schedule, nothing_learned
from rlhf_engine.algorithms.update import update as learn
from rlhf_engine.config import TrainConfig
from rlhf_engine.data import PromptSet, Report, Tally, load_rows, require_room, tokenize_prompts
from rlhf_engine.errors import CheckpointWriteError, ConfigError, EngineError, RunStopped
from rlhf_engine.folders import put_in_place
from rlhf_engine.hydra import HydraModel, save_pretrained
from rlhf_engine.hydra.loading import read_context_length, read_vocabulary
from rlhf_engine.manifest import write_manifest
from rlhf_engine.report import plot_curves, samples_markdown
from rlhf_engine.rollout import Rollout, SamplingConfig
from rlhf_engine.tokenizing import eos_token_ids, load_tokenizer, require_same_tokens
from rlhf_engine.training.adamw import require_optim
from rlhf_engine.training.build import PAST, build_policy_model, check_sources, shard_base
from rlhf_engine.training.checkpoint import (
    TrainerState,
    begin_kernels,
    digest,
    load_checkpoint,
    load_policies,
    read_counters,
    require_same,
    resolve_resume,
    save_checkpoint,
    saved_on_error,
)
from rlhf_engine.training.clock import Clock
from rlhf_engine.training.distributed import ALONE, World, fingerprint, fingerprint_of_all, share
from rlhf_engine.training.experience import (
    MISMATCH_MAX_FACTOR,
    Joint,
    decode_answers,
    mismatch_bound,
    score_rollout,
)
from rlhf_engine.training.generation.build import Connect, make_source
from rlhf_engine.training.generation.orders import StepOrders, gather_rollout
from rlhf_engine.training.generation.sources import PastState, Source
from rlhf_engine.training.generation.versions import put
from rlhf_engine.training.metrics import MetricsWriter, peak_memory_bytes, run_record, write_json_atomic
from rlhf_engine.training.optimizer import RoleOptimizer, lr_factor
from rlhf_engine.training.recipes import make_lesson
from rlhf_engine.training.rollouts import find_server, make_rollouts
from rlhf_engine.training.run_folder import (
    CURVES_FILE,
    FINAL_FOLDER,
    METRICS_FILE,
    RECORD_FILE,
    SAMPLES_FILE,
    SAMPLES_LOG,
    check_output,
    clear_later_steps,
    locked,
    require_unlocked,
)
from rlhf_engine.training.samples import SampleLog, Samples
from rlhf_engine.training.scoring import AnswerScorer, mean_or_none
from rlhf_engine.training.sharing import (
    Crew,
    require_same_start,
    require_same_weights,
    require_served,
    sum_gradients,
)
from rlhf_engine.training.trackers import Trackers
from rlhf_engine.training.trackers import require as require_trackers


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Answers with what they scored, for samples and evaluation."""

    prompts: list[str]
    completions: list[str]
    scores: list[float | None]
    rollout: Rollout


class RlTrainer:
    """RL by any algorithm. Construction finds everything that can be wrong with the request; `run` spends the time."""

    def __init__(self, config: TrainConfig, world: World = ALONE, *, connect: Connect | None = None) -> None:
        """world: the ranks of the run, of which this is one. connect: starts generators in other processes, for an
        `async_mode` that has them.
        """
        require_served(config, world)
        self.world, self._connect = world, connect
        self.config = config if world.size == 1 else replace(config, device=str(world.device))
        world.each("the start of the run", self._load)
        if world.size > 1:
            weights = fingerprint_of_all(self.model.parameters())
            require_same_start(world, weights=weights, prompts=self.train_set.ids, step=self._resumed_step)
        self._whole_base: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        """All of the base on every rank, which all enter together."""
        if config.shard_base:
            self._whole_base = shard_base(self.model, self.config, world).whole
        with self._whole_base():
            world.each("the start of the run", self._prepare)
        if world.size > 1:
            self._check_same(self.state.step)

    def _load(self) -> None:
        """Data, and the model as it is before any step."""
        config = self.config
        self.output = Path(config.output_dir)
        require_unlocked(self.output)
        self._resume = resolve_resume(config.resume_from_checkpoint, self.output)
        check_output(
            self.output,
            resume=config.resume_from_checkpoint,
            checkpoint=self._resume,
            overwrite=config.overwrite_output_dir,
        )
        require_trackers(config.report_to)
        require_optim(config.optim)
        self._resumed_step = 0
        if self._resume is not None:
            counters: TrainerState = read_counters(self._resume)
            require_same(
                self._resume,
                counters,
                seed=config.seed,
                algorithm=config.algorithm,
                generation_batch_size=config.generation_batch_size,
                num_generations=config.num_generations,
            )
            self._resumed_step = counters.step
            if counters.step > config.max_steps and not (self.output / FINAL_FOLDER).is_dir():
                raise ConfigError(
                    f"max_steps: expected at least {counters.step}, the steps of {self._resume}, got {config.max_steps}"
                )
        begin_kernels(self._resume, exact=config.batch_invariant)
        check_sources(config)
        self.tokenizer = load_tokenizer(config.model_name_or_path)
        if config.reward_model_path is not None:
            require_same_tokens(self.tokenizer, config.reward_model_path, read_vocabulary(config.model_name_or_path))
        self.scorer = AnswerScorer(
            config.reward_funcs,
            config.reward_weights,
            config.missing_eos_penalty,
            config.missing_eos_score,
            timeout=config.reward_timeout,
        )
        context = read_context_length(config.model_name_or_path, config.reward_model_path)
        self.reports: dict[str, Report] = {}
        self.train_set = self._load_prompts("dataset_name", config.dataset_name, context, config.dataset_limit)
        self.eval_set: PromptSet | None = None
        if config.eval_dataset_name is not None:
            self.eval_set = self._load_prompts("eval_dataset_name", config.eval_dataset_name, context)
        some = list(range(min(2, len(self.train_set.rows))))
        self.scorer.dry_run(self.train_set.texts(some), self.train_set.columns(some))
        together = DpoObjective.answers_per_unit if config.algorithm == "online_dpo" else 1
        longest = max(map(len, self.train_set.ids)) + config.max_completion_length
        require_room(together * longest, config.max_tokens_per_micro_batch)
        self._server = find_server(config, self._prompts())
        self.model: HydraModel = build_policy_model(config)

    def _prepare(self) -> None:
        """What works on the model, and where the run stands."""
        config = self.config
        self.rollouts = make_rollouts(config, self.model, self._server, self._prompts())
        rates = {"actor": config.learning_rate}
        if config.has_critic:
            critic_rate = config.critic_learning_rate
            rates["critic"] = critic_rate if critic_rate is not None else config.learning_rate
        self.optimizer = RoleOptimizer.configured(self.model, rates, config)
        self.model.eval()
        beta = None if config.kl_target is None else config.beta
        self.state = TrainerState(
            step=0,
            seed=config.seed,
            algorithm=config.algorithm,
            samples=0,
            policy_version=0,
            beta=beta,
            begun_with_beta=beta,
            prompts=digest(self.train_set.ids),
            judged_by=self._judge(),
            generation_batch_size=config.generation_batch_size,
            num_generations=config.num_generations,
        )
        if self._resume is not None:
            self.state = self._taken_up(load_checkpoint(self._resume, self.model, self.optimizer))
        self._token_budget = self.model.token_budget
        if self.state.token_budget is not None:
            self.model.token_budget = self.state.token_budget
        self._orders = StepOrders(
            config, self.train_set, self._sampling(config.seed), step=self.state.step, samples=self.state.samples
        )
        self.source = self._make_source(self._resume)
        """Answers to learn from."""
        # a checkpoint's alone: the source knows them from here on
        self.state = replace(self.state, policies_after={}, drawn_by={})
        # the actor starts as the reference unless it brings weights of its own
        self._starts_as_reference = config.actor_adapter is None or config.actor_adapter == config.reference_adapter
        self._saved_step: int | None = None
        """Of the newest checkpoint that this process has written."""
        self._unmoved = {role for role in self.optimizer.groups if not self.optimizer.has_stepped(role)}
        """Roles of which no update has been seen to change anything yet."""

    def _judge(self) -> str | None:
        """What an evaluation's reward is measured by; None without one."""
        if self.eval_set is None:
            return None
        config = self.config
        unfinished = (config.missing_eos_penalty, config.missing_eos_score)
        return digest([config.reward_funcs, config.reward_weights, *unfinished, self.eval_set.ids])

    def _taken_up(self, found: TrainerState) -> TrainerState:
        """The counters of a checkpoint as this run goes on with them."""
        state = self.state
        if found.prompts is not None and found.prompts != state.prompts:
            raise ConfigError(f"dataset_name: expected the prompts of the run of {self._resume}, got others")
        beta = found.beta if state.beta is not None and found.beta is not None else state.beta
        if state.beta is not None and found.begun_with_beta not in (None, state.beta):
            warnings.warn(
                f"beta: the run began with {found.begun_with_beta} and adapts it to kl_target; it goes on with "
                f"{beta}, not with {state.beta}",
                stacklevel=2,
            )
        best = (found.best_step, found.best_reward)
        if found.best_step is not None and found.judged_by not in (None, state.judged_by):
            warnings.warn(
                f"rewards or held-out prompts are others than in {self._resume}: its best evaluation, of step "
                f"{found.best_step}, is not compared with later ones",
                stacklevel=2,
            )
            best = (None, None)
        return replace(
            found,
            algorithm=state.algorithm,
            beta=beta,
            begun_with_beta=found.begun_with_beta if found.beta is not None else state.begun_with_beta,
            best_step=best[0],
            best_reward=best[1],
            judged_by=state.judged_by,
            prompts=state.prompts,
            generation_batch_size=state.generation_batch_size,
            num_generations=state.num_generations,
        )

    # ---- the loop --------------------------------------------------------------------------------------------------

    def run(
        self,
        on_step: Callable[[int, dict[str, float]], None] | None = None,
        *,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        """All remaining steps, with metrics, checkpoints and the final model. on_step(step, metrics) after each.

        Writes run.json, metrics.jsonl, curves.png, samples.md and final/ into the output folder. An error leaves the
        last checkpoint and all metrics so far in place. stop: asked after every step, on each rank; where one says so,
        RunStopped is raised on all of them, with a checkpoint of that step.
        """
        world = self.world
        with contextlib.ExitStack() as stack:
            world.on_main("the output folder", lambda: stack.enter_context(locked(self.output)))
            stack.callback(self.rollouts.close)
            with self._whole_base():
                world.on_main("the start of the run", self._begin)
            self._remaining_steps(on_step, stop)
            with self._whole_base():
                world.on_main("the final model", self._end)

    def _remaining_steps(
        self, on_step: Callable[[int, dict[str, float]], None] | None, stop: Callable[[], bool] | None
    ) -> None:
        world = self.world
        with contextlib.closing(self.source), contextlib.ExitStack() as stack:
            writer = world.on_main("metrics", lambda: stack.enter_context(self._writer()))
            trackers = world.on_main("trackers", lambda: stack.enter_context(self._trackers()))
            while self.state.step < self.config.max_steps:
                with self._saved_on_error(writer):
                    metrics = self.step()
                    if self.config.eval_steps and self.state.step % self.config.eval_steps == 0:
                        found = self.evaluate()
                        self._note_best(found.get("eval/reward"))
                        metrics |= found
                        if self.config.num_samples and self.state.step < self.config.max_steps:
                            with self._whole_base():
                                world.on_main("samples", self._note_samples)
                    # bound now: it runs before the loop goes on
                    record = functools.partial(self._note, writer, trackers, metrics, on_step)
                    world.each("metrics and checkpoints", record)
                if stop is not None and self.state.step < self.config.max_steps and any(world.gather(stop())):
                    world.each("the last checkpoint", functools.partial(self._save_once, writer))
                    raise RunStopped(f"stopped at step {self.state.step} of {self.config.max_steps}")

    def _saved_on_error(self, writer: MetricsWriter | None) -> contextlib.AbstractContextManager[None]:
        """`saved_on_error` of a step; a failing reward function or server costs the answers of that step."""
        if writer is None:
            return contextlib.nullcontext()
        done, past = self.state.step, self.source.state()  # a draw that fails may have taken answers out of the source

        def save() -> None:
            self._save_after(writer, past if self.state.step == done else None)

        return saved_on_error(self.output, self.optimizer, lambda: self.state.step, save)

    def _begin(self) -> None:
        """Make the output folder ready; answers before the first step, for samples."""
        clear_later_steps(self.output, step=self.state.step, total_steps=self.config.max_steps)
        self._samples = SampleLog(self.output / SAMPLES_LOG)
        # those of this step are from before its checkpoint, or are drawn again now
        self._samples.drop_from(self.state.step + 1 if 0 < self.state.step < self.config.max_steps else self.state.step)
        self._write_record()
        if self.state.step == 0:
            self._note_samples()

    def _writer(self) -> MetricsWriter:
        writer = MetricsWriter(self.output / METRICS_FILE)
        writer.truncate_after(self.state.step)
        return writer

    def _trackers(self) -> Trackers:
        return Trackers(self.config.report_to, self.output, self.config.to_dict(), step=self.state.step)

    def _note(
        self,
        writer: MetricsWriter | None,
        trackers: Trackers | None,
        metrics: dict[str, float],
        on_step: Callable[[int, dict[str, float]], None] | None,
    ) -> None:
        """What is written and told of a step that is done. writer: of the main rank."""
        config, done = self.config, self.state.step
        if writer is not None and (done % config.logging_steps == 0 or done == config.max_steps):
            writer.write(done, metrics)
            if trackers is not None:
                trackers.log(done, metrics)
        if on_step is not None:
            on_step(done, metrics)
        regular = config.save_steps and done % config.save_steps == 0
        if done == config.max_steps or regular or self.state.best_step == done:
            self._save_after(writer)
            if writer is not None and writer.last_step > 0:  # with rare logging there may be no line yet
                plot_curves(self.output / METRICS_FILE, self.output / CURVES_FILE)

    def _end(self) -> None:
        """The final model, and samples if there are any."""
        self._save_final()
        self._note_samples()
        looks = self._samples.read()
        if not looks:
            return
        after = looks[-1]
        before = next(look for look in looks if look.prompts == after.prompts)  # the run may have gone on with others
        text = samples_markdown(after.prompts, before.completions, after.completions, before.scores, after.scores)
        (self.output / SAMPLES_FILE).write_text(text, encoding="utf-8")

    def step(self) -> dict[str, float]:
        """One rollout and its update. Nothing of a failed step is applied to what is on disk."""
        config, state, world = self.config, self.state, self.world
        if state.beta is not None:
            config = replace(config, beta=state.beta)
        clock = Clock(self.model.device)
        questions = self._orders.questions(state.step)
        own = self._orders.shares(questions, world.size)[world.rank]
        with self._whole_base():
            if config.shard_base:
                clock.lap("gather_base")
            sampled = world.each("drawing answers", lambda: self.source.draw(state.step, state.policy_version))
            rollout = gather_rollout(world, sampled.rollout)
            clock.add(sampled.seconds)
            indices = own.indices
            if sampled.policy is not None and sampled.frozen is None:
                put(sampled.policy, self.model.role_backbone(PAST).slot(PAST))
            scored = score_rollout(
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
        lesson = make_lesson(config, scored, train_actor=train_actor)
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
        if lesson.objective is not None:
            seed = config.seed * 1_000_003 + state.step
            crew = None if world.size == 1 else Crew(world, in_step=config.shard_base)
            update = learn(self.model, lesson.objective, schedule, self._apply, seed=seed, crew=crew)
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
            beta=self._next_beta(scored.metrics["kl"], n_answers),
        )
        self.optimizer.is_whole = True
        published = self.source.learned(self.state.step, self.state.policy_version)
        if config.draws_beside:
            clock.lap("publish")
        tokens = rollout.batch.n_completion_tokens
        memory = float(peak_memory_bytes(self.model.device))
        most = world.most({**clock.metrics(), "generate": sampled.generate_seconds, "peak_memory_bytes": memory})
        generate_seconds = most.pop("generate")
        return {
            **scored.metrics,
            **lesson.metrics,
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
        """Sample one answer per prompt from a role and score it, without penalties for a missing end.

        sample_ids: of the answers, from 0 on unless told; an answer's draws are a function of seed and id. With a
        sharded base all ranks call this and `kl_to_reference` together, each for answers of its own.
        """
        self.rollouts.sync(self.state.policy_version)
        asked = [prompts.ids[i] for i in indices]
        with self._whole_base():
            rollout = self.rollouts.generate(asked, self._sampling(seed), role=role, sample_ids=sample_ids)
            lane = self.model.score(rollout.batch, ("reward",)).rewards_N if self.scorer.uses_lane else None
        texts, ids = decode_answers(self.tokenizer, rollout.batch)
        scored = self.scorer(prompts.texts(indices), texts, ids, prompts.columns(indices), (True,) * len(indices), lane)
        return Answers(prompts=prompts.texts(indices), completions=texts, scores=scored.totals, rollout=rollout)

    def kl_to_reference(self, rollout: Rollout) -> float:
        """Mean over answers of Σ_t exact KL(actor ‖ reference), nats per answer."""
        return float(self._kl_sum(rollout) / rollout.batch.n_sequences)

    def _kl_sum(self, rollout: Rollout) -> torch.Tensor:
        with self._whole_base():
            scores = self.model.score(
                rollout.batch, ("actor", "reference"), temperature=self.config.temperature, exact_kl=True
            )
        assert scores.kl_M is not None
        return scores.kl_M.sum()

    def evaluate(self) -> dict[str, float]:
        """Mean score and exact KL per answer on the held-out prompts, of which each rank answers a share."""
        assert self.eval_set is not None
        n = len(self.eval_set.rows)
        own = list(share(n, self.world.rank, self.world.size))
        with self._whole_base():
            found = self.world.gather(self.world.each("evaluation", lambda: self._evaluate(own)))
        reward = mean_or_none([score for scores, _ in found for score in scores])
        metrics = {"eval/kl": float(torch.tensor([kl for _, kl in found]).sum() / n)}
        return metrics if reward is None else {**metrics, "eval/reward": reward}

    def _evaluate(self, indices: list[int]) -> tuple[list[float | None], float]:
        """Scores of answers to held-out prompts, and the sum of their KL."""
        assert self.eval_set is not None
        if not indices:  # fewer prompts than ranks
            return [], 0.0
        answers = self.answer(self.eval_set, indices, seed=self.config.seed, sample_ids=indices)
        return answers.scores, float(self._kl_sum(answers.rollout))

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

    def _save_once(self, writer: MetricsWriter | None) -> None:
        """A checkpoint of the current step, unless there is one."""
        if self._saved_step != self.state.step:
            self._save_after(writer)

    def _save_after(self, writer: MetricsWriter | None, past: PastState | None = None) -> None:
        """A checkpoint, once the metrics of the steps before it are on the disk."""
        if writer is not None:
            writer.sync()
        self.save(past)

    def finished(self) -> bool:
        """Whether every step is done and the final model is written."""
        return self.state.step >= self.config.max_steps and (self.output / FINAL_FOLDER).is_dir()

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
            reward=self.scorer.uses_lane,
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

    def _prompts(self) -> list[list[int]]:
        """All that answers will be drawn to."""
        return [*self.train_set.ids, *(self.eval_set.ids if self.eval_set is not None else [])]

    def _load_prompts(self, argument: str, path: str, context: int, limit: int | None = None) -> PromptSet:
        config = self.config
        tally = Tally(source=path, argument=argument, max_bad_rows=config.max_bad_rows)
        found = tokenize_prompts(
            load_rows(path, tally, kinds=("prompt_only",), limit=limit),
            self.tokenizer,
            tally,
            context_length=context,
            max_completion_length=config.max_completion_length,
            max_prompt_length=config.max_prompt_length,
            truncation=config.truncation,
            vocabulary=read_vocabulary(config.model_name_or_path),
        )
        self.reports[argument] = tally.report()
        return found

    def _write_record(self) -> None:
        device = self.model.device
        dtype = self.model.backbone().dtype
        record = run_record(
            config=self.config,
            command=[Path(sys.argv[0]).name, *sys.argv[1:]],
            backends=registry.report(device.type, dtype),
            device=device,
        )
        record["base_hash"] = self.model.backbone().base_hash()
        record["resumed_at_step"] = self.state.step
        if self.world.size > 1:
            record["processes"] = self.world.size
        record["data"] = {argument: report.to_dict() for argument, report in self.reports.items()}
        write_json_atomic(self.output / RECORD_FILE, record)

    def _note_samples(self) -> None:
        """Answers of the present policy to the first few prompts, held-out ones if there are any, into the log."""
        if self.config.num_samples == 0:
            return
        prompts = self.eval_set or self.train_set
        indices = list(range(min(self.config.num_samples, len(prompts.rows))))
        found = self.answer(prompts, indices, seed=self.config.seed)
        self._samples.write(
            Samples(step=self.state.step, prompts=found.prompts, completions=found.completions, scores=found.scores)
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
