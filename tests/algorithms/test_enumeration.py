"""Estimators of the policy gradient against the exact gradient, over all answers of a tabular language model."""

import math

import pytest
import torch
from rlhf_kernels.ppo_loss import ppo_loss

from rlhf_engine.algorithms import grpo, reinforce, remax, rloo
from rlhf_engine.algorithms.policy_gradient import policy_gradient_loss
from rlhf_engine.algorithms.ppo import token_kl
from rlhf_engine.algorithms.sequences import k3, spread
from tests.algorithms.tabular import TabularModel

BETA = 0.3
EXACT = 1e-12
WRONG = 1e-3
"""A wrong estimator is off by more than this share of the gradient."""


@pytest.fixture
def model():
    return TabularModel()


def kl(model, places, estimator="k1"):
    logprobs = model.logprobs_M(places).detach()
    exact = model.exact_kl_M(places).detach() if estimator == "exact" else None
    return token_kl(logprobs, model.ref_logprobs_M(places), estimator, exact)


def off_by(found, exact) -> float:
    """Largest difference, as a share of the largest entry of the exact gradient."""
    return float((found - exact).abs().max() / exact.abs().max())


def reinforce_loss(model, places, *, beta=BETA, with_values=True):
    batch = model.batch(places)
    gains = reinforce.returns(model.rewards_N[list(places)], kl(model, places), batch, beta=beta)
    if with_values:
        gains = gains - model.values_M(places)
    return policy_gradient_loss(model.logprobs_M(places), gains, batch, n_answers=1)


@pytest.mark.parametrize("with_values", [True, False])
def test_reinforce_is_unbiased_for_any_value(model, with_values):
    exact = -model.gradient(model.objective((1 - BETA) * model.rewards_N, BETA))
    found = model.expected_gradient(lambda places: reinforce_loss(model, places, with_values=with_values), draws=1)
    assert off_by(found, exact) < EXACT


def remax_loss(model, places, *, divide_by_own_length=False, estimator="k1", beta=BETA, **options):
    batch = model.batch(places)
    greedy = model.rewards_N[model.greedy()].expand(len(places))
    scores = model.rewards_N[list(places)]
    gains = remax.advantages(scores, greedy, kl(model, places, estimator), batch, beta=beta, **options)
    logprobs = model.logprobs_M(places)
    n, own = len(places), divide_by_own_length
    loss = policy_gradient_loss(logprobs, gains, batch, n_answers=n, divide_by_own_length=own)
    if options.get("kl_in") == "loss":
        loss = loss + beta * k3(logprobs, model.ref_logprobs_M(places)).sum()
    return loss


@pytest.mark.parametrize("draws", [1, 2])
def test_remax_is_unbiased(model, draws):
    exact = -model.gradient(model.objective(model.rewards_N, BETA))
    assert off_by(model.expected_gradient(lambda places: remax_loss(model, places), draws=draws), exact) < EXACT


@pytest.mark.parametrize(
    "departure",
    [
        {"divide_by_own_length": True}, {"gamma": 0.9}, {"kl_in": "local"}, {"kl_in": "loss"}, {"clip": 0.3},
        {"estimator": "exact"}, {"estimator": "k3"},
    ],
    ids=lambda departure: "-".join(map(str, next(iter(departure.items())))),
)  # fmt: skip
def test_departures_of_released_code_are_biased(model, departure):
    exact = -model.gradient(model.objective(model.rewards_N, BETA))
    found = model.expected_gradient(lambda places: remax_loss(model, places, **departure), draws=1)
    assert off_by(found, exact) > WRONG


def test_a_draw_that_is_the_greedy_answer_has_no_gradient_from_the_reward(model):
    places = (model.greedy(),)
    assert not model.gradient(remax_loss(model, places, beta=0.0)).any()


def rloo_loss(model, places, *, proximal=False, estimator="k1"):
    batch = model.batch(places)
    returns = rloo.returns(model.rewards_N[list(places)], kl(model, places, estimator), batch, beta=BETA)
    gains = rloo.leave_one_out(returns, torch.zeros(len(places), dtype=torch.int64))
    logprobs, n = model.logprobs_M(places), len(places)
    if proximal:
        old = logprobs.detach()
        return rloo.proximal_loss(logprobs, old, gains, batch, n_answers=n, clip_low=0.2, clip_high=0.2).loss
    return policy_gradient_loss(logprobs, spread(gains, batch), batch, n_answers=n)


