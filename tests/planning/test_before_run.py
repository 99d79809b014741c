"""Lines before a run's first step: bytes to the last one, a trial that changes nothing, seconds near the clock's."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch
from rlhf_kernels.runtime import native
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rlhf_engine.commands.main import main
from rlhf_engine.hydra.kv_cache import BLOCK
from rlhf_engine.planning import before_run
from rlhf_engine.planning.before_run import Line, Memory, predict_step
from rlhf_engine.rollout import SamplingConfig
from rlhf_engine.runs.metrics import read_metrics
from rlhf_engine.training.reward_model.trainer import RewardTrainer
from rlhf_engine.training.rl import RlTrainer
from rlhf_engine.training.run import Run
from rlhf_engine.training.sft import SftTrainer
from tests.training.test_data import sft_config, train_config, write_model, write_pairs, write_prompts, write_reward
from tests.training.test_reward import reward_config
from tests.training.test_rl import without_timings

MANY = 10**9
"""Steps of which any are worth a prediction."""
RUNS = {
    "ppo": {},
    "full": {"method": "full_ppo"},
    "grpo": {"algorithm": "grpo", "lora_dropout": 0.1},
    "one token": {"max_completion_length": 1},
    "best_of_n": {"algorithm": "best_of_n"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def _long_steps(monkeypatch) -> None:
    """Steps of any length count as long ones."""
    monkeypatch.setattr(before_run, "SOON_S", 0.0)
    monkeypatch.setattr(before_run, "LONG_S", 0.0)


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


# ---- time ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("small", "large", "calls", "units", "seconds"),
    [
        ((10, 1.0), (30, 2.0), 2, 100, 2 * 0.5 + 100 * 0.05),
        ((10, 1.0), (30, 9.0), 2, 100, 100 * 0.4),  # a call costs nothing less than nothing
        ((10, 2.0), (30, 1.0), 3, 100, 3 * 1.0),  # the larger call was faster: flat
        ((10, 2.0), (10, 1.0), 3, 100, 10.0),
    ],
)
def test_seconds_lie_on_a_line(small, large, calls, units, seconds):
    assert Line.through(small, large).seconds(calls, units) == pytest.approx(seconds)


@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
@pytest.mark.parametrize(
    ("algorithm", "learned"), [("grpo", range(8)), ("online_dpo", (0, 1, 4, 5)), ("best_of_n", (0, 4))]
)
def test_a_trial_counts_the_tokens_of_a_step_s_micro_batches(model, tmp_path, algorithm, learned):
    """Two prompts with four answers each."""
    options = {"algorithm": algorithm, "num_generations": 4, "num_mini_batches": 1, "per_device_train_batch_size": 8}
    trial = before_run._RlTrial(RlTrainer(train_config(model, tmp_path / "out", **options)))
    (part,) = trial._micro_batches()
    assert sorted(map(part.prompt_tokens, range(part.n_sequences))) == sorted(trial.prompts[i] for i in learned)
    different = {tuple(prompt) for prompt in trial.prompts}
    assert len(different) == 2
    tokens = sum(map(len, different)) + len(learned) * trial.length
    assert trial.model.count_rows(part) == tokens
    assert trial.model.count_rows(trial._batch(8)) == sum(map(len, different)) + 8 * trial.length


@pytest.mark.usefixtures("_long_steps")
@pytest.mark.parametrize("kind", ["ppo", "grpo", "one token", "sft", "reward"])
def test_a_trial_changes_no_number_of_the_run(model, tmp_path, kind):
    plain = make(kind, model, tmp_path / "plain", max_steps=2)
    plain.run()
    tried = make(kind, model, tmp_path / "tried", max_steps=2)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert predict_step(tried, MANY) > 0
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in tried.model.parameters())
    assert not tried.model.training
    tried.run()
    rows = [[without_timings(row) for row in read_metrics(run.output / "metrics.jsonl")] for run in (plain, tried)]
    assert rows[0] == rows[1]
    assert len(rows[0]) == 2


def test_no_trial_of_a_short_run(model, tmp_path, capsys):
    """Nor of one whose second step comes at once."""
    trainer = make("ppo", model, tmp_path / "out")
    assert predict_step(trainer, 4) is None
    assert predict_step(trainer, MANY) is None
    assert [line.split(":")[0] for line in before_run.before_run(trainer)] == ["memory"]


@pytest.mark.usefixtures("_long_steps")
def test_no_prediction_where_answers_are_drawn_beside_the_updates(model, tmp_path):
    trainer = make("ppo", model, tmp_path / "out", async_mode="replay")
    assert predict_step(trainer, MANY) is None
    assert Memory.of(trainer).to_come["KV cache"] == 0


@pytest.mark.usefixtures("_long_steps")
def test_a_trial_out_of_memory_costs_the_prediction_alone(model, tmp_path, monkeypatch):
    trainer = make("sft", model, tmp_path / "out")

    def loss(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trainer, "loss", loss)
    _, warning = before_run.before_run(trainer)
    assert warning.startswith("warning: a trial of a few rows ran out of memory")
    monkeypatch.undo()
    trainer.run()


@pytest.mark.usefixtures("_long_steps")
def test_commands_say_it_once_and_on_standard_error(model, tmp_path, capsys):
    pairs, prompts = write_pairs(tmp_path), write_prompts(tmp_path)
    reward = write_reward(tmp_path, "return [1.0] * len(prompts)")
    common = ["--model_name_or_path", str(model), "--device", "cpu", "--save_steps", "1"]
    sft = ["sft", *common, "--dataset_name", str(pairs), "--max_steps", "3", "--full", "--output_dir"]
    train = ["train", *common, "--dataset_name", str(prompts), "--reward_funcs", reward, "--max_steps", "2"]
    train += ["--generation_batch_size", "4", "--max_completion_length", "8", "--output_dir"]
    for command, ending in ((sft, ""), (train, " if every answer has 8 tokens; reward functions and")):
        assert main([*command, str(tmp_path / command[0])]) == 0
        out, err = capsys.readouterr()
        assert "memory: " not in out
        assert "predicted" not in out
        assert len(re.findall(r"^memory: .*; .* free$", err, re.MULTILINE)) == 1
        lines = re.findall(r"^predicted: about .* for the \d steps, until \d\d:\d\d; .* a step(.*)$", err, re.MULTILINE)
        assert len(lines) == 1
        assert lines[0].startswith(ending)
        assert err.index("predicted") < err.index(" 1/")
    assert main([*sft, str(tmp_path / "sft"), "--resume_from_checkpoint", "auto"]) == 0
    assert "predicted" not in capsys.readouterr().err  # nothing is left to do


# ---- against the clock -----------------------------------------------------------------------------------------------


def llama(folder: Path, tokenizer: Path) -> Path:
    """A random Llama of 44 M parameters with the story model's tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=8192,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return folder


