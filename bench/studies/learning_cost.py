#!/usr/bin/env python
"""Time and memory of learning from a batch of answers: prompts once against copies, and four roles against SFT.

    python bench/studies/learning_cost.py [--dtypes float32 bfloat16] [--rounds 5] [--isa avx2] [--json FILE]

A random Llama of 41 M with LoRA r 16 on every linear. Learning is what follows a rollout: log-probs of actor and
reference, values and rewards of all answers, then one forward and backward of policy and value loss, eight answers at
a time. Exact mode where the instruction set has it by default. Ways are timed in turns in one process; a time is the
median of the rounds. Peak memory is that of one call above its inputs, in a process of its own.

    shared      with each prompt once and with a copy of it for every answer; K answers to a prompt of so many tokens.
                K = 1 has nothing to share, and shows what looking for it costs
    roles       learning of a method, over a LoRA step of SFT on all tokens of the same rows; `products` is the same
                ratio of the products alone, counted: linears forward, backward to their inputs (not to the first
                block's queries, keys and values), and the LM head on the rows that a loss reads

--json appends one record per dtype.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from arms import append
from lanes import make_model, update
from rlhf_bench.isa import SETS, is_held, run_held
from rlhf_bench.memory import peak_of_process, set_up_malloc
from rlhf_bench.timing import interleaved, medians
from rlhf_kernels.runtime import registry

from rlhf_engine.devices import keep_freed_memory
from rlhf_engine.hydra import HydraModel, LmLoss, PackedBatch
from rlhf_engine.hydra.roles import fold_lanes
from rlhf_engine.rollout import exactness

MICRO_BATCH = 8
SHARED = ((8, 256, 64), (4, 64, 64), (1, 256, 64))
"""(answers to a prompt, tokens of a prompt, tokens of an answer); sixteen answers each."""
ANSWERS, PROMPT, LENGTH = 16, 64, 128
METHODS = ("hydra_ppo", "j_hydra_ppo")
ROLES = ("actor", "reference", "critic", "reward")


def make_batch(vocab: int, answers_per_prompt: int, prompt: int, answer: int) -> PackedBatch:
    """Sixteen random answers, those to one prompt side by side."""
    generator = torch.Generator().manual_seed(prompt)

    def draw(n: int, length: int) -> list[list[int]]:
        return torch.randint(3, vocab, (n, length), generator=generator).tolist()

    prompts = [row for row in draw(ANSWERS // answers_per_prompt, prompt) for _ in range(answers_per_prompt)]
    return PackedBatch.from_lists(prompts, draw(ANSWERS, answer))


def in_parts(batch: PackedBatch) -> list[PackedBatch]:
    """The micro-batches."""
    return [batch.select(range(i, i + MICRO_BATCH)) for i in range(0, ANSWERS, MICRO_BATCH)]


def learn(model: HydraModel, batch: PackedBatch) -> None:
    """Score a batch by all roles, then update policy and critic."""
    model.score(batch, ROLES)
    for part in in_parts(batch):
        update(model, part)
    model.zero_grad(set_to_none=True)


def tune(model: HydraModel, batch: PackedBatch) -> None:
    """One step of SFT on all tokens of the same rows, by the actor's adapter."""
    tokens = batch.tokens_T.view(ANSWERS, LENGTH)
    for part in in_parts(PackedBatch.from_lists(tokens[:, :1].tolist(), tokens[:, 1:].tolist())):
        model(part, (LmLoss(role="actor", denom=1.0),))[0].backward()
    model.zero_grad(set_to_none=True)


def products(arguments: argparse.Namespace, scored: int, updated: int, *, of_head: int) -> float:
    """Multiply-adds of one row: lanes scored, lanes updated, and passes of the LM head over all tokens of a row."""
    h, width = arguments.hidden, arguments.hidden * 8 // 3 // 64 * 64
    block, first = 4 * h * h + 3 * h * width, 3 * h * h
    linears = (scored + 2 * updated) * arguments.layers * block - updated * first
    return LENGTH * linears + of_head * arguments.vocab * h


