"""Keys and values of the tokens so far, which decoding attends to.

Legend: T tokens of a call, K key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(eq=False)
class KVCache:
    """Keys and values of every layer, [rows, K, capacity, D] each, allocated when a layer first writes.

    The tokens of one head lie side by side, in the order in which decoding reads them.
    """

    rows: int
    capacity: int
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)

    def read(self, layer: int, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer up to the longest row, [rows, longest, K, D]: a block of `decode_attention`."""
        return self.keys[layer].transpose(1, 2)[:, :longest], self.values[layer].transpose(1, 2)[:, :longest]


@dataclass(frozen=True, kw_only=True, eq=False)
class NewTokens:
    """Where the tokens of one call go in a cache."""

    cache: KVCache
    rows_T: torch.Tensor
    """int64 [T], cache row of each token."""
    positions_T: torch.Tensor
    """int64 [T], position of each token in its row."""
    _places: dict[int, torch.Tensor] = field(init=False, default_factory=dict)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store keys and values [T, K, D] of a layer."""
        for new, layers in ((key, self.cache.keys), (value, self.cache.values)):
            _, heads, dim = new.shape
            if layer not in layers:
                layers[layer] = new.new_zeros((self.cache.rows, heads, self.cache.capacity, dim))
            layers[layer].view(-1, dim).index_copy_(0, self._places_of(heads), new.reshape(-1, dim))

    def _places_of(self, heads: int) -> torch.Tensor:
        """int64 [T · heads], index of each vector in the cache of a layer; made once per call."""
        if heads not in self._places:
            head = torch.arange(heads, device=self.rows_T.device)
            row = self.rows_T[:, None] * heads + head
            self._places[heads] = (row * self.cache.capacity + self.positions_T[:, None]).flatten()
        return self._places[heads]
