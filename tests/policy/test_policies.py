"""Many policies on one base: each has the bits that it has alone, whatever the others do meanwhile."""

import json
import math
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from rlhf_engine.errors import BusyError, EngineError, MemoryLimitError, NonFiniteError, PolicyRemovedError
from rlhf_engine.hydra import HydraModel, PackedBatch, RoleSpec, SlotConfig, hydra_roles
from rlhf_engine.hydra.outputs import PolicyLoss, TargetLogprobs, TopLogprobs, ValueLoss
from rlhf_engine.policy import Pass, Policies, PolicyThread
from rlhf_engine.policy.joint import run
from rlhf_engine.policy.pool import BASE, promise
from rlhf_engine.policy.thread import replay
from rlhf_engine.rollout import Request, SamplingConfig
from rlhf_engine.rollout.rows import LiveRows
from tests.conftest import VOCAB, tiny_llama

RANKS = (4, 5, 8, 16, 32)
TARGETS = ("all-linear", ("q_proj", "v_proj"), ("gate_proj", "up_proj", "down_proj"), ("o_proj", "lm_head"))
HOW = SamplingConfig(max_completion_length=6, eos_token_ids=(2,), seed=7)
ROUNDS = 2


def make_pool(dtype: torch.dtype = torch.float32, *, exact: bool = True, **options: object) -> Policies:
    host = HydraModel.from_pretrained(tiny_llama().to(dtype), roles={BASE: RoleSpec()})
    return Policies(host, exact=exact, **options)


def add(pool: Policies, i: int, name: str | None = None, **options: object):
    """Policy i of a set of mixed shapes, whose LoRA is not zero."""
    targets = TARGETS[i % len(TARGETS)]
    slots = {"actor": SlotConfig(r=RANKS[i % len(RANKS)], target_modules=targets)}
    policy = pool.add(name or f"p{i}", slots=slots, seed=i, **options)
    generator = torch.Generator().manual_seed(1000 + i)
    with torch.no_grad():
        for p in policy.model.backbone().slots.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator))
    return policy


def requests(i: int, turn: int) -> list[Request]:
    """Two or three prompts of policy i, one of them with two answers."""
    rng = random.Random(100 * i + turn)
    prompts = [tuple(rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 20))) for _ in range(rng.randint(2, 3))]
    return [Request(prompt=p, sample_id=10 * turn + j) for j, p in enumerate([*prompts, prompts[0]])]


def learn_from(policy, i: int, answers) -> Pass:
    """A pass whose loss weighs each token of the answers."""
    batch = PackedBatch.from_lists([a.prompt for a in answers], [a.tokens for a in answers])
    generator = torch.Generator().manual_seed(i)
    weights = torch.randn(batch.n_completion_tokens, 2, generator=generator)
    targets = torch.stack([batch.targets_M, batch.targets_M.flip(0)], 1)
    outputs = (TargetLogprobs(rows_P=batch.predict_rows_M, targets=targets, weights=weights),)
    return Pass(policy=policy, batch=batch, outputs=outputs, loss=lambda results: results[0].loss)


def seen(policy) -> list[torch.Tensor]:
    """Weights and moments of a policy."""
    tensors = policy.optimizer.state_tensors()
    return [*policy.model.backbone().slots.state_dict().values(), *(tensors[name] for name in sorted(tensors))]


def turn(thread: PolicyThread, i: int, t: int) -> list[object]:
    """Draw, learn and step once; what came out."""
    answers = thread.submit(f"p{i}", requests(i, t), HOW).answers.result(120)
    policy = thread.policies.hold(f"p{i}")
    try:
        results = thread.compute(learn_from(policy, i, answers)).result(120)
        gradients = thread.call(lambda: [p.grad.clone() for p in policy.model.backbone().slots.parameters()]).result(
            120
        )
        options = {"learning_rate": 0.01 * (1 + i % 3), "betas": (0.9, 0.95 if t else 0.999), "eps": 1e-8 * (1 + i % 2)}
        done = thread.call(lambda: thread.policies.step(f"p{i}", weight_decay=0.1, max_grad_norm=1.0, **options))
        norms = done.result(120).result(120)
        state = thread.call(lambda: [x.clone() for x in seen(policy)]).result(120)
    finally:
        thread.policies.release(policy)
    drawn = [(a.tokens, a.logprobs, a.versions) for a in answers]
    return [drawn, norms, results[0].logprob.clone(), *gradients, *state]


