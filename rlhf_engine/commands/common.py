"""Helpers of the commands: process-wide settings, kernels that are asked for, data that were left out."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from rlhf_kernels.runtime import cores, registry
from transformers.utils import logging

from rlhf_engine.config import EvaluateConfig, GenerateConfig, ServeConfig
from rlhf_engine.config.launch import launched_rank
from rlhf_engine.devices import DTYPES, keep_freed_memory, resolve_device
from rlhf_engine.errors import ConfigError
from rlhf_engine.rollout import exactness

INTERRUPTED = 130  # exit code after Ctrl-C


def prepare(kernels: str) -> None:
    """Process-wide settings: kernel backend, threads, memory, quiet libraries."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    registry.set_default_backend(kernels)
    keep_freed_memory()
    note = cores.limit_threads()
    if note is not None and launched_rank() == 0:
        print(f"note: {note}", file=sys.stderr)


SHORT_CUTS = ("decode_step", "lora_group")
"""Ops that do at once what others do one by one; where a backend has none, the others run."""


def check_kernels(kernels: str, device_type: str, dtype: torch.dtype) -> None:
    """A backend asked for by name must serve every op; say at once which it does not."""
    if kernels == "auto":
        return
    report = {op: row for op, row in registry.report(device_type, dtype).items() if op not in SHORT_CUTS}
    missing = [op for op, row in report.items() if row[kernels] != "available"]
    if missing:
        raise ConfigError(
            f"kernels: expected a backend that serves every op on {device_type}, {kernels!r} has no {missing}"
        )


def begin_drawing(config: EvaluateConfig | GenerateConfig | ServeConfig) -> str:
    """Check the device and the kernels of a command that draws answers, and settle exact mode; the device's type."""
    device_type = resolve_device(config.device).type
    check_kernels(config.kernels, device_type, DTYPES[config.dtype])
    registry.begin_run(exact=exactness.by_default(device_type) if config.exact is None else config.exact)
    return device_type


def print_what_was_left_out(reports: Iterable[Any]) -> None:
    """A line for each source of data of which not every row is used as it is."""
    for report in reports:
        if not report.is_plain:
            print(report.text(), file=sys.stderr)
