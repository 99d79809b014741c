"""Generators as Ray actors: processes whose answers are those of one process, whatever becomes of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_engine.errors import ConfigError, GeneratorError
from rlhf_engine.generators import ray as ray_transport
from rlhf_engine.generators.ray import Generator, RayTransport, _import_ray, generators_on_ray
from rlhf_engine.generators.scheduler import Drawn
from rlhf_engine.rollout import Rollout
from rlhf_engine.runs.metrics import read_metrics
from rlhf_engine.training.rl import RlTrainer
from tests.generators.test_ray_transport import pids
from tests.training.test_data import train_config

pytest.importorskip("ray", reason="Ray is not installed")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def ray():
    """One Ray for all tests here, which they join."""
    found = _import_ray()
    found.init(address="local", num_cpus=3, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield found
    found.shutdown()


class Run:
    """A run that notes what it learns from."""

    def __init__(self, model: Path, output: Path, **options: Any) -> None:
        self.config = train_config(model, output, **options)
        self.transport: RayTransport | None = None
        self.drawn: list[Rollout] = []
        self.rows: list[dict[str, float]] = []
        self.drawn_by: set[str] = set()

    def __call__(self, on_step=lambda run: None) -> Run:
        with contextlib.ExitStack() as stack:
            if self.config.async_kind == "ray":
                start = stack.enter_context(generators_on_ray(self.config))
                self.trainer = RlTrainer(self.config, connect=lambda *given: self._note(start(*given)))
            else:
                self.trainer = RlTrainer(self.config)
            stack.enter_context(contextlib.closing(self.trainer.source))
            draw = self.trainer.source.draw

            def noted(step, version, lap):
                rollout, metrics = draw(step, version, lap)
                self.drawn.append(rollout)
                return rollout, metrics

            self.trainer.source.draw = noted  # type: ignore[method-assign]
            while self.trainer.state.step < self.config.max_steps:
                self.rows.append(self.trainer.step())
                on_step(self)
        return self

    def _note(self, transport: RayTransport) -> RayTransport:
        next_event = transport.next_event

        def noted(timeout):
            event = next_event(timeout)
            if isinstance(event, Drawn):
                self.drawn_by.add(event.worker)
            return event

        transport.next_event = noted  # type: ignore[method-assign]
        self.transport = transport
        return transport


def when_all_are_up(run: Run) -> None:
    """Steps are faster here than processes start."""
    until = time.monotonic() + 60
    while len(pids(run.transport)) < run.config.ray_generators:
        assert time.monotonic() < until
        time.sleep(0.1)


def require_same_answers(run: Run, replay: Run) -> None:
    """Tokens are equal; floats differ by what another shape of batch rounds differently."""
    n = run.config.generation_batch_size
    for step, (found, expected) in enumerate(zip(run.drawn, replay.drawn, strict=True)):
        assert found.batch.sample_ids == tuple(range(step * n, (step + 1) * n))  # each once, none left out
        assert found.batch.tokens_T.tolist() == expected.batch.tokens_T.tolist()
        assert found.versions_M.tolist() == expected.versions_M.tolist()
        torch.testing.assert_close(found.logprobs_M, expected.logprobs_M, atol=1e-4, rtol=0)
    assert [row["staleness/max"] for row in run.rows] == [row["staleness/max"] for row in replay.rows]


@pytest.mark.parametrize(
    ("generators", "steps"), [(1, 3), pytest.param(2, 6, marks=pytest.mark.long)], ids=["one", "two"]
)
def test_other_processes_draw_what_this_one_draws(ray, model, tmp_path, generators, steps):
    threads = torch.get_num_threads()
    options = {"async_mode": f"ray={generators}", "max_steps": steps}
    run = Run(model, tmp_path / "ray", **options)(when_all_are_up)
    replay = Run(model, tmp_path / "replay", async_mode="replay", max_steps=steps)()
    require_same_answers(run, replay)
    assert run.drawn_by == {f"generator {i + 1}" for i in range(generators)}
    sent = [row["async/published_bytes"] for row in run.rows]
    slot = sum(p.numel() * p.element_size() for p in run.trainer.model.backbone().slot("actor").parameters())
    assert generators * slot < sent[-1] < generators * (slot + 4096)  # and the names of its tensors
    assert not run.transport.losses
    assert pids(run.transport) == {}  # all ended with the run
    assert torch.get_num_threads() == threads


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": "remax", "max_staleness": 2},
        {"algorithm": "rloo", "async_mode": "ray=3"},
        {"method": "dynamic_lora_ppo"},
        {"method": "lora_ppo", "kl_estimator": "exact"},
    ],
    ids=["remax", "rloo", "dynamic_lora", "exact_kl"],
)
def test_other_algorithms_and_methods(ray, model, tmp_path, options):
    run = Run(model, tmp_path / "ray", **{"async_mode": "ray=2", **options})(when_all_are_up)
    replay = Run(model, tmp_path / "replay", **{**options, "async_mode": "replay"})()
    require_same_answers(run, replay)


@pytest.mark.long
def test_a_run_that_is_taken_up_draws_what_it_would_have_drawn(ray, model, tmp_path):
    options = {"save_steps": 1, "resume_from_checkpoint": "auto", "max_staleness": 2}
    whole = Run(model, tmp_path / "replay", async_mode="replay", max_steps=5, **options)()
    first = Run(model, tmp_path / "ray", async_mode="ray", max_steps=3, **options)(lambda run: run.trainer.save())
    second = Run(model, tmp_path / "ray", async_mode="ray", max_steps=5, **options)()
    assert (len(first.drawn), len(second.drawn)) == (3, 2)
    second.drawn, second.rows = first.drawn + second.drawn, first.rows + second.rows
    require_same_answers(second, whole)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:generator")
@pytest.mark.parametrize("killed", [True, False], ids=["killed", "silent"])
def test_one_that_is_killed_or_falls_silent_while_it_draws_is_replaced(ray, model, tmp_path, killed, monkeypatch):
    """It is stopped first, so that the signal comes while it has work."""
    for place in () if killed else ("sources", "ray"):
        monkeypatch.setattr(f"rlhf_engine.generators.{place}.SILENCE", 2.0)
    run = Run(model, tmp_path / "ray", async_mode="ray=2", max_steps=8)

    def on_step(run: Run) -> None:
        if run.trainer.state.step == 2:
            when_all_are_up(run)
            pid = pids(run.transport)["generator 1"]
            os.kill(pid, signal.SIGSTOP)
            if killed:
                threading.Timer(1.0, lambda: os.kill(pid, signal.SIGKILL)).start()

    run(on_step)
    (loss,) = run.transport.losses
    assert loss.worker == "generator 1"
    said = "worker process has died" if killed else "generator 1 has drawn no token of the answers of step"
    assert said in str(loss.cause)
    assert isinstance(loss.cause, TimeoutError) != killed
    require_same_answers(run, Run(model, tmp_path / "replay", async_mode="replay", max_steps=8)())


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:generator")
def test_the_only_one_is_killed_and_the_learner_waits_for_the_next(ray, model, tmp_path):
    run = Run(model, tmp_path / "ray", async_mode="ray")

    def on_step(run: Run) -> None:
        if run.trainer.state.step == 1:
            os.kill(pids(run.transport)["generator 1"], signal.SIGKILL)
        elif run.trainer.state.step == 3:
            assert list(pids(run.transport)) == ["generator 2"]

    run(on_step)
    require_same_answers(run, Run(model, tmp_path / "replay", async_mode="replay")())


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:generator")
def test_what_a_generator_raises_ends_the_run(ray, model, tmp_path, monkeypatch):
    class Failing(Generator):  # not of this module, which the other process may not find
        def draw(self, prompts, version, keep):
            if prompts["sample_ids"][0] == 2 * len(prompts["rows"]):  # the third step's
                raise ZeroDivisionError("of the third step")
            return super().draw(prompts, version, keep)

    monkeypatch.setattr(ray_transport, "Generator", Failing)
    monkeypatch.setattr("rlhf_engine.generators.ray.RESTARTS", 0)
    run = Run(model, tmp_path / "ray", async_mode="ray")
    with pytest.raises(GeneratorError, match="step 3; the last one ended with ZeroDivisionError: of the thir") as found:
        run()
    assert isinstance(found.value.__cause__, ZeroDivisionError)
    assert "in draw" in str(found.value.__cause__.__cause__)  # where, in the other process
    assert [loss.worker for loss in run.transport.losses] == ["generator 1"]


def test_more_generators_than_there_is_room_for(ray, model, tmp_path):
    config = train_config(model, tmp_path / "run", async_mode="ray=4")
    message = r"async: expected ray with at most 3, .* where Ray has 3 CPUs .*; got 4"
    with pytest.raises(ConfigError, match=message), generators_on_ray(config):
        pass


def test_a_trainer_has_to_be_told_how_to_reach_them(model, tmp_path):
    with pytest.raises(ConfigError, match="expected RlTrainer's `connect` with 'ray'"):
        RlTrainer(train_config(model, tmp_path / "run", async_mode="ray"))


def test_an_address_where_nobody_answers(model, tmp_path, monkeypatch):
    monkeypatch.setattr(_import_ray(), "is_initialized", lambda: False)  # whatever other tests have started
    began = time.monotonic()
    for address in ("127.0.0.1:9", "no-such-host.invalid:6379", "127.0.0.1:99999"):
        monkeypatch.setenv("RAY_ADDRESS", address)
        config = train_config(model, tmp_path / "run", async_mode="ray")
        message = f"RAY_ADDRESS: expected the address of a running cluster's head, got '{address}'"
        with pytest.raises(ConfigError, match=message), generators_on_ray(config):
            pass
    assert time.monotonic() - began < 15


def command(model: Path, output: Path, **options: Any) -> list[str]:
    config = train_config(model, output, async_mode="ray", **options)
    path = output.parent / "train.yaml"
    path.write_text(config.to_yaml())
    return [sys.executable, "-m", "rlhf_engine", "train", "--config", str(path)]


def processes_with(text: str) -> list[str]:
    """Command lines of what runs and names `text`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if text in line or text in os.readlink(folder / "cwd"):
                found.append(line)
    return found


