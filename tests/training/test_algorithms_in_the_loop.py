"""Every algorithm through the training loop: what it holds, what it learns, what it leaves out, and that it resumes."""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf_engine.errors import ConfigError, EngineError, MismatchError
from rlhf_engine.rollout import PromptBatch
from rlhf_engine.scoring.experience import Scoring
from rlhf_engine.training.rl import RlTrainer, make_algorithm
from rlhf_engine.training.update import Schedule, alone, update
from tests.training.test_data import train_config, write_reward
from tests.training.test_rl import Stop, metrics, same, stop_after, trained

ALGORITHMS = {
    "remax": {"algorithm": "remax"},
    "remax-departures": {
        "algorithm": "remax", "kl_in": "loss", "gamma": 0.9, "advantage_clip": 1.0, "loss_type": "own_length",
    },
    "rloo": {"algorithm": "rloo"},
    "rloo-vanilla": {"algorithm": "rloo", "loss_type": "vanilla", "num_generations": 2, "entropy_coef": 0.01},
    "reinforce": {"algorithm": "reinforce"},
    "reinforce-shared": {"algorithm": "reinforce", "method": "j_hydra_ppo"},
    "grpo": {"algorithm": "grpo", "num_mini_batches": 2, "num_ppo_epochs": 2},
    "grpo-plain": {"algorithm": "grpo", "loss_type": "dr_grpo", "scale_rewards": "none"},
    "online_dpo": {"algorithm": "online_dpo"},
    "online_dpo-ipo": {"algorithm": "online_dpo", "loss_type": "ipo", "num_generations": 2},
    "best_of_n": {"algorithm": "best_of_n"},
}  # fmt: skip


def slowly(*names: str) -> list[Any]:
    """Parameters of the long lane."""
    return [pytest.param(name, marks=pytest.mark.long) for name in sorted(names)]


HALVES = """
return [float(sum(7 + 2 * i == t % 50 for i, t in enumerate(row))) + 0.1 * sum(row) / 50 for row in completion_ids]
"""


@pytest.fixture
def reward(tmp_path):
    """A reward that no two answers share by chance."""
    return write_reward(tmp_path, HALVES)


def config(model, folder, reward, **changes):
    options = {"num_mini_batches": None, "num_ppo_epochs": None, "reward_funcs": [reward], "generation_batch_size": 16}
    return train_config(model, folder, **{**options, **changes})


def first_step(trainer, **changes):
    """What the first step would learn from: (prepared, as it was scored, as it was drawn)."""
    made = dataclasses.replace(trainer.config, **changes)
    trainer.rollouts.sync(0)
    prompts = PromptBatch.of(
        [i % len(trainer.train_set.rows) for i in range(made.prompts_per_step)],
        trainer.train_set.ids,
        generations=made.generations,
        with_greedy=made.facts.with_greedy,
    )
    rollout = trainer.rollouts.generate(prompts, trainer.sampling(0))
    scoring = Scoring(trainer.model, trainer.scorer, trainer.tokenizer, trainer.train_set)
    scored = scoring.experience(rollout, prompts, made, 0)
    answers, metrics = make_algorithm(made).learn_from(scored)
    return SimpleNamespace(answers=answers, metrics=metrics), scored, rollout


def test_micro_batches_add_up_to_the_gradient_of_the_minibatch(model, reward, tmp_path):
    for case in ("remax-departures", "rloo", "reinforce-shared", "grpo", "online_dpo-ipo", "best_of_n"):
        trainer = RlTrainer(config(model, tmp_path / case, reward, **ALGORITHMS[case]))
        made, _, _ = first_step(trainer)
        found = []

        def step(trainer=trainer, found=found):
            found.append({n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None})
            trainer.model.zero_grad(set_to_none=True)
            return {}

        for size in (99, 3):
            schedule = Schedule(num_epochs=1, num_mini_batches=1, micro_batch_size=size)
            algorithm = make_algorithm(trainer.config)
            stats = alone(update(trainer.model, algorithm, made.answers, schedule, step, seed=0))
            found.append(stats)
        whole, stats, parts, other_stats = found
        assert whole.keys() == parts.keys()
        for name, gradient in whole.items():
            atol, said = 1e-4 * float(gradient.abs().max()) + 1e-9, f"{case}: {name}"
            torch.testing.assert_close(parts[name], gradient, rtol=1e-3, atol=atol, msg=said)
        # before the first update margins are 0 up to rounding, which decides how many are above it
        for name in stats.keys() - {"micro_batch_size", "rewards/accuracies"}:
            assert other_stats[name] == pytest.approx(stats[name], rel=1e-4, abs=1e-5), (case, name)


