"""Options of `rlhf-engine reward`: a reward model from pairs, or from single answers that were liked or not."""

# ruff: noqa: RUF009 - `option` and `required` return dataclasses.field(...), which ruff cannot see

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlhf_engine.config.parser import option
from rlhf_engine.config.training import SupervisedOptions, not_empty
from rlhf_engine.errors import ConfigError

BestMetric = Literal["auc", "accuracy", "balanced_accuracy", "loss", "brier", "calibration_error", "margin"]


@dataclass(frozen=True, kw_only=True)
class RewardConfig(SupervisedOptions):
    """Training of a reward model: an adapter slot and a scalar head on the frozen base, or everything.

    Rows hold `prompt` and either `chosen` and `rejected`, or `completion` and `label` (true or false, 1 or 0).
    """

    FIRST = ("model_name_or_path", "dataset_name", "mode", "eval_share", "output_dir")
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
    eval_dataset_name: str | None = option(None, "held-out rows, from what dataset_name may be")
    eval_share: float | None = option(None, "hold out this share of the groups of dataset_name", gt=0, lt=1)
    group_column: str | None = option(
        None, "rows equal in this column stay on one side of the split; none: rows of one prompt stay together"
    )
    per_device_eval_batch_size: int = option(16, "rows per forward of an evaluation", ge=1)
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
        if self.truncation in ("keep_start", "both"):
            raise ConfigError(
                "truncation: expected error, drop or keep_end for reward models, which judge an answer at its end, got "
                f"{self.truncation!r}"
            )
        for name in ("eval_dataset_name", "group_column"):
            if getattr(self, name) is not None:
                not_empty(name, getattr(self, name))
        if self.eval_dataset_name is not None and self.eval_share is not None:
            raise ConfigError("eval_share: expected either eval_dataset_name or eval_share, got both")
        if self.group_column is not None and self.eval_share is None:
            raise ConfigError(
                f"group_column: expected it with eval_share, which it splits by, got {self.group_column!r} without"
            )
        if self.metric_for_best_model is not None and not self.has_eval:
            raise ConfigError(
                "metric_for_best_model: expected it with eval_dataset_name or eval_share, got "
                f"{self.metric_for_best_model!r} without held-out rows"
            )
        if self.mode == "full" and self.export != "adapter":
            raise ConfigError(
                "export: expected it unset for --full, whose final folder is a sequence classifier anyway, got "
                f"{self.export!r}"
            )

    @property
    def has_eval(self) -> bool:
        """Whether there are held-out rows."""
        return self.eval_dataset_name is not None or self.eval_share is not None
