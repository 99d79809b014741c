"""Generation with a KV cache in the actor's lane."""

from rlhf_engine.rollout.generate import Rollout, SamplingConfig, check_prompts, generate

__all__ = ["Rollout", "SamplingConfig", "check_prompts", "generate"]
