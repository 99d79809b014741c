"""Recipes of examples/recipes: every file is sound, and every `--tiny` runs from its data to its evaluation."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.test_docs import CONFIGS

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "examples" / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
QUICK = ("perl-ticketing",)
"""Recipes whose `--tiny` runs in the default suite."""
SECONDS = 60


def command(*argv: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(RECIPES / "run.py"), *map(str, argv)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=600,
    )


@pytest.mark.parametrize("name", NAMES)
def test_options_are_those_of_the_commands(name):
    recipe = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    assert set(recipe) == {"base", "layout", "needs", "tiny_data", "stages"}
    assert (RECIPES / "tiny" / recipe["tiny_data"]).is_dir()
    for stage in recipe["stages"].values():
        options = dict(stage["options"])
        options["async_mode"] = options.pop("async", "off")
        cls = CONFIGS[stage["command"]]
        if stage["command"] != "train":
            del options["async_mode"]
        cls(**options)  # checks names, types, bounds and what contradicts


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in NAMES])
def test_tiny_runs_from_data_to_evaluation(name, tmp_path):
    began = time.monotonic()
    done = command(name, "--tiny", "--output_dir", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    seconds = time.monotonic() - began
    stages = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())["stages"]
    assert all((tmp_path / f"{stage}.done").is_file() for stage in stages)
    results = json.loads((tmp_path / "evaluation" / "results.json").read_text())
    assert all(figures["reward"] is not None for figures in results["models"].values())
    assert len(results["models"]) >= 2
    assert (tmp_path / "evaluation" / "report.html").is_file()
    again = command(name, "--tiny", "--output_dir", tmp_path)  # nothing is done twice
    assert again.returncode == 0
    assert "==" not in again.stdout
    assert seconds < SECONDS * 3  # under a minute on a machine to itself
    if name == "perl-ticketing":
        options_may_be_given(name, tmp_path)


def options_may_be_given(name, whole):
    """The last stage alone, on another run's models and with other options; a stage that is done keeps its own."""
    other, change = whole / "other", ["--set", "evaluate.max_prompts=1"]
    done = command(name, "--tiny", "--output_dir", other, "--from", "evaluate", "--start", whole, *change)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("== perl-ticketing") == 1
    results = json.loads((other / "evaluation" / "results.json").read_text())
    assert results["prompts"] == 1
    assert results["record"]["config"]["reward_adapter"] == str(whole / "reward" / "final")
    done = command(name, "--tiny", "--output_dir", whole, *change)
    assert done.returncode == 2
    assert "stage evaluate: expected max_prompts 4, with which it was done, got 1; give another" in done.stderr
    for given, message in [
        (["--from", "evaluate"], f"from: expected the stages before evaluate done in '{other / 'new'}', got no reward"),
        (["--start", whole], "start: expected it with --from, got no --from"),
        (["--set", "sft.seed=1"], "set: expected OPTION=VALUE or STAGE.OPTION=VALUE with a stage of reward, rei"),
        (["--set", "seed"], "with a stage of reward, reinforce, evaluate, got 'seed'"),
    ]:
        done = command(name, "--tiny", "--output_dir", other / "new", *given)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr


def test_a_recipe_without_its_data_says_what_to_fetch(tmp_path):
    done = command("remax-hh", "--data", tmp_path, "--output_dir", tmp_path / "out")
    assert done.returncode == 2
    assert "expected files in" in done.stderr
    assert "Fetch hh.jsonl: Anthropic/hh-rlhf (Hugging Face)" in done.stderr
    done = command("remax-hh", "--output_dir", tmp_path / "out")
    assert done.returncode == 2
    assert "data: expected a folder with hh.jsonl" in done.stderr
    done = command("nothing", "--output_dir", tmp_path / "out")
    assert done.returncode == 2
    assert "recipe: expected one of async-gsm8k" in done.stderr


def test_published_layouts_become_rows(tmp_path):
    sys.path.insert(0, str(RECIPES))
    try:
        from prepare import LAYOUTS
    finally:
        sys.path.remove(str(RECIPES))
    found = {name: LAYOUTS[name](RECIPES / "tiny" / folder) for name, folder in [
        ("stack_exchange", "stack_exchange"), ("hh", "hh"), ("tldr", "tldr"), ("gsm8k", "gsm8k"), ("thumbs", "thumbs"),
        ("taskmaster", "taskmaster"),
    ]}  # fmt: skip
    for name in ("stack_exchange", "hh", "tldr"):
        train, held_out = found[name]["pairs.jsonl"], found[name]["pairs_heldout.jsonl"]
        assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
        assert held_out
        assert all(row["chosen"] != row["rejected"] for row in train)
    assert found["hh"]["pairs.jsonl"][0]["prompt"].endswith("\n\nAssistant:")
    assert all(row["chosen"].startswith(" Asks: ") for row in found["tldr"]["pairs.jsonl"])
    question = found["gsm8k"]["prompts.jsonl"][0]
    assert question["prompt"].count("Question: ") == 5
    a, b = (int(x) for x in question["prompt"].rpartition("Question: A box holds ")[2].split() if x.isdigit())
    assert int(question["answer"]) == a * b
    liked = found["thumbs"]["liked.jsonl"]
    assert len(liked) * 2 == len(found["thumbs"]["thumbs.jsonl"])
    dialogues = [{row["dialogue"] for row in found["taskmaster"][f"thumbs{of}.jsonl"]} for of in ("", "_heldout")]
    assert all(dialogues)
    assert not dialogues[0] & dialogues[1]
    drawn = [{"prompt": f"p{i}", "completion": text} for i in range(30) for text in ("a", "b" if i else "a")]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in drawn))
    pairs = LAYOUTS["sampled_pairs"](tmp_path)
    assert [len(pairs[name]) for name in ("pairs.jsonl", "pairs_heldout.jsonl")] == [27, 2]  # p0's answers are equal
    assert {(row["chosen"], row["rejected"]) for row in pairs["pairs.jsonl"]} == {("a", "b")}
