"""Checkpoints on disk: whole or not there, only what belongs to them, and errors for folders that are none."""

import json
import os
import shutil

import pytest
import torch

from rlhf_engine.errors import ConfigError, CorruptCheckpointError
from rlhf_engine.hydra import HydraModel, SlotConfig, hydra_roles, load_pretrained, save_pretrained
from rlhf_engine.hydra.optimizer import RoleOptimizer
from rlhf_engine.io import write_manifest
from rlhf_engine.runs.checkpoint import TrainerState, list_checkpoints, load_checkpoint, resolve_resume, save_checkpoint
from tests.conftest import random_batch, randomise, tiny_llama

RATES = {"actor": 1e-2, "critic": 1e-2}


def make(base, *, seed: int = 0, roles=None, **slot) -> tuple[HydraModel, RoleOptimizer]:
    """A model on the base folder whose slots and heads are not zero, with optimizer state."""
    roles = roles or hydra_roles()
    used = {r.slot for r in roles.values() if r.slot is not None}
    config = SlotConfig(**{"r": 4, "alpha": 8.0, **slot})
    model = HydraModel.from_pretrained(base, roles=roles, slots=dict.fromkeys(used, config), seed=seed)
    randomise(model, *sorted(used), seed=seed)
    optimizer = RoleOptimizer(model, RATES)
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.ones_like(p)
    optimizer.step()
    return model.eval(), optimizer


def state(step: int) -> TrainerState:
    return TrainerState(step=step, seed=5, samples=8 * step, policy_version=step)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def test_round_trip_restores_every_tensor_and_counter(base, tmp_path):
    model, optimizer = make(base, seed=1)
    model.trained_heads.add("value")
    folder = save_checkpoint(tmp_path, model, optimizer, state(3), keep=2)
    other, other_optimizer = make(base, seed=2)
    assert not same(model.state_dict(), other.state_dict())
    assert load_checkpoint(folder, other, other_optimizer) == state(3)
    assert same(model.state_dict(), other.state_dict())
    assert same(optimizer.state_tensors(), other_optimizer.state_tensors())
    assert other.trained_heads == {"value"}
    assert not list(tmp_path.glob(".*"))
    assert {p.suffix for p in folder.rglob("*") if p.is_file()} == {".json", ".safetensors"}  # no pickle


def test_only_the_newest_are_kept_in_order_of_steps(base, tmp_path):
    model, optimizer = make(base)
    for step in (2, 9, 10):
        save_checkpoint(tmp_path, model, optimizer, state(step), keep=2)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-10"]
    save_checkpoint(tmp_path, model, optimizer, state(11), keep=None)
    assert len(list_checkpoints(tmp_path)) == 3


