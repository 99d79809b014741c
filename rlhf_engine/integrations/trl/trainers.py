"""Our trainers behind TRL by name: `HydraTrainer` with one algorithm each, its options and its paper."""

from __future__ import annotations

from rlhf_engine.integrations.trl import papers
from rlhf_engine.integrations.trl.base import HydraTrainer
from rlhf_engine.integrations.trl.config import (
    HydraBestOfNConfig,
    HydraGRPOConfig,
    HydraPPOConfig,
    HydraReinforceConfig,
    HydraRLOOConfig,
    ReMaxConfig,
)


class HydraPPOTrainer(HydraTrainer):
    """GRPOTrainer whose advantages come from a learned value, and whose losses are PPO's."""

    _name, _paper = "Hydra-PPO", papers.HYDRA
    config_class = HydraPPOConfig


class HydraReinforceTrainer(HydraTrainer):
    """REINFORCE with a learned value baseline."""

    _name, _paper = "Hydra-REINFORCE", papers.PERL
    config_class = HydraReinforceConfig


class ReMaxTrainer(HydraTrainer):
    """REINFORCE whose baseline is the score of the greedy answer."""

    _name, _paper = "ReMax", papers.REMAX
    config_class = ReMaxConfig


class HydraRLOOTrainer(HydraTrainer):
    """REINFORCE whose baseline is the mean of the other answers to the prompt."""

    _name, _paper = "Hydra-RLOO", papers.RLOO
    config_class = HydraRLOOConfig


class HydraGRPOTrainer(HydraTrainer):
    """GRPO: advantages within groups of answers, and PPO's clipped loss."""

    _name, _paper = "Hydra-GRPO", papers.GRPO
    config_class = HydraGRPOConfig


class HydraBestOfNTrainer(HydraTrainer):
    """The likelihood of the best of several answers."""

    _name, _paper = "Hydra-Best-of-N", papers.BEST_OF_N
    config_class = HydraBestOfNConfig
