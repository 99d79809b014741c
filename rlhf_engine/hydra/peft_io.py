"""PEFT's format in and out: LoRA folders and loaded PeftModels become slots, slots become folders that PEFT loads.

PEFT supplies the format and the config class, not the switching. Folders hold safetensors and JSON only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from rlhf_engine.hydra.bank import AdapterSlot, SlotConfig

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
HEADS_FILE = "heads.safetensors"
ENGINE_FILE = "rlhf_engine.json"
_PREFIX = "base_model.model."
_NOT_SERVED = {
    "use_dora": False,
    "bias": "none",
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layer_replication": None,
    "fan_in_fan_out": False,
    "lora_bias": False,
}

PairTensors = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""name of the linear → (A [r, in], B [out, r])"""


@dataclass(frozen=True, kw_only=True, eq=False)
class PeftAdapter:
    """A LoRA taken out of a PeftModel, and the plain model underneath."""

    base: PreTrainedModel
    config: SlotConfig
    tensors: PairTensors


def is_peft_model(source: object) -> bool:
    """Whether `source` is a loaded PeftModel."""
    return isinstance(source, PeftModel)


def take_peft_adapter(model: Any) -> PeftAdapter:
    """Take the active LoRA out of a PeftModel and strip PEFT's layers off its base. Nothing is merged."""
    name = model.active_adapter
    config = model.peft_config[name]
    tensors = _pair_up(get_peft_model_state_dict(model, adapter_name=name), f"PeftModel adapter {name!r}")
    copies = {path: (a.detach().clone(), b.detach().clone()) for path, (a, b) in tensors.items()}
    return PeftAdapter(base=model.unload(), config=_slot_config(config.to_dict(), copies, None), tensors=copies)


def read_slot_config(folder: str | os.PathLike[str]) -> SlotConfig:
    """SlotConfig of a PEFT LoRA folder, with `init_from` pointing at it.

    Raises ValueError for a folder that is not one, or that uses something the gate does not serve (DoRA, …).
    """
    config = _read_json(Path(folder), CONFIG_FILE, "adapter")
    return _slot_config(config, _read_tensors(folder), str(folder))


def load_slot(slot: AdapterSlot, folder: str | os.PathLike[str], *, base_hash: Callable[[], str]) -> None:
    """Load a PEFT folder's weights into a slot. Raises ValueError if it belongs to another base or does not fit."""
    engine = Path(folder) / ENGINE_FILE
    if engine.is_file():
        recorded = json.loads(engine.read_text()).get("base_hash")
        if recorded is not None and recorded != base_hash():
            raise ValueError(
                f"init_from={str(folder)!r}: expected an adapter of this base (hash {base_hash()[:12]}…), "
                f"got one of another base (hash {recorded[:12]}…)"
            )
    load_tensors(slot, _read_tensors(folder), f"init_from={str(folder)!r}")


def load_tensors(slot: AdapterSlot, tensors: PairTensors, origin: str) -> None:
    """Copy pairs into a slot. Raises ValueError unless names and shapes are exactly the slot's."""
    ours = dict(slot.items())
    if set(ours) != set(tensors):
        missing, extra = sorted(set(ours) - set(tensors))[:3], sorted(set(tensors) - set(ours))[:3]
        raise ValueError(
            f"{origin}: expected weights for the {len(ours)} linears of slot {slot.name!r}; missing {missing}, "
            f"not in this model {extra} (an adapter of another base?)"
        )
    for path, pair in ours.items():
        a, b = tensors[path]
        if a.shape != pair.A.shape or b.shape != pair.B.shape:
            raise ValueError(
                f"{origin}: expected {path} A {tuple(pair.A.shape)} and B {tuple(pair.B.shape)}, "
                f"got {tuple(a.shape)} and {tuple(b.shape)} (an adapter of another base?)"
            )
    with torch.no_grad():
        for path, pair in ours.items():
            a, b = tensors[path]
            pair.A.copy_(a)
            pair.B.copy_(b)


