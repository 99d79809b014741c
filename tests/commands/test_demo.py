"""The demo from the command line: everything runs in miniature; at full size it keeps its promise for three seeds."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_engine.commands.main import main
from rlhf_engine.runs.metrics import read_metrics


def demo_here(capsys, folder: Path, *options: str) -> tuple[dict[str, float], str]:
    """As below, without another process."""
    assert main(["demo", "--output_dir", str(folder), *options]) == 0
    return json.loads((folder / "result.json").read_text()), capsys.readouterr().out


def run_demo(folder: Path, *options: str) -> tuple[dict[str, float], str]:
    """The result that `rlhf-engine demo` leaves, and what it prints."""
    command = [sys.executable, "-m", "rlhf_engine", "demo", "--output_dir", str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "result.json").read_text()), done.stdout


def test_the_quick_demo_runs_everything_and_leaves_what_it_says(tmp_path, capsys):
    result, shown = demo_here(capsys, tmp_path / "demo", "--quick")
    assert {"win_rate", "kl", "reward_before", "reward_after", "seconds", "peak_memory_bytes"} <= set(result)
    assert 0 <= result["win_rate"] <= 1
    assert result["parameters_four_models"] > 2 * result["parameters_held"]
    for name in ("rl/curves.png", "rl/samples.md", "rl/metrics.jsonl", "rl/run.json", "sft/heads.safetensors"):
        assert (tmp_path / "demo" / name).stat().st_size > 0
    assert "wins by true preference" in shown


@pytest.mark.long
def test_the_commands_do_again_what_the_demo_did(tmp_path, capsys):
    demo_here(capsys, tmp_path / "demo", "--quick")
    for command, folder, metric in (("sft", "sft", "loss"), ("train", "rl", "reward")):
        options = f"{command} --config {tmp_path}/demo/{command}.yaml --output_dir {tmp_path}/again/{folder}"
        assert main(options.split()) == 0
        demo, again = (read_metrics(tmp_path / of / folder / "metrics.jsonl") for of in ("demo", "again"))
        assert len(demo) > 1, command
        assert [row[metric] for row in again] == [row[metric] for row in demo], command


@pytest.mark.long
def test_another_algorithm_starts_from_the_supervised_model_of_a_demo(tmp_path):
    run_demo(tmp_path / "ppo", "--quick")
    begun, _ = run_demo(tmp_path / "taken", "--quick", "--algorithm", "rloo", "--start", str(tmp_path / "ppo"))
    whole, _ = run_demo(tmp_path / "whole", "--quick", "--algorithm", "rloo")
    assert not (tmp_path / "taken" / "sft").exists()
    for name in ("reward_before", "reward_after", "kl", "win_rate", "reward_accuracy"):
        assert begun[name] == whole[name], name


def test_a_start_that_is_none(tmp_path, capsys):
    expected = "start: expected the folder of an earlier demo, got .*absent, which lacks"
    for start, message in ((str(tmp_path / "absent"), expected), ("", "start: ")):
        assert main(["demo", "--quick", "--output_dir", str(tmp_path / "out"), "--start", start]) == 2
        assert re.search(message, capsys.readouterr().err)
        assert not (tmp_path / "out").exists()


def test_a_start_is_not_emptied(tmp_path, capsys):
    for name in ("sft/manifest.json", "sft/metrics.jsonl", "train.jsonl", "heldout.jsonl", ".rlhf-engine-demo"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text('{"step": 1}\n')
    assert main(["demo", "--quick", "--output_dir", str(tmp_path), "--start", str(tmp_path)]) == 2
    assert "output_dir: expected another folder than start" in capsys.readouterr().err
    assert (tmp_path / "train.jsonl").exists()


@pytest.mark.long
def test_the_demo_draws_beside_its_updates(tmp_path):
    results = [run_demo(tmp_path / mode, "--quick", "--async", mode)[0] for mode in ("replay", "overlap")]
    assert results[0]["reward_after"] == results[1]["reward_after"]  # the floats do not depend on timing
    rows = [json.loads(line) for line in (tmp_path / "overlap" / "rl" / "metrics.jsonl").read_text().splitlines()]
    assert [row["staleness/max"] for row in rows] == [0, 1]


def test_the_demo_leaves_a_folder_alone_that_is_not_its_own(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("precious")
    assert main(["demo", "--quick", "--output_dir", str(tmp_path)]) == 2
    assert "output_dir: expected a new folder or one of an earlier demo" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").read_text() == "precious"


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ppo_wins_by_the_true_preference(tmp_path, seed):
    result, _ = run_demo(tmp_path / "demo", "--seed", str(seed))
    assert result["win_rate"] >= 0.75
    assert result["kl"] <= 15
    assert result["true_score_after"] > result["true_score_before"] + 0.5
