"""What the trainers make of their data; the tiny model, tokenizer and data folders that tests of training share."""

import gzip
import json
import shutil
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_engine.commands.demo_task import build_tokenizer
from rlhf_engine.config import EvaluateConfig, GenerateConfig, RewardConfig, SFTConfig, TrainConfig
from rlhf_engine.data.tokenize import load_tokenizer
from rlhf_engine.errors import ConfigError
from rlhf_engine.rollout.answer import AnswerSession
from rlhf_engine.tools.evaluate import Evaluation
from rlhf_engine.training.reward_model import RewardTrainer
from rlhf_engine.training.rl import RlTrainer
from rlhf_engine.training.sft import SftTrainer

WORDS = ["red", "blue", "cat", "dog", "sun", "moon", "star", "sea", "runs", "sings", "and", "the", "a", "one", "two"]
MEASURED = ("seconds/step", "tokens_per_second", "samples_per_second", "peak_memory_bytes")
"""Metrics of a supervised step that are not floats of the training."""
PROMPTS = [f"{a} {b}" for a in ("red", "blue", "the", "a one") for b in ("cat", "dog runs", "moon and star")]


def write_model(folder: Path, *, seed: int = 0, reward_head: bool = True, **options: Any) -> Path:
    """A two-layer random Llama, a word-level tokenizer, and a reward head that counts as trained."""
    tokenizer = build_tokenizer([" ".join(WORDS)])
    torch.manual_seed(seed)
    config = {
        "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": len(tokenizer), "max_position_embeddings": 64,
        "initializer_range": 0.2, "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id, "tie_word_embeddings": False,
    }  # fmt: skip
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


def train_config(model: Path, output: Path, **changes: Any) -> TrainConfig:
    """A run of a few fast steps on prompts beside the output folder."""
    output.parent.mkdir(parents=True, exist_ok=True)
    options = {
        "model_name_or_path": str(model), "output_dir": str(output),
        "dataset_name": str(write_prompts(output.parent)), "lora_r": 4, "lora_alpha": 8.0, "max_completion_length": 8,
        "generation_batch_size": 8, "num_mini_batches": 2, "num_ppo_epochs": 1, "per_device_train_batch_size": 3,
        "learning_rate": 1e-2, "max_steps": 4, "save_steps": 0, "device": "cpu",
    }  # fmt: skip
    return TrainConfig(**{**options, **changes})


def sft_config(model: Path, output: Path, **changes: Any) -> SFTConfig:
    """A run of a few fast steps on pairs beside the output folder."""
    output.parent.mkdir(parents=True, exist_ok=True)
    options = {
        "model_name_or_path": str(model), "output_dir": str(output), "dataset_name": str(write_pairs(output.parent)),
        "mode": "full", "gamma": 0.5, "max_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-2,
        "device": "cpu",
    }  # fmt: skip
    lora = {"lora_r": 4, "lora_alpha": 8.0} if changes.get("mode") == "lora" else {}
    return SFTConfig(**{**options, **lora, **changes})


