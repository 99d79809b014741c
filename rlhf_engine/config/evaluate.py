"""Options of `rlhf-engine evaluate`: several models on the same prompts, side by side."""

# ruff: noqa: RUF009 - `option` and `required` return dataclasses.field(...), which ruff cannot see

from __future__ import annotations

from dataclasses import dataclass

from rlhf_engine.config.data import SOURCES, RowOptions
from rlhf_engine.config.parser import option, required
from rlhf_engine.config.rollout import EngineConfig, SamplingOptions
from rlhf_engine.config.training import ModelOptions, not_empty
from rlhf_engine.errors import ConfigError

BASE, REFERENCES = "base", "references"
"""Names of the base without an adapter, and of the answers in the data."""
REWARD = "reward"
"""The judge that prefers the answer with the higher reward."""


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(SamplingOptions, EngineConfig, RowOptions, ModelOptions):
    """Models side by side: rewards, win rates, KL, ROUGE, and a page with their answers."""

    FIRST = ("model_name_or_path", "models", "dataset_name", "reward_model_path", "output_dir")
    EXAMPLE = (
        "rlhf-engine evaluate --model_name_or_path BASE --models ppo=runs/ppo/final --dataset_name heldout.jsonl "
        "--reward_model_path RM --output_dir evaluation"
    )

    models: list[str] = option(
        [],
        "what is evaluated, each as [name=]PLACE: a PEFT folder or model folder, either also on the Hub, a JSONL file "
        f"with prompt and completion, {BASE}, or {REFERENCES} for the data's own answers",
    )
    against: str = option(BASE, "name of the model that win rates are against; it is evaluated as well")
    dataset_name: str = required(f"prompts, with or without answers of their own: {SOURCES}")
    output_dir: str = required("folder for answers, verdicts, results and the page")
    resume: bool = option(False, "go on with the answers and verdicts that output_dir lacks")
    max_prompts: int | None = option(None, "the first so many prompts; none: all", ge=1)
    max_prompt_length: int | None = option(None, "longest prompt in tokens, for truncation; none: any", ge=1)
    num_generations: int = option(1, "answers per prompt of each model; from 2 on, rewards of best-of-n as well", ge=1)
    max_completion_length: int = option(64, "most tokens generated per prompt", ge=1)
    reward_funcs: list[str] = option(
        [],
        "what answers are worth, as of train: reward_model, a built-in such as math, package.module:function, or "
        "file.py:function; none: reward_model where a reward model is given",
    )
    reward_weights: list[float] | None = option(None, "one weight per reward source; none: all 1")
    reward_adapter: str | None = option(None, "PEFT folder of a LoRA reward model")
    reward_model_path: str | None = option(
        None, "folder of a whole reward model; reward_model without either is the base's own head"
    )
    judge: str | None = option(
        None,
        f"who prefers which of two answers: {REWARD}, file.py:function with TRL's judge signature, or the address of "
        f"a server with OpenAI's chat completions; none: {REWARD} where there is one, otherwise nobody",
    )
    judge_model: str | None = option(None, "name that the judging server has for its model")
    judge_template: str | None = option(
        None, "text file with the question to the server, with {prompt}, {first} and {second}; none: a built-in one"
    )
    judge_timeout: float = option(120.0, "seconds within which the server has to have answered", gt=0)
    judge_requests: int = option(8, "requests to the server at once", ge=1)
    max_bad_verdicts: float = option(
        0.0, "share of verdicts that may say nothing before the evaluation stops", ge=0, lt=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_prompts_kept()
        for name in ("dataset_name", "output_dir", "against"):
            not_empty(name, getattr(self, name))
        for name in self.models:
            not_empty("models", name)
        if self.greedy and self.num_generations > 1:
            raise ConfigError(
                f"num_generations: expected 1 with greedy, where all answers are the same, got {self.num_generations}"
            )
        self._check_rewards()
        self._check_judge()

    @property
    def sources(self) -> tuple[str, ...]:
        """Reward sources: those of `reward_funcs`, or the reward model that is given."""
        given = self.reward_adapter is not None or self.reward_model_path is not None
        return tuple(self.reward_funcs) or (("reward_model",) if given else ())

    @property
    def judged_by(self) -> str | None:
        """The judge; None where nobody judges."""
        return self.judge or (REWARD if self.sources else None)

    @property
    def judge_is_server(self) -> bool:
        """Whether the judge is a server."""
        return self.judge is not None and self.judge.startswith(("http://", "https://"))

    def _check_rewards(self) -> None:
        if self.reward_weights is not None and len(self.reward_weights) != len(self.sources):
            raise ConfigError(
                f"reward_weights: expected {len(self.sources)} numbers, one per reward source, got "
                f"{len(self.reward_weights)}"
            )
        for name in ("reward_adapter", "reward_model_path"):
            if getattr(self, name) is not None and "reward_model" not in self.sources:
                raise ConfigError(f"{name}: expected 'reward_model' among reward_funcs, got {self.reward_funcs}")
        if self.reward_adapter is not None and self.reward_model_path is not None:
            raise ConfigError("reward_model_path: expected either reward_adapter or reward_model_path, got both")

    def _check_judge(self) -> None:
        if self.judge == REWARD and not self.sources:
            raise ConfigError("judge: expected reward_funcs or a reward model for a judge by reward, got neither")
        for name in ("judge_model", "judge_template"):
            if getattr(self, name) is not None and not self.judge_is_server:
                raise ConfigError(f"{name}: expected the address of a server as judge, got {self.judge!r}")
        if self.judge_is_server and self.judge_model is None:
            raise ConfigError("judge_model: expected the name of the server's model, got none")
