"""PEFT's format: LoRA folders and loaded PeftModels become slots, slots become folders that PEFT loads as the same.

PEFT supplies the format and the config class, not the switching. Folders hold safetensors and JSON only. PEFT itself is
imported when a PeftModel or an export needs it: an engine that computes does without.

PEFT rewrites the names of linears on mixtures of experts, whose layout changed between transformers 4 and 5. It takes
`gate_proj`, `up_proj` and `down_proj` of dense layers and shared experts for parts of the stacked experts, drops their
LoRA and only warns. Such linears are written as `target_parameters`, names that PEFT leaves alone. It then adds the
LoRA to the weight, W + s B A, in the weight's own dtype. A bf16 weight rounds small additions away, so those linears
need float32.

Every slot is loaded back through PEFT, on a model of the same class whose weights take no memory, and compared.
"""

from __future__ import annotations

import copy
import json
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_engine.errors import ConfigError
from rlhf_engine.hub import is_hub_name, local_folder, plain_name, revision_of
from rlhf_engine.hydra.backbone import Backbone, digest
from rlhf_engine.hydra.gate import AdapterSlot, SlotConfig
from rlhf_engine.hydra.modules import path_of
from rlhf_engine.hydra.probe import base_model
from rlhf_engine.io import check_model, read_json

if TYPE_CHECKING:
    from peft import PeftModel

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
HEADS_FILE = "heads.safetensors"
ENGINE_FILE = "rlhf_engine.json"
PREFIX = "base_model.model."
_NOT_SERVED = {
    "use_dora": False, "bias": "none", "rank_pattern": {}, "alpha_pattern": {}, "layer_replication": None,
    "lora_bias": False, "trainable_token_indices": None, "alora_invocation_tokens": None, "use_qalora": False,
    "use_bdlora": None, "velora_config": None, "monteclora_config": None, "arrow_config": None, "kasa_config": None,
}  # fmt: skip
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
    for path, (a, b) in tensors.items():  # before anything of that size is made
        if a.dim() != 2 or a.shape[0] != slot.r:
            raise ValueError(f"{where}: expected A of {path} as [r={slot.r}, in], got {tuple(a.shape)}")
        if not all(x.is_floating_point() and bool(x.isfinite().all()) for x in (a, b)):
            raise ValueError(f"{where}: expected finite numbers in A and B of {path}, got others")
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


# ---- slots out -------------------------------------------------------------------------------------------------------

_EXACT = (torch.float32, torch.float64)  # dtypes of weights that a LoRA may be added to without being rounded away
_loaded_back: dict[tuple[Any, ...], list[str]] = {}
"""Linears that are written as parameters, by kinds of slots that PEFT has loaded back as they are."""


def save_slot(
    backbone: Backbone, name: str, folder: str | os.PathLike[str], *, base_name: str, score: torch.Tensor | None = None
) -> None:
    """Write a slot as a PEFT LoRA folder, with a record of its base; ValueError where PEFT would load another function.

    base_name: name of the base on the Hub, or its folder: PEFT's config has the whole path, which holds from wherever
    the adapter is loaded. score: weight [1, H] of a reward head, which makes it the folder of a sequence classifier.
    """
    slot = backbone.slot(name)
    if score is None:
        by_parameter = require_exportable(backbone, name)
        write_adapter(slot, folder, backbone=backbone, base_name=base_name, as_parameters=by_parameter)
    else:
        _write_and_load_back(backbone, slot, folder, base_name=base_name, score=score)
    record = {"base_hash": backbone.base_hash(), "decoder_hash": backbone.decoder_hash(), "slot": name}
    (Path(folder) / ENGINE_FILE).write_text(json.dumps(record, indent=1) + "\n")


def require_exportable(backbone: Backbone, name: str) -> list[str]:
    """Linears of a slot that are written as parameters; ValueError for a slot that `save_slot` would refuse."""
    slot, model = backbone.slot(name), backbone.model
    base = (type(model), model.config.to_json_string(), backbone.dtype, backbone.quantized, backbone.has_lm_head)
    kind = (*base, slot.config, *((path, pair.A.shape, pair.B.shape) for path, pair in slot.items()))
    if kind not in _loaded_back:
        try:
            with tempfile.TemporaryDirectory() as folder:
                _loaded_back[kind] = _write_and_load_back(backbone, slot, folder)
        except (OSError, SafetensorError) as error:  # a full disk
            place = os.environ.get("TMPDIR", "the system's")
            raise ConfigError(f"TMPDIR: expected a folder that can be written, got {place}: {error}") from error
    return _loaded_back[kind]


