#!/usr/bin/env python
"""Training with the answers drawn beside the updates, against one after the other, on the same machine in one run.

    python bench/studies/overlap.py --out bench/results/cpu/overlap
    python bench/studies/overlap.py --quick --out runs/overlap                   # a tiny model
    python bench/studies/overlap.py --device cuda --dtype bfloat16 --hidden 2048 --layers 16 --batch 64 --out DIR

A random Llama, the same prompts, every answer as long as allowed, one policy per step. Arms: `off` draws, scores and
learns in turn with all threads; `overlap` draws the answers of the next step meanwhile, on a CPU with the threads
shared out, half to each side. Arms alternate, each in a process of its own; the
first two steps of each warm up.

    generate    seconds of drawing (and, beside, of frozen lanes that the generator asked), whoever waited for it
    learn       seconds of the learner's own work
    at most     (generate + learn) / max(generate, learn): what overlapping these two stages could win, were they not in
                each other's way
    speed-up    seconds per step of `off` over those of `overlap`: what it does win
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from arms import in_turn, make_parser, measure, setting_of, trainer_of, write_results
from rlhf_bench.workload import Setting, prepare

from rlhf_engine.devices import keep_freed_memory

ARMS = ("off", "overlap")
WARM_UP = 2
OPTIONS = ("device", "dtype", "algorithm")


def work(request: dict[str, Any]) -> dict[str, float]:
    """Medians over the steps of one arm."""
    setting, folder = Setting(**request["setting"]), Path(request["folder"])
    if request["device"] == "cpu":
        torch.set_num_threads(setting.threads)
    keep_freed_memory()
    beside = request["arm"] == "overlap"
    trainer = trainer_of(
        request,
        setting,
        folder,
        Path(request["scratch"]),
        num_mini_batches=setting.mini_batches,
        num_ppo_epochs=setting.epochs,
        async_mode="overlap" if beside else "off",
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
    parser = make_parser(__doc__)
    parser.add_argument("--algorithm", default="ppo", choices=("ppo", "reinforce", "remax", "rloo", "grpo"))
    arguments = parser.parse_args()
    if arguments.request:
        print(json.dumps(work(arguments.request)))
        return
    if arguments.out is None:
        parser.error("--out: expected a folder for overlap.json and overlap.md")
    setting = setting_of(arguments, batch=32, steps=8)
    if setting.steps <= WARM_UP:
        parser.error(f"--steps: expected more than {WARM_UP}, which warm up, got {setting.steps}")
    options = {name: getattr(arguments, name) for name in OPTIONS}
    with tempfile.TemporaryDirectory() as folder:
        prepare(setting, Path(folder))
        rounds = in_turn(
            ARMS, arguments.rounds, lambda arm: measure(__file__, setting, Path(folder), arm=arm, **options)
        )
    found = {arm: {name: statistics.median(r[name] for r in rounds[arm]) for name in rounds[arm][0]} for arm in ARMS}
    text = table(found)
    record = {**options, "medians": found, "rounds": rounds}
    write_results("overlap", arguments, setting, record, f"# Answers drawn beside the updates\n\n{text}\n")
    print(text)


if __name__ == "__main__":
    main()
