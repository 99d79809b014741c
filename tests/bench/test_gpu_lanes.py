"""The lane runner on a machine without a GPU: records, resuming, failures, timeouts."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rlhf_bench.timing import interleaved

from rlhf_engine.runs.metrics import git_commit
from tests.conftest import OneOfEach

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench" / "gpu" / "lanes.py"

spec = importlib.util.spec_from_file_location("gpu_lanes", SCRIPT)
gpu_lanes = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = gpu_lanes  # dataclasses look their module up
spec.loader.exec_module(gpu_lanes)


def lane(name, code, **options):
    return gpu_lanes.Lane(name=name, command=(sys.executable, "-c", code), **options)


def counting(path, code=""):
    """Code that leaves one more line in a file each time it runs."""
    return f"print('x', file=open({str(path)!r}, 'a')); {code}"


def run(lanes, folder, commit="c0ffee", sources="5"):
    return gpu_lanes.run_lanes(lanes, folder, commit=commit, sources=sources)


def record(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


def assert_dead(pid):
    """A killed process may stay a moment until it is reaped."""
    stat = Path(f"/proc/{pid}/stat")
    for _ in range(50):
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("a lane's child survived it")


def test_records_what_a_lane_did(tmp_path):
    assert run([lane("hello", "print('a' * 20_000 + 'end')")], tmp_path / "new") == 0
    got = record(tmp_path / "new", "hello")
    assert (got["lane"], got["state"], got["rc"], got["commit"], got["sources"]) == ("hello", "done", 0, "c0ffee", "5")
    assert got["command"][0] == sys.executable
    assert 0 <= got["seconds"] < 60
    assert got["start"].endswith("+00:00")
    assert got["output"].endswith("aend\n")
    assert len(got["output"]) == gpu_lanes.TAIL
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["hello.json", gpu_lanes.ARCHIVE]
    with tarfile.open(tmp_path / "new" / gpu_lanes.ARCHIVE) as archive:
        assert archive.getnames() == ["hello.json"]


def test_done_lanes_are_skipped_until_something_changes(tmp_path):
    count = tmp_path / "count"
    lanes = [lane("counts", counting(count))]

    def runs():
        return len(count.read_text().splitlines())

    assert (run(lanes, tmp_path), runs()) == (0, 1)
    assert (run(lanes, tmp_path), runs()) == (0, 1)
    assert (run(lanes, tmp_path, commit="other"), runs()) == (0, 2)
    assert (run(lanes, tmp_path, commit="other", sources="6"), runs()) == (0, 3)
    changed = [lane("counts", counting(count, "pass"))]
    assert (run(changed, tmp_path, commit="other", sources="6"), runs()) == (0, 4)


def test_a_failure_is_recorded_stops_nothing_and_comes_again_last(tmp_path):
    order = tmp_path / "order"
    fails = lane("fails", f"print('fails', file=open({str(order)!r}, 'a')); raise SystemExit('broken on purpose')")
    first = lane("first", f"print('first', file=open({str(order)!r}, 'a'))")
    second = lane("second", f"print('second', file=open({str(order)!r}, 'a'))")
    assert run([fails, first], tmp_path) == 1
    assert record(tmp_path, "fails")["state"] == "failed"
    assert record(tmp_path, "fails")["rc"] == 1
    assert "broken on purpose" in record(tmp_path, "fails")["output"]
    assert run([fails, first, second], tmp_path) == 1
    assert order.read_text().split() == ["fails", "first", "second", "fails"]
    assert run([first, second], tmp_path) == 0


@pytest.mark.long
def test_a_lane_that_takes_too_long_is_killed_with_its_children(tmp_path):
    child = tmp_path / "child"
    code = f"""
