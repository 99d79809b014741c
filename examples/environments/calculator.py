#!/usr/bin/env python
"""A tiny model learns to call a calculator: `python examples/environments/calculator.py [FOLDER]`, in about a minute.

It makes a model of 150,000 weights that has seen how a call is written, and calls at half of the questions. Then it
trains the model by GRPO with an environment, whose reward is 1 for the right product. The model cannot multiply, so the
reward climbs as it learns to call. Files and curves are in FOLDER, by default runs/calculator.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools[0].function.name }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    '{% for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>")
PHRASES = (
    *("system\n", "user\n", "assistant\n", "tool\n", "multiply"),
    *('<tool_call>{"name": "multiply", "arguments": {"a": ', ', "b": ', "}}</tool_call>"),
)


class Calculator:
    """An environment in TRL's protocol: one question, one tool, a reward of 1 for the right answer."""

    def __init__(self) -> None:
        self.asked, self.result = "", None

    def reset(self, prompt: list[dict], **row) -> None:
        """Begin with a row of the data."""
        self.asked, self.result = prompt[-1]["content"], None

    def multiply(self, a: int, b: int) -> int:
        """Multiplies two numbers.

        Args:
            a: The first number.
            b: The second number.

        Returns:
            Their product.
        """
        self.result = a * b
        return self.result

    def get_reward(self) -> float:
        """1 where the product of the question was computed."""
        a, b = self.asked.split("*")
        return float(self.result == int(a) * int(b))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and one for each phrase of the template."""
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in PHRASES])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    return fast


def demonstration(chance: random.Random, calls: float) -> list[dict]:
    """A conversation: a call and its result, or a guess."""
    a, b = chance.randrange(2, 10), chance.randrange(2, 10)
    asked = {"role": "user", "content": f"{a}*{b}"}
    if chance.random() >= calls:
        return [asked, {"role": "assistant", "content": str(chance.randrange(100, 1000))}]
    call = {"type": "function", "function": {"name": "multiply", "arguments": {"a": a, "b": b}}}
    result = {"role": "tool", "name": "multiply", "content": str(a * b)}
    last = {"role": "assistant", "content": str(a * b)}
    return [asked, {"role": "assistant", "content": "", "tool_calls": [call]}, result, last]


def make_model(folder: Path, *, steps: int = 500, calls: float = 0.5, seed: int = 0) -> Path:
    """Write a model that calls the calculator at about a share of the questions, and its tokenizer."""
    tokenizer, chance = make_tokenizer(), random.Random(seed)
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        **sizes,
        vocab_size=len(tokenizer),
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schema = [{"type": "function", "function": {"name": "multiply"}}]
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 - step / steps)
        talks = [demonstration(chance, calls) for _ in range(32)]
        texts = [tokenizer.apply_chat_template(talk, tools=schema, tokenize=False) for talk in talks]
        rows = tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False)
        labels = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)
        model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"], labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_questions(path: Path, n: int = 64, seed: int = 1) -> Path:
    """Rows with a question each."""
    chance = random.Random(seed)
    questions = [f"{chance.randrange(2, 10)}*{chance.randrange(2, 10)}" for _ in range(n)]
    rows = [{"prompt": [{"role": "user", "content": question}]} for question in questions]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def main(folder: Path) -> int:
    """Make the model, and train it."""
    from rlhf_engine.commands.main import main as rlhf_engine

    model = make_model(folder / "model")
    options = {
        "model_name_or_path": model,
        "dataset_name": write_questions(folder / "questions.jsonl"),
        "environment": f"{Path(__file__).resolve()}:Calculator",
        "output_dir": folder / "run",
        "algorithm": "grpo",
        "num_generations": 8,
        "generation_batch_size": 64,
        "max_completion_length": 40,
        "max_turns": 3,
        "max_steps": 30,
        "learning_rate": 5e-4,
        "beta": 0.01,
        "resume_from_checkpoint": "restart",
    }
    return rlhf_engine(["train", *(part for name, value in options.items() for part in (f"--{name}", str(value)))])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/calculator")))
