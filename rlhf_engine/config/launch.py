"""Facts from the environment about the processes that a launcher (`torchrun`, `accelerate launch`) has started."""

from __future__ import annotations

import importlib.metadata
import os

import rlhf_engine
from rlhf_engine.errors import ConfigError


def launched() -> int:
    """Processes of this run; 1 without a launcher."""
    there = all(name in os.environ for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    return int(os.environ["WORLD_SIZE"]) if there else 1


def launched_rank() -> int:
    """Rank of this process among those that were launched; 0 without a launcher."""
    return int(os.environ["RANK"]) if launched() > 1 else 0


def versions() -> dict[str, str]:
    """Versions that all processes of a run have alike, by package; torch for another device counts as the same."""
    packages = {name: importlib.metadata.version(name).partition("+")[0] for name in ("torch", "transformers")}
    return {"rlhf-engine": rlhf_engine.__version__, **packages}


def version_of(package: str) -> str | None:
    """Version of an installed package; None where it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def asked_to_shard() -> bool:
    """Whether `accelerate launch` was configured for FSDP. Raises ConfigError for options of it that are not served."""
    if os.environ.get("ACCELERATE_USE_FSDP") != "true":
        return False
    expected = {
        "FSDP_VERSION": ("2", "fsdp_version"),
        "FSDP_RESHARD_AFTER_FORWARD": ("true", "fsdp_reshard_after_forward"),
        "FSDP_OFFLOAD_PARAMS": ("false", "fsdp_offload_params"),
        "FSDP_ACTIVATION_CHECKPOINTING": ("false", "fsdp_activation_checkpointing"),
    }
    for name, (value, option) in expected.items():
        configured = os.environ.get(name, value)
        if configured != value:
            hint = "; gradient_checkpointing is an option of the run" if "CHECKPOINTING" in name else ""
            raise ConfigError(f"{option}: expected {value} in the launcher's configuration{hint}, got {configured}")
    return True
