"""What each algorithm learns from given numbers, against its formula written out answer by answer.

Everything differs from everything: policy, policy before and reference, KL, values, weights of another engine. So a
algorithm that hands on the wrong one, or leaves one out, is found.
"""

import dataclasses
import math
from types import SimpleNamespace

import torch

from rlhf_engine.algorithms.base import Algorithm, Experience, MicroBatch
from rlhf_engine.config import TrainConfig
from rlhf_engine.hydra import PolicyLoss
from rlhf_engine.rollout import PromptBatch
from rlhf_engine.scoring.experience import _kept, correct_age
from rlhf_engine.training.rl import make_algorithm
from tests.algorithms.fused import at_logprobs
from tests.conftest import random_batch

LENGTHS = ((2, 3), (2, 2), (1, 1), (1, 4))
SCORES, GREEDY = [1.5, -0.5, 2.0, 0.25], [1.0, 1.0, -1.0, -1.0]
BETA, CLIP, EPS = 0.3, 0.2, 1e-4


def numbers(seed: int) -> torch.Tensor:
    return torch.randn(10, generator=torch.Generator().manual_seed(seed))


SCORED = Experience(
    batch=random_batch(LENGTHS), groups_N=torch.tensor([0, 0, 1, 1]), scores_N=torch.tensor(SCORES),
    greedy_scores_N=torch.tensor(GREEDY), logprobs_M=-1 - 0.3 * numbers(6).abs(),
    old_logprobs_M=-1 - 0.3 * numbers(0).abs(), ref_logprobs_M=-1 - 0.3 * numbers(1).abs(), kl_M=0.1 * numbers(2),
    values_M=numbers(3), weights_M=1 + 0.1 * numbers(4), metrics={},
)  # fmt: skip
POLICY_M = SCORED.old_logprobs_M + 0.3 * numbers(5)
"""Log-probs of the policy in the update."""


class Answer:
    """Numbers of one answer as lists, its log-probs with a gradient."""

    def __init__(self, i: int, policy_M: torch.Tensor) -> None:
        first = sum(c for _, c in LENGTHS[:i])
        rows = slice(first, first + LENGTHS[i][1])
        self.length, self.score, self.greedy, self.group = LENGTHS[i][1], SCORES[i], GREEDY[i], i // 2
        self.policy = policy_M[rows]
        self.old, self.ref, self.kl = (x[rows] for x in (SCORED.old_logprobs_M, SCORED.ref_logprobs_M, SCORED.kl_M))
        self.values, self.weights = SCORED.values_M[rows], SCORED.weights_M[rows]
        self.ratio = self.policy.sum() - self.old.sum()
        self.to_ref = self.policy.sum() - self.ref.sum()
        self.k3 = (self.ref - self.policy).exp() - 1 - (self.ref - self.policy)


def clipped(gain, log_ratio):
    ratio = torch.exp(log_ratio)
    return torch.minimum(gain * ratio, gain * ratio.clamp(1 - CLIP, 1 + CLIP))


def gradient_of_log(answers, gain):
    """−mean over answers of Σ_t w_t gain(answer, t) log π_t"""
    total = 0.0
    for a in answers:
        total = total - sum(a.weights[t] * gain(a, t) * a.policy[t] for t in range(a.length))
    return total / len(answers)


def remax(answers):
    return gradient_of_log(answers, lambda a, t: a.score - a.greedy - BETA * a.kl[t:].sum())


def remax_departures(answers):
    def gain(a, t):
        over = max(-0.75, min(0.75, a.score - a.greedy))
        return (0.9 ** (a.length - 1 - t) * over - BETA * a.kl[t]) / a.length

    return gradient_of_log(answers, gain)


def remax_kl_in_loss(answers):
    return gradient_of_log(answers, lambda a, t: a.score - a.greedy) + BETA * sum(a.k3.sum() for a in answers) / 4


def reinforce(answers):
    return gradient_of_log(answers, lambda a, t: (1 - BETA) * a.score - BETA * a.kl[t:].sum() - a.values[t])


def over_the_other(answers, a):
    """RLOO's advantage among two: the return less the other's."""
    (other,) = [b for b in answers if b.group == a.group and b is not a]
    return (a.score - BETA * a.kl.sum()) - (other.score - BETA * other.kl.sum())


def rloo(answers):
    return -sum(clipped(a.weights[-1] * over_the_other(answers, a), a.ratio) for a in answers) / 4


def rloo_vanilla(answers):
    return gradient_of_log(answers, lambda a, t: over_the_other(answers, a))


def grpo_tokens(answers, *, scaled):
    """Of each answer, Σ_t of −clipped gain + β k3"""
    sums = []
    for a in answers:
        group = [b.score for b in answers if b.group == a.group]
        mean = sum(group) / 2
        gain = a.score - mean
        if scaled:
            gain /= math.sqrt(sum((s - mean) ** 2 for s in group)) + EPS
        tokens = [clipped(a.weights[t] * gain, a.policy[t] - a.old[t]) for t in range(a.length)]
        sums.append(-sum(tokens) + BETA * a.k3.sum())
    return sums


def grpo(answers):
    return sum(x / a.length for x, a in zip(grpo_tokens(answers, scaled=True), answers, strict=True)) / 4


def grpo_dapo(answers):
    return sum(grpo_tokens(answers, scaled=True)) / 10


def grpo_plain(answers):
    return sum(grpo_tokens(answers, scaled=False)) / (4 * 16)


def pairs(answers):
    """(better, worse) of each prompt."""
    return [(answers[0], answers[1]), (answers[2], answers[3])]


def online_dpo(answers):
    return -sum(torch.log(torch.sigmoid(BETA * (w.to_ref - l.to_ref))) for w, l in pairs(answers)) / 2


