"""HTTP to a server that draws or judges: a whole answer by a deadline, again after what passes, ended together.

The timeout of `http.client` is one of each read, so a server that sends a byte now and then never meets it. Here every
read has the time that is left of the request's. Only connecting is looser: each address of a host has that time.

A request may be sent again if it is independent of others and has its own seed: the answer is then the one that was
lost. A late answer is not asked for again; from the same seed it would be as late.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

from rlhf_engine.errors import ConfigError, RolloutServerError


@dataclass(frozen=True, kw_only=True)
class Server:
    """Names of a server in messages, and the place of its key."""

    kind: str
    """Such as `a vLLM server`."""
    option: str
    """Option that the user has given the server by; messages begin with it."""
    timeout_option: str
    """Option that the timeout comes from."""
    key_variable: str
    """Environment variable with the server's key: a flag would be kept in the run record."""


PAUSES = (0.25, 1.0)
"""Seconds before a request is sent again, once for each."""
MOST_BYTES = 1 << 26
"""The longest body that is read. A token with its log-probs takes less than 300 bytes."""
_PASSING = (502, 503, 504)
"""Statuses of a server, or of what stands in front of it, that may be up in a moment."""
_CHUNK = 1 << 16
"""Most bytes read at once."""


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
            for sock in self._sockets:
                with contextlib.suppress(OSError):  # of a connection that the server has closed
                    # a TLS socket's own shutdown would take its state from under the thread that reads
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)

    @contextlib.contextmanager
    def holding(self, sock: socket.socket) -> Iterator[None]:
        """Let `end` break off this socket. Raises ConnectionAbortedError after it."""
        with self._lock:
            if self._ended.is_set():
                raise ConnectionAbortedError("the requests beside it have ended")
            self._sockets.add(sock)
        try:
            yield
        finally:
            with self._lock:
                self._sockets.discard(sock)

    def pause(self, seconds: float | None, deadline: float) -> bool:
        """Wait before another attempt; False if there is none to be: no pause left, no time left, or all has ended."""
        if seconds is None or time.monotonic() + seconds >= deadline:
            return False
        return not self._ended.wait(seconds)


class Transport:
    """Requests to one server; may be used by several threads."""

    def __init__(self, base_url: str, server: Server, *, timeout: float) -> None:
        """Make a client of a server; nothing is sent yet.

        Args:
            base_url: http(s)://host:port, with or without /v1.
            server: what the server is called.
            timeout: seconds within which a whole answer has to be there, attempts that failed included.

        Raises:
            ConfigError: an address of another form.
        """
        self.server = server
        parts = urlsplit(base_url)
        try:
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{server.option}: expected a port number, got {base_url!r}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise ConfigError(f"{server.option}: expected an address such as http://localhost:8000, got {base_url!r}")
        self.url = base_url
        self.timeout = timeout
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port = parts.hostname, port
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")

    def exchange(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        again: bool,
        group: RequestGroup | None = None,
    ) -> tuple[int, bytes]:
        """(status, body) of one request, on a connection of its own.

        again: whether it is sent again after a lost or refused connection and after 502, 503 and 504. Raises
        RolloutServerError where no answer comes.
        """
        group = RequestGroup() if group is None else group
        content = None if body is None else json.dumps(body).encode()
        deadline = time.monotonic() + self.timeout
        pauses = iter(PAUSES if again else ())
        attempts = 0
        try:
            while True:
                attempts += 1
                try:
                    status, raw = self._attempt(method, path, content, deadline, group)
                    if status not in _PASSING or not group.pause(next(pauses, None), deadline):
                        break
                except ConnectionError:
                    if not group.pause(next(pauses, None), deadline):
                        raise
        except TimeoutError as error:
            raise self.error(
                f"expected an answer from {path} within {self.timeout:g} s ({self.server.timeout_option}), got "
                "none, or not the whole of it"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            times = f", after {attempts} attempts" if attempts > 1 else ""
            raise self.error(
                f"expected {self.server.kind} that answers {path}, got {type(error).__name__}: {error}{times}"
            ) from error
        if status in (401, 403):
            variable = self.server.key_variable
            raise self.error(f"expected the server's key in the environment variable {variable}, got {status}")
        return status, raw

    def error(self, text: str) -> RolloutServerError:
        """Error to raise about this server: "expected …, got …"."""
        return RolloutServerError(f"{self.server.option} {self.url}: {text}")

    def _attempt(
        self, method: str, path: str, content: bytes | None, deadline: float, group: RequestGroup
    ) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json"}
        key = os.environ.get(self.server.key_variable)
        if key:
            headers["Authorization"] = f"Bearer {key}"
        connection = self._kind(self._host, self._port, timeout=_left(deadline))
        try:
            connection.connect()
            sock = connection.sock
            with group.holding(sock):
                sock.settimeout(_left(deadline))  # sending has it as a whole
                connection.request(method, self._prefix + path, content, headers)
                response = http.client.HTTPResponse(cast(socket.socket, _Incoming(sock, deadline)), method=method)
                with contextlib.closing(response):
                    response.begin()
                    return response.status, self._body(response, path)
        finally:
            connection.close()

    def _body(self, response: http.client.HTTPResponse, path: str) -> bytes:
        body = bytearray()
        while len(body) + (response.length or 0) <= MOST_BYTES:  # length: what is still to come, where that is known
            part = response.read(_CHUNK)
            body += part
            if not part:
                if response.length:
                    raise http.client.IncompleteRead(bytes(body), response.length)
                return bytes(body)
        raise self.error(f"expected an answer of at most {MOST_BYTES} bytes from {path}, got more")


class _Incoming(io.RawIOBase):
    """Stream of what a socket receives before a deadline. Stands in for the socket that an HTTPResponse reads."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock, self._deadline = sock, deadline
        self._raw = sock.makefile("rb", buffering=0)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(_left(self._deadline))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _left(deadline: float) -> float:
    """Seconds until then. Raises TimeoutError if there are none."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the time is over")
    return left
