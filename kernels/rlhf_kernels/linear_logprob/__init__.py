"""Log-probability of a target token straight from hidden states: logprob = log softmax(head(hidden))[target].

Forward   z = transform(hidden Wᵀ + scale (hidden Aᵀ) Bᵀ + bias) / temperature, then per row
          logprob = z_t − lse, and on request entropy, lse, is_top1, mean_logit, log_sum_sq_prob.
Backward  G = dL/d(hidden Wᵀ) [N, V] tile by tile; d_hidden = G W, dW = Gᵀ hidden, d_bias = Σ_n G,
          dA = scale (G B)ᵀ hidden, dB = scale Gᵀ (hidden Aᵀ). The logits never exist as one [N, V] tensor.

Legend    hidden [N, H], weight W [V, H], target [N] int64, bias [V], A [r, H], B [V, r],
          temperature scalar or [N].
Dtypes    any float in; accumulation and outputs fp32 (fp64 if hidden or weight is fp64); gradients in each
          input's dtype.
Ahead     d_logprob/d_hidden of a row is known up to the incoming gradient once its lse is: with only hidden to
          be differentiated and only logprob and lse as functions of it, forward also makes
          E_n = Σ_{v≠t} p_nv u_nv W_v, u = dz/dy. Backward is then elementwise, with g, g' the gradients of logprob
          and lse: (g_n (1 − p_nt) + g'_n p_nt) u_nt W_t + (g'_n − g_n) E_n.
Cost      GEMMs of N·H·V: forward alone 1; with the gradient ahead 2 in all; otherwise 1 and in the backward one to
          make the tile again plus one per trained factor. So differentiable entropy costs 3 instead of 2; name it
          in `detach` where it is only looked at, and it costs nothing. A weight that needs no gradient gets none:
          no product, no allocation.
Source    the transform's order is that of transformers' heads (bias, logit scale, softcap), then the
          temperature.
Statistics and their derivatives: `reference.py`; tiles and determinism: `rlhf_kernels.vocab.logits`.
"""

from torch import Tensor

from rlhf_kernels.linear_logprob import native, reference
from rlhf_kernels.runtime import autocast, eager, registry, triton_support
from rlhf_kernels.vocab.logits import (
    HEAD,
    LOGPROB_GRADS,
    OUTPUTS,
    HeadGrads,
    HeadLora,
    HeadOptions,
    LogprobGrads,
    LogprobOutputs,
    LogprobSaved,
    accumulation_dtype,
    check_detach,
    check_head,
    check_outputs,
    check_saved,
    check_tensor,
    grads_needed,
    widest,
)

__all__ = ["HeadLora", "LogprobOutputs", "linear_logprob"]

registry.register("linear_logprob", "reference", reference)
registry.register("linear_logprob", "cpu", native)
registry.register(
    "linear_logprob", "triton", registry.Lazy("rlhf_kernels.linear_logprob.triton", triton_support.unsupported)
)


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float | None = None,
    ignore_index: int = -100,
    lora: HeadLora | None = None,
    outputs: tuple[str, ...] = ("logprob",),
    detach: tuple[str, ...] = (),
    backend: str = "auto",
) -> LogprobOutputs:
    """Log-probabilities of target tokens under a head, without [N, V] logits; equations: the module's docstring.

    Differentiable in hidden, weight, bias, lora.A and lora.B.

    Args:
        hidden: [N, H], floating; last hidden states.
        weight: [V, H], floating, of the head; V ≥ 1.
        target: [N] int64 in [0, V), or `ignore_index`. The CPU refuses other values; elsewhere they are undefined.
        bias: [V], floating, of the head. None: no bias.
        temperature: number > 0, or a floating tensor [N] without a gradient.
        softcap: number > 0, the bound of |logits| before the temperature. None: no bound.
        logit_scale: number > 0, factor of the logits before the softcap. None: 1.
        ignore_index: target of rows that do not count. They give 0 in every output and no gradient, whatever they hold.
        lora: rank-r addition to the head. None: no addition.
        outputs: names of the fields of `LogprobOutputs` that are computed; all except `is_top1` are differentiable.
        detach: names among `outputs` that carry no gradient; see Cost in the module's docstring for what that saves.
        backend: `auto` or the name of a backend, see `rlhf_kernels.runtime.registry`.

    Returns:
        `LogprobOutputs`, each field [N]: float64 if hidden or weight is float64, else float32. Fields that `outputs`
            does not name are None.

    Raises:
        TypeError: a tensor's dtype is not of the kind above, or outputs or detach is a str.
        ValueError: a shape or device does not fit, or a number or target is out of its range.
        ValueError: temperature requires grad.
        ValueError: a name in outputs or detach, or backend, is unknown.
        BackendUnavailableError: the named backend cannot serve the call.
    """
    options = check_head(hidden, weight, bias, lora, temperature, softcap, logit_scale)
    check_tensor("target", target, (hidden.shape[0],), hidden, "int64")
    wanted = check_outputs(outputs)
    constant = check_detach(detach, outputs)
    differentiable = {*wanted.split(","), "logprob"} - constant - {"is_top1"}
    inputs = (hidden, weight, bias, options.lora_A, options.lora_B)
    ahead = grads_needed(*inputs) == "hidden" and differentiable <= {"logprob", "lse"}
    chosen = registry.resolve("linear_logprob", backend, widest(hidden, weight), weight.shape)
    results = _linear_logprob(hidden, weight, target, options, ignore_index, wanted, ahead, chosen)
    made = dict(zip(OUTPUTS, results[:-1], strict=True))
    for name in constant:
        made[name] = made[name].detach()
    asked = wanted.split(",")
    return LogprobOutputs(**{name: made[name] if name in asked else None for name in OUTPUTS})


