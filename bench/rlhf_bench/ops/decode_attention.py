"""`decode_attention`: one query per row against a cache, all rows full or of ragged lengths.

A full or ragged case has one block per row. A paged one has blocks of 32 positions, as the rollout engine keeps them:
ragged rows, room for all their positions, and the blocks in the order that a pool has after long use. One with sinks is
ragged, and has a logit per head in the softmax's denominator.

Floor: a bare copy of as many bytes as the used keys and values have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rlhf_kernels.decode_attention import decode_attention
from torch import Tensor

from rlhf_bench.case import Baseline, Case, NotHereError, Tensors, require
from rlhf_bench.floor import copy_floors

PAGE = 32
"""Positions per block of a paged case: `rlhf_engine.hydra.attention.BLOCK`."""


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
    "tiny": [(3, 40, 4, 2, 16)],
    "quick": [(16, 128, 8, 8, 64)],
    "default": [(16, 128, 8, 8, 64), (16, 1024, 14, 2, 64)],
    "full": [(n, s, *heads) for heads in ((8, 8, 64), (14, 2, 64), (32, 8, 128)) for n in (1, 16) for s in (128, 2048)],
}
_CUDA = {
    "tiny": [(3, 40, 4, 2, 16)],
    "quick": [(32, 1024, 32, 8, 128)],
    "default": [(32, s, 32, 8, 128) for s in (1024, 4096)],
    "full": [(n, s, 32, 8, 128) for n in (1, 32, 128) for s in (1024, 4096)],
}


def cases(size: str, device_type: str, dtype: torch.dtype) -> list[Case]:
    """Full and ragged rows; paged ones except at the CPU's quick and default sizes; sinks at tiny and full ones."""
    sizes = (_CUDA if device_type == "cuda" else _CPU)[size]
    is_short = size in ("quick", "default")
    kinds = ["full", "ragged"]
    kinds += [] if is_short and device_type == "cpu" else ["paged"]
    kinds += [] if is_short else ["sinks"]
    return [_case(CacheSize(*s), dtype, kind) for s in sizes for kind in kinds]


