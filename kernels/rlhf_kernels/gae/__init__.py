"""Generalised advantage estimation, and whitening of advantages or rewards.

`gae` (Schulman et al., "High-dimensional continuous control using generalized advantage estimation", 2016).
Masked positions are not part of the trajectory: t+ and t− are the next and the previous unmasked position of
the row. V after the last one is `bootstrap` (0 if None), and A after it is 0. At unmasked t

    δ_t = r_t + γ V_t+ − V_t        A_t = δ_t + γ λ A_t+        ret_t = A_t + V_t

A is linear in r, V and bootstrap, and its backward is the scan in the other direction: with g_t the sum of
the gradients of A_t and ret_t, and G before the first position 0,

    G_t = g_t + γ λ G_t−    dr_t = G_t    dV_t = γ G_t− − G_t + dret_t    dbootstrap = γ G of the last one

`whiten`, over the n unmasked elements of x, with the unbiased variance (divided by c = max(n − 1, 1), as in
TRL):

    μ = Σ x / n    σ² = Σ (x − μ)² / c    s = (σ² + eps)^−½    y = (x − μ) s    (+ μ if not shift_mean)
    dx = s (g − Σg / n) − s³ (x − μ) Σ g (x − μ) / c    (+ Σg / n if not shift_mean)

With `moments` = (n, Σ x, Σ x²), perhaps summed over ranks, σ² = max(Σ x² − (Σ x)² / n, 0) / c; they are
constants then, and dx = s g.

Symbols: B sequences, T time; reward, value, mask, advantage, ret [B, T]; bootstrap [B]; x, y, mask of any one
shape. Dtypes: any floating point in; gae accumulates and returns float32, or float64 if an input is float64;
whiten computes in float64, rounds once, and returns float32, or float64 for float64. Gradients come back in
the inputs' own dtypes. Masked outputs and gradients are exactly 0, and masked inputs may hold anything, NaN
included. Determinism: same bits for the same inputs, for any number of threads; `gae` has the same bits on
cpu and reference. Backends: triton (float32 only), cpu, reference, and cuda for `gae`. First derivatives only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from rlhf_kernels.gae import native, reference
from rlhf_kernels.runtime import cuda_support, registry, signature, triton_support
from rlhf_kernels.runtime.eager import custom_op, eager

for _op in ("gae", "whiten"):
    registry.register(_op, "reference", reference)
    registry.register(_op, "cpu", native)
    registry.register(_op, "triton", registry.Lazy("rlhf_kernels.gae.triton", triton_support.unsupported))
registry.register("gae", "cuda", registry.Lazy("rlhf_kernels.gae.cuda", cuda_support.unsupported))


class GaeOutputs(NamedTuple):
    """Result of `gae`; float32 or float64, 0 at masked positions."""

    advantage: torch.Tensor
    """[B, T], A of the module's docstring"""
    ret: torch.Tensor
    """[B, T], the return A + V"""


def gae(
    reward: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    *,
    gamma: float,
    lam: float,
    bootstrap: torch.Tensor | None = None,
    backend: str = "auto",
) -> GaeOutputs:
    """Generalised advantage estimation (Schulman et al. 2016), with the equations of the module's docstring.

    Differentiable in reward, value and bootstrap.

    Args:
        reward: [B, T], floating; r of each position. Masked positions may hold anything.
        value: [B, T], floating, on reward's device; V of each position. Masked positions may hold anything.
        mask: [B, T], bool or numbers, on reward's device; 0 where a position is not part of the trajectory.
        gamma: discount γ per position, in [0, 1].
        lam: λ, in [0, 1]: 0 gives one-step errors, 1 the discounted return minus the value.
        bootstrap: [B], floating; value of the state after each row's last unmasked position. None: 0.
        backend: `auto` or the name of a backend, see `rlhf_kernels.runtime.registry`.

    Returns:
        `GaeOutputs` with advantage and ret, both [B, T]: float64 if an input is float64, else float32.

    Raises:
        TypeError: reward, value or bootstrap is no floating tensor, or mask is no tensor.
        ValueError: a shape or device does not fit, gamma or lam is outside [0, 1], or backend is unknown.
        BackendUnavailableError: the named backend cannot serve the call.
    """
    _check_floating("reward", reward)
    if reward.dim() != 2:
        raise ValueError(f"reward: expected shape [B, T], got {tuple(reward.shape)}")
    _check_floating("value", value)
    _check_like("value", value, reward.shape, reward.device)
    _check_like("mask", mask, reward.shape, reward.device)
    for name, knob in (("gamma", gamma), ("lam", lam)):
        if not 0.0 <= knob <= 1.0:
            raise ValueError(f"{name}: expected a number in [0, 1], got {knob}")
    inputs = [reward, value]
    if bootstrap is not None:
        _check_floating("bootstrap", bootstrap)
        _check_like("bootstrap", bootstrap, reward.shape[:1], reward.device)
        inputs.append(bootstrap)
    dtype = _accumulate_dtype(*inputs)
    reward, value = reward.to(dtype), value.to(dtype)
    bootstrap = None if bootstrap is None else bootstrap.to(dtype)
    backend = registry.resolve("gae", backend, reward)
    mask = mask if mask.dtype is torch.bool else mask != 0
    return GaeOutputs(*_gae(reward, value, mask, bootstrap, float(gamma), float(lam), backend))


