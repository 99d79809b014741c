#!/usr/bin/env python
"""Everything that needs a GPU, in lanes of at most eight minutes that can be stopped and taken up again.

    python bench/gpu/lanes.py [--plan NAME] [--budget SECONDS] [--lane NAME ...] [--out DIR] [--quick] [--list]
    python bench/gpu/lanes.py --rehearse [--plan NAME] [--lane NAME ...] [--out DIR]           # needs no GPU

A lane is one command. It writes DIR/<lane>.json: {lane, state, start, seconds, limit_s, command, rc, commit, sources,
output}, where output is the end of what it printed. A lane that is done is skipped as long as the commit and the
sources are the same; the others come again, after those that never ran. DIR is bench/results/<name of the GPU>
unless given, and results.tar.gz in it has all of it; `make gpu ARGS="--lane correct-gpu"` passes options on.

A plan is what fits into eight minutes: first what is right, second the kernels' times, third whole steps. With a budget
a lane that needs more than what is left is left out, and the others end in time.

A rehearsal runs every lane on the CPU: Triton's interpreter, the smallest shapes, one test of each test function. Its
records and figures are marked `rehearsed`; none is a measurement. Then it stops a run half-way and takes it up again.

State: done; failed; timeout (killed, with everything it started); unavailable (a tool that this machine lacks, or that
does not work on it: `output` says which). SIGTERM and SIGHUP kill the lane that runs, with everything it started.
Exit code: 0 if no lane failed, 1 if one did, 2 without a GPU or with one that is in use, 128 + the signal's number.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 480.0
CLOSING_S = 5.0  # of a budget, to kill a lane and to write the archive
WORKERS = 14  # processes of a correctness lane: most of its time is compiling
ARCHIVE = "results.tar.gz"
TAIL = 12_000  # characters of output that are kept
CASE_KINDS = {  # of ops whose cases take several lanes, one for each kind
    "linear_logprob": ("forward", "frozen", "trained", "entropy", "entropy_grad"),
    "linear_ppo_loss": ("frozen", "trained"),
    "lora": ("decode_mixed", "decode_single", "single", "mixed"),
}
METHODS = ("full_ppo", "lora_ppo", "dynamic_lora_ppo", "j_hydra_ppo", "hydra_ppo")
SIZES = FULL, QUICK, REHEARSAL = ("full", "quick", "rehearsal")
SHAPES = {  # options of a script, by size
    "lanes": {
        FULL: (
            *("--dtype", "bfloat16", "--hidden", "2048", "--layers", "16", "--tokens", "512"),
            *("--batches", "1", "2", "4", "8", "16", "32"),
        ),
        QUICK: ("--dtype", "bfloat16", "--hidden", "256", "--layers", "4", "--batches", "1", "4"),
        REHEARSAL: (
            *("--hidden", "64", "--layers", "1", "--vocab", "97", "--tokens", "8", "--batches", "1", "2"),
            *("--rounds", "1"),
        ),
    },
    "overlap": {
        FULL: (  # 1.3 B parameters
            *("--dtype", "bfloat16", "--hidden", "2048", "--layers", "24", "--batch", "64", "--micro-batch", "16"),
            *("--prompt-tokens", "256", "--answer-tokens", "256", "--rounds", "2"),
        ),
        QUICK: ("--dtype", "bfloat16", "--hidden", "256", "--layers", "4", "--rounds", "1"),
        REHEARSAL: ("--quick", "--rounds", "1"),
    },
    "step": {
        FULL: (),
        QUICK: ("--batch", "4", "--prompt", "32", "--answer", "32"),
        REHEARSAL: ("--batch", "3", "--prompt", "5", "--answer", "4", "--micro-batch", "2", "--dtype", "float32"),
    },
    "hydra_table": {
        FULL: (  # the paper's: Llama-7B, rank 128, prompts and answers of 400 tokens, 80 GB
            *("--dtype", "bfloat16", "--shape", "llama-7b", "--lora-r", "128", "--prompt", "400", "--answer", "400"),
            *("--cap", "80GB", "--batch", "2", "--rounds", "1", "--limit", "256"),
        ),
        QUICK: (
            *("--dtype", "bfloat16", "--batch", "2", "--rounds", "1", "--epochs", "1", "--cap", "4GB"),
            *("--limit", "8"),
        ),
        REHEARSAL: (
            *("--batch", "2", "--rounds", "1", "--epochs", "1", "--cap", "100MB", "--limit", "4"),
            *("--prompt", "4", "--answer", "4"),
        ),
    },
}
STEP_MODELS = {  # shapes, and seconds that their step needs
    FULL: {"llama-3.2-1b": 120.0, "llama-8b": 240.0},
    QUICK: {"llama-3.2-1b": 60.0},
    REHEARSAL: {"tiny": 20.0},
}
PLAN_SHAPES = {FULL: ("llama", "gpt2", "qwen3"), QUICK: ("llama",), REHEARSAL: ("llama",)}  # one a lane
TINY = {  # the model of a rehearsed step
    "model_type": "llama",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}
REHEARSED = "on a CPU"
PLANS = {  # beginnings of lanes' names, in their order; benches before sanitizers, which slow a GPU's memory down
    "first": ("environment", "small-shapes", "correct-"),
    "second": ("environment", "bench-", "memcheck", "racecheck"),
    "third": ("environment", "step-", "lanes", "overlap", "plan_check", "hydra_table"),
}
ON_A_GPU = (  # tests that put tensors on a GPU if there is one
    "tests/kernels/triton",
    *(f"tests/kernels/test_{name}.py" for name in ("cuda_ops", "cuda_lora_decode", "gae", "whiten")),
    *(f"tests/hydra/test_{name}.py" for name in ("on_gpu", "shares", "varlen")),
    "tests/generators/test_overlap_on_gpu.py",
    "tests/bench/test_timing_on_gpu.py",
)


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One command and how long it may take."""

    name: str
    command: tuple[str, ...]
    limit_s: float = LIMIT_S
    needs_s: float = 20.0  # it is not begun with less; a guess until a GPU has run it
    missing: str | None = None  # why it cannot run here
    unavailable: str | None = None  # output that shows, together with a failure, that the tool does not work here
    replaces: Path | None = None  # a file that the command would append to
    rehearsed: str | None = None  # how, if it is
    interpreted: bool = True  # a rehearsal runs Triton's kernels; False: the command's shapes are too large for that


