"""Requests to a server that is slow, endless, away for a moment, or given up on."""

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from rlhf_engine.errors import RolloutServerError
from rlhf_engine.rollout.vllm import client as http
from rlhf_engine.rollout.vllm.client import VLLM, RequestGroup, Transport, VllmClient
from tests.rollout import test_vllm
from tests.rollout.test_vllm import PROMPTS, ask, connect, sampling

model, server = test_vllm.model, test_vllm.server
LOAD, UNLOAD, COMPLETIONS = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/completions"


@contextmanager
def answering(send: Callable[[socket.socket], None]) -> Iterator[tuple[str, list[float]]]:
    """(address of a server that reads a request and does this with every connection, when connections came)."""
    came: list[float] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return  # closed
                came.append(time.monotonic())
                with connection, suppress(OSError):  # of a client that has given up
                    connection.recv(65536)
                    send(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}", came
        finally:
            listening.shutdown(socket.SHUT_RDWR)
    thread.join()


def get(url: str, *, timeout: float, again: bool = True) -> tuple[int, bytes]:
    return Transport(url, VLLM, timeout=timeout).exchange("GET", "/x", again=again)


def test_a_byte_now_and_then_is_no_answer_in_time():
    ok = b"HTTP/1.1 200 OK\r\n"
    for start in (b"", ok + b"X: ", ok + b"Content-Length: 100\r\n\r\n", ok + b"\r\n"):

        def send(connection: socket.socket, start: bytes = start) -> None:
            connection.sendall(start)
            for _ in range(40):
                connection.sendall(b"H")
                time.sleep(0.05)

        late = r"from /x within 0\.3 s \(max_completion_length\), got none, or not"
        with answering(send) as (url, came):
            began = time.monotonic()
            with pytest.raises(RolloutServerError, match=late):
                get(url, timeout=0.3)
            assert 0.2 < time.monotonic() - began < 1.5
        assert len(came) == 1  # from the same seed another would be as late


def test_attempts_share_one_deadline(monkeypatch):
    monkeypatch.setattr(http, "PAUSES", (0.2, 30.0))
    with answering(lambda connection: None) as (url, came):
        began = time.monotonic()
        with pytest.raises(RolloutServerError, match=r"got RemoteProtocolError: .*, after 2 attempts"):
            get(url, timeout=1.0)
        assert 0.2 < time.monotonic() - began < 2
    assert len(came) == 2
    assert came[1] - came[0] >= 0.2


def test_an_endless_body_is_not_read(monkeypatch):
    monkeypatch.setattr(http, "MOST_BYTES", 1000)
    for head in ("Content-Length: 1001", "X: y", "Transfer-Encoding: chunked"):
        chunk = b"a\r\n0123456789\r\n" if "chunked" in head else b"0123456789"
        sent = 0

        def send(connection: socket.socket, head: str = head, chunk: bytes = chunk) -> None:
            nonlocal sent
            connection.sendall(f"HTTP/1.1 200 OK\r\n{head}\r\n\r\n".encode())
            while sent < 10_000_000 and "Length" not in head:  # of an announced length nothing has to come
                connection.sendall(chunk * 1000)
                sent += 10_000

        message = "expected an answer of at most 1000 bytes from /x, got more"
        with answering(send) as (url, came), pytest.raises(RolloutServerError, match=message):
            get(url, timeout=20.0)
        assert sent < 10_000_000
        assert len(came) == 1


def test_a_body_of_the_most_bytes_comes_back_whole(monkeypatch):
    monkeypatch.setattr(http, "MOST_BYTES", 1000)
    body = bytes(i % 251 for i in range(1000))
    for head in (b"Content-Length: 1000", b"X: y"):
        raw = b"HTTP/1.1 418 No\r\n" + head + b"\r\n\r\n" + body
        with answering(lambda connection, raw=raw: connection.sendall(raw)) as (url, _):
            assert get(url, timeout=20.0) == (418, body)


