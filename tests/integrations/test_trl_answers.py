"""Answers behind TRL: what reward functions are shown and tell, which draws are alike, what counts; and model cards.

Ratios are over the words that drew, in the update as well.
"""

import copy
import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="needs trl (pip install 'rlhf-engine[trl]')")

from datasets import Dataset
from peft import LoraConfig
from trl import TrlParser

import rlhf_engine.integrations.trl as ours
from rlhf_engine.data.tokenize import load_tokenizer
from rlhf_engine.rollout import generate_requests
from tests.integrations.trl_runs import LORA, QUICK, make_trainer, rollouts, rows, trained, words
from tests.training.test_data import PROMPTS


def make(method, folder, output, reward_funcs=words, **changes):
    config = getattr(ours, f"{method}Config")(**{**QUICK, "output_dir": str(output), **changes})
    return make_trainer(getattr(ours, f"{method}Trainer"), config, folder, reward_funcs)


def test_scripts_read_the_configuration_of_a_reward_model_from_the_command_line(tmp_path):
    words = ["--output_dir", str(tmp_path), "--use_cpu", "true", "--bf16", "false", "--learning_rate", "1e-4"]
    (found,) = TrlParser(ours.PerlRewardConfig).parse_args_and_config(words)
    assert found.learning_rate == 1e-4


@pytest.mark.parametrize("method", ["ReMax", "HydraOnlineDPO"])
def test_what_is_told_of_hidden_answers_stands_in_no_table(folder, tmp_path, method):
    lengths = []

    def telling(prompts, completions, completion_ids, log_extra, log_metric, **columns):
        lengths.append([len(ids) for ids in completion_ids])
        log_extra("length", lengths[-1])
        log_metric("length", sum(lengths[-1]) / len(lengths[-1]))
        return [float(n) for n in lengths[-1]]

    trainer = make(method, folder, tmp_path, telling, max_steps=1, log_completions=True)
    trainer.train()
    hidden, shown = lengths  # TRL asks for its own at last
    assert hidden != shown
    assert list(trainer._logs["extra"]["length"]) == shown
    assert float(rows(trainer)[0]["length"]) == pytest.approx(sum(shown) / len(shown))
    trainer.evaluate(Dataset.from_list([{"prompt": p} for p in PROMPTS[:8]]))


def test_hidden_answers_are_read_as_the_others(folder, tmp_path, monkeypatch):
    """Where a tokenizer says how a reply is read, a greedy one is read so, too."""

    def read(tokenizer, ids, prefix=None, tools=None):
        return {"role": "assistant", "content": tokenizer.decode(ids), "reasoning_content": str(len(prefix))}

    monkeypatch.setattr("trl.trainer.grpo_trainer.parse_response", read)
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    tokenizer.response_schema = {"type": "object"}
    seen = []

    def keys(prompts, completions, completion_ids, **columns):
        seen.append([sorted(message) for (message,) in completions])
        return [float(len(ids)) for ids in completion_ids]

    config = ours.ReMaxConfig(**{**QUICK, "output_dir": str(tmp_path), "max_steps": 1})
    talks = [{"prompt": [{"role": "user", "content": p}]} for p in PROMPTS * 2]
    trainer = ours.ReMaxTrainer(
        model=str(folder), reward_funcs=keys, args=config, train_dataset=Dataset.from_list(talks),
        processing_class=tokenizer, peft_config=copy.deepcopy(LORA),
    )  # fmt: skip
    trainer.train()
    greedy, drawn = seen
    assert greedy == drawn == [["content", "reasoning_content", "role"]] * 8


def test_truncated_answers_are_in_no_pair_if_asked_for(folder, tmp_path):
    def long_ones(prompts, completions, completion_ids, **columns):
        return [float(len(ids)) for ids in completion_ids]

    kept = {}
    for masked in (False, True):
        options = {"answers_per_prompt": 4, "max_steps": 1, "mask_truncated_completions": masked}
        trainer = make("HydraOnlineDPO", folder, tmp_path, long_ones, **options)
        seen = []
        compute = trainer._generate_and_score_completions
        noted = lambda inputs, go=compute, seen=seen: seen.append(go(inputs)) or seen[-1]  # noqa: E731
        trainer._generate_and_score_completions = noted
        trainer.train()
        ends = set(trainer.eos_token_ids)
        kept[masked] = [
            [ids[real].tolist()[-1] in ends for ids, real in zip(pair, reals, strict=True)]
            for out in seen
            for pair, reals, keep in zip(out["pair_completion_ids"], out["pair_answer_mask"], out["keep"], strict=True)
            if keep
        ]
    assert any(not all(ended) for ended in kept[False])
    assert kept[True]
    assert all(all(ended) for ended in kept[True])


def test_no_two_answers_of_an_evaluation_are_drawn_alike(folder, tmp_path, monkeypatch):
    """The last batch is smaller than the others."""
    ids = []

    def drawn(model, requests, sampling):
        ids.extend(request.sample_id for request in requests)
        return generate_requests(model, requests, sampling)

    monkeypatch.setattr("rlhf_engine.integrations.trl.base.generate_requests", drawn)
    trainer = make("ReMax", folder, tmp_path, per_device_eval_batch_size=8)
    trainer.evaluate(Dataset.from_list([{"prompt": PROMPTS[i % 4]} for i in range(20)]))
    assert len(ids) == len(set(ids)) >= 40


