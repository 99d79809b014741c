"""Options that several commands have in common: the run, the base model, rows of data, training."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from rlhf_engine.config.parser import Options, option, required
from rlhf_engine.errors import ConfigError
from rlhf_engine.hub import ADAPTER_FILE, local_folder

SUFFIXES = (".json", ".jsonl", ".csv", ".json.gz", ".jsonl.gz", ".csv.gz", ".parquet")
"""Names of files with rows end so."""

SOURCES = (
    "a file or folder of JSON, JSONL, CSV (each also .gz) or Parquet, a folder of save_to_disk, or a dataset of the "
    "Hub: owner/name[/subset][@revision][:split]; with [:N] at the end its first N rows"
)
Kernels = Literal["auto", "cuda", "triton", "cpu", "reference"]
Dtype = Literal["float32", "bfloat16"]
Quantization = Literal["none", "8bit", "4bit"]
Optim = Literal["adamw", "adamw_8bit", "adamw_stochastic", "adamw_8bit_stochastic", "adafactor"]
FLOAT32_GRADIENTS: tuple[Optim, ...] = ("adamw", "adafactor")
"""Kinds of `optim` that accumulate gradients of half-precision parameters in float32."""
OPTIM_HELP = (
    "AdamW's state: adamw: float32 moments, and float32 master weights of what is trained in bfloat16; 8bit: moments "
    "in 8 bits (bitsandbytes); stochastic: no masters, bfloat16 weights are rounded up or down at random, and adapters "
    "are in bfloat16, else in float32. adafactor: second moments by row and column in place of moments, masters as in "
    "adamw"
)

QUANTIZATION_HELP = "frozen backbones in 8 or 4 bits (nf4) through bitsandbytes"
LARGEST_SEED = 2**32 - 1  # largest seed of NumPy. Seeds of steps are made of the run's, and have to stay within 64 bits
LARGEST_RANK = 2**14  # largest rank of an adapter: more than the width of most models, at which it is no low rank
REPOSITORY = (r"\w[\w.-]*/\w[\w.-]*", "owner/name")
DEVICE = (r"auto|cpu|cuda(:\d+)?", "auto, cpu, cuda or cuda:N")
"""Forms of options: a repository of the Hub, and a device."""
TRACKERS = ("tensorboard", "trackio", "wandb")


class RunOptions(Options):
    """Options of every command that computes something."""

    kernels: Kernels = option("auto", "kernel backend; one asked for by name never falls back")
    seed: int = option(0, "seed of everything random in this run", ge=0, le=LARGEST_SEED)


class ModelOptions(RunOptions):
    """The base model."""

    model_name_or_path: str = required("folder of the base model, or its owner/name[@revision] on the Hub")
    dtype: Dtype = option("float32", "dtype of the base weights and activations")
    device: str = option("auto", DEVICE[1], form=DEVICE)


class RowOptions(Options):
    """Options for rows that are too long or cannot be used."""

    max_bad_rows: float = option(
        0.0, "rows that may be unusable before the run stops: a share below 1, or a whole number of rows", ge=0
    )
    truncation: Literal["error", "drop", "keep_end", "keep_start", "both"] = option(
        "error",
        "rows that are too long: error (a bad row), drop, keep_end (the prompt's oldest tokens go, of conversations "
        "turns), keep_start (the answer's last tokens go) or both (the prompt's down to half of the length, then the "
        "answer's)",
    )
    system_prompt: str | None = option(None, "system turn of conversations that have none", is_text=True)
    chat_template_kwargs: dict[str, Any] | None = option(
        None,
        "arguments of the chat template, as JSON: '{\"enable_thinking\": false}'; a column of that name comes first",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        is_fine = self.max_bad_rows <= 1 or self.max_bad_rows.is_integer()
        self.require("max_bad_rows", is_fine, "a share below 1 or a whole number of rows")

    def check_prompts_kept(self) -> None:
        """Raise ConfigError for a truncation that cuts the last tokens of prompts."""
        why = "error, drop or keep_end for prompts, whose last tokens are what is to be answered"
        self.require("truncation", self.truncation != "keep_start", why)


class DataOptions(RowOptions):
    """Options of where training rows come from."""

    dataset_name: str = required(f"training data: {SOURCES}")


class RewardModelOptions(Options):
    """The learned reward."""

    reward_model_path: str | None = option(
        None,
        "a reward model, also of the Hub: PEFT folder of an adapter, or folder of a whole one "
        "(AutoModelForSequenceClassification), which costs a head on the base's weights; none: the base's own head",
    )

    @cached_property
    def reward_adapter(self) -> str | None:
        """`reward_model_path` where an adapter is there."""
        path = self.reward_model_path
        is_adapter = path is not None and (local_folder(path, "reward_model_path") / ADAPTER_FILE).is_file()
        return path if is_adapter else None

    @property
    def whole_reward_model(self) -> str | None:
        """`reward_model_path` where no adapter is there."""
        return None if self.reward_adapter is not None else self.reward_model_path


class TrainingOptions(DataOptions, ModelOptions):
    """Adapters, optimizer, logging, checkpoints and the output folder."""

    output_dir: str = required("folder for checkpoints, metrics and the run record")
    push_to_hub: str | None = option(
        None,
        "owner/name on the Hub to upload the result to at the end, as export does; a new repository is public",
        form=REPOSITORY,
    )
    report_to: list[str] = option(
        [], "tensorboard, trackio or wandb: trackers that get the metrics as well, through accelerate"
    )
    save_steps: int = option(50, "a checkpoint every so many steps, to go on from; 0: none on the way", ge=0)
    save_total_limit: int | None = option(2, "checkpoints kept, beside the best; none: all", ge=1)
    resume_from_checkpoint: str | None = option(
        None,
        "auto (the newest in output_dir) or a checkpoint's path; restart: begin afresh in an output_dir that already "
        "holds a run; none: begin in one that holds none",
    )
    lora_r: int = option(16, "rank of the adapters", ge=1, le=LARGEST_RANK)
    lora_alpha: float = option(32.0, "the adapter's output is scaled by lora_alpha / lora_r", gt=0)
    lora_dropout: float = option(0.0, "dropout on the adapter's input", ge=0, lt=1)
    lora_target_modules: str | list[str] = option(
        "all-linear", "all-linear, or the last part of the names of the linears to adapt"
    )
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = option(
        "constant", "learning rate after the warm-up; linear and cosine end at 0"
    )
    warmup_steps: int = option(0, "steps over which the learning rate rises linearly from 0", ge=0)
    optim: Optim = option("adamw", OPTIM_HELP)
    weight_decay: float = option(0.0, "AdamW's decoupled weight decay", ge=0)
    adam_epsilon: float = option(1e-8, "AdamW's epsilon", gt=0)
    max_grad_norm: float | None = option(
        None,
        "a role's gradient is scaled down to this norm where it is greater; 0: never; none: 1, but never for copg, "
        "remax, rloo and reinforce, whose gradients are sums per answer, unbiased as they are",
        ge=0,
    )
    gradient_checkpointing: bool = option(False, "recompute activations in the backward pass to save memory")
    max_tokens_per_micro_batch: int | None = option(
        None,
        "divide a step's rows into micro-batches of at most so many tokens, and of at most per_device_train_batch_size "
        "rows; none: by the latter alone",
        ge=1,
    )
    shard_base: bool = option(
        False,
        "several processes: each holds a share of every frozen backbone, as in any case of trained ones (FSDP2), and "
        "all of it to draw, score and evaluate; with vllm_server_base_url never all of it",
    )

    @property
    def restarts(self) -> bool:
        """Whether a run that output_dir holds is overwritten."""
        return self.resume_from_checkpoint == "restart"

    @property
    def largest_grad_norm(self) -> float | None:
        """Norm that a role's gradient is scaled down to; None where it never is."""
        return 1.0 if self.max_grad_norm is None else self.max_grad_norm or None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optim == "adafactor":
            self.require_unset(["adam_epsilon"], "with optim adafactor, which does not read it")
        self.require("report_to", set(self.report_to) <= set(TRACKERS), f"names among {', '.join(TRACKERS)}")

    def check_warm_up(self, steps: int) -> None:
        """Raise ConfigError for a warm-up that is longer than a run of so many steps."""
        self.require("warmup_steps", self.warmup_steps <= steps, f"at most the run's {steps} steps")


