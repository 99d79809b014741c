"""`sample` in plain torch: one tile of logits per row chunk, noise from `rlhf_kernels.runtime.philox`.

top_k takes the k-th value of each row of a tile and top_p sorts it: several times the cost of the plain sweep. min_p
compares with the row's maximum.
"""

from __future__ import annotations

import math

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


def _keep_min_p_(z: Tensor, min_p: float) -> Tensor:
    """Everything less likely than min_p times the most probable token becomes −inf."""
    if min_p <= 0.0:
        return z
    return z.masked_fill_(z < z.amax(-1, keepdim=True) + math.log(min_p), -torch.inf)


def filter_(z: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Leave words out of logits z [n, V] in place, by −inf: first by top_k, then by top_p, then by min_p.

    top_k = 0, top_p = 1, min_p = 0: none. Probabilities are of what the filter before has left. A row depends on no
    other.
    """
    if top_k:
        z = _keep_top_k_(z, top_k)
    return _keep_min_p_(_keep_top_p_(z, top_p), min_p)


def choose(z: Tensor, seed: Tensor, position: Tensor, greedy: tuple[Tensor, Tensor] | None) -> Tensor:
    """Draw a token of each row of logits z [n, V]. seed, position: keys of the noise, [n].

    greedy: which rows take another token, bool [n], and the tokens that they take, int64 [n].
    """
    # On the CPU it costs nothing to see that no row needs noise
    if greedy is not None and z.device.type == "cpu" and bool(greedy[0].all()):
        return greedy[1]
    drawn = (gumbel(seed, position, STREAM, z.shape[1]) + z).argmax(-1)
    return drawn if greedy is None else torch.where(*greedy, drawn)


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
    min_p: float,
    with_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(token, logprob, entropy), each [N]; entropy [0] unless wanted. top_k = 0, top_p = 1, min_p = 0: no filter."""
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
        best = None if greedy is None else (greedy[rows], c.argmax(-1))
        z = filter_(c.div_(head.divisor(rows)), top_k, top_p, min_p)
        drawn = choose(z, seed[rows], position[rows], best)
        stats = tile_stats(z, drawn, "entropy" if with_entropy else "logprob")
        token[rows], logprob[rows] = drawn, stats["logprob"]
        if with_entropy:
            entropy[rows] = stats["entropy"]
    return token, logprob, entropy
