"""What runs prompts and decoding steps: hidden states of the next token, with keys and values kept in the cache.

`TransformersStep` goes through the model's own forward under the gate, which serves every backbone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from rlhf_engine.hydra.attention import Linears, plan_decode, plan_packed
from rlhf_engine.hydra.backbone import Backbone
from rlhf_engine.hydra.batch import PackedBatch
from rlhf_engine.hydra.gate import SlotTable
from rlhf_engine.hydra.kv_cache import KVCache, NewTokens
from rlhf_engine.rollout.rows import LiveRows, Prompt, slot_table


class Step(Protocol):
    """Runs rows through a backbone."""

    name: str
    invariant: bool
    """Whether a row's decoding has the same bits whatever it is batched with."""

    def prefill(self, prompts: Sequence[Prompt]) -> torch.Tensor:
        """Put prompts into their blocks of the cache; hidden states [N, H] of the last tokens."""
        ...

    def decode(self, live: LiveRows) -> torch.Tensor:
        """Put every row's last token into the cache at its length; its hidden states [N, H]."""
        ...


class TransformersStep:
    """Through the model's own forward: prompts packed, then one token per row."""

    name = "transformers"
    invariant = False  # products round by the number of their rows

    def __init__(self, backbone: Backbone, cache: KVCache) -> None:
        self.backbone, self.cache = backbone, cache
        self._linears: Linears = {}
        self._table: SlotTable | None = None

    def prefill(self, prompts: Sequence[Prompt]) -> torch.Tensor:
        batch = PackedBatch.from_lists([p.tokens for p in prompts], [[]] * len(prompts), device=self.backbone.device)
        new = NewTokens.of_prompts(self.cache, [p.blocks for p in prompts], batch.lengths, batch.device)
        plan = plan_packed(batch.lengths, batch.device, new=new)
        table = slot_table([p.slot for p in prompts], batch.lengths)
        hidden = self.backbone.run(batch.tokens_T, batch.positions_T, table, plan)
        return hidden.index_select(0, batch.last_rows_N)

    def decode(self, live: LiveRows) -> torch.Tensor:
        if live.slot_table != self._table:
            self._linears, self._table = {}, live.slot_table
        plan = plan_decode(self.cache, live.table_NB, live.lengths_N, live.longest + 1, self._linears)
        return self.backbone.run(live.tokens_N, live.lengths_N, live.slot_table, plan)
