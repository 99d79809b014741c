"""`linear_ppo_loss` by the native sweeps of the vocabulary (csrc/cpu/head.h). Same functions as `reference`.

One sweep where that is enough: with a frozen head and no entropy bonus, d_hidden is a row's coefficient times sums that
the sweep makes anyway (E of `linear_logprob`), so it costs 2 products; masked and ignored rows enter neither. Otherwise
the coefficients are known after the first sweep and a second one makes the gradients of those rows alone whose
coefficients are not zero (masked, clipped and zero-advantage rows have none).
A row's logprob has the very bits that `linear_logprob` gives it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import registry
from ..autocast import without_autocast
from ..head_native import HeadCall, active_rows, floats, scatter, unsupported
from ..logits import HeadGrads, HeadOptions, LogprobSaved, logprob_hidden_grad, split_target, temperature_column

__all__ = ["forward", "unsupported"]


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
    """(loss [], statistics [9], logprob [N], d_hidden, d_weight, d_bias, d_lora_A, d_lora_B), all fp32.

    Gradients are empty where `needs` does not name them.
    """
    n_rows, n_vocab = hidden.shape[0], weight.shape[0]
    target = torch.where(mask != 0, target, ignore_index)
    keep, index = split_target(target, n_vocab, ignore_index)
    temperature_column(options.row_temperature, keep, torch.float32)  # for its check of the values
    factor = torch.where(keep, mask.float(), 0.0)
    ahead = needs == "hidden" and entropy_coef == 0
    rows = active_rows(keep)
    call = HeadCall(hidden, weight, index, options, rows)
    compact = call.forward({"logprob", "lse", "entropy"}, expected=ahead)
    made = {name: scatter(rows, x, n_rows) for name, x in compact.items()}
    ppo_loss = registry.implementation("ppo_loss", registry.resolve("ppo_loss", "auto", factor))
    loss, statistics, on_logprob = ppo_loss.forward(
        made["logprob"],
        old_logprob,
        advantage,
        factor,
        denom.float(),
        ref_logprob,
        made["entropy"],
        clip_low,
        clip_high,
        dual_clip,
        kl,
        kl_coef,
        entropy_coef,
    )
    gradients: dict[str, Tensor] = {}
    if ahead:
        empty = floats(0)
        saved = LogprobSaved(made["logprob"], made["lse"], made["entropy"], empty, made["expected"])
        gradients["hidden"] = logprob_hidden_grad(weight, index, keep, options, saved, on_logprob, None)
    elif needs:
        on_entropy = factor * (-entropy_coef) / denom.float()
        rows = active_rows((on_logprob != 0) | (on_entropy != 0))
        given = {"lse": made["lse"], "logprob": on_logprob}
        if entropy_coef != 0:
            given |= {"entropy": on_entropy, "entropy_value": made["entropy"]}
        named = {name: x[rows].contiguous() for name, x in given.items()}
        second = HeadCall(hidden, weight, index, options, rows)
        sums = second.backward(named, set(needs.split(",")))
        gradients = {name: x for name, x in zip(HeadGrads.names, sums, strict=True) if x is not None}
        if "hidden" in gradients:
            gradients["hidden"] = scatter(rows, gradients["hidden"], n_rows)
    empties = (floats(0) if name not in gradients else gradients[name] for name in HeadGrads.names)
    return (loss, statistics, made["logprob"], *empties)
