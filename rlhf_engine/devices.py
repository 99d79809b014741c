"""Names of devices and dtypes in configurations, resolved."""

from __future__ import annotations

import torch

from rlhf_engine.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_device(name: str) -> torch.device:
    """`auto` is the first CUDA device if there is one, else the CPU. Raises ConfigError for one that is absent."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device: expected one that is present (cpu), got {name!r}")
    return torch.device(name)
