"""Behind TRL, from 1.15 on: our kernels in its trainers (`patch`), and PPO as one of them (`HydraPPOTrainer`).

TRL is an optional dependency (`pip install 'rlhf-engine[trl]'`); nothing outside this package imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhf_engine.integrations.trl.seam import Patch, patch

if TYPE_CHECKING:
    from rlhf_engine.integrations.trl.ppo import HydraPPOConfig, HydraPPOTrainer

__all__ = ["HydraPPOConfig", "HydraPPOTrainer", "Patch", "patch"]


def __getattr__(name: str) -> Any:
    # on demand: classes of TRL are made of classes of TRL, which `patch` alone need not import
    if name in ("HydraPPOConfig", "HydraPPOTrainer"):
        from rlhf_engine.integrations.trl import ppo

        return getattr(ppo, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
