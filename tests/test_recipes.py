"""Recipes of examples/recipes: every file is sound, and every `--tiny` runs from its data to its evaluation."""

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import yaml
from transformers import AutoTokenizer

from rlhf_engine.commands.main import main
from tests.hydra.test_build import classifier_on
from tests.test_docs import CONFIGS
from tests.training.test_data import PROMPTS, write_model, write_rows

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "examples" / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
SECONDS = 60


@pytest.fixture
def runner(monkeypatch) -> ModuleType:
    """The script, whose stages are run by this process."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("recipes_run", RECIPES / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(argv: list[str], stdout: int | None = None) -> subprocess.CompletedProcess[bytes]:
        assert argv[:3] == [sys.executable, "-m", "rlhf_engine"]
        return subprocess.CompletedProcess(argv, main(argv[3:]))

    module.subprocess = SimpleNamespace(run=run, DEVNULL=subprocess.DEVNULL)
    return module


def command(*argv: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(RECIPES / "run.py"), *map(str, argv)], capture_output=True, text=True, cwd=ROOT,
        timeout=600,
    )  # fmt: skip


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


def assert_whole(name: str, folder: Path) -> None:
    """Every stage of a recipe is done, with figures of its models and a page."""
    stages = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())["stages"]
    assert all((folder / f"{stage}.done").is_file() for stage in stages)
    results = json.loads((folder / "evaluation" / "results.json").read_text())
    assert all(figures["reward"] is not None for figures in results["models"].values())
    assert len(results["models"]) >= 2
    assert (folder / "evaluation" / "report.html").is_file()


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_tiny_runs_from_data_to_evaluation(name, tmp_path):
    began = time.monotonic()
    done = command(name, "--tiny", "--output_dir", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    seconds = time.monotonic() - began
    assert_whole(name, tmp_path)
    again = command(name, "--tiny", "--output_dir", tmp_path)  # nothing is done twice
    assert again.returncode == 0
    assert "==" not in again.stdout
    assert seconds < SECONDS * 3  # under a minute on a machine to itself


def test_stages_run_once_and_options_may_be_given(runner, tmp_path, capfd):
    """The last stage alone, on another run's models and with other options; a stage that is done keeps its own."""
    name, whole = "perl-ticketing", tmp_path / "whole"

    def run(*argv: object) -> tuple[int, str, str]:
        capfd.readouterr()
        return runner.main([name, "--tiny", *map(str, argv)]), *capfd.readouterr()

    code, out, err = run("--output_dir", whole)
    assert (code, out.count(f"== {name}")) == (0, 3), err
    assert_whole(name, whole)
    code, out, _ = run("--output_dir", whole)  # nothing is done twice
    assert (code, out.count("==")) == (0, 0)
    other, change = whole / "other", ["--set", "evaluate.max_prompts=1"]
    code, out, err = run("--output_dir", other, "--from", "evaluate", "--start", whole, *change)
    assert (code, out.count(f"== {name}")) == (0, 1), err
    results = json.loads((other / "evaluation" / "results.json").read_text())
    assert results["prompts"] == 1
    assert results["record"]["config"]["reward_model_path"] == str(whole / "reward" / "final")
    code, _, err = run("--output_dir", whole, *change)
    assert code == 2
    assert "stage evaluate: expected max_prompts 4, with which it was done, got 1; give another" in err
    for given, message in [
        (["--from", "evaluate"], f"from: expected the stages before evaluate done in '{other / 'new'}', got no reward"),
        (["--start", whole], "start: expected it with --from, got no --from"),
        (["--set", "sft.seed=1"], "set: expected OPTION=VALUE or STAGE.OPTION=VALUE with a stage of reward, rei"),
        (["--set", "seed"], "with a stage of reward, reinforce, evaluate, got 'seed'"),
    ]:
        code, _, err = run("--output_dir", other / "new", *given)
        assert (code, message in err) == (2, True), err


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


def test_published_layouts_become_rows():
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


def test_a_gold_model_labels_sampled_pairs(runner, tmp_path):
    """The better answer is first, by transformers' own classifier; equal ones are left out, held-out prompts apart."""
    write_model(tmp_path / "base")
    gold = classifier_on(tmp_path / "base").double()
    gold.save_pretrained(tmp_path / "gold")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "gold")
    texts = [(f"{prompt} {word}", word) for prompt in PROMPTS for word in ("sun", "sea", "red", "cat")]
    drawn = [{"prompt": p, "completion": a} for p, word in texts for a in (" sea sea", f" the {word}")]
    drawn += [{"prompt": "same", "completion": " sun"}] * 2
    write_rows(tmp_path / "answers.jsonl", drawn)
    runner.write_rows("sampled_pairs", tmp_path, tmp_path, tmp_path / "gold", "cpu")
    labelled = [map(json.loads, (tmp_path / f"labelled{of}.jsonl").open()) for of in ("", "_heldout")]
    rows = [list(part) for part in labelled]
    assert [len(part) for part in rows] == [len(texts) - len(texts[::20]), len(texts[::20])]
    assert len({row["chosen"] == " sea sea" for row in rows[0]}) == 2  # gold turned some
    for row in rows[0]:
        answers = [tokenizer(row["prompt"] + row[name]).input_ids for name in ("chosen", "rejected")]
        with torch.no_grad():
            better, worse = (float(gold(torch.tensor([[*ids, tokenizer.eos_token_id]])).logits) for ids in answers)
        assert better > worse
