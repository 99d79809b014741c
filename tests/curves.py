"""The curves of short runs in tests: drawn once, copied afterwards, because drawing is most of such a run's time."""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock


@contextmanager
def drawn_once() -> Iterator[None]:
    """Within the block the first run draws its curves, and every later one leaves a copy of that picture."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        picture = folder / "curves.png"

        def draw(metrics_jsonl: str | Path, png_path: str | Path) -> None:
            from rlhf_engine.runs.curves import plot_curves  # not by tests of the kernels, which draw nothing
            from rlhf_engine.runs.metrics import read_metrics

            assert read_metrics(metrics_jsonl), metrics_jsonl
            if not picture.exists():
                plot_curves(metrics_jsonl, picture)
            shutil.copy(picture, png_path)

        loop = sys.modules.get("rlhf_engine.training.run")  # where nobody has imported it, nothing is drawn
        if loop is not None:
            stack.enter_context(mock.patch.object(loop, "plot_curves", draw))
        yield