def equal(ours: list[object], theirs: list[object]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_32_policies_of_two_threads_have_the_bits_that_each_has_alone_with_evictions_between(dtype, tmp_path, survived):
    n = 32
    alone = {}
    for i in range(n):
        pool = make_pool(dtype)
        add(pool, i)
        with PolicyThread(pool) as thread:
            alone[i] = [turn(thread, i, t) for t in range(ROUNDS)]
    pool = make_pool(dtype, state=tmp_path, max_policies=24)  # 8 of them are on disk at any time
    for i in range(n):
        add(pool, i)
    assert len(pool.evicted) == 8
    with PolicyThread(pool, max_rows=17) as thread:

        def client(part: int) -> list[int]:
            order = [(t, i) for t in range(ROUNDS) for i in range(part, n, 2)]
            return [i for t, i in order if not equal(turn(thread, i, t), alone[i][t])]

        with ThreadPoolExecutor(2) as clients:
            wrong = [i for part in clients.map(client, range(2)) for i in part]
        assert thread.owed == thread.n_live == thread.n_waiting == 0
        assert [policy.holders for policy in pool] == [0] * 25
    survived("two_threads", ROUNDS * n, len(wrong))
    assert wrong == []


def test_a_joint_pass_has_the_results_and_gradients_of_each_pass_alone_heads_and_shared_slots_included():
    pool = make_pool()
    jobs = []
    for i in range(6):
        roles = hydra_roles("hydra_ppo" if i % 2 else "j_hydra_ppo")
        slots = {"actor": SlotConfig(r=RANKS[i % 5])} | ({"critic": SlotConfig(r=3)} if i % 2 else {})
        policy = pool.add(f"h{i}", roles=roles, slots=slots, seed=i)
        generator = torch.Generator().manual_seed(i)
        with torch.no_grad():
            for p in (*policy.model.backbone().slots.parameters(), *policy.model.heads.parameters()):
                p.add_(0.1 * torch.randn(p.shape, generator=generator))
        batch = PackedBatch.from_lists([[5, 6 + i, 7], [5, 6 + i, 7], [9]], [[3, 4], [8, 3, 9], [4]])
        m = batch.n_completion_tokens
        tokens = {name: torch.randn(m, generator=generator) for name in ("old", "advantage", "return", "value")}
        outputs = (
            PolicyLoss(old_logprob_M=tokens["old"] - 4, advantage_M=tokens["advantage"], mask_M=torch.ones(m), denom=m),
            ValueLoss(old_value_M=tokens["value"], return_M=tokens["return"], mask_M=torch.ones(m), denom=m, clip=0.2),
        )
        jobs.append(Pass(policy=policy, batch=batch, outputs=outputs, loss=lambda r: r[0].loss + 0.1 * r[1].loss))

    def gradients(policy) -> list[torch.Tensor]:
        held = [*policy.model.backbone().slots.parameters(), *policy.model.heads.named_parameters()]
        trained = [p for p in (x[1] if isinstance(x, tuple) else x for x in held) if p.grad is not None]
        found = [p.grad.clone() for p in trained]
        for p in trained:
            p.grad = None
        return found

    calls = []
    run_lanes = type(pool.host.backbone()).run_lanes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(pool.host.backbone()), "run_lanes", lambda self, *a: calls.append(len(a[0])) or run_lanes(self, *a)
        )
        together = run(pool.host, jobs)
    assert calls == [9]  # three policies of one lane, three of two
    ours = [gradients(job.policy) for job in jobs]
    assert all(len(found) > 10 for found in ours)
    for job, result, mine in zip(jobs, together, ours, strict=True):
        with pool.host.backbone().kernels.used():
            alone = job.policy.model(job.batch, job.outputs)
            job.loss(alone).backward()
        assert torch.equal(result[0].loss, alone[0].loss)
        assert torch.equal(result[1].loss, alone[1].loss)
        assert equal(mine, gradients(job.policy))


