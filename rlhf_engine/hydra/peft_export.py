"""Slots out: PEFT LoRA folders that plain `PeftModel.from_pretrained` loads as the same function.

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
import os
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_engine.errors import ConfigError
from rlhf_engine.hub import is_hub_name, plain_name, revision_of
from rlhf_engine.hydra import peft_io
from rlhf_engine.hydra.adapters import AdapterSlot
from rlhf_engine.hydra.backbone import digest
from rlhf_engine.hydra.gated_linear import path_of
from rlhf_engine.hydra.peft_io import ENGINE_FILE, PREFIX, SCORE_MODULES, WEIGHTS_FILE
from rlhf_engine.hydra.probe import base_model

if TYPE_CHECKING:
    from rlhf_engine.hydra.backbone import Backbone

_EXACT = (torch.float32, torch.float64)  # dtypes of weights that a LoRA may be added to without being rounded away
_loaded_back: dict[tuple[Any, ...], list[str]] = {}
"""Linears that are written as parameters, by kinds of slots that PEFT has loaded back as they are."""


def save_slot(
    backbone: Backbone, name: str, folder: str | os.PathLike[str], *, base_name: str, score: torch.Tensor | None = None
) -> None:
    """Write a slot as a PEFT LoRA folder, with a record of its base.

    Args:
        backbone: the backbone that has the slot.
        name: of the slot.
        folder: the folder to write; it need not exist.
        base_name: name of the base on the Hub, with its revision if it has one, or its folder: PEFT's config has the
            whole path, which holds from wherever the adapter is loaded.
        score: weight [1, H] of a reward head. The folder is then one of a sequence classifier (PEFT's SEQ_CLS, with
            `score` under `modules_to_save`).

    Raises:
        ValueError: PEFT would load another function from the folder.
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
            peft_io.warn_of_other_base(peft_io.recorded_base(adapter)[0], name, "model_name_or_path")
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

    paths = peft_io.read_slot_config(folder).target_modules
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
