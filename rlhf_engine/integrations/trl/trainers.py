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
    """PPO with a learned value (Hydra-RLHF, arXiv 2309.00754), behind GRPOTrainer."""

    _name, _paper = "Hydra-PPO", papers.HYDRA
    config_class = HydraPPOConfig


class HydraReinforceTrainer(HydraTrainer):
    """REINFORCE with a learned value baseline (PERL, arXiv 2403.10704)."""

    _name, _paper = "Hydra-REINFORCE", papers.PERL
    config_class = HydraReinforceConfig


class ReMaxTrainer(HydraTrainer):
    """REINFORCE whose baseline is the score of the greedy answer (ReMax, arXiv 2310.10505)."""

    _name, _paper = "ReMax", papers.REMAX
    config_class = ReMaxConfig


class HydraRLOOTrainer(HydraTrainer):
    """REINFORCE whose baseline is the mean of the other answers to the prompt (RLOO, arXiv 2402.14740)."""

    _name, _paper = "Hydra-RLOO", papers.RLOO
    config_class = HydraRLOOConfig


class HydraGRPOTrainer(HydraTrainer):
    """GRPO (arXiv 2402.03300): advantages within groups of answers, and PPO's clipped loss."""

    _name, _paper = "Hydra-GRPO", papers.GRPO
    config_class = HydraGRPOConfig


class HydraBestOfNTrainer(HydraTrainer):
    """Likelihood of the best of several answers (arXiv 2009.01325)."""

    _name, _paper = "Hydra-Best-of-N", papers.BEST_OF_N
    config_class = HydraBestOfNConfig
