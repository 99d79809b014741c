"""Measure what HTTP costs: 16 clients of an endpoint against the same requests to the thread of the policies itself.

    python bench/many_policies.py --http path/to/model --out serve_http.jsonl                # 5 minutes each way
    python bench/many_policies.py --http path/to/model --seconds 15 --rounds 2

Rounds take turns. The clients are threads, of another process where they speak HTTP, so that the server's CPU is its
own. In exact mode every answer has to be the one of the other way, token by token.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from arms import append
from rlhf_kernels.runtime.registry import Settings

from rlhf_engine.data.tokenize import eos_token_ids, load_tokenizer
from rlhf_engine.hydra import HydraModel, RoleSpec, SlotConfig
from rlhf_engine.policy.pool import BASE, Policies
from rlhf_engine.policy.thread import PolicyThread
from rlhf_engine.rollout import Request, SamplingConfig
from rlhf_engine.serve.app import Service
from rlhf_engine.serve.server import running

Asked = tuple[str, list[int], int, int]  # policy, prompt, most tokens, seed
Answered = tuple[int, list[int], float]  # number of the request, tokens, seconds


def request_of(client: int, number: int, policies: int, vocabulary: int) -> Asked:
    """Request of a client: short and long prompts and answers by turns."""
    rng = random.Random(f"{client} {number}")
    prompt = [rng.randrange(3, vocabulary) for _ in range(rng.choice((4, 16, 64, 128)))]
    return f"p{client % policies}", prompt, rng.choice((8, 32, 64, 128)), rng.randrange(2**31)


def ask_all(ask: Callable[[Asked], list[int]], clients: int, seconds: float, sizes: tuple[int, int]) -> dict[str, Any]:
    """Let all clients ask, each its next request once the last is answered, and end the requests that have begun."""
    ready, began = threading.Barrier(clients), time.perf_counter()

    def run(client: int) -> list[Answered]:
        found = list[Answered]()
        ready.wait()
        end = time.perf_counter() + seconds
        for number in itertools.count():
            then = time.perf_counter()
            if then >= end:
                return found
            tokens = ask(request_of(client, number, *sizes))
            found.append((number, tokens, time.perf_counter() - then))
        raise AssertionError("numbers do not end")

    with ThreadPoolExecutor(clients) as pool:
        answers = {i: found for i, found in enumerate(pool.map(run, range(clients)))}
    return {"answers": answers, "seconds": time.perf_counter() - began}


def over_http(url: str, clients: int, seconds: float, sizes: tuple[int, int]) -> dict[str, Any]:
    """The same in a process of clients."""
    import httpx2

    local = threading.local()

    def ask(asked: Asked) -> list[int]:
        if not hasattr(local, "client"):
            local.client = httpx2.Client(base_url=url, trust_env=False, timeout=600)
        policy, prompt, most, seed = asked
        body = {"model": policy, "prompt": prompt, "max_tokens": most, "seed": seed, "return_token_ids": True}
        reply = local.client.post("/v1/completions", json=body)
        reply.raise_for_status()
        return list(reply.json()["choices"][0]["token_ids"])

    return ask_all(ask, clients, seconds, sizes)


def summary(found: dict[str, Any], cpu: float) -> dict[str, float]:
    """Tokens a second, latencies and this process's CPU of one round."""
    answers = [answer for each in found["answers"].values() for answer in each]
    seconds = sorted(answer[2] for answer in answers)
    tokens = sum(len(answer[1]) for answer in answers)
    return {
        "samples": len(answers), "tokens_per_second": tokens / found["seconds"],
        "cpu_ms_a_sample": 1e3 * cpu / len(answers), "cpu_us_a_token": 1e6 * cpu / tokens,
        "p50_ms": 1e3 * statistics.median(seconds), "p99_ms": 1e3 * seconds[int(0.99 * (len(seconds) - 1))],
    }  # fmt: skip


def main() -> None:
    """Take turns, compare answers, and print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--policies", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=300.0, help="of a round")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.model)
    with Settings(exact=True).used():
        host = HydraModel.from_pretrained(str(args.model), roles={BASE: RoleSpec()})
    policies, ends = Policies(host), eos_token_ids(tokenizer, host.backbone().model)
    for i in range(args.policies):
        policies.add(f"p{i}", slots={"actor": SlotConfig(r=8)}, seed=i)
    options = (args.clients, args.seconds, (args.policies, host.backbone().vocabulary))
    rounds: dict[str, list[dict[str, float]]] = {"in_process": [], "http": []}
    known: dict[tuple[int, int], list[int]] = {}
    with (
        PolicyThread(policies) as thread,
        running(Service(thread, tokenizer, name="base")) as url,
        multiprocessing.get_context("spawn").Pool(1) as others,
    ):

        def ask(asked: Asked) -> list[int]:
            policy, prompt, most, seed = asked
            how = SamplingConfig(max_completion_length=most, eos_token_ids=ends, seed=seed)
            given = [Request(prompt=tuple(prompt), sample_id=0, keep=True)]
            return thread.submit(policy, given, how).answers.result()[0].tokens

        ask_all(ask, args.clients, 2.0, options[2])
        for turn in range(2 * args.rounds):
            name, before = ("in_process", "http")[turn % 2], time.process_time()
            found = ask_all(ask, *options) if name == "in_process" else others.apply(over_http, (url, *options))
            rounds[name].append(summary(found, time.process_time() - before))
            print(name, {key: round(value, 2) for key, value in rounds[name][-1].items()}, flush=True)
            for client, answers in found["answers"].items():
                assert [number for number, _, _ in answers] == list(range(len(answers))), "an answer was lost"
                for number, tokens, _ in answers:
                    assert known.setdefault((client, number), tokens) == tokens, "another answer to the same request"
        assert (thread.owed, thread.n_live) == (0, 0)
    mean = {name: {key: statistics.fmean(r[key] for r in each) for key in each[0]} for name, each in rounds.items()}
    ratio = mean["http"]["tokens_per_second"] / mean["in_process"]["tokens_per_second"]
    more = mean["http"]["cpu_ms_a_sample"] - mean["in_process"]["cpu_ms_a_sample"]
    print(
        f"HTTP over in process: {ratio:.3f} of the tokens/s, {more:+.2f} ms of CPU a sample, no answer lost or changed"
    )
    append(
        args.out, study="serve_http", options=vars(args) | {"model": args.model.name, "out": None}, **mean, ratio=ratio
    )


if __name__ == "__main__":
    main()
