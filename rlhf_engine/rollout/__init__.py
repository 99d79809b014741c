"""Rollouts: continuous batching over a paged cache, on the backbone and adapter slots that train."""

from rlhf_engine.rollout.engine import EngineOptions, RolloutEngine
from rlhf_engine.rollout.generate import generate, generate_requests
from rlhf_engine.rollout.request import (
    PromptBatch,
    Request,
    Rollout,
    RolloutStats,
    SamplingConfig,
    check_prompts,
)
from rlhf_engine.rollout.rows import AnswerRow

__all__ = [
    "AnswerRow",
    "EngineOptions",
    "PromptBatch",
    "Request",
    "Rollout",
    "RolloutEngine",
    "RolloutStats",
    "SamplingConfig",
    "check_prompts",
    "generate",
    "generate_requests",
]
