"""One process at a time runs in an output folder, and what a stop left half-way of a checkpoint is mended."""

import json
import multiprocessing
import os
import shutil
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from rlhf_engine.errors import ConfigError
from rlhf_engine.runs.checkpoint import list_checkpoints
from rlhf_engine.runs.curves import plot_curves
from rlhf_engine.runs.folder import locked, require_unlocked
from rlhf_engine.training.reward_model import RewardTrainer
from rlhf_engine.training.rl import RlTrainer
from rlhf_engine.training.sft import SftTrainer
from tests.training.test_data import sft_config, train_config
from tests.training.test_reward import reward_config


def hold(folder: Path, held: Connection) -> None:
    with locked(folder):
        held.send(True)
        time.sleep(600)


@pytest.fixture
def other(tmp_path):
    """A process that runs in tmp_path / "run"."""
    context = multiprocessing.get_context("fork")  # it imports nothing and computes nothing
    held, sent = context.Pipe(duplex=False)
    process = context.Process(target=hold, args=(tmp_path / "run", sent))
    process.start()
    assert held.poll(60)
    yield process
    process.kill()
    process.join()


TRAINERS = [(RlTrainer, train_config), (SftTrainer, sft_config), (RewardTrainer, reward_config)]


def test_two_processes_do_not_run_in_one_folder(model, tmp_path, other, survived):
    said = rf"output_dir: expected a folder that no other process writes, got .*run, where process {other.pid} runs"
    for trainer, config in TRAINERS:
        for options in ({}, {"resume_from_checkpoint": "restart"}, {"resume_from_checkpoint": "auto"}):
            with pytest.raises(ConfigError, match=said):
                trainer(config(model, tmp_path / "run", **options))
            survived("faults", 1)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [".lock"]
    other.kill()
    other.join()
    require_unlocked(tmp_path / "run")  # a killed process leaves it free
    with locked(tmp_path / "run"):
        pass


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    said = r"output_dir: expected a folder that can be written, got .*: Not a directory"
    with pytest.raises(ConfigError, match=said), locked(tmp_path / "file" / "run"):
        pass


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.warns(UserWarning, match="is on a file system without locks"), locked(tmp_path / "run"):
        pass


def test_a_checkpoint_asked_for_by_its_path_is_found_where_a_stop_left_it(model, tmp_path):
    trainer = RlTrainer(train_config(model, tmp_path / "run"))
    trainer.step()
    checkpoint = trainer.save()
    os.rename(checkpoint, checkpoint.with_name(f".{checkpoint.name}.replaced"))
    resumed = RlTrainer(train_config(model, tmp_path / "other", resume_from_checkpoint=str(checkpoint)))
    assert resumed.state == trainer.state
    assert list_checkpoints(tmp_path / "run") == [checkpoint]


def test_a_beta_that_adapts_is_the_checkpoints(model, tmp_path):
    options = {"kl_target": 0.01, "beta": 0.5}
    trainer = RlTrainer(train_config(model, tmp_path / "run", **options))
    trainer.step()
    checkpoint = trainer.save()
    adapted = json.loads((checkpoint / "trainer_state.json").read_text())["beta"]
    resume = {"resume_from_checkpoint": str(checkpoint)}
    with pytest.warns(UserWarning, match=rf"beta: the run began with 0.5 .* goes on with {adapted}, not with 0.3"):
        other = RlTrainer(train_config(model, tmp_path / "other", **{**options, "beta": 0.3}, **resume))
    assert other.state.beta == adapted
    assert RlTrainer(train_config(model, tmp_path / "same", **options, **resume)).state == trainer.state


def test_links_in_a_run_folder_are_replaced_and_nothing_is_written_through_them(model, tmp_path):
    """However they came there: of files that are written at once, files that grow, and folders."""
    run, outside = tmp_path / "run", tmp_path / "outside"
    files = [".lock", "run.json", "metrics.jsonl", "samples.jsonl", "samples.md", "page.html", "drawn.png"]
    files += [f".{name}.{os.getpid()}.tmp" for name in ("run.json", "metrics.jsonl", "drawn.png")]
    folders = ["checkpoint-1", ".checkpoint-1.tmp", ".checkpoint-1.replaced", ".checkpoint-1.removed"]
    folders += ["final", ".final.tmp", ".final.replaced", ".final.removed"]
    for how in ("there", "nowhere"):
        run.mkdir()
        for name in files + folders:
            (run / name).symlink_to(outside / how / name)
        for name in [*files, *(f"{folder}/kept" for folder in folders)] if how == "there" else []:
            (outside / how / name).parent.mkdir(parents=True, exist_ok=True)
            (outside / how / name).write_text("kept")
        options = {"max_steps": 1, "save_steps": 1, "resume_from_checkpoint": "restart"}
        RlTrainer(train_config(model, run, **options)).run()
        plot_curves(run / "metrics.jsonl", run / "drawn.png")  # the run's own are a copy, in tests
        assert not [path.name for path in run.rglob("*") if path.is_symlink()]
        assert (run / "final" / "manifest.json").is_file()
        assert list_checkpoints(run) == [run / "checkpoint-1"]
        assert {path.read_text() for path in outside.rglob("*") if path.is_file()} == {"kept"}
        shutil.rmtree(run)


def test_a_reward_function_that_changes_the_working_folder_moves_nothing(model, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    code = "import os\ndef score(completions, **_):\n    os.chdir('elsewhere')\n    return [0.0] * len(completions)\n"
    (tmp_path / "reward.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    rewards = {"reward_funcs": ["reward.py:score"], "reward_model_path": None}
    trainer = RlTrainer(train_config(model, Path("run"), max_steps=2, save_steps=1, **rewards))
    assert trainer.output == tmp_path / "run"  # a thread may write while the function runs
    trainer.run()
    assert Path.cwd() == tmp_path
    assert not list((tmp_path / "elsewhere").iterdir())
    written = {"final", "checkpoint-2", "run.json", "metrics.jsonl", "samples.md", "page.html"}
    assert written <= {path.name for path in (tmp_path / "run").iterdir()}
