"""A run's own page: written while the run goes on, at rest afterwards, and the numbers that lead it."""

import json
import math
import re
import time

import pytest

from rlhf_engine.errors import RunStopped
from rlhf_engine.runs import page as pages
from rlhf_engine.runs.curves import PANELS
from rlhf_engine.runs.folder import locked
from rlhf_engine.runs.headline import headlines, kind_of_run
from rlhf_engine.runs.metrics import Columns, MetricsWriter
from rlhf_engine.runs.page import PAGE_FILE, TEMPLATES, LivePage, comparison, differing_options, write_page
from rlhf_engine.training.rl import RlTrainer
from tests.training.test_data import train_config, write_prompts


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


PARTS = TEMPLATES.get_template("runs/parts.html.jinja").module


def shown(rows, record=None, state="done"):
    return {h.label: h for h in headlines(Columns(rows), record or {}, state)}


def rows_of(n, **metrics):
    """n lines; a metric's value is a function of the step."""
    return [{"step": i, **{name: f(i) for name, f in metrics.items()}} for i in range(1, n + 1)]


def test_reinforcement_learning_leads_with_the_held_out_reward():
    rows = rows_of(40, reward=float, kl=lambda i: i / 10, tokens_per_second=lambda i: 100.0)
    rows[9] |= {"eval/reward": 1.0, "eval/kl": 0.5}
    rows[39] |= {"eval/reward": 2.5, "eval/kl": 3.0}
    found = headlines(Columns(rows), {"total_steps": 40}, "done")
    leading = [h.label for h in found if not h.is_minor][:3]
    assert leading == ["Reward, held out", "KL to the reference, held out", "Steps"]
    by_label = {h.label: h for h in found}
    assert by_label["Reward, held out"].text == "1.000 → 2.500"
    assert by_label["Reward, held out"].note == "step 10 → 40"
    assert by_label["Reward, training"].value == (37 + 38 + 39 + 40) / 4  # a tenth of the steps
    assert by_label["Reward, training"].text == "2.500 → 38.500"
    assert by_label["Steps"].text == "40 of 40"
    assert by_label["Generation"].value == 100.0
    assert "Reward, training" not in PARTS.cards(found)


def test_without_held_out_prompts_the_reward_of_training_leads():
    found = headlines(Columns(rows_of(3, reward=float, kl=float)), {}, "done")
    assert (found[0].label, found[0].text, found[0].note) == ("Reward, training", "1.000 → 3.000", "last step")
    assert not found[0].is_minor


def test_a_reward_model_leads_with_its_held_out_accuracy_and_margin():
    rows = rows_of(30, reward_loss=float, reward_accuracy=lambda i: 0.5, tokens_per_second=float)
    for step, accuracy in ((10, 0.7), (20, 0.8), (30, 0.75)):
        rows[step - 1] |= {"eval/accuracy": accuracy, "eval/margin": accuracy, "eval/loss": 0.5}
    record = {"rows": {"train": 9, "eval": 400}, "result": {"steps": 30, "final_step": 20}}
    found = headlines(Columns(rows), record, "done")
    assert [h.label for h in found][0:3:2] == ["Accuracy, held out", "Margin, held out"]
    assert found[0].value == 0.8  # of the step whose model was kept
    assert found[0].text == "0.700 → 0.800"
    assert found[0].note == "step 10 → 20, which was kept; last, step 30: 0.750; the same rows chose the step"
    # where rows report that chose nothing, theirs are shown, with the interval of the step
    rows = [{"step": 0, "eval/accuracy": 0.5, "test/accuracy": 0.49}, *rows]
    for step, accuracy in ((10, 0.6), (20, 0.71), (30, 0.7)):
        rows[step] |= {"test/accuracy": accuracy, "test/accuracy_low": accuracy - 0.1, "test/accuracy_high": 0.85}
    found = headlines(Columns(rows), record, "done")
    assert found[0].text == "0.490 → 0.710 [0.610, 0.850]"
    assert found[0].note == "step 0 → 20, which was kept; last, step 30: 0.700; [low, high]: 95 % by group"
    assert headlines(Columns(rows[:1]), {}, "running")[0].text == "0.490"
    running = headlines(Columns(rows), {"rows": {"eval": 400}}, "running")
    assert running[0].value == 0.7
    assert "kept" not in running[0].note


