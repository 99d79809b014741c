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

from collections.abc import Callable
from typing import Any

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
    check_matrices,
    check_outputs,
    check_saved,
    check_tensor,
    grads_needed,
    widest,
)
from rlhf_kernels.vocab.runs import RUNS, HeadLoras, HeadRuns, check_runs, is_one_sweep, joined, slot_names

__all__ = ["HeadLora", "HeadLoras", "LogprobOutputs", "linear_logprob"]

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
    lora: HeadLora | HeadLoras | None = None,
    outputs: tuple[str, ...] = ("logprob",),
    detach: tuple[str, ...] = (),
    backend: str = "auto",
) -> LogprobOutputs:
    """Log-probabilities of target tokens under a head, without [N, V] logits; equations: the module's docstring.

    Differentiable in hidden, weight, bias, and A and B of every LoRA; one without rows has no gradient.

    Args:
        hidden: [N, H], floating; last hidden states.
        weight: [V, H], floating, of the head; V ≥ 1.
        target: [N] int64 in [0, V), or `ignore_index`. The CPU refuses other values; elsewhere they are undefined.
        bias: [V], floating, of the head. None: no bias.
        temperature: number > 0, or a floating tensor [N] without a gradient.
        softcap: number > 0, the bound of |logits| before the temperature. None: no bound.
        logit_scale: number > 0, factor of the logits before the softcap. None: 1.
        ignore_index: target of rows that do not count. They give 0 in every output and no gradient, whatever they hold.
        lora: rank-r addition to the head, or additions by runs of rows. None: no addition.
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
    check_matrices(hidden, weight)
    one, runs = check_runs(lora, hidden, weight)
    options = check_head(hidden, weight, bias, one, temperature, softcap, logit_scale)
    check_tensor("target", target, (hidden.shape[0],), hidden, "int64")
    wanted = check_outputs(outputs)
    constant = check_detach(detach, outputs)
    differentiable = {*wanted.split(","), "logprob"} - constant - {"is_top1"}
    inputs = (hidden, weight, bias, options.lora_A, options.lora_B)
    ahead = grads_needed(*inputs) == "hidden" and differentiable <= {"logprob", "lse"}
    ahead = ahead and not any(x.requires_grad for x in (*runs.run_A, *runs.run_B))
    chosen = registry.resolve("linear_logprob", backend, widest(hidden, weight), weight.shape)
    results = _linear_logprob(hidden, weight, target, options, runs, ignore_index, wanted, ahead, chosen)
    made = dict(zip(OUTPUTS, results[:-1], strict=True))
    for name in constant:
        made[name] = made[name].detach()
    asked = wanted.split(",")
    return LogprobOutputs(**{name: made[name] if name in asked else None for name in OUTPUTS})


@eager.custom_op(
    "rlhf_kernels::linear_logprob",
    f"hidden: float[N, H], weight: float[V, H], target: int64[N], {HEAD}, {RUNS}",
    also=lambda given: given.runs.check(given.hidden.shape[0]),
)
def _linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    head: HeadOptions,
    runs: HeadRuns,
    ignore_index: int,
    outputs: str,
    ahead: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    served = registry.implementation("linear_logprob", backend)
    run = served.forward
    rest = (ignore_index, outputs, ahead)
    with autocast.off(hidden):
        if not runs.run_A:
            return run(hidden, weight, target, head, *rest)
        if backend == "cpu":  # which knows runs
            return run(hidden, weight, target, head, *rest, runs)
        one_sweep = backend == "triton" and is_one_sweep()
        together = served.together(hidden, weight, head) if one_sweep else None
        heads, calls = runs.heads(head, len(hidden), hidden.device, together), []
        for one in heads:
            shared = () if one.runs is None else (one.runs,)
            calls.append((hidden[one.rows], weight, target[one.rows], one.head, *rest, *shared))
        parts = served.forwards(calls) if one_sweep else [run(*call) for call in calls]
        made = [joined(heads, column, len(hidden)) for column in zip(*parts, strict=True)]
        return tuple(made)  # type: ignore[return-value]


@_linear_logprob.register_fake
def _(hidden, weight, target, head, runs, ignore_index, outputs, ahead, backend):
    made = {"logprob", "lse", *outputs.split(",")}
    dtype = accumulation_dtype(hidden, weight)
    rows = tuple(hidden.new_empty(hidden.shape[0] if name in made else 0, dtype=dtype) for name in OUTPUTS)
    return (*rows, hidden.new_empty(hidden.shape if ahead else 0, dtype=dtype))


def _check_backward(given: Any) -> None:
    given.runs.check(given.hidden.shape[0])
    check_saved(given.grads, given.saved)


@eager.custom_op(
    "rlhf_kernels::linear_logprob_backward",
    f"hidden: float[N, H], weight: float[V, H], target: int64[N], {HEAD}, {RUNS}, logprob: float[N], "
    "lse: float[N], entropy: float[N]?, log_sum_sq_prob: float[N]?, expected: float[N, H]?, "
    f"{LOGPROB_GRADS.replace('%s', 'N')}",
    also=_check_backward,
)
def _linear_logprob_backward(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    head: HeadOptions,
    runs: HeadRuns,
    ignore_index: int,
    saved: LogprobSaved,
    grads: LogprobGrads,
    needs: str,
    backend: str,
) -> list[Tensor]:
    """Gradients of hidden, weight, bias, lora_A, lora_B, then of every slot's A and B; empty where not needed."""
    served = registry.implementation("linear_logprob", backend)
    run = served.backward
    rest = (head, ignore_index, saved, grads, needs)
    with autocast.off(hidden):
        if not runs.run_A:
            return list(run(hidden, weight, target, *rest))
        if backend == "cpu":
            return list(run(hidden, weight, target, *rest, runs))
        # Side by side each sweep has its own sums: too many for those of W
        one_sweep = backend == "triton" and is_one_sweep() and "weight" not in needs.split(",")
        each = served.backwards if one_sweep else lambda calls: [run(*call) for call in calls]
        return _backward_by_slot(each, hidden, weight, target, runs, *rest)


