#!/usr/bin/env python
"""Measure and test on a GPU within a budget: decoding steps by part, whole steps, peers, ops; two trees, if asked.

    python bench/gpu/measure.py [--budget SECONDS] [--out DIR] [--before TREE] [--part NAME ...]
    python bench/gpu/measure.py --rehearse [--out DIR]                  # on a CPU, at sizes that measure nothing

A part is a process, or two that follow each other: that of TREE, another checkout of the project, and this tree's.
Parts run in the order of `PARTS`; one that needs more seconds than are left is left out. DIR/records.jsonl gets a line
for each figure as soon as it is there, and one for each part that ended: {part, tree, commit, sources, device, state,
seconds, output}, where output is the end of what it printed. What is done is not done again while `sources`, a hash of
the tree's code, is the same. SIGTERM ends the part that runs with everything that it started.

State: done; failed; timeout (no budget was left); missing (a package is not there: `output` names it).
Exit code: 0 if no part failed, 1 if one did, 2 for a request that cannot be served, 128 + the signal's number.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SPARE_S = 5.0  # of a budget, to end a process and to write what it printed
TAIL = 4000  # characters of output that are kept
REHEARSED = "rehearsal"
ENDS = (signal.SIGTERM, signal.SIGHUP)
ON_A_GPU = (  # tests that put tensors on a GPU if there is one
    "tests/kernels/triton",
    *(f"tests/kernels/test_{name}.py" for name in ("cuda_ops", "gae", "whiten")),
    *(f"tests/hydra/test_{name}.py" for name in ("on_gpu", "shares", "varlen")),
    "tests/generators/test_overlap_on_gpu.py",
    "tests/bench/test_timing_on_gpu.py",
)


class Part(NamedTuple):
    """One process measures these; several calls share it, because importing takes a while."""

    name: str
    needs_s: float  # it is not begun with less; a guess until a GPU has run it
    run: str = ""  # what stands behind the interpreter
    calls: tuple[str, ...] = ()  # of steps.py, instead of it
    package: str = ""  # without which it is missing


OPS = ("decode_attention", "linear_logprob", "linear_ppo_loss", "lora", "llama_ops", "attention")
PARTS = (
    Part("1b", 200, calls=("environment", "whole_step 1b ppo", "decode 1b 64", "whole_step 1b grpo", "micro_batch 1b")),
    Part("peft", 60, calls=("peft_step 1b",), package="peft"),
    Part("tests", 200, f"-m pytest -p no:cacheprovider -q {' '.join(ON_A_GPU)}"),
    Part("8b", 150, calls=("decode 8b 64", "whole_step 8b ppo")),
    Part("exact", 90, calls=("whole_step 1b ppo + exact", "decode 1b 16")),
    Part(
        "steps",
        120,
        calls=("decode 1b 64 + native", "decode 1b 64 + rounded", "decode 1b 64 + native + rounded"),
    ),
    Part("short", 60, calls=("decode 1b 64 160", "decode 1b 64 160 + whole")),
    Part("heads", 60, calls=("heads 1b", "heads 1b + one_sweep")),
    Part("updates", 120, calls=("micro_batch 1b + lora_group", "whole_step 1b grpo + attention")),
    *(Part(f"op-{op}", 45, f"-m rlhf_engine bench {op}") for op in OPS),  # beside Liger and FlexAttention
    Part("trl", 120, "bench/studies/trl_patch.py", package="trl"),
)


def stop(number: int, frame: object) -> None:
    """End this program, and by its `finally` what it started; a second signal does not cut that off."""
    for each in ENDS:
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + number)


def gpu() -> str | None:
    """Name of the first GPU, None without one; importing torch to ask takes as long as a part."""
    with contextlib.suppress(OSError):
        words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        found = subprocess.run(words, capture_output=True, text=True).stdout.splitlines()
        return found[0].strip() if found else None
    return None


def write(file: Path, row: dict[str, Any]) -> None:
    """One more line, which is in the file when this returns."""
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(row, ensure_ascii=False) + "\n")


def sources_of(tree: Path) -> dict[str, str]:
    """A tree's name, commit ("" where there is no repository) and hash of the code that parts run."""
    digest = hashlib.sha256()
    folders = ("bench", "csrc", "kernels", "rlhf_engine", "tests")
    for path in sorted(path for name in folders for path in (tree / name).rglob("*")):
        if path.suffix in (".py", ".cu", ".cuh", ".h", ".cpp"):
            digest.update(f"{path.relative_to(tree)}\0".encode() + path.read_bytes() + b"\0")
    git = ["git", "-C", str(tree), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() if (tree / ".git").exists() else ""
    return {"tree": tree.name, "commit": commit, "sources": digest.hexdigest()[:16]}


def command_of(part: Part, tree: Path, file: Path, about: dict[str, Any]) -> list[str]:
    """The words of a part's process."""
    words, rehearsed = part.run.split(), about["device"] == REHEARSED
    if part.calls:
        return [sys.executable, str(ROOT / "bench" / "gpu" / "steps.py"), str(file), json.dumps(about), *part.calls]
    if "pytest" in words:
        spread = ["-n", "10", "--dist", "loadgroup"] if importlib.util.find_spec("xdist") else []
        words += ["--collect-only"] if rehearsed else ["-m", "gpu or not long", *spread]
    elif "bench" in words:
        words += ["--json", str(file), *(["--dtype", "fp32"] if rehearsed else ["--quick", "--device", "cuda"])]
    else:
        small = ["--quick", "--kinds", "grpo", "--rounds", "1"]
        words += ["--out", str(file.parent / part.name), *(small if rehearsed else ["--device", "cuda"])]
    return [sys.executable, *words]


def run_part(part: Part, tree: Path, file: Path, about: dict[str, Any], limit_s: float) -> str:
    """Run one process to its end or its limit, write its line; returns the state."""
    paths = [str(tree / "kernels"), str(tree / "bench"), str(tree), os.environ.get("PYTHONPATH", "")]
    found = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    if about["device"] == REHEARSED:
        found |= {"CUDA_VISIBLE_DEVICES": "", "RLHF_ENGINE_REHEARSAL": "1"}
        found |= {} if part.package else {"TRITON_INTERPRET": "1"}  # peers have no kernel of ours
    began, rc, text, state = time.monotonic(), None, f"{part.package} is not installed", "missing"
    if not part.package or importlib.util.find_spec(part.package):
        with tempfile.TemporaryFile() as output:
            options: dict[str, Any] = {"cwd": tree, "env": found, "stdout": output, "stderr": subprocess.STDOUT}
            options |= {"preexec_fn": lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)}
            words = command_of(part, tree, file, about)
            signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)  # until it is known what has to be ended
            process = subprocess.Popen(words, start_new_session=True, **options)
            try:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    rc = process.wait(timeout=limit_s)
            finally:  # its session holds whatever it started
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            text = output.read().decode(errors="replace")[-TAIL:]
        state = "done" if rc == 0 else "timeout" if rc is None else "failed"
    seconds = round(time.monotonic() - began, 1)
    write(file, about | {"state": state, "seconds": seconds, "output": text})
    shown = "".join(f"\n    {line}" for line in text.splitlines()[-12:] if state in ("failed", "timeout"))
    print(f"{part.name:20} {tree.name:16} {state} after {seconds:.0f} s{shown}", flush=True)
    return state


