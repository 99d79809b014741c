"""What is measured on a GPU, on a machine without one: records, budgets, signals, a rehearsal, two trees."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bench.test_bench import load_script

ROOT = Path(__file__).resolve().parents[2]
measure = load_script("gpu/measure")


def run(folder, *parts, trees=(ROOT,), budget_s=100.0):
    rc = measure.run_parts(parts, trees, folder / "records.jsonl", "rehearsal", budget_s)
    return rc, [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


def script(path, code):
    """A part that runs some code."""
    path.with_suffix(".py").write_text(code)
    return measure.Part(path.name, 1, str(path.with_suffix(".py")))


def assert_dead(pid):
    """A killed process may stay a moment until it is reaped."""
    stat = Path(f"/proc/{pid}/stat")
    for _ in range(50):
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("a part's child survived it")


def test_what_is_done_is_not_done_again_and_a_failure_stops_nothing(tmp_path, capsys):
    count = tmp_path / "count"
    counts = script(tmp_path / "counts", f"print('x', file=open({str(count)!r}, 'a')); print('a' * 9000 + 'end')")
    fails = script(tmp_path / "fails", "raise SystemExit('broken on purpose')")
    absent = measure.Part("absent", 1, "nothing.py", package="no_such_package")
    for times in (1, 2):
        rc, rows = run(tmp_path, fails, absent, counts)
        assert rc == 1
        assert [row["state"] for row in rows] == [*("failed", "missing", "done"), *("failed", "missing")][
            : 1 + 2 * times
        ]
        assert "broken on purpose" in rows[0]["output"]
        assert rows[1]["output"] == "no_such_package is not installed"
        assert (rows[2]["output"][-4:], len(rows[2]["output"])) == ("end\n", measure.TAIL)
        assert (rows[2]["part"], rows[2]["tree"], len(rows[2]["sources"])) == ("counts", ROOT.name, 16)
    assert "done before" in capsys.readouterr().out
    assert count.read_text() == "x\n"


def test_a_budget_ends_what_takes_too_long_with_its_children(tmp_path, capsys):
    child = tmp_path / "child"
    code = f"""
import subprocess, sys, time
started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(child)!r}, "w").write(str(started.pid))
time.sleep(600)
"""
    rc, rows = run(tmp_path, script(tmp_path / "sleeps", code), budget_s=8.0)
    assert (rc, rows[0]["state"]) == (1, "timeout")
    assert_dead(child.read_text())
    late = measure.Part("late", 100, "nothing.py")
    assert measure.run_parts([late], [ROOT], tmp_path / "records.jsonl", "a card", 20.0) == 0
    assert "left out: it needs 100 s, 15 s are left" in capsys.readouterr().out


def test_a_signal_while_a_part_is_started_leaves_no_child(tmp_path, monkeypatch):
    started, real, before = [], subprocess.Popen, {n: signal.getsignal(n) for n in measure.ENDS}

    def start(*words, **options):
        started.append(real(*words, **options))
        os.kill(os.getpid(), signal.SIGTERM)  # before the caller has the process
        return started[-1]

    monkeypatch.setattr(measure.subprocess, "Popen", start)
    try:
        for number in measure.ENDS:
            signal.signal(number, measure.stop)
        with pytest.raises(SystemExit) as stopped:
            run(tmp_path, script(tmp_path / "sleeps", "import time; time.sleep(600)"))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert stopped.value.code == 128 + signal.SIGTERM
    assert_dead(started[0].pid)


def test_every_marked_test_is_among_those_that_run(tmp_path):
    there = [ROOT / file for file in measure.ON_A_GPU]
    assert all(path.exists() for path in there)
    marked = {path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text(encoding="utf-8")}
    assert {path for path in marked if not {path, *path.parents} & set(there)} <= {Path(__file__)}


def test_bad_requests_are_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(measure, "gpu", lambda: None)
    for words, said in (
        ((), "no GPU: nvidia-smi names none; --rehearse needs none"),
        (("--part", "nothing"), "invalid choice: 'nothing'"),
        (("--rehearse", "--before", str(tmp_path)), f"--before: expected a checkout of rlhf-engine, got {tmp_path}"),
        (("--rehearse", "--budget", "nan"), "--budget: expected more than 5 seconds, got nan"),
    ):
        with pytest.raises(SystemExit, match="2"):
            measure.main([*words, "--out", str(tmp_path / "out")])
        assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.long
@pytest.mark.parametrize("python", [sys.executable, str(ROOT / ".venv" / "gpu" / "bin" / "python")])
def test_a_rehearsal_of_two_trees_runs_every_part(tmp_path, python):
    """The second in the packages of the GPU machine: torch 2.11, Triton 3.6, transformers 5.17; no PEFT, no TRL."""
    if not Path(python).exists():
        pytest.skip(f"{python} is not there; make test-long makes it")
    tree = tmp_path / "before"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tree)], check=True)
    words = [python, "bench/gpu/measure.py", "--rehearse", "--budget", "1200", "--out", str(tmp_path)]
    words += ["--before", str(tree)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    ended = {(row["part"], row["tree"]): row["state"] for row in rows if "state" in row}
    both = {part.name for part in measure.PARTS if part.calls and not part.package}
    assert set(ended) == {(p.name, ROOT.name) for p in measure.PARTS} | {(name, "before") for name in both}
    missing = {part for (part, _), state in ended.items() if state == "missing"}
    assert missing == (set() if python == sys.executable else {"peft", "trl"})
    assert {state for (part, _), state in ended.items() if part not in missing} == {"done"}
    steps = [row for row in rows if row.get("call", "").startswith("whole_step")]
    assert {row["prompts"] for row in steps} == {"default", "copied", "shared"}
    assert all(row["step"] == pytest.approx(sum(row["seconds"].values()), abs=1e-3) for row in steps)
