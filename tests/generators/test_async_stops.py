"""A learner that is stopped while it publishes a policy: the run goes on as if it had never been."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from rlhf_engine.generators import work
from rlhf_engine.training.rl import RlTrainer
from tests.generators.test_async_runs import steps_of
from tests.training.test_data import train_config, write_model
from tests.training.test_rl import same, trained

# the third publication takes its time between two tensors, and says when it is there
PROGRAM = """
import sys, time
from pathlib import Path
import torch
from rlhf_engine.commands import main
from rlhf_engine.generators import sources, work
from rlhf_engine.training import run

run.plot_curves = lambda *paths: None  # most of a short run's time
take, clone, calls = work.take, torch.Tensor.clone, []

def slow_take(slot, version):
    if version != 3:
        return take(slot, version)
    def slow_clone(tensor, *args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            Path(sys.argv[1]).touch()
            time.sleep(float(sys.argv[2]))
        return clone(tensor, *args, **kwargs)
    torch.Tensor.clone = slow_clone
    return take(slot, version)

sources.take = slow_take
sys.exit(main.main(sys.argv[3:]))
"""


OPTIONS = {"async_mode": "overlap", "max_steps": 5, "save_steps": 1, "resume_from_checkpoint": "auto"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory, package_table):
    """A run that was never stopped."""
    return steps_of(model, tmp_path_factory.mktemp("whole") / "run", **OPTIONS)[0]


def test_a_run_that_breaks_in_the_middle_of_a_publication_goes_on(model, whole, tmp_path, monkeypatch):
    """As if it had been killed there: nothing is written after that."""
    copies = iter(range(3))
    clone = torch.Tensor.clone

    def break_off(slot, version):
        if version != 3:
            return work.take(slot, version)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "clone", lambda tensor: (next(copies), clone(tensor))[1])
            return work.take(slot, version)

    with monkeypatch.context() as patch:
        patch.setattr("rlhf_engine.generators.sources.take", break_off)
        with pytest.raises(StopIteration):
            steps_of(model, tmp_path / "parts", **OPTIONS)
    assert next(copies, None) is None
    assert RlTrainer(train_config(model, tmp_path / "parts", **OPTIONS)).state.step == 2
    resumed, _ = steps_of(model, tmp_path / "parts", **OPTIONS)
    assert same(trained(whole), trained(resumed))


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=["ctrl_c", "term", "kill"])
def test_a_run_stopped_in_the_middle_of_a_publication_goes_on(model, whole, tmp_path, how):
    asked = how != signal.SIGKILL  # it ends its step, publication included
    config = train_config(model, tmp_path / "parts", **OPTIONS)
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())
    marker = tmp_path / "publishing"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path])}
    program = [sys.executable, "-c", PROGRAM, str(marker), "1" if asked else "60"]
    command = [*program, "train", "--config", str(path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        until = time.monotonic() + 90
        while not marker.exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        if not marker.exists():
            process.kill()
            raise AssertionError(process.communicate()[0].decode()[-3000:])
        process.send_signal(how)
        assert process.wait(50) == (128 + how if asked else -how)
    assert RlTrainer(config).state.step == (3 if asked else 2)  # what had been published whole and saved
    resumed, _ = steps_of(model, tmp_path / "parts", **OPTIONS)
    assert same(trained(whole), trained(resumed))
