#!/usr/bin/env python
"""Seconds of a training step in exact mode beside one without.

    python bench/studies/exact_cost.py [--models "llama 41M" "gpt2 41M"] [--dtypes float32 bfloat16] [--steps 4]
        [--isa avx2] [--json FILE] [--tokenizer ../shared/models/stories260K]

GRPO: 32 answers of 64 tokens, eight to a prompt, LoRA r 16 on every linear. Two runs take their steps in turns in one
process; a time is the median of the steps after the first. What `auto` takes without exact mode is the kernel table's
choice. --json appends one record per model and dtype.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from arms import append
from exact import MODELS
from rlhf_bench.isa import SETS, is_held, run_held
from rlhf_kernels.runtime import registry
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_engine.config import TrainConfig
from rlhf_engine.training.rl import RlTrainer

ANIMALS = ("dog", "cat", "bear", "fox", "bird", "fish", "frog", "owl")
REWARD = "def reward(completions, **columns):\n    return [float(len(text) % 7) for text in completions]\n"


def prepare(folder: Path, model: str, tokenizer: str) -> None:
    """A random model, prompts and a reward function."""
    torch.manual_seed(0)
    config = copy.deepcopy(MODELS[model])
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 2, 0
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder / "model")
    rows = [{"prompt": f"Once upon a time there was a little {name} who lived in a big house and"} for name in ANIMALS]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "reward.py").write_text(REWARD)


def make(folder: Path, dtype: str, *, exact: bool) -> RlTrainer:
    """A run of its own, in exact mode or not."""
    return RlTrainer(
        TrainConfig(
            model_name_or_path=str(folder / "model"),
            dataset_name=str(folder / "prompts.jsonl"),
            reward_funcs=[f"{folder / 'reward.py'}:reward"],
            output_dir=str(folder / f"exact_{exact}"),
            algorithm="grpo",
            num_generations=8,
            generation_batch_size=32,
            max_completion_length=64,
            dtype=dtype,
            exact=exact,
            device="cpu",
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["llama 41M"])
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--steps", type=int, default=4, help="steps of each run, of which the first does not count")
    parser.add_argument("--isa", choices=SETS, help="instruction set; default: the best of this CPU")
    parser.add_argument("--tokenizer", default="../shared/models/stories260K", help="folder of the tokenizer")
    parser.add_argument("--json", type=Path, help="file to append records to")
    options = parser.parse_args()
    if options.isa and not is_held(options.isa):
        sys.exit(run_held(options.isa, sys.argv[1:], program=[__file__]))
    for model, dtype in itertools.product(options.models, options.dtypes):
        with tempfile.TemporaryDirectory() as name:
            prepare(Path(name), model, options.tokenizer)
            runs = {exact: make(Path(name), dtype, exact=exact) for exact in (False, True)}
            seconds: dict[bool, list[float]] = {False: [], True: []}
            mismatch: dict[bool, float] = {}
            for _ in range(options.steps):
                for exact, run in runs.items():
                    with registry.use_exact(exact):
                        began = time.perf_counter()
                        found = run.step()
                        seconds[exact].append(time.perf_counter() - began)
                    mismatch[exact] = found["mismatch/rollout_max"]
        auto, exactly = (statistics.median(seconds[exact][1:]) for exact in (False, True))
        print(
            f"{model} {dtype}: {exactly:.2f} s in exact mode, {auto:.2f} s without, {exactly / auto:.2f} x", flush=True
        )
        about = {"model": model, "dtype": dtype, "ratio": exactly / auto}
        found = {"auto_s": seconds[False], "exact_s": seconds[True]}
        append(options.json, **about, **found, mismatch_auto=mismatch[False], mismatch_exact=mismatch[True])


if __name__ == "__main__":
    main()
