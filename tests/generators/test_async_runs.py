"""Runs whose answers are drawn beside the updates: the same floats as one after the other, stopped or not."""

import contextlib
import dataclasses
import itertools
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_engine.errors import ConfigError, GeneratorError, MismatchError
from rlhf_engine.generators import work as versions
from rlhf_engine.generators.sources import Worker
from rlhf_engine.generators.work import digest
from rlhf_engine.hydra import load_pretrained
from rlhf_engine.rollout.engine import RolloutEngine
from rlhf_engine.runs.metrics import read_metrics
from rlhf_engine.training.rl import RlTrainer
from tests.training.test_data import train_config
from tests.training.test_rl import Stop, same, stop_after, trained

TIMINGS = ("seconds/", "tokens_per_second", "samples_per_second", "peak_memory_bytes", "async/")


def without_timings(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if not name.startswith(TIMINGS)} for row in rows]


def steps_of(model: Path, output: Path, **options: Any) -> tuple[RlTrainer, list[dict[str, Any]]]:
    """All steps of a run without its plots and its final model; the metrics of each."""
    config = train_config(model, output, **options)
    trainer = RlTrainer(config)
    rows = []
    with contextlib.closing(trainer.source):
        while trainer.state.step < config.max_steps:
            rows.append(trainer.step())
            if config.save_steps:
                trainer.save()
    return trainer, rows


def ages(rows: list[dict[str, Any]]) -> list[float]:
    return [row["staleness/max"] for row in rows]


CASES = {
    "ppo": {"lora_dropout": 0.2},
    "ppo_decoupled": {"off_policy_correction": "decoupled", "gradient_checkpointing": True},
    "two_behind": {"max_staleness": 2, "off_policy_correction": "token_truncate"},
    "j_hydra": {"method": "j_hydra_ppo"},
    "remax": {"algorithm": "remax", "generation_batch_size": 8},
    "rloo": {"algorithm": "rloo"},
    "grpo": {"algorithm": "grpo", "off_policy_correction": "sequence_truncate"},
    "online_dpo": {"algorithm": "online_dpo"},
    "best_of_n": {"algorithm": "best_of_n"},
    "reinforce": {"algorithm": "reinforce"},
}


SHORTLY = ("two_behind", "grpo")  # others take their ways, too


@pytest.mark.parametrize(
    "options", [pytest.param(v, id=k, marks=[pytest.mark.long] * (k not in SHORTLY)) for k, v in CASES.items()]
)
def test_beside_or_one_after_the_other_the_floats_are_the_same(model, tmp_path, options):
    options = {"max_steps": 5, **options}
    beside, rows = steps_of(model, tmp_path / "beside", async_mode="overlap", **options)
    replay, again = steps_of(model, tmp_path / "replay", async_mode="replay", **options)
    assert same(trained(beside), trained(replay))
    assert without_timings(rows) == without_timings(again)
    most = options.get("max_staleness", 1)
    assert ages(rows) == [min(step, most) for step in range(5)]
    of_async = ("max_staleness", "off_policy_correction")
    alone, _ = steps_of(model, tmp_path / "alone", **{k: v for k, v in options.items() if k not in of_async})
    assert not same(trained(beside), trained(alone))  # or being behind would have changed nothing


def test_a_policy_for_several_batches(model, tmp_path):
    _, rows = steps_of(model, tmp_path / "blocks", async_mode="blocks", max_staleness=2, max_steps=7)
    assert ages(rows) == [0, 1, 2, 0, 1, 2, 0]
    assert "staleness/k3" not in rows[0]  # the present policy drew them
    assert rows[1]["staleness/k3"] > 0
    # recomputed by the policy that drew them, log-probs are what the rollout said
    assert max(row["mismatch/rollout_max"] for row in rows) < 1e-4


def test_ratios_are_to_the_policy_that_drew(model, tmp_path):
    """With ratios to the drawing policy the first minibatch's differ from 1, with any other correction they do not."""
    found = {}
    for correction in ("behaviour", "decoupled", "none"):
        output = tmp_path / correction
        once = {"num_ppo_epochs": 1, "num_mini_batches": 1, "cliprange": 1e-3}
        _, rows = steps_of(
            model, output, async_mode="blocks", max_staleness=1, max_steps=2, off_policy_correction=correction, **once
        )
        found[correction] = rows[1]["clip_ratio"]
        assert rows[1]["mismatch/update_max"] < 1e-5, "to the policy before the update"
    assert found["behaviour"] > 0.1
    assert found["decoupled"] == found["none"] == 0


