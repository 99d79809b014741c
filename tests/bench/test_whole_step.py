"""A whole step of a tiny model: what its record and its picture have."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import tiny_llama

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"batch": 3, "prompt": 5, "answer": 4, "micro-batch": 2, "dtype": "float32", "device": "cpu"}


def run(shape, algorithm, out):
    options = {**SMALL, "shape": shape, "algorithm": algorithm, "out": out}
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    command = [sys.executable, str(ROOT / "bench" / "studies" / "whole_step.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize("algorithm", ["ppo", pytest.param("grpo", marks=pytest.mark.long)])
def test_a_step_says_where_its_seconds_go(tmp_path, algorithm):
    tiny_llama().config.save_pretrained(tmp_path / "tiny")
    done = run(tmp_path / "tiny", algorithm, tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / f"tiny-{algorithm}.json").read_text())
    assert list(record["seconds"]) == list(record["first_seconds"]) == ["generation", "scoring", "update"]
    assert all(seconds > 0 for seconds in record["seconds"].values())
    assert record["capture_seconds"] is record["launches_per_layer"] is record["peak_bytes"] is None  # no GPU
    seconds = [row["seconds"] for row in record["kernels"]]
    assert len(seconds) == 20
    assert seconds == sorted(seconds, reverse=True)
    assert {row["phase"] for row in record["kernels"]} <= set(record["seconds"])
    assert set(record["tokens_per_second"]) == {"rollout", "transformers.generate"}
    assert record["tokens_per_second"]["rollout"] == pytest.approx(12 / record["seconds"]["generation"])
    assert (tmp_path / f"tiny-{algorithm}.png").read_bytes().startswith(b"\x89PNG")
    assert f"tiny-{algorithm}: " in done.stdout


def test_an_unknown_shape_is_refused(tmp_path):
    done = run("llama-9b", "ppo", tmp_path / "out")
    assert done.returncode == 2
    assert "got 'llama-9b'; did you mean 'llama-8b'?" in done.stderr
    assert not (tmp_path / "out").exists()
