"""Saving and loading a HydraModel: the folder's root is the actor, everything else lies in sub-folders.

folder/adapter_config.json, adapter_model.safetensors    the actor's slot, loads with plain PeftModel.from_pretrained
folder/config.json, model.safetensors                    the actor where it is a trained backbone, loads as a causal LM
folder/slots/<name>/…                                    every other slot, as a PEFT folder
folder/backbones/<name>/…                                every other trained backbone, as a transformers folder
folder/heads.safetensors                                 value and reward heads
folder/rlhf_engine.json                                  roles, slots, backbones with path and hash, versions

Frozen backbones are not written: they never change and stay where they are.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from rlhf_engine import __version__
from rlhf_engine.hydra import peft_io
from rlhf_engine.hydra.loading import Quantization, load_model
from rlhf_engine.hydra.model import HydraModel
from rlhf_engine.hydra.peft_io import require_exportable, save_slot
from rlhf_engine.hydra.roles import OFF, RoleSpec, lasting, lasting_slots
from rlhf_engine.hydra.shares import copy_whole, state_of
from rlhf_engine.io import MANIFEST_FILE, check_model, read_json

_FORMAT = 2


def save_pretrained(model: HydraModel, folder: str | os.PathLike[str]) -> None:
    """Write slots, heads, roles and trained backbones.

    Frozen backbones are not written; their paths and hashes are. Transient roles and their slots are left out.

    Args:
        model: a model whose slots plain PEFT can load, see `require_savable`.
        folder: made where it is missing; files of the same names are overwritten.

    Raises:
        ValueError: PEFT would load another function from a slot's folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for manifest in (*folder.glob(MANIFEST_FILE), *folder.glob(f"*/*/{MANIFEST_FILE}")):  # of what is overwritten
        manifest.unlink()
    actor = model.roles.get("actor")
    slots: dict[str, dict[str, str]] = {}
    backbones: dict[str, dict[str, Any]] = {}
    for name in model.backbones:
        backbone = model.backbone(name)
        source = str(backbone.model.config._name_or_path)
        backbones[name] = {"source": source, "lm_head": backbone.has_lm_head, "folder": None, "hash": None}
        if backbone.frozen:
            backbones[name]["hash"] = backbone.base_hash()
        else:
            is_actor = actor is not None and actor.slot is OFF and actor.backbone == name
            backbones[name]["folder"] = "." if is_actor else f"backbones/{name}"
            where = folder / backbones[name]["folder"]
            backbone.model.save_pretrained(where, state_dict=state_of(backbone.model))
        for slot in [slot for slot in backbone.slots if slot in lasting_slots(model.roles)]:
            is_actor = actor is not None and actor.slot == slot
            slots[slot] = {"backbone": name, "folder": "." if is_actor else f"slots/{slot}"}
            save_slot(backbone, slot, folder / slots[slot]["folder"], base_name=source)
    peft_io.save_heads(model.heads, set(model.heads), folder)
    record = {
        "format": _FORMAT,
        "base_hash": backbones[actor.backbone]["hash"] if actor is not None else None,  # of the adapter in the root
        "backbones": backbones,
        "roles": {name: dataclasses.asdict(role) for name, role in lasting(model.roles).items()},
        "slots": slots,
        "adapter_dtype": str(model.adapter_dtype).removeprefix("torch."),
        "trained_heads": sorted(model.trained_heads),
        "versions": {"rlhf_engine": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
    }
    (folder / peft_io.ENGINE_FILE).write_text(json.dumps(record, indent=1) + "\n")


def require_savable(model: HydraModel) -> None:
    """Raise ValueError for a model with a slot that `save_pretrained` would refuse, before it is trained."""
    for name in model.backbones:
        backbone = model.backbone(name)
        for slot in [slot for slot in backbone.slots if slot in lasting_slots(model.roles)]:
            require_exportable(backbone, slot)


def load_pretrained(
    folder: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    backbones: Mapping[str, str | os.PathLike[str]] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    quantization: Quantization = "none",
    token_budget: int | None = None,
) -> HydraModel:
    """Load what `save_pretrained` wrote.

    `dtype` and `quantization` have to be those of the saved model. With others the hashes of its frozen backbones
    differ.

    Args:
        folder: written by `save_pretrained`.
        base: folder of the frozen backbone `base`; None: where it was when the model was saved.
        backbones: name → folder of another frozen backbone; None, or one that is left out: where it was then.
        dtype: dtype of the backbones.
        device: device of backbones, slots and heads.
        quantization: `8bit` or `4bit` loads frozen backbones through bitsandbytes; `none` as they are.
        token_budget: most tokens of all lanes in one backbone forward, ≥ 1; None: a default by device and width.

    Returns:
        A model with the saved roles, slots and heads.

    Raises:
        ValueError: a folder that `save_pretrained` did not write, a backbone that is not there, or one with another
            hash.
        CorruptCheckpointError: a folder that differs from its manifest. It is a ValueError.
    """
    folder = Path(folder)
    check_model(folder)
    record = read_record(folder)
    given = {**(backbones or {}), **({} if base is None else {"base": base})}
    unknown = sorted(name for name in given if name not in record["backbones"] or record["backbones"][name]["folder"])
    if unknown:
        frozen = sorted(name for name, held in record["backbones"].items() if not held["folder"])
        raise ValueError(f"backbones: expected names of frozen backbones ({frozen}), got {unknown}")
    sources: dict[str, str | os.PathLike[str]] = {}
    for name, held in record["backbones"].items():
        source = folder / held["folder"] if held["folder"] else given.get(name) or held["source"]
        if not source:
            raise ValueError(
                f"{name}: expected the backbone's folder, got None and none is recorded (it was built in memory)"
            )
        sources[name] = source
    model = HydraModel.from_pretrained(
        sources.pop("base"), roles={name: RoleSpec(**fields) for name, fields in record["roles"].items()},
        slots={name: peft_io.read_slot_config(folder / held["folder"]) for name, held in record["slots"].items()},
        backbones=sources, dtype=dtype, device=device, quantization=quantization, token_budget=token_budget,
        adapter_dtype=getattr(torch, record["adapter_dtype"]),
    )  # fmt: skip
    _check_hashes(model, record)
    peft_io.load_heads(model.heads, folder)
    model.trained_heads = set(record["trained_heads"])
    return model


def load_into(model: HydraModel, folder: str | os.PathLike[str]) -> None:
    """Load what `save_pretrained` wrote into a model of the same roles, in place; ValueError where it differs."""
    folder = Path(folder)
    record = read_record(folder)
    kept = lasting_slots(model.roles)
    ours = {slot: name for name in model.backbones for slot in model.backbone(name).slots if slot in kept}
    theirs = {slot: held["backbone"] for slot, held in record["slots"].items()}
    if ours != theirs:
        raise ValueError(f"expected slots {_listed(ours)}, got {_listed(theirs)} in {str(folder)!r}")
    dtype = str(model.adapter_dtype).removeprefix("torch.")
    if ours and record["adapter_dtype"] != dtype:  # loading would round, or pretend to a precision that is not there
        raise ValueError(f"adapter_dtype: expected {record['adapter_dtype']} as in {str(folder)!r}, got {dtype}")
    trained = {name for name in model.backbones if not model.backbone(name).frozen}
    held = {name for name, backbone in record["backbones"].items() if backbone["folder"]}
    if set(model.backbones) != set(record["backbones"]) or trained != held:
        raise ValueError(
            f"expected backbones {sorted(model.backbones)} of which {sorted(trained)} are trained, got "
            f"{sorted(record['backbones'])} and {sorted(held)} in {str(folder)!r}"
        )
    for slot, name in ours.items():
        backbone = model.backbone(name)
        # the slot's own record of its base is compared with this hash
        where = folder / record["slots"][slot]["folder"]
        peft_io.load_slot(backbone.slot(slot), where, backbone)
    _check_hashes(model, record)
    for name in trained:
        backbone = model.backbone(name)
        saved = load_model(
            folder / record["backbones"][name]["folder"],
            dtype=backbone.dtype,
            device="cpu",
            lm_head=backbone.has_lm_head,
        )
        for (_, p), q in zip(backbone.base_parameters(), saved.parameters(), strict=True):
            copy_whole(p, q)
    peft_io.load_heads(model.heads, folder)
    model.trained_heads = set(record["trained_heads"])


def _check_hashes(model: HydraModel, record: Mapping[str, Any]) -> None:
    for name, held in record["backbones"].items():
        if held["hash"] is None:
            continue
        own = model.backbone(name).base_hash()
        if own != held["hash"]:
            raise ValueError(
                f"{name}: expected the backbone with hash {held['hash'][:12]}…, got one with hash {own[:12]}…"
            )


def _listed(slots: Mapping[str, str]) -> list[str]:
    return sorted(slot if name == "base" else f"{slot} on {name}" for slot, name in slots.items())


def read_record(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Record that `save_pretrained` wrote in a folder. Raises ValueError for a folder that it did not write."""
    path = Path(folder) / peft_io.ENGINE_FILE
    if not path.is_file():
        raise ValueError(f"folder: expected one with {peft_io.ENGINE_FILE}, got {str(folder)!r}")
    record = read_json(Path(folder), peft_io.ENGINE_FILE, "folder")
    if record.get("format") == 1:  # one frozen backbone, before there were others
        base = {"source": record["base"], "lm_head": True, "folder": None, "hash": record["base_hash"]}
        slots = {name: {"backbone": "base", "folder": where} for name, where in record["slots"].items()}
        upgraded = {"format": _FORMAT, "backbones": {"base": base}, "slots": slots, "adapter_dtype": "float32"}
        record = {**record, **upgraded}
    if record.get("format") != _FORMAT:
        raise ValueError(f"{path}: expected format {_FORMAT}, got {record.get('format')!r}")
    for held in (*record["slots"].values(), *record["backbones"].values()):
        where = Path(held["folder"] or ".")
        if where.is_absolute() or ".." in where.parts:
            raise ValueError(f"{path}: expected folders that lie in {str(folder)!r}, got {held['folder']!r}")
    return record
