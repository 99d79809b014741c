"""Operations of a transformer block between its matmuls: RMS norm, rotary embedding, gated product, activation.

`rms_norm`, with H the last dimension and the mean over it (Zhang and Sennrich, "Root mean square layer
normalization", 2019):

    rstd = (mean x² + eps)^−½    n = x rstd    y = weight · n
    dx = rstd (g − n mean(g n)) with g = weight · dy    dweight = Σ_rows dy · n

With `plus_one` 1 + weight stands for weight (Gemma), and y is rounded once.

`rotary`, for a head whose halves are (a, b) and angles whose halves are (c, c'), (s, s') (Su et al., "RoFormer",
2021, in the layout of Llama):

    (a, b) → (a c − b s, b c' + a s')    (da, db) → (da c + db s', db c' − da s)

`swiglu` (Shazeer, "GLU variants improve transformer", 2020), with σ the logistic function:

    y = up · gate σ(gate)    dup = dy gate σ    dgate = dy up σ (1 + gate (1 − σ))

`activation` (Hendrycks and Gimpel, "Gaussian error linear units", 2016), of four kinds:

    y = x s    dx = dy (s + x s')
    silu: s = σ(x)    quick_gelu: s = σ(1.702 x)    gelu: s = (1 + erf(x / √2)) / 2
    gelu_tanh: s = σ(2 √(2/π) (x + 0.044715 x³)) = (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2

`reference` is the very sequence of torch ops that transformers' Llama runs, and `cpu` and `triton` round where it does.
`rotary` has its bits. The sum of squares and the logistic function have an order and a formula of their own in each,
in `cpu` those of `decode_step`: torch's depend on where a number lies in memory. An activation is float32 inside and
rounds once. Gradients round once, the reference's at every step. The backward pass keeps x and rstd, the angles, gate
and up, x of an activation; the reference keeps what autograd does.

Symbols: x [..., H], weight [H]; q [B, heads, T, D], k [B, kv_heads, T, D], cos and sin [1 or B, T, D]; gate, up of
any one shape; x of an activation of any shape. Dtypes: float32 and bfloat16 (cpu), float16 too (triton), any floating
point (reference); all tensors of a call have one. Gradients for x, weight, q, k, gate and up, none for the angles;
first derivatives only.
Determinism: but for `reference`, the bits of a row of a norm, of a head and of an element elsewhere depend on it alone.
torch adds dweight up.
Backends: triton (of `activation` `auto` takes it in exact mode only), cpu, reference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlhf_kernels.llama_ops import native, reference
from rlhf_kernels.runtime import registry, triton_support
from rlhf_kernels.runtime.eager import custom_op

__all__ = ["activation", "rms_norm", "rotary", "swiglu"]

for _op in ("rms_norm", "rotary", "swiglu", "activation"):
    registry.register(_op, "reference", reference)
    registry.register(_op, "cpu", native)
    _triton = registry.Lazy("rlhf_kernels.llama_ops.triton", triton_support.unsupported)
    registry.register(_op, "triton", _triton, when_measured=_op == "activation")


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, plus_one: bool = False, backend: str = "auto") -> Tensor:
    """RMS norm over the last dimension (Zhang and Sennrich 2019), with the equations of the module's docstring.

    Differentiable in x and weight.

    Args:
        x: [..., H], floating; H ≥ 1.
        weight: [H], of x's dtype and device.
        eps: number ≥ 0 that is added to the mean square.
        plus_one: whether the factors are 1 + weight, as in Gemma.
        backend: `auto` or the name of a backend, see `rlhf_kernels.runtime.registry`.

    Returns:
        y of x's shape and dtype.

    Raises:
        TypeError: x or weight is no floating tensor.
        ValueError: a shape, dtype or device does not fit, eps is negative or NaN, or backend is unknown.
        BackendUnavailableError: the named backend cannot serve the call.
    """
    _check("x", x, x)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x: expected a last dimension of at least 1, got shape {tuple(x.shape)}")
    _check("weight", weight, x, x.shape[-1:])
    if not eps >= 0.0:
        raise ValueError(f"eps: expected a number of at least 0, got {eps}")
    chosen = registry.resolve("rms_norm", backend, x, (x.shape[-1],))
    if chosen == "reference":
        return reference.rms_norm(x, weight, eps, plus_one)
    y: Tensor = _rms_norm(x, weight, float(eps), bool(plus_one), chosen)[0]
    return y


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Rotary embedding of queries and keys (Su et al. 2021), in the layout of Llama; equations: the module's docstring.

    Differentiable in q and k. All tensors have one floating dtype and one device.

    Args:
        q: [B, heads, T, D] queries; D is even.
        k: [B, kv_heads, T, D] keys.
        cos: [1 or B, T, D], cosines as the model's rotary embedding returns them, without a gradient.
        sin: sines in the shape of cos, without a gradient.
        backend: `auto` or the name of a backend, see `rlhf_kernels.runtime.registry`.

    Returns:
        Turned q and k, of the shapes and dtype of the inputs. All backends except `reference` lay them out
            in memory as [B, T, heads, D].

    Raises:
        TypeError: an argument is no floating tensor.
        ValueError: a shape, dtype or device does not fit, or backend is unknown.
        ValueError: cos or sin requires grad while gradients are enabled.
        BackendUnavailableError: the named backend cannot serve the call.
    """
    for name, x in (("q", q), ("k", k)):
        _check(name, x, q)
        if x.dim() != 4 or x.shape[3] == 0 or x.shape[3] % 2:
            raise ValueError(f"{name}: expected shape [B, heads, T, D] with an even D, got {tuple(x.shape)}")
    if k.shape[:1] + k.shape[2:] != q.shape[:1] + q.shape[2:]:
        raise ValueError(f"k: expected the B, T, D of q, {tuple(q.shape)}, got {tuple(k.shape)}")
    for name, x in (("cos", cos), ("sin", sin)):
        _check(name, x, q)
        if x.dim() != 3 or x.shape[0] not in (1, q.shape[0]) or x.shape[1:] != q.shape[2:]:
            raise ValueError(
                f"{name}: expected shape [1 or {q.shape[0]}, {q.shape[2]}, {q.shape[3]}], got {tuple(x.shape)}"
            )
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name}: expected angles without a gradient, got a tensor that requires one")
    if sin.shape != cos.shape:
        raise ValueError(f"sin: expected the shape of cos, {tuple(cos.shape)}, got {tuple(sin.shape)}")
    chosen = registry.resolve("rotary", backend, q, (q.shape[-1],))
    if chosen == "reference":
        return reference.rotary(q, k, cos, sin)
    q_turned, k_turned = _rotary(q, k, cos, sin, chosen)
    return q_turned, k_turned


