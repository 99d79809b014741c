"""A run's own page: written while the run goes on, at rest afterwards, and never a burden or the end of a run."""

from __future__ import annotations

import json
import re
import time

import pytest

from rlhf_engine.errors import RunStopped
from rlhf_engine.runs import page as pages
from rlhf_engine.runs.folder import locked
from rlhf_engine.runs.metrics import MetricsWriter
from rlhf_engine.runs.page import PAGE_FILE, LivePage, write_page
from rlhf_engine.training.rl import RlTrainer
from tests.training.test_data import train_config, write_model, write_prompts


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("live") / "model")


def start(folder, steps=1):
    """A folder of a run that goes on."""
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"total_steps": 10}))
    with MetricsWriter(folder / "metrics.jsonl") as writer:
        for step in range(1, steps + 1):
            writer.write(step, {"reward": float(step)})
    return folder


def state_of(page) -> tuple[str, bool]:
    """State of the one run on a page, and whether the page reads itself again, which both ways of it agree on."""
    text = page.read_text(encoding="utf-8")
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    again = '<html lang="en" data-refresh="' in text
    assert again == ('<noscript><meta http-equiv="refresh"' in text[: text.index("<style>")])
    return json.loads(found)["runs"][0]["state"], again


def test_a_run_writes_its_page_from_the_first_step_to_the_last(model, tmp_path):
    seen = []
    trainer = RlTrainer(train_config(model, tmp_path / "run", max_steps=2))
    trainer.run(lambda step, metrics: seen.append(state_of(tmp_path / "run" / PAGE_FILE)))
    assert seen == [("running", True)] * 2
    assert state_of(tmp_path / "run" / PAGE_FILE) == ("done", False)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["total_steps"] == 2


def test_a_run_that_is_stopped_leaves_a_page_at_rest(model, tmp_path):
    trainer = RlTrainer(train_config(model, tmp_path / "run", max_steps=3))
    with pytest.raises(RunStopped):
        trainer.run(stop=lambda: True)
    assert state_of(tmp_path / "run" / PAGE_FILE) == ("stopped", False)
    assert state_of(write_page([tmp_path / "run"], tmp_path / "report.html")) == ("stopped", False)


def test_a_page_costs_a_bounded_share_of_the_time(tmp_path, monkeypatch):
    """The clock is set by hand: a step takes a second, a page two."""
    now = [0.0]
    written = []

    def slow(*arguments, **options):
        now[0] += 2.0
        written.append(now[0])

    monkeypatch.setattr(pages.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(pages, "write_page", slow)
    page = LivePage(start(tmp_path / "run"))
    for _ in range(2000):
        now[0] += 1.0
        page.refresh()
    assert 2.0 * (len(written) - 1) <= pages.SHARE * now[0]
    assert len(written) >= 0.9 * pages.SHARE * now[0] / 2.0


def test_pages_follow_each_other_no_faster_than_is_read(tmp_path):
    page = LivePage(start(tmp_path / "run"))
    page.refresh()
    first = page.path.stat()
    page.refresh()
    assert page.path.stat().st_ino == first.st_ino  # each page is another file, put in place whole


def test_a_page_of_an_earlier_run_is_gone(tmp_path):
    folder = start(tmp_path / "run")
    (folder / PAGE_FILE).write_text("old")
    with LivePage(folder) as page:
        assert not page.path.exists()


def test_a_run_without_a_step_has_no_page(tmp_path):
    folder = start(tmp_path / "run", steps=0)
    with pytest.raises(KeyError), LivePage(folder):
        raise KeyError
    assert not (folder / PAGE_FILE).exists()


def test_a_page_that_cannot_be_written_ends_no_run(tmp_path):
    folder = start(tmp_path / "run")
    with LivePage(folder) as page:
        page.path.mkdir()
        with pytest.warns(UserWarning, match=r"page\.html: the page was not written: out: expected a file"):
            page.refresh()
        page.path.rmdir()
    assert state_of(folder / PAGE_FILE) == ("done", False)


def test_report_sees_whether_a_run_goes_on_there(tmp_path):
    """The lock of the folder says so: it ends with the process, however that ends."""
    folder = start(tmp_path / "run", steps=3)
    with locked(folder):
        assert state_of(write_page([folder], tmp_path / "a.html")) == ("running", False)
    assert state_of(write_page([folder], tmp_path / "a.html")) == ("stopped", False)


def test_a_page_says_when_it_was_written(tmp_path):
    page = write_page([start(tmp_path / "run")], tmp_path / "a.html").read_text()
    (text,) = re.findall(r'"written": (\d+)', page)
    assert abs(int(text) - time.time()) < 60
    assert time.strftime("written %Y-%m-%d %H:%M UTC", time.gmtime(int(text))) in page


def test_a_page_waits_longer_where_steps_are_long(tmp_path):
    folder = start(tmp_path / "run")
    assert '"patience": 600.0' in write_page([folder], tmp_path / "a.html").read_text()
    with MetricsWriter(folder / "metrics.jsonl") as writer:
        writer.write(2, {"seconds/step": 100.0})
    assert '"patience": 2000.0' in write_page([folder], tmp_path / "a.html").read_text()


def test_pages_have_everything_they_draw_with(model, tmp_path):
    """Held-out prompts and samples as well: nothing of a page's data is left behind by the way it is written."""
    prompts = str(write_prompts(tmp_path))
    options = {"max_steps": 2, "eval_steps": 1, "eval_dataset_name": prompts}
    RlTrainer(train_config(model, tmp_path / "run", **options)).run()
    own = (tmp_path / "run" / PAGE_FILE).read_text()
    report = write_page([tmp_path / "run"], tmp_path / "report.html").read_text()
    when = re.compile(r'"written": \d+|written \S+ \S+ UTC')
    assert when.sub("", own) == when.sub("", report)
