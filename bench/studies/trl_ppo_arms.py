"""The arms of `vs_trl_ppo.py`: what is run, and the three things that run it, each in a process of its own.

    python bench/studies/trl_ppo_arms.py REQUEST.json       # `vs_trl_ppo.py` writes the request and reads the answer

Only the standard library is imported before a worker knows what it runs: TRL's arm must not hold our packages in its
memory, nor have them installed.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rlhf_bench.workload import HEADS_FILE, PHASES, PROMPTS_FILE, Setting, prepare

ROOT = Path(__file__).resolve().parents[2]
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One thing that is measured."""

    engine: str
    """trl, ours or gemm"""
    dtype: str = "float32"
    lora_critic: bool = False
    """TRL's critic on LoRA instead of trained whole."""
    packed: bool = False
    """Products with weights that MKL has packed, instead of `torch.mm`; in fp32."""
    exact: bool | None = None
    """Exact mode of ours; None: what `rlhf-engine train` takes. Of products: True for the passes that it leaves."""
    checks_all: bool = False
    """Exact mode whose actor lane scores every answer, as a run without exact mode does."""


# ---- workers: each runs in a process of its own ------------------------------------------------------------------


def memory_bytes() -> dict[str, int]:
    """Memory that this process holds, and the most it ever held."""
    status = Path("/proc/self/status")
    if status.is_file():
        found = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return {"rss": 1024 * int(found["VmRSS"].split()[0]), "peak_rss": 1024 * int(found["VmHWM"].split()[0])}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS, in bytes; the present size is not told there
    return {"rss": peak, "peak_rss": peak}


def run_ours(setting: Setting, arm: Arm, folder: Path, scratch: Path) -> dict[str, Any]:
    """`RlTrainer`, as `rlhf-engine train` runs it, with the kernels that `auto` picks."""
    import torch
    from rlhf_kernels.runtime import registry

    from rlhf_engine.config import TrainConfig
    from rlhf_engine.devices import DTYPES, keep_freed_memory
    from rlhf_engine.runs.metrics import git_commit
    from rlhf_engine.scoring import experience
    from rlhf_engine.training.rl import RlTrainer

    keep_freed_memory()
    if arm.checks_all:
        experience.CHECKED_EVERY = 1
    trainer = RlTrainer(
        TrainConfig(
            model_name_or_path=str(folder),
            dataset_name=str(folder / PROMPTS_FILE),
            output_dir=str(scratch),
            dtype=arm.dtype,
            exact=arm.exact,
            device="cpu",
            lora_r=setting.lora_r,
            lora_alpha=float(setting.lora_alpha),
            generation_batch_size=setting.batch,
            per_device_train_batch_size=setting.micro_batch,
            num_mini_batches=setting.mini_batches,
            num_ppo_epochs=setting.epochs,
            max_completion_length=setting.answer_tokens,
            max_steps=setting.steps,
            temperature=1.0,
            learning_rate=1e-5,
            beta=0.05,
            seed=setting.seed,
        )
    )
    lengths = {len(ids) for ids in trainer.train_set.ids}
    if lengths != {setting.prompt_tokens}:
        raise RuntimeError(f"expected prompts of {setting.prompt_tokens} tokens, got lengths {sorted(lengths)}")
    before = memory_bytes()
    ends, steps = [time.perf_counter()], []
    for _ in range(setting.steps):
        steps.append(trainer.step())
        if steps[-1]["completions/mean_length"] != setting.answer_tokens:
            raise RuntimeError(f"expected answers of {setting.answer_tokens} tokens, got shorter ones")
        ends.append(time.perf_counter())
    after = memory_bytes()
    for step in steps:
        found = (step["completions/mean_length"], step["completions/max_length"])
        if found != (setting.answer_tokens, setting.answer_tokens):
            raise RuntimeError(f"expected answers of {setting.answer_tokens} tokens, got mean and longest {found}")
    return {
        "ends": ends,
        "phases": [{phase: step[f"seconds/{phase}"] for phase in PHASES} for step in steps],
        "reward": [step["reward"] for step in steps],
        "before": before,
        "after": after,
        "kernel_backends": {k: dict(v) for k, v in registry.report("cpu", DTYPES[arm.dtype]).items()},
        "git_commit": git_commit(ROOT / "rlhf_engine" / "__init__.py"),
        "threads": torch.get_num_threads(),
    }


