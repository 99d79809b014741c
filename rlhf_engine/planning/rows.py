"""Timelines for every number of rows, from traces with few and with many.

The bytes of a storage are a linear function of the rows; blocks are rounded up afterwards, and memory inside of a
kernel is computed from its arguments. So two traces give the timeline of all numbers between theirs, to the byte. The
table of presets is made of such timelines; tests compare them with traces.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from rlhf_engine.planning.tracing import ROUNDING, Event, Seen, Shaped, Timeline
from rlhf_engine.planning.workspace import workspace_bytes


class Between:
    """Timelines of the rows between those of two traces."""

    def __init__(self, few: Timeline, many: Timeline, rows: tuple[int, int], device_type: str) -> None:
        """Match the events of the two.

        Ops that run once per row have no counterpart and are left out. Raises ValueError where one of them is the peak.
        """
        self._rows, self._device_type = rows, device_type
        blocks = SequenceMatcher(None, _ops(few), _ops(many), autojunk=False).get_matching_blocks()
        alive = _alive(few), _alive(many)
        self._pairs: list[tuple[Event, Event, list[int], list[int]]] = []
        self._known: dict[str, list[int]] = {}
        for i, j in ((block.a + k, block.b + k) for block in blocks for k in range(block.size)):
            a, b = few.events[i], many.events[j]
            if len(alive[0][i]) == len(alive[1][j]) and _seen(a).new == _seen(b).new:
                self._pairs.append((a, b, alive[0][i], alive[1][j]))
        common = [Timeline(events=[a for a, *_ in self._pairs]), Timeline(events=[b for _, b, *_ in self._pairs])]
        if [timeline.peak for timeline in common] != [few.peak, many.peak]:
            raise ValueError(f"rows: expected a peak that {rows[0]} and {rows[1]} rows have in common, got none")

    def timelines(self, rows: Sequence[int]) -> list[Timeline]:
        """Timeline of each number of rows."""
        wanted = np.array(rows)
        rounding = ROUNDING[self._device_type]
        found = [Timeline() for _ in rows]
        for a, b, few, many in self._pairs:
            alive = self._on_line(np.array(few)[:, None], np.array(many)[:, None], wanted)  # [storages, rows]
            alive = -(-alive // rounding) * rounding
            live = alive.sum(0) + self._inside(_seen(a), _seen(b), rows)
            added = alive[len(alive) - _seen(a).new :].sum(0)
            for timeline, most, new in zip(found, live.tolist(), added.tolist(), strict=True):
                timeline.events.append(Event(op=a.op, added=new, live=most))
        return found

    def _on_line(self, few: Any, many: Any, rows: Any) -> Any:
        first, last = self._rows
        return few + (many - few) * (rows - first) // (last - first)

    def _inside(self, few: Seen, many: Seen, rows: Sequence[int]) -> list[int]:
        """Bytes of a kernel's workspace by rows, whose tiles make it no line."""
        if few.args is None or many.args is None:
            return [self._on_line(few.inside, many.inside, n) for n in rows]
        key = f"{few.func} {few.args} {many.args}"
        if key not in self._known:
            (mine, spec), (theirs, _) = tree_flatten(few.args), tree_flatten(many.args)
            self._known[key] = []
            for n in rows:
                args = [self._argument(x, y, n) for x, y in zip(mine, theirs, strict=True)]
                call = tree_unflatten(args, spec)
                self._known[key].append(workspace_bytes(few.func, call, None, self._device_type))
        return self._known[key]

    def _argument(self, few: Any, many: Any, rows: int) -> Any:
        if isinstance(few, Shaped):
            shape = [self._on_line(x, y, rows) for x, y in zip(few.shape, many.shape, strict=True)]
            return torch.empty(shape, dtype=few.dtype, device="meta")
        if isinstance(few, int) and not isinstance(few, bool):
            return self._on_line(few, many, rows)
        return few


def _ops(timeline: Timeline) -> list[str]:
    return [event.op for event in timeline.events]


def _seen(event: Event) -> Seen:
    assert event.seen is not None
    return event.seen


def _alive(timeline: Timeline) -> list[list[int]]:
    """Bytes of every storage alive at each event, in the order in which they were made."""
    replayed: dict[int, list[list[int]]] = {}
    for event in timeline.events:
        log = _seen(event).log
        if id(log) not in replayed:
            replayed[id(log)] = _replayed(log)
    return [replayed[id(_seen(event).log)][_seen(event).place] for event in timeline.events]


def _replayed(log: list[int | None]) -> list[list[int]]:
    found = []
    alive: dict[int, int] = {}
    made = 0
    for entry in log:
        if entry is None:
            found.append(list(alive.values()))
        elif entry < 0:
            del alive[-1 - entry]
        else:
            alive[made] = entry
            made += 1
    return found