def swiglu(gate: Tensor, up: Tensor, *, backend: str = "auto") -> Tensor:
    """Gated product silu(gate) · up (Shazeer 2020), with the equations of the module's docstring.

    Differentiable in gate and up.

    Args:
        gate: floating, of any shape.
        up: of gate's shape, dtype and device.
        backend: `auto` or the name of a backend, see `rlhf_kernels.runtime.registry`.

    Returns:
        y of gate's shape and dtype.

    Raises:
        TypeError: an argument is no floating tensor.
        ValueError: shape, dtype or device of up is not that of gate, or backend is unknown.
        BackendUnavailableError: the named backend cannot serve the call.
    """
    _check("gate", gate, gate)
    _check("up", up, gate, gate.shape)
    chosen = registry.resolve("swiglu", backend, gate, gate.shape[-1:] or None)
    if chosen == "reference":
        return reference.swiglu(gate, up)
    y: Tensor = _swiglu(gate, up, chosen)
    return y


def activation(x: Tensor, kind: str, *, backend: str = "auto") -> Tensor:
    """Activation of every element (Hendrycks and Gimpel 2016), with the equations of the module's docstring.

    Differentiable in x.

    Args:
        x: floating, of any shape.
        kind: "silu", "gelu", "gelu_tanh" (GELU's approximation by a tanh) or "quick_gelu" (by a logistic function).
        backend: `auto` or the name of a backend, see `rlhf_kernels.runtime.registry`.

    Returns:
        y of x's shape and dtype.

    Raises:
        TypeError: x is no floating tensor.
        ValueError: kind or backend is unknown.
        BackendUnavailableError: the named backend cannot serve the call.
    """
    _check("x", x, x)
    if kind not in native.KINDS:
        raise ValueError(f"kind: expected one of {native.KINDS}, got {kind!r}")
    chosen = registry.resolve("activation", backend, x, x.shape[-1:] or None)
    if chosen == "reference":
        return reference.activation(x, kind)
    y: Tensor = _activation(x, kind, chosen)
    return y


def _check(name: str, x: Tensor, like: Tensor, shape: torch.Size | None = None) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"{name}: expected a floating point dtype, got {x.dtype}")
    if x.dtype != like.dtype or x.device != like.device:
        raise ValueError(f"{name}: expected {like.dtype} on {like.device}, got {x.dtype} on {x.device}")
    if shape is not None and x.shape != shape:
        raise ValueError(f"{name}: expected shape {tuple(shape)}, got {tuple(x.shape)}")


# ---- the ops of the backends that have kernels -----------------------------------------------------------------------


@custom_op("rlhf_kernels::rms_norm", "x: D[..., H], weight: D[H]")
def _rms_norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool, backend: str) -> tuple[Tensor, Tensor]:
    return registry.kernels("rms_norm", backend).rms_norm(x, weight, eps, plus_one)  # type: ignore[no-any-return]


@_rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float, plus_one: bool, backend: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def _rms_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, *ctx.options = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, output[1])


