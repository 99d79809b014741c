"""The low-rank parts in C++ (csrc/cpu/lora.cpp); the base products are those of `linear`, but for `Decoder`.

Equations: see the package docstring.
Same functions and arguments as `reference`. x, y and their gradients are fp32 or bf16, adapters too (fp16 ones
enter as fp32, exactly). Everything accumulates in fp32; on tile registers (AMX) an fp32 operand enters as a sum
of bf16 parts that keeps 16 or 24 of its bits, see csrc/cpu/lora_tiles.inc.h.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlhf_kernels.linear import native as linear_native, product_for
from rlhf_kernels.lora.segments import LoraCall
from rlhf_kernels.runtime import autocast, native

_TYPES = (torch.float32, torch.bfloat16)
_Matrix = tuple[int, int, int]  # address, row stride, type
_ABSENT: _Matrix = (0, 0, 0)
_DECODE_ROWS = {torch.float32: (4, 64), torch.bfloat16: (1, 64)}
"""Fewest and most rows with which `Decoder` is faster than torch's product and `_forward`."""


def unsupported(device_type: str, dtype: torch.dtype) -> str | None:
    """Reason why the native code cannot serve such tensors, or None. dtype: the widest of x and the adapters."""
    reason = native.unsupported(device_type, torch.float32)
    if reason is None and dtype not in _TYPES:
        return f"it computes in {' or '.join(map(str, _TYPES))}, not in {dtype}"
    return reason


def forward(x: Tensor, lora_call: LoraCall) -> Tensor:
    """The delta of the on rows, compact and in row order: fp32 [Σ(ends − starts), M]."""
    delta = x.new_empty((lora_call.n_on, lora_call.B[0].shape[0]), dtype=torch.float32)
    _forward(x, delta, False, lora_call, _compact(lora_call))
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
    grads = _backward(ddelta, x, dx, lora_call, _compact(lora_call), need_A, need_B)
    return grads if dx is None else [dx, *grads]


def linear_forward(x: Tensor, weight: Tensor, bias: Tensor | None, lora_call: LoraCall) -> Tensor:
    """The base on all rows in one call and in x's own shape (for off rows' bits), then the deltas in place."""
    with autocast.off(x):
        y = product_for(x, weight).forward(x, weight, bias)
        x_rows, y_rows = x.flatten(0, -2), y.flatten(0, -2)
        _forward(x_rows, y_rows, True, lora_call, _in_place(lora_call))
    return y


