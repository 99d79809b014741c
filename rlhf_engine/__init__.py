"""rlhf-engine: RLHF on one frozen backbone. Actor, critic, reference and reward are adapter slots and heads on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_engine.integrations.peft import fuse_lora as fuse_lora

__version__ = "0.1.0"
__all__ = ["__version__", "fuse_lora"]


def __getattr__(name: str) -> Any:
    # on demand: the command line answers --help without importing torch
    if name == "fuse_lora":
        from rlhf_engine.integrations.peft import fuse_lora

        return fuse_lora
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
