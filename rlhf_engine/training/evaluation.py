"""Looking at a policy: answers with their scores, the KL to the reference, evaluations, and samples for the eye."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rlhf_engine.data import PromptSet
from rlhf_engine.devices import share
from rlhf_engine.io import writing
from rlhf_engine.rollout import PromptBatch, Rollout
from rlhf_engine.runs.folder import SAMPLES_FILE, SAMPLES_LOG
from rlhf_engine.runs.metrics import SampleLog, Samples, write_atomic
from rlhf_engine.runs.text import samples_markdown
from rlhf_engine.scoring.experience import as_replies, decode_answers
from rlhf_engine.scoring.rewards import mean_or_none

if TYPE_CHECKING:
    from rlhf_engine.training.rl import RlTrainer

_SAMPLES = 4  # prompts whose answers go into the report


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Answers with what they scored, for samples and evaluation."""

    prompts: list[str]  # prompts as text
    completions: list[str]  # answers as text
    scores: list[float | None]  # score of each answer; None for one without
    rollout: Rollout  # the answers as tokens
    logged: dict[str, list[float]]  # values that reward functions logged, by metric


class Evaluator:
    """Answers of the present policy outside of its training; each rank answers a share of the held-out prompts."""

    def __init__(self, run: RlTrainer) -> None:
        """Take a run whose policy, rollouts and data are there."""
        self._run, self._samples = run, SampleLog(run.output / SAMPLES_LOG)

    def answer(
        self,
        prompts: PromptSet,
        indices: list[int],
        *,
        role: str = "actor",
        seed: int = 0,
        sample_ids: list[int] | None = None,
    ) -> Answers:
        """Draw one answer per prompt, keyed by seed and `sample_ids`; scores are without a penalty for no end."""
        self._run.rollouts.sync(self._run.policy.state.policy_version)
        data = prompts.conversations(indices) if self._run.config.converses else ()
        asked = PromptBatch.of(indices, prompts.ids, generations=1, data=data)
        asked = dataclasses.replace(asked, sample_ids=tuple(sample_ids or asked.sample_ids))
        with self._run.whole_base():
            rollout = self._run.rollouts.generate(asked, self._run.sampling(seed), role=role)
            learned = self._run.scorer.uses_reward_model
            rewards_N = self._run.policy.model.score(rollout.batch, ("reward",)).rewards_N if learned else None
        texts, ids = decode_answers(self._run.tokenizer, rollout.batch)
        written, replies = as_replies(self._run.tokenizer, rollout, prompts.written(indices), texts)
        finished = (True,) * len(indices)
        scored = self._run.scorer(
            written, replies, ids, prompts.columns(indices), finished, rewards_N, rollout.environment_rewards
        )
        shown = [prompts.prompts[i] for i in indices]
        if rollout.talks is not None:  # prompts with what `reset` has added
            shown = [str(self._run.tokenizer.decode(rollout.batch.prompt_tokens(i))) for i in range(len(indices))]
            texts = [talk.text for talk in rollout.talks]
        return Answers(prompts=shown, completions=texts, scores=scored.totals, rollout=rollout, logged=scored.logged)

    def kl_to_reference(self, rollout: Rollout) -> float:
        """Mean over answers of Σ_t exact KL(actor ‖ reference), in nats per answer."""
        return float(self._kl_sum(rollout) / rollout.batch.n_sequences)

    def _kl_sum(self, rollout: Rollout) -> torch.Tensor:
        with self._run.whole_base():
            scores = self._run.policy.model.score(
                rollout.batch, ("actor", "reference"), temperature=self._run.policy.config.temperature, exact_kl=True
            )
        assert scores.kl_M is not None
        return scores.kl_M.sum()

    def evaluate(self) -> dict[str, float]:
        """Answer the held-out prompts: exact KL in nats per answer, mean score, means of what functions logged."""
        assert self._run.eval_set is not None
        world, n = self._run.policy.world, len(self._run.eval_set.rows)
        own = list(share(n, world.rank, world.size))
        with self._run.whole_base():
            with world.together("evaluation"):
                values = self._evaluate(own)
            shares = world.gather(values)
        if world.is_main and not any(ended for _, _, ended in shares):
            most = self._run.policy.config.max_completion_length
            warnings.warn(
                f"max_completion_length: no answer to a held-out prompt ended within {most} tokens", stacklevel=2
            )
        metrics = {"eval/kl": float(torch.tensor([kl for _, kl, _ in shares]).sum() / n)}
        for name in dict.fromkeys(name for values, _, _ in shares for name in values):
            mean = mean_or_none([number for values, _, _ in shares for number in values.get(name, ())])
            metrics |= {} if mean is None else {f"eval/{name}": mean}
        return metrics

    def _evaluate(self, indices: list[int]) -> tuple[dict[str, Sequence[float | None]], float, bool]:
        """Scores and logged values of answers to held-out prompts, the sum of their KL, and whether any ended."""
        assert self._run.eval_set is not None
        if not indices:  # fewer prompts than ranks
            return {}, 0.0, False
        seed = self._run.policy.config.seed
        answers = self.answer(self._run.eval_set, indices, seed=seed, sample_ids=indices)
        scores: dict[str, Sequence[float | None]] = {**answers.logged, "reward": answers.scores}
        return scores, float(self._kl_sum(answers.rollout)), any(answers.rollout.finished)

    def forget_samples_from(self, step: int) -> None:
        """Drop the samples that an earlier process has noted of a step and later ones."""
        self._samples.drop_from(step)

    def note_samples(self) -> None:
        """Answer the first few prompts, held-out ones if there are any, and note the answers in the log."""
        config, step = self._run.policy.config, self._run.policy.state.step
        prompts = self._run.eval_set or self._run.train_set
        indices = list(range(min(_SAMPLES, len(prompts.rows))))
        answers = self.answer(prompts, indices, seed=config.seed)
        samples = Samples(step=step, prompts=answers.prompts, completions=answers.completions, scores=answers.scores)
        with writing(self._run.output / SAMPLES_LOG):
            self._samples.write(samples)

    def write_samples(self) -> None:
        """Write samples.md: answers before and after training, side by side, if any were noted."""
        looks = self._samples.read()
        if not looks:
            return
        after = looks[-1]
        before = next(look for look in looks if look.prompts == after.prompts)  # the run may have gone on with others
        text = samples_markdown(after.prompts, before.completions, after.completions, before.scores, after.scores)
        with writing(self._run.output / SAMPLES_FILE):
            write_atomic(self._run.output / SAMPLES_FILE, text.encode())
