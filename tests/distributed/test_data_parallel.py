"""Two processes train as one does: gradients, metrics, checkpoints; and what ends a run ends it on both of them."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from rlhf_engine.commands.main import main
from rlhf_engine.config import TrainConfig, parse_config
from rlhf_engine.config.launch import asked_to_shard
from rlhf_engine.devices import ALONE, World, balanced, share
from rlhf_engine.errors import ConfigError
from rlhf_engine.generators.ray import generators_on_ray
from rlhf_engine.rollout import exactness
from rlhf_engine.runs.metrics import read_metrics
from rlhf_engine.training.data_parallel import require_served
from rlhf_engine.training.rl import RlTrainer
from rlhf_engine.training.update import update
from tests.distributed.ranks import recorded_steps
from tests.hydra.architectures import CONFIGS as ARCHITECTURES
from tests.rollout.stand_in import StandIn
from tests.training.test_data import train_config, write_reward
from tests.training.test_rl import without_timings

ROOT = Path(__file__).resolve().parents[2]
RTOL, ATOL = 1e-4, 1e-5

# some prompts have no reward; where each rank has one prompt, one of them has then nothing to learn from
PATCHY = """
scores = [float(sum(7 + 2 * i == t % 50 for i, t in enumerate(row))) + len(row) for row in completion_ids]
return [None if len(p) < 9 else s for p, s in zip(prompts, scores)]
"""
TIES = "return [float(len(row) > 4) for row in completion_ids]"
BLOCKS = {"async_mode": "blocks", "max_staleness": 1}
CASES: dict[str, dict[str, Any]] = {
    "ppo": {"num_ppo_epochs": 2, "missing_eos_penalty": 1.0},
    "ppo-shared-slot": {"method": "j_hydra_ppo", "lora_dropout": 0.2, "kl_estimator": "k3"},
    "ppo-few": {"generation_batch_size": 2},  # a minibatch is one answer: one rank has none
    "ppo-patchy": {"reward_funcs": ["patchy", "reward_model"]},
    "ppo-four-backbones": {"method": "lora_ppo", "num_mini_batches": 1, "kl_estimator": "exact"},
    "reinforce": {"algorithm": "reinforce"},
    "remax": {"algorithm": "remax", "reward_funcs": ["patchy"]},
    "rloo": {"algorithm": "rloo", "num_generations": 2, "entropy_coef": 0.01},
    "rloo-vanilla": {"algorithm": "rloo", "loss_type": "vanilla"},
    "grpo": {"algorithm": "grpo", "reward_funcs": ["patchy"], "num_generations": 2},
    "grpo-few": {
        **{"algorithm": "grpo", "reward_funcs": ["patchy"]},
        **{"num_generations": 3, "generation_batch_size": 6, "num_mini_batches": 1},
    },
    "grpo-tokens": {"algorithm": "grpo", "loss_type": "dapo"},
    "grpo-top_p": {"algorithm": "grpo", "top_p": 0.8, "min_p": 0.01},
    "online_dpo": {"algorithm": "online_dpo", "reward_funcs": ["ties"], "num_mini_batches": 1, "num_generations": 2},
    "best_of_n": {"algorithm": "best_of_n", "num_mini_batches": 1},
    "past": {**BLOCKS, "algorithm": "grpo", "off_policy_correction": "token_truncate"},
}
CASES |= {
    "ppo-uneven": {"per_device_train_batch_size": 1, "generation_batch_size": 10, "gradient_checkpointing": True},
    "ppo-by-memory": {"per_device_train_batch_size": None, "num_mini_batches": 1, "num_ppo_epochs": 2},
    "ppo-some-lanes-together": {"per_device_train_batch_size": 1, "generation_batch_size": 10},
}
SHORTLY = ("ppo", "ppo-few", "ppo-by-memory", "grpo-few", "online_dpo", "past")
"""Cases of every push: several epochs, ranks without rows or rewards, groups, pairs and past policies."""
SHARDED_SHORTLY = ("ppo", "ppo-by-memory", "past")
"""Cases that are compared with a base in shares per push."""
FAILS = """
import os
assert len(calls) < 3 or os.environ.get('RANK') != '1', 'no luck'
return [1.0] * len(prompts)
"""
STEPS = 2
WAIT = 240.0
"""Seconds that a process waits for the other."""


def made(folder: Path, name: str, model: Path, **changes: Any) -> dict[str, Any]:
    """Options of a run."""
    # an epsilon far above rounding, of which AdamW would else make whole steps where a gradient is 0
    options = {"generation_batch_size": 12, "max_steps": 3, "adam_epsilon": 1e-3, **changes}
    rewards = {name: write_reward(folder, body, name) for name, body in {"patchy": PATCHY, "ties": TIES}.items()}
    if "reward_funcs" in options:
        options["reward_funcs"] = [rewards.get(source, source) for source in options["reward_funcs"]]
    return train_config(model, folder / name / "run", **options).to_dict()


def start(folder: Path, jobs: list[dict[str, Any]], timeout: float = WAIT, *, processes: int = 2) -> subprocess.Popen:
    """What starts processes and ends with them. timeout: seconds that a process waits for the others."""
    (folder / "store").unlink(missing_ok=True)  # of processes that this folder's were before
    (folder / "plan.json").write_text(json.dumps({"processes": processes, "timeout": timeout, "jobs": jobs}))
    return subprocess.Popen(
        [sys.executable, "-m", "tests.distributed.ranks", str(folder)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # all of them can be ended together
    )


def end(launcher: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(launcher.pid, signal.SIGKILL)
    launcher.communicate()


def finish(launcher: subprocess.Popen, folder: Path, timeout: float = 300, *, processes: int = 2) -> list[int]:
    """Exit statuses of the processes."""
    try:
        errors = launcher.communicate(timeout=timeout)[1]
    finally:
        end(launcher)
    print(errors[-6000:])  # shown where a test fails
    assert launcher.returncode == 0
    return [int((folder / f"ended-{rank}").read_text()) for rank in range(processes)]


def assert_same_numbers(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, value in without_timings(expected).items():
        if key.startswith(("micro_batch", "scoring_tokens")):
            continue
        if key == "rewards/accuracies" and abs(expected["rewards/margins"]) < 1e-6:
            continue  # before the first update a pair's margin is rounding, above 0 or below
        if key == "entropy_rollout" and exactness.by_default("cpu"):
            continue  # of the answers that are checked, of which every rank has its own
        # what measures rounding is as small, but another number; the variance explained of one answer cancels
        tolerance = 1e-4 if key.startswith(("mismatch", "value/explained")) else ATOL
        assert found[key] == pytest.approx(value, rel=RTOL, abs=tolerance), key


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Relative to the largest number of a tensor: its small ones are sums of large ones."""
    torch.testing.assert_close(found, expected, rtol=RTOL, atol=ATOL * max(1.0, float(expected.abs().max())))