def run_trl(setting: Setting, arm: Arm, folder: Path, scratch: Path) -> dict[str, Any]:
    """TRL's PPOTrainer. Its callback tells the end of every batch."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig, inject_adapter_in_model
    from safetensors.torch import load_file
    from transformers import AutoTokenizer, LlamaForCausalLM, LlamaForSequenceClassification, TrainerCallback
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    class Clock(TrainerCallback):
        ends: list[float] = []  # noqa: RUF012 - one instance only
        logs: list[dict[str, float]] = []  # noqa: RUF012

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.ends.append(time.perf_counter())

        def on_log(self, *args: Any, logs: dict[str, float], **kwargs: Any) -> None:
            self.logs.append(dict(logs))

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.ends.append(time.perf_counter())

    dtype = getattr(torch, arm.dtype)

    def scorer() -> LlamaForSequenceClassification:
        return LlamaForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=dtype)

    policy, reward, critic = LlamaForCausalLM.from_pretrained(folder, dtype=dtype), scorer(), scorer()
    with torch.no_grad():
        reward.score.weight.copy_(load_file(folder / HEADS_FILE)["reward.weight"])
        critic.score.weight.zero_()  # as ours starts
    lora = {"r": setting.lora_r, "lora_alpha": setting.lora_alpha}
    if arm.lora_critic:
        inject_adapter_in_model(LoraConfig(**lora, target_modules=list(LINEARS)), critic)
        critic.score.requires_grad_(True)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    texts = [json.loads(line)["prompt"] for line in (folder / PROMPTS_FILE).read_text().splitlines()]
    prompts = Dataset.from_list([{"input_ids": tokenizer(text)["input_ids"]} for text in texts])
    lengths = {len(row) for row in prompts["input_ids"]}
    if lengths != {setting.prompt_tokens}:
        raise RuntimeError(f"expected prompts of {setting.prompt_tokens} tokens, got lengths {sorted(lengths)}")
    trainer = PPOTrainer(
        args=PPOConfig(**_trl_options(setting), output_dir=str(scratch)),
        processing_class=tokenizer,
        model=policy,
        ref_model=None,  # the policy with its adapter switched off
        reward_model=reward,
        value_model=critic,
        train_dataset=prompts,
        eval_dataset=prompts.select(range(1)),
        peft_config=LoraConfig(**lora, target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=[Clock],
    )
    if trainer.policy_model.generation_config.eos_token_id is not None:
        raise RuntimeError("expected no token that ends TRL's answers")
    before = memory_bytes()
    trainer.train()
    return {
        "ends": Clock.ends,
        "reward": [log["objective/scores"] for log in Clock.logs if "objective/scores" in log],
        "before": before,
        "after": memory_bytes(),
        "trained_parameters": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        "threads": torch.get_num_threads(),
    }


def _trl_options(setting: Setting) -> dict[str, Any]:
    """The same work in TRL's words, and nothing beside it: no samples, no checkpoints, no reports."""
    return {
        "total_episodes": setting.batch * setting.steps,
        "response_length": setting.answer_tokens,
        "per_device_train_batch_size": setting.micro_batch,
        "gradient_accumulation_steps": setting.batch // setting.micro_batch,
        "local_rollout_forward_batch_size": setting.trl_rollout_batch or setting.batch,
        "num_mini_batches": setting.mini_batches,
        "num_ppo_epochs": setting.epochs,
        "temperature": 1.0,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "kl_coef": 0.05,
        "missing_eos_penalty": None,
        "num_sample_generations": 0,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": setting.seed,
    }


