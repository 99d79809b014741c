"""Headline numbers of a run by its kind, and the table that compares runs."""

import math

import pytest

from rlhf_engine.runs.curves import PANELS
from rlhf_engine.runs.headline import headlines, kind_of_run
from rlhf_engine.runs.page import TEMPLATES, comparison, differing_options

PARTS = TEMPLATES.get_template("runs/parts.html.jinja").module


def shown(rows, record=None, state="done"):
    return {h.label: h for h in headlines(rows, record or {}, state)}


def rows_of(n, **metrics):
    """n lines; a metric's value is a function of the step."""
    return [{"step": i, **{name: f(i) for name, f in metrics.items()}} for i in range(1, n + 1)]


def test_reinforcement_learning_leads_with_the_held_out_reward():
    rows = rows_of(40, reward=float, kl=lambda i: i / 10, tokens_per_second=lambda i: 100.0)
    rows[9] |= {"eval/reward": 1.0, "eval/kl": 0.5}
    rows[39] |= {"eval/reward": 2.5, "eval/kl": 3.0}
    found = headlines(rows, {"total_steps": 40}, "done")
    assert [h.label for h in found if not h.is_minor][:3] == [
        "Reward, held out",
        "KL to the reference, held out",
        "Steps",
    ]
    by_label = {h.label: h for h in found}
    assert by_label["Reward, held out"].text == "1.000 → 2.500"
    assert by_label["Reward, held out"].note == "step 10 → 40"
    assert by_label["Reward, training"].value == (37 + 38 + 39 + 40) / 4  # a tenth of the steps
    assert by_label["Reward, training"].text == "2.500 → 38.500"
    assert by_label["Steps"].text == "40 of 40"
    assert by_label["Generation"].value == 100.0
    assert "Reward, training" not in PARTS.cards(found)


def test_without_held_out_prompts_the_reward_of_training_leads():
    found = headlines(rows_of(3, reward=float, kl=float), {}, "done")
    assert (found[0].label, found[0].text, found[0].note) == ("Reward, training", "1.000 → 3.000", "last step")
    assert not found[0].is_minor


def test_a_reward_model_leads_with_its_held_out_accuracy_and_margin():
    rows = rows_of(30, reward_loss=float, reward_accuracy=lambda i: 0.5, tokens_per_second=float)
    for step, accuracy in ((10, 0.7), (20, 0.8), (30, 0.75)):
        rows[step - 1] |= {"eval/accuracy": accuracy, "eval/margin": accuracy, "eval/loss": 0.5}
    record = {"rows": {"train": 9, "eval": 400}, "result": {"steps": 30, "final_step": 20}}
    found = headlines(rows, record, "done")
    assert [h.label for h in found][0:3:2] == ["Accuracy, held out", "Margin, held out"]
    assert found[0].value == 0.8  # of the step whose model was kept
    assert found[0].text == "0.700 → 0.800"
    assert found[0].note == "step 10 → 20, which was kept; last, step 30: 0.750; the same rows chose the step"
    # where rows report that chose nothing, theirs are shown, with the interval of the step
    rows = [{"step": 0, "eval/accuracy": 0.5, "test/accuracy": 0.49}, *rows]
    for step, accuracy in ((10, 0.6), (20, 0.71), (30, 0.7)):
        rows[step] |= {"test/accuracy": accuracy, "test/accuracy_low": accuracy - 0.1, "test/accuracy_high": 0.85}
    found = headlines(rows, record, "done")
    assert found[0].text == "0.490 → 0.710 [0.610, 0.850]"
    assert found[0].note == "step 0 → 20, which was kept; last, step 30: 0.700; [low, high]: 95 % by group"
    assert headlines(rows[:1], {}, "running")[0].text == "0.490"
    running = headlines(rows, {"rows": {"eval": 400}}, "running")
    assert running[0].value == 0.7
    assert "kept" not in running[0].note


def test_supervised_training_leads_with_its_loss():
    found = headlines(rows_of(20, lm_loss=lambda i: 2.0, reward_loss=float, reward_accuracy=float), {}, "done")
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
        assert kind_of_run([{"step": 1, **metrics}]) == kind
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
    found = [headlines(rows, {}, "done") for rows in all_rows]
    return PARTS.comparison(comparison([f"run{i}" for i in range(len(configs))], configs, found))


def test_options_that_differ_are_columns_and_the_best_is_marked():
    configs = [
        {"learning_rate": 1e-3, "beta": 0.1, "output_dir": "a", "reward_funcs": ["x"]},
        {"learning_rate": 3e-3, "beta": 0.1, "output_dir": "b", "reward_funcs": ["x"], "new": 1},
    ]
    assert differing_options(configs) == ["learning_rate"]
    memory = {"peak_memory_bytes": lambda i: 1e9}
    table = table_of(
        configs,
        [rows_of(2, reward=float, kl=float, **memory), rows_of(3, reward=float, kl=float, **memory)],
    )
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
