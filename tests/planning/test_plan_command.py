"""`rlhf-engine plan`: table, chart, JSON, and requests that cannot be served."""

from __future__ import annotations

import json
import re

import pytest
from rlhf_kernels.runtime import native
from transformers import LlamaConfig, T5Config

from rlhf_engine.commands.main import main
from rlhf_engine.config import PlanConfig, parse_size
from rlhf_engine.errors import ConfigError
from rlhf_engine.hydra import METHODS
from rlhf_engine.planning import fit
from rlhf_engine.planning.predict import PHASES
from rlhf_engine.planning.report import run_plan, sharing, stack


@pytest.fixture(autouse=True)
def few_traces(monkeypatch):
    """Sequences are traced one by one, which takes time and shows nothing more."""
    monkeypatch.setattr(fit, "TRACED_ROWS", 4)


@pytest.fixture
def folder(tmp_path):
    """A config without weights."""
    LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
        max_position_embeddings=64,
    ).save_pretrained(tmp_path / "m")
    return tmp_path / "m"


SHORT = ("--max_prompt_length", "8", "--max_completion_length", "8", "--batch", "4", "--reserve", "0MB")


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = main(["plan", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_table_and_chart(capsys, folder, tmp_path):
    chart = tmp_path / "charts" / "plan.png"
    code, out, err = run(
        capsys, "--model", str(folder), *SHORT, "--method", "full_ppo", "--gpu", "2MB", "--out", str(chart)
    )
    assert code == 0
    assert err.startswith("note: tracing the engine's code")
    assert len(err.splitlines()) == 1
    assert "largest micro-batch in 2MB" in out
    assert "Every prompt has 8 tokens and every answer 8" in out
    assert "The optimizer (adamw) has two moments in float32." in out.replace("\n", " ")
    assert chart.read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_one_json_object_per_method(capsys, folder):
    code, out, _ = run(capsys, "--model", str(folder), *SHORT, "--gpu", "2MB", "--json")
    assert code == 0
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["method"] for row in rows] == list(METHODS)
    for row in rows:
        assert set(row["peak_bytes"]) == set(PHASES)
        assert (row["max_batch"] > 0) == (row["max_micro_batch"] > 0)
        assert row["peak_bytes"]["update"] > row["state_bytes"] > 0
        assert {"frozen_weights", "gradients", "optimizer"} <= set(row["state_parts"])
        assert sum(row["state_parts"].values()) == row["state_bytes"]
        assert row["budget_bytes"] == 2_000_000
        assert row["assumptions"]
    held = {row["method"]: row["state_parts"]["frozen_weights"] for row in rows}
    assert held["lora_ppo"] > held["dynamic_lora_ppo"] > held["hydra_ppo"] == held["j_hydra_ppo"]


@pytest.mark.long
def test_nothing_fits_where_no_update_does(capsys, folder):
    options = ("--model", str(folder), *SHORT[:4], "--method", "full_ppo", "--num_mini_batches", "1")
    options += ("--batch", "1", "--reserve", "0MB")
    _, out, _ = run(capsys, *options, "--per_device_train_batch_size", "1", "--json")
    peaks = json.loads(out)["peak_bytes"]
    between = f"{(max(peaks['generation'], peaks['inference']) + peaks['update']) / 2e6:.4f}MB"
    _, out, _ = run(capsys, *options, "--gpu", between, "--json")
    assert json.loads(out)["max_batch"] == json.loads(out)["max_micro_batch"] == 0
    _, out, _ = run(capsys, *options, "--gpu", between)
    assert re.search(rf"largest batch in {re.escape(between)} +│ +0 ", out)


def test_parts_of_a_bar_add_up_to_the_peak(capsys, folder):
    options = {"model": str(folder), "max_prompt_length": 8, "max_completion_length": 8, "batch": 4}
    (found,) = run_plan(PlanConfig(method="hydra_ppo", json=True, gpu="2MB", reserve="0MB", **options))
    for phase in PHASES:
        parts = stack(found, phase)
        assert sum(parts.values()) == found.peak_bytes[phase]
        assert all(size >= 0 for size in parts.values()), (phase, parts)


@pytest.mark.long
def test_how_several_processes_hold_the_base_is_said(capsys, tmp_path):
    shape = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 16, "num_attention_heads": 4}
    LlamaConfig(vocab_size=40, max_position_embeddings=64, **shape).save_pretrained(tmp_path / "m")
    short = ("--max_prompt_length", "2", "--max_completion_length", "2", *SHORT[4:])
    argv = ("--model", str(tmp_path / "m"), *short, "--method", "hydra_ppo", "--processes", "2", "--json")
    row = json.loads(run(capsys, *argv, "--gpu", "80GB")[1])
    assert row["way"] == "whole"
    assert all(way["fits"] for way in row["ways"].values())
    assert "run it without --shard_base: the base fits whole all the time." in row["advice"][1]
    assert len(row["advice"]) == 2
    # each process draws two of four answers; the largest batch is of both
    assert row["max_batch"] == 2 * row["ways"]["whole"]["max_batch"]
    least = row["ways"]["shard_base vllm"]
    row = json.loads(run(capsys, *argv, "--gpu", f"{max(least['peak_bytes'].values()) / 1e6:.6f}MB")[1])
    assert row["way"] == "shard_base vllm"
    assert row["peak_bytes"] == least["peak_bytes"]
    assert "run it with --shard_base beside --rollout_backend vllm: the base never fits whole" in row["advice"][1]
    assert "a vLLM server draws the answers, on 1 more such GPU (--tensor-parallel-size 1)" in row["advice"][2]
    _, out, _ = run(capsys, *argv[:-1], "--gpu", "0.1MB")
    assert "hydra_ppo: 0.1MB hold it in no way" in out
    assert "in each of 2 processes" in " ".join(out.partition("━")[0].split())
    assert "of the base, update" in out
    assert re.search(r"largest batch in 0\.1MB +│ +0 ", out)


