"""One process of a run of HydraPPOTrainer; tests start it alone and twice beside each other.

python -m tests.integrations.trl_ranks MODEL OUTPUT ANSWERS_PER_MICRO_BATCH [save | CHECKPOINT]

Two steps, or with `save` four with a checkpoint of each and two steps to a rollout; from CHECKPOINT the rest of those.
"""

import os
import sys
from pathlib import Path

from safetensors.torch import save_file
from transformers import TrainerCallback

from rlhf_engine.integrations.trl import HydraPPOConfig, HydraPPOTrainer
from tests.integrations.trl_runs import QUICK, make_trainer, words


def main(model: str, output: Path, per_device: int, saving: str | None = None) -> None:
    output.mkdir(parents=True, exist_ok=True)
    changes = {"output_dir": str(output / "run"), "max_steps": 2, "learning_rate": 1e-3, "max_grad_norm": 0.0}
    changes |= {"per_device_train_batch_size": per_device, "steps_per_generation": 2}
    if saving is not None:
        changes |= {"max_steps": 4, "steps_per_generation": 4, "save_strategy": "steps", "save_steps": 1}
    args = HydraPPOConfig(**{**QUICK, **changes})
    trainer = make_trainer(HydraPPOTrainer, args, Path(model), [words, "reward_model"])
    found = {}

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **options):
            for name, p in trainer.model.named_parameters():
                if p.grad is not None:
                    found[f"{state.global_step}|{name.replace('module.', '')}"] = p.grad.clone()

    trainer.add_callback(Look())
    trainer.train(resume_from_checkpoint=None if saving in (None, "save") else saving)
    save_file(found, output / f"{os.environ.get('RANK', 'alone')}.safetensors")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
