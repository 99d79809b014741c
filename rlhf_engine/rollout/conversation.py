"""Conversations with tools and environments: what a policy says is drawn, what they answer is given.

The protocol is TRL's. Each answer has an environment to itself: `reset(**row)` may return text that is added to the
prompt, its other public methods are tools, and `get_reward()` is the score of the conversation, where there is one.
Beside that, `get_turn_reward()` is the reward of the turn that has just ended. Environments are used again, after
another `reset`, and `close()` is called at the end. All calls are made in one thread. `tools` are functions for all.

An answer that calls tools gets their results, and is drawn on from there, until one calls none or a limit is reached.
Whatever a tool does is bounded: an unknown name, arguments that do not fit, errors, and calls that take too long give a
result that says so, and are counted.

Token ids are kept as they were drawn. What follows them is the chat template's text of the results. Some templates
write earlier turns anew, such as without their thoughts. Then the conversation goes on from the new text, and those
tokens of it that differ from the drawn ones count as given.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import (
    DocstringParsingException,
    TypeHintParsingException,
    get_json_schema,
)

from rlhf_engine.config import TrainConfig
from rlhf_engine.data import Row
from rlhf_engine.data.tokenize import encode
from rlhf_engine.errors import ConfigError, RewardError
from rlhf_engine.hydra.loading import read_context_length
from rlhf_engine.rollout.request import FinishReason, Message, Request, SamplingConfig, Talk
from rlhf_engine.rollout.rows import AnswerRow
from rlhf_engine.user_code import ERRORS, TimedCaller, TookTooLong, failure, load_module, load_object, settings_kept

LARGEST_RESULT = 20_000  # characters of a tool's result; the rest is cut off
_OF_ENVIRONMENTS = ("reset", "get_reward", "get_turn_reward", "close")  # methods of an environment that are no tools
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_MARK = "⁂"


class Conversations:
    """The environments and tools of a run."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        context_length: int,
        *,
        make: Callable[[], Any] | None = None,
        tools: Sequence[Callable[..., Any]] = (),
        max_turns: int = 8,
        timeout: float = 60.0,
    ) -> None:
        """Take what makes an environment, and tools. ConfigError where the chat template cannot serve them.

        max_turns: turns after which no tool is called. timeout: seconds after which a call is given up.
        """
        self.tokenizer, self.max_turns, self.timeout = tokenizer, max_turns, timeout
        self._context, self._make, self._tools = context_length, make, {tool.__name__: tool for tool in tools}
        self.call = TimedCaller("environments")
        """Makes the calls of tools and environments."""
        self.free = deque[Any]()
        """Environments that no conversation has."""
        probe = self.take()
        named = self.tools_of(probe)
        if probe is not None:
            self.free.append(probe)
            if not callable(getattr(probe, "reset", None)):
                raise ConfigError(f"environment: expected a method `reset`, got a {type(probe).__name__} without one")
        if not named:
            raise ConfigError("tools: expected at least one function or method of the environment, got none")
        try:
            self.schemas: list[Any] = [get_json_schema(tool) for tool in named.values()]
            """JSON schemas of the tools, for the chat template."""
        except (DocstringParsingException, TypeHintParsingException) as error:
            raise ConfigError(f"tools: expected type hints and a Google docstring with `Args:`: {error}") from error
        self.has_reward = any(callable(getattr(probe, name, None)) for name in ("get_reward", "get_turn_reward"))
        """Whether the environment scores conversations, or turns of them."""
        self._check_template(next(iter(named)))

    def take(self) -> Any:
        """An environment for one conversation; None without environments."""
        if self._make is None:
            return None
        with contextlib.suppress(IndexError):
            return self.free.popleft()
        return self._called("environment", self._make)

    def tools_of(self, environment: Any) -> dict[str, Callable[..., Any]]:
        """Tools by name: the functions, and an environment's public methods."""
        if environment is None:
            return self._tools
        names = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction) if name[0] != "_"]
        return {**self._tools, **{name: getattr(environment, name) for name in names if name not in _OF_ENVIRONMENTS}}

    def close(self) -> None:
        """Close the environments that no conversation has, where they have a method for it."""
        for environment in [self.free.popleft() for _ in range(len(self.free))]:
            if hasattr(environment, "close"):
                self._asked(environment.close)
        self.call.close()

    # ---- the chat template -----------------------------------------------------------------------------------------

    def _check_template(self, tool: str) -> None:
        """Find out how results are written, and whether earlier turns are written anew."""
        tokenizer = self.tokenizer
        user = {"role": "user", "content": "?"}
        try:
            plain, shown = self.text([user], has_tools=False), self.text([user])
            thoughts = [
                self._call(tool),
                {**self._call(tool), "reasoning_content": "thought"},
                self._call(tool, f"<think>\nthought\n</think>\n\n{_MARK}"),
            ]
            pairs = [(self._closed([user, m]), self.text([user, m, self._result(tool)])) for m in thoughts]
        except (TemplateError, TypeError, ValueError) as error:
            raise ConfigError(
                f"chat_template: expected one that takes calls of tools, got an error: {error}"
            ) from error
        if plain == shown:
            raise ConfigError("chat_template: expected one that shows tools to the model, got one that leaves them out")
        said = pairs[0][0]
        if getattr(tokenizer, "response_template", None) is None and "<tool_call>" not in said:
            raise ConfigError(
                "response_template: expected a tokenizer with one, or a chat template that writes calls as "
                f"<tool_call>JSON</tool_call>, got calls written as {said[-80:]!r}"
            )
        self.rewrites = any(not after.startswith(before) for before, after in pairs)
        """Whether the template writes earlier turns anew."""
        if self.rewrites:
            warnings.warn(
                "chat_template: it writes earlier turns anew once a result follows; what differs from the drawn tokens "
                "counts as given, and is not learned from",
                stacklevel=3,
            )

    def text(self, messages: Sequence[Message], *, has_tools: bool = True, goes_on: bool = True, **given: Any) -> str:
        """The chat template's text, with the tools; goes_on: and with what an answer goes on from."""
        template = {"tools": self.schemas if has_tools else None, "add_generation_prompt": goes_on, **given}
        text = self.tokenizer.apply_chat_template([dict(m) for m in messages], tokenize=False, **template)
        assert isinstance(text, str)
        return text

    def _closed(self, messages: Sequence[Message], **given: Any) -> str:
        """Text of messages up to the end token of the last one, where the template writes one."""
        text, end = self.text(messages, goes_on=False, **given), str(self.tokenizer.eos_token)
        return text[: text.rindex(end) + len(end)] if end in text else text

    @staticmethod
    def _call(tool: str, content: str = _MARK) -> Message:
        function = {"name": tool, "arguments": {}}
        return {"role": "assistant", "content": content, "tool_calls": [{"type": "function", "function": function}]}

    @staticmethod
    def _result(tool: str, text: str = "0") -> Message:
        return {"role": "tool", "name": tool, "content": text}

    def suffix(self, results: Sequence[Message], template: Mapping[str, Any]) -> list[int]:
        """Token ids of results behind an answer that has ended with its end token."""
        asked = [{"role": "user", "content": "?"}, self._call(results[0]["name"])]
        before, after = self._closed(asked, **template), self.text([*asked, *results], **template)
        return encode(self.tokenizer, after.removeprefix(before))

    def parse(self, ids: Sequence[int], prefix: Sequence[int], *, ended: bool) -> tuple[Message, list[dict[str, Any]]]:
        """The message of a drawn turn, and all its calls; what has not the form of one has the type `malformed`."""
        tokenizer = self.tokenizer
        if getattr(tokenizer, "response_template", None) is not None:
            try:
                parts = dict(tokenizer.parse_response(list(ids), prefix=list(prefix), tools=self.schemas))
                content = str(parts.get("content") or "").removesuffix(str(tokenizer.eos_token))
                return {"role": "assistant", **parts, "content": content}, list(parts.get("tool_calls") or [])
            except (ValueError, TypeError, KeyError) as error:
                malformed = {"type": "malformed", "error": str(error)}
                text = str(tokenizer.decode(list(ids), skip_special_tokens=True))
                return {"role": "assistant", "content": text}, [malformed]
        text = str(tokenizer.decode(list(ids[:-1] if ended else ids)))
        calls = [parsed_call(written) for written in _CALL.findall(text)]
        if not calls or any(call["type"] != "function" for call in calls):  # which a template could not write
            return {"role": "assistant", "content": text}, calls
        return {"role": "assistant", "content": _CALL.sub("", text).strip(), "tool_calls": calls}, calls

    def rows(self, rows: Sequence[Row]) -> list[Row]:
        """Rows as prompts of conversations, whose template shows the tools; a string is the user's turn."""
        made = list[Row]()
        for row in rows:
            prompt = ({"role": "user", "content": row.prompt},) if isinstance(row.prompt, str) else row.prompt
            made.append(replace(row, prompt=prompt, template={**row.template, "tools": self.schemas}))
        return made

    # ---- answers ---------------------------------------------------------------------------------------------------

    def begin(self, row: Mapping[str, Any], ids: Sequence[int]) -> Conversation:
        """Begin a conversation about a row of data. ids: its prompt, which what `reset` returns is added to."""
        messages = [dict(message) for message in row["prompt"]]
        template, environment = dict(row.get("chat_template_kwargs") or {}), self.take()
        if environment is not None:
            own = [dict(message) for message in row["prompt"]]  # which it may change
            seen = self._asked(environment.reset, **{**row, "prompt": own})
            if seen:
                last = next((m for m in reversed(messages) if m["role"] == "user"), None)
                if last is None:
                    raise ConfigError("dataset_name: expected a turn of the user, which `reset` adds to, got none")
                last["content"] = f"{last['content']}{seen}"
                ids = encode(self.tokenizer, self.text(messages, **template))
        return Conversation(self, messages, tuple(ids), environment, template)

    def dry_run(self, row: Mapping[str, Any], ids: Sequence[int]) -> None:
        """Begin one conversation, so that an environment that does not take the rows is found early."""
        environment = self.begin(row, ids).environment
        if environment is not None:
            self.free.append(environment)

    def _asked(self, method: Callable[..., Any], **given: Any) -> Any:
        """Call a method of an environment; RewardError where it fails, as for a reward function."""
        return self._called(f"environment's {getattr(method, '__name__', 'method')!r}", lambda: method(**given))

    def _called(self, name: str, call: Callable[[], Any]) -> Any:
        try:
            with settings_kept(name):
                return self.call(call, self.timeout)
        except TookTooLong as error:
            raise RewardError(f"{name} took longer than {self.timeout:g} seconds") from error
        except ERRORS as error:
            raise failure(name, error) from error

    def reward(self, method: Callable[..., Any]) -> float | None:
        """A reward that an environment gives, finite or None."""
        value = self._asked(method)
        if value is None:
            return None
        try:
            number = float(value)
            if abs(number) <= torch.finfo(torch.float32).max:
                return number
        except (TypeError, ValueError, OverflowError):
            pass
        wrong = TypeError(f"expected a finite number or None, got {value!r}")
        raise failure(f"environment's {method.__name__!r}", wrong)

    def fits(self, length: int, most: int) -> int:
        """Tokens, at most so many, that may follow so many tokens in the context."""
        return min(most, self._context - length)


