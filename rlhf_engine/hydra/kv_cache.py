"""Keys and values of the tokens so far, in blocks that rows take and give back; what decoding attends to.

A row's table lists its blocks in order: position p lies at entry p % block of the block table[p // block]. Rows may
share blocks, such as those of a common prompt; a block goes back when the last of them lets go of it.

Where heads of keys and of values differ in size (multi-head latent attention), the smaller ones are filled up with
zeros, because the kernels of `decode_attention` take one size. Zeros change no score, and the outputs' are cut off.

Legend: T tokens of a call, N rows, B blocks of a row, K key/value heads, D head size, the larger one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

BLOCK = 32  # positions per block


class BlockPool:
    """Pool of blocks: which are free, and how many holders each of the others has."""

    def __init__(self, blocks: int = 0) -> None:
        self._free: list[int] = []
        self._holders: list[int] = []
        self.most_used = 0  # most blocks in use at once so far
        self.grow(blocks)

    def grow(self, blocks: int) -> None:
        """Have so many blocks in all; those that are held stay."""
        self._free = [*range(blocks - 1, self.size - 1, -1), *self._free]
        self._holders += [0] * (blocks - self.size)

    @property
    def size(self) -> int:
        """Blocks in all."""
        return len(self._holders)

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def take(self, n: int) -> list[int]:
        """n blocks for one holder. Raises ValueError if fewer are free."""
        if n > len(self._free):
            raise ValueError(f"n: expected at most {len(self._free)} blocks, which are free, got {n}")
        taken = [self._free.pop() for _ in range(n)]
        for block in taken:
            self._holders[block] = 1
        self.most_used = max(self.most_used, self.size - self.free)
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """One more holder for each of the blocks."""
        for block in blocks:
            if self._holders[block] == 0:
                raise ValueError(f"blocks: expected blocks in use, got {block}, which is free")
            self._holders[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """One holder less for each of the blocks."""
        for block in blocks:
            if self._holders[block] == 0:
                raise ValueError(f"blocks: expected blocks in use, got {block}, which is free")
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free.append(block)


@dataclass(eq=False)
class KVCache:
    """Keys and values of every layer, [blocks, K, block, D] each, allocated when a layer first writes.

    The tokens of one head lie side by side, in the order in which decoding reads them. What no row has written is not
    initialised.
    """

    blocks: int
    block: int = BLOCK
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)

    def allocate(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Room for a layer whose keys and values are like these, [T, K, ≤ D] each; nothing if it is there already."""
        size = max(key.shape[2], value.shape[2])
        for like, layers in ((key, self.keys), (value, self.values)):
            if layer not in layers:
                layers[layer] = like.new_empty((self.blocks, like.shape[1], self.block, size))

    def grow(self, blocks: int) -> None:
        """Have so many blocks, with what the present ones hold; one layer at a time is there twice."""
        for layers in (self.keys, self.values) if blocks > self.blocks else ():
            for layer, old in layers.items():
                layers[layer] = old.new_empty((blocks, *old.shape[1:]))
                layers[layer][: len(old)] = old
        self.blocks = blocks

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, [blocks, block, K, D] each, as `decode_attention` takes them."""
        return self.keys[layer].transpose(1, 2), self.values[layer].transpose(1, 2)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks in every layer."""
        for layers in (self.keys, self.values):
            for x in layers.values():
                x[list(targets)] = x[list(sources)]


@dataclass(frozen=True, kw_only=True, eq=False)
class NewTokens:
    """Places in a cache for the tokens of one call."""

    cache: KVCache
    blocks_T: torch.Tensor  # int64 [T], block of each token
    entries_T: torch.Tensor  # int64 [T], entry of each token in its block
    _places: dict[int, torch.Tensor] = field(init=False, default_factory=dict)

    @classmethod
    def of_rows(cls, cache: KVCache, table_NB: torch.Tensor, positions_N: torch.Tensor) -> NewTokens:
        """One new token per row: at its position in its row's blocks."""
        column = torch.div(positions_N, cache.block, rounding_mode="floor")
        blocks = table_NB.gather(1, column[:, None])[:, 0]
        return cls(cache=cache, blocks_T=blocks, entries_T=positions_N - column * cache.block)

    @classmethod
    def of_prompts(
        cls, cache: KVCache, tables: Sequence[Sequence[int]], lengths: Sequence[int], device: torch.device
    ) -> NewTokens:
        """The first `lengths[i]` positions of each row, one row after another."""
        positions = [torch.arange(n) for n in lengths]
        blocks = [torch.tensor(table)[p // cache.block] for table, p in zip(tables, positions, strict=True)]
        entries = torch.cat(positions) % cache.block
        return cls(cache=cache, blocks_T=torch.cat(blocks).to(device), entries_T=entries.to(device))

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store keys and values [T, K, ≤ D] of a layer."""
        self.cache.allocate(layer, key, value)
        for new, layers in ((key, self.cache.keys), (value, self.cache.values)):
            held = layers[layer]
            new = filled_up(new, held.shape[3])
            held.view(-1, held.shape[3]).index_copy_(0, self._places_of(new.shape[1]), new.reshape(-1, held.shape[3]))

    def _places_of(self, heads: int) -> torch.Tensor:
        """int64 [T · heads], index of each vector in the cache of a layer; made once per call."""
        if heads not in self._places:
            head = torch.arange(heads, device=self.blocks_T.device)
            first = self.blocks_T[:, None] * heads + head
            self._places[heads] = (first * self.cache.block + self.entries_T[:, None]).flatten()
        return self._places[heads]


def filled_up(heads: torch.Tensor, size: int) -> torch.Tensor:
    """[…, D] with zeros behind what heads [… , ≤ D] have; the same tensor where nothing is missing."""
    missing = size - heads.shape[-1]
    return torch.nn.functional.pad(heads, (0, missing)) if missing else heads
