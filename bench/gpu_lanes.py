#!/usr/bin/env python
"""Everything that needs a GPU, in lanes of at most eight minutes that can be stopped and taken up again.

    python bench/gpu_lanes.py [--plan NAME] [--budget SECONDS] [--lane NAME ...] [--out DIR] [--quick] [--list]

A lane is one command. It writes DIR/<lane>.json: {lane, state, start, seconds, limit_s, command, rc, commit, sources,
output}, where output is the end of what it printed. A lane that is done is skipped as long as the commit and the
sources are the same; the others come again, after those that never ran. DIR is bench/results/<name of the GPU>
unless given, and results.tar.gz in it has all of it; `make gpu ARGS="--lane correct-gae"` passes options on.

A plan is what fits into eight minutes: first what is right, second the kernels' times, third whole steps. With a budget
a lane that needs more than what is left is left out, and the others end in time.

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

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 480.0
CLOSING_S = 5.0  # of a budget, to kill a lane and to write the archive
WORKERS = 8  # processes of a correctness lane: most of its time is compiling
ARCHIVE = "results.tar.gz"
TAIL = 12_000  # characters of output that are kept
BENCH_OPS = (  # as `rlhf-engine bench` calls them
    "linear_logprob",
    "linear_logprob_pair",
    "gather_logprob",
    "linear_ppo_loss",
    "lora",
    "ppo_losses",
    "gae",
    "sample",
    "decode_attention",
)
BASELINES = ("trl", "liger-kernel", "cut-cross-entropy", "peft", "quack-kernels", "flash-attn")
METHODS = ("full_ppo", "lora_ppo", "dynamic_lora_ppo", "j_hydra_ppo", "hydra_ppo")
SHAPES = {  # options of a script, in full and with --quick
    "lanes": (
        ("--hidden", "2048", "--layers", "16", "--tokens", "512", "--batches", "1", "2", "4", "8", "16", "32"),
        ("--hidden", "256", "--layers", "4", "--batches", "1", "4"),
    ),
    "overlap": (  # 1.3 B parameters
        (
            *("--hidden", "2048", "--layers", "24", "--batch", "64", "--micro-batch", "16", "--prompt-tokens", "256"),
            *("--answer-tokens", "256", "--rounds", "2"),
        ),
        ("--hidden", "256", "--layers", "4", "--rounds", "1"),
    ),
    "step": (  # shapes, and seconds that a step needs
        (("llama-3.2-1b", 60.0), ("llama-8b", 150.0)),
        (("llama-3.2-1b", 30.0),),
    ),
    "plan_check": (("llama", "gpt2", "qwen3"), ("llama",)),  # shapes, one a lane
    "hydra_table": (  # the paper's: Llama-7B, rank 128, prompts and answers of 400 tokens, 80 GB
        (
            *("--shape", "llama-7b", "--lora-r", "128", "--prompt", "400", "--answer", "400", "--cap", "80GB"),
            *("--batch", "2", "--rounds", "1", "--limit", "256"),
        ),
        ("--batch", "2", "--rounds", "1", "--epochs", "1", "--cap", "4GB", "--limit", "8"),
    ),
}
PLANS = {  # beginnings of lanes' names, in their order; benches before sanitizers, which slow a GPU's memory down
    "first": ("environment", "small-shapes", "correct-", "determinism", "graphs"),
    "second": ("environment", "bench-", "memcheck", "racecheck"),
    "third": ("environment", "step-", "lanes", "overlap", "plan_check", "hydra_table"),
}
MORE_TESTS = {"gae": ("whiten",)}  # ops whose folder has a second public function with tests of its own


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


# --- running lanes ---------------------------------------------------------------------------------------------------


class Stopped(BaseException):
    """A signal that ends the run."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise Stopped."""

    def stop(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # a second one would cut off the end of this
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
    if lane.missing is not None:
        return record
    if lane.replaces is not None:
        lane.replaces.unlink(missing_ok=True)
    began = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            lane.command, cwd=ROOT, env=_environment(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            rc: int | None = process.wait(timeout=lane.limit_s)
        except subprocess.TimeoutExpired:
            rc = None
        finally:  # its session holds whatever it started; also when this program is interrupted
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(max(0, output.seek(0, os.SEEK_END) - 4 * TAIL))
        text = output.read().decode(errors="replace")[-TAIL:]
    state = "done" if rc == 0 else "timeout" if rc is None else "failed"
    if state == "failed" and lane.unavailable is not None and re.search(lane.unavailable, text):
        state = "unavailable"
    return record | {"state": state, "seconds": round(time.monotonic() - began, 1), "rc": rc, "output": text}


def _environment() -> dict[str, str]:
    """This process's, with the checkout importable and no interpreter in place of the GPU."""
    found = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(ROOT / "kernels"), str(ROOT), *filter(None, [found.get("PYTHONPATH")])])
    return found | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def _write(path: Path, record: Mapping[str, object]) -> None:
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    scratch.replace(path)


# --- which lanes there are -------------------------------------------------------------------------------------------


