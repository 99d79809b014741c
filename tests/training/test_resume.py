"""A run stopped at any step, for any reason, goes on to the same floats; and every entry of its state matters."""

import dataclasses
import errno
import io
import itertools
import json
import math
import os
import pickle
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf_engine.commands.main import main, run_and_exit
from rlhf_engine.errors import ConfigError, CorruptCheckpointError, EngineError, RewardError, notes
from rlhf_engine.hydra import load_pretrained
from rlhf_engine.io import check_manifest, write_manifest
from rlhf_engine.runs.checkpoint import list_checkpoints, load_checkpoint
from rlhf_engine.runs.folder import LOCK_FILE
from rlhf_engine.runs.metrics import read_metrics
from rlhf_engine.runs.progress import StopSignals, TrainingProgress
from rlhf_engine.training.rl import RlTrainer
from tests.training.test_data import train_config, write_prompts, write_reward
from tests.training.test_rl import metrics, same, trained

CROSSING = {
    "lr_scheduler_type": "cosine", "warmup_steps": 2, "kl_target": 0.05, "lora_dropout": 0.1,
}  # fmt: skip
"""A run that crosses ends of epochs (a step takes 8 of 6 prompts), changes of the learning rate and of beta."""


def all_steps(config) -> RlTrainer:
    """A run with a checkpoint after every step, without curves and the final model."""
    trainer = RlTrainer(config)
    for _ in range(config.max_steps - trainer.state.step):
        trainer.step()
        trainer.save()
    trainer.source.close()
    return trainer


def go_on(config) -> RlTrainer:
    trainer = RlTrainer(config)
    while trainer.state.step < config.max_steps:
        trainer.step()
    trainer.source.close()
    return trainer


# with past policies it goes on from one step per push, below
@pytest.mark.parametrize(
    ("mode", "steps"), [("off", 4), *(pytest.param(mode, 20, marks=pytest.mark.long) for mode in ("off", "replay"))]
)
def test_stopped_at_every_step(model, tmp_path, mode, steps):
    options = {**CROSSING, "async_mode": mode, "max_steps": steps, "save_total_limit": None}
    whole = all_steps(train_config(model, tmp_path / "whole", **options))
    betas = {json.loads((c / "trainer_state.json").read_text())["beta"] for c in list_checkpoints(whole.output)}
    assert len(betas) == steps  # it changed every time
    for step in range(1, steps):
        resume = whole.output / f"checkpoint-{step}"
        resumed = go_on(train_config(model, tmp_path / f"from-{step}", **options, resume_from_checkpoint=str(resume)))
        assert same(trained(whole), trained(resumed)), step
        assert resumed.state == whole.state, step


def lose_counter(name):
    def lose(folder: Path) -> None:
        path = folder / "trainer_state.json"
        state = json.loads(path.read_text())
        assert state.pop(name) not in (None, {}, 0)
        path.write_text(json.dumps(state))

    return lose


def lose_tensors(file, part):
    def lose(folder: Path) -> None:
        held = load_file(folder / file)
        lost = [name for name in held if part in name]
        assert lost
        save_file({name: x for name, x in held.items() if name not in lost}, folder / file, metadata={"format": "pt"})

    return lose


LOSSES = {
    **{name: lose_counter(name) for name in ("step", "samples", "policy_version", "beta", "policies_after")},
    **{f"optimizer_{part}": lose_tensors("optimizer.safetensors", part) for part in ("exp_avg", "exp_avg_sq", "step")},
    "optimizer_of_critic": lose_tensors("optimizer.safetensors", "critic"),
    "value_head": lose_tensors("heads.safetensors", "value"),
    "a_matrix_of_the_actor": lose_tensors("adapter_model.safetensors", "layers.0.self_attn.q_proj.lora_B"),
    "a_matrix_of_the_critic": lose_tensors(
        "slots/critic/adapter_model.safetensors", "layers.0.self_attn.q_proj.lora_B"
    ),
    "past_policies": lambda folder: (folder / "policies.safetensors").unlink(),
}


