"""PEFT's format in: LoRA folders and loaded PeftModels become slots. `peft_export` is the way out.

PEFT supplies the format and the config class, not the switching. Folders hold safetensors and JSON only. PEFT itself is
imported when a PeftModel or an export needs it: an engine that computes does without.
"""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from rlhf_engine.hub import local_folder, plain_name
from rlhf_engine.hydra.adapters import AdapterSlot, SlotConfig
from rlhf_engine.io import check_model

if TYPE_CHECKING:
    from peft import PeftModel

    from rlhf_engine.hydra.backbone import Backbone

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
HEADS_FILE = "heads.safetensors"
ENGINE_FILE = "rlhf_engine.json"
PREFIX = "base_model.model."
_NOT_SERVED = {
    "use_dora": False,
    "bias": "none",
    "rank_pattern": {},
    "alpha_pattern": {},
    "layer_replication": None,
    "lora_bias": False,
    "trainable_token_indices": None,
    "alora_invocation_tokens": None,
    "use_qalora": False,
    "use_bdlora": None,
    "velora_config": None,
    "monteclora_config": None,
    "arrow_config": None,
    "kasa_config": None,
}
SCORE_MODULES = ("score", "classifier")
"""Modules that PEFT saves beside the LoRA of a sequence classifier: its head, which `reward_model` reads."""
_CHANGES_BASE = ("pissa", "corda", "olora", "mica", "loftq", "lora_ga")
"""Starts of `init_lora_weights` under which PEFT changes the base as well: the adapter alone is not the function."""

_COPY = ".base_layer.weight"  # end of the name of a linear's own weight. PEFT saves it beside a LoRA on the LM head.

PairTensors = Mapping[str, tuple[torch.Tensor, torch.Tensor]]  # name of the linear → (A [r, in], B [out, r])


@dataclass(frozen=True, kw_only=True, eq=False)
class PeftAdapter:
    """A LoRA taken out of a PeftModel, and the plain model underneath."""

    base: PreTrainedModel
    config: SlotConfig
    tensors: PairTensors


def is_peft_model(source: object) -> bool:
    """Whether `source` is a loaded PeftModel."""
    peft = sys.modules.get("peft")  # whoever made one has imported it
    return peft is not None and isinstance(source, peft.PeftModel)


def take_peft_adapter(model: Any) -> PeftAdapter:
    """Take the active LoRA out of a PeftModel and strip PEFT's layers off; ValueError where there is more."""
    from peft import get_peft_model_state_dict

    name = model.active_adapter
    where = f"the PeftModel's adapter {name!r}"
    config = model.peft_config[name].to_dict()
    require_plain_lora(config, where)  # before the model is taken apart
    require_plainly_on(model, name, where)
    # what is saved of embeddings otherwise is the base's own
    state = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    tensors = _pair_up(state, where)
    copies = {path: (a.detach().clone(), b.detach().clone()) for path, (a, b) in tensors.items()}
    slot = slot_config(config, copies, where)
    return PeftAdapter(base=model.unload(), config=slot, tensors=copies)


def require_plainly_on(model: PeftModel, name: str, where: str) -> None:
    """Raise ValueError unless each layer of PEFT runs the named adapter alone, unmerged and at its config's scale."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    config: Any = model.peft_config[name]
    scale = config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)
    layers: dict[str, Any] = {p: m for p, m in model.get_base_model().named_modules() if isinstance(m, BaseTunerLayer)}
    for path, layer in layers.items():
        active, theirs = list(layer.active_adapters), layer.scaling.get(name, scale)
        wrong = None
        if layer.merged:
            wrong = f"no weights with adapters merged into them (load the base anew), got {layer.merged_adapters} in"
        elif layer.disable_adapters:
            wrong = "it to be on, got adapters disabled at"
        elif active != [name]:
            wrong = f"no other active adapter, got {active} at"
        elif theirs != scale:
            wrong = f"the scale {scale:g} of its config, got {theirs:g} at"
        if wrong is not None:
            raise ValueError(f"{where}: expected {wrong} {path}")


def read_slot_config(folder: str | os.PathLike[str]) -> SlotConfig:
    """SlotConfig of a PEFT LoRA folder, `init_from` pointing at it; ValueError for what the gate does not serve."""
    where = f"adapter {str(folder)!r}"
    folder = local_folder(folder, "adapter", weights=True)
    check_model(folder, weights=False)
    config = read_json(folder, CONFIG_FILE, "adapter")
    require_plain_lora(config, where)
    tensors = _pair_up(_load_weights(folder), where)
    # absolute, because a relative folder `sft` would be taken for the slot of that name
    slot = slot_config(config, tensors, where, init_from=str(Path(folder).resolve()))
    for path, (a, _) in tensors.items():  # before anything of that size is made
        if a.dim() != 2 or a.shape[0] != slot.r:
            raise ValueError(f"{where}: expected A of {path} as [r={slot.r}, in], got {tuple(a.shape)}")
    return slot


def recorded_base(folder: str | os.PathLike[str]) -> tuple[str | None, str | None]:
    """Base that an adapter's folder records, name or path and hash; None for what it does not record."""
    folder = local_folder(folder, "adapter", weights=True)
    check_model(folder, weights=False)
    values: list[str | None] = []
    for file, key in ((CONFIG_FILE, "base_model_name_or_path"), (ENGINE_FILE, "base_hash")):
        there = (Path(folder) / file).is_file()
        values.append(read_json(Path(folder), file, "adapter").get(key) if there else None)
    return values[0], values[1]


