"""PPO and importance weights on hand-computed numbers, and the update's exactness, stops and refusals."""

import math
from dataclasses import replace

import pytest
import torch

from rlhf_engine.algorithms.base import Experience, MicroBatch, TokenValues
from rlhf_engine.algorithms.ppo import Ppo, advantages, token_kl, token_rewards
from rlhf_engine.algorithms.remax import ReMax
from rlhf_engine.algorithms.sequences import importance_weights, sequence_log_ratio, weight_metrics
from rlhf_engine.config.algorithm import AlgorithmOptions
from rlhf_engine.errors import NonFiniteError
from rlhf_engine.hydra import PackedBatch
from rlhf_engine.hydra.optimizer import RoleOptimizer
from rlhf_engine.training.update import Schedule, alone, minibatches, update
from tests.conftest import build, random_batch


def test_kl_estimators_by_hand():
    new, ref = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    assert token_kl(new, ref, "k1").tolist() == [0.5, -1.0]
    torch.testing.assert_close(token_kl(new, ref, "k3"), torch.tensor([math.exp(-0.5) - 1 + 0.5, math.e - 1 - 1.0]))
    exact = torch.tensor([0.25, 0.5])
    assert token_kl(new, ref, "exact", exact) is exact
    with pytest.raises(ValueError, match="estimator: expected 'k1', 'k3' or 'exact', got 'k9'"):
        token_kl(new, ref, "k9")
    with pytest.raises(ValueError, match="exact_kl_M: expected the exact KL"):
        token_kl(new, ref, "exact")


def test_token_rewards_put_the_score_on_the_last_token():
    batch = random_batch(((2, 3), (1, 2)))
    rewards = token_rewards(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), torch.tensor([10.0, 20.0]), batch, beta=0.5)
    assert rewards.tolist() == [-0.5, -1.0, 10 - 1.5, -2.0, 20 - 2.5]
    # the score of an answer without tokens lands on no other
    batch = PackedBatch.from_lists([[1, 2], [1], [2]], [[3, 4], [], [4]])
    with pytest.raises(ValueError, match=r"completions of at least one token, got none in sequences \[1\]"):
        token_rewards(torch.zeros(3), torch.tensor([1.0, 100.0, 2.0]), batch, beta=0.5)


def test_advantages_by_hand():
    batch = random_batch(((2, 3), (1, 1)))
    advantage, ret = advantages(
        torch.tensor([0.0, 0.0, 1.0, 2.0]), torch.tensor([0.5, 0.25, 0.125, 1.0]), batch, gamma=0.5, lam=0.5
    )
    # δ of the first answer: 0.125 − 0.5, 0.0625 − 0.25, 1 − 0.125; γλ = 0.25
    a2 = 0.875
    a1 = -0.1875 + 0.25 * a2
    a0 = -0.375 + 0.25 * a1
    assert advantage.tolist() == [a0, a1, a2, 1.0]
    assert ret.tolist() == [a0 + 0.5, a1 + 0.25, a2 + 0.125, 2.0]


def test_whitened_advantages_have_mean_0_and_variance_1_over_real_tokens():
    batch = random_batch()
    m = batch.n_completion_tokens
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(m, generator=generator), torch.randn(m, generator=generator)
    made = Experience(
        batch=batch, old_logprobs_M=values, values_M=values, kl_M=rewards, scores_N=torch.zeros(batch.n_sequences),
        groups_N=torch.arange(batch.n_sequences),
    )  # fmt: skip
    found, _ = ppo().learn_from(made)
    advantage = found.advantages_M
    assert abs(advantage.mean().item()) < 1e-6
    assert abs(advantage.std().item() - 1) < 1e-4


def test_minibatches_partition():
    generator = torch.Generator().manual_seed(0)
    parts = minibatches(10, 4, generator)
    assert sorted(i for part in parts for i in part) == list(range(10))
    assert parts[0] != sorted(parts[0]), "answers are dealt at random"
    assert sorted(len(part) for part in parts) == [2, 2, 3, 3]
    assert len(minibatches(3, 8, generator)) == 3


