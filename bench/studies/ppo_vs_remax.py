#!/usr/bin/env python
"""ReMax (arXiv 2310.10505) beside PPO on one backbone: memory beyond the base, and time per answer, in one run.

    python bench/studies/ppo_vs_remax.py --out bench/results/cpu/ppo_vs_remax
    python bench/studies/ppo_vs_remax.py --quick --out runs/ppo_vs_remax          # a tiny model

Both draw as many answers per step from the same random Llama with the same prompts. Both update once over each (one
epoch, one minibatch) and score with the same learned reward. Half of ReMax's answers are the greedy ones, which nothing
is learned from; so seconds are given per answer drawn and per answer trained on. Arms alternate, each in a process of
its own; the first step of each warms up.

    memory      peak of the process during whole steps less what it held before the model was built and less the base's
                own weights: adapters, heads, gradients, moments, cache, activations (CPU: resident memory, blocks
                straight from and to the system; CUDA: torch's allocator)
    state       of that, what stays between steps, counted from the tensors

PPO's two lanes share a backbone forward up to --token_budget tokens, which is faster and holds the activations of both;
above it they go one after another. So the micro-batch decides what ReMax's single lane saves.

The paper's figures are of whole models: four A100-80GB and DeepSpeed, where PPO holds a critic of the policy's size.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from arms import QUICK, in_turn, make_parser, measure, setting_of, trainer_of, write_results
from rlhf_bench.memory import _status, set_up_malloc
from rlhf_bench.workload import PHASES, Setting, prepare

from rlhf_engine.devices import keep_freed_memory, reset_peak_memory
from rlhf_engine.training.rl import RlTrainer

ALGORITHMS = ("ppo", "remax")
TINY = {**QUICK, "layers": 1, "vocab": 32, "batch": 4, "prompt_tokens": 4, "answer_tokens": 2, "micro_batch": 2}
PAPER = "memory −46 %, about 2 × faster (2.8 h against 6.0 h with offload), Llama-2-7B, four A100-80GB"


def make_trainer(request: dict[str, Any], setting: Setting, folder: Path, output: Path) -> RlTrainer:
    """One epoch, one minibatch."""
    checkpointing = request["gradient_checkpointing"]
    once = {"num_mini_batches": 1, "num_ppo_epochs": 1}
    return trainer_of(request, setting, folder, output, gradient_checkpointing=checkpointing, **once)


# ---- one measurement, in a process of its own ------------------------------------------------------------------------


def work(request: dict[str, Any]) -> dict[str, Any]:
    """Seconds per step and phase, or the peak in bytes."""
    setting, folder = Setting(**request["setting"]), Path(request["folder"])
    if request["what"] == "memory":
        return _memory(request, setting, folder)
    keep_freed_memory()
    trainer = make_trainer(request, setting, folder, Path(request["scratch"]))
    steps = [trainer.step() for _ in range(setting.steps)][1:]
    trained = request["setting"]["batch"] // (2 if request["algorithm"] == "remax" else 1)
    return {
        "seconds": statistics.median(step["seconds/step"] for step in steps),
        "trained": trained,
        "phases": {phase: statistics.median(step[f"seconds/{phase}"] for step in steps) for phase in PHASES},
    }


def _memory(request: dict[str, Any], setting: Setting, folder: Path) -> dict[str, Any]:
    on_cpu = request["device"] == "cpu"
    if on_cpu:
        set_up_malloc()
    with tempfile.TemporaryDirectory() as tiny:  # what a process gets once: code, threads, buffers of libraries
        prepare(Setting(**TINY), Path(tiny))
        make_trainer(request, Setting(**TINY), Path(tiny), Path(tiny) / "run").step()
    gc.collect()
    before = _status("VmRSS") if on_cpu else torch.cuda.memory_allocated()
    trainer = make_trainer(request, setting, folder, Path(request["scratch"]))
    reset_peak_memory(request["device"])
    for _ in range(2):
        trainer.step()
    peak = _status("VmHWM") if on_cpu else torch.cuda.max_memory_allocated()
    base = sum(p.numel() * p.element_size() for _, p in trainer.model.backbone().base_parameters())
    trained = [p for group in trainer.optimizer.groups.values() for p in group.values()]
    held = sum(
        p.numel() * p.element_size()
        for p in (*trainer.model.backbone().slots.parameters(), *trainer.model.heads.parameters())
    )
    moments = sum(t.numel() * t.element_size() for t in trainer.optimizer.state_tensors().values())
    gradients = sum(p.numel() * p.element_size() for p in trained)
    return {"beyond_base": peak - before - base, "base": base, "state": held + moments + gradients}


# ---- all of them -----------------------------------------------------------------------------------------------------


def table(found: dict[str, dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| | peak beyond the base, MB | state, MB | ms per answer | per trained answer | generate, score, update, s |",
        "|---|---|---|---|---|---|",
    ]
    for name in ALGORITHMS:
        row = found[name]
        phases = ", ".join(f"{row['phases'][phase]:.2f}" for phase in PHASES)
        lines.append(
            f"| {name} | {row['beyond_base'] / 1e6:.1f} | {row['state'] / 1e6:.1f} | "
            f"{1e3 * row['seconds'] / row['answers']:.1f} | {1e3 * row['seconds'] / row['trained']:.1f} | {phases} |"
        )
    ppo, remax = (found[name] for name in ALGORITHMS)
    lines.append(
        f"| remax / ppo | {remax['beyond_base'] / ppo['beyond_base']:.2f} | {remax['state'] / ppo['state']:.2f} | "
        f"{remax['seconds'] / ppo['seconds']:.2f} | "
        f"{remax['seconds'] / remax['trained'] / (ppo['seconds'] / ppo['trained']):.2f} | |"
    )
    return "\n".join(lines)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    arguments = parser.parse_args()
    if arguments.request:
        print(json.dumps(work(arguments.request)))
        return
    if arguments.out is None:
        parser.error("--out: expected a folder for ppo_vs_remax.json and ppo_vs_remax.md")
    setting = setting_of(arguments, batch=32)
    options = {name: getattr(arguments, name) for name in ("device", "dtype", "gradient_checkpointing")}
    with tempfile.TemporaryDirectory() as folder:
        prepare(setting, Path(folder))

        def measure_arm(name: str, what: str) -> dict[str, Any]:
            return measure(__file__, setting, Path(folder), what=what, algorithm=name, **options)

        found = {name: measure_arm(name, "memory") for name in ALGORITHMS}
        rounds = in_turn(ALGORITHMS, arguments.rounds, lambda name: measure_arm(name, "time"))
    for name in ALGORITHMS:
        found[name] |= {
            "answers": setting.batch,
            "trained": rounds[name][0]["trained"],
            "seconds": statistics.median(r["seconds"] for r in rounds[name]),
            "phases": {p: statistics.median(r["phases"][p] for r in rounds[name]) for p in PHASES},
        }
    text = table(found)
    record = {**options, "medians": found, "rounds": rounds, "paper": PAPER}
    page = f"# ReMax beside PPO\n\n{text}\n\nThe paper: {PAPER}.\n"
    write_results("ppo_vs_remax", arguments, setting, record, page)
    print(text)


if __name__ == "__main__":
    main()
