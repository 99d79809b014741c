"""Tables of adapters and batches: what is made once, what makes room, and threads that share them."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from rlhf_kernels.lora import tables

CPU = torch.device("cpu")
UPLOADS = 3  # of a batch: its tiles, chunks and folds


def batch(n):
    """The layout of n rows that all carry slot 0."""
    return tables.layout_of([0], [n], [0], [2], [0], 1, False, CPU)


def rows(layout):
    return int(layout.tiles[:, 1].sum())


@pytest.fixture
def uploads(monkeypatch):
    """Rows of every table that is made, with both caches empty at first."""
    made = []
    upload = tables.upload
    monkeypatch.setattr(tables, "upload", lambda rows, *more: made.append(rows) or upload(rows, *more))
    for cache in (tables.ADAPTERS, tables.BATCHES):
        cache.clear()
    yield made
    for cache in (tables.ADAPTERS, tables.BATCHES):
        cache.clear()


def test_a_large_model_s_second_step_makes_no_table(uploads):
    """1,200 linears with four sets of slots each, whatever the batches between."""
    A, B = torch.zeros(4800, 2, 8), torch.zeros(4800, 8, 2)
    linears = [([A[i]], [B[i]]) for i in range(4800)]

    def step():
        for a, b in linears:
            tables.slots_of(a, b, [1.0], [0.0])

    step()
    assert len(uploads) == 4800
    for n in range(1, 2000):
        batch(n)
    uploads.clear()
    step()
    assert uploads == []
    batch(1999)
    assert uploads == []
    batch(1)
    assert len(uploads) == UPLOADS  # batches of long ago made room


def test_the_table_not_used_for_longest_makes_room(uploads, monkeypatch):
    monkeypatch.setattr(tables.BATCHES, "entries", 3)
    for n in (1, 2, 3, 1, 4, 1, 5):  # 1 is used again and again
        batch(n)
    assert sorted(map(rows, tables.BATCHES.tables())) == [1, 4, 5]
    assert len(uploads) == 5 * UPLOADS


def test_threads_share_tables(uploads, monkeypatch):
    """Two threads with 10,000 calls each and room for few tables: every table is the one that was wanted."""
    monkeypatch.setattr(tables.BATCHES, "entries", 4)

    def calls(first):
        for i in range(10_000):
            n = 1 + (first + i) % 7
            assert rows(batch(n)) == n

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(calls, first) for first in (0, 3)]:
            done.result()
    assert len(tables.BATCHES.tables()) == 4
