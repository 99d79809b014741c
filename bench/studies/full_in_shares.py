#!/usr/bin/env python
"""Full-parameter supervised training in one process, and in several with a share each (FSDP2): bytes and seconds.

    python bench/studies/full_in_shares.py --out bench/results/cpu/full_in_shares
    python bench/studies/full_in_shares.py --quick --out runs/full_in_shares                              # a tiny model
    python bench/studies/full_in_shares.py --processes 8 --device cuda --dtype bfloat16 --hidden 4096 --layers 32
        --out DIR

A random Llama, the same rows, as `rlhf-engine sft --full` takes them. Arms alternate, each in processes of its own; the
first step of each warms up. Of the first process:

    weights, state    bytes of the base and of the optimizer's state that it holds between steps
    loaded, peak      most memory before the first step, and of all, less what it had before the model: resident on a
                      CPU, of torch on a GPU
    step              seconds
    apart             largest difference of the arms' losses, relative
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from arms import arguments_in_processes, in_turn, make_parser, measure, setting_of, write_results
from rlhf_bench.workload import PROMPTS_FILE, Setting, prepare
from torch.distributed.tensor import DTensor

from rlhf_engine.config import SFTConfig
from rlhf_engine.devices import World, keep_freed_memory, peak_memory_bytes
from rlhf_engine.training.sft import SftTrainer

ROWS_FILE = "rows.jsonl"


def work(request: dict[str, Any]) -> dict[str, Any] | None:
    """Numbers of one arm, in one of its processes; None in all but the first."""
    setting, folder = Setting(**request["setting"]), Path(request["folder"])
    world = World.from_environment(request["device"], timeout=600)
    if request["device"] == "cpu":
        torch.set_num_threads(max(1, setting.threads // world.size))
    keep_freed_memory()
    before = peak_memory_bytes(request["device"])
    config = SFTConfig(
        model_name_or_path=str(folder),
        dataset_name=str(folder / ROWS_FILE),
        output_dir=request["scratch"],
        mode="full",
        gamma=0.0,
        dtype=request["dtype"],
        device=request["device"],
        per_device_train_batch_size=setting.micro_batch,
        gradient_accumulation_steps=setting.batch // setting.micro_batch,
        max_steps=setting.steps,
        learning_rate=1e-5,
        seed=setting.seed,
    )
    trainer = SftTrainer(config, world)
    loaded = peak_memory_bytes(request["device"]) - before
    steps = [trainer.step() for _ in range(setting.steps)]
    base = [p for _, p in trainer.model.backbone().base_parameters()]
    held = [p.to_local() if isinstance(p, DTensor) else p for p in base]
    found = {
        "weights": sum(p.untyped_storage().nbytes() for p in held),
        "state": sum(x.numel() * x.element_size() for x in trainer.optimizer.state_tensors().values()),
        "loaded": loaded,
        "peak": peak_memory_bytes(request["device"]) - before,
        "step": statistics.median(step["seconds/step"] for step in steps[1:]),
        "losses": [step["loss"] for step in steps],
    }
    world.close()
    return found if world.is_main else None


def table(medians: dict[str, dict[str, float]]) -> str:
    """Markdown."""
    lines = ["| | weights, MB | optimizer state, MB | peak of loading, MB | peak, MB | step, s |", "|---" * 6 + "|"]
    for arm, row in medians.items():
        held = " | ".join(f"{row[name] / 1e6:.1f}" for name in ("weights", "state", "loaded", "peak"))
        lines.append(f"| {arm} | {held} | {row['step']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--processes", type=int, default=2)
    arguments = arguments_in_processes(parser, work, "full_in_shares")
    if arguments is None:
        return
    setting = setting_of(arguments, batch=16)
    arms = {"one process": 1, f"{arguments.processes} processes": arguments.processes}
    options = {name: getattr(arguments, name) for name in ("device", "dtype")}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(setting, folder)
        prompts = [json.loads(line)["prompt"] for line in (folder / PROMPTS_FILE).read_text().splitlines()]
        rows = [{"prompt": words[: len(words) // 2], "completion": words} for words in map(str.split, prompts)]
        lines = (json.dumps({key: " ".join(words) for key, words in row.items()}) + "\n" for row in rows)
        (folder / ROWS_FILE).write_text("".join(lines))
        rounds = in_turn(
            list(arms),
            arguments.rounds,
            lambda arm: measure(__file__, setting, folder, processes=arms[arm], **options),
        )
    shown = ("weights", "state", "loaded", "peak", "step")
    medians = {
        arm: {name: statistics.median(found[name] for found in measured) for name in shown}
        for arm, measured in rounds.items()
    }
    losses = [measured[0]["losses"] for measured in rounds.values()]
    apart = max(abs(a - b) / abs(a) for a, b in zip(*losses, strict=True))
    text = f"{table(medians)}\n\nLosses of {setting.steps} steps differ by up to {apart:.1g} of themselves.\n"
    record = {**options, "processes": arguments.processes, "medians": medians, "apart": apart, "rounds": rounds}
    write_results("full_in_shares", arguments, setting, record, f"# Full training in shares\n\n{text}")
    print(text)


if __name__ == "__main__":
    main()
