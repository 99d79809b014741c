#!/usr/bin/env python
"""Exact mode on many tokens: the largest difference of log-probs between rollout, scoring and training forward.

    python bench/studies/exact.py [--tokens 60000] [--models stories260k llama …] [--dtypes fp32 bf16] [--isa avx2]
        [--stories ../shared/models/stories260K] [--json FILE]

Each round draws answers with 1 to 64 rows at once, to ragged prompts, some of them shared by several answers. Rows are
under one of two adapters of other ranks or under none; temperatures and threads change. The same answers are then
scored, with prompts shared and with copies of them, and go through a training forward in micro-batches of another size.
Rounds go on until `--tokens` answer tokens are reached for a model and dtype. Models are random, but for stories260K.

--json appends one record per model and dtype. The exit status is 1 if any log-prob differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from arms import append
from rich.console import Console
from rich.table import Table
from rlhf_bench.isa import SETS, is_held, run_held
from rlhf_kernels.runtime import registry
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from rlhf_engine.hydra import HydraModel, Logprobs, PackedBatch, RoleSpec, SlotConfig
from rlhf_engine.rollout import EngineOptions, Request, SamplingConfig, generate_requests

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MODELS: dict[str, PreTrainedConfig] = {
    "llama 41M": LlamaConfig(
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=32000,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    ),
    "gpt2 41M": GPT2Config(
        n_embd=512, n_layer=8, n_head=8, vocab_size=32000, n_positions=1024, bos_token_id=1, eos_token_id=2
    ),
    "gemma2 42M": Gemma2Config(
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        query_pre_attn_scalar=64,
        vocab_size=32000,
        max_position_embeddings=1024,
        sliding_window=64,
    ),
    "qwen3, grouped": Qwen3Config(
        hidden_size=192,
        intermediate_size=500,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=40,
        vocab_size=5003,
        max_position_embeddings=1024,
    ),
    "mistral, window": MistralConfig(
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=2000,
        max_position_embeddings=1024,
        sliding_window=50,
    ),
}
"""Widths of Qwen3 are no multiples of a vector. Steps of GPT-2 and Gemma 2 are transformers' own."""
ROLES = {
    "actor": RoleSpec(slot="actor", head="lm", trainable=True),
    "behaviour": RoleSpec(slot="other", head="lm"),
    "reference": RoleSpec(slot=None, head="lm"),
}
FIELDS = {"actor": "logprobs_M", "behaviour": "past_logprobs_M", "reference": "ref_logprobs_M"}
TEMPERATURES = (1.0, 0.7, 1.3)


def make(name: str, dtype: torch.dtype, stories: str) -> HydraModel:
    """A model with two adapters that are not zero, of ranks 16 and 5."""
    torch.manual_seed(0)
    if name == "stories260k":
        plain: Any = AutoModelForCausalLM.from_pretrained(stories, dtype=dtype)
    else:
        plain = AutoModelForCausalLM.from_config(MODELS[name], dtype=dtype)
        for parameter in plain.parameters():
            if parameter.dim() == 2:
                parameter.data.mul_(2.0)  # logits that differ
    slots = {"actor": SlotConfig(r=16), "other": SlotConfig(r=5)}
    model = HydraModel.from_pretrained(plain, roles=ROLES, slots=slots, dtype=dtype).eval()
    with torch.no_grad():
        for slot in slots:
            for parameter in model.backbone().slot(slot).parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape))
    return model


def requests(number: int, vocabulary: int) -> list[Request]:
    """Prompts of 1 to 90 tokens, one of 340, some of them asked several times; roles in turns."""
    generator = torch.Generator().manual_seed(number)
    lengths = torch.randint(1, 91, (40,), generator=generator).tolist()
    prompts = [tuple(torch.randint(3, vocabulary, (n,), generator=generator).tolist()) for n in [*lengths, 340]]
    asked = [prompts[i] for i in torch.randint(0, len(prompts), (64,), generator=generator).tolist()]
    roles = list(ROLES)
    return [
        Request(prompt=prompt, sample_id=1000 * number + i, role=roles[i % len(roles)])
        for i, prompt in enumerate(asked)
    ]


