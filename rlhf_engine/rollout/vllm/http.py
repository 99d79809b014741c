"""HTTP to a server that draws or judges: a whole answer by a deadline, again after what passes, ended together.

httpx2 speaks the protocol. Its timeout is one of each read, so a server that sends a byte now and then never meets it.
A timer therefore breaks off the connection at the request's deadline. Only connecting is looser: each address of a host
has that time. Nothing is redirected, and proxies of the environment are not used.

A request may be sent again if it is independent of others and has its own seed: the answer is then the one that was
lost. A late answer is not asked for again; from the same seed it would be as late.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from rlhf_engine.errors import ConfigError, RolloutServerError


class Server(NamedTuple):
    """Names of a server in messages, and the place of its key."""

    kind: str  # such as `a vLLM server`
    option: str  # that the user has given the server by; messages begin with it
    timeout_option: str
    key_variable: str  # of the environment, with the server's key: a flag would be kept in the run record


PAUSES = (0.25, 1.0)  # seconds before a request is sent again, once for each
MOST_BYTES = 1 << 26  # the longest body that is read. A token with its log-probs takes less than 300 bytes.
_PASSING = (502, 503, 504)  # statuses of a server, or of what stands in front of it, that may be up in a moment


class RequestGroup:
    """Requests of several threads that end together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._ended = threading.Event()

    def end(self) -> None:
        """Break off the connections under way; requests to come fail, and those still connecting once they have."""
        with self._lock:
            self._ended.set()
            _break_off(self._sockets)

    @contextlib.contextmanager
    def holding(self, seconds: float) -> Iterator[Callable[[str, Mapping[str, Any]], None]]:
        """Let `end`, or the end of so many seconds, break off the connection that httpx2 traces to what is yielded."""
        own: list[socket.socket] = []

        def trace(event: str, facts: Mapping[str, Any]) -> None:
            if event not in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
                return
            with self._lock:
                if self._ended.is_set():
                    facts["return_value"].close()  # httpx2 has not taken it over yet
                    raise ConnectionAbortedError("the requests beside it have ended")
                own.append(facts["return_value"].get_extra_info("socket"))
                self._sockets.add(own[-1])

        timer = threading.Timer(seconds, _break_off, [own])
        timer.daemon = True
        timer.start()
        try:
            yield trace
        finally:
            timer.cancel()
            with self._lock:
                self._sockets.difference_update(own)

    def pause(self, seconds: float | None, deadline: float) -> bool:
        """Wait before another attempt; False if there is none to be: no pause left, no time left, or all has ended."""
        if seconds is None or time.monotonic() + seconds >= deadline:
            return False
        return not self._ended.wait(seconds)


def _break_off(sockets: Iterable[socket.socket]) -> None:
    for sock in sockets:
        with contextlib.suppress(OSError):  # of a connection that is closed
            # a TLS socket's own shutdown would take its state from under the thread that reads
            socket.socket.shutdown(sock, socket.SHUT_RDWR)


class Transport:
    """Requests to one server; may be used by several threads."""

    def __init__(self, base_url: str, server: Server, *, timeout: float) -> None:
        """Make a client of http(s)://host:port, with or without /v1; `timeout` seconds include attempts that failed."""
        import httpx2  # in three places: most processes call no server

        self.server, self.url, self.timeout = server, base_url, timeout
        try:
            url = httpx2.URL(base_url)
        except httpx2.InvalidURL as error:
            raise ConfigError(f"{server.option}: expected an address, got {base_url!r}: {error}") from error
        if url.scheme not in ("http", "https") or not url.host or url.query or url.userinfo:
            raise ConfigError(f"{server.option}: expected an address such as http://localhost:8000, got {base_url!r}")
        self._client = httpx2.Client(
            base_url=url.copy_with(path=url.path.rstrip("/").removesuffix("/v1")),
            verify=ssl.create_default_context() if url.scheme == "https" else False,
            trust_env=False,
            # a connection for each request
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
            headers={"Content-Type": "application/json", "Accept-Encoding": "identity"},
        )

    def exchange(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        again: bool,
        group: RequestGroup | None = None,
    ) -> tuple[int, bytes]:
        """(status, body) of one request; `again` after a lost or refused connection, 502, 503 or 504."""
        import httpx2

        group = RequestGroup() if group is None else group
        content = None if body is None else json.dumps(body).encode()
        deadline = time.monotonic() + self.timeout
        for attempts, pause in enumerate((*PAUSES, None) if again else (None,), 1):
            try:
                status, raw = self._attempt(method, path, content, deadline, group)
                if status not in _PASSING or not group.pause(pause, deadline):
                    break
            except (httpx2.TransportError, ConnectionAbortedError) as error:
                if isinstance(error, httpx2.TimeoutException) or time.monotonic() >= deadline:
                    limit = f"{self.timeout:g} s ({self.server.timeout_option})"
                    said = f"expected an answer from {path} within {limit}, got none, or not the whole of it"
                    raise self.error(said) from error
                if not group.pause(pause, deadline):
                    got = f"{type(error).__name__}: {error}" + (f", after {attempts} attempts" if attempts > 1 else "")
                    raise self.error(f"expected {self.server.kind} that answers {path}, got {got}") from error
        if status in (401, 403):
            key = f"the server's key in the environment variable {self.server.key_variable}"
            raise self.error(f"expected {key}, got {status}")
        return status, raw

    def error(self, text: str) -> RolloutServerError:
        """Error to raise about this server: "expected …, got …"."""
        return RolloutServerError(f"{self.server.option} {self.url}: {text}")

    def _attempt(
        self, method: str, path: str, content: bytes | None, deadline: float, group: RequestGroup
    ) -> tuple[int, bytes]:
        key = os.environ.get(self.server.key_variable)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        left = max(1e-3, deadline - time.monotonic())
        with group.holding(left) as trace:
            request = self._client.build_request(
                method, path, content=content, headers=headers, timeout=left, extensions={"trace": trace}
            )
            with contextlib.closing(self._client.send(request, stream=True)) as response:
                length, body = int(response.headers.get("Content-Length", 0)), bytearray()
                for part in response.iter_raw() if length <= MOST_BYTES else ():
                    body += part
                    if len(body) > MOST_BYTES:
                        break
                if max(length, len(body)) > MOST_BYTES:
                    raise self.error(f"expected an answer of at most {MOST_BYTES} bytes from {path}, got more")
                if time.monotonic() >= deadline:  # of a body without a length, breaking off looks like the end
                    raise ConnectionAbortedError("the time is over")
                return response.status_code, bytes(body)
