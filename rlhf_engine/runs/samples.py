"""Answers to the same few prompts as a run goes on: `samples.jsonl`, one line per look at the policy."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf_engine.errors import ConfigError
from rlhf_engine.io import no_link
from rlhf_engine.runs.metrics import cut_after, read_lines


@dataclass(frozen=True, kw_only=True)
class Samples:
    """One look."""

    step: int
    """Steps done by then."""
    prompts: list[str]
    completions: list[str]
    scores: list[float | None]


class SampleLog:
    """The file. What a crash has left behind whole lines is left out, as in metrics."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[Samples]:
        """All looks, in order. Raises ConfigError for a line of other fields than a look has."""
        return [self._look(row) for row, _ in read_lines(self.path) if row is not None]

    def _look(self, fields: dict[str, Any]) -> Samples:
        kinds = {"prompts": (str,), "completions": (str,), "scores": (int, float, type(None))}
        lists = {name: fields.get(name) for name in kinds}
        of_kind = [isinstance(x, list) and all(type(y) in kinds[name] for y in x) for name, x in lists.items()]
        if set(fields) != {"step", *kinds} or not all(of_kind) or len({len(x or ()) for x in lists.values()}) > 1:
            raise ConfigError(
                f"{self.path}: expected prompts, completions and scores, as many of each, got other fields at step "
                f"{fields['step']}"
            )
        return Samples(**fields)

    def drop_from(self, step: int) -> None:
        """Drop the looks at this step and later ones: the run has gone back."""
        if os.path.lexists(self.path):
            cut_after(self.path, step - 1)

    def write(self, samples: Samples) -> None:
        """Append one look, flushed to disk."""
        with open(self.path, "ab", opener=no_link) as file:
            file.write(json.dumps(asdict(samples), ensure_ascii=False, allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
