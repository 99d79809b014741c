"""Online DPO behind TRL, on one base and without logits: `HydraOnlineDPOTrainer`.

Of `answers_per_prompt` answers of the present policy the best against the worst, by the total of the rewards (arXiv
2402.04792; loss of arXiv 2305.18290, or with `loss_type` ipo of arXiv 2310.12036). TRL is shown the first answer of
each, so that its reward metrics are means over the policy's answers. A prompt whose answers score the same teaches
nothing, and the loss is the mean over the other prompts. See `base` for sizes: a row of a micro-batch is a prompt, and
its two answers go through the base together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from rlhf_engine.algorithms.online_dpo import dpo_loss
from rlhf_engine.hydra import LogprobLoss, PackedBatch
from rlhf_engine.integrations.trl import papers
from rlhf_engine.integrations.trl.base import Answers, HydraTrainer, Micro
from rlhf_engine.integrations.trl.config import HydraConfig


@dataclass
class HydraOnlineDPOConfig(HydraConfig):
    """GRPOConfig for pairs. beta: temperature of the loss."""

    beta: float = field(default=0.1, metadata={"help": "Temperature of the loss."})
    answers_per_prompt: int = field(default=2, metadata={"help": "Answers of which the best and the worst are taken."})
    loss_type: str = field(default="sigmoid", metadata={"help": "sigmoid or ipo."})

    def checks(self) -> dict[str, tuple[bool, str]]:
        return {
            **super().checks(),
            "beta": (self.beta > 0, "a number > 0"),
            "num_generations": (self.num_generations == 1, "1: answers_per_prompt says how many are drawn"),
            "answers_per_prompt": (self.answers_per_prompt >= 2, "at least 2"),
            "loss_type": (self.loss_type in ("sigmoid", "ipo"), "'sigmoid' or 'ipo'"),
        }


class HydraOnlineDPOTrainer(HydraTrainer):
    """The best of several answers against the worst."""

    _tag_names = ("trl", "rlhf-engine", "online-dpo")
    _name = "Hydra-Online-DPO"
    _paper = papers.ONLINE_DPO
    config_class = HydraOnlineDPOConfig

    @property
    def hidden(self) -> tuple[bool, ...]:  # type: ignore[override]  # of the base a constant, here of the configuration
        return (False,) * (self.args.answers_per_prompt - 1)

    def experience(self, answers: Answers) -> dict[str, torch.Tensor]:
        return {}

    def losses(self, micro: Micro) -> tuple[Any, ...]:
        raise NotImplementedError("pairs have a forward of their own")

    def combine(self, micro: Micro, results: tuple[Any, ...]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        raise NotImplementedError("pairs have a forward of their own")

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        shown = [self._answers.completion_tokens(i) for i in range(self._answers.n_sequences)]
        drawn = [shown, *self._hidden_ids]
        totals_KN = torch.stack([self._totals, *(totals for totals, _ in self._hidden_totals)])
        scored_KN = torch.stack([self._scored, *(scored for _, scored in self._hidden_totals)])
        if self.mask_truncated_completions:
            ends = set(self.eos_token_ids)
            ended = [[ids[-1] in ends for ids in answers] for answers in drawn]
            scored_KN &= torch.tensor(ended, device=scored_KN.device)
        best_N = totals_KN.masked_fill(~scored_KN, -torch.inf).argmax(0)
        worst_N = totals_KN.masked_fill(~scored_KN, torch.inf).argmin(0)
        at = torch.arange(len(shown), device=best_N.device)
        keep_N = (scored_KN.sum(0) >= 2) & (totals_KN[best_N, at] > totals_KN[worst_N, at])
        mode = "train" if self.model.training else "eval"
        self.note(mode, "pairs/tied_ratio", (~keep_N).float())
        pairs = [ids for i in at.tolist() for ids in (drawn[int(best_N[i])][i], drawn[int(worst_N[i])][i])]
        prompts = [prompt for prompt in self._prompt_ids for _ in range(2)]
        batch = PackedBatch.from_lists(prompts, pairs, device=self.accelerator.device)
        with self.accelerator.autocast():  # as the forward that learns
            ref = self.hydra.score(batch, ("reference",), temperature=self.temperature).ref_logprobs_M
        assert ref is not None
        ref_NC = batch.pad(ref)
        mask_NC = batch.pad(torch.ones_like(ref)).bool()
        ids_NC = batch.pad(torch.tensor([x for ids in pairs for x in ids], device=ref.device))
        n, width = len(shown), ref_NC.shape[1]
        return {
            **{name: output[name] for name in ("prompt_ids", "prompt_mask", "num_items_in_batch")},
            "pair_ids": ids_NC.view(n, 2, width),
            "pair_mask": mask_NC.view(n, 2, width),
            "pair_ref": ref_NC.view(n, 2, width),
            "keep": keep_N,
            "num_units_in_batch": self.accelerator.reduce(keep_N.sum(), reduction="sum"),
        }

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        mode = "train" if self.model.training else "eval"
        mask, keep = inputs["pair_mask"], inputs["keep"]
        prompts = [
            ids[real.bool()].tolist() for ids, real in zip(inputs["prompt_ids"], inputs["prompt_mask"], strict=True)
        ]
        batch = PackedBatch.from_lists(
            [prompt for prompt in prompts for _ in range(2)],
            [
                ids[real].tolist()
                for pair, reals in zip(inputs["pair_ids"], mask, strict=True)
                for ids, real in zip(pair, reals, strict=True)
            ],
            device=mask.device,
        )
        ref_M = inputs["pair_ref"][mask]
        n = self._denominator(inputs["num_units_in_batch"], mode)
        kept = [2 * i + j for i in keep.nonzero()[:, 0].tolist() for j in range(2)]

        def loss(logprobs_M: torch.Tensor) -> Any:
            rows_M, part = batch.select_completion_rows(kept), batch.select(kept)
            options = {"n_pairs": n, "beta": self.args.beta, "loss_type": self.args.loss_type}
            return dpo_loss(logprobs_M[rows_M], ref_M[rows_M], part, **options)

        def nothing(logprobs_M: torch.Tensor) -> Any:  # a gradient of 0, because other processes wait for one
            return _Nothing(0.0 * logprobs_M.sum(), logprobs_M.new_zeros(0), logprobs_M.new_zeros(0))

        output = LogprobLoss(loss=loss if kept else nothing, temperature=self.temperature)
        (found,) = self.forward(model, batch, (output,))
        self.require_finite("the loss is not finite", found.loss.detach())
        self.note(mode, "entropy", found.entropy)
        chosen, rejected = found.found.chosen_P, found.found.rejected_P
        for name, x in {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/accuracies": (chosen > rejected).float(),
            "rewards/margins": chosen - rejected,
        }.items():
            self.note(mode, name, x)  # of all processes; where none has a pair there is no line
        return found.loss


@dataclass(frozen=True)
class _Nothing:
    """What a loss of no pairs returns."""

    loss: torch.Tensor
    chosen_P: torch.Tensor
    rejected_P: torch.Tensor
