"""`linear_ppo_loss` by the native sweeps of the vocabulary (csrc/cpu/head.h). Same functions as `reference`.

One sweep where that is enough: with a frozen head and no entropy bonus, d_hidden is a row's coefficient times sums that
the sweep makes anyway (E of `linear_logprob`), so it costs 2 products; masked and ignored rows enter neither. Otherwise
the coefficients are known after the first sweep. A second one then makes the gradients of the rows whose coefficients
are not zero: not masked, clipped or zero-advantage ones. A row's logprob has the very bits that `linear_logprob` gives
it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_kernels.ppo_loss.options import PpoOptions, PpoTokens
from rlhf_kernels.runtime import registry
from rlhf_kernels.vocab.logits import (
    HeadGrads,
    HeadOptions,
    LogprobSaved,
    logprob_hidden_grad,
    split_target,
    temperature_column,
)
from rlhf_kernels.vocab.native import HeadCall, active_rows, floats, scatter, unsupported

__all__ = ["forward", "unsupported"]


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
    """(loss [], statistics [9], logprob [N], d_hidden, d_weight, d_bias, d_lora_A, d_lora_B), all fp32.

    Gradients are empty where `needs` does not name them.
    """
    n_rows, n_vocab = hidden.shape[0], weight.shape[0]
    target = torch.where(tokens.mask != 0, target, ignore_index)
    keep, index = split_target(target, n_vocab, ignore_index)
    temperature_column(head.row_temperature, keep, torch.float32)  # for its check of the values
    factor = torch.where(keep, tokens.mask.float(), 0.0)
    denom = tokens.denom_tensor(torch.float32)
    ahead = needs == "hidden" and options.entropy_coef == 0
    rows = active_rows(keep)
    call = HeadCall(hidden, weight, index, head, rows)
    compact = call.forward({"logprob", "lse", "entropy"}, expected=ahead)
    made = {name: scatter(rows, x, n_rows) for name, x in compact.items()}
    ppo_loss = registry.implementation("ppo_loss", registry.resolve("ppo_loss", "auto", factor))
    loss, statistics, on_logprob = ppo_loss.forward(
        made["logprob"], tokens._replace(mask=factor, denom=denom), made["entropy"], options
    )
    gradients: dict[str, Tensor] = {}
    if ahead:
        empty = floats(0)
        saved = LogprobSaved(made["logprob"], made["lse"], made["entropy"], empty, made["expected"])
        gradients["hidden"] = logprob_hidden_grad(weight, index, keep, head, saved, on_logprob, None)
    elif needs:
        on_entropy = factor * (-options.entropy_coef) / denom
        rows = active_rows((on_logprob != 0) | (on_entropy != 0))
        given = {"lse": made["lse"], "logprob": on_logprob}
        if options.entropy_coef != 0:
            given |= {"entropy": on_entropy, "entropy_value": made["entropy"]}
        named = {name: x[rows].contiguous() for name, x in given.items()}
        second = HeadCall(hidden, weight, index, head, rows)
        gradients = second.backward(named, set(needs.split(",")))
        if "hidden" in gradients:
            gradients["hidden"] = scatter(rows, gradients["hidden"], n_rows)
    # a head LoRA leaves columns of its own between the rows of these gradients
    dense = (gradients[name].contiguous() if name in gradients else floats(0) for name in HeadGrads.names)
    return (loss, statistics, made["logprob"], *dense)
