"""Options of `rlhf-engine sft`: joint language-model and reward training."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_engine.config.parser import option
from rlhf_engine.config.training import (
    SupervisedOptions,
)


@dataclass(frozen=True, kw_only=True)
class SFTConfig(SupervisedOptions):
    """Supervised training of language model and reward head together.

    Rows hold `prompt` and either `completion`, or `chosen` and `rejected`, whose common beginning may be the prompt.
    """

    FIRST = ("model_name_or_path", "dataset_name", "mode", "learning_rate", "output_dir")
    EXAMPLE = (
        "rlhf-engine sft --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/Capybara --lora "
        "--output_dir runs/sft"
    )

    gamma: float = option(0.1, "weight of the pairwise reward objective, which needs chosen and rejected", ge=0)
    save_steps: int = option(50, "a checkpoint every so many steps, to go on from; 0: none", ge=0)