@pytest.mark.parametrize("name", ["rloo", *slowly(*(ALGORITHMS.keys() - {"rloo"}))])
def test_the_reward_rises(name, model, tmp_path):
    options = ALGORITHMS[name]
    spec = write_reward(tmp_path, "return [sum(t % 3 == 0 for t in row) / 8 for row in completion_ids]")
    options = {"beta": 0.02, **options} if options["algorithm"] != "best_of_n" else options
    options = {"max_steps": 12, "generation_batch_size": 32, "learning_rate": 2e-2, **options}
    trainer = RlTrainer(config(model, tmp_path / "run", spec, **options))
    trainer.run()
    rewards = [row["reward"] for row in metrics(trainer)]
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.1


def test_without_a_critic_there_is_no_storage_for_one(model, reward, tmp_path):
    trainer = RlTrainer(config(model, tmp_path / "run", reward, algorithm="grpo", max_steps=1))
    trainer.step()
    with_critic = RlTrainer(config(model, tmp_path / "ppo", reward, max_steps=1))
    with_critic.step()
    held, more = trainer.model.held_parameters(), with_critic.model.held_parameters()
    assert held["backbones"] == more["backbones"]
    assert more["slots"] == 2 * held["slots"]
    assert (held["heads"], list(trainer.model.heads)) == (0, [])
    assert list(trainer.optimizer.groups) == ["actor"]
    states = trainer.optimizer.state_tensors()
    assert len(with_critic.optimizer.state_tensors()) > 2 * len(states)
    assert not any("critic" in key or "value" in key for key in states)


def test_remax_pairs_drawn_answers_with_the_greedy_one(model, reward, tmp_path):
    k = 4
    trainer = RlTrainer(config(model, tmp_path / "run", reward, algorithm="remax", beta=0.0, num_generations=k))
    made, scored, rollout = first_step(trainer)
    assert rollout.batch.n_sequences == 16
    assert scored.batch.n_sequences == len(scored.greedy_scores_N) == 16 // k * (k - 1)
    assert rollout.stats.prompts <= 16 // k  # all answers share the prompt's prefill
    drawn = [i for i in range(16) if i % k < k - 1]
    for i, place in enumerate(drawn):
        assert scored.batch.completion_tokens(i) == rollout.batch.completion_tokens(place)
    assert all(len(set(scores)) == 1 for scores in scored.greedy_scores_N.view(-1, k - 1).tolist())
    again, other, _ = first_step(trainer)
    assert torch.equal(other.greedy_scores_N, scored.greedy_scores_N)
    expected = (scored.scores_N - scored.greedy_scores_N)[scored.batch.sequence_of_M]
    assert torch.equal(made.answers.advantages_M, expected)
    assert torch.equal(again.answers.advantages_M, expected)


@pytest.mark.parametrize("name", ["remax", "rloo"])
def test_a_step_asks_for_the_greedy_answers_it_needs_and_no_others(name, model, reward, tmp_path, monkeypatch):
    trainer = RlTrainer(config(model, tmp_path / "run", reward, algorithm=name))
    asked = []
    generate = trainer.rollouts.generate

    def noted(prompts, sampling):
        asked.append(prompts)
        return generate(prompts, sampling)

    monkeypatch.setattr(trainer.rollouts, "generate", noted)
    for step in range(2):
        trainer.step()
        assert list(asked[step].greedy) == ([False, True] * 8 if name == "remax" else [False] * 16)
        assert list(asked[step].sample_ids) == list(range(16 * step, 16 * step + 16))
        k, prompts = 2 if name == "remax" else 4, asked[step].prompts
        assert all(prompts[i] == prompts[i - i % k] for i in range(16))


def test_baselines_stay_with_their_prompts_where_answers_are_left_out(model, tmp_path):
    """The greedy answer of the second prompt has no score: the pairs after it must not move up."""
    spec = write_reward(tmp_path, "return [None if i == 3 else float(i) for i, _ in enumerate(completion_ids)]")
    _, scored, _ = first_step(RlTrainer(config(model, tmp_path / "run", spec, algorithm="remax")))
    assert scored.scores_N.tolist() == [0.0, *(float(i) for i in range(4, 16, 2))]
    distinct = scored.greedy_scores_N - scored.scores_N
    assert set(distinct.tolist()) <= {0.0, 1.0}  # 0 where both answers are the same tokens
    assert 1.0 in distinct.tolist()


