#!/usr/bin/env python
"""Several processes with a base each, against the base in shares (FSDP2): bytes held and seconds per step, in one run.

    python bench/sharded_base.py --out bench/results/cpu/sharded_base
    python bench/sharded_base.py --quick --out runs/sharded_base                                  # a tiny model
    python bench/sharded_base.py --processes 8 --device cuda --dtype bfloat16 --hidden 4096 --layers 32 --out DIR

A random Llama, the same prompts, every answer as long as allowed. Arms alternate, each in processes of its own, which
`torch.distributed.run` starts; the first step of each warms up. Of the first process:

    base        bytes of backbones it holds while it learns
    gather      seconds in which the base is made whole for drawing and scoring
    update      seconds of learning, in which a sharded base is gathered block by block, forward and backward
    same        whether both arms end with the same bits in adapters and heads
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rlhf_kernels import registry
from torch.distributed.tensor import DTensor
from trl_ppo_arms import PHASES, PROMPTS_FILE, Setting, prepare

from rlhf_engine.config import TrainConfig
from rlhf_engine.devices import keep_freed_memory
from rlhf_engine.launch import launched_rank
from rlhf_engine.training.distributed import World, fingerprint_of_all
from rlhf_engine.training.metrics import run_record, write_json_atomic
from rlhf_engine.training.rl import RlTrainer

ARMS = ("replicated", "sharded")
QUICK = {"hidden": 64, "layers": 2, "vocab": 256, "batch": 8, "prompt_tokens": 8, "answer_tokens": 8, "micro_batch": 4}
SHOWN = ("gather_base", *PHASES, "step")


def work(request: dict[str, Any]) -> dict[str, Any]:
    """Medians over the steps of one arm, in one of its processes."""
    setting, folder = Setting(**request["setting"]), Path(request["folder"])
    world = World.from_environment(request["device"], timeout=600)
    if request["device"] == "cpu":
        torch.set_num_threads(max(1, setting.threads // world.size))
    keep_freed_memory()
    trainer = RlTrainer(
        TrainConfig(
            model_name_or_path=str(folder),
            dataset_name=str(folder / PROMPTS_FILE),
            output_dir=request["scratch"],
            shard_base=request["arm"] == "sharded",
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
        ),
        world,
    )
    steps = [trainer.step() for _ in range(setting.steps)][1:]
    held = 0
    for _, p in trainer.model.backbone().base_parameters():
        held += (p.to_local() if isinstance(p, DTensor) else p).untyped_storage().nbytes()
    trained = [p for group in trainer.optimizer.groups.values() for p in group.values()]
    found = {"base": held, "bits": fingerprint_of_all(trained)}
    seconds = {name: statistics.median(step.get(f"seconds/{name}", 0.0) for step in steps) for name in SHOWN}
    world.close()
    return {**found, "seconds": seconds}


def measure(arm: str, setting: Setting, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """One arm, in processes of its own; what the first of them saw."""
    with tempfile.TemporaryDirectory() as scratch:
        request = {
            "arm": arm,
            "setting": dataclasses.asdict(setting),
            "folder": str(folder),
            "scratch": str(Path(scratch) / "run"),
            "found": str(Path(scratch) / "found.json"),
            "device": arguments.device,
            "dtype": arguments.dtype,
        }
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launch += ["--nproc_per_node", str(arguments.processes)]
        subprocess.run([*launch, __file__, "--request", json.dumps(request)], check=True)
        return json.loads(Path(request["found"]).read_text())


def table(found: dict[str, dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| | base held, MB | gather, s | generate, s | score, s | update, s | step, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm, row in found.items():
        times = " | ".join(f"{row['seconds'][name]:.2f}" for name in SHOWN)
        lines.append(f"| {arm} | {row['base'] / 1e6:.1f} | {times} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--request", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    for field in dataclasses.fields(Setting):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, help=field.metadata["help"])
    arguments = parser.parse_args()
    if arguments.request:
        request = json.loads(arguments.request)
        found = work(request)
        if launched_rank() == 0:
            Path(request["found"]).write_text(json.dumps(found))
        return
    if arguments.out is None:
        parser.error("--out: expected a folder for sharded_base.json and sharded_base.md")
    given = {f.name: getattr(arguments, f.name) for f in dataclasses.fields(Setting)}
    quick = QUICK if arguments.quick else {}
    setting = Setting(**{"batch": 16, **quick, **{name: value for name, value in given.items() if value is not None}})
    rounds: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        prepare(setting, Path(folder))
        for i in range(arguments.rounds):
            for arm in ARMS:
                rounds[arm].append(measure(arm, setting, Path(folder), arguments))
                print(
                    f"round {i + 1}/{arguments.rounds} {arm} {rounds[arm][-1]['seconds']['step']:.2f} s",
                    file=sys.stderr,
                )
    medians = {
        arm: {
            "base": rounds[arm][0]["base"],
            "seconds": {n: statistics.median(r["seconds"][n] for r in rounds[arm]) for n in SHOWN},
        }
        for arm in ARMS
    }
    same = len({r["bits"] for arm in ARMS for r in rounds[arm]}) == 1
    arguments.out.mkdir(parents=True, exist_ok=True)
    record = run_record(
        config=setting,
        command=["python", "bench/sharded_base.py", *sys.argv[1:]],
        backends=registry.report(torch.device(arguments.device).type, getattr(torch, arguments.dtype)),
        device=arguments.device,
    )
    record |= {
        "processes": arguments.processes,
        "dtype": arguments.dtype,
        "medians": medians,
        "same": same,
        "rounds": rounds,
    }
    write_json_atomic(arguments.out / "sharded_base.json", record)
    text = (
        f"{table(medians)}\n\nSame bits in adapters and heads after {setting.steps} steps: {'yes' if same else 'no'}.\n"
    )
    (arguments.out / "sharded_base.md").write_text(f"# A base in shares, {arguments.processes} processes\n\n{text}")
    print(text)


if __name__ == "__main__":
    main()