def test_passes_beyond_the_token_budget_go_one_after_another_with_the_same_bits():
    pool = make_pool()
    passes = []
    for i in range(8):  # two of them with LoRA on the LM head
        add(pool, i)
        answers = [SimpleNamespace(prompt=r.prompt, tokens=[3, 4, 5]) for r in requests(i, 0)]
        passes.append(learn_from(pool.get(f"p{i}"), i, answers))
    results = []
    for budget in (10_000, passes[0].batch.n_tokens, 1):
        pool.host.token_budget = budget
        run(pool.host, passes)
        results.append([p.grad.clone() for x in passes for p in x.policy.model.backbone().slots.parameters()])
        for each in passes:
            each.policy.optimizer.adamw.zero_grad()
    assert equal(results[0], results[1])
    assert equal(results[0], results[2])


def test_targets_and_top_words_are_those_of_the_whole_distribution():
    pool = make_pool()
    batch = PackedBatch.from_lists([[5, 6, 7], [9]], [[3, 4], [8, 3, 9]])
    rows = torch.arange(batch.n_tokens)
    policy = add(pool, 3)  # with LoRA on the LM head
    every = torch.arange(VOCAB).expand(len(rows), VOCAB)
    weights = torch.rand(len(rows), VOCAB)
    outputs = (TargetLogprobs(rows_P=rows, targets=every, weights=weights), TopLogprobs(rows_P=rows, k=5))
    (table, loss), top = run(pool.host, [Pass(policy=policy, batch=batch, outputs=outputs)])[0]
    torch.testing.assert_close(table.exp().sum(1), torch.ones(len(rows)))
    torch.testing.assert_close(loss, -(weights * table).sum())
    best = table.topk(5)
    assert torch.equal(top.token, best.indices)
    torch.testing.assert_close(top.logprob, best.values)
    with pytest.raises(ValueError, match=r"targets: expected shape \[P\] or \[P, K\] for 9 rows, got \[8\]"):
        run(pool.host, [Pass(policy=policy, batch=batch, outputs=(TargetLogprobs(rows_P=rows, targets=every[0][:8]),))])


def drawn(pool: Policies, name: str) -> list[tuple[list[int], list[float]]]:
    pool.engine.submit([Request(prompt=(5, 6, 7), sample_id=j, role=pool.get(name).role) for j in range(3)], HOW)
    rows = sorted(pool.engine.run(), key=lambda row: row.index)
    return [(row.tokens, row.logprobs) for row in rows]


def trained(pool: Policies, name: str, times: int = 1) -> None:
    for t in range(times):
        answers = [SimpleNamespace(prompt=(5, 6, 7), tokens=[3, 4 + t, 5])]
        run(pool.host, [learn_from(pool.get(name), t, answers)])
        pool.step(name, learning_rate=0.05).result(0)


def test_forks_snapshots_and_what_comes_back_from_disk_go_on_as_if_nothing_had_been(tmp_path, monkeypatch):
    pool = make_pool(state=tmp_path)
    add(pool, 0)
    trained(pool, "p0")
    pool.fork("p0", "fork")
    kept = pool.snapshot("p0")
    assert pool.snapshot("p0") is kept
    before = drawn(pool, "p0")
    assert kept.name == "p0@1"
    assert not any(p.requires_grad for p in kept.model.backbone().slots.parameters())
    pool.save("p0")
    trained(pool, "p0", 2)
    trained(pool, "fork", 2)
    after = drawn(pool, "p0")
    assert after == drawn(pool, "fork") != before == drawn(pool, "p0@1")
    assert equal(seen(pool.get("p0")), seen(pool.get("fork")))
    pool.release(kept)
    assert "p0@1" in pool
    pool.release(kept)
    assert "p0@1" not in pool
    known = list[bool]()  # to a server's thread, which does not wait for the lock
    for owner, name in ((pool.engine, "forget"), (pool, "_read")):
        work = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *how, work=work: (known.append("fork" in pool), work(*how))[1])
    pool.evict("fork")
    assert [policy.name for policy in pool] == [BASE, "p0"]
    assert drawn(pool, "fork") == after
    assert len(known) >= 2
    assert all(known)
    trained(pool, "fork")
    trained(pool, "p0")
    assert equal(seen(pool.get("p0")), seen(pool.get("fork")))
    again = make_pool(state=tmp_path)  # as another process would: p0 as it was saved last
    assert sorted(again.names) == [BASE, "fork", "p0"]
    assert drawn(again, "p0") == before
    trained(again, "p0", 2)
    assert drawn(again, "p0") == after
    again.pause("p0")
    again.remove("p0")
    assert not again.paused, "another of this name is served"
    assert "p0" not in make_pool(state=tmp_path)
    last = make_pool(state=tmp_path)
    (last.evicted["fork"] / "optimizer.safetensors").write_bytes(b"spoilt")
    with (
        pytest.warns(UserWarning, match=r"policy 'fork': .*optimizer.safetensors"),
        pytest.raises(
            EngineError, match=r"^policy 'fork': expected a checkpoint that can be read, got one that cannot$"
        ),
    ):
        last.get("fork")
    assert "fork" in last