def left(folder: Path, name: str, rank: int) -> Any:
    return json.loads((folder / f"{name}-{rank}.json").read_text())


def assert_ended(folder: Path, name: str, kinds: Sequence[str], messages: Sequence[str]) -> None:
    """What each process has raised in a job, from rank 0 on; those that were killed are left out."""
    for rank, (kind, message) in enumerate(zip(kinds, messages, strict=True)):
        found_kind, text, seconds = left(folder, name, rank)
        assert found_kind == kind
        assert message in text
        assert seconds < WAIT / 2  # at once rather than after the longest wait


def short(names: Iterable[str], shortly: Container[str]) -> list[Any]:
    """Parameters, of which those that are not in shortly run in the long lane."""
    return [name if name in shortly else pytest.param(name, marks=pytest.mark.long) for name in names]


def chosen(request: pytest.FixtureRequest, test: str) -> set[str]:
    """Ids of the parameters with which this session runs a test of the file that asks."""
    own = [item for item in request.session.items if item.path == request.path]
    return {item.callspec.id for item in own if item.originalname == test}


@pytest.fixture(scope="module")
def both(request, model, tmp_path_factory) -> Path:
    """The folder of what two processes have left of all jobs, in the last of which one has too little memory."""
    folder = tmp_path_factory.mktemp("both")
    sharded = chosen(request, "test_a_sharded_base_changes_no_bit")
    plain = chosen(request, "test_two_processes_take_the_steps_of_one") | sharded
    jobs: list[dict[str, Any]] = []
    for kind, names, shares in (("", plain, False), ("sharded-", sharded, True)):
        for name in (name for name in CASES if name in names):
            config = made(folder, kind + name, model, **CASES[name], shard_base=shares)
            jobs.append({"name": kind + name, "do": "steps", "steps": STEPS, "config": config})
    held_out = {"eval_dataset_name": made(folder, "held-out", model)["dataset_name"], "eval_steps": 2}
    resumed_too = chosen(request, "test_a_run_of_two_processes_goes_on_with_the_same_floats")
    run = {"save_steps": 2, "lora_dropout": 0.2, **held_out}
    replay = {"algorithm": "grpo", "async_mode": "replay", "save_steps": 2}  # checkpoints hold past policies
    overlap = {**replay, "async_mode": "overlap"}
    for suffix, options in {
        "": run, "-replay": replay, "-overlap": overlap, "-sharded": {**run, "shard_base": True},
    }.items():  # fmt: skip
        whole, resumed = (made(folder, name + suffix, model, **options) for name in ("whole", "resumed"))
        is_resumed = (suffix or "whole") in resumed_too
        if is_resumed or suffix != "-sharded":  # others are compared with whole runs
            jobs.append({"name": f"whole{suffix}", "do": "run", "config": whole})
        if is_resumed:
            jobs.append({"name": f"resumed{suffix}", "do": "run", "stop": 3, "config": resumed})
    held = {"method": "dynamic_lora_ppo", "shard_base": True}
    jobs.append({"name": "hold", "do": "hold", "config": made(folder, "hold", model, **held)})
    names = sorted(chosen(request, "test_a_sharded_architecture_says_the_same"))
    jobs.append({"name": "architectures", "do": "architectures", "of": names})
    jobs.append({"name": "in step", "do": "in step"})
    other = made(folder, "other", model)
    changed = folder / "changed.jsonl"
    changed.write_text(Path(other["dataset_name"]).read_text().replace("cat", "dog", 1))
    jobs += [
        {"name": "other-options", "do": "fail", "config": other, "rank_1": {"learning_rate": 0.5}},
        {"name": "other-data", "do": "fail", "config": other, "rank_1": {"dataset_name": str(changed)}},
    ]
    raises = made(folder, "raises", model, reward_funcs=[write_reward(folder, FAILS, "raises")])
    jobs.append({"name": "raises", "do": "fail", "config": raises})
    # ranks that have lost one another do nothing more together
    memory = made(folder, "no-memory", model, shard_base=True)
    jobs.append({"name": "no-memory", "do": "fail", "out_of_memory": 1, "config": memory})
    assert finish(start(folder, jobs), folder) == [0, 0]
    return folder


