"""Two policies of different rank, method, algorithm and seed on one base: each makes the floats that it makes alone."""

import dataclasses
import itertools

import pytest
import torch

from rlhf_engine.errors import ConfigError
from rlhf_engine.training.rl import RlTrainer
from tests.training.test_data import train_config, write_model, write_reward
from tests.training.test_rl import metrics, same, trained

POLICIES = {
    "first": {"method": "hydra_ppo", "lora_r": 4, "lora_dropout": 0.1, "seed": 1, "num_mini_batches": 2},
    "second": {"method": "j_hydra_ppo", "lora_r": 8, "seed": 2, "kl_target": 3.0},
    "third": {"algorithm": "grpo", "lora_r": 2, "seed": 3, "lora_target_modules": ["q_proj", "lm_head"]},
}


@pytest.fixture(scope="module")
def reward(tmp_path_factory):
    body = "return [float(len(set(row))) + 0.01 * sum(row) for row in completion_ids]"
    return write_reward(tmp_path_factory.mktemp("reward"), body)


def config(model, output, reward, name, **changes):
    common = {"reward_funcs": [reward], "generation_batch_size": 16, "max_steps": 3, "save_steps": 1}
    if POLICIES[name].get("algorithm", "ppo") != "ppo":
        common |= {"num_mini_batches": None, "num_ppo_epochs": None}
    return train_config(model, output, **{**common, **POLICIES[name], **changes})


@pytest.fixture(scope="module")
def alone(model, reward, tmp_path_factory):
    """Each policy after a run without the others."""
    folder = tmp_path_factory.mktemp("alone")
    found = {name: RlTrainer(config(model, folder / name, reward, name)) for name in POLICIES}
    for trainer in found.values():
        trainer.run()
    return found


def test_policies_take_turns_with_the_floats_that_each_has_alone(model, reward, alone, tmp_path):
    together: dict[str, RlTrainer] = {}
    for name in POLICIES:
        base = next(iter(together.values())).model if together else None
        together[name] = RlTrainer(config(model, tmp_path / "together" / name, reward, name), base=base)
    assert len({id(trainer.model.backbone().model) for trainer in together.values()}) == 1
    steps = {name: [trainer.step()] for name, trainer in together.items()}
    for name in ("second", "third", "first", "first", "third", "second"):  # in any order
        steps[name].append(together[name].step())
    for name, trainer in together.items():
        assert same(trained(trainer), trained(alone[name])), name
        expected = metrics(alone[name])
        for row, found in zip(expected, steps[name], strict=True):
            shared = row.keys() & found.keys()
            assert {"reward", "kl", "policy/loss", "grad_norm/actor"} <= shared
            assert {key: found[key] for key in shared} == {key: row[key] for key in shared}, name
    weights = [next(iter(trained(trainer).values())) for trainer in together.values()]
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(weights) if a.shape == b.shape)


def test_a_run_beside_another_resumes_and_leaves_the_other_alone(model, reward, alone, tmp_path):
    first = RlTrainer(config(model, tmp_path / "first", reward, "first"))
    first.step()
    before = {key: tensor.clone() for key, tensor in trained(first).items()}
    made = config(model, tmp_path / "parts", reward, "second", max_steps=2)
    RlTrainer(made, base=first.model).run()
    made = dataclasses.replace(made, max_steps=3, resume_from_checkpoint="auto")
    resumed = RlTrainer(made, base=first.model)
    assert resumed.state.step == 2
    resumed.run()
    assert same(trained(resumed), trained(alone["second"]))
    assert same(trained(first), before)


def test_options_that_ask_for_another_base(model, reward, tmp_path):
    first = RlTrainer(config(model, tmp_path / "first", reward, "first"))
    other = write_model(tmp_path / "other")
    for folder, changes, message in (
        (model, {"method": "lora_ppo"}, r"method: expected one whose backbones the given model has, \['base'\], got '"),
        (model, {"dtype": "bfloat16"}, "dtype: expected that of the given model, torch.float32, got torch.bfloat16"),
        (other, {}, "model_name_or_path: expected that of the given model"),
    ):
        with pytest.raises(ConfigError, match=message):
            RlTrainer(config(folder, tmp_path / "second", reward, "second", **changes), base=first.model)
