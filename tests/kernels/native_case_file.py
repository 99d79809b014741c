"""Cases in a file that a C++ program reads on any machine: inputs, answers in float64, and limits on the error.

The file is a list of entries. Each is a line of text, followed by raw little-endian numbers where it has a shape:
`case OP LABEL`, `number NAME VALUE`, `array NAME DTYPE DIMENSIONS SIZE…`, `want NAME MAX RMS ROW ULP DIMENSIONS SIZE…`
(always float64) and `end`. A want's limits are the largest error, its root mean square, that of the worst row, and the
error in units of the last place; one that does not apply is `inf`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
NONE = math.inf


class Want(NamedTuple):
    """An answer and how far a result may be from it."""

    exact: Tensor
    limits: tuple[float, float, float, float]


def _norms(actual: Tensor, exact: Tensor) -> tuple[float, float, float]:
    """Largest, root mean square and worst row's error, where the answer is finite."""
    error = torch.where(exact.isfinite(), (actual.double() - exact).abs(), 0.0)
    if error.numel() == 0:
        return 0.0, 0.0, 0.0
    square = error.square()
    rows = square.reshape(square.shape[0], -1) if square.dim() else square[None, None]
    return error.max().item(), square.mean().sqrt().item(), rows.mean(1).max().sqrt().item()


def _size(exact: Tensor) -> float:
    return torch.where(exact.isfinite(), exact, 0.0).abs().max().item() if exact.numel() else 0.0


def tier1(exact: Tensor, plain: Tensor) -> Want:
    return Want(exact, (4 * _norms(plain, exact)[0] + 1e-6 * _size(exact), NONE, NONE, NONE))


def tier2(exact: Tensor) -> Want:
    return Want(exact, (NONE, NONE, NONE, 0.55))


def tier3(exact: Tensor, eager: Tensor) -> Want:
    largest, rms, row = _norms(eager, exact)
    tiny = 1e-7 * _size(exact)
    return Want(exact, (2 * largest + tiny, 1.25 * rms + tiny, 2 * row + tiny, NONE))


def within(exact: Tensor, limit: float) -> Want:
    return Want(exact, (limit * _size(exact), NONE, NONE, NONE))


def rounded(exact: Tensor, eager: Tensor) -> Want:
    """By the tier of the dtype that the result has."""
    return (tier1 if eager.dtype == FP32 else tier3)(exact, eager)


def judged(answers: Callable[[torch.dtype], dict[str, Tensor]], dtype: torch.dtype) -> dict[str, Want]:
    """What `answers` gives in float64, by the tier of each result that it gives in `dtype`."""
    eager = answers(dtype)
    return {name: rounded(x, eager[name]) for name, x in answers(FP64).items()}


class Case(NamedTuple):
    """One call of an op. Arrays and numbers have the names that the C++ program asks for."""

    op: str
    label: str
    arrays: dict[str, Tensor]
    numbers: dict[str, float]
    wants: dict[str, Want]


def randn(g: torch.Generator, *shape: int, scale: float = 1.0, dtype: torch.dtype = FP32) -> Tensor:
    return (scale * torch.randn(shape, generator=g)).to(dtype)


def write(path: Path, cases: Iterable[Case]) -> None:
    """All of `cases` as a file."""
    with open(path, "wb") as file:
        for case in cases:
            file.write(f"case {case.op} {case.label}\n".encode())
            for name, number in case.numbers.items():
                file.write(f"number {name} {float(number)!r}\n".encode())
            for name, x in case.arrays.items():
                _put(file, f"array {name} {str(x.dtype).removeprefix('torch.')}", x)
            for name, want in case.wants.items():
                _put(file, f"want {name} {' '.join(map(repr, want.limits))}", want.exact.double())
            file.write(b"end\n")


def _put(file: BinaryIO, head: str, x: Tensor) -> None:
    file.write(f"{head} {' '.join(map(str, (x.dim(), *x.shape)))}\n".encode())
    x = x.detach().contiguous()
    file.write((x.view(torch.int16) if x.dtype == BF16 else x).numpy().tobytes())
