"""The web application: OpenAI's endpoints, vLLM's for tokens, health, metrics and a status page."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from transformers import PreTrainedTokenizerBase

from rlhf_engine.data.tokenize import eos_token_ids
from rlhf_engine.devices import peak_memory_bytes
from rlhf_engine.errors import BusyError, CorruptCheckpointError, EngineError, MemoryLimitError, PolicyRemovedError
from rlhf_engine.policy.pool import BASE, LivePolicy, Policies
from rlhf_engine.policy.thread import PolicyThread
from rlhf_engine.serve.answers import Reply
from rlhf_engine.serve.protocol import Asked, BadRequestError, Reader, parse_json

MOST_BODY, _LARGE = 1 << 24, 1 << 16  # most bytes of a body, and those beyond which another thread reads it
_POINTS, _SECONDS = 300, 2.0  # points of the page's curves, and seconds between two


class Service:
    """The endpoints of one server, and their state."""

    most_body = MOST_BODY

    def __init__(
        self,
        thread: PolicyThread,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str,
        keys: Sequence[str] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Serve a thread's policies.

        name: of the base among the models. keys: of clients, any of which is needed; none: nobody needs one.
        template_kwargs: arguments of the chat template, unless a body has its own.
        """
        backbone = thread.engine.backbone
        self.thread, self.name, self._keys = thread, name, [key.encode() for key in keys]
        self.reader = Reader(
            tokenizer=tokenizer, ends=eos_token_ids(tokenizer, backbone.model), context=backbone.context_length,
            vocabulary=backbone.vocabulary, template_kwargs=template_kwargs or {},
        )  # fmt: skip
        self.requests = Counter[tuple[str, int]]()  # so far, by endpoint and status
        self._began = time.time()
        # time, tokens a second, requests that are written and that wait
        self.history = deque[tuple[float, float, int, int]](maxlen=_POINTS)

    def app(self) -> Starlette:
        """The application, for an ASGI server."""
        posts = {
            "/v1/completions": ("cmpl", self.reader.completion), "/v1/chat/completions": ("chatcmpl", self.reader.chat),
            "/inference/v1/generate": ("gen", self.reader.tokens),
        }  # fmt: skip
        routes = [
            *(Route(path, self._answer(partial(self._drawn, *how)), methods=["POST"]) for path, how in posts.items()),
            Route("/v1/models", self._answer(self.models)),
            Route("/v1/models/{name:path}", self._answer(self.models)),
            Route("/metrics", self._answer(self.metrics)),
            Route("/status", self._answer(self.status)),
            Route("/health", self.health),
            Route("/", self.page),
        ]
        handlers: dict[Any, Any] = dict.fromkeys((404, 405, 500), self._failed)
        return Starlette(routes=routes, exception_handlers=handlers, lifespan=self._life)

    @contextlib.asynccontextmanager
    async def _life(self, _: Starlette) -> AsyncIterator[None]:
        async def watch() -> None:
            tokens, then = self.thread.tokens, time.time()
            while True:
                await asyncio.sleep(_SECONDS)
                now, drawn = time.time(), self.thread.tokens
                self.history.append((now, (drawn - tokens) / (now - then), self.thread.n_live, self.thread.n_waiting))
                tokens, then = drawn, now

        task = asyncio.create_task(watch())
        try:
            yield
        finally:
            task.cancel()

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
            raise BadRequestError("authorization: expected 'Bearer KEY' with a key served here, got none", status=401)

    async def _drawn(self, kind: str, read: Callable[[Any], Asked], request: Request) -> Response:
        """Answer a body, whole or as a stream."""
        raw = bytearray()
        async for part in request.stream():
            raw += part
            if len(raw) > self.most_body:
                raise BadRequestError(f"body: expected at most {self.most_body} bytes, got more", status=413)
        with _as_errors():
            # of a large one the loop of all requests does not wait to be read
            large, work = len(raw) > _LARGE, lambda: read(parse_json(bytes(raw)))
            asked = self._named(await asyncio.to_thread(work) if large else work())
            answers = Reply(self.thread, self.reader.tokenizer, asked, kind)
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
            raise self._unknown(asked.model)
        return replace(asked, policy=policy, model=asked.model or self.name)

    def _unknown(self, name: str) -> BadRequestError:
        names = [self.name, *(name for name in self.thread.policies.names if name != BASE)]
        text = f"model: expected one of {names}, got {name[:100]!r}"
        return BadRequestError(text, status=404, code="model_not_found")

    async def models(self, request: Request) -> Response:
        """OpenAI's list of models, or one of them."""
        policies, created = self.thread.policies, int(self._began)
        facts: dict[str, Any] = {"object": "model", "created": created, "owned_by": "rlhf-engine", "root": self.name}
        facts["max_model_len"] = self.reader.context
        data = {self.name: {"id": self.name, **facts, "parent": None}}
        data |= {name: {"id": name, **facts, "parent": self.name} for name in policies.names if name != BASE}
        wanted = request.path_params.get("name")
        if wanted is None:
            return JSONResponse({"object": "list", "data": list(data.values())})
        if wanted not in data:
            raise self._unknown(wanted)
        return JSONResponse(data[wanted])

    async def health(self, _: Request) -> Response:
        """200 while the thread of the policies runs."""
        return Response(status_code=200 if self.thread.is_alive else 503)

    def facts(self) -> dict[str, Any]:
        """Everything that the status page shows."""
        thread, policies = self.thread, self.thread.policies
        pool, block = thread.engine.cache_use()
        return {
            "model": self.name, "exact": thread.engine.backbone.kernels.exact, "seconds": time.time() - self._began,
            "tokens": thread.tokens, "turns": thread.turns, "live": thread.n_live, "waiting": thread.n_waiting,
            "owed_tokens": thread.owed, "cache_bytes_used": pool * block,
            "peak_memory_bytes": peak_memory_bytes(thread.engine.backbone.device),
            "policies": [
                {
                    "name": self.name if policy.name == BASE else policy.name, "steps": policy.state.step,
                    "bytes": policy.n_bytes, "users": policy.holders,
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
        facts, lines = self.facts(), list[str]()
        for name, value in facts.items():
            if isinstance(value, (int, float)):
                kind = "counter" if name in ("tokens", "turns") else "gauge"
                lines += [f"# TYPE rlhf_engine_{name} {kind}", f"rlhf_engine_{name} {float(value)}"]
        lines.append("# TYPE rlhf_engine_policy_bytes gauge")
        lines += [f"rlhf_engine_policy_bytes{{policy={json.dumps(p['name'])}}} {p['bytes']}" for p in facts["policies"]]
        lines.append("# TYPE rlhf_engine_requests counter")
        lines += [f'rlhf_engine_requests{{path="{path}",status="{code}"}} {n}' for path, code, n in facts["requests"]]
        return PlainTextResponse("\n".join([*lines, ""]), media_type="text/plain; version=0.0.4")

    async def page(self, _: Request) -> Response:
        """The status page, which reads `/status` again and again."""
        text = resources.files("rlhf_engine.serve").joinpath("page.html").read_text(encoding="utf-8")
        return HTMLResponse(text, headers={"Content-Security-Policy": _POLICY})

    async def _failed(self, request: Request, error: Exception) -> Response:
        """Answer with an error object at an unknown place, and after a fault of the server, which its log tells."""
        status, place = getattr(error, "status_code", 500), f"{request.method} {request.url.path[:99]!r}"
        message = f"path: expected one of this server's with its method, got {place}"
        if status >= 500:
            message = f"{place} failed by a fault of the server ({type(error).__name__})"
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
    """Server-sent events, an error the last of them; whatever ends them ends the answers."""

    def __init__(self, answers: Reply, chunks: AsyncIterator[dict[str, Any]]) -> None:
        super().__init__(self._events(chunks), media_type="text/event-stream")
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answers.end()

    async def _events(self, chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
        try:
            with _as_errors():
                async for chunk in chunks:
                    yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
        except BadRequestError as error:
            yield f"data: {json.dumps(error.body(), ensure_ascii=False)}\n\n"
        yield "data: [DONE]\n\n"


async def _until_gone(request: Request) -> None:
    """Return once the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