def test_every_entry_of_the_state_matters(model, tmp_path):
    """From a checkpoint in the middle that has every kind of entry; with nothing lost, a run goes on as it was."""
    options = {**CROSSING, "async_mode": "replay", "max_steps": 5, "save_total_limit": None}
    whole = all_steps(train_config(model, tmp_path / "whole", **options))
    threads = torch.get_num_threads()
    for lost, lose in ((None, None), *LOSSES.items()):
        folder = tmp_path / "lost" / "checkpoint-3"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole.output / "checkpoint-3", folder)
        if lose is not None:
            lose(folder)
            with pytest.raises(CorruptCheckpointError):  # whoever changes a file is found out: its list is changed, too
                check_manifest(folder)
            (folder / "manifest.json").unlink()
            write_manifest(folder)
        made = train_config(model, tmp_path / str(lost), **options, resume_from_checkpoint=str(folder))
        try:
            resumed = go_on(made)
        except (EngineError, ValueError, KeyError):
            assert lost is not None
            continue
        finally:
            torch.set_num_threads(threads)  # of a replay that was not closed
        is_same = same(trained(whole), trained(resumed)) and resumed.state == whole.state
        assert is_same == (lost is None), lost


def test_other_damage_is_refused_and_older_checkpoints_are_named(model, tmp_path):
    trainer = RlTrainer(train_config(model, tmp_path / "run"))
    older, folder = trainer.save(), tmp_path / "run" / "checkpoint-7"
    shutil.copytree(older, folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"resume_from_checkpoint: .*; beside it is checkpoint-0"):
        load_checkpoint(folder, trainer.model, trainer.optimizer)


def test_a_run_goes_on_with_what_it_began_with(model, tmp_path):
    trainer = RlTrainer(train_config(model, tmp_path / "run"))
    trainer.step()
    resume = {"resume_from_checkpoint": str(trainer.save())}
    (tmp_path / "fewer").mkdir()
    fewer = tmp_path / "fewer" / "prompts.jsonl"
    lines = Path(trainer.config.dataset_name).read_text().splitlines(keepends=True)
    fewer.write_text("".join(lines[1:]))
    exchanged = shutil.copytree(model, tmp_path / "exchanged") / "tokenizer.json"
    tokens = json.loads(exchanged.read_text())
    words = tokens["model"]["vocab"]
    one, other = [word for word in words if word not in " ".join(lines)][-2:]  # prompts have the same ids
    words[one], words[other] = words[other], words[one]
    exchanged.write_text(json.dumps(tokens))
    for options, message in (
        ({"model_name_or_path": str(exchanged.parent)}, "model_name_or_path: expected the tokenizer of the run of"),
        ({"dataset_name": str(fewer)}, "dataset_name: expected the prompts of the run of"),
        ({"generation_batch_size": 4, "num_mini_batches": 1}, "generation_batch_size: expected 8 as in"),
        ({"optim": "adamw_stochastic"}, "adapter_dtype: expected float32 as in"),
    ):
        with pytest.raises(ConfigError, match=message):
            RlTrainer(dataclasses.replace(train_config(model, tmp_path / "other", **resume), **options))
    trainer.step()
    later = trainer.save()
    with pytest.raises(ConfigError, match="max_steps: expected at least 2 steps, those of"):
        RlTrainer(train_config(model, tmp_path / "other", max_steps=1, resume_from_checkpoint=str(later)))


