"""`rlhf-engine bench`: time, memory and error of the kernels."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_engine.commands.common import as_request_errors, prepare
from rlhf_engine.config import BenchConfig, parse_config


def run(argv: Sequence[str]) -> int:
    # the op may stand first, without its flag
    argv = ["--op", *argv] if argv and not argv[0].startswith("-") else argv
    config = parse_config(BenchConfig, argv, prog="rlhf-engine bench")
    if config.isa is not None:
        from rlhf_bench.isa import is_held, run_held

        if not is_held(config.isa):
            with as_request_errors():
                return run_held(config.isa, ["bench", *argv])
    prepare("auto")
    from rlhf_bench.command import run_bench

    run_bench(config)
    return 0
