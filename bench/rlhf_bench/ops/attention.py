"""`attention`: packed sequences of an update, forward and backward.

An equal case has sequences of one length, on which SDPA computes the same. A shared one has families of a prompt and
four answers, which SDPA can compute with a copy of the prompt for each answer.

Floor: a bare copy of inputs, results and their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from rlhf_kernels.attention import attention, reference
from torch import Tensor

from rlhf_bench.case import Baseline, Case, NotHereError, Tensors, differentiate, leaves_of
from rlhf_bench.floor import copy_floors

ANSWERS = 4
_INPUTS = ("q", "k", "v")


class PackedSize(NamedTuple):
    """N sequences of L positions, Hq query heads on Hkv key heads of D features."""

    N: int
    L: int
    Hq: int
    Hkv: int
    D: int

    def __str__(self) -> str:
        return f"{self.N}x{self.L}x{self.Hq}of{self.Hkv}x{self.D}"


_GRID = [(n, length, *heads) for heads in ((8, 8, 64), (8, 2, 128), (32, 8, 64)) for n, length in ((16, 64), (2, 512))]
_SIZES = {
    "cpu": {
        "tiny": [(5, 20, 4, 2, 16)],
        "quick": [(5, 128, 8, 8, 64)],
        "default": [(5, 256, 8, 8, 64), (5, 256, 14, 2, 64)],
        "full": _GRID,
    },
    "cuda": {
        "tiny": [(5, 20, 4, 2, 16)],
        "quick": [(5, 256, 8, 8, 64)],
        "default": [(5, 512, 32, 8, 128)],
        "full": [(10, 512, 32, 8, 128)],
    },
}


def cases(size: str, device_type: str, dtype: torch.dtype) -> list[Case]:
    """Equal and shared sequences of each size."""
    return [_case(PackedSize(*s), dtype, kind) for s in _SIZES[device_type][size] for kind in ("equal", "shared")]


def _case(s: PackedSize, dtype: torch.dtype, kind: str) -> Case:
    lengths = [s.L] * s.N
    each = 1 + ANSWERS
    parents = [-1 if kind == "equal" or i % each == 0 else i // each * each for i in range(s.N)]
    scale, rows = s.D**-0.5, s.N * s.L

    def make(device: torch.device) -> Tensors:
        generator = torch.Generator(device).manual_seed(0)
        heads = {"q": s.Hq, "k": s.Hkv, "v": s.Hkv, "grad_out": s.Hq}
        return {
            name: torch.randn((rows, n, s.D), generator=generator, device=device).to(dtype) for name, n in heads.items()
        }

    def finish(compute: Callable[[Tensors], Tensor], inputs: Tensors) -> Tensors:
        leaves = leaves_of(inputs, _INPUTS)
        return differentiate({"out": compute(leaves)}, {"out": inputs["grad_out"]}, leaves)

    def run(inputs: Tensors, backend: str) -> Tensors:
        def ours(x: Tensors) -> Tensor:
            return attention(x["q"], x["k"], x["v"], lengths, scale=scale, parents=parents, backend=backend)

        return finish(ours, inputs)

    def plain(x: Tensors) -> Tensor:
        return reference.in_its_dtype(x["q"], x["k"], x["v"], lengths, parents, scale, None, None, None)

    def sdpa(inputs: Tensors) -> Callable[[], Tensors]:
        if kind == "shared":
            raise NotHereError("takes no sequence whose keys are partly another one's")

        def compute(x: Tensors) -> Tensor:
            q, k, v = (x[name].unflatten(0, (s.N, s.L)).transpose(1, 2) for name in _INPUTS)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=s.Hq != s.Hkv)
            return out.transpose(1, 2).flatten(0, 1)

        return lambda: finish(compute, inputs)

    moved = float(rows * s.D * dtype.itemsize * 4 * (s.Hq + s.Hkv))
    return Case(
        op="attention",
        name=f"{kind}/{s}",
        dtype=dtype,
        kernels=("attention",),
        shape=(s.D,),
        make=make,
        run=run,
        eager=lambda inputs: finish(plain, inputs),
        floor=lambda inputs: copy_floors(moved, inputs["q"].device, dtype),
        baselines=(
            Baseline(name="matmul + softmax + matmul", prepare=lambda inputs: lambda: finish(plain, inputs)),
            Baseline(name="F.scaled_dot_product_attention", prepare=sdpa),
        ),
        flops=14.0 * s.Hq * s.D * _pairs(lengths, parents),
        moved_bytes=moved,
    )


def _pairs(lengths: Sequence[int], parents: Sequence[int]) -> int:
    """Pairs of a query and a key that it sees: its own sequence's up to itself, and all of its parent's."""
    before = [lengths[parent] if parent >= 0 else 0 for parent in parents]
    return sum(n * (n + 1) // 2 + n * seen for n, seen in zip(lengths, before, strict=True))
