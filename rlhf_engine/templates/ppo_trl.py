"""PPO behind TRL's names: actor and critic are adapters on the base, which is the reference."""

import matplotlib
from datasets import Dataset
from peft import LoraConfig
from reward import reward

from rlhf_engine.integrations.trl import HydraPPOConfig, HydraPPOTrainer

matplotlib.use("Agg")
from matplotlib import pyplot

trainer = HydraPPOTrainer(
    model="runs/sft",
    reward_funcs=reward,
    args=HydraPPOConfig(
        output_dir="runs/ppo",
        max_steps=48,
        per_device_train_batch_size=32,
        steps_per_generation=2,
        num_iterations=2,
        max_completion_length=40,
        learning_rate=2e-3,
        beta=0.05,
        logging_steps=4,
        save_strategy="no",
        report_to="none",
        bf16=False,
    ),
    train_dataset=Dataset.from_json("prompts.jsonl"),
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
)
trainer.train()
trainer.save_model("runs/ppo/final")
trainer.save_state()

logged = [row for row in trainer.state.log_history if "reward" in row]
pyplot.plot([row["step"] for row in logged], [row["reward"] for row in logged])
pyplot.xlabel("step")
pyplot.ylabel("reward")
pyplot.savefig("runs/ppo/curve.png")
