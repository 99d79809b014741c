"""Judges of two answers to one prompt: rewards, a function, or a server with OpenAI's chat completions.

A function or a server sees every pair in both orders; a preference is the mean of both, so that a judge who prefers the
first answer whatever it says prefers nobody. A judge who says nothing usable in either order has given no verdict.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple

from rlhf_engine.config.commands import EvaluateConfig
from rlhf_engine.data.read import read_text
from rlhf_engine.errors import ConfigError, RewardError
from rlhf_engine.rollout.vllm.client import RequestGroup, Server, Transport
from rlhf_engine.scoring.rewards import load_reward

SERVER = Server(
    kind="a server with OpenAI's chat completions",
    option="judge",
    timeout_option="judge_timeout",
    key_variable="OPENAI_API_KEY",
)
TEMPLATE = """Two assistants have answered the same prompt. Which answer is better?

[Prompt]
{prompt}

[Answer A]
{first}

[Answer B]
{second}

Judge by how well the answer serves the prompt. Neither the order nor the length is a merit. Write one line: A if \
answer A is better, B if answer B is better, TIE if they are equally good."""
"""Question to a server; {prompt}, {first} and {second} are replaced."""
_FIELDS = ("{prompt}", "{first}", "{second}")
_MOST_TOKENS = 1024  # tokens of a judge's reply, some of which think first
_SAID = {"A": 1.0, "B": 0.0, "TIE": 0.5, "C": 0.5}
_BUSY = (429, 500)  # statuses after which a server is given time, up to the timeout
_FIRST_PAUSE = 1.0  # seconds; doubled each time
_AT_ONCE = 64  # pairs that a function sees in one call


class Pair(NamedTuple):
    """Two answers to one prompt, in the order in which a judge sees them."""

    prompt: str
    first: str
    second: str


class Verdict(NamedTuple):
    """Reply to one pair."""

    preference: float | None  # 1: the first is better, 0: the second, 0.5: neither; None: nothing usable was said
    reply: str  # in the judge's words, cut short; "" of a function


def make_judge(config: EvaluateConfig) -> FunctionJudge | ServerJudge:
    """Build the function or the client of a server that the options name; ConfigError for one that cannot judge."""
    assert config.judge is not None
    if not config.judge_is_server:
        return FunctionJudge(config.judge)
    template = TEMPLATE
    if config.judge_template is not None:
        template = read_text(config.judge_template, "judge_template")
    assert config.judge_model is not None
    return ServerJudge(
        config.judge,
        model=config.judge_model,
        template=template,
        timeout=config.judge_timeout,
    )


class FunctionJudge:
    """Judge by a function as in TRL: 0 or 1 says which answer is better, 0.5 neither, −1 or None no verdict."""

    def __init__(self, spec: str) -> None:
        """Load the function."""
        try:
            given: Any = load_reward(spec)
        except ConfigError as error:
            raise ConfigError(str(error).replace("reward_funcs", "judge")) from error
        if isinstance(given, type):
            given = given()
        self._judge: Callable[..., Any] = getattr(given, "judge", given)
        self._spec = spec

    def verdicts(self, pairs: Sequence[Pair]) -> Iterator[tuple[int, Verdict]]:
        """(place of the pair, verdict) of each pair, in any order."""
        for start in range(0, len(pairs), _AT_ONCE):
            some = pairs[start : start + _AT_ONCE]
            prompts = [pair.prompt for pair in some]
            completions = [[pair.first, pair.second] for pair in some]
            try:
                # TRL's judges may shuffle the order themselves; both orders are given here
                takes_order = "shuffle_order" in inspect.signature(self._judge).parameters
                options = {"shuffle_order": False} if takes_order else {}
                results = self._judge(prompts, completions, **options)
            except Exception as error:  # a user's function may raise anything; it is named and passed on
                raise RewardError(f"judge {self._spec!r} raised {type(error).__name__}: {error}") from error
            if not isinstance(results, Sequence) or isinstance(results, str) or len(results) != len(some):
                raise RewardError(f"judge {self._spec!r}: expected a list of {len(some)} results, got {results!r:.200}")
            for i, value in enumerate(results):
                yield start + i, Verdict(self._preference(value), "")

    def _preference(self, value: Any) -> float | None:
        if value is None or value == -1:
            return None
        if isinstance(value, (int, float)) and value in (0, 0.5, 1):
            return 1.0 - float(value)
        raise RewardError(f"judge {self._spec!r}: expected 0, 1, 0.5, -1 or None for each prompt, got {value!r}")


class ServerJudge:
    """Judge by a model behind `POST /v1/chat/completions`."""

    def __init__(self, url: str, *, model: str, template: str, timeout: float, requests: int = 8) -> None:
        """Make a client; nothing is sent yet."""
        for field in _FIELDS:
            if field not in template:
                raise ConfigError(f"judge_template: expected a text with {', '.join(_FIELDS)}, got none of {field}")
        self._http = Transport(url, SERVER, timeout=timeout)
        self._model, self._template, self._requests = model, template, requests

    def verdicts(self, pairs: Sequence[Pair]) -> Iterator[tuple[int, Verdict]]:
        """(place of the pair, verdict) of each pair, in any order; several are asked at once."""
        group = RequestGroup()
        with ThreadPoolExecutor(self._requests) as pool:
            asked = {pool.submit(self._ask, pair, group): i for i, pair in enumerate(pairs)}
            try:
                for future in as_completed(asked):
                    yield asked[future], future.result()
            finally:
                group.end()
                pool.shutdown(cancel_futures=True)

    def _ask(self, pair: Pair, group: RequestGroup) -> Verdict:
        values = dict(zip(_FIELDS, pair, strict=True))
        # in one pass, so that an answer is not looked at for fields
        question = re.sub("|".join(map(re.escape, _FIELDS)), lambda field: values[field[0]], self._template)
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0.0,
            "max_tokens": _MOST_TOKENS,
        }
        deadline, pause = time.monotonic() + self._http.timeout, _FIRST_PAUSE
        while True:
            status, raw = self._http.exchange("POST", "/v1/chat/completions", body, again=True, group=group)
            if status not in _BUSY or not group.pause(pause, deadline):
                break
            pause *= 2
        if status != 200:
            text = raw.decode(errors="replace")[:200]
            raise self._http.error(f"expected a verdict from /v1/chat/completions, got status {status}: {text}")
        return _verdict(_content(raw, self._http))


def _content(raw: bytes, http: Transport) -> str:
    try:
        content = json.loads(raw)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        text = raw.decode(errors="replace")[:200]
        raise http.error(f"expected choices[0].message.content from /v1/chat/completions, got {text!r}") from error
    if content is not None and not isinstance(content, str):
        raise http.error(f"expected text as choices[0].message.content, got {type(content).__name__}")
    return content or ""


def _verdict(reply: str) -> Verdict:
    """Verdict of the last line that is not empty: A, B or TIE, in whatever marks."""
    lines = [line for line in reply.splitlines() if line.strip()]
    word = re.sub(r"[^A-Za-z]", "", lines[-1]).upper() if lines else ""
    return Verdict(_SAID.get(word.removeprefix("ANSWER").removeprefix("VERDICT")), reply[-200:])


def by_reward(first: float | None, second: float | None) -> float | None:
    """Preference by two rewards: 1, 0, or 0.5 for equal ones; None where one is missing."""
    if first is None or second is None or math.isnan(first) or math.isnan(second):
        return None
    return 0.5 if first == second else float(first > second)
