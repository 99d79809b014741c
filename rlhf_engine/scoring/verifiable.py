"""Rewards that can be checked without a model: `--reward_funcs math format,weight=…` and so on, by name.

    math         1 where the answer is that of the data (column `answer`), by math-verify
    format       1 where the whole answer matches a pattern
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
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from rlhf_engine.errors import ConfigError

Texts = Sequence[Any]
_FENCED = re.compile(r"```(?:[\w+-]*)\n(.*?)```", re.DOTALL)
_INSTALL = "pip install 'rlhf-engine[rewards]' has it"
_RUNNER = """
import os, resource, sys
seconds, size = map(int, sys.argv[1:])
for kind, limit in (
    (resource.RLIMIT_CPU, seconds),
    (resource.RLIMIT_AS, size),
    (resource.RLIMIT_FSIZE, 2**24),
    (resource.RLIMIT_CORE, 0),
):
    resource.setrlimit(kind, (limit, limit))
source = sys.stdin.buffer
read = lambda: source.read(int(source.readline()))
answer = read()
names = {"__name__": "__main__"}
try:
    exec(compile(answer, "answer", "exec"), names)
    tests, word = read(), read()
    exec(compile(tests, "tests", "exec"), names)
except BaseException:
    os._exit(1)
sys.__stdout__.flush()
os.write(1, word)
os._exit(0)
"""
"""Program of `code`: the tests and the word that says they passed are read when the answer's code has ended."""


