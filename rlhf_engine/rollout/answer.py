"""Answers to prompts for people: what `rlhf-engine generate` does."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_engine.config import EvaluateConfig, GenerateConfig, TrainConfig
from rlhf_engine.data import PromptSet, Row, Tally, load_rows, plain_prompts, tokenize_prompts
from rlhf_engine.data.read import read_text
from rlhf_engine.data.tokenize import eos_token_ids, load_tokenizer, require_same_tokens
from rlhf_engine.devices import DTYPES, resolve_device
from rlhf_engine.errors import ConfigError, NonFiniteError
from rlhf_engine.hydra import OFF, HydraModel, PackedBatch, RoleSpec, peft_io, reward_model
from rlhf_engine.hydra.gate import ScalarHead
from rlhf_engine.hydra.loading import read_context_length, read_vocabulary
from rlhf_engine.io import LineFile, json_digest
from rlhf_engine.rollout import exactness
from rlhf_engine.rollout.engine import RolloutEngine
from rlhf_engine.rollout.generate import RolloutCheck, check_rollout, collect
from rlhf_engine.rollout.request import EngineOptions, Request, RolloutStats, SamplingConfig, StopTexts
from rlhf_engine.rollout.rows import AnswerRow


def build_answer_model(
    config: GenerateConfig | EvaluateConfig, adapters: Mapping[str, str | None], *, reward_for: str | None = None
) -> HydraModel:
    """Build the policies of a command, each a slot of the base, and a role `reward` for the option that wants one."""
    dtype, device = DTYPES[config.dtype], resolve_device(config.device)
    roles = {role: RoleSpec(slot=role if folder else OFF) for role, folder in adapters.items()}
    slots = {role: peft_io.read_slot_config(folder) for role, folder in adapters.items() if folder}
    base: str | PreTrainedModel = config.model_name_or_path
    others: dict[str, str | PreTrainedModel] = {}
    if reward_for is None:
        return HydraModel.from_pretrained(base, roles=roles, slots=slots, dtype=dtype, device=device)
    source = config.reward_model_path or config.model_name_or_path
    head = reward_model.require_reward_head(source, reward_for)
    slot = OFF
    if config.reward_adapter is not None:
        slot, slots["reward"] = "reward", peft_io.read_slot_config(config.reward_adapter)
    place = "base"
    if config.whole_reward_model is not None:
        base, other = reward_model.load_beside(
            config.model_name_or_path, config.whole_reward_model, dtype=dtype, device=device
        )
        if other is not None:
            others, place = {"reward": other}, "reward"
    roles["reward"] = RoleSpec(backbone=place, slot=slot, head="reward")
    model = HydraModel.from_pretrained(base, roles=roles, slots=slots, backbones=others, dtype=dtype, device=device)
    scalar_head = model.heads["reward"]
    assert isinstance(scalar_head, ScalarHead)
    reward_model.load_reward_head(scalar_head, head, reward_for)
    return model


def load_own_tokenizer(config: TrainConfig | GenerateConfig | EvaluateConfig) -> PreTrainedTokenizerBase:
    """Load the base's tokenizer. ConfigError where a whole reward model reads other tokens."""
    tokenizer = load_tokenizer(config.model_name_or_path)
    if config.whole_reward_model is not None:
        require_same_tokens(tokenizer, config.whole_reward_model, read_vocabulary(config.model_name_or_path))
    return tokenizer


def tokenize_own_prompts(
    config: TrainConfig | GenerateConfig | EvaluateConfig,
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    tally: Tally,
) -> PromptSet:
    """Tokenize rows as prompts of a command's base, with room for an answer there and in a whole reward model."""
    return tokenize_prompts(
        rows, tokenizer, tally,
        context_length=read_context_length(config.model_name_or_path, config.whole_reward_model),
        max_completion_length=config.max_completion_length, max_prompt_length=config.max_prompt_length,
        truncation=config.truncation, vocabulary=read_vocabulary(config.model_name_or_path),
    )  # fmt: skip


