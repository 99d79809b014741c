"""Checkpoints: adapters, heads, optimizer, counters and kernel choices, written whole or not at all.

Randomness, data order and schedules are functions of (seed, step), so the step is all there is to remember of them.
A checkpoint is written to a temporary folder, flushed to disk and renamed; what has the final name is complete. Its
manifest has the SHA-256 of every file, and none is read that differs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from rlhf_kernels.runtime import cores, registry
from safetensors.torch import load_file, save_file

from rlhf_engine.errors import CheckpointWriteError, ConfigError, CorruptCheckpointError
from rlhf_engine.generators.work import Snapshot
from rlhf_engine.hydra import HydraModel, peft_io, save_pretrained
from rlhf_engine.hydra.optimizer import RoleOptimizer
from rlhf_engine.hydra.persist import load_into
from rlhf_engine.io import (
    MANIFEST_FILE,
    check_manifest,
    finish_replacement,
    finish_replacements,
    remove,
    replacing,
    write_manifest,
    writing,
)

_NAME = re.compile(r"checkpoint-\d+")
_OPTIMIZER_FILE = "optimizer.safetensors"
_STATE_FILE = "trainer_state.json"
_POLICIES_FILE = "policies.safetensors"
_KERNELS_FILE = "kernels.json"


class Counters(Protocol):
    """Counters that a run keeps, a dataclass of plain values; the checkpoint of a field `best_step` is kept, too."""

    @property
    def step(self) -> int:
        """Steps done."""

    @property
    def seed(self) -> int:
        """Seed that every random number of the run is a function of."""


C = TypeVar("C", bound=Counters)


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """Counters of an RL run."""

    step: int  # steps done
    seed: int  # seed that every random number of the run is a function of
    algorithm: str | None = None  # algorithm that trains the policy; None in checkpoints written before it was recorded
    samples: int  # answers generated so far; the next one gets this id
    policy_version: int  # updates of the policy so far
    budgets: dict[str, int] = field(default_factory=dict)  # micro_batch_tokens, scoring_tokens, where they are chosen
    budget_failures: dict[str, int] = field(default_factory=dict)
    """Steps in a row, up to this one, that ran out of memory, likewise."""
    micro_batch_size: int | None = None
    """Sequences per forward and backward after running out of memory; None, as in any new run: as configured."""
    token_budget: int | None = None  # likewise tokens per backbone forward, where `budgets` has none
    beta: float | None = None  # KL coefficient of the next step where it adapts; None: as configured
    begun_with_beta: float | None = None
    """The configured one, where it adapts; None in checkpoints written before it was recorded."""
    best_step: int | None = None  # step of the best evaluation so far, by reward
    best_reward: float | None = None  # reward of the evaluation at `best_step`
    judged_by: str | None = None  # a digest of the rewards and held-out prompts that the best evaluation is the best by
    prompts: str | None = None  # a digest of the prompts, in their order
    vocabulary: str | None = None  # a digest of the tokenizer's words, by which rewards read answers
    generation_batch_size: int | None = None  # answers of a step, by which the place in the data is found again
    num_generations: int | None = None  # answers to a prompt, likewise
    policies_after: dict[str, int] = field(default_factory=dict)
    """Steps done → version, of past policies that later steps may ask for."""
    drawn_by: dict[str, int] = field(default_factory=dict)
    """Step → version of the policy, of later steps whose answers had been begun."""


def save_checkpoint(
    output_dir: str | os.PathLike[str],
    model: HydraModel,
    optimizer: RoleOptimizer,
    state: Counters,
    *,
    keep: int | None,
    policies: Mapping[int, Snapshot] | None = None,
) -> Path:
    """Write checkpoint-<step> whole or not at all; of earlier ones the newest `keep` and what they refer to stay."""
    root = Path(output_dir)
    final = root / f"checkpoint-{state.step}"
    with replacing(final) as temporary:
        _write(temporary, model, optimizer, state, policies or {})
    with writing(final):
        _drop_all_but(keep, root)
    return final


@contextlib.contextmanager
def saved_on_error(
    output: Path, optimizer: RoleOptimizer, step: Callable[[], int], save: Callable[[], object]
) -> Iterator[None]:
    """Save a checkpoint of the last whole step where the block fails before any weight has changed (`is_whole`)."""
    try:
        yield
    except BaseException as error:
        trained = (p for group in optimizer.groups.values() for p in group.values())
        is_there = (output / f"checkpoint-{step()}").is_dir()
        if optimizer.is_whole and step() > 0 and not is_there and all(bool(p.isfinite().all()) for p in trained):
            try:
                save()
                error.add_note(f"checkpoint of step {step()} written, --resume_from_checkpoint auto goes on")
            except CheckpointWriteError as failed:
                error.add_note(f"no checkpoint of step {step()}: {failed}")
        raise


def _write(
    folder: Path, model: HydraModel, optimizer: RoleOptimizer, state: Counters, policies: Mapping[int, Snapshot]
) -> None:
    save_pretrained(model, folder)
    save_file(optimizer.state_tensors(), folder / _OPTIMIZER_FILE)
    if policies:
        tensors = {f"{version}|{name}": x for version, p in policies.items() for name, x in p.tensors.items()}
        save_file({name: x.detach().cpu().contiguous() for name, x in tensors.items()}, folder / _POLICIES_FILE)
    (folder / _STATE_FILE).write_text(json.dumps(vars(state), indent=1) + "\n")
    with model.backbone().kernels.used():
        chosen: list[dict[str, Any]] = [choice._asdict() for choice in registry.choices()]
        if registry.is_exact():
            chosen.append({"exact": True})
    (folder / _KERNELS_FILE).write_text(json.dumps(chosen, indent=1) + "\n")
    write_manifest(folder)


def _drop_all_but(keep: int | None, root: Path) -> None:
    """Nothing is dropped while one of those to keep cannot be read: what it refers to is not known."""
    checkpoints = list_checkpoints(root)
    kept = checkpoints if keep is None else checkpoints[-keep:]
    try:
        states = [json.loads((folder / _STATE_FILE).read_text()) for folder in kept]
    except (FileNotFoundError, ValueError):
        return
    needed = {root / f"checkpoint-{state['best_step']}" for state in states if state.get("best_step") is not None}
    for old in checkpoints:
        if old not in kept and old not in needed:
            remove(old)


def load_checkpoint(
    folder: str | os.PathLike[str],
    model: HydraModel,
    optimizer: RoleOptimizer,
    kind: type[C] = TrainerState,  # type: ignore[assignment]  # mypy knows no defaults of type variables
) -> C:
    """Load a checkpoint into a model and an optimizer; its counters. A folder that is refused changes nothing."""
    folder = Path(folder)
    state = read_counters(folder, kind)
    check(folder)
    try:
        load_into(model, folder)
        optimizer.load_state_tensors(load_file(folder / _OPTIMIZER_FILE))
    except ValueError as error:
        raise ConfigError(f"resume_from_checkpoint: {error}") from error
    return state


def begin_kernels(resume: Path | None, *, exact: bool | None = False) -> None:
    """Let `auto` choose kernels for the run whose settings are in use, or as its checkpoint says; bound threads."""
    lowered = cores.limit_threads()
    if lowered is not None:
        warnings.warn(lowered, stacklevel=3)
    path = None if resume is None else resume / _KERNELS_FILE
    if path is None or not path.is_file():
        registry.begin_run(exact=bool(exact))
        return
    check(path.parent, [_KERNELS_FILE])
    backends, was_exact = [], False
    for i, given in enumerate(json.loads(path.read_text())):
        if "backend" in given:
            shape = None if given["shape"] is None else tuple(given["shape"])
            backends.append(registry.Choice(given["op"], given["dtype"], shape, given["backend"]))
        elif "exact" in given:
            was_exact = given["exact"]
        else:
            raise ConfigError(
                f"resume_from_checkpoint: {_KERNELS_FILE}[{i}]: expected default tiles, got tuned ones of "
                f"{given.get('op')}; tuned tables are gone, begin anew from the adapters of this checkpoint"
            )
    try:
        registry.begin_run(backends, exact=was_exact if exact is None else exact)
    except registry.BackendUnavailableError as error:
        raise ConfigError(f"resume_from_checkpoint: {error}; --kernels NAME goes on with another") from error


def load_policies(folder: str | os.PathLike[str]) -> dict[int, Snapshot]:
    """Load the past policies of a checkpoint by version; empty where it has none."""
    path = Path(folder) / _POLICIES_FILE
    tensors: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in (load_file(path) if path.is_file() else {}).items():
        version, _, name = key.partition("|")
        tensors.setdefault(int(version), {})[name] = tensor
    return {version: Snapshot(version=version, tensors=named) for version, named in tensors.items()}


def read_counters(
    folder: Path,
    kind: type[C] = TrainerState,  # type: ignore[assignment]  # mypy knows no defaults of type variables
) -> C:
    """Read a checkpoint's counters alone; ConfigError where the folder has none of this kind."""
    check(_require_checkpoint(folder), [_STATE_FILE])
    fields = json.loads((folder / _STATE_FILE).read_text())
    known = {x.name: x for x in dataclasses.fields(kind)}  # type: ignore[arg-type]  # counters are dataclasses
    needed = {
        x.name for x in known.values() if x.default is dataclasses.MISSING and x.default_factory is dataclasses.MISSING
    }
    if not needed <= set(fields) <= set(known):
        raise ConfigError(
            f"resume_from_checkpoint: expected a checkpoint of this command, with {sorted(known)}, got one with "
            f"{sorted(fields)} in {str(folder)!r}"
        )
    return kind(**fields)


