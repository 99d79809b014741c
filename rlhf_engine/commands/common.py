"""Helpers of the commands: process-wide settings, errors of requests, stops by signal, and the last lines printed."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf_engine.config.launch import asked_to_shard, launched_rank
from rlhf_engine.errors import ConfigError, RunStopped, as_request_errors

if TYPE_CHECKING:
    from rlhf_engine.config import EvaluateConfig, GenerateConfig
    from rlhf_engine.config.run import TrainingOptions
    from rlhf_engine.devices import World
    from rlhf_engine.training.run import Run

C = TypeVar("C", bound="TrainingOptions")


def prepare(kernels: str) -> None:
    """Process-wide settings: kernel backend, threads, memory, quiet libraries."""
    with as_request_errors():  # the environment may name an instruction set that is not there
        from rlhf_kernels.runtime import cores, registry
    from transformers.utils import logging

    from rlhf_engine.devices import keep_freed_memory

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    registry.set_default_backend(kernels)
    keep_freed_memory()
    note = cores.limit_threads()
    if note is not None and launched_rank() == 0:
        print(f"note: {note}", file=sys.stderr)


SHORT_CUTS = ("decode_step", "lora_group")
"""Ops that do at once what others do one by one; where a backend has none, the others run."""


def check_kernels(kernels: str, device_type: str, dtype: Any) -> None:
    """A backend asked for by name must serve every op; say at once which it does not."""
    from rlhf_kernels.runtime import registry

    if kernels == "auto":
        return
    report = {op: row for op, row in registry.report(device_type, dtype).items() if op not in SHORT_CUTS}
    missing = [op for op, row in report.items() if row[kernels] != "available"]
    if missing:
        raise ConfigError(
            f"kernels: expected a backend that serves every op on {device_type}, {kernels!r} has no {missing}"
        )


@contextlib.contextmanager
def launched_world(config: C) -> Iterator[tuple[C, World]]:
    """The ranks that a launcher has started, while a run lasts, and the options with what the launcher adds to them."""
    from rlhf_engine.devices import World

    if config.push_to_hub is not None and launched_rank() == 0:
        from rlhf_engine.hub import require_push

        require_push(config.push_to_hub)
    if asked_to_shard() and not config.shard_base:
        config = dataclasses.replace(config, shard_base=True)
    with contextlib.closing(World.from_environment(config.device)) as world:
        yield config, world


def begin_drawing(config: EvaluateConfig | GenerateConfig) -> str:
    """Check the device and the kernels of a command that draws answers, and settle exact mode; the device's type."""
    from rlhf_kernels.runtime import registry

    from rlhf_engine.devices import DTYPES, resolve_device
    from rlhf_engine.rollout import exactness

    device_type = resolve_device(config.device).type
    check_kernels(config.kernels, device_type, DTYPES[config.dtype])
    registry.begin_run(exact=exactness.by_default(device_type) if config.exact is None else config.exact)
    return device_type


def run_trainer(name: str, trainer: Run, results: Callable[[], Mapping[str, Any]], *, notes: Iterable[str] = ()) -> int:
    """Make a trainer's remaining steps with its progress shown, and print where `results` lie; the exit code."""
    from rlhf_engine.runs.page import PAGE_FILE

    finished = trainer.world.gather(trainer.finished())[0]
    if not trainer.world.is_main:
        return 0 if finished else _run_until_stopped(name, trainer)
    if finished:
        print(f"nothing to do: {trainer.output} is at step {trainer.steps_done()} of {trainer.total_steps}")
        return 0
    print_what_was_left_out(trainer.reports.values())
    for note in notes:
        print(note, file=sys.stderr)
    print(f"page {trainer.output / PAGE_FILE}, which follows the run in a browser", file=sys.stderr)
    code = _run_until_stopped(name, trainer)
    if not code:
        pushed = {} if trainer.config.push_to_hub is None else {"pushed": _push(name, trainer.config, trainer.output)}
        _print_where_results_are(trainer.output, {**results(), **pushed})
    return code


def _push(name: str, config: TrainingOptions, output: Path) -> str | None:
    """Export a run's result to the folder `hub` in its own, and upload it; the address of the commit."""
    from rlhf_engine.config.commands import ExportConfig, Format
    from rlhf_engine.io import remove
    from rlhf_engine.tools.export import export

    is_full = getattr(config, "mode", None) == "full" or getattr(config, "method", None) == "full_ppo"
    to: Format = ("sequence_classification" if name == "reward" else "merged") if is_full else "peft"
    place = output / "hub"
    remove(place)
    with as_request_errors():
        return export(ExportConfig(source=str(output), to=to, output_dir=str(place), push_to_hub=config.push_to_hub))[0]


def _run_until_stopped(name: str, trainer: Run) -> int:
    """Make the remaining steps until a signal comes; 0, or the exit code where one has stopped the run."""
    from rlhf_engine.runs.progress import StopSignals

    with StopSignals() as signals:
        try:
            trainer.run(stop=signals.asked)
        except RunStopped as stopped:
            if launched_rank() == 0:
                print(f"rlhf-engine {name}: {stopped}; --resume_from_checkpoint auto goes on", file=sys.stderr)
            return signals.exit_code
    return 0


def _print_where_results_are(output: Path, results: Mapping[str, Any]) -> None:
    """Standard output of a run that is over."""
    from rlhf_engine.runs.folder import CURVES_FILE, METRICS_FILE
    from rlhf_engine.runs.page import PAGE_FILE
    from rlhf_engine.runs.progress import exit_summary

    metrics = output / METRICS_FILE
    files = {"curves": output / CURVES_FILE, "metrics": metrics, "page": output / PAGE_FILE}
    print(exit_summary(metrics, {**results, **files}))


def print_what_was_left_out(reports: Iterable[Any]) -> None:
    """A line for each source of data of which not every row is used as it is."""
    for report in reports:
        if not report.is_plain:
            print(report.text(), file=sys.stderr)