def test_names_that_are_no_checkpoints_are_ignored(base, tmp_path):
    for name in (".checkpoint-8.tmp", "checkpoint-x", "checkpoint-old-checkpoint-7", "checkpoint-"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-9").write_text("a file")
    assert list_checkpoints(tmp_path) == []
    assert resolve_resume("auto", tmp_path) is None
    assert resolve_resume("auto", tmp_path / "nowhere") is None
    save_checkpoint(tmp_path, *make(base), state(1), keep=1)
    assert resolve_resume("auto", tmp_path) == tmp_path / "checkpoint-1"
    assert resolve_resume(None, tmp_path) is None


def test_a_crash_while_writing_leaves_the_last_checkpoint(base, tmp_path, monkeypatch):
    model, optimizer = make(base)
    saved = {k: v.clone() for k, v in model.state_dict().items()}
    first = save_checkpoint(tmp_path, model, optimizer, state(1), keep=1)
    randomise(model, "actor", seed=9)

    def no_space(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", no_space)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(tmp_path, model, optimizer, state(2), keep=1)
    monkeypatch.undo()
    assert not list(tmp_path.glob(".*"))  # what was half-written is room for others now
    assert resolve_resume("auto", tmp_path) == first
    assert load_checkpoint(first, model, optimizer).step == 1
    assert same(model.state_dict(), saved)
    second = save_checkpoint(tmp_path, model, optimizer, state(2), keep=1)  # over the leftover
    assert list_checkpoints(tmp_path) == [second]
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("lost", ["trainer_state.json", "optimizer.safetensors", "rlhf_engine.json"])
def test_a_folder_that_is_no_checkpoint(base, tmp_path, lost):
    folder = save_checkpoint(tmp_path, *make(base), state(1), keep=None)
    (folder / lost).unlink()
    with pytest.raises(CorruptCheckpointError, match=f"got .*{lost}.* not there"):
        resolve_resume(str(folder), tmp_path)
    (folder / "manifest.json").unlink()
    with pytest.raises(ConfigError, match=f"resume_from_checkpoint: expected {lost} in .*, which is not there"):
        resolve_resume(str(folder), tmp_path)
    with pytest.raises(ConfigError, match=f"expected {lost}"):
        load_checkpoint(folder, *make(base))
    with pytest.raises(ConfigError, match="expected 'auto', 'restart' or a checkpoint folder, got 'newest'"):
        resolve_resume("newest", tmp_path)


def test_lost_heads_are_not_replaced_by_zeros(base, tmp_path):
    folder = save_checkpoint(tmp_path, *make(base), state(1), keep=None)
    (folder / "heads.safetensors").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"of manifest\.json, got \['heads\.safetensors'\] not there"):
        load_checkpoint(folder, *make(base))
    (folder / "manifest.json").unlink()
    write_manifest(folder)
    with pytest.raises(ValueError, match=r"expected the heads \['reward', 'value'\], got none of"):
        load_checkpoint(folder, *make(base))


def test_a_checkpoint_of_another_configuration_is_refused(base, tmp_path):
    folder = save_checkpoint(tmp_path / "a", *make(base), state(1), keep=None)
    with pytest.raises(ConfigError, match=r"expected slots \['actor'\], got \['actor', 'critic'\]"):
        load_checkpoint(folder, *make(base, roles=hydra_roles("j_hydra_ppo")))
    for slot, r in (({"r": 2}, 2), ({"alpha": 16.0}, 4)):  # the latter of the same shapes, another function
        with pytest.raises(ValueError, match=f"expected r={r}, scale 4 like slot 'actor', got r=4 and scale 2"):
            load_checkpoint(folder, *make(base, **slot))
    other = tmp_path / "other"
    tiny_llama(seed=1).save_pretrained(other)
    with pytest.raises(ValueError, match=r"expected an adapter of this base .* got one of another base"):
        load_checkpoint(folder, *make(other))


@pytest.mark.parametrize("where", ["../other", "/etc", "slots/../../other"])
def test_a_record_points_to_no_other_folder(base, tmp_path, where):
    save_pretrained(make(base)[0], tmp_path / "m")
    path = tmp_path / "m" / "rlhf_engine.json"
    record = json.loads(path.read_text())
    record["slots"]["critic"]["folder"] = where
    path.write_text(json.dumps(record))
    shutil.copytree(tmp_path / "m" / "slots" / "critic", tmp_path / "other")
    with pytest.raises(ValueError, match=r"rlhf_engine\.json: expected folders that lie in .*, got"):
        load_pretrained(tmp_path / "m")


def test_loading_says_what_is_wrong_with_a_folder(base, tmp_path):
    model = make(base)[0]
    save_pretrained(model, tmp_path / "m")
    other = tmp_path / "other"
    tiny_llama(seed=1).save_pretrained(other)
    with pytest.raises(ValueError, match=r"of another base|with hash"):
        load_pretrained(tmp_path / "m", base=other)
    with pytest.raises(ValueError, match=r"folder: expected one with rlhf_engine\.json"):
        load_pretrained(base)
    with pytest.raises(ValueError, match="expected format 2, got None"):
        load_pretrained(tmp_path / "m" / "slots" / "critic")
    in_memory = HydraModel.from_pretrained(tiny_llama(), roles=hydra_roles())
    save_pretrained(in_memory, tmp_path / "n")
    with pytest.raises(ValueError, match="base: expected the backbone's folder, got None and none is recorded"):
        load_pretrained(tmp_path / "n")
    batch = random_batch()
    again = load_pretrained(tmp_path / "n", base=base)
    assert torch.equal(again.score(batch, ("actor",)).logprobs_M, in_memory.score(batch, ("actor",)).logprobs_M)
    record = json.loads((tmp_path / "m" / "rlhf_engine.json").read_text())
    assert record["slots"] == {
        "actor": {"backbone": "base", "folder": "."},
        "critic": {"backbone": "base", "folder": "slots/critic"},
    }
