"""Rewards that can be checked without a model: `--reward_funcs math format,weight=…` and so on, by name.

    math         1 where the answer is that of the data (column `answer`), by math-verify
    format       1 where the whole answer has a form: thoughts, then the answer, or a pattern
    length       0 between `least` and `most` tokens, down to −1 over `buffer` tokens beside them
    repetition   −(share of n-grams of words that were said before)
    json_schema  1 where the answer is JSON of a schema
    code         1 where the answer's code passes the tests of the data (column `tests`)

Options follow a name after commas: `length,most=200,buffer=50`. Each has TRL's signature, so it serves there as well:
`verifiable.make("length,most=200")`. Sums of them are weighted by `--reward_weights`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from rlhf_engine.data.tokenize import text_of
from rlhf_engine.errors import ConfigError

Texts = Sequence[Any]
_INSTALL = "pip install 'rlhf-engine[rewards]' has it"
_JUDGE = Path(__file__).with_name("judge.py")
_SPARE = 10.0  # seconds beyond its limit after which a process that judges is given up


def _ends_with_think(prompts: Sequence[Any] | None, n: int) -> list[bool | None]:
    """Whether each prompt ends with <think>; None where TRL gives a conversation without its template."""
    return [p.rstrip().endswith("<think>") if isinstance(p, str) else None for p in prompts] if prompts else [False] * n


@dataclass(kw_only=True)
class Judged:
    """Reward judged in processes apart, within limits of time and memory; beyond them an answer has 0."""

    __name__: ClassVar[str]
    timeout: float = 5.0  # seconds of an answer
    _idle: list[subprocess.Popen[bytes]] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        if self.timeout <= 0:
            raise ConfigError(f"reward_funcs: {self.__name__}: expected a timeout above 0, got {self.timeout:g}")

    def _judge(self, rows: list[Any], batch: int = 1000, jobs: int = 1, memory: int = 4096) -> list[float | None]:
        requests = [[self.timeout, memory * 2**20, rows[i : i + batch]] for i in range(0, len(rows), batch)]
        with ThreadPoolExecutor(jobs) as pool:
            return [reward for rewards in pool.map(self._ask, requests) for reward in rewards]

    def _ask(self, request: list[Any]) -> list[float | None]:
        worker, n = self._idle.pop() if self._idle else self._start(), len(request[-1])
        assert worker.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            worker.stdin.write(json.dumps(request).encode() + b"\n")
            worker.stdin.flush()
        reply = _line(worker, self.timeout * n + _SPARE)
        if reply is None:
            _end(worker)
            return [0.0] * n
        self._idle.append(worker)
        rewards: list[Any] = json.loads(reply)
        for reward in rewards:
            if isinstance(reward, str):
                raise ConfigError(f"reward_funcs: {self.__name__}: {reward}")
        return rewards

    def _start(self) -> subprocess.Popen[bytes]:
        worker = subprocess.Popen(
            [sys.executable, "-I", "-X", "int_max_str_digits=0", str(_JUDGE), self.__name__],
            env={"PATH": os.defpath},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        if _line(worker, 60.0) is None:  # until it has imported what it needs
            _end(worker)
            raise RuntimeError("the process that judges answers did not start")
        return worker

    def close(self) -> None:
        """End the processes that judge."""
        while self._idle:
            _end(self._idle.pop())

    def __del__(self) -> None:
        self.close()


def _line(worker: subprocess.Popen[bytes], seconds: float) -> bytes | None:
    """A worker's next line; None where it takes longer, or has ended."""
    assert worker.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(worker.stdout, selectors.EVENT_READ)
        return worker.stdout.readline() or None if selector.select(seconds) else None


