"""Answers behind TRL: what reward functions are shown and tell, which draws are alike, and what counts."""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("trl", reason="needs trl (pip install 'rlhf-engine[trl]')")

from datasets import Dataset
from trl import TrlParser

import rlhf_engine.integrations.trl as ours
from rlhf_engine.rollout import generate
from rlhf_engine.tokenizing import load_tokenizer
from tests.integrations.trl_runs import LORA, QUICK, make_trainer, rollouts, rows, words
from tests.training.test_data import PROMPTS, write_model

METHODS = ("HydraPPO", "HydraReinforce", "ReMax", "HydraRLOO", "HydraGRPO", "HydraBestOfN", "HydraOnlineDPO")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def make(method, folder, output, reward_funcs=words, **changes):
    config = getattr(ours, f"{method}Config")(**{**QUICK, "output_dir": str(output), **changes})
    return make_trainer(getattr(ours, f"{method}Trainer"), config, folder, reward_funcs)


@pytest.mark.parametrize("method", [*METHODS, "PerlReward"])
def test_scripts_read_the_configuration_from_the_command_line(tmp_path, method):
    words = ["--output_dir", str(tmp_path), "--use_cpu", "true", "--bf16", "false", "--learning_rate", "1e-4"]
    (found,) = TrlParser(getattr(ours, f"{method}Config")).parse_args_and_config(words)
    assert type(found) is getattr(ours, f"{method}Config")
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
    monkeypatch.setattr("rlhf_engine.integrations.trl.base.parse_response", read)
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
        model=str(folder),
        reward_funcs=keys,
        args=config,
        train_dataset=Dataset.from_list(talks),
        processing_class=tokenizer,
        peft_config=copy.deepcopy(LORA),
    )
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
        trainer._generate_and_score_completions = lambda inputs, go=compute, seen=seen: (
            seen.append(go(inputs)) or seen[-1]
        )
        trainer.train()
        ends = set(trainer.eos_token_ids)
        kept[masked] = [
            [ids[real].tolist()[-1] in ends for ids, real in zip(pair, reals, strict=True)]
            for out in seen
            for pair, reals, keep in zip(out["pair_ids"], out["pair_mask"], out["keep"], strict=True)
            if keep
        ]
    assert any(not all(ended) for ended in kept[False])
    assert kept[True]
    assert all(all(ended) for ended in kept[True])


def test_no_two_answers_of_an_evaluation_are_drawn_alike(folder, tmp_path, monkeypatch):
    """The last batch is smaller than the others."""
    ids = []

    def drawn(*arguments, sample_ids, **options):
        ids.extend(sample_ids)
        return generate(*arguments, sample_ids=sample_ids, **options)

    monkeypatch.setattr("rlhf_engine.integrations.trl.base.generate", drawn)
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
