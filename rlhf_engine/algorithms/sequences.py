"""Sums over whole answers and over groups of answers to one prompt. Dtypes are kept, gradients pass.

Legend: N sequences, M completion tokens packed; groups_N int64 [N] says which prompt an answer belongs to.
"""

from __future__ import annotations

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