def run_parts(parts: Sequence[Part], trees: Sequence[Path], file: Path, device: str, budget_s: float) -> int:
    """Run what is not done yet, as far as the budget goes; returns the exit code."""
    end = time.monotonic() + budget_s - SPARE_S
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []
    done = {(row["part"], row["sources"]) for row in rows if row.get("state") == "done"}
    about = {tree: {**sources_of(tree), "device": device} for tree in trees}
    states = set()
    for part, tree in [(p, t) for p in parts for t in (trees if p.calls and not p.package else trees[-1:])]:
        left = end - time.monotonic()
        if (part.name, about[tree]["sources"]) in done:
            print(f"{part.name:20} {tree.name:16} done before", flush=True)
        elif device != REHEARSED and left < part.needs_s:
            print(f"{part.name:20} {tree.name:16} left out: it needs {part.needs_s:.0f} s, {left:.0f} s are left")
        else:
            states.add(run_part(part, tree, file, {"part": part.name, **about[tree]}, left))
    return 1 if {"failed", "timeout"} & states else 0


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="measure.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--budget", type=float, default=540.0, metavar="SECONDS", help="in all (default: 540)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: bench/results/<name of the GPU>")
    parser.add_argument("--before", type=Path, metavar="TREE", help="another checkout, measured beside this one")
    parser.add_argument("--part", nargs="+", choices=[p.name for p in PARTS], metavar="NAME", help="only these")
    parser.add_argument("--rehearse", action="store_true", help="every part on the CPU, at sizes that measure nothing")
    options = parser.parse_args(words)
    device = REHEARSED if options.rehearse else gpu()
    if device is None:
        parser.error("no GPU: nvidia-smi names none; --rehearse needs none")
    if options.before is not None and not (options.before / "rlhf_engine").is_dir():
        parser.error(f"--before: expected a checkout of rlhf-engine, got {options.before}")
    if not options.budget > SPARE_S:
        parser.error(f"--budget: expected more than {SPARE_S:.0f} seconds, got {options.budget:g}")
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    folder = options.out or ROOT / ("runs" if options.rehearse else "bench/results") / slug
    parts = [part for part in PARTS if not options.part or part.name in options.part]
    trees = [*([options.before.resolve()] if options.before else []), ROOT]
    for number in ENDS:
        signal.signal(number, stop)
    return run_parts(parts, trees, folder.resolve() / "records.jsonl", device, options.budget)


if __name__ == "__main__":
    raise SystemExit(main())
