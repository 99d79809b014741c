"""Options of `rlhf-engine report`: a page of one run or several."""

# ruff: noqa: RUF009 - `option` and `required` return dataclasses.field(...), which ruff cannot see

from __future__ import annotations

from dataclasses import dataclass

from rlhf_engine.config.parser import Options, option
from rlhf_engine.config.training import (
    not_empty,
)


@dataclass(frozen=True, kw_only=True)
class ReportConfig(Options):
    """A page of one run or several: numbers, a table that compares runs, curves, answers side by side, options."""

    POSITIONAL = ("run",)

    run: list[str] = option([], "output folders of runs; may also be the first arguments")
    out: str = option("report.html", "the page, which needs nothing but a browser")
    title: str | None = option(None, "its heading; none: the run's name, or how many there are", is_text=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        not_empty("run", self.run)
        not_empty("out", self.out)
