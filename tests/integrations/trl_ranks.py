"""One process of a run of HydraPPOTrainer; tests start it alone and twice beside each other.

python -m tests.integrations.trl_ranks MODEL OUTPUT ANSWERS_PER_MICRO_BATCH
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import save_file
from transformers import TrainerCallback

from rlhf_engine.integrations.trl import HydraPPOConfig, HydraPPOTrainer
from rlhf_engine.tokenizing import load_tokenizer
from tests.training.test_data import PROMPTS


def words(prompts, completions, completion_ids, **columns):
    return [float(len(set(text.split()))) for text in completions]


def main(model: str, output: Path, per_device: int) -> None:
    args = HydraPPOConfig(
        output_dir=str(output / "run"),
        max_steps=2,
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=2,
        steps_per_generation=2,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_completion_length=8,
        max_grad_norm=0.0,
        disable_tqdm=True,
    )
    trainer = HydraPPOTrainer(
        model=model,
        reward_funcs=[words, "lane"],
        args=args,
        train_dataset=Dataset.from_list([{"prompt": p} for p in PROMPTS] * 4),
        processing_class=load_tokenizer(model),
        peft_config=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    found = {}

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **options):
            for name, p in trainer.model.named_parameters():
                if p.grad is not None:
                    found[f"{state.global_step}|{name.replace('module.', '')}"] = p.grad.clone()

    trainer.add_callback(Look())
    trainer.train()
    save_file(found, output / f"{os.environ.get('RANK', 'alone')}.safetensors")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
