"""A server in a process of its own for the tests of this room, what it holds, and clients of every kind."""

import contextlib
import json
import multiprocessing
import os
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import torch

from rlhf_engine.devices import release_memory
from rlhf_engine.policy.pool import BASE
from tests.serve.serving import BODY, CHAT, COMPLETIONS, GENERATE, Place, add, serving
from tests.serve.test_endpoints import joined
from tests.serve.test_kills import PROCESSES, digest, resident
from tests.serve.test_protocol import LONG, TEXT, bodies, until

KEY, CLIENTS, WAITING = "first", 32, 100_000
HONEST = ("one", "two")
"""Policies that nobody removes."""


def sample() -> dict[str, int]:
    """What this process holds now; memory without what malloc keeps for later."""
    release_memory(torch.device("cpu"))
    tasks = [task for task in Path("/proc/self/task").iterdir() if task.exists()]
    children = sum(len((task / "children").read_text().split()) for task in tasks)
    found = {"threads": len(tasks), "files": len(os.listdir("/proc/self/fd")), "children": children}
    return {"memory": resident(), **found}


# ---- the process of the server ---------------------------------------------------------------------------------------


def answer(place: Place, asked: str, rng: random.Random) -> Any:
    """What the test's process asks: a sample, what is left once all is at rest, or that policies come and go."""
    policies, thread = place.policies, place.thread
    if asked == "sample":
        return sample()
    if asked == "rest":
        for name in {*policies.names} - {BASE, *HONEST}:
            policies.remove(name)
        until(lambda: thread.owed == 0)
        held = sum(policy.holders for policy in policies)
        return thread.n_live, thread.n_waiting, held, [digest(policies.get(name)) for name in HONEST]
    guest = f"guest{rng.randrange(4)}"
    with contextlib.suppress(ValueError):  # one that is in use is not evicted
        policies.evict(rng.choice(HONEST))
    if guest not in policies:
        add(policies, guest, rng.randrange(4))
    elif rng.random() < 0.5:
        policies.remove(guest)
    else:
        policies.pause(guest, rng.random() < 0.5)
    return guest


def child(folder: Path, state: Path, keys: list[str], pipe: Connection) -> None:
    """Serve two policies, and answer what comes over the pipe, until it says so."""
    torch.set_num_threads(1)
    rng = random.Random(0)
    with serving(folder, *HONEST, keys=keys, waiting=WAITING, state=state) as place:
        pipe.send(place.url)
        while (asked := pipe.recv()) != "end":
            pipe.send(answer(place, asked, rng))


class Server(NamedTuple):
    """A server in another process."""

    url: str
    ask: Callable[[str], Any]

    def client(self) -> httpx2.Client:
        """Who has the key."""
        return httpx2.Client(
            base_url=self.url, trust_env=False, timeout=120, headers={"Authorization": f"Bearer {KEY}"}
        )


@contextlib.contextmanager
def server(folder: Path, state: Path, *keys: str) -> Iterator[Server]:
    """Start a server with the base of a folder, and end it."""
    ours, theirs = multiprocessing.Pipe()
    process = PROCESSES.Process(target=child, args=(folder, state, list(keys), theirs))
    process.start()
    theirs.close()  # or its death would not be seen

    asking = threading.Lock()

    def ask(what: str) -> Any:
        with asking:
            ours.send(what)
            return ours.recv()

    try:
        yield Server(ours.recv(), ask)
    finally:
        with contextlib.suppress(OSError):
            ours.send("end")
        process.join(60)
        code = process.exitcode
        process.kill()
        assert code == 0, f"the server's process ended with {code}"


# ---- honest clients --------------------------------------------------------------------------------------------------


