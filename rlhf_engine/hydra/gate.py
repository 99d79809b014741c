"""The gate: which adapter slot serves which rows, and how rows attend, during one backbone call.

transformers hands its linears and attention functions tensors only, so this has to be ambient. It is a thread-local
that holds one immutable `BackboneCall`, entered with a context manager. Nothing about it lives on modules: two threads
may run different slots through the same modules at once. Gradient checkpointing recomputes layers later, maybe in
another thread, so `checkpoint_contexts` captures the call and the settings of kernels that the layer first ran by.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Self

import torch
from rlhf_kernels.lora import Segments, group
from rlhf_kernels.runtime import registry

if TYPE_CHECKING:
    from rlhf_engine.hydra.adapters import AdapterSlot
    from rlhf_engine.hydra.attention import AttentionPlan


@dataclass(frozen=True, kw_only=True)
class SlotTable:
    """Row ranges of a backbone call, sorted and disjoint, and the slot that serves each (None: plain backbone)."""

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    slots: tuple[str | None, ...]

    @classmethod
    def uniform(cls, slot: str | None, n_rows: int) -> SlotTable:
        """All rows through one slot."""
        return cls(starts=(0,), ends=(n_rows,), slots=(slot,))


@dataclass(frozen=True, kw_only=True, eq=False)
class DropoutKey:
    """Key of the LoRA dropout masks of one call: masks are a function of (seed, row id, layer, column)."""

    seed: int
    row_ids_T: torch.Tensor  # int64 [T], one id per row of the call


@dataclass(frozen=True, kw_only=True, eq=False)
class BackboneCall:
    """Everything ambient during one backbone forward."""

    table: SlotTable
    attention: AttentionPlan
    slots: Mapping[str, AdapterSlot] = field(default_factory=dict)
    """The slots that the table names; others may be there. Layers hold none, so that models may share a base."""
    dropout: DropoutKey | None = None
    positions_T: torch.Tensor | None = None
    """int64 [T], position of each row in its sequence, for attention that counts positions by itself."""
    windows: list[int | None] | None = None
    """Sliding windows that layers' attention was called with, where they are noted: proof of what ran."""


_local = threading.local()


def current() -> BackboneCall | None:
    """The call that this thread is in, or None outside of one."""
    return getattr(_local, "call", None)


@contextlib.contextmanager
def enter(call: BackboneCall | None, kernels: registry.Settings | None = None) -> Iterator[None]:
    """Make `call` current in this thread, and settings of the kernels if given, for the length of a `with` block."""
    previous = current()
    _local.call = call
    group.held.clear()  # what linears compute for each other is for one call
    try:
        with contextlib.nullcontext() if kernels is None else kernels.used():
            yield
    finally:
        _local.call = previous
        group.held.clear()  # a recompute may end between two linears of a group


class _Recompute(contextlib.ExitStack):
    """The block of `enter` for each recompute of a layer, of which a graph that is kept has several."""

    def __init__(self) -> None:
        super().__init__()
        self._call, self._kernels = current(), registry.effective()

    def __enter__(self) -> Self:
        self.enter_context(enter(self._call, self._kernels))
        return self


def checkpoint_contexts() -> tuple[contextlib.AbstractContextManager[None], contextlib.ExitStack]:
    """`context_fn` for `torch.utils.checkpoint`: the recompute runs under the call of the original forward."""
    return contextlib.nullcontext(), _Recompute()


def lora_segments(table: SlotTable, present: tuple[str, ...]) -> Segments:
    """The kernel's segment table for a layer that has adapters of the slots in `present`."""
    # the compiler traces through a cache, and says so
    return _make_segments(table, present) if torch.compiler.is_compiling() else _cached_segments(table, present)


def _make_segments(table: SlotTable, present: tuple[str, ...]) -> Segments:
    kept = [
        (a, b, present.index(s)) for a, b, s in zip(table.starts, table.ends, table.slots, strict=True) if s in present
    ]
    return Segments(starts=tuple(k[0] for k in kept), ends=tuple(k[1] for k in kept), slots=tuple(k[2] for k in kept))


_cached_segments = lru_cache(maxsize=512)(_make_segments)
