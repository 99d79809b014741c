"""Runs with an environment make the same floats killed and taken up, beside the updates, and in other processes."""

import contextlib
import itertools
import signal
from pathlib import Path
from typing import Any

import pytest

from examples.environments.calculator import questions
from rlhf_engine.runs.metrics import read_metrics
from rlhf_engine.training.rl import RlTrainer
from tests.conversations import scored
from tests.generators import test_ray
from tests.generators.test_async_runs import ages, steps_of, without_timings
from tests.generators.test_ray import Run, require_same_answers, when_all_are_up
from tests.training.test_data import train_config, write_rows
from tests.training.test_resume import start, steps_logged, wait_for
from tests.training.test_rl import same, trained

ray = test_ray.ray
RESUMED = {"max_steps": 4, "save_steps": 1, "resume_from_checkpoint": "auto"}


def options_of(folder: Path, **options: Any) -> dict[str, Any]:
    """Options of a run with the environment, on questions in the folder."""
    return {
        "dataset_name": str(write_rows(folder / "questions.jsonl", questions(6))),
        "environment": f"{scored.__file__}:Scored",
        "max_completion_length": 40, "max_turns": 3, "learning_rate": 1e-2, **options,
    }  # fmt: skip


def stopped(model: Path, output: Path, at: int, **options: Any) -> None:
    """A run that is lost in the step after `at` saved ones."""
    trainer = RlTrainer(train_config(model, output, **options))
    with contextlib.closing(trainer.source):
        for _ in range(at):
            trainer.step()
            trainer.save()
        trainer.step()


GRPO = {"algorithm": "grpo", "num_generations": 4, "advantage_level": "turn"}
PPO = {"algorithm": "ppo"}


@pytest.mark.parametrize(
    "options",
    [pytest.param(GRPO, id="grpo"), pytest.param({**PPO, "max_staleness": 2}, id="ppo", marks=pytest.mark.long)],
)
def test_beside_the_updates_stopped_or_not_the_floats_are_the_same(caller, tmp_path, options):
    options = options_of(tmp_path, **options, **RESUMED)
    replay, rows = steps_of(caller, tmp_path / "replay", async_mode="replay", **options)
    assert max(row["tools/calls"] for row in rows) > 0
    most = options.get("max_staleness", 1)
    assert ages(rows) == [min(step, most) for step in range(4)]
    options["async_mode"] = "overlap"
    stopped(caller, tmp_path / "overlap", 2, **options)
    overlap, others = steps_of(caller, tmp_path / "overlap", **options)
    assert without_timings(rows[2:]) == without_timings(others)
    assert same(trained(replay), trained(overlap))
    assert replay.state == overlap.state


def test_in_flight_every_token_says_which_policy_drew_it(caller, tmp_path):
    """No floats are promised: when a new policy comes is a matter of time."""
    found = []
    config = train_config(caller, tmp_path / "run", async_mode="overlap,in_flight", **options_of(tmp_path, **GRPO))
    trainer = RlTrainer(config)
    draw = trainer.source.draw

    def noted(step, version, lap):
        rollout, metrics = draw(step, version, lap)
        found.append(rollout)
        return rollout, metrics

    trainer.source.draw = noted  # type: ignore[method-assign]
    with contextlib.closing(trainer.source):
        for _ in range(4):
            assert trainer.step()["staleness/max"] <= 1
    for step, rollout in enumerate(found):
        assert rollout.batch.n_completion_tokens == len(rollout.versions_M)
        each = [rollout.versions_M[a:b].tolist() for a, b in itertools.pairwise(rollout.batch.completion_cu)]
        assert each == list(map(sorted, each))
        assert {max(0, step - 1), step} >= set(rollout.versions_M.tolist())


@pytest.mark.long
@pytest.mark.parametrize("mode", ["off", "overlap"])
def test_killed_and_taken_up_a_run_makes_the_same_floats(caller, tmp_path, mode, package_table, survived):
    options = options_of(tmp_path, **GRPO, async_mode=mode, **{**RESUMED, "max_steps": 6, "save_total_limit": 1})
    whole, rows = steps_of(caller, tmp_path / "whole", **options)
    config = train_config(caller, tmp_path / "run", **options)
    for since in (0, 2):
        with start(config, tmp_path / "run.yaml") as process:
            wait_for(lambda: steps_logged(tmp_path / "run") > since, process)  # noqa: B023
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert steps_logged(tmp_path / "run") < 6
    resumed = RlTrainer(config)
    resumed.run()
    assert same(trained(whole), trained(resumed))
    logged = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert without_timings(logged) == without_timings([{"step": i + 1, **row} for i, row in enumerate(rows)])
    survived("kills", 2)


@pytest.mark.long
def test_other_processes_hold_the_conversations_that_this_one_holds(ray, caller, tmp_path):
    options = options_of(tmp_path, **GRPO, max_steps=3)
    run = Run(caller, tmp_path / "ray", async_mode="ray=2", **options)(when_all_are_up)
    replay = Run(caller, tmp_path / "replay", async_mode="replay", **options)()
    require_same_answers(run, replay)
    assert run.drawn_by <= {"generator 1", "generator 2"}  # one may be done before the other has begun
    for found, expected in zip(run.drawn, replay.drawn, strict=True):
        assert found.talks == expected.talks
        assert found.batch.turns == expected.batch.turns
        assert not (found.logprobs_M != expected.logprobs_M).any()
    assert same(trained(run.trainer), trained(replay.trainer))