def _backward_by_slot(
    each: Callable[[list[tuple[Any, ...]]], list[tuple[Tensor, ...]]],
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    runs: HeadRuns,
    head: HeadOptions,
    ignore_index: int,
    saved: LogprobSaved,
    grads: LogprobGrads,
    needs: str,
) -> list[Tensor]:
    """The same by calls of one LoRA each; the head's own gradients are their sums, in the dtype of the head."""
    names, heads = needs.split(","), runs.heads(head, len(hidden), hidden.device)
    made: dict[str, Tensor] = {}
    rows_of_hidden: list[Tensor] = []
    calls = {}
    for i, one in enumerate(heads):
        own_saved = LogprobSaved(*(x[one.rows] if x.shape[0] else x for x in saved))
        own_grads = LogprobGrads(*(None if g is None else g[one.rows] for g in grads))
        own, own_needs = (hidden[one.rows], weight, target[one.rows], one.head), one.needs({*names})
        if own_needs:
            calls[i] = (*own, ignore_index, own_saved, own_grads, own_needs)
    for i, parts in zip(calls, each([*calls.values()]), strict=True):
        one = heads[i]
        for name, part in zip((*HeadGrads.names[:3], *slot_names(one.slot)), parts, strict=False):
            if name == "hidden":
                rows_of_hidden.append(part)
            elif name in names:
                made[name] = made[name] + part if name in made else part
    if "hidden" in names:
        made["hidden"] = joined(heads, rows_of_hidden, len(hidden))
    inputs = zip(_names(len(runs.run_A)), _inputs(hidden, weight, head, runs), strict=True)
    empty = {name: weight.new_zeros(x.shape if x is not None and name in names else 0) for name, x in inputs}
    return list((empty | made).values())


def _names(n_slots: int) -> list[str]:
    """Names of all gradients in the order of `_linear_logprob_backward`."""
    return [*HeadGrads.names, *(name for slot in range(n_slots) for name in slot_names(slot))]


def _inputs(hidden: Tensor, weight: Tensor, head: HeadOptions, runs: HeadRuns) -> list[Tensor | None]:
    """Tensors with a gradient, in the order of `_names`."""
    slots = [x for pair in zip(runs.run_A, runs.run_B, strict=True) for x in pair]
    return [hidden, weight, head.bias, head.lora_A, head.lora_B, *slots]


@_linear_logprob_backward.register_fake
def _(hidden, weight, target, head, runs, ignore_index, saved, grads, needs, backend):
    inputs = zip(_names(len(runs.run_A)), _inputs(hidden, weight, head, runs), strict=True)
    needed, dtype = needs.split(","), accumulation_dtype(hidden, weight)
    made = [(x.shape, x.dtype) if x is not None and name in needed else (0, dtype) for name, x in inputs]
    return [hidden.new_empty(shape, dtype=kind) for shape, kind in made]


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
    runs = inputs.runs
    ctx.runs, ctx.n_slots = runs._replace(run_A=[], run_B=[]), len(runs.run_A)
    ctx.save_for_backward(inputs.hidden, inputs.weight, inputs.target, *tensors, *saved, *runs.run_A, *runs.run_B)
    ctx.ignore_index, ctx.backend = inputs.ignore_index, inputs.backend


def _backward(ctx, d_logprob, d_entropy, d_lse, _, d_mean_logit, d_log_sum_sq_prob, *unused):
    hidden, weight, target, *rest = ctx.saved_tensors
    n = ctx.n_slots
    head, saved = HeadOptions(*rest[:4], *ctx.numbers), LogprobSaved(*rest[4:9])
    runs = ctx.runs._replace(run_A=rest[9 : 9 + n], run_B=rest[9 + n :])
    grads = LogprobGrads(d_logprob, d_entropy, d_lse, d_mean_logit, d_log_sum_sq_prob)
    wanted = _linear_logprob.needed(ctx, *HeadGrads.names)
    if n:
        wanted += [need for pair in zip(*_linear_logprob.needed(ctx, "run_A", "run_B"), strict=True) for need in pair]
    needs = ",".join(name for name, need in zip(_names(n), wanted, strict=True) if need)
    rest = (head, runs, ctx.ignore_index, saved, grads, needs, ctx.backend)
    made = _linear_logprob_backward(hidden, weight, target, *rest)
    given = [g if need else None for g, need in zip(made, wanted, strict=True)]
    named = dict(zip(HeadGrads.names, given, strict=False))
    # Of an empty list torch expects one back, also of numbers
    lists: dict[str, list[Tensor | None]] = {} if n else {name: [] for name in HeadRuns._fields}
    return _linear_logprob.gradients(**named, **(lists | {"run_A": given[5::2], "run_B": given[6::2]}))


_linear_logprob.register_autograd(_backward, setup_context=_setup_context)
