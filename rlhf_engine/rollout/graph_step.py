"""Decoding steps as CUDA graphs: transformers' forward and the draw, captured once per number of rows.

A graph reads and writes tensors that stay where they are, with places for as many rows as its bucket has; rows that are
not there are idle and write into a block of the cache that is nobody's. One replay is one token: it draws, makes the
drawn token the next input and moves on by one position, all on the device. Rows of several slots, draws with top-k or
top-p, and rows that may not end yet go through the forward itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rlhf_engine.hydra.backbone import Backbone
from rlhf_engine.hydra.gate import SlotTable
from rlhf_engine.hydra.kv_cache import KVCache
from rlhf_engine.rollout.draw import Drawer, Drawn
from rlhf_engine.rollout.rows import DrawGroup, LiveRows, RowState
from rlhf_engine.rollout.step import TransformersStep

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""What to run again and again → its replay. It may run it a few times before."""

_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


class GraphStep(TransformersStep):
    """`TransformersStep` with captured decoding."""

    name = "graph"

    def __init__(self, backbone: Backbone, cache: KVCache, columns: int, idle_block: int, capture: Capture) -> None:
        """columns: blocks of the longest table. idle_block: a block of the cache that no row has."""
        super().__init__(backbone, cache)
        self._columns, self._idle_block, self._capture = columns, idle_block, capture
        self._graphs: dict[tuple[object, ...], _Graph] = {}

    def burst(self, live: LiveRows, n: int, draw: Drawer) -> list[Drawn]:
        if not _captures(live):
            return super().burst(live, n, draw)
        slot, group = live.rows[0].slot, live.groups[0]
        size = bucket(len(live))
        key = (size, slot, group.slot, group.temperature)
        if key not in self._graphs:
            self._graphs[key] = self._make(size, slot, group, draw)
        graph = self._graphs[key]
        return graph.run(live, n)

    def _make(self, size: int, slot: str | None, group: DrawGroup, draw: Drawer) -> _Graph:
        state = RowState.idle(size, self._columns, self.backbone.device, block=self._idle_block)
        table, longest = SlotTable.uniform(slot, size), self._columns * self.cache.block
        drawn: list[Drawn] = []

        def step() -> None:
            hidden = self.decode(state, table, longest)
            state.lengths_N += 1
            drawn[:] = [draw.draw_group(hidden, state, group, None)]
            state.tokens_N.copy_(drawn[0][0])

        replay = self._capture(step)
        state.load(RowState.idle(size, self._columns, self.backbone.device, block=self._idle_block))
        return _Graph(state, drawn, replay, self._columns, self._idle_block)


class _Graph:
    """One captured step."""

    def __init__(
        self, state: RowState, drawn: Sequence[Drawn], replay: Callable[[], None], columns: int, idle_block: int
    ) -> None:
        self._state, self._drawn, self._replay = state, drawn, replay
        size, device = len(state.tokens_N), state.tokens_N.device
        self._idle = RowState.idle(size, columns, device, block=idle_block)

    def run(self, live: LiveRows, n: int) -> list[Drawn]:
        rows = len(live)
        self._state.load(self._idle)
        self._state.load(live.state)
        found = []
        for _ in range(n):
            self._replay()
            tokens, logprobs = self._drawn[0]
            found.append((tokens[:rows].clone(), logprobs[:rows].clone()))
        live.state.tokens_N = found[-1][0]
        live.state.lengths_N += n
        live.longest += n
        return found


def bucket(rows: int) -> int:
    """Rows of the smallest graph that has room for so many."""
    return next((size for size in _BUCKETS if size >= rows), -(-rows // 64) * 64)


def _captures(live: LiveRows) -> bool:
    """Whether one graph serves these rows."""
    if len(live.groups) > 1 or len(live.slot_table.slots) > 1 or live.any_minimum:
        return False
    group = live.groups[0]
    return group.temperature is not None and group.top_k is None and (group.top_p or 1.0) >= 1.0


def capture_cuda(step: Callable[[], None]) -> Callable[[], None]:
    """Capture a step on the current device; what it calls has run before, so that nothing compiles meanwhile.

    Raises RuntimeError if something in it waits for the device.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step()
    except RuntimeError as error:
        raise RuntimeError(
            f"a decoding step could not be captured; step='transformers' does without: {error}"
        ) from error
    return graph.replay
