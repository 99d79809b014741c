"""`rlhf-engine sft`: supervised fine-tuning with a reward head."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_engine.commands.common import as_request_errors, check_kernels, launched_world, prepare, run_trainer
from rlhf_engine.config import SFTConfig, parse_config


def run(argv: Sequence[str]) -> int:
    config = parse_config(SFTConfig, argv, prog="rlhf-engine sft")
    prepare(config.kernels)
    from rlhf_engine.devices import DTYPES, resolve_device
    from rlhf_engine.training.sft import SftTrainer

    with launched_world(config) as (config, world):
        with as_request_errors():
            check_kernels(config.kernels, resolve_device(config.device).type, DTYPES[config.dtype])
            trainer = SftTrainer(config, world)
        results = {"base" if config.mode == "full" else "slot": config.output_dir}
        return run_trainer("sft", trainer, lambda: results, notes=[f"note: {note}" for note in trainer.notes])
