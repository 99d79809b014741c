#!/usr/bin/env python
"""Experiments an hour: `rlhf-engine sweep` with four runs against two processes at a time, and what it holds in memory.

    python bench/studies/sweep_speed.py MODEL [--algorithm ppo] [--steps 40] [--rounds 3] [--json F]

Both arms make the same four runs: four answers a step of a story model, two learning rates, two seeds. `processes`
starts a `train` of one thread for each run, two at a time. `sweep` makes all on one base, on --threads threads, for
each of which it forks a process.
In every round the arms take turns; times are medians. CPU seconds are those of all processes of an arm. Memory is
that of tensors after a step, with every run alive, beside the base and the bytes of weights, gradients and moments.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import yaml

from rlhf_engine.commands.sweep import Sweep
from rlhf_engine.config.sweep import read_grid

TEMPLATES = Path(__file__).resolve().parents[2] / "rlhf_engine" / "templates"
GRID: dict[str, list[Any]] = {"learning_rate": [1e-3, 3e-3], "seed": [0, 1]}


def grid_of(options: argparse.Namespace, folder: Path) -> Path:
    """The grid file."""
    flags = {
        "model_name_or_path": options.model_name_or_path, "algorithm": options.algorithm, "device": "cpu",
        "dataset_name": str(TEMPLATES / "story_prompts.jsonl"), "max_completion_length": options.tokens,
        "reward_funcs": f"{TEMPLATES / 'happy_endings.py'}:reward", "max_steps": options.steps, "save_steps": 0,
        "generation_batch_size": 4, "dtype": options.dtype,
    } | ({"num_generations": 4} if options.algorithm == "grpo" else {})  # fmt: skip
    path = folder / "grid.yaml"
    path.write_text(yaml.safe_dump({"flags": flags, "grid": GRID}))
    return path


def run(arguments: list[str], threads: int = 1) -> None:
    """A command in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    subprocess.run([sys.executable, "-m", "rlhf_engine", *arguments], env=environment, check=True, capture_output=True)


def measure(arm: str, grid: Path, threads: int) -> tuple[float, float]:
    """Seconds, and CPU seconds."""
    with tempfile.TemporaryDirectory() as folder:
        began, before = time.perf_counter(), os.times()
        if arm == "sweep":
            run(["sweep", str(grid), "--output_dir", f"{folder}/sweep"], threads)
        else:
            commands = []
            for name, config in read_grid(str(grid), Path(folder)).runs.items():
                file = Path(folder, f"{name}.yaml")
                file.write_text(config.to_yaml())
                commands.append(["train", "--config", str(file)])
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(run, commands))
        after = os.times()
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        return time.perf_counter() - began, cpu


def tensor_bytes() -> int:
    """Bytes of all tensors that are alive, each storage once."""
    gc.collect()
    alive = [x.untyped_storage() for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in alive}.values())


def memory(grid: Path) -> dict[str, float]:
    """MB of the base, of the policies, and of all tensors, in the third round of turns."""
    with tempfile.TemporaryDirectory() as folder:
        torch.set_num_threads(1)  # else processes that are forked have what is counted
        made = Sweep(read_grid(str(grid), Path(folder)), Path(folder))
        made.prepare()
        base = sum(p.numel() * p.element_size() for p in made.base.parameters())
        groups = [group for trainer in made._ready.values() for group in trainer.optimizer.groups.values()]
        policies = 4 * sum(p.numel() * p.element_size() for group in groups for p in group.values())
        calls, seen = itertools.count(1), list[int]()

        def stop() -> bool:
            if next(calls) >= 3 * len(made.runs):
                seen.append(tensor_bytes())
            return bool(seen)

        made.run(stop)
        over = (seen[0] - base) / policies
        return {"base MB": base / 1e6, "policies MB": policies / 1e6, "tensors MB": seen[0] / 1e6, "over base": over}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model_name_or_path")
    parser.add_argument("--algorithm", default="ppo")
    parser.add_argument("--dtype", default="float32")
    for name, default in (("steps", 40), ("tokens", 48), ("rounds", 3), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path, help="file for the record")
    options = parser.parse_args()
    if options.steps < 3:
        parser.error(f"--steps: expected at least 3, for memory is read in the third, got {options.steps}")
    with tempfile.TemporaryDirectory() as folder:
        grid = grid_of(options, Path(folder))
        found: dict[str, list[tuple[float, float]]] = {"processes": [], "sweep": []}
        for _ in range(options.rounds):
            for arm, times in found.items():
                times.append(measure(arm, grid, options.threads))
        record: dict[str, Any] = {**vars(options), "load": os.getloadavg()[0], "memory": memory(grid)}
        shown = [Path(a).name if Path(a).is_absolute() else a for a in sys.argv[1:]]
        record |= {"model_name_or_path": shown[0], "command": " ".join(["bench/studies/sweep_speed.py", *shown])}
    for arm_name, times in found.items():
        seconds, cpu = (statistics.median(column) for column in zip(*times, strict=True))
        record[arm_name] = {"seconds": seconds, "cpu": cpu, "runs an hour": 4 * 3600 / seconds, "all": times}
    before, now = record["processes"], record["sweep"]
    record["times as many"] = {
        "by the clock": before["seconds"] / now["seconds"],
        "by CPU seconds, of two idle cores": before["cpu"] / 2 / now["cpu"] * min(options.threads, 2),
    }
    print(json.dumps(record, indent=1, default=str))
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
