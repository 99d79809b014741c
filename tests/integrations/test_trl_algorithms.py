"""Trainers behind TRL beside PPO's: what they learn from by hand, one base, resuming, and what they refuse."""

import math

import pytest
import torch

pytest.importorskip("trl", reason="needs trl (pip install 'rlhf-engine[trl]')")

from datasets import Dataset
from peft import LoraConfig

from rlhf_engine.algorithms import reinforce, rloo
from rlhf_engine.errors import ConfigError
from rlhf_engine.integrations.trl import (
    HydraBestOfNConfig,
    HydraBestOfNTrainer,
    HydraConfig,
    HydraGRPOConfig,
    HydraGRPOTrainer,
    HydraOnlineDPOConfig,
    HydraOnlineDPOTrainer,
    HydraReinforceConfig,
    HydraReinforceTrainer,
    HydraRLOOConfig,
    HydraRLOOTrainer,
    ReMaxConfig,
    ReMaxTrainer,
)
from tests.integrations.trl_runs import LORA, QUICK, make_trainer, rollouts, rows, trained, watched, words
from tests.training.test_data import PROMPTS

KINDS = {
    "remax": (ReMaxTrainer, ReMaxConfig),
    "rloo": (HydraRLOOTrainer, HydraRLOOConfig),
    "grpo": (HydraGRPOTrainer, HydraGRPOConfig),
    "best_of_n": (HydraBestOfNTrainer, HydraBestOfNConfig),
    "reinforce": (HydraReinforceTrainer, HydraReinforceConfig),
    "online_dpo": (HydraOnlineDPOTrainer, HydraOnlineDPOConfig),
}
WITHOUT_CRITIC = ("remax", "rloo", "grpo", "best_of_n")


def make(kind, folder, output, reward_funcs=words, *, peft_config=LORA, **changes):
    trainer_class, config_class = KINDS[kind]
    args = config_class(**{**QUICK, "output_dir": str(output), **changes})
    return make_trainer(trainer_class, args, folder, reward_funcs, peft_config=peft_config)


