"""A vLLM server's HTTP endpoints: models, LoRA adapters, completions as token ids with their log-probs.

The protocol is that of `vllm serve` (its `entrypoints/openai`):

* An answer's ids stand in `token_ids` since 0.10.2 (asked for by `return_token_ids`), before that only in the names of
  its log-probs, `token_id:17` (`return_tokens_as_token_ids`). Both are asked for; where both come they must agree.
* What a request leaves open is filled in from the model's `generation_config.json`, so every option is sent.
* Log-probs of drawn tokens are of the distribution they were drawn from only where the server runs with
  `--logprobs-mode processed_logprobs`.
* Ids that end an answer are part of it; texts are found in the tokens that completed them. With `min_tokens` = m the
  earliest end is token m + 1.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlhf_engine.rollout.request import SamplingConfig
from rlhf_engine.rollout.vllm.http import RequestGroup, Server, Transport

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
