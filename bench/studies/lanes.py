#!/usr/bin/env python
"""One backbone call for all lanes against one call per lane: milliseconds and peak memory against batch size.

    python bench/studies/lanes.py [--hidden 512 --layers 8 --vocab 32000 --tokens 128 --batches 1 2 4 8 16 32]
        [--out FOLDER]

A Hydra model on a random Llama; prompts and answers of half the tokens each. Two passes of a PPO step:

    score     log-probs of actor and reference, values, rewards: three lanes (actor, OFF, critic), no gradient
    update    policy loss and value loss, forward and backward: two lanes (actor, critic)

`together` sends the lanes through the backbone in one call (a token budget above everything), `apart` one after another
(a budget of 1). Times are medians of interleaved rounds; peak memory is that of one call above its inputs, taken in a
process of its own (bench/rlhf_bench/memory.py). The last line names the token budget from which on `together` stops
paying: the smallest number of tokens of all lanes at which it is less than 2 % faster.
Writes lanes.json and lanes.png into --out (bench/results/cpu/lanes or bench/results/<gpu>/lanes).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from rlhf_bench.memory import peak_of_process, peak_on_cuda, set_up_malloc
from rlhf_bench.timing import interleaved, medians
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_engine.devices import DTYPES
from rlhf_engine.hydra import (
    HydraModel,
    Logprobs,
    PackedBatch,
    PolicyLoss,
    Rewards,
    SlotConfig,
    ValueLoss,
    Values,
    hydra_roles,
)
from rlhf_engine.runs.metrics import git_commit, write_json_atomic

PASSES = {"score": 3, "update": 2}
BUDGETS = {"together": 2**62, "apart": 1}
WORTH_IT = 0.98


def make_model(arguments: argparse.Namespace, device: torch.device, method: str = "hydra_ppo") -> HydraModel:
    """A method's model on a random Llama with LoRA r 16 on every linear."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=arguments.hidden,
        intermediate_size=arguments.hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 64,
        num_key_value_heads=arguments.hidden // 64,
        vocab_size=arguments.vocab,
        max_position_embeddings=max(1024, arguments.tokens),
    )
    with device:
        plain = LlamaForCausalLM(config).to(DTYPES[arguments.dtype])
    roles = hydra_roles(method)
    slots = {role.slot: SlotConfig(r=16) for role in roles.values() if role.slot is not None}
    return HydraModel.from_pretrained(plain, roles=roles, slots=slots, device=device)


def make_batch(n: int, arguments: argparse.Namespace, device: torch.device) -> PackedBatch:
    """n random sequences, half prompt and half answer."""
    generator = torch.Generator().manual_seed(n)
    tokens = torch.randint(3, arguments.vocab, (n, arguments.tokens), generator=generator)
    half = arguments.tokens // 2
    return PackedBatch.from_lists(tokens[:, :half].tolist(), tokens[:, half:].tolist(), device=device)


def run_pass(model: HydraModel, batch: PackedBatch, name: str, budget: int) -> None:
    """One scoring pass or one forward and backward, under a token budget."""
    model.token_budget = budget
    if name == "score":
        with torch.no_grad():  # forward itself, because `HydraModel.score` would split the batch to fit the budget
            model(batch, (Logprobs(), Logprobs(role="reference"), Values(), Rewards()))
        return
    update(model, batch)
    model.zero_grad(set_to_none=True)


