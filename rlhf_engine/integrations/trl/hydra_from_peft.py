"""A HydraModel on the very tensors of a PeftModel: nothing is held twice, and each sees what the other trains.

    PeftModel            what TRL, accelerate and PEFT know: it is wrapped, saved, resumed
      base weights   ←── shared ──→   HydraModel's backbone, through modules of its own
      default        ←── shared ──→   slot `actor`
      critic         ←── shared ──→   slot `critic`
      hydra_heads    ←── shared ──→   value and reward head

The HydraModel runs inside the PeftModel's forward, so that the hooks of whatever wraps that fire: where the model is
called with `hydra=(arguments, options)`, the HydraModel is.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn

from rlhf_engine.errors import ConfigError, as_request_errors
from rlhf_engine.hydra import HydraModel, SlotConfig, peft_io
from rlhf_engine.hydra.loading import keep_differentiable
from rlhf_engine.hydra.roles import RoleSpec

HEADS = "hydra_heads"  # name under which the heads are the PeftModel's


def hydra_on(
    model: PeftModel,
    roles: Mapping[str, RoleSpec],
    adapters: Mapping[str, str],
    *,
    copies: Mapping[str, str] | None = None,
    slots: Mapping[str, SlotConfig] | None = None,
    disable_dropout: bool = False,
    seed: int = 0,
) -> HydraModel:
    """A HydraModel whose backbone, and whose slots in `adapters` (slot → PEFT's name), are the PeftModel's tensors.

    copies: slots that start with an adapter's numbers and are the HydraModel's own. slots: shapes and origins of
    further ones of its own. disable_dropout: whatever the adapters' configurations say.

    Raises ConfigError for adapters that are no plain LoRA on linears.
    """
    keep_differentiable(model)  # its linears share their weights with the HydraModel's
    named = {**adapters, **(copies or {})}
    own = {slot: _slot_config(model, name) for slot, name in named.items()}
    if disable_dropout:
        own = {slot: replace(config, dropout=0.0) for slot, config in own.items()}
    hydra = HydraModel.from_pretrained(_plain_copy(model), roles=roles, slots={**own, **(slots or {})}, seed=seed)
    layers: dict[str, Any] = {
        path: module for path, module in model.get_base_model().named_modules() if isinstance(module, LoraLayer)
    }
    for slot, name in named.items():
        for path, pair in hydra.backbone().slot(slot).items():
            a, b = layers[path].lora_A[name].weight, layers[path].lora_B[name].weight
            if slot in adapters:
                pair.A, pair.B = a, b
            else:
                with torch.no_grad():
                    pair.A.copy_(a)
                    pair.B.copy_(b)
    hydra.adapter_dtype = next(iter(hydra.backbone().slot(next(iter(adapters))).parameters())).dtype
    for name, head in getattr(model, HEADS, {}).items():  # a model that was trained before goes on with its heads
        if name in hydra.heads:
            hydra.heads[name].load_state_dict(head.state_dict())
    model.add_module(HEADS, hydra.heads)
    base: Any = model.get_base_model()
    before = base.forward

    @functools.wraps(before, assigned=(), updated=())  # transformers reads the signature
    def forward(*args: Any, **kwargs: Any) -> Any:
        asked = kwargs.pop("hydra", None)
        return before(*args, **kwargs) if asked is None else hydra(*asked[0], **asked[1])

    base.forward = forward
    return hydra


def _plain_copy(model: PeftModel) -> Any:
    """The base without PEFT's layers, on the same tensors: modules are copied, what they hold is not."""
    tensors = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    base: Any = model.base_model
    plain = copy.deepcopy(base, tensors).unload()
    plain.__dict__.pop("forward", None)  # a patched one would lead back to the original
    for module in plain.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return plain


def _slot_config(model: PeftModel, name: str) -> SlotConfig:
    config = model.peft_config[name].to_dict()
    where = f"the adapter {name!r}"
    with as_request_errors():
        peft_io.require_plain_lora(config, where)
    layers = dict(model.get_base_model().named_modules())
    paths = [path for path, layer in layers.items() if isinstance(layer, LoraLayer) and name in layer.r]
    others = [path for path in paths if not isinstance(layers[path].get_base_layer(), nn.Linear)]
    if others or not paths:
        raise ConfigError(f"peft_config: expected LoRA on linears alone, got {others or 'no layer'} for {where}")
    return peft_io.slot_config(config, paths, where)


def require_alone(model: PeftModel, name: str) -> None:
    """Raise ConfigError unless the function of a PeftModel is its plain base and the named adapter."""
    where = f"model: the adapter {name!r}"
    with as_request_errors():
        peft_io.require_plain_lora(model.peft_config[name].to_dict(), where)
        peft_io.require_plainly_on(model, name, where)


def has_learned(model: PeftModel, name: str) -> bool:
    """Whether an adapter changes anything: whether some B of it is not 0."""
    layers: list[Any] = [m for m in model.modules() if isinstance(m, LoraLayer) and name in m.lora_B]
    return any(bool(layer.lora_B[name].weight.any()) for layer in layers)


def is_on_same_tensors(hydra: HydraModel, model: PeftModel) -> bool:
    """Whether every trained tensor of a HydraModel still is one of the PeftModel's."""
    theirs = {id(p) for p in model.parameters()}
    return all(id(p) in theirs for p in hydra.parameters() if isinstance(p, torch.nn.Parameter) and p.requires_grad)
