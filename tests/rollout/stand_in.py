"""A protocol stand-in for a vLLM server. It is NOT vLLM: it speaks the same endpoints and answers from a HydraModel.

It runs in a thread of the test. Adapters are read from the folder that it is told, answers are sampled by this
package's own engine, so what passes against it shows that the two sides understand each other, and nothing about vLLM's
numbers, speed or bugs. Field names, status codes and error bodies follow vLLM's `entrypoints/openai`; what it leaves to
`generation_config.json` where a request is silent is taken from `DEFAULTS` here, which no caller wants.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from rlhf_engine.hydra import HydraModel, PackedBatch, RoleSpec, peft_io
from rlhf_engine.rollout import Request, RolloutEngine, SamplingConfig

DEFAULTS = {"temperature": 0.3, "top_p": 0.5, "top_k": 2, "min_p": 0.1, "repetition_penalty": 1.3, "max_tokens": 16}
_MASK = 0xFFFFFFFFFFFFFFFF
JSON = dict[str, Any]


def sample_id_of(seed: int) -> int:
    """The sample id whose `row_seed(0, id)` is this seed: SplitMix64's finaliser undone."""
    z = seed & _MASK
    z ^= z >> 31 ^ z >> 62
    z = z * pow(0x94D049BB133111EB, -1, 1 << 64) & _MASK
    z ^= z >> 27 ^ z >> 54
    z = z * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & _MASK
    z ^= z >> 30 ^ z >> 60
    return (z - 1) & _MASK


