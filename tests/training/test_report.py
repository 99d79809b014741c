"""Reports: curves from the metrics there are, samples that stay text, tables, progress off a terminal."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from matplotlib.image import imread
from rich.console import Console

from rlhf_engine.report import (
    PANELS,
    TrainingProgress,
    format_value,
    plot_curves,
    samples_markdown,
    smooth,
    summary_table,
)
from rlhf_engine.training.metrics import MetricsWriter


def write(path: Path, steps: int, *names: str) -> None:
    with MetricsWriter(path) as writer:
        for step in range(steps):
            writer.write(step, {name: math.sin(step + len(name)) for name in names})


def test_every_panel_is_drawn_when_all_metrics_are_there(tmp_path: Path) -> None:
    write(tmp_path / "m.jsonl", 24, *(name for panel in PANELS for name, _ in panel.lines))
    png = tmp_path / "new" / "curves.png"
    assert plot_curves(tmp_path / "m.jsonl", png) == [panel.title for panel in PANELS]
    image = imread(png)
    assert image.shape[1] > 1200  # three panels side by side
    assert image[..., :3].std() > 0.05  # not a blank page


def test_only_panels_with_data_and_gaps_for_lost_values(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "m.jsonl") as writer:
        writer.write(0, {"reward": 1.0, "kl": math.nan, "unheard_of": 2.0})
        writer.write(1, {"reward": math.inf, "kl": math.nan, "clip_ratio": 0.0})
    assert plot_curves(tmp_path / "m.jsonl", tmp_path / "c.png") == ["Reward", "Clipped ratios"]


def test_no_known_metric_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "m.jsonl", 2, "unheard_of")
    with pytest.raises(ValueError, match=r"metrics_jsonl: expected lines with known metrics in .*m\.jsonl"):
        plot_curves(tmp_path / "m.jsonl", tmp_path / "c.png")
    assert not (tmp_path / "c.png").exists()


def test_smoothing_has_no_bias_at_the_start() -> None:
    assert smooth([3.0, 3.0, 3.0]) == pytest.approx([3.0, 3.0, 3.0])
    assert smooth([1.0, 0.0], decay=0.5) == pytest.approx([1.0, 0.5 / 1.5])
    assert smooth([]) == []


def test_samples_stay_text() -> None:
    text = samples_markdown(["# p\n```", "q"], ["<b>a</b>", " "], ["c", "d"], [0.5, None], [1, 2.25])
    assert text.count("## ") == 2
    assert "````text\n# p\n```\n````" in text  # a fence longer than any in the prompt
    assert "**Before** (reward 0.500)\n\n```text\n<b>a</b>\n```" in text
    assert "**Before** (reward –)\n\n*an empty answer*" in text
    assert "**After** (reward 2.250)\n\n```text\nd\n```" in text
    assert "reward" not in samples_markdown(["p"], ["a"], ["b"])
    with pytest.raises(ValueError, match=r"after: expected 1 entries, one per prompt, got 2"):
        samples_markdown(["p"], ["a"], ["b", "c"])


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (3, "3"), (12345, "12,345"), (12345.6, "12,346"), (0.12345, "0.123"), (0.0, "0.000"),
     (0.00012345, "1.23e-04"), (-2.5, "-2.500"), (math.nan, "nan"), (True, "True"), ("x", "x")],
)  # fmt: skip
def test_numbers_are_readable(value: object, text: str) -> None:
    assert format_value(value) == text


def test_table_shows_names_columns_and_values() -> None:
    buffer = io.StringIO()
    table = summary_table("Held out", ["before", "after"], {"true score": [1.0, 2.5], "win rate": [None, 0.75]})
    Console(file=buffer, width=80).print(table)
    lines = buffer.getvalue().splitlines()
    assert "Held out" in lines[0]
    assert any("true score" in line and "1.000" in line and "2.500" in line for line in lines)
    assert any("win rate" in line and "–" in line and "0.750" in line for line in lines)
    with pytest.raises(ValueError, match=r"rows: a: expected 1 values, one per column, got 2"):
        summary_table("t", ["x"], {"a": [1, 2]})


def test_progress_is_plain_lines_off_a_terminal() -> None:
    buffer = io.StringIO()
    with TrainingProgress(9, title="ppo [x]", console=Console(file=buffer, width=30), step=5) as progress:
        progress.update(6, {"reward": 0.5, "kl": 0.001, "tokens_per_second": 1234.5, "other": 1})
        progress.update(7, {})
    first, second = buffer.getvalue().splitlines()
    assert first.startswith("ppo [x] 6/9  reward 0.500  kl 1.00e-03  tokens/s 1,234  ")
    assert second.startswith("ppo [x] 7/9  ")
    assert "\x1b" not in buffer.getvalue()


def test_progress_is_a_bar_on_a_terminal_but_not_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    for ci, plain in (("", False), ("1", True)):
        monkeypatch.setenv("CI", ci)
        buffer = io.StringIO()
        console = Console(file=buffer, width=120, force_terminal=True, color_system=None)
        with TrainingProgress(4, title="sft", console=console) as progress:
            progress.update(4, {"lm_loss": 1.5})
        assert progress.plain is plain
        assert "4/4" in buffer.getvalue()
        assert "loss 1.500" in buffer.getvalue()
        assert ("━" in buffer.getvalue()) is not plain
    with pytest.raises(ValueError, match=r"total_steps: expected an integer >= 1, got 0"):
        TrainingProgress(0)