def load_slot(slot: AdapterSlot, folder: str | os.PathLike[str], backbone: Backbone | None) -> None:
    """Load a PEFT folder's weights into a slot; ValueError for those of another base, None takes any."""
    theirs = read_slot_config(folder)
    origin = f"init_from={str(folder)!r}"
    if (theirs.r, theirs.scale) != (slot.config.r, slot.config.scale):
        raise ValueError(
            f"{origin}: expected r={slot.config.r}, scale {slot.config.scale:g} like slot {slot.name!r}, got "
            f"r={theirs.r} and scale {theirs.scale:g}"
        )
    name, recorded = recorded_base(folder)
    if backbone is not None and recorded is not None:
        record = read_json(Path(folder), ENGINE_FILE, "adapter")
        by_decoder = not backbone.has_lm_head and record.get("decoder_hash") is not None
        recorded = record["decoder_hash"] if by_decoder else recorded
        ours = backbone.decoder_hash if by_decoder else backbone.base_hash
        if recorded != ours():
            raise ValueError(
                f"{origin}: expected an adapter of this base (hash {ours()[:12]}…), "
                f"got one of another base (hash {recorded[:12]}…)"
            )
    elif backbone is not None:
        warn_of_other_base(name, backbone.model.config.name_or_path, origin)
    tensors = _load_weights(folder)
    if backbone is not None:
        _require_own_weights(tensors, backbone, origin)
    load_tensors(slot, _pair_up(tensors, origin), origin)


def warn_of_other_base(recorded: str | None, given: str | None, origin: str) -> None:
    """Warn of an adapter whose config names another base than the one given, by the last part of their names."""
    if recorded and given and Path(plain_name(recorded)).name != Path(plain_name(given)).name:
        warnings.warn(
            f"{origin}: its base_model_name_or_path is {recorded!r}, the base given is {given!r}; no hash is recorded "
            "that would tell whether they are the same",
            stacklevel=3,
        )


def _require_own_weights(tensors: Mapping[str, torch.Tensor], backbone: Backbone, origin: str) -> None:
    """Raise ValueError for a weight beside the LoRA that is not the backbone's: PEFT would load it into the base."""
    linears = dict(backbone.model.named_modules())
    for key, theirs in tensors.items():
        path = key.removeprefix(PREFIX).removesuffix(_COPY)
        if not key.endswith(_COPY) or path not in linears:
            continue
        ours = linears[path].weight
        assert isinstance(ours, torch.Tensor)
        ours = ours.detach().cpu()
        same = ours.shape == theirs.shape and (
            torch.equal(ours.to(theirs.dtype), theirs) or torch.equal(ours, theirs.to(ours.dtype))
        )
        if not same:
            raise ValueError(f"{origin}: expected {path}'s own weight beside its LoRA, got another one")


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


def save_heads(heads: nn.ModuleDict, names: set[str], folder: str | os.PathLike[str]) -> None:
    """Write the scalar heads, and an index of the model's one file: others read every safetensors file without."""
    tensors = {
        f"{name}.{key}": t.detach().cpu().contiguous()
        for name in sorted(names)
        for key, t in heads[name].state_dict().items()
    }
    if tensors:
        save_file(tensors, Path(folder) / HEADS_FILE, metadata={"format": "pt"})
        _write_index(Path(folder))


def _write_index(folder: Path) -> None:
    model = folder / "model.safetensors"
    if model.is_file():
        with safe_open(model, framework="pt") as file:
            names = sorted(file.keys())
        index = {"metadata": {"total_size": model.stat().st_size}, "weight_map": dict.fromkeys(names, model.name)}
        (folder / f"{model.name}.index.json").write_text(json.dumps(index, indent=1) + "\n")


def read_head(folder: str | os.PathLike[str], name: str) -> dict[str, torch.Tensor]:
    """weight [1, H] and bias [1] of a head in a folder's `heads.safetensors`."""
    tensors = _load_tensors(Path(folder) / HEADS_FILE)
    return {key.removeprefix(f"{name}."): t for key, t in tensors.items() if key.startswith(f"{name}.")}


