"""Options of `rlhf-engine sweep`: many runs of `train` on one base.

The grid file:

    flags: {model_name_or_path: MODEL, config: train.yaml}    # of all runs
    grid: {algorithm: [ppo, remax], seed: [0, 1, 2]}          # axes, each with its values
    with: {algorithm: {remax: {num_mini_batches: 1}}}         # flags that come with a value of an axis
    runs_at_once: 6                                           # by memory; none: all
    halving: {at: [20, 50], by: eval/reward, keep: 0.5}
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_engine.config.parser import Options, config_of, option, required
from rlhf_engine.config.train import TrainConfig
from rlhf_engine.errors import ConfigError

SEED = "seed"
SHARED = ("model_name_or_path", "dtype", "device", "quantization", "kernels", "exact", "gradient_checkpointing")
"""Options that belong to the base, or to the process."""
_UNSET = ("vllm_server_base_url", "shard_base", "dry_run", "push_to_hub")


class SweepConfig(Options):
    """Many runs of train on one base in one process: a grid of options, seeds, and successive halving."""

    POSITIONAL = ("grid",)
    EXAMPLE = "rlhf-engine sweep grid.yaml --output_dir runs/sweep"

    grid: str = required("YAML file of the grid: flags, grid, with, runs_at_once, halving; may also come first")
    output_dir: str = required("folder for a folder of each run and the page of all; the same command goes on there")


class Halving(Options):
    """Successive halving: groups of runs that differ in their seed alone stay or are dropped together."""

    at: list[int] = required("steps after which groups are dropped")
    by: str = required(
        "metric whose mean over the steps since decides; the largest stay, with - before its name the least"
    )
    keep: float = option(0.5, "share of the groups that stay", gt=0, lt=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("at", self.at == sorted({*self.at}) and self.at[0] > 0, "steps above 0 that increase")


class GridFile(Options):
    """A grid file."""

    grid: dict[str, Any] = required("axes, each an option of train with a list of values")
    flags: dict[str, Any] | None = option(None, "options of train that all runs share")
    with_value: dict[str, Any] | None = option(None, "axis → value → options that come with it", alias="with")
    runs_at_once: int | None = option(None, "runs that take turns, whose policies are in memory; none: all", ge=1)
    halving: dict[str, Any] | None = option(None, "at, by and keep")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("grid", bool(self.grid), "an axis or several")
        for axis, values in self.grid.items():
            if not isinstance(values, list) or not values:
                raise ConfigError(f"grid.{axis}: expected a list of values, got {values!r}")
        for axis, presets in (self.with_value or {}).items():
            unknown = [value for value in presets if value not in self.grid.get(axis, ())]
            if unknown:
                raise ConfigError(f"with.{axis}: expected values of the grid, got {unknown}")


class Grid(NamedTuple):
    """Runs of a grid file, and how they take turns."""

    runs: dict[str, TrainConfig]  # runs by the names of their folders, those of one seed together
    halving: Halving | None
    at_once: int | None  # runs in memory at once; None: all


def run_name(axes: Iterable[str], point: Mapping[str, Any]) -> str:
    """Name of the folder of a run, of the axes in their order."""
    return re.sub(r"[^\w.,=+-]+", "-", "_".join(f"{axis}-{point[axis]}" for axis in axes))


def read_grid(path: str, output: Path) -> Grid:
    """Read a grid file, of runs in folders within `output`, which go on there.

    Raises ConfigError for options that are wrong, and for runs that cannot share a base.
    """
    file = config_of(GridFile, {"grid file": path}, path, argument="grid file")
    halving = None if file.halving is None else config_of(Halving, file.halving, f"halving of {path}")
    runs: dict[str, TrainConfig] = {}
    axes = sorted(file.grid, key=lambda axis: axis != SEED)  # the seed turns slowest
    for values in itertools.product(*(file.grid[axis] for axis in axes)):
        point, given = dict(zip(axes, values, strict=True)), dict(file.flags or {})
        for axis, value in point.items():
            given |= next((more for key, more in (file.with_value or {}).get(axis, {}).items() if key == value), {})
        given |= point
        name = run_name(file.grid, point)
        if name in runs:
            raise ConfigError(f"grid: expected values that give each run a name of its own, got {name!r} twice")
        own = {"output_dir": str(output / name), "resume_from_checkpoint": "auto"}
        for option_name in own.keys() & given.keys():
            raise ConfigError(f"{option_name}: expected it unset in a grid, got {given[option_name]!r}")
        runs[name] = config_of(TrainConfig, {**given, **own}, path)
    _check_shared(list(runs.values()))
    return Grid(runs, halving, file.runs_at_once)


def _check_shared(runs: Sequence[TrainConfig]) -> None:
    """Raise ConfigError for runs that cannot take turns on one base in one process."""
    for name in SHARED:
        different = list(dict.fromkeys(getattr(run, name) for run in runs))
        if len(different) > 1:
            raise ConfigError(f"{name}: expected one value for all runs, which share a base, got {different}")
    for run in runs:
        run.require("async_mode", run.async_mode != "ray", "a run in this process in a sweep")
        run.require_unset(_UNSET, "in a sweep")
        local = set(run.report_to) <= {"tensorboard"}
        run.require("report_to", local, "tensorboard alone in a sweep, as others have one run a process")