def masked_moments(x: torch.Tensor, mask: torch.Tensor, *, backend: str = "auto") -> torch.Tensor:
    """Number, sum and sum of squares of the unmasked elements, for `whiten`; sums over ranks may be taken first.

    Args:
        x: floating, of any shape. Masked elements may hold anything.
        mask: x's shape and device, bool or numbers; 0 where an element does not count.
        backend: `auto` or the name of a backend, see `rlhf_kernels.runtime.registry`.

    Returns:
        (n, Σ x, Σ x²), float64 [3] on x's device, without a gradient.

    Raises:
        TypeError: x is no floating tensor, or mask is no tensor.
        ValueError: mask is not of x's shape and device, or backend is unknown.
        BackendUnavailableError: the named backend cannot serve the call.
    """
    _check_floating("x", x)
    _check_like("mask", mask, x.shape, x.device)
    x = x.detach().to(_accumulate_dtype(x))
    return _masked_moments(x, mask != 0, registry.resolve("whiten", backend, x))


def whiten(
    x: torch.Tensor,
    mask: torch.Tensor,
    *,
    shift_mean: bool = True,
    moments: torch.Tensor | None = None,
    eps: float = 1e-8,
    backend: str = "auto",
) -> torch.Tensor:
    """Whitening: scales x to mean 0 and unbiased variance 1 over its unmasked elements; differentiable in x.

    The equations stand in the module's docstring.

    Args:
        x: floating, of any shape. Masked elements may hold anything.
        mask: x's shape and device, bool or numbers; 0 where an element does not count.
        shift_mean: False scales and keeps the mean.
        moments: [3], floating, from `masked_moments`; constants. None: those of x, through which the gradient passes.
        eps: number ≥ 0 that is added to the variance.
        backend: `auto` or the name of a backend, see `rlhf_kernels.runtime.registry`.

    Returns:
        y of x's shape, 0 at masked elements: float64 if x is float64, else float32.

    Raises:
        TypeError: x or moments is no floating tensor, or mask is no tensor.
        ValueError: a shape or device does not fit, eps is negative or NaN, or backend is unknown.
        BackendUnavailableError: the named backend cannot serve the call.
    """
    _check_floating("x", x)
    _check_like("mask", mask, x.shape, x.device)
    if not eps >= 0.0:
        raise ValueError(f"eps: expected a number of at least 0, got {eps}")
    if moments is not None:
        _check_floating("moments", moments)
        _check_like("moments", moments, torch.Size([3]), x.device)
        moments = moments.detach().double()
    if x.dtype is not torch.float32:
        x = x.to(_accumulate_dtype(x))
    mask = mask if mask.dtype is torch.bool else mask != 0
    chosen = registry.resolve("whiten", backend, x)
    knobs = bool(shift_mean), float(eps)
    if not eager(x, mask, moments):
        return _whiten(x, mask, moments, *knobs, chosen)[0]
    constant = x.detach() if x.requires_grad else x
    y, stats = registry.implementation("whiten", chosen).whiten_forward(constant, mask, moments, *knobs)
    if torch.is_grad_enabled() and x.requires_grad:
        return _WhitenGradient.apply(x, (y, constant, mask, stats, knobs[0], moments is not None, chosen))
    return y


def _accumulate_dtype(*inputs: torch.Tensor) -> torch.dtype:
    return torch.float64 if any(x.dtype == torch.float64 for x in inputs) else torch.float32


def _check_floating(name: str, x: torch.Tensor) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"{name}: expected a floating point dtype, got {x.dtype}")


def _check_like(name: str, x: torch.Tensor, shape: torch.Size, device: torch.device) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    if x.shape != shape:
        raise ValueError(f"{name}: expected shape {tuple(shape)}, got {tuple(x.shape)}")
    if x.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, got one on {x.device}")


