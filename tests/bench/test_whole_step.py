"""A whole step of a tiny model: what its record and its picture have."""

import json

import pytest

from tests.bench.test_bench import load_script
from tests.conftest import tiny_llama

SMALL = {"batch": 3, "prompt": 5, "answer": 4, "micro-batch": 2, "dtype": "float32", "device": "cpu"}


def run(shape, algorithm, out):
    options = {**SMALL, "shape": shape, "algorithm": algorithm, "out": out}
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    load_script("studies/whole_step").main(words)


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_a_step_says_where_its_seconds_go(tmp_path, capsys, algorithm):
    tiny_llama().config.save_pretrained(tmp_path / "tiny")
    run(tmp_path / "tiny", algorithm, tmp_path)
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
    assert f"tiny-{algorithm}: " in capsys.readouterr().out


def test_an_unknown_shape_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        run("llama-9b", "ppo", tmp_path / "out")
    assert "got 'llama-9b'; did you mean 'llama-8b'?" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
