"""The fused policy loss at given log-probs, for tests that have numbers in place of a model."""

import torch
from rlhf_kernels.ppo_loss import PpoLossOutputs, ppo_loss

from rlhf_engine.hydra import PolicyLoss


def at_logprobs(request: PolicyLoss, logprobs_M: torch.Tensor) -> PpoLossOutputs:
    """What a request would return if the model gave its tokens these log-probs; without an entropy bonus."""
    assert request.entropy_coef == 0
    return ppo_loss(
        logprobs_M, request.old_logprob_M, request.advantage_M, request.mask_M, denom=request.denom,
        clip_low=request.clip_low, clip_high=request.clip_high, ref_logprob=request.ref_logprob_M, kl=request.kl,
        kl_coef=request.kl_coef,
    )  # fmt: skip
