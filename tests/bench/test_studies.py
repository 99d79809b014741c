"""The studies in bench/studies/: grids that go on where they stopped, lanes together and apart, the paper's table."""

import dataclasses
import importlib.util
import json
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from rlhf_kernels.runtime import native

from tests.bench.test_bench import load_script
from tests.conftest import SHARED, STORIES
from tests.training.test_data import write_model, write_prompts, write_reward

ROOT = Path(__file__).resolve().parents[2]


def run(script: str, *arguments: object, cwd: Path = ROOT, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "bench" / "studies" / script), *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == code, done.stderr[-3000:]
    return done


def write_grid(path: Path, **changes: object) -> Path:
    grid = {
        "command": "train",
        "flags": {"generation_batch_size": 4, "num_mini_batches": 1, "max_completion_length": 4, "max_steps": 2},
        "grid": {"method": ["hydra_ppo"], "seed": [0, 1]},
        "curves": ["reward", "kl"],
        "final": ["reward", "kl"],
    }
    path.write_text(yaml.safe_dump({**grid, **changes}))
    return path


@pytest.fixture
def sweep(monkeypatch):
    """bench/studies/sweep.py as a module."""
    specification = importlib.util.spec_from_file_location("sweep", ROOT / "bench" / "studies" / "sweep.py")
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "sweep", module)  # dataclasses look their module up
    specification.loader.exec_module(module)
    return module


@pytest.mark.long
def test_a_grid_makes_one_record_per_run_and_goes_on_where_it_stopped(tmp_path):
    model, out = write_model(tmp_path / "m"), tmp_path / "out"
    grid = write_grid(tmp_path / "tiny.yaml")
    reward = write_reward(tmp_path, "return [float(len(c)) for c in completions]")
    shared = ["--model_name_or_path", model, "--dataset_name", write_prompts(tmp_path), "--reward_funcs", reward]
    arguments = [grid, "--out", out, "--", *shared]
    # the second run cannot begin: the place of its metrics is taken by a folder
    taken = tmp_path / "runs" / "sweeps" / "tiny" / "method-hydra_ppo_seed-1" / "metrics.jsonl"
    taken.mkdir(parents=True)
    stopped = run("sweep.py", *arguments, cwd=tmp_path, code=1)
    assert "tiny: `sweep` ended with exit code 1; run this again to go on" in stopped.stderr
    (record,) = out.glob("*.json")
    first = record.read_text()
    taken.rmdir()
    table = run("sweep.py", *arguments, cwd=tmp_path).stdout
    assert record.read_text() == first
    found = json.loads((out / "method-hydra_ppo_seed-1.json").read_text())
    assert found["run"] == {"seed": 1, "method": "hydra_ppo"}
    assert found["curves"]["step"] == [1, 2]
    assert str(tmp_path) not in first  # folders of a machine stay out of the records
    assert "| hydra_ppo | 2 | " in table
    assert table.strip() in (out / "summary.md").read_text()
    assert (out / "curves.png").stat().st_size > 5000
    write_grid(grid, flags={**yaml.safe_load(grid.read_text())["flags"], "learning_rate": 0.5})
    other = run("sweep.py", *arguments, cwd=tmp_path, code=1)
    assert "expected a record of `rlhf-engine train" in other.stderr
    assert record.read_text() == first


@pytest.mark.long
def test_runs_of_a_recipe_share_the_stages_before_what_varies(tmp_path):
    grid = write_grid(
        tmp_path / "tiny.yaml",
        command="recipe",
        flags={"recipe": "perl-ticketing", "from": "reinforce", "reward.max_steps": 3, "reward.max_length": None},
        grid={"reinforce.beta": [0.0, 0.5], "seed": [1]},
        final=["perl/reward", "perl/kl", "kl"],
        against=[["perl/kl", "perl/reward"], ["kl", "reward"]],
    )
    table = run("sweep.py", grid, "--out", tmp_path / "out", "--", "--tiny", cwd=tmp_path).stdout
    assert "| 0.5 | 1 | " in table
    records = [json.loads(path.read_text()) for path in sorted((tmp_path / "out").glob("*.json"))]
    assert [record["run"]["reinforce.beta"] for record in records] == [0.0, 0.5]
    assert records[1]["command"] == (
        "python examples/recipes/run.py perl-ticketing --from reinforce --set reward.max_length=null "
        "--set reward.max_steps=3 --set seed=1 --set reinforce.beta=0.5"
    )
    assert [len(record["curves"]["reward"]) for record in records] == [2, 2]
    (start,) = (tmp_path / "runs" / "sweeps" / "tiny").iterdir()  # where the whole run's pages are
    assert json.loads((start / "reward" / "run.json").read_text())["config"]["max_steps"] == 3
    assert (start / "evaluation" / "report.html").is_file()
    assert (tmp_path / "out" / "curves.png").stat().st_size > 5000


