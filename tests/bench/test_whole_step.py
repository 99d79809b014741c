"""A whole step of a tiny model: what its record and its picture have."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "--shape",
    "tiny",
    "--batch",
    "3",
    "--prompt",
    "5",
    "--answer",
    "4",
    "--micro-batch",
    "2",
    "--dtype",
    "float32",
)


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_a_step_says_where_its_seconds_go(tmp_path, algorithm):
    command = [sys.executable, str(ROOT / "bench" / "whole_step.py"), *SMALL, "--algorithm", algorithm]
    done = subprocess.run(
        [*command, "--device", "cpu", "--out", str(tmp_path)], capture_output=True, text=True, check=False, timeout=300
    )
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
