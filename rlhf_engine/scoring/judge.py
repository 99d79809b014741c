"""Process that judges answers apart from the run: lines of JSON in, a reward, null or what is wrong with the data out.

It runs as a script, `judge.py REWARD`, and imports nothing of this project. A child process judges answers, with limits
of time for each and of memory. At its end all that it started is ended, on Linux also what left its process group.

The answers of `code` run one process further away. It has the answer's code and what the tests call it with. It never
has the tests, nor what they expect, and no say in the verdict:

    worker ──fork──► tests ──starts──► answer        tests → answer: call add with 2, 3; answer → tests: 5

What returns is made anew as plain data of Python's own types, which the tests compare. An object of the answer's own
classes stays there: the tests hold a `_Remote` of it, which equals no plain data, whatever its class says.

Where Linux has Landlock (5.13 on), the answer reads Python's and the system's folders and writes its own folder alone.
It has no privileges and traces no process. By version it makes no TCP connection (6.7) and signals no other process
(6.12). Not held are UDP, sockets in the file system, the disk's space, and processes made without end until the time
is over. Without Landlock the answer has all rights of the user: one that means harm can change the judge itself.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import io
import json
import operator
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from types import ModuleType
from typing import IO, Any

# What only some judges need is imported by these: the process of an answer starts sooner.

_LONGEST = 2**26  # bytes of a message between the tests and the answer
_TAG = r"</?(?:think|answer)>"
_BLOCK = rf"\s*(?!{_TAG})\S(?:(?!{_TAG}).)*"
_THOUGHTS_AND_ANSWER = rf"\s*<think>{_BLOCK}</think>\s*<answer>{_BLOCK}</answer>\s*"


def fenced(text: str) -> str:
    """The last fenced block of a text; the whole text where there is none."""
    blocks = re.findall(r"```(?:[\w+-]*)\n(.*?)```", text, re.DOTALL)
    return str(blocks[-1]) if blocks else text


def judge_format(text: str, pattern: str, opened: bool | None) -> float:
    """Judge by a pattern; "": thoughts, then an answer. opened: the prompt ends with <think>; None: it may do so."""
    if pattern:
        return float(re.fullmatch(pattern, text, re.DOTALL) is not None)
    starts = {True: ["<think>"], False: [""], None: ["", "<think>"]}[opened]
    return float(any(re.fullmatch(_THOUGHTS_AND_ANSWER, start + text, re.DOTALL) for start in starts))


def judge_json_schema(text: str, schema: Any) -> float | str:
    """Judge by a JSON schema; nothing that it refers to is fetched."""
    import jsonschema
    from referencing import Registry  # which jsonschema needs
    from referencing.exceptions import Unresolvable

    try:
        kind = jsonschema.validators.validator_for(schema)
        kind.check_schema(schema)
        # int("NaN") raises: NaN and Infinity, which Python reads, are no JSON
        return float(kind(schema, registry=Registry()).is_valid(json.loads(fenced(text), parse_constant=int)))
    except jsonschema.SchemaError as error:
        return f"expected a JSON schema, got {error.message}"
    except Unresolvable as error:
        return f"expected a JSON schema that refers to itself alone, got {error}"
    except (ValueError, RecursionError):
        return 0.0


def answer_of(text: str, opened: bool | None = False) -> str:
    """Cut a text to its answer: after its thoughts, in <answer>, from the last box or "final answer is" on."""
    _, closed, rest = text.rpartition("</think>")
    if not closed and (opened or "<think>" in text):
        return ""  # thoughts that did not end
    before, closed, _ = rest.rpartition("</answer>")
    text = before.rpartition("<answer>")[2].strip(" \n.") if closed else rest
    for start in ("\\boxed", "final answer is"):
        if start in text:
            return text[text.rindex(start) :]
    return _boxed(text) if closed and not re.search("[A-Za-z]{2}", re.sub(r"\\[A-Za-z]+", "", text)) else text


def _boxed(text: str) -> str:
    """A text that is no LaTeX as LaTeX: of x + 1 math-verify else reads the 1."""
    return text if "$" in text or "\\boxed" in text or not text else f"$\\boxed{{{text}}}$"


def judge_math(text: str, gold: str, opened: bool | None = False) -> float | None:
    """Judge by comparing with the right answer, a number or LaTeX; None where that cannot be read."""
    import logging

    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)  # it logs what it cannot read
    right, given = ([*parse(each, parsing_timeout=None)] for each in (_boxed(gold), answer_of(text, opened)))
    return float(verify(right, given, timeout_seconds=None)) if right else None


_FORMS: tuple[tuple[type, Callable[[Any], Any], Callable[[list[Any]], Any]], ...] = (
    (dict, dict.items, dict),
    *((kind, list, kind) for kind in (list, tuple, set, frozenset, bytes)),
    (complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    (range, lambda value: [value.start, value.stop, value.step], lambda parts: range(*parts)),
)
"""Plain data that JSON lacks: type, its parts, and the value made of these."""
_MAKE = {kind.__name__: make for kind, _, make in _FORMS}


class _Elsewhere:
    """Has the attributes of an object of the other process."""

    _remote: tuple[_End, int]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # libraries look for protocols there, such as numpy for addresses
            raise AttributeError(name)
        return self._remote[0].ask("getattr", self, name)


class _Remote(_Elsewhere):
    """Object of the other process, where all is done but comparison and arithmetic with plain data."""

    def __init__(self, end: _End, number: int) -> None:
        object.__setattr__(self, "_remote", (end, number))

    def __setattr__(self, name: str, value: Any) -> None:
        self._remote[0].ask("setattr", self, name, value)


def _forwarded(name: str, *, between: bool) -> Callable[..., Any]:
    def method(self: _Remote, /, *arguments: Any, **options: Any) -> Any:
        if between and not isinstance(arguments[0], _Remote):
            return NotImplemented
        return self._remote[0].ask(name, self, *arguments, **options)

    return method


_ALONE = ("call", "len", "iter", "next", "bool", "int", "float", "str", "repr", "abs", "round", "getitem", "setitem")
_BETWEEN = ("eq", "lt", "le", "gt", "ge", "add", "sub", "mul", "matmul", "truediv", "mod", "and", "or", "xor")
for _name in _ALONE + _BETWEEN:
    setattr(_Remote, f"__{_name}__", _forwarded(_name, between=_name in _BETWEEN))


class _End:
    """One end of the pipes between tests and answer: it asks the other end, and serves it in the meantime."""

    def __init__(self, source: IO[bytes], sink: IO[bytes], names: dict[str, Any] | None = None) -> None:
        self._source, self._sink, self._names = source, sink, names
        self._kept: dict[int, Any] = {}  # by number: objects of this end that the other holds
        self._remotes: dict[int, Any] = {}  # by number: objects of the other end, so that one stays one
        self._errors: dict[str, type[Exception]] = {}  # exceptions of the other end's own
        self._printed = io.StringIO()
        if names is not None:
            sys.stdout = self._printed

    def ask(self, what: str, /, *arguments: Any, **options: Any) -> Any:
        """Have a function of `builtins`, of `operator` or of `_function` called at the other end; it may raise here."""
        self._send({"do": what, "of": [self._pack(each) for each in arguments], "by": self._pack(options)})
        reply = self.wait()
        sys.stdout.write(reply["said"])
        if "raised" in reply:
            error = self._error(reply["raised"])(*self._unpack(reply["of"]))
            # it would end a loop of the tests, as if these had passed
            raise RuntimeError(*error.args) if isinstance(error, StopIteration) and what != "next" else error
        value = self._unpack(reply["is"])
        for argument, changed in zip(arguments, reply["changed"], strict=False):
            if changed is not None and value is None and what == "call":
                argument.clear()
                (argument.extend if isinstance(argument, list) else argument.update)(self._unpack(changed))
        return value

    def wait(self) -> dict[str, Any]:
        """Serve until the other end replies."""
        while True:
            line = self._source.readline(_LONGEST)
            if not line.endswith(b"\n"):
                raise SystemExit("the other process has ended, or talks too much")
            message: dict[str, Any] = json.loads(line)
            if "do" not in message:
                return message
            self._serve(message)

    def _serve(self, message: dict[str, Any]) -> None:
        changed: list[Any] = []
        try:
            arguments, options = [self._unpack(each) for each in message["of"]], self._unpack(message["by"])
            value = self._function(message["do"])(*arguments, **options)
            if value is None:  # a function that changes what it is given returns nothing
                changed = [self._pack(each) if type(each) in (list, dict, set) else None for each in arguments]
            reply = {"is": self._pack(value), "changed": changed}
        except Exception as error:  # code of others may raise anything; it is raised where it was asked for
            names = [each.__name__ for each in type(error).__mro__]
            reply = {"raised": names, "of": self._pack(list(error.args))}
        reply["said"] = self._printed.getvalue()
        self._printed.seek(0)
        self._printed.truncate()
        self._send(reply)

    def _function(self, name: str) -> Callable[..., Any]:
        own: dict[str, Callable[..., Any]] = {"call": lambda f, /, *args, **kwargs: f(*args, **kwargs), "bool": bool}
        if self._names is None:  # the answer asks: of an object of the tests it has its own data, and no way further
            own["getattr"] = lambda value, key: _data(value, key)[key]
            own["setattr"] = lambda value, key, new: _data(value, key).__setitem__(key, new)
            return own[name]
        names = self._names
        own |= {"exec": lambda code: exec(compile(code, "answer", "exec"), names), "name": names.__getitem__}
        return own.get(name) or getattr(builtins, name, None) or getattr(operator, name)

    def _send(self, message: dict[str, Any]) -> None:
        self._sink.write(json.dumps(message).encode() + b"\n")
        self._sink.flush()

    def _keep(self, value: Any) -> int:
        self._kept[id(value)] = value
        return id(value)

    def _pack(self, value: Any) -> Any:
        """A value as JSON: plain data whole, and of anything else the number under which this end keeps it."""
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, _Elsewhere):
            return ["yours", value._remote[1]]
        for kind, parts, _ in _FORMS:
            if isinstance(value, kind):
                number = None if type(value) is kind else self._keep(value)
                return [kind.__name__, [self._pack(part) for part in parts(value)], number]
        if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            return ["numpy", str(value.dtype), self._pack(value.tolist())]
        if isinstance(value, (int, float, str)):
            return ["value", value, self._keep(value)]
        if isinstance(value, type) and issubclass(value, Exception):
            return ["error", [each.__name__ for each in value.__mro__]]
        return ["mine", self._keep(value)]

    def _unpack(self, packed: Any) -> Any:
        if not isinstance(packed, list):
            return packed
        kind, first, *rest = packed
        if kind == "yours":
            return self._kept[first]
        if kind == "error":
            return self._error(first)
        if kind == "numpy":
            return importlib.import_module("numpy").array(self._unpack(rest[0]), first)[()]
        if kind == "mine":
            return self._remotes.setdefault(first, _Remote(self, first))
        value = first if kind == "value" else _MAKE[kind]([self._unpack(part) for part in first])
        if rest[0] is not None:  # plain data with attributes of its own, such as a named tuple's
            value = type(kind, (_Elsewhere, type(value)), {})(value)
            value._remote = (self, rest[0])
        return value

    def _error(self, names: list[str]) -> type[Exception]:
        """The exception of a class and its bases by name: Python's own, or one made here."""
        error = Exception
        for name in reversed(names):
            known = self._errors.get(name) or getattr(builtins, name, None)
            if known is None:
                known = self._errors[name] = type(name, (error,), {})
            if isinstance(known, type) and issubclass(known, Exception):
                error = known
        return error


