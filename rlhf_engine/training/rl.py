"""The RL loop: rollout → experience → update, until done; everything can stop and go on at a step.

One step draws `generation_batch_size` answers in the actor's lane, scores them with all lanes at once, and updates
what the algorithm trains: the actor, and a critic where it has one. Data order, sampling seeds and minibatches are
functions of (seed, step): no stream is saved, and a resumed run makes the same floats as one that never stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_kernels.runtime import registry

from rlhf_engine.algorithms.base import Algorithm, Experience, find_algorithm, next_beta
from rlhf_engine.config import TrainConfig
from rlhf_engine.data import PromptSet, Row, Tally, load_rows, require_room, split_by_group
from rlhf_engine.data.tokenize import eos_token_ids
from rlhf_engine.devices import (
    ALONE,
    Budget,
    Clock,
    World,
    earlier_peaks,
    fingerprint,
    peak_memory_bytes,
    read_memory,
    resolve_device,
)
from rlhf_engine.errors import ConfigError, EngineError
from rlhf_engine.generators.sources import AnswerSource, Connect, PastState, StepPrompts, make_source
from rlhf_engine.generators.work import gather_rollout
from rlhf_engine.hydra import HydraModel, save_pretrained
from rlhf_engine.hydra.build import BEHAVIOUR, PAST, build_policy_model, check_sources
from rlhf_engine.hydra.optimizer import require_optim
from rlhf_engine.rollout import PromptBatch, SamplingConfig, exactness
from rlhf_engine.rollout.answer import load_own_tokenizer, tokenize_own_prompts
from rlhf_engine.rollout.conversation import make_conversations
from rlhf_engine.rollout.generate import Rollouts, find_server, make_rollouts
from rlhf_engine.runs.checkpoint import (
    TrainerState,
    begin_kernels,
    digest,
    load_policies,
    read_counters,
    require_same,
    resolve_resume,
)
from rlhf_engine.runs.folder import FINAL_FOLDER, check_output, clear_later_steps, require_unlocked, write_final
from rlhf_engine.runs.metrics import require_trackers
from rlhf_engine.scoring.experience import MISMATCH_MAX_FACTOR, Scoring, mismatch_bound
from rlhf_engine.scoring.rewards import ENVIRONMENT, AnswerScorer
from rlhf_engine.training.data_parallel import require_served
from rlhf_engine.training.evaluation import Evaluator
from rlhf_engine.training.run import Policy, Run
from rlhf_engine.training.update import Ranks, Schedule, Turns, alone, nothing_learned, update

_ANY = 2**62  # more tokens than there are


def new_state(
    config: TrainConfig, words: Mapping[str, int], train_set: PromptSet, eval_set: PromptSet | None
) -> TrainerState:
    """Counters of a run that begins. words: of the tokenizer. eval_set: held-out prompts."""
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
        vocabulary=digest(sorted(words.items())),
        judged_by=judged_by,
        generation_batch_size=config.generation_batch_size,
        num_generations=config.num_generations,
    )


def resumed_state(held: TrainerState, state: TrainerState, resume: Path) -> TrainerState:
    """Counters of a run that goes on; ConfigError for other prompts, a warning for another β or other rewards."""
    if held.prompts is not None and held.prompts != state.prompts:
        raise ConfigError(f"dataset_name: expected the prompts of the run of {resume}, got others")
    if held.vocabulary not in (None, state.vocabulary):
        raise ConfigError(f"model_name_or_path: expected the tokenizer of the run of {resume}, got another")
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

    def learn(self, experience: Experience, *, n_answers: int) -> Turns[dict[str, float]]:
        """Make one step in turns: all epochs over an experience; metrics by name. What fails is not applied."""
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
            args = (self.model, algorithm, learned, schedule, self.apply)
            measured = yield from update(*args, seed=seed, ranks=ranks)
        self.model.eval()
        self._check_moved(before, measured)
        if options.has_critic:
            self.model.trained_heads.add("value")
        if self.world.size > 1:
            self.require_same(state.step + 1)
        beta = None  # the KL coefficient from now on, where one adapts
        if state.beta is not None and options.kl_target is not None:
            beta = next_beta(state.beta, experience.mean_kl, target=options.kl_target, n_answers=n_answers)
        self.advance(
            samples=state.samples + n_answers,
            policy_version=state.policy_version + int(measured["optimizer_steps"] > 0),
            **self._settle_budgets(),
            beta=beta,
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


# ---- the loop --------------------------------------------------------------------------------------------------------


REWARD_SECONDS = 1800.0  # seconds after which a call of a reward function is given up


class RlTrainer(Run[TrainerState]):
    """RL by any algorithm. Construction finds everything that can be wrong with the request; `run` spends the time."""

    config: TrainConfig
    """Options of the run."""
    policy: RlPolicy
    """Policy that is trained."""
    train_set: PromptSet
    """Prompts that are learned from."""
    eval_set: PromptSet | None = None
    """Held-out prompts."""

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
                resume, resumed_step = self._read()
                model = build_policy_model(self.config, base)
            self._share_out(model, rows=self.train_set.ids, step=resumed_step)
            begun = new_state(self.config, self.tokenizer.get_vocab(), self.train_set, self.eval_set)
            with world.together("the start of the run"):
                self.policy = RlPolicy(self.config, model, begun, longest=self._longest(), resume=resume, world=world)
            with self.whole_base(), world.together("the start of the run"):
                self._prepare(model, resume)
        if world.size > 1:
            self.policy.require_same(self.state.step)

    def _read(self) -> tuple[Path | None, int]:
        """Check the request and read its data; the checkpoint that the run goes on from, and its steps."""
        config, resume, resumed_step = self.config, None, 0
        if not config.dry_run:  # which begins anew and writes nothing
            require_unlocked(self.output)  # before the look for checkpoints, which finishes what a dead process began
            resume = resolve_resume(config.resume_from_checkpoint, self.output)
            check_output(self.output, resume=config.resume_from_checkpoint, checkpoint=resume)
        require_trackers(config.report_to)
        require_optim(config.optim)
        if resume is not None:
            held: TrainerState = read_counters(resume)
            resumed_step, fixed = held.step, ("seed", "algorithm", "generation_batch_size", "num_generations")
            require_same(resume, held, **{name: getattr(config, name) for name in fixed})
        exact = config.exact
        if exact is None and resume is None:
            exact = not config.vllm_servers and exactness.by_default(resolve_device(config.device).type)
        begin_kernels(resume, exact=exact)
        check_sources(config)
        self.tokenizer = load_own_tokenizer(config)
        self.conversations = make_conversations(config, self.tokenizer)
        has_reward = self.conversations is not None and self.conversations.has_reward
        if ENVIRONMENT in config.reward_funcs and not has_reward:
            raise ConfigError("reward_funcs: expected another than 'environment', which gives no rewards")
        if has_reward and ENVIRONMENT not in config.reward_funcs:
            weights = config.reward_weights and [*config.reward_weights, 1.0]
            config = replace(config, reward_funcs=[*config.reward_funcs, ENVIRONMENT], reward_weights=weights)
        scoring = (config.reward_funcs, config.reward_weights, *config.unfinished)
        self.scorer = AnswerScorer(*scoring, timeout=REWARD_SECONDS)
        self.reports = {}
        self.train_set = self._read_prompts("dataset_name", config.dataset_name)
        if config.eval_share is not None:
            parts = split_by_group(self.train_set.rows, share=config.eval_share, seed=config.seed)
            self.train_set, self.eval_set = (_part(self.train_set, part) for part in parts)
        self.total_steps = config.count_steps(len(self.train_set.rows))
        if config.dry_run:
            rows, ids = self.train_set.rows, self.train_set.ids
            longest = sorted(range(len(ids)), key=lambda i: -len(ids[i]))[: config.prompts_per_step]
            self.train_set = _part(self.train_set, [rows[i] for i in longest])
        if resumed_step > self.total_steps and not (self.output / FINAL_FOLDER).is_dir():
            done, got = f"those of {resume}", self.total_steps
            option = "max_steps" if config.num_train_epochs is None else "num_train_epochs"
            raise ConfigError(f"{option}: expected at least {resumed_step} steps, {done}, got {got}")
        if isinstance(config.eval_dataset_name, str):
            self.eval_set = self._read_prompts("eval_dataset_name", config.eval_dataset_name)
        some = list(range(min(2, len(self.train_set.rows))))
        self.scorer.dry_run(self.train_set.written(some), self.train_set.columns(some))
        if self.conversations is not None:
            self.conversations.dry_run(self.train_set.conversations(some)[0], self.train_set.ids[0])
        require_room(self._longest(), config.max_tokens_per_micro_batch)
        self._all_prompts = [*self.train_set.ids, *(self.eval_set.ids if self.eval_set is not None else [])]
        self._server = find_server(config, self._all_prompts, rank=self.world.rank)
        self.config = replace(config, max_steps=self.total_steps)
        return resume, resumed_step

    def _read_prompts(self, argument: str, path: str) -> PromptSet:
        config = self.config
        tally = Tally(source=path, argument=argument, max_bad_rows=config.max_bad_rows)
        rows = load_rows(path, tally, config, kinds=("prompt_only",))
        self.reports[argument] = tally
        if self.conversations is not None:
            rows = self.conversations.rows(rows)
        return tokenize_own_prompts(config, rows, self.tokenizer, tally)

    def _longest(self) -> int:
        """Most tokens that stay together in a micro-batch: of an answer, or of several to a prompt."""
        longest = max(map(len, self.train_set.ids)) + self.config.max_completion_length
        return self.config.facts.answers_together * longest

    def _prepare(self, model: HydraModel, resume: Path | None) -> None:
        config, state = self.config, self.state
        if resume is None:
            exactness.settle(config.exact, model.role_backbone("actor"))
        self.rollouts = self._make_rollouts()
        sampling, world = self.sampling(config.seed), self.world
        self._prompts = StepPrompts(
            config, self.train_set, sampling, step=state.step, samples=state.samples, world=world
        )
        budget = self.policy.budgets["scoring_tokens"]
        self._scoring = Scoring(model, self.scorer, self.tokenizer, self.train_set, self.world, budget)
        self.scorer.trainer_state.max_steps = self.total_steps
        self._note_progress()
        self.source = self._make_source(resume)
        """Answers to learn from."""
        # a checkpoint's alone: the source knows them from here on
        self.state = replace(self.state, policies_after={}, drawn_by={})
        self.evaluation = Evaluator(self)
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

    def end(self) -> None:
        """Write samples, if there are any, and last the final model, by which a run counts as finished."""
        self.evaluation.note_samples()
        self.evaluation.write_samples()
        write_final(self.output, self._write_model)

    def describe(self) -> dict[str, Any]:
        """Hash of a frozen base, for the run's record; one that is trained has none that would mean something later."""
        backbone = self.model.backbone()
        return {"base_hash": backbone.base_hash() if backbone.frozen else None}

    def finished(self) -> bool:
        """Whether every step is done and the final model is written."""
        return self._is_last() and (self.output / FINAL_FOLDER).is_dir()

    def save(self, past: PastState | None = None) -> Path:
        """Write a checkpoint of the current step on the main rank, `past` None: as it is now; its folder."""
        past = self.source.state() if past is None else past
        state = replace(
            self.state,
            policies_after={str(done): policy.version for done, policy in past.policies.items()},
            drawn_by={str(step): version for step, version in past.drawn_by.items()},
        )
        policies = {policy.version: policy for policy in past.policies.values()}
        return self._save(state, policies)

    def make_saver(self) -> Callable[[], object]:
        """Make a function that writes a checkpoint with the source of answers as it is now, before a draw fails."""
        done, past = self.state.step, self.source.state()
        return lambda: self.save(past if self.state.step == done else None)

    def next_prompts(self) -> PromptBatch:
        """Choose the prompts of the next step that this rank draws answers to, one per answer."""
        return self._prompts.own(self.state.step)

    def step(self) -> dict[str, float]:
        """Make one rollout and its update; metrics by name. A failure is an EngineError; nothing on disk changes."""
        with self.kernels.used():
            return alone(self.step_in_turns())

    def step_in_turns(self) -> Turns[dict[str, float]]:
        """Do what `step` does, in turns of a pass; `kernels` are in use during each."""
        config, state, world = self.policy.options, self.state, self.world
        clock, version = Clock(self.model.device, with_peaks=config.dry_run), state.policy_version
        prompts, own = self._prompts.of_step(state.step), self._prompts.own(state.step)
        with self.whole_base():
            if config.shard_base:
                clock.lap("gather_base")
            with world.together("drawing answers"):
                share, drawn = self.source.draw(state.step, version, clock.lap)
            rollout = share if world.size == 1 else gather_rollout(world, share)
            experience = self._scoring.experience(share, own, config, version, (rollout, prompts))
        clock.lap("score")
        learned = yield from self.policy.learn(experience, n_answers=len(prompts))
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

    def sampling(self, seed: int) -> SamplingConfig:
        ends = () if self.config.dry_run else eos_token_ids(self.tokenizer, self.model.backbone().model)
        return SamplingConfig.of(self.config, ends, seed=seed)

    def _make_rollouts(self, role: str = "actor", compared: str | None = None) -> Rollouts:
        given = (self.config, self.model, self._server, self._all_prompts)
        options: dict[str, Any] = {"role": role, "compared": compared, "rank": self.world.rank}
        return make_rollouts(*given, **options, conversations=self.conversations)

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


def _part(prompts: PromptSet, rows: Sequence[Row]) -> PromptSet:
    """The prompts of some of the rows."""
    places = {id(row): place for place, row in enumerate(prompts.rows)}
    kept = [places[id(row)] for row in rows]
    texts, ids = [prompts.prompts[i] for i in kept], [prompts.ids[i] for i in kept]
    return PromptSet(rows=list(rows), prompts=texts, ids=ids)
