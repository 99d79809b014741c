"""`rlhf-engine plan`: table, JSON, a dry run of one step, and requests that cannot be served."""

import json
import re

import pytest
from transformers import LlamaConfig, T5Config

from rlhf_engine.commands.main import main
from rlhf_engine.config import PlanConfig, TrainConfig
from rlhf_engine.config.parser import parse_size
from rlhf_engine.errors import ConfigError
from rlhf_engine.hydra import METHODS
from rlhf_engine.tools.memory import PHASES
from rlhf_engine.training.rl import RlTrainer
from tests.training.test_data import train_config, write_model, write_prompts, write_reward


@pytest.fixture
def folder(tmp_path):
    """A config without weights."""
    LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=100, max_position_embeddings=64,
    ).save_pretrained(tmp_path / "m")  # fmt: skip
    return tmp_path / "m"


SHORT = ("--max_prompt_length", "8", "--max_completion_length", "8", "--batch", "4")


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = main(["plan", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_table(capsys, folder):
    code, out, err = run(capsys, "--model", str(folder), *SHORT, "--gpu", "2MB")
    assert (code, err) == (0, "")
    head, _, rows = out.partition("┡")
    assert all(method in head for method in METHODS)
    assert re.search(r"largest batch in 2MB +│ +\d", rows)
    assert re.search(r"frozen backbones +│ +0\.\d+ ", rows)
    _, out, _ = run(capsys, "--model", str(folder), *SHORT, "--gpu", "1kB", "--method", "hydra_ppo")
    assert re.search(r"largest batch in 1kB +│ +0 ", out)


def test_one_json_object_per_method(capsys, folder):
    code, out, _ = run(capsys, "--model", str(folder), *SHORT, "--gpu", "2MB", "--json")
    assert code == 0
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["method"] for row in rows] == list(METHODS)
    for row in rows:
        assert set(row["peak_bytes"]) == set(PHASES)
        assert (row["max_batch"] > 0) == (row["max_micro_batch"] > 0)
        state = sum(n for part, n in row["state_parts"].items() if part != "gradients")
        assert row["peak_bytes"]["update"] > state > 0
        assert row["budget_bytes"] == 1_900_000
    held = {row["method"]: row["state_parts"]["frozen_weights"] for row in rows}
    assert held["lora_ppo"] > held["dynamic_lora_ppo"] > held["hydra_ppo"] == held["j_hydra_ppo"]
    _, out, _ = run(capsys, "--model", str(folder), *SHORT, "--method", "full_sft", "--json", "--gpu", "2MB")
    assert set(json.loads(out)["peak_bytes"]) == {"update"}


def test_one_name_of_linears_and_no_plan_of_a_base_that_is_trained_in_shares(capsys, folder):
    code, _, err = run(capsys, "--model", str(folder), *SHORT, "--lora_target_modules", "q_proj")
    assert (code, err) == (0, "")
    argv = ("--model", str(folder), *SHORT, "--json", "--processes", "2")
    assert [json.loads(line)["method"] for line in run(capsys, *argv)[1].splitlines()] == list(METHODS)[1:]
    code, _, err = run(capsys, *argv, "--method", "full_ppo")
    assert (code, "method: expected one with a frozen base, with several processes" in err) == (2, True)


def test_processes_share_a_step_and_with_shard_base_the_base(capsys):
    argv = ("--model", "llama-8b", "--dtype", "bfloat16", "--method", "hydra_ppo", "--json")
    found = []
    for more in ((), ("--processes", "2"), ("--processes", "2", "--shard_base")):
        found.append(json.loads(run(capsys, *argv, *more)[1]))
    alone, both, shares = found
    assert both["kv_cache_bytes"] == alone["kv_cache_bytes"] / 2
    assert both["max_batch"] == pytest.approx(2 * alone["max_batch"], rel=0.01)
    assert shares["base_bytes"]["update"] < both["base_bytes"]["update"] < shares["base_bytes"]["generation"]


def test_sizes():
    for text, size in {"80GB": 80 * 10**9, "24 GiB": 24 * 2**30, "1.5gb": 15 * 10**8, "500MiB": 500 * 2**20}.items():
        assert parse_size("gpu", text) == size
    for text in ("80", "GB", "-1GB", "80 bananas", "80GBs", "", "1e3GB"):
        with pytest.raises(ConfigError, match=r"gpu: expected (a size such as 80GB or|something that)"):
            PlanConfig(model_name_or_path="llama-7b", gpu=text)


def test_requests_that_cannot_be_served(capsys):
    for argv, message in [
        (
            ["--model", "lama-7b"],
            "expected a preset, a folder with config.json or owner/name of the Hub, got 'lama-7b'; did you",
        ),
        (["--model", "llama-7b", "--batch", "0"], "generation_batch_size: expected an integer >= 1, got 0"),
        (
            ["--model", "llama-7b", "--num_generations", "5"],
            "size: expected a multiple of num_generations (5)",
        ),
        (
            ["--model", "llama-7b", "--processes", "8", "--batch", "14", "--num_generations", "2"],
            "generation_batch_size: expected at least 16 with 8 processes, a prompt of 2 answers for each, got 14",
        ),
        (["--model", "llama-7b", "--load_in_4bit"], "unknown option --load_in_4bit; quantization 4bit"),
        (["--model", "llama-7b", "--method", "dpo"], "method: expected one of 'all', 'full_ppo'"),
        (["--model", "llama-7b", "--max_prompt_length", "3000"], "the model's context of 2048 tokens, got 3000 + 64"),
        (["--model", "gpt2", "--lora_target_modules", "q_proj"], "target_modules: expected name endings among"),
        ([], "missing required option: --model"),
    ]:
        code, out, err = run(capsys, *argv)
        assert (code, out) == (2, "")
        assert message in err
        assert len(err.splitlines()) == 1


def test_folders_that_are_no_decoder(capsys, tmp_path):
    T5Config(num_layers=1, d_model=8, d_kv=4, d_ff=8, num_heads=2, vocab_size=20).save_pretrained(tmp_path / "t5")
    for place, message in ((tmp_path / "t5", "a decoder-only model"), (tmp_path, "a folder with config.json")):
        code, _, err = run(capsys, "--model", str(place))
        assert code == 2
        assert f"model_name_or_path: expected {message}" in err


def test_a_step_is_measured_and_nothing_is_written(tmp_path, capsys):
    model, prompts = write_model(tmp_path / "model"), write_prompts(tmp_path)
    reward = write_reward(tmp_path, "return [1.0] * len(prompts)")
    before = set(tmp_path.rglob("*"))
    argv = ["--model_name_or_path", str(model), "--dataset_name", str(prompts), "--reward_funcs", reward]
    argv += ["--generation_batch_size", "4", "--max_completion_length", "8", "--max_steps", "1", "--device", "cpu"]
    assert main(["train", *argv, "--output_dir", str(tmp_path / "out"), "--dry_run"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"4 answers of up to \d+ \+ 8 tokens", out[0])
    assert [line.split()[0] for line in out[1:]] == ["generate", "score", "update", "step"]
    assert all(re.search(r" \d+\.\d\d s +\d+\.\d\d GB", line) for line in out[1:])
    assert {path for path in tmp_path.rglob("*") if "__pycache__" not in str(path)} == before


def test_the_longest_prompts_are_answered_at_full_length(tmp_path):
    model = write_model(tmp_path / "model")
    trainer = RlTrainer(train_config(model, tmp_path / "out", dry_run=True, max_steps=2))
    assert [row.prompt for row in trainer.train_set.rows] == trainer.train_set.prompts
    every = RlTrainer(train_config(model, tmp_path / "out", max_steps=1))
    n = trainer.config.prompts_per_step
    lengths = sorted(map(len, every.train_set.ids), reverse=True)
    assert sorted(map(len, trainer.next_prompts().prompts[:: trainer.config.generations]), reverse=True) == lengths[:n]
    with trainer.resources(), trainer.steps():
        trainer.step()
        metrics = trainer.step()
    assert all(map(trainer.optimizer.has_stepped, ("actor", "critic")))
    assert metrics["completions/mean_length"] == trainer.config.max_completion_length
    assert {"peak_memory_bytes/generate", "peak_memory_bytes/score", "peak_memory_bytes/update"} <= set(metrics)
    assert not (tmp_path / "out").exists()


def test_answers_that_are_drawn_elsewhere_have_no_dry_run():
    with pytest.raises(ConfigError, match="dry_run: expected false where answers are drawn elsewhere"):
        TrainConfig(model_name_or_path="m", dataset_name="d", output_dir="o", dry_run=True, async_mode="overlap")
