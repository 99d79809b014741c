"""`rlhf-engine train`: RL on one frozen backbone, in one process or several."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf_engine.commands.common import as_request_errors, check_kernels, launched_world, prepare, run_trainer
from rlhf_engine.config import TrainConfig, parse_config

if TYPE_CHECKING:
    from rlhf_engine.training.rl import RlTrainer


def run(argv: Sequence[str]) -> int:
    config = parse_config(TrainConfig, argv, prog="rlhf-engine train")
    prepare(config.kernels)
    from rlhf_engine.devices import DTYPES, resolve_device
    from rlhf_engine.runs.folder import FINAL_FOLDER, SAMPLES_FILE
    from rlhf_engine.training.rl import RlTrainer

    with contextlib.ExitStack() as stack:
        with as_request_errors():
            check_kernels(config.kernels, resolve_device(config.device).type, DTYPES[config.dtype])
        config, world = stack.enter_context(launched_world(config))
        with as_request_errors():
            connect = None
            if config.async_mode == "ray":
                from rlhf_engine.generators.ray import generators_on_ray

                connect = stack.enter_context(generators_on_ray(config, world))
            trainer = RlTrainer(config, world, connect=connect)
        if config.dry_run:
            return _measure(trainer)
        results = {"model": trainer.output / FINAL_FOLDER, "samples": trainer.output / SAMPLES_FILE}
        return run_trainer("train", trainer, lambda: results)


def _measure(trainer: RlTrainer) -> int:
    """Print seconds and peak memory by phase of a step; the one before it makes the optimizer's state."""
    from rlhf_engine.runs.progress import describe_budgets

    config = trainer.config
    with trainer.resources(), trainer.steps():
        trainer.step()
        metrics = trainer.step()
    if not trainer.world.is_main:
        return 0
    longest = max(map(len, trainer.train_set.ids))
    each = f", shared by {trainer.world.size} processes" if trainer.world.size > 1 else ""
    print(f"{config.generation_batch_size} answers of up to {longest} + {config.max_completion_length} tokens{each}")
    if chosen := describe_budgets(metrics):
        print(chosen)
    peaks = {name.partition("/")[2]: n for name, n in metrics.items() if name.startswith("peak_memory_bytes/")}
    for phase, peak in peaks.items():
        print(f"{phase:12} {metrics[f'seconds/{phase}']:9.2f} s {peak / 1e9:9.2f} GB")
    print(f"{'step':12} {metrics['seconds/step']:9.2f} s {max(peaks.values()) / 1e9:9.2f} GB at the peak")
    return 0
