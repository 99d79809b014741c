"""Shared parts of the examples of this folder: a tiny model that has seen how tools are called, and a run of `train`.

Its words are bytes, and a token for each phrase that an example names. It learns demonstrations in seconds on a CPU.
"""

from __future__ import annotations

import inspect
import json
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t.function.name }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    '{% for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>")


def call(tool: str, **arguments: Any) -> dict[str, Any]:
    """A turn that calls a tool."""
    function = {"name": tool, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def make_tokenizer(tools: Iterable[Callable[..., Any]], phrases: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """One token per byte, and one for each phrase, also for those around the arguments of calls."""
    known = ["system\n", "user\n", "assistant\n", "tool\n", "}}</tool_call>", *phrases]
    for tool in tools:
        head = f'<tool_call>{{"name": "{tool.__name__}", "arguments": {{'
        names = [name for name in inspect.signature(tool).parameters if name != "self"]
        known += [tool.__name__, f'{head}"{names[0]}": ', *(f', "{name}": ' for name in names[1:])]
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in dict.fromkeys(known)])
    options = {"eos_token": SPECIAL[1], "pad_token": SPECIAL[1], "model_input_names": ["input_ids", "attention_mask"]}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **options)


def make_model(
    folder: Path,
    demonstration: Callable[[random.Random], list[dict[str, Any]]],
    tools: Sequence[Callable[..., Any]],
    phrases: Sequence[str] = (),
    *,
    steps: int = 500,
    seed: int = 0,
) -> Path:
    """Write a model of 150,000 weights that has learned from demonstrations, and its tokenizer."""
    tokenizer, chance = make_tokenizer(tools, phrases), random.Random(seed)
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **ends, vocab_size=len(tokenizer), max_position_embeddings=256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    answers = tokenizer.convert_tokens_to_ids("assistant\n")
    schemas = [{"type": "function", "function": {"name": tool.__name__}} for tool in tools]
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - step / steps)
        talks = [demonstration(chance) for _ in range(32)]
        texts = [tokenizer.apply_chat_template(talk, tools=schemas, tokenize=False) for talk in talks]
        rows = tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False)
        asked = (rows["input_ids"] == answers).cumsum(1) == 0  # all before the first answer
        labels = rows["input_ids"].masked_fill(asked | (rows["attention_mask"] == 0), -100)
        model(**rows, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train(folder: Path, environment: str, rows: Iterable[dict[str, Any]], **options: Any) -> int:
    """Train `folder/model` with an environment: `rlhf-engine train`, with options that suit it unless others are given.

    environment: path/file.py:class. rows: the data, with a prompt each.
    """
    from rlhf_engine.commands.main import main

    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    options = {
        "model_name_or_path": folder / "model",
        "dataset_name": data,
        "environment": environment,
        "output_dir": folder / "run",
        "algorithm": "grpo",
        "method": "full_ppo",  # all weights, which are as few as those of adapters
        "num_generations": 8,
        "generation_batch_size": 128,
        "max_completion_length": 64,
        "max_turns": 3,
        "max_steps": 20,
        "learning_rate": 5e-4,
        "beta": 0.01,
        "resume_from_checkpoint": "restart",
        **options,
    }
    return main(["train", *(part for name, value in options.items() for part in (f"--{name}", str(value)))])


def folder_of(script: str) -> Path:
    """The folder of a script's files: its argument, or one in runs/ of its name."""
    return Path(sys.argv[1] if len(sys.argv) > 1 else f"runs/{Path(script).stem}")
