"""Models, adapters and data by their names on the Hub: real huggingface_hub and datasets, a stand-in over loopback."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_engine import hub
from rlhf_engine.commands.main import main
from rlhf_engine.data.tokenize import load_tokenizer
from rlhf_engine.errors import ConfigError
from rlhf_engine.hydra import HydraModel, RoleSpec, SlotConfig, save_pretrained
from rlhf_engine.hydra.peft_io import read_slot_config
from rlhf_engine.tools.memory import find_config
from tests.conftest import randomise
from tests.hub_stand_in import Hub, commit_of, hub as stand_in
from tests.training.test_data import write_model

NAME = "small/llama"


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """What the stand-in serves: a model with code and a pickle beside it, a model without safetensors, rows."""
    root = tmp_path_factory.mktemp("hub")
    model = write_model(root / "models" / NAME, reward_head=False)
    for extra in ("modeling_llama.py", "pytorch_model.bin", "consolidated.safetensors", "original/x.json"):
        (model / extra).parent.mkdir(exist_ok=True)
        (model / extra).write_text("{}")
    pickled = write_model(root / "models" / "small/pickled", reward_head=False)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    rows = root / "datasets" / "some/rows" / "train.jsonl"
    rows.parent.mkdir(parents=True)
    lines = [{"prompt": f"the {word}", "completion": " cat sat"} for word in ("cat", "dog", "bird", "fish")]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root


@pytest.fixture
def server(root, tmp_path, monkeypatch) -> Iterator[Hub]:
    """The stand-in, with an empty cache, for this process."""
    hub._fetched.cache_clear()
    with stand_in(root) as server:
        for name, value in {
            "ENDPOINT": server.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
        }.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", server.url)
        yield server
    hub._fetched.cache_clear()


def files_of(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def run(server: Hub, home: Path, *words: str, offline: bool = False) -> subprocess.CompletedProcess[str]:
    """A command of this project, whose Hub is the stand-in."""
    env = os.environ | {"HF_ENDPOINT": server.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    env |= {"HF_HUB_OFFLINE": "1" if offline else "0", "HF_DATASETS_OFFLINE": "1" if offline else "0"}
    command = [sys.executable, "-m", "rlhf_engine", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)


def test_weights_are_fetched_when_they_are_loaded_and_once(server, root):
    assert find_config(NAME).num_hidden_layers == 2
    assert load_tokenizer(NAME).eos_token_id is not None
    folder = hub.local_folder(NAME)
    small = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert files_of(folder) == small
    roles = {"actor": RoleSpec(slot="actor", trainable=True), "reference": RoleSpec()}
    ours = HydraModel.from_pretrained(NAME, roles=roles, slots={"actor": SlotConfig(r=2)})
    assert files_of(folder) == small | {"model.safetensors"}
    assert folder.name == commit_of(root / "models" / NAME)
    plain = AutoModelForCausalLM.from_pretrained(root / "models" / NAME)
    assert torch.equal(ours.backbone().lm_head.weight, plain.lm_head.weight)
    assert ours.backbone().model.config._name_or_path == NAME
    asked = len(server.asked)
    HydraModel.from_pretrained(NAME, roles=roles, slots={"actor": SlotConfig(r=2)})
    assert len(server.asked) == asked
    assert not [path for path in server.asked if path.endswith((".py", ".bin", "consolidated.safetensors", "x.json"))]


def test_what_lies_here_is_not_looked_for_elsewhere(server, root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_model(Path(NAME))
    assert hub.local_folder(NAME) == Path(NAME)
    assert hub.plain_name(NAME) == str(tmp_path / NAME)
    for path in ("nowhere", "./small/llama2", "/nowhere/model", "a/b/c", "owner/name@"):
        assert hub.local_folder(path) == Path(path)
    assert server.asked == []


def test_a_revision_and_the_name_that_others_know(server, root):
    folder = hub.local_folder(f"{NAME}@v1", weights=True)
    assert folder.name == commit_of(root / "models" / NAME)
    assert f"/api/models/{NAME}/revision/v1" in server.asked
    assert hub.plain_name(f"{NAME}@v1") == NAME


def test_weights_are_those_of_the_commit_whose_config_was_read(server, root):
    """A branch is looked up once, whichever options name the model."""
    reward = {"argument": "reward_model_path", "weights": True}
    folders = [hub.local_folder(NAME, **options) for options in ({}, reward, {})]
    assert {folder.name for folder in folders} == {commit_of(root / "models" / NAME)}
    assert server.asked.count(f"/api/models/{NAME}/revision/main") == 1


def test_what_the_hub_does_not_give_is_one_line(server, root):
    wanted = "expected a folder, or a model of the Hub, got"
    for name, message in [
        ("small/none", f"{wanted} 'small/none': 404 .*Repository Not Found .*If .* private .* authenticated"),
        ("small/llama@v2", f"{wanted} 'small/llama@v2': 404 .*Revision Not Found"),
        ("small/gated", f"{wanted} 'small/gated': 403 .*Cannot access gated repo"),
        ("small/pickled", "expected safetensors of 'small/pickled', got none"),
    ]:
        server.gated.add("small/gated")
        with pytest.raises(ConfigError, match=rf"^actor_adapter: {message}"):
            hub.local_folder(name, "actor_adapter", weights=True)


def test_without_a_network_the_cache_serves_or_one_line_says_how(server, monkeypatch):
    hub.local_folder(NAME, weights=True)
    hub._fetched.cache_clear()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    assert "model.safetensors" in files_of(hub.local_folder(NAME, weights=True))
    wanted = "model_name_or_path: expected a folder, or a model in the Hub's cache, without a network, got"
    with pytest.raises(
        ConfigError, match=f"^{wanted} 'small/other': .*error happened .*check your internet connection"
    ):
        load_tokenizer("small/other")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=f"^{wanted} 'small/third@v1': .*'HF_HUB_OFFLINE=0'.*; `hf down"):
        load_tokenizer("small/third@v1")


@pytest.mark.long
def test_from_names_to_an_adapter_and_on_without_a_network(server, root, tmp_path):
    home, adapter = tmp_path / "home", tmp_path / "sft"
    short = ("--per_device_train_batch_size", "2")
    words = ("--model_name_or_path", f"{NAME}@v1", "--dataset_name", "some/rows", "--output_dir", str(adapter), *short)
    done = run(server, home, "sft", *words, "--max_steps", "2", "--lora")
    assert done.returncode == 0, done.stderr
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == NAME
    asked = len(server.asked)
    words = ("--model_name_or_path", f"{NAME}@v1", "--adapter", str(adapter), "--prompt", "the cat")
    drawn = run(server, home, "generate", *words, "--max_completion_length", "3", offline=True)
    assert drawn.returncode == 0, drawn.stderr
    assert len(server.asked) == asked
    shutil.copytree(adapter, root / "models" / "small/adapter")
    words = (*words[:2], "--adapter", "small/adapter", *words[4:])
    again = run(server, home, "generate", *words, "--max_completion_length", "3")
    assert (again.returncode, again.stdout) == (0, drawn.stdout), again.stderr


TOKEN = "hf_a_token_that_may_write"


@pytest.fixture
def adapter(server, tmp_path) -> Path:
    """An actor's adapter on the model of the Hub, at a revision of it."""
    roles = {"actor": RoleSpec(slot="actor", trainable=True), "reference": RoleSpec()}
    model = HydraModel.from_pretrained(f"{NAME}@v1", roles=roles, slots={"actor": SlotConfig(r=2)})
    randomise(model, "actor")
    save_pretrained(model, tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.fixture
def writer(server, tmp_path, monkeypatch) -> Hub:
    """The stand-in, and a token that may write to it."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    server.writers.add(TOKEN)
    return server


def export(source: Path, out: Path, *more: str) -> int:
    return main(["export", str(source), "--to", "peft", "--output_dir", str(out), *more])


def test_an_adapter_is_pushed_with_its_card_and_comes_back_by_name(writer, root, adapter, tmp_path, capsys):
    name, out = "somebody/pushed", tmp_path / "out"
    assert export(adapter, out, "--push_to_hub", name, "--license", "mit") == 0
    shown = capsys.readouterr().out
    pushed = root / "models" / name
    assert shown.splitlines()[-1] == f"pushed   {writer.url}/{name}/commit/{commit_of(pushed)}"
    assert TOKEN not in shown
    assert files_of(pushed) == files_of(out) - {"manifest.json"}
    assert all((pushed / file).read_bytes() == (out / file).read_bytes() for file in files_of(pushed))
    assert writer.private == set()
    config = json.loads((pushed / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == (NAME, "v1")
    card = (pushed / "README.md").read_text()
    assert f"base_model: {NAME}\n" in card
    assert f'folder, base = "{name}", "{NAME}"' in card
    assert 'revision="v1"' in card
    texts = "".join(path.read_text() for path in pushed.iterdir() if path.suffix in (".json", ".md"))
    assert str(tmp_path) not in texts
    assert TOKEN not in texts
    again = tmp_path / "again"
    assert main(["export", name, "--to", "peft", "--output_dir", str(again)]) == 0
    for file in ("adapter_model.safetensors", "adapter_config.json", "rlhf_engine.json"):
        assert (again / file).read_bytes() == (out / file).read_bytes()
    # and back: the loader compares the hash of the base
    roles = {"actor": RoleSpec(slot="actor"), "reference": RoleSpec()}
    model = HydraModel.from_pretrained(NAME, roles=roles, slots={"actor": read_slot_config(name)})
    ours = load_file(adapter / "adapter_model.safetensors")
    for path, pair in model.backbone().slot("actor").items():
        assert torch.equal(pair.B, ours[f"base_model.model.{path}.lora_B.weight"])
    theirs = AutoPeftModelForCausalLM.from_pretrained(name)
    assert theirs.peft_config["default"].base_model_name_or_path == NAME
    assert f"/api/models/{NAME}/revision/v1" in writer.asked or f"/{NAME}/resolve/v1/config.json" in writer.asked


def test_a_run_pushes_its_result(writer, root, tmp_path, capsys, monkeypatch):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "the cat", "completion": " sat"}\n' * 4)
    out, words = tmp_path / "sft", ("--max_steps", "1", "--per_device_train_batch_size", "2", "--lora_r", "4")
    words = ("--lora", "--model_name_or_path", f"{NAME}@v1", "--dataset_name", str(rows), *words)
    assert main(["sft", *words, "--output_dir", str(out), "--push_to_hub", "somebody/run"]) == 0
    pushed = root / "models" / "somebody/run"
    assert f"{writer.url}/somebody/run/commit/{commit_of(pushed)}" in capsys.readouterr().out
    assert (pushed / "adapter_model.safetensors").read_bytes() == (out / "adapter_model.safetensors").read_bytes()
    config = json.loads((pushed / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["r"]) == (NAME, 4)
    assert (pushed / "README.md").is_file()
    drawn = []
    for adapter in (str(out), "somebody/run"):
        generate = ("--model_name_or_path", f"{NAME}@v1", "--adapter", adapter, "--prompt", "the cat")
        assert main(["generate", *generate, "--max_completion_length", "3"]) == 0
        drawn.append(capsys.readouterr().out)
    assert drawn[0] == drawn[1]
    writer.writers.clear()
    monkeypatch.setenv("HF_TOKEN", "")
    assert main(["sft", *words, "--output_dir", str(tmp_path / "no"), "--push_to_hub", "somebody/run"]) == 2
    assert "push_to_hub: expected a token for 'somebody/run', got none" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()  # before anything is trained


def test_a_push_replaces_another_model_and_leaves_other_files(writer, root, adapter, tmp_path):
    name = "somebody/again"
    there = root / "models" / name
    there.mkdir(parents=True)
    for file in ("model.safetensors", "config.json", "notes.txt"):
        (there / file).write_text("{}")
    assert export(adapter, tmp_path / "out", "--push_to_hub", name, "--private") == 0
    assert writer.private == set()  # it was there before
    assert files_of(there) == files_of(tmp_path / "out") - {"manifest.json"} | {"notes.txt"}
    assert export(adapter, tmp_path / "new", "--push_to_hub", "somebody/secret", "--private") == 0
    assert writer.private == {"somebody/secret"}


def test_a_reward_model_is_pushed_with_its_card(writer, root, tmp_path):
    base = write_model(tmp_path / "base")
    name, words = "somebody/reward", ["--to", "sequence_classification", "--push_to_hub", "somebody/reward"]
    assert main(["export", str(base), "--output_dir", str(tmp_path / "out"), *words]) == 0
    assert "- reward-model\n" in (root / "models" / name / "README.md").read_text()
    theirs = AutoModelForSequenceClassification.from_pretrained(name)
    assert torch.equal(theirs.score.weight, load_file(base / "heads.safetensors")["reward.weight"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("token", "push_to_hub: expected a token for 'somebody/x', got none; run `hf auth login` or set HF_TOKEN"),
        ("offline", "push_to_hub: expected a network for 'somebody/x', got HF_HUB_OFFLINE; unset it"),
        ("rights", "push_to_hub: expected to upload to 'somebody/x', got: 403"),
        ("network", "push_to_hub: expected to upload to 'somebody/x', got: "),
    ],
)
def test_what_cannot_be_pushed_is_one_line(writer, adapter, tmp_path, capsys, monkeypatch, change, message):
    if change == "token":
        monkeypatch.delenv("HF_TOKEN")
    elif change == "offline":
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    elif change == "rights":
        writer.writers.clear()
    else:
        hub.local_folder(f"{NAME}@v1")  # the base is in the cache
        hub.local_folder(f"{NAME}@v1", weights=True)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    capsys.readouterr()
    assert export(adapter, tmp_path / "out", "--push_to_hub", "somebody/x") == 2
    out, err = capsys.readouterr()
    assert len(err.splitlines()) == 1
    assert err.startswith(f"rlhf-engine export: {message}")
    assert TOKEN not in out + err
    written = change in ("rights", "network")
    assert (tmp_path / "out").exists() == written
    assert ("; `hf upload somebody/x " in err) == written


def test_a_token_is_no_option(writer, adapter, tmp_path, capsys):
    assert export(adapter, tmp_path / "out", "--push_to_hub", "somebody/x", "--token", "hf_secret") == 2
    out, err = capsys.readouterr()
    assert "unknown option --token" in err
    assert "hf_secret" not in out + err


def test_a_card_that_the_hub_refuses_is_one_line(writer, tmp_path):
    folder = tmp_path / "wrong"
    folder.mkdir()
    (folder / "README.md").write_text("---\nbase_model: /home/somebody/model\n---\n")
    with pytest.raises(ConfigError, match=r"^push_to_hub: expected to upload to 'somebody/x', got: .*Invalid metadata"):
        hub.push_folder(folder, "somebody/x", private=False)
