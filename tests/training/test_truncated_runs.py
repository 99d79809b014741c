"""Runs that draw among some words: what they learn from, that they go on, and what is refused."""

import pytest
import torch
from rlhf_kernels.runtime import native

from rlhf_engine.config import TrainConfig
from rlhf_engine.errors import ConfigError, MismatchError
from rlhf_engine.hydra.supports import Supports
from rlhf_engine.training.rl import RlTrainer
from tests.generators.test_async_runs import steps_of, without_timings
from tests.training.test_data import train_config
from tests.training.test_rl import same, trained


def test_every_algorithm_learns_from_them(model, tmp_path):
    for algorithm in ("ppo", "grpo", "rloo", "remax", "reinforce", "cispo", "online_dpo", "best_of_n"):
        options = {"algorithm": algorithm, "top_p": 0.8, "top_k": 40, "min_p": 0.005, "max_steps": 2}
        options |= {"beta": 0.1, "entropy_coef": 0.01} if algorithm == "ppo" else {}
        trainer, rows = steps_of(model, tmp_path / algorithm, **options)
        for row in rows:
            assert 1 < row["support/mean"] < 40, algorithm
            most = 8 * (1 + 8 * 8) + 8 * 8 * 4 * -(-trainer.model.backbone().n_words // 32)
            assert 0 < row["support/bytes"] <= most, algorithm
            assert max(row["mismatch/rollout_max"], row["mismatch/update_max"]) < 1e-5, algorithm
        assert rows[0]["kl"] == pytest.approx(0.0, abs=1e-5), algorithm
        assert trainer.state.policy_version == 2, algorithm


@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
@pytest.mark.parametrize(
    ("options", "dtype"), [({"kl_estimator": "exact"}, "bfloat16"), ({"algorithm": "grpo"}, "float32")]
)
def test_in_exact_mode_rollout_and_update_differ_by_nothing(options, dtype, model, tmp_path):
    _, rows = steps_of(model, tmp_path / "run", exact=True, dtype=dtype, top_p=0.8, max_steps=2, **options)
    for row in rows:
        assert row["mismatch/rollout_max"] == row["mismatch/update_max"] == 0.0
    assert rows[0]["kl"] == 0.0


def test_beside_the_updates_the_floats_are_the_same(model, tmp_path):
    """Ratios to the older policy that drew are over its words."""
    options = {"algorithm": "grpo", "top_p": 0.8, "max_steps": 3, "off_policy_correction": "token_truncate"}
    beside, rows = steps_of(model, tmp_path / "beside", async_mode="overlap", **options)
    replay, again = steps_of(model, tmp_path / "replay", async_mode="replay", **options)
    assert same(trained(beside), trained(replay))
    assert without_timings(rows) == without_timings(again)
    assert [row["staleness/max"] for row in rows] == [0.0, 1.0, 1.0]
    for row in rows:
        assert row["mismatch/rollout_max"] < 1e-5  # of the policy that drew
        assert row["support/mean"] > 1


def test_supports_that_are_lost_stop_a_run(model, tmp_path, monkeypatch):
    trainer = RlTrainer(train_config(model, tmp_path / "run", top_p=0.8))
    monkeypatch.setattr(Supports, "join", lambda parts: None)
    with pytest.raises(MismatchError, match="rollout and training log-probs differ by"):
        trainer.step()


def test_held_out_answers_are_drawn_likewise(model, tmp_path):
    config = train_config(model, tmp_path / "run", top_k=3)
    config = TrainConfig(**{**config.to_dict(), "eval_dataset_name": config.dataset_name, "eval_steps": 1})
    trainer = RlTrainer(config)
    answers = trainer.evaluation.answer(trainer.eval_set, [0, 1, 2])
    assert set(answers.rollout.batch.supports.sizes.tolist()) == {3}
    assert trainer.evaluation.kl_to_reference(answers.rollout) == 0.0
    assert trainer.evaluation.evaluate()["eval/kl"] == 0.0
    trainer.step()
    assert trainer.evaluation.evaluate()["eval/kl"] > 0


def test_values_that_mean_nothing_and_an_engine_that_does_not_say_among_which_words(tmp_path):
    for option, value, message in (
        ("top_p", 1.5, r"top_p: expected a number or none <= 1, got 1\.5"),
        ("min_p", 0.0, r"min_p: expected a number or none > 0, got 0\.0"),
    ):
        with pytest.raises(ConfigError, match=message):
            train_config(tmp_path / "m", tmp_path / "run", **{option: value})
    server = {"vllm_server_base_url": "http://localhost:1"}
    for option, value in (("top_k", 3), ("top_p", 0.5), ("min_p", 0.5)):
        message = rf"{option}: expected it unset with vllm_server_base_url, .* the words .* got {value}"
        with pytest.raises(ConfigError, match=message):
            train_config(tmp_path / "m", tmp_path / "run", **server, **{option: value})


def test_a_run_without_filters_keeps_no_words(model, tmp_path):
    trainer = RlTrainer(train_config(model, tmp_path / "run", top_p=1.0))
    assert not trainer.sampling(0).filters
    row = trainer.step()
    assert not [name for name in row if name.startswith("support/")]
    assert isinstance(row["mismatch/rollout_max"], float)
    assert torch.isfinite(torch.tensor(row["policy/loss"]))
