"""Tokens and their log-probs from hidden states: one sweep of the vocabulary, no logits kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from rlhf_kernels.sample import sample

from rlhf_engine.hydra.backbone import Backbone, LmHead
from rlhf_engine.rollout.rows import RowState, SampleGroup

NextTokens = tuple[torch.Tensor, torch.Tensor]
"""Tokens int64 [N] and log-probs fp32 [N]."""


class Sampler:
    """Draws for rows of one backbone, whose head stays where it is meanwhile."""

    def __init__(self, backbone: Backbone, eos_token_ids: Sequence[int]) -> None:
        self._backbone = backbone
        self._heads: dict[str | None, LmHead] = {}
        self._ends = torch.tensor(sorted(eos_token_ids), dtype=torch.int64, device=backbone.device)

    def __call__(
        self, hidden: torch.Tensor, state: RowState, groups: Sequence[SampleGroup], *, any_short: bool
    ) -> NextTokens:
        """The next tokens of rows with these hidden states [N, H]. any_short: some may not end yet."""
        if len(groups) == 1:
            return self.sample_group(hidden, state, groups[0], any_short=any_short)
        tokens_N = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
        logprobs_N = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        for group in groups:
            assert group.rows_N is not None
            drawn = self.sample_group(hidden[group.rows_N], state.at(group.rows_N), group, any_short=any_short)
            tokens_N[group.rows_N], logprobs_N[group.rows_N] = drawn
        return tokens_N, logprobs_N

    def sample_group(self, hidden: torch.Tensor, state: RowState, group: SampleGroup, *, any_short: bool) -> NextTokens:
        """`__call__` for the rows of one group."""
        if group.slot not in self._heads:
            self._heads[group.slot] = self._backbone.lm_head_in(group.slot)
        head = self._heads[group.slot]
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
            top_k=group.top_k,
            top_p=group.top_p,
            forbidden=self._ends if any_short else None,
            forbids=state.lengths_N < state.least_N if any_short else None,
        )
        assert drawn.token is not None
        assert drawn.logprob is not None
        return drawn.token, drawn.logprob
