#!/usr/bin/env python
"""Training with the answers drawn beside the updates, against one after the other, on the same machine in one run.

    python bench/overlap.py --out bench/results/cpu/overlap
    python bench/overlap.py --quick --out runs/overlap                   # a tiny model
    python bench/overlap.py --device cuda --dtype bfloat16 --hidden 2048 --layers 16 --batch 64 --out DIR

A random Llama, the same prompts, every answer as long as allowed, one policy per step. Arms: `off` draws, scores and
learns in turn with all threads; `overlap` draws the answers of the next step meanwhile, on a CPU with the threads
shared out, half to each side (`--generator-threads` gives others). Arms alternate, each in a process of its own; the
first two steps of each warm up.

    generate    seconds of drawing (and, beside, of frozen lanes that the generator asked), whoever waited for it
    learn       seconds of the learner's own work
    at most     (generate + learn) / max(generate, learn): what overlapping these two stages could win, were they not in
                each other's way
    speed-up    seconds per step of `off` over those of `overlap`: what it does win
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rlhf_kernels import registry
from trl_ppo_arms import PROMPTS_FILE, Setting, prepare

from rlhf_engine.config import TrainConfig
from rlhf_engine.devices import keep_freed_memory
from rlhf_engine.training.metrics import run_record, write_json_atomic
from rlhf_engine.training.rl import RlTrainer

ARMS = ("off", "overlap")
WARM_UP = 2
QUICK = {"hidden": 64, "layers": 2, "vocab": 256, "batch": 8, "prompt_tokens": 8, "answer_tokens": 8, "micro_batch": 4}
OPTIONS = ("device", "dtype", "algorithm", "generator_threads")


def work(request: dict[str, Any]) -> dict[str, float]:
    """Medians over the steps of one arm."""
    setting, folder = Setting(**request["setting"]), Path(request["folder"])
    if request["device"] == "cpu":
        torch.set_num_threads(setting.threads)
    keep_freed_memory()
    beside = request["arm"] == "overlap"
    trainer = RlTrainer(
        TrainConfig(
            model_name_or_path=str(folder),
            dataset_name=str(folder / PROMPTS_FILE),
            output_dir=request["scratch"],
            algorithm=request["algorithm"],
            dtype=request["dtype"],
            device=request["device"],
            lora_r=setting.lora_r,
            lora_alpha=float(setting.lora_alpha),
            generation_batch_size=setting.batch,
            per_device_train_batch_size=setting.micro_batch,
            num_mini_batches=setting.mini_batches,
            num_ppo_epochs=setting.epochs,
            max_completion_length=setting.answer_tokens,
            max_steps=setting.steps,
            learning_rate=1e-5,
            seed=setting.seed,
            async_mode="overlap" if beside else "off",
            generator_threads=request["generator_threads"] if beside else None,
        )
    )
    steps, ends = [], []
    for _ in range(setting.steps):
        steps.append(trainer.step())
        ends.append(time.perf_counter())
    trainer.source.close()
    seconds = (ends[-1] - ends[WARM_UP - 1]) / (setting.steps - WARM_UP)
    found = {"seconds": seconds}
    for step in steps[WARM_UP:]:
        waited = step.get("seconds/wait", step.get("seconds/generate", 0.0))
        step["learn"] = step["seconds/step"] - waited
        step["generate"] = step["async/generate_seconds"] if beside else step["seconds/generate"]
        step["wait"] = step.get("seconds/wait", 0.0)
    for name in ("generate", "learn", "wait", "seconds/score", "seconds/update"):
        found[name] = statistics.median(step[name] for step in steps[WARM_UP:])
    if request["device"] != "cpu":
        found["peak_bytes"] = float(torch.cuda.max_memory_allocated())
    return found


def measure(arm: str, setting: Setting, folder: Path, options: dict[str, Any]) -> dict[str, float]:
    """One arm in a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        request = {
            "arm": arm,
            "setting": dataclasses.asdict(setting),
            "folder": str(folder),
            "scratch": str(Path(scratch) / "run"),
            **options,
        }
        command = [sys.executable, __file__, "--request", json.dumps(request)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(found: dict[str, dict[str, float]]) -> str:
    """Markdown."""
    lines = [
        "| | s per step | generate | score | update | learner waits | at most | speed-up |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for arm in ARMS:
        row = found[arm]
        most = (row["generate"] + row["learn"]) / max(row["generate"], row["learn"])
        lines.append(
            f"| {arm} | {row['seconds']:.3f} | {row['generate']:.3f} | {row['seconds/score']:.3f} | "
            f"{row['seconds/update']:.3f} | {row['wait']:.3f} | {most:.2f} | "
            f"{found['off']['seconds'] / row['seconds']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--request", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--algorithm", default="ppo", choices=("ppo", "reinforce", "remax", "rloo", "grpo"))
    parser.add_argument("--generator-threads", type=int)
    for field in dataclasses.fields(Setting):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, help=field.metadata["help"])
    arguments = parser.parse_args()
    if arguments.request:
        print(json.dumps(work(json.loads(arguments.request))))
        return
    if arguments.out is None:
        parser.error("--out: expected a folder for overlap.json and overlap.md")
    given = {f.name: getattr(arguments, f.name) for f in dataclasses.fields(Setting)}
    setting = Setting(
        **{
            "batch": 32,
            "steps": 8,
            **(QUICK if arguments.quick else {}),
            **{name: value for name, value in given.items() if value is not None},
        }
    )
    if setting.steps <= WARM_UP:
        parser.error(f"--steps: expected more than {WARM_UP}, which warm up, got {setting.steps}")
    options = {name: getattr(arguments, name) for name in OPTIONS}
    rounds: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        prepare(setting, Path(folder))
        for i in range(arguments.rounds):
            for arm in ARMS:
                began = time.perf_counter()
                rounds[arm].append(measure(arm, setting, Path(folder), options))
                print(f"round {i + 1}/{arguments.rounds} {arm} {time.perf_counter() - began:.0f} s", file=sys.stderr)
    found = {arm: {name: statistics.median(r[name] for r in rounds[arm]) for name in rounds[arm][0]} for arm in ARMS}
    arguments.out.mkdir(parents=True, exist_ok=True)
    record = run_record(
        config=setting,
        command=["python", "bench/overlap.py", *sys.argv[1:]],
        backends=registry.report(torch.device(arguments.device).type, getattr(torch, arguments.dtype)),
        device=arguments.device,
    )
    record |= {**options, "medians": found, "rounds": rounds}
    write_json_atomic(arguments.out / "overlap.json", record)
    text = table(found)
    (arguments.out / "overlap.md").write_text(f"# Answers drawn beside the updates\n\n{text}\n")
    print(text)


if __name__ == "__main__":
    main()
