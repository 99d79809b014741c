"""`rlhf-engine sft`, `reward` and `train`: runs of many steps, in one process or several."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rlhf_engine.commands.common import check_kernels, prepare, print_what_was_left_out
from rlhf_engine.config import ExportConfig, RewardConfig, SFTConfig, TrainConfig
from rlhf_engine.config.commands import Format
from rlhf_engine.config.launch import asked_to_shard, launched_rank
from rlhf_engine.config.run import TrainingOptions
from rlhf_engine.devices import DTYPES, World, resolve_device
from rlhf_engine.errors import RunStopped, as_request_errors
from rlhf_engine.hub import require_push
from rlhf_engine.io import remove
from rlhf_engine.runs.folder import CURVES_FILE, FINAL_FOLDER, METRICS_FILE, SAMPLES_FILE
from rlhf_engine.runs.page import PAGE_FILE
from rlhf_engine.runs.progress import StopSignals, describe_budgets, exit_summary
from rlhf_engine.runs.text import format_value
from rlhf_engine.training.reward_model import RewardTrainer
from rlhf_engine.training.rl import RlTrainer
from rlhf_engine.training.run import Run
from rlhf_engine.training.sft import SftTrainer

C = TypeVar("C", bound=TrainingOptions)


def sft(config: SFTConfig) -> int:
    """Fine-tune, with a reward head."""
    with _launched(config) as (config, world):
        with as_request_errors():
            trainer = SftTrainer(config, world)
        results = {"base" if config.mode == "full" else "slot": config.output_dir}
        return _run("sft", trainer, lambda: results, notes=[f"note: {note}" for note in trainer.notes])


def reward(config: RewardConfig) -> int:
    """Train a reward model, on an adapter slot or whole."""
    with _launched(config) as (config, world):
        with as_request_errors():
            trainer = RewardTrainer(config, world)
        share = trainer.trained_parameters / trainer.base_parameters
        held_out = len(trainer.eval_set) + len(trainer.test_set)
        size = (
            f"{trainer.objective}, {len(trainer.rows):,} rows and {held_out:,} held out; training "
            f"{trainer.trained_parameters:,} parameters, {100 * share:.3g} % of the base's {trainer.base_parameters:,}"
        )

        def results() -> dict[str, str]:
            result = trainer.result()
            metric = f"held-out {trainer.best_metric} {format_value(result['best_metric'])}"
            return {"reward model": f"{trainer.output / FINAL_FOLDER}  (step {result['final_step']}, {metric})"}

        return _run("reward", trainer, results, notes=[size, *(f"note: {note}" for note in trainer.notes)])


def train(config: TrainConfig) -> int:
    """Train by RL on one frozen backbone."""
    with contextlib.ExitStack() as stack:
        config, world = stack.enter_context(_launched(config))
        with as_request_errors():
            connect = None
            if config.async_kind == "ray":
                from rlhf_engine.generators.ray import generators_on_ray

                connect = stack.enter_context(generators_on_ray(config, world))
            trainer = RlTrainer(config, world, connect=connect)
        if config.dry_run:
            return _measure(trainer)
        results = {"model": trainer.output / FINAL_FOLDER, "samples": trainer.output / SAMPLES_FILE}
        return _run("train", trainer, lambda: results)


@contextlib.contextmanager
def _launched(config: C) -> Iterator[tuple[C, World]]:
    """Options of a run, with what a launcher adds to them, and the ranks that it has started, while the run lasts."""
    prepare(config.kernels)
    with as_request_errors():
        check_kernels(config.kernels, resolve_device(config.device).type, DTYPES[config.dtype])
    if config.push_to_hub is not None and launched_rank() == 0:
        require_push(config.push_to_hub)
    if asked_to_shard() and not config.shard_base:
        config = dataclasses.replace(config, shard_base=True)
    with contextlib.closing(World.from_environment(config.device)) as world:
        yield config, world


def _run(name: str, trainer: Run, results: Callable[[], Mapping[str, Any]], *, notes: Iterable[str] = ()) -> int:
    """Make a trainer's remaining steps with its progress shown, and print where `results` lie; the exit code."""
    finished, output = trainer.world.gather(trainer.finished())[0], trainer.output
    if not trainer.world.is_main:
        return 0 if finished else _run_until_stopped(name, trainer)
    if finished:
        print(f"nothing to do: {output} is at step {trainer.steps_done()} of {trainer.total_steps}")
        return 0
    print_what_was_left_out(trainer.reports.values())
    for note in notes:
        print(note, file=sys.stderr)
    print(f"page {output / PAGE_FILE}, which follows the run in a browser", file=sys.stderr)
    code = _run_until_stopped(name, trainer)
    if not code:
        places = dict(results())
        if trainer.config.push_to_hub is not None:
            places["pushed"] = _push(name, trainer.config, output)
        files = {"curves": CURVES_FILE, "metrics": METRICS_FILE, "page": PAGE_FILE}
        places |= {what: output / file for what, file in files.items()}
        print(exit_summary(output / METRICS_FILE, places))
    return code


def _run_until_stopped(name: str, trainer: Run) -> int:
    """Make the remaining steps until a signal comes; 0, or the exit code where one has stopped the run."""
    with StopSignals() as signals:
        try:
            trainer.run(stop=signals.asked)
        except RunStopped as stopped:
            if launched_rank() == 0:
                print(f"rlhf-engine {name}: {stopped}; --resume_from_checkpoint auto goes on", file=sys.stderr)
            return signals.exit_code
    return 0


def _push(name: str, config: TrainingOptions, output: Path) -> str | None:
    """Export a run's result to the folder `hub` in its own, and upload it; the address of the commit."""
    from rlhf_engine.tools.export import export

    is_full = getattr(config, "mode", None) == "full" or getattr(config, "method", None) == "full_ppo"
    to: Format = ("sequence_classification" if name == "reward" else "merged") if is_full else "peft"
    place = output / "hub"
    remove(place)
    with as_request_errors():
        return export(ExportConfig(source=str(output), to=to, output_dir=str(place), push_to_hub=config.push_to_hub))[0]


def _measure(trainer: RlTrainer) -> int:
    """Print seconds and peak memory by phase of a step; the one before it makes the optimizer's state."""
    config = trainer.config
    with trainer.resources(), trainer.steps():
        trainer.step()
        metrics = trainer.step()
    if not trainer.world.is_main:
        return 0
    longest = max(map(len, trainer.train_set.ids))
    each = f", shared by {trainer.world.size} processes" if trainer.world.size > 1 else ""
    print(f"{config.generation_batch_size} answers of up to {longest} + {config.max_completion_length} tokens{each}")
    if chosen := describe_budgets(metrics):
        print(chosen)
    peaks = {name.partition("/")[2]: n for name, n in metrics.items() if name.startswith("peak_memory_bytes/")}
    for phase, peak in peaks.items():
        print(f"{phase:12} {metrics[f'seconds/{phase}']:9.2f} s {peak / 1e9:9.2f} GB")
    print(f"{'step':12} {metrics['seconds/step']:9.2f} s {max(peaks.values()) / 1e9:9.2f} GB at the peak")
    return 0
