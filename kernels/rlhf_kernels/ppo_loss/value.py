"""Clipped value loss with the sums that explained variance needs, in one op.

Per token, with value v, return R and mask m:

    v_clip = old + clip(v − old, −clip, clip);   loss = ½ Σ m max((v − R)², (v_clip − R)²) / denom
    ∂loss/∂v = m (v − R) / denom, or 0 where the clipped error is the larger one

Statistics: count = Σ m, sum_error = Σ m (R − v), sum_error_sq, sum_ret = Σ m R, sum_ret_sq. They are not
divided, so that they can be added across micro-batches and ranks before 1 − Var(R − v) / Var(R) is taken.

Shapes, mask, denom, dtypes, determinism: as for the policy loss, see the package docstring.
Source: Schulman et al. 2017; the clipped form is that of the OpenAI baselines.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_kernels.ppo_loss.checks import (
    accumulate_dtype,
    as_denom,
    check_denom,
    check_tensors,
    flat,
    flat_or_none,
    is_one,
    like,
)
from rlhf_kernels.ppo_loss.statistics import LossAndStatistics, ValueStatistics
from rlhf_kernels.runtime import registry, signature
from rlhf_kernels.runtime.eager import eager


class ValueLossOutputs(ValueStatistics, LossAndStatistics):
    """Result of `value_loss`: loss [], which alone carries a gradient, statistics [6], and each statistic by name."""


@signature.custom_op(
    "rlhf_kernels::value_loss",
    "value: float[N], old_value: float[N], ret: float[N], mask: real[N], denom: float[]",
)
def _value_loss_op(
    value: Tensor,
    old_value: Tensor | None,
    ret: Tensor,
    mask: Tensor,
    denom: Tensor,
    clip: float | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return registry.implementation("ppo_loss", backend).value_forward(value, old_value, ret, mask, denom, clip)


@_value_loss_op.register_fake
def _(value, *args):  # type: ignore[no-untyped-def]
    dtype = accumulate_dtype(value)
    return (
        value.new_empty((), dtype=dtype),
        value.new_empty(6, dtype=dtype),
        value.new_empty(value.shape, dtype=dtype),
    )


@signature.custom_op("rlhf_kernels::value_loss_backward", "grad_loss: float[], dloss: float[N]")
def _value_loss_backward_op(grad_loss: Tensor, dloss: Tensor, backend: str) -> Tensor:
    return registry.implementation("ppo_loss", backend).value_backward(grad_loss, dloss)


@_value_loss_backward_op.register_fake
def _(grad_loss, dloss, backend):  # type: ignore[no-untyped-def]
    return torch.empty_like(dloss)


def _value_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, statistics, dloss = output
    ctx.mark_non_differentiable(statistics, dloss)
    ctx.save_for_backward(dloss)
    ctx.dtype, ctx.backend = inputs.value.dtype, inputs.backend


def _value_backward(ctx, grad_loss, grad_statistics, grad_dloss):  # type: ignore[no-untyped-def]
    grad = _value_loss_backward_op(grad_loss, ctx.saved_tensors[0], ctx.backend) if ctx.needs_input_grad[0] else None
    return _value_loss_op.gradients(value=None if grad is None else grad.to(ctx.dtype))


_value_loss_op.register_autograd(_value_backward, setup_context=_value_setup)


class _ValueGradient(torch.autograd.Function):
    """Gives a loss that was computed eagerly its gradient to value."""

    @staticmethod
    def forward(ctx, value, state):  # type: ignore[no-untyped-def]
        loss, dloss, ctx.backend = state
        ctx.save_for_backward(dloss)
        ctx.like = (value.shape, value.dtype)
        return loss

    @staticmethod
    def backward(ctx, grad_loss):  # type: ignore[no-untyped-def]
        (dloss,) = ctx.saved_tensors
        if eager(grad_loss) and not torch.is_grad_enabled():
            run = registry.implementation("ppo_loss", ctx.backend).value_backward
            grad = dloss if is_one(grad_loss) else run(grad_loss, dloss)
        else:
            grad = _value_loss_backward_op(grad_loss, flat(dloss), ctx.backend)
        return like(grad, *ctx.like), None


def value_loss(
    value: Tensor,
    old_value: Tensor | None,
    ret: Tensor,
    mask: Tensor,
    *,
    denom: float | Tensor,
    clip: float | None = None,
    backend: str = "auto",
) -> ValueLossOutputs:
    """Value loss: half the squared error, clipped around the old value if `clip` is given, and its statistics.

    The equations stand in the module's docstring. Differentiable in value. All per-token tensors have one shape, of N
    elements, and one device; masked tokens may hold anything.

    Args:
        value: floating, of any shape; values of the critic that is trained.
        old_value: floating; values before the update, a constant. It matters with clip only. None: clip is None, too.
        ret: floating; returns, the target of value, a constant.
        mask: bool or real numbers; 0 where a token does not count, other numbers are weights.
        denom: finite number > 0, or a tensor []; Σ mask over the whole optimizer step.
        clip: number > 0, the largest distance from old_value that counts. None: no clip.
        backend: `auto` or the name of a backend, see `rlhf_kernels.runtime.registry`.

    Returns:
        `ValueLossOutputs` with loss [] and statistics [6]: float64 if value is float64, else float32.

    Raises:
        TypeError: a tensor is missing or not floating, or mask is complex.
        ValueError: a shape or device does not fit, or denom or clip is out of its range.
        ValueError: clip is given without old_value, or backend is unknown.
        BackendUnavailableError: the named backend cannot serve the call.
    """
    check_tensors(value=value, ret=ret, mask=mask, old_value=old_value)
    if clip is not None and not clip > 0:
        raise ValueError(f"clip: expected None or a number > 0, got {clip!r}")
    if clip is not None and old_value is None:
        raise ValueError(f"clip: {clip!r} needs old_value, got old_value=None")
    check_denom(denom)
    chosen = registry.resolve("ppo_loss", backend, value)
    old_value = None if clip is None else old_value
    clip = None if clip is None else float(clip)
    if not eager(value, old_value, ret, mask):
        constants = flat_or_none(old_value), flat(ret), flat(mask), as_denom(denom, value)
        loss, statistics, _ = _value_loss_op(value.reshape(-1), *constants, clip, chosen)
        return ValueLossOutputs(loss, statistics)
    implementation = registry.implementation("ppo_loss", chosen)
    if getattr(implementation, "TAKES_AS_GIVEN", False):
        loss, statistics, dloss = implementation.value_forward(value, old_value, ret, mask, denom, clip)
    else:
        constants = flat_or_none(old_value), flat(ret), flat(mask), as_denom(denom, value)
        loss, statistics, dloss = implementation.value_forward(flat(value), *constants, clip)
    if torch.is_grad_enabled() and value.requires_grad:
        loss = _ValueGradient.apply(value, (loss, dloss, chosen))
    return ValueLossOutputs(loss, statistics)


def explained_variance(
    *, count: Tensor, sum_error: Tensor, sum_error_sq: Tensor, sum_ret: Tensor, sum_ret_sq: Tensor
) -> Tensor:
    """1 − Var(R − v) / Var(R) from sums added across micro-batches and ranks, fp64; NaN where Var(R) is 0."""
    n, e, ee, r, rr = (x.double() for x in (count, sum_error, sum_error_sq, sum_ret, sum_ret_sq))
    error_variance = (ee / n - (e / n).square()).clamp_min(0)
    ret_variance = (rr / n - (r / n).square()).clamp_min(0)
    return torch.where(ret_variance > 0, 1 - error_variance / ret_variance, torch.nan)
