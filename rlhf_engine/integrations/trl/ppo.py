"""PPO behind TRL: `HydraPPOTrainer` is TRL's GRPOTrainer with a critic, on one base.

    trainer = HydraPPOTrainer(
        model="path/to/model",
        args=HydraPPOConfig(output_dir="ppo"),
        reward_funcs=reward,                 # functions, models as in TRL, `reward_model` for one on the same base
        train_dataset=prompts,
        peft_config=LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()

Log-probs of actor and reference, values and learned rewards come from one backbone forward. Advantages are by GAE. The
clipped losses of actor and critic share a forward. The critic is PEFT's adapter `critic`. A checkpoint's root
loads with plain PEFT, and `heads.safetensors` beside it has the value head. See `base` for sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from rlhf_engine.algorithms.ppo import advantages, token_rewards
from rlhf_engine.hydra import PolicyLoss, ValueLoss
from rlhf_engine.integrations.trl import papers
from rlhf_engine.integrations.trl.base import Answers, HydraTrainer, Micro
from rlhf_engine.integrations.trl.config import HydraConfig


@dataclass
class HydraPPOConfig(HydraConfig):
    """GRPOConfig with PPO's defaults, one answer per prompt, and what a critic needs.

    beta: coefficient of the KL to the reference in a token's reward. epsilon, epsilon_high: clipping of ratios.
    delta: largest ratio that a token of negative advantage counts with, as in GRPOConfig. entropy_coef: coefficient of
    the mean entropy per token.
    """

    reads = ("delta", "entropy_coef", "epsilon", "epsilon_high")

    loss_type: str = field(default="ppo", metadata={"help": "ppo, the only one."})
    gamma: float = field(default=1.0, metadata={"help": "Discount factor of the return."})
    lam: float = field(default=0.95, metadata={"help": "Lambda of generalised advantage estimation."})
    vf_coef: float = field(default=0.1, metadata={"help": "Weight of the value loss."})
    cliprange_value: float = field(
        default=0.2, metadata={"help": "Values are clipped to the old value plus or minus this."}
    )
    whiten_advantages: bool = field(default=True, metadata={"help": "Advantages with mean 0 and variance 1."})
    critic_learning_rate: float | None = field(
        default=None, metadata={"help": "Of critic and value head; none: as actor."}
    )

    def checks(self) -> dict[str, tuple[bool, str]]:
        return {
            **super().checks(),
            "loss_type": (self.loss_type == "ppo", "'ppo'"),
            "gamma": (0 <= self.gamma <= 1, "a number from 0 to 1"),
            "lam": (0 <= self.lam <= 1, "a number from 0 to 1"),
            "delta": (
                self.delta is None or self.delta >= 1 + (self.epsilon_high or self.epsilon),
                "None or a number >= 1 + epsilon_high",
            ),
            "vf_coef": (self.vf_coef >= 0, "a number >= 0"),
            "cliprange_value": (self.cliprange_value > 0, "a number > 0"),
            "critic_learning_rate": (
                self.critic_learning_rate is None or self.critic_learning_rate >= 0,
                "None or a number >= 0",
            ),
        }


class HydraPPOTrainer(HydraTrainer):
    """GRPOTrainer whose advantages come from a learned value, and whose losses are PPO's."""

    _tag_names = ("trl", "rlhf-engine", "ppo")
    _name = "Hydra-PPO"
    _paper = papers.HYDRA
    config_class = HydraPPOConfig
    has_critic = True

    def experience(self, answers: Answers) -> dict[str, torch.Tensor]:
        args, values_M = self.args, answers.values_M
        assert values_M is not None
        advantage_M, return_M = advantages(
            token_rewards(answers.kl_M, answers.totals_N, answers.batch, self.kl_coef),
            values_M,
            answers.batch,
            gamma=args.gamma,
            lam=args.lam,
            whiten_rewards=False,
            whiten_advantages=False,
        )
        if args.whiten_advantages:
            advantage_M = self._whiten(advantage_M, answers.keep_M)
        mode = "train" if self.model.training else "eval"
        self.note(mode, "value/mean", values_M)
        self.note(mode, "value/return", return_M)
        return {"advantages": advantage_M, "returns": return_M, "values": values_M}

    def _whiten(self, x_M: torch.Tensor, keep_M: torch.Tensor) -> torch.Tensor:
        """Mean 0 and variance 1 over the kept tokens of all processes."""
        mean, variance = self.moments(x_M[keep_M])
        return ((x_M.double() - mean) / (variance + 1e-8) ** 0.5).to(x_M.dtype)

    def losses(self, micro: Micro) -> tuple[Any, ...]:
        policy = PolicyLoss(
            old_logprob_M=micro.of["old_logprobs"],
            advantage_M=micro.of["advantages"],
            mask_M=micro.mask_M,
            denom=micro.n_tokens,
            clip_low=self.epsilon_low,
            clip_high=self.epsilon_high,
            dual_clip=self.args.delta,
            entropy_coef=self.args.entropy_coef,
            temperature=self.temperature,
        )
        value = ValueLoss(
            old_value_M=micro.of["values"],
            return_M=micro.of["returns"],
            mask_M=micro.mask_M,
            denom=micro.n_tokens,
            clip=self.args.cliprange_value,
        )
        return policy, value

    def combine(self, micro: Micro, results: tuple[Any, ...]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        policy, value = results
        to_means = micro.n_tokens / max(1, int(micro.mask_M.sum()))  # over this micro-batch alone
        told = {
            "policy_loss": policy.policy_loss,
            "value/loss": value.loss,
            "entropy": policy.entropy,
            "clip_ratio": policy.clip_fraction,
            "approx_kl": policy.approx_kl,
            "value/clip_ratio": value.clip_fraction,
        }
        return policy.loss + self.args.vf_coef * value.loss, {name: x * to_means for name, x in told.items()}
