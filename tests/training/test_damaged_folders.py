"""Damaged folders of every kind that is written: refused by name, or read as the same tensors."""

import dataclasses
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from rlhf_engine.commands.main import main
from rlhf_engine.data.tokenize import load_tokenizer, require_same_tokens
from rlhf_engine.errors import ConfigError, CorruptCheckpointError
from rlhf_engine.hydra import HydraModel, RoleSpec, load_pretrained, peft_io, reward_model
from rlhf_engine.hydra.loading import load_model
from rlhf_engine.io import check_manifest
from rlhf_engine.runs.checkpoint import load_checkpoint
from rlhf_engine.training.reward_model import CLASSIFIER_FOLDER, RewardTrainer
from rlhf_engine.training.rl import RlTrainer
from rlhf_engine.training.sft import SftTrainer
from tests.training.test_data import sft_config, train_config, write_model
from tests.training.test_reward import reward_config

Tensors = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Written:
    """Folders that runs have written, and the trainer of the checkpoint."""

    root: Path
    trainer: RlTrainer
    base: Path


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Written:
    base = write_model(tmp_path_factory.mktemp("base"))
    root = tmp_path_factory.mktemp("written")
    trainer = RlTrainer(train_config(base, root / "rl", max_steps=1))
    trainer.run()
    RlTrainer(train_config(base, root / "full_ppo", max_steps=1, method="full_ppo")).run()
    for mode in ("lora", "full"):
        SftTrainer(sft_config(base, root / f"sft_{mode}", mode=mode, max_steps=1, save_steps=1)).run()
    RewardTrainer(reward_config(base, root / "reward_lora", max_steps=1, export="merged")).run()
    RewardTrainer(reward_config(base, root / "reward_full", max_steps=1, mode="full")).run()
    return Written(root=root, trainer=trainer, base=base)


def checkpoint(folder: Path, written: Written) -> Tensors:
    load_checkpoint(folder, written.trainer.model, written.trainer.optimizer)
    return dict(written.trainer.model.state_dict()) | written.trainer.optimizer.state_tensors()


def whole(folder: Path, written: Written) -> Tensors:
    model = load_pretrained(folder)
    return {**model.state_dict(), "roles": model.roles}


def slot(folder: Path, written: Written) -> Tensors:
    """As `--actor_adapter`, `--reference_adapter` and `--adapter` read one."""
    config = peft_io.read_slot_config(folder)
    model = HydraModel.from_pretrained(written.base, roles={"actor": RoleSpec(slot="actor")}, slots={"actor": config})
    return {**model.backbone().slot("actor").state_dict(), "scale": config.scale}


def model(folder: Path, written: Written) -> Tensors:
    found = load_model(folder, dtype=torch.float32, device="cpu")
    return {**found.state_dict(), "config": settings(found), "generation": found.generation_config.to_dict()}


def classifier(folder: Path, written: Written) -> Tensors:
    found = load_model(folder, dtype=torch.float32, device="cpu", lm_head=False)
    return {**found.state_dict(), "config": settings(found)}


def settings(found: PreTrainedModel) -> dict[str, Any]:
    """Of a model, wherever its folder lies."""
    return {name: x for name, x in found.config.to_dict().items() if name != "_name_or_path"}


def head(folder: Path, written: Written) -> Tensors:
    return dict(reward_model.require_reward_head(folder, "reward_adapter"))


def tokenizer(folder: Path, written: Written) -> Tensors:
    found = load_tokenizer(folder)
    return {**found.get_vocab(), "ends": found.eos_token_id, "text": found("abc cab")["input_ids"]}


READERS: dict[str, tuple[str, str, Callable[[Path, Written], Tensors]]] = {
    "checkpoint": ("rl/checkpoint-1", ".", checkpoint), "checkpoint_as_model": ("rl/checkpoint-1", ".", whole),
    "rl": ("rl/final", ".", whole), "rl_actor": ("rl/final", ".", slot),
    "rl_critic": ("rl/final", "slots/critic", slot), "rl_critic_alone": ("rl/final/slots/critic", ".", slot),
    "rl_tokenizer": ("rl/final", ".", tokenizer), "full_ppo": ("full_ppo/final", ".", whole),
    "full_ppo_actor": ("full_ppo/final", ".", model),
    "full_ppo_critic": ("full_ppo/final", "backbones/critic", classifier),
    "full_ppo_critic_alone": ("full_ppo/final/backbones/critic", ".", classifier),
    "sft_lora": ("sft_lora", ".", slot), "sft_lora_head": ("sft_lora", ".", head),
    "sft_full": ("sft_full", ".", model), "sft_full_head": ("sft_full", ".", head),
    "sft_full_tokenizer": ("sft_full", ".", tokenizer), "reward_lora": ("reward_lora/final", ".", slot),
    "reward_lora_head": ("reward_lora/final", ".", head),
    "reward_merged": ("reward_lora/final", CLASSIFIER_FOLDER, classifier),
    "reward_merged_alone": (f"reward_lora/final/{CLASSIFIER_FOLDER}", ".", classifier),
    "reward_full": ("reward_full/final", ".", classifier), "reward_full_head": ("reward_full/final", ".", head),
}  # fmt: skip
"""What is read: the folder that was written, the part of it that is given, and the reader."""


def model_files(folder: Path, part: str) -> list[Path]:
    """Of a part and its manifest, without a run's own files beside a model of sft."""
    if part != ".":
        return [folder / "manifest.json", *sorted((folder / part).iterdir())]
    if (folder / "run.json").is_file():
        own = ("run.json", "metrics.jsonl", "page.html", "curves.png", ".lock")
        return sorted(path for path in folder.iterdir() if path.is_file() and path.name not in own)
    return sorted(path for path in folder.rglob("*") if path.is_file())