@pytest.mark.parametrize("name", short(CASES, SHORTLY))
def test_two_processes_take_the_steps_of_one(name, both, model, tmp_path):
    config = TrainConfig(**made(tmp_path, name, model, **CASES[name]))
    expected, rows = recorded_steps(config, ALONE, STEPS)
    assert all(row["optimizer_steps"] > 0 for row in rows)
    if name == "grpo-few":
        assert rows[0]["completions/skipped"] == 3  # all answers of one rank
    if name == "online_dpo":
        assert rows[0]["pairs/tied_ratio"] == pytest.approx(5 / 6)  # one pair for two ranks
    found = [load_file(both / f"{name}-{rank}.safetensors") for rank in range(2)]
    for tensors in found:
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[key], found[0][key]) for key in expected)
    for key, tensor in expected.items():
        assert_close(found[0][key], tensor)
    for rank in range(2):
        for row, expected_row in zip(left(both, name, rank), rows, strict=True):
            assert_same_numbers(row, expected_row)
    if name == "ppo-by-memory":  # all choose by the rank with the least memory
        chosen = [[(row["micro_batch_tokens"], row["scoring_tokens"]) for row in left(both, name, i)] for i in range(2)]
        assert chosen[0] == chosen[1]
        assert all(tokens < row["micro_batch_tokens"] for (tokens, _), row in zip(chosen[0], rows, strict=True))