class AnswerSession:
    """The answers that a `GenerateConfig` asks for, each a row that is added to `out` as it is finished."""

    def __init__(self, config: GenerateConfig) -> None:
        self.config = config
        argument, source = config.prompt_source
        self.report = Tally(source=source, argument=argument, max_bad_rows=config.max_bad_rows)
        rows = read_prompts(config, self.report)
        self.tokenizer = load_own_tokenizer(config)
        prompts = tokenize_own_prompts(config, rows, self.tokenizer, self.report)
        shown = [
            row.prompt if isinstance(row.prompt, str) else text  # strings whole: answers are found again by them
            for row, text in zip(prompts.rows, prompts.prompts, strict=True)
        ]
        self.texts = [text for text in shown for _ in range(config.num_generations)]
        self._out = None if config.out is None else LineFile(Path(config.out))
        self.done = set() if self._out is None else _held(self._out, self.texts, config)  # places that `out` held
        adapters = {"actor": config.adapter}
        self.model = build_answer_model(config, adapters, reward_for="best_of" if config.best_of else None)
        exactness.settle(config.exact, self.model.role_backbone("actor"))
        ends = eos_token_ids(self.tokenizer, self.model.backbone().model)
        self._sampling = SamplingConfig.of(config, ends)
        self._stops = StopTexts(self._sampling.stop, self._raw_text)
        self._places = [i for i in range(len(self.texts)) if i not in self.done]
        self._each = config.best_of or 1
        self._requests = [
            Request(prompt=prompt, sample_id=i * self._each + j, greedy=config.greedy)
            for i in self._places
            for prompt in [tuple(prompts.ids[i // config.num_generations])]
            for j in range(self._each)
        ]
        self._engine = RolloutEngine(self.model, options=EngineOptions.of(config))
        if self._requests:
            self._engine.submit(self._requests, self._sampling, decode=self._raw_text)
        self._answers: list[AnswerRow] = []
        self._groups: dict[int, list[AnswerRow]] = {}
        self._rows_left = len(self._places)

    @property
    def stats(self) -> RolloutStats:
        """Statistics of time and memory so far."""
        return self._engine.stats

    def step(self) -> list[dict[str, Any]]:
        """One token more for every answer being written; the rows of those that finished."""
        complete = []
        for answer in self._engine.step():
            self._answers.append(answer)
            group = self._groups.setdefault(answer.index // self._each, [])
            group.append(answer)
            if len(group) == self._each:
                complete.append(self._groups.pop(answer.index // self._each))
        rows = self._best_rows(complete) if self.config.best_of else [self._row(answer) for (answer,) in complete]
        self._rows_left -= len(rows)
        if self._out is not None:
            for row in rows:
                self._out.add({**row, "settings": _settings(self.config)})
        return rows

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows that are missing, as they finish."""
        while not self.finished():
            yield from self.step()

    def finished(self) -> bool:
        """Whether every answer is there."""
        return self._rows_left == 0

    @property
    def streams(self) -> bool:
        """Whether there is a single answer, which can be shown as it is written."""
        return len(self.texts) == 1 and self._each == 1

    def partial_text(self) -> str:
        """Text of the only answer so far, without the characters that its next tokens may still change."""
        assert len(self._requests) == 1
        text = self._text(self._engine.partial(0)).rstrip("\ufffd")
        return text[: len(text) - self._stops.may_begin(text)]

    def check(self) -> RolloutCheck:
        """The finished answers beside the training forward, see `check_rollout`."""
        requests = [self._requests[answer.index] for answer in sorted(self._answers, key=lambda answer: answer.index)]
        rollout = collect(self._engine, requests, self._answers)
        options = EngineOptions.of(self.config)
        return check_rollout(self.model, rollout, requests, self._sampling, options=options)

    def _best_rows(self, groups: list[list[AnswerRow]]) -> list[dict[str, Any]]:
        """The answer of each group that the reward likes best, the first drawn among equals."""
        if not groups:
            return []
        answers = [answer for group in groups for answer in sorted(group, key=lambda answer: answer.index)]
        batch = PackedBatch.from_lists(
            [self._requests[answer.index].prompt for answer in answers],
            [answer.tokens for answer in answers],
            device=self.model.device,
        )
        rewards_N = self.model.score(batch, ("reward",)).rewards_N
        assert rewards_N is not None
        bad = ~rewards_N.isfinite()
        if bad.any():
            place = self._places[answers[int(bad.int().argmax())].index // self._each]
            raise NonFiniteError(f"reward of an answer to prompt {place} is {float(rewards_N[bad][0])}")
        rows = []
        for k, scores in enumerate(rewards_N.view(len(groups), self._each).tolist()):
            best = max(range(self._each), key=scores.__getitem__)
            row = self._row(answers[k * self._each + best])
            rows.append({**row, "score": scores[best], "mean_score": sum(scores) / self._each})
        return rows

    def _row(self, answer: AnswerRow) -> dict[str, Any]:
        place = self._places[answer.index // self._each]
        return {
            "index": place, "prompt": self.texts[place], "completion": self._text(answer.tokens),
            "completion_ids": list(answer.tokens), "tokens": len(answer.tokens),
            "finish_reason": answer.finish_reason, "mean_logprob": sum(answer.logprobs) / len(answer.logprobs),
        }  # fmt: skip

    def _raw_text(self, tokens: Any) -> str:
        return str(self.tokenizer.decode(tokens))

    def _text(self, tokens: Any) -> str:
        return self._stops.cut(str(self.tokenizer.decode(tokens, skip_special_tokens=True)))


def _held(out: LineFile, texts: list[str], config: GenerateConfig) -> set[int]:
    """Places of the answers that a file holds. Raises ConfigError for one of another request, or not to go on with."""
    path, settings = out.path, _settings(config)
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"out: expected a file in a folder that exists, got {str(path)!r}")
    if path.exists() and not config.resume:
        raise ConfigError(f"out: expected a file that does not exist, got {str(path)!r}; --resume goes on with it")
    done = set()
    for number, row in out.read("out"):
        place = f"out: {path}:{number}: expected an answer"
        if row.get("settings") != settings:
            raise ConfigError(f"{place} of this model with these options, got one of others")
        index, prompt = row["index"], row["prompt"]
        if index >= len(texts) or texts[index] != prompt:
            raise ConfigError(f"{place} to one of these prompts, got one to {prompt!r} at place {index}")
        done.add(index)
    return done


_PROMPTS = {"prompt", "prompt_file", "dataset_name", "max_bad_rows"}
_ASKED = {*_PROMPTS, "num_generations", "out", "resume", "json", "verify_rollout"}
_HOW = {"kv_cache_memory", "decode_step", "exact", "device", "kernels"}
"""Options that say which answers are asked for; those that change them by rounding at most."""


def _settings(config: GenerateConfig) -> str:
    """A digest of the options that answers depend on."""
    kept = {name: value for name, value in config.to_dict().items() if name not in _ASKED | _HOW}
    # options that files began with
    earlier = {"dataset_streaming": False, "ignore_eos": False, "reward_adapter": config.reward_adapter}
    kept |= {**earlier, "reward_model_path": config.whole_reward_model}
    return json_digest(kept)


def summary(session: AnswerSession) -> str:
    """Summary of a session in words: tokens, speed, steps, and most rows at once."""
    stats = session.stats
    return (
        f"{stats.tokens:,} tokens, {stats.tokens_per_second:,.0f} tokens/s ({stats.prefill_seconds:.2f} s for "
        f"{stats.prompt_tokens:,} prompt tokens, {stats.decode_seconds:.2f} s for {stats.steps:,} {stats.step} steps, "
        f"at most {stats.most_rows} rows at once)"
    )


def read_prompts(config: GenerateConfig, tally: Tally) -> list[Row]:
    """Prompts that the request names. Raises ConfigError for none, an empty one, and as `load_rows` does."""
    if config.dataset_name is not None:
        return load_rows(config.dataset_name, tally, config, kinds=("prompt_only",))
    if config.prompt_file is None:
        prompts = dict(enumerate(config.prompt or (), start=1))
    else:
        lines = enumerate(_text_of(config.prompt_file).split("\n"), start=1)
        prompts = {i: line.rstrip("\r") for i, line in lines if line.strip()}
    for i, prompt in prompts.items():
        if not prompt.strip():
            raise ConfigError(f"prompt: expected text, got an empty prompt at place {i - 1}")
    if not prompts:
        raise ConfigError(f"prompt_file: expected at least one prompt in {config.prompt_file!r}, got none")
    tally.read = len(prompts)
    return plain_prompts(prompts, tally.source)


def _text_of(name: str) -> str:
    """Standard input or a text file."""
    return sys.stdin.read() if name == "-" else read_text(name, "prompt_file")
