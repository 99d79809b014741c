"""`ReMaxTrainer` and `HydraRLOOTrainer`: their advantages by hand, one base, resuming, and what they refuse."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("trl", reason="needs trl (pip install 'rlhf-engine[trl]')")

from datasets import Dataset
from peft import LoraConfig

from rlhf_engine.algorithms import rloo
from rlhf_engine.errors import ConfigError
from rlhf_engine.integrations.trl import HydraRLOOConfig, HydraRLOOTrainer, ReMaxConfig, ReMaxTrainer
from tests.integrations.trl_runs import LORA, QUICK, make_trainer, rows, trained, words
from tests.training.test_data import PROMPTS, write_model

KINDS = {"remax": (ReMaxTrainer, ReMaxConfig, 1), "rloo": (HydraRLOOTrainer, HydraRLOOConfig, 4)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def make(kind, folder, output, reward_funcs=words, *, peft_config=LORA, **changes):
    trainer_class, config_class, _ = KINDS[kind]
    args = config_class(**{**QUICK, "output_dir": str(output), **changes})
    return make_trainer(trainer_class, args, folder, reward_funcs, peft_config=peft_config)


def watched(trainer) -> list[tuple]:
    """(answers, what was made of them) of every rollout to come."""
    seen = []
    experience = trainer.experience

    def keep(answers):
        made = experience(answers)
        seen.append((answers, made, trainer._hidden_totals[0][0] if trainer._hidden_totals else None))
        return made

    trainer.experience = keep
    return seen


@pytest.mark.parametrize("kind", KINDS)
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
    def long_ones(prompts, completions, completion_ids, **columns):
        return [float(len(ids)) for ids in completion_ids]

    trainer = make("remax", folder, tmp_path, long_ones, beta=0.3)
    seen = watched(trainer)
    trainer.train()
    moved = 0.0
    for answers, made, greedy in seen:
        lengths = answers.batch.completion_lens
        assert answers.totals_N.tolist() == [float(n) for n in lengths]
        at = 0
        for i, n in enumerate(lengths):
            kl = answers.kl_M[at : at + n]
            expected = n - greedy[i] - 0.3 * kl.flip(0).cumsum(0).flip(0)
            assert torch.allclose(made["advantages"][at : at + n], expected, atol=1e-5)
            moved = max(moved, float(kl.abs().max()))
            at += n
    assert moved > 1e-3
    # the same prompt has the same greedy answer until the policy moves
    answers, _, greedy = seen[0]
    by_prompt: dict[tuple, set] = {}
    for i in range(answers.batch.n_sequences):
        by_prompt.setdefault(tuple(answers.batch.prompt_tokens(i)), set()).add(float(greedy[i]))
    assert all(len(found) == 1 for found in by_prompt.values())


@pytest.mark.parametrize("loss_type", ["proximal", "vanilla"])
def test_rloo_compares_the_answers_to_a_prompt(folder, tmp_path, loss_type):
    trainer = make("rloo", folder, tmp_path, beta=0.0, loss_type=loss_type)
    seen = watched(trainer)
    trainer.train()
    for answers, made, _ in seen:
        first = torch.tensor(answers.batch.completion_cu[:-1])
        groups = made["advantages"][first].view(-1, 4)
        scores = answers.totals_N.view(-1, 4)
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
    assert seen[0][0].keep_N.tolist() == [True, True, False, False, *[False] * 4]


@pytest.mark.parametrize(("kind", "options"), [("remax", {}), ("rloo", {"loss_type": "vanilla"}), ("rloo", {})])
def test_means_are_over_the_answers_that_are_learned_from(kind, options, folder, tmp_path):
    def some(prompts, completions, completion_ids, **columns):
        return [float(len(ids)) if i % 4 < 2 else None for i, ids in enumerate(completion_ids)]

    trainer = make(kind, folder, tmp_path, some, beta=0.0, max_steps=1, **options)
    seen, denominators = watched(trainer), []
    losses = trainer.losses

    def keep(micro):
        denominators.append(micro.n_answers)
        return losses(micro)

    trainer.losses = keep
    trainer.train()
    answers, _, _ = seen[0]
    assert 0 < int(answers.keep_N.sum()) < len(answers.keep_N)
    assert set(denominators) == {float(answers.keep_N.sum())}


def test_an_evaluation_may_draw_another_number_of_answers(folder, tmp_path):
    sizes = {"num_generations": 4, "num_generations_eval": 2, "per_device_eval_batch_size": 4}
    trainer = make("rloo", folder, tmp_path, loss_type="vanilla", max_steps=1, **sizes)
    made = []
    experience = trainer.experience
    trainer.experience = lambda answers: made.append((answers, experience(answers))) or made[-1][1]
    found = trainer.evaluate(Dataset.from_list([{"prompt": p} for p in PROMPTS[:2]]))
    assert math.isfinite(found["eval_loss"])
    ((answers, of),) = made
    scores_N = rloo.returns(answers.totals_N, answers.kl_M, answers.batch, beta=trainer.kl_coef)
    expected_N = scores_N - scores_N.view(2, 2).flip(1).view(-1)  # each less the other answer to its prompt
    assert torch.equal(of["advantages"], expected_N[answers.batch.sequence_of_M])


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("remax", {"num_generations": 2}, "num_generations: expected 1, got 2"),
        ("remax", {"num_iterations": 2}, "num_iterations: expected 1: one update per rollout"),
        (
            "remax",
            {"steps_per_generation": 4},
            "steps_per_generation: expected gradient_accumulation_steps: one update",
        ),
        ("remax", {"epsilon": 0.1}, r"epsilon: expected 0\.2, because no ratio is clipped, got 0\.1"),
        ("remax", {"loss_type": "grpo"}, "loss_type: expected 'remax', got 'grpo'"),
        ("rloo", {"loss_type": "vanilla", "epsilon_high": 0.3}, "epsilon_high: expected None, because"),
        ("rloo", {"num_generations": 1}, "num_generations: expected at least 2, got 1"),
        ("rloo", {"loss_type": "grpo"}, "loss_type: expected 'proximal' or 'vanilla', got 'grpo'"),
        ("rloo", {"loss_type": "vanilla", "steps_per_generation": 4}, "steps_per_generation: expected gradient_accum"),
    ],
)
def test_options_that_cannot_be_served(folder, tmp_path, kind, changes, message):
    with pytest.raises(ConfigError, match=message):
        make(kind, folder, tmp_path, **changes)


def test_an_adapter_on_embeddings_is_refused(folder, tmp_path):
    embedded = LoraConfig(r=2, target_modules=["embed_tokens"], task_type="CAUSAL_LM")
    with pytest.raises(ConfigError, match="peft_config"):
        make("remax", folder, tmp_path, peft_config=embedded)
