"""Work for generators: in time, none too early, none twice, none lost."""

import random
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from rlhf_kernels.runtime import registry

from rlhf_engine.errors import GeneratorError
from rlhf_engine.generators.scheduler import Drawn, Joined, Lost, Scheduler, StalenessRule, newest_after
from rlhf_engine.generators.sources import WORKER, GeneratorThread, StoppedError
from rlhf_engine.generators.work import Snapshot, VersionStore
from rlhf_engine.hydra import PackedBatch
from rlhf_engine.rollout import PromptBatch, Rollout
from rlhf_engine.rollout.request import RolloutStats


def ages(rule: StalenessRule, steps: int) -> list[int]:
    """Of the answers of each step when it learns from them, policies one update apart."""
    return [step - rule.drawn_after(step, rule.earliest(step)) for step in range(steps)]


def test_ages_by_the_rule():
    """One batch ahead is one update behind but for the first; batches of one policy grow old together."""
    assert ages(StalenessRule(max_staleness=1), 6) == [0, 1, 1, 1, 1, 1]
    assert ages(StalenessRule(max_staleness=3), 6) == [0, 1, 2, 3, 3, 3]
    assert ages(StalenessRule(batches_per_policy=4), 9) == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert ages(StalenessRule(), 4) == [0, 0, 0, 0]
    for rule in (StalenessRule(), StalenessRule(max_staleness=2), StalenessRule(batches_per_policy=3)):
        for done in range(12):  # drawable is the inverse of earliest
            allowed = [step for step in range(done, 40) if rule.earliest(step) <= done]
            assert allowed == list(range(done, rule.drawable(done)))
    newest = StalenessRule(max_staleness=3, newest=True)
    assert [newest.drawn_after(5, done) for done in (2, 3, 4, 5)] == [2, 3, 4, 5]
    with pytest.raises(ValueError, match="after 1 steps"):
        newest.drawn_after(5, 1)
    # a policy from before the run was taken up is the oldest one known
    assert [newest_after({4: "a", 7: "b"}, done) for done in (2, 4, 6, 7, 9)] == [4, 4, 4, 7, 7]


def make_shares(step: int, n_shares: int) -> list[PromptBatch]:
    """Shares of a prompt each, which name the step; sample ids count on."""
    ids = range(step * n_shares, (step + 1) * n_shares)
    return [PromptBatch.of([step], {step: [1]}, generations=1, first_id=i) for i in ids]


def answers_of(prompts: PromptBatch, version: int, seconds: float = 0.0) -> Rollout:
    return Rollout(
        batch=PackedBatch.from_lists(prompts.prompts, [prompts.rows], sample_ids=prompts.sample_ids),
        logprobs_M=torch.zeros(1), versions_M=torch.tensor([version]), finish_reasons=("length",), filtered=False,
        stats=RolloutStats(tokens=1, seconds=seconds),
    )  # fmt: skip


def policy(version: int) -> Snapshot:
    return Snapshot(version=version, tensors={"x": torch.full((2,), float(version))})


class Stage:
    """Stands for drawing: takes its time and notes what it was asked for."""

    def __init__(self, seconds=lambda step: 0.0) -> None:
        self.seconds, self.steps, self.stop = seconds, [], threading.Event()
        self.beat, self.rollouts, self.kernels = 0.0, SimpleNamespace(close=lambda: None), registry.PROCESS

    def __call__(self, prompts: PromptBatch, version: int) -> Rollout:
        (step,) = prompts.rows
        self.steps.append(step)
        if self.stop.wait(self.seconds(step)):
            raise StoppedError
        return answers_of(prompts, version)


def scheduler_of(stage: Stage, rule: StalenessRule, total: int, **options) -> tuple[Scheduler, VersionStore]:
    store = VersionStore()
    transport = GeneratorThread(stage, store)
    return Scheduler(transport, make_shares, rule, {0: policy(0)}, step=0, total_steps=total, **options), store


def learn(scheduler: Scheduler, steps: range, seconds=lambda step: 0.0) -> list[int]:
    """Ages of the answers of each step, policies one update apart."""
    found = []
    for step in steps:
        rollout, *_ = scheduler.take(step)
        assert rollout.batch.completion_tokens(0) == [step]
        assert set(rollout.versions_M.tolist()) == {rollout.policy_version}
        found.append(step - rollout.policy_version)
        time.sleep(seconds(step))
        scheduler.publish(step + 1, policy(step + 1))
    return found


