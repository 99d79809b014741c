"""Saving and loading a HydraModel: the folder's root is the actor in PEFT format, other slots are sub-folders.

folder/adapter_config.json, adapter_model.safetensors    the actor, loads with plain PeftModel.from_pretrained
folder/slots/<name>/…                                    every other slot, same format
folder/heads.safetensors                                 value and reward heads
folder/rlhf_engine.json                                  roles, slots, base path and hash, versions
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import torch
import transformers

from rlhf_engine import __version__
from rlhf_engine.hydra import peft_io
from rlhf_engine.hydra.model import DEFAULT_TOKEN_BUDGET, HydraModel
from rlhf_engine.hydra.roles import OFF, RoleSpec, require_role

_FORMAT = 1


def save_pretrained(model: HydraModel, folder: str | os.PathLike[str]) -> None:
    """Write slots, heads and roles. The base itself is not written: it never changes and stays where it is."""
    if set(model.backbones) != {"base"}:
        raise ValueError(f"model: expected one backbone, 'base', got {sorted(model.backbones)}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    base = model.backbone("base")
    root_slot = require_role(model.roles, "actor").slot if "actor" in model.roles else OFF
    folders = {}
    for name in base.slots:
        folders[name] = "." if name == root_slot else f"slots/{name}"
        base_name = str(base.model.config._name_or_path)
        peft_io.save_slot(base.slot(name), folder / folders[name], base_name=base_name, base_hash=base.base_hash())
    peft_io.save_heads(model.heads, set(model.heads), folder)
    record = {
        "format": _FORMAT,
        "base": str(base.model.config._name_or_path),
        "base_hash": base.base_hash(),
        "roles": {name: dataclasses.asdict(role) for name, role in model.roles.items()},
        "slots": folders,
        "trained_heads": sorted(model.trained_heads),
        "versions": {
            "rlhf_engine": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    (folder / peft_io.ENGINE_FILE).write_text(json.dumps(record, indent=1) + "\n")


def load_pretrained(
    folder: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    token_budget: int = DEFAULT_TOKEN_BUDGET,
) -> HydraModel:
    """Load what `save_pretrained` wrote. `base` overrides where the backbone lies.

    Raises ValueError if the folder is not such a folder, or if the base is another one (its hash differs).
    """
    folder = Path(folder)
    record = read_record(folder)
    if not (base or record["base"]):
        raise ValueError("base: expected the backbone's folder, got None and none is recorded (it was built in memory)")
    roles = {name: RoleSpec(**fields) for name, fields in record["roles"].items()}
    slots = {name: peft_io.read_slot_config(folder / where) for name, where in record["slots"].items()}
    model = HydraModel.from_pretrained(
        base or record["base"],
        roles=roles,
        slots=slots,
        dtype=dtype,
        device=device,
        token_budget=token_budget,
    )
    found = model.backbone("base").base_hash()
    if found != record["base_hash"]:
        raise ValueError(
            f"base: expected the backbone with hash {record['base_hash'][:12]}…, got one with hash {found[:12]}…"
        )
    peft_io.load_heads(model.heads, folder)
    model.trained_heads = set(record["trained_heads"])
    return model


def read_record(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What `save_pretrained` noted in a folder. Raises ValueError for a folder that it did not write."""
    path = Path(folder) / peft_io.ENGINE_FILE
    if not path.is_file():
        raise ValueError(f"folder: expected one with {peft_io.ENGINE_FILE}, got {str(folder)!r}")
    record: dict[str, Any] = json.loads(path.read_text())
    if record.get("format") != _FORMAT:
        raise ValueError(f"{path}: expected format {_FORMAT}, got {record.get('format')!r}")
    return record
