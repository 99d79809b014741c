"""`linear_logprob` by the native sweeps of the vocabulary (csrc/cpu/head.h). Same functions as `reference`.

Memory beyond inputs and outputs: a block of 512 rows of W twice, 32 × 512 logits per thread, and with the gradient
ahead or in the backward the fp32 sums [n, H]; nothing grows with N · V.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_kernels.vocab.logits import (
    OUTPUTS,
    HeadGrads,
    HeadOptions,
    LogprobSaved,
    logprob_hidden_grad,
    split_target,
    temperature_column,
)
from rlhf_kernels.vocab.native import HeadCall, active_rows, floats, results, scatter, unsupported

__all__ = ["backward", "forward", "unsupported"]


def forward(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    options: HeadOptions,
    ignore_index: int,
    outputs: str,
    ahead: bool,
) -> tuple[Tensor, ...]:
    """Statistics [N] in the order of `OUTPUTS`, empty where not wanted, then E [N, H], empty unless `ahead`."""
    keep, index = split_target(target, weight.shape[0], ignore_index)
    temperature_column(options.row_temperature, keep, torch.float32)  # for its check of the values
    rows = active_rows(keep)
    call = HeadCall(hidden, weight, index, options, rows)
    made = call.forward({"logprob", "lse", *outputs.split(",")}, expected=ahead)
    return tuple(
        scatter(rows, made[name], hidden.shape[0]) if name in made else floats(0) for name in (*OUTPUTS, "expected")
    )


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
    keep, index = split_target(target, weight.shape[0], ignore_index)
    d_logprob, d_entropy, d_lse, d_mean_logit, d_log_sum_sq_prob = grads
    if needs == "hidden" and saved.expected.dim() == 2 and d_entropy is d_mean_logit is d_log_sum_sq_prob is None:
        d_hidden = logprob_hidden_grad(weight, index, keep, options, saved, d_logprob, d_lse)
        return (d_hidden.to(hidden.dtype), *[floats(0) for _ in HeadGrads.names[1:]])
    rows = active_rows(keep)
    call = HeadCall(hidden, weight, index, options, rows)
    given = {"lse": saved.lse, "logprob": d_logprob, "on_lse": d_lse, "mean_logit": d_mean_logit}
    if d_entropy is not None:
        given |= {"entropy": d_entropy, "entropy_value": saved.entropy}
    if d_log_sum_sq_prob is not None:
        given |= {"log_sum_sq_prob": d_log_sum_sq_prob, "log_sum_sq_prob_value": saved.log_sum_sq_prob}
    compact = {name: x[rows].float().contiguous() for name, x in given.items() if x is not None}
    gradients = call.backward(compact, set(needs.split(",")), round_weight=True)
    return results(gradients, rows, (hidden, weight, options.bias, options.lora_A, options.lora_B))
