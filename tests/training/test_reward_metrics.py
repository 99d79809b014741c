"""Metrics of reward models against their definitions by brute force, with many ties, in any order of rows."""

import itertools
import math

import numpy as np
import pytest
import torch

from rlhf_engine.training import reward_metrics as metrics

SEEDS = range(6)


def draw(seed: int, n: int = 41, levels: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores on few levels, 0 among them, and labels that go with them somewhat."""
    generator = torch.Generator().manual_seed(seed)
    score = (torch.randint(0, levels, (n,), generator=generator) - levels // 2).double() / 2
    label = (score + torch.randn(n, generator=generator)) > 0
    assert label.any()
    assert not label.all()
    return score, label


def half(x: float) -> float:
    """What one comparison counts: 1, ½ for a tie, 0."""
    return 1.0 if x > 0 else 0.5 if x == 0 else 0.0


def auc(score: torch.Tensor, label: torch.Tensor) -> float | None:
    return metrics.pointwise_metrics(score, label)["auc"]


def test_auc_is_the_share_of_ordered_pairs():
    for seed in SEEDS:
        score, label = draw(seed)
        ones, zeros = score[label].tolist(), score[~label].tolist()
        by_hand = sum(half(a - b) for a in ones for b in zeros) / (len(ones) * len(zeros))
        assert auc(score, label) == by_hand  # sums of halves are exact
        assert auc(-score, label) == pytest.approx(1 - by_hand, abs=1e-15)
        assert auc(score.exp(), label) == by_hand  # order is all that counts
        order = torch.randperm(len(score), generator=torch.Generator().manual_seed(seed))
        assert auc(score[order], label[order]) == by_hand


def test_auc_of_many_rows_is_exact():
    n = 200_000  # n₁ n₀ is beyond 2^32, counts below 2^53
    label = torch.arange(n) % 2 == 0
    assert auc(torch.zeros(n), label) == 0.5
    assert auc(label.float(), label) == 1.0


def test_accuracies_count_ties_half():
    for seed in SEEDS:
        score, label = draw(seed)
        rows = list(zip(score.tolist(), label.tolist(), strict=True))
        right = [half(s if p else -s) for s, p in rows]
        assert metrics.pointwise_metrics(score, label)["accuracy"] == sum(right) / len(right)
        by_class = [[half(s if p else -s) for s, p in rows if p is wanted] for wanted in (True, False)]
        by_hand = 0.5 * sum(sum(c) / len(c) for c in by_class)
        assert metrics.pointwise_metrics(score, label)["balanced_accuracy"] == pytest.approx(by_hand, abs=1e-15)
        assert metrics.pairwise_metrics(score, torch.zeros_like(score))["accuracy"] == sum(
            map(half, score.tolist())
        ) / len(score)


def calibration_by_hand(probability: list[float], outcome: list[float], bins: int) -> float:
    """The definition, with the mean over the orders of tied rows taken row by row."""
    n = len(probability)
    rows = sorted(probability)
    means = {q: np.mean([p for r, p in zip(probability, outcome, strict=True) if r == q]) for q in rows}
    total = 0.0
    for part in np.array_split(np.arange(n), bins):
        if len(part):
            q = np.mean([rows[i] for i in part])
            p = np.mean([means[rows[i]] for i in part])
            total += len(part) / n * abs(q - p)
    return total


def test_calibration_error_and_brier():
    for seed, bins in itertools.product(SEEDS, (1, 3, 10, 64)):
        score, label = draw(seed)
        q = torch.sigmoid(score)
        found = metrics.calibration_error(q, label.double(), bins=bins)
        assert found == pytest.approx(calibration_by_hand(q.tolist(), label.double().tolist(), bins), abs=1e-12)
        pairs = list(zip(q.tolist(), label.tolist(), strict=True))
        by_hand = sum((a - b) ** 2 for a, b in pairs) / len(pairs)
        assert metrics.pointwise_metrics(score, label)["brier"] == pytest.approx(by_hand, abs=1e-14)
        order = torch.randperm(len(q), generator=torch.Generator().manual_seed(seed))
        assert metrics.calibration_error(q[order], label[order].double(), bins=bins) == found


@pytest.mark.parametrize("weight", [1.0, 4.0])
def test_pointwise_metrics_together(weight):
    score, label = draw(3)
    found = metrics.pointwise_metrics(score.float(), label, pos_weight=weight)
    assert set(found) == set(metrics.POINTWISE_METRICS)
    sigma = [1 / (1 + math.exp(-s)) for s in score.tolist()]
    terms = [-weight * math.log(q) if p else -math.log(1 - q) for q, p in zip(sigma, label.tolist(), strict=True)]
    assert found["loss"] == pytest.approx(sum(terms) / len(terms), rel=1e-9)
    assert found["auc"] == auc(score, label)
    assert found["margin"] == pytest.approx(float(score[label].mean() - score[~label].mean()))
    # a reward of log-odds + log w is the perfectly calibrated answer to weight w
    odds = torch.tensor([3.0, 1 / 3])
    labels = torch.tensor([True, True, True, False, True, False, False, False])
    rewards = (odds.log() + math.log(weight)).repeat_interleave(4)
    perfect = metrics.pointwise_metrics(rewards.double(), labels, pos_weight=weight)
    assert perfect["calibration_error"] == pytest.approx(0, abs=1e-6)
    assert perfect["brier"] == pytest.approx(3 / 16, abs=1e-6)


def test_pairwise_metrics_together():
    chosen, rejected = draw(1)[0], draw(2)[0]
    margin = (chosen - rejected).tolist()
    found = metrics.pairwise_metrics(chosen, rejected, center=0.1)
    assert set(found) == set(metrics.PAIRWISE_METRICS)
    loss = sum(math.log1p(math.exp(-m)) for m in margin) / len(margin)
    loss += 0.1 * sum((a + b) ** 2 for a, b in zip(chosen.tolist(), rejected.tolist(), strict=True)) / len(margin)
    assert found["loss"] == pytest.approx(loss, rel=1e-12)
    assert found["accuracy"] == sum(map(half, margin)) / len(margin)
    assert found["margin"] == pytest.approx(sum(margin) / len(margin))
    sigma = [1 / (1 + math.exp(-m)) for m in margin]
    assert found["brier"] == pytest.approx(sum((1 - q) ** 2 for q in sigma) / len(sigma))
    higher = [max(q, 1 - q) for q in sigma]
    by_hand = calibration_by_hand([round(q, 14) for q in higher], [half(m) for m in margin], metrics.CALIBRATION_BINS)
    assert found["calibration_error"] == pytest.approx(by_hand, abs=1e-9)


def test_one_class_has_no_auc():
    for label in (True, False):
        found = metrics.pointwise_metrics(torch.tensor([1.0, -1.0]), torch.tensor([label, label]))
        assert found["auc"] is found["balanced_accuracy"] is found["margin"] is None
        assert found["accuracy"] == 0.5


REFUSED = [
        (lambda: auc(torch.tensor([1.0, math.nan]), torch.tensor([1, 0])), "reward_N: .* got 1 that"),
        (lambda: auc(torch.ones(2), torch.ones(3)), r"label_N: expected 2 labels .* got shape \(3,\)"),
        (lambda: auc(torch.ones(2), torch.tensor([0, 2])), "label_N: expected only 0 and 1"),
        (lambda: auc(torch.ones(0), torch.ones(0)), "reward_N: expected at least one number"),
        (lambda: auc(torch.ones(2, 1), torch.ones(2, 1)), "reward_N: expected at least one number in a te"),
        (lambda: metrics.pairwise_metrics(torch.ones(2), torch.ones(3)), "rejected_P: expected 2 rewards like"),
    ]  # fmt: skip


def test_what_is_refused():
    for call, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            call()


def test_intervals_keep_groups_together():
    """A bootstrap over groups in numpy; rows that stand alone would give a much narrower interval."""
    draw_ = np.random.default_rng(1)
    groups = np.repeat(np.arange(30), 8)
    label = np.repeat(draw_.random(30) < 0.5, 8)  # one label per group
    score = np.round(np.repeat(draw_.normal(size=30), 8) + 0.7 * label + 0.1 * draw_.normal(size=240), 1)
    higher = (score[:, None] > score) + 0.5 * (score[:, None] == score)
    aucs, accuracies = [], []
    for _ in range(4000):
        weight = np.bincount(draw_.integers(0, 30, 30), minlength=30)[groups]
        pairs = np.outer(weight * label, weight * ~label)
        aucs.append((pairs * higher).sum() / pairs.sum())
        right = np.where(score == 0, 0.5, (score > 0) == label)
        accuracies.append((weight * right).sum() / weight.sum())
    found = metrics.intervals(torch.tensor(score), torch.tensor(label), [str(g) for g in groups])
    for name, values in (("auc", aucs), ("accuracy", accuracies)):
        edges = np.nanquantile(values, [0.025, 0.975])
        assert [found[f"{name}_low"], found[f"{name}_high"]] == pytest.approx(edges, abs=0.03)
    alone = metrics.intervals(torch.tensor(score), torch.tensor(label), [str(i) for i in range(240)])
    assert found["auc_high"] - found["auc_low"] > 1.5 * (alone["auc_high"] - alone["auc_low"])
    assert set(metrics.intervals(torch.tensor(score), None, [""] * 240)) == {"accuracy_low", "accuracy_high"}
