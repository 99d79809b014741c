"""Rows from files, their order, and the tiny model, tokenizer and data folders that tests of training share."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_engine.config import PPOConfig, SFTConfig
from rlhf_engine.demo_task import build_tokenizer
from rlhf_engine.errors import ConfigError
from rlhf_engine.training.data import batch_indices, epoch_order, read_rows

WORDS = ["red", "blue", "cat", "dog", "sun", "moon", "star", "sea", "runs", "sings", "and", "the", "a", "one", "two"]
PROMPTS = [f"{a} {b}" for a in ("red", "blue", "the", "a one") for b in ("cat", "dog runs", "moon and star")]

# ---- what other tests of training use --------------------------------------------------------------------------------


def write_model(folder: Path, *, seed: int = 0, reward_head: bool = True, **options: Any) -> Path:
    """A two-layer random Llama, a word-level tokenizer, and a reward head that counts as trained."""
    tokenizer = build_tokenizer([" ".join(WORDS)])
    torch.manual_seed(seed)
    config = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": False,
    }
    LlamaForCausalLM(LlamaConfig(**{**config, **options})).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if reward_head:
        head = {"reward.weight": torch.randn(1, 24), "reward.bias": torch.randn(1)}
        save_file(head, folder / "heads.safetensors")
    return folder


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_prompts(folder: Path) -> Path:
    return write_rows(folder / "prompts.jsonl", [{"prompt": p, "place": i} for i, p in enumerate(PROMPTS)])


def write_pairs(folder: Path) -> Path:
    rows = [{"prompt": p, "chosen": f"{p} sings the sun", "rejected": "sea sea"} for p in PROMPTS]
    return write_rows(folder / "pairs.jsonl", rows)


def write_reward(folder: Path, body: str, name: str = "reward") -> str:
    """A reward function in a file of its own; body: its lines. Returns what reward_funcs takes."""
    text = f"calls = []\n\n\ndef {name}(prompts, completions, completion_ids, **columns):\n    calls.append(1)\n"
    path = folder / f"{name}.py"
    path.write_text(text + textwrap.indent(textwrap.dedent(body).strip(), "    ") + "\n")
    return f"{path}:{name}"


def ppo_config(model: Path, output: Path, **changes: Any) -> PPOConfig:
    """A run of a few fast steps on prompts beside the output folder."""
    output.parent.mkdir(parents=True, exist_ok=True)
    options = {
        "model_name_or_path": str(model),
        "output_dir": str(output),
        "dataset_name": str(write_prompts(output.parent)),
        "lora_r": 4,
        "lora_alpha": 8.0,
        "max_completion_length": 8,
        "generation_batch_size": 8,
        "num_mini_batches": 2,
        "num_ppo_epochs": 1,
        "per_device_train_batch_size": 3,
        "learning_rate": 1e-2,
        "max_steps": 4,
        "save_steps": 0,
        "num_samples": 0,
        "device": "cpu",
    }
    return PPOConfig(**{**options, **changes})


def sft_config(model: Path, output: Path, **changes: Any) -> SFTConfig:
    """A run of a few fast steps on pairs beside the output folder."""
    output.parent.mkdir(parents=True, exist_ok=True)
    options = {
        "model_name_or_path": str(model),
        "output_dir": str(output),
        "dataset_name": str(write_pairs(output.parent)),
        "mode": "full",
        "gamma": 0.5,
        "lora_r": 4,
        "lora_alpha": 8.0,
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "device": "cpu",
    }
    return SFTConfig(**{**options, **changes})


# ---- tests -----------------------------------------------------------------------------------------------------------


def test_jsonl_json_limit_and_blank_lines(tmp_path):
    rows = [{"prompt": "x", "n": 1}, {"prompt": "y", "n": 2}]
    lines = tmp_path / "a.jsonl"
    lines.write_text("\n".join(["", json.dumps(rows[0]), "  ", json.dumps(rows[1])]))
    whole = tmp_path / "a.json"
    whole.write_text(json.dumps(rows))
    assert read_rows(lines, ("prompt",)) == read_rows(whole, ("prompt",)) == rows
    assert read_rows(lines, ("prompt",), limit=1) == rows[:1]


def test_only_line_feeds_end_a_line(tmp_path):
    # JSON allows these inside of strings; str.splitlines would cut the row in two
    text = "one\u2028two\u2029three\x85four"
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": text}, ensure_ascii=False) + "\r\n", encoding="utf-8", newline="")
    assert read_rows(path, ("prompt",)) == [{"prompt": text}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"prompt": "x"}\n\n{"prompt": \n', r"a\.jsonl:3: expected a JSON object, got "),
        ("a.jsonl", '{"prompt": "x"}\n["y"]\n', r"a\.jsonl:2: expected a JSON object, got list"),
        ("a.jsonl", '{"prompt": "x"}\n{"text": "y"}\n', r"a\.jsonl:2: expected a string in column 'prompt', got None"),
        ("a.jsonl", '{"prompt": 7}\n', r"a\.jsonl:1: expected a string in column 'prompt', got 7"),
        ("a.jsonl", '{"prompt": " \\n"}\n', r"a\.jsonl:1: expected text in column 'prompt', got an empty prompt"),
        ("a.jsonl", "\n", r"dataset_name: expected at least one row in .*a\.jsonl', got none"),
        ("a.json", '{"prompt": "x"}', r"a\.json: expected a list of objects, got dict"),
        ("a.json", '[{"prompt": "x"}, {}]', r"a\.json: row 1: expected a string in column 'prompt', got None"),
        ("a.json", "[", r"a\.json: expected JSON in UTF-8, got"),
        ("a.jsonl", b"\xff\xfe\x00", r"a\.jsonl: expected JSON in UTF-8, got"),
    ],
)
def test_bad_files_name_file_and_line(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=message):
        read_rows(path, ("prompt",))


def test_a_missing_file_names_the_argument(tmp_path):
    with pytest.raises(ConfigError, match=r"^eval_dataset_name: expected a \.json or \.jsonl file, got .*not a file"):
        read_rows(tmp_path / "none.jsonl", ("prompt",), argument="eval_dataset_name")
    with pytest.raises(ConfigError, match=r"^dataset_name: expected"):
        read_rows(tmp_path, ("prompt",))


def test_order_is_a_function_of_seed_and_epoch():
    assert sorted(epoch_order(9, 0, 0)) == list(range(9))
    assert epoch_order(9, 0, 0) == epoch_order(9, 0, 0)
    assert len({tuple(epoch_order(9, seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


@pytest.mark.parametrize(("n", "size"), [(5, 3), (5, 5), (3, 7), (1, 2)])
def test_batches_walk_through_whole_epochs(n, size):
    walked = [i for step in range(2 * n) for i in batch_indices(n, size, step, seed=4)]
    epochs = [walked[k * n : (k + 1) * n] for k in range(2 * size)]
    assert epochs == [epoch_order(n, 4, k) for k in range(2 * size)]
