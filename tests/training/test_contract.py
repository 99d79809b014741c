"""The contract of every trainer: stop, fail, go on, finish, overwrite, refuse.

A kind is one trainer in one mode. Tests of what is particular to one trainer lie in that trainer's own file.
"""

import dataclasses
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_engine.errors import ConfigError, RunStopped, notes
from rlhf_engine.io import _replaced
from rlhf_engine.runs.checkpoint import list_checkpoints
from rlhf_engine.runs.folder import locked
from rlhf_engine.runs.metrics import read_metrics
from rlhf_engine.training.reward_model import RewardTrainer
from rlhf_engine.training.rl import RlTrainer
from rlhf_engine.training.run import Run
from rlhf_engine.training.sft import SftTrainer
from tests.training.test_data import sft_config, train_config, write_model
from tests.training.test_reward import reward_config
from tests.training.test_rl import metrics, same, trained, without_timings


class Killed(Exception):
    """What ends a run at once."""


@dataclass(frozen=True)
class Kind:
    """A trainer in a mode.

    Args:
        trainer: the class.
        config: makes its options, from a model folder, an output folder and changes.
        options: of the mode.
        result: the file of the output folder that is written last; with it the run is finished.
    """

    trainer: type[Run]
    config: Callable[..., Any]
    options: dict[str, Any]
    result: str


@dataclass(frozen=True)
class Trainers:
    """A kind, and the model that its runs start from."""

    kind: Kind
    model: Path

    def config(self, output: Path, **changes: Any) -> Any:
        """Options of a run of four steps into an output folder."""
        return self.kind.config(self.model, output, **{"max_steps": 4, "save_steps": 0, **self.kind.options, **changes})

    def make(self, output: Path, **changes: Any) -> Run:
        """A trainer whose runs write into an output folder."""
        return self.kind.trainer(self.config(output, **changes))

    def result(self, output: Path) -> Path:
        """The last file of the result."""
        return output / self.kind.result


COSINE = {"lr_scheduler_type": "cosine", "warmup_steps": 2}
KINDS = {
    "sft-lora": Kind(SftTrainer, sft_config, {"mode": "lora", "lora_dropout": 0.2, **COSINE}, "adapter_config.json"),
    "sft-full": Kind(SftTrainer, sft_config, {"mode": "full"}, "config.json"),
    "reward-lora": Kind(
        RewardTrainer,
        reward_config,
        {
            "lora_dropout": 0.2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
            "eval_dataset_name": 0.4, "eval_steps": 2,
        },
        "final/adapter_config.json",
    ),
    "reward-full": Kind(RewardTrainer, reward_config, {"mode": "full", "learning_rate": 1e-3}, "final/config.json"),
    "rl": Kind(RlTrainer, train_config, {"lora_dropout": 0.1, "kl_target": 0.05, **COSINE}, "final"),
    "rl-full": Kind(RlTrainer, train_config, {"method": "full_ppo", "learning_rate": 1e-3}, "final"),
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[bool, Path]:
    """Models with and without a reward head."""
    return {head: write_model(tmp_path_factory.mktemp(f"model-{head}"), reward_head=head) for head in (True, False)}


def kinds(*per_push: str) -> list[Any]:
    """All of them, of which `make test` has these."""
    return [name if name in per_push else pytest.param(name, marks=pytest.mark.long) for name in KINDS]


@pytest.fixture(params=kinds("rl"))  # what stops, ends and overwrites a run is one class
def trainers(request, models) -> Trainers:
    kind = KINDS[request.param]
    return Trainers(kind, models[kind.trainer is RlTrainer])


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a result."""
    files = [f for f in sorted(folder.rglob("*.safetensors")) if "checkpoint-" not in str(f.relative_to(folder))]
    return {f"{f.relative_to(folder)} {name}": x for f in files for name, x in load_file(f).items()}


def kill(step: int, found: dict[str, Any]) -> None:
    raise Killed


def names(output: Path) -> list[str]:
    return [folder.name for folder in list_checkpoints(output)]


# test_adamw has sft-full, the next test rl-full
@pytest.mark.parametrize("trainers", kinds("sft-lora", "reward-lora", "rl"), indirect=True)
def test_a_run_goes_on_with_the_same_floats(trainers, tmp_path):
    """It was stopped at step 3, and its checkpoint of that step got lost: it goes on from step 2."""
    whole = trainers.make(tmp_path / "whole" / "run")
    whole.run()
    output = tmp_path / "parts" / "run"
    config = trainers.config(output, save_steps=2, resume_from_checkpoint="auto")
    looks: list[int] = []

    def stop() -> bool:
        looks.append(1)
        return len(looks) == 3

    with pytest.raises(RunStopped, match="stopped at step 3 of 4"):
        trainers.kind.trainer(config).run(stop=stop)
    assert not trainers.result(output).exists()
    assert names(output)[-1] == "checkpoint-3"
    (output / "checkpoint-3").rename(tmp_path / "lost")
    resumed = trainers.kind.trainer(config)
    assert resumed.state.step == 2
    assert not resumed.finished()
    resumed.run()
    assert resumed.finished()
    assert trained(whole)
    assert same(trained(whole), trained(resumed))
    assert whole.state == resumed.state
    assert metrics(whole) == metrics(resumed)
    assert [row["step"] for row in metrics(resumed) if row["step"]] == [1, 2, 3, 4]
    results = [tensors(run.output) for run in (whole, resumed)]
    assert results[0]
    assert same(*results)
    assert trainers.kind.trainer(config).finished()
    assert (output / "curves.png").stat().st_size > 5000


RESUMED = {
    "full_ppo": {"method": "full_ppo", "critic_init": "reward", "dtype": "bfloat16", "optim": "adamw_stochastic"},
    "full_ppo-float32": {"method": "full_ppo", "kl_estimator": "exact"},
    "j_hydra": {"method": "j_hydra_ppo", **COSINE, "num_ppo_epochs": 2},
    "dynamic_lora": {"method": "dynamic_lora_ppo", "critic_init": "reward"},
    "lora": {"method": "lora_ppo", "critic_init": "actor", "lora_dropout": 0.2, "kl_estimator": "exact"},
    "adapters": {"learning_rate": 1e-4, "optim": "adamw_stochastic"},
    "adafactor": {"learning_rate": 1e-4, "optim": "adafactor"},
    "top_p-ppo": {"top_p": 0.8, "lora_dropout": 0.1},
    "top_p-grpo": {"algorithm": "grpo", "top_p": 0.8, "lora_dropout": 0.1},
    **{name: {"algorithm": name} for name in ("remax", "rloo", "reinforce", "grpo", "online_dpo", "best_of_n")},
}
"""Runs of RL that take ways of their own: every method and algorithm, state in half precision, words left out."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[pytest.mark.long] * (x not in ("full_ppo", "top_p-grpo", "online_dpo"))) for x in RESUMED],
)
def test_every_method_and_algorithm_goes_on_with_the_same_floats(models, tmp_path, name):
    options = {"learning_rate": 1e-3, "max_steps": 3, **RESUMED[name]}
    if "algorithm" in options:
        options |= {"num_mini_batches": None, "num_ppo_epochs": None, "generation_batch_size": 16}
    whole = RlTrainer(train_config(models[True], tmp_path / "whole", **options))
    whole.step()
    resume = {"resume_from_checkpoint": str(whole.save())}
    rows = [whole.step(), whole.step()]
    resumed = RlTrainer(train_config(models[True], tmp_path / "parts", **options, **resume))
    assert [without_timings(resumed.step()) for _ in rows] == [without_timings(row) for row in rows]
    assert same(trained(whole), trained(resumed))
    assert whole.state == resumed.state


