"""`lora_linear`: one slot on all rows, and rows that are off, the actor's and the critic's in one call.

Floor: the base linear alone: its product forward and, where there is a backward, its dx. Gradients to x and to every
A and B that rows use, never to the frozen weight. Adapters are float32, as they are in training, whatever the base is;
`F.grouped_mm` alone rounds them to bf16, all that its kernel takes, so its gradients are not the case's.
In a mixed case half of the rows are off and the slots share the other half. Decode cases are forward only, without
gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rlhf_kernels import DecodeLinear, Segments, lora_linear
from torch import Tensor

from rlhf_bench.case import Baseline, Case, Floors, NotHereError, Tensors, differentiate, leaves_of, require
from rlhf_bench.floor import gemm_floors

ALPHA = 32.0


@dataclass(frozen=True, kw_only=True)
class LoraShape:
    """N rows through a [M, K] linear with `slots` adapters of rank r; `mixed`: half of the rows off."""

    N: int
    K: int
    M: int
    r: int = 16
    slots: int = 1
    mixed: bool = False
    backward: bool = True

    @property
    def name(self) -> str:
        """Name of the case, such as `mixed/1024x1024x4096_r16`."""
        kind = ("mixed" if self.mixed else "single") if self.slots <= 2 else f"slots{self.slots}"
        kind = kind if self.backward else f"decode_{kind}"
        return f"{kind}/{self.N}x{self.K}x{self.M}_r{self.r}"

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """(start, end, slot) in row order; slot −1 is off."""
        on = self.N // 2 if self.mixed else 0
        borders = [on + (self.N - on) * i // self.slots for i in range(self.slots + 1)]
        runs = [(0, on, -1)] if on else []
        return runs + [(borders[i], borders[i + 1], i) for i in range(self.slots)]


RANKS = [8, 16, 32, 64, 128]


def lora_shapes(size: str, device_type: str) -> list[LoraShape]:
    """The grid: a single slot, and off + actor + critic; with --full also ranks, and more slots.

    A GPU's default has every rank at one shape, in training and in decoding, and every number of decoding rows.
    """
    if size == "tiny":
        return _grid([(16, 24)], [4], 32, [4])
    if device_type == "cpu":
        if size == "quick":
            return _grid([(256, 512)], [16], 256, [8])
        shapes = [(1024, 1024), (1024, 4096)]
        return _grid(shapes, [16], 1024, [8]) if size == "default" else _full(shapes, 1024, [1, 8, 16, 64, 256], [8])
    if size == "quick":
        return _grid([(4096, 4096)], [16], 2048, [16])
    if size == "full":
        rows = [1, 16, 64, 256]
        return _full([(4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096)], 8192, rows, rows)
    others = [r for r in RANKS if r != 16]
    return [
        *_grid([(4096, 4096), (4096, 14336)], [16], 8192, [1, 16, 64, 256]),
        *_grid([(4096, 4096)], others, 8192, []),
        *(shape for r in others for shape in _decode(4096, 4096, r, [64])),
    ]


def _full(shapes: list[tuple[int, int]], n_rows: int, decode: list[int], at_each_rank: list[int]) -> list[LoraShape]:
    grid = _grid(shapes, RANKS, n_rows, decode)
    grid += [LoraShape(N=n_rows, K=K, M=M, slots=slots, mixed=True) for K, M in shapes for slots in (8, 32)]
    return grid + [shape for K, M in shapes for r in RANKS if r != 16 for shape in _decode(K, M, r, at_each_rank)]


def _grid(shapes: list[tuple[int, int]], ranks: list[int], n_rows: int, decode: list[int]) -> list[LoraShape]:
    """Training at every rank, decoding at rank 16."""
    grid = []
    for K, M in shapes:
        for r in ranks:
            grid += [LoraShape(N=n_rows, K=K, M=M, r=r), LoraShape(N=n_rows, K=K, M=M, r=r, slots=2, mixed=True)]
        grid += _decode(K, M, 16, decode)
    return grid


def _decode(K: int, M: int, r: int, rows: list[int]) -> list[LoraShape]:
    mixed = [LoraShape(N=n, K=K, M=M, r=r, slots=min(2, n), mixed=n >= 4, backward=False) for n in rows]
    return mixed + [LoraShape(N=n, K=K, M=M, r=r, backward=False) for n in rows if n >= 4]


def cases(size: str, device_type: str, dtype: torch.dtype) -> list[Case]:
    """One case per entry of the grid."""
    return [_case(shape, dtype) for shape in lora_shapes(size, device_type)]


def _case(shape: LoraShape, dtype: torch.dtype) -> Case:
    slots = range(shape.slots)
    A, B = [f"A{i}" for i in slots], [f"B{i}" for i in slots]
    gradients = ("x", *A, *B) if shape.backward else ()
    scale = ALPHA / shape.r

    def make(device: torch.device) -> Tensors:
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int, std: float = 1.0) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).mul_(std)

        inputs = {"x": draw(shape.N, shape.K).to(dtype), "weight": draw(shape.M, shape.K, std=shape.K**-0.5).to(dtype)}
        inputs |= {name: draw(shape.r, shape.K, std=shape.K**-0.5) for name in A}
        inputs |= {name: draw(shape.M, shape.r, std=0.1) for name in B}
        return inputs | {"grad_y": draw(shape.N, shape.M).to(dtype)}

    def finish(linear: Callable[[Tensors], Tensor], inputs: Tensors) -> Tensors:
        leaves = leaves_of(inputs, gradients)
        return differentiate({"y": linear(inputs | leaves)}, {"y": inputs["grad_y"]}, leaves)

    bound: dict[tuple[int, str], DecodeLinear] = {}

    def run(inputs: Tensors, backend: str) -> Tensors:
        starts, ends, slot_of = zip(*shape.runs, strict=True)
        segments = Segments(starts=starts, ends=ends, slots=slot_of)

        def linear(given: Tensors) -> Tensor:
            adapters = [given[n] for n in A], [given[n] for n in B]
            scales = [scale] * shape.slots
            base = given["weight"], None
            if shape.backward:
                return lora_linear(given["x"], *base, *adapters, scales, segments, backend=backend)
            key = (id(given["weight"]), backend)  # it stays what it is for as long as `bound` holds the weight
            if key not in bound:
                bound[key] = DecodeLinear(*base, *adapters, scales, segments, backend=backend)
            return bound[key](given["x"])

        return finish(linear, inputs)

    def eager_linear(given: Tensors) -> Tensor:
        return _eager(given, shape, scale)

    def prepare_eager(inputs: Tensors) -> Callable[[], Tensors]:
        return lambda: finish(eager_linear, inputs)

    def prepare_compiled(inputs: Tensors) -> Callable[[], Tensors]:
        linear = torch.compile(eager_linear, dynamic=False)
        return lambda: finish(linear, inputs)

    def prepare_peft(inputs: Tensors) -> Callable[[], Tensors]:
        return _peft(inputs, shape)

    def prepare_grouped(inputs: Tensors) -> Callable[[], Tensors]:
        x = inputs["x"]
        if x.device.type != "cuda":
            raise NotHereError("needs a CUDA device")
        if x.dtype != torch.bfloat16 or torch.cuda.get_device_capability(x.device)[0] not in (9, 10):
            raise NotHereError("needs bf16 and compute capability 9.0 or 10.0; else it is a loop over torch.mm")
        linear = grouped_linear(shape, scale, inputs)
        return lambda: finish(linear, inputs)

    def floor(inputs: Tensors) -> Floors:
        x, weight, dy = inputs["x"], inputs["weight"], inputs["grad_y"]
        return gemm_floors((x, weight.T), *([(dy, weight)] if shape.backward else []))

    item, passes = dtype.itemsize, 2 if shape.backward else 1
    base = shape.K * shape.M + shape.N * (shape.K + shape.M)
    adapters = shape.slots * shape.r * (shape.K + shape.M) * 4
    return Case(
        op="lora",
        name=shape.name,
        dtype=dtype,
        kernels=("lora",) if shape.backward else ("lora_decode",),
        replayed=not shape.backward,
        shape=(shape.M, shape.K),
        make=make,
        run=run,
        eager=lambda inputs: finish(eager_linear, inputs),
        floor=floor,
        baselines=(
            Baseline(name="eager per lane", prepare=prepare_eager),
            Baseline(name="torch.compile(eager per lane)", prepare=prepare_compiled, compiles=True),
            Baseline(name="adapter_names" if shape.mixed else "LoRA layer", package="peft", prepare=prepare_peft),
            *([Baseline(name="F.grouped_mm", prepare=prepare_grouped, same=not shape.backward)] if shape.mixed else []),
        ),
        flops=2.0 * passes * shape.N * shape.K * shape.M,
        moved_bytes=passes * (base * item + adapters),
    )


def _eager(given: Tensors, shape: LoraShape, scale: float) -> Tensor:
    """The base on all rows, then (x Aᵀ) Bᵀ per lane in the adapters' dtype, as peft's layer does it."""
    y = F.linear(given["x"], given["weight"])
    parts = []
    for start, end, slot in shape.runs:
        part = y[start:end]
        if slot >= 0:
            A, B = given[f"A{slot}"], given[f"B{slot}"]
            part = part + (F.linear(F.linear(given["x"][start:end].to(A.dtype), A), B) * scale).to(y.dtype)
        parts.append(part)
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def grouped_linear(shape: LoraShape, scale: float, inputs: Tensors) -> Callable[[Tensors], Tensor]:
    """Two grouped products on the rows that are on, in the dtype of x.

    The adapters are cast and stacked in every call of a training case, and now, once, for decoding.
    """
    on = shape.runs[0][1] if shape.mixed else 0
    ends = [end - on for _, end, slot in shape.runs if slot >= 0]
    offs = torch.tensor(ends, dtype=torch.int32, device=inputs["x"].device)

    def stacked(given: Tensors) -> list[Tensor]:
        return [torch.stack([given[f"{n}{i}"] for i in range(shape.slots)]).to(given["x"].dtype) for n in "AB"]

    bound = None if shape.backward else stacked(inputs)

    def linear(given: Tensors) -> Tensor:
        x = given["x"]
        A, B = bound or stacked(given)
        y = F.linear(x, given["weight"])
        h = F.grouped_mm(x[on:], A.transpose(1, 2), offs=offs)
        delta = F.grouped_mm(h, B.transpose(1, 2), offs=offs)
        return torch.cat([y[:on], torch.add(y[on:], delta, alpha=scale)])

    return linear


def _peft(inputs: Tensors, shape: LoraShape) -> Callable[[], Tensors]:
    """peft's layer around an nn.Linear. Mixed: sequences with a name each, a path that peft keeps for inference."""
    require("peft")
    import peft

    x, weight = inputs["x"], inputs["weight"]
    module = torch.nn.Sequential(torch.nn.Linear(shape.K, shape.M, bias=False, device=x.device, dtype=x.dtype))
    module[0].weight = torch.nn.Parameter(weight, requires_grad=False)
    for slot in range(shape.slots):
        config = peft.LoraConfig(r=shape.r, lora_alpha=int(ALPHA), lora_dropout=0.0, target_modules=["0"])
        with warnings.catch_warnings():  # that there are several adapters is what this is about
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")
            peft.inject_adapter_in_model(config, module, f"slot{slot}")
    layer: Any = module[0]
    if type(layer) is not peft.tuners.lora.Linear:
        raise NotHereError(f"expected peft.tuners.lora.Linear, but it takes {type(layer).__name__} here")
    adapters = {}
    for name, part in (("A", layer.lora_A), ("B", layer.lora_B)):
        for slot in range(shape.slots):
            adapters[f"{name}{slot}"] = torch.nn.Parameter(inputs[f"{name}{slot}"])
            part[f"slot{slot}"].weight = adapters[f"{name}{slot}"]
    names = None
    if shape.mixed:
        # as many rows per sequence as fit every shape's length
        step = min(end - start for start, end, _ in shape.runs)
        while any((end - start) % step for start, end, _ in shape.runs):
            step -= 1
        names = [
            "__base__" if slot < 0 else f"slot{slot}"
            for start, end, slot in shape.runs
            for _ in range((end - start) // step)
        ]

    def run() -> Tensors:
        leaves = leaves_of(inputs, ("x",)) if shape.backward else {}
        rows = leaves.get("x", x)
        if names is None:
            layer.train()
            y = layer(rows)
        else:
            layer.eval()
            y = layer(rows.view(len(names), -1, shape.K), adapter_names=names).reshape(shape.N, shape.M)
        leaves |= adapters if shape.backward else {}
        return differentiate({"y": y}, {"y": inputs["grad_y"]}, leaves)

    return run