def test_grids_that_are_none(tmp_path, sweep):
    several = {"command": "recipe", "flags": {"from": "evaluate"}, "grid": {"recipe": ["perl-hh", "remax-hh"]}}
    for changes, message in (
        ({"grid": {}}, "grid: expected an axis or several, got {}"),
        ({"extra": 1}, "unknown key in"),
        ({"command": "sft"}, "expected command train, demo or recipe, got 'sft'"),
        ({"grid": {"seed": 3}}, r"grid\.seed: expected a list of values, got 3"),
        ({"command": "recipe"}, r"recipe: expected a flag or an axis, .* got \[\]"),
        (several, r"recipe: expected a flag or an axis, of one value with `from`, got \['perl-hh', 'remax-hh'\]"),
        ({"against": [["reward", "eval/kl"]]}, r"against: expected pairs of \[.*\] or of \['kl', 'reward'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            sweep.Grid.read(write_grid(tmp_path / "g.yaml", **changes))


def test_presets_of_an_axis_and_curves_over_another(tmp_path, sweep):
    grid_file = write_grid(
        tmp_path / "g.yaml",
        grid={"algorithm": ["ppo", "remax"], "seed": [0, 1]},
        curves=["reward", "kl", "seconds/step"],
        against=[["kl", "reward"], ["seconds", "reward"]],
        **{"with": {"algorithm": {"remax": {"num_mini_batches": 3, "beta": 0.5}}}},
    )
    grid = sweep.Grid.read(grid_file)
    plain = sweep.command_of(grid, {"seed": 0, "algorithm": "ppo"})
    preset = sweep.command_of(grid, {"seed": 0, "algorithm": "remax"})
    assert plain[plain.index("--num_mini_batches") + 1] == "1"
    assert "--beta" not in plain
    assert (preset[preset.index("--num_mini_batches") + 1], preset[preset.index("--beta") + 1]) == ("3", "0.5")
    assert preset.count("--num_mini_batches") == 1
    curves = {"step": [1, 2, 3], "reward": [0.0, 1.0, 2.0], "kl": [0.0, 0.5, 1.0], "seconds/step": [1.0, 2.0, 4.0]}
    assert sweep._curve({"curves": curves}, "seconds") == [1.0, 3.0, 7.0]
    records = [
        {
            "run": point,
            "final": {metric: 1.0 + point["seed"] + 0.5 * (point["algorithm"] == "remax") for metric in grid.final},
            "curves": curves,
            "git_commit": None,
        }
        for point in grid.runs()
    ]
    # two values, 1 apart: 12.706 (Student's t for one degree of freedom) times 0.5
    assert "| remax | 2 | 2 ± 6.4" in sweep.summarise(grid, records, tmp_path)
    assert "| remax | 2 | +0.5 ± 0" in (tmp_path / "summary.md").read_text()  # paired by seed
    reaching = dataclasses.replace(grid, reach={"reward": 0.5, "kl": 9.0})
    assert "| 3.0 ± 0 (3.0, 3.0) | never |" in sweep.summarise(reaching, records, tmp_path)
    assert (tmp_path / "curves.png").stat().st_size > 5000
    for changes, message in (
        ({"with": {"algorithm": {"dpo": {}}}}, r"with.algorithm: expected values of the grid, got \['dpo'\]"),
        ({"against": [["seconds", "reward"]]}, "against: expected pairs of"),
    ):
        with pytest.raises(ValueError, match=message):
            sweep.Grid.read(write_grid(tmp_path / "bad.yaml", **changes))


def busy_records(path: Path) -> dict[tuple[str, int], dict]:
    return {(r["arm"], r["busy"]): r for r in map(json.loads, path.read_text().splitlines())}


def arms_here(busy) -> list[str]:
    """Arms that this torch and this package have."""
    arms = [*([busy.OURS] if native.missing() is None else []), *busy.PEERS, busy.GEMMS]
    return [arm for arm in arms if hasattr(torch.nn.functional, "linear_cross_entropy") or "linear_cross" not in arm]


@pytest.mark.long
def test_busy_neighbours(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # names are not broken, however wide the numbers are
    busy = load_script("studies/busy")
    assert busy.main(["--tiny", "--rounds", "3", "--busy", "0", "1", "--json", str(tmp_path / "a.jsonl")]) == 0
    found = busy_records(tmp_path / "a.jsonl")
    here = arms_here(busy)
    assert set(found) == {(arm, n) for arm in here for n in (0, 1)}
    for (arm, n), record in found.items():
        assert (record["case"], record["dtype"], record["rounds"]) == ("frozen/24x16x97", "float32", 3)
        assert (record["order"], len(record["samples_ms"])) == (here, 3)
        assert record["ms"] == sorted(record["samples_ms"])[1]
        assert record["slowdown"] == record["ms"] / found[arm, 0]["ms"]
        assert (record["threads"], record["isa"]) == (torch.get_num_threads(), native.isa()), (arm, n)
        assert record["command"].startswith("python bench/studies/busy.py --tiny --rounds 3 --busy 0 1 --json ")
        assert set(record["missing"]) == {arm for arm in (busy.OURS, *busy.PEERS) if arm not in here}
    shown = capsys.readouterr().out
    assert "frozen/24x16x97 float32" in shown
    assert all(arm in shown for arm in here)


def test_requests_that_the_study_of_neighbours_cannot_serve(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for options, message in (
        (["--op", "lora", "--sizes", "4x5x6"], "argument --sizes: expected it with --op linear_logprob, got --op lora"),
        (["--sizes", "4x5"], "argument --sizes: expected NxHxV of whole numbers above 0, got '4x5'"),
        (["--sizes", "4x0x5"], "argument --sizes: expected NxHxV of whole numbers above 0, got '4x0x5'"),
        (["--rounds", "0"], "argument --rounds: expected a whole number of at least 1, got '0'"),
        (["--busy", "-1"], "argument --busy: expected"),
        (["--json", "none/a.jsonl"], "busy: json: expected a path that can be written, got"),
        (["--isa", "neon"] if platform.machine() == "x86_64" else ["--isa", "amx_bf16"], "busy: isa: expected"),
    ):
        try:
            code = load_script("studies/busy").main(["--tiny", *options])
        except SystemExit as stop:
            code = stop.code
        assert code == 2
        assert message in capsys.readouterr().err


LANES = "--hidden 64 --layers 1 --vocab 200 --tokens 16 --batches 1 3 --rounds 1 --device cpu"
THUMBS = SHARED / "data" / "taskmaster-ticketing"
SIZES = "--batch 2 --prompt 8 --answer 4 --limit 4 --epochs 1 --rounds 1 --cap 1.3GB"
STUDIES = {
    "lanes.py": (f"{LANES} --out out", "one call stops paying at"),
    "ppo_vs_remax.py": ("--quick --rounds 1 --out out", "| remax / ppo |"),
    "overlap.py": ("--quick --rounds 1 --steps 4 --out out", "| off |"),
    "sharded_base.py": ("--quick --rounds 1 --steps 2 --out out", "| sharded |"),
    "full_in_shares.py": ("--quick --rounds 1 --steps 2 --out out", "| 2 processes |"),
    "off_policy.py": ("--work work --quick --seeds 0 --batches 1 --out out", "| "),
    "perl_taskmaster.py": (f"--data {THUMBS} --work work --quick --out out", "| lora_r1 | 0.00"),
    "hydra_table.py": (f"{SIZES} --device cpu --methods lora_ppo hydra_ppo --out out", "| hydra_ppo |"),
    "exact.py": ("--tokens 1 --models 'mistral, window' --dtypes bf16 --json out.jsonl", "mistral"),
    "exact_runs.py": (
        f"--modes overlap --dtypes bf16 --steps 2 --stories {STORIES} --json out.jsonl",
        "2 steps, 1024 tokens, largest difference 0",
    ),
    "learning_cost.py": ("--hidden 64 --layers 2 --vocab 200 --rounds 1 --dtypes float32 --json out.jsonl", ""),
}
"""Studies at a small size, and what they print; each leaves a record."""


@pytest.mark.long
@pytest.mark.parametrize("script", STUDIES)
def test_a_study_runs_and_leaves_its_record(script, tmp_path):
    if script.startswith("exact") and (native.missing() is not None or not STORIES.exists()):
        pytest.skip(f"needs the extension, and {STORIES.name} beside the checkout, in shared/")
    if script.startswith("perl") and not THUMBS.is_dir():
        pytest.skip("Taskmaster's reward files are not beside the checkout")
    words, said = STUDIES[script]
    assert said in run(script, *shlex.split(words), cwd=tmp_path).stdout
    assert [
        json.loads(path.read_text().splitlines()[0] if path.suffix == ".jsonl" else path.read_text())
        for path in (*tmp_path.glob("*.jsonl"), *tmp_path.glob("out/**/*.json"))
    ]
