"""Page of a run in its own folder, written again and again while the run goes on.

A page is written whole, and its cost grows with the run. The time between two is therefore `1 / SHARE` times what the
last one took, and at least `SHORTEST`: the page never costs more than that share of a run.
"""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from types import TracebackType

from rlhf_engine.errors import ConfigError
from rlhf_engine.io import writing
from rlhf_engine.runs.folder import METRICS_FILE
from rlhf_engine.runs.page import write_page

PAGE_FILE = "page.html"
SHORTEST = 5.0
"""Least seconds between two pages."""
SHARE = 0.005
"""Most of a run's time that its page takes."""


class LivePage:
    """Context manager of a run's page: within it the page reads itself again in a browser, afterwards it is at rest."""

    def __init__(self, output: Path) -> None:
        self.path = output / PAGE_FILE
        self._due, self._gap = 0.0, SHORTEST

    def __enter__(self) -> LivePage:
        with writing(self.path):
            self.path.unlink(missing_ok=True)  # of the run that this one overwrites or goes on with
        return self

    def refresh(self) -> None:
        """Write the page, if it is time to. Called after each step whose metrics are written."""
        began = time.monotonic()
        if began >= self._due:
            self._write("running", refresh=self._gap)
            now = time.monotonic()
            self._gap = max(SHORTEST, (now - began) / SHARE)
            self._due = now + self._gap

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        metrics = self.path.parent / METRICS_FILE
        if metrics.is_file() and metrics.stat().st_size:
            self._write("done" if kind is None else "stopped", refresh=None)

    def _write(self, state: str, *, refresh: float | None) -> None:
        """Write the page; where that fails there is a warning: a page can be made again, a run cannot."""
        try:
            write_page([self.path.parent], self.path, state=state, refresh=refresh)
        except ConfigError as failure:
            warnings.warn(f"{self.path}: the page was not written: {failure}", stacklevel=3)