def _data(value: Any, key: str) -> dict[str, Any]:
    """Data of an object of the tests that the answer may read and change: of instances, and no methods."""
    if callable(value) or isinstance(value, ModuleType) or hasattr(type(value), key):
        raise AttributeError(key)
    return vars(value)


class _Names(dict[str, Any]):
    """Names of the tests; one that they do not set is Python's, the standard library's, or the answer's."""

    def __init__(self, answer: _End, used: set[str]) -> None:
        super().__init__(__name__="__main__")
        self._answer, self._used = answer, used

    def __missing__(self, name: str) -> Any:
        if self._used != {name}:
            if hasattr(builtins, name):
                raise KeyError(name)
            if name in sys.stdlib_module_names:
                return importlib.import_module(name)
        return self._answer.ask("name", name)


def judge_code(answer: str, tests: str, seconds: float) -> float:
    """Judge by tests that run to their end; they call an answer that is in a process of its own."""
    import ast
    import subprocess

    folder = os.getcwd()
    process = subprocess.Popen(
        [sys.executable, "-I", "-X", "int_max_str_digits=0", __file__, "answer"],
        env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=lambda: _confine(folder, int(seconds) + 1),
    )
    assert process.stdin is not None
    assert process.stdout is not None
    end = _End(process.stdout, process.stdin)
    end.ask("exec", fenced(answer))
    tree = ast.parse(tests, "tests")
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    exec(compile(tree, "tests", "exec"), _Names(end, used))
    return 1.0


