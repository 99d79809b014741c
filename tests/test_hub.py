"""Models, adapters and data by their names on the Hub: real huggingface_hub and datasets, a stand-in over loopback."""

from __future__ import annotations

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
from transformers import AutoModelForCausalLM

from rlhf_engine import hub
from rlhf_engine.errors import ConfigError
from rlhf_engine.hydra import HydraModel, RoleSpec, SlotConfig
from rlhf_engine.planning.presets import find_config
from rlhf_engine.tokenizing import load_tokenizer
from tests.hub_stand_in import Hub, commit_of
from tests.hub_stand_in import hub as stand_in
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
    folders = [
        hub.local_folder(NAME),
        hub.local_folder(NAME, "reward_model_path", weights=True),
        hub.local_folder(NAME),
    ]
    assert {folder.name for folder in folders} == {commit_of(root / "models" / NAME)}
    assert server.asked.count(f"/api/models/{NAME}/revision/main") == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("small/none", "expected a folder or a name of the Hub, got 'small/none', which is neither, or is private"),
        ("small/llama@v2", "expected a revision of 'small/llama', got 'v2', which it has not"),
        ("small/gated", "expected access to 'small/gated', got a refusal; accept its terms on the Hub"),
        ("small/pickled", "expected safetensors of 'small/pickled', got none"),
    ],
)
def test_what_the_hub_does_not_give_is_one_line(server, root, name, message):
    server.gated.add("small/gated")
    with pytest.raises(ConfigError, match=rf"^actor_adapter: {message}"):
        hub.local_folder(name, "actor_adapter", weights=True)


def test_without_a_network_the_cache_serves_or_one_line_says_how(server, monkeypatch):
    hub.local_folder(NAME, weights=True)
    hub._fetched.cache_clear()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    assert "model.safetensors" in files_of(hub.local_folder(NAME, weights=True))
    with pytest.raises(ConfigError) as caught:
        load_tokenizer("small/other")
    assert str(caught.value) == (
        "model_name_or_path: expected a folder, or a model in the Hub's cache, without a network, got 'small/other'; "
        "`hf download small/other` fetches it"
    )
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ConfigError, match=r"without a network \(HF_HUB_OFFLINE\), got .*; `hf download small/third --rev"
    ):
        load_tokenizer("small/third@v1")


def test_from_names_to_an_adapter_and_on_without_a_network(server, root, tmp_path):
    home, adapter = tmp_path / "home", tmp_path / "sft"
    short = ("--logging_steps", "1", "--per_device_train_batch_size", "2")
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
