"""The cases of every op: one module each, with `cases(size, device_type, dtype) -> list[Case]`."""

from __future__ import annotations

import importlib

import torch

from rlhf_bench import OPS, SIZES
from rlhf_bench.case import Case


def load_cases(op: str, size: str, device_type: str, dtype: torch.dtype) -> list[Case]:
    """All cases of `op`. `dtype` is that of weights and activations; ops on float32 numbers per token keep those."""
    if op not in OPS:
        raise ValueError(f"op: expected one of {OPS}, got {op!r}")
    if size not in SIZES:
        raise ValueError(f"size: expected one of {SIZES}, got {size!r}")
    return importlib.import_module(f"rlhf_bench.ops.{op}").cases(size, device_type, dtype)
