"""The Hydra model: roles, adapter slots, lanes and heads on one frozen backbone."""

from rlhf_engine.hydra.batch import PackedBatch
from rlhf_engine.hydra.gate import SlotConfig
from rlhf_engine.hydra.model import HydraModel, Scores
from rlhf_engine.hydra.outputs import (
    HiddenStates,
    LmLoss,
    LogprobLoss,
    LogprobPair,
    Logprobs,
    Output,
    PairwiseRewardLoss,
    PointwiseRewardLoss,
    PolicyLoss,
    Rewards,
    ValueLoss,
    Values,
)
from rlhf_engine.hydra.persist import load_pretrained, save_pretrained
from rlhf_engine.hydra.roles import (
    METHODS,
    OFF,
    RoleSpec,
    hydra_roles,
)

__all__ = [
    "METHODS", "OFF", "HiddenStates", "HydraModel", "LmLoss", "LogprobLoss", "LogprobPair", "Logprobs", "Output",
    "PackedBatch", "PairwiseRewardLoss", "PointwiseRewardLoss", "PolicyLoss", "Rewards", "RoleSpec", "Scores",
    "SlotConfig", "ValueLoss", "Values", "hydra_roles", "load_pretrained", "save_pretrained",
]  # fmt: skip