def run_gemm(setting: Setting, arm: Arm, folder: Path, scratch: Path) -> dict[str, Any]:
    """The bare matmuls of one step on one frozen backbone, in their order, every weight a tensor of its own.

    generate: the prompts through all linears, then one token per row and step; the LM head for one row per sequence.
    score: three lanes (off, actor, critic) of all tokens; the LM head on the answers for actor and reference. In exact
        mode the actor's lane has one answer in eight.
    update: two lanes forward and, for the gradient of activations, backward; the LM head on the answers, both ways.
    No weight of the backbone has a gradient, and the input of the first q, k and v needs none. Packed weights are made
    in the first batch, which warms up.
    """
    import torch
    from rlhf_bench.floor import packed_by_mkl

    from rlhf_engine.scoring.experience import CHECKED_EVERY

    dtype, width = getattr(torch, arm.dtype), setting.intermediate
    shapes = [(setting.hidden,) * 2] * 4 + [(width, setting.hidden)] * 2 + [(setting.hidden, width)]
    blocks = [[torch.randn(shape, dtype=dtype) for shape in shapes] for _ in range(setting.layers)]
    head = [torch.randn(setting.vocab, setting.hidden, dtype=dtype)]
    base_model = [weight for block in blocks for weight in block]
    flops = 0.0

    @cache
    def matrix(rows: int, columns: int, use: str) -> torch.Tensor:
        return torch.randn(rows, columns, dtype=dtype)

    @cache
    def packed(weight: torch.Tensor, rows: int, backward: bool) -> Callable[[], object]:
        across = weight.t().contiguous() if backward else weight
        return packed_by_mkl(matrix(rows, across.shape[1], "in"), across)

    def multiply(weights: list[torch.Tensor], rows: int, *, backward: bool = False) -> None:
        nonlocal flops
        for weight in weights:
            right = weight if backward else weight.t()
            k, n = right.shape
            if arm.packed:
                packed(weight, rows, backward)()
            else:
                torch.mm(matrix(rows, k, "in"), right, out=matrix(rows, n, "out"))
            flops += 2.0 * rows * k * n

    def generate() -> None:
        for rows in (setting.batch * setting.prompt_tokens, *[setting.batch] * (setting.answer_tokens - 1)):
            multiply(base_model, rows)
            multiply(head, setting.batch)

    def score() -> None:
        by_actor = -(-setting.batch // CHECKED_EVERY) if arm.exact else setting.batch
        multiply(base_model, (2 * setting.batch + by_actor) * setting.length)
        multiply(head, setting.batch * setting.answer_tokens)
        multiply(head, by_actor * setting.answer_tokens)

    def update() -> None:
        for _ in range(setting.epochs * setting.batch // setting.micro_batch):
            multiply(base_model, 2 * setting.micro_batch * setting.length)
            multiply(head, setting.micro_batch * setting.answer_tokens)
            multiply(head, setting.micro_batch * setting.answer_tokens, backward=True)
            multiply(base_model[:2:-1], 2 * setting.micro_batch * setting.length, backward=True)

    before, ends, phases = memory_bytes(), [time.perf_counter()], []
    for _ in range(setting.steps):
        flops, marks = 0.0, [ends[-1]]
        for phase in (generate, score, update):
            phase()
            marks.append(time.perf_counter())
        phases.append({name: marks[i + 1] - marks[i] for i, name in enumerate(PHASES)})
        ends.append(marks[-1])
    found = {"ends": ends, "phases": phases, "before": before, "after": memory_bytes()}
    return {**found, "flops": flops, "threads": torch.get_num_threads()}


def work(request_file: str) -> None:
    """Work of a worker process: one request, whose answer goes into a file."""
    request = json.loads(Path(request_file).read_text())
    setting, folder = Setting(**request["setting"]), Path(request["folder"])
    if request["arm"] is None:
        prepare(setting, folder)
        return
    import torch

    torch.set_num_threads(setting.threads)
    arm = Arm(**request["arm"])
    found = {"ours": run_ours, "trl": run_trl, "gemm": run_gemm}[arm.engine](
        setting, arm, folder, Path(request["scratch"])
    )
    Path(request["answer"]).write_text(json.dumps(found))


if __name__ == "__main__":
    work(sys.argv[1])
