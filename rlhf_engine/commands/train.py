"""`rlhf-engine train`: RL on one frozen backbone, in one process or several."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from rlhf_engine.commands.common import as_request_errors, check_kernels, launched_world, prepare, run_trainer
from rlhf_engine.config import TrainConfig, parse_config


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
                from rlhf_engine.generators.ray.connect import generators_on_ray

                connect = stack.enter_context(generators_on_ray(config, world))
            trainer = RlTrainer(config, world, connect=connect)
        samples = {"samples": trainer.output / SAMPLES_FILE} if config.num_samples else {}
        results = {"model": trainer.output / FINAL_FOLDER, **samples}
        return run_trainer("train", trainer, lambda: results)
