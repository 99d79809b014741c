"""Bodies of requests as what is to be drawn, and OpenAI's objects for answers and errors.

Every field of a body is read, known to change nothing, or refused: none is left out in silence.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from rlhf_engine.data.tokenize import encode, encode_prompt
from rlhf_engine.rollout.request import SamplingConfig

MOST_CHOICES, MOST_TOP, MOST_STOPS, MOST_WORDS = 128, 20, 16, 1 << 20
"""Most answers to a prompt, likeliest words at a token, stop texts, and likeliest words in one answer to a body."""
_TEMPERATURES = (1e-3, 1e3)
_PLAIN = {
    "user", "metadata", "store", "service_tier", "request_id", "cache_salt", "priority", "safety_identifier",
    "detokenize", "flat_logprobs", "extra_args", "spaces_between_special_tokens", "prompt_cache_key",
    "reasoning_effort", "output_kind",
}  # fmt: skip
"""Fields that change no answer here."""
_ONLY: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,), "length_penalty": (1,),
    "include_stop_str_in_output": (False,), "use_beam_search": (False,), "continue_final_message": (False,),
    "add_generation_prompt": (True,), "skip_special_tokens": (True,), "parallel_tool_calls": (True,),
    "logit_bias": ({},), "modalities": (["text"],), "response_format": ({"type": "text"},), "best_of": (1,),
    "suffix": (), "function_call": (), "functions": (), "audio": (), "prediction": (), "web_search_options": (),
    "truncate_prompt_tokens": (), "features": (), "kv_transfer_params": (), "bad_words": (), "allowed_token_ids": (),
}  # fmt: skip
"""Fields that are served with these values alone, or null."""
_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
TOOL_CALL = "<tool_call>"


class BadRequestError(Exception):
    """A request that is answered with an error object; the text names the argument, what was expected, what came."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        name, colon, _ = str(self).partition(": expected")
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        param = name if colon and re.fullmatch(r"[\w.\[\]]+", name) else None
        return {"error": {"message": str(self), "type": kind, "param": param, "code": self.code}}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A body that was read."""

    model: str
    """Name in the body, and in the answer; empty: none."""
    policy: str = ""
    """Name of the policy that draws."""
    prompts: list[list[int]]
    """Token ids."""
    sampling: SamplingConfig | None
    """How answers are drawn; None: nothing is drawn."""
    greedy: bool = False
    """Whether answers are the arg-max."""
    n: int = 1
    """Answers to each prompt."""
    stream: bool = False
    """Whether tokens are sent as they are drawn."""
    usage_in_stream: bool = False
    """Whether a stream ends with the numbers of tokens."""
    logprobs: int | None = None
    """Likeliest words given with each token's log-prob; None: no log-probs."""
    prompt_logprobs: int | None = None
    """The same for the tokens of prompts."""
    echo: bool = False
    """Whether the prompt stands before the answer."""
    token_ids: bool = False
    """Whether token ids are given."""
    by_id: bool = False
    """Whether log-probs name tokens by id, `token_id:17`."""
    tools: bool = False
    """Whether tool calls are looked for in answers."""

    @property
    def n_tokens(self) -> int:
        """Most tokens of prompts and answers."""
        most = self.sampling.max_completion_length if self.sampling else 0
        return self.n * sum(len(prompt) + most for prompt in self.prompts)

    @property
    def scores_again(self) -> bool:
        """Whether the log-probs of answers are not those that they were drawn by."""
        own = self.sampling is None or (self.sampling.temperature == 1.0 and not self.sampling.filters)
        return self.logprobs is not None and (self.logprobs > 0 or not own)


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Reads bodies for one base."""

    tokenizer: PreTrainedTokenizerBase
    ends: tuple[int, ...]
    """Tokens that end an answer."""
    context: int
    """Most tokens of prompt and answer."""
    vocabulary: int
    """Number of token ids."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, unless a body has its own."""

    def completion(self, body: Mapping[str, Any]) -> Asked:
        """Read a body of /v1/completions."""
        fields = _Fields(body)
        prompts = self._prompts(fields.take("prompt", object, required=True))
        echo = fields.take("echo", bool, False)
        logprobs = fields.number("logprobs", int, None, 0, MOST_TOP)
        asked = self._asked(
            fields, prompts, default_max=16, logprobs=logprobs, least_max=0 if echo else 1, echo=echo,
            prompt_logprobs=logprobs if echo else fields.number("prompt_logprobs", int, None, 0, MOST_TOP),
        )  # fmt: skip
        if asked.stream and echo:
            raise BadRequestError("echo: expected false in a stream, got true")
        return asked

    def chat(self, body: Mapping[str, Any]) -> Asked:
        """Read a body of /v1/chat/completions."""
        fields = _Fields(body)
        messages = [_message(i, m) for i, m in enumerate(fields.take("messages", list, required=True))]
        if not messages:
            raise BadRequestError("messages: expected at least one message, got none")
        tools = fields.take("tools", list, None) or None
        choice = fields.take("tool_choice", object, None)
        if choice not in (None, "auto", "none"):
            raise BadRequestError(f"tool_choice: expected 'auto' or 'none', got {_short(choice)}")
        if choice == "none":
            tools = None
        kwargs = {**self.template_kwargs, **(fields.take("chat_template_kwargs", dict, None) or {})}
        if kwargs.keys() & _RESERVED:
            raise BadRequestError(f"chat_template_kwargs: expected none of {sorted(_RESERVED)}, got {sorted(kwargs)}")
        if not self.tokenizer.chat_template:
            raise BadRequestError("messages: expected a model with a chat template, got one without; use completions")
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True, **kwargs
            )
        except _OF_TEMPLATES as error:
            raise BadRequestError(
                f"messages: expected what the chat template takes, got an error of it: {error}"
            ) from error
        wanted, top = fields.take("logprobs", bool, False), fields.number("top_logprobs", int, None, 0, MOST_TOP)
        if top is not None and not wanted:
            raise BadRequestError(f"top_logprobs: expected null without logprobs, got {top}")
        return self._asked(
            fields, [encode(self.tokenizer, str(text))], default_max=None, logprobs=(top or 0) if wanted else None,
            prompt_logprobs=fields.number("prompt_logprobs", int, None, 0, MOST_TOP), tools=tools is not None,
        )  # fmt: skip

    def tokens(self, body: Mapping[str, Any]) -> Asked:
        """Read a body of /inference/v1/generate, tokens to tokens."""
        fields = _Fields(body)
        prompt = self._ids("token_ids", fields.take("token_ids", list, required=True))
        model, stream = fields.take("model", str, None), fields.take("stream", bool, False)
        options = fields.take("stream_options", object, None)
        given = fields.inner("sampling_params")
        fields.end()
        given.given.pop("skip_special_tokens", None)  # of texts, which there are none of
        given.given |= {"model": model, "stream": stream, "stream_options": options}
        return self._asked(
            given, [prompt], default_max=16, logprobs=given.number("logprobs", int, None, 0, MOST_TOP), token_ids=True,
            prompt_logprobs=given.number("prompt_logprobs", int, None, 0, MOST_TOP),
        )  # fmt: skip

    # ---- parts -----------------------------------------------------------------------------------------------------

    def _prompts(self, prompt: Any) -> list[list[int]]:
        """One prompt or several, each a text or token ids."""
        several = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)) else [prompt]
        return [
            encode_prompt(self.tokenizer, each)
            if isinstance(each, str)
            else self._ids("prompt" if len(several) == 1 else f"prompt[{i}]", each)
            for i, each in enumerate(several)
        ]

    def _ids(self, name: str, value: Any) -> list[int]:
        if not isinstance(value, list) or not all(type(x) is int and 0 <= x < self.vocabulary for x in value):
            raise BadRequestError(
                f"{name}: expected a text or a list of token ids of 0 to {self.vocabulary - 1}, got {_short(value)}"
            )
        return value

    def _asked(
        self,
        fields: _Fields,
        prompts: list[list[int]],
        *,
        default_max: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
        least_max: int = 1,
        echo: bool = False,
        token_ids: bool = False,
        tools: bool = False,
    ) -> Asked:
        """Read the fields that all bodies have."""
        longest = max(map(len, prompts))
        if not all(prompts):
            raise BadRequestError("prompt: expected at least one token, got none")
        room = self.context - longest
        name = "max_completion_tokens" if fields.given.get("max_completion_tokens") is not None else "max_tokens"
        most = fields.number(name, int, None, least_max, None)
        fields.given.pop("max_tokens", None), fields.given.pop("max_completion_tokens", None)
        most = (room if default_max is None else min(default_max, room)) if most is None else most
        if most > room or room < least_max:
            raise BadRequestError(
                f"{name}: expected prompt and answer of at most {self.context} tokens (the context), got {longest} and "
                f"{max(most, least_max)}",
                code="context_length_exceeded",
            )
        temperature = fields.number("temperature", float, 1.0, 0.0, _TEMPERATURES[1])
        if 0.0 < temperature < _TEMPERATURES[0]:  # which logits are divided by
            raise BadRequestError(f"temperature: expected 0 or at least {_TEMPERATURES[0]}, got {temperature}")
        stop = fields.take("stop", object, [])
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(x, str) and x for x in stops):
            raise BadRequestError(
                f"stop: expected a text or at most {MOST_STOPS} texts, none empty, got {_short(stop)}"
            )
        ends = () if fields.take("ignore_eos", bool, False) else self.ends
        ends = tuple({*ends, *self._ids("stop_token_ids", fields.take("stop_token_ids", list, []))})
        seed = fields.number("seed", int, None, -(2**63), 2**63 - 1)
        top_k, min_p = fields.number("top_k", int, 0, -1, None), fields.number("min_p", float, None, 0.0, 1.0)
        top_p = fields.number("top_p", float, None, 1e-6, 1.0)
        sampling = None
        if most > 0:
            # an end may be drawn once so many tokens stand before it
            least = fields.number("min_tokens", int, 0, 0, most - 1 if ends else most)
            sampling = SamplingConfig(
                max_completion_length=most,
                min_completion_length=least + 1 if least and ends else 0,
                eos_token_ids=tuple(sorted(ends)),
                temperature=temperature or 1.0,
                top_k=min(top_k, self.vocabulary) if top_k > 0 else None,
                top_p=None if top_p == 1.0 else top_p,
                min_p=min_p or None,
                stop=tuple(stops),
                seed=secrets.randbits(63) if seed is None else seed,
            )
        stream, options = fields.take("stream", bool, False), fields.inner("stream_options")
        usage = options.take("include_usage", bool, False)
        options.take("continuous_usage_stats", bool, False)
        options.end()
        k = max(logprobs or 0, prompt_logprobs or 0)
        asked = Asked(
            model=fields.take("model", str, None) or "",
            prompts=prompts,
            sampling=sampling,
            greedy=temperature == 0.0,
            n=fields.number("n", int, 1, 1, MOST_CHOICES),
            stream=stream,
            usage_in_stream=usage,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            echo=echo,
            token_ids=fields.take("return_token_ids", bool, False) or token_ids,
            by_id=fields.take("return_tokens_as_token_ids", bool, False) or token_ids,
            tools=tools,
        )
        fields.end()
        if asked.n_tokens * k > MOST_WORDS:
            raise BadRequestError(
                f"logprobs: expected at most {MOST_WORDS} likeliest words of all tokens, got {asked.n_tokens} × {k}"
            )
        return asked


