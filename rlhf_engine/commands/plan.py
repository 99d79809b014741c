"""`rlhf-engine plan`: memory of a run before it is begun."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_engine.commands.common import as_request_errors, prepare
from rlhf_engine.config import PlanConfig, parse_config


def run(argv: Sequence[str]) -> int:
    config = parse_config(PlanConfig, argv, prog="rlhf-engine plan")
    from rlhf_engine.planning.report import is_tabled, run_plan

    if is_tabled(config):
        run_plan(config)
        return 0
    prepare("auto")
    with as_request_errors():
        run_plan(config)
    return 0
