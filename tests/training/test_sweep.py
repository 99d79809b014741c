"""`rlhf-engine sweep`: many runs on one base, each with the floats, files and fate that it has as a `train` alone."""

import hashlib
import itertools
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rlhf_engine.commands.main import main
from rlhf_engine.config.sweep import read_grid
from rlhf_engine.policy import joint
from rlhf_engine.runs.metrics import read_metrics
from rlhf_engine.runs.page import write_page
from tests.runs.test_page import data_of
from tests.training.test_data import write_model, write_prompts, write_reward
from tests.training.test_rl import without_timings

REWARD = "return [float(len(set(row))) + 0.01 * sum(row) for row in completion_ids]"
AXES = {"algorithm": ["ppo", "grpo"], "seed": [1, 2]}
WITH = {"algorithm": {"ppo": {"lora_r": 4, "kl_target": 3.0}, "grpo": {"lora_r": 2, "learning_rate": 3e-3}}}
RATES = {"algorithm": ["ppo", "grpo", "remax"], "learning_rate": [1e-2, 3e-3]}


@pytest.fixture(scope="module")
def flags(model, tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("flags")
    return {
        "model_name_or_path": str(model), "dataset_name": str(write_prompts(folder)), "max_completion_length": 8,
        "reward_funcs": [write_reward(folder, REWARD)], "generation_batch_size": 8, "learning_rate": 1e-2,
        "max_steps": 4, "save_steps": 2, "device": "cpu", "eval_dataset_name": 0.3, "eval_steps": 2,
    }  # fmt: skip


def write_grid(folder: Path, flags: dict[str, Any], **fields: Any) -> str:
    path = folder / "grid.yaml"
    path.write_text(yaml.safe_dump({"flags": flags, "grid": AXES, "with": WITH, **fields}))
    return str(path)


def sweep(grid: str, output: Path) -> int:
    return main(["sweep", grid, "--output_dir", str(output)])


def left(folder: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """What a run has left that does not tell time: metrics, and digests of the final model."""
    final, found = folder / "final", {}
    for path in sorted(path for path in final.rglob("*") if path.is_file() and path.name != "manifest.json"):
        content = path.read_bytes()
        if path.name == "adapter_config.json":  # PEFT writes a set in the order of a process
            content = bytes(sorted(content))
        found[str(path.relative_to(final))] = hashlib.sha256(content).hexdigest()
    return [without_timings(row) for row in read_metrics(folder / "metrics.jsonl")], found


def train_alone(flags: dict[str, Any], output: Path, axes: dict[str, Any] = AXES) -> dict[str, Any]:
    """What the runs of the grid leave, each of a `train` of its own."""
    found = {}
    for values in itertools.product(*axes.values()):
        point = dict(zip(axes, values, strict=True))
        name = "_".join(f"{axis}-{value}" for axis, value in point.items())
        config = output / f"{name}.yaml"
        config.write_text(yaml.safe_dump({**flags, **WITH["algorithm"].get(point.get("algorithm"), {}), **point}))
        assert main(["train", "--config", str(config), "--output_dir", str(output / name)]) == 0
        found[name] = left(output / name)
    return found


@pytest.fixture(scope="module")
def alone(flags, tmp_path_factory) -> dict[str, Any]:
    return train_alone(flags, tmp_path_factory.mktemp("alone"))


def test_each_run_is_that_of_train_alone(flags, alone, tmp_path, capsys):
    assert sweep(write_grid(tmp_path, flags), tmp_path / "out") == 0
    assert {name: left(tmp_path / "out" / name) for name in alone} == alone
    assert capsys.readouterr().out.startswith("4 of 4 runs done, 0 dropped, 0 failed\n")
    files = {path.name for path in (tmp_path / "out" / "algorithm-ppo_seed-1").iterdir()}
    assert {"page.html", "run.json", "curves.png", "samples.md", "checkpoint-4", "final"} <= files
    page = tmp_path / "out" / "page.html"
    assert {run["name"]: run["state"] for run in data_of(page)["runs"]} == dict.fromkeys(alone, "done")
    (table,) = re.findall(r'<table id="groups">.*?</table>', page.read_text(), re.DOTALL)
    cells = re.findall(r'<td class="number" data-value="([\d.-]+)">[\d.-]+ ± ([\d.]+)', table)
    for algorithm in AXES["algorithm"]:  # the interval of a mean over two seeds, by a table of Student's t
        a, b = (alone[f"algorithm-{algorithm}_seed-{seed}"][0][-1]["eval/reward"] for seed in AXES["seed"])
        half = 12.706 * statistics.stdev([a, b]) / math.sqrt(2)
        near = [float(spread) for mean, spread in cells if math.isclose(float(mean), (a + b) / 2, rel_tol=1e-6)]
        assert near == [pytest.approx(half, rel=2e-2)]


def test_out_of_exact_mode_each_run_is_that_of_train_alone(flags, tmp_path):
    flags = {**flags, "exact": False, "max_steps": 3}
    (tmp_path / "alone").mkdir()
    expected = train_alone(flags, tmp_path / "alone")
    assert sweep(write_grid(tmp_path, flags, runs_at_once=3), tmp_path / "out") == 0
    assert {name: left(tmp_path / "out" / name) for name in expected} == expected


def test_updates_made_together_have_the_floats_of_each_alone(flags, tmp_path, monkeypatch, capsys):
    """Minibatches of other numbers and lengths, a run that turns NaN beside others, and a stop in the middle."""
    flags = {**flags, "seed": 1, "max_steps": 3, "eval_steps": 0, "save_steps": 0}
    (tmp_path / "alone").mkdir()
    expected = train_alone(flags, tmp_path / "alone", RATES)
    reward = write_reward(tmp_path, f"import os, signal\nif len(calls) == 31: os.kill(os.getpid(), 15)\n{REWARD}")
    sizes, make = [], joint._run_together
    monkeypatch.setattr(joint, "_run_together", lambda host, passes: sizes.append(len(passes)) or make(host, passes))
    axes = {**RATES, "learning_rate": [*RATES["learning_rate"], 1e30]}
    grid = write_grid(tmp_path, {**flags, "reward_funcs": [reward]}, grid=axes)
    assert sweep(grid, tmp_path / "out") == 128 + signal.SIGTERM
    assert max(sizes) == 9
    assert len(set(sizes)) > 2
    assert not list((tmp_path / "out").glob("*/final"))
    assert sweep(grid, tmp_path / "out") == 1
    said = capsys.readouterr()
    assert "6 of 9 runs done, 0 dropped, 3 failed" in said.out
    assert "nothing of this minibatch was applied" in said.err
    assert {name: left(tmp_path / "out" / name) for name in expected} == expected


def test_a_backward_pass_that_breaks_off_ends_its_runs(flags, tmp_path, monkeypatch, capsys):
    flags = {**flags, "max_steps": 2, "eval_steps": 0}
    backward, calls = torch.autograd.backward, itertools.count(1)

    def broken(losses, *given, **more):
        if isinstance(losses, list) and next(calls) == 6:
            raise RuntimeError("no kernel")
        return backward(losses, *given, **more)

    monkeypatch.setattr(torch.autograd, "backward", broken)
    assert sweep(write_grid(tmp_path, flags, grid={"seed": [1, 2]}, **{"with": {}}), tmp_path / "out") == 1
    assert capsys.readouterr().err.count("broke off, their gradients are gone: no kernel") == 2


def test_a_method_with_backbones_of_its_own_takes_turns_with_others(flags, tmp_path):
    flags = {**flags, "max_steps": 2, "lora_r": 4}
    axes = {"method": ["lora_ppo", "hydra_ppo", "full_ppo"], "seed": [1]}
    (tmp_path / "alone").mkdir()
    expected = train_alone(flags, tmp_path / "alone", axes)
    assert sweep(write_grid(tmp_path, flags, grid=axes, **{"with": {}}), tmp_path / "out") == 0
    assert {name: left(tmp_path / "out" / name) for name in expected} == expected


def test_a_sweep_that_is_killed_goes_on(flags, alone, tmp_path, survived):
    out, grid = tmp_path / "out", write_grid(tmp_path, flags, runs_at_once=2)
    command = [sys.executable, "-m", "rlhf_engine", "sweep", grid, "--output_dir", str(out)]
    names = list(read_grid(grid, tmp_path).runs)
    assert names == ["algorithm-ppo_seed-1", "algorithm-grpo_seed-1", "algorithm-ppo_seed-2", "algorithm-grpo_seed-2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        third, deadline = out / names[2] / "metrics.jsonl", time.monotonic() + 300
        while not (third.is_file() and third.read_text().count("\n") >= 2):  # after two are done, in the middle of two
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
    done = {name: (out / name / "final").stat().st_mtime_ns for name in names[:2]}
    assert sweep(grid, out) == 0
    assert {name: left(out / name) for name in alone} == alone
    assert {name: (out / name / "final").stat().st_mtime_ns for name in names[:2]} == done
    assert len(list((out / names[0]).glob("checkpoint-*"))) == 2
    survived("kills", 1)


def test_a_signal_stops_all_runs_after_their_step(flags, alone, tmp_path, monkeypatch):
    reward = write_reward(tmp_path, f"import os, signal\nif len(calls) == 20: os.kill(os.getpid(), 15)\n{REWARD}")
    grid = write_grid(tmp_path, {**flags, "reward_funcs": [reward], "save_steps": 0})
    assert sweep(grid, tmp_path / "out") == 128 + signal.SIGTERM
    steps = {name: [path.name for path in (tmp_path / "out" / name).glob("checkpoint-*")] for name in alone}
    assert all(len(found) == 1 for found in steps.values())
    assert not list((tmp_path / "out").glob("*/final"))
    assert sweep(grid, tmp_path / "out") == 0
    for name, expected in alone.items():
        assert left(tmp_path / "out" / name)[0] == expected[0]


def wait_for(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_with_two_threads_two_processes_share_the_runs(flags, alone, tmp_path, number):
    """A sweep is stopped, or killed, while both are at work; then one of them is killed; the rest is made by one."""
    go, died, out = tmp_path / "go", tmp_path / "died", tmp_path / "out"
    body = f"""
        import os, pathlib, time
        while len(calls) == 6 and not os.path.exists({str(go)!r}):
            pathlib.Path({str(tmp_path)!r}, f"at-{{os.getpid()}}").touch()
            time.sleep(0.01)
        if len(calls) == 5 and os.path.exists({str(go)!r}) and not os.path.exists({str(died)!r}):
            with open({str(died)!r}, "x"):
                os.kill(os.getpid(), 9)
    """
    reward = write_reward(tmp_path, f"{textwrap.dedent(body)}{REWARD}")
    grid = write_grid(tmp_path, {**flags, "reward_funcs": [reward]})
    command = [sys.executable, "-m", "rlhf_engine", "sweep", grid, "--output_dir", str(out)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "2"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: process.poll() is not None or len(list(tmp_path.glob("at-*"))) == 2)
        workers = [int(path.name.removeprefix("at-")) for path in tmp_path.glob("at-*")]
        assert process.pid not in workers
        process.send_signal(number)
        if number == signal.SIGTERM:
            go.touch()
        stopped = process.communicate()[1]
    wait_for(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))
    assert process.returncode == (128 + number if number == signal.SIGTERM else -number)
    assert not list(out.glob("*/final"))
    if number == signal.SIGTERM:
        assert "stopped; the same command goes on" in stopped
        again = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert again.returncode == 1
        assert "a process ended by itself (-9) with algorithm-" in again.stderr
        assert "2 of 4 runs done, 0 dropped, 2 failed" in again.stdout
    go.touch()
    died.touch()
    assert sweep(grid, out) == 0
    assert {name: left(out / name) for name in alone} == alone


@pytest.mark.parametrize("at_once", [None, 1])
def test_halving_drops_the_worse_half_of_the_groups(flags, alone, tmp_path, at_once):
    halving = {"at": [1, 3], "by": "-learning_rate", "keep": 0.5}  # ppo has the larger rate
    out = tmp_path / "out"
    grid = write_grid(tmp_path, flags, halving=halving, **({} if at_once is None else {"runs_at_once": at_once}))
    assert sweep(grid, out) == 0
    for name, (rows, files) in alone.items():
        kept = "grpo" in name
        assert left(out / name) == ((rows, files) if kept else (rows[:2], {}))  # of step 0 an evaluation
    states = {run["name"]: (run["state"], run["steps"]) for run in data_of(out / "page.html")["runs"]}
    assert states == {name: ("done", 4) if "grpo" in name else ("stopped", 1) for name in alone}
    record = json.loads((out / "sweep.json").read_text())["rungs"]
    assert record["1"]["dropped"] == ["algorithm-ppo_seed-1", "algorithm-ppo_seed-2"]
    assert record["3"]["dropped"] == []
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/metrics.jsonl")}
    assert sweep(grid, out) == 0  # nothing to do
    assert {path: path.stat().st_mtime_ns for path in out.glob("*/metrics.jsonl")} == before


def test_an_error_stops_one_run_alone(flags, alone, tmp_path, capsys):
    good = flags["reward_funcs"]
    mended = tmp_path / "mended"
    lost = f"import os\nif len(calls) > 7 and not os.path.exists({str(mended)!r}): raise KeyError('lost')\n"
    bad = [write_reward(tmp_path, lost + REWARD, "shaky")]
    axes = {"reward_funcs": [good, bad], "seed": [1]}
    grid = write_grid(tmp_path, {**flags, **WITH["algorithm"]["ppo"]}, **{"grid": axes, "with": {}})
    good_name, bad_name = read_grid(grid, tmp_path).runs
    assert sweep(grid, tmp_path / "out") == 1
    said = capsys.readouterr()
    assert said.out.startswith("1 of 2 runs done, 0 dropped, 1 failed\n")
    assert f"rlhf-engine sweep, run {bad_name}: " in said.err
    assert "lost" in said.err
    assert left(tmp_path / "out" / good_name) == alone["algorithm-ppo_seed-1"]
    assert not (tmp_path / "out" / bad_name / "final").exists()
    mended.touch()  # the run goes on where it was
    assert sweep(grid, tmp_path / "out") == 0
    assert left(tmp_path / "out" / bad_name) == alone["algorithm-ppo_seed-1"]


def test_grids_that_are_refused(flags, tmp_path, capsys):
    other = str(write_model(tmp_path / "other"))
    halving = {"at": [1], "by": "reward"}
    for changes, fields, message in (
        (
            {},
            {"grid": {"model_name_or_path": [flags["model_name_or_path"], other]}},
            "model_name_or_path: expected one ",
        ),
        (
            {},
            {"grid": {"exact": [True, False]}},
            "exact: expected one value for all runs, which share a base, got [",
        ),
        ({}, {"grid": {"dtype": ["float32", "bfloat16"]}}, "dtype: expected one value for all runs"),
        ({"vllm_server_base_url": "http://localhost:1"}, {}, "vllm_server_base_url: expected it unset in a sweep, got"),
        ({"output_dir": "here"}, {}, "output_dir: expected it unset in a grid, got 'here'"),
        ({"learning_rat": 1}, {}, "; did you mean learning_rate?"),
        ({}, {"grid": {"seed": 1}}, "grid.seed: expected a list of values, got 1"),
        ({}, {"grid": {"seed": [1, 1]}}, "got 'seed-1' twice"),
        ({}, {"grid": {"learning_rate": [-1.0]}}, "learning_rate: expected a number >= 0, got -1"),
        (
            {},
            {"grid": {"seed": [1]}, "with": {"algorithm": {"ppo": {}}}},
            "with.algorithm: expected values of the ",
        ),
        ({}, {"halving": {**halving, "at": [2, 1]}}, "at: expected steps above 0 that increase, got [2, 1]"),
        ({}, {"halving": {"at": [1]}}, "missing required option: by"),
        ({}, {"halving": {**halving, "at": [4]}}, "halving: expected at below the 4 steps of"),
        ({}, {"runs_at_once": 0}, "runs_at_once: expected an integer or none >= 1, got 0"),
        ({}, {"jobs": 2}, "unknown key in"),
    ):
        fields = {"with": {}, **fields} if "grid" in fields else fields
        assert sweep(write_grid(tmp_path, {**flags, **changes}, **fields), tmp_path / "out") == 2, message
        (line,) = [each for each in capsys.readouterr().err.splitlines() if each.startswith("rlhf-engine")]
        assert message in line
    assert not (tmp_path / "out").exists()  # nothing was begun


def test_other_options_are_not_mixed_into_a_sweep(flags, tmp_path, capsys):
    flags = {**flags, "max_steps": 2, "eval_steps": 0}
    axes = {"grid": {"seed": [1]}, "with": {}}
    assert sweep(write_grid(tmp_path, flags, **axes), tmp_path / "out") == 0
    assert sweep(write_grid(tmp_path, {**flags, "beta": 0.5}, **axes), tmp_path / "out") == 2
    assert "beta: expected " in capsys.readouterr().err
    more = {**axes, "grid": {"seed": [1, 2]}}  # further seeds of the same are welcome, and another place
    (tmp_path / "out").rename(tmp_path / "moved")
    assert sweep(write_grid(tmp_path, flags, **more), tmp_path / "moved") == 0
    runs = [tmp_path / "moved" / f"seed-{seed}" for seed in (1, 2)]
    assert [run["steps"] for run in data_of(write_page(runs, tmp_path / "page.html"))["runs"]] == [2, 2]
