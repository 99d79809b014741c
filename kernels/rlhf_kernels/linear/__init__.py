"""A linear layer, y = x Wᵀ + b, whose rows do not depend on each other.

    y_n = W x_n + b;   dx_n = Wᵀ dy_n;   dW = Σ_n dy_n x_nᵀ;   db = Σ_n dy_n

Symbols: x [.., K] with N rows (all leading dims flattened), weight [M, K], bias [M], y [.., M], one floating dtype.
Products accumulate in fp32 over the full depth and are rounded once, bias included. `cpu` and `triton` add every
element of the output in one order, whatever the number of rows, their neighbours and the number of threads;
`reference` is `F.linear`, whose order is torch's affair. Nothing is computed for what needs no gradient: a frozen
weight has no dW.

Backends: triton, cpu, reference. `auto` takes `triton` in exact mode only, `cpu` there and where it was measured.
"""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from rlhf_kernels.linear import native, reference
from rlhf_kernels.runtime import autocast, eager, registry, triton_support

__all__ = ["linear", "product_for"]

registry.register("linear", "reference", reference)
# where nothing was measured a library's product is the safer guess
registry.register("linear", "cpu", native, when_measured=True)
registry.register(
    "linear", "triton", registry.Lazy("rlhf_kernels.linear.triton", triton_support.unsupported), when_measured=True
)


@eager.custom_op("rlhf_kernels::linear", "x: D[..., K], weight: D[M, K], bias: D[M]")
def _op(x: Tensor, weight: Tensor, bias: Tensor | None, backend: str) -> Tensor:
    return registry.implementation("linear", backend).forward(x, weight, bias)


@_op.register_fake
def _(x, weight, bias, backend):  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _check_backward(given: Any) -> None:
    if given.need_weight and given.x is None:
        raise TypeError("x: expected a tensor with need_weight, got None")


@eager.custom_op("rlhf_kernels::linear_backward", "dy: D[..., M], x: D[..., K], weight: D[M, K]", also=_check_backward)
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
        grads.append(dy.reshape(math.prod(dy.shape[:-1]), dy.shape[-1]).sum(0))
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
    """Linear layer whose rows do not depend on each other, with the equations of the module's docstring.

    Differentiable in x, weight and bias. Under autocast all three are converted first, as for `F.linear`.

    Args:
        x: [.., K], floating.
        weight: [M, K], of x's dtype and device.
        bias: [M], of x's dtype and device. None: no bias.
        backend: `auto` or the name of a backend, see `rlhf_kernels.runtime.registry`.

    Returns:
        y [.., M] of x's dtype; under autocast of autocast's dtype.

    Raises:
        TypeError: x is no floating tensor, or another tensor is not of its dtype and device.
        ValueError: shapes do not fit, or backend is unknown.
        BackendUnavailableError: the named backend cannot serve the call.
    """
    for name, tensor in (("x", x), ("weight", weight)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    x, weight, bias = autocast.as_for_linear(x, weight, bias)
    check(x, weight, bias)
    chosen = _resolve(x, weight, backend)
    return F.linear(x, weight, bias) if chosen == "reference" else _op(x, weight, bias, chosen)


def product_for(x: Tensor, weight: Tensor) -> Any:
    """The implementation that `auto` takes for such tensors: `forward`, `input_gradient`, `weight_gradient`."""
    return registry.implementation("linear", _resolve(x, weight, "auto"))


def _resolve(x: Tensor, weight: Tensor, backend: str) -> str:
    """The backend of a call; some process-wide defaults leave linears to torch."""
    if backend == "auto" and (registry.leaves_to_torch("linear") or eager.is_transformed()):
        return "reference"  # torch.func has no rules for custom ops
    return registry.resolve("linear", backend, x, weight.shape)


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