def long_ones(prompts, completions, completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.long] * (kind not in ("remax", "grpo"))) for kind in WITHOUT_CRITIC]
)
def test_it_trains_the_actor_alone_and_resumes_with_the_same_floats(kind, folder, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2}
    whole = make(kind, folder, tmp_path / "whole", ["reward_model", words], **options)
    before = trained(whole)
    assert {name.split(".")[-2] for name in before} == {"default"}
    whole.train()
    after = trained(whole)
    assert not any(torch.equal(before[name], after[name]) for name in before if "lora_B" in name)
    assert not (tmp_path / "whole" / "checkpoint-2" / "heads.safetensors").exists()
    resumed = make(kind, folder, tmp_path / "parts", ["reward_model", words], **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    again = trained(resumed)
    assert all(torch.equal(after[name], again[name]) for name in after)
    first = rows(whole)[0]
    assert abs(float(first["kl"])) < 1e-7
    assert abs(float(first["approx_kl"])) < 1e-10
    assert ("reward/greedy" in first) == (kind == "remax")


def test_remax_takes_the_greedy_score_off_and_each_token_s_kl_to_go(folder, tmp_path):
    trainer = make("remax", folder, tmp_path, long_ones, beta=0.3)
    seen = watched(trainer)
    trainer.train()
    moved = 0.0
    for answers, _, columns, _ in seen:
        lengths, greedy = answers.batch.completion_lens, answers.greedy_scores_N
        assert answers.scores_N.tolist() == [float(n) for n in lengths]
        at = 0
        for i, n in enumerate(lengths):
            kl = answers.kl_M[at : at + n]
            expected = n - greedy[i] - 0.3 * kl.flip(0).cumsum(0).flip(0)
            assert torch.allclose(columns["advantages_M"][at : at + n], expected, atol=1e-5)
            moved = max(moved, float(kl.abs().max()))
            at += n
    assert moved > 1e-3
    # the same prompt has the same greedy answer until the policy moves
    answers, greedy = seen[0].experience, seen[0].experience.greedy_scores_N
    by_prompt: dict[tuple, set] = {}
    for i in range(answers.batch.n_sequences):
        by_prompt.setdefault(tuple(answers.batch.prompt_tokens(i)), set()).add(float(greedy[i]))
    assert all(len(found) == 1 for found in by_prompt.values())


def test_reinforce_learns_values_beside_the_policy(folder, tmp_path):
    trainer = make("reinforce", folder, tmp_path, ["reward_model", words], beta=0.2, gamma=0.9)
    seen, before = watched(trainer), trained(trainer)
    trainer.train()
    after = trained(trainer)
    assert {name.split(".")[-2] for name in before} == {"default", "critic", "value"}
    assert not any(torch.equal(before[name], after[name]) for name in before if "lora_B" in name)
    for answers, _, columns, mask_M in seen:
        assert mask_M.all()
        expected_M = reinforce.returns(answers.scores_N, answers.kl_M, answers.batch, beta=0.2, gamma=0.9)
        assert torch.equal(columns["returns_M"], expected_M)
        assert torch.equal(columns["advantages_M"], expected_M - answers.values_M)
    assert {"value/loss", "value/mean", "value/explained_variance", "policy/loss"} <= rows(trainer)[0].keys()


def test_best_of_n_learns_one_answer_of_each_prompt(folder, tmp_path):
    trainer = make("best_of_n", folder, tmp_path, num_generations=4)
    seen = watched(trainer)
    out = rollouts(trainer)
    trainer.train()
    for (answers, _, columns, mask_M), given in zip(seen, out, strict=True):
        learned = mask_M[answers.batch.last_completion_rows_N].view(-1, 4)
        best = answers.scores_N.view(-1, 4).argmax(1)
        assert torch.equal(learned, torch.nn.functional.one_hot(best, 4).bool())
        assert int(given["num_units_in_batch"]) == len(best)
        assert not columns["advantages_M"].any()
    assert float(rows(trainer)[-1]["reward/best"]) >= float(rows(trainer)[-1]["reward"])


def test_grpo_leaves_a_group_out_that_has_one_score(folder, tmp_path):
    def one_of_four(prompts, completions, completion_ids, **columns):
        return [float(i) if i % 8 < 5 else None for i in range(len(prompts))]

    trainer = make("grpo", folder, tmp_path, one_of_four, num_generations=4, scale_rewards="none", max_steps=1)
    seen = watched(trainer)
    trainer.train()
    answers, keep_N, columns, mask_M = seen[0]
    assert keep_N.tolist() == [True] * 4 + [False] * 4
    ends_N = answers.batch.last_completion_rows_N
    assert columns["advantages_M"][ends_N].tolist() == [-1.5, -0.5, 0.5, 1.5, 0.0, 0.0, 0.0, 0.0]
    assert torch.equal(mask_M, keep_N[answers.batch.sequence_of_M])


def test_rloo_compares_the_answers_to_a_prompt(folder, tmp_path):
    trainer = make("rloo", folder, tmp_path, beta=0.0, max_steps=2)
    seen = watched(trainer)
    trainer.train()
    for answers, _, columns, _ in seen:
        first = torch.tensor(answers.batch.completion_cu[:-1])
        groups = columns["advantages_M"][first].view(-1, 4)
        scores = answers.scores_N.view(-1, 4)
        for i in range(4):
            others = scores[:, [j for j in range(4) if j != i]].mean(1)
            assert torch.allclose(groups[:, i], scores[:, i] - others, atol=1e-5)
        prompts = [tuple(answers.batch.prompt_tokens(i)) for i in range(answers.batch.n_sequences)]
        assert all(len(set(prompts[i : i + 4])) == 1 for i in range(0, len(prompts), 4))


def test_rloo_leaves_answers_out_that_have_no_other_to_compare_with(folder, tmp_path):
    def one_of_four(prompts, completions, completion_ids, **columns):
        return [1.0 if i % 4 == 0 or i == 1 else None for i in range(len(prompts))]

    trainer = make("rloo", folder, tmp_path, one_of_four, max_steps=1)
    seen = watched(trainer)
    trainer.train()
    assert seen[0].keep_N.tolist() == [True, True, False, False, *[False] * 4]


@pytest.mark.parametrize(("kind", "options"), [("remax", {}), ("rloo", {"loss_type": "vanilla"}), ("rloo", {})])
def test_means_are_over_the_answers_that_are_learned_from(kind, options, folder, tmp_path):
    def some(prompts, completions, completion_ids, **columns):
        return [float(len(ids)) if i % 4 < 2 else None for i, ids in enumerate(completion_ids)]

    trainer = make(kind, folder, tmp_path, some, beta=0.0, max_steps=1, **options)
    seen, denominators = watched(trainer), []
    terms = trainer.algorithm.terms

    def keep(micro):
        denominators.append(micro.n_answers)
        return terms(micro)

    trainer.algorithm.terms = keep
    trainer.train()
    keep_N = seen[0].keep_N
    assert 0 < int(keep_N.sum()) < len(keep_N)
    assert set(denominators) == {float(keep_N.sum())}


def test_an_evaluation_may_draw_another_number_of_answers(folder, tmp_path):
    sizes = {"num_generations": 4, "num_generations_eval": 2, "per_device_eval_batch_size": 4}
    trainer = make("rloo", folder, tmp_path, loss_type="vanilla", max_steps=1, **sizes)
    seen = watched(trainer)
    found = trainer.evaluate(Dataset.from_list([{"prompt": p} for p in PROMPTS[:2]]))
    assert math.isfinite(found["eval_loss"])
    ((answers, _, columns, _),) = seen
    scores_N = rloo.returns(answers.scores_N, answers.kl_M, answers.batch, beta=trainer.args.beta)
    expected_N = scores_N - scores_N.view(2, 2).flip(1).view(-1)  # each less the other answer to its prompt
    assert torch.equal(columns["advantages_M"], expected_N[answers.batch.sequence_of_M])


def test_options_that_cannot_be_served(folder, tmp_path):
    for kind, changes, message in (
        ("remax", {"num_generations": 2}, "num_generations: expected 1, got 2"),
        ("remax", {"num_iterations": 2}, "num_iterations: expected 1, one update per rollout: sum of remax has no rat"),
        ("remax", {"steps_per_generation": 4}, "steps_per_generation: expected gradient_accumulation_steps, one"),
        ("remax", {"epsilon": 0.1}, r"epsilon: expected 0\.2, because remax does not read it, got 0\.1"),
        ("remax", {"loss_type": "grpo"}, "loss_type: expected 'sum' or 'own_length', got 'grpo'"),
        ("rloo", {"loss_type": "vanilla", "epsilon_high": 0.3}, "epsilon_high: expected None, because"),
        ("rloo", {"num_generations": 1}, "num_generations: expected at least 2, got 1"),
        ("reinforce", {"num_iterations": 2}, "num_iterations: expected 1, one update per rollout: reinforce has no"),
        ("reinforce", {"beta": 1.5}, "beta: expected a number from 0 to 1, got 1.5"),
        ("grpo", {"loss_type": "bnpo"}, "loss_type: expected 'grpo' or 'dapo' or 'dr_grpo', got 'bnpo'"),
        ("grpo", {"scale_rewards": "batch"}, "scale_rewards: expected one of 'group', 'none', got 'batch'"),
        ("grpo", {"use_bias_correction_kl": True}, "use_bias_correction_kl: expected False, because no KL is weighed"),
        ("grpo", {"algorithm": "dpo"}, "algorithm: expected one of best_of_n, .*, got 'dpo'"),
        ("grpo", {"algorithm": "ppo"}, "algorithm: expected 'grpo' for HydraGRPOConfig; HydraConfig takes others"),
        ("online_dpo", {"answers_per_prompt": 1}, "answers_per_prompt: expected at least 2, got 1"),
        ("online_dpo", {"num_generations": 2}, "num_generations: expected 1: answers_per_prompt says how many"),
        ("online_dpo", {"beta": 0.0}, "beta: expected a number > 0"),
        ("online_dpo", {"loss_type": "hinge"}, "loss_type: expected 'sigmoid' or 'ipo', got 'hinge'"),
    ):
        with pytest.raises(ConfigError, match=message):
            KINDS[kind][1](**{**QUICK, "output_dir": str(tmp_path), **changes})
    embedded = LoraConfig(r=2, target_modules=["embed_tokens"], task_type="CAUSAL_LM")
    with pytest.raises(ConfigError, match="peft_config"):
        make("remax", folder, tmp_path, peft_config=embedded)
    with pytest.raises(ConfigError, match=r"algorithm: expected an algorithm that learns from single answers; .*"):
        HydraConfig(str(tmp_path), algorithm="online_dpo", use_cpu=True, bf16=False)


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_the_best_against_the_worst_and_the_first_loss(folder, tmp_path, loss_type):
    trainer = make("online_dpo", folder, tmp_path, long_ones, answers_per_prompt=4, loss_type=loss_type)
    seen = rollouts(trainer)
    trainer.train()
    for out in seen:
        lengths = out["pair_answer_mask"].sum(-1)
        assert torch.equal(out["keep"], lengths[:, 0] > lengths[:, 1])
        assert (lengths[:, 0] >= lengths[:, 1]).all()
    first = rows(trainer)[0]
    # where the policy is the reference every pair's loss is a constant, and so is the mean over pairs without a tie
    share = float(seen[0]["keep"].float().mean())
    constant = math.log(2) if loss_type == "sigmoid" else (1 / (2 * 0.1)) ** 2
    assert 0 < share < 1
    assert float(first["loss"]) == pytest.approx(constant, rel=1e-3)
    assert float(first["pairs/tied_ratio"]) == pytest.approx(1 - share)
    assert float(first["rewards/margins"]) == pytest.approx(0.0, abs=1e-5)
    assert float(rows(trainer)[-1]["rewards/margins"]) != 0.0


def test_under_autocast_a_policy_that_has_not_learned_has_no_margin(folder, tmp_path):
    trainer = make("online_dpo", folder, tmp_path, long_ones, bf16=True)
    trainer.train()
    first, second = rows(trainer)[:2]
    assert float(first["rewards/margins"]) == pytest.approx(0.0, abs=1e-6)
    assert float(second["rewards/margins"]) != 0.0


def test_it_prefers_what_scores_more_and_resumes_with_the_same_floats(folder, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8, "answers_per_prompt": 4}
    whole = make(
        "online_dpo", folder, tmp_path / "whole", [long_ones, "reward_model"], reward_weights=[1.0, 0.0], **options
    )
    assert {name.split(".")[-2] for name in trained(whole)} == {"default"}
    whole.train()
    assert float(rows(whole)[-1]["rewards/margins"]) > 0.05
    resumed = make(
        "online_dpo", folder, tmp_path / "parts", [long_ones, "reward_model"], reward_weights=[1.0, 0.0], **options
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    left, right = trained(whole), trained(resumed)
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_ties_teach_nothing(folder, tmp_path):
    def same(prompts, completions, completion_ids, **columns):
        return [1.0] * len(prompts)

    trainer = make("online_dpo", folder, tmp_path, same, max_steps=2)
    before = trained(trainer)
    trainer.train()
    after = trained(trainer)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert [float(row["loss"]) for row in rows(trainer)] == [0.0, 0.0]
    assert float(rows(trainer)[0]["pairs/tied_ratio"]) == 1.0


def test_answers_without_a_score_are_in_no_pair(folder, tmp_path):
    calls = []

    def once(prompts, completions, completion_ids, **columns):
        calls.append(1)
        return [float(len(ids)) if len(calls) % 3 else None for ids in completion_ids]

    trainer = make("online_dpo", folder, tmp_path, once, answers_per_prompt=3, max_steps=1)
    seen = rollouts(trainer)
    trainer.train()  # the third call is of the answers that TRL is shown
    assert len(calls) == 3
    shown = [trainer._answers.completion_tokens(i) for i in range(8)]
    for i, ids in enumerate(shown):
        pair = [seen[0]["pair_completion_ids"][i][j][seen[0]["pair_answer_mask"][i][j]].tolist() for j in range(2)]
        others = [answers.completion_tokens(i) for answers, *_ in trainer._hidden]
        assert all(answer in others for answer in pair), (ids, pair)
