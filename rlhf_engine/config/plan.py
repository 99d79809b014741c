"""Options of `rlhf-engine plan`: how much memory a run will take, before anything is downloaded."""

# ruff: noqa: RUF009 - `option` and `required` return dataclasses.field(...), which ruff cannot see

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlhf_engine.config.parser import Options, option, parse_size, required
from rlhf_engine.config.training import (
    LARGEST_RANK,
    OPTIM_HELP,
    Dtype,
    Optim,
    not_empty,
)
from rlhf_engine.errors import ConfigError

CARDS = {"h100": "80GB", "h200": "141GB", "a100": "80GB"}
"""Cards that `--gpu` knows by name, and their memory."""


@dataclass(frozen=True, kw_only=True)
class PlanConfig(Options):
    """Memory that each method takes, and the largest batches that fit, from a model's config alone."""

    model: str = required(
        "a preset such as llama-7b, a folder with config.json or owner/name of the Hub; weights are not needed"
    )
    method: Literal["all", "full_ppo", "lora_ppo", "dynamic_lora_ppo", "j_hydra_ppo", "hydra_ppo", "full_sft"] = option(
        "all", "one method of train, or all five side by side; full_sft: sft --full, a step being one minibatch"
    )
    batch: int = option(64, "answers per step (generation_batch_size of train), of all processes together", ge=1)
    processes: int = option(1, "processes that share a step, a GPU each; the memory is that of one of them", ge=1)
    shard_base: bool = option(False, "hold frozen backbones in shares while learning, as --shard_base of train does")
    num_generations: int = option(
        1,
        "answers per prompt that are learned from; on a CPU they share its pass (with full_sft, 2: pairs)",
        ge=1,
    )
    gpu: str = option(
        "80GB",
        f"memory of the device, in GB (10^9 bytes), GiB (2^30), MB or MiB, or a card ({', '.join(CARDS)})",
    )
    device: Literal["cuda", "cpu"] = option("cuda", "whose kernels run; nothing is run there")
    dtype: Dtype = option("float32", "dtype of the base weights and activations")
    adapter_dtype: Dtype = option("float32", "dtype of the adapters")
    optim: Optim = option("adamw", OPTIM_HELP)
    lora_r: int = option(16, "rank of the adapters", ge=1, le=LARGEST_RANK)
    lora_target_modules: str | list[str] = option(
        "all-linear", "all-linear, or the last part of the names of the linears to adapt"
    )
    max_prompt_length: int = option(128, "tokens of every prompt", ge=1)
    max_completion_length: int = option(64, "tokens of every answer", ge=1)
    num_mini_batches: int = option(4, "optimizer steps per epoch over the batch", ge=1)
    per_device_train_batch_size: int = option(16, "sequences per forward and backward", ge=1)
    token_budget: int | None = option(
        None, "most tokens of all lanes together in one backbone forward; none: by device and model", ge=1
    )
    gradient_checkpointing: bool = option(False, "recompute activations in the backward pass to save memory")
    json: bool = option(False, "print one JSON object per method, each on a line of its own")
    load_in_8bit: bool = option(False, "frozen backbones in 8 bits through bitsandbytes")
    load_in_4bit: bool = option(False, "frozen backbones in 4 bits (nf4) through bitsandbytes")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("model", "lora_target_modules"):
            not_empty(name, getattr(self, name))
        if self.load_in_8bit and self.load_in_4bit:
            raise ConfigError("load_in_4bit: expected it unset with load_in_8bit, got true")
        if self.batch % self.num_generations:
            raise ConfigError(
                f"batch: expected a multiple of num_generations ({self.num_generations}), got {self.batch}"
            )
        if self.batch < self.processes * self.num_generations:
            raise ConfigError(
                f"batch: expected at least {self.processes * self.num_generations} with {self.processes} processes, a "
                f"prompt of {self.num_generations} answers for each, got {self.batch}"
            )
        if self.budget_bytes <= 0:
            raise ConfigError(f"gpu: expected more than nothing, got {self.gpu!r}")

    @property
    def share(self) -> int:
        """Most answers of a step that one process draws: those to a prompt stay together."""
        return -(-(self.batch // self.num_generations) // self.processes) * self.num_generations

    @property
    def budget_bytes(self) -> int:
        """Bytes that a plan may use: all but 5 %, which driver, libraries and fragmentation take."""
        return parse_size("gpu", CARDS.get(self.gpu, self.gpu)) * 19 // 20
