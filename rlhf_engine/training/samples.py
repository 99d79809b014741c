"""Answers to the same few prompts as a run goes on: `samples.jsonl`, one line per look at the policy."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from rlhf_engine.training.metrics import whole_lines, write_atomic


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
        """All looks, in order."""
        return [Samples(**json.loads(line)) for line in whole_lines(self.path)]

    def drop_from(self, step: int) -> None:
        """Drop the looks at this step and later ones: the run has gone back."""
        kept = [line for line in whole_lines(self.path) if json.loads(line)["step"] < step]
        if self.path.exists():
            write_atomic(self.path, b"".join(kept))

    def write(self, samples: Samples) -> None:
        """Append one look, flushed to disk."""
        with self.path.open("ab") as file:
            file.write(json.dumps(asdict(samples), ensure_ascii=False, allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
