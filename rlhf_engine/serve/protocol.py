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
from rlhf_engine.rollout.conversation import parsed_call
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

    model: str  # name in the body, and in the answer; empty: none
    policy: str = ""  # name of the policy that draws
    prompts: list[list[int]]  # token ids
    sampling: SamplingConfig | None  # how answers are drawn; None: nothing is drawn
    greedy: bool = False  # whether answers are the arg-max
    n: int = 1  # answers to each prompt
    stream: bool = False  # whether tokens are sent as they are drawn
    usage_in_stream: bool = False  # whether a stream ends with the numbers of tokens
    logprobs: int | None = None  # likeliest words given with each token's log-prob; None: no log-probs
    prompt_logprobs: int | None = None  # the same for the tokens of prompts
    echo: bool = False  # whether the prompt stands before the answer
    token_ids: bool = False  # whether token ids are given
    by_id: bool = False  # whether log-probs name tokens by id, `token_id:17`
    tools: bool = False  # whether tool calls are looked for in answers

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
    ends: tuple[int, ...]  # tokens that end an answer
    context: int  # most tokens of prompt and answer
    vocabulary: int  # number of token ids
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # of the chat template, unless a body has its own

    def completion(self, body: Mapping[str, Any]) -> Asked:
        """Read a body of /v1/completions."""
        fields = _Fields(body)
        prompts = self._prompts(fields.take("prompt", object, required=True))
        echo, logprobs = fields.take("echo", bool, False), fields.top("logprobs")
        if echo and fields.given.get("stream"):
            raise _wrong("echo", "false in a stream", echo)
        return self._asked(
            fields, prompts, 16, 0 if echo else 1, logprobs=logprobs, echo=echo,
            prompt_logprobs=logprobs if echo else fields.top("prompt_logprobs"),
        )  # fmt: skip

    def chat(self, body: Mapping[str, Any]) -> Asked:
        """Read a body of /v1/chat/completions."""
        fields = _Fields(body)
        messages = [_message(i, m) for i, m in enumerate(fields.take("messages", list, required=True))]
        if not messages:
            raise _wrong("messages", "at least one message", messages)
        tools, choice = fields.take("tools", list, None) or None, fields.take("tool_choice", object, "auto")
        if choice not in ("auto", "none"):
            raise _wrong("tool_choice", "'auto' or 'none'", choice)
        tools = tools if choice == "auto" else None
        kwargs = {**self.template_kwargs, **fields.take("chat_template_kwargs", dict, {})}
        if kwargs.keys() & _RESERVED:
            raise _wrong("chat_template_kwargs", f"none of {sorted(_RESERVED)}", sorted(kwargs))
        if not self.tokenizer.chat_template:
            raise BadRequestError("messages: expected a model with a chat template, got one without; use completions")
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True, **kwargs
            )
        except _OF_TEMPLATES as error:
            raise _wrong("messages", "what the chat template takes", f"{type(error).__name__}: {error}") from error
        wanted, top = fields.take("logprobs", bool, False), fields.top("top_logprobs")
        if top is not None and not wanted:
            raise _wrong("top_logprobs", "null without logprobs", top)
        return self._asked(
            fields, [encode(self.tokenizer, str(text))], None, logprobs=(top or 0) if wanted else None,
            prompt_logprobs=fields.top("prompt_logprobs"), tools=tools is not None,
        )  # fmt: skip

    def tokens(self, body: Mapping[str, Any]) -> Asked:
        """Read a body of /inference/v1/generate, tokens to tokens."""
        fields = _Fields(body)
        prompt = self._ids("token_ids", fields.take("token_ids", list, required=True))
        outer = {name: fields.given.pop(name, None) for name in ("model", "stream", "stream_options")}
        inner = fields.inner("sampling_params")
        fields.end()
        inner.given = {**inner.given, **outer, "skip_special_tokens": None}  # of texts, which there are none of
        return self._asked(
            inner, [prompt], 16, logprobs=inner.top("logprobs"), prompt_logprobs=inner.top("prompt_logprobs"),
            token_ids=True, by_id=True,
        )  # fmt: skip

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
            raise _wrong(name, f"a text or a list of token ids of 0 to {self.vocabulary - 1}", value)
        return value

    def _asked(
        self, fields: _Fields, prompts: list[list[int]], default_max: int | None, least_max: int = 1, **known: Any
    ) -> Asked:
        """Read the fields that all bodies have; known: what of `Asked` is read."""
        if not all(prompts):
            raise BadRequestError("prompt: expected at least one token, got none")
        longest = max(map(len, prompts))
        room = self.context - longest
        given = [fields.number(name, int, None, least_max, None) for name in ("max_completion_tokens", "max_tokens")]
        default = room if default_max is None else min(default_max, room)
        most = next((number for number in given if number is not None), default)
        if most > room or room < least_max:
            raise BadRequestError(
                f"max_tokens: expected prompt and answer of at most {self.context} tokens (the context), got {longest} "
                f"and {max(most, least_max)}",
                code="context_length_exceeded",
            )
        temperature = fields.number("temperature", float, 1.0, 0.0, _TEMPERATURES[1])
        if 0.0 < temperature < _TEMPERATURES[0]:  # which logits are divided by
            raise _wrong("temperature", f"0 or at least {_TEMPERATURES[0]}", temperature)
        stop = fields.take("stop", object, [])
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(x, str) and x for x in stops):
            raise _wrong("stop", f"a text or at most {MOST_STOPS} texts, none empty", stop)
        ends = () if fields.take("ignore_eos", bool, False) else self.ends
        ends = tuple(sorted({*ends, *self._ids("stop_token_ids", fields.take("stop_token_ids", list, []))}))
        seed, top_k = fields.number("seed", int, None, -(2**63), 2**63 - 1), fields.number("top_k", int, 0, -1, None)
        top_p, min_p = fields.number("top_p", float, 1.0, 1e-6, 1.0), fields.number("min_p", float, 0.0, 0.0, 1.0)
        # an end may be drawn once so many tokens stand before it
        least = fields.number("min_tokens", int, 0, 0, max(0, most - bool(ends)))
        sampling = SamplingConfig(
            max_completion_length=max(most, 1), min_completion_length=least + 1 if least and ends else 0,
            eos_token_ids=ends, temperature=temperature or 1.0, top_p=None if top_p == 1.0 else top_p,
            top_k=min(top_k, self.vocabulary) if top_k > 0 else None, min_p=min_p or None, stop=tuple(stops),
            seed=secrets.randbits(63) if seed is None else seed,
        )  # fmt: skip
        options = fields.inner("stream_options")
        usage = options.take("include_usage", bool, False)
        options.take("continuous_usage_stats", bool, False)
        options.end()
        for name, field_ in (("token_ids", "return_token_ids"), ("by_id", "return_tokens_as_token_ids")):
            known[name] = fields.take(field_, bool, False) or known.get(name, False)
        asked = Asked(
            model=fields.take("model", str, ""), prompts=prompts, sampling=sampling if most else None,
            greedy=temperature == 0.0, n=fields.number("n", int, 1, 1, MOST_CHOICES),
            stream=fields.take("stream", bool, False), usage_in_stream=usage, **known,
        )  # fmt: skip
        fields.end()
        words = asked.n_tokens * max(asked.logprobs or 0, asked.prompt_logprobs or 0)
        if words > MOST_WORDS:
            raise _wrong("logprobs", f"at most {MOST_WORDS} likeliest words of all tokens", words)
        return asked


