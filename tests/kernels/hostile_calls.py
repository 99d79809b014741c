"""A program that calls everything above and in the C++ extension wrongly, one wrong argument at a time.

`python -m tests.kernels.hostile_calls EXTENSION [LAYER [NAME]]` makes sure that this build of the extension is in use,
one under AddressSanitizer say. It prints a line of JSON per function. The functions are those of
`hostile_targets.targets`; none can be left out.

Each function is called in a process of its own, which notes what it is about to do: one that dies names its call. Ops
are called with the arguments of `direct_calls.CALLS`. Every other function is called wrongly just before a right call
comes by, with the arguments of that call, while the drivers of `hostile_drivers` run.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from torch import Tensor

from .hostile_targets import Target, Watch, install, role_of, targets
from .hostile_values import EXTENSION, NO_TENSORS, changes, extension_changes, must_be_refused, parsed

MOST_CRASHES = 20
"""Of one function; each starts its process again, behind the call that ended it."""
MOST_PATTERNS = 4
"""Right calls of one function that are made wrong, each with other dtypes or other arguments left out."""
LIMIT_S = 300
NAMED = re.compile(
    r"[\w.\[\]'>-]+((, | \* )[\w.\[\]']+)*: (expected|\S+ needs) |"  # ours
    r"backend='cpu' cannot serve |"
    r"rlhf_kernels::\w+\(\) Expected a value of type .* for argument '\w+'|"  # torch's, of a schema
    r"[\w()]+\(\): incompatible |Unable to cast |bad cast"  # pybind11's
)
"""How a message begins that names the argument."""


class Attack:
    """What becomes of wrong calls of one function."""

    def __init__(self, target: Target, log: int, done_before: int) -> None:
        self._target, self._log, self._left = target, log, done_before
        self._patterns: set[str] = set()
        self._busy = False
        self.n_calls = self.n_refused = 0

    def note(self, text: str) -> None:
        os.write(self._log, (text.replace("\n", " ") + "\n").encode())

    def is_new(self, values: Any) -> bool:
        """Whether a right call is to be made wrong: not within another one, and unlike those before."""
        pattern = _pattern(values)
        if self._busy or pattern in self._patterns or len(self._patterns) >= MOST_PATTERNS:
            return False
        self._patterns.add(pattern)
        return True

    def call(self, label: str, function: Callable[[], Any], right: Callable[[], Any] | None, refused: bool) -> None:
        """One wrong call. It must raise in the way of its layer, or give what has the shapes of `right`'s result."""
        self.n_calls += 1
        if self.n_calls <= self._left:
            return
        self.note(f"> {label}")
        self._busy = True
        try:
            result = function()
        except Exception as error:
            self.n_refused += 1
            if not self._is_plain(label, error):
                self.note(f"! {label}: {type(error).__name__}: {error}"[:400])
        else:
            if refused:
                self.note(f"! {label}: taken")
            elif right is not None:
                self._compare(label, result, right)
        finally:
            self._busy = False

    def _is_plain(self, label: str, error: Exception) -> bool:
        """Whether an error says what is wrong: by the argument's name, or in torch's or Python's words."""
        if isinstance(error, (TypeError, ValueError)) and NAMED.match(str(error)):
            return True
        if isinstance(error, (RuntimeError, MemoryError)) and self._target.layer != "extension":
            return True  # torch's: a layout that it has no code for, memory that there is not
        if isinstance(error, RuntimeError):
            return NAMED.match(str(error)) is not None
        if self._target.layer == "wrapper":  # no user calls it
            return isinstance(error, (TypeError, ValueError, AttributeError, LookupError, AssertionError))
        return self._target.layer == "public" and label.endswith(NO_TENSORS)

    def _compare(self, label: str, result: Any, right: Callable[[], Any]) -> None:
        self._busy = True
        try:
            expected = right()
        except IndexError as error:
            self.note(f"! {label}: taken, and for the reference out of range: {error}"[:400])
            return
        except Exception:  # what is no number for one backend may be one for another
            return
        if _shapes(result) != _shapes(expected):
            self.note(f"! {label}: gave {_shapes(result)}, the reference {_shapes(expected)}"[:400])


def _pattern(value: Any) -> str:
    """What distinguishes right calls: kinds and dtypes, not sizes."""
    if isinstance(value, Tensor):
        return f"{value.dtype}{value.dim()}"
    if isinstance(value, (list, tuple)):
        return f"({' '.join(_pattern(part) for part in value)})"
    if isinstance(value, dict):
        return f"({' '.join(f'{name}={_pattern(part)}' for name, part in value.items())})"
    if isinstance(value, int) and not isinstance(value, bool):
        return "0" if value == 0 else "int"
    return str(value) if isinstance(value, (bool, str)) else type(value).__name__


def _shapes(value: Any) -> Any:
    if isinstance(value, Tensor):
        return list(value.shape)
    if isinstance(value, (list, tuple)):
        return [_shapes(part) for part in value]
    return type(value).__name__


# ---- one process -----------------------------------------------------------------------------------------------------


def attack_op(attack: Attack, name: str) -> None:
    """Every wrong call of a registered op, in every dtype that its native code takes."""
    from .hostile_drivers import op_call

    for dtype in ("float32", "float64", "bfloat16"):
        run, arguments = op_call(name, dtype)
        try:
            run(arguments())
        except (TypeError, ValueError):
            continue
        for argument, value in arguments().items():
            for label in dict(changes(value)):

                def wrong(backend: str | None = None, argument=argument, label=label, run=run, make=arguments) -> Any:  # type: ignore[no-untyped-def]
                    fresh = make()  # some ops write into their arguments
                    fresh[argument] = next(found for seen, found in changes(fresh[argument]) if seen == label)
                    return run(fresh | ({"backend": backend} if backend else {}))

                right = functools.partial(wrong, "reference") if "backend" in arguments() else None
                attack.call(f"{name}, {dtype}: {argument}, {label}", wrong, right, False)


