"""Sums over whole answers and over groups of answers to one prompt, and KL. Dtypes are kept, gradients pass.

Legend: N sequences, M completion tokens packed; groups_N int64 [N] says which prompt an answer belongs to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from rlhf_kernels.gae import gae, whiten

from rlhf_engine.hydra import PackedBatch


def sequence_sums(x_M: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """Σ_t x_t of each answer, [N]; the same bits every time, also on CUDA."""
    _check_tokens("x_M", x_M, batch)
    return batch.pad(x_M).sum(1)


def spread(x_N: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """An answer's number at each of its tokens, [M]."""
    if x_N.shape != (batch.n_sequences,):
        raise ValueError(f"x_N: expected one number per answer, [{batch.n_sequences}], got {list(x_N.shape)}")
    return x_N[batch.sequence_of_M]


def to_go(x_M: torch.Tensor, batch: PackedBatch, *, gamma: float = 1.0) -> torch.Tensor:
    """Σ_{s ≥ t} γ^{s−t} x_s within each answer, [M]."""
    _check_tokens("x_M", x_M, batch)
    x_NC = batch.pad(x_M)
    # generalised advantage estimation with λ = 1 and values of 0 is this sum
    sums_NC = gae(x_NC, torch.zeros_like(x_NC), batch.pad(torch.ones_like(x_M)), gamma=gamma, lam=1.0).advantage
    return batch.unpad(sums_NC)


