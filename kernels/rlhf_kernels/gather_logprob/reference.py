"""`gather_logprob` in plain torch: one row chunk of the given logits at a time is copied and upcast.

Peak memory beyond inputs, outputs and (unless it overwrites the logits) the gradient: about four tiles of 2²²
elements.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_kernels.linear_logprob.reference import tile_grad, tile_stats
from rlhf_kernels.vocab.logits import OUTPUTS, accumulation_dtype, row_chunks, split_target, temperature_column


def _place(logits: Tensor, rows: slice) -> slice | tuple[Tensor, ...]:
    """Index of flat rows in `logits` [..., V], whose leading dimensions need not collapse into one."""
    if logits.dim() == 2:
        return rows
    flat = torch.arange(rows.start, rows.stop, device=logits.device)
    return torch.unravel_index(flat, logits.shape[:-1])


def _tile(logits: Tensor, place: slice | tuple[Tensor, ...], keep: Tensor, divisor: float | Tensor) -> Tensor:
    """z [n, V], a fresh copy; rows that do not count become 0 because they may hold NaN."""
    z = logits[place].to(accumulation_dtype(logits)).masked_fill(~keep[:, None], 0.0)
    return z.div_(divisor)


def forward(
    logits: Tensor,
    target: Tensor,
    row_temperature: Tensor | None,
    temperature: float,
    ignore_index: int,
    outputs: str,
) -> tuple[Tensor, ...]:
    """Statistics [N] in the order of `OUTPUTS`, empty where not wanted; lse is always made, for backward."""
    n_rows, n_vocab = target.shape[0], logits.shape[-1]
    keep, index = split_target(target, n_vocab, ignore_index)
    dtype = accumulation_dtype(logits)
    column = temperature_column(row_temperature, keep, dtype)
    made = {"logprob", "lse", *outputs.split(",")}
    results = {name: torch.zeros(n_rows, dtype=dtype, device=logits.device) for name in OUTPUTS if name in made}
    for rows in row_chunks(n_rows, n_vocab):
        divisor = temperature if column is None else column[rows]
        stats = tile_stats(_tile(logits, _place(logits, rows), keep[rows], divisor), index[rows], outputs)
        for name, value in stats.items():
            results[name][rows] = torch.where(keep[rows], value, 0.0)
    return tuple(results[name] if name in results else logits.new_empty(0, dtype=dtype) for name in OUTPUTS)


def backward(
    logits: Tensor,
    target: Tensor,
    row_temperature: Tensor | None,
    temperature: float,
    ignore_index: int,
    saved: tuple[Tensor, Tensor, Tensor],
    grads: tuple[Tensor | None, ...],
    d_logits: Tensor,
) -> None:
    """Write dL/d(logits) into `d_logits`, which may be `logits` itself: a tile is read before it is written.

    saved: lse, entropy, log_sum_sq_prob. grads: those of logprob, entropy, lse, mean_logit, log_sum_sq_prob
    (or None).
    """
    n_rows, n_vocab = target.shape[0], logits.shape[-1]
    keep, index = split_target(target, n_vocab, ignore_index)
    dtype = accumulation_dtype(logits)
    column = temperature_column(row_temperature, keep, dtype)
    d_logprob, d_entropy, d_lse, d_mean, d_sum_sq = (
        None if g is None else torch.where(keep, g.to(dtype), 0.0) for g in grads
    )
    for rows in row_chunks(n_rows, n_vocab):
        place, divisor = _place(logits, rows), temperature if column is None else column[rows]
        g = tile_grad(
            _tile(logits, place, keep[rows], divisor),
            index[rows],
            saved[0][rows],
            logprob=None if d_logprob is None else d_logprob[rows],
            lse_grad=None if d_lse is None else d_lse[rows],
            entropy=None if d_entropy is None else (d_entropy[rows], saved[1][rows]),
            mean_logit=None if d_mean is None else d_mean[rows],
            log_sum_sq_prob=None if d_sum_sq is None else (d_sum_sq[rows], saved[2][rows]),
        )
        d_logits[place] = g.div_(divisor).to(d_logits.dtype)