def rounds(model: HydraModel, tokens: int) -> Iterator[tuple[int, float, float, float]]:
    """Answer tokens of each round, and the largest differences: scoring, scoring of copies, training forward."""
    vocabulary, number, done = model.backbone().vocabulary, 0, 0
    while done < tokens:
        torch.set_num_threads(1 + number % 2)
        asked, temperature = requests(number, vocabulary), TEMPERATURES[number % 3]
        sampling = SamplingConfig(max_completion_length=80, eos_token_ids=(2,), temperature=temperature, seed=number)
        rows = (1, 2, 7, 16, 33, 64)[number % 6]
        if rows < 7:
            asked = asked[:12]
        drawn = generate_requests(model, asked, sampling, options=EngineOptions(max_rows=rows))
        worst = [0.0, 0.0, 0.0]
        for role in ROLES:
            places = [i for i, request in enumerate(asked) if request.role == role]
            batch, truth = drawn.batch.select(places), drawn.logprobs_M[drawn.batch.select_completion_rows(places)]
            for way, shares in enumerate((True, False)):
                model.shares_prompts = shares
                scored = getattr(model.score(batch, (role,), temperature=temperature), FIELDS[role])
                worst[way] = max(worst[way], float((scored - truth).abs().max()))
            model.shares_prompts = True
            worst[2] = max(worst[2], trained(model, batch, role, temperature, truth))
        yield drawn.batch.n_completion_tokens, *worst
        number, done = number + 1, done + drawn.batch.n_completion_tokens


def trained(model: HydraModel, batch: PackedBatch, role: str, temperature: float, truth: torch.Tensor) -> float:
    """Largest difference of a training forward in micro-batches of seven answers."""
    worst = 0.0
    for first in range(0, batch.n_sequences, 7):
        places = list(range(first, min(first + 7, batch.n_sequences)))
        with torch.enable_grad():
            (found,) = model(batch.select(places), (Logprobs(role=role, temperature=temperature),))
        worst = max(worst, float((found.logprob.detach() - truth[batch.select_completion_rows(places)]).abs().max()))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ["stories260k", *MODELS]
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--tokens", type=int, default=60_000, help="answer tokens for each model and dtype")
    parser.add_argument("--isa", choices=SETS, help="instruction set; default: the best of this CPU")
    parser.add_argument("--stories", default="../shared/models/stories260K", help="folder of stories260K")
    parser.add_argument("--json", type=Path, help="file to append records to")
    arguments = parser.parse_args()
    if arguments.isa and not is_held(arguments.isa):
        sys.exit(run_held(arguments.isa, sys.argv[1:], program=[__file__]))
    table = Table(title="largest |log-prob of the rollout − log-prob of …|", title_justify="left")
    for column in ("model", "dtype", "tokens", "scoring", "scoring, copies", "training forward", "seconds"):
        table.add_column(column, justify="right" if column not in ("model", "dtype") else "left")
    differs = False
    with registry.use_exact():
        for name in arguments.models:
            for dtype in arguments.dtypes:
                began, total, worst = time.monotonic(), 0, [0.0] * 3
                model = make(name, DTYPES[dtype], arguments.stories)
                for tokens, *found in rounds(model, arguments.tokens):
                    total += tokens
                    worst = [max(a, b) for a, b in zip(worst, found, strict=True)]
                seconds = time.monotonic() - began
                differs |= any(worst)
                table.add_row(name, dtype, f"{total:,}", *(f"{x:g}" for x in worst), f"{seconds:.0f}")
                record = {
                    "model": name,
                    "dtype": dtype,
                    "tokens": total,
                    "max_abs_difference": dict(zip(("scoring", "scoring_copies", "training"), worst, strict=True)),
                    "seconds": round(seconds, 1),
                }
                append(arguments.json, **record)
                print(
                    json.dumps({key: record[key] for key in ("model", "dtype", "tokens", "max_abs_difference")}),
                    flush=True,
                )
    Console().print(table)
    sys.exit(int(differs))


if __name__ == "__main__":
    main()