RESUMED = {"max_steps": 5, "save_steps": 1, "resume_from_checkpoint": "auto"}


@pytest.fixture(
    scope="module",
    params=[
        {"async_mode": "overlap", "max_staleness": 2},
        pytest.param({"async_mode": "blocks", "max_staleness": 2, "method": "j_hydra_ppo"}, marks=pytest.mark.long),
    ],
    ids=["overlap", "batches per policy"],
)
def uninterrupted(request, model, tmp_path_factory):
    """Options of a run, which was never stopped, and its steps."""
    options = {**RESUMED, **request.param}
    return options, *steps_of(model, tmp_path_factory.mktemp("whole") / "run", **options)


@pytest.mark.parametrize("at", [2, *(pytest.param(at, marks=pytest.mark.long) for at in (1, 3, 4))])
def test_a_resumed_run_makes_the_same_floats(model, tmp_path, uninterrupted, at):
    options, whole, rows = uninterrupted
    stopped = RlTrainer(train_config(model, tmp_path / "parts", **options))
    with contextlib.closing(stopped.source):
        for step in range(at + 1):
            stopped.step()
            if step < at:  # what comes after is lost with the stop
                stopped.save()
    resumed, others = steps_of(model, tmp_path / "parts", **options)
    assert len(others) == 5 - at
    assert same(trained(whole), trained(resumed))
    assert without_timings(rows[at:]) == without_timings(others)
    assert whole.state == resumed.state


def test_a_run_may_be_taken_up_without_async_and_with(model, tmp_path):
    options = {"save_steps": 1, "resume_from_checkpoint": "auto"}
    steps_of(model, tmp_path / "run", async_mode="overlap", max_steps=2, **options)
    alone, _ = steps_of(model, tmp_path / "run", max_steps=4, **options)
    assert alone.state.step == 4
    _, rows = steps_of(model, tmp_path / "run", async_mode="overlap", max_steps=6, **options)
    assert ages(rows) == [0, 1]


def test_a_run_that_breaks_in_the_middle_of_a_publication_goes_on(model, tmp_path, monkeypatch):
    """As if it had been killed there: nothing is written after that."""
    options = {"async_mode": "overlap", **RESUMED}
    whole, _ = steps_of(model, tmp_path / "whole", **options)
    copies = iter(range(3))
    clone = torch.Tensor.clone

    def break_off(slot, version):
        if version != 3:
            return versions.take(slot, version)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "clone", lambda tensor: (next(copies), clone(tensor))[1])
            return versions.take(slot, version)

    with monkeypatch.context() as patch:
        patch.setattr("rlhf_engine.generators.sources.take", break_off)
        with pytest.raises(RuntimeError, match="raised StopIteration"):
            steps_of(model, tmp_path / "parts", **options)
    assert next(copies, None) is None
    assert RlTrainer(train_config(model, tmp_path / "parts", **options)).state.step == 2
    resumed, _ = steps_of(model, tmp_path / "parts", **options)
    assert same(trained(whole), trained(resumed))


def test_copies_of_the_policy_are_not_saved(model, tmp_path):
    trainer = RlTrainer(train_config(model, tmp_path / "run", async_mode="overlap", max_steps=2))
    trainer.run()
    assert ages(read_metrics(trainer.output / "metrics.jsonl")) == [0, 1]
    final = load_pretrained(trainer.output / "final")
    assert set(final.roles) == {"actor", "reference", "critic", "reward"}
    assert sorted(p.name for p in (trainer.output / "final" / "slots").iterdir()) == ["critic"]