@pytest.mark.long
@pytest.mark.usefixtures("_long_steps")
@pytest.mark.parametrize("size", ["260K", "44M"])
@pytest.mark.parametrize("kind", ["ppo", "grpo", "best_of_n", "sft", "reward"])
def test_a_step_takes_what_is_predicted(stories, tmp_path, monkeypatch, size, kind):
    """CPU seconds, which other processes disturb least, within a factor of two; the best of three."""
    base = stories if size == "260K" else llama(tmp_path / "base", stories)
    monkeypatch.setattr(time, "perf_counter", time.process_time)
    batch = {"per_device_train_batch_size": 16, "max_steps": 3}
    if kind in RUNS:
        batch |= {"generation_batch_size": 16, "max_completion_length": 48, "num_mini_batches": 1}
        batch["reward_funcs"] = [write_reward(tmp_path, "return [float(len(c)) for c in completions]")]
    ratios = []
    for attempt in range(3):
        trainer = make(kind, base, tmp_path / str(attempt), **batch)
        predicted = predict_step(trainer, MANY)
        trainer.run()
        measured = min(row["seconds/step"] for row in read_metrics(trainer.output / "metrics.jsonl")[1:])
        ratios.append(predicted / measured)
        if 0.5 < ratios[-1] < 2:
            break
    assert 0.5 < ratios[-1] < 2, ratios
