"""Options of every command, as flat frozen dataclasses made of sections; names as in TRL where TRL has the option.

`parse_config(cls, argv)` reads flags and `--config`.
"""

from rlhf_engine.config.commands import (
    BenchConfig,
    DemoConfig,
    DoctorConfig,
    EvaluateConfig,
    ExportConfig,
    GenerateConfig,
    InitConfig,
    PlanConfig,
    ReportConfig,
    ServeConfig,
)
from rlhf_engine.config.parser import parse_config
from rlhf_engine.config.run import Kernels
from rlhf_engine.config.supervised import RewardConfig, SFTConfig
from rlhf_engine.config.train import Method, TrainConfig

__all__ = [
    "BenchConfig", "DemoConfig", "DoctorConfig", "EvaluateConfig", "ExportConfig", "GenerateConfig", "InitConfig",
    "Kernels", "Method", "PlanConfig", "ReportConfig", "RewardConfig", "SFTConfig",
    "ServeConfig", "TrainConfig", "parse_config",
]  # fmt: skip
