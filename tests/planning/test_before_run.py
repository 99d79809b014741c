"""Lines before a run's first step: bytes to the last one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlhf_engine.commands.main import main
from rlhf_engine.hydra.kv_cache import BLOCK
from rlhf_engine.planning.before_run import Memory
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
def test_bytes_are_those_that_a_step_leaves(model, tmp_path, kind):
    trainer = make(kind, model, tmp_path / "out", save_steps=1, **({"max_steps": 2} if kind != "sft" else {}))
    found = Memory.of(trainer)
    parameters = sum(p.numel() * p.element_size() for p in trainer.model.parameters())
    assert sum(found.held.values()) == parameters
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    assert found.to_come["gradients"] == sum(p.numel() * p.element_size() for p in trained)
    with pytest.raises(KeyboardInterrupt):
        trainer.run(interrupt)
    state = trainer.optimizer.state_tensors().values()
    assert found.to_come["optimizer state"] == sum(x.numel() * x.element_size() for x in state) > 0
    resumed = make(kind, model, tmp_path / "out", save_steps=1, resume_from_checkpoint="auto")
    after = Memory.of(resumed)
    assert (after.to_come["optimizer state"], after.held["optimizer state"]) == (0, found.to_come["optimizer state"])


def interrupt(step: int, metrics: dict) -> None:
    if step == 2:
        raise KeyboardInterrupt


@pytest.mark.parametrize("changes", [{}, {"algorithm": "grpo"}, {"max_rows": 3}])
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
    assert Memory.of(trainer).to_come["KV cache"] == stats.most_blocks * BLOCK * position


def test_a_cache_with_a_bound_is_not_larger(model, tmp_path):
    free = Memory.of(make("ppo", model, tmp_path / "free"))
    bound = Memory.of(make("ppo", model, tmp_path / "bound", kv_cache_memory="20kB"))
    assert bound.to_come["KV cache"] == 20_000 < free.to_come["KV cache"]


def memory(**changes) -> Memory:
    parts = {
        "held": {"frozen weights": 10**9, "trained weights": 0},
        "to_come": {"gradients": 2 * 10**7, "optimizer state": 4 * 10**7, "KV cache": 3 * 10**9},
        "free": 4 * 10**9,
        "device_type": "cuda",
    }
    return Memory(**{**parts, **changes})


def test_one_line_names_every_part_that_is_there():
    assert memory().line() == (
        "memory: 1 GB frozen weights; the first step adds 20 MB gradients, 40 MB optimizer state, 3 GB KV cache, "
        "activations; 4 GB free"
    )
    assert memory(free=None, device_type="cpu").line().endswith("3 GB KV cache, activations and packed weights")


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({}, None),
        ({"free": None}, None),
        ({"free": 3 * 10**9}, "most is KV cache: bound it by --kv_cache_memory, or lower --generation_batch_size"),
        ({"free": 1, "to_come": {"gradients": 1, "optimizer state": 2, "KV cache": 0}}, "or choose another --optim"),
        ({"free": 1, "to_come": {"gradients": 2, "optimizer state": 1, "KV cache": 0}}, "lower --lora_r"),
    ],
)
def test_what_cannot_fit_is_said_with_the_option_to_lower(changes, option):
    warning = memory(**changes).warning()
    assert bool(warning) == (option is not None)
    assert option is None or option in warning


def test_no_cache_where_answers_are_drawn_beside_the_updates(model, tmp_path):
    assert Memory.of(make("ppo", model, tmp_path / "out", async_mode="replay")).to_come["KV cache"] == 0


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
        assert len(re.findall(r"^memory: .*; .* free$", err, re.MULTILINE)) == 1
        assert err.index("memory: ") < err.index(" 1/")
    assert main([*sft, str(tmp_path / "sft"), "--resume_from_checkpoint", "auto"]) == 0
    assert "memory: " not in capsys.readouterr().err  # nothing is left to do
