"""`linear`: the product of a frozen layer, forward alone and with its gradient to x.

Floor: the same products with the weight packed once. A frozen weight has no dW.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from rlhf_kernels.linear import linear
from torch import Tensor

from rlhf_bench.case import Baseline, Case, Floors, Tensors, differentiate, leaves_of
from rlhf_bench.floor import gemm_floors


def shapes(size: str, device_type: str) -> list[tuple[int, int, int]]:
    """(N, K, M): rows, in and out features."""
    if size == "tiny":
        return [(8, 16, 24)]
    if device_type != "cpu":
        return [(8192, 4096, 4096)]
    if size == "quick":
        return [(256, 512, 512), (256, 512, 2048)]
    grid = [(1024, 1024, 1024), (1024, 1024, 4096), (1024, 4096, 1024)]
    return grid if size == "default" else [*grid, (16, 1024, 4096), (64, 1024, 4096), (256, 2048, 2048)]


def cases(size: str, device_type: str, dtype: torch.dtype) -> list[Case]:
    """Forward and frozen (forward and dx) of every shape."""
    return [_case(*shape, dtype, backward) for shape in shapes(size, device_type) for backward in (False, True)]


def _case(N: int, K: int, M: int, dtype: torch.dtype, backward: bool) -> Case:
    gradients = ("x",) if backward else ()

    def make(device: torch.device) -> Tensors:
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int, std: float = 1.0) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).mul_(std).to(dtype)

        return {"x": draw(N, K), "weight": draw(M, K, std=K**-0.5), "grad_y": draw(N, M)}

    def finish(product: Callable[[Tensor, Tensor], Tensor], inputs: Tensors) -> Tensors:
        leaves = leaves_of(inputs, gradients)
        given = inputs | leaves
        return differentiate({"y": product(given["x"], given["weight"])}, {"y": inputs["grad_y"]}, leaves)

    def floor(inputs: Tensors) -> Floors:
        x, weight, dy = inputs["x"], inputs["weight"], inputs["grad_y"]
        return gemm_floors((x, weight.T), *([(dy, weight)] if backward else []))

    passes = 2 if backward else 1
    return Case(
        op="linear",
        name=f"{'frozen' if backward else 'forward'}/{N}x{K}x{M}",
        dtype=dtype,
        kernels=("linear",),
        shape=(M, K),
        make=make,
        run=lambda inputs, backend: finish(lambda x, w: linear(x, w, backend=backend), inputs),
        eager=lambda inputs: finish(F.linear, inputs),
        floor=floor,
        baselines=(Baseline(name="F.linear", prepare=lambda inputs: lambda: finish(F.linear, inputs)),),
        flops=2.0 * passes * N * K * M,
        moved_bytes=passes * (K * M + N * (K + M)) * dtype.itemsize,
    )