@pytest.mark.long
def test_the_command_starts_ray_and_ends_it(model, tmp_path):
    found = subprocess.run(
        command(model, tmp_path / "run"), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert found.returncode == 0, found.stderr
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 4
    assert (tmp_path / "run" / "final").is_dir()
    said = found.stdout + found.stderr
    assert not [word for word in ("raylet", "dashboard", "usage stats", "Warning") if word in said], said


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_generators_end_with_the_learner(model, tmp_path, how):
    """A terminal's Ctrl-C goes to every process of the group."""
    (tmp_path / "here").mkdir()
    line = command(model, tmp_path / "run", max_steps=100_000)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}:{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.Popen(
        line, cwd=tmp_path / "here", env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    until = time.monotonic() + 90
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.is_file() and metrics.stat().st_size):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.2)
    assert len(processes_with(str(tmp_path / "here"))) > 1  # Ray's and the generator
    if how == signal.SIGINT:
        os.killpg(process.pid, how)
        _, said = process.communicate(timeout=30)
        assert process.returncode == 130, said
        assert "stopped" in said
        assert "is lost" not in said
    else:
        process.kill()
        process.wait()
    until = time.monotonic() + 20
    # Ray's own agents, which hold no model, take a minute to see that their machine's manager is gone
    while left := [line for line in processes_with(str(tmp_path / "here")) if "Agent" not in line]:
        assert time.monotonic() < until, left
        time.sleep(0.2)
