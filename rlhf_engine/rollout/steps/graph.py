"""Decoding steps as CUDA graphs: another step's decoding and the sampling, captured once per number of rows.

A graph reads and writes tensors that stay where they are, with places for as many rows as its bucket has; rows that are
not there are idle and write into a block of the cache that is nobody's. One replay is one token: it draws, makes the
drawn token the next input and moves on by one position, all on the device. Draws with top-k, top-p or min-p, and rows
that may not end yet, go through the other step itself. So do rows of several slots, unless that reads slots from the
state, and the last tokens of rows for which no graph is large enough: a capture takes as long as many steps.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch

from rlhf_engine.devices import capturing
from rlhf_engine.errors import EngineError
from rlhf_engine.hydra.gate import SlotTable
from rlhf_engine.rollout.rows import LiveRows, Prompt, RowState, SampleGroup
from rlhf_engine.rollout.sampler import NextTokens, Sampler
from rlhf_engine.rollout.steps.transformers import RolloutStep, TransformersStep

Capture = Callable[[Callable[[], NextTokens]], tuple[NextTokens, Callable[[], None]]]
"""Function that captures a step → tensors that hold its results from then on, and its replay. May run it before."""

_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WARM_UP = 3  # eager steps before a capture
WORTH = 32  # tokens that are left to sample at least, for a capture to pay
_MOST_GRAPHS = 32  # kept from one rollout to the next
_IDLE_SHARE = 4  # one captured graph serves rows for one in so many of its places, before another is captured


class CaptureError(EngineError):
    """A decoding step that cannot be captured."""


class GraphStep(RolloutStep):
    """Another step, its decoding captured."""

    name = "graph"
    wait_share = TransformersStep.wait_share

    def __init__(self, step: RolloutStep, columns: int, idle_block: int, capture: Capture, *, required: bool) -> None:
        """Capture a step for tables of `columns` blocks; else it runs by itself, or CaptureError if required."""
        self._step, self.backbone, self.cache = step, step.backbone, step.cache
        self._columns, self._idle_block = columns, idle_block
        self._capture: Capture | None = capture
        self._required = required
        self._graphs: dict[tuple[int, tuple[object, ...]], _Graph] = {}
        self.used = set[tuple[int, tuple[object, ...]]]()
        """Graphs that have run since the engine last rested. The choice looks at these alone: rows of one rollout run
        in the same graphs, whatever ran before it."""

    def begin(self) -> None:
        """Begin a rollout: no graph has run in it, and of many, which temperatures make, those of the last one stay."""
        if len(self._graphs) > _MOST_GRAPHS:
            self._graphs = {key: graph for key, graph in self._graphs.items() if key in self.used}
        self.used.clear()

    def prefill(self, prompts: Sequence[Prompt]) -> torch.Tensor:
        return self._step.prefill(prompts)

    def decode(self, state: RowState, table: SlotTable, longest: int) -> torch.Tensor:
        return self._step.decode(state, table, longest)

    def decode_many(self, live: LiveRows, n: int, sampler: Sampler) -> list[NextTokens]:
        graph = self._graph_for(live, sampler)
        return super().decode_many(live, n, sampler) if graph is None else graph.run(live, n)

    def _graph_for(self, live: LiveRows, sampler: Sampler) -> _Graph | None:
        """The graph that serves these rows; None for the step itself."""
        (group, *others), any_slot, rows = live.groups(), self._step.reads_slots, len(live)
        if self._capture is None or others or (len(live.slot_table.slots) > 1 and not any_slot):
            return None
        if group.temperature is None or group.truncates or group.not_yet is not None or len(group.heads.slots) > 1:
            return None
        slot = None if any_slot else live.rows[0].slot
        kind = (slot, group.heads.slots[0], group.temperature)
        left = max(row.left for row in live.rows)
        size = bucket(rows)
        known = min((n for n, other in self.used if n >= rows and other == kind), default=None)
        if known is not None and (known < max(size + 1, rows * _IDLE_SHARE) or left < WORTH):
            return self._graphs[known, kind]
        if left < WORTH:
            return None
        self.used.add((size, kind))
        if (size, kind) in self._graphs:
            return self._graphs[size, kind]
        try:
            made = self._make(self._capture, size, slot, group, sampler)
        except CaptureError as error:
            if self._required:
                raise
            self._capture, self.name = None, self._step.name
            warnings.warn(f"decoding without CUDA graphs: {error}", stacklevel=2)
            return None
        self._graphs[size, kind] = made
        return made

    def _make(self, capture: Capture, size: int, slot: str | None, group: SampleGroup, sampler: Sampler) -> _Graph:
        idle = RowState.idle(size, self._columns, self.backbone.device, block=self._idle_block)
        state = RowState.idle(size, self._columns, self.backbone.device, block=self._idle_block)
        fixed = {f.name: getattr(state, f.name) for f in fields(state)}
        table, longest = SlotTable.uniform(slot, size), self._columns * self.cache.block

        def step() -> NextTokens:
            hidden = self.decode(state, table, longest)
            state.lengths_N += 1
            drawn = sampler(hidden, state, [group])
            state.tokens_N.copy_(drawn.tokens)
            return drawn

        drawn, replay = capture(step)
        if any(getattr(state, name) is not tensor for name, tensor in fixed.items()):
            raise AssertionError("a captured step has to write where its tensors are")
        return _Graph(state, idle, drawn, replay)


class _Graph:
    """One captured step."""

    def __init__(self, state: RowState, idle: RowState, drawn: NextTokens, replay: Callable[[], None]) -> None:
        self._state, self._idle, self._drawn, self._replay = state, idle, drawn, replay

    def run(self, live: LiveRows, n: int) -> list[NextTokens]:
        """n tokens for the live rows."""
        rows = len(live)
        self._state.load(self._idle)
        self._state.load(live.state)
        drawn = []
        for _ in range(n):
            self._replay()
            drawn.append(NextTokens(self._drawn.tokens[:rows].clone(), self._drawn.logprobs[:rows].clone()))
        live.state.tokens_N = drawn[-1].tokens
        live.state.lengths_N += n
        live.longest += n
        return drawn


def bucket(rows: int) -> int:
    """Places of the smallest graph that has room for so many rows."""
    return next((size for size in _BUCKETS if size >= rows), -(-rows // 128) * 128)


class CudaCapture:
    """Captures steps of one device; their graphs share one pool of memory, since one replays at a time.

    `torch.cuda.graph` waits for the device, collects garbage and empties the cache first, while a learner beside works
    on. Here a stream of its own captures, which waits for the current one alone. Kernels of a graph keep the priority
    of the stream that captured them, so it is a high one: a step of decoding is short, and others wait for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device, priority=-1)

    def __call__(self, step: Callable[[], NextTokens]) -> tuple[NextTokens, Callable[[], None]]:
        """Capture the step. Raises CaptureError if something in it waits for the device."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                for _ in range(WARM_UP):  # what is compiled or uploaded at first calls cannot be captured
                    step()
                try:
                    with capturing:
                        drawn = _captured(graph, step, self._pool)
                except RuntimeError as error:
                    raise CaptureError(
                        f"decode_step: expected a model whose step can be captured for 'graph', got: {error}"
                    ) from error
        finally:
            current.wait_stream(self._stream)  # what it has written is read, and its memory used again, on this one
        return drawn, graph.replay


def _captured(graph: torch.cuda.CUDAGraph, step: Callable[[], NextTokens], pool: Any) -> NextTokens:
    """Next tokens of a step that the graph has captured on the current stream."""
    collects = gc.isenabled()
    gc.disable()  # an event or a graph that dies now would end the capture
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            drawn = step()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the stream has to leave the capture; the step's own error counts
                _end(graph, pool)
            raise
        _end(graph, pool)
    finally:
        if collects:
            gc.enable()
    return drawn


def _end(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """End a capture, and see that the allocator leaves it too: torch 2.11 stays in one that fails."""
    try:
        graph.capture_end()
    except RuntimeError:
        end, release = (getattr(torch._C, f"_cuda_{name}", None) for name in ("endAllocateToPool", "releasePool"))
        if end is not None and release is not None:
            with contextlib.suppress(RuntimeError):  # of a later torch, which has left by itself
                end(torch.cuda.current_device(), pool)
                release(torch.cuda.current_device(), pool)
        raise