def test_what_cannot_be_served_is_refused_and_moves_nobody(tmp_path):
    pool = make_pool(state=tmp_path, max_policies=2)
    add(pool, 0)
    before = drawn(pool, "p0")
    for name in ("p0", BASE, "", "../x", "a/b", ".x", "x" * 101):
        with pytest.raises(ValueError, match="name: expected"):
            pool.add(name)
    with pytest.raises(ValueError, match="policy: expected one of"):
        pool.get("nobody")
    with pytest.raises(ValueError, match="expected a role 'actor' with a slot"):
        pool.add("x", roles={"actor": RoleSpec()})
    with pytest.raises(ValueError, match="expected another than the base"):
        pool.remove(BASE)
    held = [pool.hold(add(pool, 1).name), pool.hold("p0")]
    with pytest.raises(MemoryLimitError, match="within max_policies 2, got 2 policies, 0 of which could go"):
        pool.add("third")
    with pytest.raises(ValueError, match="expected a policy that nobody uses, got 'p1' with 1 users"):
        pool.evict("p1")
    for policy in held:
        pool.release(policy)
    pool.memory = 1
    with pytest.raises(
        MemoryLimitError, match="within max_policies 2 and memory 1, got 2 policies, 2 of which could go"
    ):
        pool.add("third")
    run(pool.host, [learn_from(pool.get("p0"), 0, [SimpleNamespace(prompt=(5,), tokens=[3])])])
    with pytest.raises(ValueError, match="save: expected a policy without gradients that wait for a step"):
        pool.save("p0")
    next(pool.get("p0").model.backbone().slots.parameters()).grad[:] = torch.nan
    with pytest.raises(NonFiniteError, match="gradient of actor is not finite"):
        pool.step("p0", learning_rate=0.1).result(0)
    infinite = dict.fromkeys(("learning_rate", "eps", "weight_decay", "max_grad_norm"), math.inf)
    for option, value in {**infinite, "learning_rate": math.nan, "betas": (0.9, math.nan)}.items():
        with pytest.raises(ValueError, match=f"^{option}: expected .* got "):
            pool.step("p0", **{"learning_rate": 0.1, option: value})
    assert drawn(pool, "p0") == before
    assert pool.get("p0").state.step == 0


def test_a_policy_that_is_removed_in_flight_fails_its_own_requests_alone():
    pool = make_pool()
    for i in range(3):
        add(pool, i)
    long = SamplingConfig(max_completion_length=40, eos_token_ids=())
    with PolicyThread(pool, max_rows=4) as thread:
        heard, gone = threading.Event(), pool.get("p0")
        mine = thread.submit("p0", requests(0, 0) * 4, long, listen=lambda *_: heard.set())
        others = thread.submit("p1", requests(1, 0), long)
        assert heard.wait(60)
        thread.call(lambda: pool.remove("p0")).result(60)
        with pytest.raises(PolicyRemovedError, match="policy 'p0' was removed"):
            mine.answers.result(60)
        answers = others.answers.result(60)
        with pytest.raises(ValueError, match="policy: expected one of"):
            thread.submit("p0", requests(0, 0), long)
        with pytest.raises(PolicyRemovedError, match="policy 'p0' was removed"):
            thread.submit(gone, requests(0, 0), long)
        pool.pause("p2")
        with pytest.raises(BusyError, match="expected one that is not paused, got 'p2'"):
            thread.submit("p2", requests(2, 0), long)
        pool.pause("p2", False)
        thread.submit("p2", requests(2, 0), long).answers.result(60)
        assert thread.owed == 0
    pool.engine.submit(
        [Request(prompt=r.prompt, sample_id=r.sample_id, role=pool.get("p1").role) for r in requests(1, 0)], long
    )
    alone = sorted(pool.engine.run(), key=lambda row: row.index)
    assert [(a.tokens, a.logprobs) for a in answers] == [(a.tokens, a.logprobs) for a in alone]
    with pytest.raises(EngineError, match="was closed"):
        thread.submit("p1", requests(1, 0), long)


