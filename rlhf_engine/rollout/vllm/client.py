"""HTTP to a server that draws or judges, and the endpoints of a vLLM server.

A whole answer comes by a deadline, a request is sent again after what passes, and several end together. The timeout of
httpx2 is one of each read, which a server that sends a byte now and then never meets. A timer therefore breaks off the
connection at the request's deadline. Nothing is redirected, and proxies of the environment are not used.

A request may be sent again if it is independent of others and has its own seed: the answer is then the one that was
lost. A late answer is not asked for again; from the same seed it would be as late.

Of a vLLM server (`vllm serve`, its `entrypoints/openai`):

* An answer's ids stand in `token_ids` since 0.10.2 (asked for by `return_token_ids`), before that only in the names of
  its log-probs, `token_id:17` (`return_tokens_as_token_ids`). Both are asked for; where both come they must agree.
* What a request leaves open is filled in from the model's `generation_config.json`, so every option is sent.
* Log-probs are of the distribution that was drawn from only with `--logprobs-mode processed_logprobs`.
* Ids that end an answer are part of it; texts are found in the tokens that completed them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rlhf_engine.errors import ConfigError, RolloutServerError
from rlhf_engine.rollout.request import SamplingConfig


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


# ---- vLLM ------------------------------------------------------------------------------------------------------------

VLLM = Server(
    kind="a vLLM server",
    option="vllm_server_base_url",
    timeout_option="max_completion_length",
    key_variable="VLLM_API_KEY",  # as the server itself reads it
)
RUNTIME_LORA = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"

_LOWEST = -9999.0  # number that the server writes in place of −∞
_SHOWN = 200  # most characters of an answer in a message


class ServedModel(NamedTuple):
    """One entry of /v1/models."""

    name: str
    root: str | None  # path that it was loaded from, where the server says
    parent: str | None  # the base of an adapter; None for a base
    max_model_len: int | None


class Completion(NamedTuple):
    """One answer."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    stop_reason: int | str | None


def sampling_body(sampling: SamplingConfig, *, seed: int, greedy: bool = False) -> dict[str, Any]:
    """Fields of a request that set how an answer is drawn. Raises ValueError for what the server would do otherwise."""
    if greedy and sampling.temperature != 1:
        raise ValueError(
            "greedy: expected temperature 1, at which a vLLM server reports the log-probs of greedy tokens, got "
            f"{sampling.temperature}"
        )
    if sampling.stop and sampling.min_completion_length > 1:
        raise ValueError(
            "min_completion_length: expected none together with stop texts, which a vLLM server does not look for "
            f"before as many tokens, got {sampling.min_completion_length}"
        )
    return {
        "max_tokens": sampling.max_completion_length,
        # an end may be drawn once so many tokens stand before it
        "min_tokens": max(0, sampling.min_completion_length - 1),
        "temperature": 0.0 if greedy else sampling.temperature,
        "top_k": -1 if sampling.top_k is None else sampling.top_k,
        "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        "min_p": sampling.min_p or 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": seed,
        "stop": list(sampling.stop),
        # ends are those of the run, not those of the server's model
        "stop_token_ids": list(sampling.eos_token_ids),
        "ignore_eos": True,
    }


class VllmClient:
    """Requests to one server, of several threads, tried thrice but for `unload_adapter`; RolloutServerError else."""

    def __init__(self, base_url: str, *, timeout: float) -> None:
        """base_url: http(s)://host:port, with or without /v1. timeout: seconds within which all of an answer comes."""
        self.url, self.timeout = base_url, timeout
        self._http = Transport(base_url, VLLM, timeout=timeout)

    def health(self) -> None:
        """Raise RolloutServerError unless a server is up at the address."""
        status, body = self._http.exchange("GET", "/health", again=True)
        if status != 200:
            raise self._http.error(f"expected a healthy server, got status {status}{_said(body)}")

    def models(self) -> list[ServedModel]:
        """Bases and adapters that are served now."""
        data = self._json("GET", "/v1/models").get("data")
        if not isinstance(data, list) or not all(isinstance(m, dict) and isinstance(m.get("id"), str) for m in data):
            raise self._http.error(f"expected a list of models with ids from /v1/models, got {_short(data)}")
        return [ServedModel(m["id"], *(m.get(field) for field in ServedModel._fields[1:])) for m in data]

    def load_adapter(self, name: str, path: str) -> None:
        """Load a PEFT folder, as the server sees it, under a name."""
        request = {"lora_name": name, "lora_path": path}
        status, body = self._http.exchange("POST", "/v1/load_lora_adapter", request, again=True)
        if status == 200:
            return
        if status == 400 and any(model.name == name for model in self.models()):
            return  # loaded by an attempt whose answer was lost
        if status in (404, 405) and not _is_vllm_error(body):
            raise self._http.error(
                f"expected a server that loads adapters at run time, started with {RUNTIME_LORA}=1 and --enable-lora, "
                f"got status {status} from /v1/load_lora_adapter"
            )
        raise self._http.error(
            f"expected the server to load adapter {name!r} from {path!r}, got status {status}{_said(body)}; it needs "
            "--enable-lora, a --max-lora-rank of at least lora_r, and to see that folder (vllm_adapter_dir "
            "HERE:THERE)"
        )

    def unload_adapter(self, name: str) -> bool:
        """Forget an adapter; False where the server would not (its copy in memory had gone before, for one)."""
        status, _ = self._http.exchange("POST", "/v1/unload_lora_adapter", {"lora_name": name}, again=False)
        return status in (200, 404)

    def complete(
        self,
        model: str,
        prompt: Sequence[int],
        body: Mapping[str, Any],
        *,
        vocabulary: int,
        group: RequestGroup | None = None,
    ) -> Completion:
        """One answer of a served model to a prompt of token ids; body as of `sampling_body`, ended with `group`."""
        wanted = {"n": 1, "logprobs": 1, "return_token_ids": True, "return_tokens_as_token_ids": True}
        request = {"model": model, "prompt": list(prompt), **wanted, **body}
        payload = self._json("POST", "/v1/completions", request, group)
        try:
            return _completion(payload, model, prompt, vocabulary)
        except _Unusable as error:
            raise self._http.error(f"expected {error} from /v1/completions of {model!r}") from error

    def _json(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, group: RequestGroup | None = None
    ) -> dict[str, Any]:
        status, raw = self._http.exchange(method, path, body, again=True, group=group)
        if status != 200:
            raise self._http.error(f"expected an answer from {path}, got status {status}{_said(raw)}")
        try:
            answer = json.loads(raw)
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise self._http.error(f"expected JSON from {path}, got {error} in {_short(raw)}") from error
        if not isinstance(answer, dict):
            raise self._http.error(f"expected a JSON object from {path}, got {_short(answer)}")
        return answer