def update(model: HydraModel, batch: PackedBatch) -> None:
    """One forward and backward of policy and critic."""
    m = batch.n_completion_tokens
    zeros, mask = torch.zeros(m, device=batch.device), torch.ones(m, dtype=torch.bool, device=batch.device)
    policy = PolicyLoss(old_logprob_M=zeros - 10, advantage_M=zeros + 1, mask_M=mask, denom=float(m))
    value = ValueLoss(old_value_M=zeros, return_M=zeros + 1, mask_M=mask, denom=float(m))
    policy_out, value_out = model(batch, (policy, value))
    (policy_out.loss + value_out.loss).backward()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measurements of a worker process: milliseconds of every batch, pass and way, or the peak bytes of one of them."""
    device = torch.device(arguments.device)
    torch.set_num_threads(arguments.threads)
    if arguments.worker == "memory" and device.type == "cpu":
        set_up_malloc()
    model = make_model(arguments, device).train()
    found: dict[str, Any] = {}
    for n in arguments.batches:
        batch = make_batch(n, arguments, device)
        for name in PASSES:
            calls = {
                way: (lambda batch=batch, name=name, budget=budget: run_pass(model, batch, name, budget))
                for way, budget in BUDGETS.items()
            }
            for call in calls.values():
                call()
            if arguments.worker == "time":
                values: dict[str, float] = medians(interleaved(calls, arguments.rounds, device))
            else:
                peak = peak_on_cuda if device.type == "cuda" else peak_of_process
                values = {way: float(peak(call)) for way, call in calls.items()}
            found[f"{name} {n}"] = values
            print(f"{arguments.worker} {name} batch {n}: {values}", file=sys.stderr)
    return found


def in_worker(kind: str, argv: list[str]) -> dict[str, Any]:
    """Run this file in a process of its own; its result."""
    done = subprocess.run(
        [sys.executable, __file__, *argv, "--worker", kind], stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Time and memory of `together` as a share of `apart`, against the tokens of all lanes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharex=True)
    for axis, quantity in zip(axes, ("ms", "peak_bytes"), strict=True):
        for name in PASSES:
            mine = [row for row in rows if row["pass"] == name]
            ratios = [row["together"][quantity] / row["apart"][quantity] for row in mine]
            axis.plot([row["tokens"] for row in mine], ratios, marker="o", label=name)
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_xlabel("tokens of all lanes")
        axis.set_title(f"{'time' if quantity == 'ms' else 'peak memory'}: one call / one per lane")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=512, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--tokens", type=int, default=128, help="tokens per sequence, half of them the prompt")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--worker", choices=("time", "memory"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(measure(arguments)))
        return
    argv = sys.argv[1:]
    milliseconds, peaks = in_worker("time", argv), in_worker("memory", argv)
    rows = []
    for name, n_lanes in PASSES.items():
        for n in arguments.batches:
            key = f"{name} {n}"
            ways = {way: {"ms": milliseconds[key][way], "peak_bytes": peaks[key][way]} for way in BUDGETS}
            rows.append({"pass": name, "batch": n, "tokens": n * arguments.tokens * n_lanes, **ways})
    crossings = {
        name: next(
            (
                row["tokens"]
                for row in rows
                if row["pass"] == name and row["together"]["ms"] > WORTH_IT * row["apart"]["ms"]
            ),
            None,
        )
        for name in PASSES
    }
    device = torch.device(arguments.device)
    where = torch.cuda.get_device_name(device).replace(" ", "-") if device.type == "cuda" else "cpu"
    out = arguments.out or Path("bench/results") / where / "lanes"
    out.mkdir(parents=True, exist_ok=True)
    record = {
        "rows": rows,
        "stops_paying_at_tokens": crossings,
        "setting": {k: v for k, v in vars(arguments).items() if k not in ("out", "worker")},
        "git_commit": git_commit(Path(__file__)),
        "torch": torch.__version__,
        "command": f"python bench/studies/lanes.py {' '.join(argv)}".strip(),
    }
    write_json_atomic(out / "lanes.json", record)
    plot(rows, out / "lanes.png")
    names = f"{'together ms':>13}{'apart ms':>10}{'ratio':>7}{'together MiB':>14}{'apart MiB':>11}"
    print(f"{'pass':8}{'batch':>6}{'tokens':>8}{names}")
    for row in rows:
        a, b = row["together"], row["apart"]
        print(
            f"{row['pass']:8}{row['batch']:6}{row['tokens']:8}{a['ms']:13.1f}{b['ms']:10.1f}{a['ms'] / b['ms']:7.2f}"
            f"{a['peak_bytes'] / 2**20:14.0f}{b['peak_bytes'] / 2**20:11.0f}"
        )
    print(f"one call stops paying at (tokens of all lanes): {crossings}; results in {out}")


if __name__ == "__main__":
    main()