_OF_TEMPLATES = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What templates raise of what they do not know."""
_RESERVED = {"tokenize", "add_generation_prompt", "tools", "conversation", "chat_template", "return_dict"}


class _Fields:
    """Fields of a JSON object that are not read yet."""

    def __init__(self, given: Any, name: str = "body") -> None:
        if not isinstance(given, Mapping):
            raise BadRequestError(f"{name}: expected a JSON object, got {_short(given)}")
        self.given = dict(given)

    def take(self, name: str, kind: type, default: Any = None, *, required: bool = False) -> Any:
        """A field of that type; null is the default."""
        value = self.given.pop(name, None)
        if value is None:
            if required:
                raise BadRequestError(f"{name}: expected a value, got none")
            return default
        if not isinstance(value, kind):
            names = {bool: "true or false", str: "a text", list: "a list", dict: "an object"}
            raise BadRequestError(f"{name}: expected {names.get(kind, kind.__name__)}, got {_short(value)}")
        return value

    def number(self, name: str, kind: type, default: Any, least: float, most: float | None) -> Any:
        """A number of that type between two bounds; null is the default."""
        value = self.given.pop(name, None)
        if value is None:
            return default
        fits = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
        if not fits or not least <= value <= (2**63 - 1 if most is None else most):
            bound = f"of at least {least}" if most is None else f"from {least} to {most}"
            what = "a whole number" if kind is int else "a number"
            raise BadRequestError(f"{name}: expected {what} {bound}, got {_short(value)}")
        return kind(value)

    def inner(self, name: str) -> _Fields:
        """An object within, empty where there is none."""
        value = self.given.pop(name, None)
        return _Fields({} if value is None else value, name)

    def end(self) -> None:
        """Refuse what is left, unless it changes nothing."""
        for name, value in self.given.items():
            if name in _PLAIN or value is None:
                continue
            if name not in _ONLY:
                raise BadRequestError(f"{name}: expected no such field, got {_short(value)}")
            if value not in _ONLY[name]:
                only = " or ".join(["null", *map(repr, _ONLY[name])])
                raise BadRequestError(f"{name}: expected {only}, got {_short(value)}")


def _message(i: int, message: Any) -> dict[str, Any]:
    """A message of a conversation whose text is a string; parts of another kind than text are refused."""
    name = f"messages[{i}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise BadRequestError(f"{name}: expected an object with a role, got {_short(message)}")
    content, own = message.get("content"), dict(message)
    if isinstance(content, list):
        texts = [
            part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content
        ]
        if not all(isinstance(text, str) for text in texts):
            raise BadRequestError(f"{name}.content: expected text or parts of text, got {_short(content)}")
        own["content"] = "".join(texts)  # type: ignore[arg-type]
    elif content is None and message.get("tool_calls"):
        own["content"] = ""
    elif not isinstance(content, str):
        raise BadRequestError(f"{name}.content: expected text or parts of text, got {_short(content)}")
    calls = message.get("tool_calls")
    if calls is not None:
        own["tool_calls"] = [
            _with_parsed_arguments(f"{name}.tool_calls", call) for call in _list_of_objects(name, calls)
        ]
    return own


def _list_of_objects(name: str, calls: Any) -> list[Mapping[str, Any]]:
    """Calls of functions."""
    if not isinstance(calls, list) or not all(
        isinstance(c, Mapping) and isinstance(c.get("function"), Mapping) for c in calls
    ):
        raise BadRequestError(f"{name}.tool_calls: expected a list of calls of functions, got {_short(calls)}")
    return calls


def _with_parsed_arguments(name: str, call: Mapping[str, Any]) -> dict[str, Any]:
    """A call whose arguments are an object, as chat templates take them; OpenAI's are JSON in a string."""
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError) as error:
            raise BadRequestError(f"{name}: expected arguments in JSON, got {_short(function['arguments'])}") from error
    return {**call, "function": function}


def _short(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except RecursionError:
        return f"a deep {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:97]}…"


def parse_json(raw: bytes) -> Any:
    """A body's JSON. BadRequestError for what is none, numbers and characters that are none included."""

    def refuse(name: str) -> float:
        raise ValueError(f"the number {name}")

    try:
        value = json.loads(raw.decode(), parse_constant=refuse)
        if b"\\u" in raw:  # halves of characters may be escaped
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"body: expected JSON, got {error}") from error


def tool_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Text before the calls of tools, and the calls; those that are no calls stay in the text."""
    calls = list[dict[str, Any]]()

    def take(match: re.Match[str]) -> str:
        try:
            call = json.loads(match[1])
        except ValueError:
            return match[0]
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return match[0]
        arguments = call.get("arguments", call.get("parameters", {}))
        function = {"name": call["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
        calls.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function})
        return ""

    left = _TOOL_CALL.sub(take, text)
    return (left.rstrip() if calls else text), calls