TEMPLATE = "{% for m in messages %}{{ m.content }} <eos> {% endfor %}{% if add_generation_prompt %}and {% endif %}"
TALKS = [
    {
        "prompt": [{"role": "user", "content": prompt}],
        "chosen": [{"role": "assistant", "content": "and sings"}],
        "rejected": [{"role": "assistant", "content": "and sea sea"}],
    }
    for prompt in PROMPTS
]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A base whose tokenizer has a chat template: an answer begins with `and`."""
    folder = write_model(tmp_path_factory.mktemp("base"))
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def words(trainer: SftTrainer | RlTrainer, ids: list[int]) -> str:
    return " ".join(trainer.tokenizer.convert_ids_to_tokens(ids))


def test_sft_learns_from_conversations(base, tmp_path):
    data = write_rows(tmp_path / "talks.jsonl", TALKS)
    trainer = SftTrainer(sft_config(base, tmp_path / "out", dataset_name=str(data)))
    first = trainer.rows[0]
    assert words(trainer, first.prompt) == "red cat <eos> and"
    assert (words(trainer, first.answers[0]), words(trainer, first.answers[1])) == ("sings <eos>", "sea sea <eos>")
    assert set(trainer.run()) >= {"lm_loss", "reward_loss"}


def test_every_command_gives_conversations_a_system_prompt_and_the_template_its_arguments(base, tmp_path):
    folder = shutil.copytree(base, tmp_path / "base")
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = "{% if tools %}star {% endif %}{% if one %}one {% endif %}" + TEMPLATE
    tokenizer.save_pretrained(folder)
    data = str(write_rows(tmp_path / "talks.jsonl", [{**row, "tools": [{"name": "x"}]} for row in TALKS]))
    said = {"system_prompt": "the sea", "chat_template_kwargs": {"one": True}, "dataset_name": data}
    common = {"model_name_or_path": str(folder), "max_completion_length": 4, "device": "cpu"}
    evaluated = Evaluation(EvaluateConfig(**common, **said, models=[], output_dir=str(tmp_path / "e")))
    reward = RewardConfig(model_name_or_path=str(folder), output_dir=str(tmp_path / "r"), mode="lora", **said)
    prompts = [
        SftTrainer(sft_config(folder, tmp_path / "s", **said)).rows[0].prompt,
        list(RewardTrainer(reward).rows[0].prompt),
        RlTrainer(train_config(folder, tmp_path / "t", **said)).train_set.ids[0],
        evaluated.prompts.ids[0],
        list(AnswerSession(GenerateConfig(**common, **said))._requests[0].prompt),
    ]
    for ids in prompts:
        assert " ".join(tokenizer.convert_ids_to_tokens(ids)) == "star one the sea <eos> red cat <eos> and"
    with pytest.raises(ConfigError, match=r"dataset_name: expected conversations for system_prompt and chat_templ"):
        GenerateConfig(**common, prompt=["red"], system_prompt="the sea")
    few = {**said, "dataset_name": f"{said['dataset_name']}[:3]"}
    assert len(SftTrainer(sft_config(folder, tmp_path / "s", **few)).rows) == 3


def test_every_format_trains_the_same(base, tmp_path):
    datasets = pytest.importorskip("datasets")  # other files import this one where it may be missing
    plain = sft_config(base, tmp_path / "plain")
    text = Path(plain.dataset_name).read_bytes()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "pairs.jsonl.gz").write_bytes(gzip.compress(text))
    expected = SftTrainer(plain).run()
    rows = datasets.Dataset.from_list([json.loads(line) for line in text.splitlines()])
    rows.to_parquet(str(tmp_path / "pairs.parquet"))
    for source in (tmp_path / "folder", tmp_path / "pairs.parquet"):
        found = SftTrainer(sft_config(base, tmp_path / f"from_{source.name}", dataset_name=str(source))).run()
        assert {k: found[k] for k in found if k not in MEASURED} == {k: expected[k] for k in found if k not in MEASURED}


def test_sft_leaves_out_what_it_may_and_says_so(base, tmp_path):
    rows = [{"prompt": p, "completion": "sings the sun"} for p in PROMPTS]
    rows[2]["completion"] = ""
    rows[5]["prompt"] = "red " * 70
    data = str(write_rows(tmp_path / "rows.jsonl", rows))
    with pytest.raises(ConfigError, match=r"^.*rows\.jsonl:3: expected text in column 'completion', got an empty comp"):
        SftTrainer(sft_config(base, tmp_path / "out", dataset_name=data))
    with pytest.raises(ConfigError, match=r"^.*rows\.jsonl:3: .* 2 of 12 rows cannot be used, where max_bad_rows is 1"):
        SftTrainer(sft_config(base, tmp_path / "out", dataset_name=data, max_bad_rows=1))
    for options, used, dropped, truncated in (
        ({"max_bad_rows": 2}, 10, 0, 0),
        ({"max_bad_rows": 0.1, "truncation": "drop"}, 10, 1, 0),
        ({"max_bad_rows": 0.1, "truncation": "keep_end"}, 11, 0, 1),
    ):
        trainer = SftTrainer(sft_config(base, tmp_path / "out", dataset_name=data, **options))
        (report,) = trainer.reports.values()
        assert len(trainer.rows) == report.used == used
        assert (report.read, report.dropped, report.truncated) == (12, dropped, truncated)
    assert len(trainer.rows[4].prompt) == 64 - 4  # the context, less the answer and its end


def test_rl_takes_conversations_and_reward_functions_get_their_messages(base, tmp_path):
    rows = [{"prompt": talk["prompt"], "place": i} for i, talk in enumerate(TALKS)]
    body = """
        assert all(p[-1]["role"] == "user" for p in prompts), prompts
        assert all([m["role"] for m in c] == ["assistant"] for c in completions), completions
        from tests.training.test_data import TALKS
        assert all(TALKS[i]["prompt"] == p for i, p in zip(columns["place"], prompts, strict=True))
        return [1.0] * len(prompts)
    """
    data = write_rows(tmp_path / "talks.jsonl", rows)
    reward = write_reward(tmp_path, body)
    config = train_config(base, tmp_path / "run", dataset_name=str(data), reward_funcs=[reward], max_steps=1)
    trainer = RlTrainer(config)
    assert words(trainer, trainer.train_set.ids[0]) == "red cat <eos> and"
    trainer.run()


def test_rl_cuts_prompts_and_writes_down_what_it_left_out(base, tmp_path):
    data = write_rows(tmp_path / "p.jsonl", [{"prompt": "red cat"}, {"prompt": 3}, {"prompt": "sun moon " * 40}])
    common = {"dataset_name": str(data), "max_bad_rows": 1, "max_prompt_length": 10, "max_steps": 1}
    trainer = RlTrainer(train_config(base, tmp_path / "run", truncation="keep_end", **common))
    assert [len(ids) for ids in trainer.train_set.ids] == [3, 10]
    assert words(trainer, trainer.train_set.ids[1]) == "<bos> " + "moon sun " * 4 + "moon"
    trainer.run()
    record = json.loads((tmp_path / "run" / "run.json").read_text())["data"]["dataset_name"]
    assert (record["read"], record["used"], record["truncated"], record["dropped"]) == (3, 2, 1, 0)
    assert record["bad"][0]["places"] == [f"{data}:2"]
    dropping = RlTrainer(train_config(base, tmp_path / "other", truncation="drop", **common))
    assert len(dropping.train_set.rows) == 1
    with pytest.raises(ConfigError, match=r"2 of 3 rows cannot be used, .*; expected at most 10 tokens \(max_prompt_l"):
        RlTrainer(train_config(base, tmp_path / "third", **common))


def test_options_of_data_that_mean_nothing(base, tmp_path):
    for make, options, message in (
        (train_config, {"truncation": "keep_start"}, "truncation: expected error, drop or keep_end for prompts"),
        (sft_config, {"max_bad_rows": 1.5}, "max_bad_rows: expected a share below 1 or a whole number of rows, got 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            make(base, tmp_path / "run", **options)
