"""A linear layer, y = x Wᵀ + b, whose rows do not depend on each other.

    y_n = W x_n + b;   dx_n = Wᵀ dy_n;   dW = Σ_n dy_n x_nᵀ;   db = Σ_n dy_n

Symbols: x [.., K] with N rows (all leading dims flattened), weight [M, K], bias [M], y [.., M], one floating dtype.
Products accumulate in fp32 over the full depth and are rounded once, bias included. `cpu` adds every element of the
output in one order, whatever the number of rows, their neighbours and the number of threads; `reference` is
`F.linear`, whose order is torch's affair. Nothing is computed for what needs no gradient: a frozen weight has no dW.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_kernels import eager, registry
from rlhf_kernels.linear import native, reference

__all__ = ["linear", "product_for"]

registry.register("linear", "reference", reference)
# where nothing was measured a library's product is the safer guess
registry.register("linear", "cpu", native, when_measured=True)


@eager.custom_op("rlhf_kernels::linear")
def _op(x: Tensor, weight: Tensor, bias: Tensor | None, backend: str) -> Tensor:
    return registry.implementation("linear", backend).forward(x, weight, bias)


@_op.register_fake
def _(x, weight, bias, backend):  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@eager.custom_op("rlhf_kernels::linear_backward")
def _backward_op(
    dy: Tensor, x: Tensor | None, weight: Tensor, need_x: bool, need_weight: bool, need_bias: bool, backend: str
) -> list[Tensor]:
    """x is read for dW alone."""
    implementation = registry.implementation("linear", backend)
    grads = []
    if need_x:
        grads.append(implementation.input_gradient(dy, weight))
    if need_weight:
        grads.append(implementation.weight_gradient(dy, x))
    if need_bias:
        grads.append(dy.reshape(-1, dy.shape[-1]).sum(0))
    return grads


@_backward_op.register_fake
def _(dy, x, weight, need_x, need_weight, need_bias, backend):  # type: ignore[no-untyped-def]
    dx = (*dy.shape[:-1], weight.shape[1])
    shapes = [(dx, need_x), (weight.shape, need_weight), (weight.shape[:1], need_bias)]
    return [dy.new_empty(shape) for shape, need in shapes if need]


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, weight, _, backend = inputs
    ctx.save_for_backward(x if weight.requires_grad else None, weight)
    ctx.backend = backend


def _backward(ctx, dy):  # type: ignore[no-untyped-def]
    x, weight = ctx.saved_tensors
    needs = ctx.needs_input_grad[:3]
    grads = iter(_backward_op(dy, x, weight, *needs, ctx.backend))
    return (*[next(grads) if need else None for need in needs], None)


_op.register_autograd(_backward, setup_context=_setup)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    """The linear layer of the module's docstring.

    Args:
        x: [.., K].
        weight: [M, K].
        bias: [M], or None.
        backend: `auto`, `cpu` or `reference`.

    Returns:
        y [.., M] of x's dtype.

    Raises:
        TypeError: a tensor is not of x's floating dtype.
        ValueError: shapes or devices do not fit.
    """
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        half = torch.get_autocast_dtype(x.device.type)  # what autocast does to F.linear, where autograd sees it
        x, weight, bias = x.to(half), weight.to(half), None if bias is None else bias.to(half)
    check(x, weight, bias)
    chosen = registry.resolve("linear", backend, x, weight.shape)
    return F.linear(x, weight, bias) if chosen == "reference" else _op(x, weight, bias, chosen)


def product_for(x: Tensor, weight: Tensor) -> Any:
    """The implementation that `auto` takes for such tensors: `forward`, `input_gradient`, `weight_gradient`."""
    return registry.implementation("linear", registry.resolve("linear", "auto", x, weight.shape))


def check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise unless x, weight and bias are those of one linear layer."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"x: expected a floating tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    if x.dim() < 1:
        raise ValueError(f"x: expected shape [.., features], got {tuple(x.shape)}")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"weight: expected shape [M, {x.shape[-1]}], got {tuple(weight.shape)}")
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"bias: expected shape [{weight.shape[0]}], got {tuple(bias.shape)}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and (tensor.dtype != x.dtype or tensor.device != x.device):
            raise TypeError(f"{name}: expected {x.dtype} on {x.device} like x, got {tensor.dtype} on {tensor.device}")
