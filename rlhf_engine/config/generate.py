"""Options of `rlhf-engine generate`: answers of a model with or without an adapter."""

# ruff: noqa: RUF009 - `option` and `required` return dataclasses.field(...), which ruff cannot see

from __future__ import annotations

from dataclasses import dataclass

from rlhf_engine.config.data import SOURCES, SUFFIXES, RowOptions
from rlhf_engine.config.parser import option
from rlhf_engine.config.rollout import EngineConfig, SamplingOptions
from rlhf_engine.config.training import (
    ModelOptions,
    not_empty,
)
from rlhf_engine.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(SamplingOptions, EngineConfig, RowOptions, ModelOptions):
    """Answers to prompts, by a base model with or without an adapter."""

    FIRST = ("model_name_or_path", "adapter", "prompt", "num_generations", "max_completion_length")
    EXAMPLE = 'rlhf-engine generate --model_name_or_path Qwen/Qwen3-0.6B --adapter runs/ppo/final --prompt "Once upon"'

    adapter: str | None = option(None, "PEFT folder of an adapter, or its name on the Hub; none: the base alone")
    prompt: list[str] | None = option(None, "prompts, each one argument", is_text=True)
    prompt_file: str | None = option(None, "text file with one prompt a line; - reads standard input")
    dataset_name: str | None = option(None, f"prompts, texts or conversations: {SOURCES}")
    max_prompt_length: int | None = option(None, "longest prompt in tokens, for truncation; none: any", ge=1)
    num_generations: int = option(1, "answers per prompt; the prompt goes through the model once", ge=1)
    best_of: int | None = option(
        None,
        "draw so many answers per prompt and keep the one with the highest reward, which reads stop texts, too",
        ge=2,
    )
    reward_adapter: str | None = option(None, "best_of: PEFT folder of a LoRA reward model")
    reward_model_path: str | None = option(
        None, "best_of: folder of a whole reward model; without either, the base's own reward head"
    )
    max_completion_length: int = option(64, "most tokens generated per prompt", ge=1)
    min_completion_length: int = option(0, "no end-of-sequence token before so many tokens", ge=0)
    ignore_eos: bool = option(False, "do not end answers at end-of-sequence tokens")
    verify_rollout: bool = option(
        False, "compare log-probs with those of the training forward, and say how they differ"
    )
    out: str | None = option(None, "JSONL file that every answer is added to as it finishes")
    resume: bool = option(False, "go on with the answers that `out` lacks")
    json: bool = option(False, "print one JSON object per answer")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resume and self.out is None:
            raise ConfigError("resume: expected it together with out, the file to go on with, got no out")
        if self.min_completion_length > self.max_completion_length:
            raise ConfigError(
                f"min_completion_length: expected at most max_completion_length ({self.max_completion_length}), got "
                f"{self.min_completion_length}"
            )
        if self.out is not None:
            not_empty("out", self.out)
        self._check_prompts()
        for name in ("reward_adapter", "reward_model_path"):
            if getattr(self, name) is not None and self.best_of is None:
                raise ConfigError(f"{name}: expected it together with best_of, got no best_of")
        if self.reward_adapter is not None and self.reward_model_path is not None:
            raise ConfigError("reward_model_path: expected either reward_adapter or reward_model_path, got both")
        if self.best_of is not None and (self.greedy or self.num_generations > 1):
            other = "greedy" if self.greedy else f"num_generations {self.num_generations}"
            raise ConfigError(f"best_of: expected it without greedy and num_generations, got {other}")
        if self.greedy and self.num_generations > 1:
            raise ConfigError(
                f"num_generations: expected 1 with greedy, where all answers are the same, got {self.num_generations}"
            )

    @property
    def prompt_source(self) -> tuple[str, str]:
        """The option that names the prompts, and what messages call them."""
        given = {"prompt_file": self.prompt_file, "dataset_name": self.dataset_name, "prompt": "prompt"}
        return next((name, value) for name, value in given.items() if value is not None)

    def _check_prompts(self) -> None:
        """Require one source of prompts, and no option that it cannot serve."""
        self.check_prompts_kept()
        given = [n for n in ("prompt", "prompt_file", "dataset_name") if getattr(self, n) not in (None, [])]
        if not given:
            raise ConfigError("prompt: expected at least one prompt, a prompt_file or a dataset_name, got none of them")
        if len(given) > 1:
            raise ConfigError(f"{given[1]}: expected one of prompt, prompt_file and dataset_name, got {given}")
        for name in ("prompt_file", "dataset_name"):
            if getattr(self, name) is not None:
                not_empty(name, getattr(self, name))
        if self.dataset_name is None and (self.system_prompt is not None or self.chat_template_kwargs):
            raise ConfigError(
                "dataset_name: expected conversations for system_prompt and chat_template_kwargs, got none"
            )
        if self.prompt_file is not None and self.prompt_file.endswith(SUFFIXES):
            raise ConfigError(
                f"prompt_file: expected a text file, got {self.prompt_file!r}; dataset_name reads such files"
            )
