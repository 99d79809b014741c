"""Rehearsal of runs on several GPUs: four processes on a CPU, data parallel × sharded base × where answers are drawn.

Each run takes the steps of one process up to rounding, and goes on to the bit where it was stopped. With a
thread beside it, generators on Ray or a server, a run ends on all processes where one is killed, and goes on from its
checkpoint. The server is the protocol stand-in, which is not vLLM.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_engine.config import TrainConfig
from rlhf_engine.devices import ALONE
from rlhf_engine.generators.ray import _import_ray
from rlhf_engine.runs.metrics import read_metrics
from rlhf_engine.training.rl import RlTrainer
from tests.distributed.ranks import trainer_of
from tests.distributed.test_data_parallel import WAIT, assert_same_numbers, finish, left, made, start
from tests.rollout.stand_in import StandIn
from tests.training.test_data import write_reward
from tests.training.test_rl import without_timings

pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = pytest.mark.long

PROCESSES, STEPS = 4, 4
DRAWN: dict[str, dict[str, Any]] = {
    "off": {"method": "j_hydra_ppo", "lora_dropout": 0.1},
    "replay": {"async_mode": "replay"},
    "overlap": {"async_mode": "overlap", "max_staleness": 2},
    "ray": {"async_mode": "ray"},
    "vllm": {"vllm_server_base_url": "", "algorithm": "grpo", "num_generations": 2},
    "vllm-overlap": {"vllm_server_base_url": "", "async_mode": "overlap"},
}
"""Where answers are drawn."""
CASES = {
    **DRAWN,
    **{f"sharded-{name}": {**options, "shard_base": True} for name, options in DRAWN.items() if name != "overlap"},
}
KILLED = ("overlap", "sharded-ray", "vllm-overlap")
LATE = """
import os
if len(calls) > 3 and os.environ.get("RANK") == "2":
    os._exit(3)
return [float(sum(7 + i == t % 50 for i, t in enumerate(row))) + len(row) for row in completion_ids]
"""
"""A reward that ends a process in its third step; its first call is the dry run."""


@pytest.fixture(scope="module")
def addresses(model) -> Iterator[dict[str, Any]]:
    """Options that name two servers, and a cluster with room for the generators of all processes."""
    ray = _import_ray()
    # a cluster that this process is in would be joined by the runs of one process; the others need its address
    found = ray.init(
        address="local", num_cpus=2 * PROCESSES, include_dashboard=False, logging_level="ERROR", log_to_driver=False
    )
    with (
        pytest.MonkeyPatch.context() as patch,
        StandIn(model, name="tiny") as first,
        StandIn(model, name="tiny") as second,
    ):
        patch.setenv("RAY_ADDRESS", found.address_info["gcs_address"])
        yield {"vllm": f"{first.url},{second.url}", "ray": found.address_info["gcs_address"]}
        assert not first.adapters
        assert not second.adapters
    ray.shutdown()


def config_of(
    folder: Path, run: str, case: str, model: Path, addresses: dict[str, Any], **changes: Any
) -> dict[str, Any]:
    """Options of a run."""
    options = {"max_steps": STEPS, "save_steps": 1, **CASES[case], **changes}
    if "vllm_server_base_url" in options:
        options["vllm_server_base_url"] = addresses["vllm"]
    if options.get("async_mode") == "ray":
        assert os.environ["RAY_ADDRESS"] == addresses["ray"]
    return made(folder, run, model, **options)


@pytest.fixture(scope="module")
def four(model, addresses, tmp_path_factory) -> Path:
    """The folder of what four processes have left of whole runs and of runs that were stopped and went on."""
    folder = tmp_path_factory.mktemp("four")
    jobs = []
    for case in CASES:
        whole, resumed = (config_of(folder, f"{name}-{case}", case, model, addresses) for name in ("whole", "resumed"))
        jobs.append({"name": f"whole-{case}", "do": "run", "config": whole})
        jobs.append({"name": f"resumed-{case}", "do": "run", "stop": 3, "config": resumed})
    ended = finish(start(folder, jobs, processes=PROCESSES), folder, timeout=1500, processes=PROCESSES)
    assert ended == [0] * PROCESSES
    return folder


def rows_of(folder: Path, run: str) -> list[dict[str, Any]]:
    """Metrics of a run that are no matter of time."""
    rows = [without_timings(row) for row in read_metrics(folder / run / "run" / "metrics.jsonl")]
    return [{k: v for k, v in row.items() if not k.startswith(("async/", "vllm/"))} for row in rows]


@pytest.mark.parametrize("case", CASES)
def test_four_processes_take_the_steps_of_one(case, four, model, addresses, tmp_path):
    options = config_of(tmp_path, "alone", case, model, addresses, shard_base=False)
    if options.get("vllm_server_base_url"):
        options["vllm_server_base_url"] = options["vllm_server_base_url"].split(",")[0]
    with trainer_of(RlTrainer, TrainConfig(**options), ALONE) as trainer:
        trainer.run()
    expected, found = rows_of(tmp_path, "alone"), rows_of(four, f"whole-{case}")
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    for mine, theirs in zip(found, expected, strict=True):
        assert_same_numbers(mine, theirs)


@pytest.mark.parametrize("case", CASES)
def test_a_run_of_four_processes_goes_on_with_the_same_floats(case, four):
    whole, resumed = (load_file(four / f"{name}-{case}-0.safetensors") for name in ("whole", "resumed"))
    for rank in range(1, PROCESSES):
        other = load_file(four / f"whole-{case}-{rank}.safetensors")
        assert all(torch.equal(whole[key], other[key]) for key in whole)
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


@pytest.mark.parametrize("case", KILLED)
def test_a_run_goes_on_after_one_of_its_processes_was_killed(case, model, addresses, tmp_path):
    reward = write_reward(tmp_path, LATE, "late")
    changes = {"reward_funcs": [reward], "kl_estimator": "k3"}
    whole = config_of(tmp_path, "whole", case, model, addresses, **changes)
    killed = config_of(tmp_path, "killed", case, model, addresses, **changes)
    ended = finish(
        start(tmp_path, [{"name": "killed", "do": "fail", "config": killed}], processes=PROCESSES),
        tmp_path,
        processes=PROCESSES,
    )
    assert ended == [0, 0, 3, 0]
    for rank in (0, 1, 3):
        kind, message, seconds = left(tmp_path, "killed", rank)
        assert (kind, seconds < WAIT / 2) == ("RankError", True), message
    done = [row["step"] for row in rows_of(tmp_path, "killed")]
    assert done == list(range(1, len(done) + 1))
    assert 0 < len(done) < STEPS
    # the same function, which now ends nobody
    Path(reward.partition(":")[0]).write_text(Path(reward.partition(":")[0]).read_text().replace("> 3", "> 999"))
    jobs = [
        {"name": "whole", "do": "run", "config": whole},
        {"name": "again", "do": "run", "config": {**killed, "resume_from_checkpoint": "auto"}},
    ]
    assert finish(start(tmp_path, jobs, processes=PROCESSES), tmp_path, processes=PROCESSES) == [0] * PROCESSES
    expected, found = (load_file(tmp_path / f"{name}-0.safetensors") for name in ("whole", "again"))
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert rows_of(tmp_path, "killed") == rows_of(tmp_path, "whole")
