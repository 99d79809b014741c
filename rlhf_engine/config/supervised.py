"""Options of `rlhf-engine sft` and `rlhf-engine reward`: passes over rows of prompts and answers."""

from __future__ import annotations

from typing import Literal

from rlhf_engine.config.parser import option, required
from rlhf_engine.config.run import HeldOutOptions, TrainingOptions

BestMetric = Literal["auc", "accuracy", "balanced_accuracy", "loss", "brier", "calibration_error", "margin"]


class SupervisedOptions(TrainingOptions):
    """Passes over rows of prompts and answers."""

    mode: Literal["full", "lora"] = required(
        "lora trains an adapter on the frozen base, full the base itself", switches=("full", "lora")
    )
    max_length: int | None = option(None, "most tokens of prompt and answer, for truncation; none: any", ge=1)
    learning_rate: float = option(1e-4, "learning rate; for --full on a pretrained model rather 1e-5", ge=0)
    num_train_epochs: float = option(1.0, "passes over the data", gt=0)
    max_steps: int | None = option(None, "optimizer steps, in place of num_train_epochs", ge=1)
    per_device_train_batch_size: int = option(16, "rows per forward and backward", ge=1)
    gradient_accumulation_steps: int = option(
        1, "batches per optimizer step, which several processes share out by rows", ge=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_steps is not None:
            self.check_warm_up(self.max_steps)
        if self.mode == "full":
            names = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules")
            self.require_unset(names, "for --full, which has no adapter")


class SFTConfig(SupervisedOptions):
    """Supervised fine-tuning with a reward head: --full writes a new base, --lora an adapter of a frozen one.

    Rows hold `prompt` and either `completion`, or `chosen` and `rejected`, whose common beginning may be the prompt.
    """

    FIRST = ("model_name_or_path", "dataset_name", "mode", "learning_rate", "output_dir")
    EXAMPLE = (
        "rlhf-engine sft --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/Capybara --lora "
        "--output_dir runs/sft"
    )

    gamma: float = option(0.1, "weight of the pairwise reward objective, which needs chosen and rejected", ge=0)


class RewardConfig(HeldOutOptions, SupervisedOptions):
    """Training of a reward model: an adapter slot and a scalar head on the frozen base, or everything.

    Rows hold `prompt` and either `chosen` and `rejected`, or `completion` and `label` (true or false, 1 or 0).
    """

    FIRST = ("model_name_or_path", "dataset_name", "mode", "eval_dataset_name", "output_dir")
    EXAMPLE = (
        "rlhf-engine reward --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/ultrafeedback_binarized "
        "--lora --output_dir runs/reward"
    )

    objective: Literal["auto", "pairwise", "pointwise"] = option(
        "auto", "pairwise: chosen against rejected; pointwise: labels of single answers; auto: by the columns"
    )
    pos_weight: Literal["none", "balanced"] = option(
        "none", "balanced: rows with label true count (number of false) / (number of true) times; pointwise only"
    )
    center_rewards_coefficient: float | None = option(
        None, "adds this times mean((r_chosen + r_rejected)^2), which keeps rewards around 0; pairwise only", ge=0
    )
    group_column: str | None = option(
        None, "rows equal in this column stay on one side of the split; none: rows of one prompt stay together"
    )
    eval_steps: int = option(
        50, "evaluate on held-out rows every so many steps, at the start and the end; 0: only there", ge=0
    )
    metric_for_best_model: BestMetric | None = option(
        None, "held-out metric whose best step becomes the final model; none: auc (pointwise), accuracy (pairwise)"
    )
    export: Literal["adapter", "merged", "none"] = option(
        "adapter",
        "of --lora, in sequence_classification/: an adapter for transformers' sequence classifiers, or a whole one "
        "with the adapter merged in float32",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        is_kept = self.truncation not in ("keep_start", "both")
        why = "error, drop or keep_end for reward models, which judge an answer at its end"
        self.require("truncation", is_kept, why)
        if self.eval_share is None:
            self.require_unset(["group_column"], "without a share as eval_dataset_name, which it splits by")
        if self.eval_dataset_name is None:
            self.require_unset(["metric_for_best_model"], "without eval_dataset_name")
        if self.mode == "full":
            self.require_unset(["export"], "for --full, whose final folder is a sequence classifier anyway")
