"""The algorithms' pure functions on numbers worked out by hand, and what they refuse."""

import math
from types import SimpleNamespace

import pytest
import torch

from rlhf_engine.algorithms import best_of_n, grpo, online_dpo, reinforce, remax, rloo
from rlhf_engine.algorithms.base import MicroBatch, next_beta
from rlhf_engine.algorithms.policy_gradient import kl_penalty
from rlhf_engine.algorithms.sequences import group_sizes, group_sums, sequence_sums, spread, to_go
from rlhf_engine.config.algorithm import AlgorithmOptions
from tests.algorithms.fused import at_logprobs
from tests.conftest import random_batch

GROUPS = torch.tensor([0, 0, 1, 1, 1])


def test_sums_over_answers_and_groups():
    batch = random_batch(((2, 3), (1, 2)))
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    assert sequence_sums(x, batch).tolist() == [6.0, 9.0]
    assert spread(torch.tensor([7.0, 8.0]), batch).tolist() == [7.0, 7.0, 7.0, 8.0, 8.0]
    assert to_go(x, batch).tolist() == [6.0, 5.0, 3.0, 9.0, 5.0]
    assert to_go(x, batch, gamma=0.5).tolist() == [1 + 1 + 0.75, 3.5, 3.0, 6.5, 5.0]
    assert group_sums(x, GROUPS).tolist() == [3.0, 3.0, 12.0, 12.0, 12.0]
    assert group_sizes(GROUPS).tolist() == [2, 2, 3, 3, 3]
    with pytest.raises(ValueError, match=r"x_M: expected one number per completion token, \[5\], got \[4\]"):
        to_go(x[:4], batch)
    with pytest.raises(ValueError, match=r"x_N: expected one number per answer, \[2\], got \[5\]"):
        spread(x, batch)
    with pytest.raises(ValueError, match=r"groups_N: expected one group per answer, \[5\], got \[4\]"):
        group_sums(x, GROUPS[:4])


def test_requests_that_cannot_be_served():
    batch, two, five = random_batch(((2, 3), (1, 2))), torch.tensor([10.0, 20.0]), torch.ones(5)
    with pytest.raises(ValueError, match="kl_in: expected 'to_go', 'local' or 'loss', got 'reward'"):
        kl_penalty(five, batch, beta=0.5, kl_in="reward")
    with pytest.raises(ValueError, match=r"greedy_scores_N: expected one score per drawn answer, \[2\], got \[1\]"):
        remax.advantages(two, two[:1], five, batch, beta=0.5)
    with pytest.raises(ValueError, match=r"beta: expected a number in \[0, 1\], .*, got 1.5"):
        reinforce.returns(two, five, batch, beta=1.5)


def test_rloo_advantages():
    batch = random_batch(((2, 3), (1, 2)))
    kl = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    assert rloo.returns(torch.tensor([10.0, 20.0]), kl, batch, beta=0.5).tolist() == [7.0, 15.5]
    found = rloo.leave_one_out(torch.tensor([1.0, 3.0, 1.0, 2.0, 6.0]), GROUPS)
    assert found.tolist() == [-2.0, 2.0, -3.0, -1.5, 4.5]
    with pytest.raises(ValueError, match="groups_N: expected at least two answers per prompt, got one"):
        rloo.leave_one_out(torch.ones(3), torch.tensor([0, 0, 1]))


def test_proximal_rloo_clips_the_ratio_of_the_whole_answer():
    batch = random_batch(((2, 2), (1, 1), (1, 1)))
    new = torch.tensor([-1.0, -1.0, -1.0, -1.0], requires_grad=True)
    old = torch.tensor([-1.1, -1.1, -1.05, -1.5])
    gains = torch.tensor([1.0, 1.0, -1.0])
    found = rloo.proximal_loss(new, old, gains, batch, n_answers=3, clip_low=0.2, clip_high=0.2)
    ratios = [math.exp(0.2), math.exp(0.05), math.exp(0.5)]
    torch.testing.assert_close(found.ratio_N, torch.tensor(ratios))
    assert found.clipped_N.tolist() == [True, False, False]  # one token's ratio of e^0.1 would not have been clipped
    torch.testing.assert_close(found.loss.detach(), torch.tensor((-1.2 - ratios[1] + ratios[2]) / 3))
    found.loss.backward()
    torch.testing.assert_close(new.grad, torch.tensor([0.0, 0.0, -ratios[1] / 3, ratios[2] / 3]))


def test_grpo_advantages():
    scores = torch.tensor([1.0, 3.0, 1.0, 2.0, 6.0])
    assert grpo.advantages(scores, GROUPS, scale_rewards="none").tolist() == [-1.0, 1.0, -2.0, -1.0, 3.0]
    assert grpo.advantages(torch.ones(5), GROUPS, scale_rewards="group").tolist() == [0.0] * 5
    with pytest.raises(ValueError, match="scale_rewards: expected 'group' or 'none', got 'batch'"):
        grpo.advantages(scores, GROUPS, scale_rewards="batch")
    with pytest.raises(ValueError, match="groups_N: expected at least two answers per prompt, got one"):
        grpo.advantages(scores, torch.tensor([0, 0, 1, 1, 2]), scale_rewards="none")


