"""Clipped PPO loss with its statistics straight from hidden states; the gradient is made in the forward.

Forward   logprob, entropy from z = head(hidden) as in `linear_logprob`; then, as in `ppo_loss`,
          loss = Σ_n mask_n (ppo_n + kl_coef · kl_n − entropy_coef · entropy_n) / denom
Backward  with c_n = ∂loss/∂logprob_n and e_n = ∂loss/∂entropy_n, both known once row n's lse is:
          G_nv = c_n (1[v = t] − p_nv) − e_n p_nv (log p_nv + entropy_n), pulled back through the transform;
          d_hidden = G W, dW = Gᵀ hidden, … . Computed in the forward, scaled by the incoming gradient in the
          backward. Rows with c = e = 0 (masked, ignored, clipped, zero advantage) have no gradient. The reference
          leaves all of them out of these products. With only hidden to be differentiated and no entropy bonus the
          native and Triton backends need one sweep: it leaves out masked and ignored rows (Triton also rows of
          zero advantage without a KL term), but whether a row is clipped is known only when it is over.
          Otherwise they sweep twice: the native backend's second sweep leaves out every row with c = e = 0, that
          of Triton none, their part being 0 there.

Legend    hidden [N, H], weight W [V, H], target [N] int64, old_logprob, advantage, mask, ref_logprob [N],
          denom [].
Dtypes    any float in; accumulation, loss, statistics and logprob fp32 (fp64 if hidden or weight is fp64);
          gradients are kept in that dtype and rounded once, to each input's dtype, after scaling.
Determinism: as `rlhf_kernels.vocab.logits`; logprob equals that of `linear_logprob` bit for bit.
Source    Schulman et al. 2017; gradient in the forward as in fused cross-entropy losses.
"""

from typing import NamedTuple

from torch import Tensor

from rlhf_kernels.linear_ppo_loss import native, reference
from rlhf_kernels.ppo_loss import PolicyStatistics
from rlhf_kernels.ppo_loss.checks import as_denom, check_kl
from rlhf_kernels.ppo_loss.options import PpoOptions, PpoTokens
from rlhf_kernels.runtime import autocast, eager, registry, triton_support
from rlhf_kernels.vocab.logits import (
    HEAD,
    HeadGrads,
    HeadLora,
    HeadOptions,
    accumulation_dtype,
    check_head,
    check_tensor,
    grads_needed,
    widest,
)

__all__ = ["LinearPpoLossOutputs", "linear_ppo_loss"]

registry.register("linear_ppo_loss", "reference", reference)
registry.register("linear_ppo_loss", "cpu", native)
registry.register(
    "linear_ppo_loss", "triton", registry.Lazy("rlhf_kernels.linear_ppo_loss.triton", triton_support.unsupported)
)


class _LossStatisticsLogprob(NamedTuple):
    loss: Tensor
    statistics: Tensor
    logprob: Tensor


class LinearPpoLossOutputs(PolicyStatistics, _LossStatisticsLogprob):
    """Result of `linear_ppo_loss`: loss [], statistics [9] and logprob [N], and each statistic by name.

    The loss alone carries a gradient. logprob is the target's, 0 in masked and ignored rows.
    """


