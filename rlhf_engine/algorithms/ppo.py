"""PPO for language models: token rewards, advantages, the update. Pure functions and one step.

Per token t of an answer, with policy π, reference π_ref, score R of the whole answer (Hydra-RLHF, arXiv 2309.00754 §3;
PPO, arXiv 1707.06347; GAE, arXiv 1506.02438):

    r_t = −β · KL_t + [t last] · R        KL_t by k1 = log π − log π_ref, k3 = e^{−k1} − 1 + k1, or exactly
    δ_t = r_t + γ V_{t+1} − V_t           A_t = δ_t + γ λ A_{t+1}           G_t = A_t + V_t
    L   = Σ_t max(−A_t ρ_t, −A_t clip(ρ_t, 1−ε, 1+ε)) / n + c_v · ½ Σ_t max((V_t−G_t)², (clip V_t − G_t)²) / n

Legend: N sequences, M completion tokens packed, C the longest completion ([N, C] is right-padded).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from rlhf_kernels.gae import gae, whiten
from rlhf_kernels.ppo_loss import explained_variance

from rlhf_engine.devices import is_out_of_memory, release_memory
from rlhf_engine.errors import MemoryLimitError, NonFiniteError
from rlhf_engine.hydra import HydraModel, PackedBatch, PolicyLoss, ValueLoss


@dataclass(frozen=True, kw_only=True, eq=False)
class Experience:
    """What one update learns from. Nothing in it requires a gradient."""

    batch: PackedBatch
    old_logprobs_M: torch.Tensor
    """fp32 [M], log π of the policy before the update, from the training forward."""
    old_values_M: torch.Tensor
    """fp32 [M]"""
    advantages_M: torch.Tensor
    """fp32 [M], whitened where asked for."""
    returns_M: torch.Tensor
    """fp32 [M]"""


@dataclass(frozen=True, kw_only=True)
class UpdateOptions:
    """How an update goes over its experience."""

    num_ppo_epochs: int
    num_mini_batches: int
    micro_batch_size: int
    """Sequences per forward and backward."""
    cliprange: float
    cliprange_value: float
    vf_coef: float
    entropy_coef: float
    temperature: float
    target_kl: float | None
    train_actor: bool = True
    """False while only the critic warms up."""


def token_kl(
    logprobs_M: torch.Tensor,
    ref_logprobs_M: torch.Tensor,
    estimator: str,
    exact_kl_M: torch.Tensor | None = None,
) -> torch.Tensor:
    """KL per token, fp32 [M], by `k1`, `k3` (Schulman's unbiased, non-negative one) or the given exact values."""
    if estimator == "exact":
        if exact_kl_M is None:
            raise ValueError("exact_kl_M: expected the exact KL per token for estimator='exact', got None")
        return exact_kl_M
    k1 = logprobs_M - ref_logprobs_M
    if estimator == "k1":
        return k1
    if estimator == "k3":
        return torch.expm1(-k1) + k1
    raise ValueError(f"estimator: expected 'k1', 'k3' or 'exact', got {estimator!r}")


def token_rewards(kl_M: torch.Tensor, scores_N: torch.Tensor, batch: PackedBatch, beta: float) -> torch.Tensor:
    """r_t [M]: −β·KL_t, plus the answer's score on its last token."""
    rewards = -beta * kl_M
    last = torch.tensor(batch.completion_cu[1:], device=kl_M.device) - 1
    return rewards.index_add(0, last, scores_N.to(rewards.dtype))


def advantages(
    rewards_M: torch.Tensor,
    values_M: torch.Tensor,
    batch: PackedBatch,
    *,
    gamma: float,
    lam: float,
    whiten_rewards: bool,
    whiten_advantages: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantage [M], return [M]) by GAE over each answer; the last token's next value is 0."""
    mask_NC = batch.pad(torch.ones_like(rewards_M))
    rewards_NC = batch.pad(rewards_M)
    if whiten_rewards:
        rewards_NC = whiten(rewards_NC, mask_NC, shift_mean=False)
    advantage_NC, return_NC = gae(rewards_NC, batch.pad(values_M), mask_NC, gamma=gamma, lam=lam)
    if whiten_advantages:
        advantage_NC = whiten(advantage_NC, mask_NC)
    return batch.unpad(advantage_NC), batch.unpad(return_NC)


def minibatches(n: int, count: int, generator: torch.Generator) -> list[list[int]]:
    """A random partition of n sequences into `count` minibatches of nearly equal size (fewer if n < count)."""
    order = torch.randperm(n, generator=generator).tolist()
    count = min(count, n)
    bounds = [round(i * n / count) for i in range(count + 1)]
    return [order[a:b] for a, b in itertools.pairwise(bounds)]


def ppo_update(
    model: HydraModel,
    experience: Experience,
    options: UpdateOptions,
    step: Callable[[], Mapping[str, float]],
    *,
    seed: int,
) -> dict[str, float]:
    """All epochs over one experience; returns metrics averaged over the minibatches.

    step: clips and applies the accumulated gradients, clears them, returns gradient norms by role. Denominators are
    those of the whole minibatch, so that micro-batches add up to its exact gradient. With `target_kl`, a minibatch
    whose approximate KL exceeds it is not applied and ends the update.

    A minibatch that runs out of memory is redone from its start with micro-batches of half the size, for this and all
    that follow: the same sum of gradients and, keyed by sample and position, the same dropout masks. Raises
    NonFiniteError, before the minibatch is applied, naming the loss that is not finite, and MemoryLimitError where not
    even one sequence fits.
    """
    generator = torch.Generator().manual_seed(seed)
    applied: list[dict[str, float]] = []
    stopped = False
    first_mismatch = 0.0
    for epoch in range(options.num_ppo_epochs):
        for number, indices in enumerate(
            minibatches(experience.batch.n_sequences, options.num_mini_batches, generator)
        ):
            dropout_seed = int(torch.randint(2**62, (), generator=generator))
            stats, options = _accumulate_in_memory(model, experience, indices, options, dropout_seed)
            _require_finite(model, stats, f"epoch {epoch}, minibatch {number}")
            if epoch == 0 and number == 0:
                first_mismatch = stats["mismatch"]
            if options.target_kl is not None and stats["approx_kl"] > options.target_kl:
                model.zero_grad(set_to_none=True)
                stopped = True
                break
            applied.append({**stats, **step()})
        if stopped:
            break
    keys = [k for k in (applied[0] if applied else {}) if k != "mismatch"]
    means = {k: sum(s[k] for s in applied) / len(applied) for k in keys}
    return {
        **means,
        "optimizer_steps": float(len(applied)),
        "stopped_by_target_kl": float(stopped),
        "mismatch/update_max": first_mismatch,
        "micro_batch_size": float(options.micro_batch_size),
    }


def _accumulate_in_memory(
    model: HydraModel,
    experience: Experience,
    indices: Sequence[int],
    options: UpdateOptions,
    dropout_seed: int,
) -> tuple[dict[str, float], UpdateOptions]:
    """`_accumulate`, with smaller micro-batches until it fits; the statistics, and the options that fitted."""
    while True:
        try:
            return _accumulate(model, experience, indices, options, dropout_seed), options
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            size = min(options.micro_batch_size, len(indices))
            if size == 1:
                model.zero_grad(set_to_none=True)  # of the sequences before it
                raise MemoryLimitError(
                    "the update of a single sequence does not fit into memory; shorten answers, lower token_budget or "
                    "lora_r, or switch gradient_checkpointing on"
                ) from error
        # here rather than above, where the error still holds the tensors of the failed pass
        model.zero_grad(set_to_none=True)
        release_memory(model.device)
        options = dataclasses.replace(options, micro_batch_size=(size + 1) // 2)


def _accumulate(
    model: HydraModel,
    experience: Experience,
    indices: Sequence[int],
    options: UpdateOptions,
    dropout_seed: int,
) -> dict[str, float]:
    """Gradients of one minibatch, micro-batch by micro-batch; its statistics."""
    lengths = experience.batch.completion_lens
    denom = float(sum(lengths[i] for i in indices))
    totals: dict[str, torch.Tensor] = {}
    value_sums: list[torch.Tensor] = []
    worst: list[torch.Tensor] = []
    for start in range(0, len(indices), options.micro_batch_size):
        chosen = indices[start : start + options.micro_batch_size]
        part = experience.batch.select(chosen)
        rows = experience.batch.select_completion_rows(chosen)
        policy, value = _outputs(experience, part, rows, denom, options)
        found = _backward(model, part, (policy, value) if options.train_actor else (value,), options, dropout_seed)
        value_out = found.results[-1]
        sums = {"loss": found.loss, "value/loss": value_out.loss, "value/clip_ratio": value_out.clip_fraction}
        if options.train_actor:
            policy_out = found.results[0]
            worst.append((policy_out.logprob - experience.old_logprobs_M[rows]).abs().max())
            sums |= {
                "policy/loss": policy_out.policy_loss,
                "entropy": policy_out.entropy,
                "clip_ratio": policy_out.clip_fraction,
                "approx_kl": policy_out.approx_kl,
            }
        for name, tensor in sums.items():
            totals[name] = totals.get(name, torch.zeros_like(tensor)) + tensor.detach()
        value_sums.append(torch.stack([getattr(value_out, f).double() for f in _VALUE_SUMS]))
    stats = {name: float(tensor) for name, tensor in totals.items()}
    stats.setdefault("approx_kl", 0.0)
    moments = dict(zip(_VALUE_SUMS, torch.stack(value_sums).sum(0), strict=True))
    stats["value/explained_variance"] = float(explained_variance(**moments))
    stats["mismatch"] = float(torch.stack(worst).max()) if worst else 0.0
    return stats


_VALUE_SUMS = ("count", "sum_error", "sum_error_sq", "sum_ret", "sum_ret_sq")


class _Backward(NamedTuple):
    """What a micro-batch gave beside its gradients."""

    loss: torch.Tensor
    """0-d, the weighted sum whose gradient was taken"""
    results: list[Any]
    """of the outputs, in their order"""


def _backward(
    model: HydraModel,
    part: PackedBatch,
    outputs: Sequence[PolicyLoss | ValueLoss],
    options: UpdateOptions,
    dropout_seed: int,
) -> _Backward:
    """Add a micro-batch's gradients: of all outputs at once where their lanes share a traversal, else one by one.

    One by one, only one graph is alive at a time; together they would cost memory for nothing.
    """
    together = model.runs_together(part, [output.role for output in outputs])
    losses: list[torch.Tensor] = []
    results: list[Any] = []
    for group in [outputs] if together else [[output] for output in outputs]:
        found = model(part, group, dropout_seed=dropout_seed)
        weights = [1.0 if isinstance(output, PolicyLoss) else options.vf_coef for output in group]
        loss = torch.stack([weight * out.loss for weight, out in zip(weights, found, strict=True)]).sum()
        loss.backward()
        losses.append(loss.detach())
        results.extend(found)
    if not options.train_actor:
        # a critic on the actor's slot (J-Hydra) trains its head alone until the actor may move
        for p in model.trainable_parameters("actor").values():
            p.grad = None
    return _Backward(loss=torch.stack(losses).sum(), results=results)


def _outputs(
    experience: Experience, part: PackedBatch, rows: torch.Tensor, denom: float, options: UpdateOptions
) -> tuple[PolicyLoss, ValueLoss]:
    mask = torch.ones(part.n_completion_tokens, dtype=torch.bool, device=part.device)
    policy = PolicyLoss(
        old_logprob_M=experience.old_logprobs_M[rows],
        advantage_M=experience.advantages_M[rows],
        mask_M=mask,
        denom=denom,
        clip_low=options.cliprange,
        clip_high=options.cliprange,
        entropy_coef=options.entropy_coef,
        temperature=options.temperature,
    )
    value = ValueLoss(
        old_value_M=experience.old_values_M[rows],
        return_M=experience.returns_M[rows],
        mask_M=mask,
        denom=denom,
        clip=options.cliprange_value,
    )
    return policy, value


def _require_finite(model: HydraModel, stats: Mapping[str, float], where: str) -> None:
    for name in ("policy/loss", "value/loss", "loss"):
        if name in stats and not math.isfinite(stats[name]):
            model.zero_grad(set_to_none=True)  # nobody may step on what this minibatch left behind
            raise NonFiniteError(f"{name} is {stats[name]} at {where}; nothing of this minibatch was applied")