@pytest.mark.parametrize(
    "method",
    ["ReMax", *(pytest.param(m, marks=pytest.mark.long) for m in ("HydraRLOO", "HydraReinforce", "HydraBestOfN"))],
)
def test_a_metric_does_not_depend_on_how_a_step_is_cut_up(folder, tmp_path, method):
    told = []
    for per_device, steps in ((8, 1), (4, 2)):
        sizes = {"per_device_train_batch_size": per_device, "gradient_accumulation_steps": steps, "max_steps": 1}
        trainer = make(method, folder, tmp_path, shuffle_dataset=False, **sizes)
        trainer.train()
        told.append(rows(trainer)[0])
    for name in ("loss", "policy/loss", "grad_norm"):
        assert float(told[0][name]) == pytest.approx(float(told[1][name]), rel=1e-4, abs=1e-5), name


def test_tokens_that_nothing_is_learned_from_are_in_no_denominator(folder, tmp_path):
    def half(prompts, completions, completion_ids, **columns):
        return [1.0 if i % 2 else None for i in range(len(prompts))]

    trainer = make("HydraPPO", folder, tmp_path, half, max_steps=1)
    seen = rollouts(trainer)
    trainer.train()
    (out,) = seen
    assert 0 < int(out["num_items_in_batch"]) == int(out["loss_mask"].sum()) < int(out["answer_mask"].sum())


_FILTERS = {"top_k": 30, "top_p": 0.8, "min_p": 0.01}
FILTERED: dict[str, dict[str, Any]] = {name: _FILTERS for name in ("HydraPPO", "ReMax", "HydraOnlineDPO")}
FILTERED["HydraGRPO"] = {**_FILTERS, "num_generations": 4}


@pytest.mark.parametrize(
    "kind", ["HydraPPO", "HydraOnlineDPO", *(pytest.param(x, marks=pytest.mark.long) for x in ("ReMax", "HydraGRPO"))]
)
def test_an_update_is_over_the_words_that_drew(kind, folder, tmp_path):
    trainer, seen = make(kind, folder, tmp_path, **FILTERED[kind], max_steps=1, steps_per_generation=2), []
    terms = trainer.algorithm.terms
    trainer.algorithm.terms = lambda micro: seen.append(micro) or terms(micro)
    before = trained(trainer)
    trainer.train()
    assert 1 < trainer.state.log_history[0]["support/mean"] < 30
    after = trained(trainer)
    for name, p in trainer.model.named_parameters():
        p.data.copy_(before.get(name, p))
    assert len(seen) == 2
    for micro in seen:
        assert micro.batch.supports is not None
        sizes = micro.batch.supports.sizes
        assert int(sizes.min()) >= 1
        assert int(sizes.max()) <= 30
        assert len(set(sizes.tolist())) > 3
        scores = trainer.hydra.eval().score(micro.batch, ("actor", "reference"))
        torch.testing.assert_close(scores.logprobs_M, micro.old_logprobs_M, rtol=0, atol=1e-5)
        torch.testing.assert_close(scores.ref_logprobs_M, micro.ref_logprobs_M, rtol=0, atol=1e-5)
        whole = dataclasses.replace(micro.batch, supports=None)
        assert float((trainer.hydra.score(whole, ("actor",)).logprobs_M - micro.old_logprobs_M).mean()) < -0.1
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("kind", [pytest.param("HydraGRPO", marks=pytest.mark.long), "HydraOnlineDPO"])
def test_a_run_stopped_in_the_middle_of_a_rollout_goes_on_to_the_same_floats(kind, folder, tmp_path):
    options = {**FILTERED[kind], "save_strategy": "steps", "save_steps": 1, "steps_per_generation": 4}
    whole = make(kind, folder, tmp_path / "whole", **options)
    whole.train()
    assert (tmp_path / "whole" / "checkpoint-3" / "rollout_0.safetensors").is_file()
    resumed = make(kind, folder, tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    expected, found = trained(whole), trained(resumed)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


CARDS = {
    "HydraPPO": ("Hydra-PPO", "2309.00754", "Efficient RLHF"),
    "ReMax": ("ReMax", "2310.10505", "ReMax: A Simple"),
    "HydraRLOO": ("Hydra-RLOO", "2402.14740", "Back to Basics"),
    "HydraReinforce": ("Hydra-REINFORCE", "2403.10704", "PERL: Parameter Efficient"),
    "HydraBestOfN": ("Hydra-Best-of-N", "2009.01325", "Learning to summarize"),
    "HydraOnlineDPO": ("Hydra-Online-DPO", "2402.04792", "Direct Language Model Alignment"),
}


def check(card: str, name: str, arxiv: str, title: str) -> None:
    assert f"This model was trained with {name}, a method introduced in [{title}" in card
    assert f"https://huggingface.co/papers/{arxiv}" in card
    assert f"Cite {name} as:" in card
    assert "- rlhf-engine\n" in card
    assert card.count("DeepSeekMath") == 0  # GRPOTrainer's


def test_a_policy_s_card(folder, tmp_path):
    for method, facts in CARDS.items():
        make(method, folder, tmp_path / method).create_model_card(model_name="mine")
        check((tmp_path / method / "README.md").read_text(), *facts)


def test_a_reward_model_s_card(folder, tmp_path):
    options = {name: x for name, x in QUICK.items() if name != "max_completion_length"}
    thumbs = Dataset.from_list([{"prompt": "a", "completion": "b", "label": i % 2 == 0} for i in range(8)])
    trainer = ours.PerlRewardTrainer(
        model=str(folder), args=ours.PerlRewardConfig(**{**options, "output_dir": str(tmp_path)}),
        train_dataset=thumbs, processing_class=load_tokenizer(folder),
        peft_config=LoraConfig(r=2, target_modules="all-linear", task_type="SEQ_CLS", modules_to_save=["score"]),
    )  # fmt: skip
    trainer.create_model_card(model_name="mine")
    check((tmp_path / "README.md").read_text(), "PERL", "2403.10704", "PERL: Parameter Efficient")
