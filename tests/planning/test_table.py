"""The table of presets: the same numbers and lines as traces, without torch."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from rlhf_engine.commands.main import main
from rlhf_engine.config import PlanConfig
from rlhf_engine.hydra import METHODS
from rlhf_engine.hydra.supports import numbers_of_bits
from rlhf_engine.planning import report, table
from rlhf_engine.planning.fit import FULL_SFT, TRACED_ROWS, largest_fitting
from rlhf_engine.planning.predict import PHASES, Planner
from rlhf_engine.planning.presets import PRESETS, find_config
from rlhf_engine.planning.report import _moments
from rlhf_engine.planning.rows import Between
from rlhf_engine.planning.tracing import extrapolated_peak
from rlhf_engine.policy.adamw import gradient_dtype, has_8bit_moments, has_masters
from tests.planning.test_predict import setting

SCRIPT = Path(__file__).parents[2] / "bench" / "tables" / "plan_table.py"
LONG = pytest.mark.long
OPTIMS = ("adamw", "adamw_8bit", "adamw_stochastic", "adamw_8bit_stochastic")


def plan(capsys, *argv: str) -> tuple[str, str]:
    assert main(["plan", *argv]) == 0
    captured = capsys.readouterr()
    return captured.out, captured.err


def traced(capsys, monkeypatch, *argv: str) -> str:
    with monkeypatch.context() as without:
        without.setattr(table, "fits", lambda config, methods: None)
        out, err = plan(capsys, *argv)
    assert err.startswith("note: tracing")
    return out


def test_every_preset_is_there_in_both_dtypes():
    expected = {f"{name} {dtype}" for name in PRESETS for dtype in ("float32", "bfloat16")}
    assert set(table.read()["presets"]) == expected
    for name, part in table.read()["presets"].items():
        words = find_config(name.split()[0]).get_text_config().vocab_size
        assert part["support_bytes_per_token"] == 4 * numbers_of_bits(words) + 8
        assert set(part["methods"]) == {*METHODS, FULL_SFT}
        for own in part["methods"].values():
            assert set(own["optim"]) == set(OPTIMS)
    assert (*METHODS, FULL_SFT) == report.METHODS


@pytest.mark.parametrize(
    "options", [(), pytest.param(("--json", "--batch", "5", "--num_mini_batches", "2"), marks=LONG)]
)
def test_a_tabled_plan_is_the_traced_one_to_the_byte(capsys, monkeypatch, options):
    argv = ("--model", "gpt2", "--method", FULL_SFT, *options)
    out, _ = plan(capsys, *argv)
    assert out == traced(capsys, monkeypatch, *argv)


@LONG
@pytest.mark.parametrize(
    "options",
    [
        ("gpt2", "float32"),
        ("gpt2", "bfloat16", "--optim", "adamw_8bit_stochastic"),
        ("llama-8b", "bfloat16", "--gpu", "24GB"),
        ("llama-8b", "float32", "--batch", "7", "--num_mini_batches", "1", "--per_device_train_batch_size", "3"),
        ("qwen3-0.6b", "bfloat16", "--gpu", "8GB"),
        ("gemma-2-2b", "float32", "--gpu", "h200"),
    ],
)
def test_tabled_plans_are_the_traced_ones(capsys, monkeypatch, options):
    argv = ("--model", options[0], "--dtype", options[1], *options[2:], "--json")
    for method in ("all", FULL_SFT):
        out, _ = plan(capsys, *argv, "--method", method)
        assert out == traced(capsys, monkeypatch, *argv, "--method", method)


@LONG
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_script_writes_the_table_s_part(dtype):
    spec = importlib.util.spec_from_file_location("plan_table", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert json.loads(json.dumps(script.part("gpt2", dtype))) == table.read()["presets"][f"gpt2 {dtype}"]


def test_a_tabled_plan_imports_no_torch_and_takes_less_than_3_s():
    code = (
        "import sys; from rlhf_engine.commands.main import main; "
        "code = main(['plan', '--model', 'gpt2', '--dtype', 'bfloat16']); sys.exit(code or 'torch' in sys.modules)"
    )
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert time.perf_counter() - began < 3
    assert (done.returncode, done.stderr) == (0, "")
    assert "largest batch in 80GB" in done.stdout


@pytest.mark.parametrize(
    "change",
    [
        {"device": "cpu"},
        {"adapter_dtype": "bfloat16"},
        {"lora_r": 8},
        {"lora_dropout": 0.1},
        {"lora_target_modules": "q_proj"},
        {"max_prompt_length": 100},
        {"max_completion_length": 100},
        {"token_budget": 1000},
        {"gradient_checkpointing": True},
        {"model": "gpt3"},
    ],
)
def test_options_that_change_a_trace_are_not_looked_up(change):
    config = PlanConfig(model="gpt2")
    assert table.fits(config, ["hydra_ppo"]) is not None
    assert table.fits(dataclasses.replace(config, **change), ["hydra_ppo"]) is None


def test_answers_to_one_prompt_share_blocks_of_the_cache():
    alone, shared = (table.fits(PlanConfig(model="gpt2", num_generations=n), ["hydra_ppo"])[0] for n in (1, 4))
    block = shared.cache_block * shared.cache_bytes_per_position
    assert alone.kv_cache_bytes - shared.kv_cache_bytes == 16 * 3 * 128 // shared.cache_block * block
    assert shared.peak("generation") < alone.peak("generation")
    assert shared.peak("update") == alone.peak("update")


def test_other_libraries_are_named(capsys, monkeypatch):
    assert table.difference() is None
    monkeypatch.setattr(table, "version", lambda name: {"torch": "9.8.7+cpu", "transformers": "6.5"}[name])
    _, err = plan(capsys, "--model", "gpt2", "--method", "hydra_ppo")
    assert "torch 9.8, transformers 6.5 are installed here" in err
    assert len(err.splitlines()) == 1


def test_a_curve_is_read_as_it_was_written():
    numbers = random.Random(0)
    for size in (0, 10**6):
        curve = [3 + 17 * n + numbers.randint(0, size) for n in range(TRACED_ROWS)]
        assert table.decode(table.encode(curve)) == curve
    assert table.encode([5 * n for n in range(1, TRACED_ROWS + 1)]) == [5, 1, 1]


@pytest.mark.parametrize("optim", OPTIMS)
def test_the_words_about_an_optimizer_are_true(optim):
    words = _moments(PlanConfig(model="gpt2", dtype="bfloat16", optim=optim))
    assert ("8 bits" in words) == has_8bit_moments(optim)
    assert ("float32 master weights" in words) == has_masters(optim)
    assert words.endswith(f"gradients in {str(gradient_dtype(optim, torch.bfloat16)).removeprefix('torch.')}")


# ---- rows between two traces -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "method", "phase", "dtype"),
    [
        ("llama", "j_hydra_ppo", "generation", torch.bfloat16),
        ("gpt2", "hydra_ppo", "inference", torch.float32),
        *(pytest.param("llama", "hydra_ppo", phase, torch.bfloat16, marks=LONG) for phase in PHASES),
        pytest.param("gpt2", "full_ppo", "update", torch.float32, marks=LONG),
        pytest.param("gemma2", "j_hydra_ppo", "inference", torch.bfloat16, marks=LONG),
        pytest.param("qwen3", "full_sft", "update", torch.float32, marks=LONG),
    ],
)
def test_rows_between_two_traces_are_exact(name, method, phase, dtype):
    """On CUDA, as in the table: 40 answers of 30 tokens lie beyond 1024 positions, where tiles of heads end."""
    plan = setting(name, device_type="cuda", prompt_length=5, completion_length=30, dtype=dtype)
    planner, repeats, ends = Planner(method, plan), 1 if phase == "generation" else 2, (1, 40)
    few, many = (planner._timeline(phase, rows, repeats, 2, True) for rows in ends)
    wanted = (1, 2, 7, 35, 40)
    for rows, found in zip(wanted, Between(few, many, ends, "cuda").timelines(wanted), strict=True):
        assert found.peak == planner._timeline(phase, rows, repeats, 2, True).peak, rows


def test_timelines_that_have_no_peak_in_common_are_refused():
    planner = Planner("hydra_ppo", setting())
    few, many = planner._timeline("inference", 2, 1, 2), planner._timeline("update", 2, 1, 2)
    with pytest.raises(ValueError, match="rows: expected a peak that 2 and 3 rows have in common"):
        Between(few, many, (2, 3), "cuda")


def test_layers_are_extrapolated_from_rows_between_two_traces():
    plan = setting(device_type="cuda")
    plan.config.num_hidden_layers = 6
    planner, layers = Planner("hydra_ppo", plan), (2, 3)
    pair = [
        Between(*(planner._timeline("update", rows, 1, n) for rows in (1, 30)), (1, 30), "cuda").timelines([13])[0]
        for n in layers
    ]
    assert extrapolated_peak(*pair, layers, 6) == planner._timeline("update", 13, 1, 6).peak


# ---- search ----------------------------------------------------------------------------------------------------------


def test_a_search_finds_the_same_wherever_it_begins():
    numbers = random.Random(0)
    for _ in range(300):
        above, budget = numbers.randint(0, 12), numbers.randint(0, 400)
        a, b, c, d = (numbers.randint(1, 9) for _ in range(4))
        peaks = [0, *(a * n + b if n <= above else c * n * n // 7 + d + n for n in range(1, 2**11))]
        rising = [n for n in range(above + 1, 500) if peaks[n] <= budget]
        low = [n for n in range(1, above + 1) if peaks[n] <= budget]
        expected = max(rising, default=0) or max(low, default=0)
        assert largest_fitting(peaks.__getitem__, budget, above=above, probe=numbers.randint(1, 70)) == expected
