#!/usr/bin/env python
"""Short seeded runs of two checkouts, one after the other: whether every float of theirs is equal to the last bit.

    git worktree add /tmp/before COMMIT && cp kernels/rlhf_kernels/_native*.so /tmp/before/kernels/rlhf_kernels/
    python bench/studies/seeded.py --before /tmp/before --model MODEL_FOLDER --out runs/seeded

Each run is a process of its checkout, with the same options and data. Compared are its metrics without timings and the
tensors of its final model. A row says `equal`, or the first step and the names of metrics and tensors that differ.
Writes OUT/seeded.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TIMINGS = (
    *("seconds", "tokens_per_second", "samples_per_second", "peak_memory_bytes", "step_time", "train_", "num_tokens"),
    *("async/generate_seconds", "async/generator_utilisation", "async/learner_utilisation", "async/speedup"),
)
RL: dict[str, Any] = {
    **{"max_completion_length": 16, "generation_batch_size": 16, "num_mini_batches": 2, "num_ppo_epochs": 1},
    **{"per_device_train_batch_size": 8, "lora_r": 8, "learning_rate": 1e-3, "max_steps": 2, "save_steps": 0},
    "dataset_name": "rlhf_engine/templates/story_prompts.jsonl",
    **{"reward_funcs": ["rlhf_engine/templates/happy_endings.py:reward"]},
}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("train", {}),
    "ppo, bfloat16": ("train", {"dtype": "bfloat16"}),
    "ppo, reference kernels": ("train", {"kernels": "reference"}),
    "j_hydra_ppo": ("train", {"method": "j_hydra_ppo", "lora_dropout": 0.1}),
    "full_ppo": ("train", {"method": "full_ppo", "learning_rate": 1e-5}),
    "lora_ppo": ("train", {"method": "lora_ppo"}),
    "remax": ("train", {"algorithm": "remax"}),
    "grpo, K = 8": ("train", {"algorithm": "grpo", "num_generations": 8}),
    "rloo": ("train", {"algorithm": "rloo", "num_generations": 4}),
    "online_dpo": ("train", {"algorithm": "online_dpo", "learning_rate": 1e-4}),
    "grpo, replay": ("train", {"algorithm": "grpo", "num_generations": 4, "async_mode": "replay", "max_steps": 3}),
    "grpo, overlap": ("train", {"algorithm": "grpo", "num_generations": 4, "async_mode": "overlap", "max_steps": 3}),
    "truncated sampling": ("train", {"top_k": 20, "top_p": 0.9}),
    "two ranks": ("train", {}),
    "sft, lora": ("sft", {"mode": "lora"}),
    "sft, full": ("sft", {"mode": "full"}),
    "reward": ("reward", {"mode": "lora"}),
    "behind TRL": ("trl", {}),
    "fuse_lora": ("fuse_lora", {}),
    "demo": ("demo", {}),
}
SUPERVISED = {"max_steps": 4, "save_steps": 0, "learning_rate": 1e-3, "per_device_train_batch_size": 8}


def write_pairs(path: Path) -> Path:
    """Rows that `sft` and `reward` read: prompts of the stories, with an ending that is happy and one that is not."""
    prompts = [json.loads(line) for line in (ROOT / RL["dataset_name"]).read_text(encoding="utf-8").splitlines()]
    ends = {"chosen": " She was so happy. They all smiled.", "rejected": " It was dark. Then it was over."}
    path.write_text("".join(json.dumps({"prompt": row["prompt"], **ends}) + "\n" for row in prompts[:64]))
    return path


# ---- in a process of a checkout --------------------------------------------------------------------------------------


def behind_trl(request: dict[str, Any]) -> None:
    """Three updates of HydraPPOTrainer; its log becomes metrics.jsonl."""
    from datasets import Dataset
    from peft import LoraConfig

    from rlhf_engine.integrations.trl import HydraPPOConfig, HydraPPOTrainer

    prompts = [json.loads(line) for line in Path(RL["dataset_name"]).read_text(encoding="utf-8").splitlines()]
    trainer = HydraPPOTrainer(
        model=request["model"],
        reward_funcs=lambda completions, **_: [float(text.count("a")) for text in completions],
        args=HydraPPOConfig(
            output_dir=request["folder"], max_steps=4, per_device_train_batch_size=8, gradient_accumulation_steps=1,
            steps_per_generation=2, num_iterations=1, max_completion_length=16, learning_rate=1e-3, logging_steps=1,
            save_strategy="no", report_to="none", bf16=False, use_cpu=True, disable_tqdm=True, seed=3,
        ),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in prompts]),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )  # fmt: skip
    trainer.train()
    trainer.save_model(str(Path(request["folder"]) / "final"))
    rows = [row for row in trainer.state.log_history if "loss" in row]
    (Path(request["folder"]) / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def fused(request: dict[str, Any]) -> None:
    """Loss and gradients of a PeftModel after `fuse_lora`."""
    import torch
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    from rlhf_engine import fuse_lora

    torch.manual_seed(5)
    base = AutoModelForCausalLM.from_pretrained(request["model"])
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(base, config)
    fuse_lora(model)
    ids = torch.randint(3, base.config.vocab_size, (4, 32))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    folder = Path(request["folder"]) / "final"
    folder.mkdir(parents=True)
    save_file({**gradients, "loss": loss.detach()[None]}, folder / "gradients.safetensors")


# ---- both checkouts --------------------------------------------------------------------------------------------------


def start(tree: Path, name: str, model: Path, folder: Path) -> None:
    """Make one run in a checkout, in an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    command, changes = RUNS[name]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = ":".join(str(tree / part) for part in ("kernels", "bench", "."))
    module = [sys.executable, "-m"]
    if command in ("trl", "fuse_lora"):
        argv = [
            sys.executable,
            __file__,
            "--child",
            json.dumps({"kind": command, "model": str(model), "folder": str(folder)}),
        ]
    elif command == "demo":
        argv = [*module, "rlhf_engine", "demo", "--quick", "--output_dir", str(folder)]
    else:
        options = {**(RL if command == "train" else SUPERVISED), **changes, "output_dir": str(folder)}
        options["model_name_or_path"] = str(model)
        if command != "train":
            options["dataset_name"] = str(write_pairs(folder.parent / "pairs.jsonl"))
        config = folder.with_suffix(".json")
        config.write_text(json.dumps(options))  # JSON is YAML
        two = ["torch.distributed.run", "--nproc_per_node", "2", "-m"] if name == "two ranks" else []
        argv = [*module, *two, "rlhf_engine", command, "--config", str(config)]
    done = subprocess.run(argv, cwd=tree, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise RuntimeError(f"{name} in {tree} ended with {done.returncode}:\n{done.stdout[-3000:]}")


def left(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows of metrics without timings, and tensors by file and name, of everything below a run's folder."""
    from safetensors.torch import load_file

    rows = [
        {key: value for key, value in json.loads(line).items() if not key.startswith(TIMINGS)}
        for path in sorted(folder.rglob("metrics.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    tensors = {
        f"{path.relative_to(folder)} {name}": tensor
        for path in sorted(folder.rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }
    return rows, tensors


def compared(folders: list[Path]) -> dict[str, Any]:
    """Counts of the rows and tensors that a run leaves, and which of them differ."""
    import torch

    (rows, tensors), (other_rows, other_tensors) = map(left, folders)
    metrics = {
        key: step
        for step, (row, other) in reversed(list(enumerate(zip(rows, other_rows, strict=False))))
        for key in row.keys() | other.keys()
        if row.get(key) != other.get(key)
    }
    names = tensors.keys() | other_tensors.keys()
    moved = [
        n for n in names if n not in tensors or n not in other_tensors or not torch.equal(tensors[n], other_tensors[n])
    ]
    equal = not metrics and not moved and len(rows) == len(other_rows) and bool(tensors)
    counts = {"rows": len(rows), "tensors": len(tensors)}
    return {"equal": equal, **counts, "metrics": dict(sorted(metrics.items())), "moved": sorted(moved)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", type=Path, help="the other checkout, with its extension compiled")
    parser.add_argument("--model", type=Path, help="folder of a small pretrained model")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="NAME")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        request = json.loads(arguments.child)
        {"trl": behind_trl, "fuse_lora": fused}[request["kind"]](request)
        return 0
    if not arguments.before or not arguments.model or not arguments.out:
        parser.error("expected --before, --model and --out")
    trees = {"before": arguments.before.resolve(), "now": ROOT}
    results: dict[str, Any] = {}
    for name in arguments.only:
        folders = [(arguments.out / side / name.replace(", ", "-").replace(" ", "_")).resolve() for side in trees]
        for tree, folder in zip(trees.values(), folders, strict=True):
            folder.parent.mkdir(parents=True, exist_ok=True)
            done = folder.with_suffix(".done")
            if tree == ROOT or not done.exists():  # runs of before are made once
                start(tree, name, arguments.model.resolve(), folder)
                done.touch()
        results[name] = compared(folders)
        found = results[name]
        print(f"{name:24} {found['rows']:3} rows {found['tensors']:4} tensors ", end="")
        print(
            "equal" if found["equal"] else f"metrics (first row): {found['metrics']}, tensors: {found['moved'][:6]}",
            flush=True,
        )
    (arguments.out / "seeded.json").write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(found["equal"] for found in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
