"""Reports: curves from the metrics there are, samples that stay text, tables, progress off a terminal."""

import errno
import io
import json
import math
import os
import re
from array import array
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from rlhf_engine.runs.curves import PANELS, plot_curves, smooth
from rlhf_engine.runs.metrics import MetricsWriter
from rlhf_engine.runs.page import write_page
from rlhf_engine.runs.progress import TrainingProgress, course, exit_summary
from rlhf_engine.runs.text import format_score, format_value, samples_markdown, summary_table


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


def test_what_stays_flat_is_not_drawn_unless_a_run_is_for_it(tmp_path: Path) -> None:
    """A single update of GRPO clips nothing: its ratios are 1 throughout."""
    for name, clipped in (("one", 0.0), ("two", 0.1)):
        with MetricsWriter(tmp_path / name / "metrics.jsonl") as writer:
            for step in range(1, 6):
                flat = {"clip_ratio": clipped, "approx_kl": 0.0, "mismatch/update_max": 0.0}
                writer.write(step, {"reward": 1.0, "entropy": 2.0 - 0.1 * step, **flat})
        (tmp_path / name / "run.json").write_text("{}")
    assert plot_curves(tmp_path / "one" / "metrics.jsonl", tmp_path / "c.png") == ["Reward", "Entropy"]

    def titles(*runs: str) -> list[str]:
        page = write_page([tmp_path / run for run in runs], tmp_path / "a.html").read_text()
        data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
        return [panel["title"] for panel in json.loads(data[1])["panels"]]

    assert titles("one") == titles("two") == ["Reward", "Entropy"]
    assert titles("one", "two") == ["Reward", "Entropy", "Clipped ratios"]  # in which these differ


def test_no_known_metric_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "m.jsonl", 2, "unheard_of")
    with pytest.raises(ValueError, match=r"metrics_jsonl: expected lines with known metrics in .*m\.jsonl"):
        plot_curves(tmp_path / "m.jsonl", tmp_path / "c.png")
    assert not (tmp_path / "c.png").exists()


def test_a_full_disk_costs_the_picture_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "m.jsonl", 3, "reward")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(UserWarning, match=r"c\.png: the curves were not drawn: No space left on device"):
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


def test_numbers_are_readable() -> None:
    for value, text in (
        (None, "–"), (3, "3"), (12345, "12,345"), (12345.6, "12,346"), (0.12345, "0.123"), (0.0, "0.000"),
        (0.00012345, "0.000123"), (-2.5, "-2.500"), (math.nan, "nan"), (True, "True"), ("x", "x"),
    ):  # fmt: skip
        assert format_value(value) == text
    scores = {1.31e-07: "0.000", -3e-8: "0.000", 0.0012: "0.0012", 1e-4: "0.0001", 0.5: "0.500", 3: "3", None: "–"}
    assert {score: format_score(score) for score in scores} == scores


def test_table_shows_names_columns_and_values() -> None:
    buffer = io.StringIO()
    table = summary_table("Held out", ["before", "after"], {"true score": [1.0, 2.5], "win rate": [None, 0.75]})
    Console(file=buffer, width=80).print(table)
    lines = buffer.getvalue().splitlines()
    assert "Held out" in lines[0]
    assert any("true score" in line and "1.000" in line and "2.500" in line for line in lines)
    assert any("win rate" in line and "–" in line and "0.750" in line for line in lines)


def test_progress_is_plain_lines_off_a_terminal() -> None:
    buffer = io.StringIO()
    with TrainingProgress(9, title="ppo [x]", console=Console(file=buffer, width=30), step=5) as progress:
        chosen = {"micro_batch_tokens": 8192.0, "scoring_tokens": 32768.0}
        progress.update(6, {"reward": 0.5, "kl": 0.001, "tokens_per_second": 1234.5, "other": 1, **chosen})
        progress.update(7, chosen)
    said, first, second = buffer.getvalue().splitlines()
    assert said == "by free memory: micro-batches of up to 8,192 tokens, scoring of up to 32,768 tokens"
    assert first.startswith("ppo [x] 6/9  reward 0.500  kl 0.001  tokens/s 1,234  ")
    assert second.startswith("ppo [x] 7/9  ")
    assert "\x1b" not in buffer.getvalue()


