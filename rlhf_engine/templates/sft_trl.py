"""Supervised training with TRL's SFTTrainer, whose log-probs come from rlhf-engine's kernels."""

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from rlhf_engine.integrations.trl import patch

patch()

tokenizer = AutoTokenizer.from_pretrained("model")
rows = Dataset.from_json("pairs.jsonl")
texts = rows.map(
    lambda row: {"text": f"{row['prompt']} {row['chosen']} {tokenizer.eos_token}"}, remove_columns=rows.column_names
)
trainer = SFTTrainer(
    model=AutoModelForCausalLM.from_pretrained("model"),
    args=SFTConfig(
        output_dir="runs/trl_sft",
        max_steps=240,
        per_device_train_batch_size=24,
        learning_rate=2e-3,
        logging_steps=20,
        save_strategy="no",
        report_to="none",
        bf16=False,
        gradient_checkpointing=False,
    ),
    train_dataset=texts,
    processing_class=tokenizer,
)
trainer.train()
trainer.save_model("runs/sft")
