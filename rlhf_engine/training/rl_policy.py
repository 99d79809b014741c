"""The policy of an RL run: how it learns from answers, beside what every policy has.

Every random number of an update is a function of (seed, step), so no stream is saved.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rlhf_engine.algorithms.base import Algorithm, Experience, find_algorithm, next_beta
from rlhf_engine.config import TrainConfig
from rlhf_engine.data import PromptSet, Row, Tally, load_rows, require_room, split_by_group, tokenize_prompts
from rlhf_engine.data.tokenizer import load_tokenizer, require_same_tokens
from rlhf_engine.devices import ALONE, Budget, World, fingerprint, read_memory, resolve_device
from rlhf_engine.errors import ConfigError, EngineError
from rlhf_engine.hydra import HydraModel
from rlhf_engine.hydra.build import check_sources
from rlhf_engine.hydra.loading import read_context_length, read_vocabulary
from rlhf_engine.hydra.optimizer import require_optim
from rlhf_engine.rollout import exactness
from rlhf_engine.rollout.backend import RolloutServer, find_server
from rlhf_engine.runs.checkpoint import TrainerState, begin_kernels, digest, read_counters, require_same, resolve_resume
from rlhf_engine.runs.folder import FINAL_FOLDER, check_output, require_unlocked
from rlhf_engine.runs.metrics import require_trackers
from rlhf_engine.scoring.experience import MISMATCH_MAX_FACTOR, mismatch_bound
from rlhf_engine.scoring.rewards import AnswerScorer
from rlhf_engine.training.run import Policy
from rlhf_engine.training.update import Ranks, Schedule, nothing_learned, update

_ANY = 2**62  # more tokens than there are
REWARD_SECONDS = 1800.0  # seconds after which a call of a reward function is given up


@dataclass(frozen=True, kw_only=True)
class RlInputs:
    """Everything that an RL run reads, apart from its model."""

    resume: Path | None  # checkpoint that the run goes on from
    resumed_step: int  # steps done by then
    total_steps: int  # steps of the whole run
    tokenizer: PreTrainedTokenizerBase
    scorer: AnswerScorer
    train_set: PromptSet
    eval_set: PromptSet | None  # held-out prompts
    reports: dict[str, Tally]  # report on the rows of each source, by the option that names it
    longest: int  # most tokens that stay together in a micro-batch: of an answer, or of several to a prompt
    all_prompts: list[list[int]]  # token ids of every prompt that answers will be drawn to
    server: RolloutServer | None  # server that draws answers; None where this process does


def load_inputs(config: TrainConfig, *, rank: int = 0) -> RlInputs:
    """Check the request and read its data, as this rank of the run."""
    output = Path(config.output_dir)
    resume = None
    if not config.dry_run:  # which begins anew and writes nothing
        require_unlocked(output)  # before the look for checkpoints, which finishes what a dead process has begun
        resume = resolve_resume(config.resume_from_checkpoint, output)
        check_output(output, resume=config.resume_from_checkpoint, checkpoint=resume)
    require_trackers(config.report_to)
    require_optim(config.optim)
    resumed_step = 0 if resume is None else _check_resumed(config, resume)
    exact = config.exact
    if exact is None and resume is None:
        exact = not config.vllm_servers and exactness.by_default(resolve_device(config.device).type)
    begin_kernels(resume, exact=exact)
    check_sources(config)
    tokenizer = load_tokenizer(config.model_name_or_path)
    if config.whole_reward_model is not None:
        require_same_tokens(tokenizer, config.whole_reward_model, read_vocabulary(config.model_name_or_path))
    scorer = AnswerScorer(config.reward_funcs, config.reward_weights, *config.unfinished, timeout=REWARD_SECONDS)
    context = read_context_length(config.model_name_or_path, config.whole_reward_model)
    reports: dict[str, Tally] = {}

    def load_prompts(argument: str, path: str) -> PromptSet:
        tally = Tally(source=path, argument=argument, max_bad_rows=config.max_bad_rows)
        prompts = tokenize_prompts(
            load_rows(path, tally, config, kinds=("prompt_only",)),
            tokenizer,
            tally,
            context_length=context,
            max_completion_length=config.max_completion_length,
            max_prompt_length=config.max_prompt_length,
            truncation=config.truncation,
            vocabulary=read_vocabulary(config.model_name_or_path),
        )
        reports[argument] = tally
        return prompts

    train_set, eval_set = load_prompts("dataset_name", config.dataset_name), None
    if config.eval_share is not None:
        split = split_by_group(train_set.rows, share=config.eval_share, seed=config.seed, argument="eval_dataset_name")
        train_set, eval_set = _part(train_set, split.train), _part(train_set, split.held_out)
    total_steps = config.count_steps(len(train_set.rows))
    if config.dry_run:
        by_length = sorted(zip(train_set.ids, train_set.rows, strict=True), key=lambda pair: -len(pair[0]))
        train_set = _part(train_set, [row for _, row in by_length[: config.prompts_per_step]])
    if resumed_step > total_steps and not (output / FINAL_FOLDER).is_dir():
        if config.num_train_epochs is None:
            raise ConfigError(f"max_steps: expected at least {resumed_step}, the steps of {resume}, got {total_steps}")
        raise ConfigError(
            f"num_train_epochs: expected at least {resumed_step} steps, those of {resume}, got {total_steps}"
        )
    if isinstance(config.eval_dataset_name, str):
        eval_set = load_prompts("eval_dataset_name", config.eval_dataset_name)
    some = list(range(min(2, len(train_set.rows))))
    scorer.dry_run(train_set.written(some), train_set.columns(some))
    longest = config.facts.answers_together * (max(map(len, train_set.ids)) + config.max_completion_length)
    require_room(longest, config.max_tokens_per_micro_batch)
    all_prompts = [*train_set.ids, *(eval_set.ids if eval_set is not None else [])]
    return RlInputs(
        resume=resume,
        resumed_step=resumed_step,
        total_steps=total_steps,
        tokenizer=tokenizer,
        scorer=scorer,
        train_set=train_set,
        eval_set=eval_set,
        reports=reports,
        longest=longest,
        all_prompts=all_prompts,
        server=find_server(config, all_prompts, rank=rank),
    )


def _part(prompts: PromptSet, rows: Sequence[Row]) -> PromptSet:
    """The prompts of some of the rows."""
    places = {id(row): place for place, row in enumerate(prompts.rows)}
    kept = [places[id(row)] for row in rows]
    texts, ids = [prompts.prompts[i] for i in kept], [prompts.ids[i] for i in kept]
    return PromptSet(rows=list(rows), prompts=texts, ids=ids)


def _check_resumed(config: TrainConfig, resume: Path) -> int:
    """Steps of the checkpoint. Raises ConfigError for one that this run cannot go on from."""
    counters: TrainerState = read_counters(resume)
    require_same(
        resume,
        counters,
        seed=config.seed,
        algorithm=config.algorithm,
        generation_batch_size=config.generation_batch_size,
        num_generations=config.num_generations,
    )
    return counters.step


def new_state(config: TrainConfig, inputs: RlInputs) -> TrainerState:
    """Counters of a run that begins."""
    beta = None if config.kl_target is None else config.beta
    judged_by = None
    if inputs.eval_set is not None:  # what an evaluation's reward is measured by
        rewards = [config.to_dict()["reward_funcs"], config.reward_weights, *config.unfinished]
        judged_by = digest([*rewards, inputs.eval_set.ids])
    return TrainerState(
        step=0,
        seed=config.seed,
        algorithm=config.algorithm,
        samples=0,
        policy_version=0,
        beta=beta,
        begun_with_beta=beta,
        prompts=digest(inputs.train_set.ids),
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

    def __init__(self, config: TrainConfig, model: HydraModel, inputs: RlInputs, world: World = ALONE) -> None:
        """Take a model as it is before any step, or go on from a checkpoint; ConfigError where that does not fit."""
        rates = {"actor": config.learning_rate}
        if config.has_critic:
            critic_rate = config.critic_learning_rate
            rates["critic"] = critic_rate if critic_rate is not None else config.learning_rate
        super().__init__(config, model, rates, new_state(config, inputs), world=world)
        if (resume := inputs.resume) is not None:
            self.state = resumed_state(self.load(resume, config.max_steps), self.state, resume)
        _require_memory(model, inputs.longest // config.facts.answers_together)
        named = config.per_device_train_batch_size or config.max_tokens_per_micro_batch
        kinds = {"micro_batch_tokens": (inputs.longest, named is None), "scoring_tokens": (1, True)}
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
        train_actor = options.dry_run or state.step >= options.critic_warmup_steps
        algorithm = make_algorithm(options, train_actor=train_actor)
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
            policy_version=state.policy_version + int(train_actor and measured["optimizer_steps"] > 0),
            **self._settle_budgets(is_whole=train_actor),
            beta=self._next_beta(experience.mean_kl, n_answers),
        )
        adapted = {} if state.beta is None else {"beta": state.beta}
        return {**metrics, **measured, **self.state.budgets, **adapted, "learning_rate": options.learning_rate * factor}

    def _settle_budgets(self, *, is_whole: bool) -> dict[str, dict[str, int]]:
        """Choose and lower budgets at the end of a step, see `Budget.settle`; counters of a checkpoint."""
        chosen, failures = {}, {}
        for name, budget in self.budgets.items():
            room = budget.settle(self.world.gather, is_whole=is_whole)
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


def make_algorithm(config: TrainConfig, *, train_actor: bool = True) -> Algorithm:
    """Make the algorithm of a run with its options; `train_actor` is False while only a critic warms up."""
    return find_algorithm(config.algorithm)(
        config,
        temperature=config.temperature,
        max_completion_length=config.max_completion_length,
        train_actor=train_actor,
    )
