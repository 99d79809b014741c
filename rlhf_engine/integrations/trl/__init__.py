"""Behind TRL, from 1.15 on: our kernels in its trainers (`patch`), and PPO, ReMax, RLOO, online DPO and reward models.

TRL is an optional dependency (`pip install 'rlhf-engine[trl]'`); nothing outside this package imports it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rlhf_engine.integrations.trl.patching import Patch, patch

if TYPE_CHECKING:
    from rlhf_engine.integrations.trl.online_dpo import HydraOnlineDPOConfig, HydraOnlineDPOTrainer
    from rlhf_engine.integrations.trl.ppo import HydraPPOConfig, HydraPPOTrainer
    from rlhf_engine.integrations.trl.reinforce import HydraRLOOConfig, HydraRLOOTrainer, ReMaxConfig, ReMaxTrainer
    from rlhf_engine.integrations.trl.reward import PerlRewardConfig, PerlRewardTrainer

__all__ = [
    "HydraOnlineDPOConfig",
    "HydraOnlineDPOTrainer",
    "HydraPPOConfig",
    "HydraPPOTrainer",
    "HydraRLOOConfig",
    "HydraRLOOTrainer",
    "Patch",
    "PerlRewardConfig",
    "PerlRewardTrainer",
    "ReMaxConfig",
    "ReMaxTrainer",
    "patch",
]
_MODULES = {
    "HydraPPO": "ppo",
    "HydraOnlineDPO": "online_dpo",
    "HydraRLOO": "reinforce",
    "ReMax": "reinforce",
    "PerlReward": "reward",
}


def __getattr__(name: str) -> Any:
    # on demand: classes of TRL are made of classes of TRL, which `patch` alone need not import
    module = _MODULES.get(name.removesuffix("Config").removesuffix("Trainer"))
    if module is not None and name in __all__:
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
