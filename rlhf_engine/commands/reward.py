"""`rlhf-engine reward`: a reward model, on an adapter slot or whole."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_engine.commands.common import as_request_errors, check_kernels, launched_world, prepare, run_trainer
from rlhf_engine.config import RewardConfig, parse_config


def run(argv: Sequence[str]) -> int:
    config = parse_config(RewardConfig, argv, prog="rlhf-engine reward")
    prepare(config.kernels)
    from rlhf_engine.devices import DTYPES, resolve_device
    from rlhf_engine.runs.folder import FINAL_FOLDER
    from rlhf_engine.runs.text import format_value
    from rlhf_engine.training.reward_model import RewardTrainer

    with launched_world(config) as (config, world):
        with as_request_errors():
            check_kernels(config.kernels, resolve_device(config.device).type, DTYPES[config.dtype])
            trainer = RewardTrainer(config, world)
        share = trainer.trained_parameters / trainer.base_parameters
        held_out = len(trainer.eval_set) + len(trainer.test_set)
        size = (
            f"{trainer.objective}, {len(trainer.rows):,} rows and {held_out:,} held out; training "
            f"{trainer.trained_parameters:,} parameters, {100 * share:.3g} % of the base's {trainer.base_parameters:,}"
        )
        name = trainer.best_metric

        def results() -> dict[str, str]:
            result = trainer.result()
            metric = format_value(result["best_metric"])
            how = f"step {result['final_step']}, held-out {name} {metric}"
            return {"reward model": f"{trainer.output / FINAL_FOLDER}  ({how})"}

        notes = [size, *(f"note: {note}" for note in trainer.notes)]
        return run_trainer("reward", trainer, results, notes=notes)
