"""Log-prob under a policy a and a reference r, their exact KL and the policy's entropy, in one sweep over W.

Forward   z_a = head(hidden_a), z_r = plain head(hidden_r); per row, with p = softmax(z_a):
          logprob_x = z_x,t − lse_x
          kl        = KL(a‖r) = Σ_v p_v (z_a,v − z_r,v) − lse_a + lse_r
          entropy   = lse_a − Σ_v p_v z_a,v
Backward  to hidden_a only, with d_v = log p_v − log softmax(z_r)_v:
          ∂logprob_a/∂z_v = 1[v = t] − p_v,  ∂kl/∂z_v = p_v (d_v − kl),
          ∂entropy/∂z_v = −p_v (log p_v + entropy)
Ahead     as in `linear_logprob`, forward makes E_n = Σ_{v≠t} p_v u_v W_v when hidden_a needs a gradient and entropy
          is detached, and D_n = Σ_{v≠t} p_v (d_v − kl) u_v W_v unless kl is detached too; with g, g″ the gradients of
          logprob_a and kl, d_hidden is then (g (1 − p_t) + g″ p_t (d_t − kl)) u_t W_t − g E + g″ D.
Cost      GEMMs of N·H·V: forward 2; with kl and entropy detached 3 in all, with entropy detached 4, otherwise 5.

Legend    hidden_a, hidden_r [N, H], weight W [V, H], target t [N] int64, bias [V], lora A [r, H]
          and B [V, r].
Dtypes    any float in; accumulation and outputs fp32 (fp64 if hidden_a or weight is fp64). A KL below about
          1e-6 is fp32 rounding and may come out slightly negative; equal rows without lora give
          exactly 0.
Determinism: as `rlhf_kernels.vocab.logits`; logprob_a, logprob_r and entropy are those of `linear_logprob`, bit for
bit.
Source    the KL of two softmaxes in the streaming form of online softmax.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_kernels.linear_logprob_pair import native, reference
from rlhf_kernels.runtime import autocast, eager, registry, triton_support
from rlhf_kernels.vocab.logits import (
    HEAD,
    HeadLora,
    HeadOptions,
    PairSaved,
    accumulation_dtype,
    check_detach,
    check_head,
    check_tensor,
    widest,
)

__all__ = ["PairOutputs", "linear_logprob_pair"]

registry.register("linear_logprob_pair", "reference", reference)
registry.register("linear_logprob_pair", "cpu", native)
registry.register(
    "linear_logprob_pair",
    "triton",
    registry.Lazy("rlhf_kernels.linear_logprob_pair.triton", triton_support.unsupported),
)


class PairOutputs(NamedTuple):
    """Per-row results of `linear_logprob_pair`, in nats; 0 in ignored rows."""

    logprob_a: Tensor
    """[N], log-prob of the target under the policy a"""
    logprob_r: Tensor
    """[N], log-prob of the target under the reference r, without a gradient"""
    kl: Tensor
    """[N], KL(a‖r) over the whole vocabulary"""
    entropy: Tensor
    """[N], entropy of a"""


def linear_logprob_pair(
    hidden_a: Tensor,
    hidden_r: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float | None = None,
    ignore_index: int = -100,
    lora: HeadLora | None = None,
    detach: tuple[str, ...] = (),
    backend: str = "auto",
) -> PairOutputs:
    """Log-probs of target tokens under policy a and reference r, KL(a‖r) and a's entropy, in one sweep.

    The equations stand in the module's docstring. Differentiable in hidden_a alone.

    Args:
        hidden_a: [N, H], floating; last hidden states of the policy.
        hidden_r: [N, H], floating; those of the reference. It is float64 exactly if hidden_a is.
        weight: [V, H], floating, of the head that both share; V ≥ 1.
        target: [N] int64 in [0, V), or `ignore_index`. The CPU refuses other values; elsewhere they are undefined.
        bias: [V], floating, of the head. None: no bias.
        temperature: number > 0, or a floating tensor [N] without a gradient.
        softcap: number > 0, the bound of |logits| before the temperature. None: no bound.
        logit_scale: number > 0, factor of the logits before the softcap. None: 1.
        ignore_index: target of rows that do not count. They give 0 in every output and no gradient, whatever they hold.
        lora: rank-r addition to the policy's head; the reference's logits lack it. None: no addition.
        detach: names of outputs that carry no gradient; see Cost in the module's docstring for what that saves.
        backend: `auto` or the name of a backend, see `rlhf_kernels.runtime.registry`.

    Returns:
        `PairOutputs` with logprob_a, logprob_r, kl and entropy, each [N]: float64 if hidden_a or weight is float64,
            else float32.

    Raises:
        TypeError: a tensor's dtype is not of the kind above, or detach is a str.
        ValueError: a shape or device does not fit, or a number or target is out of its range.
        ValueError: temperature requires grad, or so does another tensor than hidden_a while gradients are enabled.
        ValueError: a name in detach, or backend, is unknown.
        BackendUnavailableError: the named backend cannot serve the call.
    """
    options = check_head(hidden_a, weight, bias, lora, temperature, softcap, logit_scale)
    check_tensor("hidden_r", hidden_r, tuple(hidden_a.shape), hidden_a)
    check_tensor("target", target, (hidden_a.shape[0],), hidden_a, "int64")
    if accumulation_dtype(hidden_r) != accumulation_dtype(hidden_a):
        raise TypeError(f"hidden_r: expected a dtype that goes with {hidden_a.dtype}, got {hidden_r.dtype}")
    if torch.is_grad_enabled():
        others = {"hidden_r": hidden_r, "weight": weight, "bias": bias}
        others |= {"lora.A": options.lora_A, "lora.B": options.lora_B}
        for name, x in others.items():
            if x is not None and x.requires_grad:
                raise ValueError(
                    f"{name}: expected one that needs no gradient (only hidden_a gets one), got one that "
                    "requires grad; detach it, or use two linear_logprob calls to train it"
                )
    chosen = registry.resolve("linear_logprob_pair", backend, widest(hidden_a, weight), weight.shape)
    constant = check_detach(detach, PairOutputs._fields)
    ahead = ""
    if torch.is_grad_enabled() and hidden_a.requires_grad and "entropy" in constant:
        ahead = "logprob" if "kl" in constant else "logprob,kl"
    results = _linear_logprob_pair(hidden_a, hidden_r, weight, target, options, ignore_index, ahead, chosen)
    named = dict(zip(PairOutputs._fields, results, strict=False))
    return PairOutputs(**{name: x.detach() if name in constant else x for name, x in named.items()})


_INPUTS = f"hidden_a: float[N, H], hidden_r: float[N, H], weight: float[V, H], target: int64[N], {HEAD}"


@eager.custom_op("rlhf_kernels::linear_logprob_pair", _INPUTS)
def _linear_logprob_pair(
    hidden_a: Tensor,
    hidden_r: Tensor,
    weight: Tensor,
    target: Tensor,
    head: HeadOptions,
    ignore_index: int,
    ahead: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    run = registry.implementation("linear_logprob_pair", backend).forward
    with autocast.off(hidden_a):
        return run(hidden_a, hidden_r, weight, target, head, ignore_index, ahead)


@_linear_logprob_pair.register_fake
def _(hidden_a, hidden_r, weight, target, head, ignore_index, ahead, backend):
    dtype = accumulation_dtype(hidden_a, weight)
    rows = [hidden_a.new_empty(hidden_a.shape[0], dtype=dtype) for _ in range(6)]
    sizes = [hidden_a.shape if name in ahead.split(",") else 0 for name in ("logprob", "kl")]
    return (*rows, *(hidden_a.new_empty(size, dtype=dtype) for size in sizes))


@eager.custom_op(
    "rlhf_kernels::linear_logprob_pair_backward",
    f"{_INPUTS}, logprob_a: float[N], logprob_r: float[N], lse_a: float[N], lse_r: float[N], kl: float[N], "
    "entropy: float[N], expected: float[N, H]?, expected_kl: float[N, H]?, d_logprob: float[N], "
    "d_kl: float[N], d_entropy: float[N]",
)
def _linear_logprob_pair_backward(
    hidden_a: Tensor,
    hidden_r: Tensor,
    weight: Tensor,
    target: Tensor,
    head: HeadOptions,
    ignore_index: int,
    saved: PairSaved,
    d_logprob: Tensor | None,
    d_kl: Tensor | None,
    d_entropy: Tensor | None,
    backend: str,
) -> Tensor:
    run = registry.implementation("linear_logprob_pair", backend).backward
    with autocast.off(hidden_a):
        return run(hidden_a, hidden_r, weight, target, head, ignore_index, saved, (d_logprob, d_kl, d_entropy))


@_linear_logprob_pair_backward.register_fake
def _(hidden_a, *args):
    return hidden_a.new_empty(hidden_a.shape)


def _setup_context(ctx, inputs, output):
    logprob_a, logprob_r, kl, entropy, lse_a, lse_r, expected, expected_kl = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(logprob_r, lse_a, lse_r, expected, expected_kl)
    saved = PairSaved(logprob_a, logprob_r, lse_a, lse_r, kl, entropy, expected, expected_kl)
    tensors, ctx.numbers = inputs.head[:4], inputs.head[4:]
    ctx.save_for_backward(inputs.hidden_a, inputs.hidden_r, inputs.weight, inputs.target, *tensors, *saved)
    ctx.ignore_index, ctx.backend = inputs.ignore_index, inputs.backend


def _backward(ctx, d_logprob, _, d_kl, d_entropy, *unused):
    *given, bias, lora_A, lora_B, row_temperature = ctx.saved_tensors[:8]
    head, saved = HeadOptions(bias, lora_A, lora_B, row_temperature, *ctx.numbers), PairSaved(*ctx.saved_tensors[8:])
    rest = (head, ctx.ignore_index, saved, d_logprob, d_kl, d_entropy, ctx.backend)
    return _linear_logprob_pair.gradients(hidden_a=_linear_logprob_pair_backward(*given, *rest))


_linear_logprob_pair.register_autograd(_backward, setup_context=_setup_context)
