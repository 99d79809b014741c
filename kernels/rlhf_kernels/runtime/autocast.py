"""The ops under `torch.autocast`: linears follow it as `F.linear` does, and nothing inside an op does.

Inside an op autocast would round products that are meant to be fp32.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
from torch import Tensor

_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "maia", "xla", "ipu", "privateuseone")
_AVAILABLE = frozenset(device for device in _DEVICES if torch.amp.is_autocast_available(device))
"""Looked up once: torch.compile of torch 2.11 does not trace the call."""


def is_on(x: Tensor) -> bool:
    """Whether autocast is on for x's device; False for devices that have none, such as `meta`."""
    device = x.device.type
    return device in _AVAILABLE and torch.is_autocast_enabled(device)


def off(x: Tensor) -> AbstractContextManager[object]:
    """Autocast off for x's device, within a `with` block."""
    return torch.autocast(x.device.type, enabled=False) if is_on(x) else contextlib.nullcontext()


def converted(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Operands of a product as autocast hands them on, by conversions that autograd sees; the first one decides."""
    if not is_on(tensors[0]) or tensors[0].dtype == torch.float64:
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(tensors[0].device.type)) for x in tensors)


def as_for_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The arguments of a linear as autocast hands them to `F.linear`, by conversions that autograd sees."""
    x, weight, *rest = converted(x, weight, *([] if bias is None else [bias]))
    return x, weight, rest[0] if rest else None
