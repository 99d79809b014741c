"""Metrics files: whole lines, no repeated steps after a resume, values JSON cannot hold; the run record."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rlhf_kernels.runtime import registry

from rlhf_engine.config import DemoConfig
from rlhf_engine.devices import peak_memory_bytes
from rlhf_engine.runs.metrics import MetricsWriter, git_commit, read_metrics, run_record, write_json_atomic


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "metrics.jsonl"


def test_every_line_is_on_disk_at_once_and_plain(path: Path) -> None:
    with MetricsWriter(path) as writer:
        writer.write(0, {"a": 1, "b": torch.tensor(2.5), "c": np.float32(0.5), "d": "x", "e": None, "f": True})
        assert read_metrics(path) == [{"step": 0, "a": 1, "b": 2.5, "c": 0.5, "d": "x", "e": None, "f": True}]
        writer.write(1, {"a": np.int64(3)})
        assert read_metrics(path)[1] == {"step": 1, "a": 3}


def test_nonfinite_values_are_null_and_named(path: Path) -> None:
    with MetricsWriter(path) as writer:
        writer.write(0, {"kl": math.nan, "loss": torch.tensor(math.inf), "x": -math.inf, "ok": 1.0})
    raw = path.read_text()
    assert "NaN" not in raw.replace("nan", "")
    line = json.loads(raw, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert line == {
        "step": 0, "kl": None, "loss": None, "x": None, "ok": 1.0,
        "nonfinite": {"kl": "nan", "loss": "inf", "x": "-inf"},
    }  # fmt: skip


def test_resume_does_not_repeat_steps(path: Path) -> None:
    with MetricsWriter(path) as writer:
        for step in range(6):
            writer.write(step, {"a": step})
        writer.write(5, {"eval": 1.0})  # a second line of a step is fine
    with MetricsWriter(path) as writer:
        with pytest.raises(ValueError, match=r"step: expected at least 5, got 4"):
            writer.write(4, {"a": 0})
        assert writer.truncate_after(3) == 3
        assert writer.truncate_after(3) == 0
        writer.write(4, {"a": 40})
    assert [(line["step"], line["a"]) for line in read_metrics(path)] == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 40)]
    with MetricsWriter(path) as writer:
        assert writer.truncate_after(-1) == 5
        writer.write(0, {})
        path.rename(path.with_name("elsewhere"))
        with pytest.raises(FileNotFoundError):  # what is written would follow the old file
            writer.write(1, {})
        path.touch()
        with pytest.raises(OSError, match="another file has come in its place"):
            writer.write(1, {})
    assert read_metrics(path.with_name("elsewhere")) == [{"step": 0}]


def test_a_line_cut_short_by_a_crash_is_dropped(path: Path) -> None:
    with MetricsWriter(path) as writer:
        writer.write(0, {"a": 1})
    with path.open("a") as file:
        file.write('{"step": 1, "a"')
    assert read_metrics(path) == [{"step": 0, "a": 1}]
    with MetricsWriter(path) as writer:
        writer.write(1, {"a": 2})
    assert [line["a"] for line in read_metrics(path)] == [1, 2]


def test_damage_before_the_end_costs_one_line_and_is_said(path: Path) -> None:
    with MetricsWriter(path) as writer:
        for step in range(5):
            writer.write(step, {"a": step})
    lines = path.read_bytes().splitlines(keepends=True)
    for place, said in ((2, "line 3, after step 1"), (0, "line 1, before every other")):
        path.write_bytes(b"".join([*lines[:place], b"\xff" + lines[place][1:], *lines[place + 1 :]]))
        rest = [step for step in range(5) if step != place]
        with pytest.warns(UserWarning, match=rf"metrics\.jsonl: expected a JSON object .* left out {said}$"):
            assert [line["step"] for line in read_metrics(path)] == rest
        with pytest.warns(UserWarning, match=said):
            writer = MetricsWriter(path)
        assert writer.last_step == 4
        writer.write(5, {"a": 5})
        # a run that has gone on says it as well: the line is there, but for its content
        with pytest.warns(UserWarning, match=said):
            assert [line["step"] for line in read_metrics(path)] == [*rest, 5]
        with pytest.warns(UserWarning, match=said):
            assert writer.truncate_after(3) == 2
        writer.close()
        assert path.read_bytes().count(b"\n") == 4


@pytest.mark.parametrize("left", [b"\x00" * 100 + b"\n", b"\xff\xfe\n", b'{"step": 2, "rew\n', b"17\n"])
def test_what_a_power_cut_leaves_is_dropped(path: Path, left: bytes) -> None:
    with MetricsWriter(path) as writer:
        writer.write(1, {"reward": 0.5})
        writer.sync()
    whole = path.read_bytes()
    path.write_bytes(whole + left)
    assert read_metrics(path) == [{"step": 1, "reward": 0.5}]
    with MetricsWriter(path) as writer:
        assert writer.last_step == 1
    assert path.read_bytes() == whole


def test_refused_values(path: Path) -> None:
    with MetricsWriter(path) as writer:
        with pytest.raises(TypeError, match=r"metrics: a: expected one number, got a tensor of shape \(2,\)"):
            writer.write(0, {"a": torch.zeros(2)})
        with pytest.raises(TypeError, match=r"metrics: a: expected a number.* got list"):
            writer.write(0, {"a": [1]})
        with pytest.raises(ValueError, match=r"the name 'step' is taken"):
            writer.write(0, {"step": 1})
    assert path.read_text() == ""  # a refused line leaves nothing behind
    with pytest.raises(FileNotFoundError, match="there is no file"):
        read_metrics(path.with_name("none.jsonl"))


def test_atomic_write_replaces_or_leaves(tmp_path: Path) -> None:
    file = tmp_path / "new" / "r.json"
    write_json_atomic(file, {"a": 1})
    write_json_atomic(file, {"a": "ü"})
    assert json.loads(file.read_text(encoding="utf-8")) == {"a": "ü"}
    with pytest.raises(ValueError, match="JSON"):
        write_json_atomic(file, {"a": math.nan})
    assert json.loads(file.read_text(encoding="utf-8")) == {"a": "ü"}
    assert [p.name for p in file.parent.iterdir()] == ["r.json"]
    ended, others = ".r.json.999999999.tmp", {".r.json.1.tmp", ".r.json.mine.tmp", "r.json"}
    for name in (ended, *others):
        (file.parent / name).touch()
    write_json_atomic(file, {})
    assert {p.name for p in file.parent.iterdir()} == others


def test_run_record_is_json_and_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = DemoConfig(seed=5)
    # a wheel of PyPI is 2.15.0 in its metadata and 2.15.0+cu132 in torch.__version__
    monkeypatch.setattr("rlhf_engine.runs.metrics.version_of", lambda package: "2.15.0")
    backends = registry.report("cpu")
    record = run_record(config=config, command=["rlhf-engine", "demo"], backends=backends)
    write_json_atomic(tmp_path / "run.json", record)
    back = json.loads((tmp_path / "run.json").read_text())
    assert back == record
    assert back["config"] == config.to_dict()
    assert back["versions"]["torch"] == torch.__version__
    assert back["versions"]["python"] == sys.version.split()[0]
    assert back["kernel_backends"] == backends
    assert back["command"] == ["rlhf-engine", "demo"]
    assert back["device_name"]
    assert back["cpu_cores"] >= 1
    assert back["started"].endswith("+00:00")


def test_git_commit_is_that_of_the_checkout_that_tracks_the_file(tmp_path: Path) -> None:
    file = tmp_path / "code.py"
    file.write_text("a = 1\n")
    # the environment of a git hook would point every call at another repository
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout.strip()

    assert git_commit(file) is None  # no checkout
    git("init", "-q")
    assert git_commit(file) is None  # in a checkout, but not part of it
    git("add", "code.py")
    git("commit", "-qm", "first")
    assert git_commit(file) == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    file.write_text("a = 2\n")
    assert git_commit(file) == {"commit": git("rev-parse", "HEAD"), "dirty": True}


def test_peak_memory_counts_bytes_and_rises() -> None:
    before = peak_memory_bytes()
    block = np.ones(2**27 + before // 4, dtype=np.uint8)  # larger than what was freed since the peak is likely to be
    grown = peak_memory_bytes()
    assert grown >= block.nbytes  # bytes, not kibibytes
    assert grown >= before > 2**24  # Python with torch takes more than 16 MiB
