"""`linear_ppo_loss` on Triton and cuBLAS: the sweep of `linear_logprob` with the loss at its end.

Logprob and entropy come from the same products, tiles and kernels as those of `linear_logprob`, so a log-prob made
there at the same weights gives a ratio of exactly 1.
Gradient, only hidden needed and no entropy term: the sweep itself makes E = Σ_{v≠t} p u W, whose factor, the
coefficient c = ∂loss/∂logprob, is known after it; d_hidden = c ((1 − p_t) u_t W_t − E). GEMMs of N·H·V: 2, of cuBLAS.
Rows without a gradient (masked, ignored, clipped, zero advantage) are in both, and their coefficient 0 drops their E. A
product over the other rows alone, whose count only the device knows, is no call of cuBLAS: on an H100 one in Triton
made the whole op 1.28 times as slow as `linear_logprob`, where all rows had a gradient.
So few rows that the fused kernel makes their statistics take one more, as in `linear_logprob`.
Otherwise (a trained head, bias or LoRA, or an entropy term): a second sweep makes the logits again and all gradients
from them, 1 GEMM plus one per trained factor; dead rows are zero there.
The loss itself is `ppo_loss` as its backend for these tensors computes it. Deterministic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_kernels.ppo_loss.options import PpoOptions, PpoTokens
from rlhf_kernels.runtime import registry
from rlhf_kernels.runtime.triton_support import AotCase
from rlhf_kernels.vocab import triton_aot
from rlhf_kernels.vocab.logits import HeadGrads, HeadOptions
from rlhf_kernels.vocab.triton_sweep import RowGrads, Sweep


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

    Gradients are fp32, because the backward still scales them; empty where `needs` does not name them. A masked
    row is treated like an ignored one: neither its target nor its numbers are looked at.
    """
    sweep = Sweep(hidden, weight, torch.where(tokens.mask != 0, target, ignore_index), head, ignore_index)
    factor = torch.where(sweep.keep, tokens.mask.to(torch.float32), 0.0)  # [N]
    denom = tokens.denom_tensor(torch.float32)
    ahead = needs == "hidden" and options.entropy_coef == 0 and sweep.n_rows > 0
    logprob = entropy = sweep.empty(0)
    if sweep.n_rows:
        stats = sweep.statistics("entropy", "logprob" if ahead else "")
        logprob, entropy = stats.values["logprob"], stats.values["entropy"]
    ppo_loss = registry.implementation("ppo_loss", registry.resolve("ppo_loss", "auto", logprob))
    loss, statistics, d_logprob = ppo_loss.forward(logprob, tokens._replace(mask=factor, denom=denom), entropy, options)
    made: dict[str, Tensor] = {}
    if needs and sweep.n_rows:
        if ahead:
            made["hidden"] = sweep.from_expected(stats, RowGrads(logprob=d_logprob), torch.float32)
        else:
            d_entropy = factor * (-options.entropy_coef) / denom if options.entropy_coef else None
            made = sweep.gradients(stats, RowGrads(logprob=d_logprob, entropy=d_entropy), needs)
    elif needs:
        inputs = zip(HeadGrads.names, (hidden, weight, head.bias, head.lora_A, head.lora_B), strict=True)
        made = {
            n: x.new_zeros(x.shape, dtype=torch.float32) for n, x in inputs if x is not None and n in needs.split(",")
        }
    return (loss, statistics, logprob, *(made[n] if n in made else sweep.empty(0) for n in HeadGrads.names))


def aot_cases() -> list[AotCase]:
    """The gradient in fp32, which the backward still scales; everything else is a kernel of `linear_logprob`."""
    return triton_aot.ppo_cases()
