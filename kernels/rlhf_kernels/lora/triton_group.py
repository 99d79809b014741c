"""Triton's LoRA of linears that read one x: each step of forward and backward is one launch for all of them.

With the symbols of `lora.triton`, for the linears m = 1 … L of a group, each with slots of its own:

    shrink   h_m = q A_m (k_m ∘ x)                  one launch; h is kept for the backward
    expand   y_m += s B_m h_m                       one launch
    columns  dB_m = s Σ dy_m h_mᵀ, parts of dh_m    one launch, then one that adds the parts
    columns  dA_m = q Σ dh_m (k_m ∘ x)ᵀ             one launch, then one for all that dA and dB are added up from
    expand   dx = Σ_m dy_m W_m + Σ_m q k_m ∘ (A_mᵀ dh_m)    products one after another, then one launch

A pair (linear, slot) is a slot of the group: tiles, chunks and addresses are those of `lora.triton` with all of them in
one table. `shapes` [slots, 6] says for each: its linear, the stream of its dropout, K, M, and the columns of a part of
h and of dh. Results and gradients of the linears lie apart; kernels take their addresses.

Every sum is taken in the order of `lora.triton` where the linears have the same rows on, one padded rank and one dtype:
y, dA and dB have its bits. dx has not: there each linear's part is rounded before autograd adds it, here the products
add up in dx and the low-rank parts in fp32, rounded once. No atomics; equal inputs give equal bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhf_kernels.linear import product_for, reference as torch_products
from rlhf_kernels.lora import triton as single
from rlhf_kernels.lora.group import MOST
from rlhf_kernels.lora.segments import LoraCall
from rlhf_kernels.lora.tables import BATCHES, EXACT_CHUNK, EXACT_ROWS, TARGET_PROGRAMS, block_rows
from rlhf_kernels.lora.triton import (
    _ELEMENTS,
    EXACT_SPLITS,
    EXPAND_RANKS,
    ONE_READ_RANK,
    _factor as factor_of,
    _keep as keep_of,
    _small_rows as small_rows,
    _weight as weight_of,
)
from rlhf_kernels.runtime.device_tables import upload
from rlhf_kernels.runtime.triton_math import dot
from rlhf_kernels.runtime.triton_support import INTERPRETED, AotCase

_SHAPES = tl.constexpr(6)
_WIDTH = single._WIDTH


@triton.jit
def _of(linear, a0, a1, a2, a3):
    """The argument of a linear."""
    return tl.where(linear == 0, a0, tl.where(linear == 1, a1, tl.where(linear == 2, a2, a3)))


@triton.jit
def _rows_of(linear, a0, a1, a2, a3, s0, s1, s2, s3, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr):
    """Address and stride of a linear's rows."""
    address, stride = _of(linear, a0, a1, a2, a3).to(tl.pointer_type(ELEMENT)), _of(linear, s0, s1, s2, s3)
    if ALIGNED:
        address, stride = tl.multiple_of(address, 16), tl.multiple_of(stride, 16)
    return address, stride


@triton.jit
def _size(shape, place, SIZED: tl.constexpr):
    """A number of a slot's shape; SIZED: it is divisible by 16, which makes loads wide."""
    size = tl.load(shape + place).to(tl.int32)
    if SIZED:
        size = tl.multiple_of(size, 16)
    return size