@pytest.mark.parametrize("name", short(CASES, SHARDED_SHORTLY))
def test_a_sharded_base_changes_no_bit(name, both):
    for rank in range(2):
        expected, found = (load_file(both / f"{kind}{name}-{rank}.safetensors") for kind in ("", "sharded-"))
        assert found.keys() == expected.keys()
        if name == "ppo-some-lanes-together":  # where the base is sharded none are, because one rank's would not fit
            for key, tensor in expected.items():
                assert_close(found[key], tensor)
            continue
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        assert left(both, f"sharded-{name}", rank) == left(both, name, rank)


def test_processes_in_step_draw_shares_of_any_size_and_hold_few_blocks(both):
    for rank in range(2):
        found = left(both, "in step", rank)
        assert found["same"]
        assert found["tokens"] > (50 if rank == 0 else 4)
        assert found["samples"][0] == found["samples"][1]
        assert len(found["samples"][0]) == (0 if rank else 10)
        assert found["gathered"] == [[2, 1], [2, 1]]
        held = found["held"]
        rest = held["base"] - held["blocks"] * held["block"]
        assert held["whole"] > held["before"] + held["base"]
        # the block that runs, what it came in, and the next one; keys, values and activations take about another
        assert held["in step"] < held["before"] + rest + 4.5 * held["block"]


@pytest.mark.parametrize(
    "suffix",
    [
        pytest.param("", id="whole"),
        *(pytest.param(suffix, id=suffix, marks=pytest.mark.long) for suffix in ("-replay", "-sharded")),
        pytest.param("-overlap", id="-overlap"),
    ],
)
def test_a_run_of_two_processes_goes_on_with_the_same_floats(suffix, both):
    whole, resumed = (load_file(both / f"{name}{suffix}-0.safetensors") for name in ("whole", "resumed"))
    other = load_file(both / f"whole{suffix}-1.safetensors")
    assert whole.keys() == resumed.keys() == other.keys()
    assert all(torch.equal(whole[key], resumed[key]) and torch.equal(whole[key], other[key]) for key in whole)
    rows = [
        [without_timings(row) for row in read_metrics(both / f"{name}{suffix}" / "run" / "metrics.jsonl")]
        for name in ("whole", "resumed")
    ]
    # how busy generators were is a matter of time
    rows = [[{k: v for k, v in row.items() if not k.startswith("async/")} for row in found] for found in rows]
    assert rows[0] == rows[1]
    before = [] if suffix in ("-replay", "-overlap") else [0]
    assert [row["step"] for row in rows[0]] == [*before, 1, 2, 3]
    assert not before or {"eval/reward", "eval/kl"} <= rows[0][2].keys()


def test_generators_beside_both_processes_draw_what_each_draws_by_itself(both):
    for rank in range(2):
        overlap, replay = (load_file(both / f"whole-{mode}-{rank}.safetensors") for mode in ("overlap", "replay"))
        assert all(torch.equal(overlap[key], replay[key]) for key in replay)