def online_dpo_ipo(answers):
    return sum((w.to_ref - l.to_ref - 1 / (2 * BETA)) ** 2 for w, l in pairs(answers)) / 2


def best_of_n(answers):
    return -(answers[0].policy.sum() + answers[2].policy.sum()) / (3 + 1)


DEPARTURES = {"gamma": 0.9, "advantage_clip": 0.75, "loss_type": "own_length", "kl_in": "local"}
CASES = [
    (remax, {}), (remax_departures, DEPARTURES), (remax_kl_in_loss, {"kl_in": "loss"}), (reinforce, {}),
    (rloo, {"num_generations": 2}), (rloo_vanilla, {"num_generations": 2, "loss_type": "vanilla"}), (grpo, {}),
    (grpo_dapo, {"loss_type": "dapo"}), (grpo_plain, {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    (online_dpo, {}), (online_dpo_ipo, {"loss_type": "ipo"}), (best_of_n, {}),
]  # fmt: skip


def config(algorithm: str, **changes) -> TrainConfig:
    required = {"model_name_or_path": "m", "dataset_name": "d", "output_dir": "o", "max_completion_length": 16}
    beta = {} if algorithm == "best_of_n" else {"beta": BETA}
    return TrainConfig(**required, **beta, algorithm=algorithm, **changes)


def learned(options, experience) -> tuple[Algorithm, MicroBatch]:
    """The algorithm of the options, and all that it learns from an experience as one micro-batch."""
    algorithm = make_algorithm(options)
    answers, _ = algorithm.learn_from(experience)
    n = answers.batch.n_completion_tokens
    micro = MicroBatch(
        batch=answers.batch, mask_M=torch.ones(n, dtype=torch.bool), n_tokens=float(n),
        n_answers=float(answers.batch.n_sequences), **answers.token_values(),
    )  # fmt: skip
    return algorithm, micro


def loss_of(algorithm, micro, logprobs_M):
    """What is minimised, at these log-probs of the answers' tokens."""
    fused = algorithm.terms(micro)[0].output
    if not isinstance(fused, PolicyLoss):
        return algorithm.loss(logprobs_M, micro).loss
    return at_logprobs(fused, logprobs_M).loss


def test_what_is_learned_from_given_numbers():
    for formula, options in CASES:
        name = next(
            n for n in ("best_of_n", "online_dpo", "reinforce", "remax", "rloo", "grpo") if n in formula.__name__
        )
        leaf = POLICY_M.clone().requires_grad_()
        formula([Answer(i, leaf) for i in range(4)]).backward()
        expected = leaf.grad
        algorithm, micro = learned(config(name, **options), SCORED)
        chosen = {"best_of_n": [0, 2]}.get(name, [0, 1, 2, 3])
        rows_M = SCORED.batch.select_completion_rows(chosen)
        mine = POLICY_M.clone().requires_grad_()
        loss_of(algorithm, micro, mine[rows_M]).backward()
        assert expected.abs().max() > 0.01
        torch.testing.assert_close(mine.grad, expected, rtol=1e-4, atol=1e-6)


def test_values_are_taught_the_returns_of_each_algorithm():
    """REINFORCE: (1−β) score less β KL to go; PPO: GAE's, with the whole score."""
    answers = [Answer(i, POLICY_M) for i in range(4)]
    algorithm, micro = learned(config("reinforce", vf_coef=0.7), SCORED)
    *_, value = algorithm.terms(micro)
    to_go = torch.cat([(1 - BETA) * a.score - BETA * a.kl.flip(0).cumsum(0).flip(0) for a in answers])
    torch.testing.assert_close(value.output.return_M, to_go)
    assert torch.equal(value.output.old_value_M, SCORED.values_M)
    assert value.weight == 0.7
    assert value.output.denom == 4  # a sum per answer, as the policy's
    algorithm, micro = learned(config("ppo", lam=1.0, scale_rewards="none", vf_coef=0.7), SCORED)
    policy, value = algorithm.terms(micro)
    to_go = torch.cat([a.score - BETA * a.kl.flip(0).cumsum(0).flip(0) for a in answers])
    torch.testing.assert_close(value.output.return_M, to_go)
    torch.testing.assert_close(policy.output.advantage_M, SCORED.weights_M * (to_go - SCORED.values_M))
    assert torch.equal(policy.output.old_logprob_M, SCORED.old_logprobs_M)


def test_without_weights_every_answer_counts_as_drawn():
    """Weights of 1 and none at all are the same."""
    for name in ("remax", "reinforce", "rloo", "grpo"):
        found = []
        for weights in (None, torch.ones(10)):
            scored = dataclasses.replace(SCORED, weights_M=weights)
            found.append(loss_of(*learned(config(name), scored), POLICY_M))
        assert torch.equal(*found)


def test_answers_of_an_older_policy_are_weighed_by_the_ratio_to_it():
    past_M = SCORED.before_logprobs_M - 0.1 * numbers(7)
    made = correct_age(SCORED, past_M, SimpleNamespace(correction="token_truncate", off_policy_clip_max=9.0))
    torch.testing.assert_close(made.weights_M, SCORED.weights_M * (SCORED.before_logprobs_M - past_M).exp())
    behaviour = correct_age(SCORED, past_M, SimpleNamespace(correction="behaviour", off_policy_clip_max=9.0))
    assert torch.equal(behaviour.old_logprobs_M, past_M)


def test_prompts_without_enough_rewards_are_left_out():
    prompts = PromptBatch.of([0, 1, 2], [[5]] * 3, generations=3, with_greedy=True)
    totals = [1.0, 2.0, None, 1.0, None, 3.0, 1.0, 2.0, 3.0]  # the greedy one, too few, whole
    assert _kept(totals, prompts, least=2) == [4, 5]