def head_names(folder: str | os.PathLike[str]) -> set[str]:
    """Names of the heads in a folder's `heads.safetensors`; none if there is no such file."""
    path = Path(folder) / HEADS_FILE
    return {key.partition(".")[0] for key in _load_tensors(path)} if path.is_file() else set()


def load_heads(heads: nn.ModuleDict, folder: str | os.PathLike[str]) -> None:
    """Load every head of the model. Raises ValueError if the folder lacks one."""
    missing = sorted(set(heads) - load_heads_if_present(heads, folder))
    if missing:
        raise ValueError(f"{Path(folder) / HEADS_FILE}: expected the heads {sorted(heads)}, got none of {missing}")


def load_heads_if_present(heads: nn.ModuleDict, folder: str | os.PathLike[str]) -> set[str]:
    """Load the heads of `heads.safetensors` that the model has; returns their names (none if there is no such file)."""
    path = Path(folder) / HEADS_FILE
    if not path.is_file():
        return set()
    tensors = _load_tensors(path)
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


def require_plain_lora(config: Mapping[str, Any], where: str) -> None:
    """Raise ValueError for a PEFT config that is not plain LoRA: what is ignored would be silently wrong."""
    if str(config.get("peft_type")).rpartition(".")[2] != "LORA":
        raise ValueError(f"{where}: expected peft_type LORA, got {config.get('peft_type')}")
    for key, plain in _NOT_SERVED.items():
        if config.get(key) and config[key] != plain:
            raise ValueError(f"{where}: expected {key}={plain!r}, got {config[key]!r}, which is not served")
    others = [name for name in config.get("target_parameters") or () if not name.endswith(".weight")]
    if others:
        raise ValueError(f"{where}: expected target_parameters that are weights of linears, got {others}, not served")
    whole = config.get("modules_to_save") or []
    if any(name not in SCORE_MODULES for name in whole):
        raise ValueError(
            f"{where}: expected modules_to_save=None, or {list(SCORE_MODULES)} of a reward model, got {whole!r}, "
            "which is not served"
        )
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise ValueError(
            f"{where}: expected init_lora_weights that leaves the base alone, got {start!r}; save it with PEFT's "
            "path_initial_model_for_weight_conversion to make a plain LoRA of it"
        )
    for key in ("r", "lora_alpha"):
        if not isinstance(config.get(key), (int, float)):
            raise ValueError(f"{where}: expected a number as {key}, got {config.get(key)!r}")


def slot_config(
    config: Mapping[str, Any], paths: Iterable[str], where: str, *, init_from: str | None = None
) -> SlotConfig:
    """The config of a slot on the linears of these names. Raises ValueError where there are none."""
    targets = tuple(paths)
    if not targets:
        raise ValueError(f"{where}: expected LoRA weights, got none")
    return SlotConfig(
        r=int(config["r"]),
        alpha=float(config["lora_alpha"]),
        dropout=float(config.get("lora_dropout") or 0.0),
        target_modules=targets,
        use_rslora=bool(config.get("use_rslora")),
        init_from=init_from,
    )


def _load_weights(folder: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    path = Path(folder) / WEIGHTS_FILE
    if not path.is_file():
        raise ValueError(f"adapter: expected {WEIGHTS_FILE} in {str(folder)!r}, which is not there")
    return _load_tensors(path)


def _load_tensors(path: Path) -> dict[str, torch.Tensor]:
    check_model(path.parent, [path.name])
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path}: expected a safetensors file, got {error}") from error


def _pair_up(tensors: Mapping[str, torch.Tensor], origin: str) -> PairTensors:
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        if key.removeprefix(PREFIX).split(".")[0] in SCORE_MODULES and ".lora_" not in key:
            continue  # the head of a reward model
        if key.endswith(_COPY):
            continue  # the base's own, which `load_slot` compares
        path, marker, half = key.removeprefix(PREFIX).rpartition(".lora_")
        if not marker or half not in ("A.weight", "B.weight"):
            raise ValueError(f"{origin}: expected only lora_A and lora_B weights of linears, got {key!r}")
        halves.setdefault(path, {})[half[0]] = tensor
    for path, pair in halves.items():
        if set(pair) != {"A", "B"}:
            raise ValueError(f"{origin}: expected A and B of {path}, got only {sorted(pair)}")
    return {path: (pair["A"], pair["B"]) for path, pair in halves.items()}


def read_json(folder: Path, name: str, argument: str) -> dict[str, Any]:
    """The object in a folder's JSON file. Raises ValueError, naming the argument, where there is none."""
    path = folder / name
    if not path.is_file():
        raise ValueError(f"{argument}: expected a folder with {name}, got {str(folder)!r} which has none")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: expected JSON, got {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value
