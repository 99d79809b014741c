"""`fuse_lora`: the LoRA layers of a PeftModel on this project's kernels, in place, and undone as easily.

    fusion = fuse_lora(peft_model)      # outputs and gradients as before, faster
    …                                   # train, save_pretrained, set_adapter, disable_adapter, merge: all of PEFT
    fusion.undo()

A layer keeps its parameters, their names and everything PEFT knows of it; only its forward is another one: base
product and low-rank delta in one op whose backward makes no copy of x, where PEFT runs half a dozen. Nothing is merged.
Beyond PEFT, `adapter_names` serves in training as well: one batch trains several adapters in one pass.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import Linear as PeftLinear, LoraLayer, LoraModel
from rlhf_kernels.lora import OFF, Dropout, Segments, lora_delta_, lora_linear
from torch import nn
from transformers.pytorch_utils import Conv1D

from rlhf_engine.integrations import Exchange

BASE_NAME = "__base__"
"""Name in `adapter_names` of a row that carries no adapter."""
_QUANTISED = ("Linear4bit", "Linear8bitLt")
"""PEFT's layers around bitsandbytes' linears, by name: the package is optional."""


class Fusion(Exchange):
    """Record of what `fuse_lora` did to a `model`. A context manager that undoes it.

    `fused` names the layers that run on our kernels; `left` those that run as PEFT's, with the reason.
    """

    def __init__(self, model: PeftModel, fused: dict[str, Any], left: dict[str, str]) -> None:
        """Fuse the layers in `fused`, and let the model take adapters by sample."""
        self.model, self.fused, self.left = model, tuple(fused), left
        self._changed: dict[str, Any] = {**fused, "the model": model.base_model}
        for stream, layer in enumerate(fused.values()):
            layer.dropout_stream = stream
        mixins = {name: _FusedLayer if name in fused else _FusedModel for name in self._changed}
        # the same objects, with the methods of the mixin before their own
        super().__init__((m, "__class__", _class_with(mixins[name], m.__class__)) for name, m in self._changed.items())

    def undo(self) -> None:
        """Give every layer its own forward back. Does nothing the second time.

        Raises:
            RuntimeError: something else has changed a layer's class or forward since; undo that first.
        """
        parts = zip(self._changed.items(), self._parts, strict=True)
        for (name, module), (_, _, ours, _) in parts if self.is_in_place else ():
            if type(module) is not ours or "forward" in module.__dict__:
                raise RuntimeError(
                    f"undo: expected {name} as fuse_lora made it, got a {type(module).__name__} that something else "
                    "has changed since; undo that first"
                )
        super().undo()


def fuse_lora(model: PeftModel) -> Fusion:
    """Run the LoRA linears of a PeftModel on `lora_linear`, in place.

    Served are linears on nn.Linear, Conv1D and bitsandbytes' linears, with plain LoRA. Others (DoRA and other variants,
    embeddings, convolutions, a bias of the adapter's own) stay PEFT's, with a warning. A layer also runs as PEFT's
    while hooks hang on its linears, as where weights are offloaded. Dropout masks come from torch's random state, and
    are not those of nn.Dropout.

    Args:
        model: a PeftModel with LoRA, not fused yet. It is changed in place.

    Returns:
        Names of the fused layers, and of those left to PEFT with the reason. Its `undo` restores the model.

    Raises:
        TypeError: a model other than a PeftModel with LoRA.
        ValueError: a model that is fused already.
    """
    if not isinstance(model, PeftModel) or not isinstance(model.base_model, LoraModel):
        raise TypeError(f"model: expected a PeftModel with LoRA adapters, got {type(model).__name__}")
    if isinstance(model.base_model, _FusedModel):
        raise ValueError("model: expected a PeftModel whose layers are PEFT's own, got one that is fused already")
    layers: dict[str, Any] = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    left = {name: reason for name, module in layers.items() if (reason := _refusal(module))}
    fused = {name: module for name, module in layers.items() if name not in left}
    if left:
        name, reason = next(iter(left.items()))
        warnings.warn(
            f"fuse_lora: {len(left)} of {len(layers)} LoRA layers stay as they are, such as {name}: {reason}",
            stacklevel=2,
        )
    return Fusion(model, fused, left)


def _new(mixin: Any, own: Any) -> Any:
    cls = _class_with(mixin, own)
    return cls.__new__(cls)


@functools.cache
def _class_with(mixin: Any, own: Any) -> Any:
    return type(f"Fused{own.__name__}", (mixin, own), {"__module__": own.__module__})


def _refusal(layer: LoraLayer) -> str | None:
    """Reason why a layer's forward cannot be replaced, or None if it can."""
    if "forward" in layer.__dict__:
        return "expected the forward of its class, got one of its own, which would not be asked"
    if type(layer) is not PeftLinear and type(layer).__name__ not in _QUANTISED:
        return f"expected LoRA on a linear, got {type(layer).__name__}"
    base = layer.get_base_layer()
    if type(layer) is PeftLinear and type(base) not in (nn.Linear, Conv1D):
        return f"expected a base layer nn.Linear or Conv1D, got {type(base).__name__}"
    return next((reason for name in layer.lora_A if (reason := _refused_adapter(layer, name))), None)