def text_of(completion: Any) -> str:
    """Text of an answer: a string, or of TRL's conversations the last message's content."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"] or "")


def fenced(text: str) -> str:
    """The last fenced block of a text; the whole text where there is none."""
    found = _FENCED.findall(text)
    return str(found[-1]) if found else text


@dataclass(frozen=True, kw_only=True)
class Format:
    """Reward of 1 for an answer that matches a pattern from its first character to its last, else 0.

    Args:
        pattern: regular expression in which a dot matches line feeds, too.
    """

    __name__: ClassVar[str] = "format"
    pattern: str = r"<think>.*?</think>\s*<answer>.*?</answer>\s*"

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            got = f"{self.pattern!r}: {error}"
            raise ConfigError(f"reward_funcs: format: expected a regular expression, got {got}") from error

    def __call__(self, completions: Texts, **columns: Any) -> list[float]:
        whole = re.compile(self.pattern, re.DOTALL)
        return [float(whole.fullmatch(text_of(completion)) is not None) for completion in completions]


@dataclass(frozen=True, kw_only=True)
class Length:
    """Reward of 0 for an answer of `least` to `most` tokens; beside them it falls to −1 over `buffer` tokens.

    With `most` and `buffer` this is the soft overlong punishment of DAPO (arXiv 2503.14476, equation 13), whose
    L_max is `most` + `buffer`.

    Args:
        least: tokens that cost nothing at least.
        most: tokens that cost nothing at most; None: any number.
        buffer: tokens from no cost to all of it.
    """

    __name__: ClassVar[str] = "length"
    least: int = 0
    most: int | None = None
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
    """Reward of minus the share of an answer's n-grams of words that it has had before: 0 without, towards −1.

    Args:
        n: words of an n-gram. An answer of fewer words has none, and 0.
    """

    __name__: ClassVar[str] = "repetition"
    n: int = 3

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ConfigError(f"reward_funcs: repetition: expected n of at least 1, got {self.n}")

    def __call__(self, completions: Texts, **columns: Any) -> list[float]:
        return [self._of(text_of(completion).lower().split()) for completion in completions]

    def _of(self, words: list[str]) -> float:
        grams = list(zip(*(words[i:] for i in range(self.n)), strict=False))
        return len(set(grams)) / len(grams) - 1.0 if grams else 0.0


@dataclass(frozen=True, kw_only=True)
class JsonSchema:
    """Reward of 1 for an answer that is JSON of a schema, else 0; JSON may stand in a fenced block.

    Args:
        schema: file with the schema; "": the data's column `schema` has each row's, as text or as an object.
    """

    __name__: ClassVar[str] = "json_schema"
    schema: str = ""

    def __post_init__(self) -> None:
        _jsonschema()
        if self.schema:
            self._checked(_read_json(self.schema))

    def __call__(self, completions: Texts, schema: Sequence[Any] | None = None, **columns: Any) -> list[float]:
        if self.schema:
            schemas: Sequence[Any] = [_read_json(self.schema)] * len(completions)
        elif schema is None:
            raise ConfigError("reward_funcs: json_schema: expected a column `schema`, or json_schema,schema=FILE")
        else:
            schemas = [json.loads(each) if isinstance(each, str) else each for each in schema]
        return [self._of(text_of(c), self._checked(each)) for c, each in zip(completions, schemas, strict=True)]

    @staticmethod
    def _checked(schema: Any) -> Any:
        """A validator; it fetches nothing that a schema refers to. Raises ConfigError for what is no schema."""
        library = _jsonschema()
        from referencing import Registry  # which jsonschema needs

        try:
            kind = library.validators.validator_for(schema)
            kind.check_schema(schema)
        except library.SchemaError as error:
            raise ConfigError(f"reward_funcs: json_schema: expected a JSON schema, got {error.message}") from error
        return kind(schema, registry=Registry())

    @staticmethod
    def _of(text: str, validator: Any) -> float:
        try:
            return float(validator.is_valid(json.loads(fenced(text))))
        except (ValueError, RecursionError):
            return 0.0


@dataclass(frozen=True, kw_only=True)
class Code:
    """Reward of 1 for an answer whose Python code runs, and the data's column `tests` after it, without an error.

    The last fenced block of an answer is its code. Each answer runs in a process of its own, in an empty folder, with
    limits. They hold programs that go wrong. They are no sandbox: a program that means harm has the rights of the run.

    Args:
        timeout: seconds of an answer.
        memory: MiB of an answer.
        jobs: answers at a time; 0: one for each core.
    """

    __name__: ClassVar[str] = "code"
    timeout: float = 5.0
    memory: int = 512
    jobs: int = 0

    def __post_init__(self) -> None:
        if os.name != "posix":
            raise ConfigError("reward_funcs: code: expected a system that limits processes (Linux, macOS), got none")
        if self.timeout <= 0 or self.memory < 64:
            got = f"{self.timeout:g} and {self.memory}"
            raise ConfigError(f"reward_funcs: code: expected a timeout above 0 and memory of 64 at least, got {got}")

    def __call__(self, completions: Texts, tests: Sequence[Any] | None = None, **columns: Any) -> list[float]:
        if tests is None:
            raise ConfigError("reward_funcs: code: expected a column `tests` with Python code, got none")
        sources = ["\n".join(each) if isinstance(each, list) else str(each) for each in tests]
        with ThreadPoolExecutor(self.jobs or os.cpu_count() or 1) as pool:
            return list(pool.map(self._of, [fenced(text_of(c)) for c in completions], sources))

    def _of(self, answer: str, tests: str) -> float:
        word = os.urandom(16)
        parts = [answer.encode(errors="replace"), tests.encode(errors="replace"), word]
        given = b"".join(b"%d\n%b" % (len(part), part) for part in parts)
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", _RUNNER, str(int(self.timeout) + 1), str(self.memory * 2**20)],
                cwd=folder,
                env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                process.communicate(given, timeout=self.timeout)
            except (subprocess.TimeoutExpired, BrokenPipeError):
                pass
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            return float(process.returncode == 0 and output.read().endswith(word))


@dataclass(kw_only=True)
class Math:
    """Reward of 1 for an answer that equals the data's, else 0, by math-verify; None where the data's cannot be read.

    The data's column `answer` has a number or LaTeX; of a text such as GSM8K's, what follows `####`. A process of its
    own compares, and is ended where an answer takes too long.

    Args:
        timeout: seconds of an answer.
        column: column of the data with the answers.
    """

    __name__: ClassVar[str] = "math"
    timeout: float = 5.0
    column: str = "answer"
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.timeout <= 0:
            raise ConfigError(f"reward_funcs: math: expected a timeout above 0, got {self.timeout:g}")
        try:
            import math_verify  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"reward_funcs: math: expected the package math-verify, got none; {_INSTALL}") from error

    def __call__(self, completions: Texts, **columns: Any) -> list[float | None]:
        if self.column not in columns:
            raise ConfigError(f"reward_funcs: math: expected a column {self.column!r}, got {sorted(columns)}")
        return [self._of(text_of(c), str(gold)) for c, gold in zip(completions, columns[self.column], strict=True)]

    def _of(self, answer: str, gold: str) -> float | None:
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, str(Path(__file__).with_name("math_worker.py"))]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            if self._line(60.0) is None:  # until it has imported what it needs
                self.close()
                raise RuntimeError("the process that compares answers did not start")
        assert self._process.stdin is not None
        gold = gold.rpartition("####")[2].strip()
        self._process.stdin.write(json.dumps([gold, answer]).encode() + b"\n")
        self._process.stdin.flush()
        found = self._line(self.timeout)
        if found is None:
            self.close()
            return 0.0
        same: float | None = json.loads(found)
        return same

    def _line(self, seconds: float) -> bytes | None:
        """The worker's next line; None where it takes longer, or has ended."""
        assert self._process is not None
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            return self._process.stdout.readline() or None if selector.select(seconds) else None

    def close(self) -> None:
        """End the process that compares."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            self._process = None

    def __del__(self) -> None:
        self.close()


BUILT_IN: dict[str, Any] = {
    "code": Code,
    "format": Format,
    "json_schema": JsonSchema,
    "length": Length,
    "math": Math,
    "repetition": Repetition,
}


def is_built_in(spec: str) -> bool:
    """Whether a reward source is one of this module, by name, with or without options."""
    return spec.partition(",")[0] in BUILT_IN


def make(spec: str) -> Callable[..., list[float | None]]:
    """Make a reward function of this module.

    Args:
        spec: a name, then its options: `length,most=200,buffer=50`.

    Returns:
        A function of TRL's signature.

    Raises:
        ConfigError: an unknown name or option, a value that does not fit, or a package that is not installed.
    """
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


def _jsonschema() -> Any:
    try:
        import jsonschema
    except ImportError as error:
        raise ConfigError(
            f"reward_funcs: json_schema: expected the package jsonschema, got none; {_INSTALL}"
        ) from error
    return jsonschema


def _read_json(path: str) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"reward_funcs: json_schema: expected a file with a schema, got {path!r}: {error}") from error
