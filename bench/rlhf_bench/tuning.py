"""A sweep of the free settings of the Triton kernels on one GPU: a tuned table (`rlhf_kernels.runtime.tuning`) out.

What is run are the cases of the benchmark. A case's calls look their settings up, which says what keys there are, with
which defaults. Then for every key, one setting after the other, each with the ones before as chosen:

    compiles and fits → spills no more than the default → right → timed, all values and the best so far interleaved

Right: with neutral settings alone every result has the default's bits, in every case of the key; otherwise it passes
the tier of the benchmark in the smallest case. A setting is changed only for a gain of `LEAST_GAIN`, as the geometric
mean over the cases, and so is the whole choice in a last comparison with the default. Of a key's cases at most
`MOST_CASES` are timed, from the smallest to the largest. One of every other op that looks the key up has to run, too.

The table is written after every key, so a sweep that was stopped goes on where it was.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from rlhf_kernels import BackendUnavailableError
from rlhf_kernels.runtime import aot, tuning
from rlhf_kernels.runtime.tuning import Entry, Key, Row, Settings, TunedTable

from rlhf_bench.accuracy import Yardstick, judge, yardstick
from rlhf_bench.candidates import backends_here, one_line
from rlhf_bench.case import Case, Run, Tensors
from rlhf_bench.ops import load_cases
from rlhf_bench.timing import interleaved, medians

_FIRST = (("linear_logprob", "linear_ppo_loss", "linear_logprob_pair"), ("decode_attention",), ("sample",), ("lora",))
"""Ops that a step spends most on; the first three share sites."""
GROUPS = _FIRST + tuple((op,) for op in aot.OPS if not any(op in group for group in _FIRST))
"""Ops that are swept together."""
OPS = tuple(op for group in GROUPS for op in group)
LEAST_GAIN = 1.02
MOST_CASES = 3
ROUNDS, LEAST_ROUNDS, ROUNDS_S = 20, 5, 1.5
"""Of a timing: as many as fit into the seconds, within the two numbers."""
_DEFAULT = "default"


class OutOfTimeError(Exception):
    """The budget is spent."""


class Timer(Protocol):
    """Milliseconds of functions by name, that is what a sweep decides by."""

    def __call__(self, runs: Mapping[str, Run], settings: Mapping[str, Settings]) -> dict[str, float]:
        """runs: functions by name. settings: of each."""
        ...


def median_timer(device: torch.device) -> Timer:
    """Medians of interleaved rounds; every function has been called before."""

    def time_all(runs: Mapping[str, Run], settings: Mapping[str, Settings]) -> dict[str, float]:
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        for run in runs.values():
            run()
        torch.cuda.synchronize(device)
        rounds = int(ROUNDS_S / (time.perf_counter() - began))
        return medians(interleaved(runs, max(LEAST_ROUNDS, min(ROUNDS, rounds)), device))

    return time_all


def rehearsal_timer(runs: Mapping[str, Run], settings: Mapping[str, Settings]) -> dict[str, float]:
    """Figures that nothing has measured: settings of small numbers count as fast. For sweeps without a GPU."""
    return {name: 1.0 + sum(math.log2(value) for value in settings[name].values()) for name in runs}


@dataclass(kw_only=True)
class Sweep:
    """One sweep of some ops on one device."""

    device: torch.device
    out: Path
    table: TunedTable
    timer: Timer
    end: float = math.inf
    """Of `time.monotonic`."""
    say: Callable[[str], None] = print
    clock: Callable[[], float] = time.monotonic

    def run(self, ops: Sequence[str], size: str, dtypes: Sequence[torch.dtype]) -> list[str]:
        """Sweep what the table does not have.

        Args:
            ops: some of `OPS`; those that share sites with one of them are swept with it.
            size: of the benchmark's cases.
            dtypes: of weights and activations.

        Returns:
            What there was no time for.
        """
        left = []
        for group in GROUPS:
            for dtype in dtypes if set(group) & set(ops) else ():
                try:
                    self._sweep_group(group, size, dtype)
                except OutOfTimeError:
                    left.append(f"{', '.join(group)} in {str(dtype).removeprefix('torch.')}")
        return left

    def without_a_case(self) -> list[str]:
        """Sites that no case has looked up: they keep their defaults."""
        found = {entry.row.key[:2] for entry in self.table.entries}
        return [f"{op}.{name}" for op, name in tuning.sites() if (op, name) not in found]

    def _sweep_group(self, group: Sequence[str], size: str, dtype: torch.dtype) -> None:
        self._check_time()
        cases = [case for op in group for case in load_cases(op, size, self.device.type, dtype)]
        served = [case for case in cases if "triton" in backends_here(case, self.device.type)[0]]
        users: dict[Key, list[Case]] = {}
        defaults: dict[Key, Settings] = {}
        for case in served:
            self._check_time()
            with tuning.watched() as found, tuning.trial({}):
                try:
                    self._call(case, case.make(self.device))
                except (torch.OutOfMemoryError, BackendUnavailableError) as error:
                    self.say(f"{case.op} {case.name}: left out, {one_line(error)}")
                    continue
            for key, default in found.items():
                users.setdefault(key, []).append(case)
                defaults[key] = default
        for key, default in defaults.items():
            if self.table.of(key) is not None:
                continue
            began = self.clock()
            entry = _KeySweep(self, key, default, users[key]).run()
            self.table = replace(self.table, entries=(*self.table.entries, entry))
            tuning.write(self.out, self.table)
            chosen = ", ".join(f"{name} {value}" for name, value in entry.row.settings.items()) or "default"
            self.say(f"{key}: {chosen} ({_gain(entry.ms):.3f} x, {self.clock() - began:.1f} s)")

    def _check_time(self) -> None:
        if self.clock() >= self.end:
            raise OutOfTimeError

    @staticmethod
    def _call(case: Case, inputs: Tensors) -> Tensors:
        return case.run(inputs, "triton")


class _KeySweep:
    """The sweep of one key over all cases that look it up."""

    def __init__(self, sweep: Sweep, key: Key, default: Settings, cases: Sequence[Case]) -> None:
        self.sweep = sweep
        self.key, self.default = key, default
        self.site = tuning.sites()[key.op, key.site]
        ordered = sorted(cases, key=lambda case: case.flops)
        last = len(ordered) - 1
        self.cases = [ordered[i] for i in sorted({last * i // (MOST_CASES - 1) for i in range(MOST_CASES)})]
        self.n_timed = len(self.cases)
        for case in reversed(ordered):
            if case.op not in {known.op for known in self.cases}:
                self.cases.append(case)
        self.inputs = [case.make(sweep.device) for case in self.cases]
        self.left_out: dict[str, str] = {}

    def run(self) -> Entry:
        self.expected, self.spills = self._results(self.default)
        best = self.default
        for name, values in self.site.candidates.items():
            tried = {str(value): {**best, name: value} for value in values if value != best[name]}
            right = {label: s for label, s in tried.items() if self._is_right(f"{name}={label}", s)}
            if right:
                ms = self._time({_DEFAULT: best, **right})
                gains = {label: _gain(_between(ms, label)) for label in right}
                fastest = max(gains, key=gains.__getitem__)
                best = right[fastest] if gains[fastest] >= LEAST_GAIN else best
        settings = {name: value for name, value in best.items() if value != self.default[name]}
        ms = self._time({_DEFAULT: self.default, "chosen": best})
        if settings and _gain(ms) < LEAST_GAIN:
            settings = {}
        return Entry(Row(self.key, settings), self.default, ms, self.left_out)

    def _results(self, settings: Settings) -> tuple[list[Tensors], int]:
        """Results of every case, and the most bytes that a thread of a launched kernel spills."""
        with tuning.trial({self.key: settings}), _launched() as kernels:
            found = [self.sweep._call(case, x) for case, x in zip(self.cases, self.inputs, strict=True)]
        return found, max((kernel.n_spills or 0 for kernel in kernels), default=0)

    def _is_right(self, label: str, settings: Settings) -> bool:
        self.sweep._check_time()
        reason = self._wrong(settings)
        if reason is not None:
            self.left_out[label] = reason
        return reason is None

    def _wrong(self, settings: Settings) -> str | None:
        from triton.compiler.errors import CompilationError
        from triton.runtime.errors import OutOfResources, PTXASError

        try:
            found, spills = self._results(settings)
        except (CompilationError, OutOfResources, PTXASError, torch.OutOfMemoryError) as error:
            return one_line(error)
        if spills > self.spills:
            return f"spills {spills} bytes per thread, the default {self.spills}"
        changed = [name for name, value in settings.items() if value != self.default[name]]
        if not self.site.changes_bits(changed):
            for case, got, expected in zip(self.cases, found, self.expected, strict=True):
                for name, x in expected.items():
                    if not torch.equal(got[name], x):
                        return f"{case.name}: {name} has other bits, though {', '.join(changed)} is to change none"
            return None
        accuracy = judge(self.cases[0], found[0], self._yardstick)
        return None if accuracy.ok else f"{self.cases[0].name}: {accuracy.result} fails {accuracy.tier}: {accuracy.why}"

    @functools.cached_property
    def _yardstick(self) -> Yardstick:
        with tuning.trial({}):
            return yardstick(self.cases[0], self.inputs[0])

    def _time(self, named: Mapping[str, Settings]) -> dict[str, dict[str, float]]:
        """Case → name → milliseconds."""
        found = {}
        for case, inputs in list(zip(self.cases, self.inputs, strict=True))[: self.n_timed]:
            self.sweep._check_time()
            runs = {name: functools.partial(self._run, case, inputs, s) for name, s in named.items()}
            found[f"{case.op} {case.name}"] = self.sweep.timer(runs, named)
        return found

    def _run(self, case: Case, inputs: Tensors, settings: Settings) -> Any:
        with tuning.trial({self.key: settings}):
            return self.sweep._call(case, inputs)


def _between(ms: Mapping[str, Mapping[str, float]], label: str) -> dict[str, dict[str, float]]:
    return {case: {_DEFAULT: times[_DEFAULT], "chosen": times[label]} for case, times in ms.items()}


def _gain(ms: Mapping[str, Mapping[str, float]]) -> float:
    """Speed-up of the choice over the default, as the geometric mean over the cases."""
    logs = [math.log(times[_DEFAULT] / times["chosen"]) for times in ms.values()]
    return math.exp(sum(logs) / len(logs))


@contextlib.contextmanager
def _launched() -> Iterator[list[Any]]:
    """The compiled kernels that are launched within the block; none in the interpreter."""
    from triton.runtime.jit import JITFunction

    kernels: list[Any] = []
    run = JITFunction.run

    def recorded(function: Any, *args: Any, **options: Any) -> Any:
        kernel = run(function, *args, **options)
        if kernel is not None:
            kernels.append(kernel)
        return kernel

    JITFunction.run = recorded
    try:
        yield kernels
    finally:
        JITFunction.run = run


def begun(out: Path, device: torch.device, *, commit: str, rehearsed: bool) -> TunedTable:
    """The table that a sweep goes on with: the one in `out`, or a new one.

    Raises:
        ValueError: what is in `out` is no table of this version, device and kind.
    """
    name = tuning.device_name(device)
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise ValueError(f"--out: expected the path of a file in a folder that is there, got {str(out)!r}")
    if not out.exists():
        return tuning.new_table(name, commit=commit, rehearsed=rehearsed)
    try:
        return tuning.read(out, device=name, rehearsed=rehearsed)
    except tuning.TunedTableError as error:
        raise ValueError(f"--out: expected a table to go on with, got {str(out)!r}: {error}") from error
