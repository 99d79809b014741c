"""Tokens and their log-probs from hidden states.

Draws among all words are one sweep of the vocabulary, no logits kept. Draws among some make the logits of a few rows at
a time by the function that scoring has (`hydra.truncation`), and give the words that each token was drawn among.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from rlhf_kernels.gather_logprob import gather_logprob
from rlhf_kernels.sample import sample
from rlhf_kernels.sample.reference import choose, filter_
from rlhf_kernels.vocab.logits import row_chunks
from rlhf_kernels.vocab.runs import HeadLoras

from rlhf_engine.hydra.adapters import LmHead
from rlhf_engine.hydra.backbone import Backbone
from rlhf_engine.hydra.supports import pack_bits
from rlhf_engine.hydra.truncation import OUTSIDE, head_options, wide_logits
from rlhf_engine.rollout.rows import RowState, SampleGroup


class NextTokens(NamedTuple):
    """Tokens that one step drew for N rows."""

    tokens: torch.Tensor  # int64 [N]
    logprobs: torch.Tensor  # fp32 [N], log-probs under the distribution that a token was drawn from
    bits: torch.Tensor | None = None
    """int32 [N, W], words that it was drawn among, as `pack_bits` packs them; no bit, or None: all words"""


class Sampler:
    """Draws for rows of one backbone, whose head stays where it is meanwhile."""

    def __init__(self, backbone: Backbone) -> None:
        self._head = functools.cache(backbone.lm_head_in)

    def __call__(self, hidden: torch.Tensor, state: RowState, groups: Sequence[SampleGroup]) -> NextTokens:
        """The next tokens of rows with these hidden states [N, H]."""
        parts = []
        for group in groups:
            own_hidden, own, heads = hidden, state, group.heads
            if group.rows_N is not None:
                own_hidden, own = hidden[group.rows_N], state.at(group.rows_N)
            runs = list(zip(map(self._head, heads.slots), heads.starts, heads.ends, strict=True))
            if group.truncates or group.not_yet is not None:
                parts.append(_sample_among_some(own_hidden, runs, own, group))
                continue
            head, options = runs[0][0], head_options(runs[0][0])
            if len(runs) > 1:
                options["lora"] = HeadLoras.of_runs(heads.starts, heads.ends, [head.lora for head, *_ in runs])
            drawn = sample(
                own_hidden,
                head.weight,
                temperature=own.temperatures_N if group.temperature is None else group.temperature,
                seed=own.seeds_N,
                position=own.lengths_N,
                greedy=own.greedy_N,
                **options,
            )
            assert drawn.token is not None
            assert drawn.logprob is not None
            parts.append(NextTokens(drawn.token, drawn.logprob))
        return parts[0] if groups[0].rows_N is None else _joined(parts, groups, len(hidden))


def _sample_among_some(
    hidden: torch.Tensor, runs: Sequence[tuple[LmHead, int, int]], state: RowState, group: SampleGroup
) -> NextTokens:
    """The same where words are left out. Ends that come too early go first, then the filters follow."""
    parts = []
    for head, start, end in runs:
        for chunk in row_chunks(end - start, len(head.weight)):
            rows = slice(start + chunk.start, start + chunk.stop)
            own, logits = state.at(rows), wide_logits(hidden[rows], head)
            filtered = logits.clone()
            if group.not_yet is not None:
                filtered[:, group.not_yet] = -torch.inf
            greedy = (own.greedy_N, filtered.argmax(-1))  # before the temperature could round two onto each other
            filtered /= own.temperatures_N[:, None]
            if group.truncates:
                filtered = filter_(filtered, group.top_k or 0, group.top_p or 1.0, group.min_p or 0.0)
            kept = filtered > -torch.inf
            z = (logits / own.temperatures_N[:, None]).masked_fill_(~kept, OUTSIDE)
            tokens = choose(z, own.seeds_N, own.lengths_N, greedy, kept)
            logprobs = gather_logprob(z, tokens).logprob
            assert logprobs is not None
            parts.append((tokens, logprobs, pack_bits(kept)))
    return NextTokens(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _joined(parts: Sequence[NextTokens], groups: Sequence[SampleGroup], n: int) -> NextTokens:
    """Put what was drawn for groups of n rows into the rows' order."""
    tokens_N, logprobs_N = parts[0].tokens.new_empty(n), parts[0].logprobs.new_empty(n, dtype=torch.float32)
    bits = next((part.bits.new_zeros(n, part.bits.shape[1]) for part in parts if part.bits is not None), None)
    for part, group in zip(parts, groups, strict=True):
        assert group.rows_N is not None
        tokens_N[group.rows_N], logprobs_N[group.rows_N] = part.tokens, part.logprobs.to(logprobs_N.dtype)
        if part.bits is not None and bits is not None:
            bits[group.rows_N] = part.bits
    return NextTokens(tokens_N, logprobs_N, bits)
