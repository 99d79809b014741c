"""Two Python threads at once get the bits that one gets alone, from all that promises it."""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rlhf_kernels import Segments, linear, linear_logprob, lora_linear
from rlhf_kernels.decode_step import DecodeStep
from rlhf_kernels.runtime import device_tables, registry
from torch import Tensor

from rlhf_engine.generators.work import Snapshot, VersionStore
from rlhf_engine.hydra import HydraModel, Logprobs
from rlhf_engine.rollout import SamplingConfig, generate
from rlhf_engine.user_code import TimedCaller
from tests.conftest import build, random_batch
from tests.kernels.decode_step_cases import SIZES, make_adapters, make_call, make_decoder
from tests.reliability.properties import answers, drawn
from tests.reliability.table import Survived

Job = Callable[[], Any]
SEED = int(os.environ.get("RELIABILITY_SEED", "0"))


def bits(x: Any) -> Any:
    """Tensors as their bytes, within whatever holds them."""
    if isinstance(x, Tensor):
        plain = torch.empty(x.shape, dtype=x.dtype).copy_(x.detach())  # whatever its strides
        return x.dtype, tuple(x.shape), plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return [bits(part) for part in x] if isinstance(x, (list, tuple)) else x


def kernels(n: int) -> Iterator[tuple[str, Job]]:
    """Random calls of every op, whose tensors both threads read; see `properties`."""
    chance = random.Random(SEED)
    for i in range(n):
        case = drawn(chance.choice)
        yield f"{i}: {case}", lambda case=case: answers(case, "cpu", hostile=True)