def test_epochs_in_place_of_steps(model, tmp_path):
    """A run that goes on may have more of them, but no fewer steps than it has made."""
    options = {"num_train_epochs": 2.1, "max_steps": 1, "lr_scheduler_type": "linear", "learning_rate": 0.3}
    trainer = RlTrainer(train_config(model, tmp_path / "run", **options))
    prompts = len(trainer.train_set.rows)
    assert trainer.total_steps == math.ceil(2.1 * prompts / 8) > 1
    rates = [trainer.step()["learning_rate"] for _ in range(trainer.total_steps)]
    assert rates == pytest.approx([0.3 * (1 - i / trainer.total_steps) for i in range(trainer.total_steps)])
    resume = {**options, "resume_from_checkpoint": str(trainer.save())}
    assert RlTrainer(train_config(model, tmp_path / "b", **{**resume, "num_train_epochs": 3})).total_steps == math.ceil(
        3 * prompts / 8
    )
    with pytest.raises(ConfigError, match=r"num_train_epochs: expected at least \d+ steps, those of"):
        RlTrainer(train_config(model, tmp_path / "b", **{**resume, "num_train_epochs": 0.1}))
    with pytest.raises(ConfigError, match=f"warmup_steps: expected at most the run's {trainer.total_steps} steps, got"):
        RlTrainer(train_config(model, tmp_path / "b", **{**options, "warmup_steps": 99}))


