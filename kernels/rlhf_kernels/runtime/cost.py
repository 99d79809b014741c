"""The cost of an op's call: FLOPs, bytes moved, and memory taken inside the call.

An op's folder may hold a `cost.py` with one or both of

    work(name, args, out) -> list[Work]                     FLOPs and bytes
    workspace(name, args, backend_of) -> int | Traced       bytes beyond the arguments and the results

`name` is the op's name in `torch.ops.rlhf_kernels`, `args` are its arguments there, and tensors may be without data.
`backend_of(op, dtype, shape)` names the backend that serves a registered op. An op without `work` moves its arguments
and results once; an op without `workspace` takes nothing that grows with the model.

Symbols: N rows, K → M a linear, r rank, H hidden size, V vocabulary, e bytes per element.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlhf_kernels.runtime.signature import folder_of

GEMMS, ELEMENTWISE, LORA, ATTENTION = "base GEMMs", "norms, RoPE, activations, sums", "LoRA", "attention"
HEADS, SAMPLING = "log-prob and loss heads", "sampling"

BackendOf = Callable[[str, torch.dtype, Sequence[int] | None], str]


@dataclass(frozen=True)
class Work:
    """One kind of work in a call of an op.

    Args:
        kind: what it is like, for a machine's ceilings.
        part: what of a training step it belongs to.
        flops: floating-point operations.
        bytes: bytes read and written.
        rows: rows of a product; 0 where the bytes say how large the call is.
        dtype: dtype of the largest input.
        launches: kernels that a GPU starts; 0 for a view.
        calls: calls of ops on the host; 0 for further work in the same call.
    """

    kind: str
    part: str
    flops: float = 0.0
    bytes: float = 0.0
    rows: int = 0
    dtype: torch.dtype = torch.float32
    launches: int = 1
    calls: int = 1


@dataclass(frozen=True)
class Traced:
    """A call in plain torch whose memory a trace without data finds.

    Args:
        function: the function to trace.
        args: its arguments.
        reads: what the function reads from tensors, by type: a value, or a function that returns the next one.
    """

    function: Callable[..., Any]
    args: Sequence[Any]
    reads: dict[type, Any]


def work(name: str, args: Sequence[Any], out: Any) -> list[Work] | None:
    """Work of one call of an op of this package, or None where the op has no formula."""
    found = getattr(_module(name), "work", None)
    return None if found is None else found(name, args, out)


def workspace(name: str, args: Sequence[Any], backend_of: BackendOf) -> int | Traced:
    """Bytes that one call of an op of this package takes beyond its arguments and results."""
    found = getattr(_module(name), "workspace", None)
    return 0 if found is None else found(name, args, backend_of)


@functools.cache
def _module(name: str) -> Any:
    module = f"rlhf_kernels.{folder_of(name)}.cost"
    return None if importlib.util.find_spec(module) is None else importlib.import_module(module)


def tensor_bytes(x: torch.Tensor) -> int:
    """Bytes of a tensor's elements."""
    return x.numel() * x.element_size()


def all_bytes(values: Sequence[Any]) -> float:
    """Bytes of the tensors among the values."""
    return float(sum(tensor_bytes(x) for x in values if isinstance(x, torch.Tensor)))


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple that is at least n."""
    return -(-n // multiple) * multiple


def next_power(n: int) -> int:
    """The smallest power of two that is at least n, and at least 1."""
    return 2 ** max(0, math.ceil(math.log2(max(1, n))))
