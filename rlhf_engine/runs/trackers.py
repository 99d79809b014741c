"""A run's metrics for TensorBoard, trackio or Weights & Biases, through accelerate's trackers.

`metrics.jsonl` is written in any case and is what a run resumes from; trackers get copies. They are as they come: what
talks to a network does so because the user asked for it by name.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rlhf_engine.errors import ConfigError
from rlhf_engine.runs.metrics import write_json_atomic

TENSORBOARD_FOLDER = "tensorboard"
NAMES_FILE = "trackers.json"
"""File with the names of a run elsewhere, by tracker."""
_NAMED_BY = {"wandb": "id", "trackio": "name"}
"""The argument by which a tracker finds a run again."""


class Trackers:
    """The open trackers of a run; none where none are asked for."""

    def __init__(self, names: Sequence[str], output: Path, options: Mapping[str, Any], *, step: int = 0) -> None:
        """output: of the run, whose name the trackers get; TensorBoard's files go into it. step: from which it goes on.

        Raises ConfigError for one that is not installed.
        """
        self._open: list[Any] = []
        if not names:
            return
        require(names)
        from accelerate import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        PartialState()  # by which a tracker tells whether it is on the main process
        plain = {name: x if isinstance(x, (bool, int, float, str)) else str(x) for name, x in options.items()}
        known = self._names(names, output, step)
        for name in names:
            cls = LOGGER_TYPE_TO_CLASS[name]
            if cls.requires_logging_directory:
                # of steps after the one that a run goes on from, TensorBoard shows what comes now
                tracker = cls(TENSORBOARD_FOLDER, output, **({"purge_step": step + 1} if step else {}))
            else:
                tracker = cls(output.name, resume="allow", **{_NAMED_BY[name]: known[name]})
            if hasattr(tracker, "start"):
                tracker.start()
            if name != "tensorboard":  # its hyper-parameter page makes a run of its own each time a run resumes
                tracker.store_init_configuration(plain)
            self._open.append(tracker)

    @staticmethod
    def _names(names: Sequence[str], output: Path, step: int) -> dict[str, str]:
        """Names of the run in trackers that keep it elsewhere, by tracker; at step 0 they are new."""
        path = output / NAMES_FILE
        known: dict[str, str] = json.loads(path.read_text()) if step and path.is_file() else {}
        new = {name: secrets.token_hex(4) for name in names if name in _NAMED_BY and name not in known}
        if new:
            write_json_atomic(path, {**known, **new})
        return {**known, **new}

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Finite numbers alone; what is not finite is in metrics.jsonl."""
        values = {name: float(x) for name, x in metrics.items() if isinstance(x, (int, float)) and x - x == 0}
        for tracker in self._open:
            tracker.log(values, step=step)

    def close(self) -> None:
        for tracker in self._open:
            tracker.finish()
        self._open = []

    def __enter__(self) -> Trackers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def require(names: Sequence[str]) -> None:
    """Raise ConfigError for trackers that are not installed."""
    if not names:
        return
    from accelerate.tracking import get_available_trackers

    there = {str(tracker) for tracker in get_available_trackers()}
    missing = [name for name in names if name not in there]
    if missing:
        raise ConfigError(
            f"report_to: expected trackers that are installed (pip install 'rlhf-engine[logging]'), got {missing}"
        )
