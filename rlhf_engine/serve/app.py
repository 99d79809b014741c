"""The web application: OpenAI's endpoints, vLLM's for tokens, health, metrics and a status page."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from transformers import PreTrainedTokenizerBase

from rlhf_engine.devices import peak_memory_bytes
from rlhf_engine.errors import BusyError, CorruptCheckpointError, EngineError, MemoryLimitError, PolicyRemovedError
from rlhf_engine.policy.pool import BASE, LivePolicy, Policies
from rlhf_engine.policy.thread import PolicyThread
from rlhf_engine.serve.answers import Reply
from rlhf_engine.serve.protocol import Asked, BadRequestError, Reader, parse_json

MOST_BODY = 16 * 2**20
"""Most bytes of a body."""
_LARGE = 1 << 16
"""Bytes of a body beyond which another thread reads it."""
_POINTS, _SECONDS = 300, 2.0  # points of the page's curves, and seconds between two


class Service:
    """What the endpoints of one server have in common."""

    def __init__(
        self,
        thread: PolicyThread,
        tokenizer: PreTrainedTokenizerBase,
        reader: Reader,
        *,
        name: str,
        keys: Sequence[str] = (),
        most_body: int = MOST_BODY,
    ) -> None:
        """name: of the base among the models. keys: of clients, any of which is needed; none: nobody needs one."""
        self.thread, self.tokenizer, self.reader, self.name = thread, tokenizer, reader, name
        self._keys, self._most_body = [key.encode() for key in keys], most_body
        self.requests = Counter[tuple[str, int]]()
        """Requests so far by endpoint and status."""
        self._began = time.time()
        self.history = deque[tuple[float, float, int, int]](maxlen=_POINTS)
        """Time, tokens a second, requests that are written and that wait."""

    def app(self) -> Starlette:
        """The application, for an ASGI server."""
        routes = [
            Route("/v1/models", self._answer(self.models)),
            Route("/v1/models/{name:path}", self._answer(self.models)),
            Route("/v1/completions", self._answer(self.completions), methods=["POST"]),
            Route("/v1/chat/completions", self._answer(self.chat), methods=["POST"]),
            Route("/inference/v1/generate", self._answer(self.generate), methods=["POST"]),
            Route("/health", self.health),
            Route("/metrics", self._answer(self.metrics)),
            Route("/status", self._answer(self.status)),
            Route("/", self.page),
        ]
        handlers: dict[Any, Any] = {404: self._no_such_place, 405: self._no_such_place}
        return Starlette(routes=routes, exception_handlers=handlers, lifespan=self._life)

    @contextlib.asynccontextmanager
    async def _life(self, _: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            task.cancel()

    async def _watch(self) -> None:
        tokens, then = self.thread.tokens, time.monotonic()
        while True:
            await asyncio.sleep(_SECONDS)
            now, drawn = time.monotonic(), self.thread.tokens
            speed = (drawn - tokens) / (now - then)
            self.history.append((time.time(), speed, self.thread.n_live, self.thread.n_waiting))
            tokens, then = drawn, now

    # ---- requests --------------------------------------------------------------------------------------------------

    def _answer(self, work: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """An endpoint that needs a key, and answers an error with OpenAI's object."""

        async def endpoint(request: Request) -> Response:
            try:
                self._require_key(request)
                response = await work(request)
            except BadRequestError as error:
                response = JSONResponse(error.body(), status_code=error.status)
            except ClientDisconnect:
                response = Response(status_code=499)
            self.requests[request.url.path.partition("/v1/models")[0] or "/v1/models", response.status_code] += 1
            return response

        return endpoint

    def _require_key(self, request: Request) -> None:
        if not self._keys:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # each is compared, in constant time, so that the time tells nothing
        known = [hmac.compare_digest(given.strip().encode("latin-1"), key) for key in self._keys]
        if scheme.lower() != "bearer" or not any(known):
            raise BadRequestError(
                "authorization: expected 'Bearer KEY' with a key of this server, got none", status=401
            )

    async def _body(self, request: Request) -> bytes:
        parts, size = list[bytes](), 0
        async for part in request.stream():
            size += len(part)
            if size > self._most_body:
                raise BadRequestError(f"body: expected at most {self._most_body} bytes, got more", status=413)
            parts.append(part)
        return b"".join(parts)

    async def _drawn(self, request: Request, kind: str, read: Callable[[Any], Asked]) -> Response:
        """Answer a body, whole or as a stream."""
        raw = await self._body(request)
        with _as_errors():
            if len(raw) > _LARGE:  # the loop of all requests does not wait for it
                asked = self._named(await asyncio.to_thread(lambda: read(parse_json(raw))))
            else:
                asked = self._named(read(parse_json(raw)))
            answers = Reply(self.thread, self.tokenizer, asked, kind)
            if asked.stream:
                return _Stream(answers, await answers.begin_stream())
            drawing, leaving = asyncio.ensure_future(answers.whole()), asyncio.ensure_future(_until_gone(request))
            try:
                await asyncio.wait({drawing, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if not drawing.done():
                    raise ClientDisconnect
                return JSONResponse(drawing.result())
            finally:
                leaving.cancel()
                drawing.cancel()
                answers.end()

    def _named(self, asked: Asked) -> Asked:
        """The same, of the policy that the body names; no name, and the base's, are the base."""
        policy = BASE if asked.model in ("", self.name) else asked.model
        if policy not in self.thread.policies:
            names = [self.name, *(name for name in self.thread.policies.names if name != BASE)]
            raise BadRequestError(
                f"model: expected one of {names}, got {asked.model[:100]!r}", status=404, code="model_not_found"
            )
        return replace(asked, policy=policy, model=asked.model or self.name)

    async def completions(self, request: Request) -> Response:
        """OpenAI's completions."""
        return await self._drawn(request, "cmpl", self.reader.completion)

    async def chat(self, request: Request) -> Response:
        """OpenAI's chat completions."""
        return await self._drawn(request, "chatcmpl", self.reader.chat)

    async def generate(self, request: Request) -> Response:
        """vLLM's endpoint from tokens to tokens."""
        return await self._drawn(request, "gen", self.reader.tokens)

    async def models(self, request: Request) -> Response:
        """OpenAI's list of models, or one of them."""
        policies, created = self.thread.policies, int(self._began)
        data = [
            {
                "id": self.name if name == BASE else name, "object": "model", "created": created,
                "owned_by": "rlhf-engine", "root": self.name, "parent": None if name == BASE else self.name,
                "max_model_len": self.reader.context,
            }
            for name in policies.names
        ]  # fmt: skip
        wanted = request.path_params.get("name")
        if wanted is None:
            return JSONResponse({"object": "list", "data": data})
        found = next((model for model in data if model["id"] == wanted), None)
        if found is None:
            message = f"model: expected one of {[model['id'] for model in data]}, got {wanted[:100]!r}"
            raise BadRequestError(message, status=404, code="model_not_found")
        return JSONResponse(found)

    # ---- who looks after it ----------------------------------------------------------------------------------------

    async def health(self, _: Request) -> Response:
        """200 while the thread of the policies runs."""
        return Response(status_code=200 if self.thread.is_alive else 503)

    def facts(self) -> dict[str, Any]:
        """What the status page shows."""
        thread, policies = self.thread, self.thread.policies
        pool, block = thread.engine.cache_use()
        return {
            "model": self.name,
            "exact": thread.engine.backbone.kernels.exact,
            "seconds": time.time() - self._began,
            "tokens": thread.tokens,
            "turns": thread.turns,
            "live": thread.n_live,
            "waiting": thread.n_waiting,
            "owed_tokens": thread.owed,
            "cache_bytes_used": pool * block,
            "peak_memory_bytes": peak_memory_bytes(thread.engine.backbone.device),
            "policies": [
                {
                    "name": self.name if policy.name == BASE else policy.name, "steps": policy.state.step,
                    "bytes": 0 if policy.name == BASE else policy.n_bytes, "users": policy.holders,
                    "state": _state(policy, policies),
                }
                for policy in policies
            ] + [{**_ON_DISK, "name": name} for name in list(policies.evicted)],
            "requests": [[*key, n] for key, n in sorted(self.requests.items())],
            "history": list(self.history),
        }  # fmt: skip

    async def status(self, _: Request) -> Response:
        """The facts of the page, in JSON."""
        return JSONResponse(self.facts())

    async def metrics(self, _: Request) -> Response:
        """Prometheus' text format."""
        facts = self.facts()
        kinds = {"tokens": "counter", "turns": "counter"}
        lines = []
        for name in ("tokens", "turns", "live", "waiting", "owed_tokens", "cache_bytes_used", "peak_memory_bytes"):
            lines += [f"# TYPE rlhf_engine_{name} {kinds.get(name, 'gauge')}", f"rlhf_engine_{name} {facts[name] or 0}"]
        lines += [f"# TYPE rlhf_engine_exact gauge\nrlhf_engine_exact {int(facts['exact'])}"]
        lines += ["# TYPE rlhf_engine_policy_bytes gauge"]
        lines += [f"rlhf_engine_policy_bytes{{policy={json.dumps(p['name'])}}} {p['bytes']}" for p in facts["policies"]]
        lines += ["# TYPE rlhf_engine_requests counter"]
        lines += [f'rlhf_engine_requests{{path="{path}",status="{code}"}} {n}' for path, code, n in facts["requests"]]
        return PlainTextResponse("\n".join([*lines, ""]), media_type="text/plain; version=0.0.4")

    async def page(self, _: Request) -> Response:
        """The status page, which reads `/status` again and again."""
        text = resources.files("rlhf_engine.serve").joinpath("page.html").read_text(encoding="utf-8")
        return HTMLResponse(text, headers={"Content-Security-Policy": _POLICY})

    async def _no_such_place(self, request: Request, error: Exception) -> Response:
        status = getattr(error, "status_code", 404)
        message = (
            f"path: expected one of this server's with its method, got {request.method} {request.url.path[:100]!r}"
        )
        return JSONResponse(BadRequestError(message, status=status).body(), status_code=status)


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


def _state(policy: LivePolicy, policies: Policies) -> str:
    return "paused" if policy.name in policies.paused else "trained" if policy.optimizer else "frozen"


_ON_DISK = {"steps": 0, "bytes": 0, "users": 0, "state": "on disk"}
_STATUS: tuple[tuple[Any, int], ...] = (
    (CorruptCheckpointError, 503), (PolicyRemovedError, 404), ((BusyError, MemoryLimitError), 429), (ValueError, 400),
    ((EngineError, OSError), 503),
)  # fmt: skip


@contextlib.contextmanager
def _as_errors() -> Iterator[None]:
    """Errors of the block as what is answered to a request."""
    try:
        yield
    except (EngineError, ValueError, OSError) as error:
        status = next(status for kinds, status in _STATUS if isinstance(error, kinds))
        raise BadRequestError(str(error), status=status) from error


class _Stream(StreamingResponse):
    """Server-sent events; whatever ends them ends the answers."""

    def __init__(self, answers: Reply, chunks: AsyncIterator[dict[str, Any]]) -> None:
        super().__init__(_events(chunks), media_type="text/event-stream")
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answers.end()


async def _events(chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    """An event of each chunk; an error is the last of them."""
    try:
        with _as_errors():
            async for chunk in chunks:
                yield _event(chunk)
    except BadRequestError as error:
        yield _event(error.body())
    yield b"data: [DONE]\n\n"


def _event(value: Any) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


async def _until_gone(request: Request) -> None:
    """Return once the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