# --- running lanes ---------------------------------------------------------------------------------------------------


class Stopped(BaseException):
    """A signal that ends the run."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


_held: list[int] | None = None
"""Signals that came while a process was being started; None: they stop the run at once."""


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise Stopped."""

    def stop(number: int, frame: FrameType | None) -> None:
        if _held is not None:
            _held.append(number)
            return
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # a second one would cut off the end of this
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Signals within the block come at its end: a process that has been started is known by then."""
    global _held
    _held = held = []
    try:
        yield
    finally:
        _held = None
        for number in held:
            signal.raise_signal(number)


def run_lanes(lanes: Sequence[Lane], folder: Path, *, commit: str, sources: str, budget_s: float | None = None) -> int:
    """Run what is not done yet, as far as the budget goes, record every lane; returns the exit code."""
    end = None if budget_s is None else time.monotonic() + budget_s - CLOSING_S
    folder.mkdir(parents=True, exist_ok=True)
    known = {lane.name: _recorded(folder, lane, commit, sources) for lane in lanes}
    for lane in lanes:
        if known[lane.name] == "done":
            print(f"{lane.name:32} done before", flush=True)
    never_ran = [lane for lane in lanes if known[lane.name] is None]
    again = [lane for lane in lanes if known[lane.name] not in (None, "done")]
    states = []
    try:
        for lane in (*never_ran, *again):
            left = math.inf if end is None else end - time.monotonic()
            if left < lane.needs_s:
                print(f"{lane.name:32} left out: it needs {lane.needs_s:.0f} s, {left:.0f} s are left", flush=True)
                continue
            print(f"{lane.name:32} …", flush=True)
            record = {**_run(replace(lane, limit_s=min(lane.limit_s, left))), "commit": commit, "sources": sources}
            _write(folder / f"{lane.name}.json", record)
            states.append(record["state"])
            print(f"{lane.name:32} {record['state']} after {record['seconds']:.0f} s", flush=True)
            if record["state"] != "done":
                print("    " + "\n    ".join(str(record["output"]).splitlines()[-15:]), flush=True)
    finally:
        _archive(folder)
    return 1 if "failed" in states or "timeout" in states else 0


def _archive(folder: Path) -> None:
    """Everything in the folder as one file, which is what comes back from a machine that is given back."""
    scratch = folder / f"{ARCHIVE}.tmp"
    with tarfile.open(scratch, "w:gz") as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.name != ARCHIVE and path.suffix != ".tmp":
                archive.add(path, path.relative_to(folder))
    scratch.replace(folder / ARCHIVE)


def _recorded(folder: Path, lane: Lane, commit: str, sources: str) -> str | None:
    """State of this lane's record if it is about these sources and this command."""
    path = folder / f"{lane.name}.json"
    if not path.is_file():
        return None
    record = json.loads(path.read_text())
    same = (record["commit"], record["sources"], record["command"]) == (commit, sources, list(lane.command))
    return record["state"] if same else None