@pytest.mark.parametrize("newest", [False, True], ids=["fixed", "newest"])
@pytest.mark.parametrize(
    ("most", "steps"), [(1, 200), (3, 300), *(pytest.param(n, 1000, marks=pytest.mark.long) for n in (1, 3))]
)
def test_no_answer_is_too_old_however_long_things_take(newest, most, steps, survived):
    random.seed(most)
    delays = [random.choice([0.0, 0.0, 0.0005, 0.002]) for _ in range(2 * steps)]
    stage = Stage(lambda step: delays[step])
    scheduler, store = scheduler_of(stage, StalenessRule(max_staleness=most, newest=newest), steps)
    found = learn(scheduler, range(steps), lambda step: delays[steps + step])
    scheduler.close()
    assert max(found) <= most
    assert stage.steps == list(range(steps))  # each once, and none beyond the last
    assert min(store._held) >= steps - 1 - most  # the others are forgotten
    if not newest:
        assert found == [min(step, most) for step in range(steps)]
    elif most == 3:
        assert len(set(found)) > 1  # else the newest policy was never newer than it had to be
    survived("machines", steps)


@pytest.mark.alone
def test_a_step_takes_as_long_as_the_longer_stage():
    generate, update, steps = 0.03, 0.05, 20
    scheduler, _ = scheduler_of(Stage(lambda step: generate), StalenessRule(max_staleness=1), steps)
    began = time.perf_counter()
    learn(scheduler, range(steps), lambda step: update)
    took = time.perf_counter() - began
    scheduler.close()
    least = generate + steps * update
    assert least <= took < 1.15 * least
    assert took < 0.75 * steps * (generate + update)


def test_a_run_that_is_taken_up_draws_by_the_policies_it_would_have_had():
    stage = Stage()
    policies = {steps: policy(steps) for steps in (3, 4, 5)}
    transport = GeneratorThread(stage, VersionStore())
    scheduler = Scheduler(
        transport, make_shares, StalenessRule(max_staleness=2), policies, step=5, total_steps=9, drawn_by={6: 3}
    )
    assert learn(scheduler, range(5, 9)) == [2, 3, 2, 2]  # step 6 had been begun by version 3
    scheduler.close()


class Crowd:
    """A transport to several generators whose fates a test decides."""

    def __init__(self, names: list[str]) -> None:
        self.events: list = [Joined(worker=name) for name in names]
        self.arrived = threading.Condition()
        self.sent: list[tuple[str, PromptBatch, int]] = []
        self.published: list[int] = []
        self.given_up: list[str] = []
        self.silent: set[str] = set()
        self.on_their_way = 0
        self.closed = False

    def publish(self, snapshot: Snapshot) -> int:
        self.published.append(snapshot.version)
        return snapshot.n_bytes

    def keep(self, versions: frozenset[int]) -> None:
        pass

    def submit(self, worker: str, prompts: PromptBatch, version: int) -> None:
        with self.arrived:
            self.sent.append((worker, prompts, version))
            self.arrived.notify_all()

    def tell(self, event) -> None:
        with self.arrived:
            self.events.append(event)
            self.arrived.notify_all()

    def next_event(self, timeout: float):
        with self.arrived:
            self.arrived.wait_for(lambda: bool(self.events), timeout)
            return self.events.pop(0) if self.events else None

    def silent_for(self, worker: str) -> float:
        return 100.0 if worker in self.silent else 0.0

    def expects_more(self) -> bool:
        return self.on_their_way > 0

    def give_up(self, worker: str, cause: BaseException) -> None:
        self.given_up.append(worker)
        self.tell(Lost(worker=worker, cause=cause))

    def close(self) -> None:
        self.closed = True

    def wait_for(self, n: int) -> list[tuple[str, PromptBatch]]:
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.sent) >= n, 10), self.sent
            return [(worker, prompts) for worker, prompts, _ in self.sent]

    def finish(self, worker: str, prompts: PromptBatch) -> None:
        self.tell(Drawn(worker=worker, rollout=answers_of(prompts, 0, seconds=0.1)))


def crowd_of(names: list[str], total: int, **options) -> tuple[Crowd, Scheduler]:
    crowd = Crowd(names)
    rule = StalenessRule(max_staleness=1)
    return crowd, Scheduler(
        crowd, make_shares, rule, {0: policy(0)}, step=0, total_steps=total, n_shares=2, timeout=50.0, **options
    )


