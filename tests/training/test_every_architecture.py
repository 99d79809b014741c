"""Every architecture through the whole of it: supervised training of a new base, PPO on it, stop and go on."""

import copy
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from rlhf_kernels.runtime import testing
from transformers import AutoModelForCausalLM

from rlhf_engine.commands.demo_task import build_tokenizer
from rlhf_engine.hydra import PackedBatch
from rlhf_engine.training.rl import RlTrainer
from rlhf_engine.training.sft import SftTrainer
from tests.hydra.architectures import CONFIGS, MORE
from tests.hydra.test_architectures import in_double, logits, rows_of
from tests.training.test_data import WORDS, sft_config, train_config


def write(name: str, folder: Path) -> Path:
    """A tiny random model of an architecture, with a word-level tokenizer."""
    tokenizer = build_tokenizer([" ".join(WORDS)])
    config = copy.deepcopy((CONFIGS | MORE)[name])
    config.vocab_size = len(tokenizer)
    for token in ("bos", "eos", "pad"):
        setattr(config, f"{token}_token_id", getattr(tokenizer, f"{token}_token_id"))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


SHORTLY = ("llama", "gpt2", "mixtral", "deepseek_v3")
"""One of each kind of linear and block; the others are in the long lane."""
ADDED_TO_WEIGHTS = ("deepseek_v3", "glm4_moe")
"""Their folders have PEFT add some of the LoRA to the weight, where there is no dropout."""


@pytest.mark.parametrize(
    "name", [name if name in SHORTLY else pytest.param(name, marks=pytest.mark.long) for name in CONFIGS]
)
def test_supervised_training_then_ppo_then_going_on_then_plain_peft(name, tmp_path):
    SftTrainer(sft_config(write(name, tmp_path / "m"), tmp_path / "base", mode="full", max_steps=2)).run()
    dropout = 0.0 if name in ADDED_TO_WEIGHTS else 0.1
    options = {"lora_dropout": dropout, "gradient_checkpointing": True, "learning_rate": 1e-3}
    config = train_config(tmp_path / "base", tmp_path / "run", resume_from_checkpoint="auto", **options)
    trainer = RlTrainer(config)
    base = trainer.model.backbone().base_hash()
    before = trainer.model.backbone().slot("actor").state_dict()
    before = {key: tensor.clone() for key, tensor in before.items()}
    trainer.step()
    trainer.save()
    second = trainer.step()
    assert second["optimizer_steps"] == 2
    after = trainer.model.backbone().slot("actor").state_dict()
    assert not any(torch.equal(after[key], tensor) for key, tensor in before.items() if key.endswith(".B"))
    assert trainer.model.backbone().base_hash(refresh=True) == base
    resumed = RlTrainer(config)
    assert resumed.state.step == 1
    resumed.step()
    again = resumed.model.backbone().slot("actor").state_dict()
    assert all(torch.equal(again[key], tensor) for key, tensor in after.items())
    resumed.save()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    theirs = PeftModel.from_pretrained(plain, tmp_path / "run" / "checkpoint-2").eval()
    batch = PackedBatch.from_lists([[3, 4], [5]], [[5, 3, 4], [4, 4]])
    with torch.no_grad():
        single, double = rows_of(theirs, batch), in_double(theirs, batch)
    testing.assert_ok(testing.tier1(logits(resumed.model.eval(), batch, "actor"), double, single), name)
