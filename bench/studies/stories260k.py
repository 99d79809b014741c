#!/usr/bin/env python
"""Hydra-PPO on a real pretrained story model, several seeds: reward and KL before and after, curves, samples.

    python bench/studies/stories260k.py --model MODEL_FOLDER [--seeds 0 1 2] [--output bench/results/cpu/stories260k]

The run is `rlhf-engine train --config examples/stories260k.yaml` for each seed. Before and after it, every held-out
prompt is answered once with the same sampling seed; the reward function, the exact KL to the reference and the share of
repeated trigrams are averaged over those answers.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
import time
from pathlib import Path

from transformers.utils import logging

from rlhf_engine.config import TrainConfig, parse_config
from rlhf_engine.devices import peak_memory_bytes
from rlhf_engine.runs.folder import CURVES_FILE, METRICS_FILE, RECORD_FILE, SAMPLES_FILE
from rlhf_engine.runs.metrics import write_json_atomic
from rlhf_engine.runs.progress import TrainingProgress
from rlhf_engine.scoring.rewards import mean_or_none
from rlhf_engine.training.evaluation import Answers
from rlhf_engine.training.rl import RlTrainer

CONFIG = "examples/stories260k.yaml"
SAMPLING_SEED = 1234


def repeated_trigrams(text: str) -> float:
    """Share of a text's trigrams that it has said before."""
    words = re.findall(r"[a-z']+", text.lower())
    trigrams = list(zip(words, words[1:], words[2:], strict=False))
    return 1 - len(set(trigrams)) / len(trigrams) if trigrams else 0.0


def describe(answers: Answers) -> dict[str, float | None]:
    """Mean reward and mean share of repeated trigrams."""
    repeats = [repeated_trigrams(text) for text in answers.completions]
    return {"reward": mean_or_none(answers.scores), "repeated_trigrams": sum(repeats) / len(repeats)}


def run(model: str, seed: int, folder: Path, output: Path) -> dict[str, object]:
    """One seed: train in `folder`, keep metrics, curves, samples and the record in `output`."""
    argv = ["--config", CONFIG, "--model_name_or_path", model, "--output_dir", str(folder), "--seed", str(seed)]
    trainer = RlTrainer(parse_config(TrainConfig, argv))
    prompts = trainer.eval_set
    assert prompts is not None  # the config has them
    indices = list(range(len(prompts.rows)))
    before = trainer.evaluation.answer(prompts, indices, role="reference", seed=SAMPLING_SEED)
    began = time.perf_counter()
    with TrainingProgress(trainer.config.max_steps, title=f"seed {seed}") as progress:
        trainer.run(progress.update)
    seconds = time.perf_counter() - began
    after = trainer.evaluation.answer(prompts, indices, role="actor", seed=SAMPLING_SEED)
    for name in (METRICS_FILE, CURVES_FILE, SAMPLES_FILE):
        shutil.copy(folder / name, output / f"seed{seed}_{name}")
    record = json.loads((folder / RECORD_FILE).read_text())
    rows = [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]
    return {
        "seed": seed,
        "before": describe(before),
        "after": describe(after),
        "kl_nats_per_answer": trainer.evaluation.kl_to_reference(after.rollout),
        "seconds": seconds,
        "peak_memory_bytes": peak_memory_bytes(),
        "mismatch_rollout_max": max(row["mismatch/rollout_max"] for row in rows),
        "versions": record["versions"],
        "git_commit": record["git_commit"],
        "device": record["device_name"],
        "command": f"rlhf-engine train --config {CONFIG} --model_name_or_path MODEL --output_dir OUT --seed {seed}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of the pretrained model")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=Path("bench/results/cpu/stories260k"))
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    arguments.output.mkdir(parents=True, exist_ok=True)
    results = []
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            results.append(run(arguments.model, seed, Path(folder), arguments.output))
        write_json_atomic(arguments.output / "summary.json", results)
    print("| seed | reward before | after | KL, nats per answer | repeated trigrams before | after | seconds |")
    print("|---|---|---|---|---|---|---|")
    for r in results:
        before, after = r["before"], r["after"]
        print(
            f"| {r['seed']} | {before['reward']:.2f} | {after['reward']:.2f} | {r['kl_nats_per_answer']:.1f} "
            f"| {before['repeated_trigrams']:.3f} | {after['repeated_trigrams']:.3f} | {r['seconds']:.0f} |"
        )


if __name__ == "__main__":
    main()
