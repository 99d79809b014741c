"""`decode_attention`: one query per row against a cache with one block per row, all rows full or of ragged lengths.

Floor: a bare copy of as many bytes as the used keys and values have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from rlhf_kernels.decode_attention import decode_attention
from torch import Tensor

from rlhf_engine.bench.case import Baseline, Case, NotHereError, Tensors, require
from rlhf_engine.bench.floor import copy_floors


class CacheSize(NamedTuple):
    """N rows, S positions each, Hq query heads on Hkv cache heads of D features."""

    N: int
    S: int
    Hq: int
    Hkv: int
    D: int

    def __str__(self) -> str:
        return f"{self.N}x{self.S}x{self.Hq}of{self.Hkv}x{self.D}"


_CPU = {
    "tiny": [(3, 21, 4, 2, 16)],
    "quick": [(16, 128, 8, 8, 64)],
    "default": [(16, 128, 8, 8, 64), (16, 1024, 14, 2, 64)],
    "full": [(n, s, *heads) for heads in ((8, 8, 64), (14, 2, 64), (32, 8, 128)) for n in (1, 16) for s in (128, 2048)],
}
_CUDA = {
    "tiny": [(3, 21, 4, 2, 16)],
    "quick": [(32, 1024, 32, 8, 128)],
    "default": [(32, s, 32, 8, 128) for s in (1024, 4096)],
    "full": [(n, s, 32, 8, 128) for n in (1, 32, 128) for s in (1024, 4096)],
}


def cases(size: str, device_type: str, dtype: torch.dtype) -> list[Case]:
    """Full and ragged rows at every size."""
    sizes = (_CUDA if device_type == "cuda" else _CPU)[size]
    return [_case(CacheSize(*s), dtype, ragged) for s in sizes for ragged in (False, True)]


def _case(s: CacheSize, dtype: torch.dtype, ragged: bool) -> Case:
    lengths = [s.S - (i * s.S) // (2 * s.N) if ragged else s.S for i in range(s.N)]

    def make(device: torch.device) -> Tensors:
        generator = torch.Generator(device).manual_seed(0)

        def numbers(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        return {
            "q": numbers(s.N, s.Hq, s.D),
            "k_cache": numbers(s.N, s.Hkv, s.S, s.D).transpose(1, 2),  # as rollouts lay it out
            "v_cache": numbers(s.N, s.Hkv, s.S, s.D).transpose(1, 2),
            "lengths": torch.tensor(lengths, device=device),
            "block_table": torch.arange(s.N, device=device)[:, None],
        }

    def run(inputs: Tensors, backend: str) -> Tensors:
        arguments = (inputs[name] for name in ("q", "k_cache", "v_cache", "lengths", "block_table"))
        return {"out": decode_attention(*arguments, scale=s.D**-0.5, backend=backend)}

    moved = 2 * sum(lengths) * s.Hkv * s.D * dtype.itemsize
    return Case(
        op="decode_attention",
        name=f"{'ragged' if ragged else 'full'}/{s}",
        dtype=dtype,
        kernels=("decode_attention",),
        shape=(s.D,),
        make=make,
        run=run,
        eager=_eager,
        floor=lambda inputs: copy_floors(moved, inputs["q"].device),
        baselines=(
            Baseline(name="matmul + softmax + matmul", prepare=lambda inputs: lambda: _eager(inputs)),
            Baseline(name="F.scaled_dot_product_attention", prepare=_sdpa),
            Baseline(name="flash_attn_with_kvcache", package="flash-attn", prepare=_flash),
        ),
        flops=4.0 * sum(lengths) * s.Hq * s.D,
        moved_bytes=moved,
    )


def _seen(inputs: Tensors) -> Tensor | None:
    """bool [N, 1, 1, S] of the used positions, or None where all are."""
    position = torch.arange(inputs["k_cache"].shape[1], device=inputs["q"].device)
    seen = position < inputs["lengths"][:, None]
    return None if bool(seen.all()) else seen[:, None, None]


def _eager(inputs: Tensors) -> Tensors:
    q = inputs["q"]
    group = q.shape[1] // inputs["k_cache"].shape[2]
    k, v = (inputs[name].transpose(1, 2).repeat_interleave(group, 1) for name in ("k_cache", "v_cache"))
    score = (q[:, :, None] * q.shape[2] ** -0.5) @ k.transpose(2, 3)  # [N, Hq, 1, S]
    seen = _seen(inputs)
    if seen is not None:
        score = score.masked_fill(~seen, -torch.inf)
    return {"out": (score.softmax(-1) @ v)[:, :, 0]}


def _sdpa(inputs: Tensors) -> Callable[[], Tensors]:
    q, seen = inputs["q"][:, :, None], _seen(inputs)
    k, v = inputs["k_cache"].transpose(1, 2), inputs["v_cache"].transpose(1, 2)
    return lambda: {"out": F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)[:, :, 0]}


def _flash(inputs: Tensors) -> Callable[[], Tensors]:
    q = inputs["q"][:, None]
    if q.device.type != "cuda" or q.dtype == torch.float32:
        raise NotHereError("takes bf16 and fp16 on a CUDA device")
    require("flash-attn", "2.8.3")
    from flash_attn import flash_attn_with_kvcache

    caches, lengths = (inputs["k_cache"], inputs["v_cache"]), inputs["lengths"].int()
    return lambda: {"out": flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths)[:, 0]}