def linear_ppo_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    denom: float | Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    ref_logprob: Tensor | None = None,
    kl: str = "k3",
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float | None = None,
    bias: Tensor | None = None,
    lora: HeadLora | None = None,
    ignore_index: int = -100,
    backend: str = "auto",
) -> LinearPpoLossOutputs:
    """PPO loss of target tokens under a head, without [N, V] logits; the equations stand in the module's docstring.

    Differentiable in hidden, weight, bias, lora.A and lora.B. Masked rows may hold anything, their target included.
    Under `torch.no_grad()` no gradient is made.

    Args:
        hidden: [N, H], floating; last hidden states.
        weight: [V, H], floating, of the head; V ≥ 1.
        target: [N] int64 in [0, V), or `ignore_index`. The CPU refuses other values; elsewhere they are undefined.
        old_logprob: [N], floating; log-probs of the policy that sampled the tokens, a constant.
        advantage: [N], floating, a constant.
        mask: [N], bool or floating; 0 where a row does not count, other numbers are weights.
        denom: finite number > 0, or a tensor []; Σ mask over the whole optimizer step.
        clip_low: number ≥ 0; the ratio is clipped at 1 − clip_low.
        clip_high: number ≥ 0; the ratio is clipped at 1 + clip_high.
        dual_clip: number > 1, the bound of the ratio where the advantage is negative. None: no such bound.
        ref_logprob: [N], floating; log-probs of the reference, a constant. None: no KL, and kl_coef is 0.
        kl: estimator of the KL term: `k1`, `k2` or `k3`.
        kl_coef: finite coefficient of the KL term.
        entropy_coef: finite coefficient of the entropy bonus.
        temperature: number > 0, or a floating tensor [N] without a gradient.
        softcap: number > 0, the bound of |logits| before the temperature. None: no bound.
        logit_scale: number > 0, factor of the logits before the softcap. None: 1.
        bias: [V], floating, of the head. None: no bias.
        lora: rank-r addition to the head. None: no addition.
        ignore_index: target of rows that do not count, as if they were masked.
        backend: `auto` or the name of a backend, see `rlhf_kernels.runtime.registry`.

    Returns:
        `LinearPpoLossOutputs` with loss [], statistics [9] and logprob [N]: float64 if hidden or weight is float64,
            else float32.

    Raises:
        TypeError: a tensor's dtype is not of the kind above.
        ValueError: a shape or device does not fit, or a number or target is out of its range.
        ValueError: temperature requires grad, or kl_coef is not 0 without ref_logprob.
        ValueError: kl or backend is unknown.
        BackendUnavailableError: the named backend cannot serve the call.
    """
    head = check_head(hidden, weight, bias, lora, temperature, softcap, logit_scale)
    n_rows = hidden.shape[0]
    check_tensor("target", target, (n_rows,), hidden, "int64")
    check_tensor("old_logprob", old_logprob, (n_rows,), hidden)
    check_tensor("advantage", advantage, (n_rows,), hidden)
    check_tensor("mask", mask, (n_rows,), hidden, "mask")
    if ref_logprob is not None:
        check_tensor("ref_logprob", ref_logprob, (n_rows,), hidden)
    options = PpoOptions.checked(clip_low, clip_high, dual_clip, kl, kl_coef, entropy_coef, ref_logprob=ref_logprob)
    tokens = PpoTokens(
        old_logprob.detach(),
        advantage.detach(),
        mask.detach(),
        as_denom(denom, hidden),
        None if ref_logprob is None else ref_logprob.detach(),
    )
    loss, statistics, logprob, *_ = _linear_ppo_loss(
        hidden,
        weight,
        target,
        tokens,
        head,
        ignore_index,
        options,
        grads_needed(hidden, weight, bias, head.lora_A, head.lora_B),
        registry.resolve("linear_ppo_loss", backend, widest(hidden, weight), weight.shape),
    )
    return LinearPpoLossOutputs(loss, statistics, logprob)


@eager.custom_op(
    "rlhf_kernels::linear_ppo_loss",
    "hidden: float[N, H], weight: float[V, H], target: int64[N], old_logprob: float[N], "
    f"advantage: float[N], mask: mask[N], denom: float[], ref_logprob: float[N], {HEAD}",
    also=lambda given: check_kl(given.options.kl),
)
def _linear_ppo_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    tokens: PpoTokens,
    head: HeadOptions,
    ignore_index: int,
    options: PpoOptions,
    needs: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    run = registry.implementation("linear_ppo_loss", backend).forward
    with autocast.off(hidden):
        return run(hidden, weight, target, tokens, head, options, ignore_index, needs)


@_linear_ppo_loss.register_fake
def _(hidden, weight, target, tokens, head, ignore_index, options, needs, backend):
    inputs = zip(HeadGrads.names, (hidden, weight, head.bias, head.lora_A, head.lora_B), strict=True)
    grads = [x.shape if name in needs.split(",") and x is not None else 0 for name, x in inputs]
    sizes = ((), 9, hidden.shape[0], *grads)
    return tuple(hidden.new_empty(size, dtype=accumulation_dtype(hidden, weight)) for size in sizes)


def _setup_context(ctx, inputs, output):
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[3:])
    given = {"hidden": inputs.hidden, "weight": inputs.weight, **inputs.head._asdict()}
    ctx.dtypes = {name: given[name].dtype for name in HeadGrads.names if name in inputs.needs.split(",")}


def _backward(ctx, d_loss, *unused):
    grads = zip(HeadGrads.names, ctx.saved_tensors, strict=True) if d_loss is not None else ()
    return _linear_ppo_loss.gradients(**{n: (d * d_loss).to(ctx.dtypes[n]) for n, d in grads if n in ctx.dtypes})


_linear_ppo_loss.register_autograd(_backward, setup_context=_setup_context)