def save_slot(slot: AdapterSlot, folder: str | os.PathLike[str], *, base_name: str, base_hash: str) -> None:
    """Write a slot as a PEFT LoRA folder that plain `PeftModel.from_pretrained` loads."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = slot.config
    LoraConfig(
        r=config.r,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # PEFT annotates int and computes with floats
        lora_dropout=config.dropout,
        use_rslora=config.use_rslora,
        target_modules=sorted(path for path, _ in slot.items()),  # full names match exactly these linears
        task_type="CAUSAL_LM",
        base_model_name_or_path=base_name,
        inference_mode=True,
    ).save_pretrained(str(folder))
    tensors = {}
    for path, pair in slot.items():
        tensors[f"{_PREFIX}{path}.lora_A.weight"] = pair.A.detach().cpu().contiguous()
        tensors[f"{_PREFIX}{path}.lora_B.weight"] = pair.B.detach().cpu().contiguous()
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / ENGINE_FILE).write_text(json.dumps({"base_hash": base_hash, "slot": slot.name}, indent=1) + "\n")


def save_heads(heads: nn.ModuleDict, names: set[str], folder: str | os.PathLike[str]) -> None:
    """Write the named scalar heads to `heads.safetensors`."""
    tensors = {
        f"{name}.{key}": t.detach().cpu().contiguous()
        for name in sorted(names)
        for key, t in heads[name].state_dict().items()
    }
    if tensors:
        save_file(tensors, Path(folder) / HEADS_FILE, metadata={"format": "pt"})


def load_heads_if_present(heads: nn.ModuleDict, folder: str | os.PathLike[str]) -> set[str]:
    """Load the heads of `heads.safetensors` that the model has; returns their names (none if there is no such file)."""
    path = Path(folder) / HEADS_FILE
    if not path.is_file():
        return set()
    tensors = load_file(path)
    loaded = set()
    for name, head in heads.items():
        own = {key.removeprefix(f"{name}."): t for key, t in tensors.items() if key.startswith(f"{name}.")}
        if not own:
            continue
        expected = {key: tuple(t.shape) for key, t in head.state_dict().items()}
        got = {key: tuple(t.shape) for key, t in own.items()}
        if expected != got:
            raise ValueError(f"{path}: expected head {name!r} with {expected}, got {got}")
        head.load_state_dict(own)
        loaded.add(name)
    return loaded


def _slot_config(config: Mapping[str, Any], tensors: PairTensors, origin: str | None) -> SlotConfig:
    where = f"adapter {origin!r}" if origin else "the PeftModel's adapter"
    if str(config.get("peft_type")).rpartition(".")[2] != "LORA":
        raise ValueError(f"{where}: expected peft_type LORA, got {config.get('peft_type')}")
    for key, plain in _NOT_SERVED.items():
        if config.get(key) not in (plain, None, {}, []):
            raise ValueError(f"{where}: expected {key}={plain!r}, got {config[key]!r}, which is not served")
    return SlotConfig(
        r=int(config["r"]),
        alpha=float(config["lora_alpha"]),
        dropout=float(config.get("lora_dropout") or 0.0),
        target_modules=tuple(tensors),
        use_rslora=bool(config.get("use_rslora")),
        init_from=origin,
    )


def _read_tensors(folder: str | os.PathLike[str]) -> PairTensors:
    path = Path(folder) / WEIGHTS_FILE
    if not path.is_file():
        raise ValueError(f"adapter: expected {WEIGHTS_FILE} in {str(folder)!r}, which is not there")
    return _pair_up(load_file(path), f"adapter {str(folder)!r}")


def _pair_up(tensors: Mapping[str, torch.Tensor], origin: str) -> PairTensors:
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        path, marker, half = key.removeprefix(_PREFIX).rpartition(".lora_")
        if not marker or half not in ("A.weight", "B.weight"):
            raise ValueError(f"{origin}: expected only lora_A and lora_B weights of linears, got {key!r}")
        halves.setdefault(path, {})[half[0]] = tensor
    for path, pair in halves.items():
        if set(pair) != {"A", "B"}:
            raise ValueError(f"{origin}: expected A and B of {path}, got only {sorted(pair)}")
    return {path: (pair["A"], pair["B"]) for path, pair in halves.items()}


def _read_json(folder: Path, name: str, argument: str) -> dict[str, Any]:
    path = folder / name
    if not path.is_file():
        raise ValueError(f"{argument}: expected a folder with {name}, got {str(folder)!r} which has none")
    found = json.loads(path.read_text())
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found
