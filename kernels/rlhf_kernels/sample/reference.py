"""`sample` in plain torch: one tile of logits per row chunk, noise from `rlhf_kernels.runtime.philox`.

top_k / top_p sort each tile (top_p) or take its k-th value (top_k): several times the cost of the plain
sweep.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_kernels.linear_logprob.reference import tile_stats
from rlhf_kernels.runtime.autocast import without_autocast
from rlhf_kernels.runtime.philox import gumbel
from rlhf_kernels.vocab.logits import Head, HeadOptions, accumulation_dtype, row_chunks

STREAM = 1  # keeps the sampler's words apart from those of LoRA dropout under the same seed


def _keep_top_k_(z: Tensor, top_k: int) -> Tensor:
    """Everything below the k-th largest logit becomes −inf; ties with it stay."""
    if top_k >= z.shape[1]:
        return z
    return z.masked_fill_(z < z.topk(top_k, dim=-1).values[:, -1:], -torch.inf)


def _keep_top_p_(z: Tensor, top_p: float) -> Tensor:
    """The smallest set of most probable tokens that reaches mass top_p stays; the rest becomes −inf."""
    if top_p >= 1.0:
        return z
    sorted_z, order = z.sort(dim=-1, descending=True, stable=True)
    p = sorted_z.softmax(-1)
    mass_before = p.cumsum(-1) - p
    drop = torch.zeros_like(z, dtype=torch.bool).scatter_(1, order, mass_before >= top_p)
    drop.scatter_(1, order[:, :1], False)  # rounding must not empty the set
    return z.masked_fill_(drop, -torch.inf)


@without_autocast
def forward(
    hidden: Tensor,
    weight: Tensor,
    seed: Tensor,
    position: Tensor,
    greedy: Tensor | None,
    bans: tuple[Tensor, Tensor] | None,
    options: HeadOptions,
    top_k: int,
    top_p: float,
    with_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(token, logprob, entropy), each [N]; entropy [0] unless wanted. top_k = 0, top_p = 1: no filter."""
    n_rows, n_vocab = hidden.shape[0], weight.shape[0]
    head = Head.of(hidden, weight, torch.ones_like(seed, dtype=torch.bool), options)
    dtype = accumulation_dtype(hidden, weight)
    token = torch.zeros(n_rows, dtype=torch.int64, device=hidden.device)
    logprob = torch.zeros(n_rows, dtype=dtype, device=hidden.device)
    entropy = torch.zeros(n_rows if with_entropy else 0, dtype=dtype, device=hidden.device)
    for rows in row_chunks(n_rows, n_vocab):
        c = head.capped(head.rows(hidden, rows))
        if bans is not None:
            forbidden, forbids = bans
            c[:, forbidden] = c[:, forbidden].masked_fill(forbids[rows, None], -torch.inf)
        # Before the temperature: dividing could round two different logits onto each other
        best = None if greedy is None else c.argmax(-1)
        z = c.div_(head.divisor(rows))
        if top_k:
            z = _keep_top_k_(z, top_k)
        z = _keep_top_p_(z, top_p)
        # On the CPU it costs nothing to see that no row needs noise
        if best is not None and greedy is not None and z.device.type == "cpu" and bool(greedy[rows].all()):
            drawn = best
        else:
            drawn = (gumbel(seed[rows], position[rows], STREAM, n_vocab) + z).argmax(-1)
            if best is not None and greedy is not None:
                drawn = torch.where(greedy[rows], best, drawn)
        stats = tile_stats(z, drawn, "entropy" if with_entropy else "logprob")
        token[rows], logprob[rows] = drawn, stats["logprob"]
        if with_entropy:
            entropy[rows] = stats["entropy"]
    return token, logprob, entropy