def parsed_call(written: str) -> dict[str, Any]:
    """A call in JSON, as a message has it; where it is none, what is wrong with it."""
    try:
        call = json.loads(written)
        name, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if isinstance(name, str) and isinstance(arguments, dict):
            return {"type": "function", "function": {"name": name, "arguments": arguments}}
        error = "expected a name and an object of arguments"
    except (ValueError, TypeError, KeyError, RecursionError) as wrong:
        error = f"expected JSON with a name and arguments: {type(wrong).__name__}: {wrong}"
    return {"type": "malformed", "error": error}


@dataclass(eq=False)
class Conversation:
    """A conversation that is being held."""

    host: Conversations
    messages: list[Message]
    prompt: tuple[int, ...]
    environment: Any
    template: Mapping[str, Any]
    tokens: list[int] = field(default_factory=list)
    """Token ids behind the prompt, drawn and given."""
    turns: list[tuple[int, int]] = field(default_factory=list)
    """Spans of the drawn tokens, counted from the prompt's first on."""
    logprobs: list[float] = field(default_factory=list)
    supports: list[torch.Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    turn_rewards: list[float] = field(default_factory=list)
    calls: int = 0
    failures: int = 0

    def __post_init__(self) -> None:
        self.n_prompt, self._tools = len(self.messages), self.host.tools_of(self.environment)
        self._drawn, self._owed, self._hung = 0, 0.0, False

    def request(self, first: Request, sampling: SamplingConfig) -> Request:
        """The request of the next turn. RewardError where what `reset` adds leaves no room for an answer."""
        length = len(self.prompt) + len(self.tokens)
        most = self.host.fits(length, sampling.max_completion_length - len(self.tokens))
        if most < 1:
            raise RewardError(f"environment's 'reset': expected room for an answer, got a prompt of {length} tokens")
        least = min(sampling.min_completion_length, most)
        prompt = (*self.prompt, *self.tokens)
        return replace(first, prompt=prompt, keep=True, max_completion_length=most, min_completion_length=least)

    def take(self, row: AnswerRow, most: int) -> bool:
        """Take a drawn turn, and answer it; whether another turn is to be drawn. most: tokens behind the prompt."""
        begin, self.finish_reason = len(self.prompt) + len(self.tokens), row.finish_reason
        self.tokens += row.tokens
        self.turns.append((begin, begin + len(row.tokens)))
        self.logprobs += row.logprobs
        among_all = [torch.empty(0, dtype=torch.int32)] * (len(row.tokens) - len(row.supports))
        self.supports += [*row.supports, *among_all]
        self.versions += row.versions
        self._drawn += 1
        ended = row.finish_reason == "eos"
        message, calls = self.host.parse(row.tokens, row.prompt, ended=ended)
        self.messages.append(message)
        goes_on = bool(calls) and row.finish_reason != "length" and self._drawn < self.host.max_turns
        results = [self._call(call) for call in calls] if goes_on else []
        if method := getattr(self.environment, "get_turn_reward", None):
            self.turn_rewards.append((self.host.reward(method) or 0.0) + self._owed)
            self._owed = 0.0
        if calls and not goes_on:
            self.finish_reason = "length"  # it had more to do
        return goes_on and self._answer(results, ended, most)

    def _call(self, call: Mapping[str, Any]) -> Message:
        """Call a tool; its result as a message."""
        self.calls += 1
        function = call.get("function") or {}
        given = function.get("arguments") or {}
        name, error = str(function.get("name", call.get("name", "unknown"))), call.get("error")
        if error is None and call.get("type") != "function":
            error = f"calls of the type {call.get('type')!r} are not known"
        if error is None and name not in self._tools:
            error = f"Tool {name} not found."
        if error is None and self._hung:
            error = "an earlier call has not come back"
        text = ""
        if error is None:
            try:
                with settings_kept(f"tool {name!r}"):
                    arguments = dict(json.loads(given) if isinstance(given, str) else given)
                    text = str(self.host.call(lambda: self._tools[name](**arguments), self.host.timeout))
            except TookTooLong:
                self._hung = True  # what it does to the environment, nobody knows
                error = f"it took longer than {self.host.timeout:g} seconds"
            except ERRORS as raised:
                error = _said(raised)
        if error is not None:
            self.failures += 1
            text = str({"error": error})
        if len(text) > LARGEST_RESULT:
            text = f"{text[:LARGEST_RESULT]}… ({len(text) - LARGEST_RESULT} characters more)"
        return self.host._result(name, text)

    def _answer(self, results: list[Message], ended: bool, most: int) -> bool:
        """Put results behind what was drawn; False where they cannot stand there, which ends the conversation."""
        kept, after = [*self.prompt, *self.tokens], list[int]()
        n = len(self.prompt)
        with contextlib.suppress(TemplateError, TypeError, ValueError):  # of what no template or tokenizer takes
            if self.host.rewrites:
                after = encode(self.host.tokenizer, self.host.text([*self.messages, *results], **self.template))
            else:
                end = [] if ended else [int(self.host.tokenizer.eos_token_id)]  # type: ignore[arg-type]
                after = [*kept, *end, *self.host.suffix(results, self.template)]
        if self.host.fits(len(after), most - (len(after) - n)) < 1 or after[:n] != kept[:n]:
            self.finish_reason = "length"
            return False
        self.messages += results
        if self.host.rewrites:
            same = next((i for i, (a, b) in enumerate(zip(kept, after, strict=False)) if a != b), len(kept))
            self._keep_drawn(same)
        self.tokens = after[n:]
        return True

    def _keep_drawn(self, end: int) -> None:
        """Let tokens from a position on count as given."""
        n = sum(first < end for first, _ in self.turns)
        self._owed += sum(self.turn_rewards[n:])  # to the next turn, as there is no token left of these
        self.turns = [(first, min(last, end)) for first, last in self.turns[:n]]
        del self.turn_rewards[n:]
        drawn = sum(last - first for first, last in self.turns)
        for values in (self.logprobs, self.supports, self.versions):
            del values[drawn:]

    def end(self) -> Talk:
        """The finished conversation; the environment says what it is worth."""
        method = getattr(self.environment, "get_reward", None)
        reward = None if method is None else self.host.reward(method)
        if self.environment is not None and not self._hung:
            self.host.free.append(self.environment)
        return Talk(
            messages=self.messages,
            n_prompt=self.n_prompt,
            reward=reward,
            turn_rewards=tuple(self.turn_rewards),
            calls=self.calls,
            failures=self.failures,
        )


def _said(error: BaseException) -> str:
    try:
        return str(error) or type(error).__name__
    except Exception:  # by the error's own __str__
        return type(error).__name__


def make_conversations(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> Conversations | None:
    """The conversations of a run; None where it has neither environments nor tools."""
    if not config.converses:
        return None
    make = config.environment
    if isinstance(make, str):
        make = load_object(make, "environment", "module:class or path/file.py:class")
    return Conversations(
        tokenizer,
        read_context_length(config.model_name_or_path, config.whole_reward_model),
        make=make,
        tools=[] if config.tools is None else load_tools(config.tools),
        max_turns=config.max_turns,
        timeout=config.tool_timeout,
    )


def load_tools(spec: str) -> list[Callable[..., Any]]:
    """The public functions that a module or file defines."""
    module = load_module(spec, "tools", spec)
    functions = [f for name, f in vars(module).items() if inspect.isfunction(f) and not name.startswith("_")]
    own: list[Callable[..., Any]] = [f for f in functions if f.__module__ == module.__name__]
    if not own:
        raise ConfigError(f"tools: expected functions in {spec!r}, got none")
    return own