def _run(lane: Lane) -> dict[str, object]:
    start = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    record: dict[str, object] = {"lane": lane.name, "state": "unavailable", "start": start, "seconds": 0.0}
    record |= {"limit_s": lane.limit_s, "command": list(lane.command), "rc": None, "output": lane.missing}
    record |= {} if lane.rehearsed is None else {"rehearsed": lane.rehearsed}
    if lane.missing is not None:
        return record
    if lane.replaces is not None:
        lane.replaces.unlink(missing_ok=True)
    began = time.monotonic()
    process: subprocess.Popen[bytes] | None = None
    rc: int | None = None
    with tempfile.TemporaryFile() as output:
        try:
            with _signals_held():
                process = subprocess.Popen(
                    lane.command,
                    cwd=ROOT,
                    env=_environment(lane),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            with contextlib.suppress(subprocess.TimeoutExpired):
                rc = process.wait(timeout=lane.limit_s)
        finally:  # its session holds whatever it started; also when this program is interrupted
            if process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(max(0, output.seek(0, os.SEEK_END) - 4 * TAIL))
        text = output.read().decode(errors="replace")[-TAIL:]
    state = "done" if rc == 0 else "timeout" if rc is None else "failed"
    if state == "failed" and lane.unavailable is not None and re.search(lane.unavailable, text):
        state = "unavailable"
    return record | {"state": state, "seconds": round(time.monotonic() - began, 1), "rc": rc, "output": text}


def _environment(lane: Lane) -> dict[str, str]:
    """This process's, with the checkout importable; an interpreter in place of the GPU only where one is rehearsed."""
    found = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join(
        [str(ROOT / "kernels"), str(ROOT / "bench"), str(ROOT), *filter(None, [found.get("PYTHONPATH")])]
    )
    found |= {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    if lane.rehearsed is not None:
        found |= {"CUDA_VISIBLE_DEVICES": "", "RLHF_ENGINE_REHEARSAL": "1", "OMP_NUM_THREADS": "1"}
        found |= {"TRITON_INTERPRET": "1"} if lane.interpreted else {}
    return found


def _write(path: Path, record: Mapping[str, object]) -> None:
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    scratch.replace(path)


# --- which lanes there are -------------------------------------------------------------------------------------------


def gpu_lanes(folder: Path, size: str = FULL) -> list[Lane]:
    """The environment first, then what is right, then what is fast, then what is slow to find."""
    lanes = [
        *_correct_lanes(size),
        *_timing_lanes(folder, size),
        *_step_lanes(folder, size),
    ]
    if size != REHEARSAL:
        return lanes
    return [lane if lane.rehearsed else replace(lane, rehearsed=REHEARSED) for lane in lanes]


def _correct_lanes(size: str) -> list[Lane]:
    mode = ("--rehearse",) if size == REHEARSAL else ()
    lanes = [Lane(name="environment", command=(sys.executable, str(Path(__file__).resolve()), "--environment", *mode))]
    lanes.append(Lane(name="small-shapes", command=_small_shapes(size), needs_s=90.0))
    lanes.append(replace(_pytest("correct-gpu", ON_A_GPU, "gpu or not long", size=size), needs_s=200.0))
    # Everything else that is short: another torch, another Triton, another machine
    elsewhere = [word for file in ON_A_GPU for word in ("--ignore", file)]
    ops = sorted(path.parent.name for path in (ROOT / "kernels" / "rlhf_kernels").glob("*/reference.py"))
    files = [*(f"tests/kernels/test_{name}.py" for name in (*ops, "cuda_build")), "tests/hydra", "tests/generators"]
    rest = [file for file in files if file not in ON_A_GPU]
    lanes.append(_pytest("correct-cpu", rest, "not gpu and not long", *elsewhere, size=size))
    return lanes


def _timing_lanes(folder: Path, size: str) -> list[Lane]:
    lanes = []
    for op in sorted(path.parent.name for path in (ROOT / "kernels" / "rlhf_kernels").glob("*/triton.py")):
        for kind in CASE_KINDS.get(op, (None,)):
            name = f"bench-{op}" if kind is None else f"bench-{op}-{kind}"
            rows = folder / f"{name}.jsonl"
            command = [sys.executable, "-m", "rlhf_engine", "bench", op, "--device", _device(size)]
            command += ["--json", str(rows), *([] if kind is None else ["--case", kind])]
            command += {FULL: [], QUICK: ["--quick"], REHEARSAL: ["--dtype", "fp32"]}[size]
            lanes.append(Lane(name=name, command=tuple(command), replaces=rows))
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    absent = None if sanitizer else "compute-sanitizer is not on PATH nor in /usr/local/cuda/bin"
    if size == REHEARSAL:
        absent = "not rehearsed: compute-sanitizer looks at what a GPU does, and small-shapes is the program it runs"
    for tool in ("memcheck", "racecheck"):
        command = (sanitizer or "compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *_small_shapes(size))
        lanes.append(Lane(name=tool, command=command, missing=absent, unavailable="Device not supported"))
    return lanes


def _step_lanes(folder: Path, size: str) -> list[Lane]:
    device = ("--device", _device(size))
    lanes = []
    for algorithm in ("ppo", "grpo"):
        for model, needs_s in STEP_MODELS[size].items():
            shape = str(folder / model) if size == REHEARSAL else model
            options = (*device, "--shape", shape, "--algorithm", algorithm, *SHAPES["step"][size])
            lane = _bench("whole_step", folder, *options, name=f"step-{model}-{algorithm}")
            lanes.append(replace(lane, needs_s=needs_s))
    lanes.append(_bench("lanes", folder, *device, *SHAPES["lanes"][size]))
    overlap = _bench("overlap", folder, *device, *SHAPES["overlap"][size])
    no_peft = (
        None if importlib.util.find_spec("peft") else "it saves adapters, and peft, which checks them, is not there"
    )
    lanes.append(replace(overlap, missing=no_peft))
    for shape in PLAN_SHAPES[size]:
        few = ("--method", "hydra_ppo") if size == REHEARSAL else ()
        lane = _bench("plan_check", folder, *device, "--shape", shape, *few, name=f"plan_check-{shape}", part=shape)
        lanes.append(replace(lane, interpreted=False))
    for method in METHODS:  # one method a lane: each adds its row to the table
        shape = ("--shape", str(folder / "tiny")) if size == REHEARSAL else ()
        options = (*device, "--methods", method, *shape, *SHAPES["hydra_table"][size])
        lane = _bench("hydra_table", folder, *options, name=f"hydra_table-{method}")
        again = size == REHEARSAL and method != METHODS[-1]
        absent = f"not rehearsed: hydra_table-{METHODS[-1]} is the same script with another method" if again else None
        lanes.append(replace(lane, interpreted=False, missing=absent))
    return lanes


def _device(size: str) -> str:
    return "cpu" if size == REHEARSAL else "cuda"


def _small_shapes(size: str) -> tuple[str, ...]:
    return (sys.executable, str(ROOT / "bench" / "gpu" / "small_shapes.py"), *(["cpu"] if size == REHEARSAL else []))


def _bench(script: str, folder: Path, *options: str, name: str | None = None, part: str = "") -> Lane:
    path = ROOT / "bench" / "studies" / f"{script}.py"
    command = (sys.executable, str(path), *options, "--out", str(folder / script / part))
    return Lane(name=name or script, command=command)


def _pytest(name: str, files: Sequence[str], marks: str, *more: str, size: str) -> Lane:
    there = [file for file in files if (ROOT / file).exists()]
    if size == REHEARSAL:
        more = ("--one-of-each", *more)
    elif importlib.util.find_spec("xdist") is not None:
        more = ("-n", str(WORKERS), "--dist", "loadgroup", *more)
    # Without pytest's cache: nothing is left in the checkout, and lanes do not depend on each other.
    command = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", marks, *more, *there)
    return Lane(name=name, command=command)


# --- what this machine is --------------------------------------------------------------------------------------------


def commit_of(root: Path) -> str:
    """The commit that is checked out, "unknown" where there is no repository."""
    if not (root / ".git").exists():
        return "unknown"
    return _first_line(["git", "-C", str(root), "rev-parse", "HEAD"]) or "unknown"


def sources_of(root: Path) -> str:
    """Short hash of the code that lanes run: a changed file counts, committed or not."""
    digest = hashlib.sha256()
    for folder in ("bench", "csrc", "kernels", "rlhf_engine", "tests"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".cu", ".cuh", ".h", ".cpp") and path.is_file():
                digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _first_line(command: Sequence[str]) -> str | None:
    """First line of what a tool prints, None if it is not there or fails."""
    if shutil.which(command[0]) is None:
        return None
    run = subprocess.run(command, capture_output=True, text=True)
    return run.stdout.strip().splitlines()[0] if run.returncode == 0 and run.stdout.strip() else None


def environment_report() -> dict[str, object]:
    """Device, driver, versions, commit, and which baselines are there and which are not."""
    import torch
    from rlhf_bench import PEERS
    from rlhf_kernels.runtime import cuda_native, native, registry

    from rlhf_engine.hydra import varlen

    versions: dict[str, str | None] = {}
    for package in (*PEERS, "triton", "transformers", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    nvcc = None
    with contextlib.suppress(cuda_native.BuildError):
        nvcc = cuda_native.nvcc_version(cuda_native.find_nvcc()).strip().splitlines()[-1]
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device: dict[str, object] = {"device": kind}
    if kind == "cuda":
        found = torch.cuda.get_device_properties(0)
        device = {
            "device": found.name,
            "capability": f"{found.major}.{found.minor}",
            "memory_gib": round(found.total_memory / 2**30, 1),
            "multiprocessors": found.multi_processor_count,
        }
    return {
        **device,
        "driver": _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        "torch": torch.__version__,
        "cuda_of_torch": torch.version.cuda,
        "python": platform.python_version(),
        "nvcc": nvcc,
        "cuda_kernels": cuda_native.missing() or "available",
        "attention": varlen.report(),
        "native_extension": native.missing() or "available",
        "commit": commit_of(ROOT),
        "sources": sources_of(ROOT),
        "installed": {name: version for name, version in versions.items() if version},
        "baselines_not_installed": [name for name in PEERS if versions[name] is None],
        "backends": {op: row["auto"] for op, row in registry.report(kind, torch.bfloat16).items()},
    }


def _gpu_name() -> tuple[str, str | None]:
    """Name of the GPU and None, or "" and the reason why there is none."""
    if importlib.util.find_spec("torch") is None:
        return "", f"torch is not installed for {sys.executable}"
    import torch

    if not torch.cuda.is_available():
        return "", f"torch {torch.__version__} sees no CUDA device"
    return torch.cuda.get_device_name(0), None


def _in_use() -> str | None:
    """Process that uses a GPU, as far as the driver reports one; None without one."""
    return _first_line(["nvidia-smi", "--query-compute-apps=pid,process_name", "--format=csv,noheader"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lane", nargs="+", action="extend", metavar="NAME", help="only these (default: all)")
    parser.add_argument("--plan", metavar="NAME", help=f"only the lanes of a plan: {', '.join(PLANS)}")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="in all; lanes that cannot end are left out")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: bench/results/<name of the GPU>")
    parser.add_argument("--quick", action="store_true", help="benchmarks at small sizes")
    parser.add_argument("--rehearse", action="store_true", help="every lane on the CPU, then a stop and a resume")
    parser.add_argument("--list", action="store_true", help="name the lanes and stop")
    parser.add_argument("--environment", action="store_true", help="describe this machine as JSON and stop")
    options = parser.parse_args(arguments)
    asks = options.list or options.environment  # a lane asks, too, while its runner uses the GPU
    other = None if asks or options.rehearse else _in_use()  # before this process is one that does
    name, no_gpu = ("rehearsal", None) if options.rehearse else _gpu_name()
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    default = ROOT / "runs" / slug if options.rehearse else ROOT / "bench" / "results" / slug
    folder = (options.out or default).resolve()
    lanes = gpu_lanes(folder, REHEARSAL if options.rehearse else QUICK if options.quick else FULL)
    wrong = _wrong(options, lanes)
    if wrong is not None:
        print(f"gpu_lanes: {wrong}", file=sys.stderr)
        return 2
    if options.plan is not None:
        lanes = [lane for lane in lanes if lane.name.startswith(PLANS[options.plan])]
    if options.lane:
        lanes = [lane for lane in lanes if lane.name in options.lane]
    if options.list:
        print("\n".join(lane.name for lane in lanes))
        return 0
    if no_gpu is not None:
        print(f"gpu_lanes: no GPU: {no_gpu}", file=sys.stderr)
        return 2
    if options.environment:
        print(json.dumps(environment_report(), indent=1))
        return 0
    if other is not None:
        print(f"gpu_lanes: expected a GPU that nothing else uses, got one with process {other}", file=sys.stderr)
        return 2
    if options.rehearse:
        _write_tiny(folder)
    try:
        with stopped_by_signals():
            rc = run_lanes(lanes, folder, commit=commit_of(ROOT), sources=sources_of(ROOT), budget_s=options.budget)
    except Stopped as stopped:
        print(f"gpu_lanes: stopped by {signal.Signals(stopped.number).name}", file=sys.stderr)
        return 128 + stopped.number
    if options.rehearse and not options.lane and options.plan is None and rc == 0:
        return rehearse_a_stop(folder / "stopped")
    return rc


# --- a rehearsal -----------------------------------------------------------------------------------------------------

STOPPED_LANES = ("environment", "bench-gae", "bench-ppo_loss")  # short ones; the second of them is stopped


def rehearse_a_stop(folder: Path) -> int:
    """Start a run of three lanes, stop it in the second by SIGTERM, take it up again; the exit code.

    1 if a process of it lives 5 s later, if what was done is done again, or if what was missing is not.
    """
    shutil.rmtree(folder, ignore_errors=True)
    words = [sys.executable, str(Path(__file__).resolve()), "--rehearse", "--out", str(folder), "--lane"]
    records = [folder / f"{name}.json" for name in STOPPED_LANES]
    run = subprocess.Popen([*words, *STOPPED_LANES], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not records[0].is_file() and run.poll() is None:
            time.sleep(0.1)
        time.sleep(1.0)  # the second lane has begun, and takes longer
        below = _descendants(run.pid)
        began = time.monotonic()
        run.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(CLOSING_S)
        rc, alive = run.poll(), [pid for pid in below if _is_alive(pid)]
    finally:
        run.kill()
    first = records[0].read_text() if records[0].is_file() else None
    if rc != 128 + signal.SIGTERM or not below or alive or records[1].exists():
        print(f"a stop: rc {rc}, {len(below)} processes, alive afterwards: {alive}", file=sys.stderr)
        return 1
    print(f"stopped in {STOPPED_LANES[1]}: {len(below)} processes ended within {time.monotonic() - began:.1f} s")
    again = subprocess.run([*words, *STOPPED_LANES], capture_output=True, text=True, check=False)
    states = [json.loads(path.read_text())["state"] if path.is_file() else None for path in records]
    if again.returncode or states != ["done"] * len(records) or records[0].read_text() != first:
        print(f"taken up again: rc {again.returncode}, {states}\n{again.stdout}{again.stderr}", file=sys.stderr)
        return 1
    print(f"taken up again: {', '.join(STOPPED_LANES[1:])} ran, {STOPPED_LANES[0]} did not")
    return 0


def _descendants(pid: int) -> list[int]:
    """Every process below one, in whatever session."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            children.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found[1:]


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _write_tiny(folder: Path) -> None:
    """The model of the rehearsed steps."""
    (folder / "tiny").mkdir(parents=True, exist_ok=True)
    (folder / "tiny" / "config.json").write_text(json.dumps(TINY))


def _wrong(options: argparse.Namespace, lanes: Sequence[Lane]) -> str | None:
    """Check the request; return the first thing that is wrong with it, or None."""
    unknown = sorted(set(options.lane or ()) - {lane.name for lane in lanes})
    if unknown:
        return f"--lane: unknown {', '.join(unknown)}; --list names them all"
    if options.plan is not None and options.plan not in PLANS:
        return f"--plan: expected one of {', '.join(PLANS)}, got {options.plan!r}"
    least = min(lane.needs_s for lane in lanes) + CLOSING_S
    if options.budget is not None and not options.budget >= least:
        return f"--budget: expected at least {least:.0f} seconds, what the shortest lane needs, got {options.budget:g}"
    return None


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "kernels"))
    raise SystemExit(main())
