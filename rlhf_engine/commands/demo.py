"""`rlhf-engine demo`: the whole product in minutes on two CPU cores, judged by something the training never sees.

1. A seeded generator makes a corpus and preference pairs whose true preference is a known function (`demo_task`).
2. A small decoder and a tokenizer are trained from scratch: language model and reward head jointly.
3. RL, by PPO or another algorithm, improves the policy against that *learned* reward, on one frozen backbone.
4. The *true* preference compares answers of RL and SFT on held-out prompts.

Parts 2 and 3 are the commands `sft` and `train` with the options of `sft.yaml` and `train.yaml`, which stay there.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import torch
import yaml
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_engine.commands.common import check_kernels, prepare
from rlhf_engine.commands.demo_task import DemoTask, build_tokenizer, prefer, true_score, vocabulary_texts
from rlhf_engine.config import DemoConfig, Kernels, SFTConfig, TrainConfig, parse_config
from rlhf_engine.config.algorithm import ALGORITHMS
from rlhf_engine.devices import peak_memory_bytes, resolve_device
from rlhf_engine.errors import ConfigError
from rlhf_engine.runs.metrics import read_metrics, write_json_atomic
from rlhf_engine.runs.text import summary_table
from rlhf_engine.training.evaluation import Answers
from rlhf_engine.training.rl import RlTrainer
from rlhf_engine.training.sft import SftTrainer

C = TypeVar("C", SFTConfig, TrainConfig)
_MARKER = ".rlhf-engine-demo"
_START = ("sft/manifest.json", "train.jsonl", "heldout.jsonl")
"""Files that RL reads from a folder that `make_start` has filled."""


@dataclass(frozen=True, kw_only=True)
class DemoSize:
    """Sizes of the demo's data, model and training."""

    n_pairs: int = 17280
    n_train_prompts: int = 800
    n_heldout_prompts: int = 336
    hidden_size: int = 128
    n_layers: int = 3
    sft_steps: int = 720
    rl_steps: int = 26


QUICK = DemoSize(n_pairs=400, n_train_prompts=64, n_heldout_prompts=16, sft_steps=6, rl_steps=2)


def run(config: DemoConfig) -> int:
    prepare(config.kernels)
    check_kernels(config.kernels, resolve_device("auto").type, torch.float32)
    _print_demo(*run_demo(config), config.algorithm)
    return 0


def _print_demo(result: dict[str, Any], before: Answers, after: Answers, algorithm: str) -> None:
    console = Console()
    rows = {
        "learned reward": (result["reward_before"], result["reward_after"]),
        "true score": (result["true_score_before"], result["true_score_after"]),
        "KL to SFT, nats per answer": (0.0, result["kl"]),
        "wins by true preference": (None, f"{100 * result['win_rate']:.1f} %"),
    }
    console.print(summary_table("Held-out prompts", ("SFT", algorithm.upper()), rows))
    memory = {
        "parameters held": (f"{result['parameters_held']:,}", f"{result['parameters_four_models']:,}"),
        "of these trained": (f"{result['trainable_parameters']:,}", f"{result['parameters_four_models'] // 2:,}"),
    }
    console.print(summary_table("Memory", ("this method", "PPO with four models"), memory))
    for i in range(min(3, len(before.prompts))):
        console.print(f"\n{before.prompts[i]}", markup=False, style="bold")
        console.print(f"  SFT  {before.completions[i]}", markup=False)
        console.print(f"  RL   {after.completions[i]}", markup=False)
    print(
        f"\n{result['seconds']:.0f} s ({result['seconds_sft']:.0f} supervised, {result['seconds_rl']:.0f} RL), "
        f"peak memory {result['peak_memory_bytes'] / 2**20:.0f} MiB; page {result['output_dir']}/rl/page.html, "
        f"samples {result['output_dir']}/rl/samples.md\n"
        "again, with options of your own: rlhf-engine train "
        f"--config {result['output_dir']}/train.yaml --output_dir runs/again"
    )


def run_demo(config: DemoConfig) -> tuple[dict[str, Any], Answers, Answers]:
    """Run all four parts; returns the result and the held-out answers of SFT and of RL."""
    size = QUICK if config.quick else DemoSize()
    began = time.perf_counter()
    output = Path(config.output_dir)
    start = output if config.start is None else Path(config.start)
    if config.start is not None:
        sft_metrics = _read_start(start, output)
    _fresh_folder(output)
    if config.start is None:
        sft_metrics = make_start(output, size, seed=config.seed, kernels=config.kernels)
    seconds_sft = time.perf_counter() - began
    trainer = RlTrainer(_rl_config(config, size, start))
    before = heldout_answers(trainer, "reference")
    rl_began = time.perf_counter()
    trainer.run()
    seconds_rl = time.perf_counter() - rl_began
    after = heldout_answers(trainer, "actor")
    held = trainer.model.held_parameters()
    base = sum(p.numel() for _, p in trainer.model.backbone().base_parameters())
    result = {
        "win_rate": win_rate(after, before),
        "kl": trainer.evaluation.kl_to_reference(after.rollout),  # exact, nats per answer
        "reward_before": _mean([s for s in before.scores if s is not None]),
        "reward_after": _mean([s for s in after.scores if s is not None]),
        "true_score_before": _true_mean(before),
        "true_score_after": _true_mean(after),
        # share of fresh pairs that the learned reward orders like their noisy labels, at the end of its training
        "reward_accuracy": sft_metrics.get("reward_accuracy", float("nan")),
        "seconds": time.perf_counter() - began,
        "seconds_sft": seconds_sft,
        "seconds_rl": seconds_rl,
        "peak_memory_bytes": peak_memory_bytes(trainer.model.device),
        "parameters_held": sum(held.values()),
        "parameters_four_models": 4 * base + 2 * (size.hidden_size + 1),
        "trainable_parameters": sum(p.numel() for g in trainer.optimizer.groups.values() for p in g.values()),
        "output_dir": str(output),
    }
    write_json_atomic(output / "result.json", result)
    return result, before, after


