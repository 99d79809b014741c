"""`sample` in plain torch: one tile of logits per row chunk, noise from `rlhf_kernels.runtime.philox`.

top_k takes the k-th value of each row of a tile. top_p sorts the likeliest 1,024 words of a row, and all of them where
those do not reach the mass: several times the cost of the plain sweep. min_p compares with the row's maximum.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlhf_kernels.linear_logprob.reference import tile_stats
from rlhf_kernels.runtime.philox import gumbel, gumbel_at
from rlhf_kernels.runtime.registry import is_gpu
from rlhf_kernels.vocab.logits import Head, HeadOptions, accumulation_dtype, row_chunks

_MANY = 8  # one in so many words
_LIKELIEST = 1024  # words of a row that are looked at before all of them are sorted
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
    likeliest, order = z.topk(min(_LIKELIEST, z.shape[1]), dim=-1)
    p = z.softmax(-1).gather(1, order)
    up_to = p.cumsum(-1)
    size = (up_to - p < top_p).sum(-1, keepdim=True).clamp_min_(1)  # rounding must not empty the set
    last = likeliest.gather(1, size - 1)
    ties = size - (likeliest > last).sum(-1, keepdim=True)
    drop, is_last = z < last, z == last
    for row in (is_last.sum(-1, keepdim=True) > ties).nonzero()[:, 0].tolist():  # of equal ones the first stay
        drop[row] |= is_last[row] & (is_last[row].cumsum(-1) > ties[row])
    reach_on = (up_to[:, -1] < top_p).nonzero()[:, 0]
    if len(reach_on):
        drop[reach_on] = _beyond_top_p(z[reach_on], top_p)
    return z.masked_fill_(drop, -torch.inf)


def _beyond_top_p(z: Tensor, top_p: float) -> Tensor:
    """Mask of the words that `_keep_top_p_` drops, bool [n, V], by all words of a row in order."""
    sorted_z, order = z.sort(dim=-1, descending=True, stable=True)
    p = sorted_z.softmax(-1)
    mass_before = p.cumsum(-1) - p
    drop = torch.zeros_like(z, dtype=torch.bool).scatter_(1, order, mass_before >= top_p)
    return drop.scatter_(1, order[:, :1], False)


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


def choose(
    z: Tensor, seed: Tensor, position: Tensor, greedy: tuple[Tensor, Tensor] | None, kept: Tensor | None = None
) -> Tensor:
    """Draw a token of each row of logits z [n, V]. seed, position: keys of the noise, [n].

    greedy: which rows take another token, bool [n], and the tokens that they take, int64 [n]. kept: bool [n, V], the
    words that are drawn among, where they are known.
    """
    # On the CPU it costs nothing to see that no row needs noise
    if greedy is not None and not is_gpu(z.device) and bool(greedy[0].all()):
        return greedy[1]
    if kept is None or is_gpu(z.device):
        drawn = (gumbel(seed, position, STREAM, z.shape[1]) + z).argmax(-1)
    else:
        drawn = _choose_among(z, seed, position, kept)
    return drawn if greedy is None else torch.where(*greedy, drawn)


def _choose_among(z: Tensor, seed: Tensor, position: Tensor, kept: Tensor) -> Tensor:
    """The same without noise for what is left out, in rows of few words: four numbers are made for each there."""
    drawn = torch.empty_like(seed)
    is_few = kept.sum(1) < z.shape[1] // _MANY
    many, few = (~is_few).nonzero()[:, 0], is_few.nonzero()[:, 0]
    if len(many):
        drawn[many] = (gumbel(seed[many], position[many], STREAM, z.shape[1]) + z[many]).argmax(-1)
    if len(few):
        rows, words = kept[few].nonzero().T
        noise = gumbel_at(seed[few][rows], position[few][rows], STREAM, words)
        scores = torch.full((len(few), z.shape[1]), -torch.inf, dtype=z.dtype)
        scores[rows, words] = noise + z[few[rows], words]
        drawn[few] = scores.argmax(-1)
    return drawn


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
