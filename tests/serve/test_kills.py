"""Processes that are killed while 16 clients train and save their policies, and policies that come and go."""

import hashlib
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rlhf_kernels.runtime.registry import Settings

from rlhf_engine.hydra import HydraModel, PackedBatch, RoleSpec, SlotConfig
from rlhf_engine.hydra.outputs import TargetLogprobs
from rlhf_engine.policy.joint import Pass
from rlhf_engine.policy.pool import BASE, LivePolicy, Policies
from rlhf_engine.policy.thread import PolicyThread
from rlhf_engine.rollout import Request, SamplingConfig
from tests.conftest import tiny_llama

CLIENTS = 16
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.serve.test_kills"])  # which takes the time of a start


def start(work: Callable[..., None], *arguments: object) -> multiprocessing.process.BaseProcess:
    process = PROCESSES.Process(target=work, args=arguments)
    process.start()
    return process


def make_pool(state: Path | None) -> Policies:
    torch.set_num_threads(1)
    with Settings(exact=True).used():
        return Policies(HydraModel.from_pretrained(tiny_llama(), roles={BASE: RoleSpec()}), state=state)


def digest(policy: LivePolicy) -> str:
    """Of weights and moments."""
    assert policy.optimizer is not None
    tensors = {**policy.model.backbone().slots.state_dict(), **policy.optimizer.state_tensors()}
    found = hashlib.sha256()
    for name, x in sorted(tensors.items()):
        found.update(name.encode() + x.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def learn(thread: PolicyThread, name: str, i: int) -> None:
    """One step of a policy: draw, weigh the tokens, update."""
    policies = thread.policies
    policy = policies.get(name)
    how = SamplingConfig(max_completion_length=4 + i % 3, eos_token_ids=(2,), seed=policy.state.step)
    answers = thread.submit(
        name, [Request(prompt=(1, 5 + i), sample_id=j, keep=True) for j in range(2)], how
    ).answers.result(60)
    batch = PackedBatch.from_lists([a.prompt for a in answers], [a.tokens for a in answers])
    weights = torch.randn(batch.n_completion_tokens, generator=torch.Generator().manual_seed(i))
    output = TargetLogprobs(rows_P=batch.predict_rows_M, targets=batch.targets_M, weights=weights)
    thread.compute(Pass(policy=policy, batch=batch, outputs=(output,), loss=lambda results: results[0].loss)).result(60)
    policies.step(name, learning_rate=0.01).result(60)


def train(state: Path, log: Path, steps: int) -> None:
    """Take every client's policy from where its checkpoint is to so many steps; a line in the log for each."""
    policies = make_pool(state)
    lines = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def client(i: int) -> None:
        if f"p{i}" not in policies:
            policies.add(f"p{i}", slots={"actor": SlotConfig(r=2 + i % 4)}, seed=i)
        while True:
            policy = policies.get(f"p{i}")
            os.write(lines, f"{i} {policy.state.step} {digest(policy)}\n".encode())
            if policy.state.step >= steps:
                return
            learn(thread, f"p{i}", i)
            policies.save(f"p{i}")

    with PolicyThread(policies) as thread:
        clients = [threading.Thread(target=client, args=(i,)) for i in range(CLIENTS)]
        for each in clients:
            each.start()
        for each in clients:
            each.join()


def entries(log: Path) -> list[tuple[int, int, str]]:
    """Client, step and digest of every whole line."""
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    return [(int(i), int(step), found) for i, step, found in map(str.split, lines)]


@pytest.mark.parametrize(("kills", "steps"), [(2, 2), pytest.param(20, 14, marks=pytest.mark.long)])
def test_after_kills_policies_are_those_of_an_undisturbed_run(tmp_path, survived, kills, steps):
    whole, killed = tmp_path / "whole.log", tmp_path / "killed.log"
    undisturbed = start(train, tmp_path / "whole", whole, steps)
    undisturbed.join(300)
    assert undisturbed.exitcode == 0
    expected = {(i, step): found for i, step, found in entries(whole)}
    assert set(expected) == {(i, step) for i in range(CLIENTS) for step in range(steps + 1)}
    assert len(set(expected.values())) == len(expected)
    rng = random.Random(kills)
    for n in range(kills):
        # restored policies have a line each at once
        had, more = len(entries(killed)), CLIENTS * (n > 0) + rng.randint(2, CLIENTS * steps // kills)
        process = start(train, tmp_path / "killed", killed, steps)
        while len(entries(killed)) < had + more and process.is_alive():
            time.sleep(0.001)
        time.sleep(rng.random() * 0.03)
        assert process.is_alive(), "it was to be killed at work"
        process.kill()
        process.join()
    last = start(train, tmp_path / "killed", killed, steps)
    last.join(300)
    assert last.exitcode == 0
    found = entries(killed)
    assert [entry for entry in found if expected[entry[:2]] != entry[2]] == []
    assert len(found) > len(expected), "or nothing had been begun anew"
    states = [Policies(make_pool(None).host, state=tmp_path / name) for name in ("whole", "killed")]
    for i in range(CLIENTS):
        one, other = (policies.get(f"p{i}") for policies in states)
        assert one.state == other.state
        assert digest(one) == digest(other) == expected[i, steps]
    survived("kills", kills)


def come_and_go(n: int, warm: int, result: Path) -> None:
    """Make, use and remove policies; write the resident memory after the first of them and at the end."""
    policies = make_pool(None)
    roles, sizes = set(policies.host.roles), list[int]()
    with PolicyThread(policies) as thread:
        for i in range(warm + n):
            if i == warm:
                sizes.append(resident())
            policies.add("p0", slots={"actor": SlotConfig(r=1 + i % 8)}, seed=i)
            learn(thread, "p0", i % CLIENTS)
            policies.remove("p0")
        sizes.append(resident())
        assert set(policies.host.roles) == roles
        assert policies.host.backbone().slots.keys() == set()
        thread.call(lambda: None).result(60)
        assert not thread._had.keys() - {BASE}
    result.write_text(" ".join(map(str, sizes)))


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("n", [100, pytest.param(1000, marks=pytest.mark.long)])
def test_policies_that_come_and_go_leave_memory_as_it_was(tmp_path, survived, n):
    process = start(come_and_go, n, n // 4, tmp_path / "sizes")
    process.join(600)
    assert process.exitcode == 0
    warm, after = map(int, (tmp_path / "sizes").read_text().split())
    survived("lives", n, int(after > 1.02 * warm))
    assert after <= 1.02 * warm, (warm, after)
