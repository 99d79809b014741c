"""Checkpoints: adapters, heads, optimizer and counters in safetensors and JSON, written whole or not at all.

Randomness, data order and schedules are functions of (seed, step), so the step is all there is to remember of them.
A checkpoint is written to a temporary folder, flushed to disk and renamed; what has the final name is complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from rlhf_engine.errors import ConfigError
from rlhf_engine.folders import put_in_place
from rlhf_engine.hydra import HydraModel, peft_io, save_pretrained
from rlhf_engine.hydra.persist import load_into
from rlhf_engine.training.optimizer import RoleOptimizer

_NAME = re.compile(r"checkpoint-\d+")
_OPTIMIZER_FILE = "optimizer.safetensors"
_STATE_FILE = "trainer_state.json"


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """Counters of a run."""

    step: int
    """Steps done."""
    seed: int
    """Seed that every random number of the run is a function of."""
    samples: int
    """Answers generated so far; the next one gets this id."""
    policy_version: int
    """Updates of the policy so far."""
    micro_batch_size: int | None = None
    """Sequences per forward and backward after running out of memory; None: as configured."""
    token_budget: int | None = None
    """Tokens per traversal after running out of memory; None: as configured."""


def save_checkpoint(
    output_dir: str | os.PathLike[str],
    model: HydraModel,
    optimizer: RoleOptimizer,
    state: TrainerState,
    *,
    keep: int | None,
) -> Path:
    """Write checkpoint-<step> atomically and drop all but the newest `keep`; returns its folder."""
    root = Path(output_dir)
    final, temporary = root / f"checkpoint-{state.step}", root / f".checkpoint-{state.step}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    save_pretrained(model, temporary)
    save_file(optimizer.state_tensors(), temporary / _OPTIMIZER_FILE)
    (temporary / _STATE_FILE).write_text(json.dumps(vars(state), indent=1) + "\n")
    put_in_place(temporary, final)
    for old in list_checkpoints(root)[: -keep if keep is not None else 0]:
        shutil.rmtree(old)
    return final


def load_checkpoint(folder: str | os.PathLike[str], model: HydraModel, optimizer: RoleOptimizer) -> TrainerState:
    """Load into a model and optimizer built from the same configuration; ConfigError for a folder that is none."""
    folder = _require_checkpoint(Path(folder))
    try:
        load_into(model, folder)
    except ValueError as error:
        raise ConfigError(f"resume_from_checkpoint: {error}") from error
    optimizer.load_state_tensors(load_file(folder / _OPTIMIZER_FILE))
    fields: dict[str, Any] = json.loads((folder / _STATE_FILE).read_text())
    return TrainerState(**fields)


def list_checkpoints(output_dir: str | os.PathLike[str]) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    root = Path(output_dir)
    found = [p for p in root.glob("checkpoint-*") if p.is_dir() and _NAME.fullmatch(p.name)] if root.is_dir() else []
    return sorted(found, key=lambda p: int(p.name.rpartition("-")[2]))


def resolve_resume(resume: str | None, output_dir: str | os.PathLike[str]) -> Path | None:
    """The checkpoint that `resume_from_checkpoint` means: None, a folder, or with `auto` the newest (None if none)."""
    if resume is None:
        return None
    if resume == "auto":
        found = list_checkpoints(output_dir)
        return found[-1] if found else None
    if not Path(resume).is_dir():
        raise ConfigError(f"resume_from_checkpoint: expected 'auto' or a checkpoint folder, got {resume!r}")
    return _require_checkpoint(Path(resume))


def _require_checkpoint(folder: Path) -> Path:
    for name in (_STATE_FILE, _OPTIMIZER_FILE, peft_io.ENGINE_FILE):
        if not (folder / name).is_file():
            raise ConfigError(f"resume_from_checkpoint: expected {name} in {str(folder)!r}, which is not there")
    return folder