def test_what_is_asked_for_while_a_turn_begins_is_done(monkeypatch):
    """A turn between `call`'s first line and its lock, in which the thread takes what it was asked for so far."""
    with PolicyThread(make_pool()) as thread:

        def promise_late():
            monkeypatch.undo()
            assert thread.call(lambda: 1).result(60) == 1
            return promise()

        monkeypatch.setattr("rlhf_engine.policy.thread.promise", promise_late)
        assert thread.call(lambda: 2).result(60) == 2
        with pytest.raises(SystemExit):
            thread.call(lambda: sys.exit(3)).result(60)
        assert thread.call(lambda: 4).result(60) == 4
        batch, base = PackedBatch.from_lists([[5]], [[6]]), thread.policies.get(BASE)
        unknown = TargetLogprobs(role="nobody", rows_P=torch.tensor([0]), targets=torch.tensor([6]))
        for outputs, message in (((), "outputs: expected at least one"), ((unknown,), "nobody")):
            with pytest.raises(ValueError, match=message):
                thread.compute(Pass(policy=base, batch=batch, outputs=outputs)).result(60)


def test_one_request_does_not_wait_for_the_thousand_of_another_policy():
    pool = make_pool()
    add(pool, 0)
    add(pool, 1)
    done = []
    with PolicyThread(pool, max_rows=4) as thread:
        many = thread.submit("p0", [Request(prompt=(5, 6), sample_id=j) for j in range(200)], HOW)
        one = thread.submit("p1", [Request(prompt=(7,), sample_id=0)], HOW)
        one.answers.add_done_callback(lambda _: done.append(len(many.rows)))
        many.answers.result(60)
        with pytest.raises(BusyError, match="expected at most 1000000 tokens to wait"):
            thread.submit("p0", [Request(prompt=(5,), sample_id=0, max_completion_length=60)] * 20_000, HOW)
        with pytest.raises(ValueError, match="expected token ids of 0 to"):
            thread.submit("p0", [Request(prompt=(VOCAB,), sample_id=0)], HOW)
    assert done[0] <= 8


def test_rows_that_do_not_fit_into_memory_begin_again_fewer_at_a_time(monkeypatch):
    pool = make_pool()
    add(pool, 0)
    step, most = pool.engine.step, []

    def limited():
        most.append(len(pool.engine.writing()) + len(pool.engine._admission.waiting))
        if most[-1] > 3:
            pool.engine._clear()
            raise MemoryLimitError("no room")
        return step()

    asked = [Request(prompt=(5, 6), sample_id=j) for j in range(11)]
    with PolicyThread(pool) as thread:
        with monkeypatch.context() as tables:
            tables.setattr(LiveRows, "widen", lambda *_: (_ for _ in ()).throw(MemoryError("no room for tables")))
            with pytest.raises(MemoryError, match="no room for tables"):
                thread.submit("p0", asked, HOW).answers.result(60)
        assert pool.engine.finished, "nothing stays behind"
        whole = [(a.tokens, a.logprobs) for a in thread.submit("p0", asked, HOW).answers.result(60)]
        monkeypatch.setattr(pool.engine, "step", limited)
        again = [(a.tokens, a.logprobs) for a in thread.submit("p0", asked, HOW).answers.result(60)]
        monkeypatch.setattr(pool.engine, "step", lambda: (_ for _ in ()).throw(MemoryLimitError("no room at all")))
        with pytest.raises(MemoryLimitError, match="no room at all"):
            thread.submit("p0", asked[:1], HOW).answers.result(60)
    assert whole == again
    assert max(most) == 11


