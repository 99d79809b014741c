"""`rlhf-engine report`: a page of one run or several."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_engine.config import ReportConfig, parse_config


def run(argv: Sequence[str]) -> int:
    config = parse_config(ReportConfig, argv, prog="rlhf-engine report")
    from rlhf_engine.runs.page import write_page

    print(f"page {write_page(config.run, config.out, title=config.title)}")
    return 0