def _refused_adapter(layer: LoraLayer, name: str) -> str | None:
    if name in layer.lora_variant:
        return f"expected plain LoRA, got {type(layer.lora_variant[name]).__name__} in adapter {name!r}"
    if layer.lora_bias[name]:
        return f"expected lora_bias=False, got True in adapter {name!r}"
    if getattr(layer.lora_dropout[name], "p", 0.0) >= 1:
        return f"expected lora_dropout below 1, got {layer.lora_dropout[name].p} in adapter {name!r}"
    return None


class _Fused(nn.Module):
    """Class of a module whose own class cannot be imported: a copy or a pickle makes it again from its two parts."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        return (_new, type(self).__bases__, *reduced[2:])


class _FusedLayer(_Fused):
    """Stands before one of PEFT's classes; a layer's forward on `lora_linear` and `lora_delta_`."""

    dropout_stream: int
    named = False
    """Whether the last forward in training was one by sample."""

    def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._check_recomputed(kwargs.get("adapter_names") is not None)
        if self._is_peft_s(x):
            return super().forward(x, *args, **kwargs)  # type: ignore[misc, no-any-return]  # PEFT's class
        self._check_forward_args(x, *args, **kwargs)
        names: Sequence[str] | None = kwargs.pop("adapter_names", None)
        kwargs.pop("alora_offsets", None)  # of variants, which stay PEFT's
        if self.disable_adapters or (names is None and self.merged):
            if self.disable_adapters and self.merged:
                self.unmerge()
            return self.base_layer(x, *args, **kwargs)
        if names is not None:
            return self._add(x, [_runs(x, names, self.lora_A)], args, kwargs)
        n_rows = x.numel() // x.shape[-1]
        active = [name for name in self.active_adapters if name in self.lora_A]
        return self._add(x, [([name], Segments.single(n_rows, 0)) for name in active], args, kwargs)

    def _check_recomputed(self, named: bool) -> None:
        """Checkpointed activations are computed again without the names, under the active adapter."""
        if self.named and not named and torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "adapter_names: expected no checkpointed activations in training, whose second forward has no names"
            )
        if self.training and self.named != named:
            self.named = named

    def _is_peft_s(self: Any, x: torch.Tensor) -> bool:
        """Whether a call is one that PEFT's own forward has to serve."""
        adapters = (*self.lora_A.values(), *self.lora_B.values())
        wrapped = any(type(part) is not nn.Linear for part in adapters)  # their weights are there in a call alone
        return (
            wrapped
            or x.dim() < 2
            or x.numel() == 0
            or any(_carries_more(part) for part in (self.base_layer, *adapters))
            or any(isinstance(scale, torch.Tensor) and scale.requires_grad for scale in self.scaling.values())
            or _is_transformed()
        )

    def _add(
        self: Any, x: torch.Tensor, passes: list[tuple[list[str], Segments]], args: Any, kwargs: Any
    ) -> torch.Tensor:
        """The base's output plus every pass, each of which has at most one adapter per row."""
        base, y = self.base_layer, None
        if type(base) is nn.Linear and passes and not args and not kwargs:
            *lora, dropout = self._lora(x, *passes[0])
            y = lora_linear(x, base.weight, base.bias, *lora, dropout=dropout)
            passes = passes[1:]
        if y is None:
            y = base(x, *args, **kwargs)
        for names, segments in passes:
            *lora, dropout = self._lora(x, names, segments)
            # a copy where gradients flow: autograd refuses to change what a custom Function returned
            y = lora_delta_(y.clone() if torch.is_grad_enabled() else y, x, *lora, dropout=dropout)
        return y

    def _lora(self: Any, x: torch.Tensor, names: list[str], segments: Segments) -> tuple[Any, ...]:
        """A, B, scales, segments and dropout of a call."""
        for name in names:
            reason = _refused_adapter(self, name)
            if reason is not None:  # an adapter that has come since
                raise ValueError(f"adapter {name!r} of a fused layer: {reason}; undo the fusion to use it")
        drops = [self.lora_dropout[name] for name in names]
        p = tuple(drop.p if isinstance(drop, nn.Dropout) and drop.training else 0.0 for drop in drops)
        dropout = None
        if any(p):
            # from the random state that gradient checkpointing restores: recomputed masks are the same
            seed = int(torch.randint(2**62, ()))
            rows = torch.arange(x.numel() // x.shape[-1], device=x.device)
            dropout = Dropout(p=p, seed=seed, row_ids=rows, stream=self.dropout_stream)
        return (
            [self.lora_A[name].weight for name in names],
            [self.lora_B[name].weight for name in names],
            [self.scaling[name] for name in names],
            segments,
            dropout,
        )


def _is_transformed() -> bool:
    """Whether torch.func is at work, which our ops have no rules for."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def _carries_more(module: nn.Module) -> bool:
    """Whether something hangs on a module that only a call of it brings about: a hook, or a forward of its own."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks) or "forward" in module.__dict__


def _runs(x: torch.Tensor, names: Sequence[str], known: Any) -> tuple[list[str], Segments]:
    """The adapters of a batch with one name per sample, and which rows of x carry which."""
    present = [name for name in dict.fromkeys(names) if name != BASE_NAME and name in known]
    rows = x.numel() // x.shape[-1] // max(1, len(names))
    slots = [present.index(name) if name in present else OFF for name in names]
    firsts = [i for i, slot in enumerate(slots) if i == 0 or slot != slots[i - 1]]
    starts = tuple(i * rows for i in firsts)
    return present, Segments(
        starts=starts, ends=(*starts[1:], len(names) * rows), slots=tuple(slots[i] for i in firsts)
    )


class _FusedModel(_Fused):
    """Stands before LoraModel: adapters by sample also in training mode."""

    @contextmanager
    def _enable_peft_forward_hooks(self: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        named = kwargs.get("adapter_names") is not None
        training = self.training and named
        if training and any(getattr(module, "gradient_checkpointing", False) for module in self.modules()):
            raise ValueError(
                "adapter_names: expected no gradient checkpointing in training, whose second forward does not know them"
            )
        before = {module: set(module._forward_pre_hooks) for module in self.modules()} if named else {}
        if training:  # what PEFT refuses is this flag of the outermost module; the layers keep theirs
            self.training = False
        try:
            with super()._enable_peft_forward_hooks(*args, **kwargs):  # type: ignore[misc]
                self.training = self.training or training
                yield
        except BaseException:
            for module, hooks in before.items():  # PEFT would leave its own behind
                for key in set(module._forward_pre_hooks) - hooks:
                    del module._forward_pre_hooks[key]
                    module._forward_pre_hooks_with_kwargs.pop(key, None)
            raise
        finally:
            self.training = self.training or training
