"""CISPO by hand and behind TRL against TRL's own, and CoPG: its gradient by enumeration of every answer."""

import math
import os

import pytest
import torch

from rlhf_engine.algorithms import copg, rloo
from rlhf_engine.algorithms.base import Experience, MicroBatch
from rlhf_engine.algorithms.cispo import Cispo
from rlhf_engine.algorithms.policy_gradient import policy_gradient_loss
from rlhf_engine.algorithms.sequences import sequence_sums, spread
from rlhf_engine.config.algorithm import AlgorithmOptions
from tests.algorithms.tabular import TabularModel
from tests.algorithms.test_enumeration import BETA, EXACT, WRONG, kl, off_by
from tests.conftest import random_batch
from tests.training.test_data import PROMPTS, write_model


def test_a_weight_is_the_ratio_up_to_a_bound_and_no_token_loses_its_gradient():
    batch = random_batch(((2, 2), (1, 2)))
    new = torch.tensor([-1.0, -1.0, -2.0, -0.5], requires_grad=True)
    old = torch.tensor([-1.1, -2.0, -1.0, -0.5])
    micro = MicroBatch(
        batch=batch, old_logprobs_M=old, ref_logprobs_M=new.detach() + math.log(2),
        advantages_M=torch.tensor([2.0, 2.0, -1.0, -1.0]), mask_M=torch.tensor([True, True, True, False]),
        n_tokens=4.0, n_answers=2.0,
    )  # fmt: skip
    algorithm = Cispo(AlgorithmOptions(algorithm="cispo", beta=0.5, cliprange=0.5))
    found = algorithm.loss(new, micro)
    found.loss.backward()
    weights = torch.tensor([math.exp(0.1), 1.5, math.exp(-1.0), 0.0])
    kl = 2 - 1 - math.log(2)
    slope = torch.tensor([1 - 2.0] * 3 + [0.0])  # of k3 where π_ref = 2 π
    torch.testing.assert_close(new.grad, (-weights * micro.advantages_M + 0.5 * slope) / 4)
    policy = float((weights * micro.advantages_M * new.detach()).sum())
    assert float(found.loss) == pytest.approx((0.5 * 3 * kl - policy) / 4)
    told = algorithm.more_sums(micro, found)
    assert {name: float(x) for name, x in told.items()} == pytest.approx({"clip_ratio": 1 / 4, "kl_loss": 3 * kl / 4})


def test_advantages_are_those_of_grpo():
    batch = random_batch(((2, 1), (2, 2)))
    zeros = torch.zeros(3)
    made = Experience(
        batch=batch, groups_N=torch.tensor([0, 0]), scores_N=torch.tensor([1.0, 3.0]), old_logprobs_M=zeros,
        ref_logprobs_M=zeros, kl_M=zeros,
    )  # fmt: skip
    found, metrics = Cispo(AlgorithmOptions(algorithm="cispo", scale_rewards="none")).learn_from(made)
    assert found.advantages_M.tolist() == [-1.0, 1.0, 1.0]
    assert metrics == {"advantage_std": 1.0}


def test_behind_trl_it_has_the_loss_of_trl(tmp_path):
    pytest.importorskip("trl", reason="needs trl (pip install 'rlhf-engine[trl]')")
    from trl import GRPOConfig, GRPOTrainer
    from trl.kernels import chunked_logprob

    if not hasattr(chunked_logprob, "_use_triton") and "TRITON_INTERPRET" not in os.environ:
        pytest.skip("this TRL has Triton kernels alone, which need TRITON_INTERPRET=1 here")
    from rlhf_engine.integrations.trl import HydraConfig, HydraTrainer
    from tests.integrations.test_trl_options import ONE_BATCH, assert_equal, beside, drift, loss_and_gradients
    from tests.integrations.trl_runs import make_trainer, rows

    folder = write_model(tmp_path / "model")
    given = {**ONE_BATCH, "beta": 0.0, "max_steps": 2}
    ours = make_trainer(HydraTrainer, HydraConfig(str(tmp_path), algorithm="cispo", epsilon_high=0.5, **given), folder)
    config = GRPOConfig(str(tmp_path), loss_type="cispo", epsilon_high=1.5, **given)  # the largest weight itself
    theirs = beside(ours, GRPOTrainer, config, folder)
    prompts = [{"prompt": p} for p in PROMPTS[:2] for _ in range(4)]
    inputs = ours._generate_and_score_completions(prompts)
    old = inputs["of_old_logprobs_M"] + drift(inputs)
    mine = loss_and_gradients(ours, {**inputs, "of_old_logprobs_M": old})
    shown = {"old_per_token_logps": old, "advantages": inputs["of_advantages_M"][:, 0]}
    assert_equal(mine, loss_and_gradients(theirs, {**inputs, **shown}))
    ours.train()
    assert all(float(row["grad_norm"]) > 0 for row in rows(ours))
    assert "cispo" in ours._tag_names


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
        batch=batch, groups_N=torch.tensor([0, 0, 0]), scores_N=torch.tensor([1.0, 4.0, 2.0]), old_logprobs_M=zeros,
        ref_logprobs_M=zeros, kl_M=zeros,
    )  # fmt: skip
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
