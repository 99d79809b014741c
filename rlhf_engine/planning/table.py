"""Plans of presets from a table in place of traces, without torch: `plan_table.json`.

The table holds, for every preset in float32 and bfloat16 with default lengths and adapters, what the planner found in
traces: bytes of the state, and bytes that a phase allocates with 1 … 64 rows. `bench/tables/plan_table.py` writes it,
and tests compare it with traces.
"""

from __future__ import annotations

import dataclasses
import json
import math
from functools import cache
from importlib.metadata import version
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from rlhf_engine.config import PlanConfig
from rlhf_engine.planning.fit import TRACED_ROWS, Fit, Step

PATH = Path(__file__).with_name("plan_table.json")
STATE = ("frozen_weights", "trained_weights", "adapters", "heads", "packed_weights")
"""Parts of the state that no optimizer changes, in the table's order."""
_ALIKE = (
    *("processes", "device", "adapter_dtype", "lora_r", "lora_dropout", "lora_target_modules"),
    *("max_prompt_length", "max_completion_length", "token_budget", "gradient_checkpointing"),
)
"""Options that change a trace; the table has their defaults."""


class TabledFit(Fit):
    """Prediction of one method of a preset."""

    def __init__(self, method: str, step: Step, optim: str, part: dict[str, Any]) -> None:
        """part: the table's line of the preset and dtype."""
        super().__init__(method, step)
        self.cache_block, self.prefill_tokens = read()["cache_block"], read()["prefill_tokens"]
        self._part, self._own = part, part["methods"][method]
        gradients, optimizer, self._temporary = self._own["optim"][optim]
        state = dict(zip(STATE, self._own["state"], strict=True))
        self._state = {**state, "gradients": gradients, "optimizer": optimizer}
        self._peaks = self._own["peaks"] if optim == "adamw" else {**self._own["peaks"], **self._own["other_optim"]}

    @property
    def state_bytes(self) -> dict[str, int]:
        """Bytes of the state by part."""
        return self._state

    @property
    def temporary_bytes(self) -> int:
        """Most bytes that AdamW takes for a parameter while it steps, one parameter at a time."""
        found: int = self._temporary
        return found

    @property
    def cache_bytes_per_position(self) -> int:
        """Keys and values of a token in every layer."""
        found: int = self._part["cache_bytes_per_position"]
        return found

    @property
    def support_bytes_per_token(self) -> int:
        """Most bytes of the words that a token was drawn among."""
        found: int = self._part["support_bytes_per_token"]
        return found

    def _most_lanes(self, phase: str) -> int:
        found: int = self._own["lanes"][phase]
        return found

    def _shares(self, phase: str) -> bool:
        return False  # the table is of GPUs, where attention shares no keys

    def _allocated(self, phase: str, rows: int, repeats: int, apart: bool) -> int:
        apart = apart and self._most_lanes(phase) > 1
        curve = self._part["curves"][self._peaks[phase][f"{repeats} {'apart' if apart else 'together'}"]]
        return decode(curve)[rows - 1]


def encode(curve: list[int]) -> list[int]:
    """Bytes of 1 … 64 rows as a unit and, in units, the first, the first difference and the second ones, less zeros."""
    unit = math.gcd(*curve)
    units = [n // unit for n in curve]
    first = [b - a for a, b in pairwise(units)]
    second = [b - a for a, b in pairwise(first)]
    while second and second[-1] == 0:
        second.pop()
    return [unit, units[0], first[0], *second]


def decode(text: list[int]) -> list[int]:
    """Inverse of `encode`."""
    unit, start, *first = text
    first += [0] * (TRACED_ROWS - 1 - len(first))
    return [unit * n for n in accumulate(accumulate(first), initial=start)]


@cache
def read() -> dict[str, Any]:
    """The table."""
    found: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
    return found


def fits(config: PlanConfig, methods: list[str]) -> list[TabledFit] | None:
    """Methods of a preset with options that the table has, or None."""
    part = read()["presets"].get(f"{config.model} {config.dtype}")
    default = {field.name: field.default for field in dataclasses.fields(PlanConfig)}
    if part is None or config.gpu == "cpu" or config.optim == "adafactor":  # the last is traced
        return None
    if any(getattr(config, name) != default[name] for name in _ALIKE):
        return None
    step = Step(
        prompt_length=config.max_prompt_length,
        completion_length=config.max_completion_length,
        batch=config.batch,
        num_generations=config.num_generations,
        num_mini_batches=config.num_mini_batches,
        micro_batch=config.per_device_train_batch_size,
        token_budget=read()["token_budget"],
    )
    return [TabledFit(method, step, config.optim, part) for method in methods]


def difference() -> str | None:
    """A line where libraries are not those that the table was traced with."""
    table = read()["versions"]
    here = {name: version(name) for name in table}
    if all(_minor(here[name]) == _minor(table[name]) for name in table):
        return None
    traced, installed = (", ".join(f"{name} {_minor(v)}" for name, v in found.items()) for found in (table, here))
    return (
        f"note: numbers of presets were traced with {traced}; {installed} are installed here. "
        "A folder with the model's config.json as --model is traced anew"
    )


def _minor(text: str) -> str:
    return ".".join(text.split("+")[0].split(".")[:2])