def require_same(checkpoint: Path, recorded: Counters, **now: Any) -> None:
    """Check that a checkpoint's counters record the values of the run, if any; ConfigError names the option."""
    for name, value in now.items():
        before = getattr(recorded, name)
        if before is not None and before != value:
            raise ConfigError(f"{name}: expected {before!r} as in {checkpoint}, got {value!r}")


def require_same_rows_per_step(checkpoint: Path, recorded: int | None, now: int) -> None:
    """Check that a step takes as many rows as `recorded`: otherwise the place in the data would be another."""
    if recorded is not None and recorded != now:
        raise ConfigError(
            f"per_device_train_batch_size: expected {recorded} rows per step with gradient_accumulation_steps, as in "
            f"{checkpoint}, got {now}"
        )


def digest(value: Any) -> str:
    """Name plain values, such as the rows of a run, by 16 hexadecimal digits of their `repr`."""
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()


def check(folder: Path, names: Iterable[str] | None = None) -> None:
    """Raise CorruptCheckpointError unless a checkpoint is as it was written, of `names` alone where given."""
    try:
        check_manifest(folder, names)
    except CorruptCheckpointError as error:
        others = [other.name for other in list_checkpoints(folder.parent) if other.name != folder.name]
        instead = f"; beside it {'are' if others[1:] else 'is'} {', '.join(others)}" if others else ""
        raise CorruptCheckpointError(f"resume_from_checkpoint: {error}{instead}") from error