@custom_op("rlhf_kernels::gae", "reward: D[B, T], value: D[B, T], mask: bool[B, T], bootstrap: D[B]")
def _gae(
    reward: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    bootstrap: torch.Tensor | None,
    gamma: float,
    lam: float,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return registry.implementation("gae", backend).forward(reward, value, mask, bootstrap, gamma, lam)


@_gae.register_fake
def _(reward, value, mask, bootstrap, gamma, lam, backend):
    return reward.new_empty(reward.shape), reward.new_empty(reward.shape)


@custom_op("rlhf_kernels::gae_backward", "grad_advantage: D[B, T], grad_ret: D[B, T], mask: bool[B, T]")
def _gae_backward(
    grad_advantage: torch.Tensor,
    grad_ret: torch.Tensor,
    mask: torch.Tensor,
    gamma: float,
    lam: float,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return registry.implementation("gae", backend).backward(grad_advantage, grad_ret, mask, gamma, lam)


@_gae_backward.register_fake
def _(grad_advantage, grad_ret, mask, gamma, lam, backend):
    shape = grad_advantage.shape
    return (
        grad_advantage.new_empty(shape),
        grad_advantage.new_empty(shape),
        grad_advantage.new_empty(shape[0]),
    )


def _gae_setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    _, _, mask, _, ctx.gamma, ctx.lam, ctx.backend = inputs
    ctx.save_for_backward(mask)


def _gae_gradient(ctx: Any, grad_advantage: torch.Tensor, grad_ret: torch.Tensor) -> tuple:
    (mask,) = ctx.saved_tensors
    d_reward, d_value, d_bootstrap = _gae_backward(grad_advantage, grad_ret, mask, ctx.gamma, ctx.lam, ctx.backend)
    wants_reward, wants_value, _, wants_bootstrap = ctx.needs_input_grad[:4]
    return _gae.gradients(
        reward=d_reward if wants_reward else None,
        value=d_value if wants_value else None,
        bootstrap=d_bootstrap if wants_bootstrap else None,
    )


_gae.register_autograd(_gae_gradient, setup_context=_gae_setup)


@signature.custom_op("rlhf_kernels::masked_moments", "x: D[...], mask: bool[...]")
def _masked_moments(x: torch.Tensor, mask: torch.Tensor, backend: str) -> torch.Tensor:
    return registry.implementation("whiten", backend).masked_moments(x, mask)


@_masked_moments.register_fake
def _(x, mask, backend):
    return x.new_empty(3, dtype=torch.float64)


@signature.custom_op("rlhf_kernels::whiten", "x: D[...], mask: bool[...], moments: float64[3]")
def _whiten(
    x: torch.Tensor,
    mask: torch.Tensor,
    moments: torch.Tensor | None,
    shift_mean: bool,
    eps: float,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return registry.implementation("whiten", backend).whiten_forward(x, mask, moments, shift_mean, eps)


@_whiten.register_fake
def _(x, mask, moments, shift_mean, eps, backend):
    return x.new_empty(x.shape), x.new_empty(3, dtype=torch.float64)


@signature.custom_op("rlhf_kernels::whiten_backward", "grad: D[...], x: D[...], mask: bool[...], stats: float64[3]")
def _whiten_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    mask: torch.Tensor,
    stats: torch.Tensor,
    shift_mean: bool,
    constant_moments: bool,
    backend: str,
) -> torch.Tensor:
    implementation = registry.implementation("whiten", backend)
    return implementation.whiten_backward(grad, x, mask, stats, shift_mean, constant_moments)


@_whiten_backward.register_fake
def _(grad, x, mask, stats, shift_mean, constant_moments, backend):
    return x.new_empty(x.shape)


def _whiten_setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, mask, moments, ctx.shift_mean, _, ctx.backend = inputs
    _, stats = output
    ctx.mark_non_differentiable(stats)
    ctx.constant_moments = moments is not None
    ctx.save_for_backward(x, mask, stats)


def _whiten_gradient(ctx: Any, grad: torch.Tensor, _grad_stats: torch.Tensor) -> tuple:
    x, mask, stats = ctx.saved_tensors
    d_x = _whiten_backward(grad, x, mask, stats, ctx.shift_mean, ctx.constant_moments, ctx.backend)
    return d_x, None, None, None, None, None


_whiten.register_autograd(_whiten_gradient, setup_context=_whiten_setup)


class _WhitenGradient(torch.autograd.Function):
    """Gives a y that was computed eagerly its gradient to x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, state: tuple) -> torch.Tensor:
        y, constant, mask, stats, ctx.shift_mean, ctx.constant_moments, ctx.backend = state
        ctx.save_for_backward(constant, mask, stats)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        x, mask, stats = ctx.saved_tensors
        arguments = (grad, x, mask, stats, ctx.shift_mean, ctx.constant_moments)
        if eager(grad, x) and not torch.is_grad_enabled():
            return registry.implementation("whiten", ctx.backend).whiten_backward(*arguments), None
        return _whiten_backward(*arguments, ctx.backend), None