def cases() -> list[tuple[str, dict[str, Any]]]:
    """Bodies of every kind: texts, chats, tokens, long prompts, several answers, log-probs, streams."""
    found = list[tuple[str, dict[str, Any]]]()
    for i in range(48):
        how = {"model": ["tiny", *HONEST][i % 3], "seed": i, "max_tokens": 3 + i % 11, "n": 1 + i % 4}
        match i % 8:
            case 0:
                talk = [{"role": "user", "content": "red cat"}]
                found.append((CHAT, {**how, "messages": talk, "logprobs": True, "top_logprobs": i % 3}))
            case 1:
                own = {name: how.pop(name) for name in ("seed", "max_tokens", "n")}
                found.append((GENERATE, {**how, "token_ids": [1, 5, 6 + i % 9], "sampling_params": own}))
            case 2:
                found.append((COMPLETIONS, {**how, "prompt": [5 + i % 7] * 50, "temperature": 0.7, "top_p": 0.9}))
            case 3:
                found.append((COMPLETIONS, {**how, "prompt": "the sun", "logprobs": 2, "prompt_logprobs": 1}))
            case 4:
                found.append((COMPLETIONS, {**how, "prompt": ["red cat", "a dog"], "temperature": 0, "echo": True}))
            case _:
                stop = {"prompt": "moon and star", "stop": ["cat", "sun"], "logprobs": 0}
                found.append((COMPLETIONS, {**how, **stop, "stream": i % 2 == 1}))
    return [(path, {**body, **({} if path == GENERATE else {"return_token_ids": True})}) for path, body in found]


def told(client: httpx2.Client, path: str, body: dict[str, Any]) -> Any:
    """An answer without what is new each time; of a stream its choices."""
    if not body.get("stream"):
        reply = client.post(path, json=body)
        known = reply.json().items() if reply.status_code == 200 else [("failed", reply.text)]
        return {name: value for name, value in known if name not in ("id", "created", "request_id")}
    with client.stream("POST", path, json=body) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    chunks = [json.loads(line) for line in lines if line != "[DONE]"]
    return joined(chunks) if lines[-1] == "[DONE]" and all("choices" in chunk for chunk in chunks) else lines


def load(served: Server, expected: Sequence[Any], places: Sequence[int]) -> tuple[list[Any], list[float]]:
    """Have 32 clients ask for the cases at some places; those that are answered otherwise, and all seconds."""
    wrong, seconds, known = list[Any](), list[float](), cases()

    def work(i: int) -> None:
        with served.client() as client:
            for place in places[i::CLIENTS]:
                began = time.perf_counter()
                try:
                    found = told(client, *known[place])
                except (httpx2.HTTPError, ValueError, LookupError, AssertionError) as error:
                    found = repr(error)
                seconds.append(time.perf_counter() - began)
                if found != expected[place]:
                    wrong.append((known[place], expected[place], found))

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(work, range(CLIENTS)))
    return wrong, seconds


# ---- abuse -----------------------------------------------------------------------------------------------------------