class Refusal(Exception):
    """A status other than 200 and its body."""

    def __init__(self, status: int, message: str, *, body: JSON | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = body or {"error": {"message": message, "type": "BadRequestError", "code": status}}


class StandIn:
    """The server. What tests change: the attributes below `faults`."""

    def __init__(self, base: Path | Any, *, name: str, root: str | None = None) -> None:
        self.base, self.name, self.root = base, name, root or name
        self.max_model_len: int | None = 64
        # faults
        self.runtime_lora = True
        self.healthy = True
        self.logprobs_mode = "processed_logprobs"
        self.ids = "both"
        """How token ids come back: both, token_ids, names (versions before 0.10.2) or none."""
        self.stale = False
        """Loading is said to have worked, but every name answers from the first adapter."""
        self.keeps = False
        """Adapters are not unloaded."""
        self.delays: list[float] = []
        """Seconds that the next completions wait, the first one's first."""
        self.answers_left: int | None = None
        """Completions before the server breaks off connections."""
        self.passing: dict[str, list[int]] = {}
        """By path, what becomes of its next requests: a status, 0 for a connection that is broken off before the work,
        1 for one that is broken off after it."""
        self.alter: Callable[[JSON, JSON], JSON | bytes] = lambda payload, request: payload
        """Changes what goes out: (payload, request) → payload, or raw bytes that end before their Content-Length."""
        # what happened
        self.log: list[tuple[str, JSON]] = []
        self.adapters: dict[str, list[torch.Tensor]] = {}
        self._model: HydraModel | None = None
        self._first: list[torch.Tensor] | None = None
        self._lock = threading.Lock()
        self._closing = threading.Event()
        handler = type("Handler", (_Handler,), {"stand_in": self})
        self._http = _Server(("127.0.0.1", 0), handler)
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def requests(self, path: str) -> list[JSON]:
        return [body for where, body in self.log if where == path]

    def close(self) -> None:
        self._closing.set()
        self._http.shutdown()
        self._http.server_close()

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---- endpoints -------------------------------------------------------------------------------------------------

    def models(self) -> JSON:
        base = {"id": self.name, "root": self.root, "parent": None, "max_model_len": self.max_model_len}
        cards = [{"id": name, "root": "?", "parent": self.name} for name in self.adapters]
        return {"object": "list", "data": [base, *cards]}

    def load(self, body: JSON) -> None:
        name, folder = body["lora_name"], Path(body["lora_path"])
        if not self.runtime_lora:
            raise Refusal(404, "Not Found", body={"detail": "Not Found"})
        if name in self.adapters:
            raise Refusal(400, f"The lora adapter '{name}' has already been loaded.")
        if not (folder / peft_io.CONFIG_FILE).is_file():
            raise Refusal(404, f"No adapter found for {folder}")
        slot = self._with_slot(folder).backbone().slot("actor")
        peft_io.load_slot(slot, folder, None)  # of whatever base it is: vLLM does not look
        self.adapters[name] = [p.detach().clone() for p in slot.parameters()]
        self._first = self._first or self.adapters[name]

    def unload(self, body: JSON) -> None:
        if self.keeps:
            raise Refusal(500, f"Failed to remove lora adapter '{body['lora_name']}' from the engine.")
        if self.adapters.pop(body["lora_name"], None) is None:
            raise Refusal(404, f"The lora adapter '{body['lora_name']}' cannot be found.")

    def complete(self, body: JSON) -> JSON:
        if body["model"] not in (self.name, *self.adapters):
            raise Refusal(404, f"The model `{body['model']}` does not exist.")
        options = {**DEFAULTS, **body}
        if "prompt_logprobs" in body:
            raise Refusal(400, "with adapters vLLM computes them by those of the other requests, or ends there")
        if options["repetition_penalty"] != 1.0:
            raise Refusal(400, "the stand-in has no penalties: the request left its defaults in place")
        role = "base" if body["model"] == self.name else "actor"
        model = self._model
        if model is None:
            raise Refusal(400, "the stand-in answers once an adapter has been loaded")
        if role == "actor":
            self._put(self._first if self.stale else self.adapters[body["model"]])
        prompt = tuple(options["prompt"])
        ends = tuple(options["stop_token_ids"]) + (() if options.get("ignore_eos") else (2,))
        sampling = SamplingConfig(
            max_completion_length=min(options["max_tokens"], (self.max_model_len or 64) - len(prompt)),
            eos_token_ids=ends,
            min_completion_length=options["min_tokens"] + 1 if options.get("min_tokens") else 0,
            temperature=options["temperature"] or 1.0, top_k=options["top_k"] if options["top_k"] > 0 else None,
            top_p=options["top_p"], min_p=options["min_p"] or None, stop=tuple(options.get("stop", ())),
        )  # fmt: skip
        request = Request(
            prompt=prompt, sample_id=sample_id_of(options["seed"]), role=role, greedy=options["temperature"] == 0
        )
        engine = RolloutEngine(model)
        engine.submit([request], sampling, decode=lambda ids: "".join(f"<{i}>" for i in ids))
        (answer,) = engine.run()
        values = list(answer.logprobs)
        if self.logprobs_mode == "raw_logprobs":
            values = self._score(model, role, prompt, answer.tokens)
        stop_reason: Any = None
        if answer.finish_reason == "eos":
            stop_reason = answer.tokens[-1]
        elif answer.finish_reason == "stop":
            stop_reason = sampling.stop[0]
        named = self.ids in ("both", "names") and options.get("return_tokens_as_token_ids")
        words = [f"token_id:{t}" if named else "word" for t in answer.tokens]
        choice = {
            "index": 0, "text": "", "logprobs": {"tokens": words, "token_logprobs": values},
            "finish_reason": "length" if answer.finish_reason == "length" else "stop", "stop_reason": stop_reason,
        }  # fmt: skip
        if self.ids in ("both", "token_ids") and options.get("return_token_ids"):
            choice |= {"token_ids": list(answer.tokens), "prompt_token_ids": list(prompt)}
        return {"id": "cmpl-1", "object": "text_completion", "model": body["model"], "choices": [choice], "usage": {}}

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _with_slot(self, folder: Path) -> HydraModel:
        if self._model is None:
            self._model = HydraModel.from_pretrained(
                self.base,
                roles={"actor": RoleSpec(slot="actor"), "base": RoleSpec()},
                slots={"actor": dataclasses.replace(peft_io.read_slot_config(folder), init_from=None)},
            ).eval()
        return self._model

    def _put(self, tensors: list[torch.Tensor] | None) -> None:
        assert self._model is not None
        assert tensors is not None
        with torch.no_grad():
            for p, q in zip(self._model.backbone().slot("actor").parameters(), tensors, strict=True):
                p.copy_(q)

    @staticmethod
    def _score(model: HydraModel, role: str, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> list[float]:
        if role != "actor":
            raise Refusal(400, "the stand-in scores adapters only")
        found = model.score(PackedBatch.from_lists([prompt], [tokens]), ("actor",)).logprobs_M
        assert found is not None
        return found.tolist()

    def answer(self, method: str, path: str, body: JSON) -> tuple[int, JSON | bytes]:
        """(status, body) of a request; what can fail on purpose fails here."""
        fate = self.passing[path].pop(0) if self.passing.get(path) else None
        if fate == 0:
            raise ConnectionAbortedError
        if fate is not None and fate > 1:
            return fate, {}
        found = self._work(method, path, body)
        if fate == 1:
            raise ConnectionAbortedError
        return found

    def _work(self, method: str, path: str, body: JSON) -> tuple[int, JSON | bytes]:
        if (method, path) == ("GET", "/health"):
            return (200, b"") if self.healthy else (503, b"")
        if (method, path) == ("GET", "/v1/models"):
            return 200, self.models()
        self.log.append((path, body))
        if path == "/v1/completions":
            if self.delays and self._closing.wait(self.delays.pop(0)):
                raise ConnectionAbortedError
            with self._lock:
                if self.answers_left is not None:
                    self.answers_left -= 1
                    if self.answers_left < 0:
                        raise ConnectionAbortedError
                return 200, self.alter(self.complete(body), body)
        with self._lock:
            {"/v1/load_lora_adapter": self.load, "/v1/unload_lora_adapter": self.unload}[path](body)
        return 200, b"Success: done."


class _Server(ThreadingHTTPServer):
    request_queue_size = 256  # of five, the default, a rollout's connections overflow it and are reset
    daemon_threads = False  # closing waits for them: nothing of a test outlives it


class _Handler(BaseHTTPRequestHandler):
    stand_in: StandIn

    def do_GET(self) -> None:
        self._reply({})

    def do_POST(self) -> None:
        self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _reply(self, body: JSON) -> None:
        try:
            status, found = self.stand_in.answer(self.command, self.path, body)
        except Refusal as refusal:
            status, found = refusal.status, refusal.body
        except ConnectionAbortedError:
            self.close_connection = True
            self.connection.close()
            return
        raw = found if isinstance(found, bytes) else json.dumps(found).encode()
        cut = self.path == "/v1/completions" and isinstance(found, bytes)
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw) + (100 if cut else 0)))
        try:
            self.end_headers()
            self.wfile.write(raw)
        except ConnectionError:
            self.close_connection = True  # a client that has given up

    def log_message(self, *arguments: Any) -> None:
        pass
