"""Options of `rlhf-engine demo`: supervised training, then RL, on a small built-in task."""

# ruff: noqa: RUF009 - `option` and `required` return dataclasses.field(...), which ruff cannot see

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlhf_engine.config.algorithm import ALGORITHMS, Algorithm
from rlhf_engine.config.parser import option
from rlhf_engine.config.train import Method
from rlhf_engine.config.training import (
    RunOptions,
    not_empty,
)


@dataclass(frozen=True, kw_only=True)
class DemoConfig(RunOptions):
    """Supervised training, then RL, on a small built-in task; needs a CPU and a few minutes."""

    algorithm: Algorithm = option("ppo", ", ".join(ALGORITHMS))
    output_dir: str = option("runs/demo", "folder for the models, metrics, samples and curves")
    method: Method = option("hydra_ppo", "critic on an adapter of its own, or (j_hydra_ppo) on the actor's")
    async_mode: Literal["off", "replay", "overlap"] = option(
        "off",
        "overlap: draw the answers of the next step while this one is learned; replay: the same in turn",
        alias="async",
    )
    start: str | None = option(
        None, "folder of an earlier demo, whose supervised model and prompts are taken in place of new ones"
    )
    quick: bool = option(False, "a few steps only, to see that everything runs")
    json: bool = option(False, "print the summary as one JSON object")

    def __post_init__(self) -> None:
        super().__post_init__()
        not_empty("output_dir", self.output_dir)
        if self.start is not None:
            not_empty("start", self.start)
