"""Lines that a command prints before a run's first step: the memory that it will take, and what cannot fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rlhf_engine.errors import ConfigError
from rlhf_engine.hydra import SlotConfig
from rlhf_engine.hydra.roles import lasting
from rlhf_engine.planning.formula import Formula, Setting
from rlhf_engine.training.rl import RlTrainer
from rlhf_engine.training.run import Run, SupervisedRun

_NAMES = {"generation": "while answers are drawn", "inference": "while they are scored", "update": "in the update"}
_ADVICE = {
    "generation": "bound the KV cache by --kv_cache_memory, or lower --generation_batch_size or "
    "--max_completion_length",
    "inference": "lower --max_completion_length",
    "update": "switch --gradient_checkpointing on, or lower --per_device_train_batch_size or --lora_r, "
    "or choose another --optim",
}


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of a run on one device."""

    held: int
    """In memory already: weights, and the optimizer's state of a run that goes on."""
    peaks: dict[str, int]
    """Most that each phase takes, by the formula."""
    free: int | None
    """Free bytes of the device, or of the machine for a CPU; None where the system does not say."""

    def lines(self) -> Iterator[str]:
        """Write what is held and the peaks into one line, and a warning where a phase needs more than is free."""
        peaks = ", ".join(f"{_size(n)} {_NAMES[phase]}" for phase, n in self.peaks.items())
        free = "" if self.free is None else f"; {_size(self.free)} free"
        yield f"memory: {_size(self.held)} held; at its peak about {peaks}{free}"
        most = max(self.peaks, key=self.peaks.__getitem__)
        needed = self.peaks[most] - self.held
        if self.free is not None and needed > self.free:
            yield (
                f"warning: about {_size(needed)} more are needed {_NAMES[most]}, {_size(self.free)} are free: "
                f"{_ADVICE[most]}; --dry_run measures one step"
            )


def before_run(trainer: Run[Any]) -> Iterator[str]:
    """Tell what memory a run will need.

    Args:
        trainer: a run that has been made ready, on the main rank.

    Yields:
        Memory; a warning where what is to come is more than is free. Nothing for a model that the formula cannot count.
    """
    try:
        memory = memory_of(trainer)
    except ConfigError:
        return
    each = f" (each of {trainer.world.size} processes)" if trainer.world.size > 1 else ""
    for line in memory.lines():
        yield line + each


def memory_of(trainer: Run[Any]) -> Memory:
    """Count a run. Raises ConfigError for a model that the formula cannot count."""
    config, model = trainer.config, trainer.model
    backbones = [model.backbone(name) for name in model.backbones]
    slots: list[Any] = [slot.config for backbone in backbones for slot in backbone.slots.values()]
    slot: SlotConfig = slots[0] if slots else SlotConfig(r=1)
    options: dict[str, Any] = {"num_mini_batches": 1}
    if isinstance(trainer, RlTrainer):
        rl = trainer.config
        prompts = trainer.next_prompts().prompts
        options = {
            "prompt_length": -(-sum(map(len, prompts)) // len(prompts)),
            "completion_length": rl.max_completion_length,
            "batch": len(prompts),
            "num_generations": rl.generations,
            "num_mini_batches": rl.mini_batches,
            "cache_limit": rl.cache_bytes,
            "micro_batch": rl.per_device_train_batch_size,
        }
    else:
        assert isinstance(trainer, SupervisedRun)
        longest = sorted((row.tokens for row in trainer.next_rows()), reverse=True)
        tokens = sum(longest[: config.per_device_train_batch_size])  # type: ignore[attr-defined]
        options |= {
            "prompt_length": tokens // 2,
            "completion_length": tokens - tokens // 2,
            "batch": 1,
            "micro_batch": 1,
        }
    formula = Formula(
        lasting(model.roles),
        Setting(
            config=backbones[0].model.config,
            dtype=backbones[0].dtype,
            adapter_dtype=next((p.dtype for b in backbones for p in b.slots.parameters()), torch.float32),
            device_type=model.device.type,
            slot=slot,
            token_budget=model.token_budget,
            gradient_checkpointing=config.gradient_checkpointing,
            optim=config.optim,
            quantization=getattr(config, "quantization", "none"),
            processes=trainer.world.size,
            shard_base=bool(config.shard_base),
            **options,
        ),
        backbones[0].model,
    )
    tensors = [*model.parameters(), *trainer.optimizer.state_tensors().values()]
    local = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
    held = sum(x.numel() * x.element_size() for x in {x.data_ptr(): x for x in local}.values())
    draws = isinstance(trainer, RlTrainer) and not (config.vllm_servers or config.is_async)  # type: ignore[attr-defined]
    phases = [phase for phase in formula.phases if draws or phase != "generation"]
    return Memory(held=held, peaks={phase: formula.peak(phase) for phase in phases}, free=_free_bytes(model.device))


def _size(n: int) -> str:
    unit, name = (1e9, "GB") if n >= 1e8 else (1e6, "MB") if n >= 1e5 else (1e3, "kB")
    return f"{n / unit:.3g} {name}"


def _free_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = []
    meminfo, group = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
    if meminfo.is_file():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free.append(1024 * int(lines["MemAvailable"].split()[0]))
    most, used = group / "memory.max", group / "memory.current"
    if most.is_file() and used.is_file() and most.read_text().strip() != "max":
        free.append(max(0, int(most.read_text()) - int(used.read_text())))
    return min(free, default=None)
