"""Inputs of every native op with answers in float64, for `native_cases_main.cpp`.

That program computes each case with every instruction set that its CPU has, and holds the results to the tiers of
`rlhf_kernels.runtime.testing`. The limits are computed here, so it only compares.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from . import native_case_file
from .native_case_file import BF16, FP16, FP32, Case
from .native_cases_products import decode_step_case, head_case, linear_case, lora_case, lora_decode_case, sample_case
from .native_cases_rows import (
    attention_case,
    block_cases,
    decode_attention_case,
    gae_case,
    gather_logprob_case,
    ppo_loss_case,
    value_loss_case,
    whiten_case,
)


def write(path: Path, seeds: tuple[int, ...] = (0, 1, 2)) -> None:
    """Every case for each seed."""
    native_case_file.write(path, (case for seed in seeds for case in cases(seed)))


def cases(seed: int) -> Iterator[Case]:
    """One case of every op and dtype, of ragged sizes."""
    g = torch.Generator().manual_seed(seed)
    for dtype in (FP32, BF16):
        name = str(dtype).removeprefix("torch.")
        label = f"{name}-seed{seed}"
        yield head_case(g, dtype, f"plain-{label}", (33, 64, 0, 700), False)
        yield head_case(g, dtype, f"options-{label}", (15, 38, 6, 517), True)
        yield sample_case(g, dtype, label)
        for adapter in (FP32, BF16):
            both = f"{name}-adapters-{str(adapter).removeprefix('torch.')}-seed{seed}"
            yield lora_case(g, dtype, adapter, both)
            yield lora_decode_case(g, dtype, adapter, both)
        yield attention_case(g, dtype, label)
        yield decode_attention_case(g, dtype, label)
        yield decode_step_case(dtype, label, seed)
        yield gather_logprob_case(g, dtype, label)
        yield from block_cases(g, dtype, label)
    for dtype in (FP32, BF16, FP16):
        label = f"{str(dtype).removeprefix('torch.')}-seed{seed}"
        yield linear_case(g, dtype, f"few-rows-{label}", (19, 301, 229))
        yield linear_case(g, dtype, f"many-rows-{label}", (41, 301, 177))
    yield ppo_loss_case(g, f"float32-seed{seed}")
    yield value_loss_case(g, f"float32-seed{seed}")
    yield gae_case(g, f"float32-seed{seed}")
    yield whiten_case(g, f"float32-seed{seed}")
