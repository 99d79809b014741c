"""`decode_step`: one new token per row through a Llama-like decoder, without and with one LoRA slot on every linear.

Floor: bare GEMMs of the sizes of all linears. Baseline: the forward of transformers' Llama on a `DynamicCache` of the
same lengths, cropped after every call; with a slot, its linears add two small products. None includes the head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from rlhf_kernels.decode_step import LINEARS, Decoder, DecoderLayer, DecodeStep, Projection, StepAdapter
from torch import Tensor, nn

from rlhf_bench.case import Baseline, Case, Floors, Tensors
from rlhf_bench.floor import gemm_floors, random_normal

EPS, RANK, LORA_SCALE, WORDS = 1e-5, 16, 2.0, 1000


class StepSize(NamedTuple):
    """N rows at position S; L layers of H features, Hq query heads on Hkv cache heads of D, an MLP of M."""

    N: int
    S: int
    L: int
    H: int
    Hq: int
    Hkv: int
    D: int
    M: int

    def __str__(self) -> str:
        return f"{self.N}x{self.S}x{self.L}x{self.H}"

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Name of a linear → (out, in)."""
        q, kv = self.Hq * self.D, self.Hkv * self.D
        shapes = ((q, self.H), (kv, self.H), (kv, self.H), (self.H, q), (self.M, self.H), (self.M, self.H))
        return dict(zip(LINEARS, (*shapes, (self.H, self.M)), strict=True))


_SMALL, _MIDDLE, _HALF_BILLION = (5, 64, 8, 4, 8, 172), (8, 512, 8, 8, 64, 1344), (24, 896, 14, 2, 64, 4864)
_SIZES = {
    "tiny": [(3, 11, 2, 32, 4, 2, 8, 44)],
    "quick": [(16, 32, *_SMALL), (16, 100, *_MIDDLE)],
    "default": [(16, 32, *_SMALL), (64, 32, *_SMALL), (16, 100, *_MIDDLE)],
    "full": [(n, s, *model) for model in (_SMALL, _MIDDLE, _HALF_BILLION) for n in (1, 16, 64) for s in (1, 100)],
}


def cases(size: str, device_type: str, dtype: torch.dtype) -> list[Case]:
    """Every size without and with a slot on all rows."""
    return [_case(StepSize(*s), dtype, on) for s in _SIZES[size] for on in (False, True)]


def _case(s: StepSize, dtype: torch.dtype, on: bool) -> Case:
    names = [(i, name) for i in range(s.L) for name in LINEARS]

    def make(device: torch.device) -> Tensors:
        g = torch.Generator(device).manual_seed(0)

        def numbers(*shape: int, scale: float = 1.0, type: torch.dtype = dtype) -> Tensor:
            return (scale * torch.randn(shape, generator=g, device=device)).to(type)

        position = torch.arange(s.S + 1, device=device)[:, None]
        angles = position * 10000.0 ** (-torch.arange(0, s.D, 2, device=device) / s.D)
        inputs = {
            "embedding": numbers(WORDS, s.H),
            "cos": angles.cos().repeat(1, 2).to(dtype),
            "sin": angles.sin().repeat(1, 2).to(dtype),
            "tokens": torch.arange(s.N, device=device),
            "positions": torch.full((s.N,), s.S, device=device),
            "slots": torch.full((s.N,), 0 if on else -1, device=device),
            "table": torch.arange(s.N, device=device)[:, None].contiguous(),
        }
        for i in range(s.L):
            inputs |= {f"{i}.{which}": numbers(s.N, s.Hkv, s.S + 1, s.D) for which in ("keys", "values")}
        for i, name in names:
            out, width = s.shapes()[name]
            inputs[f"{i}.{name}"] = numbers(out, width, scale=width**-0.5)
            if on:
                inputs[f"{i}.{name}.A"] = numbers(RANK, width, scale=width**-0.5, type=torch.float32)
                inputs[f"{i}.{name}.B"] = numbers(out, RANK, scale=0.1, type=torch.float32)
        return inputs

    steps: dict[str, tuple[int, Callable[[], Tensor]]] = {}  # by backend, made once for its inputs

    def run(inputs: Tensors, backend: str) -> Tensors:
        where = inputs["embedding"].data_ptr()
        if backend not in steps or steps[backend][0] != where:
            steps[backend] = where, _step(s, on, inputs, backend)
        return {"hidden": steps[backend][1]()}

    weights = sum(out * width for out, width in s.shapes().values()) * s.L
    cached = 2 * s.N * (s.S + 1) * s.Hkv * s.D * s.L
    return Case(
        op="decode_step",
        name=f"{'on' if on else 'off'}/{s}",
        dtype=dtype,
        kernels=("decode_step",),
        shape=(s.M, s.H),
        make=make,
        run=run,
        eager=lambda inputs: run(inputs, "reference"),
        floor=lambda inputs: _floor(s, inputs),
        baselines=(
            Baseline(name="forward + DynamicCache", prepare=lambda i: _prepare(s, on, i), package="transformers"),
        ),
        flops=2.0 * s.N * weights,
        moved_bytes=(weights + cached) * dtype.itemsize,
    )


