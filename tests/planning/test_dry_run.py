"""`train --dry_run`: a real step with the longest prompts and answers, its memory by phase, and nothing on disk."""

import re

import pytest

from rlhf_engine.commands.main import main
from rlhf_engine.config import TrainConfig
from rlhf_engine.errors import ConfigError
from rlhf_engine.training.rl import RlTrainer
from tests.training.test_data import train_config, write_model, write_prompts, write_reward


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
    trainer = RlTrainer(train_config(model, tmp_path / "out", dry_run=True, max_steps=1))
    every = RlTrainer(train_config(model, tmp_path / "out", max_steps=1))
    n = trainer.config.prompts_per_step
    lengths = sorted(map(len, every.train_set.ids), reverse=True)
    assert sorted(map(len, trainer.next_prompts().prompts[:: trainer.config.generations]), reverse=True) == lengths[:n]
    with trainer.resources(), trainer.steps():
        trainer.step()
        metrics = trainer.step()
    assert metrics["completions/mean_length"] == trainer.config.max_completion_length
    assert {"peak_memory_bytes/generate", "peak_memory_bytes/score", "peak_memory_bytes/update"} <= set(metrics)
    assert not (tmp_path / "out").exists()


def test_answers_that_are_drawn_elsewhere_have_no_dry_run():
    with pytest.raises(ConfigError, match="dry_run: expected false where answers are drawn elsewhere"):
        TrainConfig(model_name_or_path="m", dataset_name="d", output_dir="o", dry_run=True, async_mode="overlap")
