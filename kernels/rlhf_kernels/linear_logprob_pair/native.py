"""`linear_logprob_pair` by the native sweeps of the vocabulary (csrc/cpu/head.h). Same functions as `reference`.

Each block of W is read and packed once for both sets of rows. A row's log-probs and entropy have the very bits that
`linear_logprob` gives it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_kernels.vocab.logits import HeadOptions, PairSaved, pair_hidden_grad, split_target, temperature_column
from rlhf_kernels.vocab.native import HeadCall, active_rows, floats, scatter, unsupported

__all__ = ["backward", "forward", "unsupported"]

_ROWS = ("logprob", "pair_logprob", "kl", "entropy", "lse", "pair_lse")


def _as_wide_as(hidden_a: Tensor, hidden_r: Tensor) -> Tensor:
    """hidden_a in fp32 where hidden_r is: one dtype serves both, and neither may be rounded to it."""
    return hidden_a if hidden_a.dtype == hidden_r.dtype else hidden_a.float()


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
    keep, index = split_target(target, weight.shape[0], ignore_index)
    temperature_column(options.row_temperature, keep, torch.float32)  # for its check of the values
    rows = active_rows(keep)
    call = HeadCall(_as_wide_as(hidden_a, hidden_r), weight, index, options, rows)
    wanted = {"logprob", "lse", "entropy"}
    names = ahead.split(",")
    made = call.forward(wanted, pair_hidden=hidden_r, expected="logprob" in names, expected_kl="kl" in names)
    everything = (*_ROWS, "expected", "expected_kl")
    return tuple(scatter(rows, made[n], hidden_a.shape[0]) if n in made else floats(0) for n in everything)


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
    keep, index = split_target(target, weight.shape[0], ignore_index)
    d_logprob, d_kl, d_entropy = grads
    if saved.expected.dim() == 2 and d_entropy is None and (d_kl is None or saved.expected_kl.dim() == 2):
        d_hidden = pair_hidden_grad(weight, index, keep, options, saved, d_logprob, d_kl)
        return d_hidden.to(hidden_a.dtype)
    rows = active_rows(keep)
    call = HeadCall(_as_wide_as(hidden_a, hidden_r), weight, index, options, rows)
    given = {"lse": saved.lse_a, "logprob": d_logprob}
    if d_entropy is not None:
        given |= {"entropy": d_entropy, "entropy_value": saved.entropy}
    if d_kl is not None:
        given |= {"kl": d_kl, "kl_value": saved.kl, "pair_lse": saved.lse_r}
    compact = {name: x[rows].float().contiguous() for name, x in given.items() if x is not None}
    gradients = call.backward(compact, {"hidden"}, pair_hidden=None if d_kl is None else hidden_r)
    return scatter(rows, gradients["hidden"].to(hidden_a.dtype), hidden_a.shape[0])
