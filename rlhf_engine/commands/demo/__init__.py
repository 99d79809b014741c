"""`rlhf-engine demo`: supervised training, then RL, on a small built-in task."""

from __future__ import annotations

from typing import Any

from rlhf_engine.commands.common import check_kernels, prepare
from rlhf_engine.config import DemoConfig


def run(config: DemoConfig) -> int:
    prepare(config.kernels)
    import torch

    from rlhf_engine.commands.demo.stages import run_demo
    from rlhf_engine.devices import resolve_device

    check_kernels(config.kernels, resolve_device("auto").type, torch.float32)
    _print_demo(*run_demo(config), config.algorithm)
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
    print(
        f"\n{result['seconds']:.0f} s ({result['seconds_sft']:.0f} supervised, {result['seconds_rl']:.0f} RL), "
        f"peak memory {result['peak_memory_bytes'] / 2**20:.0f} MiB; page {result['output_dir']}/rl/page.html, "
        f"samples {result['output_dir']}/rl/samples.md\n"
        "again, with options of your own: rlhf-engine train "
        f"--config {result['output_dir']}/train.yaml --output_dir runs/again"
    )