def _write_and_load_back(
    backbone: Backbone,
    slot: AdapterSlot,
    folder: str | os.PathLike[str],
    *,
    base_name: str = "",
    score: torch.Tensor | None = None,
) -> list[str]:
    """Write a slot's adapter and compare it with what PEFT makes of it; linears that were written as parameters."""
    base = _weightless(backbone, classifier=score is not None)
    as_parameters = _require_names(backbone, slot, base)
    write_adapter(slot, folder, backbone=backbone, base_name=base_name, as_parameters=as_parameters, score=score)
    _require_same(slot, base, folder, score)
    return as_parameters


def write_adapter(
    slot: AdapterSlot,
    folder: str | os.PathLike[str],
    *,
    backbone: Backbone,
    base_name: str,
    as_parameters: Iterable[str] = (),
    score: torch.Tensor | None = None,
) -> None:
    """Write PEFT's two files of a slot. as_parameters: linears whose weight PEFT is to target as a parameter."""
    from peft import LoraConfig

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config, as_parameters = slot.config, set(as_parameters)
    task = "SEQ_CLS" if score is not None else "CAUSAL_LM" if backbone.has_lm_head else None
    LoraConfig(
        r=config.r,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # PEFT annotates int and computes with floats
        lora_dropout=config.dropout,
        use_rslora=config.use_rslora,
        # full names match exactly these linears
        target_modules=sorted(path for path, _ in slot.items() if path not in as_parameters),
        target_parameters=sorted(f"{path}.weight" for path in as_parameters) or None,
        fan_in_fan_out=backbone.transposed,
        task_type=task,  # type: ignore[arg-type]  # PEFT annotates str and takes None: no methods beside forward
        modules_to_save=None if score is None else [SCORE_MODULES[0]],
        # it holds from everywhere; a model made in memory has no name
        base_model_name_or_path=plain_name(base_name)
        if is_hub_name(base_name)
        else base_name and os.path.abspath(base_name),
        revision=revision_of(base_name),
        inference_mode=True,
    ).save_pretrained(str(folder))
    tensors = {}
    for path, pair in slot.items():
        tensors[f"{PREFIX}{path}.lora_A.weight"] = pair.A.detach().cpu().contiguous()
        tensors[f"{PREFIX}{path}.lora_B.weight"] = pair.B.detach().cpu().contiguous()
    if score is not None:
        tensors[f"{PREFIX}{SCORE_MODULES[0]}.weight"] = score.detach().cpu().contiguous()
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def require_base(
    model: PreTrainedModel, recorded: str | None, name: str, adapter: Path | None, *, decoder: bool = False
) -> None:
    """Raise ConfigError for a model whose hash is not the recorded one; another name is warned of."""
    if recorded is None:
        if adapter is not None:
            warn_of_other_base(recorded_base(adapter)[0], name, "model_name_or_path")
        return
    part = base_model(model) if decoder else model
    own = [(path, p) for path, p in part.named_parameters() if not path.startswith("score.")]
    for dtype in dict.fromkeys((model.dtype, torch.float32, torch.bfloat16, torch.float16)):
        if digest((path, nn.Parameter(p.detach().to(dtype), requires_grad=False)) for path, p in own) == recorded:
            return
    raise ConfigError(
        f"model_name_or_path: expected the base with hash {recorded[:12]}…, which the adapter was trained on, got "
        f"{name!r} with another"
    )