def experience(model, batch) -> TokenValues:
    scores = model.score(batch, ("actor", "critic"))
    generator = torch.Generator().manual_seed(1)
    m = batch.n_completion_tokens
    return TokenValues(
        batch=batch, old_logprobs_M=scores.logprobs_M, values_M=scores.values_M,
        advantages_M=torch.randn(m, generator=generator), returns_M=torch.randn(m, generator=generator),
    )  # fmt: skip


def ppo(**changes) -> Ppo:
    return Ppo(AlgorithmOptions(**{"vf_coef": 0.5, "entropy_coef": 0.01, **changes}))


def schedule(**changes) -> Schedule:
    return Schedule(**{"num_epochs": 1, "num_mini_batches": 1, "micro_batch_size": 99, **changes})


def test_first_minibatch_has_ratio_one_and_later_ones_do_not():
    model, batch = build(), random_batch()
    optimizer = RoleOptimizer(model, {"actor": 5e-3, "critic": 5e-3})
    metrics = alone(update(model, ppo(), experience(model, batch), schedule(num_epochs=3), optimizer.step, seed=0))
    assert metrics["mismatch/update_max"] < 1e-4
    assert metrics["approx_kl"] > 0
    assert metrics["optimizer_steps"] == 3


def test_the_kl_is_of_this_update_and_not_of_a_policy_that_drew_before():
    for algorithm in ["ppo", "policy gradient"]:
        model, batch = build(), random_batch()
        made = experience(model, batch)
        stale_M = made.old_logprobs_M + torch.randn(
            batch.n_completion_tokens, generator=torch.Generator().manual_seed(3)
        )
        optimizer = RoleOptimizer(model, {"actor": 1e-6, "critic": 1e-6})
        learns = ppo() if algorithm == "ppo" else ReMax(AlgorithmOptions(algorithm="remax"))
        stale = replace(made, old_logprobs_M=stale_M, logprobs_M=made.old_logprobs_M)
        metrics = alone(update(model, learns, stale, schedule(num_epochs=3), optimizer.step, seed=0))
        assert metrics["optimizer_steps"] == 3
        assert metrics["approx_kl"] < 1e-6
        assert metrics["mismatch/update_max"] < 1e-4


def test_the_share_of_the_value_loss_is_that_of_gradients_at_the_hidden_states():
    model, batch = build("j_hydra"), random_batch()
    made = experience(model, batch)
    shares = {}
    for vf_coef in (0.0, 0.5, 1.5):
        metrics = alone(update(model, ppo(vf_coef=vf_coef), made, schedule(), lambda: {}, seed=0))
        shares[vf_coef] = metrics["value/gradient_share"]
        model.zero_grad(set_to_none=True)
    assert shares[0.0] == 0.0
    ratio = {coef: share / (1 - share) for coef, share in shares.items()}
    assert ratio[1.5] == pytest.approx(3 * ratio[0.5], rel=1e-4)
    # the value head is linear, h ↦ h w + b, so ∂L_V/∂h_t = (V_t − G_t) w / M where nothing is clipped
    error_M = made.values_M - made.returns_M
    weight = model.heads[model.roles["critic"].head].weight
    value = 0.5 * float(error_M.norm() * weight.norm()) / batch.n_completion_tokens
    m = batch.n_completion_tokens
    mask_M = torch.ones(m, dtype=torch.bool)
    whole = MicroBatch(batch=batch, mask_M=mask_M, n_tokens=float(m), n_answers=4.0, **made.token_values())
    kept = Kept(ppo().terms(whole)[0].output)
    model(batch, [kept])[0].loss.backward()
    assert value / float(kept.hidden_T.grad.norm()) == pytest.approx(ratio[0.5], rel=1e-4)


class Kept:
    """An output whose hidden states keep their gradient."""

    roles = ("actor",)

    def __init__(self, output):
        self._output = output

    def compute(self, states):
        self.hidden_T = states.hidden_T["actor"]
        self.hidden_T.retain_grad()
        return self._output.compute(states)


def test_a_loss_that_is_not_finite_is_named_and_not_applied():
    for field, culprit in [("advantages_M", "policy/loss"), ("returns_M", "value/loss")]:
        model, batch = build(), random_batch()
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        made = experience(model, batch)
        getattr(made, field)[3] = float("nan")
        optimizer = RoleOptimizer(model, {"actor": 1e-2, "critic": 1e-2})
        with pytest.raises(NonFiniteError, match=f"{culprit} is nan at epoch 0, minibatch 0"):
            alone(update(model, ppo(), made, schedule(), optimizer.step, seed=0))
        assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


