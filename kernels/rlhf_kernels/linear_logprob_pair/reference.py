"""`linear_logprob_pair` in plain torch: both tiles of a row chunk are made together and dropped together.

Each tile has the shape that `linear_logprob` gives it, so logprob_a, logprob_r and entropy are the very bits
that two calls of `linear_logprob` return. Peak memory beyond inputs and outputs: about six tiles of 2²²
elements.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_kernels.linear_logprob.reference import tile_grad, tile_stats
from rlhf_kernels.vocab.logits import (
    Head,
    HeadGrads,
    HeadOptions,
    PairSaved,
    accumulation_dtype,
    pair_hidden_grad,
    row_chunks,
    split_target,
)


def _heads(hidden_a: Tensor, hidden_r: Tensor, weight: Tensor, keep: Tensor, options: HeadOptions) -> tuple[Head, Head]:
    head_a = Head.of(hidden_a, weight, keep, options)
    # The reference row sees the plain head; handing over the upcast weight makes both share that copy
    return head_a, Head.of(hidden_r, head_a.weight, keep, options._replace(lora_A=None, lora_B=None))


def _p_and_log_ratio(z_a: Tensor, z_r: Tensor, lse_a: Tensor, lse_r: Tensor) -> tuple[Tensor, Tensor]:
    """pₐ and log pₐ − log p_r, both [n, V]; a column with pₐ = 0 counts as 0, even at −inf − (−inf)."""
    p = (z_a - lse_a[:, None]).exp_()
    log_ratio = (z_a - z_r).sub_((lse_a - lse_r)[:, None])
    return p, log_ratio.masked_fill_(p == 0, 0.0)


def forward(
    hidden_a: Tensor,
    hidden_r: Tensor,
    weight: Tensor,
    target: Tensor,
    options: HeadOptions,
    ignore_index: int,
    ahead: str,
) -> tuple[Tensor, ...]:
    """(logprob_a, logprob_r, kl, entropy, lse_a, lse_r), each [N], then E and D [N, H].

    E is empty unless `ahead` names logprob, D unless it names kl.
    """
    n_rows, n_vocab = hidden_a.shape[0], weight.shape[0]
    keep, index = split_target(target, n_vocab, ignore_index)
    head_a, head_r = _heads(hidden_a, hidden_r, weight, keep, options)
    dtype = accumulation_dtype(hidden_a, weight)
    results = tuple(torch.zeros(n_rows, dtype=dtype, device=hidden_a.device) for _ in range(6))
    expected, expected_kl = (HeadGrads(head_a, hidden_a, "hidden" if n in ahead else "") for n in ("logprob", "kl"))
    for rows in row_chunks(n_rows, n_vocab):
        h = head_a.rows(hidden_a, rows)
        z_a = head_a.tile(h, rows)
        z_r = head_r.tile(head_r.rows(hidden_r, rows), rows)
        a = tile_stats(z_a.clone(), index[rows], "entropy")
        r = tile_stats(z_r.clone(), index[rows], "logprob")
        p, log_ratio = _p_and_log_ratio(z_a, z_r, torch.where(keep[rows], a["lse"], torch.inf), r["lse"])
        kl = (p * log_ratio).sum(-1)
        divisor = head_a.divisor(rows)
        p.scatter_(1, index[rows, None], 0.0)
        if "kl" in ahead:
            expected_kl.add(rows, h, head_a.pull_back_(log_ratio.sub_(kl[:, None]).mul_(p), z_a, divisor))
        if "logprob" in ahead:
            expected.add(rows, h, head_a.pull_back_(p, z_a, divisor))
        made = (a["logprob"], r["logprob"], kl, a["entropy"], a["lse"], r["lse"])
        for out, value in zip(results, made, strict=True):
            out[rows] = torch.where(keep[rows], value, 0.0)
    ahead_sums = (sums.sums.get("hidden") for sums in (expected, expected_kl))
    return (*results, *(hidden_a.new_empty(0, dtype=dtype) if x is None else x for x in ahead_sums))


def backward(
    hidden_a: Tensor,
    hidden_r: Tensor,
    weight: Tensor,
    target: Tensor,
    options: HeadOptions,
    ignore_index: int,
    saved: PairSaved,
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> Tensor:
    """d_hidden_a. grads: those of logprob_a, kl, entropy (or None)."""
    n_rows, n_vocab = hidden_a.shape[0], weight.shape[0]
    keep, index = split_target(target, n_vocab, ignore_index)
    head_a, head_r = _heads(hidden_a, hidden_r, weight, keep, options)
    sums = HeadGrads(head_a, hidden_a, "hidden")
    dtype = head_a.weight.dtype
    lse_r, kl, entropy = saved.lse_r, saved.kl, saved.entropy
    lse_a = torch.where(keep, saved.lse_a, torch.inf)  # p = 0 in rows that do not count
    d_logprob, d_kl, d_entropy = (None if g is None else torch.where(keep, g.to(dtype), 0.0) for g in grads)
    if saved.expected.dim() == 2 and d_entropy is None and (d_kl is None or saved.expected_kl.dim() == 2):
        d_hidden = pair_hidden_grad(weight, index, keep, options, saved, d_logprob, d_kl)
        return d_hidden.to(hidden_a.dtype)
    for rows in row_chunks(n_rows, n_vocab):
        h = head_a.rows(hidden_a, rows)
        z_a = head_a.tile(h, rows)
        g = tile_grad(
            z_a,
            index[rows],
            lse_a[rows],
            logprob=None if d_logprob is None else d_logprob[rows],
            entropy=None if d_entropy is None else (d_entropy[rows], entropy[rows]),
        )
        if d_kl is not None:
            z_r = head_r.tile(head_r.rows(hidden_r, rows), rows)
            p, log_ratio = _p_and_log_ratio(z_a, z_r, lse_a[rows], lse_r[rows])
            g += p.mul_(log_ratio.sub_(kl[rows, None])).mul_(d_kl[rows, None])
        sums.add(rows, h, head_a.pull_back_(g, z_a, head_a.divisor(rows)))
    return sums.sums["hidden"].to(hidden_a.dtype)