@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
def test_what_answers_to_one_prompt_share_is_said(capsys, folder):
    argv = ("--model", str(folder), *SHORT, "--method", "hydra_ppo", "--gpu", "2MB", "--num_generations", "4", "--json")
    _, out, _ = run(capsys, *argv, "--device", "cpu", "--num_mini_batches", "1")
    row, same = json.loads(out), "4 answers to every prompt share its full blocks of the KV cache"
    assert any(f"{same} and its pass in inference (scoring) and update. " in line for line in row["assumptions"])
    config = PlanConfig(model=str(folder), num_generations=4)
    assert sharing(config, ()).startswith(f"{same}. ")
    # 4 answers of 8 tokens; a bit for each of 100 words in numbers of 32 bits, and an offset
    assert row["most_support_bytes"] == 4 * 8 * (4 * 4 + 8)


@pytest.mark.parametrize(
    ("text", "size"), [("80GB", 80 * 10**9), ("24 GiB", 24 * 2**30), ("1.5gb", 15 * 10**8), ("500MiB", 500 * 2**20)]
)
def test_sizes(text, size):
    assert parse_size("gpu", text) == size


@pytest.mark.parametrize("text", ["80", "GB", "-1GB", "80 bananas", "80GBs", "", "1e3GB"])
def test_sizes_that_are_none(text):
    with pytest.raises(ConfigError, match="gpu: expected a size such as 80GB or 24GiB, got"):
        PlanConfig(model="llama-7b", gpu=text)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--model", "lama-7b"],
            "model: expected a preset, a folder with config.json or owner/name of the Hub, got 'lama-7b'; did you",
        ),
        (["--model", "llama-7b", "--batch", "0"], "batch: expected an integer >= 1, got 0"),
        (
            ["--model", "llama-7b", "--num_generations", "5"],
            "batch: expected a multiple of num_generations (5), got 64",
        ),
        (
            ["--model", "llama-7b", "--gpu", "1GB", "--reserve", "2GB"],
            "reserve: expected less than gpu (1GB), got '2GB'",
        ),
        (
            ["--model", "llama-7b", "--processes", "2", "--method", "full_ppo"],
            "method: expected one with a frozen backbone with 2 processes, got 'full_ppo'",
        ),
        (
            ["--model", "llama-7b", "--processes", "8", "--batch", "14", "--num_generations", "2"],
            "batch: expected at least 16 with 8 processes, a prompt of 2 answers for each, got 14",
        ),
        (["--model", "llama-7b", "--out", "plan.pdf"], "out: expected the path of a .png file, got 'plan.pdf'"),
        (["--model", "llama-7b", "--method", "dpo"], "method: expected one of 'all', 'full_ppo'"),
        (["--model", "llama-7b", "--max_prompt_length", "3000"], "the model's context of 2048 tokens, got 3000 + 64"),
        (["--model", "gpt2", "--lora_target_modules", "q_proj"], "target_modules: expected name endings among"),
        ([], "missing required option: --model"),
    ],
)
def test_requests_that_cannot_be_served(capsys, argv, message):
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_an_encoder_decoder_is_refused(capsys, tmp_path):
    T5Config(num_layers=1, d_model=8, d_kv=4, d_ff=8, num_heads=2, vocab_size=20).save_pretrained(tmp_path / "t5")
    code, _, err = run(capsys, "--model", str(tmp_path / "t5"))
    assert code == 2
    assert "model: expected a decoder-only model" in err


def test_a_folder_without_a_config_is_refused(capsys, tmp_path):
    code, _, err = run(capsys, "--model", str(tmp_path))
    assert code == 2
    assert "model: expected a folder with config.json" in err
