"""Inputs of an RL run, read before its first step: prompts, tokenizer, reward sources, server, and where it goes on."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rlhf_engine.config import TrainConfig
from rlhf_engine.data import PromptSet, Row, Tally, load_rows, require_room, split_by_group, tokenize_prompts
from rlhf_engine.devices import resolve_device
from rlhf_engine.errors import ConfigError
from rlhf_engine.hydra.loading import read_context_length, read_vocabulary
from rlhf_engine.policy.adamw import require_optim
from rlhf_engine.policy.build import check_sources
from rlhf_engine.rollout import exactness
from rlhf_engine.rollout.build import RolloutServer, find_server
from rlhf_engine.runs.checkpoint import TrainerState, begin_kernels, digest, read_counters, require_same, resolve_resume
from rlhf_engine.runs.folder import FINAL_FOLDER, check_output, require_unlocked
from rlhf_engine.runs.metrics import require_trackers
from rlhf_engine.scoring.rewards import AnswerScorer
from rlhf_engine.tokenizing import load_tokenizer, require_same_tokens

REWARD_SECONDS = 1800.0
"""Seconds after which a call of a reward function is given up."""


@dataclass(frozen=True, kw_only=True)
class RlInputs:
    """Everything that an RL run reads, apart from its model."""

    resume: Path | None
    """Checkpoint that the run goes on from."""
    resumed_step: int
    """Steps done by then."""
    total_steps: int
    """Steps of the whole run."""
    tokenizer: PreTrainedTokenizerBase
    scorer: AnswerScorer
    train_set: PromptSet
    eval_set: PromptSet | None
    """Held-out prompts."""
    reports: dict[str, Tally]
    """Report on the rows of each source, by the option that names it."""
    server: RolloutServer | None
    """Server that draws answers; None where this process does."""

    def all_prompts(self) -> list[list[int]]:
        """Token ids of every prompt that answers will be drawn to."""
        return [*self.train_set.ids, *(self.eval_set.ids if self.eval_set is not None else [])]


def load_inputs(config: TrainConfig, *, rank: int = 0) -> RlInputs:
    """Check the request and read its data, as this rank of the run."""
    output = Path(config.output_dir)
    resume = None if config.dry_run else resolve_resume(config.resume_from_checkpoint, output)
    if not config.dry_run:  # which begins anew and writes nothing
        require_unlocked(output)
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
    if config.reward_model_path is not None:
        require_same_tokens(tokenizer, config.reward_model_path, read_vocabulary(config.model_name_or_path))
    scorer = AnswerScorer(
        config.reward_funcs,
        config.reward_weights,
        config.missing_eos_penalty,
        config.missing_eos_score,
        timeout=REWARD_SECONDS,
    )
    context = read_context_length(config.model_name_or_path, config.reward_model_path)
    reports: dict[str, Tally] = {}

    def load_prompts(argument: str, path: str, limit: int | None = None) -> PromptSet:
        tally = Tally(source=path, argument=argument, max_bad_rows=config.max_bad_rows)
        prompts = tokenize_prompts(
            load_rows(path, tally, config, kinds=("prompt_only",), limit=limit),
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

    train_set, eval_set = load_prompts("dataset_name", config.dataset_name, config.dataset_limit), None
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
    longest = max(map(len, train_set.ids)) + config.max_completion_length
    require_room(config.facts.answers_together * longest, config.max_tokens_per_micro_batch)
    inputs = RlInputs(
        resume=resume,
        resumed_step=resumed_step,
        total_steps=total_steps,
        tokenizer=tokenizer,
        scorer=scorer,
        train_set=train_set,
        eval_set=eval_set,
        reports=reports,
        server=None,
    )
    return replace(inputs, server=find_server(config, inputs.all_prompts(), rank=rank))


def _part(prompts: PromptSet, rows: Sequence[Row]) -> PromptSet:
    """The prompts of some of the rows, which are in the same order."""
    chosen, of_row = {id(row) for row in rows}, zip(prompts.rows, prompts.prompts, prompts.ids, strict=True)
    kept = [(text, ids) for row, text, ids in of_row if id(row) in chosen]
    return PromptSet(rows=list(rows), prompts=[text for text, _ in kept], ids=[ids for _, ids in kept])


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


# ---- counters --------------------------------------------------------------------------------------------------------


def new_state(config: TrainConfig, inputs: RlInputs) -> TrainerState:
    """Counters of a run that begins."""
    beta = None if config.kl_target is None else config.beta
    judged_by = None
    if inputs.eval_set is not None:  # what an evaluation's reward is measured by
        unfinished = (config.missing_eos_penalty, config.missing_eos_score)
        judged_by = digest([config.to_dict()["reward_funcs"], config.reward_weights, *unfinished, inputs.eval_set.ids])
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
    """Counters of a run that goes on. held: of its checkpoint. state: of a run that would begin with these options.

    Raises ConfigError for other prompts; warns of another β or other rewards.
    """
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