def gpu_lanes(folder: Path, *, quick: bool = False) -> list[Lane]:
    """The environment first, then what is right, then what is fast, then what is slow to find."""
    lanes = [Lane(name="environment", command=(sys.executable, str(Path(__file__).resolve()), "--environment"))]
    small = (sys.executable, str(ROOT / "bench" / "gpu_small_shapes.py"))
    lanes.append(Lane(name="small-shapes", command=small, needs_s=40.0))
    ops = sorted(path.parent.name for path in (ROOT / "kernels" / "rlhf_kernels").glob("*/reference.py"))
    for op in ops:
        # Everything short runs, also tests on CPU tensors: another torch, another Triton, another machine.
        files = [
            f"tests/kernels/{part}test_{stem}.py" for stem in (op, *MORE_TESTS.get(op, ())) for part in ("triton/", "")
        ]
        lanes.append(_pytest(f"correct-{op}", files, "gpu or not long"))
    cuda_files = [f"tests/kernels/test_cuda_{part}.py" for part in ("build", "ops", "device", "lora_decode")]
    lanes.append(_pytest("correct-cuda", cuda_files, "gpu or not long"))
    lanes.append(_pytest("correct-hydra", ["tests/hydra"], "gpu or not long"))
    lanes.append(_pytest("correct-overlap", ["tests/generation"], "gpu or not long"))
    for name, keyword in (("determinism", "bits or determin"), ("graphs", "graph")):
        lanes.append(_pytest(name, ["tests/kernels"], "gpu", "-k", keyword))
    for op in BENCH_OPS:
        rows = folder / f"bench-{op}.jsonl"
        command = (sys.executable, "-m", "rlhf_engine.cli", "bench", op, "--device", "cuda", "--json", str(rows))
        lanes.append(Lane(name=f"bench-{op}", command=(*command, *(["--quick"] if quick else [])), replaces=rows))
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    for tool in ("memcheck", "racecheck"):
        command = (sanitizer or "compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *small)
        absent = None if sanitizer else "compute-sanitizer is not on PATH nor in /usr/local/cuda/bin"
        lanes.append(Lane(name=tool, command=command, missing=absent, unavailable="Device not supported"))
    for algorithm in ("ppo", "grpo"):
        for shape, needs_s in SHAPES["step"][quick]:
            options = ("--device", "cuda", "--shape", shape, "--algorithm", algorithm)
            options += ("--batch", "4", "--prompt", "32", "--answer", "32") if quick else ()
            lane = _bench("whole_step", folder, *options, name=f"step-{shape}-{algorithm}")
            lanes.append(replace(lane, needs_s=needs_s))
    lanes.append(_bench("lanes", folder, "--dtype", "bfloat16", *SHAPES["lanes"][quick]))
    options = ("--device", "cuda", "--dtype", "bfloat16", *SHAPES["overlap"][quick])
    lanes.append(_bench("overlap", folder, *options))
    for shape in SHAPES["plan_check"][quick]:
        options = ("--device", "cuda", "--shape", shape)
        lanes.append(_bench("plan_check", folder, *options, name=f"plan_check-{shape}", part=shape))
    for method in METHODS:  # one method a lane: each adds its row to the table
        options = ("--methods", method, "--dtype", "bfloat16", *SHAPES["hydra_table"][quick])
        lanes.append(_bench("hydra_table", folder, *options, name=f"hydra_table-{method}"))
    return lanes


def _bench(script: str, folder: Path, *options: str, name: str | None = None, part: str = "") -> Lane:
    command = (sys.executable, str(ROOT / "bench" / f"{script}.py"), *options, "--out", str(folder / script / part))
    return Lane(name=name or script, command=command)


def _pytest(name: str, files: Sequence[str], marks: str, *more: str) -> Lane:
    there = [file for file in files if (ROOT / file).exists()]
    if importlib.util.find_spec("xdist") is not None:
        more = ("-n", str(WORKERS), *more)
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
    from rlhf_kernels import cuda_native, registry

    versions: dict[str, str | None] = {}
    for package in (*BASELINES, "triton", "transformers", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    device = torch.cuda.get_device_properties(0)
    nvcc = None
    with contextlib.suppress(cuda_native.BuildError):
        nvcc = cuda_native.nvcc_version(cuda_native.find_nvcc()).strip().splitlines()[-1]
    return {
        "device": device.name,
        "capability": f"{device.major}.{device.minor}",
        "memory_gib": round(device.total_memory / 2**30, 1),
        "multiprocessors": device.multi_processor_count,
        "driver": _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        "torch": torch.__version__,
        "cuda_of_torch": torch.version.cuda,
        "python": platform.python_version(),
        "nvcc": nvcc,
        "cuda_kernels": cuda_native.missing() or "available",
        "commit": commit_of(ROOT),
        "sources": sources_of(ROOT),
        "installed": {name: version for name, version in versions.items() if version},
        "baselines_not_installed": [name for name in BASELINES if versions[name] is None],
        "backends": {op: row["auto"] for op, row in registry.report("cuda", torch.bfloat16).items()},
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
    """Which other process uses a GPU, as far as the driver says."""
    return _first_line(["nvidia-smi", "--query-compute-apps=pid,process_name", "--format=csv,noheader"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lane", nargs="+", action="extend", metavar="NAME", help="only these (default: all)")
    parser.add_argument("--plan", metavar="NAME", help=f"only the lanes of a plan: {', '.join(PLANS)}")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="in all; lanes that cannot end are left out")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: bench/results/<name of the GPU>")
    parser.add_argument("--quick", action="store_true", help="benchmarks at small sizes")
    parser.add_argument("--list", action="store_true", help="name the lanes and stop")
    parser.add_argument("--environment", action="store_true", help="describe this machine as JSON and stop")
    options = parser.parse_args(arguments)
    asks = options.list or options.environment  # a lane asks, too, while its runner uses the GPU
    other = None if asks else _in_use()  # before this process is one that does
    name, no_gpu = _gpu_name()
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    folder = (options.out or ROOT / "bench" / "results" / slug).resolve()
    lanes = gpu_lanes(folder, quick=options.quick)
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
    try:
        with stopped_by_signals():
            return run_lanes(lanes, folder, commit=commit_of(ROOT), sources=sources_of(ROOT), budget_s=options.budget)
    except Stopped as stopped:
        print(f"gpu_lanes: stopped by {signal.Signals(stopped.number).name}", file=sys.stderr)
        return 128 + stopped.number


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
