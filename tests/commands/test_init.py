"""`rlhf-engine init`: what it writes, leaves alone and refuses. tests/test_docs.py runs the folders."""

import json
from pathlib import Path

import pytest
import yaml

from rlhf_engine.commands.init import STARTS, TEMPLATES
from rlhf_engine.commands.main import main
from rlhf_engine.config import TrainConfig, parse_config
from rlhf_engine.config.commands import OWN_MODEL
from rlhf_engine.data import Tally, load_rows
from rlhf_engine.scoring.rewards import load_reward
from tests.conftest import tiny_llama

ROOT = Path(__file__).resolve().parents[2]


def refused(capsys, *words: str) -> str:
    """The one line of a request that cannot be served."""
    assert main(["init", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.fixture
def base(tmp_path) -> Path:
    """A model of the user's, in a folder beside the new one."""
    tiny_llama().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("start", OWN_MODEL)
def test_a_model_of_yours_is_the_base(start, base, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", start, "new/here", "--model_name_or_path", "base"]) == 0
    here = tmp_path / "new" / "here"
    monkeypatch.chdir(here)
    config = parse_config(TrainConfig, ["--config", "train.yaml"])
    assert (here / config.model_name_or_path).samefile(base)
    assert len(load_rows("prompts.jsonl", Tally(source="prompts.jsonl"), kinds=("prompt_only",))) == 64
    reward = load_reward("reward.py:reward")
    happy, plain = reward(prompts=["a"] * 2, completions=["They hugged and laughed together .", "no no"])
    assert happy > plain
    assert not (here / "model").exists()
    assert "runs/sft" not in (here / "README.md").read_text()
    printed = capsys.readouterr().out
    assert all(line in printed for line in (here / "README.md").read_text().splitlines() if line.startswith("rlhf-"))


def test_a_name_of_the_hub_stays_a_name_and_takes_the_rate_of_a_large_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "reward-function", "here", "--model_name_or_path", "Qwen/Qwen3-0.6B"]) == 0
    config = yaml.safe_load((tmp_path / "here" / "train.yaml").read_text())
    assert (config["model_name_or_path"], config["learning_rate"]) == ("Qwen/Qwen3-0.6B", 1e-4)


def test_the_recipe_has_the_settings_of_its_example(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "recipe:stories260k", "here", "--model_name_or_path", "base"]) == 0
    written = yaml.safe_load((tmp_path / "here" / "train.yaml").read_text())
    example = yaml.safe_load((ROOT / "examples" / "stories260k.yaml").read_text())
    assert {**written, **example} == {**example, "model_name_or_path": "../base", "output_dir": "runs/ppo"}
    for name, source in (("dataset_name", "prompts.jsonl"), ("eval_dataset_name", "heldout.jsonl")):
        assert written[name] == source
        assert (tmp_path / "here" / source).read_bytes() == (ROOT / example[name]).read_bytes()


def test_thumbs_have_both_labels_and_some_have_no_prompt(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "reward-model", "here", "--seed", "3"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "here" / "thumbs.jsonl").read_text().splitlines()]
    assert 0.05 < sum(row["label"] for row in rows) / len(rows) < 0.5
    assert sum(not row["prompt"] for row in rows) == len(rows) // 8


def test_nothing_is_overwritten(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    assert "output_dir: expected a new or an empty folder, got 'mine'" in refused(capsys, "tutorial", "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_what_it_refuses(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for words, message in (
        ((), "missing required options: --start, --output_dir"),
        (("tutorials", "x"), "start: expected one of 'tutorial', 'reward-function', 'reward-model', 'trl',"),
        (("tutorial",), "missing required option: --output_dir"),
        (("tutorial", "x", "y"), "unexpected argument 'y': expected an option that starts with --"),
        (("recipe:stories260k", "x"), "model_name_or_path: expected the base of 'recipe:stories260k', got none"),
        (("trl", "x", "--model_name_or_path", "m"), "expected it unset with 'trl', which makes a small model"),
    ):
        assert message in refused(capsys, *words)
        assert not list(tmp_path.iterdir())


def test_every_template_is_used():
    used = {name for start in STARTS.values() for name in (start.readme, *start.files.values())}
    data = {"story_prompts.jsonl", "story_prompts_heldout.jsonl", "demo-sft.yaml", "demo-train.yaml"}
    assert {path.name for path in TEMPLATES.iterdir() if path.is_file()} == used | data


def test_the_tutorials_reward_does_not_pay_for_a_salad(tmp_path, monkeypatch):
    """The same friendly words: in sentences of the examples, and joined as none of the examples joins them."""
    monkeypatch.chdir(tmp_path)
    assert main(["init", "tutorial", "hotel"]) == 0
    reward = load_reward(f"{tmp_path}/hotel/reward.py:reward")
    sentences = "dear guest . i am so sorry about the room . have a pleasant stay ."
    salads = ["dear sorry pleasant .", "dear i am pleasant sorry thank please .", "i am so sorry pleasant stay dear ."]
    plain, *others = reward(prompts=["a"] * 4, completions=[sentences, *salads])
    nothing = reward(prompts=["a"], completions=["we will see ."])[0]
    assert plain == 3
    assert all(score <= nothing for score in others), others