def _case(s: CacheSize, dtype: torch.dtype, kind: str) -> Case:
    lengths = [s.S if kind == "full" else s.S - (i * s.S) // (2 * s.N) for i in range(s.N)]
    pages = -(-s.S // PAGE)  # of a row
    assert pages > 1 or kind != "paged"  # what follows takes a row of one block for a cache without a table
    blocks, block = (s.N * pages, PAGE) if kind == "paged" else (s.N, s.S)

    def make(device: torch.device) -> Tensors:
        generator = torch.Generator(device).manual_seed(0)

        order: Any = torch.randperm if kind == "paged" else lambda n, generator, device: torch.arange(n, device=device)

        def numbers(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        sinks = {"sinks": numbers(s.Hq)} if kind == "sinks" else {}
        return {
            "q": numbers(s.N, s.Hq, s.D),
            "k_cache": numbers(blocks, s.Hkv, block, s.D).transpose(1, 2),  # as rollouts lay it out
            "v_cache": numbers(blocks, s.Hkv, block, s.D).transpose(1, 2),
            "lengths": torch.tensor(lengths, device=device),
            "block_table": order(blocks, generator=generator, device=device).view(s.N, -1),
            **sinks,
        }

    def run(inputs: Tensors, backend: str) -> Tensors:
        arguments = (inputs[name] for name in ("q", "k_cache", "v_cache", "lengths", "block_table"))
        return {"out": decode_attention(*arguments, scale=s.D**-0.5, sinks=inputs.get("sinks"), backend=backend)}

    moved = 2 * sum(lengths) * s.Hkv * s.D * dtype.itemsize
    return Case(
        op="decode_attention",
        name=f"{kind}/{s}",
        dtype=dtype,
        kernels=("decode_attention",),
        replayed=True,
        shape=(s.D,),
        make=make,
        run=run,
        eager=_eager,
        floor=lambda inputs: copy_floors(moved, inputs["q"].device, dtype),
        baselines=(
            Baseline(name="matmul + softmax + matmul", prepare=lambda inputs: lambda: _eager(inputs)),
            Baseline(name="F.scaled_dot_product_attention", prepare=_sdpa),
            Baseline(name="FlexDecoding", prepare=_flex, compiles=True),
            Baseline(name="flash_attn_with_kvcache", package="flash-attn", prepare=_flash),
        ),
        flops=4.0 * sum(lengths) * s.Hq * s.D,
        moved_bytes=moved,
    )


def _rows(inputs: Tensors) -> tuple[Tensor, Tensor]:
    """Keys and values by row, [N, Hkv, S, D] each: the cache itself, or a copy where rows have several blocks."""
    table = inputs["block_table"]
    caches = inputs["k_cache"], inputs["v_cache"]
    k, v = (cache if table.shape[1] == 1 else cache[table].flatten(1, 2) for cache in caches)
    return k.transpose(1, 2), v.transpose(1, 2)


def _seen(inputs: Tensors) -> Tensor | None:
    """bool [N, 1, 1, S] of the used positions, or None where all are."""
    room = inputs["block_table"].shape[1] * inputs["k_cache"].shape[1]
    seen = torch.arange(room, device=inputs["q"].device) < inputs["lengths"][:, None]
    return None if bool(seen.all()) else seen[:, None, None]


def _eager(inputs: Tensors) -> Tensors:
    q = inputs["q"]
    group = q.shape[1] // inputs["k_cache"].shape[2]
    k, v = (x.repeat_interleave(group, 1) for x in _rows(inputs))
    score = (q[:, :, None] * q.shape[2] ** -0.5) @ k.transpose(2, 3)  # [N, Hq, 1, S]
    seen = _seen(inputs)
    if seen is not None:
        score = score.masked_fill(~seen, -torch.inf)
    if "sinks" in inputs:
        score = torch.cat([score, inputs["sinks"][None, :, None, None].expand(*score.shape[:-1], 1)], -1)
    return {"out": (score.softmax(-1)[..., : k.shape[2]] @ v)[:, :, 0]}


def _without_sinks(inputs: Tensors) -> None:
    if "sinks" in inputs:
        raise NotHereError("takes no sinks")


def _sdpa(inputs: Tensors) -> Callable[[], Tensors]:
    """Attention by SDPA, which takes no table: every call copies the rows of a paged cache."""
    _without_sinks(inputs)
    q, seen = inputs["q"][:, :, None], _seen(inputs)

    def run() -> Tensors:
        k, v = _rows(inputs)
        return {"out": F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)[:, :, 0]}

    return run


def _flex(inputs: Tensors) -> Callable[[], Tensors]:
    """Compiled flex_attention, held to its decoding kernel: its own choice may be the one for long queries."""
    if inputs["q"].device.type != "cuda":
        raise NotHereError("has its decoding kernel on a CUDA device only")
    _without_sinks(inputs)
    from torch.nn.attention.flex_attention import flex_attention

    return flex_run(inputs, torch.compile(flex_attention, dynamic=False), {"BACKEND": "TRITON_DECODE"})


def flex_run(inputs: Tensors, attend: Any, options: dict[str, Any] | None) -> Callable[[], Tensors]:
    """Decode attention by an `attend` with the signature of flex_attention.

    The mask is made now, not in every step, and a paged cache is laid out as torch's `PagedAttention` has it,
    [1, Hkv, blocks · block, D].
    """
    from torch.nn.attention.experimental._paged_attention import PagedAttention
    from torch.nn.attention.flex_attention import create_block_mask

    q, lengths, table = inputs["q"][:, :, None], inputs["lengths"], inputs["block_table"]
    n, pages = table.shape
    blocks, block = inputs["k_cache"].shape[:2]

    def used(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx < lengths[b]

    device: Any = q.device  # create_block_mask takes what torch.empty does
    if pages == 1:
        k, v = _rows(inputs)
        full = _seen(inputs) is None
        mask = None if full else create_block_mask(used, n, None, 1, block, device=device)
    else:
        k, v = (inputs[name].permute(2, 0, 1, 3).flatten(1, 2)[None].contiguous() for name in ("k_cache", "v_cache"))
        logical = create_block_mask(used, n, None, 1, pages * block, device=device, BLOCK_SIZE=(128, block))
        pool = PagedAttention(blocks, block, n, device=device)
        pool.page_table[:, :pages] = table
        order = torch.arange(pages, device=device).expand(n, -1)
        pool.physical_to_logical.scatter_(1, table, order)
        mask = pool.convert_logical_block_mask(logical, kv_len=lengths)
    return lambda: {"out": attend(q, k, v, block_mask=mask, enable_gqa=True, kernel_options=options)[:, :, 0]}


def _flash(inputs: Tensors) -> Callable[[], Tensors]:
    q = inputs["q"][:, None]
    if q.device.type != "cuda" or q.dtype == torch.float32:
        raise NotHereError("takes bf16 and fp16 on a CUDA device")
    if inputs["block_table"].shape[1] > 1:
        raise NotHereError(f"takes blocks of 256 positions or more, not of {PAGE}")
    _without_sinks(inputs)
    require("flash-attn")
    from flash_attn import flash_attn_with_kvcache

    caches, lengths = (inputs["k_cache"], inputs["v_cache"]), inputs["lengths"].int()
    return lambda: {"out": flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths)[:, 0]}
