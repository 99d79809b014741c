"""Behind TRL, from 1.15 on: our kernels in its trainers (`patch`), every algorithm and reward models.

TRL is an optional dependency (`pip install 'rlhf-engine[trl]'`); nothing outside this package imports it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rlhf_engine.integrations.trl.patching import Patch, patch

if TYPE_CHECKING:
    from rlhf_engine.integrations.trl.base import HydraTrainer
    from rlhf_engine.integrations.trl.config import (
        HydraBestOfNConfig,
        HydraConfig,
        HydraGRPOConfig,
        HydraOnlineDPOConfig,
        HydraPPOConfig,
        HydraReinforceConfig,
        HydraRLOOConfig,
        ReMaxConfig,
    )
    from rlhf_engine.integrations.trl.reward import PerlRewardConfig, PerlRewardTrainer
    from rlhf_engine.integrations.trl.trainers import (
        HydraBestOfNTrainer,
        HydraGRPOTrainer,
        HydraOnlineDPOTrainer,
        HydraPPOTrainer,
        HydraReinforceTrainer,
        HydraRLOOTrainer,
        ReMaxTrainer,
    )

__all__ = [
    "HydraBestOfNConfig", "HydraBestOfNTrainer", "HydraConfig", "HydraGRPOConfig", "HydraGRPOTrainer",
    "HydraOnlineDPOConfig", "HydraOnlineDPOTrainer", "HydraPPOConfig", "HydraPPOTrainer", "HydraRLOOConfig",
    "HydraRLOOTrainer", "HydraReinforceConfig", "HydraReinforceTrainer", "HydraTrainer", "Patch",
    "PerlRewardConfig", "PerlRewardTrainer", "ReMaxConfig", "ReMaxTrainer", "patch",
]  # fmt: skip
_MODULES = {"HydraTrainer": "base", "PerlRewardConfig": "reward", "PerlRewardTrainer": "reward"}
"""Modules of the names that are neither a config in `config` nor a trainer in `trainers`."""


def __getattr__(name: str) -> Any:
    # on demand: classes of TRL are made of classes of TRL, which `patch` alone need not import
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULES.get(name, "config" if name.endswith("Config") else "trainers")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
