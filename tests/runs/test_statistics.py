"""Statistics of evaluations beside enumeration and simulation, and the true preference between two policies."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf_engine.commands.main import main
from rlhf_engine.runs.statistics import best_of_n_curve, mean_by_prompt, mean_of_runs, ratio_by_prompt
from tests.tools.test_evaluate import write_adapter
from tests.training.test_data import write_rows


def test_interval_of_a_mean_has_its_width_and_covers_what_it_should():
    generator = np.random.default_rng(0)
    covered = 0
    for trial in range(120):
        values = generator.normal(0.3, 1.0, size=80)
        found = mean_by_prompt(values.tolist(), seed=trial)
        assert found.value == pytest.approx(values.mean(), abs=1e-12)
        covered += found.low <= 0.3 <= found.high
        # normal theory: 1.96 standard errors to either side
        assert (found.high - found.low) == pytest.approx(2 * 1.96 * values.std() / math.sqrt(80), rel=0.12)
    assert 103 <= covered <= 119  # 114 expected; percentile intervals of 80 rows are a little short


def test_one_prompt_has_no_width_and_equal_values_have_none():
    assert tuple(mean_by_prompt([2.0])) == (2.0, 2.0, 2.0)
    assert tuple(mean_by_prompt([0.5] * 7)) == (0.5, 0.5, 0.5)


def test_runs_are_few_and_their_interval_is_student_s():
    assert mean_of_runs([1.0, 2.0, 3.0]) == pytest.approx((2.0, 2 - 4.30265 / 3**0.5, 2 + 4.30265 / 3**0.5), rel=1e-5)


def test_ratio_is_of_sums_and_not_a_mean_of_ratios():
    found = ratio_by_prompt([10.0, 1.0], [100.0, 1.0])
    assert found.value == pytest.approx(11 / 101)
    assert found.low == pytest.approx(0.1)
    assert found.high == pytest.approx(1.0)


def test_best_of_n_is_the_mean_over_all_sets():
    rewards = [[0.1, 2.0, -1.0, 0.7, 0.7], [3.0, 1.0, 2.0, 5.0, 4.0]]
    curve = best_of_n_curve(rewards)
    assert [best["n"] for best in curve] == [1, 2, 4, 5]
    for best in curve:
        sets = [np.mean([max(chosen) for chosen in itertools.combinations(row, best["n"])]) for row in rewards]
        assert best["reward"][0] == pytest.approx(np.mean(sets), abs=1e-12)
        assert best["kl"] == pytest.approx(math.log(best["n"]) - (best["n"] - 1) / best["n"])


def test_kl_of_best_of_n_is_that_of_the_distribution_of_the_best():
    # of 500 answers with different rewards: the best of n is answer i with probability (i/m)^n − ((i − 1)/m)^n
    m, n = 500, 4
    i = torch.arange(1, m + 1, dtype=torch.float64)
    p = (i / m) ** n - ((i - 1) / m) ** n
    kl = float((p * (p * m).log()).sum())
    (formula,) = [best["kl"] for best in best_of_n_curve([[0.0] * n]) if best["n"] == n]
    assert kl == pytest.approx(formula, abs=5e-3)


JUDGE = """
def score(completions, **columns):
    return [float(text.lower().count(" she") + text.lower().count(" he")) for text in completions]
"""
PROMPTS = [f"Once upon a time there was {what} who liked to {verb}" for what in (
    "a girl", "a boy", "a dog", "a cat", "a bird", "a king", "a fish", "a bear",
) for verb in ("play", "sing", "run", "eat", "sleep", "swim")]  # fmt: skip


def evaluate(base: Path, folder: Path, draws: int, name: str) -> dict:
    argv = ["evaluate", "--model_name_or_path", str(base), "--models", f"other={folder / 'adapter'}", "--dataset_name",
            str(folder / "prompts.jsonl"), "--reward_funcs", f"{folder / 'judge.py'}:score", "--output_dir",
            str(folder / name), "--num_generations", str(draws), "--max_completion_length", "40",
            "--temperature", "0.7", "--seed", str(draws)]  # fmt: skip
    assert main(argv) == 0
    return json.loads((folder / name / "results.json").read_text())


@pytest.mark.long
def test_two_policies_of_a_real_model(stories, tmp_path):
    write_rows(tmp_path / "prompts.jsonl", [{"prompt": p} for p in PROMPTS])
    (tmp_path / "judge.py").write_text(JUDGE)
    write_adapter(stories, tmp_path / "adapter", seed=5, scale=0.05)
    few = evaluate(stories, tmp_path, 1, "few")["models"]["other"]
    evaluate(stories, tmp_path, 24, "many")
    rewards: dict[tuple[str, int], list[float]] = {}
    names: dict = {}
    exec(JUDGE, names)
    for line in (tmp_path / "many" / "answers.jsonl").read_text().splitlines():
        row = json.loads(line)
        rewards.setdefault((row["model"], row["prompt"]), []).append(names["score"]([row["text"]])[0])
    shares = []
    for i in range(len(PROMPTS)):  # every answer of one against every answer of the other
        pairs = list(itertools.product(rewards["other", i], rewards["base", i]))
        shares.append(sum(0.5 if a == b else float(a > b) for a, b in pairs) / len(pairs))
    truth = sum(shares) / len(shares)
    assert abs(truth - 0.5) > 0.02, "the two policies are alike"
    _, low, high = few["win_rate"]
    assert low <= truth <= high
    assert high - low < 0.35


@pytest.mark.long
def test_the_demos_known_preference(tmp_path):
    """The demo judges its policies itself, by a preference that no training step sees."""
    demo = tmp_path / "demo"
    assert main(["demo", "--output_dir", str(demo)]) == 0
    own = json.loads((demo / "result.json").read_text())
    (tmp_path / "judge.py").write_text(
        "from rlhf_engine.commands.demo_task import prefer\n\n\ndef judge(prompts, completions):\n"
        "    return [1.0 - prefer(prompt, a, b) for prompt, (a, b) in zip(prompts, completions, strict=True)]\n"
    )
    argv = ["evaluate", "--model_name_or_path", str(demo / "sft"), "--models", f"ppo={demo / 'rl'}", "--dataset_name",
            str(demo / "heldout.jsonl"), "--judge", f"{tmp_path / 'judge.py'}:judge", "--reward_funcs", "reward_model",
            "--output_dir", str(tmp_path / "evaluation"), "--max_completion_length", "40", "--temperature", "0.7",
            "--seed", "1"]  # fmt: skip
    assert main(argv) == 0
    results = json.loads((tmp_path / "evaluation" / "results.json").read_text())
    _, low, high = results["models"]["ppo"]["win_rate"]
    assert low <= own["win_rate"] <= high
    assert results["models"]["base"]["reward"][0] == pytest.approx(own["reward_before"], abs=0.3)
    assert results["models"]["ppo"]["reward"][0] == pytest.approx(own["reward_after"], abs=0.3)
