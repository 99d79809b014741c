"""What tests of data share: files of rows, a byte-level tokenizer with a ChatML template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf_engine.data import Record, Row, Tally, load_rows, read_records

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """One token per byte; <|im_end|> ends an answer, as in Qwen's tokenizers, where a line feed follows it."""
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = template
    return fast


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def write_lines(path: Path, *rows: Any) -> Path:
    path.write_bytes(b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows))
    return path


def read(path: Path | str) -> list[Record]:
    return list(read_records(path))


def load(path: Path | str, max_bad_rows: float = 0.0, **options: Any) -> tuple[list[Row], Tally]:
    tally = Tally(source=str(path), max_bad_rows=max_bad_rows)
    return load_rows(path, tally, **options), tally