def test_a_pass_that_fails_leaves_the_others_their_results_and_gradients():
    pool = make_pool()
    passes = []
    for i in range(3):
        policy = add(pool, i)
        passes.append(learn_from(policy, i, [SimpleNamespace(prompt=r.prompt, tokens=[3, 4]) for r in requests(i, 0)]))
    long = PackedBatch.from_lists([[5] * 600], [[3]])
    bad = Pass(policy=passes[1].policy, batch=long, outputs=passes[1].outputs)
    worse = Pass(policy=passes[2].policy, batch=passes[2].batch, outputs=passes[2].outputs, loss=lambda _: 1 / 0)
    with PolicyThread(pool) as thread:
        with thread.engine.between_steps():  # all of them wait at once
            blocked = thread.call(lambda: run(pool.host, [passes[0]]))
            done = [thread.compute(each) for each in (passes[0], bad, worse)]
        blocked.result(60)
        done[0].result(60)
        with pytest.raises(ValueError, match="expected sequences of at most 64 tokens"):
            done[1].result(60)
        with pytest.raises(ZeroDivisionError):
            done[2].result(60)
    twice = [p.grad.clone() for p in passes[0].policy.model.backbone().slots.parameters()]
    passes[0].policy.optimizer.adamw.zero_grad()
    run(pool.host, [passes[0]])
    once = [p.grad for p in passes[0].policy.model.backbone().slots.parameters()]
    assert equal(twice, [2 * g for g in once])
    assert not passes[2].policy.has_gradient


def test_the_log_of_a_thread_is_decided_again_with_the_same_answers_out_of_exact_mode_too():
    events = list[str]()
    pool = make_pool(exact=False)
    for i in range(3):
        add(pool, i)
    with PolicyThread(pool, max_rows=5, log=lambda event: events.append(json.dumps(event))) as thread:
        tickets = [thread.submit(f"p{t % 3}", requests(t, t), HOW) for t in range(9)]
        thread.cancel(tickets[4])
        n = sum(len(t.answers.result(60)) for i, t in enumerate(tickets) if i != 4)
    assert len(events) > 20
    again = make_pool(exact=False)
    for i in range(3):
        add(again, i)
    assert replay(map(json.loads, events), again) >= n
    spoilt = [event.replace('"tokens": [', '"tokens": [1, ') for event in events]
    with pytest.raises(ValueError, match="events: expected tokens"):
        replay(map(json.loads, spoilt), again)


def test_a_step_waits_for_answers_of_fixed_weights_and_nothing_is_added_to_its_gradients_meanwhile():
    pool = make_pool()
    role = add(pool, 0).role
    learn = learn_from(pool.get("p0"), 0, [SimpleNamespace(prompt=(5, 6), tokens=[3, 4])])
    pool.engine.submit([Request(prompt=(5, 6), sample_id=0, role=role, weights="fixed")], HOW)
    pool.engine.step()
    run(pool.host, [learn])
    done = pool.step("p0", learning_rate=0.1)
    assert not done.done()
    with pytest.raises(BusyError, match="expected the step before of policy 'p0' to be done"):
        pool.step("p0", learning_rate=0.1)
    with pytest.raises(BusyError, match="policy 'p0': expected its step to be done before further gradients"):
        run(pool.host, [learn])
    (answer,) = pool.engine.run()
    assert set(answer.versions) == {0}
    assert done.result(0).keys() == {"grad_norm/actor", "grad_clipped/actor"}
    assert pool.get("p0").state.step == 1


def test_a_listener_that_raises_and_a_thread_that_breaks_off_leave_nobody_waiting(monkeypatch):
    pool = make_pool()
    add(pool, 0)
    add(pool, 1)
    thread = PolicyThread(pool, max_rows=4)
    bad = thread.submit("p0", requests(0, 0), HOW, listen=lambda *_: 1 / 0)
    good = thread.submit("p1", requests(1, 0), HOW)
    with pytest.raises(ZeroDivisionError):
        bad.answers.result(60)
    assert len(good.answers.result(60)) == len(requests(1, 0))
    assert thread.owed == 0
    monkeypatch.setattr(threading, "excepthook", lambda *_: None)
    monkeypatch.setattr(pool.engine, "submit", lambda *_, **__: [].pop())
    waiting = thread.submit("p1", requests(1, 0), HOW)
    with pytest.raises(EngineError, match="the thread of the policies broke off: IndexError"):
        waiting.answers.result(60)
    with pytest.raises(EngineError, match="was closed"):
        thread.call(lambda: None)
    thread.close()
    assert not thread.is_alive
