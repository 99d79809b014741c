"""Right calls that between them reach every function above and in the C++ extension, by name in `DRIVERS`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from rlhf_kernels import DecodeLinear, Segments, linear, lora_delta_, lora_linears
from rlhf_kernels.linear import packed
from rlhf_kernels.lora.group import Reader
from rlhf_kernels.runtime import native, registry

from . import native_once
from .decode_step_cases import mapped
from .direct_calls import CALLS, OPS


def op_call(name: str, dtype: str) -> tuple[Callable[[dict[str, Any]], Any], Callable[[], dict[str, Any]]]:
    """A registered op as a function of its arguments by name, and what makes right ones with floats of a dtype."""
    has_backend = "backend" in {argument.name for argument in OPS[name]._schema.arguments}

    def arguments() -> dict[str, Any]:
        wanted = getattr(torch, dtype)
        made: dict[str, Any] = mapped(CALLS[name](), lambda x: x.to(wanted) if x.dtype == torch.float32 else x)
        return made | ({"backend": "cpu"} if has_backend else {})

    return lambda given: OPS[name](**given), arguments


def _op(name: str, dtype: str) -> Callable[[], None]:
    def run() -> None:
        function, arguments = op_call(name, dtype)
        try:
            function(arguments())
        except (TypeError, ValueError):
            assert dtype != "float32", name  # others are not every op's

    return run


def _packed() -> None:
    """A frozen weight whose copy is made at the second gradient, and compared at the third."""
    packed.forget()
    x, weight = torch.randn(64, 32, requires_grad=True), torch.randn(32, 32)
    for _ in range(3):
        linear(x, weight, backend="cpu").sum().backward()


def _delta() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, y = torch.randn(9, 32).to(dtype), torch.zeros(9, 16, dtype=dtype)
        A, B = [torch.randn(3, 32)], [torch.randn(16, 3)]
        lora_delta_(y, x, A, B, [0.5], Segments(starts=(2,), ends=(7,), slots=(0,)))


def _linears() -> None:
    """Two linears that read the same rows, of which one has an adapter on some."""
    x, lora = torch.randn(9, 32), {"A": [torch.randn(3, 32)], "B": [torch.randn(16, 3)], "scales": [0.5]}
    adapted = Reader(torch.randn(16, 32), None, **lora, segments=Segments(starts=(2,), ends=(7,), slots=(0,)))
    lora_linears(x, [adapted, Reader(torch.randn(8, 32), torch.randn(8))])


def _again() -> None:
    """A bound linear whose tensors are looked at before its second call."""
    everywhere = Segments(starts=(0,), ends=(9,), slots=(0,))
    bound = DecodeLinear(torch.randn(16, 32), None, [torch.randn(3, 32)], [torch.randn(16, 3)], [0.5], everywhere)
    with torch.no_grad():
        for _ in range(2):
            bound(torch.randn(9, 32))


def _sets() -> None:
    with native.use_isa(native.isas()[0]):
        native.extension().isa()


def _of_once(part: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        torch.manual_seed(0)
        with registry.use_backend("cpu"):
            part()

    return run


_ONCE = (native_once.vocabulary, native_once.linears, native_once.adapters, native_once.decoding, native_once.elements)
DRIVERS: dict[str, Callable[[], None]] = {
    **{f"{name} {dtype}": _op(name, dtype) for name in CALLS for dtype in ("float32", "float64", "bfloat16")},
    **{part.__name__: _of_once(part) for part in (*_ONCE, _packed, _delta, _linears, _again, _sets)},
}