@pytest.mark.parametrize(
    "mode",
    ["overlap,in_flight", *(pytest.param(mode, marks=pytest.mark.long) for mode in ("overlap", "overlap,newest"))],
)
def test_every_token_is_of_a_whole_policy_and_says_which(model, tmp_path, monkeypatch, mode):
    """Copying is slow, in both directions; with every token the slot's bytes are those of the version it notes."""
    clone, take, step = torch.Tensor.clone, versions.take, RolloutEngine.step
    known: dict[int, str] = {}
    wrong: list[tuple[int, str]] = []
    seen: list[int] = []

    def slow_take(slot, version):
        def slow_clone(tensor, *args, **kwargs):
            time.sleep(0.001)
            return clone(tensor, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "clone", slow_clone)
            snapshot = take(slot, version)
        known[version] = digest(snapshot.tensors)
        return snapshot

    def watched(engine):
        answers = step(engine)
        if threading.current_thread().name == "generator":
            slot = engine.backbone.slot("behaviour")
            found, version = digest(dict(slot.named_parameters())), engine.versions["behaviour"]
            seen.append(version)
            if found != known[version]:
                wrong.append((version, found))
        return answers

    monkeypatch.setattr("rlhf_engine.generators.sources.take", slow_take)
    monkeypatch.setattr(RolloutEngine, "step", watched)
    _, rows = steps_of(model, tmp_path / mode, async_mode=mode, max_staleness=2, max_steps=6)
    assert not wrong
    assert len(set(seen)) >= 3
    assert max(ages(rows)) <= 2