def test_an_error_after_a_step_costs_no_step(trainers, tmp_path):
    def fail(step: int, found: dict[str, Any]) -> None:
        if step == 3:
            raise OSError("no dashboard")

    with pytest.raises(OSError, match="no dashboard") as raised:
        trainers.make(tmp_path / "run").run(fail)
    assert notes(raised.value) == ["checkpoint of step 3 written, --resume_from_checkpoint auto goes on"]
    assert names(tmp_path / "run")[-1] == "checkpoint-3"
    assert trainers.make(tmp_path / "run", resume_from_checkpoint="auto").state.step == 3


@pytest.mark.parametrize("trainers", ["reward-lora"], indirect=True)
def test_an_evaluation_that_fails_costs_no_row_of_its_step_and_curves_are_drawn_at_times(trainers, tmp_path):
    trainer, pictures = trainers.make(tmp_path / "run", save_steps=1, eval_steps=3), set[int]()
    evaluate = trainer.evaluate

    def fail() -> Any:
        if trainer.state.step == 3:
            raise OSError("no held-out rows")
        return evaluate()

    def look(step: int, _: Any) -> None:
        if step > 1:
            pictures.add((tmp_path / "run" / "curves.png").stat().st_mtime_ns)

    trainer.evaluate = fail
    with pytest.raises(OSError, match="no held-out rows"):
        trainer.run(look)
    assert [row["step"] for row in metrics(trainer)] == [0, 1, 2, 3]
    resumed = trainers.make(tmp_path / "run", save_steps=1, resume_from_checkpoint="auto")
    assert resumed.state.step == 3
    resumed.run(look)
    assert len(pictures) == 1, "three checkpoints within a minute"
    assert (tmp_path / "run" / "curves.png").stat().st_mtime_ns not in pictures


def test_a_step_that_fails_half_way_is_no_checkpoint(trainers, tmp_path, monkeypatch):
    """Weights that a part of a step has moved are no state to go on from."""
    trainer = trainers.make(tmp_path / "run", save_steps=1)
    apply = trainer.optimizer.adamw.step

    def fail() -> None:
        apply()
        if trainer.state.step == 2:
            raise RuntimeError("half way")

    monkeypatch.setattr(trainer.optimizer.adamw, "step", fail)
    with pytest.raises(RuntimeError, match="half way"):
        trainer.run()
    assert names(tmp_path / "run")[-1] == "checkpoint-2"