def calls_of_shared(model: HydraModel, batch: PackedBatch) -> dict[str, Callable[[], None]]:
    """Learning with each prompt once, and with copies."""

    def run(shares: bool) -> None:
        model.shares_prompts = shares
        learn(model, batch)

    return {"once": lambda: run(True), "copies": lambda: run(False)}


def measure_shared(arguments: argparse.Namespace, kind: str) -> dict[str, dict[str, float]]:
    """Milliseconds or peak bytes of both ways, by case."""
    model, found = make_model(arguments, torch.device("cpu")).train(), {}
    for case in SHARED:
        calls = calls_of_shared(model, make_batch(arguments.vocab, *case))
        for call in calls.values():
            call()
        name = "K = {}, {} + {}".format(*case)
        if kind == "time":
            found[name] = medians(interleaved(calls, arguments.rounds, torch.device("cpu")))
        else:
            found[name] = {way: float(peak_of_process(call)) for way, call in calls.items()}
    return found


def measure_roles(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Milliseconds of learning and of a step of SFT by method, their ratio, and that of their products."""
    answer, found = LENGTH - PROMPT, {}
    batch = make_batch(arguments.vocab, 1, PROMPT, answer)
    by_sft = products(arguments, 0, 1, of_head=2 * (LENGTH - 1))
    for method in METHODS:
        model = make_model(arguments, torch.device("cpu"), method).train()
        calls = {"learn": lambda m=model: learn(m, batch), "sft": lambda m=model: tune(m, batch)}
        for call in calls.values():
            call()
        ms = medians(interleaved(calls, arguments.rounds, torch.device("cpu")))
        scored, updated = (len(fold_lanes(model.roles, roles)) for roles in (ROLES, ("actor", "critic")))
        ratio = products(arguments, scored, updated, of_head=4 * answer) / by_sft
        found[method] = {**ms, "ratio": ms["learn"] / ms["sft"], "products": ratio}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=512, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--isa", choices=SETS, help="instruction set; default: the best of this CPU")
    parser.add_argument("--json", type=Path, help="file to append records to")
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.isa and not is_held(options.isa):
        sys.exit(run_held(options.isa, sys.argv[1:], program=[__file__]))
    exact, options.tokens = exactness.by_default("cpu"), 512
    if options.memory:
        set_up_malloc()
        options.dtype = options.dtypes[0]
        with registry.use_exact(exact):
            print(json.dumps(measure_shared(options, "memory")))
        return
    for dtype in options.dtypes:
        options.dtype = dtype
        command = [sys.executable, __file__, *sys.argv[1:], "--memory", "--dtypes", dtype]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        peaks: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        keep_freed_memory()
        with registry.use_exact(exact):
            times, roles = measure_shared(options, "time"), measure_roles(options)
        for name, ms in times.items():
            peak = peaks[name]
            print(
                f"{dtype} {name}: {ms['once']:.0f} ms with each prompt once, {ms['copies']:.0f} with copies, "
                f"{ms['once'] / ms['copies']:.3f} x; peak {peak['once'] / 2**20:.0f} and "
                f"{peak['copies'] / 2**20:.0f} MiB, {peak['once'] / peak['copies']:.3f} x",
                flush=True,
            )
        for name, row in roles.items():
            print(
                f"{dtype} {name}: {row['learn']:.0f} ms over {row['sft']:.0f} of SFT, {row['ratio']:.2f} x; "
                f"products {row['products']:.2f} x; {row['ratio'] / row['products']:.3f} of them",
                flush=True,
            )
        found = {"ms": times, "peak_bytes": peaks, "roles": roles, "rounds": options.rounds}
        append(options.json, dtype=dtype, exact=exact, **found)


if __name__ == "__main__":
    main()
