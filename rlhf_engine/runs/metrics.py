"""Numbers and sample answers that a run leaves behind, the record of what ran where, and trackers that get copies.

* `metrics.jsonl` has one JSON object per line, `{"step": 3, "reward": 0.41, …}`, flushed as written: a killed
  run loses no line. `sync` brings them to the disk before a checkpoint that a run goes on from.
* JSON has no NaN or infinity. Such a value is written as null and named: `"nonfinite": {"kl": "nan"}`. One search for
  that key finds every bad step.
* Steps never go backwards: a resumed run calls `truncate_after(step of the checkpoint)` first. What a crash has left
  behind whole lines is dropped when the file is opened. A damaged line before them stays, so that every reader says so.
* `samples.jsonl` has the answers to the same few prompts as a run goes on, a line per look at the policy.
* Files that are replaced are written beside themselves and renamed: a reader sees the old one or the new one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import math
import numbers
import os
import platform
import re
import secrets
import subprocess
import sys
import warnings
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rlhf_kernels.runtime import cores, native
from rlhf_kernels.runtime.registry import is_gpu

import rlhf_engine
from rlhf_engine.config.launch import version_of
from rlhf_engine.errors import ConfigError
from rlhf_engine.io import no_link

TENSORBOARD_FOLDER = "tensorboard"
NAMES_FILE = "trackers.json"  # file with the names of a run elsewhere, by tracker
_NAMED_BY = {"wandb": "id", "trackio": "name"}  # the argument by which a tracker finds a run again
_PACKAGES = ("torch", "transformers", "peft", "accelerate", "safetensors", "triton", "numpy")


class MetricsWriter(contextlib.AbstractContextManager["MetricsWriter"]):
    """Appends metrics to a JSONL file. A context manager; `close` may be called twice."""

    _file: Any = None
    last_step: int

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.truncate_after(math.inf)  # what a crash has left, or a link

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one line. Values: numbers, strings, booleans, None, tensors of one element."""
        if step < self.last_step:
            raise ValueError(f"step: expected at least {self.last_step}, got {step}; resuming? truncate_after first")
        line: dict[str, Any] = {"step": int(step)}
        nonfinite: dict[str, str] = {}
        for name, value in metrics.items():
            if name in ("step", "nonfinite"):
                raise ValueError(f"metrics: the name {name!r} is taken")
            line[name] = _plain(name, value)
            if isinstance(line[name], float) and not math.isfinite(line[name]):
                nonfinite[name], line[name] = str(line[name]), None
        if nonfinite:
            line["nonfinite"] = nonfinite
        if os.stat(self.path).st_ino != os.fstat(self._file.fileno()).st_ino:
            raise OSError("another file has come in its place")  # what is written would go where the old one went
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        self._file.flush()
        self.last_step = int(step)

    def sync(self) -> None:
        """Wait until all lines are on the disk."""
        os.fsync(self._file.fileno())

    def truncate_after(self, step: float) -> int:
        """Drop every line of a later step; returns how many were dropped."""
        self.close()
        before, kept = cut_after(self.path, step)
        self.last_step = max((row["step"] for row in kept if row is not None), default=-1)
        self._file = self.path.open("ab")
        return before - len(kept)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def __exit__(self, *error: object) -> None:
        self.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a metrics file as dicts, in order; a last line cut short by a crash is left out."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"metrics: there is no file {str(path)!r}")
    return [row for row, _ in read_lines(path) if row is not None]


def run_record(
    *, config: Any, command: Sequence[str], backends: Mapping[str, Any], device: torch.device | str = "cpu"
) -> dict[str, Any]:
    """Record of what ran: versions, commit, machine, options, kernel backends, start time."""
    from rlhf_engine.hydra import varlen  # takes transformers, which readers of metrics do not need

    device, cpu = torch.device(device), cores.find()
    options = dataclasses.asdict(config) if dataclasses.is_dataclass(config) else dict(config)  # type: ignore[arg-type]
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(command),
        "config": options,
        "versions": {
            "rlhf-engine": rlhf_engine.__version__,
            "python": platform.python_version(),
            **{name: version_of(name) for name in _PACKAGES},
            "torch": torch.__version__,  # the package's version lacks which CUDA it was built with
        },
        "git_commit": git_commit(Path(__file__)),
        "platform": platform.platform(),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "cpu_instruction_set": native.isa(),
        "cpu_cores": cpu.affinity,
        "cpu_quota": cpu.quota,
        "torch_threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "attention": {
            "bf16, fp16": varlen.report()["attention"] if is_gpu(device) else varlen.SDPA,
            "fp32": varlen.SDPA,
        },
        "kernel_backends": {op: dict(row) if isinstance(row, Mapping) else row for op, row in backends.items()},
    }