class _Unusable(ValueError):
    """An answer that does not say what is needed: "<what was expected>, got <what came>"."""


def _completion(payload: Mapping[str, Any], model: str, prompt: Sequence[int], vocabulary: int) -> Completion:
    choices = payload.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise _Unusable(f"one choice, got {_short(choices)}")
    choice = choices[0]
    if payload.get("model", model) != model:
        raise _Unusable(f"an answer of that model, got one of {payload['model']!r}")
    if choice.get("index", 0) != 0:
        raise _Unusable(f"the choice of index 0, got {choice['index']!r}")
    if choice.get("prompt_token_ids") not in (None, list(prompt)):
        raise _Unusable(
            f"an answer to the prompt {_short(list(prompt))}, got one to {_short(choice['prompt_token_ids'])}"
        )
    logprobs = choice.get("logprobs")
    values = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
    if not isinstance(logprobs, dict) or not isinstance(values, list):
        raise _Unusable(f"log-probs of the drawn tokens (logprobs.token_logprobs), got {_short(logprobs)}")
    tokens = _token_ids(choice.get("token_ids"), logprobs.get("tokens"))
    if not tokens:
        raise _Unusable("at least one token, got none")
    unknown = [token for token in tokens if not 0 <= token < vocabulary]
    if unknown:
        raise _Unusable(f"token ids of 0 to {vocabulary - 1}, got {unknown[0]}")
    if len(values) != len(tokens):
        raise _Unusable(f"as many log-probs as tokens, got {len(values)} for {len(tokens)}")
    reason, stop = choice.get("finish_reason"), choice.get("stop_reason")
    if reason not in ("stop", "length"):
        raise _Unusable(f"finish_reason 'stop' or 'length', got {reason!r}")
    return Completion(tokens, tuple(_number(value) for value in values), reason, stop)


def _token_ids(direct: Any, names: Any) -> tuple[int, ...]:
    """Ids of the drawn tokens, by `token_ids` and by the names `token_id:17` of their log-probs."""
    matches = [re.fullmatch(r"token_id:(\d+)", str(name)) for name in names] if isinstance(names, list) else [None]
    named = tuple(int(match[1]) for match in matches if match) if all(matches) else None
    if direct is None:
        if named is None:
            raise _Unusable(
                "token ids, in token_ids (vLLM 0.10.2 and later) or as names 'token_id:17' in logprobs.tokens "
                f"(earlier ones), got {_short(names)}"
            )
        return named
    if not isinstance(direct, list) or not all(type(token) is int for token in direct):
        raise _Unusable(f"a list of integers as token_ids, got {_short(direct)}")
    if named is not None and named != tuple(direct):
        raise _Unusable(f"the same tokens in token_ids and logprobs.tokens, got {_short(direct)} and {_short(names)}")
    return tuple(direct)


def _number(value: Any) -> float:
    if not isinstance(value, (int, float)) or not math.isfinite(value) or value <= _LOWEST:
        raise _Unusable(f"finite log-probs, got {value!r}")
    return float(value)


def _is_vllm_error(raw: bytes) -> bool:
    """Whether an error was written by vLLM, not by the web server in front of it, which knows no such path."""
    answer = _parsed(raw)
    return isinstance(answer, dict) and ("error" in answer or answer.get("object") == "error")


def _said(raw: bytes) -> str:
    """Text of an error's body, to be appended to a message. What it calls above is in the server's log, not here."""
    text = answer = _parsed(raw)
    if isinstance(answer, dict):
        inner = answer.get("error", answer)
        text = inner.get("message") or inner.get("detail") if isinstance(inner, dict) else inner
    return ": " + _short(text).replace("(above)", "(in the server's log)") if text else ""


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (UnicodeDecodeError, json.JSONDecodeError):
        return raw.decode(errors="replace")


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + " …"
