"""`rlhf-engine demo`: supervised training, then RL, on a small built-in task."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

from rlhf_engine.commands.common import check_kernels, prepare
from rlhf_engine.config import DemoConfig, parse_config


def run(argv: Sequence[str]) -> int:
    config = parse_config(DemoConfig, argv, prog="rlhf-engine demo")
    prepare(config.kernels)
    import torch
    from rich.console import Console

    from rlhf_engine.commands.demo.stages import run_demo
    from rlhf_engine.devices import resolve_device
    from rlhf_engine.runs.progress import TrainingProgress

    check_kernels(config.kernels, resolve_device("auto").type, torch.float32)
    # standard output belongs to the result
    console = Console(file=sys.stderr)
    with contextlib.ExitStack() as stack:
        bars: dict[str, TrainingProgress] = {}
        titles = {"sft": "supervised + reward", "rl": config.algorithm}

        def on_step(phase: str, step: int, total: int, metrics: dict[str, float]) -> None:
            if phase not in bars:
                stack.close()  # the earlier phase's bar is done
                bars[phase] = stack.enter_context(TrainingProgress(total, title=titles[phase], console=console))
            if not bars[phase].plain or step % 10 == 0 or step == total:
                bars[phase].update(step, metrics)

        result, before, after = run_demo(config, on_step)
    _print_demo(result, before, after, config.algorithm)
    return 0


def _print_demo(result: dict[str, Any], before: Any, after: Any, algorithm: str) -> None:
    from rich.console import Console

    from rlhf_engine.runs.text import summary_table

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
    console.print(
        f"\n{result['seconds']:.0f} s ({result['seconds_sft']:.0f} supervised, {result['seconds_rl']:.0f} RL), "
        f"peak memory {result['peak_memory_bytes'] / 2**20:.0f} MiB; page {result['output_dir']}/rl/page.html, "
        f"samples {result['output_dir']}/rl/samples.md\n"
        "again, with options of your own: rlhf-engine train "
        f"--config {result['output_dir']}/train.yaml --output_dir runs/again",
        markup=False,
        highlight=False,
        soft_wrap=True,  # a command is copied as one line
    )
