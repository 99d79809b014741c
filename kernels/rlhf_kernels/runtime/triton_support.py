"""Helpers that all Triton backends share: whether they can run here, and the cases that are compiled ahead of time.

Triton itself is imported by the `triton.py` of an op, which `registry.Lazy` loads on the first call, so none of this
needs it. `TRITON_INTERPRET=1`, set before Triton is first imported, runs the kernels on the CPU (tests). There
`tl.dot` on bf16 operands is silently wrong; kernels upcast such operands when `INTERPRETED`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def unsupported(device_type: str, dtype: torch.dtype) -> str | None:
    """Reason why Triton cannot serve such tensors, or None if it can (see `registry`)."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (it comes with torch on Linux; pip install triton)"
    if device_type != "cuda" and not INTERPRETED:
        return f"it needs CUDA tensors, not {device_type}"
    if dtype not in DTYPES:
        return f"it computes in {', '.join(map(str, DTYPES))}, not in {dtype}"
    return None


@dataclass(frozen=True, kw_only=True)
class AotCase:
    """One kernel with one configuration, as `rlhf_kernels.runtime.aot` compiles it without a GPU.

    signature: every argument that is not a constexpr, as Triton spells types ("*bf16", "fp32", "i32", "i64").
    Each `triton.py` offers `aot_cases() -> list[AotCase]`, the first of each kernel being the one it uses most.
    """

    name: str  # of the configuration, unique within a kernel
    kernel: Any  # the @triton.jit function
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    enable_fp_fusion: bool = True  # of a product and a sum
    divisible_by_16: tuple[str, ...] = ()  # arguments that are known to be (pointers, strides): wider loads
