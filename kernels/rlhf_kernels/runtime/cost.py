"""The memory that an op's call takes inside, beyond its arguments and results.

An op's folder may hold a `cost.py` with

    workspace(name, args, backend_of) -> int | Traced       bytes

`name` is the op's name in `torch.ops.rlhf_kernels`, `args` are its arguments there, and tensors may be without data.
`backend_of(op, dtype, shape)` names the backend that serves a registered op. An op without `cost.py` takes nothing
that grows with the model.
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

BackendOf = Callable[[str, torch.dtype, Sequence[int] | None], str]


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


def workspace(name: str, args: Sequence[Any], backend_of: BackendOf) -> int | Traced:
    """Bytes that one call of an op of this package takes beyond its arguments and results."""
    found = getattr(_module(name), "workspace", None)
    return 0 if found is None else found(name, args, backend_of)


@functools.cache
def _module(name: str) -> Any:
    module = f"rlhf_kernels.{folder_of(name)}.cost"
    return None if importlib.util.find_spec(module) is None else importlib.import_module(module)


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple that is at least n."""
    return -(-n // multiple) * multiple


def next_power(n: int) -> int:
    """The smallest power of two that is at least n, and at least 1."""
    return 2 ** max(0, math.ceil(math.log2(max(1, n))))