class Abuser:
    """A client that does one wrong thing after another; what the server should not have answered is in `wrong`."""

    def __init__(self, served: Server, seed: int) -> None:
        self.served, self.rng, self.bodies = served, random.Random(seed), bodies(seed)
        self.wrong, self.tried, self.slow = list[str](), Counter[str](), list[socket.socket]()

    def work(self, over: threading.Event) -> None:
        """Abuse the server until that event."""
        with self.served.client() as client, contextlib.ExitStack() as stack:
            while not over.is_set():
                kind = self.rng.choice(list(KINDS))
                self.tried[kind] += 1
                try:
                    fault = KINDS[kind](self, client, stack)
                except (httpx2.HTTPError, OSError) as error:
                    fault = repr(error)
                self.wrong += [f"{kind}: {fault}"] * bool(fault)

    def ask(self, client: httpx2.Client, statuses: tuple[int, ...], **options: Any) -> str:
        """A request that is to be answered by one of some statuses."""
        reply = client.post(options.pop("path", COMPLETIONS), **options)
        return "" if reply.status_code in statuses else f"{reply.status_code} {reply.text[:200]}"

    def raw(self, sent: bytes, *, leave: bool = False) -> bytes:
        """Send bytes, and leave or read what comes until the server closes."""
        url = httpx2.URL(self.served.url)
        place = socket.create_connection((url.host, url.port), timeout=60)
        with place, contextlib.suppress(ConnectionError):  # it need not read all
            place.sendall(sent)
            if not leave:
                place.shutdown(socket.SHUT_WR)
                return b"".join(iter(lambda: place.recv(1 << 16), b""))
        return b""

    def malformed(self, client: httpx2.Client, _: Any) -> str:
        path, content = next(self.bodies)
        return self.ask(client, (200, *range(400, 500)), path=path, content=content)

    def leaves(self, client: httpx2.Client, _: Any) -> str:
        with client.stream("POST", COMPLETIONS, json={**LONG, "model": "one", "stream": True, "n": 9}) as reply:
            next(reply.iter_lines())
        return "" if reply.status_code == 200 else str(reply.status_code)

    def cut(self, client: httpx2.Client, _: Any) -> str:
        body = json.dumps({**LONG, "model": "two"}).encode()
        body = body[: self.rng.randrange(len(body) + 1)]
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nContent-Length: "
        self.raw(f"{head}{len(json.dumps({**LONG, 'model': 'two'}))}\r\n\r\n".encode() + body, leave=True)
        return ""

    def slowly(self, client: httpx2.Client, stack: contextlib.ExitStack) -> str:
        """One byte more on each of up to eight connections, which never say a whole request."""
        url = httpx2.URL(self.served.url)
        if len(self.slow) < 8:
            self.slow.append(stack.enter_context(socket.create_connection((url.host, url.port), timeout=60)))
            self.slow[-1].sendall(b"POST /v1/completions HTTP/1.1\r\nX: ")
        with contextlib.suppress(ConnectionError):  # the server may close what takes too long
            for place in self.slow:
                place.sendall(b"a")
        return ""

    def no_http(self, client: httpx2.Client, _: Any) -> str:
        got = self.raw(self.rng.randbytes(self.rng.randrange(1, 400)) + b"\r\n\r\n")
        return "" if not got or got.startswith(b"HTTP/1.1 400") else repr(got[:200])

    def large_head(self, client: httpx2.Client, _: Any) -> str:
        got = self.raw(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\nX: " + b"a" * 200_000 + b"\r\n\r\n")
        return "" if not got or got[:10] in (b"HTTP/1.1 4", b"HTTP/1.1 2") else repr(got[:200])

    def large(self, client: httpx2.Client, _: Any) -> str:
        parts = (b"x" * 10_000 for _ in range(BODY // 10_000 + 2))  # without a length before
        return self.ask(client, (413,), content=b"x" * (BODY + 1) if self.rng.random() < 0.5 else parts)

    def keyless(self, client: httpx2.Client, _: Any) -> str:
        return self.ask(client, (401,), json=TEXT, headers={"Authorization": f"Bearer {self.rng.random()}"})

    def greedy(self, client: httpx2.Client, _: Any) -> str:
        return self.ask(client, (429,), json={"prompt": [[5]] * 300, "n": 128, "model": "one"})

    def guest(self, client: httpx2.Client, _: Any) -> str:
        """A policy that comes, goes, pauses and is being written all the while."""
        body = {**TEXT, "model": f"guest{self.rng.randrange(4)}", "n": 3}
        return self.ask(client, (200, 404, 429), json=body)

    def changes(self, client: httpx2.Client, _: Any) -> str:
        return "" if self.served.ask("change").startswith("guest") else "nothing"


KINDS: dict[str, Callable[[Abuser, httpx2.Client, contextlib.ExitStack], str]] = {
    kind.__name__: kind
    for kind in (
        Abuser.malformed, Abuser.leaves, Abuser.cut, Abuser.slowly, Abuser.no_http, Abuser.large_head, Abuser.large,
        Abuser.keyless, Abuser.greedy, Abuser.guest, Abuser.changes,
    )
}  # fmt: skip