def test_the_share_of_a_lost_generator_goes_to_another():
    crowd, scheduler = crowd_of(["a", "b"], 1)
    (_, first), (_, second) = crowd.wait_for(2)
    assert (first.sample_ids, second.sample_ids) == ((0,), (1,))
    crowd.tell(Lost(worker="a", cause=OSError("killed")))
    crowd.finish("b", second)
    *_, (worker, again) = crowd.wait_for(3)
    assert (worker, again) == ("b", first)
    crowd.finish("a", first)  # too late: nobody waits for it
    crowd.finish("b", again)
    rollout, *_ = scheduler.take(0)
    assert rollout.batch.sample_ids == (0, 1)  # every prompt once, in order
    assert len(crowd.sent) == 3
    scheduler.close()
    assert crowd.closed


def test_one_that_joins_takes_part():
    crowd, scheduler = crowd_of(["a"], 1)
    crowd.wait_for(1)
    crowd.tell(Joined(worker="late"))
    (_, first), (worker, second) = crowd.wait_for(2)
    assert worker == "late"
    crowd.finish("late", second)
    crowd.finish("a", first)
    assert scheduler.take(0)[0].batch.sample_ids == (0, 1)
    scheduler.close()


def test_a_silent_one_is_given_up_and_its_share_drawn_by_another():
    crowd, scheduler = crowd_of(["a", "b"], 1)
    (_, first), (_, second) = crowd.wait_for(2)
    crowd.finish("b", second)
    crowd.silent.add("a")
    *_, (worker, again) = crowd.wait_for(3)
    assert (worker, again, crowd.given_up) == ("b", first, ["a"])
    crowd.finish("b", again)
    scheduler.take(0)
    scheduler.close()


def test_without_generators_the_cause_is_shown():
    crowd, scheduler = crowd_of(["a", "b"], 1)
    crowd.wait_for(2)
    crowd.tell(Lost(worker="a", cause=OSError("first")))
    crowd.tell(Lost(worker="b", cause=OSError("second")))
    with pytest.raises(GeneratorError, match="OSError: second"):
        scheduler.take(0)
    scheduler.close()


def test_while_another_is_on_its_way_the_learner_waits():
    crowd, scheduler = crowd_of(["a"], 1)
    ((_, first),) = crowd.wait_for(1)
    crowd.on_their_way = 1
    crowd.tell(Lost(worker="a", cause=OSError("killed")))
    crowd.tell(Lost(worker="never joined", cause=OSError("did not come up")))
    found: list[tuple[int, ...]] = []
    learner = threading.Thread(target=lambda: found.append(scheduler.take(0)[0].batch.sample_ids))
    learner.start()
    time.sleep(0.3)
    assert learner.is_alive()  # neither loss is the end
    crowd.on_their_way = 0
    crowd.tell(Joined(worker="late"))
    *_, (worker, again) = crowd.wait_for(2)
    assert (worker, again) == ("late", first)
    crowd.finish("late", first)
    *_, (_, second) = crowd.wait_for(3)
    crowd.finish("late", second)
    learner.join(10)
    assert found == [(0, 1)]
    scheduler.close()


def test_when_the_last_one_on_its_way_is_lost_as_well_its_cause_is_shown():
    crowd, scheduler = crowd_of(["a"], 1)
    crowd.wait_for(1)
    crowd.on_their_way = 1
    crowd.tell(Lost(worker="a", cause=OSError("killed")))
    time.sleep(0.1)
    crowd.on_their_way = 0
    crowd.tell(Lost(worker="never joined", cause=OSError("did not come up")))
    with pytest.raises(GeneratorError, match="OSError: did not come up"):
        scheduler.take(0)
    scheduler.close()


def test_a_transport_that_fails_does_not_leave_the_learner_waiting():
    class Broken(Crowd):
        def next_event(self, timeout: float):
            raise OSError("no such pipe")

    rule = StalenessRule(max_staleness=1)
    scheduler = Scheduler(Broken([WORKER]), make_shares, rule, {0: policy(0)}, step=0, total_steps=1)
    with pytest.raises(GeneratorError, match="OSError: no such pipe"):
        scheduler.take(0)
    scheduler.close()
