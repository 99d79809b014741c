"""The curves of short runs in tests: drawn once, copied afterwards, because drawing is most of such a run's time."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

TRAINERS = ("rl", "sft", "reward")


@contextmanager
def drawn_once() -> Iterator[None]:
    """Within the block the first run draws its curves, and every later one leaves a copy of that picture."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        picture = folder / "curves.png"

        def draw(metrics_jsonl: str | Path, png_path: str | Path) -> None:
            from rlhf_engine.report import plot_curves  # not by tests of the kernels, which draw nothing
            from rlhf_engine.training.metrics import read_metrics

            assert read_metrics(metrics_jsonl), metrics_jsonl
            if not picture.exists():
                plot_curves(metrics_jsonl, picture)
            shutil.copy(picture, png_path)

        for name in TRAINERS:
            trainer = sys.modules.get(f"rlhf_engine.training.{name}")  # what nobody has imported draws nothing
            if trainer is not None:
                stack.enter_context(mock.patch.object(trainer, "plot_curves", draw))
        yield
