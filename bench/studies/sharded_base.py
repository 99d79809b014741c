#!/usr/bin/env python
"""Several processes with a base each, against the base in shares (FSDP2): bytes held and seconds per step, in one run.

Two arms: each process has all of the base, or a share while it learns.

    python bench/studies/sharded_base.py --out bench/results/cpu/sharded_base
    python bench/studies/sharded_base.py --quick --out runs/sharded_base                                  # a tiny model
    python bench/studies/sharded_base.py --processes 8 --device cuda --dtype bfloat16 --hidden 4096 --layers 32
        --out DIR

A random Llama, the same prompts, every answer as long as allowed. Arms alternate, each in processes of its own, which
`torch.distributed.run` starts; the first step of each warms up. Of the first process:

    base        bytes of backbones it holds while it learns
    gather      seconds in which the base is made whole for drawing and scoring
    update      seconds of learning, in which a sharded base is gathered block by block, forward and backward
    same        whether both arms end with the same bits in adapters and heads
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from arms import arguments_in_processes, in_turn, make_parser, measure, setting_of, trainer_of, write_results
from rlhf_bench.workload import PHASES, Setting, prepare
from torch.distributed.tensor import DTensor

from rlhf_engine.devices import World, fingerprint_of_all, keep_freed_memory

ARMS = ("replicated", "sharded")
SHOWN = ("gather_base", *PHASES, "step")


def work(request: dict[str, Any]) -> dict[str, Any] | None:
    """Medians over the steps of one arm, in one of its processes; None in all but the first."""
    setting, folder = Setting(**request["setting"]), Path(request["folder"])
    world = World.from_environment(request["device"], timeout=600)
    if request["device"] == "cpu":
        torch.set_num_threads(max(1, setting.threads // world.size))
    keep_freed_memory()
    trainer = trainer_of(
        request,
        setting,
        folder,
        Path(request["scratch"]),
        world=world,
        shard_base=request["arm"] == "sharded",
        num_mini_batches=setting.mini_batches,
        num_ppo_epochs=setting.epochs,
    )
    steps = [trainer.step() for _ in range(setting.steps)][1:]
    held = 0
    for _, p in trainer.model.backbone().base_parameters():
        held += (p.to_local() if isinstance(p, DTensor) else p).untyped_storage().nbytes()
    trained = [p for group in trainer.optimizer.groups.values() for p in group.values()]
    found = {
        "base": held,
        "bits": fingerprint_of_all(trained),
        "seconds": {name: statistics.median(step.get(f"seconds/{name}", 0.0) for step in steps) for name in SHOWN},
    }
    world.close()
    return found if world.is_main else None


def table(found: dict[str, dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| | base held, MB | gather, s | generate, s | score, s | update, s | step, s |", "|---" * 7 + "|"]
    for arm, row in found.items():
        times = " | ".join(f"{row['seconds'][name]:.2f}" for name in SHOWN)
        lines.append(f"| {arm} | {row['base'] / 1e6:.1f} | {times} |")
    return "\n".join(lines)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--processes", type=int, default=2)
    arguments = arguments_in_processes(parser, work, "sharded_base")
    if arguments is None:
        return
    setting = setting_of(arguments, batch=16)
    options = {name: getattr(arguments, name) for name in ("device", "dtype", "processes")}
    with tempfile.TemporaryDirectory() as folder:
        prepare(setting, Path(folder))
        rounds = in_turn(
            ARMS, arguments.rounds, lambda arm: measure(__file__, setting, Path(folder), arm=arm, **options)
        )
    medians = {
        arm: {
            "base": rounds[arm][0]["base"],
            "seconds": {name: statistics.median(found["seconds"][name] for found in rounds[arm]) for name in SHOWN},
        }
        for arm in ARMS
    }
    same = len({found["bits"] for arm in ARMS for found in rounds[arm]}) == 1
    ends = f"Same bits in adapters and heads after {setting.steps} steps: {'yes' if same else 'no'}."
    text = f"{table(medians)}\n\n{ends}\n"
    record = {**options, "medians": medians, "same": same, "rounds": rounds}
    heading = f"# A base in shares, {arguments.processes} processes"
    write_results("sharded_base", arguments, setting, record, f"{heading}\n\n{text}")
    print(text)


if __name__ == "__main__":
    main()