def git_commit(file: Path) -> dict[str, Any] | None:
    """Commit of the checkout that tracks `file`, and whether it is dirty or a rehearsal; None outside of one."""

    def git(*arguments: str) -> str | None:
        # no lock that a killed process would leave behind
        command = ["git", "--no-optional-locks", "-C", str(file.parent), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        except (FileNotFoundError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = None if git("ls-files", "--error-unmatch", file.name) is None else git("rev-parse", "HEAD")
    state = {"commit": commit, "dirty": commit is None or bool(git("status", "--porcelain", "-uno"))}
    if is_rehearsal():
        return {**state, "rehearsed": True}
    return None if commit is None else state


def is_rehearsal() -> bool:
    """Whether this process rehearses measurements without their device (`bench/gpu/measure.py --rehearse`)."""
    return os.environ.get("RLHF_ENGINE_REHEARSAL") == "1"


def write_json_atomic(path: str | Path, obj: Any) -> None:
    """Write `obj` as indented JSON, the old file or the whole new one; ValueError for NaN and infinity."""
    write_atomic(Path(path), (json.dumps(obj, indent=2, allow_nan=False, ensure_ascii=False) + "\n").encode())


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise TypeError(f"metrics: {name}: expected one number, got a tensor of shape {tuple(value.shape)}")
        value = value.item()
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"metrics: {name}: expected a number, string, boolean or None, got {type(value).__name__}")


class Columns:
    """The lines of a metrics file by name: as dicts, those of a long run would take six times the memory."""

    def __init__(self, rows: Iterable[Mapping[str, Any] | None]) -> None:
        """rows: objects with a step; None for a damaged line."""
        self.steps, lines = list[int](), list[int | None]()
        self.names: dict[str, array[float]] = {}
        """By name its numbers, NaN for a line without one, as far as the last line that has one."""
        self.nonfinite: dict[int, list[str]] = {}
        """Metrics that are not finite, by step."""
        for row in rows:
            lines.append(None if row is None else row["step"])
            if row is None:
                continue
            for name, value in row.items():
                column = self.names.setdefault(name, array("d"))
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    column.extend([math.nan] * (len(self.steps) - len(column)))
                    column.append(value)
            if "nonfinite" in row:
                self.nonfinite[row["step"]] = list(row["nonfinite"])
            self.steps.append(row["step"])
        self.damaged = name_damaged(lines)

    def numbers(self, name: str | None) -> list[tuple[int, float]]:
        """(step, value) of each line that has a number under a name, which true and false are not."""
        return [(step, x) for step, x in zip(self.steps, self.names.get(name or "", ()), strict=False) if x == x]


def read_columns(path: str | Path) -> Columns:
    """The lines of a metrics file by name; a last line cut short by a crash is left out."""
    return Columns(row for row, _ in read_lines(Path(path)))


def read_lines(path: Path) -> Iterator[tuple[dict[str, Any] | None, bytes]]:
    """Lines of a JSONL file up to the last whole one, with their objects; None, and a warning, for damaged ones."""
    steps, later = list[int | None](), list[tuple[dict[str, Any] | None, bytes]]()
    if path.is_file():
        with path.open("rb") as file:
            for line in file:
                later += [(_object(line), line)] if line.endswith(b"\n") else []
                if later and later[-1][0] is not None:
                    yield from later
                    steps += [None if row is None else row["step"] for row, _ in later]
                    later.clear()
    if damaged := name_damaged(steps):
        warnings.warn(f"{path}: expected a JSON object with a step in each line, left out {damaged}", stacklevel=3)


def name_damaged(steps: Iterable[int | None]) -> str:
    """The first damaged lines, which have no step, and the step before each, in words; empty where there are none."""
    named, place = list[str](), "before every other"
    for number, step in enumerate(steps, 1):
        named += [f"line {number}, {place}"] if step is None else []
        place = place if step is None else f"after step {step}"
    return "; ".join(named[:5])


def cut_after(path: Path, step: float) -> tuple[int, list[dict[str, Any] | None]]:
    """Cut a JSONL file behind its last line of at most a step; number of lines before, and objects of those kept."""
    lines = list(read_lines(path))
    n = max((i for i, (row, _) in enumerate(lines, 1) if row is not None and row["step"] <= step), default=0)
    write_atomic(path, b"".join(line for _, line in lines[:n]))
    return len(lines), [row for row, _ in lines[:n]]


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):  # of the former a text that is no UTF-8 is one
        return None
    is_line = isinstance(value, dict) and type(value.get("step")) is int
    return {sys.intern(name): x for name, x in value.items()} if is_line else None  # or each line had its own names


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file beside itself, flush and rename it: it is either the old one or the whole new one, and no link."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        if not _runs(left.name.split(".")[-2]):  # a process that was killed has left it
            left.unlink(missing_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    beside.unlink(missing_ok=True)
    with beside.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def _runs(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, ValueError, OverflowError):  # another user's, or a name that is not ours
        return True
    return True


def cpu_name() -> str:
    """Model of the CPU, as the system calls it."""
    info = Path("/proc/cpuinfo")
    name = (
        re.search(r"^model name\s*:(.*)$", info.read_text(errors="replace"), re.MULTILINE) if info.is_file() else None
    )
    return name[1].strip() if name else platform.processor() or platform.machine()


# ---- sample answers --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Samples:
    """One look at the policy."""

    step: int  # steps done by then
    prompts: list[str]
    completions: list[str]
    scores: list[float | None]


class SampleLog:
    """The file of looks. What a crash has left behind whole lines is left out, as in metrics."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[Samples]:
        """All looks, in order. Raises ConfigError for a line of other fields than a look has."""
        return [self._look(row) for row, _ in read_lines(self.path) if row is not None]

    def _look(self, fields: dict[str, Any]) -> Samples:
        kinds = {"prompts": (str,), "completions": (str,), "scores": (int, float, type(None))}
        lists = {name: fields.get(name) for name in kinds}
        of_kind = [isinstance(x, list) and all(type(y) in kinds[name] for y in x) for name, x in lists.items()]
        if set(fields) != {"step", *kinds} or not all(of_kind) or len({len(x or ()) for x in lists.values()}) > 1:
            raise ConfigError(
                f"{self.path}: expected prompts, completions and scores, as many of each, got other fields at step "
                f"{fields['step']}"
            )
        return Samples(**fields)

    def drop_from(self, step: int) -> None:
        """Drop the looks at this step and later ones: the run has gone back."""
        if os.path.lexists(self.path):
            cut_after(self.path, step - 1)

    def write(self, samples: Samples) -> None:
        """Append one look, flushed to disk."""
        with open(self.path, "ab", opener=no_link) as file:
            file.write(json.dumps(dataclasses.asdict(samples), ensure_ascii=False, allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


# ---- trackers --------------------------------------------------------------------------------------------------------


class Trackers(contextlib.ExitStack):
    """The open trackers of a run, which its end finishes; none where none are asked for."""

    def __init__(self, names: Sequence[str], output: Path, options: Mapping[str, Any], *, step: int = 0) -> None:
        """Open the trackers of an output folder, which go on from `step`; ConfigError for one not installed."""
        super().__init__()
        self._open: list[Any] = []
        if not names:
            return
        require_trackers(names)
        from accelerate import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        PartialState()  # by which a tracker tells whether it is on the main process
        plain = {name: x if isinstance(x, (bool, int, float, str)) else str(x) for name, x in options.items()}
        known = self._names(names, output, step)
        for name in names:
            cls = LOGGER_TYPE_TO_CLASS[name]
            if cls.requires_logging_directory:
                # of steps after the one that a run goes on from, TensorBoard shows what comes now
                tracker = cls(TENSORBOARD_FOLDER, output, **({"purge_step": step + 1} if step else {}))
            else:
                tracker = cls(output.name, resume="allow", **{_NAMED_BY[name]: known[name]})
            if hasattr(tracker, "start"):
                tracker.start()
            if name != "tensorboard":  # its hyper-parameter page makes a run of its own each time a run resumes
                tracker.store_init_configuration(plain)
            self._open.append(tracker)
            self.callback(tracker.finish)

    @staticmethod
    def _names(names: Sequence[str], output: Path, step: int) -> dict[str, str]:
        """Names of the run in trackers that keep it elsewhere, by tracker; at step 0 they are new."""
        path = output / NAMES_FILE
        known: dict[str, str] = json.loads(path.read_text()) if step and path.is_file() else {}
        new = {name: secrets.token_hex(4) for name in names if name in _NAMED_BY and name not in known}
        if new:
            write_json_atomic(path, {**known, **new})
        return {**known, **new}

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Finite numbers alone; what is not finite is in metrics.jsonl."""
        values = {name: float(x) for name, x in metrics.items() if isinstance(x, (int, float)) and x - x == 0}
        for tracker in self._open:
            tracker.log(values, step=step)


def require_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError for trackers that are not installed."""
    if not names:
        return
    from accelerate.tracking import get_available_trackers

    there = {str(tracker) for tracker in get_available_trackers()}
    missing = [name for name in names if name not in there]
    if missing:
        raise ConfigError(
            f"report_to: expected trackers that are installed (pip install 'rlhf-engine[logging]'), got {missing}"
        )
