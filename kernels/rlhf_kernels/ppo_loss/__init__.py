"""PPO policy loss from per-token numbers, with its statistics, in one op; the value loss is in `value`.

Per token, with ratio r = exp(new − old), advantage A and mask m:

    policy = max(−A r, −A clip(r, 1 − clip_low, 1 + clip_high))
    dual clip, where A < 0: policy = min(policy, −A dual_clip)
    d = ref − new;   k1 = −d,   k2 = d²/2,   k3 = exp(d) − 1 − d
    loss = Σ m (policy + kl_coef · k − entropy_coef · entropy) / denom

    ∂policy/∂new = −A r, or 0 where a bound took over;   ∂k1 = 1,   ∂k2 = −d,   ∂k3 = 1 − exp(d)
    ∂loss/∂new = m (∂policy + kl_coef · ∂k) / denom;   ∂loss/∂entropy = −entropy_coef · m / denom

Symbols: all per-token tensors have one common shape, N elements. m: bool or 0/1 (a float acts as a weight).
denom: one number for the whole optimizer step, over all micro-batches and ranks, usually Σ m. Every result
that is divided by it may simply be added up, so gradient accumulation and data parallel are exact. What
stands at masked positions does not matter, NaN and inf included.

dtypes: any float in; fp32 inside and out, fp64 where new_logprob is fp64; gradients in the input's dtype.
Gradients flow to new_logprob and entropy only; everything else is a constant. Deterministic.

Source: Schulman et al. 2017 (clip); Ye et al. 2020 (dual clip); J. Schulman, "Approximating KL divergence".
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_kernels.ppo_loss import native, reference
from rlhf_kernels.ppo_loss.checks import (
    KL_ESTIMATORS,
    accumulate_dtype,
    as_denom,
    check_denom,
    check_kl,
    check_tensors,
    flat,
    flat_or_none,
    is_one,
    like,
)
from rlhf_kernels.ppo_loss.options import PpoOptions, PpoTokens
from rlhf_kernels.ppo_loss.statistics import LossAndStatistics, PolicyStatistics
from rlhf_kernels.ppo_loss.value import ValueLossOutputs, explained_variance, value_loss
from rlhf_kernels.runtime import cuda_support, registry, signature, triton_support
from rlhf_kernels.runtime.eager import eager

__all__ = [
    "KL_ESTIMATORS",
    "PolicyStatistics",
    "PpoLossOutputs",
    "PpoOptions",
    "PpoTokens",
    "ValueLossOutputs",
    "explained_variance",
    "ppo_loss",
    "value_loss",
]

registry.register("ppo_loss", "reference", reference)
registry.register("ppo_loss", "cuda", registry.Lazy("rlhf_kernels.ppo_loss.cuda", cuda_support.unsupported))
registry.register("ppo_loss", "triton", registry.Lazy("rlhf_kernels.ppo_loss.triton", triton_support.unsupported))
registry.register("ppo_loss", "cpu", native)


class PpoLossOutputs(PolicyStatistics, LossAndStatistics):
    """Result of `ppo_loss`: loss [], which alone carries a gradient, statistics [9], and each statistic by name."""


@signature.custom_op(
    "rlhf_kernels::ppo_loss",
    "new_logprob: float[N], old_logprob: float[N], advantage: float[N], mask: real[N], denom: float[], "
    "ref_logprob: float[N], entropy: float[N]",
    also=lambda given: check_kl(given.options.kl),
)
def _ppo_loss_op(
    new_logprob: Tensor, tokens: PpoTokens, entropy: Tensor | None, options: PpoOptions, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    return registry.implementation("ppo_loss", backend).forward(new_logprob, tokens, entropy, options)


@_ppo_loss_op.register_fake
def _(new_logprob, *args):  # type: ignore[no-untyped-def]
    dtype = accumulate_dtype(new_logprob)
    return (
        new_logprob.new_empty((), dtype=dtype),
        new_logprob.new_empty(9, dtype=dtype),
        new_logprob.new_empty(new_logprob.shape, dtype=dtype),
    )


@signature.custom_op(
    "rlhf_kernels::ppo_loss_backward",
    "grad_loss: float[], dloss: float[N], mask: real[N], denom: float[]",
)
def _ppo_loss_backward_op(
    grad_loss: Tensor,
    dloss: Tensor,
    mask: Tensor,
    denom: Tensor,
    entropy_coef: float,
    need_new_logprob: bool,
    need_entropy: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    return registry.implementation("ppo_loss", backend).backward(
        grad_loss, dloss, mask, denom, entropy_coef, need_new_logprob, need_entropy
    )


@_ppo_loss_backward_op.register_fake
def _(grad_loss, dloss, mask, denom, entropy_coef, need_new_logprob, need_entropy, backend):  # type: ignore[no-untyped-def]
    n = dloss.shape[0]
    return dloss.new_empty(n if need_new_logprob else 0), dloss.new_empty(n if need_entropy else 0)


def _ppo_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, statistics, dloss = output
    ctx.mark_non_differentiable(statistics, dloss)
    ctx.save_for_backward(dloss, inputs.tokens.mask, inputs.tokens.denom)
    ctx.entropy_coef, ctx.backend = inputs.options.entropy_coef, inputs.backend
    ctx.dtypes = (inputs.new_logprob.dtype, None if inputs.entropy is None else inputs.entropy.dtype)


def _ppo_backward(ctx, grad_loss, grad_statistics, grad_dloss):  # type: ignore[no-untyped-def]
    needs = _ppo_loss_op.needed(ctx, "new_logprob", "entropy")
    made = _ppo_loss_backward_op(grad_loss, *ctx.saved_tensors, ctx.entropy_coef, *needs, ctx.backend)
    new_logprob, entropy = (x.to(t) if need else None for x, t, need in zip(made, ctx.dtypes, needs, strict=True))
    return _ppo_loss_op.gradients(new_logprob=new_logprob, entropy=entropy)


_ppo_loss_op.register_autograd(_ppo_backward, setup_context=_ppo_setup)


class _PpoGradient(torch.autograd.Function):
    """Gives a loss that was computed eagerly its gradient to new_logprob and entropy."""

    @staticmethod
    def forward(ctx, new_logprob, entropy, state):  # type: ignore[no-untyped-def]
        loss, dloss, mask, denom, ctx.entropy_coef, ctx.backend = state
        ctx.save_for_backward(dloss, mask, denom if isinstance(denom, Tensor) else None)
        ctx.denom = denom if isinstance(denom, float) else None
        ctx.shape = new_logprob.shape
        ctx.dtypes = (new_logprob.dtype, None if entropy is None else entropy.dtype)
        return loss

    @staticmethod
    def backward(ctx, grad_loss):  # type: ignore[no-untyped-def]
        dloss, mask, denom = ctx.saved_tensors
        denom = ctx.denom if denom is None else denom
        need_new, need_entropy, _ = ctx.needs_input_grad
        if eager(grad_loss) and not torch.is_grad_enabled():
            as_it_is = need_new and is_one(grad_loss)
            grad_new = grad_entropy = dloss
            if need_entropy or not as_it_is:
                run = registry.implementation("ppo_loss", ctx.backend).backward
                made = run(grad_loss, dloss, mask, denom, ctx.entropy_coef, need_new and not as_it_is, need_entropy)
                grad_new, grad_entropy = dloss if as_it_is else made[0], made[1]
        else:
            grad_new, grad_entropy = _ppo_loss_backward_op(
                grad_loss,
                flat(dloss),
                flat(mask),
                as_denom(denom, dloss),
                ctx.entropy_coef,
                need_new,
                need_entropy,
                ctx.backend,
            )
        return (
            like(grad_new, ctx.shape, ctx.dtypes[0]) if need_new else None,
            like(grad_entropy, ctx.shape, ctx.dtypes[1]) if need_entropy else None,
            None,
        )


def ppo_loss(
    new_logprob: Tensor,
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
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
    backend: str = "auto",
) -> PpoLossOutputs:
    """Clipped PPO policy loss (Schulman et al. 2017) with optional KL and entropy terms, and its statistics.

    The equations stand in the module's docstring. Differentiable in new_logprob and entropy. All per-token tensors have
    one shape, of N elements, and one device; masked tokens may hold anything.

    Args:
        new_logprob: floating, of any shape; log-probs of the policy that is trained.
        old_logprob: floating; log-probs of the policy that sampled the tokens, a constant.
        advantage: floating, a constant.
        mask: bool or real numbers; 0 where a token does not count, other numbers are weights.
        denom: finite number > 0, or a tensor []; Σ mask over the whole optimizer step.
        clip_low: number ≥ 0; the ratio is clipped at 1 − clip_low.
        clip_high: number ≥ 0; the ratio is clipped at 1 + clip_high.
        dual_clip: number > 1, the bound of the ratio where the advantage is negative. None: no such bound.
        ref_logprob: floating; log-probs of the reference, a constant. None: no KL, and kl_coef is 0.
        kl: estimator of the KL term: `k1`, `k2` or `k3`.
        kl_coef: finite coefficient of the KL term.
        entropy: floating; entropies of the policy. None: no bonus, and entropy_coef is 0.
        entropy_coef: finite coefficient of the entropy bonus.
        backend: `auto` or the name of a backend, see `rlhf_kernels.runtime.registry`.

    Returns:
        `PpoLossOutputs` with loss [] and statistics [9]: float64 if new_logprob is float64, else float32.

    Raises:
        TypeError: a tensor is missing or not floating, or mask is complex.
        ValueError: a shape or device does not fit, or a number is out of its range.
        ValueError: a coefficient is not 0 without its tensor, or kl or backend is unknown.
        BackendUnavailableError: the named backend cannot serve the call.
    """
    check_tensors(
        new_logprob=new_logprob,
        old_logprob=old_logprob,
        advantage=advantage,
        mask=mask,
        ref_logprob=ref_logprob,
        entropy=entropy,
    )
    options = PpoOptions.checked(
        clip_low, clip_high, dual_clip, kl, kl_coef, entropy_coef, ref_logprob=ref_logprob, entropy=entropy
    )
    check_denom(denom)
    chosen = registry.resolve("ppo_loss", backend, new_logprob)
    if not eager(new_logprob, old_logprob, advantage, mask, ref_logprob, entropy):
        tokens = PpoTokens(
            flat(old_logprob), flat(advantage), flat(mask), as_denom(denom, new_logprob), flat_or_none(ref_logprob)
        )
        given_entropy = None if entropy is None else entropy.reshape(-1)
        loss, statistics, _ = _ppo_loss_op(new_logprob.reshape(-1), tokens, given_entropy, options, chosen)
        return PpoLossOutputs(loss, statistics)
    implementation = registry.implementation("ppo_loss", chosen)
    if getattr(implementation, "TAKES_AS_GIVEN", False):
        tokens = PpoTokens(old_logprob, advantage, mask, float(denom), ref_logprob)
        loss, statistics, dloss = implementation.forward(new_logprob, tokens, entropy, options)
    else:
        tokens = PpoTokens(
            flat(old_logprob), flat(advantage), flat(mask), as_denom(denom, new_logprob), flat_or_none(ref_logprob)
        )
        loss, statistics, dloss = implementation.forward(flat(new_logprob), tokens, flat_or_none(entropy), options)
    if torch.is_grad_enabled() and (new_logprob.requires_grad or (entropy is not None and entropy.requires_grad)):
        loss = _PpoGradient.apply(
            new_logprob, entropy, (loss, dloss, tokens.mask, tokens.denom, options.entropy_coef, chosen)
        )
    return PpoLossOutputs(loss, statistics)
