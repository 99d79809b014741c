"""bench/studies/vs_trl_ppo.py without TRL: our arm end to end on a tiny model, its numbers, and wrong requests."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench" / "studies"
pytestmark = pytest.mark.long  # of a comparison, not of what users run


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCH))  # as `python bench/studies/vs_trl_ppo.py` has it
    try:
        import vs_trl_ppo

        yield vs_trl_ppo
    finally:
        sys.path.remove(str(BENCH))


def test_our_arm_runs_and_leaves_a_record_and_a_chart(script, tmp_path, capsys):
    arguments = ["--quick", "--skip-trl", "--arms", "ours-fp32", "trl-fp32", "gemm-fp32", "--threads", "1"]
    assert script.main([*arguments, "--batch", "2", "--micro-batch", "1", "--output", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "results.json").read_text())
    assert result["order"] == ["ours-fp32", "gemm-fp32"]
    assert result["setting"]["hidden"] == 64
    assert (result["setting"]["batch"], result["setting"]["micro_batch"]) == (2, 1), "flags win over --quick"
    assert {"torch", "transformers", "peft", "python"} <= set(result["versions"]["ours"])
    assert result["machine"]["device_name"]
    assert result["kernel_backends"]["float32"]["gae"]["reference"] == "available"
    assert result["targets"] == [], "a tiny model says nothing of them"
    ours, gemm = result["runs"]
    assert (ours["round"], ours["arm"], ours["threads"]) == (0, "ours-fp32", 1)
    assert len(ours["seconds_of_batches"]) == len(ours["reward"]) == result["setting"]["steps"] == 2
    assert ours["seconds_per_sample"] == pytest.approx(ours["seconds_of_batches"][1] / 2)
    assert ours["seconds_per_sample_with_first"] == pytest.approx(sum(ours["seconds_of_batches"]) / 4)
    assert ours["tokens_per_second"] == pytest.approx(8 / ours["seconds_per_sample"])
    for run in (ours, gemm):
        phases = sum(run[f"{phase}_seconds_per_sample"] for phase in ("generate", "score", "update"))
        assert 0.8 * run["seconds_per_sample"] < phases <= run["seconds_per_sample"]
        assert 0 < run["rss_before_training_bytes"] <= run["peak_rss_before_training_bytes"] <= run["peak_rss_bytes"]
        assert result["medians"][run["arm"]]["seconds_per_sample"] == run["seconds_per_sample"]
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    captured = capsys.readouterr()
    assert "ours-fp32" in captured.out
    assert "round 1/1  ours-fp32: " in captured.err


@pytest.mark.parametrize("arm", ["gemm-fp32", "packed-fp32", "gemm-fp32-exact", "packed-fp32-exact"])
def test_the_floor_multiplies_what_the_formula_says(script, arm):
    """Per sample and layer 2·(4H² + 3HI) flops per row of the backbone; 2HV per row of the LM head."""
    import trl_ppo_arms

    s = script.Setting(**script.QUICK)
    found = trl_ppo_arms.run_gemm(s, script.ARMS[arm], Path(), Path())
    block, first_qkv = 2 * (4 * 64**2 + 3 * 64 * 128), 2 * 3 * 64**2
    by_actor = 1 / 4 if arm.endswith("exact") else 1  # of a batch of four, one answer is checked
    rows = (8 + 7) + (2 + by_actor) * 16 + 2 * 2 * 16  # generate, score, update forward and backward
    head_rows = 8 + (1 + by_actor) * 8 + 2 * 8
    per_sample = rows * s.layers * block - 2 * 16 * first_qkv + head_rows * 2 * 64 * s.vocab
    assert found["flops"] == s.batch * per_sample


def test_wrong_requests_are_refused(script, capsys):
    for flags, message in (
        ([], "--trl-python: expected the python of an environment with TRL, or --skip-trl"),
        (["--skip-trl", "--arms", "trl-fp32"], "--arms: expected one that is not left out by --skip-trl"),
        (["--skip-trl", "--hidden", "100"], "hidden: expected a multiple of 64, got 100"),
        (["--skip-trl", "--micro-batch", "5"], "micro_batch: expected a divisor of batch / mini_batches .16., got 5"),
        (["--skip-trl", "--mini-batches", "3"], "mini_batches: expected a divisor of batch .16., got 3"),
        (["--skip-trl", "--rounds", "0"], "--rounds: expected at least 1, got 0"),
        (["--skip-trl", "--output", __file__], "--output: expected a folder, got the file"),
    ):
        with pytest.raises(SystemExit, match=r"^2$"):
            script.main(flags)
        assert re.search(message, capsys.readouterr().err)


def test_trl_needs_its_own_environment_with_the_same_torch(script, capsys):
    assert script.main(["--quick", "--trl-python", "/nowhere/python"]) == 2
    assert "expected a Python interpreter, got '/nowhere/python'" in capsys.readouterr().err
    ours = {"torch": "2.13.0+cpu", "transformers": "5.23.0", "peft": "0.21.2"}
    script.check_versions(ours, {**ours, "torch": "2.13.0", "trl": "1.12.0"}, "python")
    with pytest.raises(ValueError, match=r"expected trl==1\.12\.0 .*, got None"):
        script.check_versions(ours, ours, "python")
    with pytest.raises(ValueError, match=r"expected peft==0\.21\.2 as in this environment, got 0\.20\.0"):
        script.check_versions(ours, {**ours, "peft": "0.20.0", "trl": "1.12.0"}, "python")
