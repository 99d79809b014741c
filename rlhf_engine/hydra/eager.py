"""Whether code for the CPU may run: not while a graph is compiled, nor while tests let the CPU stand in for a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_stands_in: ContextVar[bool] = ContextVar("stands_in", default=False)


def is_eager() -> bool:
    """False under torch.compile and within `stand_in`."""
    # compilation first: a compiler stops here, and does not trace context variables
    return not torch.compiler.is_compiling() and not _stands_in.get()


@contextmanager
def stand_in(active: bool = True) -> Iterator[None]:
    """A block in which the CPU runs what a graph or another device would run."""
    token = _stands_in.set(active)
    try:
        yield
    finally:
        _stands_in.reset(token)
