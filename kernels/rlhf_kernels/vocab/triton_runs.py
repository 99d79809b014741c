"""LoRA by runs of rows as the kernels of the vocabulary sweep read it: one table, one launch for all runs.

A block of rows loops over the runs that it meets. Each adds its products to a copy of the block's sums, and its own
rows take the copy; other rows keep their sums as they are. So a row adds up what it adds up with its slot alone.
No GPU has run this: `vocab.runs.use_variant` asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_kernels.runtime.device_tables import Cache, upload
from rlhf_kernels.vocab.runs import HeadRuns

RUN_WIDTH = 6
TABLES = Cache(1 << 10)
"""By runs and addresses; those of earlier batches are not used again."""


class _Table(NamedTuple):
    lines: Tensor


class RunInputs:
    """A, B and rows of the runs of a head, laid out for the kernels."""

    def __init__(self, runs: HeadRuns) -> None:
        self.runs = runs
        self.A, self.B = (_of_one_dtype(x) for x in (runs.run_A, runs.run_B))
        ranks = [A.shape[0] for A in self.A]
        self.width = max(1, *ranks)
        """The highest rank: columns of `down`."""
        places = [x.data_ptr() for x in self.B]
        self.wide = all(n % 16 == 0 for n in (*places, *ranks))
        """Whether addresses and ranks are multiples of 16, which makes loads wide."""
        scales = torch.tensor(runs.run_scales, dtype=torch.float32).view(torch.int32).tolist()
        slots = list(zip(ranks, places, (x.data_ptr() for x in self.A), scales, strict=True))
        self._lines = [
            (start, end, *slots[slot])
            for start, end, slot in zip(runs.run_starts, runs.run_ends, runs.run_slots, strict=True)
        ]

    def slots(self) -> Iterator[tuple[Tensor, float, slice]]:
        """A, scale and rows of each run."""
        for start, end, slot in zip(self.runs.run_starts, self.runs.run_ends, self.runs.run_slots, strict=True):
            yield self.A[slot], self.runs.run_scales[slot], slice(start, end)

    def rows_and_rank(self) -> tuple[int, int]:
        """Rows and rank of one slot, any."""
        return self.runs.run_ends[0] - self.runs.run_starts[0], self.A[self.runs.run_slots[0]].shape[0]

    def table(self, n_rows: int, block: int) -> Tensor:
        """int64 [blocks + runs, 6], for blocks of so many rows.

        Of each block: its first run and the one after its last, as lines of the table. Of each run: first row, row
        after the last, rank, addresses of B and A, bits of the scale.
        """

        def make() -> _Table:
            starts = range(0, n_rows, block)
            lines = []
            for row in starts:
                met = [i for i, (start, end, *_) in enumerate(self._lines) if start < row + block and end > row]
                first, after = (met[0], met[-1] + 1) if met else (0, 0)
                lines.append([len(starts) + first, len(starts) + after, 0, 0, 0, 0])
            return _Table(upload([*lines, *map(list, self._lines)], RUN_WIDTH, self.B[0].device))

        return TABLES.get((n_rows, block, *self._lines), self.B[0].device, make).lines


def _of_one_dtype(tensors: list[Tensor]) -> list[Tensor]:
    """Contiguous ones, fp32 where they differ in dtype."""
    one = len({x.dtype for x in tensors}) == 1
    return [(x if one else x.float()).contiguous() for x in tensors]
