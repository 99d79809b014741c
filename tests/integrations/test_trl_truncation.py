"""Trainers behind TRL that draw among some words: ratios are over the words that drew, in the update as well."""

import dataclasses

import pytest
import torch

pytest.importorskip("trl", reason="needs trl (pip install 'rlhf-engine[trl]')")

from rlhf_engine.integrations.trl import (
    HydraGRPOConfig,
    HydraGRPOTrainer,
    HydraOnlineDPOConfig,
    HydraOnlineDPOTrainer,
    HydraPPOConfig,
    HydraPPOTrainer,
    ReMaxConfig,
    ReMaxTrainer,
)
from tests.integrations.trl_runs import QUICK, make_trainer, trained
from tests.training.test_data import write_model

KINDS = {
    "ppo": (HydraPPOTrainer, HydraPPOConfig, {}),
    "grpo": (HydraGRPOTrainer, HydraGRPOConfig, {"num_generations": 4}),
    "remax": (ReMaxTrainer, ReMaxConfig, {}),
    "online_dpo": (HydraOnlineDPOTrainer, HydraOnlineDPOConfig, {}),
}
FILTERS = {"top_k": 30, "top_p": 0.8, "min_p": 0.01}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def make(kind, folder, output, **changes):
    trainer, config, own = KINDS[kind]
    return make_trainer(trainer, config(**{**QUICK, **own, **FILTERS, "output_dir": str(output), **changes}), folder)


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_is_over_the_words_that_drew(kind, folder, tmp_path):
    trainer, seen = make(kind, folder, tmp_path, max_steps=1, steps_per_generation=2), []
    terms = trainer.algorithm.terms
    trainer.algorithm.terms = lambda micro: seen.append(micro) or terms(micro)
    before = trained(trainer)
    trainer.train()
    assert 1 < trainer.state.log_history[0]["support/mean"] < 30
    after = trained(trainer)
    for name, p in trainer.model.named_parameters():
        p.data.copy_(before.get(name, p))
    assert len(seen) == 2
    for micro in seen:
        assert micro.batch.supports is not None
        sizes = micro.batch.supports.sizes
        assert int(sizes.min()) >= 1
        assert int(sizes.max()) <= 30
        assert len(set(sizes.tolist())) > 3
        scores = trainer.hydra.eval().score(micro.batch, ("actor", "reference"))
        torch.testing.assert_close(scores.logprobs_M, micro.old_logprobs_M, rtol=0, atol=1e-5)
        torch.testing.assert_close(scores.ref_logprobs_M, micro.ref_logprobs_M, rtol=0, atol=1e-5)
        whole = dataclasses.replace(micro.batch, supports=None)
        assert float((trainer.hydra.score(whole, ("actor",)).logprobs_M - micro.old_logprobs_M).mean()) < -0.1
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("kind", [pytest.param("grpo", marks=pytest.mark.long), "online_dpo"])
def test_a_run_stopped_in_the_middle_of_a_rollout_goes_on_to_the_same_floats(kind, folder, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 1, "steps_per_generation": 4}
    whole = make(kind, folder, tmp_path / "whole", **options)
    whole.train()
    assert (tmp_path / "whole" / "checkpoint-3" / "rollout_0.safetensors").is_file()
    resumed = make(kind, folder, tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    expected, found = trained(whole), trained(resumed)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