def attack_calls(attack: Attack, target: Target) -> Watch:
    """What makes the right calls of a target wrong."""
    from rlhf_kernels.runtime import registry

    def watch(function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not attack.is_new((args, named)):
            return
        if target.layer == "extension":
            roles = parsed(EXTENSION[role_of(target.name)])
            for i, (value, role) in enumerate(zip(args, roles, strict=True)):
                for label, wrong in extension_changes(value, role):
                    refused = isinstance(role, str) and must_be_refused(role, label)
                    call = (*args[:i], wrong, *args[i + 1 :])
                    attack.call(f"{target.name}: {i}, {label}", functools.partial(function, *call), None, refused)
            return

        def as_reference(call: Callable[[], Any]) -> Any:
            with registry.use_backend("reference"):
                return call()

        names = list(inspect.signature(function).parameters) if not isinstance(function, type) else []
        wrong_calls = [
            (names[i] if i < len(names) else str(i), label, (*args[:i], wrong, *args[i + 1 :]), named)
            for i, value in enumerate(args)
            for label, wrong in changes(value)
        ]
        wrong_calls += [
            (argument, label, args, {**named, argument: wrong})
            for argument, value in named.items()
            for label, wrong in changes(value)
        ]
        for argument, label, wrong_args, wrong_named in wrong_calls:
            run = functools.partial(function, *wrong_args, **wrong_named)
            right = functools.partial(as_reference, run) if target.layer == "public" else None
            attack.call(f"{target.name}: {argument}, {label}", run, right, False)

    return watch


def attack_target(target: Target, drivers: list[str], log: int, done_before: int) -> None:
    """Make all wrong calls of a target."""
    from .hostile_drivers import DRIVERS

    attack = Attack(target, log, done_before)
    if target.layer == "op":
        attack_op(attack, target.name)
    else:
        install(target, attack_calls(attack, target))
        for driver in drivers:
            with suppress(AssertionError):  # numbers that wrong calls have added to
                DRIVERS[driver]()
    attack.note(f". {attack.n_calls} {attack.n_refused}")


class Ended(NamedTuple):
    status: int
    notes: list[str]
    output: str


def in_a_process(work: Callable[[int], None]) -> Ended:
    """How `work`, which notes things in a file, ends in a process of its own."""
    with tempfile.TemporaryFile() as notes, tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                signal.alarm(LIMIT_S)
                work(notes.fileno())
                status = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        texts = []
        for file in (notes, output):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return Ended(status, texts[0].splitlines(), texts[1])


def reached(found: list[Target]) -> dict[Target, list[str]]:
    """Per target the drivers that call it."""
    from .hostile_drivers import DRIVERS

    watchable = [target for target in found if target.layer != "op"]

    def trace(log: int) -> None:
        now: list[str] = []
        for i, target in enumerate(watchable):
            install(target, lambda *_, i=i: os.write(log, f"{i} {now[0]}\n".encode()))
        for name, driver in DRIVERS.items():
            now[:] = [name]
            driver()

    ended = in_a_process(trace)
    assert ended.status == 0, ended.output
    drivers: dict[Target, list[str]] = {target: [] for target in found}
    for line in dict.fromkeys(ended.notes):
        index, _, name = line.partition(" ")
        drivers[watchable[int(index)]].append(name)
    return drivers


def report(target: Target, drivers: list[str]) -> dict[str, Any]:
    """What became of all wrong calls of a target."""
    faults: list[str] = []
    done_before = n_calls = n_refused = 0
    for _ in range(MOST_CRASHES):
        ended = in_a_process(lambda log: attack_target(target, drivers, log, done_before))  # noqa: B023
        faults += [note[2:] for note in ended.notes if note.startswith("! ")]
        made = [note[2:] for note in ended.notes if note.startswith("> ")]
        if ended.status == 0:
            n_calls, n_refused = map(int, ended.notes[-1][2:].split())
            break
        done_before += len(made)
        if re.search("AddressSanitizer: (out-of-memory|allocation-size-too-big|requested allocation)", ended.output):
            continue  # `new` throws without the sanitizer
        faults.append(f"{made[-1] if made else 'no call'}: ended with {ended.status}: {_heart(ended.output)}")
    return {**target._asdict(), "calls": n_calls or done_before, "refused": n_refused, "faults": faults}


def _heart(output: str) -> str:
    """The lines of a sanitizer's report that say what and where."""
    lines = [line.strip() for line in output.splitlines()]
    said = [line for line in lines if re.search(r"ERROR: |runtime error|Error", line)][:2]
    return " | ".join((said + [line for line in lines if "csrc/" in line][:3]) or lines[-5:])


def main(path: str, layer: str = "", name: str = "") -> None:
    """Print a report on every function, or on those of a layer and name; path: of the extension that is in use."""
    from rlhf_kernels.runtime import native

    if native.missing() is not None or not os.path.samefile(native.extension().__file__, path):
        raise SystemExit(f"expected the extension {path}, got {native.missing() or native.extension().__file__}")
    found = targets()
    drivers = reached(found)
    for target in found:
        if layer in ("", target.layer) and name in ("", target.name):
            print(json.dumps(report(target, drivers[target])), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