def whitened(x_M: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """Numbers of all tokens with mean 0 and variance 1, [M]."""
    _check_tokens("x_M", x_M, batch)
    return batch.unpad(whiten(batch.pad(x_M), batch.pad(torch.ones_like(x_M))))


def turn_sums(x_M: torch.Tensor, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Σ_t x_t of each turn, [N, K] with 0 where there is none; and whether there is a turn, bool [N, K]."""
    _check_tokens("x_M", x_M, batch)
    x_NC, turns_NC = batch.pad(x_M), batch.pad(batch.turn_of_M, -1)
    here = [turns_NC == k for k in range(max(map(len, batch.turns), default=1) if batch.turns else 1)]
    return torch.stack([(x_NC * mask).sum(1) for mask in here], 1), torch.stack([mask.any(1) for mask in here], 1)


def of_turns(x_NK: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """A turn's number at each of its tokens, [M]."""
    return x_NK[batch.sequence_of_M, batch.turn_of_M]


def turn_advantages(
    rewards_M: torch.Tensor,
    groups_N: torch.Tensor,
    batch: PackedBatch,
    of_group: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The advantage, by `of_group`, of G_k = Σ_{j ≥ k} Σ_t r_t of turn j at the tokens of turn k, [M].

    It is among the answers to a prompt that have such a turn. One that has it alone has that of its whole score there,
    which differs by nothing that depends on the turn.
    """
    sums_NK, is_there_NK = turn_sums(rewards_M, batch)
    returns_NK = sums_NK.flip(1).cumsum(1).flip(1)
    advantages_NK = of_group(returns_NK[:, 0], groups_N)[:, None].repeat(1, returns_NK.shape[1])
    for k in range(1, returns_NK.shape[1]):
        among_N = is_there_NK[:, k] & (group_sums(is_there_NK[:, k].float(), groups_N) > 1)
        if among_N.any():
            advantages_NK[among_N, k] = of_group(returns_NK[among_N, k], groups_N[among_N])
    return of_turns(advantages_NK, batch)


def group_sums(x_N: torch.Tensor, groups_N: torch.Tensor) -> torch.Tensor:
    """Σ over the answers of an answer's group, [N]; the same bits every time, also on CUDA."""
    return (_same(x_N, groups_N) * x_N).sum(1)


def best_and_worst(scores_N: torch.Tensor, groups_N: torch.Tensor) -> list[tuple[int, int]]:
    """(best, worst) answer of each prompt, the first among equals; the first and the last where all score the same."""
    scores = scores_N.tolist()
    members: dict[int, list[int]] = {}
    for i, group in enumerate(groups_N.tolist()):
        members.setdefault(group, []).append(i)
    pairs = []
    for group in members.values():
        best, worst = max(group, key=scores.__getitem__), min(group, key=scores.__getitem__)
        pairs.append((best, worst if worst != best else group[-1]))
    return pairs


def group_sizes(groups_N: torch.Tensor) -> torch.Tensor:
    """Number of answers in an answer's group, int64 [N]."""
    return (groups_N[:, None] == groups_N[None, :]).sum(1)


def _same(x_N: torch.Tensor, groups_N: torch.Tensor) -> torch.Tensor:
    if x_N.shape != groups_N.shape or x_N.dim() != 1:
        raise ValueError(f"groups_N: expected one group per answer, {list(x_N.shape)}, got {list(groups_N.shape)}")
    return (groups_N[:, None] == groups_N[None, :]).to(x_N.dtype)


def _check_tokens(name: str, x_M: torch.Tensor, batch: PackedBatch) -> None:
    if x_M.shape != (batch.n_completion_tokens,):
        raise ValueError(
            f"{name}: expected one number per completion token, [{batch.n_completion_tokens}], got {list(x_M.shape)}"
        )


Mode = Literal["token_truncate", "turn_truncate", "sequence_truncate"]


def sequence_log_ratio(log_ratio_M: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """Σ_t log ratio of each answer, [N]."""
    _check_tokens("log_ratio_M", log_ratio_M, batch)
    return sequence_sums(log_ratio_M, batch)


def importance_weights(log_ratio_M: torch.Tensor, batch: PackedBatch, *, mode: Mode, clip_max: float) -> torch.Tensor:
    """w [M], each in [0, clip_max]."""
    _check_tokens("log_ratio_M", log_ratio_M, batch)
    if not clip_max > 0:
        raise ValueError(f"clip_max: expected a positive number, got {clip_max}")
    if mode == "token_truncate":
        log_weight_M = log_ratio_M
    elif mode == "sequence_truncate":
        log_weight_M = sequence_log_ratio(log_ratio_M, batch)[batch.sequence_of_M]
    elif mode == "turn_truncate":
        log_weight_M = of_turns(turn_sums(log_ratio_M, batch)[0], batch)
    else:
        raise ValueError(f"mode: expected one of {get_args(Mode)}, got {mode!r}")
    return log_weight_M.exp().clamp(max=clip_max)


def weight_metrics(log_ratio_M: torch.Tensor, batch: PackedBatch, *, mode: Mode, clip_max: float) -> dict[str, float]:
    """Metrics of how far the two distributions differ, and of what is left of the batch under the weights.

    k3: mean of ratio − 1 − log ratio, Schulman's unbiased estimate of KL(π_roll ‖ π_old) per token.
    worst_sequence: largest |log ratio| of a whole answer. truncated_ratio: share of weights that are truncated, and
    effective_sample_size: (Σ w)² / (n Σ w²), both over tokens, or over answers or turns where these have the weights.
    """
    weights = importance_weights(log_ratio_M, batch, mode=mode, clip_max=clip_max)
    per_sequence = sequence_log_ratio(log_ratio_M, batch)
    raw = log_ratio_M
    if mode == "sequence_truncate":
        raw, weights = per_sequence, per_sequence.exp().clamp(max=clip_max)
    elif mode == "turn_truncate":
        raw = torch.masked_select(*turn_sums(log_ratio_M, batch))
        weights = raw.exp().clamp(max=clip_max)
    weights = weights.double()
    return {
        "k3": float((torch.expm1(log_ratio_M) - log_ratio_M).mean()),
        "worst_sequence": float(per_sequence.abs().max()),
        "truncated_ratio": float((raw.exp() > clip_max).float().mean()),
        "effective_sample_size": float(weights.sum() ** 2 / (len(weights) * weights.square().sum())),
        "importance_weight_mean": float(weights.mean()),
    }


def k3(logprobs_M: torch.Tensor, ref_logprobs_M: torch.Tensor) -> torch.Tensor:
    """Schulman's non-negative estimate of the KL per token, [M], with a gradient."""
    difference = ref_logprobs_M - logprobs_M
    return torch.expm1(difference) - difference