def test_what_a_run_of_two_processes_leaves_is_what_one_leaves(both, model, tmp_path):
    output = both / "whole" / "run"
    config = TrainConfig(**json.loads((output / "run.json").read_text())["config"])
    alone = RlTrainer(dataclasses.replace(config, output_dir=str(tmp_path / "alone")))
    alone.run()
    names = lambda folder: sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())  # noqa: E731
    assert names(output) == names(alone.output)
    for row, expected in zip(*(read_metrics(f / "metrics.jsonl") for f in (output, alone.output)), strict=True):
        assert_same_numbers(row, expected)


def test_what_ends_one_process_ends_the_other(both):
    rate = "learning_rate: expected the same on every rank, got 0.01 on rank 0"
    assert_ended(both, "other-options", ["ConfigError"] * 2, [rate] * 2)
    data = "dataset_name: expected the same rows on every rank, got "
    assert_ended(both, "other-data", ["ConfigError"] * 2, [data] * 2)
    raised = "rewards: another rank could not go on, rank 1: RewardError: reward function 'raises' raised"
    assert_ended(both, "raises", ["RankError", "RewardError"], [raised, "no luck"])
    assert [row["step"] for row in read_metrics(both / "raises" / "run" / "metrics.jsonl")] == [1]
    lost = ["rank 0 of 2 has lost another one", "lower per_device_train_batch_size"]
    assert_ended(both, "no-memory", ["RankError", "MemoryLimitError"], lost)


def test_each_process_holds_its_share_of_a_sharded_base(both, model):
    base = LlamaForCausalLM.from_pretrained(model)
    base_model = sum(p.numel() * 4 for p in base.model.parameters())
    head = base.lm_head.weight.numel() * 4
    for rank in range(2):
        found = left(both, "hold", rank)
        # of reward model and critic's backbone, too, but without LM head
        assert found["whole"] == pytest.approx([base_model + head, base_model], rel=0.01)  # uneven shares are padded
        assert found["share"] == pytest.approx([n / 2 for n in found["whole"]], rel=0.01)
        assert found["kl"] > 0  # after a step


@pytest.mark.parametrize("name", short(ARCHITECTURES, ("mixtral",)))
def test_a_sharded_architecture_says_the_same(name, both):
    for rank in range(2):
        assert left(both, "architectures", rank)[name] == [True, True]  # without and with gradient checkpointing


@pytest.mark.long
def test_a_process_without_memory_beside_a_server_ends_the_other(model, tmp_path):
    with StandIn(model, name=model.name) as server:
        there = {"vllm_server_base_url": server.url}
        config = made(tmp_path, "run", model, shard_base=True, **there)
        job = {"name": "memory", "do": "fail", "out_of_memory": 1, "learning": False, "config": config}
        assert finish(start(tmp_path, [job]), tmp_path) == [0, 0]
    kinds, messages, seconds = zip(*(left(tmp_path, "memory", rank) for rank in range(2)), strict=True)
    assert kinds[1] == "MemoryLimitError"  # a server's adapter may be taken from rank 0 first, while it draws
    assert "lower kv_cache_memory" in messages[1]
    assert max(seconds) < WAIT / 2


class TwoRanks(World):
    """Says that there are two, and that the other one has the same of everything."""

    def gather(self, value: Any) -> list[Any]:
        return [value, value]


def test_what_several_processes_are_not_served(model, tmp_path):
    few = "generation_batch_size: expected at least 8 in a run of 2 processes, a prompt of 4 answers for each, got 4"
    for options, message in (
        ({"method": "full_ppo", "optim": "adafactor"}, "optim: expected 'adamw' where 2 processes train a whole base"),
        ({"device": "cuda:1"}, "device: expected auto, cpu or cuda in a run of 2 processes"),
        ({"generation_batch_size": 4, "algorithm": "grpo", "num_mini_batches": 1}, few),
    ):
        config = train_config(model, tmp_path / "run", **options)
        require_served(config, ALONE)
        with pytest.raises(ConfigError, match=message):
            require_served(config, TwoRanks(size=2))