def merge_adapter(model: PreTrainedModel, folder: str | os.PathLike[str]) -> PreTrainedModel:
    """Merge a PEFT folder into a model on the CPU in float32, rounded once; a tied head gets its own weight."""
    from peft import PeftConfig, PeftModel

    paths = read_slot_config(folder).target_modules
    linears = dict(model.named_modules())
    wrong = [path for path in paths if not isinstance(linears.get(path), nn.Linear | Conv1D)]
    if wrong:
        raise ValueError(f"adapter: expected one on linears of a {type(model).__name__}, got one on {wrong[:3]}")
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear) and path_of(head, model) in paths:
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        for text in (model.config, model.config.get_text_config()):
            text.tie_word_embeddings = False
    config = PeftConfig.from_pretrained(str(folder))
    config.task_type = config.modules_to_save = None  # no methods beside forward, no head
    try:
        merged = PeftModel.from_pretrained(model, folder, config=config, torch_device="cpu").merge_and_unload()
    except RuntimeError as error:
        raise ValueError(
            f"adapter: expected one of this {type(model).__name__}, got {error}".replace("\n", " ")
        ) from error
    return merged  # type: ignore[no-any-return]


def _weightless(backbone: Backbone, *, classifier: bool = False) -> PreTrainedModel:
    """The plain float32 model of a backbone, or its classifier, every weight one number that fills its shape."""
    config = copy.deepcopy(backbone.model.config)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        if classifier:
            config.num_labels = 1
            model = AutoModelForSequenceClassification.from_config(config)
        else:
            model = type(backbone.model)(config)
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                filled = torch.zeros((), dtype=torch.float32).expand(p.shape)
                module._parameters[name] = nn.Parameter(filled, requires_grad=False)
    return model


def _require_names(backbone: Backbone, slot: AdapterSlot, base: PreTrainedModel) -> list[str]:
    """Linears of a slot whose names PEFT would rewrite. Raises ValueError where they cannot be written otherwise."""
    rewritten = [path for path, _ in slot.items() if _is_rewritten(path, base)]
    if not rewritten:
        return rewritten
    endings = sorted({path.rsplit(".", 1)[-1] for path in rewritten})
    where = f"LoRA on {endings}, which PEFT takes for parts of this {type(base).__name__}'s experts"
    if backbone.dtype not in _EXACT or backbone.quantized:
        got = "quantised ones" if backbone.quantized else str(backbone.dtype).removeprefix("torch.")
        raise ValueError(
            f"lora_target_modules: expected weights in float32 for {where}, got {got}; choose other linears or dtype "
            "float32"
        )
    if slot.config.dropout:
        raise ValueError(f"lora_dropout: expected 0 for {where}, got {slot.config.dropout}")
    return rewritten


def _is_rewritten(path: str, base: PreTrainedModel) -> bool:
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(target_modules=[path])
    try:
        convert_peft_config_for_transformers(config, base, None)
    except ValueError:  # one of two linears that would become one
        return True
    return bool(config.target_modules != {path})


def _require_same(
    slot: AdapterSlot, base: PreTrainedModel, folder: str | os.PathLike[str], score: torch.Tensor | None = None
) -> None:
    """Raise ValueError unless PEFT makes exactly the slot of a folder: its linears, tensors and scale."""
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

    where = f"{str(folder)!r}: expected plain PEFT to load slot {slot.name!r} of a {type(base).__name__}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what PEFT only warns of is found below
            model = PeftModel.from_pretrained(base, folder, low_cpu_mem_usage=True, torch_device="cpu")
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{where}, got {type(error).__name__}: {error}".replace("\n", " ")) from error
    plain = model.get_base_model()
    layers: dict[str, Any] = {path: layer for path, layer in plain.named_modules() if isinstance(layer, LoraLayer)}
    ours = dict(slot.items())
    wrong = sorted(set(ours) ^ set(layers))
    for path in set(ours) & set(layers):
        layer, pair = layers[path], ours[path]
        same = layer.scaling.get("default") == slot.config.scale and all(
            "default" in half and _equal(half["default"].weight, tensor)
            for half, tensor in ((layer.lora_A, pair.A), (layer.lora_B, pair.B))
        )
        if not same:
            wrong.append(path)
    if score is not None:
        head: Any = plain.get_submodule(SCORE_MODULES[0])
        if not _equal(head.modules_to_save["default"].weight, score):
            wrong.append(SCORE_MODULES[0])
    if wrong:
        raise ValueError(f"{where} as it is, got another function at {wrong[:3]} ({len(wrong)} of {len(ours)} linears)")


def _equal(theirs: torch.Tensor, ours: torch.Tensor) -> bool:
    ours = ours.detach().cpu()
    return theirs.device == ours.device and theirs.shape == ours.shape and torch.equal(theirs.to(ours.dtype), ours)