def test_no_redirect_is_followed_and_no_proxy_is_used(monkeypatch):
    for name in ("HTTP_PROXY", "ALL_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    raw = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n"
    with answering(lambda connection: connection.sendall(raw)) as (url, came):
        assert get(url, timeout=20.0) == (302, b"")
    assert len(came) == 1


@pytest.mark.usefixtures("short_pauses")
def test_what_passes_is_tried_again(model, server, tmp_path):
    rollouts = connect(model, server, tmp_path)
    rollouts.sync(0)
    expected = ask(rollouts, PROMPTS, sampling())
    for fate in (0, 1, 502, 503, 504):
        for path in ("/health", "/v1/models", COMPLETIONS):
            server.passing[path] = [fate] * 2
        rollouts.client.health()
        assert [served.name for served in rollouts.client.models()] == ["base", rollouts.name]
        rollout = ask(rollouts, PROMPTS, sampling())
        assert rollout.batch.tokens_T.tolist() == expected.batch.tokens_T.tolist()
        assert not any(server.passing.values())


@pytest.mark.usefixtures("short_pauses")
def test_loading_is_tried_again_and_not_done_twice(model, server, tmp_path):
    rollouts = connect(model, server, tmp_path)
    for version, fate in enumerate((0, 1, 503)):
        server.passing[LOAD] = [fate]
        rollouts.sync(version)  # fate 1: loaded, but the answer was lost; the second attempt is told that it is there
        assert list(server.adapters) == [rollouts.name]


@pytest.mark.usefixtures("short_pauses")
def test_a_server_that_stays_away_is_given_up_after_three_attempts(server):
    client = VllmClient(server.url, timeout=20)
    server.passing["/v1/models"] = [0, 0, 0, 0]
    with pytest.raises(RolloutServerError, match=r"got RemoteProtocolError: .*, after 3 attempts"):
        client.models()
    assert len(server.passing["/v1/models"]) == 1
    server.passing["/health"] = [503, 502, 504, 503]
    with pytest.raises(RolloutServerError, match="expected a healthy server, got status 504"):
        client.health()
    assert server.passing["/health"] == [503]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(RolloutServerError, match=r"got ConnectError: .*Connection refused, after 3 attempts"):
        get(url, timeout=20)
    cut_short = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n12345"
    with (
        answering(lambda connection: connection.sendall(cut_short)) as (url, came),
        pytest.raises(RolloutServerError, match=r"received 5 bytes, expected 10\), after 3 attempts"),
    ):
        get(url, timeout=20)
    assert len(came) == 3


def test_other_failures_are_failures_at_once(server):
    for status in (400, 404, 429, 500, 501):
        server.passing["/v1/models"] = [status, status]
        with pytest.raises(RolloutServerError, match=f"got status {status}"):
            VllmClient(server.url, timeout=20).models()
        assert server.passing["/v1/models"] == [status]
    server.passing[UNLOAD] = [0, 0]
    with pytest.raises(RolloutServerError, match=r"got RemoteProtocolError: [^,]*$"):
        VllmClient(server.url, timeout=20).unload_adapter("a")
    assert server.passing[UNLOAD] == [0]


def no_threads_are_left() -> bool:
    deadline = time.monotonic() + 5
    while any(thread.name.startswith("vllm") for thread in threading.enumerate()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_a_failure_does_not_wait_for_the_answers_beside_it(model, server, tmp_path, monkeypatch):
    rollouts = connect(model, server, tmp_path, timeout=60.0)
    rollouts.sync(0)
    answer = server._work

    def work(method: str, path: str, body: dict[str, Any]) -> Any:
        if body["prompt"] == PROMPTS[1]:
            return 500, {}
        server._closing.wait(30)
        return answer(method, path, body)

    monkeypatch.setattr(server, "_work", work)
    began = time.monotonic()
    with pytest.raises(RolloutServerError, match="got status 500"):
        ask(rollouts, PROMPTS, sampling())
    assert time.monotonic() - began < 5
    assert no_threads_are_left()


def test_an_interrupt_ends_the_requests_under_way(model, server, tmp_path):
    rollouts = connect(model, server, tmp_path, timeout=60.0)
    rollouts.sync(0)
    before = len(server.requests(COMPLETIONS))
    server.delays = [30.0] * len(PROMPTS)
    here = threading.get_ident()

    def interrupt() -> None:
        while len(server.requests(COMPLETIONS)) < before + len(PROMPTS):
            time.sleep(0.01)
        signal.pthread_kill(here, signal.SIGINT)

    kept = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        began = time.monotonic()
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            ask(rollouts, PROMPTS, sampling())
        assert time.monotonic() - began < 5
    finally:
        signal.signal(signal.SIGINT, kept)
    assert no_threads_are_left()


def test_what_has_ended_sends_nothing_more(server):
    group = RequestGroup()
    group.end()
    with pytest.raises(RolloutServerError, match="ConnectionAbortedError: the requests beside it have ended"):
        Transport(server.url, VLLM, timeout=20).exchange("POST", COMPLETIONS, {}, again=True, group=group)
    assert server.log == []
    with socket.create_server(("127.0.0.1", 0)) as listening:  # nor does a connection stay open, on which it waits
        transport = Transport(f"http://127.0.0.1:{listening.getsockname()[1]}", VLLM, timeout=20)
        with pytest.raises(RolloutServerError) as error:
            transport.exchange("POST", COMPLETIONS, {}, again=True, group=group)
        assert error.value.__cause__ is not None  # whose traceback would keep the socket alive
        connection, _ = listening.accept()
        with connection:
            connection.settimeout(5)
            assert connection.recv(1) == b""
