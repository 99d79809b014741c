"""Rollouts: continuous batching over a paged cache, on the backbone and adapter slots that train."""

from rlhf_engine.rollout.engine import RolloutEngine
from rlhf_engine.rollout.generate import generate, generate_requests
from rlhf_engine.rollout.request import (
    EngineOptions,
    PromptBatch,
    Request,
    Rollout,
    RolloutStats,
    SamplingConfig,
)
from rlhf_engine.rollout.rows import AnswerRow

__all__ = [
    "AnswerRow", "EngineOptions", "PromptBatch", "Request", "Rollout", "RolloutEngine", "RolloutStats",
    "SamplingConfig", "generate", "generate_requests",
]  # fmt: skip
