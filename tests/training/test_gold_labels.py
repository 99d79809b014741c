"""Pairs that a gold reward model labels, on which a proxy learns."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from rlhf_engine.config import RewardConfig
from rlhf_engine.errors import ConfigError
from rlhf_engine.hydra import PackedBatch
from rlhf_engine.training.reward_model.gold import label_pairs, load_gold
from rlhf_engine.training.reward_model.trainer import RewardTrainer
from tests.commands.test_best_of import classifier, lora_reward
from tests.training.test_data import PROMPTS, write_model, write_rows


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gold")
    write_model(folder / "base")
    classifier(folder / "base").save_pretrained(folder / "gold")
    lora_reward(folder / "base", folder / "adapter")
    rows = [
        {"prompt": p, "chosen": f"{p} sings the sun", "rejected": word}
        for p, word in zip(PROMPTS * 2, ["sea sea", "the red cat", "sun"] * len(PROMPTS), strict=False)
    ]
    rows.append({"prompt": PROMPTS[0], "chosen": "sea", "rejected": "sea"})
    write_rows(folder / "pairs.jsonl", rows)
    return folder


def config(place, output, **given):
    values = {
        "model_name_or_path": str(place / "base"),
        "dataset_name": str(place / "pairs.jsonl"),
        "output_dir": str(output),
        "mode": "lora",
        "lora_r": 2,
        "max_steps": 2,
        "gold_model_path": str(place / "gold"),
    }
    return RewardConfig(**{**values, **given})


@pytest.mark.parametrize("kind", ["gold_model_path", "gold_adapter"])
def test_gold_says_which_answer_is_better(place, tmp_path, kind):
    given = {"gold_model_path": None, kind: str(place / ("gold" if kind == "gold_model_path" else "adapter"))}
    plain = RewardTrainer(config(place, tmp_path / "plain", gold_model_path=None))
    trainer = RewardTrainer(config(place, tmp_path / "proxy", **given))
    gold = load_gold(trainer.config)
    labels = trainer.gold["dataset_name"]
    assert labels.ties == 1
    assert len(trainer.rows) == len(plain.rows)
    assert 0 < labels.turned < len(trainer.rows)
    turned = 0
    for theirs, own in zip(plain.rows, trainer.rows, strict=True):
        batch = PackedBatch.from_lists([own.prompt] * 2, own.answers)
        better, worse = gold.score(batch, ("reward",)).rewards_N.tolist()
        assert better > worse
        assert set(theirs.answers) == set(own.answers)
        turned += theirs.answers != own.answers
    assert turned == labels.turned
    assert any(f"{labels.turned} (" in note and "1 ties left out" in note for note in trainer.notes)


def test_gold_rewards_are_those_of_transformers(place, tmp_path):
    trainer = RewardTrainer(config(place, tmp_path / "proxy"))
    theirs = AutoModelForSequenceClassification.from_pretrained(place / "gold").double().eval()
    for example in trainer.rows:
        with torch.no_grad():
            scores = [float(theirs(torch.tensor([example.prompt + a])).logits[0, 0]) for a in example.answers]
        assert scores[0] > scores[1]


def test_a_run_on_gold_labels_goes_on_where_it_stopped(place, tmp_path):
    whole = RewardTrainer(config(place, tmp_path / "whole", max_steps=3))
    whole.run()
    stopped = RewardTrainer(config(place, tmp_path / "cut", max_steps=3, save_steps=1))
    steps = iter([False, True])
    with pytest.raises(Exception, match="stopped"):
        stopped.run(stop=lambda: next(steps, True))
    again = RewardTrainer(config(place, tmp_path / "cut", max_steps=3, save_steps=1, resume_from_checkpoint="auto"))
    again.run()
    for name, p in whole.model.trainable_parameters("reward").items():
        assert torch.equal(p, again.model.trainable_parameters("reward")[name])


def test_single_answers_and_other_bad_requests(place, tmp_path):
    rows = [{"prompt": p, "completion": "sea", "label": i % 2} for i, p in enumerate(PROMPTS)]
    file = write_rows(tmp_path / "thumbs.jsonl", rows)
    with pytest.raises(ConfigError, match=r"expected pairs \(chosen and rejected\), got single answers"):
        RewardTrainer(config(place, tmp_path / "a", dataset_name=str(file)))
    with pytest.raises(ConfigError, match="got both"):
        config(place, tmp_path / "a", gold_adapter="x")
    with pytest.raises(ConfigError, match="since they label pairs"):
        config(place, tmp_path / "a", objective="pointwise")
    with pytest.raises(ConfigError, match="gold_model_path: expected a trained reward head"):
        RewardTrainer(
            config(place, tmp_path / "a", gold_model_path=str(write_model(tmp_path / "m", reward_head=False)))
        )


def test_only_ties_are_an_error(place, tmp_path):
    rows = [{"prompt": p, "chosen": "sea", "rejected": "sea"} for p in PROMPTS]
    file = write_rows(tmp_path / "ties.jsonl", rows)
    with pytest.raises(ConfigError, match=rf"expected pairs that gold prefers one answer of, got {len(PROMPTS)} ties"):
        RewardTrainer(config(place, tmp_path / "a", dataset_name=str(file)))
    plain = RewardTrainer(config(place, tmp_path / "b", gold_model_path=None)).rows
    ties = [dataclasses.replace(example, answers=example.answers[:1] * 2) for example in plain]
    assert label_pairs(load_gold(config(place, tmp_path / "c")), ties).examples == []
    uneven = [dataclasses.replace(example, margin=0.5) for example in plain]
    with pytest.raises(ConfigError, match="expected pairs without a margin, which the data say, got some"):
        label_pairs(load_gold(config(place, tmp_path / "c")), uneven)
