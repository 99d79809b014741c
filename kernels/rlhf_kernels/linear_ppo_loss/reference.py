"""`linear_ppo_loss` in plain torch: per row chunk one tile of logits, its loss and at once its gradient.

A row's coefficient ∂loss/∂logprob is known as soon as its own tile is, so nothing is made again in the
backward: 1 GEMM forward, 1 for d_hidden, 1 for a trained weight. Rows whose coefficients are all zero are
left out of the gradient GEMMs (picking them reads a count from the device, so this path does not fit into a
CUDA graph).
Tiles have the shapes that `linear_logprob` gives them, so a log-prob made there gives a ratio of exactly 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..autocast import without_autocast
from ..linear_logprob.reference import tile_grad, tile_stats
from ..logits import (
    Head,
    HeadGrads,
    HeadOptions,
    accumulation_dtype,
    row_chunks,
    split_target,
)
from ..ppo_loss.reference import forward as ppo_loss_forward


@without_autocast
def forward(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    denom: Tensor,
    ref_logprob: Tensor | None,
    options: HeadOptions,
    ignore_index: int,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    kl: str,
    kl_coef: float,
    entropy_coef: float,
    needs: str,
) -> tuple[Tensor, ...]:
    """(loss [], statistics [9], logprob [N], d_hidden, d_weight, d_bias, d_lora_A, d_lora_B).

    Gradients are in the accumulation dtype, because the backward still scales them; empty where `needs` does
    not name them. A masked row is treated like an ignored one: neither its target nor its numbers are looked
    at.
    """
    n_rows, n_vocab = hidden.shape[0], weight.shape[0]
    dtype = accumulation_dtype(hidden, weight)
    target = torch.where(mask != 0, target, ignore_index)
    keep, index = split_target(target, n_vocab, ignore_index)
    factor = torch.where(keep, mask.to(dtype), 0.0)  # [N]
    denom = denom.to(dtype)
    head = Head.of(hidden, weight, keep, options)
    sums = HeadGrads(head, hidden, needs)
    logprob, entropy = (torch.zeros(n_rows, dtype=dtype, device=hidden.device) for _ in range(2))
    on_entropy = factor * (-entropy_coef) / denom  # ∂loss/∂entropy

    def ppo(rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        return ppo_loss_forward(
            logprob[rows],
            old_logprob[rows],
            advantage[rows],
            factor[rows],
            denom,
            None if ref_logprob is None else ref_logprob[rows],
            entropy[rows],
            clip_low,
            clip_high,
            dual_clip,
            kl,
            kl_coef,
            entropy_coef,
        )

    for rows in row_chunks(n_rows, n_vocab):
        h = head.rows(hidden, rows)
        z = head.tile(h, rows)
        stats = tile_stats(z.clone() if needs else z, index[rows], "entropy")
        logprob[rows] = torch.where(keep[rows], stats["logprob"], 0.0)
        entropy[rows] = torch.where(keep[rows], stats["entropy"], 0.0)
        if not needs:
            continue
        on_logprob = ppo(rows)[2]
        active = ((on_logprob != 0) | (on_entropy[rows] != 0)).nonzero()[:, 0]
        if active.numel() == 0:
            continue
        divisor = head.divisor(rows)
        if active.numel() < h.shape[0]:
            h, z = h[active], z[active]
            divisor = divisor[active] if isinstance(divisor, Tensor) else divisor
        g = tile_grad(
            z,
            index[rows][active],
            stats["lse"][active],
            logprob=on_logprob[active],
            entropy=(on_entropy[rows][active], stats["entropy"][active]) if entropy_coef else None,
        )
        sums.add(active + rows.start, h, head.pull_back_(g, z, divisor))
    loss, statistics, _ = ppo(slice(0, n_rows))
    made = (sums.sums.get(name, loss.new_empty(0)) for name in HeadGrads.names)
    return (loss, statistics, logprob, *made)
