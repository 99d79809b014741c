"""Philox4x32-10 in plain torch: random numbers that are a pure function of (seed, row, stream, column).

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). One call turns a 128-bit counter and a
64-bit key into four 32-bit words. Every backend of `sample` and of LoRA dropout draws these very words. So a token or a
mask does not depend on batch composition, backend or on how often it is recomputed.

Layout, for a matrix with one row per token: key = seed (low word, high word);
counter = (column // 4, stream, row id low word, row id high word); word `column % 4` of the result is the draw.

uint32 values live in int64 tensors; torch's int64 products wrap, which keeps the low words exact.
"""

from __future__ import annotations

import torch

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


def _mulhilo(m: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of the 64-bit product m·b, through 16-bit halves of m so that nothing overflows."""
    high = ((m >> 16) * b + (((m & 0xFFFF) * b) >> 16)) >> 16
    return high, (m * b) & _MASK


def philox4x32(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], key: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ten rounds of Philox4x32. All arguments: int64 tensors with values in [0, 2^32), broadcastable together."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _mulhilo(_M0, c0)
        high1, low1 = _mulhilo(_M1, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def random_words(seed: torch.Tensor, row_id: torch.Tensor, stream: int, n_columns: int) -> torch.Tensor:
    """uint32 draws for rows × columns.

    seed: int64 [N] or [] ; row_id: int64 [N]; stream: separates independent uses (layers, ops) of one seed.
    Returns int64 [N, n_columns] with values in [0, 2^32).
    """
    groups = torch.arange((n_columns + 3) // 4, device=row_id.device)  # [G]
    row = row_id[:, None]
    key = seed.to(torch.int64).expand_as(row_id)[:, None]
    words = philox4x32(
        (
            groups[None, :].expand(row_id.shape[0], -1),
            torch.full_like(row, stream & _MASK),
            row & _MASK,
            (row >> 32) & _MASK,
        ),
        (key & _MASK, (key >> 32) & _MASK),
    )
    return torch.stack([w.expand(row_id.shape[0], groups.shape[0]) for w in words], dim=-1).flatten(1)[:, :n_columns]


def gumbel(seed: torch.Tensor, row_id: torch.Tensor, stream: int, n_columns: int) -> torch.Tensor:
    """Standard Gumbel noise, fp32 [N, n_columns]: g = −log(−log1p(−u)), u = min((word + ½)·2⁻³², 1 − 2⁻²⁴).

    Small u keeps 32-bit resolution, which is the tail that decides an arg-max over a large vocabulary.
    """
    return _gumbel_of(random_words(seed, row_id, stream, n_columns))


def _gumbel_of(words: torch.Tensor) -> torch.Tensor:
    u = ((words.to(torch.float64) + 0.5) * 2.0**-32).to(torch.float32).clamp_max(1 - 2.0**-24)
    return -torch.log(-torch.log1p(-u))


def gumbel_at(seed: torch.Tensor, row_id: torch.Tensor, stream: int, columns: torch.Tensor) -> torch.Tensor:
    """Elements of `gumbel`: fp32 [K] of K pairs of seed, row id and column, int64 [K] each."""
    key = (seed & _MASK, (seed >> 32) & _MASK)
    counter = (columns // 4, torch.full_like(columns, stream & _MASK), row_id & _MASK, (row_id >> 32) & _MASK)
    words = torch.stack(philox4x32(counter, key), -1).gather(-1, columns[:, None] % 4)[:, 0]
    return _gumbel_of(words)


def keep_mask(p: float, seed: torch.Tensor, row_id: torch.Tensor, stream: int, n_columns: int) -> torch.Tensor:
    """Dropout mask, bool [N, n_columns]: keep where word ≥ p·2³²."""
    return random_words(seed, row_id, stream, n_columns) >= int(p * 2**32)