@triton.jit(do_not_specialize=["seed", "a0", "a1", "a2", "a3"])
def _group_shrink_kernel(a0, a1, a2, a3, s0, s1, s2, s3, out, tiles, slots, shapes, row_ids, seed, n_on,
                         X: tl.constexpr, ELEMENT: tl.constexpr, SIDE: tl.constexpr, DROPOUT: tl.constexpr,
                         ALIGNED: tl.constexpr, ROWS_ALIGNED: tl.constexpr, SIZED: tl.constexpr, UPCAST: tl.constexpr,
                         R: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """out [parts, n_on, R]: factor · (mask ∘ x) W over one part of D."""
    tile, part = tl.program_id(0), tl.program_id(1)
    lane, r = tl.arange(0, BN), tl.arange(0, R)
    row, slot, place = tl.load(tiles + tile * 4), tl.load(tiles + tile * 4 + 2), tl.load(tiles + tile * 4 + 3)
    shape = shapes + slot * _SHAPES
    n_d, width = _size(shape, 2 + SIDE, SIZED), _size(shape, 4 + SIDE, True)
    x, stride = _rows_of(tl.load(shape), a0, a1, a2, a3, s0, s1, s2, s3, X, ROWS_ALIGNED)
    live = (lane < tl.load(tiles + tile * 4 + 1)) & (part * width < n_d)
    rows = row + lane
    if DROPOUT:
        threshold, stream = tl.load(slots + slot * _WIDTH + 3), tl.load(shape + 1)
    acc = tl.zeros([BN, R], tl.float32)
    for first in range(part * width, tl.minimum(n_d, (part + 1) * width), BD):
        d = first + tl.arange(0, BD)
        inside = live[:, None] & (d[None, :] < n_d)
        v = tl.load(x + rows[:, None] * stride + d[None, :], mask=inside, other=0.0)
        if DROPOUT:
            keep = keep_of(row_ids, rows, live, first, seed, stream, threshold, BN, BD)
            v = tl.where(keep, v, tl.zeros_like(v))
        acc = dot(v, weight_of(slots, slot, d, n_d, r, ELEMENT, SIDE, ALIGNED), acc, UPCAST)
    at = (part.to(tl.int64) * n_on + place + lane)[:, None] * R + r[None, :]
    tl.store(out + at, acc * factor_of(slots, slot, SIDE), mask=live[:, None])


@triton.jit(do_not_specialize=["a0", "a1", "a2", "a3"])
def _group_expand_y_kernel(small, a0, a1, a2, a3, s0, s1, s2, s3, tiles, slots, shapes, n_parts, n_on, Y: tl.constexpr,
                           ELEMENT: tl.constexpr, ALIGNED: tl.constexpr, ROWS_ALIGNED: tl.constexpr,
                           SIZED: tl.constexpr, UPCAST: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
                           BN: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """y_m rows += s · h Bᵀ, in fp32, rounded once."""
    tile, first = tl.program_id(0), tl.program_id(1) * BD
    lane, d = tl.arange(0, BN), first + tl.arange(0, BD)
    row, slot, place = tl.load(tiles + tile * 4), tl.load(tiles + tile * 4 + 2), tl.load(tiles + tile * 4 + 3)
    shape = shapes + slot * _SHAPES
    n_d = _size(shape, 3, SIZED)
    if first < n_d:
        out, stride = _rows_of(tl.load(shape), a0, a1, a2, a3, s0, s1, s2, s3, Y, ROWS_ALIGNED)
        live = lane < tl.load(tiles + tile * 4 + 1)
        delta = tl.zeros([BN, BD], tl.float32)
        for first_r in range(0, R, BR):
            r = first_r + tl.arange(0, BR)
            w = weight_of(slots, slot, d, n_d, r, ELEMENT, 1, ALIGNED)
            delta = dot(small_rows(small, n_parts, n_on, place, live, r, R, BN), tl.trans(w), delta, UPCAST)
        delta *= factor_of(slots, slot, 1)
        at = (row + lane)[:, None] * stride + d[None, :]
        inside = live[:, None] & (d[None, :] < n_d)
        delta += tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, delta.to(Y), mask=inside)


@triton.jit(do_not_specialize=["seed"])
def _group_expand_x_kernel(small, out, blocks, slots, shapes, row_ids, seed, out_stride, n_on, n_d,
                           ELEMENT: tl.constexpr, DROPOUT: tl.constexpr, ALIGNED: tl.constexpr, UPCAST: tl.constexpr,
                           LINEARS: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
                           BD: tl.constexpr):  # fmt: skip
    """dx rows += Σ_m q k_m ∘ (dh_m A_m), in fp32, rounded once. blocks: first row, rows, (slot or −1, place) each."""
    block, first = blocks + tl.program_id(0) * (2 + 2 * LINEARS), tl.program_id(1) * BD
    lane, d = tl.arange(0, BN), first + tl.arange(0, BD)
    rows, live = tl.load(block) + lane, lane < tl.load(block + 1)
    total = tl.zeros([BN, BD], tl.float32)
    for m in range(LINEARS):
        slot, place = tl.load(block + 2 + 2 * m), tl.load(block + 3 + 2 * m)
        if slot >= 0:
            delta = tl.zeros([BN, BD], tl.float32)
            for first_r in range(0, R, BR):
                r = first_r + tl.arange(0, BR)
                w = weight_of(slots, slot, d, n_d, r, ELEMENT, 0, ALIGNED)
                delta = dot(small_rows(small, 1, n_on, place, live, r, R, BN), tl.trans(w), delta, UPCAST)
            delta *= factor_of(slots, slot, 0)
            if DROPOUT:
                threshold, stream = tl.load(slots + slot * _WIDTH + 3), tl.load(shapes + slot * _SHAPES + 1)
                keep = keep_of(row_ids, rows, live, first, seed, stream, threshold, BN, BD)
                delta = tl.where(keep, delta, 0.0)
            total += delta
    at = rows[:, None] * out_stride + d[None, :]
    inside = live[:, None] & (d[None, :] < n_d)
    total += tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["seed", "a0", "a1", "a2", "a3"])
