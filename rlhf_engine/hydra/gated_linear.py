"""Gated linears: the layers of a backbone that add the LoRA of whatever slots the gate names for a row.

    GatedLinear    nn.Linear, one fused op `lora_linear`; rows that are off keep the bits of `linear`
    GatedConv1D    GPT-2's Conv1D (weight [in, out]): its own product, or `linear` in exact mode, then `lora_delta_`
    GatedOutput    any other linear, such as a quantised one: its own forward untouched, `lora_delta_` on its output
    GatedHead      the LM head, which never runs as a module: the vocabulary kernels take its LoRA as an option

Layers find the slot of a row through the gate, never through state of their own, and keep their parameters under the
names that the plain model gives them: a backbone saves and hashes as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rlhf_kernels.linear import linear
from rlhf_kernels.lora import DecodeLinear, Dropout, group, lora_delta_, lora_linear
from rlhf_kernels.runtime import registry
from rlhf_kernels.vocab.logits import HeadLora
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_engine.errors import UnsupportedModelError
from rlhf_engine.hydra import gate
from rlhf_engine.hydra.adapters import ALL_LINEAR, AdapterSlot
from rlhf_engine.hydra.attention import DecodePlan, Linears

_ROUTER = "Router"
"""End of the class names of routers: linears whose forward returns routes beside their product or in its place."""
_QUANTISED = ("Linear4bit", "Linear8bitLt")  # bitsandbytes' linears, by name: the package is optional


class GatedLayer:
    """The place of a linear in the model, and its shape."""

    def __init__(self, path: str, stream: int, in_features: int, out_features: int) -> None:
        self.path = path  # name of the linear in the model
        self.stream = stream  # number that keeps the dropout masks of two layers apart
        self.in_features = in_features
        self.out_features = out_features

    def lora_arguments(self, call: gate.BackboneCall) -> tuple[Any, ...] | None:
        """(A, B, scales, segments, dropout) of the slots that run here in this call; None if there are none."""
        slots, wanted, path = call.slots, call.table.slots, self.path
        present = tuple(name for name in slots if name in wanted and path in slots[name].paths)
        if not present:
            return None
        pairs = [slots[name].pair(path) for name in present]
        configs = [slots[name].config for name in present]
        key, dropout = call.dropout, None
        if key is not None and any(config.dropout for config in configs):
            p = tuple(config.dropout for config in configs)
            dropout = Dropout(p=p, seed=key.seed, row_ids=key.row_ids_T, stream=self.stream)
        A, B, scales = [pair.A for pair in pairs], [pair.B for pair in pairs], [config.scale for config in configs]
        return A, B, scales, gate.lora_segments(call.table, present), dropout


class GatedLinear(nn.Linear):
    """An nn.Linear on the same weight and bias objects."""

    readers: tuple[GatedLinear, ...] = ()
    """Linears that read its input right after it, as the probe has seen. Not itself: a cycle would keep its weight."""

    def __init__(self, base: nn.Linear, *, path: str, stream: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.gated = GatedLayer(path, stream, base.in_features, base.out_features)
        self.train(base.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        call = gate.current()
        if call is not None and call.dropout is None and isinstance(call.attention, DecodePlan):
            return self._decode(x, call, call.attention.linears)
        if call is not None and group.is_wanted():
            return group.read(x, self, (self, *self.readers), lambda linear: linear.reader(call))
        arguments = None if call is None else self.gated.lora_arguments(call)
        if arguments is None:
            return linear(x, self.weight, self.bias)
        *lora, dropout = arguments
        return lora_linear(x, self.weight, self.bias, *lora, dropout=dropout)

    def reader(self, call: gate.BackboneCall) -> group.Reader:
        """Weights of the linear, and the slots that run here in a call."""
        return group.Reader(self.weight, self.bias, *(self.gated.lora_arguments(call) or ()))

    def _decode(self, x: torch.Tensor, call: gate.BackboneCall, linears: Linears) -> torch.Tensor:
        """Multiply through what the first step with these rows has prepared."""
        key = (self.gated, call.table)
        prepared = linears.get(key)
        if prepared is None:
            arguments = self.gated.lora_arguments(call)
            if arguments is None:
                return linear(x, self.weight, self.bias)
            *lora, _ = arguments
            prepared = linears[key] = DecodeLinear(self.weight, self.bias, *lora)
        return prepared(x)


class GatedConv1D(Conv1D):
    """A Conv1D on the same weight [in, out] and bias objects."""

    def __init__(self, base: Conv1D, *, path: str, stream: int) -> None:
        nn.Module.__init__(self)
        self.nf, self.nx = base.nf, base.nx
        self.weight, self.bias = base.weight, base.bias
        self.gated = GatedLayer(path, stream, base.nx, base.nf)
        self.train(base.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # no product across a weight has been measured against torch's
        takes_own = registry.is_exact() or registry.default_backend() == "triton"
        y = linear(x, self.weight.t(), self.bias) if takes_own else super().forward(x)
        return _add_delta(self.gated, x, y)


class GatedOutput:
    """A forward hook that adds the delta to what a linear of another kind returned."""

    def __init__(self, gated: GatedLayer) -> None:
        self.gated = gated

    def __call__(self, module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        # a copy where gradients flow: autograd refuses to change what a custom Function returned
        return _add_delta(self.gated, args[0], output, copy=torch.is_grad_enabled())


class GatedHead(GatedLayer):
    """The LM head. Its embedding twin, where the weight is tied, is not touched by the head's LoRA."""

    def lora(self, slot: AdapterSlot | None) -> HeadLora | None:
        """LoRA that the vocabulary kernels add to the logits for a slot; None if the slot leaves the head alone."""
        if slot is None or self.path not in slot.paths:
            return None
        pair = slot.pair(self.path)
        return HeadLora(pair.A, pair.B, slot.config.scale)