def test_a_base_is_sharded_among_several_processes_and_whole_numbers(model, tmp_path):
    with pytest.raises(ConfigError, match="shard_base: expected several processes to share the base, got one"):
        require_served(train_config(model, tmp_path / "run", shard_base=True), ALONE)
    with pytest.raises(ConfigError, match="quantization: expected it unset with shard_base"):
        train_config(model, tmp_path / "run", shard_base=True, quantization="4bit")
    with pytest.raises(ConfigError, match="async: expected 'off', 'replay' or 'ray' with shard_base"):
        train_config(model, tmp_path / "run", shard_base=True, algorithm="grpo", async_mode="overlap")
    given = ["--model_name_or_path", str(model), "--dataset_name", "d", "--output_dir", "o", "--shard_base"]
    for more, value in (([], True), (["false"], False)):
        assert parse_config(TrainConfig, [*given, *more]).shard_base == value
    gone = "shard_base: expected true or false, got 'always'; a vLLM server draws for a base"
    with pytest.raises(ConfigError, match=gone):
        parse_config(TrainConfig, [*given, "always"])
    with pytest.raises(ConfigError, match=gone):
        train_config(model, tmp_path, shard_base="always")


def test_processes_have_the_same_versions_and_a_server_each(model, tmp_path, monkeypatch):
    older = World(size=2)
    monkeypatch.setattr(World, "gather", lambda self, value: [value, {**value, "torch": "1.0"}])
    found = torch.__version__.partition("+")[0]
    with pytest.raises(ConfigError, match=f"torch: expected the same on every rank, got '{found}' on rank 0 and '1.0'"):
        require_served(train_config(model, tmp_path / "run"), older)
    config = train_config(model, tmp_path / "run", vllm_server_base_url="http://a:1, http://b:1")
    require_served(config, TwoRanks(size=2))
    with pytest.raises(ConfigError, match="vllm_server_base_url: expected at most 1 addresses, one for each process"):
        require_served(config, ALONE)
    with pytest.raises(ConfigError, match="vllm_server_base_url: expected addresses separated by single commas"):
        dataclasses.replace(config, vllm_server_base_url="http://a:1,")