_OF_TEMPLATES = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What templates raise of what they do not know."""
_RESERVED = {"tokenize", "add_generation_prompt", "tools", "conversation", "chat_template", "return_dict"}


class _Fields:
    """Fields of a JSON object that are not read yet."""

    def __init__(self, given: Any, name: str = "body") -> None:
        if not isinstance(given, Mapping):
            raise _wrong(name, "a JSON object", given)
        self.given = dict(given)

    def take(self, name: str, kind: type, default: Any = None, *, required: bool = False) -> Any:
        """A field of that type; null is the default."""
        value = self.given.pop(name, None)
        if value is None and not required:
            return default
        if value is None or not isinstance(value, kind):
            names = {bool: "true or false", str: "a text", list: "a list", dict: "an object", object: "a value"}
            raise _wrong(name, names[kind], value)
        return value

    def number(self, name: str, kind: type, default: Any, least: float, most: float | None) -> Any:
        """A number of that type between two bounds; null is the default."""
        value = self.given.pop(name, None)
        if value is None:
            return default
        fits = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
        if not fits or not least <= value <= (2**63 - 1 if most is None else most):
            bound = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise _wrong(name, f"a {'whole ' if kind is int else ''}number {bound}", value)
        return kind(value)

    def top(self, name: str) -> int | None:
        """A number of likeliest words, or null."""
        found: int | None = self.number(name, int, None, 0, MOST_TOP)
        return found

    def inner(self, name: str) -> _Fields:
        """An object within, empty where there is none."""
        value = self.given.pop(name, None)
        return _Fields({} if value is None else value, name)

    def end(self) -> None:
        """Refuse what is left, unless it changes nothing."""
        for name, value in self.given.items():
            if name in _PLAIN or value is None or value in _ONLY.get(name, ()):
                continue
            known = f"only {' or '.join(['null', *map(repr, _ONLY[name])])}" if name in _ONLY else "no such field"
            raise _wrong(name, known, value)


def _message(i: int, message: Any) -> dict[str, Any]:
    """A message whose text is a string and whose calls have objects as arguments, as chat templates take them."""
    name = f"messages[{i}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise _wrong(name, "an object with a role", message)
    content, calls, own = message.get("content"), message.get("tool_calls"), dict(message)
    parts = (
        content if isinstance(content, list) else [{"type": "text", "text": "" if calls and not content else content}]
    )
    texts: list[Any] = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise _wrong(f"{name}.content", "text or parts of text", content)
    own["content"] = "".join(texts)
    if calls is not None:
        if not isinstance(calls, list) or not all(
            isinstance(c, Mapping) and isinstance(c.get("function"), Mapping) for c in calls
        ):
            raise _wrong(f"{name}.tool_calls", "a list of calls of functions", calls)
        own["tool_calls"] = [{**call, "function": dict(call["function"])} for call in calls]
        for function in (call["function"] for call in own["tool_calls"]):
            if isinstance(given := function.get("arguments"), str):  # as OpenAI has them
                try:
                    function["arguments"] = json.loads(given or "{}")
                except (ValueError, RecursionError) as error:
                    raise _wrong(f"{name}.tool_calls", "arguments in JSON", given) from error
    return own


def _wrong(name: str, expected: str, got: Any) -> BadRequestError:
    try:
        text = json.dumps(got, ensure_ascii=False)
    except RecursionError:
        text = f"a deep {type(got).__name__}"
    return BadRequestError(f"{name}: expected {expected}, got {text if len(text) <= 100 else text[:97] + '…'}")


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
        call = parsed_call(match[1])
        if "error" in call:
            return match[0]
        function = {**call["function"], "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}
        calls.append({"id": f"call_{secrets.token_hex(12)}", **call, "function": function})
        return ""

    left = _TOOL_CALL.sub(take, text)
    return (left.rstrip() if calls else text), calls