def _add_delta(gated: GatedLayer, x: torch.Tensor, y: torch.Tensor, *, copy: bool = False) -> torch.Tensor:
    call = gate.current()
    arguments = None if call is None else gated.lora_arguments(call)
    if arguments is None:
        return y
    *lora, dropout = arguments
    return lora_delta_(y.clone() if copy else y, x, *lora, dropout=dropout)


def decoder_prefix(model: PreTrainedModel) -> str:
    """Start of the names of what lies in a model's text decoder: a vision or audio tower beside it is left out."""
    path = path_of(model.get_decoder(), model)
    return f"{path}." if path else ""


def path_of(part: nn.Module, model: nn.Module) -> str:
    """Name of a part of a model; "" for the model itself, and for what is none of its parts."""
    return next((name for name, module in model.named_modules() if module is part), "")


def gate_linears(model: PreTrainedModel) -> dict[str, GatedLayer]:
    """Gate every linear of a model's decoder, by name, but the head; UnsupportedModelError for unknown kinds."""
    prefix = decoder_prefix(model)
    head = model.get_output_embeddings()
    layers: dict[str, GatedLayer] = {}
    for path, module in list(model.named_modules()):
        if module is head or not path.startswith(prefix):
            continue
        stream = len(layers)
        if type(module) is nn.Linear or type(module) is Conv1D:
            gated = (GatedLinear if type(module) is nn.Linear else GatedConv1D)(module, path=path, stream=stream)  # type: ignore[arg-type]
            parent, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(parent), leaf, gated)
            layers[path] = gated.gated
        elif type(module).__name__ in _QUANTISED:
            layer = GatedLayer(path, stream, module.in_features, module.out_features)  # type: ignore[arg-type]
            module.register_forward_hook(GatedOutput(layer))
            layers[path] = layer
        elif isinstance(module, (nn.Linear, Conv1D)) and not type(module).__name__.endswith(_ROUTER):
            raise UnsupportedModelError(
                f"{path}: expected nn.Linear, Conv1D or a linear of bitsandbytes, got {type(module).__name__}, whose "
                "forward is not known here"
            )
    if isinstance(head, nn.Linear):
        path = next(name for name, module in model.named_modules() if module is head)
        layers[path] = GatedHead(path, len(layers), head.in_features, head.out_features)
    return layers


def is_quantised(model: PreTrainedModel) -> bool:
    """Whether the model holds linears of bitsandbytes."""
    return any(type(module).__name__ in _QUANTISED for module in model.modules())


def holds_gates(model: nn.Module) -> bool:
    """Whether a HydraModel has taken this model already."""
    return any(
        isinstance(module, (GatedLinear, GatedConv1D))
        or any(isinstance(hook, GatedOutput) for hook in module._forward_hooks.values())
        for module in model.modules()
    )


def match_targets(layers: Mapping[str, GatedLayer], blocks_prefix: str, targets: str | Sequence[str]) -> list[str]:
    """Names of the linears that a slot adapts, matched as in PEFT; `all-linear`: every one of the blocks."""
    if targets == ALL_LINEAR:
        paths = [path for path in layers if path.startswith(blocks_prefix)]
        if not paths:
            raise ValueError(f"target_modules='all-linear': expected linears below {blocks_prefix!r}, got none")
        return paths
    paths = [path for path in layers if any(_matches(path, t) for t in targets)]
    missing = [t for t in targets if not any(_matches(path, t) for path in layers)]
    if missing:
        endings = sorted({path.rsplit(".", 1)[-1] for path in layers})
        raise ValueError(f"target_modules: expected name endings among {endings}, got {missing} which match nothing")
    return paths


def _matches(path: str, target: str) -> bool:
    return path == target or path.endswith("." + target)
