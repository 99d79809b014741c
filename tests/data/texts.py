"""What tests of data share: files of rows, a byte-level tokenizer with a ChatML template."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from rlhf_engine.data import Row, Tally, load_rows
from rlhf_engine.data.read import Record, read_records

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


STORY = [
    "Once upon a time, there was a little girl named Lily.",
    "She was told to go out in the world, and she said: Hello world!",
    "Is Lily a girl? She is.",
    "The sky is blue. The answer is 42, not 123.",
    "A cat and a dog were old friends in the cold wood. Words, words, words.",
] * 5


def family(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer of one of the families, trained on STORY; <s> comes before each text.

    unigram and bpe are SentencePiece's forms, with a space before each text; first: before the first word alone;
    bytes: as GPT-2's; wordpiece: as BERT's.
    """
    special = ["<unk>", "<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if name == "unigram":
        made = Tokenizer(models.Unigram())
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=150, special_tokens=special, unk_token="<unk>", show_progress=False
        )
    elif name == "wordpiece":
        made = Tokenizer(models.WordPiece(unk_token="<unk>"))
        made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        made.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    elif name == "bytes":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    else:
        scheme = "first" if name == "first" else "always"
        made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        made.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        special += [f"<0x{i:02X}>" for i in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=450, special_tokens=special, show_progress=False)
    made.train_from_iterator(STORY, trainer)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


FAMILIES = ("unigram", "bpe", "first", "bytes", "wordpiece")
EACH_FAMILY = [pytest.param(name, marks=[pytest.mark.long] * (name != "bpe")) for name in FAMILIES]


def loss_of_text(plain: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, row: dict[str, str]) -> tuple[float, int]:
    """transformers' −log p of a row's completion and its end in the whole text, summed, and its number of tokens."""
    ids = tokenizer(row["prompt"] + row["completion"])["input_ids"] + [tokenizer.eos_token_id]
    begin = len(tokenizer(row["prompt"])["input_ids"])
    labels = [-100] * begin + ids[begin:]
    with torch.no_grad():
        mean = plain(torch.tensor([ids]), labels=torch.tensor([labels])).loss.item()
    return mean * (len(ids) - begin), len(ids) - begin


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
