"""`rlhf-engine train`: RL on one frozen backbone, in one process or several."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

from rlhf_engine.commands.common import as_request_errors, check_kernels, prepare, run_trainer
from rlhf_engine.config import TrainConfig, parse_config
from rlhf_engine.distributed.launch import asked_to_shard


def run(argv: Sequence[str]) -> int:
    config = parse_config(TrainConfig, argv, prog="rlhf-engine train")
    prepare(config.kernels)
    from rlhf_engine.devices import DTYPES, resolve_device
    from rlhf_engine.distributed.process_group import World
    from rlhf_engine.runs.folder import FINAL_FOLDER, SAMPLES_FILE
    from rlhf_engine.runs.progress import ASYNC_SHOWN, TrainingProgress
    from rlhf_engine.training.rl import RlTrainer

    with contextlib.ExitStack() as stack:
        with as_request_errors():
            check_kernels(config.kernels, resolve_device(config.device).type, DTYPES[config.dtype])
            if asked_to_shard() and not config.shard_base:
                config = dataclasses.replace(config, shard_base=True)
        world = stack.enter_context(
            contextlib.closing(World.from_environment(config.device, timeout=config.ddp_timeout))
        )
        with as_request_errors():
            connect = None
            if config.async_mode == "ray":
                from rlhf_engine.generators.ray.connect import generators_on_ray

                connect = stack.enter_context(generators_on_ray(config, world))
            trainer = RlTrainer(config, world, connect=connect)
        shown = {**TrainingProgress.SHOWN, **(ASYNC_SHOWN if config.is_async else {})}
        title = config.algorithm if world.size == 1 else f"{config.algorithm}, {world.size} processes"
        samples = {"samples": trainer.output / SAMPLES_FILE} if config.num_samples else {}
        results = {"model": trainer.output / FINAL_FOLDER, **samples}
        return run_trainer("train", trainer, lambda: results, title=title, shown=shown)
