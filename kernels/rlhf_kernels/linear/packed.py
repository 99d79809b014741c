"""Packed copies of frozen weights, kept from call to call for the products dx = dy W.

Forward, rollouts, scoring and heads read W where it lies. dx reads it across, and takes a copy in the order of its
vectors. The copy is made per call, or once per weight while all copies fit in a budget; the bits are the same.

A copy is kept from a weight's second dx on: tensors of one call never have one. Copies whose weight's memory is gone
are dropped when a new weight is met. A copy is made anew once the weight has changed. torch counts changes in place
(`Tensor._version`), but not those through `Tensor.data`, by which PEFT merges. So each use compares 4,096 pieces of
sixteen elements with the copy, other ones than the use before. What merging changes is seen at once; a single element
at the latest after about as many uses as the weight has times 65,536 elements. `forget` drops all copies.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from rlhf_kernels.runtime import native

ENVIRONMENT_VARIABLE = "RLHF_ENGINE_PACKED_WEIGHTS"
"""Names the budget in MiB; 0: keep none."""
DEFAULT_MIB = 256

_Key = tuple[int, torch.dtype, int, tuple[int, ...], str | None]


@dataclasses.dataclass(slots=True)
class _Entry:
    storage: StorageWeakRef
    version: int
    tiles: Tensor | None
    """[bytes], or None after a weight's first call."""
    turn: int = 0


_kept: dict[_Key, _Entry] = {}
_lock = threading.Lock()
_limit: int | None = None


def _from_environment() -> int:
    """The budget that the environment variable names, in bytes; the default if it is empty or not there."""
    text = os.environ.get(ENVIRONMENT_VARIABLE) or str(DEFAULT_MIB)
    if not text.isdecimal():
        raise ValueError(f"{ENVIRONMENT_VARIABLE}: expected a number of MiB from 0 on, got {text!r}")
    return int(text) * 2**20


_environment_limit = _from_environment()


def budget() -> int:
    """Bytes that all kept copies may have together: those of `set_budget`, else of the environment variable."""
    if _limit is not None:
        return _limit
    return _environment_limit


def set_budget(bytes_: int | None) -> None:
    """Set the budget of this process in bytes, and drop every copy; None: as the environment variable has it.

    Raises:
        ValueError: bytes_ is negative.
    """
    global _limit
    if bytes_ is not None and bytes_ < 0:
        raise ValueError(f"bytes_: expected a number from 0 on or None, got {bytes_}")
    _limit = bytes_
    forget()


def forget() -> None:
    """Drop every copy."""
    with _lock:
        _kept.clear()


def held() -> int:
    """Bytes of the copies that are kept."""
    with _lock:
        return _held()


def size(dtype: torch.dtype, k: int, m: int) -> int:
    """Bytes of a kept copy of a weight [m, k]; 0 where none is kept.

    None is kept where numbers become other ones on the way to the registers, as bf16 on a CPU without products of it:
    the copy would be twice the weight, and converting costs what packing costs.
    """
    types = {torch.float32: 0, torch.bfloat16: 1}
    if dtype not in types or native.missing() is not None:
        return 0
    return native.extension().linear_packed_bytes(types[dtype], k, m)


def planned(weights: Iterable[tuple[torch.dtype, int, int]]) -> int:
    """Bytes that copies of weights (dtype, K, M) take within the budget, which are met in this order."""
    limit, total = budget(), 0
    for weight in weights:
        needed = size(*weight)
        total += needed if total + needed <= limit else 0
    return total


def of(weight: Tensor, type_: int, address: int, stride: int) -> Tensor | None:
    """The kept copy of a frozen weight, made if it is time; None: pack per call.

    Args:
        weight: [M, K] with dense rows, of a dtype that `native.forward` serves.
        type_: number of its dtype in C++.
        address: of its first element.
        stride: of its rows, in elements.
    """
    if weight.requires_grad or weight.is_inference():  # inference tensors count no changes
        return None
    limit = budget()
    if limit == 0:
        return None
    M, K = weight.shape
    extension = native.extension()
    key = (address, weight.dtype, stride, (M, K), native.isa())
    with _lock:
        entry = _kept.get(key)
        if entry is None or entry.storage.expired():
            for dead in [k for k, e in _kept.items() if e.storage.expired()]:
                del _kept[dead]
            _kept[key] = _Entry(StorageWeakRef(weight.untyped_storage()), weight._version, None)
            return None
        entry.turn += 1
        if (
            entry.tiles is not None
            and entry.version == weight._version
            and extension.linear_is_packed(type_, address, stride, entry.tiles.data_ptr(), K, M, entry.turn)
        ):
            return entry.tiles
        needed = size(weight.dtype, K, M)
        if entry.tiles is None and (needed == 0 or _held() + needed > limit):
            return None
        # new memory: another thread may still read the former copy
        entry.tiles, entry.version = torch.empty(needed, dtype=torch.uint8), weight._version
        extension.linear_pack(type_, address, stride, entry.tiles.data_ptr(), K, M, native.threads())
        return entry.tiles


def _held() -> int:
    return sum(e.tiles.numel() for e in _kept.values() if e.tiles is not None)