@pytest.mark.parametrize("trainers", kinds("sft-lora", "rl"), indirect=True)
def test_a_finished_run_has_nothing_to_do_and_a_half_written_result_is_written_again(trainers, tmp_path):
    output = tmp_path / "run"
    config = trainers.config(output, save_steps=4, resume_from_checkpoint="auto")
    first, rows = trainers.kind.trainer(config), []
    first.run(lambda step, found: rows.append({"step": step, **found}))
    assert [without_timings(row) for row in rows] == [row for row in metrics(first) if row["step"]]
    assert all(row["seconds/step"] > 0 for row in rows)
    record = (output / "run.json").read_text()
    assert json.loads(record)["config"].keys() >= {field.name for field in dataclasses.fields(config)}
    held = tensors(output)
    again = trainers.kind.trainer(config)
    assert again.finished()
    assert again.steps_done() == 4
    again.run()
    assert same(tensors(output), held)
    assert [row["step"] for row in metrics(again) if row["step"]] == [1, 2, 3, 4]
    trainers.result(output).rename(tmp_path / "taken")
    (output / "run.json").write_text(record.replace('"result"', '"no_result"'))
    again = trainers.kind.trainer(config)
    assert again.state.step == 4
    assert not again.finished()
    again.run()
    assert trainers.result(output).exists()
    assert same(tensors(output), held)
    assert json.loads((output / "run.json").read_text()).get("result") == json.loads(record).get("result")


@pytest.mark.parametrize("trainers", kinds("sft-lora", "rl"), indirect=True)
def test_what_an_output_folder_is_refused_for(trainers, tmp_path, models):
    """A run of another seed, process or command in it, also where all options are the same; or a file in its place.

    Supervised and reward training have one state, so that between them the digest of the rows tells them apart.
    """
    output, rows = tmp_path / "run", {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    options = rows if trainers.kind.trainer is not RlTrainer else {}
    trainer = trainers.make(output, **options)
    output.mkdir(exist_ok=True)
    with locked(output), pytest.raises(ConfigError, match=f"output_dir: .*{os.getpid()}"):
        trainer.run()
    with pytest.raises(RunStopped):
        trainer.run(stop=lambda: True)
    checkpoint = output / "checkpoint-1"
    checkpoint.rename(_replaced(checkpoint))
    with locked(output), pytest.raises(ConfigError, match=f"output_dir: .*{os.getpid()}"):
        trainers.make(output, resume_from_checkpoint="auto")
    assert not checkpoint.exists()  # the process that runs may be about to put a newer one there
    _replaced(checkpoint).rename(checkpoint)
    with pytest.raises(ConfigError, match=r"^output_dir: expected .*--resume_from_checkpoint auto"):
        trainers.make(output)
    with pytest.raises(ConfigError, match=r"seed: expected 0 as in .*checkpoint-1, got 1"):
        trainers.make(output, resume_from_checkpoint="auto", seed=1)
    for name in ("sft-lora", "reward-lora", "rl"):
        other = Trainers(KINDS[name], models[name == "rl"])
        if other.kind.trainer is not trainers.kind.trainer:
            options = rows if name != "rl" else {}
            with pytest.raises(ConfigError, match=r"^(resume_from_checkpoint|dataset_name): expected .*checkpoint"):
                other.make(tmp_path / name, resume_from_checkpoint=str(output / "checkpoint-1"), **options)
    assert names(output) == ["checkpoint-1"]
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="output_dir: expected a folder, got the file"):
        trainers.make(tmp_path / "file")


def test_overwriting_leaves_nothing_of_the_earlier_run(trainers, tmp_path):
    output = tmp_path / "run"
    trainers.make(output, save_steps=1).run()
    (output / "notes.md").write_text("mine")

    def look(step: int, found: dict[str, Any]) -> None:
        assert not trainers.result(output).exists()
        raise Killed

    with pytest.raises(Killed):
        trainers.make(output, resume_from_checkpoint="restart").run(look)
    assert names(output) == ["checkpoint-1"]
    assert [row["step"] for row in read_metrics(output / "metrics.jsonl") if row["step"]] == [1]
    assert (output / "notes.md").read_text() == "mine"
    resumed = trainers.make(output, resume_from_checkpoint="auto")
    assert resumed.state.step == 1
    resumed.run()
    assert trainers.result(output).exists()


def test_auto_begins_where_there_is_no_checkpoint(trainers, tmp_path):
    first = trainers.make(tmp_path / "run", resume_from_checkpoint="auto")
    assert first.state.step == 0
    with pytest.raises(Killed):
        first.run(kill)
    for folder in list_checkpoints(tmp_path / "run"):
        folder.rename(tmp_path / folder.name)
    again = trainers.make(tmp_path / "run", resume_from_checkpoint="auto")
    assert again.state.step == 0
    again.run()
    assert [row["step"] for row in metrics(again) if row["step"]] == [1, 2, 3, 4]
