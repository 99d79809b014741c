"""The examples of environments run as they are: a tiny model is made, and trained by their rewards."""

import importlib.util
import math
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_engine.runs.metrics import read_metrics

FOLDER = Path(__file__).parents[2] / "examples" / "environments"
PACKAGES = {
    "openenv_echo": "openenv",
    "reasoning_gym_chain_sum": "reasoning_gym",
    "textarena_guess": "textarena",
    "verifiers_tools": "verifiers",
}


ADDS = """
class Adds:
    def reset(self, **row):
        return "times 7"

    def multiply(self, a: int, b: int) -> int:
        '''Multiply.

        Args:
            a: first
            b: second
        '''
        return a * b

    def get_reward(self):
        return 1.0
"""


def rewards(folder: Path) -> list[float]:
    """Mean reward of each step of a run."""
    return [row["reward"] for row in read_metrics(folder / "run" / "metrics.jsonl") if "reward" in row]


def test_the_calculator_trains_and_samples_show_what_reset_adds(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    from examples.environments import calculator, tiny

    few = {"generation_batch_size": 16, "max_completion_length": 24}
    assert calculator.main(tmp_path, steps=30, max_steps=2, **few) == 0
    assert len(rewards(tmp_path)) == 2
    assert all(0 <= reward <= 1 for reward in rewards(tmp_path))

    (tmp_path / "adds.py").write_text(ADDS)
    rows = [{"prompt": [{"role": "user", "content": "5 "}]}] * 2
    assert tiny.train(tmp_path, f"{tmp_path}/adds.py:Adds", rows, max_steps=1, **few) == 0
    assert "5 times 7" in (tmp_path / "run" / "samples.md").read_text()  # what was read, not what the row says


@pytest.mark.long
@pytest.mark.parametrize("name", ["calculator", *PACKAGES])
def test_the_reward_of_an_example_climbs(name, tmp_path):
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name])
    command = [sys.executable, FOLDER / f"{name}.py", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = rewards(tmp_path)
    assert math.fsum(found[-5:]) > math.fsum(found[:5]) + 0.5, found


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_that_is_missing_is_named_in_one_line(name):
    if importlib.util.find_spec(PACKAGES[name]) is not None:
        pytest.skip(f"{PACKAGES[name]} is installed")
    done = subprocess.run([sys.executable, FOLDER / f"{name}.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("pip install ")
    assert len(done.stderr.splitlines()) == 1
