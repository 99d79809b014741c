#!/usr/bin/env python
"""The first minutes of a new user: seconds from an empty environment to a curve, by the way in.

    python bench/studies/first_minutes.py --wheel dist/rlhf_engine-*.whl --model path/to/stories260K --out DIR

Each way is the commands of a page of the documentation, one after another, in a new folder. The environment is made
and filled once, from the index that pip is configured for, and every way is charged for it. A way has arrived when its
curve is there. Writes first_minutes.json and first_minutes.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_engine.runs.metrics import git_commit, write_json_atomic

MODEL = "path/to/stories260K"
"""Place of `--model` in the commands."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """Commands of one way in, and the curve to which they lead."""

    title: str
    commands: tuple[str, ...]
    curve: str
    makes_pairs: bool = False
    """Whether the user brings pairs in the form of hh-rlhf: whole dialogues, the same up to the last answer."""


WAYS = {
    "demo": Way(title="the demo", commands=("rlhf-engine demo",), curve="runs/demo/rl/curves.png"),
    "reward": Way(
        title="a reward of your own on a model of yours",
        commands=(
            f"rlhf-engine init reward-function mine --model_name_or_path {MODEL}",
            "cd mine",
            "rlhf-engine train --config train.yaml",
        ),
        curve="runs/ppo/curves.png",
    ),
    "trl": Way(
        title="a TRL script with `patch()`, and PPO behind TRL",
        commands=("rlhf-engine init trl behind-trl", "cd behind-trl", "python sft.py", "python ppo.py"),
        curve="runs/ppo/trainer_state.json",
    ),
    "peft": Way(
        title="a PeftModel with `fuse_lora`",
        commands=("rlhf-engine init trl behind-trl", "cd behind-trl", "python loop.py"),
        curve="runs/peft/curve.png",
    ),
    "thumbs": Way(
        title="thumbs, some without a prompt",
        commands=(
            "rlhf-engine init reward-model thumbs",
            "cd thumbs",
            "rlhf-engine sft --config sft.yaml",
            "rlhf-engine reward --config reward.yaml",
        ),
        curve="runs/reward/curves.png",
    ),
    "pairs": Way(
        title="raw pairs as hh-rlhf has them",
        commands=(
            f"rlhf-engine reward --lora --model_name_or_path {MODEL} --dataset_name hh.jsonl --output_dir runs/hh "
            "--eval_dataset_name 0.2 --max_steps 60 --truncation keep_end --learning_rate 1e-3",
        ),
        curve="runs/hh/curves.png",
        makes_pairs=True,
    ),
}


def make_environment(folder: Path, wheel: Path) -> float:
    """Make an environment with the wheel and what it needs; seconds."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", f"{wheel}[trl]"]
    subprocess.run(pip, check=True)
    return time.perf_counter() - began


def write_pairs(path: Path, n: int = 400) -> None:
    """Dialogues in the form of hh-rlhf, with the demo's texts."""
    from rlhf_engine.commands.demo import write_rows
    from rlhf_engine.commands.demo_task import DemoTask

    rows = DemoTask(0).sft_pairs(n)
    begin = "\n\nHuman: {prompt}\n\nAssistant: "
    pairs = [{key: begin.format(prompt=row["prompt"]) + row[key] for key in ("chosen", "rejected")} for row in rows]
    write_rows(path, pairs)


def walk(way: Way, folder: Path, programs: Path, model: Path) -> dict[str, Any]:
    """Run the commands of a way; seconds of each, and whether its curve is there."""
    if way.makes_pairs:
        write_pairs(folder / "hh.jsonl")
    environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    environment.pop("PYTHONPATH", None)
    seconds, here = [], folder
    for command in way.commands:
        words = [str(model) if word == MODEL else word for word in shlex.split(command)]
        if words[0] == "cd":
            here /= words[1]
            continue
        began = time.perf_counter()
        done = subprocess.run(words, cwd=here, env=environment, capture_output=True, text=True, check=False)
        seconds.append(time.perf_counter() - began)
        if done.returncode:
            raise SystemExit(f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return {"seconds": seconds, "arrived": (here / way.curve).is_file()}


def table(record: dict[str, Any]) -> str:
    """Markdown of a record."""
    head = ("way in", "commands, `pip install` included", "seconds, that included", "of these its own")
    lines = [f"| {' | '.join(head)} |", "|---|---|---|---|"]
    for name, row in record["ways"].items():
        own = sum(row["seconds"])
        total = "–" if record["install_seconds"] is None else f"{own + record['install_seconds']:.0f}"
        lines.append(f"| {WAYS[name].title} | {1 + len(WAYS[name].commands)} | {total} | {own:.0f} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the environment, walk the ways, write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--wheel", type=Path, help="what is installed; none: this interpreter serves")
    parser.add_argument("--model", type=Path, required=True, help="folder of a small pretrained story model")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--out", type=Path, default=Path("runs/first_minutes"))
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        programs, install_seconds = Path(sys.executable).parent, None
        if options.wheel is not None:
            install_seconds = make_environment(Path(scratch) / "environment", options.wheel.resolve())
            programs = Path(scratch) / "environment" / "bin"
            print(f"installed in {install_seconds:.0f} s", flush=True)
        ways = {}
        for name in options.ways:
            (folder := Path(scratch) / name).mkdir()
            ways[name] = walk(WAYS[name], folder, programs, options.model.resolve())
            print(f"{name:8} {sum(ways[name]['seconds']):6.1f} s, arrived: {ways[name]['arrived']}", flush=True)
    record = {
        "install_seconds": install_seconds,
        "ways": ways,
        "commands": {name: list(WAYS[name].commands) for name in options.ways},
        "wheel": None if options.wheel is None else options.wheel.name,
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "git_commit": git_commit(Path(__file__)),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    write_json_atomic(options.out / "first_minutes.json", record)
    (options.out / "first_minutes.md").write_text(table(record), encoding="utf-8")
    print(json.dumps({name: row["arrived"] for name, row in ways.items()}))
    if not all(row["arrived"] for row in ways.values()):
        raise SystemExit("a way did not lead to its curve")


if __name__ == "__main__":
    main()
