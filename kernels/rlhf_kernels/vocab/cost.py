"""Memory of one sweep of the vocabulary, by backend, and the tiles that decide it."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_kernels.runtime import native, registry
from rlhf_kernels.vocab.logits import TILE_ELEMENTS

TILE_ROWS, TILE_COLUMNS = 4096, 8192
"""Largest tile of the Triton sweep."""
MIN_TILE_ROWS, MIN_TILE_COLUMNS = 1024, 2048
"""A tile that must shrink loses rows down to the first, then columns down to the second, then rows again."""
SHARES = 132
"""Shares of the vocabulary where tiles do not depend on the number of rows: one per multiprocessor of an H200."""
SHARE_FIELDS = 12
"""Numbers that a share leaves per row."""
SMALL_TILE = 2**23
"""Elements of a tile that need no saving: 32 MiB of fp32, which an H100's L2 cache holds."""


def sweep_bytes(hidden: Tensor, weight: Tensor, backend: str, *, needs: str, ahead: bool, keeps_sums: bool) -> int:
    """Memory of a sweep and, for a trained head, of the gradient's.

    Args:
        hidden: [N, H].
        weight: [V, H].
        backend: the backend that serves.
        needs: names of the gradients that are made, comma-separated.
        ahead: whether the sweep itself makes the sums E [N, H] of d_hidden.
        keeps_sums: whether E stays inside the call, because the gradient is made of it there.
    """
    (n, h), v, e = hidden.shape, weight.shape[0], hidden.element_size()
    second = bool(needs) and not ahead
    summed = n * h * 4 if keeps_sums else 0
    if backend == "triton":
        rows, columns = tile_shape(n, v)
        tile = min(rows, n) * columns
        gradient = (n * h * e + columns * h * 4 if "weight" in needs else 0) if second else 0
        factor = tile * e if (ahead or second) and e != 4 else tile * 4 if ahead else 0
        if registry.is_exact():  # states of every share, in place of a tile where nothing but statistics is made
            states = 4 * n * SHARES * SHARE_FIELDS
            return summed + states + (tile * 4 + factor + gradient if ahead or second else 0)
        return summed + tile * 4 + factor + gradient
    if backend == "cpu":
        panel, block_rows = native.tile_size("head_panel"), native.tile_size("head_block")
        e = 2 if hidden.dtype == weight.dtype == torch.bfloat16 and native.multiplies_bf16() else 4
        block = 2 * block_rows * h * e  # of W: one is multiplied with while the next is packed
        rows = 0 if weight.element_size() == e and h % 32 == 0 else block  # as they are multiplied with hidden
        panel_rows = -(-n // panel) * panel
        packed = panel_rows * h * e + rows + (block if ahead or second else 0)
        scratch = native.threads() * (panel // 2) * h * e
        own_sums = panel_rows * h * 4 if ahead or second else 0
        gathered = n * h * e if summed and e != 4 else 0  # rows of W at the targets
        return max(summed + packed + scratch + own_sums - (n * h * 4 if summed else 0), summed + gathered)
    tile = max(1, min(n, TILE_ELEMENTS // v)) * v
    upcast = v * h * 4 if weight.dtype != torch.float32 else 0
    return summed + upcast + 4 * (tile * (5 if needs else 4) + n * h)


def tile_shape(n_rows: int, n_vocab: int) -> tuple[int, int]:
    """(rows, columns) of a tile of the Triton sweep, powers of two.

    In exact mode the number of rows does not decide about columns, and so about no order of summation.
    """
    rows, columns = (
        min(most, 2 ** max(0, n - 1).bit_length()) for n, most in ((n_rows, TILE_ROWS), (n_vocab, TILE_COLUMNS))
    )
    while not registry.is_exact() and rows * columns > max(SMALL_TILE, n_rows * n_vocab // 32):
        if rows > MIN_TILE_ROWS or columns <= MIN_TILE_COLUMNS:
            rows //= 2
        else:
            columns //= 2
    return rows, columns
