"""Two processes leave what one leaves: files, metrics, resuming; and what ends one ends the other.

Supervised runs, and those that train whole backbones, in shares. Steps of RL with adapters: `test_data_parallel`.
"""

import dataclasses
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_engine.errors import ConfigError
from rlhf_engine.runs.checkpoint import list_checkpoints
from rlhf_engine.runs.metrics import read_metrics
from rlhf_engine.training.run import Run
from rlhf_engine.training.sft import SftTrainer
from tests.distributed.ranks import KINDS, held_by
from tests.distributed.test_data_parallel import (
    ROOT,
    TwoRanks,
    assert_close,
    assert_ended,
    assert_same_numbers,
    chosen,
    end,
    finish,
    left,
    short,
    start,
)
from tests.training.test_data import sft_config, train_config
from tests.training.test_resume import steps_logged, wait_for
from tests.training.test_reward import reward_config, toy_pairs
from tests.training.test_rl import without_timings

LORA = {"mode": "lora", "lora_dropout": 0.2}
FULL = {"mode": "full", "learning_rate": 1e-3}
HELD_OUT = {"eval_dataset_name": 0.4, "eval_steps": 2}
RL = {"method": "full_ppo", "learning_rate": 1e-3, "critic_init": "reward", "generation_batch_size": 12}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sft-lora": ("sft", {**LORA, "gradient_accumulation_steps": 2}),
    "sft-lora-sharded": ("sft", {**LORA, "shard_base": True, "max_tokens_per_micro_batch": 40}),
    "sft-one-row": ("sft", {**LORA, "per_device_train_batch_size": 1}),  # one process has none
    "sft-full": ("sft", {**FULL, "max_grad_norm": 0.1}),
    "sft-full-one-row": ("sft", {**FULL, "per_device_train_batch_size": 1, "gradient_checkpointing": True}),
    "sft-full-bfloat16": ("sft", {**FULL, "dtype": "bfloat16", "gamma": 0.0}),
    "reward-pairs": ("reward", {**LORA, **HELD_OUT, "rows": "pairs"}),
    "reward-thumbs": ("reward", {**LORA, **HELD_OUT, "pos_weight": "balanced"}),
    "reward-pairs-full": ("reward", {**FULL, **HELD_OUT, "rows": "pairs", "gradient_checkpointing": True}),
    "reward-thumbs-full": ("reward", {**FULL, **HELD_OUT, "max_tokens_per_micro_batch": 24}),
    "rl-full": ("rl", {**RL, "num_ppo_epochs": 2, "max_grad_norm": 0.5}),
    "rl-full-uneven": (
        "rl",
        {
            **RL, "per_device_train_batch_size": 1, "generation_batch_size": 10, "gradient_checkpointing": True,
        },
    ),
}  # fmt: skip
ROUGH = 3e-2
"""Of bfloat16."""
RESUMED = ("rl-full", "sft-lora", "sft-full", "sft-full-bfloat16", "reward-pairs", "reward-thumbs-full")


SHORTLY = ("sft-lora", "sft-full-one-row", "reward-thumbs-full", "rl-full")
"""Cases of every push: each kind of trainer, by adapters and whole, and a rank without rows."""


def options(folder: Path, name: str, case: str, model: Path, **changes: Any) -> tuple[str, dict[str, Any]]:
    """A kind of trainer and the options of a run of three steps."""
    kind, own = CASES[case]
    # above rounding, of which AdamW would else make whole steps where a gradient is 0
    common = {"max_steps": 3, "save_steps": 2, "per_device_train_batch_size": 5, "adam_epsilon": 1e-3}
    given = {**common, **own, **changes}
    if kind == "rl":
        return kind, train_config(model, folder / name / "run", **given).to_dict()
    if kind == "sft":
        return kind, sft_config(model, folder / name / "run", **given).to_dict()
    rows = toy_pairs(48) if given.pop("rows", None) == "pairs" else None
    return kind, reward_config(model, folder / name / "run", rows, **given).to_dict()


def alone(folder: Path, name: str, case: str, model: Path, **changes: Any) -> Run:
    """The run of one process."""
    kind, found = options(folder, name, case, model, **{**changes, "shard_base": False})
    config, make = KINDS[kind]
    trainer = make(config(**found))
    trainer.run()
    return trainer


@pytest.fixture(scope="module")
def both(request, model, tmp_path_factory) -> Path:
    """The folder of what two processes have left of all jobs, the last of which one process does not survive."""
    folder = tmp_path_factory.mktemp("both")
    one = alone(folder, "one", "sft-full", model)
    (folder / "one-0.json").write_text(json.dumps(held_by(one)))
    jobs: list[dict[str, Any]] = []

    def add(name: str, case: str, do: str, changes: dict[str, Any] | None = None, **more: Any) -> None:
        kind, config = options(folder, name, case, model, **(changes or {}))
        jobs.append({"name": name, "kind": kind, "do": do, "config": config, **more})

    resumed = chosen(request, "test_a_run_of_two_processes_goes_on_with_the_same_floats")
    for case in sorted({*chosen(request, "test_two_processes_leave_what_one_leaves"), *resumed, "sft-full"}):
        add(case, case, "run")
    for case in sorted(resumed):
        add(f"resumed-{case}", case, "run", stop=3)
    add("from-one", "sft-full", "run", {"resume_from_checkpoint": str(folder / "one" / "run" / "checkpoint-2")})
    add("no-memory", "sft-lora", "fail", out_of_memory=1)
    add("dies", "reward-thumbs-full", "fail", dies=1)
    assert finish(start(folder, jobs), folder) == [0, 3]
    return folder


