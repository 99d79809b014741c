"""`rlhf-engine bench rollout` on models of a few tokens: who is timed, what records say."""

import json
from pathlib import Path

import pytest
import torch
from rlhf_bench import command
from rlhf_bench.command import run_bench
from rlhf_bench.report import KEYS
from rlhf_bench.rollout.cases import cases
from rlhf_bench.rollout.runner import rollout_records, run_rollout_cases
from rlhf_kernels.runtime import native

from rlhf_engine.commands.main import main
from rlhf_engine.config import BenchConfig
from rlhf_engine.errors import ConfigError


@pytest.fixture(scope="module")
def results():
    device = torch.device("cpu")
    return list(run_rollout_cases(cases("tiny", device, torch.float32), device=device, rounds=5))


@pytest.mark.long
def test_every_comparison_has_our_steps_a_baseline_and_a_floor(results):
    steps = ["transformers"] if native.missing() else ["native", "transformers"]
    assert [result.case.name.split("/")[0] for result in results] == ["off", "on", "skewed", "shared"]
    for result in results:
        assert [row.label for row in result.rows if row.backend] == steps
        assert result.baseline is not None
        assert result.floor_ms > 0
        assert set(result.missing) == {"native", "transformers"} - set(steps)
        for row in result.rows:
            assert (row.accuracy is not None) == row.backend
            assert row.accuracy is None or row.accuracy.ok, row
    assert {result.baseline.label for result in results} == {
        "generate", "PEFT + generate", "padded batches of the same engine", "2 prompts of the same engine",
    }  # fmt: skip


@pytest.mark.long
def test_records_are_those_of_the_kernels_and_tokens_per_second(results):
    for result in results:
        for record in rollout_records(result):
            assert tuple(record)[: len(KEYS)] == KEYS
            assert record["op"] == "rollout"
            assert record["tokens_per_second"] == pytest.approx(1e3 * result.case.tokens / record["ms"])
            assert record["baseline_tokens_per_second"] > 0
            json.dumps(record, allow_nan=False)


@pytest.mark.long
def test_shared_prompts_take_less_of_the_cache(results):
    shared = results[-1]
    apart = 2 * 2  # blocks of two prompts of 40 tokens, one answer token each
    size = shared.rows[0].peak_bytes / (apart - 1)  # one whole block is held once
    assert size == 2 * 5 * 4 * 8 * 4 * 32  # keys and values, layers, heads, features, bytes, positions


@pytest.mark.long
def test_the_command(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "cases", lambda size, *rest: cases("tiny", *rest))
    lines = tmp_path / "lines.jsonl"
    assert main(["bench", "rollout", "--quick", "--case", "off", "--dtype", "fp32", "--json", str(lines)]) == 0
    assert "generate *" in capsys.readouterr().out
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert {record["op"] for record in records} == {"rollout"}
    assert main(["bench", "rollout", "--quick", "--case", "nowhere"]) == 2
    assert "case: expected one of off/" in capsys.readouterr().err
    assert main(["bench", "rolout"]) == 2
    assert "did you mean 'rollout'" in capsys.readouterr().err


def test_a_model_is_for_rollouts():
    with pytest.raises(ConfigError, match="model_name_or_path: expected it unset without the op rollout"):
        BenchConfig(op="gae", model_name_or_path="somewhere")


def test_a_folder_that_is_no_model_and_one_with_code(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"^model_name_or_path: expected a model folder .*, got 'nowhere'"):
        run_bench(BenchConfig(op="rollout", model_name_or_path="nowhere", device="cpu"))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    names = {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Mine"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": names}))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ConfigError, match=r"^model_name_or_path: expected an architecture of transformers"):
        run_bench(BenchConfig(op="rollout", model_name_or_path=str(tmp_path), device="cpu"))
    assert not (tmp_path / "ran").exists()


@pytest.mark.long
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device here")
def test_records_that_cannot_be_written():
    with pytest.raises(ConfigError, match=r"json, out: expected paths that can be written, got .*No space left"):
        run_bench(BenchConfig(op="gae", mode="quick", case="forward/64x512", json="/dev/full", device="cpu"))