def _confine(folder: str, seconds: int) -> None:
    """Limit what this process may do, and where Linux has Landlock what it may reach."""
    import ctypes
    import struct

    for kind, limit in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_FSIZE, 2**24), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(kind, (limit, limit))
    libc = ctypes.CDLL(None)
    call = libc.syscall
    version = call(444, None, 0, 1) if sys.platform == "linux" else 0
    if version < 1:
        return
    rights = 2 ** (13, 14, 15, 15, 16)[min(version, 5) - 1] - 1  # all that are there, in landlock.h's order
    rules = struct.pack("QQQ", rights, 3, 3)[: 8 if version < 4 else 16 if version < 6 else 24]  # files, TCP, signals
    ruleset = call(444, rules, len(rules), 0)
    execute, write, read, folders = 1, 2, 4, 8
    with open("/proc/self/maps", encoding="utf-8") as maps:  # Python's own libraries, wherever they lie
        libraries = {os.path.dirname(line.split()[-1]) for line in maps if ".so" in line}
    seen = dict.fromkeys({sys.prefix, sys.base_prefix, "/usr", *libraries}, execute | read | folders)
    files = {"/etc/ld.so.cache": read, __file__: read, "/dev/urandom": read, "/dev/null": read | write}
    for path, allowed in (seen | files | {folder: rights}).items():
        if os.path.exists(path):
            call(445, ruleset, 1, struct.pack("=Qi", allowed, os.open(path, os.O_PATH | os.O_CLOEXEC)), 0)
    libc.prctl(38, 1, 0, 0, 0)  # no program gives this process more rights
    if call(446, ruleset, 0) or libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)):
        raise OSError("expected Landlock to hold the process of an answer")


