#!/usr/bin/env python
"""Seconds that the host's work takes on this machine, for docs/scaling.md: bench/results/cpu/scaling/measured.json.

    python bench/scaling/host.py [--out bench/results/cpu/scaling]      # three minutes on two cores

A policy's file and its check; answers on their way into one process and as text; an exchange of a small value between
two processes; the stages of a step by algorithm.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pieces import OUT, RECORD, made_up, slot_tensors
from rlhf_bench.workload import PROMPTS_FILE, prepare
from rlhf_bench.workload import Setting as Work
from torch import distributed as dist

from rlhf_engine.config import TrainConfig
from rlhf_engine.devices import keep_freed_memory
from rlhf_engine.distributed.process_group import World
from rlhf_engine.generators import serialize
from rlhf_engine.generators.policy_store import put, take
from rlhf_engine.generators.work import join
from rlhf_engine.planning.presets import find_config
from rlhf_engine.runs.metrics import run_record, write_json_atomic
from rlhf_engine.scoring.experience import decode_answers
from rlhf_engine.tokenizing import load_tokenizer
from rlhf_engine.training.rl import RlTrainer


def _seconds(call: Callable[[], object], rounds: int) -> float:
    """The median of so many, after one that warms up."""
    times = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def measure_publication(name: str = "llama-7b", rounds: int = 5) -> dict[str, Any]:
    """A whole slot of a preset: the learner's copy, its file, the generator's check, and its copy."""
    real = torch.nn.Module()
    for key, size in slot_tensors(name, find_config(name).num_hidden_layers).items():
        real.register_parameter(key.replace(".", "/"), torch.nn.Parameter(torch.randn(size), requires_grad=False))
    snapshot = take(real, 1)  # type: ignore[arg-type]  # of a slot it needs parameters alone
    parcel = serialize.pack_policy(snapshot)
    return {
        "preset": name,
        "elements": sum(p.numel() for p in real.parameters()),
        "bytes": len(parcel.data),
        "seconds": {
            "take": _seconds(lambda: take(real, 1), rounds),  # type: ignore[arg-type]
            "digest": _seconds(snapshot.digest, rounds),
            "pack": _seconds(lambda: serialize.pack_policy(snapshot), rounds),
            "unpack": _seconds(lambda: serialize.unpack_policy(parcel), rounds),
            "put": _seconds(lambda: put(snapshot, real), rounds),  # type: ignore[arg-type]
        },
    }


def measure_answers(answers: int = 512, prompt: int = 200, completion: int = 300, shares: int = 8) -> dict[str, Any]:
    """Seconds that one learner process spends on a step's answers before it learns from them."""
    whole = made_up(answers, prompt, completion)
    each = made_up(answers // shares, prompt, completion)
    packed = [serialize.pack_rollout(each)] * shares
    parts = [serialize.unpack_rollout(values) for values in packed]
    with tempfile.TemporaryDirectory() as folder:
        # words as tokens: a byte-level vocabulary takes longer
        prepare(Work(hidden=64, layers=1, batch=1, micro_batch=1), Path(folder))
        tokenizer = load_tokenizer(folder)
    return {
        "answers": answers,
        "prompt": prompt,
        "completion": completion,
        "shares": shares,
        "seconds": {
            "pack": _seconds(lambda: serialize.pack_rollout(whole), 5),
            "unpack": _seconds(lambda: [serialize.unpack_rollout(values) for values in packed], 5),
            "join": _seconds(lambda: join(parts), 5),
            "decode": _seconds(lambda: decode_answers(tokenizer, whole.batch), 3),
        },
    }


def measure_exchange(rounds: int = 200) -> dict[str, float]:
    """Seconds of an `all_gather_object` of a small value between two processes of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--store", f"{folder}/store", "--rounds", str(rounds), "--threads", "1"]
        ranks = [subprocess.Popen([*command, "--rank", str(i)], stdout=subprocess.PIPE, text=True) for i in range(2)]
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    return {"ranks": 2.0, "seconds": float(said[0])}


def _exchange(store: str, rank: int, rounds: int) -> float:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    world = World(rank=rank, size=2)
    return _seconds(lambda: world.gather(""), rounds)


STAGES: dict[str, dict[str, Any]] = {
    "ppo": {"num_ppo_epochs": 1},
    "reinforce": {},
    "remax": {},
    "rloo": {},
    "grpo": {},
    "online_dpo": {},
    "best_of_n": {},
}


def measure_stages(rounds: int) -> dict[str, Any]:
    """Seconds of a step by algorithm at equal generations; medians over rounds, in which algorithms take turns."""
    work = Work(hidden=256, layers=4, vocab=8192, batch=32, micro_batch=8, steps=rounds + 1)
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(work, folder)
        trainers = {
            algorithm: RlTrainer(
                TrainConfig(
                    model_name_or_path=str(folder),
                    dataset_name=str(folder / PROMPTS_FILE),
                    output_dir=str(folder / algorithm),
                    algorithm=algorithm,  # type: ignore[arg-type]
                    lora_r=work.lora_r,
                    generation_batch_size=work.batch,
                    per_device_train_batch_size=work.micro_batch,
                    num_mini_batches=1,
                    max_completion_length=work.answer_tokens,
                    max_steps=work.steps,
                    learning_rate=1e-5,
                    device="cpu",
                    **options,
                )
            )
            for algorithm, options in STAGES.items()
        }
        steps: dict[str, list[dict[str, float]]] = {algorithm: [] for algorithm in trainers}
        for _ in range(work.steps):
            for algorithm, trainer in trainers.items():
                steps[algorithm].append(trainer.step())
        for algorithm, rows in steps.items():
            found[algorithm] = {
                stage: statistics.median(row[f"seconds/{stage}"] for row in rows[1:])
                for stage in ("generate", "score", "update")
            }
    return {"work": dataclasses.asdict(work), "seconds": found}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--rounds", type=int, default=5, help="steps of each algorithm after the first")
    parser.add_argument("--threads", type=int, default=2)
    for name, kind in (("--store", str), ("--rank", int)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    if options.store is not None:
        print(_exchange(options.store, options.rank, options.rounds))
        return 0

    keep_freed_memory()
    record = run_record(
        config={}, command=["python", "bench/scaling/host.py", *sys.argv[1:]], backends={}, device="cpu"
    )
    kept = ("started", "versions", "git_commit", "device_name", "cpu_cores", "torch_threads")
    found = {
        **{key: record[key] for key in kept},
        "publication": measure_publication(),
        "answers": measure_answers(),
        "exchange": measure_exchange(),
        "stages": measure_stages(options.rounds),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    write_json_atomic(options.out / RECORD, found)
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