def test_a_learning_rate_that_jumps_where_a_run_goes_on_is_said(model, tmp_path):
    """By a line to 0, step 3 of 4 has half of the rate; of 8 steps it has three quarters."""
    options = {"max_steps": 4, "lr_scheduler_type": "linear", "learning_rate": 4e-4}
    trainer = RlTrainer(train_config(model, tmp_path / "run", **options))
    trainer.write_record()
    for _ in range(2):
        trainer.step()
    resume = {**options, "resume_from_checkpoint": str(trainer.save())}
    for changed, now in (
        ({"max_steps": 8}, "0.0003, by linear over 8 steps"),
        ({"lr_scheduler_type": "constant"}, "0.0004"),
    ):
        said = f"learning_rate: step 3 goes on at {now}.*had 0.0002 for it, by linear over 4 steps$"
        with pytest.warns(UserWarning, match=said):
            RlTrainer(train_config(model, tmp_path / "other", **{**resume, **changed}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RlTrainer(train_config(model, tmp_path / "other", **resume))
    (tmp_path / "run" / "run.json").write_text("{")  # what others have damaged says nothing of a rate
    RlTrainer(train_config(model, tmp_path / "other", **resume))


def test_prompts_are_held_out_by_share(model, tmp_path):
    options = {"eval_dataset_name": 0.4, "eval_steps": 1}
    trainer = RlTrainer(train_config(model, tmp_path / "run", **options))
    whole = RlTrainer(train_config(model, tmp_path / "all")).train_set
    parts = trainer.train_set.prompts, trainer.eval_set.prompts
    assert sorted(whole.prompts) == sorted(parts[0] + parts[1])
    assert not set(parts[0]) & set(parts[1])
    assert [len(ids) for ids in trainer.eval_set.ids] == [len(whole.ids[whole.prompts.index(p)]) for p in parts[1]]
    (tmp_path / "run").mkdir()
    trainer.step()
    assert "eval/reward" in trainer.look()
    resume = {**options, "resume_from_checkpoint": str(trainer.save()), "eval_dataset_name": 0.8}
    with pytest.raises(ConfigError, match="dataset_name: expected the prompts of the run of"):
        RlTrainer(train_config(model, tmp_path / "other", **resume))


def test_metrics_that_are_gone_are_said(model, tmp_path):
    config = train_config(model, tmp_path / "run", max_steps=2, save_steps=1)
    RlTrainer(config).run()
    (tmp_path / "run" / "metrics.jsonl").unlink()
    with pytest.warns(UserWarning, match=r"metrics\.jsonl: expected metrics of the steps up to 2, got none"):
        RlTrainer(dataclasses.replace(config, max_steps=3, resume_from_checkpoint="auto")).run()


def test_other_rewards_have_a_best_evaluation_of_their_own(model, tmp_path):
    held = {"eval_dataset_name": str(write_prompts(tmp_path)), "eval_steps": 1}
    trainer = RlTrainer(train_config(model, tmp_path / "run", **held))
    trainer.step()
    trainer._note_best(trainer.evaluation.evaluate()["eval/reward"])
    assert trainer.state.best_step == 1
    trainer._note_best(trainer.state.best_reward - 1.0)
    assert trainer.state.best_reward == trainer.evaluation.evaluate()["eval/reward"]
    resume = {"resume_from_checkpoint": str(trainer.save())}
    same_judge = RlTrainer(train_config(model, tmp_path / "same", **held, **resume))
    assert (same_judge.state.best_step, same_judge.state.best_reward) == (1, trainer.state.best_reward)
    with pytest.warns(UserWarning, match="its best evaluation, of step 1, is not compared with later ones"):
        other = RlTrainer(train_config(model, tmp_path / "b", **held, **resume, missing_eos_penalty=1.0))
    assert (other.state.best_step, other.state.best_reward) == (None, None)


def test_other_samples_are_compared_with_their_own_first_look(model, tmp_path, monkeypatch):
    config = train_config(model, tmp_path / "run", max_steps=2, save_steps=1)
    RlTrainer(config).run()
    monkeypatch.setattr("rlhf_engine.training.evaluation._SAMPLES", 1)
    RlTrainer(dataclasses.replace(config, max_steps=3, resume_from_checkpoint="auto")).run()
    assert (tmp_path / "run" / "samples.md").read_text(encoding="utf-8").count("**Before**") == 1


def test_a_final_model_without_checkpoints_is_not_a_run_to_begin_again(model, tmp_path):
    config = train_config(model, tmp_path / "run", max_steps=1)
    RlTrainer(config).run()
    shutil.rmtree(tmp_path / "run" / "checkpoint-1")
    with pytest.raises(ConfigError, match="expected checkpoints to go on from beside final/"):
        RlTrainer(dataclasses.replace(config, resume_from_checkpoint="auto"))
    assert (tmp_path / "run" / "final").is_dir()


def test_what_others_put_into_an_older_checkpoint_does_not_stop_a_run(model, tmp_path):
    trainer = RlTrainer(train_config(model, tmp_path / "run", save_total_limit=2))
    for _ in range(4):
        trainer.step()
        trainer.save()
        (trainer.output / f"checkpoint-{trainer.state.step}" / "note.txt").write_text("good")
    assert [c.name for c in list_checkpoints(trainer.output)] == ["checkpoint-3", "checkpoint-4"]
    (trainer.output / "checkpoint-4" / "trainer_state.json").write_text("{")
    trainer.step()
    trainer.save()  # which one checkpoint-4 refers to is not known: nothing is dropped
    assert len(list_checkpoints(trainer.output)) == 3


def test_what_a_stop_left_unfinished_is_removed(model, tmp_path):
    output = tmp_path / "run"
    (output / ".checkpoint-3.tmp").mkdir(parents=True)
    (output / ".metrics.jsonl.17.tmp").write_text("{")
    RlTrainer(train_config(model, output, max_steps=1)).run()
    assert [path.name for path in output.glob(".*")] == [LOCK_FILE]


class Gone(io.StringIO):
    """A pipe whose reader has ended."""

    def write(self, text):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_a_run_outlives_who_reads_its_progress(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Gone())
    with TrainingProgress(2) as progress:
        progress.update(1, {"reward": 1.0})
        progress.update(2, {"reward": 1.0})


def test_a_signal_is_heard_where_nobody_reads_the_answer(monkeypatch):
    def write(descriptor, text):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with StopSignals() as signals:
        monkeypatch.setattr("rlhf_engine.runs.progress.os.write", write)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.asked()


def test_every_signal_is_a_request_and_the_second_of_its_kind_the_end(monkeypatch, survived):
    ended: list[int] = []
    monkeypatch.setattr("rlhf_engine.runs.progress.os._exit", ended.append)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests under nohup ignore it
    try:
        for number, other in itertools.permutations((signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1), 2):
            with StopSignals() as signals:
                assert not signals.asked()
                for sent in (number, other):
                    os.kill(os.getpid(), sent)
                    assert (signals.received, signals.exit_code) == (number, 128 + number)
                assert ended == []
                os.kill(os.getpid(), other)
                assert ended == [128 + other]
                ended.clear()
                survived("faults", 1)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_loading_unpickles_nothing(model, tmp_path):
    """Reading is watched by the interpreter itself: every class that a pickle looks up is an event."""
    trainer = RlTrainer(train_config(model, tmp_path / "run"))
    trainer.step()
    folder = trainer.save()
    looked_up: list[tuple] = []
    is_watched = True
    # a hook stays for as long as the process does
    sys.addaudithook(
        lambda event, arguments: looked_up.append(arguments) if is_watched and event == "pickle.find_class" else None
    )
    try:
        pickle.loads(pickle.dumps(Exception))
        assert looked_up, "the hook sees what is unpickled"
        looked_up.clear()
        RlTrainer(train_config(model, tmp_path / "other", resume_from_checkpoint=str(folder)))
        load_pretrained(folder)
        assert not looked_up
    finally:
        is_watched = False


def start(config, path: Path) -> subprocess.Popen:
    path.write_text(config.to_yaml())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path])}
    command = [sys.executable, "-m", "rlhf_engine", "train", "--config", str(path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # tests under nohup ignore SIGHUP, and what they start would do so
    return subprocess.Popen(
        command, env=environment, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL), **pipes
    )


def wait_for(condition, process, seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > until:
            process.kill()
            raise AssertionError(process.communicate()[1][-3000:])
        time.sleep(0.005)


def steps_logged(output: Path) -> int:
    path = output / "metrics.jsonl"
    return len(read_metrics(path)) if path.is_file() else 0


def test_a_signal_ends_the_command_with_a_checkpoint(model, tmp_path, capsys):
    """In this process; the next test sends every signal to one of its own."""
    body = "import signal\nif len(calls) == 3:\n    signal.raise_signal(signal.SIGINT)\nreturn [1.0] * len(prompts)"
    options = {"max_steps": 60, "save_steps": 0, "reward_funcs": [write_reward(tmp_path, body)]}
    (tmp_path / "run.yaml").write_text(train_config(model, tmp_path / "run", **options).to_yaml())
    assert main(["train", "--config", str(tmp_path / "run.yaml")]) == 128 + signal.SIGINT
    assert "--resume_from_checkpoint auto goes on" in capsys.readouterr().err
    assert [folder.name for folder in list_checkpoints(tmp_path / "run")] == ["checkpoint-1"]
    assert steps_logged(tmp_path / "run") == 1


@pytest.mark.long
@pytest.mark.parametrize(
    "how", [signal.SIGINT, signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP], ids=["ctrl_c", "usr1", "term", "hup"]
)
def test_a_signal_writes_a_checkpoint_and_the_run_goes_on(model, tmp_path, package_table, how):
    options = {"max_steps": 60, "save_steps": 0, "resume_from_checkpoint": "auto"}
    config = train_config(model, tmp_path / "run", **options)
    with start(config, tmp_path / "run.yaml") as process:
        wait_for(lambda: steps_logged(tmp_path / "run") >= 2, process)
        process.send_signal(how)
        errors = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + how
    assert "stopping after this step, with a checkpoint; once more to stop at once" in errors
    assert "--resume_from_checkpoint auto goes on" in errors
    assert "Traceback" not in errors
    (checkpoint,) = list_checkpoints(tmp_path / "run")
    stopped = int(checkpoint.name.rpartition("-")[2])
    assert 2 <= stopped == steps_logged(tmp_path / "run") < 60
    steps = stopped + 2
    whole = go_on(train_config(model, tmp_path / "whole", **{**options, "max_steps": steps}))
    resumed = RlTrainer(train_config(model, tmp_path / "run", **{**options, "max_steps": steps}))
    assert resumed.state.step == stopped
    resumed.run()
    assert same(trained(whole), trained(resumed))
    assert [row["step"] for row in metrics(resumed)] == list(range(1, steps + 1))


@pytest.mark.parametrize(
    "mode", ["overlap", *(pytest.param(mode, marks=pytest.mark.long) for mode in ("off", "replay"))]
)
def test_a_reward_that_fails_costs_the_answers_of_one_step(model, tmp_path, mode):
    """The checkpoint of the last whole step is written, and the run that goes on from it makes the same floats."""
    body = "if len(calls) == 5:\n    raise OSError('no judge')\nreturn [float(len(c)) for c in completions]"
    reward = write_reward(tmp_path, body)
    options = {**CROSSING, "async_mode": mode, "max_steps": 5, "save_steps": 0, "reward_funcs": [reward]}
    trainer = RlTrainer(train_config(model, tmp_path / "run", **options))
    with pytest.raises(RewardError, match="raised OSError: no judge") as raised:
        trainer.run()
    assert notes(raised.value) == ["checkpoint of step 2 written, --resume_from_checkpoint auto goes on"]
    assert [folder.name for folder in list_checkpoints(trainer.output)] == ["checkpoint-2"]
    options["reward_funcs"] = [write_reward(tmp_path, body.replace("== 5", "== 0"), "mended")]
    resumed = RlTrainer(train_config(model, tmp_path / "run", **options, resume_from_checkpoint="auto"))
    resumed.run()
    whole = RlTrainer(train_config(model, tmp_path / "whole", **options))
    whole.run()
    assert same(trained(whole), trained(resumed))
    assert [row["step"] for row in metrics(resumed)] == [1, 2, 3, 4, 5]


def test_a_reward_that_hangs_costs_the_answers_of_one_step(model, tmp_path, monkeypatch, survived):
    monkeypatch.setattr("rlhf_engine.training.rl.REWARD_SECONDS", 0.5)
    reward = write_reward(tmp_path, "import time\nif len(calls) == 4:\n    time.sleep(2)\nreturn [1.0] * len(prompts)")
    options = {"max_steps": 3, "save_steps": 0, "reward_funcs": [reward]}
    with pytest.raises(RewardError, match=r"took longer than 0\.5 seconds") as raised:
        RlTrainer(train_config(model, tmp_path / "run", **options)).run()
    assert notes(raised.value) == ["checkpoint of step 1 written, --resume_from_checkpoint auto goes on"]
    survived("faults", 1)


def test_a_thread_that_is_left_does_not_keep_the_process(monkeypatch, capsys):
    """What each command does at its end, in a process that goes on."""
    ended: queue.Queue[int] = queue.Queue()
    for name, value in (("main", lambda: 3), ("_THREADS_END_WITHIN", 0.01), ("os._exit", ended.put)):
        monkeypatch.setattr(f"rlhf_engine.commands.main.{name}", value)
    for name in ("OMP_WAIT_POLICY", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "false")  # where they are set they stay
    released = threading.Event()
    judge = threading.Thread(target=released.wait, name="judge")
    judge.start()
    try:
        with pytest.raises(SystemExit, match="3"):
            run_and_exit()
        assert ended.get(timeout=60) == 3
    finally:
        released.set()
        judge.join()
    assert re.search(r"rlhf-engine: done, but .*judge.* still ran and was left behind", capsys.readouterr().err)


@pytest.mark.long
def test_killed_twenty_times_a_run_makes_the_same_floats(model, tmp_path, package_table, survived):
    options = {**CROSSING, "max_steps": 40, "save_steps": 1, "save_total_limit": 1, "resume_from_checkpoint": "auto"}
    whole = go_on(train_config(model, tmp_path / "whole", **{**options, "save_steps": 0}))
    config = train_config(model, tmp_path / "run", **options)
    chosen, killed, since = random.Random(0), 0, -1
    while killed < 20:
        with start(config, tmp_path / "run.yaml") as process:
            begun = lambda: steps_logged(tmp_path / "run") > since  # noqa: E731, B023
            if killed % 3:  # otherwise it may be killed before it has begun
                wait_for(begun, process)
            time.sleep(chosen.uniform(0, 0.4))
            assert process.poll() is None, process.communicate()[1][-2000:]
            process.kill()
            process.wait()
        killed += 1
        since = steps_logged(tmp_path / "run")
    assert 0 < steps_logged(tmp_path / "run") < 40
    resumed = RlTrainer(config)
    resumed.run()
    assert same(trained(whole), trained(resumed))
    assert [row["step"] for row in metrics(resumed)] == list(range(1, 41))
    survived("kills", killed)