_JUDGES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "format": (judge_format, ("", ".*", None)),
    "json_schema": (judge_json_schema, ("{}", {})),
    "math": (judge_math, ("1", "1")),
    "code": (judge_code, ("", "", 5.0)),
}
"""Judge of each reward, and a call that imports what it needs."""


def _silence() -> None:
    """Let what is judged read nothing and write nowhere."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)


def _judged(judge: Callable[..., Any], seconds: float, memory: int, rows: list[Any]) -> list[Any]:
    """Judge rows in a process, up to one at which it fails or goes beyond a limit; that row has 0."""
    import tempfile

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        out, into = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.setsid()
                os.chdir(folder)
                _silence()
                resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
                for row in rows:
                    signal.setitimer(signal.ITIMER_REAL, seconds)  # its signal ends the process, whatever it is at
                    os.write(into, json.dumps(judge(*row)).encode() + b"\n")
            finally:
                os._exit(0)
        os.close(into)
        os.waitpid(child, 0)
        with contextlib.suppress(OSError):  # its process group, then what Linux gives to the parent of all
            os.killpg(child, signal.SIGKILL)
        with contextlib.suppress(OSError):  # until there are none
            while sys.platform == "linux":
                with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as children:
                    for left in children.read().split():
                        os.kill(int(left), signal.SIGKILL)
                os.waitpid(-1, 0)
        with os.fdopen(out) as lines:
            verdicts = [json.loads(line) for line in lines]
    return verdicts if len(verdicts) == len(rows) else [*verdicts, 0.0]


def main() -> None:
    """Answer line by line, until there are no more."""
    if sys.argv[1] == "answer":
        source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        _silence()
        _End(source, sink, {"__name__": "__main__"}).wait()
    judge, trial = _JUDGES[sys.argv[1]]
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # what loses its parent becomes a child of this process
    if judge(*trial) == 0.0:  # it imports, and finds a parser that math-verify cannot use
        raise SystemExit(f"{sys.argv[1]}: expected a trial to pass; is its package the one that it was installed for?")
    print("ready", flush=True)
    for line in sys.stdin:
        seconds, memory, rows = json.loads(line)
        verdicts: list[Any] = []
        while len(verdicts) < len(rows):
            verdicts += _judged(judge, seconds, memory, rows[len(verdicts) :])
        print(json.dumps(verdicts), flush=True)


if __name__ == "__main__":
    main()
