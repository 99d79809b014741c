"""Online DPO behind TRL, on one base and without logits: `HydraOnlineDPOTrainer`.

Of `answers_per_prompt` answers of the present policy the best against the worst, by the total of the rewards (arXiv
2402.04792; loss of arXiv 2305.18290, or with `loss_type` ipo of arXiv 2310.12036). TRL is shown the first answer of
each, so that its reward metrics are means over the policy's answers. A prompt whose answers score the same teaches
nothing, and the loss is the mean over the other prompts. See `base` for sizes: a row of a micro-batch is a prompt, and
its two answers go through the base together.
"""

from __future__ import annotations

from typing import Any

import torch

from rlhf_engine.algorithms.base import Experience, MicroBatch
from rlhf_engine.hydra import PackedBatch
from rlhf_engine.hydra.supports import Supports
from rlhf_engine.integrations.trl import papers
from rlhf_engine.integrations.trl.base import HydraTrainer
from rlhf_engine.integrations.trl.config import HydraOnlineDPOConfig
from rlhf_engine.integrations.trl.supports import from_columns, to_columns


class HydraOnlineDPOTrainer(HydraTrainer):
    """Online DPO (arXiv 2402.04792): the best of several answers against the worst."""

    _name, _paper = "Hydra-Online-DPO", papers.ONLINE_DPO
    config_class = HydraOnlineDPOConfig

    @property
    def hidden(self) -> tuple[bool, ...]:
        """Further answers to each prompt, none of them greedy. See `HydraTrainer.hidden`."""
        return (False,) * (self.args.answers_per_prompt - 1)

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
        chosen = [(int(k), i) for i in at.tolist() for k in (best_N[i], worst_N[i])]
        pairs = [drawn[k][i] for k, i in chosen]
        prompts = [prompt for prompt in self._prompt_ids for _ in range(2)]
        device = self.accelerator.device
        batch = PackedBatch.from_lists(prompts, pairs, device=device, supports=self._supports_of(drawn, chosen))
        with self.accelerator.autocast():  # as the forward that learns
            scores = self.hydra.score(batch, ("actor", "reference"), temperature=self.temperature)
        assert scores.logprobs_M is not None
        assert scores.ref_logprobs_M is not None
        ids = torch.tensor([x for row in pairs for x in row], device=batch.device)
        keep_M = keep_N.repeat_interleave(2)[batch.sequence_of_M]

        def of_pairs(x_M: torch.Tensor) -> torch.Tensor:
            return batch.pad(x_M).view(len(shown), 2, -1)

        return {
            **{name: output[name] for name in ("prompt_ids", "prompt_mask")},
            "pair_ids": of_pairs(ids),
            "pair_mask": of_pairs(torch.ones_like(ids)).bool(),
            "of_old_logprobs_M": of_pairs(scores.logprobs_M),
            "of_ref_logprobs_M": of_pairs(scores.ref_logprobs_M),
            **{
                name: x if name == "support_lens" else x.view(len(shown), 2, -1)
                for name, x in to_columns(batch, of_pairs).items()
            },
            "keep": keep_N,
            "num_items_in_batch": self.accelerator.reduce(keep_M.sum(), reduction="sum"),
            "num_units_in_batch": self.accelerator.reduce(2 * keep_N.sum(), reduction="sum"),
        }

    def _supports_of(self, drawn: list[list[list[int]]], chosen: list[tuple[int, int]]) -> Supports | None:
        """Supports of some answers, by draw and prompt. drawn: all of them, in the order that they were drawn in."""
        if self._supports is None:
            return None
        answers = [ids for every in drawn for ids in every]
        batch = PackedBatch.from_lists(self._prompt_ids * len(drawn), answers, supports=self._supports)
        return batch.select([k * len(drawn[0]) + i for k, i in chosen]).supports

    def _prepare(
        self, mode: str, experience: Experience, keep_N: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Nothing of the answers that TRL is shown is learned from: the pairs come from all answers."""
        return {}, keep_N[experience.batch.sequence_of_M]

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        mode = "train" if self.model.training else "eval"
        # a process without a pair takes part with one that counts nothing, because others wait for its gradient
        counts = float(bool(inputs["keep"].any()))
        kept = inputs["keep"].nonzero()[:, 0] if counts else torch.zeros(1, dtype=torch.int64)
        mask, ids = inputs["pair_mask"][kept].flatten(0, 1), inputs["pair_ids"][kept].flatten(0, 1)
        prompts = [
            row[real.bool()].tolist()
            for row, real in zip(inputs["prompt_ids"][kept], inputs["prompt_mask"][kept], strict=True)
            for _ in range(2)
        ]
        answers = [row[real].tolist() for row, real in zip(ids, mask, strict=True)]
        columns = {name: x[kept].flatten(0, 1) for name, x in inputs.items() if name.startswith("support_")}
        supports = from_columns(columns, mask, self.hydra.backbone().n_words)
        of = {name.removeprefix("of_"): x for name, x in inputs.items() if name.startswith("of_")}
        micro = MicroBatch(
            batch=PackedBatch.from_lists(prompts, answers, device=mask.device, supports=supports),
            mask_M=torch.ones(int(mask.sum()), dtype=torch.bool, device=mask.device),
            n_tokens=self._denominator(inputs["num_items_in_batch"], mode),
            n_answers=2 * self._denominator(inputs["num_units_in_batch"] / 2, mode),
            **{name: x[kept].flatten(0, 1)[mask] for name, x in of.items()},
        )
        return self._loss_of(model, micro, mode, counts=counts)
