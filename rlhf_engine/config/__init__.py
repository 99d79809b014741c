"""Options of every command, as flat frozen dataclasses made of sections; names as in TRL where TRL has the option.

    TrainConfig     rlhf-engine train      RL by any algorithm and method, Hydra-PPO by default
    SFTConfig       rlhf-engine sft        joint language-model and reward training
    RewardConfig    rlhf-engine reward     a reward model on an adapter slot and a head, or whole
    GenerateConfig  rlhf-engine generate   answers of a model with or without an adapter
    EvaluateConfig  rlhf-engine evaluate   several models on the same prompts, side by side
    InitConfig      rlhf-engine init       a folder to begin with
    DemoConfig      rlhf-engine demo       everything on a small built-in task
    BenchConfig     rlhf-engine bench      how fast, how large, how exact the kernels are
    ReportConfig    rlhf-engine report     a page of one run or several
    PlanConfig      rlhf-engine plan       how much memory and time a run will take, before anything is downloaded

`parse_config(cls, argv)` reads flags and `--config`.
"""

from rlhf_engine.config.commands import (
    CARDS,
    BenchConfig,
    DemoConfig,
    EvaluateConfig,
    ExportConfig,
    GenerateConfig,
    InitConfig,
    PlanConfig,
    ReportConfig,
)
from rlhf_engine.config.parser import parse_config, parse_size
from rlhf_engine.config.run import Kernels
from rlhf_engine.config.supervised import RewardConfig, SFTConfig
from rlhf_engine.config.train import Method, TrainConfig

__all__ = [
    "CARDS",
    "BenchConfig",
    "DemoConfig",
    "EvaluateConfig",
    "ExportConfig",
    "GenerateConfig",
    "InitConfig",
    "Kernels",
    "Method",
    "PlanConfig",
    "ReportConfig",
    "RewardConfig",
    "SFTConfig",
    "TrainConfig",
    "parse_config",
    "parse_size",
]