def list_checkpoints(output_dir: str | os.PathLike[str]) -> list[Path]:
    """List the complete checkpoints of a run, oldest first; its folder need not exist."""
    root = Path(output_dir)
    folders = [p for p in root.glob("checkpoint-*") if p.is_dir() and _NAME.fullmatch(p.name)] if root.is_dir() else []
    return sorted(folders, key=lambda p: int(p.name.rpartition("-")[2]))


def resolve_resume(resume: str | None, output_dir: str | os.PathLike[str]) -> Path | None:
    """Find the checkpoint that `resume_from_checkpoint` names, `auto` for the newest; None to begin, or restart."""
    if resume in (None, "restart"):
        return None
    if resume == "auto":
        finish_replacements(Path(output_dir), "checkpoint-*")
        checkpoints = list_checkpoints(output_dir)
        return checkpoints[-1] if checkpoints else None
    finish_replacement(Path(resume).resolve())
    if not Path(resume).is_dir():
        raise ConfigError(f"resume_from_checkpoint: expected 'auto', 'restart' or a checkpoint folder, got {resume!r}")
    return _require_checkpoint(Path(resume))


def _require_checkpoint(folder: Path) -> Path:
    if (folder / MANIFEST_FILE).is_file():
        check(folder, [])  # whether files were lost
    for name in (_STATE_FILE, _OPTIMIZER_FILE, peft_io.ENGINE_FILE):
        if not (folder / name).is_file():
            raise ConfigError(f"resume_from_checkpoint: expected {name} in {str(folder)!r}, which is not there")
    return folder
