"""`linear_ppo_loss` in plain torch: per row chunk one tile of logits, its loss and at once its gradient.

A row's coefficient ∂loss/∂logprob is known as soon as its own tile is, so nothing is made again in the backward: 1 GEMM
forward, 1 for d_hidden, 1 for a trained weight. Rows whose coefficients are all zero are left out of the gradient
GEMMs. Picking them reads a count from the device, so this path does not fit into a CUDA graph. Tiles have the shapes
that `linear_logprob` gives them, so a log-prob made there gives a ratio of exactly 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_kernels.linear_logprob.reference import tile_grad, tile_stats
from rlhf_kernels.ppo_loss.options import PpoOptions, PpoTokens
from rlhf_kernels.ppo_loss.reference import forward as ppo_loss_forward
from rlhf_kernels.vocab.logits import Head, HeadGrads, HeadOptions, accumulation_dtype, row_chunks, split_target


def forward(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    tokens: PpoTokens,
    head: HeadOptions,
    options: PpoOptions,
    ignore_index: int,
    needs: str,
) -> tuple[Tensor, ...]:
    """(loss [], statistics [9], logprob [N], d_hidden, d_weight, d_bias, d_lora_A, d_lora_B).

    Gradients are in the accumulation dtype, because the backward still scales them; empty where `needs` does
    not name them. A masked row is treated like an ignored one: neither its target nor its numbers are looked
    at.
    """
    n_rows, n_vocab = hidden.shape[0], weight.shape[0]
    dtype = accumulation_dtype(hidden, weight)
    target = torch.where(tokens.mask != 0, target, ignore_index)
    keep, index = split_target(target, n_vocab, ignore_index)
    factor = torch.where(keep, tokens.mask.to(dtype), 0.0)  # [N]
    denom = tokens.denom_tensor(dtype)
    tokens = tokens._replace(mask=factor, denom=denom)
    scorer = Head.of(hidden, weight, keep, head)
    sums = HeadGrads(scorer, hidden, needs)
    logprob, entropy = (torch.zeros(n_rows, dtype=dtype, device=hidden.device) for _ in range(2))
    on_entropy = factor * (-options.entropy_coef) / denom  # ∂loss/∂entropy

    def ppo(rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        return ppo_loss_forward(logprob[rows], tokens.rows(rows), entropy[rows], options)

    for rows in row_chunks(n_rows, n_vocab):
        h = scorer.rows(hidden, rows)
        z = scorer.tile(h, rows)
        stats = tile_stats(z.clone() if needs else z, index[rows], "entropy")
        logprob[rows] = torch.where(keep[rows], stats["logprob"], 0.0)
        entropy[rows] = torch.where(keep[rows], stats["entropy"], 0.0)
        if not needs:
            continue
        on_logprob = ppo(rows)[2]
        active = ((on_logprob != 0) | (on_entropy[rows] != 0)).nonzero()[:, 0]
        if active.numel() == 0:
            continue
        divisor = scorer.divisor(rows)
        if active.numel() < h.shape[0]:
            h, z = h[active], z[active]
            divisor = divisor[active] if isinstance(divisor, Tensor) else divisor
        g = tile_grad(
            z,
            index[rows][active],
            stats["lse"][active],
            logprob=on_logprob[active],
            entropy=(on_entropy[rows][active], stats["entropy"][active]) if options.entropy_coef else None,
        )
        sums.add(active + rows.start, h, scorer.pull_back_(g, z, divisor))
    loss, statistics, _ = ppo(slice(0, n_rows))
    made = (sums.sums.get(name, loss.new_empty(0)) for name in HeadGrads.names)
    return (loss, statistics, logprob, *made)
