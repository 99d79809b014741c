"""`rlhf-engine plan`: memory of a run before it is begun."""

from __future__ import annotations

import json
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rlhf_kernels.runtime import registry

from rlhf_engine.commands.common import prepare
from rlhf_engine.config import PlanConfig
from rlhf_engine.config.run import adapter_dtype
from rlhf_engine.devices import DTYPES
from rlhf_engine.errors import ConfigError, as_request_errors
from rlhf_engine.hydra import METHODS, SlotConfig
from rlhf_engine.hydra.loading import context_length
from rlhf_engine.hydra.model import default_token_budget
from rlhf_engine.rollout import exactness
from rlhf_engine.tools.memory import Formula, Setting, find_config, roles_of

_STATE = {
    "frozen_weights": "frozen backbones", "trained_weights": "trained backbones", "adapters": "adapters",
    "heads": "scalar heads", "packed_weights": "packed weights", "gradients": "gradients",
    "optimizer": "optimizer state",
}  # fmt: skip
_WIDTH = 110  # columns of what is printed to a file


def run(config: PlanConfig) -> int:
    prepare("auto")
    with as_request_errors(), registry.use_exact(exactness.by_default(config.device)):
        rows = {method: as_row(formula, config) for method, formula in formulas(config).items()}
    if config.json:
        for method, row in rows.items():
            print(json.dumps({"method": method, **row, "options": config.to_dict()}))
    else:
        _print(rows, config)
    return 0


def formulas(config: PlanConfig) -> dict[str, Formula]:
    """The memory of each method that is asked for. Raises ConfigError for a model that is none, or a short context."""
    shape = find_config(config.model_name_or_path)
    limit = context_length(shape)
    if config.max_prompt_length + config.max_completion_length > limit:
        raise ConfigError(
            f"max_completion_length: expected prompt and answer within the model's context of {limit} tokens, got "
            f"{config.max_prompt_length} + {config.max_completion_length}"
        )
    width = shape.get_text_config().hidden_size
    setting = Setting(
        config=shape, dtype=DTYPES[config.dtype], adapter_dtype=DTYPES[adapter_dtype(config.optim)],
        device_type=config.device, slot=SlotConfig(r=config.lora_r, target_modules=config.lora_target_modules),
        prompt_length=config.max_prompt_length, completion_length=config.max_completion_length, batch=config.share,
        num_generations=config.num_generations, num_mini_batches=config.num_mini_batches,
        micro_batch=config.per_device_train_batch_size,
        token_budget=default_token_budget(torch.device(config.device), width),
        gradient_checkpointing=config.gradient_checkpointing, optim=config.optim, quantization=config.quantization,
        processes=config.processes, shard_base=config.shard_base,
    )  # fmt: skip
    every = [name for name in METHODS if name != "full_ppo" or not config.needs_frozen]
    methods = every if config.method == "all" else [config.method]
    first = Formula(roles_of(methods[0]), setting)
    return {methods[0]: first, **{name: Formula(roles_of(name), setting, first.model) for name in methods[1:]}}


def as_row(formula: Formula, config: PlanConfig) -> dict[str, Any]:
    """Bytes of one process. `max_batch` counts answers of all of them."""
    peaks = {phase: formula.peak(phase) for phase in formula.phases}
    batch, micro = formula.largest(config.budget_bytes)
    return {
        "state_parts": {part: formula.state[part] for part in _STATE},
        "base_bytes": {phase: formula.base_bytes(phase) for phase in formula.phases},
        "kv_cache_bytes": formula.cache_bytes if "generation" in peaks else 0,
        "peak_bytes": peaks,
        "max_batch": config.processes * batch,
        "max_micro_batch": micro,
        "budget_bytes": config.budget_bytes,
    }


def _print(rows: dict[str, dict[str, Any]], config: PlanConfig) -> None:
    """A column per method: state by part, peak by phase, and what fits; GB of 10^9 bytes."""
    several = f" in each of {config.processes} processes" if config.processes > 1 else ""
    table = Table(
        title=f"{config.model_name_or_path}, {config.dtype}, batch {config.generation_batch_size} of "
        f"{config.max_prompt_length} + {config.max_completion_length} tokens: GB (10^9 bytes){several}",
        title_justify="left",
    )
    table.add_column("", no_wrap=True)
    for method in rows:
        table.add_column(method, justify="right", no_wrap=True)
    for part, name in _STATE.items():
        table.add_row(name, *(_gigabytes(row["state_parts"][part]) for row in rows.values()))
    table.add_row("KV cache", *(_gigabytes(row["kv_cache_bytes"]) for row in rows.values()))
    table.add_section()
    for phase, name in {"generation": "generation", "inference": "inference (scoring)", "update": "update"}.items():
        table.add_row(f"peak, {name}", *(_gigabytes(row["peak_bytes"].get(phase, 0)) for row in rows.values()))
    table.add_section()
    table.add_row(f"largest batch in {config.gpu}", *(f"{row['max_batch']:,}" for row in rows.values()))
    table.add_row(f"largest micro-batch in {config.gpu}", *(f"{row['max_micro_batch']:,}" for row in rows.values()))
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)  # a file has no width, and five methods side by side need theirs
    console.print(table)
    print(
        f"A formula, within 10 % of what was measured; 5 % of {config.gpu} are left to the driver and fragmentation. "
        "`rlhf-engine train --dry_run` measures one step."
    )


def _gigabytes(n: int) -> str:
    """Two decimals, a dash for nothing, and small numbers not as 0."""
    return "–" if n == 0 else f"{n / 1e9:.2f}" if n >= 1e7 else f"{n / 1e9:.5f}"
