"""A tiny Qwen3 that calls tools, with Qwen3's chat template: what tests of tools and environments behind TRL share.

What it says next depends mostly on its last token, so that answers are tool calls, good and bad ones, or plain words.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import get_json_schema
from trl.chat_template_utils import qwen3_chat_template

CALL, END = '<tool_call>\n{"name": "', "}\n</tool_call>"
FIRST, SECOND, BROKEN = '", "arguments": {"a": ', ', "b": ', '", "arguments": [oops'
NAMES = ("multiply", "add", "divide")  # nobody has a tool `divide`
FIRST_NUMBERS, SECOND_NUMBERS = [f"{n}" for n in range(3, 9)], [f"1{n}" for n in range(4)]
NEXT = {
    "\n": {CALL: 12.5, "done": 11.0},
    CALL: {name: 12.0 for name in NAMES},
    **{name: {FIRST: 12.5, BROKEN: 11.0} for name in NAMES},
    FIRST: {n: 12.0 for n in FIRST_NUMBERS},
    **{n: {SECOND: 12.0} for n in FIRST_NUMBERS},
    SECOND: {n: 12.0 for n in SECOND_NUMBERS},
    **{n: {"}" + END: 12.0} for n in SECOND_NUMBERS},
    BROKEN: {"}" + END: 12.0},
    "}" + END: {"<|im_end|>": 13.0, "\n": 10.5},
    "done": {"<|im_end|>": 12.0, "done": 11.0},
}
"""Logits of what follows a piece."""
PIECES = [CALL, FIRST, SECOND, BROKEN, "}" + END, "done", *NAMES, *FIRST_NUMBERS, *SECOND_NUMBERS]
QUESTIONS = ["What is 3 times 11?", "Add 4 to 12.", "Which one is more?", "Say that you are done."]


def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product.
    """
    return a * b


def add(a: int, b: int) -> int:
    """
    Adds two integers, but never 13.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The sum.
    """
    if b == 13:
        raise ValueError("13 brings bad luck")
    return a + b


class Counter:
    """An environment that counts what is multiplied."""

    def reset(self, **row):
        self.calls, self.row = 0, row
        return " Use the counter."

    def multiply(self, a: int, b: int) -> str:
        """
        Multiplies two integers, and counts.

        Args:
            a: The first integer.
            b: The second integer.

        Returns:
            The product and the count.
        """
        self.calls += 1
        return f"{a * b} of {self.calls}"

    def get_reward(self) -> float:
        return float(self.calls)


class Adder:
    """An environment without a reward."""

    def reset(self, **row):
        self.calls = 0

    def add(self, a: int, b: int) -> int:
        """
        Adds two integers.

        Args:
            a: The first integer.
            b: The second integer.

        Returns:
            The sum.
        """
        self.calls += 1
        return a + b


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level pairs that are trained on what the template writes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special, initial_alphabet=alphabet)
    schemas = [json.dumps(get_json_schema(tool)) for tool in (multiply, add)]
    tokenizer.train_from_iterator([qwen3_chat_template, *QUESTIONS, *schemas * 4], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.add_tokens([AddedToken(piece, normalized=False) for piece in PIECES])
    fast.chat_template = qwen3_chat_template
    return fast


def write_caller(folder: Path) -> Path:
    """The model with a reward head, and its tokenizer."""
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    ))  # fmt: skip
    embeddings = torch.nn.functional.normalize(torch.randn(len(tokenizer), 128), dim=1)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(embeddings)
        for piece, following in NEXT.items():
            for then, logit in following.items():
                (before,), (after,) = tokenizer.encode(piece), tokenizer.encode(then)
                model.lm_head.weight[after] += logit / 128**0.5 * embeddings[before]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_file({"reward.weight": torch.randn(1, 128), "reward.bias": torch.zeros(1)}, folder / "heads.safetensors")
    return folder
