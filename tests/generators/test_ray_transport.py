"""What generators in other processes are sent, and what is made of their answers, with a stand-in for Ray."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from rlhf_kernels.runtime import registry

from rlhf_engine.commands.main import main
from rlhf_engine.errors import ConfigError, GeneratorError
from rlhf_engine.generators import ray as ray_transport, work as serialize
from rlhf_engine.generators.ray import Generator, RayTransport, Room, _other_gpus, generators_on_ray, room_for
from rlhf_engine.generators.scheduler import Drawn, Joined, Lost, Scheduler, StalenessRule
from rlhf_engine.generators.work import take
from rlhf_engine.hydra.build import build_generator_model
from rlhf_engine.rollout import PromptBatch, SamplingConfig
from tests.generators.test_scheduler import answers_of, make_shares, policy
from tests.training.test_data import train_config, write_model

SAMPLING = SamplingConfig(max_completion_length=1, eos_token_ids=())


class Ray:
    """Actors as objects with a thread each; one that is killed answers no more."""

    def __init__(self) -> None:
        self.actors: list[Actor] = []
        self.killed: list[Actor] = []

    def remote(self, **groups: Any) -> Any:
        return lambda kind: type("Kind", (), {"options": lambda **options: Start(self, kind)})

    def put(self, value: bytes) -> bytes:
        return value

    def kill(self, actor: Actor) -> None:
        self.killed.append(actor)

    def is_initialized(self) -> bool:
        return True


class Start:
    def __init__(self, ray: Ray, kind: type) -> None:
        self.ray, self.kind = ray, kind

    def remote(self) -> Actor:
        self.ray.actors.append(Actor(self.kind(len(self.ray.actors))))
        return self.ray.actors[-1]


class Actor:
    def __init__(self, it: Any) -> None:
        self.it = it
        self.threads = {None: ThreadPoolExecutor(1), "beat": ThreadPoolExecutor(1)}

    def __getattr__(self, name: str) -> Call:
        return Call(self, name, None)


class TaskError(Exception):
    """What Ray raises for a call that raised."""

    def __init__(self, cause: Exception) -> None:
        super().__init__("a long traceback of the other process")
        self.cause = cause


class Call:
    def __init__(self, actor: Actor, name: str, group: str | None) -> None:
        self.actor, self.name, self.group = actor, name, group

    def options(self, concurrency_group: str) -> Call:
        return Call(self.actor, self.name, concurrency_group)

    def remote(self, *arguments: Any) -> Any:
        def call() -> Any:
            try:
                return getattr(self.actor.it, self.name)(*arguments)
            except Exception as error:
                raise TaskError(error) from error

        future: Future[Any] = self.actor.threads[self.group].submit(call)
        return type("Ref", (), {"future": lambda self: future})()


class Stub:
    """Stands for a generator; number: how many were started before it."""

    def __init__(self, number: int) -> None:
        self.number, self.held, self.kept = number, {}, []

    def build(self, config, sampling, frozen, threads, kernels):
        return 100 + self.number, "here"

    def hold(self, version, digest, data):
        self.held[version] = serialize.digest(serialize.unpack_policy(version, digest, data).tensors)
        return self.held[version]

    def draw(self, prompts, version, keep):
        self.kept.append(keep)
        digest = self.held[version]
        kernels = [("gae", "float32", (self.number + 1,), "reference")]
        return {
            "rollout": serialize.pack_rollout(answers_of(PromptBatch(**prompts), version, seconds=0.1)),
            "digest": digest,
            "kernels": kernels,
        }

    def beat(self):
        return 0.0


def transport_of(monkeypatch, kind: type, **options: Any) -> tuple[Ray, RayTransport]:
    monkeypatch.setattr(ray_transport, "Generator", kind)
    ray = Ray()
    options = {"generators": 2, "restarts": 0, "timeout": 60.0, **options}
    return ray, RayTransport(ray, {}, SAMPLING, {}, room=Room(1, 0.0, None), **options)


def learn(scheduler: Scheduler, steps: range) -> None:
    for step in steps:
        found = scheduler.take(step)[0].batch.sample_ids
        assert found == (2 * step, 2 * step + 1)  # every answer once, in order
        scheduler.publish(step + 1, policy(step + 1))


def scheduler_of(transport: RayTransport, total: int, **options: Any) -> Scheduler:
    rule = StalenessRule(max_staleness=1)
    return Scheduler(transport, make_shares, rule, {0: policy(0)}, step=0, total_steps=total, n_shares=2, **options)


def pids(transport: RayTransport) -> dict[str, int]:
    """Process ids of the generators that have come up."""
    return {worker.name: worker.pid for worker in list(transport._workers.values()) if worker.pid is not None}


def test_they_join_with_every_policy_that_is_held(monkeypatch):
    ray, transport = transport_of(monkeypatch, Stub)
    assert transport.expects_more()
    assert transport.publish(policy(0)) == 0  # nobody is up yet
    transport.publish(policy(1))
    joined = {event.worker for event in (transport.next_event(5), transport.next_event(5)) if isinstance(event, Joined)}
    assert joined == {"generator 1", "generator 2"}
    assert not transport.expects_more()
    assert pids(transport) == {"generator 1": 100, "generator 2": 101}
    sent = transport.publish(policy(2))
    assert sent == 2 * len(serialize.pack_policy(policy(2))[1])
    transport.keep(frozenset({1, 2}))
    (prompts, _) = make_shares(0, 2)
    transport.submit("generator 1", prompts, 2)
    event = transport.next_event(5)
    assert isinstance(event, Drawn)
    assert (event.worker, event.rollout.policy_version) == ("generator 1", 2)
    assert event.rollout.batch.sample_ids == prompts.sample_ids
    assert ray.actors[0].it.kept == [[1, 2]]
    assert ray.actors[0].it.held.keys() == {0, 1, 2}
    transport.close()
    transport.close()
    assert ray.killed == ray.actors


class Damaging(Stub):
    def hold(self, version, digest, data):
        return super().hold(version, digest, data[:-1] + bytes([data[-1] ^ 1]) if version == 1 else data)


class Deaf(Stub):
    """Says that it holds a policy, and draws by the one before."""

    def hold(self, version, digest, data):
        held = super().hold(version, digest, data)
        if version == 1:
            self.held[1] = self.held[0]
        return held


class Garbling(Stub):
    def draw(self, prompts, version, keep):
        found = super().draw(prompts, version, keep)
        tensors = found["rollout"]["tensors"]
        return {**found, "rollout": {**found["rollout"], "tensors": tensors[:-1] + bytes([tensors[-1] ^ 1])}}


class Mistaken(Stub):
    def hold(self, version, digest, data):
        return super().hold(version, digest, data) if version == 0 else "0" * 64


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Damaging, "EngineError: policy version 1 arrived damaged"),
        (Deaf, "EngineError: generator 1 has drawn by another policy than version 1"),
        (Garbling, "EngineError: answers arrived damaged: expected ones of digest"),
        (Mistaken, "EngineError: policy version 1: generator 1 holds digest 000000000000…"),
    ],
)
@pytest.mark.filterwarnings("ignore:generator 1")
def test_a_policy_that_did_not_arrive_ends_the_generator(monkeypatch, kind, message):
    _, transport = transport_of(monkeypatch, kind, generators=1)
    scheduler = scheduler_of(transport, 5)
    with pytest.raises(GeneratorError, match=message):
        learn(scheduler, range(5))
    scheduler.close()


def test_a_generator_that_raises_is_replaced(monkeypatch):
    class Once(Stub):
        def draw(self, prompts, version, keep):
            if self.number == 0 and prompts["rows"] == (2,):
                raise ZeroDivisionError("of the third step")
            return super().draw(prompts, version, keep)

    ray, transport = transport_of(monkeypatch, Once, generators=1, restarts=1)
    scheduler = scheduler_of(transport, 6)
    text = "generator 1, process 100 on here, is lost: ZeroDivisionError: of the third step; generator 2 takes its"
    with pytest.warns(UserWarning, match=text):
        learn(scheduler, range(6))  # while nobody is there, the learner waits
    scheduler.close()
    assert [loss.worker for loss in transport.losses] == ["generator 1"]
    assert ray.killed == ray.actors
    assert pids(transport) == {}


@pytest.mark.filterwarnings("ignore:generator")
def test_no_more_than_so_many_are_replaced(monkeypatch):
    class Broken(Stub):
        def draw(self, prompts, version, keep):
            raise ZeroDivisionError(f"of number {self.number}")

    ray, transport = transport_of(monkeypatch, Broken, restarts=3)
    scheduler = scheduler_of(transport, 6)
    # which of them is the last is a matter of time: the first may be slow while others take each other's place
    with pytest.raises(GeneratorError, match=r"the last one ended with ZeroDivisionError: of number [0-4]"):
        scheduler.take(0)
    scheduler.close()
    assert len(ray.actors) == 5


@pytest.mark.filterwarnings("ignore:generator")
def test_a_base_that_differs_is_not_tried_again(monkeypatch):
    class Other(Stub):
        def build(self, config, sampling, frozen, threads, kernels):
            serialize.require_same_parts({"backbone base": "other"}, {"backbone base": "learner"})

    ray, transport = transport_of(monkeypatch, Other, generators=1, restarts=3)
    scheduler = scheduler_of(transport, 6)
    with pytest.raises(GeneratorError, match="ConfigError: model_name_or_path: expected weights on"):
        scheduler.take(0)
    scheduler.close()
    assert len(ray.actors) == 1


@pytest.mark.filterwarnings("ignore:generator")
def test_one_that_does_not_come_up_is_given_up(monkeypatch):
    class Slow(Stub):
        def build(self, config, sampling, frozen, threads, kernels):
            time.sleep(0 if self.number else 1.5)
            return super().build(config, sampling, frozen, threads, kernels)

    monkeypatch.setattr(ray_transport, "_START", 0.3)
    _, transport = transport_of(monkeypatch, Slow, generators=1, restarts=1, timeout=0.3)
    scheduler = scheduler_of(transport, 3)
    learn(scheduler, range(3))
    scheduler.close()
    (loss,) = transport.losses
    assert isinstance(loss.cause, TimeoutError)


@pytest.mark.filterwarnings("ignore:generator")
def test_one_that_draws_no_token_is_given_up(monkeypatch):
    hung: list[int] = []
    release = threading.Event()

    class Hanging(Stub):
        began: float | None = None

        def draw(self, prompts, version, keep):
            if prompts["sample_ids"] == (2,) and not hung:  # whoever got that one, once
                hung.append(self.number)
                self.began = time.monotonic()
                release.wait(60)
            return super().draw(prompts, version, keep)

        def beat(self):  # the other thread still answers
            return 0.0 if self.began is None else time.monotonic() - self.began

    _, transport = transport_of(monkeypatch, Hanging, restarts=1, timeout=0.5)
    scheduler = scheduler_of(transport, 4, timeout=0.5)
    learn(scheduler, range(4))  # the one that hangs is still at it
    release.set()
    scheduler.close()
    (loss,) = transport.losses
    assert f"generator {hung[0] + 1} has drawn no token of the answers of step 2" in str(loss.cause)


def test_one_that_beats_is_not_given_up(monkeypatch):
    class Slow(Stub):
        def draw(self, prompts, version, keep):
            time.sleep(0.7)
            return super().draw(prompts, version, keep)

    _, transport = transport_of(monkeypatch, Slow, timeout=0.4)
    scheduler = scheduler_of(transport, 2, timeout=0.4)
    learn(scheduler, range(2))
    scheduler.close()
    assert not transport.losses


def test_events_of_one_that_was_lost_are_not_looked_at(monkeypatch):
    _, transport = transport_of(monkeypatch, Stub, generators=1)
    transport.publish(policy(0))
    assert isinstance(transport.next_event(5), Joined)
    transport.submit("generator 1", make_shares(0, 1)[0], 0)
    time.sleep(0.2)  # its answer has been queued
    while not transport._notes.empty():
        transport._notes.get()  # … and is late
    transport.give_up("generator 1", OSError("gone"))
    transport.give_up("generator 1", OSError("gone"))
    with pytest.warns(UserWarning, match="generator 1, process 100 on here, is lost: OSError: gone$"):
        found = [transport.next_event(0.1) for _ in range(4)]
    assert [type(event) for event in found if event is not None] == [Lost]
    transport.submit("generator 1", make_shares(0, 1)[0], 0)  # nobody is there to draw it
    assert transport.silent_for("generator 1") == 0.0


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return train_config(write_model(folder / "model"), folder / "run", async_mode="ray")


@pytest.fixture
def generator(config) -> Generator:
    found = Generator()
    threads = torch.get_num_threads()
    frozen = serialize.fixed_parts(build_generator_model(config))
    found.build(config.to_dict(), asdict(SAMPLING), frozen, threads, [])
    return found


def adapter(config, version: int) -> tuple[str, bytes]:
    return serialize.pack_policy(take(build_generator_model(config).backbone().slot("behaviour"), version))


def test_a_generator_draws_by_what_it_was_sent(config, generator):
    digest, data = adapter(config, 0)
    assert generator.hold(0, digest, data) == digest
    (prompts,) = make_shares(0, 1)
    found = generator.draw(asdict(prompts), 0, [0])
    assert found["digest"] == digest
    rollout = serialize.unpack_rollout(found["rollout"])
    assert rollout.batch.sample_ids == (0,)
    assert rollout.frozen.past_logprobs_M.shape == rollout.logprobs_M.shape
    assert rollout.frozen.rewards_N.shape == (1,)
    assert generator.beat() < 60


def test_a_generator_with_another_base_is_refused(config, tmp_path):
    other = train_config(write_model(tmp_path / "model", seed=5), tmp_path / "run", async_mode="ray")
    frozen = serialize.fixed_parts(build_generator_model(config))
    with pytest.raises(ConfigError, match="got a backbone base of hash"):
        Generator().build(other.to_dict(), asdict(SAMPLING), frozen, None, [])


def test_a_generator_takes_the_run_s_kernels_and_names_its_own(config):
    found, frozen = Generator(), serialize.fixed_parts(build_generator_model(config))
    found.build(config.to_dict(), asdict(SAMPLING), frozen, None, [("sample", "float32", (64,), "reference")])
    assert ("sample", "float32", (64,), "reference") in registry.choices()
    found.hold(0, *adapter(config, 0))
    drawn = found.draw(asdict(make_shares(0, 1)[0]), 0, [0])
    assert drawn["kernels"] == [tuple(choice) for choice in registry.choices()]
    assert len(drawn["kernels"]) > 1
    registry.begin_run()


def test_what_generators_chose_goes_into_the_learner_s_checkpoints(monkeypatch):
    registry.begin_run()
    _, transport = transport_of(monkeypatch, Stub, generators=1)
    scheduler = scheduler_of(transport, 3)
    learn(scheduler, range(3))
    scheduler.close()
    assert registry.choices() == [("gae", "float32", (1,), "reference")]
    registry.begin_run()


def test_without_ray(config, monkeypatch, tmp_path, capsys):
    """The command says so before a model is loaded."""
    monkeypatch.setitem(sys.modules, "ray", None)
    message = r"async: expected .* \(pip install 'rlhf-engine\[ray\]'\), got 'ray'"
    with pytest.raises(ConfigError, match=message), generators_on_ray(config):
        pass
    path = tmp_path / "train.yaml"
    path.write_text(replace(config, model_name_or_path=str(tmp_path / "no model is here")).to_yaml())
    assert main(["train", "--config", str(path)]) == 2
    assert "pip install 'rlhf-engine[ray]'" in capsys.readouterr().err


def test_room(config):
    two = {"CPU": 8.0, "GPU": 2.0}
    for options, device, nodes, room in (
        ({}, "cpu", [{"CPU": 8.0}], Room(4, 0.0, 4)),
        ({"async_mode": "ray=3"}, "cpu", [{"CPU": 4.0}], Room(1, 0.0, 1)),
        ({}, "cpu", [{"CPU": 2.0}] * 4, Room(2, 0.0, 2)),
        ({"async_mode": "ray=2"}, "cuda", [two], Room(1, 1.0, None)),
        ({"async_mode": "ray=4"}, "cuda", [two], Room(1, 0.5, None)),
    ):
        assert room_for(replace(config, **options), torch.device(device), nodes) == room
    no_gpu = r"async: expected ray with at most 2, of 1 CPUs and 0 GPUs each, where Ray has 2 CPUs and 0 GPUs"
    for options, device, nodes, message in (
        ({"async_mode": "ray=3"}, "cpu", [{"CPU": 2.0}, {}], f"{no_gpu}; got 3"),
        ({}, "cuda", [{"CPU": 8.0}], "expected ray with at most 0, .* 8 CPUs and 0 GPUs; got 1"),
        ({"async_mode": "ray=5"}, "cuda", [{"CPU": 4.0, "GPU": 2.0}], "expected ray with at most 4"),
    ):
        with pytest.raises(ConfigError, match=message):
            room_for(replace(config, **options), torch.device(device), nodes)


def test_generators_leave_the_learner_its_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert _other_gpus(torch.device("cuda:1")) == "0,2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6,7")
    assert _other_gpus(torch.device("cuda")) == "6,7"
    assert _other_gpus(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert _other_gpus(torch.device("cuda")) is None