class HeldOutOptions(Options):
    """Rows or prompts that are not trained on."""

    eval_dataset_name: str | float | None = option(
        None, "held-out rows, from what dataset_name may be, or the share of its rows to hold out, such as 0.1"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        value = self.eval_dataset_name
        if isinstance(value, str) and re.fullmatch(r"(\d+\.?\d*|\.\d+)(e-?\d+)?", value) and not Path(value).exists():
            object.__setattr__(self, "eval_dataset_name", float(value))
        if self.eval_share is not None and not 0 < self.eval_share < 1:
            raise ConfigError(f"eval_dataset_name: expected a source or a share between 0 and 1, got {value!r}")

    @property
    def eval_share(self) -> float | None:
        """Share of the rows of dataset_name that is held out; None where others are, or none."""
        return self.eval_dataset_name if isinstance(self.eval_dataset_name, float) else None


def check_weights(weights: list[float] | None, sources: Sequence[Any]) -> None:
    """Raise ConfigError for weights that are not one for each reward source."""
    if weights is not None and len(weights) != len(sources):
        raise ConfigError(f"reward_weights: expected {len(sources)} numbers, one per reward source, got {len(weights)}")


def adapter_dtype(optim: Optim) -> Dtype:
    """Dtype of adapters; heads are in float32."""
    return "bfloat16" if optim.endswith("stochastic") else "float32"