def test_answers_go_on_with_a_newer_policy(model, tmp_path, monkeypatch):
    """In flight, one answer may be of several policies; its tokens say which, and the recorded log-probs stand.

    The learner publishes the policy after s updates once step s has its first tokens, the generator goes on after that.
    """
    steps = 6
    begun, published = ([threading.Event() for _ in range(steps)] for _ in range(2))
    begin, step = Worker.__call__, RolloutEngine.step
    drawing: list[int] = []

    def noted_begin(worker, prompts, version):
        drawing.append(prompts.sample_ids[0] // len(prompts))
        return begin(worker, prompts, version)

    def held(engine):
        answers = step(engine)
        now = drawing[-1] if drawing else 0  # 0: samples
        if now > 0 and not begun[now].is_set():
            begun[now].set()
            assert published[now].wait(60)
        return answers

    monkeypatch.setattr(Worker, "__call__", noted_begin)
    monkeypatch.setattr(RolloutEngine, "step", held)
    found = []
    trainer = RlTrainer(train_config(model, tmp_path / "run", async_mode="overlap,in_flight", max_steps=steps))
    draw, learned = trainer.source.draw, trainer.source.learned

    def noted(step, version, lap):
        rollout, metrics = draw(step, version, lap)
        found.append(rollout)
        return rollout, metrics

    def published_in_time(done, version):
        if done < steps:
            assert begun[done].wait(60)
        metrics = learned(done, version)
        if done < steps:
            published[done].set()
        return metrics

    monkeypatch.setattr(trainer.source, "draw", noted)
    monkeypatch.setattr(trainer.source, "learned", published_in_time)
    trainer.run()
    assert [len(set(rollout.versions_M.tolist())) for rollout in found] == [1] + [2] * (steps - 1)
    for rollout in found:
        cu = rollout.batch.completion_cu
        for a, b in itertools.pairwise(cu):
            assert rollout.versions_M[a:b].tolist() == sorted(rollout.versions_M[a:b].tolist())


def test_a_generator_that_raises_ends_the_run_with_its_cause(model, tmp_path, monkeypatch, survived):
    options = {"async_mode": "overlap", "max_steps": 5, "save_steps": 1}
    whole, _ = steps_of(model, tmp_path / "whole", **options)
    step, calls = RolloutEngine.step, []

    def failing(engine):
        if threading.current_thread().name == "generator":
            calls.append(1)
            if len(calls) == 25:
                raise OSError("the device is gone")
        return step(engine)

    config = train_config(model, tmp_path / "parts", resume_from_checkpoint="auto", **options)
    with monkeypatch.context() as patch:
        patch.setattr(RolloutEngine, "step", failing)
        with pytest.raises(GeneratorError, match="OSError: the device is gone") as found:
            RlTrainer(config).run()
    assert isinstance(found.value.__cause__, OSError)
    assert not [thread for thread in threading.enumerate() if thread.name in ("generator", "scheduler")]
    assert RlTrainer(config).state.step >= 1
    resumed, _ = steps_of(model, tmp_path / "parts", resume_from_checkpoint="auto", **options)
    assert same(trained(whole), trained(resumed))
    survived("faults", 1)


def test_a_generator_that_hangs_ends_the_run(model, tmp_path, monkeypatch, survived):
    step, release = RolloutEngine.step, threading.Event()

    def hanging(engine):
        if threading.current_thread().name == "generator":
            release.wait(20)
        return step(engine)

    monkeypatch.setattr(RolloutEngine, "step", hanging)
    monkeypatch.setattr("rlhf_engine.generators.sources.SILENCE", 1.0)
    config = train_config(model, tmp_path / "run", async_mode="overlap")
    with pytest.raises(GeneratorError, match="has drawn no token of the answers of step 1 for 1 seconds"):
        RlTrainer(config).run()
    release.set()
    survived("faults", 1)


def test_threads_end_with_the_run_and_cores_come_back(model, tmp_path):
    before = torch.get_num_threads()
    config = train_config(model, tmp_path / "run", async_mode="overlap")
    with pytest.raises(Stop):
        RlTrainer(config).run(stop_after(1))
    assert torch.get_num_threads() == before
    assert not [thread for thread in threading.enumerate() if thread.name in ("generator", "scheduler")]


def test_a_wrong_policy_in_the_slot_is_noticed(model, tmp_path, monkeypatch):
    """The training forward must say of the drawing policy what the generator said, else it drew by another."""
    trainer = RlTrainer(train_config(model, tmp_path / "run", async_mode="replay", learning_rate=0.05))
    trainer.step()
    trainer.step()
    draw, hold = Worker.__call__, trainer.source._hold

    def mistaken(policy):
        with torch.no_grad():
            for tensor in policy.tensors.values():
                tensor.add_(0.05)
        hold(policy)

    # the learner scores by frozen roles itself
    monkeypatch.setattr(Worker, "__call__", lambda *args: dataclasses.replace(draw(*args), frozen=None))
    monkeypatch.setattr(trainer.source, "_hold", mistaken)
    with (
        contextlib.closing(trainer.source),
        pytest.raises(MismatchError, match="rollout and training log-probs differ"),
    ):
        trainer.step()


def test_requests_that_contradict_themselves(model, tmp_path):
    for options, message in (
        ({"async_mode": "overlap", "max_staleness": 0}, "max_staleness: expected at least 1 with async 'overlap'"),
        ({"max_staleness": 3}, "max_staleness: expected it unset without async"),
        ({"async_mode": "replay,newest"}, "async_mode: expected off, blocks, .* got 'replay,newest'"),
        ({"async_mode": "overlap=2"}, "async_mode: expected .* ray=GENERATORS, .* got 'overlap=2'"),
        ({"async_mode": "ray,in_flight"}, "async_mode: expected .* overlap with ,in_flight, got 'ray,in_flight'"),
        ({"async_mode": "ray", "max_staleness": 0}, "max_staleness: expected at least 1 with async 'ray'"),
        ({"off_policy_correction": "none"}, "off_policy_correction: expected it unset where every step"),
        ({"async_mode": "overlap", "method": "full_ppo"}, "got method 'full_ppo'"),
        (
            {"async_mode": "overlap", "algorithm": "online_dpo", "off_policy_correction": "behaviour"},
            "off_policy_correction: expected one of none for sigmoid online_dpo",
        ),
        (
            {"async_mode": "overlap", "algorithm": "rloo", "off_policy_correction": "decoupled"},
            "expected one of behaviour, sequence_truncate, none for proximal rloo",
        ),
        (
            {"async_mode": "overlap", "off_policy_correction": "behaviour=3"},
            "off_policy_correction: expected no number but of token_truncate, .* got 'behaviour=3'",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            train_config(model, tmp_path / "run", **options)


def test_bytes_of_a_publication(model, tmp_path):
    trainer, rows = steps_of(model, tmp_path / "run", async_mode="overlap", max_steps=3)
    slot = sum(p.numel() * p.element_size() for p in trainer.model.backbone().slot("actor").parameters())
    assert [row["async/published_bytes"] for row in rows] == [slot] * 3
    _, rows = steps_of(model, tmp_path / "replay", async_mode="replay", max_steps=1)
    assert "async/published_bytes" not in rows[0]
