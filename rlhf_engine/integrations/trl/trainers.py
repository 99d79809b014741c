"""Our trainers behind TRL by name: `HydraTrainer` with one algorithm each, its options and its paper.

Online DPO learns from pairs: of `answers_per_prompt` answers of the present policy the best against the worst, by the
total of the rewards. TRL is shown the first answer of each, so that its reward metrics are means over the policy's
answers. A prompt whose answers score the same teaches nothing, and the loss is the mean over the other prompts. A row
of a micro-batch is a prompt, and its two answers go through the base together.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from rlhf_engine.algorithms.base import Experience
from rlhf_engine.hydra import PackedBatch
from rlhf_engine.integrations.trl.base import HydraTrainer
from rlhf_engine.integrations.trl.config import (
    HydraBestOfNConfig,
    HydraGRPOConfig,
    HydraOnlineDPOConfig,
    HydraPPOConfig,
    HydraReinforceConfig,
    HydraRLOOConfig,
    ReMaxConfig,
)
from rlhf_engine.integrations.trl.rollouts import in_rows, to_columns


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
        batches, totals, scored = zip((self._answers, self._totals, self._scored), *self._hidden, strict=True)
        totals_KN, scored_KN = torch.stack(totals), torch.stack(scored)
        if self.mask_truncated_completions:
            ends = set(self.eos_token_ids)
            ended = [[x.completion_tokens(i)[-1] in ends for i in range(x.n_sequences)] for x in batches]
            scored_KN &= torch.tensor(ended, device=scored_KN.device)
        best_N = totals_KN.masked_fill(~scored_KN, -torch.inf).argmax(0)
        worst_N = totals_KN.masked_fill(~scored_KN, torch.inf).argmin(0)
        n = len(best_N)
        at = torch.arange(n, device=best_N.device)
        keep_N = (scored_KN.sum(0) >= 2) & (totals_KN[best_N, at] > totals_KN[worst_N, at])
        mode = "train" if self.model.training else "eval"
        self._note(mode, "pairs/tied_ratio", (~keep_N).float())
        chosen = [int(k) * n + i for i in at.tolist() for k in (best_N[i], worst_N[i])]
        batch = PackedBatch.concat(batches).select(chosen)
        with self.accelerator.autocast():  # as the forward that learns
            scores = self.hydra.score(batch, ("actor", "reference"), temperature=self.temperature)
        assert scores.logprobs_M is not None
        assert scores.ref_logprobs_M is not None
        keep_M = keep_N.repeat_interleave(2)[batch.sequence_of_M]
        ids = [torch.tensor(batch.completion_tokens(i), device=batch.device) for i in range(2 * n)]
        rows = functools.partial(in_rows, batch)
        columns = {
            "completion_ids": pad_sequence(ids, batch_first=True),
            "of_old_logprobs_M": rows(scores.logprobs_M),
            "of_ref_logprobs_M": rows(scores.ref_logprobs_M),
            **to_columns(batch, rows),
        }
        return {
            **{name: output[name] for name in ("prompt_ids", "prompt_mask")},
            **{f"pair_{name}": x.view(n, 2, -1) for name, x in columns.items()},
            "keep": keep_N,
            "num_items_in_batch": self.accelerator.reduce(keep_M.sum(), reduction="sum"),
            "num_units_in_batch": self.accelerator.reduce(2 * keep_N.sum(), reduction="sum"),
        }

    def _prepare(
        self, mode: str, experience: Experience, keep_N: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Nothing of the answers that TRL is shown is learned from: the pairs come from all answers."""
        return {}, keep_N[experience.batch.sequence_of_M]

    def _compute_loss(self, model: Any, inputs: dict[str, Any], **options: Any) -> torch.Tensor:
        # a process without a pair takes part with one that counts nothing, because others wait for its gradient
        counts = float(bool(inputs["keep"].any()))
        kept = inputs["keep"].nonzero()[:, 0] if counts else torch.zeros(1, dtype=torch.int64)
        pairs = {name.removeprefix("pair_"): x for name, x in inputs.items() if name.startswith("pair_")}
        answers = {name: x[kept].flatten(0, 1) for name, x in pairs.items()}
        prompts = {name: inputs[name][kept].repeat_interleave(2, 0) for name in ("prompt_ids", "prompt_mask")}
        rows = {**inputs, **prompts, **answers, "loss_mask": answers["answer_mask"]}
        return super()._compute_loss(model, rows, counts=counts)
