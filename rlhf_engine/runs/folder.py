"""The output folder of a run that writes checkpoints: what its files are called, and what may be in it at the start."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from rlhf_engine.errors import ConfigError
from rlhf_engine.hydra import peft_io
from rlhf_engine.io import delete, finish_replacements, lock as lock_file, no_link, remove, replacing, write_manifest
from rlhf_engine.runs.checkpoint import list_checkpoints

METRICS_FILE = "metrics.jsonl"
RECORD_FILE = "run.json"
CURVES_FILE = "curves.png"
SAMPLES_FILE = "samples.md"
SAMPLES_LOG = "samples.jsonl"
FINAL_FOLDER = "final"
LOCK_FILE = ".lock"
MODEL_CONFIG = "config.json"


@contextlib.contextmanager
def locked(output: Path) -> Iterator[None]:
    """Make the output folder and keep other processes from running in it; ConfigError where one does."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        if (output / LOCK_FILE).is_symlink():
            (output / LOCK_FILE).unlink()
        file = os.fdopen(no_link(output / LOCK_FILE, os.O_RDWR | os.O_CREAT), "r+")
    except OSError as error:
        place = f"output_dir: expected a folder that can be written, got {str(output)!r}"
        raise ConfigError(f"{place}: {error.strerror}") from error
    with file as lock:
        _lock(lock.fileno(), fcntl.LOCK_EX, output)
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


def require_unlocked(output: Path) -> None:
    """Raise ConfigError where another process runs in an output folder."""
    if not (output / LOCK_FILE).exists():
        return
    with (output / LOCK_FILE).open() as lock:
        _lock(lock.fileno(), fcntl.LOCK_SH, output)  # the ranks of a run may ask at the same time


def _lock(descriptor: int, kind: int, output: Path) -> None:
    try:
        without = "another process that runs there will not be noticed"
        lock_file(descriptor, kind | fcntl.LOCK_NB, f"output_dir: {output}", without)
    except BlockingIOError as error:
        holder = (output / LOCK_FILE).read_text().strip()
        raise ConfigError(
            f"output_dir: expected a folder that no other process writes, got {output}, where process {holder} runs"
        ) from error


def check_output(output: Path, *, resume: str | None, checkpoint: Path | None) -> None:
    """Raise ConfigError for an output folder with a run that is neither gone on with nor to be overwritten."""
    if output.exists() and not output.is_dir():
        raise ConfigError(f"output_dir: expected a folder, got the file {str(output)!r}")
    if resume == "auto" and checkpoint is None and (output / FINAL_FOLDER).is_dir():
        raise ConfigError(
            f"output_dir: expected checkpoints to go on from beside {FINAL_FOLDER}/ in {output}, got none; use "
            "--resume_from_checkpoint restart to start afresh"
        )
    # `auto` without a checkpoint starts afresh: the run was stopped before its first one
    goes_on = resume == "auto" or (checkpoint is not None and checkpoint.resolve().parent == output.resolve())
    if not goes_on and resume != "restart":
        held = [p.name for p in list_checkpoints(output)]
        if held or (output / METRICS_FILE).exists():
            raise ConfigError(
                f"output_dir: expected one without a run, got {output} with {held or [METRICS_FILE]}; "
                "use --resume_from_checkpoint auto to go on or restart to start afresh"
            )


def clear_later_steps(output: Path, *, step: int, total_steps: int) -> None:
    """Drop what an overwritten run, or the steps after the checkpoint gone back to, left: it is not this run's."""
    drop_later_checkpoints(output, step)
    if step < total_steps:
        remove(output / FINAL_FOLDER)


def drop_later_checkpoints(output: Path, step: int) -> None:
    """Drop the checkpoints of later steps, and what stops have left of files and folders that were being written."""
    for names in ("checkpoint-*", FINAL_FOLDER):
        finish_replacements(output, names)
    for unfinished in output.glob(".*.tmp"):
        delete(unfinished)
    for checkpoint in list_checkpoints(output):
        if int(checkpoint.name.rpartition("-")[2]) > step:
            remove(checkpoint)


def find_model(folder: Path, argument: str) -> Path:
    """Folder of a run's final model, else its newest checkpoint, or of a model; ConfigError without one."""
    if not folder.is_dir():
        raise ConfigError(
            f"{argument}: expected the folder of a run, a checkpoint or a model, got {str(folder)!r}, not a folder"
        )
    finish_replacements(folder, FINAL_FOLDER)
    if (folder / FINAL_FOLDER).is_dir():
        return folder / FINAL_FOLDER
    if any((folder / name).is_file() for name in (MODEL_CONFIG, peft_io.CONFIG_FILE, peft_io.ENGINE_FILE)):
        return folder
    checkpoints = list_checkpoints(folder)
    if not checkpoints:
        raise ConfigError(
            f"{argument}: expected a folder with {FINAL_FOLDER}/, checkpoints, {MODEL_CONFIG} or "
            f"{peft_io.CONFIG_FILE}, got {str(folder)!r}, which has none of them"
        )
    return checkpoints[-1]


def write_final(output: Path, write: Callable[[Path], object]) -> None:
    """Write the result of a run into final/ by `write`, which gets the folder; it appears whole or not at all."""
    with replacing(output / FINAL_FOLDER) as temporary:
        write(temporary)
        write_manifest(temporary)
