"""Runs of our trainers behind TRL that take a second: what their tests share."""

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from peft import LoraConfig

from rlhf_engine.algorithms.base import Experience
from rlhf_engine.data.tokenize import load_tokenizer
from tests.training.test_data import PROMPTS

LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
QUICK = {
    "max_steps": 4, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 1e-2,
    "logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True, "bf16": False,
    "gradient_checkpointing": False, "max_completion_length": 8, "disable_tqdm": True,
}  # fmt: skip
"""Options of every run."""


def words(prompts, completions, completion_ids, **columns):
    """How many different words an answer has."""
    return [float(len(set(text.split()))) for text in completions]


def make_trainer(
    kind, config, folder: Path, reward_funcs=words, *, peft_config=LORA, model=None, n_prompts=48, **options
) -> Any:
    """A trainer of that class on the model in a folder."""
    prompts = Dataset.from_list([{"prompt": p} for p in PROMPTS * 4][:n_prompts])
    lora = copy.deepcopy(peft_config)  # PEFT writes into it
    return kind(
        model=model or str(folder), reward_funcs=reward_funcs, args=config, train_dataset=prompts,
        processing_class=load_tokenizer(folder), peft_config=lora, **options,
    )  # fmt: skip


def trained(trainer) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}


def rows(trainer) -> list[dict[str, Any]]:
    """Logged lines of steps."""
    return [row for row in trainer.state.log_history if "loss" in row]


def rollouts(trainer) -> list[dict[str, Any]]:
    """What comes of every rollout to be."""
    seen: list[dict[str, Any]] = []
    compute = trainer._generate_and_score_completions

    def keep(inputs):
        seen.append(compute(inputs))
        return seen[-1]

    trainer._generate_and_score_completions = keep
    return seen


class Prepared(NamedTuple):
    """What a trainer makes of a rollout."""

    experience: Experience
    """All answers that TRL is shown."""
    keep_N: torch.Tensor
    """bool [N], those that have a score and can be learned from."""
    columns: dict[str, torch.Tensor]
    """Values of each token by field of `TokenValues`."""
    mask_M: torch.Tensor
    """bool [M], tokens that are learned from."""


def watched(trainer) -> list[Prepared]:
    """What is made of every rollout to come."""
    seen: list[Prepared] = []
    prepare = trainer._prepare

    def keep(mode, experience, keep_N):
        columns, mask_M = prepare(mode, experience, keep_N)
        seen.append(Prepared(experience, keep_N, columns, mask_M))
        return columns, mask_M

    trainer._prepare = keep
    return seen


def run_ranks(*arguments, processes: int = 1) -> None:
    """A run of `trl_ranks` with these arguments, in so many processes."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path]), "OMP_NUM_THREADS": "1"}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes] if processes > 1 else []
    command = [sys.executable, *launcher, "-m", "tests.integrations.trl_ranks", *arguments]
    done = subprocess.run([str(x) for x in command], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