def test_generators_of_several_processes_are_on_a_running_cluster(model, tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed")
    config = train_config(model, tmp_path / "run", async_mode="ray")
    with (
        pytest.raises(ConfigError, match=r"RAY_ADDRESS: expected that of a running cluster \(ray start --head\)"),
        generators_on_ray(config, TwoRanks(size=2)),
    ):
        pass


def test_shares():
    assert [list(share(5, rank, 3)) for rank in range(3)] == [[0, 1], [2], [3, 4]]
    assert balanced([5, 1, 4, 2, 2], 2) == [[0, 4], [1, 2, 3]]
    assert balanced([3], 3) == [[0], [], []]


def test_options_of_the_launcher_that_are_not_served(monkeypatch):
    assert not asked_to_shard()
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert asked_to_shard()
    for name, value, message in [
        ("FSDP_VERSION", "1", "fsdp_version: expected 2"),
        ("FSDP_OFFLOAD_PARAMS", "true", "fsdp_offload_params: expected false"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "true", "gradient_checkpointing is an option of the run, got true"),
    ]:
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            with pytest.raises(ConfigError, match=message):
                asked_to_shard()


class OneOfTwo:
    """A process of a ranks, whose other one needs two calls more and lacks memory for joint lanes."""

    in_step = True

    def own(self, sizes: Sequence[int]) -> list[int]:
        return list(range(len(sizes)))[::2]

    def agree(self, calls: int, joint: bool) -> tuple[int, bool]:
        self.plan = (calls, joint)
        return calls + 2, False

    def together(self, what):
        return contextlib.nullcontext()

    def of_all(self, measured, size):
        return measured, size


@pytest.mark.parametrize("algorithm", ["ppo", "online_dpo"])
def test_a_process_in_step_makes_as_many_calls_as_the_others_and_the_gradient_of_its_own(algorithm, model, tmp_path):
    trainer = RlTrainer(train_config(model, tmp_path / "run", algorithm=algorithm, num_mini_batches=1))
    calls, gradients = [], []
    trainer.model.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    groups: list[OneOfTwo] = []

    def learn(model, algorithm, answers, schedule, step, *, seed, ranks):
        for in_step in (False, True):
            ranks = OneOfTwo()
            ranks.in_step = in_step
            calls.clear()
            small = dataclasses.replace(schedule, micro_batch_size=2)
            yield from update(model, algorithm, answers, small, taken, seed=seed, ranks=ranks)
            ranks.calls = sum(calls)
            groups.append(ranks)
        return (yield from update(model, algorithm, answers, schedule, step, seed=seed))

    def taken() -> dict[str, float]:
        gradients.append({p: p.grad.clone() for p in trainer.policy.trained() if p.grad is not None})
        trainer.model.zero_grad(set_to_none=True)
        return {}

    with mock.patch("rlhf_engine.training.rl.update", learn):
        trainer.step()
    alone, planned = groups
    terms = 2 if algorithm == "ppo" else 1
    # in a backbone forward for all terms, while that was possible
    assert planned.plan == (alone.calls, True)
    assert planned.calls == terms * (alone.calls + 2)
    assert gradients[0].keys() == gradients[1].keys()
    for p, gradient in gradients[0].items():
        assert_close(gradients[1][p], gradient)


def test_commands_for_one_process_say_so(monkeypatch, capsys):
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(["generate", "--full"]) == 2
    assert "rlhf-engine generate, rank 1: generate: expected one process, got 2" in capsys.readouterr().err


@pytest.mark.long
def test_a_process_does_not_wait_for_ever(model, tmp_path):
    late = "import os, time\nif len(calls) > 1 and os.environ.get('RANK') == '1':\n    time.sleep(600)\n"
    reward = write_reward(tmp_path, late + "return [1.0] * len(prompts)", "sleeps")
    jobs = [{"name": "sleeps", "do": "fail", "config": made(tmp_path, "sleeps", model, reward_funcs=[reward])}]
    launcher = start(tmp_path, jobs, timeout=15)
    try:
        until = time.monotonic() + 300
        while not (tmp_path / "ended-0").exists():
            assert time.monotonic() < until
            assert launcher.poll() is None, launcher.communicate()[1][-3000:]
            time.sleep(0.1)
        assert not (tmp_path / "ended-1").exists()  # it sleeps on
    finally:
        end(launcher)
    kind, message, _ = left(tmp_path, "sleeps", 0)
    assert kind == "RankError"
    assert "rank 0 of 2 has lost another one" in message
    assert "silent for too long" in message


@pytest.mark.long
@pytest.mark.parametrize("file", ["data_parallel.yaml", "fsdp2.yaml"])
def test_the_shipped_configurations_launch_a_run(file, model, tmp_path):
    config = TrainConfig(**made(tmp_path, "cli", model, max_steps=2))
    (tmp_path / "run.yaml").write_text(config.to_yaml())
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    launch += ["--config_file", str(ROOT / "examples" / "accelerate" / file)]
    command = [*launch, "-m", "rlhf_engine", "train", "--config", str(tmp_path / "run.yaml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("model ") == 1  # the main process alone says so
    output = Path(config.output_dir)
    record = json.loads((output / "run.json").read_text())
    assert record["processes"] == 2
    assert record["config"]["shard_base"] == (file == "fsdp2.yaml")
    assert [row["step"] for row in read_metrics(output / "metrics.jsonl")] == [1, 2]
    assert (output / "final" / "adapter_model.safetensors").is_file()
