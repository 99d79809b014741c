"""Least time of a case: bare products with weights packed once, or a bare copy of the bytes that must move.

Products are made in every way that the libraries here offer, and the fastest on the machine is the floor. It is no
limit of the hardware: what is below it is faster than every one of them. A product with a packed weight writes into
fresh memory, as its library offers nothing else; `torch.mm` writes into memory that is there. Weights are packed, and
widened to fp32 where bf16 is multiplied so, before the time begins; activations are widened within it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_bench.case import Floors, Run

MM = "torch.mm"
_TOO_SLOW, _QUICK_S = 10.0, 0.005
"""A way whose first call takes so many times as long as the fastest one's, and longer than that, is not timed."""


class _Way(NamedTuple):
    """Way in which products with a weight are made, and the dtype of those without."""

    linear: Callable[[Tensor, Tensor], Run]  # (x [N, K], weight [M, K]) → x Wᵀ
    dtype: torch.dtype


def gemm_floors(
    *products: tuple[Tensor, Tensor], fresh: Sequence[tuple[Tensor, Tensor]] = (), times: int = 1
) -> Floors:
    """Products a @ b, one after the other, in every way that is here.

    Args:
        products: pairs whose b is a weight, or its transpose: it is the same in every call and may be packed.
        fresh: pairs of which neither is.
        times: how often a call makes all of them.
    """
    floors = {MM: _repeated([*_into_memory([*products, *fresh])], times)}
    like = products[0][0] if products else fresh[0][0]
    if like.device.type != "cpu" or not products:
        return floors
    for label, way in _ways(like.dtype).items():
        others = [(a.to(way.dtype), b.to(way.dtype)) for a, b in fresh]
        try:
            packed = [way.linear(a, b.T.contiguous()) for a, b in products]
            packed[0]()
        except (AttributeError, RuntimeError):  # built without that library, or it has no such product
            continue
        floors[label] = _repeated([*packed, *_into_memory(others)], times)
    return floors


def copy_floors(moved_bytes: float, device: torch.device, dtype: torch.dtype) -> Floors:
    """A bare copy of numbers in `dtype` that reads and writes `moved_bytes` in total."""
    source = random_normal(max(1, int(moved_bytes) // 2 // dtype.itemsize), dtype=dtype, device=device)
    target = torch.empty_like(source)
    return {"copy": lambda: target.copy_(source)}


def random_normal(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Normal random numbers, the same in every call. A GPU multiplies equal numbers faster than the data of a model."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)


def together(parts: Sequence[Floors]) -> Floors:
    """One call does all parts, each in the same way; of the ways that every part has."""
    labels = [label for label in parts[0] if all(label in part for part in parts)]
    return {label: _repeated([part[label] for part in parts], 1) for label in labels}


def worth_timing(floors: Floors) -> Floors:
    """Those that may be the fastest, by one call each: torch's bf16 products take 100 times as long on some CPUs."""
    seconds = {}
    for label, run in floors.items():
        began = time.perf_counter()
        run()
        seconds[label] = time.perf_counter() - began
    limit = max(_QUICK_S, _TOO_SLOW * min(seconds.values()))
    return {label: run for label, run in floors.items() if seconds[label] <= limit}


def _repeated(calls: Sequence[Run], times: int) -> Run:
    @torch.no_grad()
    def run() -> None:
        for _ in range(times):
            for call in calls:
                call()

    return run


def _into_memory(products: Sequence[tuple[Tensor, Tensor]]) -> list[Run]:
    """`torch.mm` of each pair; results of one shape share their memory."""
    outs: dict[tuple[int, int], Tensor] = {}
    calls: list[Run] = []
    for a, b in products:
        shape = (a.shape[0], b.shape[1])
        out = outs.setdefault(shape, torch.empty(shape, dtype=a.dtype, device=a.device))
        calls.append(_mm(a, b, out))
    return calls


def _mm(a: Tensor, b: Tensor, out: Tensor) -> Run:
    return lambda: torch.mm(a, b, out=out)


# ---- packed weights --------------------------------------------------------------------------------------------------


def _ways(dtype: torch.dtype) -> dict[str, _Way]:
    """Ways to multiply, by label.

    What comes in as bf16 may be multiplied in fp32, which many CPUs do several times as fast.
    """
    if dtype == torch.float32:
        return {"packed by MKL": _Way(packed_by_mkl, dtype), "packed by oneDNN": _Way(_onednn, dtype)}
    return {
        "packed by oneDNN": _Way(_onednn, dtype),
        "packed by MKL in float32": _Way(_upcast(packed_by_mkl), torch.float32),
        "packed by oneDNN in float32": _Way(_upcast(_onednn), torch.float32),
    }


def packed_by_mkl(x: Tensor, weight: Tensor) -> Run:
    """x [N, K] times the transpose of a weight [M, K] that MKL packs now, in fp32."""
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, x.shape[0])
    return lambda: torch.ops.mkl._mkl_linear(x, packed, weight, None, x.shape[0])


def _onednn(x: Tensor, weight: Tensor) -> Run:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, x.shape[0])
    return lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def _upcast(linear: Callable[[Tensor, Tensor], Run]) -> Callable[[Tensor, Tensor], Run]:
    def prepare(x: Tensor, weight: Tensor) -> Run:
        wide = torch.empty(x.shape)
        run = linear(wide, weight.float())

        def call() -> Tensor:
            wide.copy_(x)
            y: Tensor = run()
            return y

        return call

    return prepare
