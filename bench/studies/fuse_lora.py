#!/usr/bin/env python
"""A PeftModel as PEFT runs it, and after `fuse_lora`: forward and backward in turns, in one process.

    python bench/studies/fuse_lora.py --out bench/results/cpu/fuse_lora
    python bench/studies/fuse_lora.py --quick --out runs/fuse_lora                                       # a tiny model
    python bench/studies/fuse_lora.py --device cuda --dtype bfloat16 --hidden 4096 --layers 8 --tokens 512 --out DIR

A random Llama with LoRA on every linear of its blocks. The loss is the model's own over all tokens. Columns:

    peft, fused   milliseconds, medians of interleaved rounds
    floor         the same model without adapters, differentiated to its input embeddings: what no LoRA can be below
    mixed         samples that carry two adapters and none, where PEFT has no backward pass: forward alone, both
    checkpointed  with gradient checkpointing
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from rlhf_bench.timing import interleaved, medians
from rlhf_kernels.runtime import registry
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_engine import fuse_lora
from rlhf_engine.runs.metrics import run_record, write_json_atomic

QUICK = {"hidden": 64, "layers": 2, "vocab": 256, "batch": 4, "tokens": 16}
ADAPTERS = ("default", "other")


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    found.add_argument("--out", type=Path, required=True)
    found.add_argument("--quick", action="store_true")
    for name, value in {"hidden": 512, "layers": 8, "vocab": 8192, "batch": 8, "tokens": 128, "rank": 16}.items():
        found.add_argument(f"--{name}", type=int, default=value)
    found.add_argument("--rounds", type=int, default=7)
    found.add_argument("--device", default="cpu")
    found.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    return found


def make_model(given: argparse.Namespace) -> PeftModel:
    """Two adapters, the first of which is trained; B is not zero."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=given.hidden,
            intermediate_size=given.hidden * 11 // 4,
            num_hidden_layers=given.layers,
            num_attention_heads=8,
            num_key_value_heads=8,
            vocab_size=given.vocab,
            tie_word_embeddings=False,
        )
    ).to(given.device, getattr(torch, given.dtype))
    config = LoraConfig(r=given.rank, lora_alpha=2 * given.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    model.add_adapter(ADAPTERS[1], config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.02)
    return model


def training_step(model: PeftModel, ids: torch.Tensor) -> Callable[[], Any]:
    def run() -> None:
        model.zero_grad(set_to_none=True)
        model(ids, labels=ids).loss.backward()

    return run


def floor_step(model: PeftModel, ids: torch.Tensor) -> Callable[[], Any]:
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()

    def run() -> None:
        embeddings.grad = None
        with model.disable_adapter():
            model(inputs_embeds=embeddings, labels=ids).loss.backward()

    return run


def mixed_forward(model: PeftModel, ids: torch.Tensor) -> Callable[[], Any]:
    names = [(*ADAPTERS, "__base__")[i % 3] for i in range(len(ids))]

    def run() -> None:
        model.eval()
        with torch.no_grad():
            model(ids, adapter_names=names)
        model.train()

    return run


def fused(model: PeftModel, run: Callable[[], Any]) -> Callable[[], Any]:
    """The same call with the layers exchanged; changing classes back and forth takes microseconds."""

    def call() -> None:
        with fuse_lora(model):
            run()

    return call


def measure(given: argparse.Namespace) -> dict[str, dict[str, float]]:
    model = make_model(given).train()
    ids = torch.randint(0, given.vocab, (given.batch, given.tokens), device=given.device)
    device = torch.device(given.device)
    found: dict[str, dict[str, float]] = {}
    for case in ("train", "checkpointed", "mixed"):
        if case == "checkpointed":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        step = mixed_forward(model, ids) if case == "mixed" else training_step(model, ids)
        arms = {"peft": step, "fused": fused(model, step)}
        if case == "train":
            arms["floor"] = floor_step(model, ids)
        for run in arms.values():
            run()
        found[case] = medians(interleaved(arms, given.rounds, device))
        model.gradient_checkpointing_disable()
        print(case, found[case], file=sys.stderr)
    return found


def table(found: dict[str, dict[str, float]]) -> str:
    lines = ["| | PEFT, ms | fused, ms | × faster | floor, ms |", "|---|---|---|---|---|"]
    for case, row in found.items():
        floor = f"{row['floor']:.1f}" if "floor" in row else ""
        lines.append(
            f"| {case} | {row['peft']:.1f} | {row['fused']:.1f} | {row['peft'] / row['fused']:.2f} | {floor} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    given = parser().parse_args()
    if given.quick:
        for name, value in QUICK.items():
            setattr(given, name, value)
    found = measure(given)
    given.out.mkdir(parents=True, exist_ok=True)
    setting = {name: value for name, value in vars(given).items() if name != "out"}
    record = run_record(
        config=setting,
        command=["python", "bench/studies/fuse_lora.py", *sys.argv[1:]],
        backends=registry.report(torch.device(given.device).type, getattr(torch, given.dtype)),
        device=given.device,
    )
    write_json_atomic(given.out / f"{given.dtype}.json", {**record, "milliseconds": found})
    (given.out / f"{given.dtype}.md").write_text(f"# LoRA of a PeftModel, {given.dtype}\n\n{table(found)}")
    print(table(found))


if __name__ == "__main__":
    main()
