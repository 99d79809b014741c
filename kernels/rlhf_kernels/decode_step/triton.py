"""`decode_step` on a GPU: ten launches a layer, and two more for every group of linears that some slot adapts.

Linears that share an input form a group: q, k and v; o; gate and up; down. A group whose weights lie side by side
(`decode_step.join`) is one product of torch, any other one product per linear; no weight is ever copied.

A row's adapter is found on the device, so that rows of any slots mix in one CUDA graph. `shrink_kernel` makes h = s A x
of every row that has a slot, `expand_kernel` adds B h. A program owns 16 rows and one slot, and takes those of the rows
that carry it; without one it ends. So an adapter touches no other row, and a row without one keeps its product's bits.
Adapters are read where they lie, by a table of their addresses. The depth of A is cut into splits by its length alone,
whose sums are added in their order.

Other launches: a sum with its norm; norms of heads, rotation and the write into the cache; attention by the op
`decode_attention`, two; the gated product. Nothing waits for the device. Numbers are rounded where the package's
docstring says, and no product is fused with a sum in between.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from rlhf_kernels.decode_attention import triton as decode_attention
from rlhf_kernels.decode_step.model import (
    GROUPS,
    LINEARS,
    Decoder,
    StepAdapter,
    check_caches,
    linear_shapes,
    mlp_shape,
    side_by_side,
    tensors_of,
)
from rlhf_kernels.runtime import autocast, registry
from rlhf_kernels.runtime.device_tables import upload
from rlhf_kernels.runtime.triton_math import dot
from rlhf_kernels.runtime.triton_support import INTERPRETED, AotCase

ROWS = 16  # of a program that multiplies by an adapter: one instruction for any number of rows
SPLIT, MAX_SPLITS = 256, 16  # features of a split of A's depth, and most splits; beyond, splits grow
RANKS = 32  # most ranks that are multiplied at a time
COLUMNS = 128  # of a tile of A or B; half of them where not of bf16
PIECE, ELEMENTS = 4096, 1024  # widest piece of a row in a norm; elements of a program of the gated product
_SIX = tl.constexpr(6)  # numbers of an adapter in the table: addresses of A and B, their strides, rank, bits of s
_ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_PLAIN: dict[str, Any] = {"enable_fp_fusion": False}


@triton.jit
def _rstd(squares, eps, WIDTH: tl.constexpr):
    """1 / √(mean + eps) of a row's sum of squares [1]."""
    mean = tl.div_rn(squares, tl.full((1,), WIDTH, tl.float32))
    return tl.div_rn(tl.full((1,), 1.0, tl.float32), tl.sqrt_rn(mean + eps))


