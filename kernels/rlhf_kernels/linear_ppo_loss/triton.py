"""`linear_ppo_loss` on Triton and cuBLAS: the sweep of `linear_logprob` with the loss at its end.

Logprob and entropy come from the same products, tiles and kernels as those of `linear_logprob`, so a log-prob made
there at the same weights gives a ratio of exactly 1.
Gradient, only hidden needed and no entropy term: the sweep itself makes E = Σ_{v≠t} p u W, whose factor, the
coefficient c = ∂loss/∂logprob, is known after it; d_hidden = c ((1 − p_t) u_t W_t − E). Rows that can have no gradient
(masked, ignored, zero advantage without a KL term) are left out of that product: their tile rows are packed away by a
prefix sum and a Triton product stops at the count, which stays on the device, so the whole op is capturable. A clipped
row is known too late for that: its coefficient 0 then drops its E; to skip it would take a second product to make its
logits again, which pays only where most rows are clipped. GEMMs of N·H·V: 1, plus the share of rows packed.
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
from rlhf_kernels.runtime.autocast import without_autocast
from rlhf_kernels.runtime.triton_support import AotCase
from rlhf_kernels.vocab import triton_aot
from rlhf_kernels.vocab.logits import HeadGrads, HeadOptions
from rlhf_kernels.vocab.triton_sweep import Live, RowGrads, Sweep


def packed(live: Tensor, tile_rows: int) -> Live:
    """Places of the live rows [N] bool within each chunk of `tile_rows` rows: a prefix sum on the device."""
    n = live.shape[0]
    chunks = torch.nn.functional.pad(live, (0, -n % tile_rows)).view(-1, tile_rows)
    position = chunks.cumsum(1)
    slot = position - 1 + torch.arange(0, chunks.numel(), tile_rows, device=live.device)[:, None]
    return Live(slot=torch.where(chunks, slot, -1).view(-1)[:n].contiguous(), counts=position[:, -1].contiguous())


@without_autocast
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
    live = None
    if ahead:
        may_move = factor != 0
        if tokens.ref_logprob is None or options.kl_coef == 0:
            may_move &= tokens.advantage != 0
        live = packed(may_move, sweep.tile_rows)
    logprob = entropy = sweep.empty(0)
    if sweep.n_rows:
        stats = sweep.statistics("entropy", "logprob" if ahead else "", live)
        logprob, entropy = stats.values["logprob"], stats.values["entropy"]
    ppo_loss = registry.implementation("ppo_loss", registry.resolve("ppo_loss", "auto", logprob))
    loss, statistics, d_logprob = ppo_loss.forward(logprob, tokens._replace(mask=factor, denom=denom), entropy, options)
    made: dict[str, Tensor] = {}
    if needs and sweep.n_rows:
        if ahead:
            made["hidden"] = sweep.from_expected(stats, RowGrads(logprob=d_logprob), torch.float32, live)
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
    """The sweep with rows packed, and the product that stops at a count on the device."""
    return triton_aot.ppo_cases()
