"""Options that several commands have in common: the run, the base model, training, passes over rows."""

# ruff: noqa: RUF009 - `option` and `required` return dataclasses.field(...), which ruff cannot see

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, Literal

from rlhf_engine.config.data import DataOptions
from rlhf_engine.config.parser import Options, option, required
from rlhf_engine.errors import ConfigError

Kernels = Literal["auto", "cuda", "triton", "cpu", "reference"]
Dtype = Literal["float32", "bfloat16"]
Optim = Literal["adamw", "adamw_8bit", "adamw_stochastic", "adamw_8bit_stochastic", "adafactor"]
FLOAT32_GRADIENTS: tuple[Optim, ...] = ("adamw", "adafactor")
"""Kinds of `optim` that accumulate gradients of half-precision parameters in float32."""
OPTIM_HELP = (
    "AdamW's state: adamw: float32 moments, and float32 master weights of what is trained in bfloat16; 8bit: moments "
    "in 8 bits (bitsandbytes); stochastic: no masters, bfloat16 weights are rounded up or down at random. adafactor: "
    "second moments by row and column in place of moments, masters as in adamw"
)
LARGEST_SEED = 2**32 - 1
"""Largest seed of NumPy. Seeds of steps are made of the run's, and have to stay within 64 bits."""
LARGEST_RANK = 2**14
"""Largest rank of an adapter: more than the width of most models, at which it is no low rank."""
REPOSITORY = r"\w[\w.-]*/\w[\w.-]*"
"""Pattern of owner/name on the Hub."""
TRACKERS = ("tensorboard", "trackio", "wandb")


@dataclass(frozen=True, kw_only=True)
class RunOptions(Options):
    """Options of every command that computes something."""

    kernels: Kernels = option("auto", "kernel backend; one asked for by name never falls back")
    seed: int = option(0, "seed of everything random in this run", ge=0, le=LARGEST_SEED)


@dataclass(frozen=True, kw_only=True)
class ModelOptions(RunOptions):
    """The base model."""

    model_name_or_path: str = required("folder of the base model, or its owner/name[@revision] on the Hub")
    dtype: Dtype = option("float32", "dtype of the base weights and activations")
    device: str = option("auto", "auto, cpu, cuda or cuda:N")

    def __post_init__(self) -> None:
        super().__post_init__()
        not_empty("model_name_or_path", self.model_name_or_path)
        check_device(self.device)


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(DataOptions, ModelOptions):
    """Adapters, optimizer, logging, checkpoints and the output folder."""

    output_dir: str = required("folder for checkpoints, metrics and the run record")
    overwrite_output_dir: bool = option(False, "start afresh in an output_dir that already holds a run")
    push_to_hub: str | None = option(
        None, "owner/name on the Hub to upload the result to at the end, as export does; a new repository is public"
    )
    logging_steps: int = option(1, "a line of metrics every so many steps", ge=1)
    report_to: list[str] = option(
        [], "tensorboard, trackio or wandb: trackers that get the metrics as well, through accelerate"
    )
    save_steps: int = option(50, "a checkpoint every so many steps, and at the end; 0: only at the end", ge=0)
    save_total_limit: int | None = option(2, "checkpoints kept, beside the best; none: all", ge=1)
    resume_from_checkpoint: str | None = option(None, "auto (the newest in output_dir) or a checkpoint's path")
    lora_r: int = option(16, "rank of the adapters", ge=1, le=LARGEST_RANK)
    lora_alpha: float = option(32.0, "the adapter's output is scaled by lora_alpha / lora_r", gt=0)
    use_rslora: bool = option(False, "scale it by lora_alpha / √lora_r")
    adapter_dtype: Dtype = option("float32", "dtype of the adapters; heads are in float32")
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
    adam_beta1: float = option(0.9, "AdamW's decay of the first moment", ge=0, lt=1)
    adam_beta2: float = option(0.999, "AdamW's decay of the second moment", ge=0, lt=1)
    adam_epsilon: float = option(1e-8, "AdamW's epsilon", gt=0)
    max_grad_norm: float | None = option(
        None, "a role's gradient is scaled down to this norm where it is greater; 0: never; none: 1", ge=0
    )
    gradient_checkpointing: bool = option(False, "recompute activations in the backward pass to save memory")
    max_tokens_per_micro_batch: int | None = option(
        None,
        "divide a step's rows into micro-batches of at most so many tokens, and of at most per_device_train_batch_size "
        "rows; none: by rows alone",
        ge=1,
    )
    ddp_timeout: float = option(
        1800.0, "several processes: seconds that one waits for the others before it gives the run up", gt=0
    )
    shard_base: bool = option(
        False,
        "several processes: each holds a share of every frozen backbone, as in any case of trained ones (FSDP2), and "
        "all of it to draw, score and evaluate; with rollout_backend vllm never all of it",
    )

    @property
    def largest_grad_norm(self) -> float | None:
        """Norm that a role's gradient is scaled down to; None where it never is."""
        return 1.0 if self.max_grad_norm is None else self.max_grad_norm or None

    def __post_init__(self) -> None:
        super().__post_init__()
        not_empty("output_dir", self.output_dir)
        check_repository(self.push_to_hub)
        not_empty("lora_target_modules", self.lora_target_modules)
        if self.optim == "adafactor":
            for field in dataclasses.fields(self):
                if field.name.startswith("adam_") and getattr(self, field.name) != field.default:
                    raise ConfigError(
                        f"{field.name}: expected it unset with optim adafactor, which does not read it, got "
                        f"{getattr(self, field.name)}"
                    )
        unknown = [name for name in self.report_to if name not in TRACKERS]
        if unknown:
            raise ConfigError(f"report_to: expected names among {', '.join(TRACKERS)}, got {unknown}")
        if self.resume_from_checkpoint is not None and self.overwrite_output_dir:
            raise ConfigError(
                "overwrite_output_dir: expected false together with resume_from_checkpoint, got true "
                f"with {self.resume_from_checkpoint!r}"
            )


@dataclass(frozen=True, kw_only=True)
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
        if self.max_steps is not None and self.warmup_steps > self.max_steps:
            raise ConfigError(f"warmup_steps: expected at most max_steps ({self.max_steps}), got {self.warmup_steps}")
        if self.mode == "full":
            self._check_no_adapter()

    def _check_no_adapter(self) -> None:
        """Raise ConfigError where an option of adapters is set, although everything is trained."""
        names = ("lora_r", "lora_alpha", "use_rslora", "lora_dropout", "lora_target_modules", "adapter_dtype")
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name in names:
            value = getattr(self, name)
            if value != defaults[name]:
                raise ConfigError(f"{name}: expected it unset for --full, which has no adapter, got {value!r}")


def not_empty(name: str, value: str | list[Any]) -> None:
    """Raise ConfigError, naming the option, for an empty text, an empty list or a list with an empty text."""
    if not value or (isinstance(value, list) and not all(value)):
        raise ConfigError(f"{name}: expected something that is not empty, got {value!r}")


def check_repository(name: str | None) -> None:
    """Raise ConfigError for what names no repository of the Hub; None names none on purpose."""
    if name is not None and re.fullmatch(REPOSITORY, name) is None:
        raise ConfigError(f"push_to_hub: expected owner/name, got {name!r}")


def check_device(name: str) -> None:
    """Raise ConfigError for what is no device's name."""
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", name) is None:
        raise ConfigError(f"device: expected auto, cpu, cuda or cuda:N, got {name!r}")
