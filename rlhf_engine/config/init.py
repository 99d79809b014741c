"""Options of `rlhf-engine init`: a small folder that runs, to begin with."""

# ruff: noqa: RUF009 - `option` and `required` return dataclasses.field(...), which ruff cannot see

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlhf_engine.config.parser import Options, option, required
from rlhf_engine.config.training import not_empty
from rlhf_engine.errors import ConfigError

Start = Literal["tutorial", "reward-function", "reward-model", "trl", "recipe:stories260k"]
OWN_MODEL = ("reward-function", "recipe:stories260k")
"""Starts that run on a model of the user's."""


@dataclass(frozen=True, kw_only=True)
class InitConfig(Options):
    """A folder to begin with: data, options, a reward and the commands that run it.

    tutorial: PPO on a reward function; reward-function: the same on a model of yours; reward-model: thumbs to a reward
    model to PPO; trl: a TRL script with two more lines; recipe:stories260k: happy endings for a story model.
    """

    POSITIONAL = ("start", "output_dir")
    EXAMPLE = "rlhf-engine init reward-function mine --model_name_or_path Qwen/Qwen3-0.6B"

    start: Start = required("what to begin with; may also be the first argument")
    output_dir: str = required("new folder for it; may also be the second argument")
    model_name_or_path: str | None = option(
        None, "of reward-function and recipes: the base; none: a small model that is made here"
    )
    seed: int = option(0, "of the data and the small model", ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        not_empty("output_dir", self.output_dir)
        if self.model_name_or_path is not None:
            not_empty("model_name_or_path", self.model_name_or_path)
            if self.start not in OWN_MODEL:
                raise ConfigError(
                    f"model_name_or_path: expected it with {' or '.join(OWN_MODEL)}, got it with {self.start!r}, which "
                    "makes a small model; the commands in its README take any"
                )
        elif self.start.startswith("recipe:"):
            raise ConfigError(f"model_name_or_path: expected the base of {self.start!r}, got none")