@pytest.mark.parametrize(
    ("name", "left"), [("remax", "a drawn answer and the greedy one"), ("ppo", "1 of its answers")]
)
def test_a_step_without_rewards_to_learn_from_changes_nothing_and_says_so_once(name, left, model, tmp_path):
    few = "i % 4 == 0" if name != "ppo" else "False"
    body = f"return [float(i) if trainer_state.global_step == 2 or {few} else None for i, _ in enumerate(completions)]"
    spec = write_reward(tmp_path, f"trainer_state = columns['trainer_state']\n{body}")
    trainer = RlTrainer(config(model, tmp_path / "run", spec, algorithm=name, max_steps=3))
    weights, seen = trained(trainer), []

    def on_step(step, row):
        seen.append((same(trained(trainer), weights), "reward" in row, row["kl"], row["completions/skipped"]))

    with pytest.warns(UserWarning, match=left) as caught:
        trainer.run(on_step)
    assert len({str(w.message) for w in caught if "nothing is learned in such a step" in str(w.message)}) == 1
    skipped = 8.0 if name == "remax" else 16.0
    assert [(*row[:2], abs(row[2]) < 1e-6, row[3]) for row in seen] == [
        (True, False, True, skipped),
        (True, False, True, skipped),
        (False, True, True, 0.0),
    ]
    assert (trainer.output / "curves.png").exists()


def test_a_run_does_not_go_on_as_another_algorithm(model, reward, tmp_path):
    made = config(model, tmp_path / "run", reward, algorithm="ppo", num_mini_batches=1, save_steps=1)
    with pytest.raises(Stop):
        RlTrainer(made).run(stop_after(2))
    other = dataclasses.replace(made, algorithm="remax", resume_from_checkpoint="auto")
    with pytest.raises(ConfigError, match=r"algorithm: expected 'ppo' as in .*checkpoint-2, got 'remax'"):
        RlTrainer(other)


def test_a_role_is_watched_until_an_update_has_moved_it(model, reward, tmp_path, monkeypatch):
    """The critic has a rate of 0 and is never seen to move; the actor's first update does nothing."""
    made = config(model, tmp_path / "run", reward, algorithm="reinforce", critic_learning_rate=0.0, max_steps=3)
    trainer = RlTrainer(made)
    step = trainer.optimizer.step

    def leaves_the_actor():
        kept = {p: p.detach().clone() for p in trainer.optimizer.groups["actor"].values()}
        norms = step()
        with torch.no_grad():
            for p, before in kept.items():
                p.copy_(before)
        return norms

    monkeypatch.setattr(trainer.optimizer, "step", leaves_the_actor)
    with pytest.raises(EngineError, match="actor: its gradient was not zero, yet the first update changed none of its"):
        trainer.step()
    moving = RlTrainer(dataclasses.replace(made, output_dir=str(tmp_path / "moving")))
    moving.step()
    assert moving.policy._unmoved == {"critic"}


def test_a_first_forward_that_differs_from_the_scoring_pass_stops_the_run(model, reward, tmp_path, monkeypatch):
    trainer = RlTrainer(config(model, tmp_path / "run", reward, algorithm="grpo", exact=False))
    before = trained(trainer)
    score = trainer.model.score

    def off(*args, **options):
        found = score(*args, **options)
        return dataclasses.replace(found, logprobs_M=found.logprobs_M + 0.005)  # within the rollout's bound of a token

    monkeypatch.setattr(trainer.model, "score", off)
    monkeypatch.setattr("rlhf_engine.scoring.experience._check_agreement", lambda *_: None)  # which comes before
    monkeypatch.setattr("rlhf_engine.training.rl.MISMATCH_MAX_FACTOR", 40)
    with pytest.raises(MismatchError, match=r"update's first forward differ by up to 0.005.*expected at most 0.004"):
        trainer.step()
    assert same(trained(trainer), before)


