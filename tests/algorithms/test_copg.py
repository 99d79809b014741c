"""CoPG: its gradient over all pairs of answers, its fixed point for answers of any policy, pairs."""

import pytest
import torch

from rlhf_engine.algorithms import copg, rloo
from rlhf_engine.algorithms.base import Experience, MicroBatch
from rlhf_engine.algorithms.policy_gradient import policy_gradient_loss
from rlhf_engine.algorithms.sequences import sequence_sums, spread
from rlhf_engine.config.algorithm import AlgorithmOptions
from tests.algorithms.tabular import TabularModel
from tests.algorithms.test_enumeration import BETA, EXACT, WRONG, kl, off_by
from tests.conftest import random_batch


@pytest.fixture
def model():
    return TabularModel()


def loss_of(model, places, *, beta=BETA):
    scores = model.rewards_N[list(places)]
    reference, batch = model.ref_logprobs_M(places), model.batch(places)
    return copg.copg_loss(model.logprobs_M(places), reference, scores, batch, n_pairs=1, beta=beta).loss


@pytest.mark.parametrize("beta", [BETA, 0.0])
def test_on_its_own_answers_it_is_the_policy_gradient(model, beta):
    exact = -model.gradient(model.objective(model.rewards_N, beta))
    assert off_by(model.expected_gradient(lambda places: loss_of(model, places, beta=beta), draws=2), exact) < EXACT


def test_a_pair_has_the_gradient_of_rloo_with_the_present_policy_s_kl(model):
    places = (2, 5)
    returns = rloo.returns(model.rewards_N[list(places)], kl(model, places), model.batch(places), beta=BETA)
    gains = spread(rloo.leave_one_out(returns, torch.tensor([0, 0])), model.batch(places))
    theirs = policy_gradient_loss(model.logprobs_M(places), gains, model.batch(places), n_answers=2)
    assert off_by(model.gradient(loss_of(model, places)), model.gradient(theirs)) < EXACT


def test_the_best_policy_has_no_gradient_whoever_drew(model):
    """Of a contextual bandit, whose best policy has a closed form: answers of one token."""
    vocabulary = model.logits.shape[1]
    reference = torch.randn(vocabulary, generator=torch.Generator().manual_seed(3), dtype=torch.float64).log_softmax(-1)
    scores = torch.linspace(-1, 2, vocabulary, dtype=torch.float64)
    for shift, is_best in ((0.0, True), (0.5, False)):
        logits = (reference + (1 + shift) * scores / BETA).requires_grad_()
        batch = random_batch(((2, 1), (2, 1)))
        for pair in ([0, 1], [vocabulary - 1, 0]):
            logprob = logits.log_softmax(-1)[pair]
            loss = copg.copg_loss(logprob, reference[pair], scores[pair], batch, n_pairs=1, beta=BETA).loss
            size = float(torch.autograd.grad(loss, logits)[0].abs().max())
            assert (size < EXACT) == is_best, size
            assert is_best or size > WRONG


def test_it_is_the_gradient_of_the_squared_gap(model):
    places = (1, 4)
    ratio = sequence_sums(model.logprobs_M(places) - model.ref_logprobs_M(places), model.batch(places))
    regularised = model.rewards_N[list(places)] - BETA * ratio
    squared = (regularised[0] - regularised[1]).square() / (4 * BETA)
    assert off_by(model.gradient(loss_of(model, places)), model.gradient(squared)) < EXACT


def test_of_several_answers_the_best_and_the_worst_are_a_pair():
    scores, groups = torch.tensor([1.0, 3.0, 2.0, 5.0, 5.0, 5.0]), torch.tensor([0, 0, 0, 1, 1, 1])
    assert copg.best_and_worst(scores, groups) == [(1, 0), (3, 5)]
    with pytest.raises(ValueError, match="expected at least two answers per prompt, got one"):
        copg.best_and_worst(scores, torch.tensor([0, 0, 1, 2, 2, 2]))
    with pytest.raises(ValueError, match="expected pairs of answers, got 3 answers"):
        copg.copg_loss(torch.zeros(3), torch.zeros(3), scores[:3], random_batch(((2, 1),) * 3), n_pairs=1, beta=0.1)


def test_scores_reach_the_loss_of_every_pair():
    batch = random_batch(((2, 1), (2, 3), (2, 2)))
    zeros = torch.zeros(6)
    made = Experience(
        batch=batch,
        groups_N=torch.tensor([0, 0, 0]),
        scores_N=torch.tensor([1.0, 4.0, 2.0]),
        old_logprobs_M=zeros,
        ref_logprobs_M=zeros,
        kl_M=zeros,
    )
    algorithm = copg.Copg(AlgorithmOptions(algorithm="copg", num_generations=3, beta=0.5))
    found, metrics = algorithm.learn_from(made)
    assert metrics == {"pairs/score_gap": 3.0}
    assert found.batch.completion_lens == (3, 1)
    logprobs = torch.tensor([-1.0, -1.0, -2.0, -0.5], requires_grad=True)
    micro = MicroBatch(
        **{name: getattr(found, name) for name in ("batch", "old_logprobs_M", "advantages_M")},
        ref_logprobs_M=torch.full((4,), -1.5),
        mask_M=torch.ones(4, dtype=torch.bool),
        n_tokens=4.0,
        n_answers=2.0,
    )
    out = algorithm.loss(logprobs, micro)
    gap = 3.0 - 0.5 * ((-4.0 + 4.5) - (-0.5 + 1.5))
    assert out.gap_P.tolist() == [gap]
    out.loss.backward()
    torch.testing.assert_close(logprobs.grad, 0.5 * gap * torch.tensor([-1.0, -1.0, -1.0, 1.0]))
    assert float(algorithm.more_sums(micro, out)["pairs/regularised_gap"]) == pytest.approx(gap)