import subprocess, sys, time
print("started", flush=True)
sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(child)!r}, "w").write(str(sleeper.pid))
time.sleep(600)
"""
    assert run([lane("sleeps", code, limit_s=2.0), lane("next", "pass")], tmp_path) == 1
    got = record(tmp_path, "sleeps")
    assert (got["state"], got["rc"], got["output"]) == ("timeout", None, "started\n")
    assert got["seconds"] < 60
    assert record(tmp_path, "next")["state"] == "done"
    assert_dead(child.read_text())


@pytest.mark.long
def test_a_budget_leaves_out_what_cannot_end_and_cuts_what_does_not(tmp_path, capsys):
    sleeps = lane("sleeps", "import time; time.sleep(600)", needs_s=1.0)
    long = lane("long", "pass", needs_s=100.0)
    began = time.monotonic()
    budget = gpu_lanes.CLOSING_S + 3
    lanes = [long, lane("first", "pass", needs_s=1.0), sleeps, lane("late", "pass", needs_s=1.0)]
    assert gpu_lanes.run_lanes(lanes, tmp_path, commit="c", sources="5", budget_s=budget) == 1
    assert time.monotonic() - began < budget
    assert record(tmp_path, "first")["state"] == "done"
    assert record(tmp_path, "sleeps")["state"] == "timeout"
    assert not (tmp_path / "long.json").exists()
    assert not (tmp_path / "late.json").exists()
    assert "left out: it needs 100 s" in capsys.readouterr().out


def test_a_signal_while_a_lane_is_started_leaves_no_child_and_what_is_missing_runs_later(tmp_path, monkeypatch):
    started, real, count, out = [], subprocess.Popen, tmp_path / "count", tmp_path / "out"
    counts = lane("counts", counting(count), replaces=count)
    count.write_text("half\n")  # of an interrupted lane: not appended to

    def start(*words, **options):
        started.append(real(*words, **options))
        if len(started) == 2:
            os.kill(os.getpid(), signal.SIGTERM)  # before the caller has the process
        return started[-1]

    monkeypatch.setattr(gpu_lanes.subprocess, "Popen", start)
    with pytest.raises(gpu_lanes.Stopped), gpu_lanes.stopped_by_signals():
        run([counts, lane("sleeps", "import time; time.sleep(600)")], out)
    assert_dead(str(started[1].pid))
    assert not (out / "sleeps.json").exists()
    with tarfile.open(out / gpu_lanes.ARCHIVE) as archive:
        assert archive.getnames() == ["counts.json"]
    assert run([counts, lane("sleeps", "pass")], out) == 0
    assert count.read_text() == "x\n"


def test_what_is_not_there_is_no_failure(tmp_path):
    absent = lane("absent", "raise SystemExit(1)", missing="no such tool")
    refused = lane("refused", "raise SystemExit('Device not supported')", unavailable="Device not supported")
    broken = lane("broken", "raise SystemExit('something else')", unavailable="Device not supported")
    assert run([absent, refused], tmp_path) == 0
    assert record(tmp_path, "absent")["state"] == record(tmp_path, "refused")["state"] == "unavailable"
    assert record(tmp_path, "absent")["output"] == "no such tool"
    assert run([broken], tmp_path) == 1


def test_lanes_run_in_the_checkout_without_an_interpreter(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    code = """
import os
from importlib.util import find_spec
print(os.getcwd(), os.environ.get("TRITON_INTERPRET"), find_spec("rlhf_kernels").origin)
"""
    assert run([lane("where", code)], tmp_path) == 0
    expected = [str(ROOT), "None", str(ROOT / "kernels/rlhf_kernels/__init__.py")]
    assert record(tmp_path, "where")["output"].split() == expected


def test_lanes_of_this_project(tmp_path):
    lanes = gpu_lanes.gpu_lanes(tmp_path)
    names = [item.name for item in lanes]
    assert names[0] == "environment"
    assert len(set(names)) == len(names)
    expected = {"correct-gpu", "correct-cpu", "memcheck", "racecheck", "bench-gae", "bench-lora-mixed"}
    assert expected <= set(names)
    assert all(item.limit_s <= 480 for item in lanes)
    for item in lanes:
        for word in item.command:
            assert not word.startswith("tests/") or (ROOT / word).exists()
    marked = {path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text(encoding="utf-8")}
    there = [ROOT / file for file in gpu_lanes.ON_A_GPU]
    assert {path for path in marked if not {path, *path.parents} & set(there)} <= {Path(__file__)}
    (bench,) = (item for item in gpu_lanes.gpu_lanes(tmp_path, "quick") if item.name == "bench-gae")
    rows = str(tmp_path / "bench-gae.jsonl")
    expected = ("-m", "rlhf_engine", "bench", "gae", "--device", "cuda", "--json", rows, "--quick")
    assert bench.command[1:] == expected
    assert bench.replaces == Path(rows)


def test_a_rehearsal_has_every_lane_on_the_cpu_or_says_why_not(tmp_path):
    real, rehearsed = gpu_lanes.gpu_lanes(tmp_path), gpu_lanes.gpu_lanes(tmp_path, "rehearsal")
    steps = {f"step-{model}-{algorithm}" for model in ("llama-3.2-1b", "llama-8b") for algorithm in ("ppo", "grpo")}
    shapes = {f"plan_check-{shape}" for shape in ("gpt2", "qwen3")}
    names = {lane.name for lane in real} - steps - shapes | {"step-tiny-ppo", "step-tiny-grpo"}
    assert {lane.name for lane in rehearsed} == names
    for lane in rehearsed:
        assert "cuda" not in lane.command
        assert lane.rehearsed or lane.missing
    assert {lane.rehearsed for lane in rehearsed} == {"on a CPU"}


def test_a_rehearsed_lane_runs_interpreted_and_its_figures_say_so(tmp_path, monkeypatch):
    code = "import os; print(*map(os.environ.get, ('TRITON_INTERPRET', 'RLHF_ENGINE_REHEARSAL')))"
    assert run([lane("timed", code, rehearsed="on a CPU"), lane("plain", code)], tmp_path) == 0
    got = record(tmp_path, "timed")
    assert (got["rehearsed"], got["output"]) == ("on a CPU", "1 1\n")
    got = record(tmp_path, "plain")
    assert (got["output"], "rehearsed" in got) == ("None None\n", False)
    monkeypatch.setenv("RLHF_ENGINE_REHEARSAL", "1")
    calls = []
    times = interleaved({"a": lambda: calls.append(1)}, 20, torch.device("cpu"))
    assert git_commit(ROOT / "README.md")["rehearsed"]
    assert (len(calls), len(times["a"])) == (2, 1)  # one round after the one that is not counted


def test_one_of_each_test_function_and_of_its_parameters_one_that_can_run():
    class Item(SimpleNamespace):
        marks = ()

        def get_closest_marker(self, name):
            return next(self.iter_markers(name), None)

        def iter_markers(self, name):
            return (mark for mark in self.marks if mark.name == name)

    skips = (pytest.mark.skip(reason="not here").mark,)
    names = {"one[0]": skips, "one[1]": (), "one[2]": (), "two": (), "three[0]": skips}
    items = [Item(nodeid=f"test_some.py::test_{name}", marks=marks) for name, marks in names.items()]
    config = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: None))
    OneOfEach().pytest_collection_modifyitems(config, items)
    assert [item.nodeid.rpartition("test_")[2] for item in items] == ["one[1]", "two", "three[0]"]


@pytest.mark.long
def test_every_lane_is_rehearsed_in_the_gpu_machine_s_environment(tmp_path):
    """Torch 2.11, Triton 3.6, transformers 5.17; no PEFT, no TRL, no compiled extension."""
    python = ROOT / ".venv" / "gpu" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{python.relative_to(ROOT)} is not there; make test-long makes it")
    tree = tmp_path / "tree"  # what is not ignored, as it travels to another machine
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in filter(None, subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    out = tmp_path / "out"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), "bench/gpu/lanes.py", "--rehearse", "--out", str(out)]
    began = time.monotonic()
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - began < 20 * 60
    found = json.loads(record(out, "environment")["output"])
    assert found["torch"].startswith("2.11.")
    assert (found["installed"]["triton"], found["installed"]["transformers"]) == ("3.6.0", "5.17.0")
    assert {"peft", "trl"} <= set(found["baselines_not_installed"])
    assert found["native_extension"].startswith("the native extension was not built")
    found = [json.loads(path.read_text()) for path in out.glob("*.json")]
    assert all(row["rehearsed"] for row in found)
    records = [row for row in found if "lane" in row]  # and a table of tiles, which a lane has made
    unavailable = {row["lane"]: row["output"] for row in records if row["state"] != "done"}
    others = {f"hydra_table-{method}" for method in gpu_lanes.METHODS[:-1]}
    assert set(unavailable) == {"memcheck", "racecheck", "overlap"} | others
    assert all(unavailable.values())
    assert "taken up again" in done.stdout


def test_sources_change_the_key_and_a_missing_repository_is_unknown(tmp_path):
    (tmp_path / "kernels").mkdir()
    one = gpu_lanes.sources_of(tmp_path)
    (tmp_path / "kernels" / "a.py").write_text("x = 1\n")
    two = gpu_lanes.sources_of(tmp_path)
    (tmp_path / "kernels" / "notes.txt").write_text("no code\n")
    assert one != two == gpu_lanes.sources_of(tmp_path)
    assert gpu_lanes.commit_of(tmp_path) == "unknown"


def test_bad_requests_are_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, said in (
        (("--lane", "correct-gpu", "nothing"), "--lane: unknown nothing; --list names them all"),
        (("--plan", "fourth"), "--plan: expected one of first, second, third, got 'fourth'"),
        (("--budget", "3"), "--budget: expected at least 25 seconds, what the shortest lane needs, got 3"),
        (("--budget", "nan"), "--budget: expected at least 25 seconds, what the shortest lane needs, got nan"),
        ((), f"no GPU: torch {torch.__version__} sees no CUDA device"),
    ):
        assert gpu_lanes.main([*arguments, "--out", str(tmp_path / "out")]) == 2
        assert capsys.readouterr().err == f"gpu_lanes: {said}\n"
    assert not (tmp_path / "out").exists()


def test_every_lane_is_in_one_plan_and_times_come_before_sanitizers(capsys):
    def listed(*arguments):
        assert gpu_lanes.main([*arguments, "--list"]) == 0
        return capsys.readouterr().out.split()

    plans = {name: listed("--plan", name) for name in gpu_lanes.PLANS}
    assert {names[0] for names in plans.values()} == {"environment"}
    together = [name for names in plans.values() for name in names[1:]]
    assert sorted([*together, "environment"]) == sorted(listed())
    assert {"correct-gpu", "memcheck"} <= set(together)
    assert plans["second"][-2:] == ["memcheck", "racecheck"]
