"""Decoders, slots and calls for `test_decode_step.py`: random weights, ragged rows, hostile memory."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from rlhf_kernels.decode_step import LINEARS, Decoder, DecoderLayer, DecodeStep, Projection, StepAdapter
from torch import Tensor

FP32, FP64 = torch.float32, torch.float64


class Sizes(NamedTuple):
    H: int = 64
    heads: int = 8
    kv_heads: int = 4
    D: int = 8
    mlp: int = 172
    layers: int = 2
    V: int = 50
    bias: bool = False
    head_norms: bool = False
    windows: tuple[int | None, ...] = (None,)  # of the layers, in turn


SIZES = [
    Sizes(),  # the smallest model of the examples: depth 172 is no whole tile
    Sizes(H=96, heads=4, kv_heads=2, D=64, mlp=130, bias=True, windows=(5, None)),
    Sizes(H=50, heads=3, kv_heads=1, D=10, mlp=33, head_norms=True, windows=(4, 7)),  # nothing a multiple of anything
    Sizes(H=33, heads=2, kv_heads=2, D=80, mlp=7, V=3, layers=1, head_norms=True, bias=True),
    Sizes(H=128, heads=16, kv_heads=1, D=16, mlp=64, layers=1, windows=(1,)),  # a query sees itself alone
]


def numbers(generator: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=generator, dtype=FP64)


def shapes_of(s: Sizes) -> dict[str, tuple[int, int]]:
    q, kv = s.heads * s.D, s.kv_heads * s.D
    shapes = [(q, s.H), (kv, s.H), (kv, s.H), (s.H, q), (s.mlp, s.H), (s.mlp, s.H), (s.H, s.mlp)]
    return dict(zip(LINEARS, shapes, strict=True))


def make_decoder(s: Sizes, dtype: torch.dtype, seed: int = 0) -> Decoder:
    g = torch.Generator().manual_seed(seed)
    layers = []
    for i in range(s.layers):
        linears = {
            name: Projection(
                weight=numbers(g, *shape, scale=shape[1] ** -0.5).to(dtype),
                bias=numbers(g, shape[0], scale=0.1).to(dtype) if s.bias else None,
            )
            for name, shape in shapes_of(s).items()
        }
        norms = {name: numbers(g, s.H).to(dtype) for name in ("input_norm", "mlp_norm")}
        norms |= {name: numbers(g, s.D).to(dtype) for name in ("q_norm", "k_norm") if s.head_norms}
        layers.append(DecoderLayer(**linears, **norms, window=s.windows[i % len(s.windows)]))
    return Decoder(
        embedding=numbers(g, s.V, s.H).to(dtype),
        layers=layers,
        final_norm=numbers(g, s.H).to(dtype),
        eps=1e-5,
        n_heads=s.heads,
        n_kv_heads=s.kv_heads,
        head_dim=s.D,
        scale=s.D**-0.5,
    )


def make_adapter(s: Sizes, dtype: torch.dtype, rank: int, names=LINEARS, scale=2.0, seed=1) -> StepAdapter:
    g = torch.Generator().manual_seed(seed)
    shapes = shapes_of(s)

    def pair(out: int, depth: int) -> tuple[Tensor, Tensor]:
        return numbers(g, rank, depth, scale=depth**-0.5).to(dtype), numbers(g, out, rank, scale=0.3).to(dtype)

    pairs = [{name: pair(*shapes[name]) for name in names} for _ in range(s.layers)]
    return StepAdapter(pairs=pairs, scale=scale)


def make_adapters(s: Sizes, dtype: torch.dtype = FP32) -> list[StepAdapter]:
    """Slots of several ranks; one adapts only some linears."""
    return [
        make_adapter(s, dtype, 4),
        make_adapter(s, dtype, 9, ("q", "v", "down"), scale=0.5, seed=2),
        make_adapter(s, dtype, 1, ("o", "gate"), seed=3),
    ]


def mapped(x: Any, f) -> Any:
    """A decoder, an adapter or parts of them with f applied to every tensor."""
    if isinstance(x, Tensor):
        return f(x)
    if dataclasses.is_dataclass(x):
        return type(x)(**{field.name: mapped(getattr(x, field.name), f) for field in dataclasses.fields(x)})
    if isinstance(x, dict):
        return {key: mapped(value, f) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(mapped(value, f) for value in x)
    return x


class Call(NamedTuple):
    """Arguments of one step, caches [blocks, block, Hkv, D] as views of [blocks, Hkv, block, D]."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    cos: Tensor
    sin: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    table: Tensor

    def take(self, decoder, adapters, backend="cpu") -> list[Tensor]:
        """hidden and every row's new entries, on copies of the caches: [N, H], [N, layers, Hkv, D] twice."""
        keys, values = ([t.clone() for t in caches] for caches in (self.keys, self.values))
        step = DecodeStep(decoder, adapters, backend=backend)
        hidden = step(*self[:5], keys, values, self.table)
        return [hidden, self.entries(keys), self.entries(values)]

    def dense(self) -> Call:
        """The same with contiguous caches."""
        return self._replace(keys=[t.contiguous() for t in self.keys], values=[t.contiguous() for t in self.values])

    def take_exactly(self, decoder, adapters) -> list[Tensor]:
        """The reference's, in float64."""
        parts = (list(self), decoder, adapters)
        call, *rest = (mapped(x, lambda t: t.double() if t.is_floating_point() else t) for x in parts)
        return Call(*call).take(*rest, "reference")

    def entries(self, caches: list[Tensor]) -> Tensor:
        block = caches[0].shape[1]
        page = self.table.gather(1, (self.positions // block)[:, None])[:, 0]
        return torch.stack([cache[page, self.positions % block] for cache in caches], 1)


def make_call(s: Sizes, n: int, dtype: torch.dtype, n_slots: int, block: int = 4, longest: int = 21, seed: int = 3):
    """Rows of ragged lengths, with NaN in all of the caches and wild numbers in all of the table that no row uses."""
    g = torch.Generator().manual_seed(seed)
    integers = lambda low, high, *shape: torch.randint(low, high, shape, generator=g)  # noqa: E731
    positions = integers(0, longest, n)
    pages = -(-longest // block) + 1
    blocks = n * pages + 1
    table = torch.randperm(blocks, generator=g)[: n * pages].view(n, pages)
    caches = [
        torch.full((blocks, s.kv_heads, block, s.D), torch.nan).to(dtype).transpose(1, 2) for _ in range(2 * s.layers)
    ]
    for i, cache in enumerate(caches):
        window = s.windows[i // 2 % len(s.windows)]
        for row in range(n):
            end = int(positions[row])
            for p in range(max(0, end + 1 - window) if window else 0, end):
                cache[table[row, p // block], p % block] = numbers(g, s.kv_heads, s.D).to(dtype)
    widest = None if None in s.windows[: s.layers] else max(w for w in s.windows[: s.layers] if w)
    first = torch.zeros(n, dtype=torch.int64) if widest is None else (positions + 1 - widest).clamp_min(0)
    page = torch.arange(pages)
    used = (page >= (first // block)[:, None]) & (page <= (positions // block)[:, None])
    angles = numbers(g, longest, s.D // 2).repeat(1, 2)
    return Call(
        tokens=integers(0, s.V, n),
        positions=positions,
        slots=integers(-1, n_slots, n),
        cos=angles.cos().to(dtype),
        sin=angles.sin().to(dtype),
        keys=caches[::2],
        values=caches[1::2],
        table=torch.where(used, table, torch.where(page % 2 == 0, -(2**40), 2**40)),
    )
