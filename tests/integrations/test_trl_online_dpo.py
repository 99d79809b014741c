"""`HydraOnlineDPOTrainer`: pairs by score, the loss by hand, ties, resuming."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("trl", reason="needs trl (pip install 'rlhf-engine[trl]')")

from rlhf_engine.errors import ConfigError
from rlhf_engine.integrations.trl import HydraOnlineDPOConfig, HydraOnlineDPOTrainer
from tests.integrations.trl_runs import QUICK, make_trainer, rollouts, rows, trained, words
from tests.training.test_data import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def make(folder, output, reward_funcs=words, **changes):
    args = HydraOnlineDPOConfig(**{**QUICK, "output_dir": str(output), **changes})
    return make_trainer(HydraOnlineDPOTrainer, args, folder, reward_funcs)


def long_ones(prompts, completions, completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_the_best_against_the_worst_and_the_first_loss(folder, tmp_path, loss_type):
    trainer = make(folder, tmp_path, long_ones, answers_per_prompt=4, loss_type=loss_type)
    seen = rollouts(trainer)
    trainer.train()
    for out in seen:
        lengths = out["pair_mask"].sum(-1)
        assert torch.equal(out["keep"], lengths[:, 0] > lengths[:, 1])
        assert (lengths[:, 0] >= lengths[:, 1]).all()
    first = rows(trainer)[0]
    # where the policy is the reference every pair's loss is a constant, and so is the mean over pairs without a tie
    share = float(seen[0]["keep"].float().mean())
    constant = math.log(2) if loss_type == "sigmoid" else (1 / (2 * 0.1)) ** 2
    assert 0 < share < 1
    assert float(first["loss"]) == pytest.approx(constant, rel=1e-3)
    assert float(first["pairs/tied_ratio"]) == pytest.approx(1 - share)
    assert float(first["rewards/margins"]) == pytest.approx(0.0, abs=1e-5)
    assert float(rows(trainer)[-1]["rewards/margins"]) != 0.0


def test_under_autocast_a_policy_that_has_not_learned_has_no_margin(folder, tmp_path):
    trainer = make(folder, tmp_path, long_ones, bf16=True)
    trainer.train()
    first, second = rows(trainer)[:2]
    assert float(first["rewards/margins"]) == pytest.approx(0.0, abs=1e-6)
    assert float(second["rewards/margins"]) != 0.0


def test_it_prefers_what_scores_more_and_resumes_with_the_same_floats(folder, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8, "answers_per_prompt": 4}
    whole = make(folder, tmp_path / "whole", [long_ones, "reward_model"], reward_weights=[1.0, 0.0], **options)
    assert {name.split(".")[-2] for name in trained(whole)} == {"default"}
    whole.train()
    assert float(rows(whole)[-1]["rewards/margins"]) > 0.05
    resumed = make(folder, tmp_path / "parts", [long_ones, "reward_model"], reward_weights=[1.0, 0.0], **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    left, right = trained(whole), trained(resumed)
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_ties_teach_nothing(folder, tmp_path):
    def same(prompts, completions, completion_ids, **columns):
        return [1.0] * len(prompts)

    trainer = make(folder, tmp_path, same, max_steps=2)
    before = trained(trainer)
    trainer.train()
    after = trained(trainer)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert [float(row["loss"]) for row in rows(trainer)] == [0.0, 0.0]
    assert float(rows(trainer)[0]["pairs/tied_ratio"]) == 1.0


def test_answers_without_a_score_are_in_no_pair(folder, tmp_path):
    calls = []

    def once(prompts, completions, completion_ids, **columns):
        calls.append(1)
        return [float(len(ids)) if len(calls) % 3 else None for ids in completion_ids]

    trainer = make(folder, tmp_path, once, answers_per_prompt=3, max_steps=1)
    seen = rollouts(trainer)
    trainer.train()  # the third call is of the answers that TRL is shown
    assert len(calls) == 3
    shown = [trainer._answers.completion_tokens(i) for i in range(8)]
    for i, ids in enumerate(shown):
        pair = [seen[0]["pair_ids"][i][j][seen[0]["pair_mask"][i][j]].tolist() for j in range(2)]
        others = [hidden[i] for hidden in trainer._hidden_ids]
        assert all(answer in others for answer in pair), (ids, pair)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"answers_per_prompt": 1}, "answers_per_prompt: expected at least 2, got 1"),
        ({"num_generations": 2}, "num_generations: expected 1: answers_per_prompt says how many are drawn"),
        ({"epsilon": 0.1}, r"epsilon: expected 0\.2, because online_dpo does not read it, got 0\.1"),
        ({"beta": 0.0}, "beta: expected a number > 0"),
        ({"loss_type": "hinge"}, "loss_type: expected 'sigmoid' or 'ipo', got 'hinge'"),
    ],
)
def test_options_that_cannot_be_served(folder, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        make(folder, tmp_path, **changes)
