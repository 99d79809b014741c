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
from rlhf_kernels.vocab.native import HeadCall, active_rows, floats, results, unsupported
from rlhf_kernels.vocab.runs import HeadRuns, joined, slot_names

__all__ = ["backward", "forward", "unsupported"]


def forward(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    options: HeadOptions,
    ignore_index: int,
    outputs: str,
    ahead: bool,
    runs: HeadRuns | None = None,
) -> tuple[Tensor, ...]:
    """Statistics [N] in the order of `OUTPUTS`, empty where not wanted, then E [N, H], empty unless `ahead`."""
    keep, index = split_target(target, weight.shape[0], ignore_index)
    temperature_column(options.row_temperature, keep, torch.float32)  # for its check of the values
    call = HeadCall(hidden, weight, index, options, active_rows(keep), runs)
    made = call.forward({"logprob", "lse", *outputs.split(",")}, expected=ahead)
    return tuple(call.scatter(made[name]) if name in made else floats(0) for name in (*OUTPUTS, "expected"))


def backward(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    options: HeadOptions,
    ignore_index: int,
    saved: LogprobSaved,
    grads: tuple[Tensor | None, ...],
    needs: str,
    runs: HeadRuns | None = None,
) -> tuple[Tensor, ...]:
    """dL/d(hidden, weight, bias, lora_A, lora_B), then of every slot's A and B; empty where `needs` does not name it.

    grads: those of logprob, entropy, lse, mean_logit, log_sum_sq_prob (or None).
    """
    keep, index = split_target(target, weight.shape[0], ignore_index)
    d_logprob, d_entropy, d_lse, d_mean_logit, d_log_sum_sq_prob = grads
    slots = [] if runs is None else list(zip(runs.run_A, runs.run_B, strict=True))
    names = [*HeadGrads.names, *(name for slot in range(len(slots)) for name in slot_names(slot))]
    if needs == "hidden" and saved.expected.dim() == 2 and d_entropy is d_mean_logit is d_log_sum_sq_prob is None:
        d_hidden = _ahead(weight, index, keep, options, saved, d_logprob, d_lse, runs)
        return (d_hidden.to(hidden.dtype), *[floats(0) for _ in names[1:]])
    call = HeadCall(hidden, weight, index, options, active_rows(keep), runs)
    given = {"lse": saved.lse, "logprob": d_logprob, "on_lse": d_lse, "mean_logit": d_mean_logit}
    if d_entropy is not None:
        given |= {"entropy": d_entropy, "entropy_value": saved.entropy}
    if d_log_sum_sq_prob is not None:
        given |= {"log_sum_sq_prob": d_log_sum_sq_prob, "log_sum_sq_prob_value": saved.log_sum_sq_prob}
    compact = {name: x[call.rows].float().contiguous() for name, x in given.items() if x is not None}
    gradients = call.backward(compact, set(needs.split(",")), round_weight=True)
    inputs = (hidden, weight, options.bias, options.lora_A, options.lora_B, *(x for pair in slots for x in pair))
    return results(gradients, dict(zip(names, inputs, strict=True)), set(needs.split(",")), call)


def _ahead(
    weight: Tensor,
    index: Tensor,
    keep: Tensor,
    options: HeadOptions,
    saved: LogprobSaved,
    d_logprob: Tensor | None,
    d_lse: Tensor | None,
    runs: HeadRuns | None,
) -> Tensor:
    """d_hidden from the sums that the forward made; slot by slot, for the bits that each has alone."""
    if runs is None:
        return logprob_hidden_grad(weight, index, keep, options, saved, d_logprob, d_lse)
    heads, parts = runs.heads(options, len(index), index.device), []
    for rows, head, *_ in heads:
        own = LogprobSaved(*(x[rows] if x.shape[0] else x for x in saved))
        grads = [None if g is None else g[rows] for g in (d_logprob, d_lse)]
        parts.append(logprob_hidden_grad(weight, index[rows], keep[rows], head, own, *grads))
    return joined(heads, parts, len(index))