class Decoder:
    """`linear_forward` for x of one shape and dtype, without dropout; rounds where that rounds.

    It reads the tensors where they lay when it was made, whatever they hold by then.
    """

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, lora_call: LoraCall) -> None:
        self._tensors = [t for t in (weight, bias, *lora_call.A, *lora_call.B) if t is not None]
        self._addresses = [t.data_ptr() for t in self._tensors]
        self._shape, self._dtype = x.shape, x.dtype
        self._y_shape = (*x.shape[:-1], weight.shape[0])
        (M, K), dtype = weight.shape, x.dtype
        lora_call.check(math.prod(x.shape[:-1]))
        A, B = self._adapters = _adapters(lora_call.A), _adapters(lora_call.B)
        self.lasting = all(own is given for own, given in zip((*A, *B), (*lora_call.A, *lora_call.B), strict=True))
        """Whether it sees what becomes of its tensors later: none of them is a copy."""
        self._run = native.extension().LoraDecoder(
            (*native.rows("weight", weight, dtype, (M, x.shape[-1])), native.type_number("x", dtype, _TYPES)),
            0 if bias is None else native.dense("bias", bias, dtype, (M,)),
            math.prod(x.shape[:-1]),
            K,
            M,
            [
                (*_pair(i, a, b, K, M), scale, 0.0, 0, 0)
                for i, (a, b, scale) in enumerate(zip(A, B, lora_call.scales, strict=True))
            ],
            _in_place(lora_call),
        )

    @staticmethod
    def serves(x: Tensor, weight: Tensor, bias: Tensor | None, lora_call: LoraCall) -> bool:
        """A few rows in a type and depth that have code, all on or with off rows that `linear` multiplies in C++ too.

        Then off rows keep its bits: the order of additions is the same. `lora_call` has no dropout.
        """
        rows = math.prod(x.shape[:-1])
        return (
            x.dtype in _TYPES
            and _DECODE_ROWS[x.dtype][0] <= rows <= _DECODE_ROWS[x.dtype][1]
            and (rows == lora_call.n_on or product_for(x, weight) is linear_native)
            and x.shape[-1] % 32 == 0 < x.shape[-1]
            and (weight.dtype, weight.device) == (x.dtype, x.device)
            and weight.stride(1) == 1
            and (bias is None or ((bias.dtype, bias.device) == (x.dtype, x.device) and bias.is_contiguous()))
        )

    def takes(self, x: Tensor) -> bool:
        """Whether x has the shape and dtype it was made for, and its tensors lie where they lay."""
        return (
            x.shape == self._shape
            and x.dtype == self._dtype
            and x.is_cpu
            and [t.data_ptr() for t in self._tensors] == self._addresses
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x [.., K] → y [.., M], dense."""
        if x.shape != self._shape or x.dtype != self._dtype or not x.is_cpu:
            raise ValueError(
                f"x: expected {self._dtype} of shape {tuple(self._shape)} on the CPU, "
                f"got {x.dtype} of shape {tuple(x.shape)} on {x.device}"
            )
        y = torch.empty(self._y_shape, dtype=self._dtype)
        if x.is_contiguous():  # says nothing about the strides of dimensions of size 1
            self._run(x.data_ptr(), x.shape[-1], y.data_ptr(), native.threads())
        else:
            rows = native.unit_inner_stride(x.flatten(0, -2))
            self._run(rows.data_ptr(), rows.stride(0), y.data_ptr(), native.threads())
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
    dy_rows, x_rows = dy.flatten(0, -2), x.flatten(0, -2)
    grads: list[Tensor] = []
    dx_rows = None
    base = product_for(x, weight)
    with autocast.off(x):
        if need_x:
            dx_rows = base.input_gradient(dy_rows, weight)  # [N, K], the base path: no dropout here
            grads.append(dx_rows.view(x.shape))
        if need_weight:
            grads.append(base.weight_gradient(dy_rows, x_rows))
        if need_bias:
            grads.append(dy_rows.sum(0))
        grads += _backward(dy_rows, x_rows, dx_rows, lora_call, _in_place(lora_call), need_A, need_B)
    return grads


_Runs = list[tuple[int, int, int, int]]  # first row of x, first row of y, rows, slot


def _in_place(lora_call: LoraCall) -> _Runs:
    return [(start, start, end - start, i) for start, end, i in lora_call.runs]


def _compact(lora_call: LoraCall) -> _Runs:
    runs, at = [], 0
    for start, end, i in lora_call.runs:
        runs.append((start, at, end - start, i))
        at += end - start
    return runs


def _matrix(name: str, x: Tensor, rows: int, columns: int) -> _Matrix:
    if x.dtype in _TYPES and x.shape == (rows, columns) and x.is_cpu and x.stride() == (columns, 1):
        address = x.data_ptr()
        if address:  # as nearly all are: every slot of every linear comes here in each pass
            return address, columns, _TYPES.index(x.dtype)
    return *native.rows(name, x, x.dtype, (rows, columns)), native.type_number(name, x.dtype, _TYPES)


def _pair(i: int, a: Tensor, b: Tensor, K: int, M: int) -> tuple[_Matrix, _Matrix, int]:
    """Return what C++ takes for slot i: A [r, K], B [M, r] and r."""
    r = a.shape[0]
    return _matrix(f"A[{i}]", a, r, K), _matrix(f"B[{i}]", b, M, r), r


def _row_ids(lora_call: LoraCall, n_rows: int) -> tuple[Tensor | None, int]:
    """The ids as C++ reads them, to be kept alive, and their address or 0."""
    if lora_call.row_ids is None:
        return None, 0
    row_ids = lora_call.row_ids.contiguous()
    return row_ids, native.dense("row_ids", row_ids, torch.int64, (n_rows,))


def _adapters(tensors: list[Tensor]) -> list[Tensor]:
    return [native.unit_inner_stride(t if t.dtype in _TYPES else t.float()) for t in tensors]  # fp16 -> fp32 is exact


def _forward(x: Tensor, y: Tensor, add: bool, lora_call: LoraCall, runs: _Runs) -> None:
    """y [.., M] (+)= delta on the runs' rows."""
    x, A, B = native.unit_inner_stride(x), _adapters(lora_call.A), _adapters(lora_call.B)
    (N, K), M = x.shape, y.shape[1]
    kept, ids = _row_ids(lora_call, N)
    lora_call.check(N)
    native.extension().lora_forward(
        _matrix("x", x, N, K),
        _matrix("y", y, y.shape[0], M),
        add,
        K,
        M,
        [
            (*_pair(i, a, b, K, M), scale, p_i if ids else 0.0, 0, 0)
            for i, (a, b, scale, p_i) in enumerate(zip(A, B, lora_call.scales, lora_call.p, strict=True))
        ],
        runs,
        (lora_call.seed, ids, lora_call.stream),
        native.threads(),
    )
    del kept


def _backward(
    dy: Tensor,
    x: Tensor,
    dx: Tensor | None,
    lora_call: LoraCall,
    runs: _Runs,
    need_A: list[bool],
    need_B: list[bool],
) -> list[Tensor]:
    """Adds to dx [N,K] in place; returns the needed dA, then dB."""
    if dx is None and not any(need_A) and not any(need_B):
        return []
    dtypes = [t.dtype for t in (*lora_call.A, *lora_call.B)]
    dy, x = native.unit_inner_stride(dy), native.unit_inner_stride(x)
    A, B = _adapters(lora_call.A), _adapters(lora_call.B)
    (N, K), (n_dy, M) = x.shape, dy.shape
    if n_dy < runs[-1][1] + runs[-1][2]:
        raise ValueError(f"dy: expected {runs[-1][1] + runs[-1][2]} rows or more, got {n_dy}")
    kept, ids = _row_ids(lora_call, N)
    lora_call.check(N)
    dense = torch.contiguous_format  # `new_empty` takes twice as long
    dA = [torch.empty_like(a, memory_format=dense) if need else None for a, need in zip(A, need_A, strict=True)]
    dB = [torch.empty_like(b, memory_format=dense) if need else None for b, need in zip(B, need_B, strict=True)]
    native.extension().lora_backward(
        _matrix("dy", dy, n_dy, M),
        _matrix("x", x, N, K),
        _ABSENT if dx is None else _matrix("dx", dx, N, K),
        K,
        M,
        [
            (
                *_pair(i, a, b, K, M),
                scale,
                p_i if ids else 0.0,
                0 if da is None else da.data_ptr(),
                0 if db is None else db.data_ptr(),
            )
            for i, (a, b, scale, p_i, da, db) in enumerate(
                zip(A, B, lora_call.scales, lora_call.p, dA, dB, strict=True)
            )
        ],
        runs,
        (lora_call.seed, ids, lora_call.stream),
        native.threads(),
    )
    del kept
    given = [(grad, dtype) for grad, dtype in zip((*dA, *dB), dtypes, strict=True) if grad is not None]
    return [grad if grad.dtype == dtype else grad.to(dtype) for grad, dtype in given]
