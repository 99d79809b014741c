"""Model cards name the method that a model was trained by, and cite its paper."""

from __future__ import annotations

import pytest

pytest.importorskip("trl", reason="needs trl (pip install 'rlhf-engine[trl]')")

from datasets import Dataset
from peft import LoraConfig

import rlhf_engine.integrations.trl as ours
from rlhf_engine.tokenizing import load_tokenizer
from tests.integrations.trl_runs import QUICK, make_trainer
from tests.training.test_data import write_model

METHODS = {
    "HydraPPO": ("Hydra-PPO", "2309.00754", "Efficient RLHF"),
    "ReMax": ("ReMax", "2310.10505", "ReMax: A Simple"),
    "HydraRLOO": ("Hydra-RLOO", "2402.14740", "Back to Basics"),
    "HydraReinforce": ("Hydra-REINFORCE", "2403.10704", "PERL: Parameter Efficient"),
    "HydraBestOfN": ("Hydra-Best-of-N", "2009.01325", "Learning to summarize"),
    "HydraOnlineDPO": ("Hydra-Online-DPO", "2402.04792", "Direct Language Model Alignment"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def check(card: str, name: str, arxiv: str, title: str) -> None:
    assert f"This model was trained with {name}, a method introduced in [{title}" in card
    assert f"https://huggingface.co/papers/{arxiv}" in card
    assert f"Cite {name} as:" in card
    assert "- rlhf-engine\n" in card
    assert card.count("DeepSeekMath") == 0  # GRPOTrainer's


def test_a_policy_s_card(folder, tmp_path):
    for method, facts in METHODS.items():
        config = getattr(ours, f"{method}Config")(**{**QUICK, "output_dir": str(tmp_path / method)})
        make_trainer(getattr(ours, f"{method}Trainer"), config, folder).create_model_card(model_name="mine")
        check((tmp_path / method / "README.md").read_text(), *facts)


def test_a_reward_model_s_card(folder, tmp_path):
    options = {name: x for name, x in QUICK.items() if name != "max_completion_length"}
    trainer = ours.PerlRewardTrainer(
        model=str(folder),
        args=ours.PerlRewardConfig(**{**options, "output_dir": str(tmp_path)}),
        train_dataset=Dataset.from_list([{"prompt": "a", "completion": "b", "label": i % 2 == 0} for i in range(8)]),
        processing_class=load_tokenizer(folder),
        peft_config=LoraConfig(r=2, target_modules="all-linear", task_type="SEQ_CLS", modules_to_save=["score"]),
    )
    trainer.create_model_card(model_name="mine")
    check((tmp_path / "README.md").read_text(), "PERL", "2403.10704", "PERL: Parameter Efficient")
