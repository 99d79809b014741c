"""Lines that a command prints before a run's first step: the memory that is certain, and what cannot fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rlhf_engine.hydra.kv_cache import BLOCK
from rlhf_engine.planning.fit import GATHERED_BLOCKS
from rlhf_engine.policy.adamw import gradient_dtype, state_layout
from rlhf_engine.training.rl import RlTrainer
from rlhf_engine.training.run import Run


def before_run(trainer: Run[Any]) -> Iterator[str]:
    """Tell what a run will need, line by line as it becomes known.

    Args:
        trainer: a run that has been made ready, on the main rank.

    Yields:
        Memory; a warning where what is to come is more than is free.
    """
    memory = Memory.of(trainer)
    each = f" (each of {trainer.world.size} processes)" if trainer.world.size > 1 else ""
    yield memory.line() + each
    if memory.warning():
        yield memory.warning()


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of a run on one device that are certain before its first step."""

    held: dict[str, int]
    """By part, in memory already."""
    to_come: dict[str, int]
    """By part, allocated in the first step."""
    free: int | None
    """Free bytes of the device, or of the machine for a CPU; None where the system does not say."""
    device_type: str

    @classmethod
    def of(cls, trainer: Run[Any]) -> Memory:
        """Count what a run holds and will hold, apart from activations.

        Args:
            trainer: a run that has been made ready.

        Returns:
            The bytes of this process.
        """
        model, adamw = trainer.model, trainer.optimizer.adamw
        backbones = [model.backbone(name) for name in model.backbones]
        base = [p for b in backbones for _, p in b.base_parameters()]
        frozen, trained_base = ([p for p in base if p.requires_grad == flag] for flag in (False, True))
        slots = [p for b in backbones for p in b.slots.parameters()]
        held = {
            "frozen weights": _bytes(frozen),
            "trained weights": _bytes(trained_base),
            "adapters and heads": _bytes([*slots, *model.heads.parameters()]),
        }
        optim = trainer.config.optim
        trained = {name: p for name, p in adamw.parameters.items() if p.requires_grad}  # a head's bias may stay
        layouts = {name: state_layout(optim, p.shape, p.dtype) for name, p in trained.items()}
        state = {name: sum(s.numel() * d.itemsize for s, d in fields.values()) for name, fields in layouts.items()}
        to_come = {
            "gradients": sum(p.numel() * gradient_dtype(optim, p.dtype).itemsize for p in trained.values()),
            "optimizer state": sum(n for name, n in state.items() if not adamw.has_stepped(name)),
            "KV cache": _cache_bytes(trainer) if isinstance(trainer, RlTrainer) else 0,
            "gathered weights": _gathered_bytes(trainer) if isinstance(trainer, RlTrainer) else 0,
        }
        held["optimizer state"] = sum(state.values()) - to_come["optimizer state"]
        return cls(held=held, to_come=to_come, free=_free_bytes(model.device), device_type=model.device.type)

    def line(self) -> str:
        """Write all parts into one line.

        Returns:
            The line.
        """
        held, to_come = (
            ", ".join(f"{_size(n)} {part}" for part, n in parts.items() if n) for parts in (self.held, self.to_come)
        )
        free = "" if self.free is None else f"; {_size(self.free)} free"
        packed = " and packed weights" if self.device_type == "cpu" else ""
        return f"memory: {held}; the first step adds {to_come}, activations{packed}{free}"

    def warning(self) -> str:
        """Name the option to lower where the first step needs more than is free.

        Returns:
            The line; empty where nothing is certain.
        """
        needed = sum(self.to_come.values())
        if self.free is None or needed <= self.free:
            return ""
        largest = max(self.to_come, key=self.to_come.__getitem__)
        advice = {
            "gradients": "train adapters, or lower --lora_r",
            "optimizer state": "train adapters, lower --lora_r, or choose another --optim",
            "gathered weights": "let a vLLM server draw, beside which no process has all of the base",
            "KV cache": "bound it by --kv_cache_memory, or lower --generation_batch_size or --max_completion_length",
        }
        return (
            f"warning: the first step needs {_size(needed)} beside activations, {_size(self.free)} are free; most is "
            f"{largest}: {advice[largest]}"
        )


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that this process holds of some tensors, each memory once."""
    held = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
    return sum(x.numel() * x.element_size() for x in {x.data_ptr(): x for x in held}.values())


def _size(n: int) -> str:
    unit, name = (1e9, "GB") if n >= 1e8 else (1e6, "MB") if n >= 1e5 else (1e3, "kB")
    return f"{n / unit:.3g} {name}"


def _cache_bytes(trainer: RlTrainer) -> int:
    """Keys and values of the next step's answers; 0 where other processes draw them."""
    config = trainer.config
    if not _draws_here(trainer):
        return 0
    prompts = trainer.next_prompts().prompts
    rows = sorted((-(-(len(p) + config.max_completion_length - 1) // BLOCK) for p in prompts), reverse=True)
    shared = sum(len(prompt) // BLOCK * (n - 1) for prompt, n in Counter(prompts).items())
    blocks = min(sum(rows) - shared, sum(rows[: _rows_alive(trainer, len(rows))]))
    needed: int = blocks * BLOCK * trainer.model.role_backbone("actor").cache_bytes_per_position
    return needed if config.cache_bytes is None else min(needed, config.cache_bytes)


def _gathered_bytes(trainer: RlTrainer) -> int:
    """Most bytes of a base in shares that are gathered at a time; 0 where each process has all of it anyway."""
    if not trainer.config.shard_base:
        return 0
    backbones = [trainer.model.backbone(name) for name in trainer.model.backbones]
    whole = _bytes(p for backbone in backbones for _, p in backbone.base_parameters())
    blocks = [_bytes(block.parameters()) for backbone in backbones for block in backbone.blocks]
    few = min(whole, whole - sum(blocks) + GATHERED_BLOCKS * max(blocks))
    return few if trainer.config.rollout_backend == "vllm" else whole


def _draws_here(trainer: RlTrainer) -> bool:
    """Whether this process draws all of its answers between updates."""
    return trainer.config.rollout_backend == "local" and not trainer.config.is_async


def _rows_alive(trainer: RlTrainer, n: int) -> int:
    return min(n, trainer.config.max_rows or n)


def _free_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    found = []
    meminfo, group = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
    if meminfo.is_file():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        found.append(1024 * int(lines["MemAvailable"].split()[0]))
    most, used = group / "memory.max", group / "memory.current"
    if most.is_file() and used.is_file() and most.read_text().strip() != "max":
        found.append(max(0, int(most.read_text()) - int(used.read_text())))
    return min(found, default=None)