def make_start(
    folder: Path,
    size: DemoSize,
    *,
    seed: int,
    kernels: Kernels = "auto",
    on_step: Callable[[int, dict[str, float]], None] | None = None,
) -> dict[str, float]:
    """Write sft/, train.jsonl and heldout.jsonl, where RL starts; metrics of the last supervised step."""
    pairs = write_data(DemoTask(seed), size, folder)
    write_model(size, folder / "init", seed)
    options = _template("sft") | {
        "model_name_or_path": str(folder / "init"), "output_dir": str(folder / "sft"), "dataset_name": str(pairs),
        "max_steps": size.sft_steps, "warmup_steps": size.sft_steps // 20, "kernels": kernels, "seed": seed,
    }  # fmt: skip
    return SftTrainer(_through_file(SFTConfig, folder / "sft.yaml", options)).run(on_step)


def _through_file(cls: type[C], path: Path, options: Mapping[str, Any]) -> C:
    """Options that are written to a file and read from it, as a command with `--config` reads them."""
    path.write_text(yaml.safe_dump(dict(options), sort_keys=False), encoding="utf-8")
    return parse_config(cls, ["--config", str(path)])


def heldout_answers(trainer: RlTrainer, role: str) -> Answers:
    """One answer of a role to each held-out prompt."""
    prompts = trainer.eval_set
    assert prompts is not None
    return trainer.evaluation.answer(prompts, list(range(len(prompts.rows))), role=role, seed=trainer.config.seed + 1)


def win_rate(answers: Answers, others: Answers) -> float:
    """Share of prompts where the true preference picks the first; a tie counts half."""
    pairs = zip(answers.prompts, answers.completions, others.completions, strict=True)
    return _mean([prefer(prompt, a, b) for prompt, a, b in pairs])


def _template(name: str) -> dict[str, Any]:
    """Options of the demo's template of that name."""
    options: dict[str, Any] = yaml.safe_load(
        resources.files("rlhf_engine").joinpath(f"templates/demo-{name}.yaml").read_text("utf-8")
    )
    return options


def rl_options(start: Path) -> dict[str, Any]:
    """Options of RL on the task that every algorithm has in common, from a folder of `make_start`."""
    files = {"dataset_name": start / "train.jsonl", "eval_dataset_name": start / "heldout.jsonl"}
    named = {name: str(path) for name, path in {"model_name_or_path": start / "sft", **files}.items()}
    return {**named, **_template("train")["all"]}


def _rl_config(config: DemoConfig, size: DemoSize, start: Path) -> TrainConfig:
    of, output = _template("train"), Path(config.output_dir)
    options: dict[str, Any] = rl_options(start) | {
        "output_dir": str(output / "rl"), "algorithm": config.algorithm, "method": config.method,
        "async_mode": config.async_mode, "max_steps": size.rl_steps, "kernels": config.kernels, "seed": config.seed,
    }  # fmt: skip
    if "beta" in ALGORITHMS[config.algorithm].reads:
        options["beta"] = 0.1
    options |= {**of["demo"], **of.get(config.algorithm, {})}
    return _through_file(TrainConfig, output / "train.yaml", options)


def _read_start(start: Path, output: Path) -> dict[str, float]:
    """Metrics of an earlier demo's last supervised step; ConfigError where it lacks a part or would be emptied."""
    lacking = [name for name in (*_START, "sft/metrics.jsonl") if not (start / name).exists()]
    if lacking:
        raise ConfigError(f"start: expected the folder of an earlier demo, got {start}, which lacks {lacking}")
    if output.resolve() == start.resolve():
        raise ConfigError(f"output_dir: expected another folder than start, got {output} for both")
    return read_metrics(start / "sft" / "metrics.jsonl")[-1]


def _fresh_folder(output: Path) -> None:
    """The demo's own folder, emptied if an earlier demo wrote it; anything else is left alone."""
    marker = output / _MARKER
    if output.exists() and any(output.iterdir()):
        if not marker.exists():
            raise ConfigError(f"output_dir: expected a new folder or one of an earlier demo, got {output}")
        shutil.rmtree(output)
    output.mkdir(parents=True, exist_ok=True)
    marker.touch()


def write_data(task: DemoTask, size: DemoSize, output: Path) -> Path:
    """Prompts, and the preference pairs whose file is returned."""
    rows = {
        "pairs": task.sft_pairs(size.n_pairs),
        "train": [{"prompt": p} for p in task.train_prompts(size.n_train_prompts)],
        "heldout": [{"prompt": p} for p in task.heldout_prompts(size.n_heldout_prompts)],
    }
    for name, records in rows.items():
        write_rows(output / f"{name}.jsonl", records)
    return output / "pairs.jsonl"


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_model(size: DemoSize, folder: Path, seed: int) -> None:
    """A small random Llama and the task's tokenizer."""
    tokenizer = build_tokenizer(vocabulary_texts())
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=size.hidden_size, intermediate_size=size.hidden_size * 5 // 2,
        num_hidden_layers=size.n_layers, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=128,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _true_mean(answers: Answers) -> float:
    return _mean([true_score(p, c) for p, c in zip(answers.prompts, answers.completions, strict=True)])


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
