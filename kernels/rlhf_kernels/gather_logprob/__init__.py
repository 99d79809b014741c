"""Log-probability of a target token from logits that someone else already made.

Forward   z = logits / temperature; logprob = z_t − lse, and on request entropy, lse, is_top1, mean_logit,
          log_sum_sq_prob, all of z.
Backward  d_logits = dL/dz / temperature, either a new tensor or, with inplace_backward, over the logits
          themselves.

Legend    logits [N, V] or [..., V] with any strides, target [N] or [...] int64, temperature scalar or
          target's shape.
Dtypes    any float in; accumulation and outputs fp32 (fp64 for fp64 logits); d_logits in the dtype of the
          logits. Row chunks are upcast one at a time, never the whole tensor.
Determinism: rows do not interact; chunk borders depend on N and V only.
Source    as `linear_logprob`, whose reference holds the statistics and their derivatives.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_kernels.gather_logprob import native, reference
from rlhf_kernels.runtime import autocast, eager, registry, signature, triton_support
from rlhf_kernels.vocab.logits import (
    LOGPROB_GRADS,
    OUTPUTS,
    LogprobGrads,
    LogprobOutputs,
    accumulation_dtype,
    check_outputs,
    check_saved,
    check_temperature,
    check_tensor,
)

__all__ = ["LogprobOutputs", "gather_logprob"]

registry.register("gather_logprob", "reference", reference)
registry.register(
    "gather_logprob", "triton", registry.Lazy("rlhf_kernels.gather_logprob.triton", triton_support.unsupported)
)
registry.register("gather_logprob", "cpu", native)


def gather_logprob(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    outputs: tuple[str, ...] = ("logprob",),
    inplace_backward: bool = False,
    backend: str = "auto",
) -> LogprobOutputs:
    """Log-probabilities of target tokens under given logits; the equations stand in the module's docstring.

    Differentiable in logits.

    Args:
        logits: [..., V] with two or more dimensions and V ≥ 1, floating, of any strides.
        target: [...] int64 in [0, V), or `ignore_index`. The CPU refuses other values; elsewhere they are undefined.
        temperature: number > 0, or a floating tensor of target's shape without a gradient.
        ignore_index: target of rows that do not count. They give 0 in every output and no gradient, whatever they hold.
        outputs: names of the fields of `LogprobOutputs` that are computed.
        inplace_backward: True writes the gradient over the logits, which saves its memory. Nothing else may read these
            logits later: the backward runs once, and autograd raises if another node saved them.
        backend: `auto` or the name of a backend, see `rlhf_kernels.runtime.registry`.

    Returns:
        `LogprobOutputs`, each field of target's shape: float64 for float64 logits, else float32. Fields that `outputs`
            does not name are None.

    Raises:
        TypeError: logits are not floating, target is not an int64 tensor, or outputs is a str.
        ValueError: a shape or device does not fit, or a target is out of range.
        ValueError: temperature is not positive, or requires grad.
        ValueError: a name in outputs or backend is unknown.
        ValueError: logits are a leaf that requires grad, with inplace_backward.
        BackendUnavailableError: the named backend cannot serve the call.
    """
    if not isinstance(logits, Tensor) or logits.dim() < 2 or logits.shape[-1] == 0:
        got = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"logits: expected a tensor [..., V] with at least 2 dimensions and V ≥ 1, got {got}")
    check_tensor("logits", logits, tuple(logits.shape), logits)
    check_tensor("target", target, tuple(logits.shape[:-1]), logits, "int64")
    scalar, per_row = check_temperature(temperature, tuple(target.shape), logits)
    wanted = check_outputs(outputs)
    needs_grad = torch.is_grad_enabled() and logits.requires_grad
    if inplace_backward and needs_grad and logits.is_leaf:
        raise ValueError(
            "inplace_backward: expected logits that are an intermediate result, got a leaf that requires grad"
        )
    flat_temperature = None if per_row is None else per_row.reshape(-1)
    chosen = registry.resolve("gather_logprob", backend, logits, (logits.shape[-1],))
    results = _gather_logprob(
        logits, target.reshape(-1), flat_temperature, scalar, ignore_index, wanted, inplace_backward, chosen
    )
    asked = wanted.split(",")
    return LogprobOutputs(
        *(x.view(target.shape) if name in asked else None for name, x in zip(OUTPUTS, results, strict=True))
    )


@eager.custom_op(
    "rlhf_kernels::gather_logprob",
    "logits: float[..., V], target: int64[*], row_temperature: float[*]",
)
def _gather_logprob(
    logits: Tensor,
    target: Tensor,
    row_temperature: Tensor | None,
    temperature: float,
    ignore_index: int,
    outputs: str,
    inplace_backward: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    run = registry.implementation("gather_logprob", backend).forward
    with autocast.off(logits):
        return run(logits, target, row_temperature, temperature, ignore_index, outputs)


@_gather_logprob.register_fake
def _(logits, target, row_temperature, temperature, ignore_index, outputs, inplace_backward, backend):
    made = {"logprob", "lse", *outputs.split(",")}
    dtype = accumulation_dtype(logits)
    return tuple(logits.new_empty(target.shape[0] if name in made else 0, dtype=dtype) for name in OUTPUTS)


class _Saved(NamedTuple):
    lse: Tensor
    entropy: Tensor
    log_sum_sq_prob: Tensor


_BACKWARD = (
    "logits: float[..., V], target: int64[*], row_temperature: float[*], lse: float[*], "
    f"entropy: float[*]?, log_sum_sq_prob: float[*]?, {LOGPROB_GRADS.replace('%s', '*')}"
)


@eager.custom_op(
    "rlhf_kernels::gather_logprob_backward", _BACKWARD, also=lambda given: check_saved(given.grads, given.saved)
)
def _gather_logprob_backward(
    logits: Tensor,
    target: Tensor,
    row_temperature: Tensor | None,
    temperature: float,
    ignore_index: int,
    saved: _Saved,
    grads: LogprobGrads,
    backend: str,
) -> Tensor:
    d_logits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    run = registry.implementation("gather_logprob", backend).backward
    with autocast.off(logits):
        run(logits, target, row_temperature, temperature, ignore_index, saved, grads, d_logits)
    return d_logits


@_gather_logprob_backward.register_fake
def _(logits, *args):
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


@signature.custom_op(
    "rlhf_kernels::gather_logprob_backward_",
    _BACKWARD,
    also=lambda given: check_saved(given.grads, given.saved),
    mutates_args=("logits",),
)
def _gather_logprob_backward_(
    logits: Tensor,
    target: Tensor,
    row_temperature: Tensor | None,
    temperature: float,
    ignore_index: int,
    saved: _Saved,
    grads: LogprobGrads,
    backend: str,
) -> None:
    run = registry.implementation("gather_logprob", backend).backward
    with autocast.off(logits):
        run(logits, target, row_temperature, temperature, ignore_index, saved, grads, logits)


@_gather_logprob_backward_.register_fake
def _(logits, *args):
    return None


def _setup_context(ctx, inputs, output):
    logits, target, row_temperature, temperature, ignore_index, outputs, inplace_backward, backend = inputs
    _, entropy, lse, _, _, log_sum_sq_prob = output
    ctx.set_materialize_grads(False)
    made = {"logprob", "lse", *outputs.split(",")} - {"is_top1"}
    ctx.mark_non_differentiable(*(x for name, x in zip(OUTPUTS, output, strict=True) if name not in made))
    ctx.save_for_backward(logits, target, row_temperature, lse, entropy, log_sum_sq_prob)
    ctx.options = (temperature, ignore_index)
    ctx.inplace_backward, ctx.backend = inplace_backward, backend


def _backward(ctx, d_logprob, d_entropy, d_lse, _, d_mean_logit, d_log_sum_sq_prob):
    logits, target, row_temperature, *saved = ctx.saved_tensors
    grads = LogprobGrads(d_logprob, d_entropy, d_lse, d_mean_logit, d_log_sum_sq_prob)
    rest = (target, row_temperature, *ctx.options, _Saved(*saved), grads, ctx.backend)
    if ctx.inplace_backward:
        d_logits = logits.detach()
        _gather_logprob_backward_(d_logits, *rest)
    else:
        d_logits = _gather_logprob_backward(logits, *rest)
    return _gather_logprob.gradients(logits=d_logits)


_gather_logprob.register_autograd(_backward, setup_context=_setup_context)
