"""rlhf-engine: RLHF on one frozen backbone. Actor, critic, reference and reward are adapter slots and heads on it.

The names of the Python guide are here, too: `from rlhf_engine import HydraModel`. Each is imported when it is first
used, so that `import rlhf_engine` imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names for type checkers; a test compares the two lists
    from rlhf_engine.algorithms.base import Algorithm as Algorithm
    from rlhf_engine.algorithms.ppo import advantages as advantages, token_rewards as token_rewards
    from rlhf_engine.algorithms.sequences import whitened as whitened
    from rlhf_engine.config import SFTConfig as SFTConfig, TrainConfig as TrainConfig
    from rlhf_engine.data.tokenize import (
        encode_prompt as encode_prompt,
        eos_token_ids as eos_token_ids,
        load_tokenizer as load_tokenizer,
    )
    from rlhf_engine.errors import ConfigError as ConfigError, EngineError as EngineError
    from rlhf_engine.hydra import (
        HydraModel as HydraModel,
        PackedBatch as PackedBatch,
        PolicyLoss as PolicyLoss,
        RoleSpec as RoleSpec,
        SlotConfig as SlotConfig,
        ValueLoss as ValueLoss,
        hydra_roles as hydra_roles,
        load_pretrained as load_pretrained,
        save_pretrained as save_pretrained,
    )
    from rlhf_engine.integrations.peft import fuse_lora as fuse_lora
    from rlhf_engine.rollout import (
        EngineOptions as EngineOptions,
        Request as Request,
        RolloutEngine as RolloutEngine,
        SamplingConfig as SamplingConfig,
    )
    from rlhf_engine.rollout.generate import generate as generate
    from rlhf_engine.training.rl import RlPolicy as RlPolicy, RlTrainer as RlTrainer
    from rlhf_engine.training.run import Policy as Policy
    from rlhf_engine.training.sft import SftTrainer as SftTrainer

    __version__: str

_NAMES = {
    "algorithms.base": ("Algorithm",),
    "algorithms.sequences": ("whitened",),
    "algorithms.ppo": ("advantages", "token_rewards"),
    "config": ("SFTConfig", "TrainConfig"),
    "data.tokenize": ("encode_prompt", "eos_token_ids", "load_tokenizer"),
    "errors": ("ConfigError", "EngineError"),
    "hydra": (
        *("HydraModel", "PackedBatch", "PolicyLoss", "RoleSpec", "SlotConfig", "ValueLoss"),
        *("hydra_roles", "load_pretrained", "save_pretrained"),
    ),
    "integrations.peft": ("fuse_lora",),
    "rollout": ("EngineOptions", "Request", "RolloutEngine", "SamplingConfig"),
    "rollout.generate": ("generate",),
    "training.rl": ("RlPolicy", "RlTrainer"),
    "training.run": ("Policy",),
    "training.sft": ("SftTrainer",),
}
"""Module below this package → the names that it lends to the package."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
_NOT_INSTALLED = "0.0+unknown"
"""Version of a checkout that is imported without being installed: git's tags are read when the package is built."""

__all__ = ["__version__", *sorted(_MODULES)]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _version()
    elif name in _MODULES:
        value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_nearest(name)}")
    globals()[name] = value  # the next use costs nothing
    return value


def __dir__() -> list[str]:
    return list(__all__)


def _version() -> str:
    """Version in the metadata of the installed package."""
    import importlib.metadata  # takes as long as everything else that `rlhf-engine --help` does

    try:
        return importlib.metadata.version("rlhf-engine")
    except importlib.metadata.PackageNotFoundError:
        return _NOT_INSTALLED


def _nearest(name: str) -> str:
    import difflib

    close = difflib.get_close_matches(name, __all__, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
