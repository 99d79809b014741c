"""The engine inside other training libraries, and the one way in which their parts are exchanged for ours."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Any, ClassVar, Self

import torch


class Exchange:
    """Context manager of attributes of another library exchanged for ours, until `undo`, in any order."""

    _in_place: ClassVar[weakref.WeakSet[Exchange]] = weakref.WeakSet()

    def __init__(self, parts: Iterable[tuple[Any, str, Any]]) -> None:
        """Make the exchange. parts: (owner, name, ours); an owner has the attribute, or is a dict with that key."""
        self._parts: list[list[Any]] = []  # [owner, name, ours, what stood there before]
        for owner, name, ours in parts:
            self._parts.append([owner, name, ours, _get(owner, name)])
            _set(owner, name, ours)
        self._in_place.add(self)

    @property
    def is_in_place(self) -> bool:
        """Whether it has not been undone."""
        return self in self._in_place

    def undo(self) -> None:
        """Take this exchange back, once; RuntimeError where something else has changed an attribute since."""
        if not self.is_in_place:
            return
        later = {(id(part[0]), part[1], id(part[3])): part for other in self._in_place for part in other._parts}
        above = [later.get((id(owner), name, id(ours))) for owner, name, ours, _ in self._parts]
        for (owner, name, ours, _), part in zip(self._parts, above, strict=True):
            here = _get(owner, name)
            if part is None and here is not ours:
                raise RuntimeError(
                    f"undo: expected {name} of {_called(owner)} as this exchange has left it, got {here!r}, which "
                    "something else has put there since; undo that first"
                )
        for (owner, name, _, before), part in zip(self._parts, above, strict=True):
            if part is None:
                _set(owner, name, before)
            else:
                part[3] = before
        self._in_place.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def _get(owner: Any, name: str) -> Any:
    return owner[name] if isinstance(owner, dict) else getattr(owner, name)


def _set(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)


def _called(owner: Any) -> str:
    return getattr(owner, "__name__", type(owner).__name__)


def as_autocast(hidden: torch.Tensor, *others: torch.Tensor | None) -> tuple[Any, ...]:
    """Hidden states, and what they are multiplied by, in the dtype that an autocast context asks for."""
    device = hidden.device.type
    if not torch.is_autocast_enabled(device) or hidden.dtype == torch.float64:
        return hidden, *others
    half = torch.get_autocast_dtype(device)
    return hidden.to(half), *(None if x is None else x.to(half) for x in others)
