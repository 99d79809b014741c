"""Our trainers behind TRL by name: `HydraTrainer` with one algorithm each, its options and its paper.

Online DPO learns from pairs: of `answers_per_prompt` answers of the present policy the best against the worst, by the
total of the rewards. TRL is shown the first answer of each, so that its reward metrics are means over the policy's
answers. A prompt whose answers score the same teaches nothing, and the loss is the mean over the other prompts. A row
of a micro-batch is a prompt, and its two answers go through the base together.
"""

from __future__ import annotations

from typing import Any

import torch

from rlhf_engine.algorithms.base import Experience
from rlhf_engine.hydra import PackedBatch
from rlhf_engine.hydra.supports import Supports
from rlhf_engine.integrations.trl.base import HydraTrainer, to_columns
from rlhf_engine.integrations.trl.config import (
    HydraBestOfNConfig,
    HydraGRPOConfig,
    HydraOnlineDPOConfig,
    HydraPPOConfig,
    HydraReinforceConfig,
    HydraRLOOConfig,
    ReMaxConfig,
)


def _paper(arxiv: str, title: str, authors: str) -> dict[str, str]:
    """A paper that model cards cite, as TRL's card wants it. arxiv: its number, which begins with the year."""
    year, surname = f"20{arxiv[:2]}", authors.partition(" and ")[0].split()[-1]
    key = f"{surname}{year}{title.split()[0].rstrip(':')}".lower()
    fields = {"title": f"{{{title}}}", "author": authors, "year": year, "eprint": arxiv, "archivePrefix": "arXiv"}
    lines = [f"    {name:<13} = {{{value}}}," for name, value in fields.items()]
    return {"title": title, "id": arxiv, "citation": "\n".join([f"@article{{{key},", *lines, "}"])}


HYDRA = _paper(
    "2309.00754",
    "Efficient RLHF: Reducing the Memory Usage of PPO",
    "Michael Santacroce and Yadong Lu and Han Yu and Yuanzhi Li and Yelong Shen",
)
REMAX = _paper(
    "2310.10505",
    "ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning Large Language Models",
    "Ziniu Li and Tian Xu and Yushun Zhang and Zhihang Lin and Yang Yu and Ruoyu Sun and Zhi-Quan Luo",
)
RLOO = _paper(
    "2402.14740",
    "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs",
    "Arash Ahmadian and Chris Cremer and others",
)
ONLINE_DPO = _paper(
    "2402.04792", "Direct Language Model Alignment from Online AI Feedback", "Shangmin Guo and Biao Zhang and others"
)
PERL = _paper(
    "2403.10704",
    "PERL: Parameter Efficient Reinforcement Learning from Human Feedback",
    "Hakim Sidahmed and Samrat Phatale and others",
)
GRPO = _paper(
    "2402.03300",
    "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
    "Zhihong Shao and Peiyi Wang and others",
)
BEST_OF_N = _paper(
    "2009.01325", "Learning to summarize from human feedback", "Nisan Stiennon and Long Ouyang and others"
)


class HydraPPOTrainer(HydraTrainer):
    """PPO with a learned value (Hydra-RLHF, arXiv 2309.00754), behind GRPOTrainer."""

    _name, _paper = "Hydra-PPO", HYDRA
    config_class = HydraPPOConfig


class HydraReinforceTrainer(HydraTrainer):
    """REINFORCE with a learned value baseline (PERL, arXiv 2403.10704)."""

    _name, _paper = "Hydra-REINFORCE", PERL
    config_class = HydraReinforceConfig


class ReMaxTrainer(HydraTrainer):
    """REINFORCE whose baseline is the score of the greedy answer (ReMax, arXiv 2310.10505)."""

    _name, _paper = "ReMax", REMAX
    config_class = ReMaxConfig


class HydraRLOOTrainer(HydraTrainer):
    """REINFORCE whose baseline is the mean of the other answers to the prompt (RLOO, arXiv 2402.14740)."""

    _name, _paper = "Hydra-RLOO", RLOO
    config_class = HydraRLOOConfig


class HydraGRPOTrainer(HydraTrainer):
    """GRPO (arXiv 2402.03300): advantages within groups of answers, and PPO's clipped loss."""

    _name, _paper = "Hydra-GRPO", GRPO
    config_class = HydraGRPOConfig


class HydraBestOfNTrainer(HydraTrainer):
    """Likelihood of the best of several answers (arXiv 2009.01325)."""

    _name, _paper = "Hydra-Best-of-N", BEST_OF_N
    config_class = HydraBestOfNConfig


class HydraOnlineDPOTrainer(HydraTrainer):
    """Online DPO (arXiv 2402.04792; loss of 2305.18290, with `loss_type` ipo of 2310.12036): best against worst."""

    _name, _paper = "Hydra-Online-DPO", ONLINE_DPO
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
        self._note(mode, "pairs/tied_ratio", (~keep_N).float())
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

    def _compute_loss(self, model: Any, inputs: dict[str, Any], **options: Any) -> torch.Tensor:
        # a process without a pair takes part with one that counts nothing, because others wait for its gradient
        counts = float(bool(inputs["keep"].any()))
        kept = inputs["keep"].nonzero()[:, 0] if counts else torch.zeros(1, dtype=torch.int64)
        columns = {n: x for n, x in inputs.items() if n.startswith(("of_", "support_"))}
        columns |= {"completion_ids": inputs["pair_ids"], "answer_mask": inputs["pair_mask"]}
        answers = {name: x[kept].flatten(0, 1) for name, x in columns.items()}
        prompts = {name: inputs[name][kept].repeat_interleave(2, 0) for name in ("prompt_ids", "prompt_mask")}
        rows = {**inputs, **prompts, **answers, "loss_mask": answers["answer_mask"]}
        return super()._compute_loss(model, rows, counts=counts)
