"""Multi-slot LoRA in Triton: all runs of all slots in one launch per step, forward and backward.

With the symbols of the package docstring, s the scale, q = 1 / (1 − p), k the dropout mask (0 or 1), for a row n:

    shrink   h_n = q A (k_n ∘ x_n)            (x → h),   dh_n = s Bᵀ dy_n  (dy → dh)
    expand   y_n += s B h_n                   (h → y),   dx_n += q k_n ∘ (Aᵀ dh_n)  (dh → dx)
    columns  dB = s Σ_n dy_n h_nᵀ             (dy, h),   dA = q Σ_n dh_n (k_n ∘ x_n)ᵀ  (x, dh)

Three kernels serve both sides of the adapter (SIDE 0: A, 1: B). W [D, R] below stands for A transposed or for B, and D
for K or M. R is the largest rank, padded to a power of two of at least 16.

Sums over tiles have two stages and a fixed order, no atomics: equal inputs give equal bits. Shrink cuts D into splits
whose sums the next kernel adds. A program of columns owns a tile of columns and a chunk of one slot's rows, keeps its
[D tile, R] sum in registers, and adds up nothing else; where dh is wanted too and R ≤ `ONE_READ_RANK`, it writes its
tile's share of dh from the same read of dy. (Above that rank the shares cost more traffic than a second read.)

In exact mode (`registry.is_exact`) no tile, split or chunk depends on anything but a linear's own sizes: not on the
number of rows, on runs beside a row's own, or on the ranks of other slots. Runs are cut in tiles of 16 rows, whose
products are one instruction whatever the rank. The base product is that of `linear`.

Dtypes: x, y, dy and adapters fp32, fp16 or bf16, in any mix; h, dh and all sums fp32. Products of two tensors of one
half type are exact, and so are those of bf16 and fp32, the sum of three bf16; everything else runs as three TF32
products, which keeps fp32's accuracy. Dropout draws `philox.keep_mask`'s words, in forward and backward.
Launches: two forward; five to seven backward for any number of runs and slots that need the same gradients.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhf_kernels.linear import product_for
from rlhf_kernels.lora.segments import LoraCall
from rlhf_kernels.lora.tables import EXACT_ROWS, SLOT_WIDTH, TARGET_PROGRAMS, Layout, Slots, layout_of, slots_of
from rlhf_kernels.runtime import autocast, registry
from rlhf_kernels.runtime.philox_triton import random_words
from rlhf_kernels.runtime.triton_math import dot
from rlhf_kernels.runtime.triton_support import INTERPRETED, AotCase

ONE_READ_RANK = 32
EXACT_SPLITS = 4  # parts of the features that h is added up from in exact mode, where the rows may not decide
MAX_RANK = 128
EXPAND_RANKS = 32  # ranks that expand multiplies at a time: more would not fit into registers at rank 128
_STAGES = {"shrink": 3, "expand": 2, "columns": 2}
_ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_WIDTH = tl.constexpr(SLOT_WIDTH)


@triton.jit
def _keep(row_ids, rows, live, first_column, seed, stream, threshold, BN: tl.constexpr, BD: tl.constexpr):
    """Dropout mask [BN, BD]: four columns share one draw of Philox (see `philox`)."""
    row = tl.load(row_ids + rows, mask=live, other=0)[:, None]
    words = random_words(seed, row, stream.to(tl.uint32), first_column, BN, BD)
    return words >= threshold.to(tl.uint32)


@triton.jit
def _weight(slots, slot, d, n_d, r, ELEMENT: tl.constexpr, SIDE: tl.constexpr, ALIGNED: tl.constexpr):
    """W [D tile, R] of a slot, zero beyond its rank."""
    address = tl.load(slots + slot * _WIDTH + SIDE).to(tl.pointer_type(ELEMENT))
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    rank = tl.load(slots + slot * _WIDTH + 2)
    at = r[None, :] * n_d + d[:, None] if SIDE == 0 else d[:, None] * rank + r[None, :]
    return tl.load(address + at, mask=(d[:, None] < n_d) & (r[None, :] < rank), other=0.0)


@triton.jit
def _factor(slots, slot, SIDE: tl.constexpr):
    """q on A's side, s on B's."""
    return tl.load(slots + slot * _WIDTH + 4 + SIDE).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _small_rows(small, n_splits, n_on, place, live, r, R: tl.constexpr, BN: tl.constexpr):
    """Rows [BN, R] of h or dh, the sum over splits in their order."""
    at = (place + tl.arange(0, BN))[:, None] * R + r[None, :]
    total = tl.load(small + at, mask=live[:, None], other=0.0)
    for _ in range(1, n_splits):
        at += n_on * R
        total += tl.load(small + at, mask=live[:, None], other=0.0)
    return total


@triton.jit(do_not_specialize=["seed", "stream"])
def _shrink_kernel(x, out, tiles, slots, row_ids, seed, stream, x_stride, n_on, n_d, split_size,
                   ELEMENT: tl.constexpr, SIDE: tl.constexpr, COMPACT: tl.constexpr, DROPOUT: tl.constexpr,
                   ALIGNED: tl.constexpr, UPCAST: tl.constexpr, R: tl.constexpr, BN: tl.constexpr,
                   BD: tl.constexpr):  # fmt: skip
    """out [splits, n_on, R]: factor · (mask ∘ x) W over one split of D. COMPACT: row i of x is the i-th on row."""
    tile, split = tl.program_id(0), tl.program_id(1)
    lane, r = tl.arange(0, BN), tl.arange(0, R)
    row, slot, place = tl.load(tiles + tile * 4), tl.load(tiles + tile * 4 + 2), tl.load(tiles + tile * 4 + 3)
    live = lane < tl.load(tiles + tile * 4 + 1)
    rows = row + lane
    from_rows = rows
    if COMPACT:
        from_rows = place + lane
    if DROPOUT:
        threshold = tl.load(slots + slot * _WIDTH + 3)
    acc = tl.zeros([BN, R], tl.float32)
    for first in range(split * split_size, tl.minimum(n_d, (split + 1) * split_size), BD):
        d = first + tl.arange(0, BD)
        inside = live[:, None] & (d[None, :] < n_d)
        v = tl.load(x + from_rows[:, None] * x_stride + d[None, :], mask=inside, other=0.0)
        if DROPOUT:
            keep = _keep(row_ids, rows, live, first, seed, stream, threshold, BN, BD)
            v = tl.where(keep, v, tl.zeros_like(v))
        acc = dot(v, _weight(slots, slot, d, n_d, r, ELEMENT, SIDE, ALIGNED), acc, UPCAST)
    at = (split.to(tl.int64) * n_on + place + lane)[:, None] * R + r[None, :]
    tl.store(out + at, acc * _factor(slots, slot, SIDE), mask=live[:, None])


@triton.jit(do_not_specialize=["seed", "stream"])
def _expand_kernel(small, out, tiles, slots, row_ids, seed, stream, out_stride, n_splits, n_on, n_d,
                   ELEMENT: tl.constexpr, SIDE: tl.constexpr, COMPACT: tl.constexpr, DROPOUT: tl.constexpr,
                   ADD: tl.constexpr, ALIGNED: tl.constexpr, UPCAST: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
                   BN: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """out rows [.., D] (+)= factor · mask ∘ (small Wᵀ), in fp32, rounded once."""
    tile, first = tl.program_id(0), tl.program_id(1) * BD
    lane, d = tl.arange(0, BN), first + tl.arange(0, BD)
    row, slot, place = tl.load(tiles + tile * 4), tl.load(tiles + tile * 4 + 2), tl.load(tiles + tile * 4 + 3)
    live = lane < tl.load(tiles + tile * 4 + 1)
    delta = tl.zeros([BN, BD], tl.float32)
    for first_r in range(0, R, BR):
        r = first_r + tl.arange(0, BR)
        w = _weight(slots, slot, d, n_d, r, ELEMENT, SIDE, ALIGNED)
        h = _small_rows(small, n_splits, n_on, place, live, r, R, BN)
        delta = dot(h, tl.trans(w), delta, UPCAST)
    delta *= _factor(slots, slot, SIDE)
    if DROPOUT:
        threshold = tl.load(slots + slot * _WIDTH + 3)
        keep = _keep(row_ids, row + lane, live, first, seed, stream, threshold, BN, BD)
        delta = tl.where(keep, delta, 0.0)
    to_rows = row + lane
    if COMPACT:
        to_rows = place + lane
    at = to_rows[:, None] * out_stride + d[None, :]
    inside = live[:, None] & (d[None, :] < n_d)
    if ADD:
        delta += tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, delta.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["seed", "stream"])
def _columns_kernel(x, small, sums, shares, tiles, chunks, slots, row_ids, seed, stream, x_stride, n_splits, n_on, n_d,
                    ELEMENT: tl.constexpr, SIDE: tl.constexpr, COMPACT: tl.constexpr, DROPOUT: tl.constexpr,
                    SHARES: tl.constexpr, ALIGNED: tl.constexpr, UPCAST: tl.constexpr, R: tl.constexpr,
                    BN: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """sums [chunks, D, R]: factor · Σ_n (mask ∘ x_n) small_nᵀ over a chunk's rows.

    SHARES: also shares [D tiles, n_on, R], factor · x W over this program's columns, from the same x.
    """
    chunk, column_tile = tl.program_id(0), tl.program_id(1)
    lane, r, d = tl.arange(0, BN), tl.arange(0, R), column_tile * BD + tl.arange(0, BD)
    begin, end = tl.load(chunks + chunk * 2).to(tl.int32), tl.load(chunks + chunk * 2 + 1).to(tl.int32)
    slot = tl.load(tiles + begin * 4 + 2)  # one slot per chunk
    factor = _factor(slots, slot, SIDE)
    if DROPOUT:
        threshold = tl.load(slots + slot * _WIDTH + 3)
    if SHARES:
        w = _weight(slots, slot, d, n_d, r, ELEMENT, SIDE, ALIGNED)
    acc = tl.zeros([BD, R], tl.float32)
    for tile in range(begin, end):
        row, place = tl.load(tiles + tile * 4), tl.load(tiles + tile * 4 + 3)
        live = lane < tl.load(tiles + tile * 4 + 1)
        from_rows = row + lane
        if COMPACT:
            from_rows = place + lane
        inside = live[:, None] & (d[None, :] < n_d)
        v = tl.load(x + from_rows[:, None] * x_stride + d[None, :], mask=inside, other=0.0)
        if DROPOUT:
            keep = _keep(row_ids, row + lane, live, column_tile * BD, seed, stream, threshold, BN, BD)
            v = tl.where(keep, v, tl.zeros_like(v))
        h = _small_rows(small, n_splits, n_on, place, live, r, R, BN)
        acc = dot(tl.trans(v), h, acc, UPCAST)
        if SHARES:
            share = dot(v, w, tl.zeros([BN, R], tl.float32), UPCAST) * factor
            at = (column_tile.to(tl.int64) * n_on + place + lane)[:, None] * R + r[None, :]
            tl.store(shares + at, share, mask=live[:, None])
    at = (chunk.to(tl.int64) * n_d + d)[:, None] * R + r[None, :]
    tl.store(sums + at, acc * factor, mask=d[:, None] < n_d)


@triton.jit
def _fold_rows_kernel(shares, out, tiles, n_shares, n_on, R: tl.constexpr, BN: tl.constexpr):
    """out [n_on, R]: the sum of shares [n_shares, n_on, R], in order, for the rows of the tiles."""
    tile = tl.program_id(0)
    lane, r = tl.arange(0, BN), tl.arange(0, R)
    live = lane < tl.load(tiles + tile * 4 + 1)
    place = tl.load(tiles + tile * 4 + 3)
    total = _small_rows(shares, n_shares, n_on, place, live, r, R, BN)
    tl.store(out + (place + lane)[:, None] * R + r[None, :], total, mask=live[:, None])


@triton.jit
def _fold_columns_kernel(sums, out, folds, slots, n_d, SIDE: tl.constexpr, R: tl.constexpr, BD: tl.constexpr):
    """out, flat: the gradients of the slots in `folds` one after the other, each in A's or B's layout."""
    entry = folds + tl.program_id(0) * 4
    slot, begin, end, ranks_before = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    rank = tl.load(slots + slot * _WIDTH + 2)
    d, r = tl.program_id(1) * BD + tl.arange(0, BD), tl.arange(0, R)
    inside = (d[:, None] < n_d) & (r[None, :] < rank)
    total = tl.zeros([BD, R], tl.float32)
    for chunk in range(begin, end):
        total += tl.load(sums + (chunk * n_d + d)[:, None] * R + r[None, :], mask=inside, other=0.0)
    at = r[None, :].to(tl.int64) * n_d + d[:, None] if SIDE == 0 else d[:, None] * rank + r[None, :]
    tl.store(out + ranks_before * n_d + at, total.to(out.dtype.element_ty), mask=inside)


def _config(n: int, rank: int, x: torch.dtype, weight: torch.dtype, kernel: str) -> dict[str, int]:
    """Columns per tile and warps: what registers and shared memory hold without spills (`rlhf_kernels.runtime.aot`)."""
    tf32 = torch.bfloat16 not in (x, weight) and torch.float32 in (x, weight)
    if kernel == "shrink":
        block = 128 if rank <= 32 and not tf32 else 64 if rank <= 64 or not tf32 else 32
        num_warps = 8 if rank >= 64 else 4
    elif kernel == "expand":
        block = 64 if tf32 and rank > 64 else 128
        num_warps = 8 if rank >= 64 else 4
    else:
        block = (128 if tf32 else 256) if rank <= 32 else 64
        num_warps = 8
    return {"BD": min(block, max(16, triton.next_power_of_2(n))), "num_warps": num_warps}


class _Call:
    """One call's adapters and dropout, and the launches on them."""

    def __init__(self, lora_call: LoraCall) -> None:
        self.A, self.B = _one_dtype("A", lora_call.A), _one_dtype("B", lora_call.B)
        self.ranks = [a.shape[0] for a in lora_call.A]
        self.runs = (lora_call.starts, lora_call.ends, lora_call.slots)
        self.n_on = lora_call.n_on
        self.rank = max(16, triton.next_power_of_2(max(self.ranks)))
        if self.rank > MAX_RANK:
            raise ValueError(f"A: expected ranks of at most {MAX_RANK} for backend='triton', got {max(self.ranks)}")
        self.slots: Slots = slots_of(self.A, self.B, lora_call.scales, lora_call.p)
        row_ids = lora_call.row_ids if any(lora_call.p) else None
        self.dropout = row_ids is not None
        self.exact = registry.is_exact()
        self.deciding_rank = MAX_RANK if self.exact else self.rank  # about tiles; a slot's own is not that of its call
        self.draw = (None if row_ids is None else row_ids.contiguous(), lora_call.seed, lora_call.stream)

    def _config(self, n_d: int, x: torch.dtype, side: int, kernel: str) -> dict[str, int]:
        weight = (self.B if side else self.A)[0]
        return {**_config(n_d, self.deciding_rank, x, weight.dtype, kernel), "num_stages": _STAGES[kernel]}

    def layout(self, wanted: list[int] | None = None, column_tiles: int = 1) -> Layout:
        """Tiles of the slots in `wanted`, or of all."""
        wanted = list(range(len(self.A))) if wanted is None else wanted
        return layout_of(*self.runs, self.ranks, wanted, column_tiles, self.exact, self.A[0].device)

    def _constexprs(self, side: int, layout: Layout, dropout: bool) -> dict[str, Any]:
        return {
            "ELEMENT": _ELEMENTS[(self.B if side else self.A)[0].dtype],
            "SIDE": side,
            "DROPOUT": dropout and self.dropout,
            "ALIGNED": self.slots.aligned,
            "UPCAST": INTERPRETED,
            "R": self.rank,
            "BN": layout.block_n,
        }

    def small(self, n_splits: int = 1) -> Tensor:
        """Room for h or dh, [splits, n_on, R]."""
        return torch.empty(n_splits, self.n_on, self.rank, dtype=torch.float32, device=self.A[0].device)

    def shrink(self, x: Tensor, side: int, wanted: list[int] | None, *, compact: bool = False) -> Tensor:
        """h [splits, n_on, R] of x on A's side, dh of dy on B's; only the rows of the slots in `wanted`."""
        layout, n_d = self.layout(wanted), x.shape[1]
        config = self._config(n_d, x.dtype, side, "shrink")
        block = config["BD"]
        programs, most = (EXACT_SPLITS, EXACT_SPLITS) if self.exact else (TARGET_PROGRAMS // layout.n_tiles, 16)
        n_splits = max(1, min(programs, n_d // (4 * block), most))
        split_size = triton.cdiv(triton.cdiv(n_d, n_splits), block) * block
        n_splits = triton.cdiv(n_d, split_size)
        out = self.small(n_splits)
        _shrink_kernel[(layout.n_tiles, n_splits)](
            x, out, layout.tiles, self.slots.table, *self.draw, x.stride(0), self.n_on, n_d, split_size,
            COMPACT=compact, **self._constexprs(side, layout, dropout=side == 0), **config,
        )  # fmt: skip
        return out

    def expand(self, small: Tensor, out: Tensor, side: int, *, add: bool, compact: bool = False) -> None:
        """Add to out's on rows: s B h on B's side, q k ∘ (Aᵀ dh) on A's."""
        layout, n_d = self.layout(), out.shape[1]
        config = self._config(n_d, torch.float32, side, "expand")
        _expand_kernel[(layout.n_tiles, triton.cdiv(n_d, config["BD"]))](
            small, out, layout.tiles, self.slots.table, *self.draw, out.stride(0), small.shape[0], self.n_on, n_d,
            COMPACT=compact, ADD=add, BR=min(self.rank, EXPAND_RANKS),
            **self._constexprs(side, layout, dropout=side == 0), **config,
        )  # fmt: skip

    def columns(
        self, x: Tensor, small: Tensor, side: int, wanted: list[int], *, dh: Tensor | None = None, compact: bool = False
    ) -> list[Tensor]:
        """dA from (x, dh) or dB from (dy, h) of the slots in `wanted`; with `dh` its rows too, from one read of dy."""
        n_d = x.shape[1]
        config = self._config(n_d, x.dtype, side, "columns")
        column_tiles = triton.cdiv(n_d, config["BD"])
        layout = self.layout(wanted, column_tiles)
        sums = torch.empty(layout.n_chunks, n_d, self.rank, dtype=torch.float32, device=x.device)
        shares = None if dh is None else self.small(column_tiles)
        _columns_kernel[(layout.n_chunks, column_tiles)](
            x, small, sums, shares, layout.tiles, layout.chunks, self.slots.table, *self.draw, x.stride(0),
            small.shape[0], self.n_on, n_d, COMPACT=compact, SHARES=dh is not None,
            **self._constexprs(side, layout, dropout=side == 0), **config,
        )  # fmt: skip
        if dh is not None and shares is not None:
            self.fold_rows(shares, dh, layout)
        weights = [(self.B if side else self.A)[i] for i in wanted]
        flat = torch.empty(sum(w.numel() for w in weights), dtype=weights[0].dtype, device=x.device)
        block = 64 if self.rank <= 64 else 32
        _fold_columns_kernel[(len(wanted), triton.cdiv(n_d, block))](
            sums, flat, layout.folds, self.slots.table, n_d, SIDE=side, R=self.rank, BD=block
        )  # fmt: skip
        if len(weights) == 1:
            return [flat.view(weights[0].shape)]
        grads = [torch.empty_like(w) for w in weights]  # an op's results may not share memory
        parts = flat.split([w.numel() for w in weights])
        torch._foreach_copy_(grads, [part.view(w.shape) for part, w in zip(parts, weights, strict=True)])
        return grads

    def fold_rows(self, shares: Tensor, dh: Tensor, layout: Layout) -> None:
        """dh [n_on, R]: the sum of its shares [.., n_on, R] in the rows of the layout."""
        _fold_rows_kernel[(layout.n_tiles,)](
            shares, dh, layout.tiles, shares.shape[0], self.n_on, R=self.rank, BN=layout.block_n
        )  # fmt: skip

    def backward(
        self, dy: Tensor, x: Tensor, dx: Tensor | None, need_A: list[bool], need_B: list[bool], *, compact: bool
    ) -> list[Tensor]:
        """Adds to dx [N, K] in place; returns the needed dA, then dB. compact: dy has on rows only."""
        slots = range(len(self.A))
        wants_A, wants_B = [i for i in slots if need_A[i]], [i for i in slots if need_B[i]]
        wants_dh = list(slots) if dx is not None else wants_A
        both = [i for i in wants_B if i in wants_dh and self.rank <= ONE_READ_RANK and not self.exact]
        dA: list[Tensor] = []
        dB: dict[int, Tensor] = {}
        dh = self.small()
        if wants_B:
            h = self.shrink(x, 0, wants_B)
            if both:
                dB |= zip(both, self.columns(dy, h, 1, both, dh=dh, compact=compact), strict=True)
            alone = [i for i in wants_B if i not in both]
            if alone:
                dB |= zip(alone, self.columns(dy, h, 1, alone, compact=compact), strict=True)
        rest = [i for i in wants_dh if i not in both]
        if rest:
            shares = self.shrink(dy, 1, rest, compact=compact)
            self.fold_rows(shares, dh, self.layout(rest))
        if wants_A:
            dA = self.columns(x, dh, 0, wants_A)
        if dx is not None:
            self.expand(dh, dx, 0, add=True)
        return [*dA, *(dB[i] for i in wants_B)]


def _one_dtype(name: str, weights: list[Tensor]) -> list[Tensor]:
    """Contiguous and of one dtype: fp32 copies where they differ."""
    for i, w in enumerate(weights):
        if w.dtype not in _ELEMENTS:
            allowed = ", ".join(map(str, _ELEMENTS))
            raise TypeError(f"{name}[{i}]: expected {allowed} for backend='triton', got {w.dtype}")
    same = len({w.dtype for w in weights}) == 1
    if not same and registry.is_exact():
        dtypes = sorted({str(w.dtype) for w in weights})
        raise TypeError(f"{name}: expected adapters of one dtype in exact mode, whose bits are their own, got {dtypes}")
    return [(w if same else w.float()).contiguous() for w in weights]


def _rows(x: Tensor) -> Tensor:
    """[N, features] with inner stride 1."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _typed(grads: list[Tensor], lora_call: LoraCall, need_A: list[bool], need_B: list[bool]) -> list[Tensor]:
    """Each gradient in its parameter's own dtype."""
    owners = [w for w, need in zip([*lora_call.A, *lora_call.B], [*need_A, *need_B], strict=True) if need]
    return [g.to(w.dtype) for g, w in zip(grads, owners, strict=True)]


def forward(x: Tensor, lora_call: LoraCall) -> Tensor:
    """The delta of the on rows, compact and in row order: fp32 [Σ(ends − starts), M]."""
    call = _Call(lora_call)
    delta = torch.empty(call.n_on, lora_call.B[0].shape[0], dtype=torch.float32, device=x.device)
    call.expand(call.shrink(_rows(x), 0, None), delta, 1, add=False, compact=True)
    return delta


def backward(
    ddelta: Tensor,
    x: Tensor,
    lora_call: LoraCall,
    need_x: bool,
    need_A: list[bool],
    need_B: list[bool],
) -> list[Tensor]:
    """Return what is needed of dx [N,K], then dA, then dB, each in its tensor's dtype. ddelta is compact."""
    dx = torch.zeros_like(x, memory_format=torch.contiguous_format) if need_x else None
    call = _Call(lora_call)
    grads = call.backward(_rows(ddelta), _rows(x), dx, need_A, need_B, compact=True)
    grads = _typed(grads, lora_call, need_A, need_B)
    return grads if dx is None else [dx, *grads]


def linear_forward(x: Tensor, weight: Tensor, bias: Tensor | None, lora_call: LoraCall) -> Tensor:
    """The product on all rows in one call and in x's own shape (for off rows' bits), then the deltas."""
    with autocast.off(x):
        y = product_for(x, weight).forward(x, weight, bias)
    call = _Call(lora_call)
    call.expand(call.shrink(_rows(x), 0, None), y.view(-1, y.shape[-1]), 1, add=True)
    return y


def linear_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    lora_call: LoraCall,
    need_x: bool,
    need_weight: bool,
    need_bias: bool,
    need_A: list[bool],
    need_B: list[bool],
) -> list[Tensor]:
    """Return what is needed of dx (x's shape), dW, db, then dA, then dB."""
    dy_rows, x_rows = _rows(dy), _rows(x)
    grads: list[Tensor] = []
    dx_rows, base = None, product_for(x, weight)
    with autocast.off(x):
        if need_x:
            dx_rows = base.input_gradient(dy_rows, weight)  # [N, K], the base path: no dropout here
            grads.append(dx_rows.view(x.shape))
        if need_weight:
            grads.append(base.weight_gradient(dy_rows, x_rows))
        if need_bias:
            grads.append(dy_rows.sum(0))
    if need_x or any(need_A) or any(need_B):
        call = _Call(lora_call)
        low_rank = call.backward(dy_rows, x_rows, dx_rows, need_A, need_B, compact=False)
        grads += _typed(low_rank, lora_call, need_A, need_B)
    return grads


def aot_cases() -> list[AotCase]:
    """bf16 activations with bf16 and fp32 adapters of ranks 16, 64 and 128, fp32 throughout, many and few rows."""
    element = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16}
    types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    integers = ("x_stride", "out_stride", "n_on", "n_d", "split_size", "n_splits", "n_shares", "stream")
    fp32 = ("small", "sums", "shares")

    def case(
        name: str,
        kernel: Any,
        x: str,
        adapter: str,
        rank: int,
        block_n: int,
        side: int,
        kind: str = "",
        most: int | None = None,
        **flags: bool,
    ) -> AotCase:
        """most: rank that decides the tiles, where that is not the rank itself."""
        out = "*fp32" if kernel in (_shrink_kernel, _fold_rows_kernel) else f"*{adapter if kind == 'fold' else x}"
        known = {
            **dict.fromkeys(integers, "i32"),
            **dict.fromkeys(fp32, "*fp32"),
            **dict.fromkeys(("tiles", "chunks", "folds", "slots", "row_ids"), "*i64"),
            "seed": "i64",
            "x": f"*{x}",
            "out": out,
        }
        config = {"BD": 64 if rank <= 64 else 32, "num_warps": 4}
        if kind in ("shrink", "expand", "columns"):
            config = _config(4096, most or rank, torch.float32 if kind == "expand" else types[x], types[adapter], kind)
        constexprs: dict[str, Any] = {
            "ELEMENT": element[adapter],
            "SIDE": side,
            "COMPACT": False,
            "DROPOUT": False,
            "ADD": True,
            "SHARES": False,
            "ALIGNED": True,
            "UPCAST": False,
            "R": rank,
            "BR": min(rank, EXPAND_RANKS),
            "BN": block_n,
            "BD": config["BD"],
            **flags,
        }
        names = kernel.arg_names
        signature = {n: kind for n, kind in known.items() if n in names}
        wide = tuple(n for n, kind in signature.items() if kind[0] == "*")
        return AotCase(
            name=f"{name} {x}/{adapter} r{rank} n{block_n}",
            kernel=kernel,
            signature=signature,
            constexprs={n: v for n, v in constexprs.items() if n in names},
            num_warps=config["num_warps"],
            num_stages=_STAGES.get(kind, 2),
            divisible_by_16=(*wide, *(n for n in ("x_stride", "out_stride", "n_d", "split_size") if n in names)),
        )

    cases = []
    for x, adapter, rank, block_n in (
        ("bf16", "bf16", 16, 64),
        ("bf16", "fp32", 16, 64),
        ("bf16", "fp32", 64, 64),
        ("bf16", "fp32", 128, 64),
        ("fp16", "fp32", 128, 64),
        ("fp32", "fp32", 16, 64),
        ("fp32", "fp32", 128, 64),
        ("bf16", "fp32", 16, 16),
    ):
        what = (x, adapter, rank, block_n)
        one_read = rank <= ONE_READ_RANK
        cases += [
            case("x", _shrink_kernel, *what, 0, "shrink"),
            case("x dropout", _shrink_kernel, *what, 0, "shrink", DROPOUT=True),
            case("dy", _shrink_kernel, *what, 1, "shrink"),
            case("y", _expand_kernel, *what, 1, "expand"),
            case("dx dropout", _expand_kernel, *what, 0, "expand", DROPOUT=True),
            case("dy", _columns_kernel, *what, 1, "columns", SHARES=one_read),
            case("x dropout", _columns_kernel, *what, 0, "columns", DROPOUT=True),
            case("dh", _fold_rows_kernel, *what, 1),
            case("dA", _fold_columns_kernel, *what, 0, "fold"),
            case("dB", _fold_columns_kernel, *what, 1, "fold"),
        ]
    for x, adapter, rank in (("bf16", "fp32", 16), ("bf16", "bf16", 64), ("fp32", "fp32", 128)):
        few = (x, adapter, rank, EXACT_ROWS)
        cases += [
            case("exact x", _shrink_kernel, *few, 0, "shrink", MAX_RANK),
            case("exact y", _expand_kernel, *few, 1, "expand", MAX_RANK),
            case("exact dx", _expand_kernel, *few, 0, "expand", MAX_RANK),
            case("exact dy", _columns_kernel, *few, 1, "columns", MAX_RANK),
        ]
    return cases + importlib.import_module("rlhf_kernels.lora.triton_group").aot_cases()  # which imports this module
