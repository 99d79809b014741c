"""Lines before a run's first step: bytes to the last one."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from rlhf_engine.commands.main import main
from rlhf_engine.hydra.kv_cache import BLOCK
from rlhf_engine.planning.before_run import Memory, memory_of
from rlhf_engine.planning.formula import PHASES
from rlhf_engine.rollout import SamplingConfig
from rlhf_engine.training.reward_model.trainer import RewardTrainer
from rlhf_engine.training.rl import RlTrainer
from rlhf_engine.training.run import Run
from rlhf_engine.training.sft import SftTrainer
from tests.training.test_data import sft_config, train_config, write_model, write_pairs, write_prompts, write_reward
from tests.training.test_reward import reward_config

RUNS = {
    "ppo": {},
    "full": {"method": "full_ppo"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def make(kind: str, model: Path, output: Path, **changes) -> Run:
    if kind == "sft":
        return SftTrainer(sft_config(model, output, **changes))
    if kind == "reward":
        return RewardTrainer(reward_config(model, output, **changes))
    return RlTrainer(train_config(model, output, **RUNS[kind], **changes))


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ppo", "full", "sft", "reward"])
def test_what_is_held_is_what_lies_in_memory(model, tmp_path, kind):
    trainer = make(kind, model, tmp_path / "out", save_steps=1, **({"max_steps": 2} if kind != "sft" else {}))
    before = memory_of(trainer)
    parameters = sum(p.numel() * p.element_size() for p in trainer.model.parameters())
    assert before.held == parameters
    assert set(before.peaks) == ({"update"} if kind in ("sft", "reward") else set(PHASES))
    with pytest.raises(KeyboardInterrupt):
        trainer.run(interrupt)
    state = sum(x.numel() * x.element_size() for x in trainer.optimizer.state_tensors().values())
    resumed = make(kind, model, tmp_path / "out", save_steps=1, resume_from_checkpoint="auto")
    assert memory_of(resumed).held == parameters + state > parameters


def interrupt(step: int, metrics: dict) -> None:
    if step == 2:
        raise KeyboardInterrupt


@pytest.mark.parametrize("changes", [{}, {"algorithm": "grpo"}])
def test_the_cache_is_the_one_that_is_drawn_with(tmp_path, changes):
    """Prompts of 40 tokens share a block where several answers are drawn to one."""
    long = write_model(tmp_path / "model", max_position_embeddings=256)
    trainer = RlTrainer(train_config(long, tmp_path / "out", max_completion_length=40, **changes))
    prompts = trainer.next_prompts().prompts
    longer = {prompt: (prompt * 40)[:40] for prompt in prompts}
    trainer.train_set.ids[:] = [list((tuple(ids) * 40)[:40]) for ids in trainer.train_set.ids]
    sampling = SamplingConfig(max_completion_length=40, eos_token_ids=())
    stats = trainer.rollouts.generate([longer[prompt] for prompt in prompts], sampling).stats
    position = trainer.model.role_backbone("actor").cache_bytes_per_position
    peaks = memory_of(trainer).peaks
    trainer.config = dataclasses.replace(trainer.config, kv_cache_memory="1kB")
    bound = memory_of(trainer).peaks
    assert peaks["generation"] - bound["generation"] == stats.most_blocks * BLOCK * position - 1000


def test_lines_name_what_is_there_and_what_does_not_fit():
    peaks = {"generation": 3 * 10**9, "inference": 10**9, "update": 2 * 10**9}
    (line,) = Memory(held=10**9, peaks=peaks, free=2 * 10**9).lines()
    assert line == (
        "memory: 1 GB held; at its peak about 3 GB while answers are drawn, 1 GB while they are scored, 2 GB in the "
        "update; 2 GB free"
    )
    assert len([*Memory(held=10**9, peaks=peaks, free=None).lines()]) == 1
    for phase, option in {"generation": "--kv_cache_memory", "update": "--gradient_checkpointing"}.items():
        _, warning = Memory(held=0, peaks={**peaks, phase: 5 * 10**9}, free=4 * 10**9).lines()
        assert warning.startswith("warning: about 5 GB more are needed")
        assert option in warning


def test_no_generation_where_answers_are_drawn_beside_the_updates(model, tmp_path):
    assert set(memory_of(make("ppo", model, tmp_path / "out", async_mode="replay")).peaks) == {"inference", "update"}


def test_commands_say_it_once_and_on_standard_error(model, tmp_path, capsys):
    pairs, prompts = write_pairs(tmp_path), write_prompts(tmp_path)
    reward = write_reward(tmp_path, "return [1.0] * len(prompts)")
    common = ["--model_name_or_path", str(model), "--device", "cpu", "--save_steps", "1"]
    sft = ["sft", *common, "--dataset_name", str(pairs), "--max_steps", "3", "--full", "--output_dir"]
    train = ["train", *common, "--dataset_name", str(prompts), "--reward_funcs", reward, "--max_steps", "2"]
    train += ["--generation_batch_size", "4", "--max_completion_length", "8", "--output_dir"]
    for command in (sft, train):
        assert main([*command, str(tmp_path / command[0])]) == 0
        out, err = capsys.readouterr()
        assert "memory: " not in out
        assert len(re.findall(r"^memory: .* held; .* free$", err, re.MULTILINE)) == 1
        assert err.index("memory: ") < err.index(" 1/")
    assert main([*sft, str(tmp_path / "sft"), "--resume_from_checkpoint", "auto"]) == 0
    assert "memory: " not in capsys.readouterr().err  # nothing is left to do