def test_supervised_training_leads_with_its_loss():
    found = headlines(Columns(rows_of(20, lm_loss=lambda i: 2.0, reward_loss=float, reward_accuracy=float)), {}, "done")
    assert [h.label for h in found[:2]] == ["Cross-entropy, training", "Perplexity"]
    assert found[1].value == pytest.approx(math.exp(2.0))
    assert "Perplexity" not in shown(rows_of(2, lm_loss=lambda i: 1e6))


def test_the_kind_of_a_run_is_in_its_metrics():
    for metrics, kind in [
        ({"reward": 1.0, "lm_loss": 1.0}, "rl"),
        ({"lm_loss": 1.0, "reward_loss": 1.0}, "supervised"),
        ({"reward_loss": 1.0}, "reward model"),
        ({"something": 1.0}, None),
    ]:
        assert kind_of_run(metrics.keys()) == kind
        assert shown([{"step": 1, **metrics}])["Steps"].text == "1"


def test_the_time_left_is_that_of_the_steps_left():
    steps = shown(rows_of(30, **{"seconds/step": lambda i: 2.0}), {"total_steps": 120}, "running")
    assert steps["Steps"].note == "running, about 3 min of steps left"
    assert shown(rows_of(3), {"config": {"max_steps": 9}}, "stopped")["Steps"].text == "3 of 9"
    assert steps["Time of a step"].note == "mean; all steps 60 s"


def test_lost_numbers_are_no_numbers():
    rows = [{"step": 1, "reward": None, "kl": None}, {"step": 2, "reward": 3.0, "kl": True}]
    assert shown(rows)["Reward, training"].text == "3.000"
    assert "KL to the reference, training" not in shown(rows)


def table_of(configs, all_rows):
    found = [headlines(Columns(rows), {}, "done") for rows in all_rows]
    return PARTS.comparison(comparison([f"run{i}" for i in range(len(configs))], configs, found))


def test_options_that_differ_are_columns_and_the_best_is_marked():
    configs = [
        {"learning_rate": 1e-3, "beta": 0.1, "output_dir": "a", "reward_funcs": ["x"]},
        {"learning_rate": 3e-3, "beta": 0.1, "output_dir": "b", "reward_funcs": ["x"], "new": 1},
    ]
    assert differing_options(configs) == ["learning_rate"]
    memory = {"peak_memory_bytes": lambda i: 1e9}
    table = table_of(configs, [rows_of(n, reward=float, kl=float, **memory) for n in (2, 3)])
    assert table.index("learning_rate") < table.index("Reward, training")
    assert 'data-value="3.0">3.000 <b title="best of the runs">★' in table
    assert table.count("★<span") == 1  # no best KL, and no best of equal memories
    assert "output_dir" not in table
    assert "beta" not in table


def test_less_is_better_where_it_is_a_loss():
    table = table_of([{}, {}], [rows_of(1, lm_loss=lambda i: 2.0), rows_of(1, lm_loss=lambda i: 1.0)])
    assert '>1.000 <b title="best of the runs">★' in table
    assert '>2.000 <b title="best of the runs">★' not in table


def test_many_options_stand_behind_the_numbers():
    configs = [{f"option{i}": k for i in range(5)} for k in range(2)]
    table = table_of(configs, [rows_of(1, reward=float)] * 2)
    assert table.index("Reward, training") < table.index("option0")


def test_held_out_and_training_numbers_are_never_in_one_column():
    held_out = rows_of(1, reward=lambda i: 9.0)
    held_out[0]["eval/reward"] = 5.0
    table = table_of([{}, {}], [held_out, rows_of(1, reward=lambda i: 7.0)])
    assert '<td class="number">–</td>' in table
    assert '>9.000 <b title="best of the runs">★' in table
    alike = table_of([{}, {}], [held_out, held_out])
    assert "Reward, training" not in alike


def test_what_a_run_is_for_is_the_first_curve_of_each_kind():
    order = [name for panel in PANELS for name, _ in panel.lines]
    assert order[0] == "reward"
    for outcome in ("lm_loss", "eval/accuracy", "eval/margin", "eval/loss"):
        assert order.index(outcome) < order.index("tokens_per_second")
    assert order[-1] == "tokens_per_second"
