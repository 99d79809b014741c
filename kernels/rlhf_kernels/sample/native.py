"""`sample` by the native sweep of the vocabulary (`head_sample` of csrc/cpu/head.h). Same function as `reference`.

W is read once for all rows, in its own dtype, and never copied but for strips of 32 rows. Memory beyond inputs and
outputs: such a strip per thread, the packed hidden states, and 36 bytes per row and 512 words.

The words of the noise are those of the reference. Logits, and the two logarithms of a Gumbel number, are rounded
differently, so a token may differ where the two best scores are within some ulp of each other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_kernels.runtime import native
from rlhf_kernels.sample.reference import STREAM
from rlhf_kernels.vocab.logits import HeadOptions, temperature_column
from rlhf_kernels.vocab.native import HeadCall, floats, unsupported
from rlhf_kernels.vocab.runs import HeadRuns

__all__ = ["forward", "unsupported"]


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
    runs: HeadRuns | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(token, logprob, entropy), each [N]; entropy [0] unless wanted. No filter: top_k = 0, top_p = 1, min_p = 0."""
    assert (top_k, top_p, min_p) == (0, 1.0, 0.0)
    n = hidden.shape[0]
    if options.row_temperature is not None:
        temperature_column(options.row_temperature, torch.ones(n, dtype=torch.bool), torch.float32)  # its check
    rows = torch.arange(n)
    call = HeadCall(hidden, weight, rows, options, rows, runs)
    forbidden, forbids = (None, None) if bans is None else (bans[0].contiguous(), bans[1])
    seed, position = call.gather(seed), call.gather(position)
    greedy, forbids = (None if x is None else call.gather(x) for x in (greedy, forbids))
    token, logprob = torch.empty(n, dtype=torch.int64), floats(n)
    entropy = floats(n if with_entropy else 0)
    native.extension().head_sample(
        (*call.head_args, 0),
        call.batch_args,
        call.runs(),
        native.dense("seed", seed, torch.int64, (n,)),
        native.dense("position", position, torch.int64, (n,)),
        0 if greedy is None else native.dense("greedy", greedy, torch.bool, (n,)),
        0 if forbidden is None else native.dense("forbidden", forbidden, torch.int64),
        0 if forbidden is None else forbidden.numel(),
        0 if forbids is None else native.dense("forbids", forbids, torch.bool, (n,)),
        STREAM,
        token.data_ptr(),
        logprob.data_ptr(),
        entropy.data_ptr() if with_entropy else 0,
        native.threads(),
    )
    return call.scatter(token), call.scatter(logprob), call.scatter(entropy) if with_entropy else entropy