def _floor(s: StepSize, inputs: Tensors) -> Floors:
    embedding = inputs["embedding"]
    widths = {width for _, width in s.shapes().values()}
    x = {width: random_normal(s.N, width, dtype=embedding.dtype, device=embedding.device) for width in widths}
    return gemm_floors(*((x[s.shapes()[n][1]], inputs[f"{i}.{n}"].T) for i in range(s.L) for n in LINEARS))


def _projections(inputs: Tensors, layer: int) -> dict[str, Any]:
    return {name: Projection(weight=inputs[f"{layer}.{name}"]) for name in LINEARS}


def _step(s: StepSize, on: bool, inputs: Tensors, backend: str) -> Callable[[], Tensor]:
    ones = torch.ones_like(inputs["embedding"][0])
    layers = [DecoderLayer(input_norm=ones, mlp_norm=ones, **_projections(inputs, i)) for i in range(s.L)]
    decoder = Decoder(
        embedding=inputs["embedding"],
        layers=layers,
        final_norm=ones,
        eps=EPS,
        n_heads=s.Hq,
        n_kv_heads=s.Hkv,
        head_dim=s.D,
        scale=s.D**-0.5,
    )
    pairs = [{n: (inputs[f"{i}.{n}.A"], inputs[f"{i}.{n}.B"]) for n in LINEARS} for i in range(s.L)] if on else []
    step = DecodeStep(decoder, [StepAdapter(pairs=pairs, scale=LORA_SCALE)] if on else [], backend=backend)
    keys, values = ([inputs[f"{i}.{n}"].transpose(1, 2) for i in range(s.L)] for n in ("keys", "values"))
    rows = {name: inputs[name] for name in ("tokens", "positions", "slots", "cos", "sin", "table")}
    return lambda: step(keys=keys, values=values, **rows)


class _Adapted(nn.Module):
    """A linear and what a slot adds to it."""

    def __init__(self, linear: nn.Linear, A: Tensor, B: Tensor) -> None:
        super().__init__()
        self.linear, self.A, self.B = linear, A, B

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y + (LORA_SCALE * (x.to(self.A.dtype) @ self.A.T) @ self.B.T).to(y.dtype)


@torch.no_grad()
def _prepare(s: StepSize, on: bool, inputs: Tensors) -> Callable[[], Tensors]:
    import transformers

    embedding = inputs["embedding"]
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=s.H,
        intermediate_size=s.M,
        num_hidden_layers=s.L,
        num_attention_heads=s.Hq,
        num_key_value_heads=s.Hkv,
        head_dim=s.D,
        rms_norm_eps=EPS,
        max_position_embeddings=s.S + 1,
    )
    model: Any = transformers.LlamaModel(config)
    model.to(device=embedding.device, dtype=embedding.dtype).eval()
    model.embed_tokens.weight.copy_(embedding)
    cache = transformers.DynamicCache()
    for i, layer in enumerate(model.layers):
        for name in LINEARS:
            parent: Any = layer.self_attn if name in "qkvo" else layer.mlp
            linear = getattr(parent, f"{name}_proj")
            linear.weight.copy_(inputs[f"{i}.{name}"])
            if on:
                setattr(parent, f"{name}_proj", _Adapted(linear, inputs[f"{i}.{name}.A"], inputs[f"{i}.{name}.B"]))
        keys, values = (inputs[f"{i}.{n}"][:, :, : s.S].clone() for n in ("keys", "values"))
        cache.update(keys, values, i)

    @torch.no_grad()
    def run() -> Tensors:
        given = inputs["tokens"][:, None], inputs["positions"][:, None]
        hidden = model(given[0], position_ids=given[1], past_key_values=cache, use_cache=True).last_hidden_state
        cache.crop(-1)
        return {"hidden": hidden[:, 0]}

    return run
