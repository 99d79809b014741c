"""`linear_logprob` in plain torch: one tile of logits per row chunk, made again in the backward.

Row statistics, with p = softmax(z), lse = log Σ eᶻ, target t:
    logprob = z_t − lse                  d/dz_j = 1[j = t] − p_j
    lse                                  d/dz_j = p_j
    entropy = −Σ p log p                 d/dz_j = −p_j (log p_j + entropy)
    mean_logit = Σ z / V                 d/dz_j = 1 / V
    log_sum_sq_prob = log Σ p²           d/dz_j = 2 p_j² / Σ p² − 2 p_j
    is_top1 = [t is the first arg-max]   no derivative

Logits, shapes and dtypes: `rlhf_kernels.vocab.logits`. GEMMs per chunk: forward 1, or 2 with the gradient ahead and
then none in the backward; otherwise backward has 1 to make the tile again, plus 1 for hidden and 1 for a trained
weight. Peak memory beyond inputs and outputs: about four tiles
of 2²² elements.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_kernels.vocab.logits import (
    OUTPUTS,
    Head,
    HeadGrads,
    HeadOptions,
    LogprobSaved,
    accumulation_dtype,
    logprob_hidden_grad,
    row_chunks,
    split_target,
)

_LOG_ZERO = -1e30  # stands in for log 0 where p = 0 multiplies it; a gradient times it stays finite


def tile_stats(z: Tensor, index: Tensor, wanted: str) -> dict[str, Tensor]:
    """Statistics of a tile z [n, V] (overwritten) at targets `index` [n]: logprob, lse and those wanted.

    The maximum is subtracted first and never starts from 0, so rows of any sign and size are safe; columns at
    −inf have p = 0 and count as 0 in the entropy.
    """
    stats = {}
    names = wanted.split(",")
    if "is_top1" in names:
        stats["is_top1"] = (z.argmax(-1) == index).to(z.dtype)  # argmax returns the first maximum
    if "mean_logit" in names:
        stats["mean_logit"] = z.mean(-1)
    # A row of −inf only has no finite maximum; the smallest float keeps it at lse = −inf rather than NaN
    m = z.amax(-1).clamp_min(torch.finfo(z.dtype).min)
    z.sub_(m[:, None])
    z_target = z.gather(1, index[:, None])[:, 0]
    e = z.exp()
    total = e.sum(-1)
    log_total = total.log()
    stats["logprob"], stats["lse"] = z_target - log_total, m + log_total
    if "entropy" in names:
        stats["entropy"] = log_total - z.clamp_min_(torch.finfo(z.dtype).min).mul_(e).sum(-1) / total
    if "log_sum_sq_prob" in names:
        stats["log_sum_sq_prob"] = e.square_().sum(-1).log() - 2 * log_total
    return stats


def tile_grad(
    z: Tensor,
    index: Tensor,
    lse: Tensor,
    *,
    logprob: Tensor | None = None,
    lse_grad: Tensor | None = None,
    entropy: tuple[Tensor, Tensor] | None = None,
    mean_logit: Tensor | None = None,
    log_sum_sq_prob: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """dL/dz [n, V] from gradients [n] of the row statistics; pairs are (gradient, value). z is only read.

    A row with lse = +inf gets p = 0, which together with zero gradients makes its whole row 0.
    """
    log_p = z - lse[:, None]
    p = log_p.exp_() if entropy is None else log_p.exp()
    on_p = torch.zeros_like(lse)  # [n], factor of p_j
    if logprob is not None:
        on_p = on_p - logprob
    if lse_grad is not None:
        on_p = on_p + lse_grad
    if log_sum_sq_prob is not None:
        on_p = on_p - 2 * log_sum_sq_prob[0]
    factor = on_p[:, None]  # [n, 1], becomes [n, V] when a term needs it
    if entropy is not None:
        grad, value = entropy
        factor = factor - grad[:, None] * log_p.clamp_min_(_LOG_ZERO).add_(value[:, None])
    if log_sum_sq_prob is not None:
        grad, value = log_sum_sq_prob
        factor = factor + p * (2 * grad * torch.exp(-value))[:, None]
    g = p.mul_(factor)
    if mean_logit is not None:
        g += (mean_logit / z.shape[1])[:, None]
    if logprob is not None:
        g[torch.arange(z.shape[0], device=z.device), index] += logprob
    return g


def forward(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    options: HeadOptions,
    ignore_index: int,
    outputs: str,
    ahead: bool,
) -> tuple[Tensor, ...]:
    """Statistics [N] in the order of `OUTPUTS`, empty where not wanted, then E [N, H], empty unless `ahead`.

    logprob and lse are always made, for backward.
    """
    n_rows, n_vocab = hidden.shape[0], weight.shape[0]
    keep, index = split_target(target, n_vocab, ignore_index)
    head = Head.of(hidden, weight, keep, options)
    made = {"logprob", "lse", *outputs.split(",")}
    dtype = accumulation_dtype(hidden, weight)
    results = {name: torch.zeros(n_rows, dtype=dtype, device=hidden.device) for name in OUTPUTS if name in made}
    expected = HeadGrads(head, hidden, "hidden" if ahead else "")
    for rows in row_chunks(n_rows, n_vocab):
        h = head.rows(hidden, rows)
        z = head.tile(h, rows)
        stats = tile_stats(z.clone() if ahead else z, index[rows], outputs)
        for name, value in stats.items():
            results[name][rows] = torch.where(keep[rows], value, 0.0)
        if ahead:
            p = (z - torch.where(keep[rows], stats["lse"], torch.inf)[:, None]).exp_()
            p.scatter_(1, index[rows, None], 0.0)
            expected.add(rows, h, head.pull_back_(p, z, head.divisor(rows)))
    everything = (*(results.get(name) for name in OUTPUTS), expected.sums.get("hidden"))
    # One empty tensor each: an op's outputs may not share memory
    return tuple(hidden.new_empty(0, dtype=dtype) if x is None else x for x in everything)


def backward(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    options: HeadOptions,
    ignore_index: int,
    saved: LogprobSaved,
    grads: tuple[Tensor | None, ...],
    needs: str,
) -> tuple[Tensor, ...]:
    """dL/d(hidden, weight, bias, lora_A, lora_B), empty where `needs` does not name it.

    grads: those of logprob, entropy, lse, mean_logit, log_sum_sq_prob (or None).
    """
    n_rows, n_vocab = hidden.shape[0], weight.shape[0]
    keep, index = split_target(target, n_vocab, ignore_index)
    if needs == "hidden" and saved.expected.dim() == 2 and grads[1] is grads[3] is grads[4] is None:
        d_hidden = logprob_hidden_grad(weight, index, keep, options, saved, grads[0], grads[2])
        return (d_hidden.to(hidden.dtype), *[saved.lse.new_empty(0) for _ in HeadGrads.names[1:]])
    head = Head.of(hidden, weight, keep, options)
    sums = HeadGrads(head, hidden, needs)
    dtype = head.weight.dtype
    lse = torch.where(keep, saved.lse, torch.inf)  # p = 0 in rows that do not count
    d_logprob, d_entropy, d_lse, d_mean, d_sum_sq = (
        None if g is None else torch.where(keep, g.to(dtype), 0.0) for g in grads
    )
    for rows in row_chunks(n_rows, n_vocab):
        h = head.rows(hidden, rows)
        z = head.tile(h, rows)
        g = tile_grad(
            z,
            index[rows],
            lse[rows],
            logprob=None if d_logprob is None else d_logprob[rows],
            lse_grad=None if d_lse is None else d_lse[rows],
            entropy=None if d_entropy is None else (d_entropy[rows], saved.entropy[rows]),
            mean_logit=None if d_mean is None else d_mean[rows],
            log_sum_sq_prob=None if d_sum_sq is None else (d_sum_sq[rows], saved.log_sum_sq_prob[rows]),
        )
        sums.add(rows, h, head.pull_back_(g, z, head.divisor(rows)))
    return sums.results(hidden, weight, options.bias, options.lora_A, options.lora_B)