def grpo_terms(loss_type):
    """GRPO, a micro-batch of two answers of 3 and 2 tokens, and its loss."""
    batch = random_batch(((2, 3), (1, 2)))
    old = torch.tensor([-0.5, -0.1, -1.0, -2.0, -0.7])
    options = AlgorithmOptions(algorithm="grpo", loss_type=loss_type, beta=0.5, cliprange=[0.2, 0.3])
    algorithm = grpo.Grpo(options, max_completion_length=8)
    micro = MicroBatch(
        batch=batch, old_logprobs_M=old, ref_logprobs_M=old - 0.5, advantages_M=torch.ones(5),
        mask_M=torch.ones(5, dtype=torch.bool), n_tokens=5.0, n_answers=2.0,
    )  # fmt: skip
    (term,) = algorithm.terms(micro)
    return algorithm, micro, term.output


@pytest.mark.parametrize(("loss_type", "weights"), [("grpo", [1 / 3] * 3 + [1 / 2] * 2), ("dr_grpo", [1 / 8] * 5)])
def test_grpo_clips_tokens_and_adds_the_kl(loss_type, weights):
    """The fused loss against the formula, and metrics as means over tokens whatever the weights."""
    algorithm, micro, output = grpo_terms(loss_type)
    new = torch.tensor([0.0, 0.0, -1.0, -2.0, -0.7])
    found = at_logprobs(output, new)
    ratio = (new - output.old_logprob_M).exp()
    gap = output.ref_logprob_M - new
    kl = gap.exp() - 1 - gap
    terms = torch.maximum(-ratio, -ratio.clamp(0.8, 1.3)) + 0.5 * kl
    torch.testing.assert_close(found.loss, (torch.tensor(weights) * terms).sum() / 2)
    entropy = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    result = SimpleNamespace(
        logprob=new, policy_loss=found.policy_loss, kl=found.kl, entropy=(output.mask_M * entropy).sum() / output.denom
    )
    measured = algorithm.measure(micro, [result]).floats()
    assert measured["clip_ratio"] == pytest.approx(1 / 5)
    assert measured["kl_loss"] == pytest.approx(float(kl.mean()))
    assert measured["policy/loss"] == pytest.approx(float(found.loss))
    weighed = (torch.tensor(weights) * entropy).sum() / sum(weights)
    assert measured["entropy"] == pytest.approx(float(weighed))
    assert measured["mismatch"] == pytest.approx(0.5)


def test_best_and_worst_leave_ties_out():
    groups = torch.tensor([4, 4, 4, 2, 2, 7, 7, 7])
    scores = torch.tensor([1.0, 3.0, 3.0, 2.0, 2.0, 5.0, 4.0, 6.0])
    assert online_dpo.best_and_worst(scores, groups) == [(1, 0), (7, 6)]


def test_dpo_by_hand():
    batch = random_batch(((2, 2), (2, 1)))
    new = torch.tensor([-1.0, -1.0, -2.0], requires_grad=True)
    ref = torch.tensor([-1.5, -1.5, -1.0])
    found = online_dpo.dpo_loss(new, ref, batch, n_pairs=1, beta=0.5)
    sigma = 1 / (1 + math.exp(-0.5 * 2.0))
    torch.testing.assert_close(found.loss.detach(), torch.tensor(-math.log(sigma)))
    assert (found.chosen_P.tolist(), found.rejected_P.tolist()) == ([0.5], [-0.5])
    found.loss.backward()
    step = 0.5 * (1 - sigma)
    torch.testing.assert_close(new.grad, torch.tensor([-step, -step, step]))
    ipo = online_dpo.dpo_loss(new, ref, batch, n_pairs=1, beta=0.5, loss_type="ipo")
    assert float(ipo.loss.detach()) == pytest.approx((2.0 - 1.0) ** 2)
    with pytest.raises(ValueError, match="loss_type: expected 'sigmoid' or 'ipo', got 'hinge'"):
        online_dpo.dpo_loss(new, ref, batch, n_pairs=1, beta=0.5, loss_type="hinge")
    with pytest.raises(ValueError, match="batch: expected pairs of answers, got 1 answers"):
        online_dpo.dpo_loss(new[:2], ref[:2], random_batch(((2, 2),)), n_pairs=1, beta=0.5)


def test_the_best_of_n():
    assert best_of_n.best(torch.tensor([1.0, 3.0, 3.0, 2.0, 0.0]), torch.tensor([5, 5, 5, 1, 1])) == [1, 3]


def test_beta_follows_the_kl():
    # by hand: errors of +50 %, clipped to +20 %, and of −10 %
    assert next_beta(0.1, 15.0, target=10.0, n_answers=1000) == pytest.approx(0.1 * 1.02)
    assert next_beta(0.1, 9.0, target=10.0, n_answers=1000) == pytest.approx(0.1 * 0.99)
    assert next_beta(0.1, 10.0, target=10.0, n_answers=1000) == 0.1
    assert next_beta(0.1, 0.0, target=10.0, n_answers=50_000) == pytest.approx(0.1 * 0.8)
    # a policy whose KL falls as beta rises ends at the target, from either side
    for beta in (0.001, 10.0):
        for _ in range(2000):
            beta = next_beta(beta, 1.0 / beta, target=4.0, n_answers=500)
        assert 1.0 / beta == pytest.approx(4.0, rel=1e-3)