def _group_columns_kernel(a0, a1, a2, a3, s0, s1, s2, s3, small, sums, shares, tiles, chunks, slots, shapes, row_ids,
                          seed, n_parts, n_on, n_most, X: tl.constexpr, ELEMENT: tl.constexpr, SIDE: tl.constexpr,
                          DROPOUT: tl.constexpr, SHARES: tl.constexpr, ALIGNED: tl.constexpr,
                          ROWS_ALIGNED: tl.constexpr, SIZED: tl.constexpr, UPCAST: tl.constexpr, R: tl.constexpr,
                          BN: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """sums [chunks, n_most, R]: factor · Σ_n (mask ∘ x_n) small_nᵀ over a chunk's rows.

    SHARES: also shares [D tiles, n_on, R], factor · x W over this program's columns, from the same x.
    """
    chunk, column_tile = tl.program_id(0), tl.program_id(1)
    lane, r, d = tl.arange(0, BN), tl.arange(0, R), column_tile * BD + tl.arange(0, BD)
    begin, end = tl.load(chunks + chunk * 2).to(tl.int32), tl.load(chunks + chunk * 2 + 1).to(tl.int32)
    slot = tl.load(tiles + begin * 4 + 2)  # one slot per chunk
    shape = shapes + slot * _SHAPES
    n_d = _size(shape, 2 + SIDE, SIZED)
    if column_tile * BD < n_d:
        x, stride = _rows_of(tl.load(shape), a0, a1, a2, a3, s0, s1, s2, s3, X, ROWS_ALIGNED)
        factor = factor_of(slots, slot, SIDE)
        if DROPOUT:
            threshold, stream = tl.load(slots + slot * _WIDTH + 3), tl.load(shape + 1)
        if SHARES:
            w = weight_of(slots, slot, d, n_d, r, ELEMENT, SIDE, ALIGNED)
        acc = tl.zeros([BD, R], tl.float32)
        for tile in range(begin, end):
            row, place = tl.load(tiles + tile * 4), tl.load(tiles + tile * 4 + 3)
            live = lane < tl.load(tiles + tile * 4 + 1)
            inside = live[:, None] & (d[None, :] < n_d)
            v = tl.load(x + (row + lane)[:, None] * stride + d[None, :], mask=inside, other=0.0)
            if DROPOUT:
                keep = keep_of(row_ids, row + lane, live, column_tile * BD, seed, stream, threshold, BN, BD)
                v = tl.where(keep, v, tl.zeros_like(v))
            h = small_rows(small, n_parts, n_on, place, live, r, R, BN)
            acc = dot(tl.trans(v), h, acc, UPCAST)
            if SHARES:
                share = dot(v, w, tl.zeros([BN, R], tl.float32), UPCAST) * factor
                at = (column_tile.to(tl.int64) * n_on + place + lane)[:, None] * R + r[None, :]
                tl.store(shares + at, share, mask=live[:, None])
        at = (chunk.to(tl.int64) * n_most + d)[:, None] * R + r[None, :]
        tl.store(sums + at, acc * factor, mask=d[:, None] < n_d)


@triton.jit
def _group_fold_rows_kernel(shares, out, tiles, shapes, n_on, R: tl.constexpr, BN: tl.constexpr):
    """out [n_on, R]: the sum of a linear's own parts of shares [parts, n_on, R], in order."""
    tile = tl.program_id(0)
    lane, r = tl.arange(0, BN), tl.arange(0, R)
    live = lane < tl.load(tiles + tile * 4 + 1)
    place, shape = tl.load(tiles + tile * 4 + 3), shapes + tl.load(tiles + tile * 4 + 2) * _SHAPES
    n_parts = tl.cdiv(tl.load(shape + 3), tl.load(shape + 5)).to(tl.int32)
    total = small_rows(shares, n_parts, n_on, place, live, r, R, BN)
    tl.store(out + (place + lane)[:, None] * R + r[None, :], total, mask=live[:, None])


@triton.jit
def _group_fold_columns_kernel(sums, out, folds, slots, shapes, R: tl.constexpr, BD: tl.constexpr):
    """out, flat: the gradients of `folds` one after the other, each in A's or B's layout.

    folds: slot, side, first chunk, chunk after the last, rows before them in sums, columns of a chunk, place in out.
    """
    entry = folds + tl.program_id(0) * 7
    slot, side, begin, end = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    before, n_most, place = tl.load(entry + 4), tl.load(entry + 5), tl.load(entry + 6)
    rank, n_d = tl.load(slots + slot * _WIDTH + 2), tl.load(shapes + slot * _SHAPES + 2 + side)
    d, r = tl.program_id(1) * BD + tl.arange(0, BD), tl.arange(0, R)
    inside = (d[:, None] < n_d) & (r[None, :] < rank)
    total = tl.zeros([BD, R], tl.float32)
    for chunk in range(begin, end):
        total += tl.load(sums + (before + chunk * n_most + d)[:, None] * R + r[None, :], mask=inside, other=0.0)
    at = tl.where(side == 0, r[None, :] * n_d + d[:, None], d[:, None] * rank + r[None, :])
    tl.store(out + place + at, total.to(out.dtype.element_ty), mask=inside)


class _Layout(NamedTuple):
    """Tables of a group's rows, shapes and wanted gradients, and what launches take from them."""

    shapes: Tensor  # [slots, 6]
    tiles: Tensor  # [tiles, 4]: first row, number of rows, slot, place among the on rows of the group
    blocks: Tensor  # [blocks, 2 + 2 linears]: rows of dx and who adds to them
    chunks_A: Tensor  # [chunks, 2]: first tile, tile after the last
    chunks_B: Tensor
    folds: Tensor  # [wanted gradients, 7]
    n_tiles: int
    n_blocks: int
    n_chunks: tuple[int, int]
    n_parts: tuple[int, int]  # of h, and of dh at most
    block_n: int
    numels: tuple[int, ...]  # of the wanted gradients, dA then dB


class _Group:
    """The adapters and dropout of a group's linears, and the launches on them."""

    def __init__(self, calls: Sequence[LoraCall | None], x: Tensor, widths: Sequence[int]) -> None:
        """widths: M of each linear."""
        on = [call for call in calls if call is not None]
        self.owners = [m for m, call in enumerate(calls) if call is not None for _ in call.A]  # linear of each slot
        rows = next((call.row_ids for call in on if call.row_ids is not None), None)
        pairs = [pair for call in on for pair in zip(call.A, call.B, call.scales, call.p, strict=True)]
        A, B, scales, p = (list(x) for x in zip(*pairs, strict=True))
        seed = next((call.seed for call in on if call.row_ids is not None), 0)
        joined = LoraCall(A, B, scales, [], [], [], p, seed, rows, 0)  # runs are this group's own matter
        self.call = single._Call(joined)
        self.calls, self.widths, self.k = calls, tuple(widths), x.shape[1]
        self.n_on = sum(call.n_on for call in on)
        self.x_dtype = x.dtype

    def config(self, side: int, kernel: str) -> dict[str, int]:
        n_d = max(self.widths) if side else self.k
        return self.call._config(n_d, torch.float32 if kernel == "expand" else self.x_dtype, side, kernel)

    def layout(self, need_A: Sequence[bool], need_B: Sequence[bool], one_read: bool) -> _Layout:
        runs = tuple(None if c is None else (*c.starts, *c.ends, *c.slots) for c in self.calls)
        streams = tuple(0 if c is None else c.stream for c in self.calls)
        blocks = tuple(self.config(side, kernel)["BD"] for kernel in ("shrink", "columns") for side in (0, 1))
        call = self.call
        sizes = ("group", runs, streams, tuple(call.ranks), self.k, self.widths, blocks)
        key = (*sizes, tuple(need_A), tuple(need_B), one_read, call.exact)
        return BATCHES.get(key, call.A[0].device, lambda: self._make(streams, blocks, need_A, need_B, one_read))

    def _make(
        self,
        streams: Sequence[int],
        blocks: Sequence[int],
        need_A: Sequence[bool],
        need_B: Sequence[bool],
        one_read: bool,
    ) -> _Layout:
        exact, ranks, device = self.call.exact, self.call.ranks, self.call.A[0].device
        shrink_A, shrink_B, columns_A, columns_B = blocks
        union = sorted({run[:2] for call in self.calls if call is not None for run in call.runs})
        if any(right[0] < left[1] for left, right in pairwise(union)):
            raise ValueError(f"segments: expected the same runs in every linear of a group, or none, got {union}")
        block_n = EXACT_ROWS if exact else block_rows([run[0] for run in union], [run[1] for run in union])
        tiles: list[list[int]] = []
        span: list[tuple[int, int]] = []  # tiles of each slot
        by_rows: dict[int, list[int]] = {}  # first row of a tile: what adds to dx there
        most, place, n_linears = [0] * len(self.calls), 0, len(self.calls)
        for m, call in enumerate(self.calls):
            if call is None:
                continue
            own: dict[int, list[list[int]]] = {slot: [] for slot in range(len(call.A))}
            for start, end, slot in call.runs:
                for row in range(start, end, block_n):
                    at = [row, min(block_n, end - row), len(span) + slot, place + row - start]
                    own[slot].append(at)
                    block = by_rows.setdefault(row, [row, at[1], *[-1, 0] * n_linears])
                    block[2 + 2 * m : 4 + 2 * m] = at[2:]
                place += end - start
            most[m] = sum(map(len, own.values()))
            for slot_tiles in own.values():
                span.append((len(tiles), len(tiles) + len(slot_tiles)))
                tiles += slot_tiles

        def split(n_d: int, block: int) -> int:
            programs, limit = (EXACT_SPLITS, EXACT_SPLITS) if exact else (TARGET_PROGRAMS // max(most), 16)
            n_splits = max(1, min(programs, n_d // (4 * block), limit))
            return int(triton.cdiv(triton.cdiv(n_d, n_splits), block) * block)

        split_A = split(self.k, shrink_A)
        parts = [columns_B if one_read else split(width, shrink_B) for width in self.widths]
        shapes = [[m, streams[m], self.k, self.widths[m], split_A, parts[m]] for m in self.owners]
        chunks: list[list[list[int]]] = [[], []]
        folds: list[list[int]] = []
        numels: list[int] = []
        widest, before = (self.k, max(self.widths)), 0
        for side, (need, columns) in enumerate(((need_A, columns_A), (need_B, columns_B))):
            for slot in (i for i, wanted in enumerate(need) if wanted):
                m = self.owners[slot]
                n_d = self.widths[m] if side else self.k
                wanted_tiles = sum(b - a for i, (a, b) in enumerate(span) if need[i] and self.owners[i] == m)
                step = EXACT_CHUNK if exact else max(1, -(-wanted_tiles * -(-n_d // columns) // TARGET_PROGRAMS))
                first, (begin, end) = len(chunks[side]), span[slot]
                chunks[side] += [[at, min(at + step, end)] for at in range(begin, end, step)]
                folds.append([slot, side, first, len(chunks[side]), before, widest[side], sum(numels)])
                numels.append(ranks[slot] * n_d)
            before += len(chunks[side]) * widest[side]
        rows = [by_rows[row] for row in sorted(by_rows)]
        return _Layout(
            shapes=upload(shapes, 6, device),
            tiles=upload(tiles, 4, device),
            blocks=upload(rows, 2 + 2 * n_linears, device),
            chunks_A=upload(chunks[0], 2, device),
            chunks_B=upload(chunks[1], 2, device),
            folds=upload(folds, 7, device),
            n_tiles=len(tiles),
            n_blocks=len(rows),
            n_chunks=(len(chunks[0]), len(chunks[1])),
            n_parts=(-(-self.k // split_A), max(-(-self.widths[m] // parts[m]) for m in self.owners)),
            block_n=block_n,
            numels=tuple(numels),
        )

    def _common(self, side: int, layout: _Layout) -> dict[str, Any]:
        weights = self.call.B if side else self.call.A
        return {
            "ELEMENT": _ELEMENTS[weights[0].dtype],
            "ALIGNED": self.call.slots.aligned,
            "UPCAST": INTERPRETED,
            "R": self.call.rank,
            "BN": layout.block_n,
        }

    def _addresses(self, rows: Sequence[Tensor]) -> tuple[list[int], dict[str, Any]]:
        """Addresses and strides of up to four tensors, and what is known of them."""
        rows = [*rows, *[rows[0]] * (MOST - len(rows))]
        aligned = all(x.data_ptr() % 16 == 0 and x.stride(0) % 16 == 0 for x in rows)
        sized = all(n % 16 == 0 for n in (self.k, *self.widths))
        return [*(x.data_ptr() for x in rows), *(x.stride(0) for x in rows)], {"ROWS_ALIGNED": aligned, "SIZED": sized}

    def room(self, n_parts: int) -> Tensor:
        """Room for h or dh, [parts, n_on, R]."""
        return torch.empty(n_parts, self.n_on, self.call.rank, dtype=torch.float32, device=self.call.A[0].device)

    def shrink(self, rows: Sequence[Tensor], side: int, layout: _Layout) -> Tensor:
        """h [parts, n_on, R] of x on A's side, the parts of dh of dy on B's."""
        places, known = self._addresses(rows)
        out, (row_ids, seed, _) = self.room(layout.n_parts[side]), self.call.draw
        _group_shrink_kernel[(layout.n_tiles, layout.n_parts[side])](
            *places, out, layout.tiles, self.call.slots.table, layout.shapes, row_ids, seed, self.n_on,
            X=_ELEMENTS[rows[0].dtype], SIDE=side, DROPOUT=side == 0 and self.call.dropout, **known,
            **self._common(side, layout), **self.config(side, "shrink"),
        )  # fmt: skip
        return out

    def expand_y(self, h: Tensor, ys: Sequence[Tensor], layout: _Layout) -> None:
        """Add s B h to the on rows of every y."""
        places, known = self._addresses(ys)
        config = self.config(1, "expand")
        _group_expand_y_kernel[(layout.n_tiles, triton.cdiv(max(self.widths), config["BD"]))](
            h, *places, layout.tiles, self.call.slots.table, layout.shapes, h.shape[0], self.n_on,
            Y=_ELEMENTS[ys[0].dtype], BR=min(self.call.rank, EXPAND_RANKS), **known, **self._common(1, layout),
            **config,
        )  # fmt: skip

    def expand_x(self, dh: Tensor, dx: Tensor, layout: _Layout) -> None:
        """Add every linear's q k ∘ (Aᵀ dh) to dx."""
        config, (row_ids, seed, _) = self.config(0, "expand"), self.call.draw
        _group_expand_x_kernel[(layout.n_blocks, triton.cdiv(self.k, config["BD"]))](
            dh, dx, layout.blocks, self.call.slots.table, layout.shapes, row_ids, seed, dx.stride(0), self.n_on, self.k,
            DROPOUT=self.call.dropout, LINEARS=len(self.calls), BR=min(self.call.rank, EXPAND_RANKS),
            **self._common(0, layout), **config,
        )  # fmt: skip

    def columns(
        self, rows: Sequence[Tensor], small: Tensor, side: int, layout: _Layout, sums: Tensor, shares: Tensor | None
    ) -> None:
        """Sums of the chunks of dA from (x, dh), or of dB from (dy, h), and parts of dh with `shares`."""
        places, known = self._addresses(rows)
        config, most, (row_ids, seed, _) = self.config(side, "columns"), max(self.widths), self.call.draw
        n_most = most if side else self.k
        _group_columns_kernel[(layout.n_chunks[side], triton.cdiv(n_most, config["BD"]))](
            *places, small, sums, shares, layout.tiles, layout.chunks_B if side else layout.chunks_A,
            self.call.slots.table, layout.shapes, row_ids, seed, small.shape[0], self.n_on, n_most,
            X=_ELEMENTS[rows[0].dtype], SIDE=side, DROPOUT=side == 0 and self.call.dropout, SHARES=shares is not None,
            **known, **self._common(side, layout), **config,
        )  # fmt: skip

    def backward(
        self, dys: Sequence[Tensor], x: Tensor, h: Tensor | None, dx: Tensor | None, need_A: list[bool],
        need_B: list[bool],
    ) -> list[Tensor]:  # fmt: skip
        """Adds to dx [N, K] in place; returns the needed dA, then dB, each in its parameter's own dtype."""
        wants_dh = dx is not None or any(need_A)
        one_read = wants_dh and all(need_B) and self.call.rank <= ONE_READ_RANK and not self.call.exact
        layout = self.layout(need_A, need_B, one_read)
        heights = (layout.n_chunks[0] * self.k, layout.n_chunks[1] * max(self.widths))
        sums = torch.empty(sum(heights), self.call.rank, dtype=torch.float32, device=x.device)
        shares = self.room(layout.n_parts[1]) if one_read else None
        if any(need_B):
            h = self.shrink([x], 0, layout) if h is None else h
            self.columns(dys, h, 1, layout, sums[heights[0] :], shares)
        if wants_dh:
            dh = self.room(1)
            shares = self.shrink(dys, 1, layout) if shares is None else shares
            _group_fold_rows_kernel[(layout.n_tiles,)](
                shares, dh, layout.tiles, layout.shapes, self.n_on, R=self.call.rank, BN=layout.block_n
            )  # fmt: skip
            if any(need_A):
                self.columns([x] * len(self.calls), dh, 0, layout, sums, None)
            if dx is not None:
                self.expand_x(dh, dx, layout)
        return self._fold(sums, layout, need_A, need_B)

    def _fold(self, sums: Tensor, layout: _Layout, need_A: list[bool], need_B: list[bool]) -> list[Tensor]:
        adapters = [w for call in self.calls if call is not None for w in call.A]
        adapters += [w for call in self.calls if call is not None for w in call.B]
        owners = [w for w, need in zip(adapters, [*need_A, *need_B], strict=True) if need]
        if not owners:
            return []
        dtypes = {w.dtype for w in owners}
        dtype = owners[0].dtype if len(dtypes) == 1 else torch.float32
        flat = torch.empty(sum(layout.numels), dtype=dtype, device=sums.device)
        block = 64 if self.call.rank <= 64 else 32
        _group_fold_columns_kernel[(len(owners), triton.cdiv(max(self.k, *self.widths), block))](
            sums, flat, layout.folds, self.call.slots.table, layout.shapes, R=self.call.rank, BD=block
        )  # fmt: skip
        parts = flat.split(list(layout.numels))
        return [part.view(w.shape).to(w.dtype) for part, w in zip(parts, owners, strict=True)]


def forward(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], calls: Sequence[LoraCall | None]
) -> tuple[list[Tensor], Tensor]:
    """y of every linear, in x's own shape, and h for the backward."""
    ys = [product_for(x, w).forward(x, w, b) for w, b in zip(weights, biases, strict=True)]
    rows = single._rows(x)
    group = _Group(calls, rows, [w.shape[0] for w in weights])
    n_slots = len(group.owners)
    layout = group.layout([False] * n_slots, [False] * n_slots, False)
    h = group.shrink([rows], 0, layout)
    group.expand_y(h, [y.view(-1, y.shape[-1]) for y in ys], layout)
    return ys, h


def backward(
    dys: Sequence[Tensor],
    x: Tensor,
    h: Tensor | None,
    weights: Sequence[Tensor],
    calls: Sequence[LoraCall | None],
    need_x: bool,
    need_A: list[bool],
    need_B: list[bool],
) -> list[Tensor]:
    """Return what is needed of dx (x's shape), then dA, then dB; the weights are frozen."""
    rows, dy_rows = single._rows(x), [single._rows(dy) for dy in dys]
    dx = None
    for dy, weight in zip(dy_rows, weights, strict=True) if need_x else ():
        base = product_for(x, weight)
        if dx is None:
            dx = base.input_gradient(dy, weight)  # the base path: no dropout here
        elif base is torch_products:
            dx.addmm_(dy, weight)
        else:
            dx += base.input_gradient(dy, weight)
    group = _Group(calls, rows, [w.shape[0] for w in weights])
    grads = group.backward(dy_rows, rows, h, dx, need_A, need_B)
    return grads if dx is None else [dx.view(x.shape), *grads]


def aot_cases() -> list[AotCase]:
    """Groups of three linears: bf16 activations with adapters of ranks 16 and 128, fp32 throughout, exact mode."""
    types = {"fp32": torch.float32, "bf16": torch.bfloat16}
    addresses = {f"{kind}{i}": "i64" if kind == "a" else "i32" for kind in "as" for i in range(MOST)}
    tables = dict.fromkeys(("tiles", "blocks", "chunks", "folds", "slots", "shapes", "row_ids"), "*i64")
    numbers = dict.fromkeys(("n_on", "n_d", "n_parts", "n_most", "out_stride"), "i32")
    known = {**addresses, **tables, **numbers, **dict.fromkeys(("small", "sums", "shares"), "*fp32"), "seed": "i64"}

    def case(kernel: Any, x: str, adapter: str, rank: int, rows: int, side: int, kind: str, **flags: bool) -> AotCase:
        rank_of_tiles = single.MAX_RANK if rows == EXACT_ROWS else rank
        given = torch.float32 if kind == "expand" else types[x]
        config = {"BD": 64 if rank <= 64 else 32, "num_warps": 4}
        if kind in single._STAGES:
            config = single._config(4096, rank_of_tiles, given, types[adapter], kind)
        element = _ELEMENTS[types[adapter]]
        out = "*fp32" if kind in ("shrink", "rows") else f"*{adapter if kind == 'fold' else x}"
        constexprs: dict[str, Any] = {
            **{"X": _ELEMENTS[types[x]], "Y": _ELEMENTS[types[x]], "ELEMENT": element, "SIDE": side, "LINEARS": 3},
            **{
                "DROPOUT": False,
                "SHARES": False,
                "ALIGNED": True,
                "ROWS_ALIGNED": True,
                "SIZED": True,
                "UPCAST": False,
            },
            **{"R": rank, "BR": min(rank, EXPAND_RANKS), "BN": rows, "BD": config["BD"], **flags},
        }
        names = kernel.arg_names
        signature = {name: kind for name, kind in {**known, "out": out}.items() if name in names}
        wide = (name for name, kind in signature.items() if kind[0] == "*" or (name[0] == "s" and name[1:].isdigit()))
        return AotCase(
            name=f"group {'-'.join(flags)} {side} {x}/{adapter} r{rank} n{rows}",
            kernel=kernel,
            signature=signature,
            constexprs={name: value for name, value in constexprs.items() if name in names},
            num_warps=config["num_warps"],
            num_stages=single._STAGES.get(kind, 2),
            divisible_by_16=(*wide, *(n for n in ("out_stride", "n_d", "n_most") if n in names)),
        )

    cases = []
    for x, adapter, rank, rows in (
        ("bf16", "bf16", 16, 64),
        ("bf16", "fp32", 16, 64),
        ("bf16", "fp32", 128, 64),
        ("fp32", "fp32", 128, 64),
        ("bf16", "fp32", 16, EXACT_ROWS),
    ):
        what = (x, adapter, rank, rows)
        one_read = rank <= ONE_READ_RANK and rows != EXACT_ROWS
        cases += [
            case(_group_shrink_kernel, *what, 0, "shrink"),
            case(_group_shrink_kernel, *what, 0, "shrink", DROPOUT=True),
            case(_group_shrink_kernel, *what, 1, "shrink"),
            case(_group_expand_y_kernel, *what, 1, "expand"),
            case(_group_expand_x_kernel, *what, 0, "expand"),
            case(_group_expand_x_kernel, *what, 0, "expand", DROPOUT=True),
            case(_group_columns_kernel, *what, 1, "columns", SHARES=one_read),
            case(_group_columns_kernel, *what, 0, "columns", DROPOUT=True),
            case(_group_fold_rows_kernel, *what, 1, "rows"),
            case(_group_fold_columns_kernel, *what, 0, "fold"),
        ]
    return cases