def _rms_norm_backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, rstd = ctx.saved_tensors
    dx = _rms_norm_gradient(dy, x, weight, rstd, *ctx.options) if ctx.needs_input_grad[0] else None
    dweight = None
    if ctx.needs_input_grad[1]:
        products = dy.float() * (x.float() * rstd)
        dweight = products.reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
    return dx, dweight, None, None, None


_rms_norm.register_autograd(_rms_norm_backward, setup_context=_rms_norm_setup)


@custom_op(
    "rlhf_kernels::rms_norm_gradient",
    "dy: D[..., H], x: D[..., H], weight: D[H], rstd: float32[..., 1]",
)
def _rms_norm_gradient(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, plus_one: bool, backend: str) -> Tensor:
    return registry.kernels("rms_norm", backend).rms_norm_gradient(dy, x, weight, rstd, plus_one)  # type: ignore[no-any-return]


@_rms_norm_gradient.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, plus_one: bool, backend: str) -> Tensor:
    return x.new_empty(x.shape)


@custom_op(
    "rlhf_kernels::rotary",
    "q: D[B, heads, T, d], k: D[B, kv_heads, T, d], cos: D[1, T, d]|[B, T, d], sin: D[1, T, d]|[B, T, d]",
)
def _rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    rotate = registry.kernels("rotary", backend).rotate
    return rotate(q, cos, sin), rotate(k, cos, sin)


@_rotary.register_fake
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    return native.turned_like(q), native.turned_like(k)


def _rotary_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, cos, sin, ctx.backend = inputs
    ctx.save_for_backward(cos, sin)


def _rotary_backward(ctx: Any, d_q: Tensor, d_k: Tensor) -> tuple[Tensor | None, ...]:
    return (*_rotary_gradient(d_q, d_k, *ctx.saved_tensors, ctx.backend), None, None, None)


_rotary.register_autograd(_rotary_backward, setup_context=_rotary_setup)


@custom_op(
    "rlhf_kernels::rotary_gradient",
    "d_q: D[B, heads, T, d], d_k: D[B, kv_heads, T, d], cos: D[1, T, d]|[B, T, d], sin: D[1, T, d]|[B, T, d]",
)
def _rotary_gradient(d_q: Tensor, d_k: Tensor, cos: Tensor, sin: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    rotate = registry.kernels("rotary", backend).rotate
    return rotate(d_q, cos, sin, back=True), rotate(d_k, cos, sin, back=True)


@_rotary_gradient.register_fake
def _(d_q: Tensor, d_k: Tensor, cos: Tensor, sin: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    return native.turned_like(d_q), native.turned_like(d_k)


@custom_op("rlhf_kernels::swiglu", "gate: D[...], up: D[...]")
def _swiglu(gate: Tensor, up: Tensor, backend: str) -> Tensor:
    return registry.kernels("swiglu", backend).swiglu(gate, up)  # type: ignore[no-any-return]


@_swiglu.register_fake
def _(gate: Tensor, up: Tensor, backend: str) -> Tensor:
    return gate.new_empty(gate.shape)


def _swiglu_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, ctx.backend = inputs
    ctx.save_for_backward(gate, up)


def _swiglu_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return (*_swiglu_gradient(dy, *ctx.saved_tensors, ctx.backend), None)


_swiglu.register_autograd(_swiglu_backward, setup_context=_swiglu_setup)


@custom_op("rlhf_kernels::swiglu_gradient", "dy: D[...], gate: D[...], up: D[...]")
def _swiglu_gradient(dy: Tensor, gate: Tensor, up: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    return registry.kernels("swiglu", backend).swiglu_gradient(dy, gate, up)  # type: ignore[no-any-return]


@_swiglu_gradient.register_fake
def _(dy: Tensor, gate: Tensor, up: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


@custom_op("rlhf_kernels::activation", "x: D[...]")
def _activation(x: Tensor, kind: str, backend: str) -> Tensor:
    return registry.kernels("activation", backend).activation(x, kind)  # type: ignore[no-any-return]


@_activation.register_fake
def _(x: Tensor, kind: str, backend: str) -> Tensor:
    return x.new_empty(x.shape)


def _activation_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *ctx.options = inputs
    ctx.save_for_backward(x)


def _activation_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return _activation_gradient(dy, *ctx.saved_tensors, *ctx.options), None, None


_activation.register_autograd(_activation_backward, setup_context=_activation_setup)


@custom_op("rlhf_kernels::activation_gradient", "dy: D[...], x: D[...]")
def _activation_gradient(dy: Tensor, x: Tensor, kind: str, backend: str) -> Tensor:
    return registry.kernels("activation", backend).activation_gradient(dy, x, kind)  # type: ignore[no-any-return]


@_activation_gradient.register_fake
def _(dy: Tensor, x: Tensor, kind: str, backend: str) -> Tensor:
    return x.new_empty(x.shape)
