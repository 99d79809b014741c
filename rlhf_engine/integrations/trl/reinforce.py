"""ReMax and RLOO behind TRL, on one base and without a critic: `ReMaxTrainer`, `HydraRLOOTrainer`.

    ReMax   A_t = r(x, a) − r(x, ā) − β Σ_{s≥t} KL_s     ā the greedy answer (arXiv 2310.10505)
    RLOO    A   = R − mean of the other answers' R        R = r(x, a) − β Σ_t KL_t (arXiv 2402.14740)

    L = −(1/n) Σ_i Σ_t A_{i,t} log π(a_{i,t})            n answers are learned from; those without a score are not

RLOO with `num_iterations` or minibatches clips the ratio of whole answers (`loss_type` proximal); see `base` for sizes,
and `rlhf_engine.algorithms` for the estimators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from rlhf_engine.algorithms import remax, rloo
from rlhf_engine.algorithms.policy_gradient import GradientLoss
from rlhf_engine.algorithms.sequences import spread
from rlhf_engine.errors import ConfigError
from rlhf_engine.hydra import LogprobLoss
from rlhf_engine.integrations.trl import papers
from rlhf_engine.integrations.trl.base import Answers, HydraTrainer, Micro
from rlhf_engine.integrations.trl.config import HydraConfig

_EPS = 1e-4
"""What RLOOTrainer adds to the deviation of advantages."""


@dataclass
class ReMaxConfig(HydraConfig):
    """GRPOConfig with one drawn answer per prompt; the greedy one comes on top and is not counted."""

    reads = ("entropy_coef",)

    loss_type: str = field(default="remax", metadata={"help": "remax, the only one."})

    def checks(self) -> dict[str, tuple[bool, str]]:
        once = self.num_iterations == 1 and self.steps_per_generation == self.gradient_accumulation_steps
        one_update = "one update per rollout, which has no ratio that would correct the others"
        return {
            **super().checks(),
            "loss_type": (self.loss_type == "remax", "'remax'"),
            "num_generations": (self.num_generations == 1, "1"),
            "num_iterations": (self.num_iterations == 1, f"1: {one_update}"),
            "steps_per_generation": (once or self.num_iterations != 1, f"gradient_accumulation_steps: {one_update}"),
        }


@dataclass
class HydraRLOOConfig(HydraConfig):
    """GRPOConfig with several answers per prompt, each the baseline of the others."""

    reads = ("entropy_coef", "epsilon", "epsilon_high")

    num_generations: int | None = field(default=4, metadata={"help": "Answers per prompt."})
    loss_type: str = field(
        default="proximal", metadata={"help": "proximal: the ratio of a whole answer is clipped; vanilla: it is not."}
    )
    normalize_advantages: bool = field(
        default=False, metadata={"help": "Advantages of a rollout with mean 0 and deviation 1."}
    )

    def checks(self) -> dict[str, tuple[bool, str]]:
        once = self.num_iterations == 1 and self.steps_per_generation == self.gradient_accumulation_steps
        unclipped = ("epsilon", "epsilon_high") if self.loss_type == "vanilla" else ()
        return {
            **super().checks(),
            **self.unread(*unclipped),
            "loss_type": (self.loss_type in ("proximal", "vanilla"), "'proximal' or 'vanilla'"),
            "num_generations": ((self.num_generations or 0) >= 2, "at least 2"),
            "steps_per_generation": (
                once or self.loss_type != "vanilla",
                "gradient_accumulation_steps for loss_type 'vanilla', which has no ratio to correct more updates",
            ),
        }


class _PolicyGradientTrainer(HydraTrainer):
    """−(1/n) Σ A log π."""

    def losses(self, micro: Micro) -> tuple[Any, ...]:
        def loss(logprobs_M: torch.Tensor) -> GradientLoss:
            weighted = micro.of["advantages"] * logprobs_M * micro.mask_M
            return GradientLoss(-weighted.sum() / micro.n_answers, None)

        return (self._output(loss, micro),)

    def _output(self, loss: Callable[[torch.Tensor], Any], micro: Micro) -> LogprobLoss:
        """That loss with the entropy bonus, a mean over tokens."""
        return LogprobLoss(
            loss=loss,
            temperature=self.temperature,
            entropy_coef=self.args.entropy_coef,
            denom=micro.n_tokens,
            mask_M=micro.mask_M,
        )

    def combine(self, micro: Micro, results: tuple[Any, ...]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        (found,) = results
        n = max(1, int(micro.mask_M.sum()))
        log_ratio_M = (found.logprob - micro.of["old_logprobs"]) * micro.mask_M
        told = {
            # over this micro-batch alone
            "policy_loss": found.found.loss * (micro.n_answers / max(1, int(micro.keep_N.sum()))),
            "entropy": (found.entropy * micro.mask_M).sum() / n,
            "approx_kl": (torch.expm1(log_ratio_M) - log_ratio_M).sum() / n,
        }
        return found.loss, told


class ReMaxTrainer(_PolicyGradientTrainer):
    """REINFORCE whose baseline is the score of the greedy answer."""

    _tag_names = ("trl", "rlhf-engine", "remax")
    _name = "ReMax"
    _paper = papers.REMAX
    config_class = ReMaxConfig
    hidden = (True,)

    def experience(self, answers: Answers) -> dict[str, torch.Tensor]:
        ((greedy_N, _),) = self._hidden_totals
        self.note("train" if self.model.training else "eval", "reward/greedy", greedy_N)
        advantages_M = remax.advantages(answers.totals_N, greedy_N, answers.kl_M, answers.batch, beta=self.kl_coef)
        return {"advantages": advantages_M}

    def usable(self, keep_N: torch.Tensor) -> torch.Tensor:
        """An answer whose greedy twin has no score has no baseline."""
        ((_, scored_N),) = self._hidden_totals
        return keep_N & scored_N


class HydraRLOOTrainer(_PolicyGradientTrainer):
    """REINFORCE whose baseline is the mean of the other answers to the prompt."""

    _tag_names = ("trl", "rlhf-engine", "rloo")
    _name = "Hydra-RLOO"
    _paper = papers.RLOO
    config_class = HydraRLOOConfig

    @property
    def _answers_per_prompt(self) -> int:
        return int(self.num_generations if self.model.training else self.num_generations_eval)

    def experience(self, answers: Answers) -> dict[str, torch.Tensor]:
        groups_N = torch.arange(answers.batch.n_sequences, device=answers.totals_N.device) // self._answers_per_prompt
        kept = answers.keep_N.nonzero()[:, 0]
        returns_N = rloo.returns(answers.totals_N, answers.kl_M, answers.batch, beta=self.kl_coef)
        advantages_N = torch.zeros_like(returns_N)
        advantages_N[kept] = rloo.leave_one_out(returns_N[kept], groups_N[kept])
        if self.args.normalize_advantages:
            mean, variance = self.moments(advantages_N[kept])
            advantages_N[kept] = (advantages_N[kept] - mean) / (variance**0.5 + _EPS)
        return {"advantages": spread(advantages_N, answers.batch)}

    def usable(self, keep_N: torch.Tensor) -> torch.Tensor:
        """An answer without another one to compare it with teaches nothing."""
        k, n = self._answers_per_prompt, len(keep_N)
        if n % k:
            raise ConfigError(
                f"num_generations: expected all answers to a prompt on one process, got {n} answers in groups of {k}"
            )
        grouped = keep_N.view(-1, k)
        return (grouped & (grouped.sum(1, keepdim=True) >= 2)).view(-1)

    def losses(self, micro: Micro) -> tuple[Any, ...]:
        if self.args.loss_type == "vanilla":
            return super().losses(micro)
        first = torch.tensor(micro.batch.completion_cu[:-1], device=micro.mask_M.device)

        def loss(logprobs_M: torch.Tensor) -> rloo.SequenceLoss:
            return rloo.proximal_loss(
                logprobs_M,
                micro.of["old_logprobs"],
                micro.of["advantages"][first] * micro.keep_N,
                micro.batch,
                n_answers=micro.n_answers,
                clip_low=self.epsilon_low,
                clip_high=self.epsilon_high,
            )

        return (self._output(loss, micro),)
