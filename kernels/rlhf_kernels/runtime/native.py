"""The compiled extension `rlhf_kernels._native`: load it, say why it is missing, turn tensors into addresses.

The extension knows no torch. What it receives is checked here, in Python, where a message can name the
argument; C++ checks sizes and null pointers only. A function of one dtype carries it in its name
(`gae_forward_float32`); where dtypes mix, an address comes with its type.

`RLHF_ENGINE_ISA=avx2`, say, holds a whole process to one instruction set; an unknown or absent one is an error.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from rlhf_kernels.runtime import cores

_DTYPE_NAMES = {torch.float32: "float32", torch.float64: "float64"}
_TYPE_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def _load() -> tuple[Any, str | None]:
    """The extension and None, or None and the reason why there is none."""
    if importlib.util.find_spec("rlhf_kernels._native") is None:
        return None, (
            "the native extension was not built; reinstall with a C++17 compiler on PATH and without "
            "RLHF_ENGINE_NATIVE=0 (pip install -v shows the compiler's messages)"
        )
    try:
        extension = importlib.import_module("rlhf_kernels._native")
    except ImportError as error:  # built, but not loadable here: another Python, a missing libgomp, …
        return None, f"the native extension does not load: {error}"
    held_to = os.environ.get("RLHF_ENGINE_ISA")
    if held_to:
        try:
            extension.set_isa(held_to)
        except ValueError as error:
            raise ValueError(f"RLHF_ENGINE_ISA: {error}") from None
    return extension, None


_extension, _missing = _load()
_isa: str | None = None if _extension is None else _extension.isa()  # kept here: a compiler of graphs reads it


def missing() -> str | None:
    """Reason why there is no native extension in this process, or None if there is one."""
    return _missing


def unsupported(device_type: str, dtype: torch.dtype) -> str | None:
    """Reason why the native CPU code cannot serve such tensors, or None if it can (see `registry`)."""
    if _missing is not None:
        return _missing
    if device_type != "cpu":
        return f"it needs CPU tensors, not {device_type}"
    if dtype not in _DTYPE_NAMES:
        return f"it computes in {' or '.join(map(str, _DTYPE_NAMES))}, not in {dtype}"
    return None


def function(name: str, dtype: torch.dtype) -> Callable[..., None]:
    """The extension's function `name` for `dtype`, one that `unsupported` lets through."""
    if dtype not in _DTYPE_NAMES:
        raise TypeError(f"{name}: expected {' or '.join(map(str, _DTYPE_NAMES))}, got {dtype}")
    return getattr(_extension, f"{name}_{_DTYPE_NAMES[dtype]}")


def extension() -> Any:
    """The extension itself, for functions without a dtype in their name; `missing` says whether it is there."""
    return _extension


def isa() -> str | None:
    """Instruction set that the native code uses, one of `isas()`; None without the extension."""
    return _isa


@contextlib.contextmanager
def use_isa(name: str) -> Iterator[None]:
    """Use instruction set `name` within a `with` block, in every thread; `isas()` lists what there is."""
    previous = _extension.isa()
    _set_isa(name)
    try:
        yield
    finally:
        _set_isa(previous)


def _set_isa(name: str) -> None:
    global _isa
    _extension.set_isa(name)
    _isa = _extension.isa()


def isas() -> list[str]:
    """Instruction sets of this machine that the native code can use, the best last."""
    return _extension.isas()


def multiplies_bf16() -> bool:
    """Whether the instruction set in use has products of bf16; elsewhere bf16 becomes fp32 on the way to registers."""
    return "bf16" in (_isa or "")


def tile_size(name: str) -> int:
    """A tile size of csrc/cpu/tiles.h, for formulas of the memory that a call takes."""
    return _extension.tiles[name]


def threads() -> int:
    """Return how many threads native code may use: as many as torch, within the quota of the CPU (see `cores`)."""
    return cores.threads()


def address(argument: str, tensor: torch.Tensor, dtype: torch.dtype, shape: Sequence[int] | None = None) -> int:
    """Address of the first element, for native code; the caller keeps `tensor` alive through the call.

    Refuses tensors that are not on the CPU, have another dtype or shape, or have no memory of their own (a DTensor,
    say). Without `shape` the tensor's own sizes are those that the native code gets.
    """
    if shape is not None and tensor.shape != shape:
        raise ValueError(f"{argument}: expected shape {tuple(shape)}, got {tuple(tensor.shape)}")
    if not tensor.is_cpu:
        raise ValueError(f"{argument}: expected a CPU tensor, got one on {tensor.device}")
    if tensor.dtype != dtype:
        raise TypeError(f"{argument}: expected dtype {dtype}, got {tensor.dtype}")
    pointer = tensor.data_ptr()
    if pointer == 0 and tensor.numel() > 0:
        raise TypeError(f"{argument}: expected a tensor with memory of its own, got {type(tensor).__name__}")
    return pointer


def rows(
    argument: str, tensor: torch.Tensor, dtype: torch.dtype, shape: Sequence[int] | None = None
) -> tuple[int, int]:
    """Address and row stride (in elements) of a [B, T] tensor whose inner stride is 1."""
    if tensor.dim() != 2:
        raise ValueError(f"{argument}: expected 2 dimensions, got shape {tuple(tensor.shape)}")
    if tensor.numel() > 0 and tensor.shape[1] > 1 and tensor.stride(1) != 1:
        raise ValueError(f"{argument}: expected inner stride 1, got strides {tensor.stride()}")
    return address(argument, tensor, dtype, shape), tensor.stride(0)


def dense(argument: str, tensor: torch.Tensor, dtype: torch.dtype, shape: Sequence[int] | None = None) -> int:
    """Address of a contiguous tensor."""
    if not tensor.is_contiguous():
        raise ValueError(f"{argument}: expected a contiguous tensor, got strides {tensor.stride()}")
    return address(argument, tensor, dtype, shape)


def type_number(argument: str, dtype: torch.dtype, known: Sequence[torch.dtype]) -> int:
    """Number that C++ has for a dtype, which has to be one of `known`."""
    if dtype not in known:
        raise TypeError(f"{argument}: expected {' or '.join(map(str, known))}, got {dtype}")
    return _TYPE_NUMBERS[dtype]


def unit_inner_stride(x: torch.Tensor) -> torch.Tensor:
    """x, copied unless the elements of a row are neighbours."""
    return x if x.dim() == 0 or x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()