@pytest.mark.parametrize(
    ("apart", "total", "line"),
    [
        (20.0, 100, r"^about 33 min for the other 98 steps, until \d\d:\d\d; peak memory so far 2\.50 GB$"),
        (0.7, 100, r"^about 69 s for the other 98 steps, until \d\d:\d\d; peak"),
        (90.0, 1000, r"^about 24 h 57 min for the other 998 steps"),
        (0.5, 100, None),  # under a minute
    ],
)
def test_a_long_run_says_after_two_steps_how_long_it_will_take(monkeypatch, apart, total, line) -> None:
    """Once, and without the first step, which compiles; the same in a pipe as on a terminal."""
    now = [1000.0]
    monkeypatch.setattr("rlhf_engine.runs.progress.time.monotonic", lambda: now[0])
    buffer = io.StringIO()
    with TrainingProgress(total, title="ppo", console=Console(file=buffer, width=200)) as progress:
        for step in range(1, 6):
            now[0] += 500.0 if step == 1 else apart
            progress.update(step, {"reward": 1.0, "peak_memory_bytes": 2.5e9})
    found = [shown for shown in buffer.getvalue().splitlines() if not shown.startswith("ppo ")]
    assert len(found) == (line is not None)
    assert line is None or re.search(line, found[0]), found


def test_a_terminal_shows_the_course_of_each_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    buffer = io.StringIO()
    console = Console(file=buffer, width=100, height=30, force_terminal=True, color_system=None)
    with TrainingProgress(8, title="ppo", console=console, shown={"staleness/max": "age"}) as progress:
        for step in range(1, 9):
            times = {"seconds/generate": 1.0, "seconds/update": 3.0, "peak_memory_bytes": 2.5e9}
            lost = {} if step < 8 else {"entropy": None}  # what is no number is not drawn
            progress.update(step, {"reward": step / 4, "kl": -step, "staleness/max": 1.0, **times, **lost})
    last = buffer.getvalue().rpartition("so far")[2]
    assert re.search(r"reward +2\.000 +▁▂▃▄▅▆▇█ ", last)
    assert re.search(r"KL, nats per answer +-8 +█▇▆▅▄▃▂▁ ", last)
    assert re.search(r"age +1\.000 +▁▁▁▁▁▁▁▁ ", last)
    assert "generate 25 %   update 75 %   peak 2.50 GB" in last
    assert "entropy" not in last
    assert "ppo" in last
    assert "8/8" in last


def test_a_low_terminal_keeps_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    buffer = io.StringIO()
    console = Console(file=buffer, width=100, height=7, force_terminal=True, color_system=None)
    with TrainingProgress(1, console=console) as progress:
        progress.update(1, {"reward": 1.0, "kl": 1.0, "entropy": 1.0, "clip_ratio": 0.5})
    last = buffer.getvalue().rpartition("so far")[2]
    assert "reward" in last
    assert "clipped" not in last
    assert "1/1" in last


def test_a_course_of_any_length_fits_and_keeps_its_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    split = np.array_split
    for count in (1, 5, 72, 73, 1000):
        values = array("d", range(count))
        # the training thread appends while the display looks
        monkeypatch.setattr(np, "array_split", lambda x, n, held=values: (held.append(0.0), split(x, n))[1])
        blocks = course(values)
        assert len(blocks) == min(count, 36)
        assert list(blocks) == sorted(blocks)  # the blocks are in the order of their heights
        assert count == 1 or (blocks[0], blocks[-1]) == ("▁", "█")


def test_summary_tells_first_and_last_and_where_things_are(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        writer.write(1, {"reward": 0.5, "kl": 0.0, "peak_memory_bytes": 3e9})
        writer.write(1000, {"reward": None, "kl": 2.0, "eval/reward": 1.5, "peak_memory_bytes": 2e9})
    text = exit_summary(tmp_path / "metrics.jsonl", {"model": tmp_path / "final", "page": "rlhf-engine report x"})
    first, *where = text.splitlines()
    assert first == (
        "1,000 steps; reward 0.500; reward, held out 1.500; KL, nats per answer 0.000 → 2.000; peak memory 3.00 GB"
    )
    assert where == [f"model  {tmp_path / 'final'}", "page   rlhf-engine report x"]


def test_progress_is_a_bar_on_a_terminal_but_not_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    for ci, plain in (("", False), ("1", True)):
        monkeypatch.setenv("CI", ci)
        buffer = io.StringIO()
        console = Console(file=buffer, width=120, force_terminal=True, color_system=None)
        with TrainingProgress(4, title="sft", console=console) as progress:
            progress.update(4, {"lm_loss": 1.5})
        assert progress.plain is plain
        assert "4/4" in buffer.getvalue()
        assert re.search(r"(loss|cross-entropy) +1\.500", buffer.getvalue())
        assert ("━" in buffer.getvalue()) is not plain
    with pytest.raises(ValueError, match=r"total_steps: expected an integer >= 1, got 0"):
        TrainingProgress(0)
