"""Steps over prompts and new tokens: hidden states of the next token, with keys and values kept in the cache.

`TransformersStep` goes through the model's own forward under the gate, which serves every backbone. `NativeStep` does
the same faster where it can, and `GraphStep` captures either.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from rlhf_engine.hydra.attention import Linears, plan_decode, plan_packed
from rlhf_engine.hydra.backbone import Backbone
from rlhf_engine.hydra.batch import PackedBatch
from rlhf_engine.hydra.gate import SlotTable
from rlhf_engine.hydra.kv_cache import KVCache, NewTokens
from rlhf_engine.rollout.rows import LiveRows, NextTokens, Prompt, RowState, Sampler, slot_table

EXTENDED = 512  # most tokens of one call that extend a prompt
PREFILL_TOKENS = 8192  # most prompt tokens that are admitted in one call; a longer prompt is a call of its own


class RolloutStep(ABC):
    """Runs rows through a backbone."""

    name: str
    backbone: Backbone
    cache: KVCache
    reads_slots = False  # from the state, so that a captured call serves rows of any slots
    wait_share: int  # one in so many places has to be free before waiting prompts interrupt the decoding of the others

    @abstractmethod
    def prefill(self, prompts: Sequence[Prompt]) -> torch.Tensor:
        """Put prompts into their blocks of the cache; hidden states [N, H] of the last tokens."""

    def extend(self, prompt: Prompt, slot_number: int) -> torch.Tensor:
        """Put the rest of a prompt into its blocks, each token a row; the hidden state [H] of the last one."""
        hidden = torch.empty(0)
        for first in range(prompt.cached, len(prompt.prompt), EXTENDED):
            tokens = prompt.prompt[first : first + EXTENDED]
            state = RowState.idle(len(tokens), len(prompt.blocks), self.backbone.device)
            state.tokens_N.copy_(torch.tensor(tokens))
            state.lengths_N.copy_(torch.arange(first, first + len(tokens)))
            state.table_NB.copy_(torch.tensor(prompt.blocks))
            state.slots_N.fill_(slot_number)
            hidden = self.decode(state, SlotTable.uniform(prompt.slot, len(tokens)), first + len(tokens) - 1)
        return hidden[-1]

    @abstractmethod
    def decode(self, state: RowState, table: SlotTable, longest: int) -> torch.Tensor:
        """Put every row's last token into the cache at its length; its hidden states [N, H]."""

    def decode_many(self, live: LiveRows, n: int, sampler: Sampler) -> list[NextTokens]:
        """n tokens more for every live row, one after another, without waiting for the device in between."""
        drawn = []
        for i in range(n):
            hidden = self.decode(live.state, live.slot_table, live.longest)
            live.state.lengths_N += 1
            live.longest += 1
            drawn.append(sampler(hidden, live.state, live.groups(i)))
            live.state.tokens_N = drawn[-1].tokens
        return drawn


class TransformersStep(RolloutStep):
    """Steps through the model's own forward: prompts packed, then one token per row."""

    name = "transformers"
    wait_share = 8

    def __init__(self, backbone: Backbone, cache: KVCache) -> None:
        self.backbone, self.cache = backbone, cache
        self._linears: Linears = {}
        self._table: SlotTable | None = None

    def prefill(self, prompts: Sequence[Prompt]) -> torch.Tensor:
        batch = PackedBatch.from_lists([p.prompt for p in prompts], [[]] * len(prompts), device=self.backbone.device)
        new = NewTokens.of_prompts(self.cache, [p.blocks for p in prompts], batch.lengths, batch.device)
        plan = plan_packed(batch.lengths, batch.device, new=new)
        table = slot_table([p.slot for p in prompts], batch.lengths)
        hidden = self.backbone.run(batch.tokens_T, batch.positions_T, table, plan)
        return hidden.index_select(0, batch.last_rows_N)

    def decode(self, state: RowState, table: SlotTable, longest: int) -> torch.Tensor:
        if table != self._table:
            self._linears, self._table = {}, table
        plan = plan_decode(self.cache, state.table_NB, state.lengths_N, longest + 1, self._linears)
        return self.backbone.run(state.tokens_N, state.lengths_N, table, plan)
