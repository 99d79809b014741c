"""`rms_norm`, `rotary`, `swiglu` and `activation` (gelu_tanh) on the tokens of an update, forward and backward.

Floor: a bare copy of the bytes that must move: inputs and outputs of both passes, statistics and angles aside. Norm
weights are frozen and have no gradient. The eager formulas are those of transformers' Llama.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from rlhf_kernels.llama_ops import activation, reference, rms_norm, rotary, swiglu
from torch import Tensor

from rlhf_bench.case import Baseline, Case, Tensors, differentiate, leaves_of
from rlhf_bench.floor import copy_floors

EPS = 1e-6
_GRID = [(256, 512), (1024, 1024), (1024, 4096)]  # tokens, hidden size
_SIZES = {
    "cpu": {"tiny": [(8, 32)], "quick": [(256, 512)], "default": [(1024, 1024)], "full": _GRID},
    "cuda": {"tiny": [(8, 32)], "quick": [(2048, 4096)], "default": [(8192, 4096)], "full": [*_GRID, (8192, 4096)]},
}
_HEAD = 64
_KIND = "gelu_tanh"
_INPUTS = {"rms_norm": ("x",), "rotary": ("q", "k"), "swiglu": ("gate", "up"), "activation": ("x",)}
_OUTPUTS = {"rms_norm": ("y",), "rotary": ("q_turned", "k_turned"), "swiglu": ("y",), "activation": ("y",)}
# tensors read or written at least, both passes together: the backward pass of `rotary` reads gradients and angles only
_MOVED = {"rms_norm": 2 + 3, "rotary": 4 + 4, "swiglu": 3 + 5, "activation": 2 + 3}


def cases(size: str, device_type: str, dtype: torch.dtype) -> list[Case]:
    """Four cases per size."""
    return [_case(name, T, H, dtype) for T, H in _SIZES[device_type][size] for name in _INPUTS]


def _case(name: str, T: int, H: int, dtype: torch.dtype) -> Case:
    width = {"swiglu": H * 8 // 3 // 32 * 32, "activation": 4 * H}.get(name, H)  # of a gated MLP and a plain one

    def make(device: torch.device) -> Tensors:
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        if name == "rms_norm":
            return {"x": draw(1, T, H), "weight": draw(H), "grad_y": draw(1, T, H)}
        if name == "swiglu":
            return {"gate": draw(1, T, width), "up": draw(1, T, width), "grad_y": draw(1, T, width)}
        if name == "activation":
            return {"x": draw(1, T, width), "grad_y": draw(1, T, width)}
        head = min(H, _HEAD)
        heads = {f: draw(1, T, H // head, head).transpose(1, 2) for f in ("q", "k", "grad_q_turned", "grad_k_turned")}
        angles = torch.rand(1, T, head, generator=generator, device=device) * 6.3
        return heads | {"cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype)}

    def finish(compute: Callable[[Tensors], tuple[Tensor, ...]], inputs: Tensors) -> Tensors:
        leaves = leaves_of(inputs, _INPUTS[name])
        outputs = dict(zip(_OUTPUTS[name], compute(inputs | leaves), strict=True))
        return differentiate(outputs, {key: inputs[f"grad_{key}"] for key in outputs}, leaves)

    def plain(given: Tensors) -> tuple[Tensor, ...]:
        if name == "rms_norm":
            return (reference.rms_norm(given["x"], given["weight"], EPS),)
        if name == "swiglu":
            return (reference.swiglu(given["gate"], given["up"]),)
        if name == "activation":
            return (reference.activation(given["x"], _KIND),)
        return reference.rotary(given["q"], given["k"], given["cos"], given["sin"])

    def run(inputs: Tensors, backend: str) -> Tensors:
        def ours(given: Tensors) -> tuple[Tensor, ...]:
            if name == "rms_norm":
                return (rms_norm(given["x"], given["weight"], eps=EPS, backend=backend),)
            if name == "swiglu":
                return (swiglu(given["gate"], given["up"], backend=backend),)
            if name == "activation":
                return (activation(given["x"], _KIND, backend=backend),)
            return rotary(given["q"], given["k"], given["cos"], given["sin"], backend=backend)

        return finish(ours, inputs)

    def prepare_eager(inputs: Tensors) -> Callable[[], Tensors]:
        return lambda: finish(plain, inputs)

    def prepare_compiled(inputs: Tensors) -> Callable[[], Tensors]:
        compiled = torch.compile(plain, dynamic=False)
        return lambda: finish(compiled, inputs)

    moved = float(T * width * dtype.itemsize * _MOVED[name])
    return Case(
        op="llama_ops",
        name=f"{name}/{T}x{width}",
        dtype=dtype,
        kernels=(name,),
        shape=(min(H, _HEAD) if name == "rotary" else width,),
        make=make,
        run=run,
        eager=lambda inputs: finish(plain, inputs),
        floor=lambda inputs: copy_floors(moved, next(iter(inputs.values())).device, dtype),
        baselines=(
            Baseline(name="eager formulas", prepare=prepare_eager),
            Baseline(name="torch.compile(formulas)", prepare=prepare_compiled, compiles=True),
        ),
        flops=T * width * {"rms_norm": 12.0, "rotary": 16.0, "swiglu": 20.0, "activation": 20.0}[name],
        moved_bytes=moved,
    )
