"""A server beside the learner (`--vllm_server_base_url … --async overlap`): a protocol stand-in, which is not vLLM."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_engine.errors import ConfigError, GeneratorError
from rlhf_engine.runs.metrics import read_metrics
from rlhf_engine.scoring.experience import Corrected, both
from rlhf_engine.training.rl import RlTrainer
from tests.rollout.stand_in import StandIn
from tests.training.test_data import train_config, write_model
from tests.training.test_rl import same, trained, without_timings

pytestmark = pytest.mark.usefixtures("short_pauses")

BESIDE = {"async_mode": "overlap", "max_staleness": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def server(model):
    with StandIn(model, name="tiny") as stand_in:
        yield stand_in


def config(model: Path, output: Path, server: StandIn, **changes: Any):
    options = {"vllm_server_base_url": server.url, **BESIDE}
    return train_config(model, output, **{**options, **changes})


def generators_names(server: StandIn) -> list[str]:
    names = [body["lora_name"] for body in server.requests("/v1/load_lora_adapter")]
    return [name.rsplit("-", 2)[1] for name in names if "-behaviour-" in name]


def test_the_floats_are_those_of_answers_drawn_here_by_past_policies(model, server, tmp_path):
    local = RlTrainer(train_config(model, tmp_path / "local", async_mode="replay", max_staleness=1))
    remote = RlTrainer(config(model, tmp_path / "remote", server))
    local.run()
    remote.run()
    ours, theirs = (read_metrics(t.output / "metrics.jsonl") for t in (local, remote))
    for mine, other in zip(ours, theirs, strict=True):
        for name, value in without_timings(mine).items():
            if not name.startswith(("mismatch/", "async/", "seconds/")):
                assert other[name] == pytest.approx(value, rel=2e-3, abs=2e-4), name
        assert other["mismatch/importance_weight_mean"] == pytest.approx(1, abs=1e-4)
        assert other["mismatch/rollout_k3"] < 1e-6
    # versions: 0 0 1 2 …: every batch but the first is one update old
    assert [row.get("staleness/mean") for row in theirs] == [row.get("staleness/mean") for row in ours]
    assert generators_names(server) == [f"v{i}" for i in range(len(theirs) - 1)]
    assert not server.adapters
    assert not (remote.output / "vllm").exists()


def test_a_resumed_run_makes_the_same_floats(model, server, tmp_path):
    whole = RlTrainer(config(model, tmp_path / "whole", server, save_steps=1))
    whole.run()
    cut = RlTrainer(config(model, tmp_path / "cut", server, save_steps=1))
    steps = iter([False, False, True])
    with pytest.raises(Exception, match="stopped"):
        cut.run(stop=lambda: next(steps, True))
    again = RlTrainer(config(model, tmp_path / "cut", server, save_steps=1, resume_from_checkpoint="auto"))
    again.run()
    assert same(trained(whole), trained(again))
    assert not server.adapters


def test_a_server_that_starts_again_loses_nothing(model, server, tmp_path):
    """It breaks off connections, forgets its adapters, and is up again: the item is drawn once more."""
    calm = RlTrainer(config(model, tmp_path / "calm", server))
    calm.run()
    server.answers_left = 7

    def restart() -> None:
        while server.answers_left > 0:
            if done.wait(0.01):
                return
        server.healthy = False
        done.wait(0.1)
        server.adapters.clear()
        server.answers_left = None
        server.healthy = True

    done = threading.Event()
    thread = threading.Thread(target=restart)
    thread.start()
    try:
        shaken = RlTrainer(config(model, tmp_path / "shaken", server))
        shaken.run()
    finally:
        done.set()
        thread.join()
    assert same(trained(calm), trained(shaken))
    names = generators_names(server)
    again = [name for name in set(names) if names.count(name) > 2]  # two runs, and once more
    assert len(again) == 1


def test_a_server_that_does_not_come_back_ends_the_run_and_keeps_the_checkpoint(model, server, tmp_path, monkeypatch):
    for name, seconds in (("SERVER_SECONDS", 0.5), ("SLOWEST", 1e9)):
        monkeypatch.setattr(f"rlhf_engine.rollout.backend.{name}", seconds)
    trainer = RlTrainer(config(model, tmp_path / "run", server, save_steps=1))
    trainer.step()
    trainer.save()
    server.healthy = False
    server.answers_left = 0
    with pytest.raises(GeneratorError, match="RolloutServerError"):
        list(iter(trainer.step, None))
    trainer.source.close()


def test_stopping_does_not_wait_for_answers(model, server, tmp_path):
    trainer = RlTrainer(config(model, tmp_path / "run", server))
    trainer.step()
    server.delays += [30.0] * 40
    began = time.monotonic()
    trainer.source.close()
    trainer.rollouts.close()
    assert time.monotonic() - began < 15


def test_weights_of_both_corrections_multiply():
    one, two = torch.tensor([0.5, 2.0]), torch.tensor([3.0, 0.25])
    old = torch.tensor([-1.0, -2.0])
    found = both(Corrected(torch.zeros(2), one, {"a": 1.0}), Corrected(old, two, {"b": 2.0}))
    assert torch.equal(found.weights_M, one * two)
    assert torch.equal(found.old_logprobs_M, old)
    assert found.metrics == {"a": 1.0, "b": 2.0}
    assert torch.equal(both(Corrected(old, one, {}), Corrected(old, None, {})).weights_M, one)


def test_what_does_not_go_together(model, server, tmp_path):
    with pytest.raises(ConfigError, match="vllm_server_base_url: expected it unset with async 'ray'"):
        config(model, tmp_path, server, async_mode="ray")
    with pytest.raises(ConfigError, match="async_policy: expected 'fixed' or 'newest' with async 'ray' or vllm"):
        config(model, tmp_path, server, async_policy="in_flight")