def tensors(output: Path) -> dict[str, torch.Tensor]:
    """Every tensor of checkpoints and result, by file and name."""
    files = sorted(output.rglob("*.safetensors"))
    return {f"{file.relative_to(output)} {name}": x for file in files for name, x in load_file(file).items()}


def names(output: Path) -> list[str]:
    return sorted(str(path.relative_to(output)) for path in output.rglob("*") if path.is_file())


@pytest.mark.parametrize("case", short(CASES, SHORTLY))
def test_two_processes_leave_what_one_leaves(case, both, model, tmp_path):
    output = both / case / "run"
    expected = alone(tmp_path, "alone", case, model).output
    assert names(output) == names(expected)
    found, one = tensors(output), tensors(expected)
    assert found.keys() == one.keys()
    for name, tensor in one.items():
        assert found[name].dtype == tensor.dtype
        if "bfloat16" in case:
            moved = float((found[name].float() - tensor.float()).norm())
            assert moved <= ROUGH * max(float(tensor.float().norm()), 1e-3), name
        else:
            assert_close(found[name], tensor)
    for row, expected_row in zip(*(read_metrics(f / "metrics.jsonl") for f in (output, expected)), strict=True):
        if "bfloat16" in case:
            assert without_timings(row) == pytest.approx(without_timings(expected_row), rel=ROUGH)
        else:
            assert_same_numbers(without_timings(row), without_timings(expected_row))
    record = json.loads((output / "run.json").read_text())
    assert record["processes"] == 2
    assert record["config"]["shard_base"] == ("full" in case or "sharded" in case)


@pytest.mark.parametrize("case", short(RESUMED, ("sft-full", "sft-lora")))
def test_a_run_of_two_processes_goes_on_with_the_same_floats(case, both):
    whole, resumed = both / case / "run", both / f"resumed-{case}" / "run"
    found, expected = tensors(resumed), tensors(whole)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    rows = [[without_timings(row) for row in read_metrics(f / "metrics.jsonl")] for f in (whole, resumed)]
    assert rows[0] == rows[1]
    assert [row["step"] for row in rows[0] if row["step"]] == [1, 2, 3]


def test_a_run_goes_on_with_another_number_of_processes(both, model, tmp_path):
    """From one to two, and from two to one: checkpoints hold whole tensors."""
    expected = tensors(both / "one" / "run")
    checkpoint = both / "sft-full" / "run" / "checkpoint-2"
    fewer = alone(tmp_path, "fewer", "sft-full", model, resume_from_checkpoint=str(checkpoint)).output
    for output in (both / "from-one" / "run", fewer):
        found = tensors(output)
        assert found
        for name, tensor in found.items():
            assert_close(tensor, expected[name])


def test_each_process_holds_its_share_of_weights_and_state(both):
    whole = left(both, "one", 0)
    for rank in range(2):
        share = left(both, "sft-full", rank)
        assert share.keys() == whole.keys()
        for part, size in whole.items():
            assert share[part] == pytest.approx(size / 2, rel=0.01)  # uneven shares are padded


def test_what_ends_one_process_ends_the_other(both):
    memory = "the step: another rank could not go on, rank 1: OutOfMemoryError: out of memory, says the test"
    assert_ended(both, "no-memory", ["RankError", "OutOfMemoryError"], [memory, ""])
    assert_ended(both, "dies", ["RankError"], ["rank 0 of 2 has lost another one"])


@pytest.mark.long
@pytest.mark.parametrize("case", ["sft-full", "rl-full"])
def test_a_signal_writes_a_checkpoint_of_shares_and_the_run_goes_on(case, model, tmp_path):
    def launched(name: str, steps: int) -> subprocess.Popen:
        changes = {"max_steps": steps, "save_steps": 0, "lr_scheduler_type": "constant"}
        kind, config = options(tmp_path, name, case, model, resume_from_checkpoint="auto", **changes)
        file = tmp_path / f"{name}.yaml"
        file.write_text(KINDS[kind][0](**config).to_yaml())
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        command = {"rl": "train"}.get(kind, kind)
        launcher += ["-m", "rlhf_engine", command, "--config", str(file)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(launcher, cwd=ROOT, start_new_session=True, **pipes)

    output = tmp_path / "stopped" / "run"
    process = launched("stopped", 300)
    try:
        wait_for(lambda: steps_logged(output) >= 2, process)
        process.send_signal(signal.SIGTERM)  # of which the launcher sends each rank one
        errors = process.communicate(timeout=120)[1]
    finally:
        end(process)
    assert process.returncode != 0
    assert "stopping after this step, with a checkpoint" in errors
    (checkpoint,) = list_checkpoints(output)
    stopped = int(checkpoint.name.rpartition("-")[2])
    assert 2 <= stopped == steps_logged(output) < 300
    for name in ("whole", "stopped"):
        process = launched(name, stopped + 2)
        try:
            errors = process.communicate(timeout=300)[1]
        finally:
            end(process)
        assert process.returncode == 0, errors[-3000:]
    whole, resumed = (tensors(tmp_path / name / "run") for name in ("whole", "stopped"))
    assert whole
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)
    assert steps_logged(output) == stopped + 2


def test_state_that_cannot_be_shared_out(model, tmp_path):
    config = dataclasses.replace(sft_config(model, tmp_path / "run"), optim="adafactor")
    with pytest.raises(ConfigError, match="optim: expected 'adamw' where 2 processes train a whole base in shares"):
        SftTrainer(config, TwoRanks(size=2, device=torch.device("cpu")))