def _end(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # of a request that it has not read
                pipe.close()


@dataclass(kw_only=True)
class Format(Judged):
    """Reward of 1 for an answer that has a form from its first character to its last, else 0."""

    __name__: ClassVar[str] = "format"
    pattern: str = ""
    """Regular expression in which a dot matches line feeds, too. Empty: thoughts in <think>, then one answer in
    <answer>, neither empty, where the prompt may have opened <think>."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            re.compile(self.pattern)
        except re.error as error:
            got = f"{self.pattern!r}: {error}"
            raise ConfigError(f"reward_funcs: format: expected a regular expression, got {got}") from error

    def __call__(self, completions: Texts, prompts: Sequence[Any] | None = None, **columns: Any) -> list[float | None]:
        opened = _ends_with_think(prompts, len(completions))
        return self._judge([(text_of(c), self.pattern, o) for c, o in zip(completions, opened, strict=True)])


@dataclass(frozen=True, kw_only=True)
class Length:
    """Reward of 0 for an answer of `least` to `most` tokens; beside them it falls to −1 over `buffer` tokens.

    With `most` and `buffer` this is the soft overlong punishment of DAPO (arXiv 2503.14476, equation 13), whose L_max
    is `most` + `buffer`.
    """

    __name__: ClassVar[str] = "length"
    least: int = 0
    most: int | None = None  # none: any number
    buffer: int = 1

    def __post_init__(self) -> None:
        if self.buffer < 1:
            raise ConfigError(f"reward_funcs: length: expected a buffer of at least 1 token, got {self.buffer}")
        if self.most is not None and self.most < self.least:
            raise ConfigError(f"reward_funcs: length: expected most of at least {self.least}, got {self.most}")

    def __call__(self, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        beside = [
            max(self.least - len(ids), 0 if self.most is None else len(ids) - self.most, 0) for ids in completion_ids
        ]
        return [-min(1.0, tokens / self.buffer) for tokens in beside]


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """Reward of minus the share of an answer's n-grams of words that it has had before: 0 without, towards −1."""

    __name__: ClassVar[str] = "repetition"
    n: int = 3  # words of an n-gram. An answer of fewer words has none, and 0.

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ConfigError(f"reward_funcs: repetition: expected n of at least 1, got {self.n}")

    def __call__(self, completions: Texts, **columns: Any) -> list[float]:
        return [self._of(text_of(completion).lower().split()) for completion in completions]

    def _of(self, words: list[str]) -> float:
        grams = list(zip(*(words[i:] for i in range(self.n)), strict=False))
        return len(set(grams)) / len(grams) - 1.0 if grams else 0.0


@dataclass(kw_only=True)
class JsonSchema(Judged):
    """Reward of 1 for an answer that is JSON of a schema, else 0; JSON may stand in a fenced block."""

    __name__: ClassVar[str] = "json_schema"
    schema: str = ""  # file with the schema. Empty: the data's column `schema` has each row's, as text or as an object.

    def __post_init__(self) -> None:
        super().__post_init__()
        _require("json_schema", "jsonschema")
        if self.schema:
            self(completions=["{}"])

    def __call__(self, completions: Texts, schema: Sequence[Any] | None = None, **columns: Any) -> list[float | None]:
        if self.schema:
            schemas: Sequence[Any] = [_read_json(self.schema)] * len(completions)
        elif schema is None:
            raise ConfigError("reward_funcs: json_schema: expected a column `schema`, or json_schema,schema=FILE")
        else:
            schemas = [json.loads(each) if isinstance(each, str) else each for each in schema]
        return self._judge([(text_of(c), each) for c, each in zip(completions, schemas, strict=True)])


@dataclass(kw_only=True)
class Code(Judged):
    """Reward of 1 for an answer whose Python code runs, and the data's column `tests` after it, without an error.

    The last fenced block of an answer is its code. It runs in a process of its own, in an empty folder, with limits.
    The tests run in another: they call what the code defines, and compare what it returns as data. What the answer's
    process can reach all the same is said at the top of `judge.py`. It is no sandbox where Linux has no Landlock.
    """

    __name__: ClassVar[str] = "code"
    memory: int = 512  # miB of an answer
    jobs: int = 0  # answers at a time; 0: one for each core

    def __post_init__(self) -> None:
        if os.name != "posix":
            raise ConfigError("reward_funcs: code: expected a system that limits processes (Linux, macOS), got none")
        if self.timeout <= 0 or self.memory < 64:
            got = f"{self.timeout:g} and {self.memory}"
            raise ConfigError(f"reward_funcs: code: expected a timeout above 0 and memory of 64 at least, got {got}")

    def __call__(self, completions: Texts, tests: Sequence[Any] | None = None, **columns: Any) -> list[float | None]:
        if tests is None:
            raise ConfigError("reward_funcs: code: expected a column `tests` with Python code, got none")
        sources = ["\n".join(each) if isinstance(each, list) else str(each) for each in tests]
        rows = [(text_of(c), each, self.timeout) for c, each in zip(completions, sources, strict=True)]
        return self._judge(rows, 1, self.jobs or os.cpu_count() or 1, self.memory)


@dataclass(kw_only=True)
class Math(Judged):
    r"""Reward of 1 for an answer that equals the data's, else 0, by math-verify; None where the data's cannot be read.

    The data's `column` has a number or LaTeX; of a text such as GSM8K's, what follows `####`. Of a completion the
    answer counts and not its thoughts: what follows `</think>`, in it what is in `<answer>` or in the last `\boxed`,
    and without these the end.
    """

    __name__: ClassVar[str] = "math"
    column: str = "answer"

    def __post_init__(self) -> None:
        super().__post_init__()
        _require("math", "math-verify")

    def __call__(self, completions: Texts, prompts: Sequence[Any] | None = None, **columns: Any) -> list[float | None]:
        if self.column not in columns:
            raise ConfigError(f"reward_funcs: math: expected a column {self.column!r}, got {sorted(columns)}")
        golds = [str(gold).rpartition("####")[2].strip() for gold in columns[self.column]]
        opened = _ends_with_think(prompts, len(completions))
        return self._judge([(text_of(c), g, o) for c, g, o in zip(completions, golds, opened, strict=True)])


BUILT_IN: dict[str, Any] = {
    "code": Code,
    "format": Format,
    "json_schema": JsonSchema,
    "length": Length,
    "math": Math,
    "repetition": Repetition,
}


def make(spec: str) -> Callable[..., list[float | None]]:
    """Make a reward function of TRL's signature of a name and its options, such as `length,most=200,buffer=50`."""
    name, *given = spec.split(",")
    if name not in BUILT_IN:
        raise ConfigError(f"reward_funcs: expected one of {', '.join(sorted(BUILT_IN))}, got {name!r}")
    kinds = {f.name: f.type for f in fields(BUILT_IN[name]) if not f.name.startswith("_")}
    options: dict[str, Any] = {}
    for each in given:
        key, equals, text = each.partition("=")
        if key not in kinds or not equals:
            raise ConfigError(f"reward_funcs: {name}: expected options {', '.join(kinds)} as key=value, got {each!r}")
        options[key] = _value(name, key, str(kinds[key]), text)
    made: Callable[..., list[float | None]] = BUILT_IN[name](**options)
    return made


def _value(name: str, key: str, kind: str, text: str) -> Any:
    wanted = {"int": int, "int | None": int, "float": float}.get(kind, str)
    try:
        return wanted(text)
    except ValueError as error:
        what = "a whole number" if wanted is int else "a number"
        raise ConfigError(f"reward_funcs: {name}: expected {what} for {key}, got {text!r}") from error


def _require(name: str, package: str) -> None:
    try:
        __import__(package.replace("-", "_"))
    except ImportError as error:
        raise ConfigError(f"reward_funcs: {name}: expected the package {package}, got none; {_INSTALL}") from error


def _read_json(path: str) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"reward_funcs: json_schema: expected a file with a schema, got {path!r}: {error}") from error
