"""Tokens and their log-probs from hidden states.

Draws among all words are one sweep of the vocabulary, no logits kept. Draws among some make the logits of a few rows at
a time by the function that scoring has (`hydra.truncation`), and give the words that each token was drawn among.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from rlhf_kernels.gather_logprob import gather_logprob
from rlhf_kernels.sample import sample
from rlhf_kernels.sample.reference import choose, filter_
from rlhf_kernels.vocab.logits import row_chunks

from rlhf_engine.hydra.backbone import Backbone, LmHead
from rlhf_engine.hydra.supports import numbers_of_bits, pack_bits
from rlhf_engine.hydra.truncation import OUTSIDE, Reader
from rlhf_engine.rollout.rows import RowState, SampleGroup


class NextTokens(NamedTuple):
    """Tokens that one step drew for N rows."""

    tokens: torch.Tensor  # int64 [N]
    logprobs: torch.Tensor  # fp32 [N], log-probs under the distribution that a token was drawn from
    bits: torch.Tensor | None = None
    """int32 [N, W], words that it was drawn among, as `pack_bits` packs them; no bit, or None: all words"""


class Sampler:
    """Draws for rows of one backbone, whose head stays where it is meanwhile."""

    def __init__(self, backbone: Backbone, eos_token_ids: Sequence[int]) -> None:
        self._backbone = backbone
        self._heads: dict[str | None, LmHead] = {}
        self._ends = torch.tensor(sorted(eos_token_ids), dtype=torch.int64, device=backbone.device)

    def __call__(self, hidden: torch.Tensor, state: RowState, groups: Sequence[SampleGroup]) -> NextTokens:
        """The next tokens of rows with these hidden states [N, H]."""
        if len(groups) == 1:
            return self.sample_group(hidden, state, groups[0])
        n, device = len(hidden), hidden.device
        tokens_N = torch.empty(n, dtype=torch.int64, device=device)
        logprobs_N = torch.empty(n, dtype=torch.float32, device=device)
        bits = None
        for group in groups:
            assert group.rows_N is not None
            drawn = self.sample_group(hidden[group.rows_N], state.at(group.rows_N), group)
            tokens_N[group.rows_N], logprobs_N[group.rows_N] = drawn.tokens, drawn.logprobs.to(logprobs_N.dtype)
            if drawn.bits is not None:
                bits = drawn.bits.new_zeros(n, drawn.bits.shape[1]) if bits is None else bits
                bits[group.rows_N] = drawn.bits
        return NextTokens(tokens_N, logprobs_N, bits)

    def sample_group(self, hidden: torch.Tensor, state: RowState, group: SampleGroup) -> NextTokens:
        """`__call__` for the rows of one group."""
        if group.slot not in self._heads:
            self._heads[group.slot] = self._backbone.lm_head_in(group.slot)
        head = self._heads[group.slot]
        if group.truncates or group.is_short:
            return self._sample_among_some(Reader(hidden, head), state, group)
        drawn = sample(
            hidden,
            head.weight,
            temperature=state.temperatures_N if group.temperature is None else group.temperature,
            seed=state.seeds_N,
            position=state.lengths_N,
            greedy=state.greedy_N,
            softcap=head.softcap,
            logit_scale=head.logit_scale,
            bias=head.bias,
            lora=head.lora,
        )
        assert drawn.token is not None
        assert drawn.logprob is not None
        return NextTokens(drawn.token, drawn.logprob)

    def _sample_among_some(self, reader: Reader, state: RowState, group: SampleGroup) -> NextTokens:
        """The same where words are left out. Ends that come too early go first, then the filters follow."""
        parts = []
        for rows in row_chunks(len(reader.hidden), len(reader.head.weight)):
            own, logits = state.at(rows), reader.logits(rows)
            filtered = logits.clone()
            if group.is_short:
                filtered[:, self._ends] = -torch.inf
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
        if not parts:
            empty = state.seeds_N.new_empty(0)
            return NextTokens(empty, empty.float(), empty.new_empty(0, numbers_of_bits(self._backbone.n_words)).int())
        return NextTokens(*(torch.cat(column) for column in zip(*parts, strict=True)))