@triton.jit
def _sum(x_ptr, delta_ptr, source, row, column, WIDTH: tl.constexpr):
    """A piece of x, or of x + delta rounded to their dtype."""
    x = tl.load(x_ptr + source + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if delta_ptr is not None:
        x += tl.load(delta_ptr + row * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def add_norm_kernel(x_ptr, token_ptr, delta_ptr, weight_ptr, sum_ptr, y_ptr, x_stride, eps, WIDTH: tl.constexpr,
                    BLOCK: tl.constexpr):  # fmt: skip
    """sum [N, WIDTH]: x + delta, unless there is no delta, and y [N, WIDTH]: its norm.

    Rows of x are x_stride apart; row n is the one of token n where there are tokens. Without sum it is not kept.
    """
    row = tl.program_id(0).to(tl.int64)
    source = row * x_stride
    if token_ptr is not None:
        source = tl.load(token_ptr + row) * x_stride
    squares = tl.zeros((1, BLOCK), tl.float32)
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = _sum(x_ptr, delta_ptr, source, row, column, WIDTH)
        squares += (x * x)[None, :]
        if sum_ptr is not None:
            tl.store(sum_ptr + row * WIDTH + column, x.to(y_ptr.dtype.element_ty), mask=column < WIDTH)
    rstd = _rstd(tl.sum(squares, 1), eps, WIDTH)
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        n = (_sum(x_ptr, delta_ptr, source, row, column, WIDTH) * rstd).to(y_ptr.dtype.element_ty).to(tl.float32)
        y = n * tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * WIDTH + column, y.to(y_ptr.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def _normed(a, b, weight_ptr, i, eps, narrow: tl.constexpr, HALF: tl.constexpr):
    """Both halves of a head [BLOCK] after their norm."""
    rstd = _rstd(tl.sum((a * a + b * b)[None, :], 1), eps, 2 * HALF)
    low = tl.load(weight_ptr + i, mask=i < HALF, other=0.0).to(tl.float32)
    high = tl.load(weight_ptr + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)
    a = (a * rstd).to(narrow).to(tl.float32) * low
    b = (b * rstd).to(narrow).to(tl.float32) * high
    return a.to(narrow).to(tl.float32), b.to(narrow).to(tl.float32)


@triton.jit
def heads_kernel(x_ptr, position_ptr, table_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, q_ptr, key_ptr, value_ptr,
                 n_heads, n_kv, block, table_row, table_column, k_block, k_position, k_head, v_block, v_position,
                 v_head, eps, HALF: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """q [N, n_heads, 2 HALF], and rows of the caches [blocks, block, n_kv, 2 HALF], of x [N, heads of q, k and v].

    A head is normed where there is a weight [2 HALF], and q and k are turned by the angles [P, 2 HALF] of the position.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    inside = i < HALF
    narrow: tl.constexpr = q_ptr.dtype.element_ty
    at = x_ptr + (row * (n_heads + 2 * n_kv) + head) * (2 * HALF) + i
    a = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    position = tl.load(position_ptr + row)
    if q_norm_ptr is not None:  # noqa: SIM102
        if head < n_heads:
            a, b = _normed(a, b, q_norm_ptr, i, eps, narrow, HALF)
    if k_norm_ptr is not None:  # noqa: SIM102
        if (head >= n_heads) & (head < n_heads + n_kv):
            a, b = _normed(a, b, k_norm_ptr, i, eps, narrow, HALF)
    if head < n_heads + n_kv:
        angle = position * (2 * HALF) + i
        cos = tl.load(cos_ptr + angle, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + angle, mask=inside, other=0.0).to(tl.float32)
        cos_b = tl.load(cos_ptr + angle + HALF, mask=inside, other=0.0).to(tl.float32)
        sin_b = tl.load(sin_ptr + angle + HALF, mask=inside, other=0.0).to(tl.float32)
        first = (a * cos).to(narrow).to(tl.float32) - (b * sin).to(narrow).to(tl.float32)
        b = (b * cos_b).to(narrow).to(tl.float32) + (a * sin_b).to(narrow).to(tl.float32)
        a = first
    page = tl.load(table_ptr + row * table_row + position // block * table_column)
    inner = position % block
    if head < n_heads:
        to = q_ptr + (row * n_heads + head) * (2 * HALF) + i
    elif head < n_heads + n_kv:
        to = key_ptr + page * k_block + inner * k_position + (head - n_heads).to(tl.int64) * k_head + i
    else:
        to = value_ptr + page * v_block + inner * v_position + (head - n_heads - n_kv).to(tl.int64) * v_head + i
    tl.store(to, a.to(narrow), mask=inside)
    tl.store(to + HALF, b.to(narrow), mask=inside)


@triton.jit
def gate_kernel(x_ptr, y_ptr, width, BLOCK: tl.constexpr):
    """x [N, 2 width]: gate and up → y [N, width]."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    narrow: tl.constexpr = y_ptr.dtype.element_ty
    at = x_ptr + row * 2 * width + column
    gate = tl.load(at, mask=column < width, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=column < width, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(narrow).to(tl.float32)
    tl.store(y_ptr + row * width + column, (silu * up).to(narrow), mask=column < width)


@triton.jit
def _adapter(entry, SIDE: tl.constexpr, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr):
    """Address and stride of A (side 0) or B."""
    address = tl.load(entry + SIDE).to(tl.pointer_type(ELEMENT))
    stride = tl.load(entry + 2 + SIDE)
    if ALIGNED:
        address, stride = tl.multiple_of(address, 16), tl.multiple_of(stride, 16)
    return address, stride


@triton.jit(do_not_specialize=["n_rows"])
def shrink_kernel(x_ptr, slot_ptr, adapter_ptr, h_ptr, n_rows, n_slots, n_members, depth, split_size,
                  ELEMENT: tl.constexpr, ALIGNED: tl.constexpr, UPCAST: tl.constexpr, R: tl.constexpr,
                  BR: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """h [splits, n_rows, members, R] fp32: s A x of x [n_rows, depth] over a split, in rows that have the slot.

    adapters: [members, n_slots, 6]; slot: [n_rows].
    """
    split, kind = tl.program_id(1), tl.program_id(2)
    slot, member = kind % n_slots, kind // n_slots % n_members
    r = kind // n_slots // n_members * BR + tl.arange(0, BR)
    rows = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    mine = (rows < n_rows) & (tl.load(slot_ptr + rows, mask=rows < n_rows, other=-1) == slot)
    entry = adapter_ptr + (member * n_slots + slot) * _SIX
    rank = tl.load(entry + 4)
    if (tl.max(mine.to(tl.int32), 0) == 0) | (tl.min(r, 0) >= rank):
        return
    address, stride = _adapter(entry, 0, ELEMENT, ALIGNED)
    h = tl.zeros((BN, BR), tl.float32)
    for first in range(split * split_size, tl.minimum(depth, (split + 1) * split_size), BD):
        d = first + tl.arange(0, BD)
        at = rows[:, None] * depth + d[None, :]
        x = tl.load(x_ptr + at, mask=mine[:, None] & (d < depth)[None, :], other=0.0)
        at = r[None, :] * stride + d[:, None]
        A = tl.load(address + at, mask=(d < depth)[:, None] & (r < rank)[None, :], other=0.0)
        h = dot(x, A, h, UPCAST)
    scale = tl.load(entry + 5).to(tl.int32).to(tl.float32, bitcast=True)
    at = ((split * n_rows + rows) * n_members + member)[:, None] * R + r[None, :]
    tl.store(h_ptr + at, h * scale, mask=mine[:, None])


@triton.jit(do_not_specialize=["n_rows"])
def expand_kernel(h_ptr, slot_ptr, adapter_ptr, y_ptr, n_rows, n_slots, n_members, n_splits, end_0, end_1, width,
                  ELEMENT: tl.constexpr, ALIGNED: tl.constexpr, UPCAST: tl.constexpr, R: tl.constexpr,
                  BR: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """y [n_rows, width] += B h in rows that have the slot, h being what `shrink_kernel` has made.

    end_0, end_1, width: columns of the first member, of the first two, of all.
    """
    tile, slot = tl.program_id(1), tl.program_id(2)
    after_0 = tl.cdiv(end_0, BD)  # tiles of the first member
    after_1 = after_0 + tl.cdiv(end_1 - end_0, BD)
    member = (tile >= after_0).to(tl.int32) + (tile >= after_1).to(tl.int32)
    begin = tl.where(member == 0, 0, tl.where(member == 1, end_0, end_1))
    end = tl.where(member == 0, end_0, tl.where(member == 1, end_1, width))
    d = (tile - tl.where(member == 0, 0, tl.where(member == 1, after_0, after_1))) * BD + tl.arange(0, BD)
    if ALIGNED:
        begin = tl.multiple_of(begin, 16)
    rows = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    mine = (rows < n_rows) & (tl.load(slot_ptr + rows, mask=rows < n_rows, other=-1) == slot)
    entry = adapter_ptr + (member * n_slots + slot) * _SIX
    rank = tl.load(entry + 4).to(tl.int32)
    if (tl.max(mine.to(tl.int32), 0) == 0) | (rank == 0):
        return
    address, stride = _adapter(entry, 1, ELEMENT, ALIGNED)
    inside = d < end - begin
    delta = tl.zeros((BN, BD), tl.float32)
    for first in range(0, rank, BR):
        r = first + tl.arange(0, BR)
        used = mine[:, None] & (r < rank)[None, :]
        h = tl.zeros((BN, BR), tl.float32)
        for split in range(n_splits):
            at = ((split * n_rows + rows) * n_members + member)[:, None] * R + r[None, :]
            h += tl.load(h_ptr + at, mask=used, other=0.0)
        at = d[:, None].to(tl.int64) * stride + r[None, :]
        B = tl.load(address + at, mask=inside[:, None] & (r < rank)[None, :], other=0.0)
        delta = dot(h, tl.trans(B), delta, UPCAST)
    at = rows[:, None] * width + (begin + d)[None, :]
    used = mine[:, None] & inside[None, :]
    y = tl.load(y_ptr + at, mask=used, other=0.0).to(tl.float32) + delta
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=used)


class _Adapters(NamedTuple):
    """Pairs of a group whose A have one dtype and whose B have one."""

    table: Tensor  # [members, slots, 6]
    A: Any  # dtypes, as Triton names them
    B: Any
    rank: int  # the largest one
    aligned: tuple[bool, bool]  # addresses, strides and columns allow wide loads of A, of B


class _Group(NamedTuple):
    """Linears of one input."""

    linears: list[tuple[Tensor, Tensor | None]]  # weight and bias: of each, or of all of them together
    ends: list[int]  # columns of the first, of the first two, of the first three, the last one repeated
    adapters: list[_Adapters]


class Step:
    """A decoder and its slots in Triton."""

    def __init__(self, decoder: Decoder, adapters: Sequence[StepAdapter]) -> None:
        for s, adapter in enumerate(adapters):
            for i, pairs in enumerate(adapter.pairs):
                for name, pair in pairs.items():
                    for x in pair:
                        if x.dtype not in _ELEMENTS:
                            raise TypeError(
                                f"adapters[{s}].pairs[{i}][{name!r}]: expected one of {[*_ELEMENTS]}, got {x.dtype}"
                            )
        self._decoder, self._adapters = decoder, adapters
        self._tensors = tensors_of(decoder, adapters)
        self._addresses: list[int] = []
        self._layers: list[list[_Group]] = []

    @torch.no_grad()
    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        cos: Tensor,
        sin: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        table: Tensor,
    ) -> Tensor:
        """See `DecodeStep.__call__`."""
        d, n = self._decoder, tokens.numel()
        check_caches(keys, values, d)
        if n == 0:
            return d.embedding.new_empty(0, d.embedding.shape[1])
        tokens, positions, slots = tokens.contiguous(), positions.contiguous(), slots.contiguous()
        device = registry.cuda_device([tokens])  # Triton launches on the current one, which need not be that
        with contextlib.nullcontext() if device is None else torch.cuda.device(device), autocast.off(d.embedding):
            addresses = [*map(Tensor.data_ptr, self._tensors)]
            if addresses != self._addresses:
                self._layers, self._addresses = self._bind(), addresses
            lengths = positions + 1
            x, delta = d.embedding, None  # type: Tensor, Tensor | None
            for i, (layer, groups) in enumerate(zip(d.layers, self._layers, strict=True)):
                x, u = self._add_norm(n, x, None if i else tokens, delta, layer.input_norm)
                q = self._heads(i, _product(u, groups[0], slots), positions, cos, sin, keys[i], values[i], table)
                attended = decode_attention.forward(q, keys[i], values[i], lengths, table, d.scale, layer.window, None)
                delta = _product(attended.flatten(1), groups[1], slots)
                x, u = self._add_norm(n, x, None, delta, layer.mlp_norm)
                delta = _product(_gated(_product(u, groups[2], slots)), groups[3], slots)
            return self._add_norm(n, x, None, delta, d.final_norm, last=True)[1]

    def _add_norm(
        self, n: int, x: Tensor, source: Tensor | None, delta: Tensor | None, weight: Tensor, *, last: bool = False
    ) -> tuple[Tensor, Tensor]:
        """x + delta, of which nothing is left after the last one, and its norm."""
        width = x.shape[1]
        y = x.new_empty(n, width)
        total = y if last else torch.empty_like(y)
        block = min(PIECE, triton.next_power_of_2(width))
        add_norm_kernel[(n,)](
            x, source, delta, weight, None if last else total, y, x.stride(0), self._decoder.eps,
            WIDTH=width, BLOCK=block, **_PLAIN,
        )  # fmt: skip
        return total, y

    def _heads(
        self,
        i: int,
        x: Tensor,
        positions: Tensor,
        cos: Tensor,
        sin: Tensor,
        keys: Tensor,
        values: Tensor,
        table: Tensor,
    ) -> Tensor:
        """q [N, heads, D]; k and v go into the caches."""
        d, layer, half = self._decoder, self._decoder.layers[i], self._decoder.head_dim // 2
        q = x.new_empty(x.shape[0], d.n_heads, d.head_dim)
        heads_kernel[(x.shape[0], d.n_heads + 2 * d.n_kv_heads)](
            x, positions, table, cos, sin, layer.q_norm, layer.k_norm, q, keys, values, d.n_heads, d.n_kv_heads,
            keys.shape[1], *table.stride(), *keys.stride()[:3], *values.stride()[:3], d.eps,
            HALF=half, BLOCK=triton.next_power_of_2(half), num_warps=1, **_PLAIN,
        )  # fmt: skip
        return q

    def _bind(self) -> list[list[_Group]]:
        """Groups of each layer by the addresses that hold now."""
        d, n_slots = self._decoder, len(self._adapters)
        ends_of = [[], [], [], []]  # type: list[list[int]]
        shapes = linear_shapes(d, mlp_shape(d)[0])
        for ends, names in zip(ends_of, GROUPS, strict=True):
            for name in (*names, *names[-1:] * (3 - len(names))):
                known = name in names[: len(ends)]
                ends.append((ends[-1] if ends else 0) + (0 if known else shapes[name][0]))
        pairs = [[a.pairs[i].get(name) for a in self._adapters] for i in range(len(d.layers)) for name in LINEARS]
        kinds = {(A.dtype, B.dtype): None for row in pairs for A, B in (pair for pair in row if pair is not None)}
        tables = {}
        for kind in kinds:
            rows = [
                _numbers(pair if pair is not None and (pair[0].dtype, pair[1].dtype) == kind else None, adapter.scale)
                for row in pairs
                for pair, adapter in zip(row, self._adapters, strict=True)
            ]
            tables[kind] = rows, upload(rows, 6, d.embedding.device).view(len(d.layers), len(LINEARS), n_slots, 6)
        layers = []
        for i, layer in enumerate(d.layers):
            groups = []
            for names, ends in zip(GROUPS, ends_of, strict=True):
                linears = [(p.weight, p.bias) for p in (getattr(layer, name) for name in names)]
                first = LINEARS.index(names[0])
                adapters = []
                for (A, B), (rows, table) in tables.items():
                    begin = (i * len(LINEARS) + first) * n_slots
                    own = rows[begin : begin + len(names) * n_slots]
                    rank = max(row[4] for row in own)
                    if rank:
                        wide = [all(x % 16 == 0 for row in own for x in row[side:4:2]) for side in (0, 1)]
                        aligned = wide[0], wide[1] and all(x % 16 == 0 for x in ends)
                        part = table[i, first : first + len(names)]
                        adapters.append(_Adapters(part, _ELEMENTS[A], _ELEMENTS[B], rank, aligned))
                groups.append(_Group(side_by_side(linears), ends, adapters))
            layers.append(groups)
        return layers


def _numbers(pair: tuple[Tensor, Tensor] | None, scale: float) -> list[int]:
    """A row of the table; rank 0: no adapter."""
    if pair is None:
        return [0] * 6
    A, B = pair
    bits = struct.unpack("<i", struct.pack("<f", scale))[0]
    return [A.data_ptr(), B.data_ptr(), A.stride(0), B.stride(0), A.shape[0], bits]


def _tile(rank: int, width: int, element: Any) -> dict[str, int]:
    """Tiles of an adapter: R ranks in all, BR of them and BD columns at a time."""
    R, columns = max(16, triton.next_power_of_2(rank)), COLUMNS // (1 + int(element != tl.bfloat16))
    return {"R": R, "BR": min(R, RANKS), "BN": ROWS, "BD": min(columns, max(16, triton.next_power_of_2(width)))}


def _product(x: Tensor, group: _Group, slots: Tensor) -> Tensor:
    """The group's linears of x [N, depth], side by side: [N, width]."""
    (n, depth), (*ends, width) = x.shape, group.ends
    if len(group.linears) == 1:
        y = F.linear(x, *group.linears[0])
    else:
        y, begin = x.new_empty(n, width), 0
        for (weight, bias), end in zip(group.linears, group.ends, strict=False):
            out = y[:, begin:end]
            torch.mm(x, weight.T, out=out) if bias is None else torch.addmm(bias, x, weight.T, out=out)
            begin = end
    for a in group.adapters:
        members, n_slots = a.table.shape[:2]
        split = SPLIT * math.ceil(depth / (SPLIT * MAX_SPLITS))
        splits = triton.cdiv(depth, split)
        shrink, expand = _tile(a.rank, depth, a.A), _tile(a.rank, width, a.B)
        h = torch.empty(splits, n, members, shrink["R"], dtype=torch.float32, device=x.device)
        wide_A, wide_B = ({"ALIGNED": aligned, "UPCAST": INTERPRETED} for aligned in a.aligned)
        shrink_kernel[(triton.cdiv(n, ROWS), splits, members * n_slots * (shrink["R"] // shrink["BR"]))](
            x, slots, a.table, h, n, n_slots, members, depth, split, ELEMENT=a.A, **wide_A, **shrink
        )
        tiles = sum(triton.cdiv(b - a, expand["BD"]) for a, b in itertools.pairwise((0, *ends, width)))
        expand_kernel[(triton.cdiv(n, ROWS), tiles, n_slots)](
            h, slots, a.table, y, n, n_slots, members, splits, *ends, width, ELEMENT=a.B, **wide_B, **expand
        )
    return y


def _gated(x: Tensor) -> Tensor:
    """silu(gate) · up of x [N, 2 I]: [N, I]."""
    n, width = x.shape[0], x.shape[1] // 2
    y = x.new_empty(n, width)
    gate_kernel[(n, triton.cdiv(width, ELEMENTS))](x, y, width, BLOCK=ELEMENTS, **_PLAIN)
    return y


def aot_cases() -> list[AotCase]:
    """bf16 as models decode, then fp32 and fp16: sums with norms, heads of 128 and 80, adapters of rank 16 and 64."""
    numbers = {"eps": "fp32"} | dict.fromkeys(
        ("position_ptr", "table_ptr", "token_ptr", "slot_ptr", "adapter_ptr"), "*i64"
    )
    single = ("n_rows", "n_slots", "n_members", "n_splits", "eps", "n_heads", "n_kv", "block", "table_row")

    def case(
        name: str, kernel: Any, dtype: str, *, warps: int = 4, odd: tuple[str, ...] = (), **constexprs: Any
    ) -> AotCase:
        types = {n: numbers.get(n, f"*{dtype}" if n.endswith("_ptr") else "i32") for n in kernel.arg_names}
        signature = {n: kind for n, kind in (types | {"h_ptr": "*fp32"}).items() if n in types and n not in constexprs}
        wide = tuple(n for n in signature if n not in (*single, *odd))
        options: dict[str, Any] = {} if "UPCAST" in constexprs else _PLAIN
        return AotCase(
            name=f"{name}, {dtype}", kernel=kernel, signature=signature, constexprs=constexprs, num_warps=warps,
            divisible_by_16=wide, **options,
        )  # fmt: skip

    cases, none = [], {"q_norm_ptr": None, "k_norm_ptr": None}  # type: list[AotCase], dict[str, Any]
    for dtype in ("bf16", "fp32", "fp16"):
        for width in (2048, 8192, 1001):
            tile = {"WIDTH": width, "BLOCK": min(PIECE, triton.next_power_of_2(width))}
            odd = ("x_stride",) if width % 16 else ()
            cases += [
                case(f"width {width}", add_norm_kernel, dtype, odd=odd, token_ptr=None, **tile),
                case(f"width {width}, first", add_norm_kernel, dtype, odd=odd, delta_ptr=None, **tile),
                case(f"width {width}, last", add_norm_kernel, dtype, odd=odd, token_ptr=None, sum_ptr=None, **tile),
            ]
        for half, norms in ((64, none), (64, {}), (40, {})):
            tile = {"HALF": half, "BLOCK": triton.next_power_of_2(half), "table_column": 1}
            kind = "normed heads" if not norms else "heads"
            cases.append(case(f"{kind} of {2 * half}", heads_kernel, dtype, warps=1, **tile, **norms))
        cases.append(case("gate and up", gate_kernel, dtype, BLOCK=ELEMENTS))
        adapters = {("fp32", 16, True), ("fp32", 64, True), ("fp32", 16, False), (dtype, 16, True), (dtype, 64, True)}
        for adapter, rank, aligned in sorted(adapters):
            kind = next(t for t in _ELEMENTS.values() if t.name == adapter)
            common = {"ELEMENT": kind, "ALIGNED": aligned, "UPCAST": False, **_tile(rank, 4096, kind)}
            name = f"rank {rank}{'' if aligned else ', unaligned'}, {adapter}"
            cases += [case(name, kernel, dtype, **common) for kernel in (shrink_kernel, expand_kernel)]
    return cases
