"""Products of a linear layer in Triton, with the functions and arguments of `reference`.

One kernel makes y = x Wᵀ + b, dx = dy W and dW = dyᵀ x. A program owns a tile of the result. It goes through the whole
depth in steps of one size, adds in fp32 on tensor cores, adds the bias in fp32, and rounds once. No sum is split among
programs, and there are no atomics.

A row's bits depend on that row alone. Its place in a tile does not matter, and the tile is the same for one row and for
thousands: on Hopper another number of rows per warp would be another instruction, with another order of sums. Columns
of a tile depend on the columns of the result and on the dtype, never on rows. dW adds rows in their order.

Products of bf16 or fp16 are exact; fp32 runs as three TF32 products, which keeps its accuracy.
"""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from rlhf_kernels.runtime.triton_math import dot
from rlhf_kernels.runtime.triton_support import INTERPRETED, AotCase

ROWS = 128
WIDE = 8192
"""Columns from which tiles of half types are wider: enough for a GPU's processors, even with few rows."""
WARPS = 8
GROUP = 8
"""Tiles of rows that go through the columns together, so that what they read stays in L2."""


@triton.jit
def product_kernel(
    a_ptr,  # [n_rows, depth]
    b_ptr,  # [depth, n_columns]
    bias_ptr,  # [n_columns] or None
    out_ptr,  # out [n_rows, n_columns], dense
    n_rows,
    n_columns,
    depth,
    a_row,
    a_inner,
    b_inner,
    b_column,
    UPCAST: tl.constexpr,
    GROUPED: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
):
    """out = a b + bias, for one tile."""
    row_tiles, column_tiles = tl.cdiv(n_rows, BR), tl.cdiv(n_columns, BC)
    group, tile = tl.program_id(0) // (GROUPED * column_tiles), tl.program_id(0) % (GROUPED * column_tiles)
    in_group = tl.minimum(row_tiles - group * GROUPED, GROUPED)
    rows = (group * GROUPED + tile % in_group) * BR + tl.arange(0, BR)
    columns = tile // in_group * BC + tl.arange(0, BC)
    live, within = (rows < n_rows)[:, None], (columns < n_columns)[None, :]
    k = tl.arange(0, BK)
    a_rows = a_ptr + (rows.to(tl.int64) * a_row)[:, None]
    b_columns = b_ptr + (columns.to(tl.int64) * b_column)[None, :]
    acc = tl.zeros((BR, BC), tl.float32)
    for start in range(0, depth, BK):
        inside, at = start + k < depth, (start + k).to(tl.int64)
        a = tl.load(a_rows + (at * a_inner)[None, :], mask=live & inside[None, :], other=0.0)
        b = tl.load(b_columns + (at * b_inner)[:, None], mask=inside[:, None] & within, other=0.0)
        acc = dot(a, b, acc, UPCAST)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + columns, mask=columns < n_columns, other=0.0).to(tl.float32)[None, :]
    place = out_ptr + (rows.to(tl.int64) * n_columns)[:, None] + columns[None, :]
    tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=live & within)


def settings(n_columns: int, item: int) -> dict[str, int]:
    """Tile, warps and stages for a result of so many columns and operands of `item` bytes; never by rows."""
    is_wide = n_columns >= WIDE and item < 4  # three TF32 products leave too few registers on sm_80
    return {
        "BR": ROWS,
        "BC": min(128 if is_wide else 64, max(16, triton.next_power_of_2(n_columns))),
        "BK": 128 // item,
        "num_warps": WARPS,
        "num_stages": 3 if is_wide else 4,  # 96 KiB either way
    }


def product(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out = a [N, K] b [K, M] + bias, with a and b of one dtype and any strides, and out dense, of any dtype."""
    (n_rows, depth), n_columns = a.shape, b.shape[1]
    if out.numel() == 0:
        return
    chosen = settings(n_columns, a.element_size())
    tiles = triton.cdiv(n_rows, chosen["BR"]) * triton.cdiv(n_columns, chosen["BC"])
    product_kernel[(tiles,)](
        a,
        b,
        None if bias is None else bias.contiguous(),
        out,
        n_rows,
        n_columns,
        depth,
        *a.stride(),
        *b.stride(),
        UPCAST=INTERPRETED,
        GROUPED=GROUP,
        **chosen,
    )


def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y [.., M] = x [.., K] Wᵀ + b, dense."""
    y = x.new_empty((*x.shape[:-1], weight.shape[0]))
    product(_rows(x), _with_unit_stride(weight).t(), bias, y)
    return y


def input_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    """dx [.., K] = dy [.., M] W."""
    dx = dy.new_empty((*dy.shape[:-1], weight.shape[1]))
    product(_rows(dy), _with_unit_stride(weight), None, dx)
    return dx


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """dW [M, K] = dyᵀ x over all rows, which are added in their order."""
    dw = dy.new_empty((dy.shape[-1], x.shape[-1]))
    product(_rows(dy).t(), _rows(x), None, dw)
    return dw


def _rows(x: Tensor) -> Tensor:
    """All rows of x as a matrix whose columns lie side by side, so that every operand of a kind lies alike."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _with_unit_stride(weight: Tensor) -> Tensor:
    """The weight where it lies, across or along; a copy where it has gaps both ways."""
    return weight if 1 in weight.stride() else weight.contiguous()


def aot_cases() -> list[AotCase]:
    """bf16 forward, dx and dW, wide and narrow, a turned weight, one row, rows of odd places; then fp16 and fp32."""
    items = {"bf16": 2, "fp16": 2, "fp32": 4}
    along, across = {"a_inner": 1, "b_inner": 1}, {"a_inner": 1, "b_column": 1}

    def case(
        name: str, dtype: str, columns: int, fixed: dict[str, Any], *, bias: bool = False, odd: bool = False
    ) -> AotCase:
        chosen = settings(columns, items[dtype])
        constexprs = {**fixed, "UPCAST": False, "GROUPED": GROUP} | {n: chosen[n] for n in ("BR", "BC", "BK")}
        constexprs |= {} if bias else {"bias_ptr": None}
        names = [n for n in product_kernel.arg_names if n not in constexprs]
        return AotCase(
            name=f"{name}, {columns}, {dtype}",
            kernel=product_kernel,
            signature={n: f"*{dtype}" if n.endswith("_ptr") else "i32" for n in names},
            constexprs=constexprs,
            num_warps=chosen["num_warps"],
            num_stages=chosen["num_stages"],
            divisible_by_16=() if odd else tuple(names),
        )

    cases = []
    for dtype in items:
        cases += [
            case("y", dtype, 8192, along),
            case("dx", dtype, 4096, across),
            case("dW", dtype, 8192, {"a_row": 1, "b_column": 1}),
            case("y with bias", dtype, 4096, along, bias=True),
            case("y of one row", dtype, 8192, along | {"n_rows": 1}),
            case("y in odd places", dtype, 8192, along, odd=True),
            case("y of a turned weight", dtype, 8192, across),
            case("y", dtype, 16, along),
        ]
    return cases