@pytest.mark.parametrize("proximal", [False, True], ids=["vanilla", "proximal"])
@pytest.mark.parametrize(("longest", "draws"), [(3, 2), pytest.param(2, 3, marks=pytest.mark.long)])
def test_rloo_is_unbiased(longest, draws, proximal):
    model = TabularModel(longest=longest)
    exact = -model.gradient(model.objective(model.rewards_N, BETA))
    found = model.expected_gradient(lambda places: rloo_loss(model, places, proximal=proximal), draws=draws)
    assert off_by(found, exact) < EXACT


def grpo_loss(model, places, scale_rewards, loss_type):
    batch = model.batch(places)
    groups = torch.zeros(len(places), dtype=torch.int64)
    gains = grpo.advantages(model.rewards_N[list(places)], groups, scale_rewards=scale_rewards)
    logprobs = model.logprobs_M(places)
    weights = grpo.token_weights(batch, loss_type=loss_type, max_completion_length=2).double()
    denom = float(sum(batch.completion_lens)) if loss_type == "dapo" else float(len(places))
    return ppo_loss(logprobs, logprobs.detach(), spread(gains, batch), weights, denom=denom)[0]


def test_grpo_without_its_divisions_is_rloo():
    model, k, longest = TabularModel(longest=2), 3, 2
    exact = -model.gradient(model.objective(model.rewards_N, 0.0)) * (k - 1) / (k * longest)
    assert off_by(model.expected_gradient(lambda p: grpo_loss(model, p, "none", "dr_grpo"), draws=k), exact) < EXACT


@pytest.mark.parametrize("longest", [1, 3])
def test_perls_optimum_is_the_tilted_anchor(longest):
    """π ∝ π_ref exp((1−β) r / β) is where the expected gradient is 0, and nowhere near here else."""
    model = TabularModel(vocabulary=4 if longest == 1 else 3, longest=longest)
    tilted = model.probabilities_N(model.reference) * ((1 - BETA) * model.rewards_N / BETA).exp()
    tilted = dict(zip(model.answers, (tilted / tilted.sum()).tolist(), strict=True))
    with torch.no_grad():
        for prefix, row in model.row_of.items():
            for token in range(model.logits.shape[1]):
                start = (*prefix, token)
                mass = sum(p for answer, p in tilted.items() if answer[: len(start)] == start)
                model.logits[row, token] = math.log(mass)
    torch.testing.assert_close(model.probabilities_N().tolist(), list(tilted.values()), rtol=1e-12, atol=1e-14)
    scale = (1 - BETA) * model.rewards_N.abs().max()
    found = model.expected_gradient(lambda places: reinforce_loss(model, places), draws=1)
    assert float(found.abs().max() / scale) < EXACT
    with torch.no_grad():
        model.logits[0, 0] += 0.1
    found = model.expected_gradient(lambda places: reinforce_loss(model, places), draws=1)
    assert float(found.abs().max() / scale) > WRONG


@pytest.mark.parametrize(("worse", "crossing"), [(0.2, 0.625), (0.5, 1.0), (0.0, 0.5), (-1.0, 0.25)])
def test_where_the_greedy_baseline_lowers_the_variance_of_two_arms(worse, crossing):
    """Arms of reward 1 and `worse`: where the better is greedy, below p = 1 / (2 (1 − worse)), and not above."""
    model = TabularModel(vocabulary=2, longest=1)
    model.rewards_N = torch.tensor([1.0, worse], dtype=torch.float64)

    def second_moment(p, greedy_baseline):
        with torch.no_grad():
            model.logits[0] = torch.tensor([p, 1 - p], dtype=torch.float64).log()
        total = 0.0
        for place, probability in ((0, p), (1, 1 - p)):
            if greedy_baseline:
                loss = remax_loss(model, (place,), beta=0.0)
            else:
                loss = reinforce_loss(model, (place,), beta=0.0, with_values=False)
            total += probability * float(model.gradient(loss).square().sum())
        return total  # the mean is the same: the variance differs as this does

    for p in (0.51, 0.55, 0.6, 0.62, 0.63, 0.7, 0.9, 0.99):
        assert (second_moment(p, True) < second_moment(p, False)) == (p < crossing)
