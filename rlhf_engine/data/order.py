"""In which order rows are seen, and which of them go through the model together: functions of (seed, epoch).

`batch_indices` walks through shuffled epochs in batches of so many rows. `pack` makes micro-batches of at most so many
tokens, for long and short rows side by side; in a `PackedBatch`, which has no padding, tokens are what costs:

    the epoch's rows in shuffled order, each into the first micro-batch that has room for it (first fit),
    then the micro-batches in shuffled order, because first fit leaves the long rows to the last ones
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def epoch_order(n: int, seed: int, epoch: int) -> list[int]:
    """The order of n rows in an epoch: a function of (seed, epoch) alone, so that a resumed run goes on in it."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(n, generator=generator).tolist()


def batch_indices(n: int, batch_size: int, step: int, seed: int) -> list[int]:
    """Rows of batch number `step` (from 0): consecutive places of the endless sequence of shuffled epochs."""
    start = step * batch_size
    orders: dict[int, list[int]] = {}
    found = []
    for place in range(start, start + batch_size):
        epoch, offset = divmod(place, n)
        if epoch not in orders:
            orders[epoch] = epoch_order(n, seed, epoch)
        found.append(orders[epoch][offset])
    return found


def pack(lengths: Sequence[int], token_budget: int, *, seed: int, epoch: int) -> list[list[int]]:
    """An epoch's micro-batches: every row once, none with more than token_budget tokens. O(n log n).

    lengths: tokens of each row, of all its sequences together. Raises ValueError for no rows, a row without tokens, and
    one that alone is over the budget.
    """
    if not lengths:
        raise ValueError("lengths: expected at least one row, got none")
    for i, length in enumerate(lengths):
        if not 1 <= length <= token_budget:
            raise ValueError(f"lengths[{i}]: expected 1 to {token_budget} tokens, the token_budget, got {length}")
    n = len(lengths)
    leaves = 1 << (n - 1).bit_length()
    # room[leaves + b]: of micro-batch b, all of them empty at first; above, the most of both halves
    room = [token_budget] * (2 * leaves)
    batches: list[list[int]] = []
    for row in epoch_order(n, seed, epoch):
        node = 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= lengths[row] else 2 * node + 1
        if node - leaves == len(batches):
            batches.append([])
        batches[node - leaves].append(row)
        room[node] -= lengths[row]
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    torch.randperm(n, generator=generator)  # spent on the rows
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
