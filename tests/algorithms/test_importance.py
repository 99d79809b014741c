"""Truncated importance weights: numbers worked out by hand, and what must not change them."""

import math

import pytest
import torch

from rlhf_engine.algorithms.sequences import importance_weights, sequence_log_ratio, weight_metrics
from rlhf_engine.hydra import PackedBatch

# answers of 2, 1 and 3 tokens; ratios 2, 1/2 | 4 | 1, 1/2, 1/2
BATCH = PackedBatch.from_lists([[5], [6, 7], [8]], [[1, 2], [3], [4, 5, 6]])
RATIOS = [2.0, 0.5, 4.0, 1.0, 0.5, 0.5]
LOG_RATIO = torch.tensor(RATIOS).log()


def test_token_level_by_hand():
    weights = importance_weights(LOG_RATIO, BATCH, mode="token_truncate", clip_max=3.0)
    torch.testing.assert_close(weights, torch.tensor([2.0, 0.5, 3.0, 1.0, 0.5, 0.5]))
    # truncated from above only: a small weight stays what it is
    weights = importance_weights(LOG_RATIO, BATCH, mode="token_truncate", clip_max=1.0)
    torch.testing.assert_close(weights, torch.tensor([1.0, 0.5, 1.0, 1.0, 0.5, 0.5]))


def test_sequence_level_by_hand():
    torch.testing.assert_close(sequence_log_ratio(LOG_RATIO, BATCH).exp(), torch.tensor([1.0, 4.0, 0.25]))
    weights = importance_weights(LOG_RATIO, BATCH, mode="sequence_truncate", clip_max=3.0)
    torch.testing.assert_close(weights, torch.tensor([1.0, 1.0, 3.0, 0.25, 0.25, 0.25]))


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


def test_engines_that_agree_change_nothing():
    zero = torch.zeros(6)
    for mode in ("token_truncate", "sequence_truncate"):
        assert torch.equal(importance_weights(zero, BATCH, mode=mode, clip_max=2.0), torch.ones(6))
        found = weight_metrics(zero, BATCH, mode=mode, clip_max=2.0)
        assert found == {
            "k3": 0.0,
            "worst_sequence": 0.0,
            "truncated_ratio": 0.0,
            "effective_sample_size": 1.0,
            "importance_weight_mean": 1.0,
        }


def test_an_answer_weighs_the_same_in_any_company():
    kept = BATCH.select([2, 0])
    rows = BATCH.select_completion_rows([2, 0])
    for mode in ("token_truncate", "sequence_truncate"):
        whole = importance_weights(LOG_RATIO, BATCH, mode=mode, clip_max=3.0)
        assert torch.equal(importance_weights(LOG_RATIO[rows], kept, mode=mode, clip_max=3.0), whole[rows])


def test_ratios_beyond_floating_point_are_truncated_too():
    far = torch.tensor([200.0, -200.0, 200.0, 0.0, 0.0, 0.0])
    weights = importance_weights(far, BATCH, mode="token_truncate", clip_max=2.0)
    assert torch.equal(weights, torch.tensor([2.0, 0.0, 2.0, 1.0, 1.0, 1.0]))
    assert weight_metrics(far, BATCH, mode="token_truncate", clip_max=2.0)["truncated_ratio"] == pytest.approx(1 / 3)


def test_weighting_advantages_is_weighting_the_loss_of_each_token():
    """max(−wAρ, −wA clip ρ) = w · max(−Aρ, −A clip ρ), on both sides of the clip and for both signs of A."""
    advantages, ratio = torch.tensor([1.0, -2.0, 3.0, -1.0, 0.5, -0.5]), torch.tensor([1.5, 1.5, 0.5, 0.5, 1.0, 0.9])
    weights = importance_weights(LOG_RATIO, BATCH, mode="token_truncate", clip_max=3.0)

    def loss(a: torch.Tensor) -> torch.Tensor:
        return torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2))

    torch.testing.assert_close(loss(weights * advantages), weights * loss(advantages))


def test_bad_input():
    for change, message in [
        ({"mode": "token_mask"}, "mode: expected 'token_truncate' or 'sequence_truncate', got 'token_mask'"),
        ({"clip_max": 0.0}, "clip_max: expected a positive number, got 0.0"),
        ({"clip_max": float("nan")}, "clip_max: expected a positive number, got nan"),
        ({"log_ratio_M": torch.zeros(5)}, r"log_ratio_M: expected one number per completion token, \[6\], got \[5\]"),
        ({"log_ratio_M": torch.zeros(3, 2)}, r"log_ratio_M: expected .*, got \[3, 2\]"),
    ]:
        options = {"log_ratio_M": LOG_RATIO, "batch": BATCH, "mode": "token_truncate", "clip_max": 2.0, **change}
        with pytest.raises(ValueError, match=message):
            importance_weights(**options)