@eager.custom_op("rlhf_kernels::linear_logprob", f"hidden: float[N, H], weight: float[V, H], target: int64[N], {HEAD}")
def _linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    head: HeadOptions,
    ignore_index: int,
    outputs: str,
    ahead: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    run = registry.implementation("linear_logprob", backend).forward
    with autocast.off(hidden):
        return run(hidden, weight, target, head, ignore_index, outputs, ahead)


@_linear_logprob.register_fake
def _(hidden, weight, target, head, ignore_index, outputs, ahead, backend):
    made = {"logprob", "lse", *outputs.split(",")}
    dtype = accumulation_dtype(hidden, weight)
    rows = tuple(hidden.new_empty(hidden.shape[0] if name in made else 0, dtype=dtype) for name in OUTPUTS)
    return (*rows, hidden.new_empty(hidden.shape if ahead else 0, dtype=dtype))


@eager.custom_op(
    "rlhf_kernels::linear_logprob_backward",
    f"hidden: float[N, H], weight: float[V, H], target: int64[N], {HEAD}, logprob: float[N], lse: float[N], "
    f"entropy: float[N]?, log_sum_sq_prob: float[N]?, expected: float[N, H]?, {LOGPROB_GRADS.replace('%s', 'N')}",
    also=lambda given: check_saved(given.grads, given.saved),
)
def _linear_logprob_backward(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    head: HeadOptions,
    ignore_index: int,
    saved: LogprobSaved,
    grads: LogprobGrads,
    needs: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    run = registry.implementation("linear_logprob", backend).backward
    with autocast.off(hidden):
        return run(hidden, weight, target, head, ignore_index, saved, grads, needs)


@_linear_logprob_backward.register_fake
def _(hidden, weight, target, head, ignore_index, saved, grads, needs, backend):
    inputs = zip(HeadGrads.names, (hidden, weight, head.bias, head.lora_A, head.lora_B), strict=True)
    made, empty, dtype = needs.split(","), hidden.new_empty, accumulation_dtype(hidden, weight)
    return tuple(empty(x.shape, dtype=x.dtype) if name in made else empty(0, dtype=dtype) for name, x in inputs)


def _setup_context(ctx, inputs, output):
    logprob, entropy, lse, _, _, log_sum_sq_prob, expected = output
    # An output nobody differentiates must cost nothing, so missing gradients stay None instead of becoming
    # zeros
    ctx.set_materialize_grads(False)
    made = {"logprob", "lse", *inputs.outputs.split(",")} - {"is_top1"}
    constant = [x for name, x in zip(OUTPUTS, output[:-1], strict=True) if name not in made]
    ctx.mark_non_differentiable(*constant, expected)
    tensors, ctx.numbers = inputs.head[:4], inputs.head[4:]
    saved = LogprobSaved(logprob, lse, entropy, log_sum_sq_prob, expected)
    ctx.save_for_backward(inputs.hidden, inputs.weight, inputs.target, *tensors, *saved)
    ctx.ignore_index, ctx.backend = inputs.ignore_index, inputs.backend


def _backward(ctx, d_logprob, d_entropy, d_lse, _, d_mean_logit, d_log_sum_sq_prob, *unused):
    hidden, weight, target, *rest = ctx.saved_tensors
    head, saved = HeadOptions(*rest[:4], *ctx.numbers), LogprobSaved(*rest[4:])
    grads = LogprobGrads(d_logprob, d_entropy, d_lse, d_mean_logit, d_log_sum_sq_prob)
    wanted = _linear_logprob.needed(ctx, *HeadGrads.names)
    needs = ",".join(name for name, need in zip(HeadGrads.names, wanted, strict=True) if need)
    made = _linear_logprob_backward(hidden, weight, target, head, ctx.ignore_index, saved, grads, needs, ctx.backend)
    return _linear_logprob.gradients(**{n: g for n, g, need in zip(HeadGrads.names, made, wanted, strict=True) if need})


_linear_logprob.register_autograd(_backward, setup_context=_setup_context)
