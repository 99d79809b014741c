#!/usr/bin/env python
"""Measure how far log-probs of the rollout are from those of the training forward in whole runs of exact mode.

    python bench/studies/exact_runs.py [--modes overlap ray] [--dtypes fp32 bf16] [--steps 200] [--json FILE]
        [--stories ../shared/models/stories260K]

RLOO on stories260K: 16 answers of at most 32 tokens a step, four to a prompt, LoRA r 8 on every linear, answers drawn
beside the updates or by a Ray generator. With --kl_estimator exact every token is scored by the policy that drew it.
--json appends one record per run. The exit status is 1 if any log-prob differs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path

from arms import append
from exact_cost import ANIMALS, REWARD

from rlhf_engine.commands.main import main as command
from rlhf_engine.runs.metrics import read_metrics

ANSWERS = 16
"""Of a step."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def run(folder: Path, stories: str, mode: str, dtype: str, steps: int) -> list[dict[str, float]]:
    """Metrics of every step of one run."""
    rows = [{"prompt": f"Once upon a time there was a little {name} who"} for name in ANIMALS]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "reward.py").write_text(REWARD)
    options = {
        "model_name_or_path": stories,
        "dataset_name": str(folder / "prompts.jsonl"),
        "reward_funcs": f"{folder / 'reward.py'}:reward",
        "output_dir": str(folder / "run"),
        "algorithm": "rloo",
        "num_generations": 4,
        "generation_batch_size": ANSWERS,
        "max_completion_length": 32,
        "lora_r": 8,
        "learning_rate": 1e-3,
        "max_steps": steps,
        "save_steps": steps,
        "async": mode,
        "kl_estimator": "exact",
        "dtype": dtype,
        "exact": "true",
        "device": "cpu",
    }
    if command(["train", *(word for name, value in options.items() for word in (f"--{name}", str(value)))]):
        sys.exit(f"{mode} {dtype}: the run failed")
    return read_metrics(folder / "run" / "metrics.jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modes", nargs="+", choices=["off", "overlap", "ray"], default=["overlap", "ray"])
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--stories", default="../shared/models/stories260K", help="folder of stories260K")
    parser.add_argument("--json", type=Path, help="file to append records to")
    options = parser.parse_args()
    differs = False
    for mode, dtype in itertools.product(options.modes, options.dtypes):
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as name:
            rows = run(Path(name), options.stories, mode, DTYPES[dtype], options.steps)
        worst = max(row["mismatch/rollout_max"] for row in rows)
        differs |= worst != 0.0 or len(rows) != options.steps
        tokens = round(sum(row["completions/mean_length"] * ANSWERS for row in rows))
        print(f"{mode} {dtype}: {len(rows)} steps, {tokens} tokens, largest difference {worst:g}", flush=True)
        stale, seconds = max(row.get("staleness/max", 0) for row in rows), time.monotonic() - began
        found = {"steps": len(rows), "tokens": tokens, "largest_difference": worst, "staleness_max": stale}
        append(options.json, mode=mode, dtype=dtype, seconds=seconds, **found)
    sys.exit(differs)


if __name__ == "__main__":
    main()
