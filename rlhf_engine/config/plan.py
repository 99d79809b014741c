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
    processes: int = option(
        1,
        "processes that share a step, a GPU each; with more than one, how each of them should hold the base: whole, "
        "by shard_base, or by shard_base beside a vLLM server, where none has all of it",
        ge=1,
    )
    num_generations: int = option(
        1,
        "answers per prompt that are learned from; on a CPU they share its pass (with full_sft, 2: pairs)",
        ge=1,
    )
    gpu: str = option(
        "80GB",
        f"memory of the device, in GB (10^9 bytes), GiB (2^30), MB or MiB, or a card ({', '.join(CARDS)})",
    )
    reserve: str = option("1GB", "of it, left to the driver, libraries and fragmentation")
    device: Literal["cuda", "cpu"] = option("cuda", "whose kernels run; nothing is run there")
    dtype: Dtype = option("float32", "dtype of the base weights and activations")
    adapter_dtype: Dtype = option("float32", "dtype of the adapters")
    optim: Optim = option("adamw", OPTIM_HELP)
    lora_r: int = option(16, "rank of the adapters", ge=1, le=LARGEST_RANK)
    lora_dropout: float = option(
        0.0, "dropout on the adapter's input, by which an update has copies of prompts", ge=0, lt=1
    )
    lora_target_modules: str | list[str] = option(
        "all-linear", "all-linear, or the last part of the names of the linears to adapt"
    )
    max_prompt_length: int = option(128, "tokens of every prompt", ge=1)
    max_completion_length: int = option(64, "tokens of every answer", ge=1)
    num_mini_batches: int = option(4, "optimizer steps per epoch over the batch", ge=1)
    per_device_train_batch_size: int = option(16, "sequences per forward and backward", ge=1)
    max_grad_norm: float | None = option(
        None,
        "a role's gradient is scaled down to this norm where it is greater; 0: never; none: 1, but never for remax, "
        "rloo and reinforce, whose gradients are sums per answer, unbiased as they are",
        ge=0,
    )
    token_budget: int | None = option(
        None, "most tokens of all lanes together in one backbone forward; none: by device and model", ge=1
    )
    gradient_checkpointing: bool = option(False, "recompute activations in the backward pass to save memory")
    json: bool = option(False, "print one JSON object per method, each on a line of its own")
    out: str | None = option(None, "path of a bar chart to write, .png")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("model", "lora_target_modules", "out"):
            if getattr(self, name) is not None:
                not_empty(name, getattr(self, name))
        if self.out is not None and not self.out.endswith(".png"):
            raise ConfigError(f"out: expected the path of a .png file, got {self.out!r}")
        if self.batch % self.num_generations:
            raise ConfigError(
                f"batch: expected a multiple of num_generations ({self.num_generations}), got {self.batch}"
            )
        if self.processes > 1:
            self._check_processes()
        if self.budget_bytes <= 0:
            raise ConfigError(f"reserve: expected less than gpu ({self.gpu}), got {self.reserve!r}")

    def _check_processes(self) -> None:
        where = f"with {self.processes} processes"
        if self.method in ("full_ppo", "full_sft"):
            raise ConfigError(f"method: expected one with a frozen backbone {where}, got {self.method!r}")
        if self.batch < self.processes * self.num_generations:
            raise ConfigError(
                f"batch: expected at least {self.processes * self.num_generations} {where}, a prompt of "
                f"{self.num_generations} answers for each, got {self.batch}"
            )

    @property
    def share(self) -> int:
        """Most answers of a step that one process draws: those to a prompt stay together."""
        return -(-(self.batch // self.num_generations) // self.processes) * self.num_generations

    @property
    def memory_bytes(self) -> int:
        """Memory of the device."""
        return parse_size("gpu", CARDS.get(self.gpu, self.gpu))

    @property
    def budget_bytes(self) -> int:
        """Bytes that a plan may use."""
        return self.memory_bytes - parse_size("reserve", self.reserve)