def gradients() -> Iterator[tuple[str, Job]]:
    """Ops with autograd, on one frozen weight, whose packed copy is made and compared while the other thread reads."""
    generator = torch.Generator().manual_seed(SEED)
    weight, A, B = (torch.randn(*shape, generator=generator) for shape in ((48, 32), (4, 32), (48, 4)))
    x, target = torch.randn(70, 32, generator=generator), torch.arange(70) % 48
    some = Segments(starts=(9,), ends=(61,), slots=(0,))

    def of(run: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Job:
        def job() -> list[Tensor]:
            leaves = [t.clone().requires_grad_() for t in (x, A, B)]
            y = run(*leaves)
            return [y, *torch.autograd.grad(y.square().sum(), leaves, materialize_grads=True)]

        return job

    yield "linear", of(lambda x, A, B: linear(x, weight))
    yield "lora_linear", of(lambda x, A, B: lora_linear(x, weight, None, [A], [B], [0.5], some))
    yield "linear_logprob", of(lambda x, A, B: linear_logprob(x, weight, target, temperature=0.7).logprob)
    for backend in ("reference", "cpu"):

        def settled(backend: str = backend) -> list[Any]:
            with registry.use_backend(backend), registry.use_exact(backend == "cpu"):
                return [registry.default_backend(), registry.is_exact(), linear(x, weight)]

        yield f"settings, {backend}", settled


def steps() -> Iterator[tuple[str, Job]]:
    """Decoding step objects for both threads, each on caches of its own, which are bound anew when another's were."""
    for i, sizes in enumerate(SIZES[:3]):
        for dtype in (torch.float32, torch.bfloat16):
            step = DecodeStep(make_decoder(sizes, dtype), make_adapters(sizes, dtype), backend="cpu")
            for n in (1, 7):
                call = make_call(sizes, n, dtype, 3, seed=SEED + n)

                def job(step: DecodeStep = step, call: Any = call) -> list[Tensor]:
                    keys, values = ([t.clone() for t in caches] for caches in (call.keys, call.values))
                    hidden = [step(*call[:5], keys, values, call.table) for _ in range(20)]
                    return [*hidden, call.entries(keys), call.entries(values)]

                yield f"step {i} {dtype} {n}", job


def models() -> Iterator[tuple[str, Job]]:
    """Scores beside rollouts and gradients, of several roles of one model."""
    model, batch = build(), random_batch(seed=SEED)
    asked = [[5, 6, 7, 8], [9, 3], [5, 6, 7, 8], [11]]

    def gradient(role: str) -> Job:
        def job() -> list[Tensor]:
            (out,) = model(batch, (Logprobs(role=role),), dropout_seed=5)
            parameters = list(model.trainable_parameters(role).values())
            return [out.logprob, *torch.autograd.grad(out.logprob.sum(), parameters, materialize_grads=True)]

        return job

    def drawn(role: str, seed: int, model: HydraModel = model) -> Job:
        def job() -> list[Any]:
            how = SamplingConfig(max_completion_length=6, eos_token_ids=(2, 5), seed=seed)
            rollout = generate(model, asked, how, role=role)
            return [rollout.batch.tokens_T, rollout.logprobs_M, list(rollout.finish_reasons)]

        return job

    for temperature in (1.0, 0.6):
        yield (
            f"score {temperature}",
            lambda t=temperature: list(vars(model.score(batch, temperature=t, exact_kl=t == 1.0)).values()),
        )
    yield "score, few tokens at once", lambda: list(vars(model.score(batch, token_budget=16)).values())
    yield "gradient", gradient("actor")
    yield from ((f"rollout {role} {seed}", drawn(role, seed)) for role in ("actor", "reference") for seed in range(3))


def holders() -> Iterator[tuple[str, Job]]:
    """What holds things for several threads: versions, tables of which few are kept, a caller's own thread."""
    store, tables, caller = VersionStore(), device_tables.Cache(2), TimedCaller("calls")
    for i in range(5):

        def version(i: int = i) -> Any:
            store.add(Snapshot(version=i, tensors={"x": torch.full((3,), float(i))}, ready=None))
            store.keep(range(5))
            return store.get(i).tensors["x"], 0 <= store.newest().version < 5

        def table(i: int = i) -> Tensor:
            made = tables.get((i,), torch.device("cpu"), lambda: (torch.full((4,), i),))
            return made[0]

        yield from ((f"version {i}", version), (f"table {i}", table), (f"call {i}", lambda i=i: caller(lambda: i, 60)))


def differing(jobs: dict[str, Job], rounds: int) -> tuple[int, list[str]]:
    """Calls that two threads have made between them, and those whose bits were not those of the call alone."""
    alone = {name: bits(job()) for name, job in jobs.items()}
    together, wrong, n_calls = threading.Barrier(2), list[str](), [0, 0]

    def work(me: int) -> None:
        order, chance = list(jobs), random.Random(2 * SEED + me)
        for _ in range(rounds):
            chance.shuffle(order)
            together.wait(600)
            for name in order:
                try:
                    if bits(jobs[name]()) != alone[name]:
                        wrong.append(name)
                except Exception as error:  # whatever it is, one thread alone did not see it
                    wrong.append(f"{name}: {error!r}")
                n_calls[me] += 1

    threads = [threading.Thread(target=work, args=(me,)) for me in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert n_calls == [rounds * len(jobs)] * 2
    return sum(n_calls), wrong


def shares_without_a_lock() -> Job:
    """The plant: of two threads that are in it at once, one reads what the other has left."""
    left, inside = list[object](), threading.Barrier(2)

    def job() -> bool:
        mine = object()
        left[:] = [mine]
        if threading.current_thread() is not threading.main_thread():
            inside.wait(600)
        return left == [mine]

    return job


@pytest.mark.parametrize("n", [400, pytest.param(3_000, marks=pytest.mark.long)])
def test_two_threads_get_what_one_gets(n: int, survived: Survived) -> None:
    """n calls of kernels and a quarter as many of each part that stands above them, in each of two threads."""
    assert differing({"plant": shares_without_a_lock()}, 3)[1] == ["plant"] * 3
    before = torch.get_num_threads()
    torch.set_num_threads(2)  # of each: native code shares its work among them
    try:
        parts = [dict(part()) for part in (gradients, steps, models, holders)]  # apart: they meet at what they share
        found = [*(differing(jobs, n // (4 * len(jobs))) for jobs in parts), differing(dict(kernels(n)), 1)]
    finally:
        torch.set_num_threads(before)
    n_calls, wrong = sum(calls for calls, _ in found), [name for _, names in found for name in names]
    print(f"{n_calls} calls, seed {SEED}")
    assert n_calls >= 3.5 * n
    survived("two_threads", n_calls, len(wrong))
    assert not wrong, (SEED, wrong[:20])