def test_online_dpo_starts_at_log_2_and_ties_teach_nothing(model, reward, tmp_path):
    trainer = RlTrainer(config(model, tmp_path / "run", reward, algorithm="online_dpo", max_steps=2))
    found = trainer.step()
    assert found["policy/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert found["pairs/score_gap"] > 0
    constant = write_reward(tmp_path, "return [1.0 for _ in completion_ids]", name="constant")
    tied = RlTrainer(config(model, tmp_path / "tied", constant, algorithm="online_dpo", max_steps=2))
    before = trained(tied)
    found = tied.step()
    assert (found["optimizer_steps"], found["pairs/tied_ratio"]) == (0.0, 1.0)
    assert same(trained(tied), before)
    assert tied.state.policy_version == 0


def test_online_dpo_prefers_answers_that_end(model, tmp_path):
    """The penalty for a missing end decides between answers that score the same."""
    spec = write_reward(tmp_path, "return [1.0 for _ in completion_ids]")
    options = {"algorithm": "online_dpo", "missing_eos_penalty": 1.0, "max_completion_length": 12}
    trainer = RlTrainer(config(model, tmp_path / "run", spec, generation_batch_size=64, **options))
    made, scored, _ = first_step(trainer)
    assert set(scored.scores_N.tolist()) == {0.0, 1.0}
    pairs = made.answers.batch
    ends = [pairs.completion_tokens(i)[-1] in trainer.sampling(0).eos_token_ids for i in range(pairs.n_sequences)]
    assert ends == [True, False] * (pairs.n_sequences // 2)


def test_best_of_n_learns_the_best_answer_of_each_prompt(model, reward, tmp_path):
    trainer = RlTrainer(config(model, tmp_path / "run", reward, algorithm="best_of_n"))
    made, scored, _ = first_step(trainer)
    chosen = made.answers.batch
    assert chosen.n_sequences == 4
    best = scored.scores_N.view(4, 4).argmax(1).tolist()
    for prompt, place in enumerate(best):
        assert chosen.completion_tokens(prompt) == scored.batch.completion_tokens(4 * prompt + place)
    assert made.metrics["reward/best"] == pytest.approx(float(scored.scores_N.view(4, 4).max(1).values.mean()))


@pytest.mark.parametrize(
    ("name", "left_out", "skipped"),
    [("remax", (0, 3), 2), ("rloo", (0, 4, 5, 6), 5), ("online_dpo", (0, 4, 5, 6), 5), ("best_of_n", (0, 4, 5, 6), 4)],
)
def test_answers_without_a_reward_are_left_out_with_what_needs_them(name, left_out, skipped, model, tmp_path):
    """ReMax: the drawn answer of prompt 0 and the greedy one of prompt 1; the others: three of prompt 1's four."""
    spec = write_reward(
        tmp_path, f"return [None if i in {left_out} else float(i % 5 + i % 3) for i, _ in enumerate(completion_ids)]"
    )
    made = config(model, tmp_path / "run", spec, algorithm=name)
    trainer = RlTrainer(made)
    made, scored, _ = first_step(trainer)
    n_drawn = 8 if name == "remax" else 16
    assert scored.batch.n_sequences == n_drawn - skipped
    assert scored.metrics["completions/skipped"] == skipped
    assert made.answers.batch.n_sequences > 0
    assert trainer.step()["optimizer_steps"] == 1.0


SERVED = {"vllm_server_base_url": "http://localhost:1"}
CONTRADICTIONS = [
    ("rloo", {"num_generations": 1}, "num_generations: expected at least 2 for rloo, got 1"),
    ("remax", {"num_generations": 1}, "num_generations: expected at least 2 for remax, got 1"),
    ("remax", {"num_generations": 4, "num_mini_batches": 5}, r"num_mini_batches \(5\), got 16, 12 to learn from"),
    ("grpo", {"num_generations": 3}, r"generation_batch_size: expected a multiple of num_generations \(3\)"),
    ("online_dpo", {"num_mini_batches": 3}, r"a multiple of num_mini_batches \(3\), got 16, 4 to learn from"),
    ("grpo", {"loss_type": "ipo"}, "loss_type: expected one of grpo, dapo, dr_grpo for grpo, got 'ipo'"),
    ("ppo", {"loss_type": "grpo"}, "loss_type: expected it unset for ppo, which does not read it"),
    ("remax", {"lam": 0.9}, r"lam: expected it unset for remax, .*\(ppo; a file may .* theirs\), got 0.9"),
    ("rloo", {"critic_learning_rate": 1.0}, "critic_learning_rate: expected it unset for rloo"),
    ("online_dpo", {"beta": 0.0}, "beta: expected more than 0 for online_dpo"),
    ("remax", {"kl_in": "loss", "kl_estimator": "k3"}, "kl_estimator: expected it unset for remax"),
    ("rloo", {"loss_type": "vanilla", "cliprange": 0.1}, "cliprange: expected it unset for rloo"),
    ("remax", {"temperature": 0.7, **SERVED}, "temperature: expected 1 for remax with vllm_server_base_url"),
    ("reinforce", {"beta": 1.5}, "beta: expected at most 1 for reinforce"),
]


def test_options_that_contradict_the_algorithm_are_refused(tmp_path):
    by_token = {**SERVED, "off_policy_correction": "token_truncate"}
    proximal = ("rloo", by_token, "correction: expected one of sequence_truncate, none for proximal rloo")
    for algorithm, options, message in (*CONTRADICTIONS, proximal):
        with pytest.raises(ConfigError, match=message):
            config(tmp_path / "m", tmp_path / "run", "reward_model", algorithm=algorithm, **options)