# answers of 2, 1 and 3 tokens; ratios 2, 1/2 | 4 | 1, 1/2, 1/2
BATCH = PackedBatch.from_lists([[5], [6, 7], [8]], [[1, 2], [3], [4, 5, 6]])
RATIOS = [2.0, 0.5, 4.0, 1.0, 0.5, 0.5]
LOG_RATIO = torch.tensor(RATIOS).log()


def test_importance_weights_by_hand():
    torch.testing.assert_close(sequence_log_ratio(LOG_RATIO, BATCH).exp(), torch.tensor([1.0, 4.0, 0.25]))
    far = torch.tensor([200.0, -200.0, 200.0, 0.0, 0.0, 0.0])  # beyond floating point
    for log_ratio, mode, clip_max, expected in (
        (LOG_RATIO, "token_truncate", 3.0, [2.0, 0.5, 3.0, 1.0, 0.5, 0.5]),
        (LOG_RATIO, "token_truncate", 1.0, [1.0, 0.5, 1.0, 1.0, 0.5, 0.5]),  # a small weight stays what it is
        (LOG_RATIO, "sequence_truncate", 3.0, [1.0, 1.0, 3.0, 0.25, 0.25, 0.25]),
        (far, "token_truncate", 2.0, [2.0, 0.0, 2.0, 1.0, 1.0, 1.0]),
        (torch.zeros(6), "sequence_truncate", 2.0, [1.0] * 6),  # engines that agree change nothing
    ):
        weights = importance_weights(log_ratio, BATCH, mode=mode, clip_max=clip_max)
        torch.testing.assert_close(weights, torch.tensor(expected))
    assert weight_metrics(far, BATCH, mode="token_truncate", clip_max=2.0)["truncated_ratio"] == pytest.approx(1 / 3)


def test_metrics_by_hand():
    token = weight_metrics(LOG_RATIO, BATCH, mode="token_truncate", clip_max=3.0)
    assert token["k3"] == pytest.approx(sum(r - 1 - math.log(r) for r in RATIOS) / 6)
    assert token["worst_sequence"] == pytest.approx(math.log(4))
    assert token["truncated_ratio"] == pytest.approx(1 / 6)
    # weights 2, 1/2, 3, 1, 1/2, 1/2: (7.5)² / (6 · 14.75)
    assert token["effective_sample_size"] == pytest.approx(7.5**2 / (6 * 14.75))
    assert token["importance_weight_mean"] == pytest.approx(7.5 / 6)
    sequence = weight_metrics(LOG_RATIO, BATCH, mode="sequence_truncate", clip_max=3.0)
    # weights 1, 3, 1/4, one per answer however long it is
    assert sequence["truncated_ratio"] == pytest.approx(1 / 3)
    assert sequence["effective_sample_size"] == pytest.approx(4.25**2 / (3 * (1 + 9 + 1 / 16)))
    assert sequence["k3"] == token["k3"]


def test_an_answer_weighs_the_same_in_any_company():
    kept = BATCH.select([2, 0])
    rows = BATCH.select_completion_rows([2, 0])
    for mode in ("token_truncate", "sequence_truncate"):
        whole = importance_weights(LOG_RATIO, BATCH, mode=mode, clip_max=3.0)
        assert torch.equal(importance_weights(LOG_RATIO[rows], kept, mode=mode, clip_max=3.0), whole[rows])


def test_bad_input():
    for change, message in [
        ({"mode": "token_mask"}, "mode: expected one of .*, got 'token_mask'"),
        ({"clip_max": 0.0}, "clip_max: expected a positive number, got 0.0"),
        ({"clip_max": float("nan")}, "clip_max: expected a positive number, got nan"),
        ({"log_ratio_M": torch.zeros(5)}, r"log_ratio_M: expected one number per completion token, \[6\], got \[5\]"),
        ({"log_ratio_M": torch.zeros(3, 2)}, r"log_ratio_M: expected .*, got \[3, 2\]"),
    ]:
        options = {"log_ratio_M": LOG_RATIO, "batch": BATCH, "mode": "token_truncate", "clip_max": 2.0, **change}
        with pytest.raises(ValueError, match=message):
            importance_weights(**options)
