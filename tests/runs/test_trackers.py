"""`report_to`: TensorBoard gets what metrics.jsonl has, of every command; what is not installed is refused at once."""

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from rlhf_engine.errors import ConfigError
from rlhf_engine.runs.metrics import Trackers, read_metrics, require_trackers
from rlhf_engine.training.rl import RlTrainer
from rlhf_engine.training.sft import SftTrainer
from tests.training.test_data import sft_config, train_config


def scalars(folder) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard"
    )
    found = accumulator.EventAccumulator(str(folder))
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


@pytest.mark.parametrize("kind", ["train", "sft"])
def test_tensorboard_has_every_number_of_every_step(model, tmp_path, kind):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    if kind == "train":
        RlTrainer(train_config(model, tmp_path / "run", max_steps=3, report_to=["tensorboard"])).run()
    else:
        SftTrainer(sft_config(model, tmp_path / "run", max_steps=3, report_to=["tensorboard"])).run()
    shown = scalars(tmp_path / "run" / "tensorboard")
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    names = {name for row in rows for name, x in row.items() if isinstance(x, float) and name != "step"}
    assert names <= set(shown)
    for name in names:
        expected = [(row["step"], pytest.approx(row[name], rel=1e-5)) for row in rows if name in row]
        assert shown[name] == expected


def test_what_is_not_installed_is_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("accelerate.tracking._available_trackers", [])
    with pytest.raises(ConfigError, match=r"report_to: expected trackers that are installed .* got \['wandb'\]"):
        require_trackers(["wandb"])
    with pytest.raises(ConfigError, match="report_to"):
        RlTrainer(train_config(tmp_path / "no model", tmp_path / "run", report_to=["tensorboard"]))


def test_only_finite_numbers_go_to_trackers(tmp_path):
    seen = []
    found = Trackers([], tmp_path, {})

    class Keep:
        def log(self, values, step):
            seen.append((step, values))

    found._open = [Keep()]
    found.log(3, {"a": 1, "b": float("nan"), "c": "text", "d": None, "e": 2.5})
    assert seen == [(3, {"a": 1.0, "e": 2.5})]


class Elsewhere:
    """What accelerate's wrappers of wandb and trackio are like."""

    requires_logging_directory = False

    def __init__(self, run_name, **options):
        self.opened.append({"project": run_name, **options})

    def store_init_configuration(self, values):
        pass

    def log(self, values, step):
        pass

    def finish(self):
        self.opened[-1]["finished"] = True


@pytest.mark.parametrize(("name", "called"), [("wandb", "id"), ("trackio", "name")])
def test_a_run_that_goes_on_is_the_same_one_elsewhere(model, tmp_path, monkeypatch, name, called):
    opened = []
    monkeypatch.setattr(Elsewhere, "opened", opened, raising=False)
    monkeypatch.setattr("accelerate.tracking._available_trackers", [name])
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, name, Elsewhere)
    options = {"report_to": [name], "save_steps": 1}
    SftTrainer(sft_config(model, tmp_path / "run", max_steps=1, **options)).run()
    SftTrainer(sft_config(model, tmp_path / "run", max_steps=2, resume_from_checkpoint="auto", **options)).run()
    SftTrainer(sft_config(model, tmp_path / "run", max_steps=1, resume_from_checkpoint="restart", **options)).run()
    assert [x["project"] for x in opened] == ["run"] * 3
    assert {(x["resume"], x["finished"]) for x in opened} == {("allow", True)}
    first, resumed, overwritten = (x[called] for x in opened)
    assert first == resumed != overwritten