def damage(path: Path, chosen: random.Random) -> str:
    """Change a file in some way, of which the name is returned."""
    content = path.read_bytes()
    kind = chosen.choice(["byte"] * 12 + ["bit"] * 4 + ["cut", "lost", "longer", "zeros", "inserted", "without"])
    at = chosen.randrange(len(content))
    changed = bytearray(content)
    if kind == "byte":
        changed[at] ^= chosen.randrange(1, 256)
    elif kind == "bit":
        changed[at] ^= 1 << chosen.randrange(8)
    elif kind == "cut":
        del changed[at:]
    elif kind == "longer":
        changed += b"\n"
    elif kind == "zeros":
        changed[at : at + 64] = bytes(len(changed[at : at + 64]))
    elif kind == "inserted":
        changed.insert(at, chosen.randrange(256))
    elif kind == "without":
        del changed[at]
    path.unlink() if kind == "lost" else path.write_bytes(changed)
    return kind


def equal(left: Tensors, right: Tensors) -> bool:
    def is_same(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b

    return left.keys() == right.keys() and all(is_same(left[k], right[k]) for k in left)


LOADED = 200
"""Damages of a folder that loads long; bytes of each file are changed in `tests.reliability.test_damage`."""


@pytest.mark.parametrize(
    ("n", "readers"),
    [(8, tuple(READERS)), *(pytest.param(LOADED, (name,), marks=pytest.mark.long) for name in READERS)],
    ids=["each", *READERS],
)
def test_a_damaged_file_is_refused_or_changes_nothing(written, tmp_path, survived, n, readers):
    for reader in readers:
        place, part, read = READERS[reader]
        folder = tmp_path / reader
        shutil.copytree(written.root / place, folder)
        found = read(folder / part, written)
        before = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in found.items()}
        files, chosen, refused = model_files(folder, part), random.Random(n), 0
        for i in range(n):
            path = files[i % len(files)]
            content = path.read_bytes()
            kind = damage(path, chosen)
            refusal = None
            try:
                after = read(folder / part, written)
            except ConfigError as error:  # which damage is one of
                refusal = str(error)
            if refusal is None:
                assert equal(before, after), (path, kind)
            else:
                refused += 1
                assert str(folder) in refusal, (path, kind)
                assert "\n" not in refusal, (path, kind)
            path.write_bytes(content)
        assert refused >= n // 4
        assert equal(before, read(folder / part, written))
    survived("damage", n * len(readers))


def test_every_folder_has_a_manifest_of_its_model_and_plain_libraries_load_it(written):
    root = written.root
    for place in {place for place, _, _ in READERS.values()}:
        if place.startswith("sft"):
            assert (root / place / "manifest.json").is_file()
        else:
            check_manifest(root / place)
    for place in ("rl/final", "sft_lora"):
        AutoPeftModelForCausalLM.from_pretrained(root / place)
        AutoTokenizer.from_pretrained(root / place)
    for place in ("full_ppo/final", "sft_full"):
        AutoModelForCausalLM.from_pretrained(root / place)
    for place in (f"reward_lora/final/{CLASSIFIER_FOLDER}", "reward_full/final"):
        AutoModelForSequenceClassification.from_pretrained(root / place)


def test_what_a_changed_file_is_said_to_be(written, tmp_path):
    folder = tmp_path / "final"
    shutil.copytree(written.root / "rl/final", folder)
    path = folder / "adapter_config.json"
    text = path.read_text()
    path.write_text(text.replace('"lora_alpha": 8.0', '"lora_alpha": 9.0'))
    assert path.read_text() != text
    for argument in ("actor_adapter", "reference_adapter", "reward_model_path"):
        with pytest.raises(ConfigError, match=r"adapter_config\.json: expected the file as it was written"):
            RlTrainer(train_config(written.base, tmp_path / "run", **{argument: str(folder)}))
    with pytest.raises(CorruptCheckpointError, match=r"; delete .*final/manifest\.json if this was done on purpose"):
        load_pretrained(folder)
    (folder / "manifest.json").unlink()
    assert load_pretrained(folder).backbone().slot("actor").config.alpha == 9.0


def test_the_command_line_says_so_in_one_line(written, tmp_path, capsys):
    folder = tmp_path / "sft"
    shutil.copytree(written.root / "sft_full", folder)
    (folder / "tokenizer_config.json").unlink()
    arguments = ["generate", "--model_name_or_path", str(folder), "--prompt", "ab"]
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "got ['tokenizer_config.json'] not there; delete" in said


def test_files_added_beside_a_model(written, tmp_path):
    folder = tmp_path / "sft"
    shutil.copytree(written.root / "sft_full", folder)
    before = model(folder, written)
    (folder / "README.md").write_text("mine")
    (folder / "notes").mkdir()
    (folder / "notes" / "config.json").write_text("{}")
    assert equal(before, model(folder, written))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(CorruptCheckpointError, match=r"got \['chat_template\.jinja'\] not listed"):
        load_tokenizer(folder)
    with pytest.raises(ConfigError, match=r"got \['chat_template\.jinja'\] not listed"):
        require_same_tokens(load_tokenizer(written.base), folder, 61)


def test_other_programs_write_manifests_too(written, tmp_path):
    folder = tmp_path / "base"
    shutil.copytree(written.base, folder)
    (folder / "manifest.json").write_text('{"schemaVersion": 2, "layers": []}')
    assert equal(model(written.base, written), model(folder, written))
