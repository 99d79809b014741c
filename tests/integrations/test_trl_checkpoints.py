"""What our trainers behind TRL write beside PEFT's and transformers' files, read again, and refuse."""

import shutil

import pytest
import torch

pytest.importorskip("trl", reason="needs trl (pip install 'rlhf-engine[trl]')")

from safetensors.torch import load_file
from transformers import Trainer

from rlhf_engine.errors import ConfigError
from rlhf_engine.integrations.trl import HydraPPOConfig, HydraPPOTrainer
from tests.integrations.trl_runs import LORA, QUICK, make_trainer, run_ranks, trained

SAVED = {"save_strategy": "steps", "save_steps": 1, "steps_per_generation": 4}


def make(folder, output, *, n_prompts=48, model=None, **changes):
    args = HydraPPOConfig(**{**QUICK, **SAVED, "output_dir": str(output), **changes})
    lora = LORA if model is None else None
    return make_trainer(HydraPPOTrainer, args, folder, n_prompts=n_prompts, model=model, peft_config=lora)


def equal(left, right) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """A run of four steps with a checkpoint of each; checkpoint-1 and checkpoint-3 are of the middle of a rollout."""
    output = tmp_path_factory.mktemp("whole")
    trainer = make(folder, output)
    trainer.train()
    return output, trained(trainer)


def test_an_epoch_s_last_step_may_be_short(folder, tmp_path):
    """Three micro-batches in an epoch, two in a step, three in a rollout."""
    options = {"n_prompts": 12, "steps_per_generation": 3, "max_steps": 6, "gradient_accumulation_steps": 2}
    run = make(folder, tmp_path / "run", **options)
    drawn = []
    compute = run._generate_and_score_completions
    run._generate_and_score_completions = lambda inputs: drawn.append(run._step) or compute(inputs)
    run.train()
    assert drawn == [0, 3, 6]
    for step in (1, 2, 3):
        resumed = make(folder, tmp_path / "parts", **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{step}"))
        assert equal(trained(run), trained(resumed)), step


def test_a_rollout_is_not_cut_up_otherwise(folder, tmp_path, whole):
    for changes, message in (
        ({"steps_per_generation": 8}, "steps_per_generation: expected 4, because .* is of the middle of a rollout"),
        ({"num_iterations": 2}, "num_iterations: expected 1, because"),
        ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps: expected 2, because"),
        ({"per_device_train_batch_size": 2}, "per_device_train_batch_size: expected 4, because"),
    ):
        with pytest.raises(ConfigError, match=message):
            make(folder, tmp_path, **changes).train(resume_from_checkpoint=str(whole[0] / "checkpoint-3"))


def test_what_a_checkpoint_lacks_is_named(folder, tmp_path, whole):
    lacking = tmp_path / "checkpoint-3"
    shutil.copytree(whole[0] / "checkpoint-3", lacking)
    (lacking / "progress_0.json").unlink()
    with pytest.raises(ConfigError, match=r"resume_from_checkpoint: expected progress_0\.json in .*save_only_model"):
        make(folder, tmp_path / "run").train(resume_from_checkpoint=str(lacking))


def test_weights_alone_are_where_a_run_begins(folder, tmp_path, whole):
    """transformers takes a folder without its state of the trainer for weights."""
    weights = tmp_path / "weights"
    shutil.copytree(whole[0] / "checkpoint-3", weights)
    (weights / "trainer_state.json").unlink()
    trainer = make(folder, tmp_path / "run", max_steps=0, num_train_epochs=0, save_strategy="no")
    trainer._load_from_checkpoint(str(weights))
    assert trainer._step == 0
    saved = load_file(weights / "adapter_model.safetensors")
    ours = {name.replace(".default", ""): p for name, p in trained(trainer).items() if ".default." in name}
    assert equal(ours, saved)


def test_a_model_alone_has_no_progress(folder, tmp_path):
    make(folder, tmp_path, max_steps=1, save_only_model=True).train()
    names = {path.name for path in (tmp_path / "checkpoint-1").iterdir()}
    assert {"adapter_model.safetensors", "heads.safetensors", "critic"} <= names
    assert not [name for name in names if name.startswith(("progress_", "rollout_"))]


def test_the_best_model_has_its_own_critic(folder, tmp_path, whole):
    trainer = make(folder, tmp_path)
    trainer.state.best_model_checkpoint = str(whole[0] / "checkpoint-2")
    trainer._load_best_model()
    best = make(folder, tmp_path / "best")
    best._load_from_checkpoint(str(whole[0] / "checkpoint-2"))
    assert equal(trained(trainer), trained(best))
    assert not equal(trained(trainer), whole[1])
    assert {name for name in trained(trainer) if "critic" in name or "value" in name}


def test_what_is_pushed_has_the_critic_too(folder, tmp_path, whole, monkeypatch):
    monkeypatch.setattr(Trainer, "_push_from_checkpoint", lambda self, checkpoint_folder: None)
    trainer = make(folder, tmp_path)
    trainer._push_from_checkpoint(str(whole[0] / "checkpoint-2"))
    for name in ("heads.safetensors", "critic/adapter_model.safetensors", "critic/adapter_config.json"):
        assert (tmp_path / name).read_bytes() == (whole[0] / "checkpoint-2" / name).read_bytes()


def test_a_model_that_was_trained_before_goes_on_with_its_critic(folder, tmp_path, whole):
    before = make(folder, tmp_path / "before")
    before._load_from_checkpoint(str(whole[0] / "checkpoint-2"))
    after = make(folder, tmp_path / "after", model=before.accelerator.unwrap_model(before.model))
    assert equal(dict(after.hydra.trainable_parameters("critic")), dict(before.hydra.trainable_parameters("critic")))
    assert bool(after.hydra.heads["value"].weight.any())
    after.train()


@pytest.mark.long
def test_two_processes_save_and_go_on_with_the_same_floats(folder, tmp_path):
    run_ranks(folder, tmp_path / "whole", 2, "save", processes=2)
    checkpoint = tmp_path / "whole" / "run" / "checkpoint-3"  # of the middle of a rollout
    assert {"progress_0.json", "progress_1.json", "rollout_0.safetensors", "rollout_1.safetensors"} <= {
        path.name for path in checkpoint.iterdir()
    }
    run_ranks(folder, tmp_path / "parts", 2, checkpoint, processes=2)
    whole, parts = (load_file(tmp_path / name / "0.safetensors") for name in ("whole", "parts"))
    last = [name for name in whole if name.startswith("3|")]
    assert last
    assert all(torch.equal(whole[name], parts[name]) for name in last)
