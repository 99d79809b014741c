"""Turns options into records: every case is checked against float64, timed interleaved, and its memory measured."""

from __future__ import annotations

import contextlib
import difflib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from rlhf_kernels.runtime import native, registry

from rlhf_bench import OPS, accuracy, candidates, memory, timing
from rlhf_bench.accuracy import Accuracy, Yardstick
from rlhf_bench.candidates import Candidates, one_line
from rlhf_bench.case import Case, Floors, Run, Subject, Tensors
from rlhf_bench.floor import worth_timing
from rlhf_bench.isa import isa_of_peers
from rlhf_bench.ops import load_cases
from rlhf_bench.rollout import OP as ROLLOUT
from rlhf_engine.errors import ConfigError
from rlhf_engine.runs.metrics import cpu_name, git_commit, is_rehearsal

FLOOR = "floor"
MOST_SECONDS = 20
"""A baseline that takes longer on a CPU is not timed: torch's bf16 products take minutes on some."""
S = TypeVar("S", bound=Subject)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One candidate of a case."""

    label: str
    backend: bool  # ours, not a baseline
    same: bool  # computes what the case asks for
    ms: float
    peak_bytes: int | None
    accuracy: Accuracy | None


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """Everything that was measured of a case."""

    case: Subject
    device: str
    rounds: int
    order: tuple[str, ...]  # in which every round called the candidates
    floor: str  # the fastest way to do the least that the case needs
    floor_ms: float
    rows: tuple[Measured, ...]
    missing: dict[str, str]  # who was not measured, and why

    def _machine(self) -> dict[str, Any]:
        """The instruction set and the model of a CPU that it was measured on."""
        if self.device != "cpu":
            return {}
        best = None if native.missing() else native.isas()[-1]
        return {"isa": native.isa(), "isa_of_peers": isa_of_peers(best), "cpu": cpu_name()}

    @property
    def baseline(self) -> Measured | None:
        """The fastest of those that compute the same."""
        return min((row for row in self.rows if not row.backend and row.same), key=lambda row: row.ms, default=None)

    def records(self) -> list[dict[str, Any]]:
        """One JSON object per backend."""
        best = self.baseline
        shared = {
            "device": self.device,
            **self._machine(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "rounds": self.rounds,
            "exact": registry.is_exact(),
            "code": git_commit(Path(__file__)),
        }
        about = {
            "kernels": list(self.case.kernels),
            "shape": self.case.shape and list(self.case.shape),
            "floor": self.floor,
            "order": list(self.order),
            "flops": self.case.flops,
            "moved_bytes": self.case.moved_bytes,
            "baselines": {
                row.label: {
                    "ms": row.ms,
                    "same": row.same,
                    "peak_bytes": row.peak_bytes,
                    **_error(row.accuracy),
                    "ok": row.accuracy and row.accuracy.ok,
                }
                for row in self.rows
                if not row.backend
            },
            "missing": self.missing,
        }
        return [
            {
                "op": self.case.op,
                "case": self.case.name,
                "dtype": str(self.case.dtype).removeprefix("torch."),
                "backend": row.label,
                "ms": row.ms,
                "floor_ms": self.floor_ms,
                "baseline": best and best.label,
                "baseline_ms": best and best.ms,
                "peak_bytes": row.peak_bytes,
                **_error(row.accuracy),
                **shared,
                "tier": row.accuracy and row.accuracy.tier,
                "result": row.accuracy and row.accuracy.result,
                "ok": row.accuracy and row.accuracy.ok,
                "why": row.accuracy and row.accuracy.why,
                **about,
            }
            for row in self.rows
            if row.backend
        ]


def timed_floors(floors: Floors) -> dict[str, Run]:
    """Ways to the floor under the names by which they are timed, without those that cannot be the fastest."""
    return {f"{FLOOR}: {label}": run for label, run in worth_timing(floors).items()}


def fastest_floor(ms: dict[str, float]) -> tuple[str, float]:
    """Label and milliseconds of the fastest of the `timed_floors`."""
    found = {name: value for name, value in ms.items() if name.startswith(f"{FLOOR}: ")}
    name = min(found, key=found.__getitem__)
    return name.removeprefix(f"{FLOOR}: "), found[name]


def _error(found: Accuracy | None) -> dict[str, float | None]:
    """JSON has no infinity; an error that is not finite is null, and `why` of the record says what is wrong."""
    if found is None or not math.isfinite(found.error):
        return {"error": None, "error_bound": found and found.bound}
    return {"error": found.error, "error_bound": found.bound}


def select(*, op: str | None, case: str | None, size: str, device_type: str, dtype: torch.dtype) -> list[Case]:
    """Cases of one op or of all; `case` is a name, or one part of names that are written "what/sizes"."""
    if op is not None and op not in OPS:
        names = (*OPS, ROLLOUT)
        close = difflib.get_close_matches(op, names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"op: expected one of {', '.join(names)}, got {op!r}{hint}")
    found = [c for name in ([op] if op else OPS) for c in load_cases(name, size, device_type, dtype)]
    return named(found, case)


def named(found: list[S], case: str | None) -> list[S]:
    """Cases of a name, or with names of which it is a part; all for None. Raises ConfigError if there are none."""
    if case is None:
        return found
    chosen = [c for c in found if case == c.name or case in c.name.split("/")]
    if not chosen:
        names = dict.fromkeys(c.name for c in found)
        raise ConfigError(
            f"case: expected one of {', '.join(names)}, or a part of one before or after the /, got {case!r}"
        )
    return chosen


def run_cases(cases: list[Case], *, size: str, device: torch.device, rounds: int) -> Iterator[CaseResult]:
    """Measure one case after the other."""
    with contextlib.ExitStack() as stack:
        server = None
        if device.type == "cpu" and memory.unsupported() is None:
            server = stack.enter_context(memory.MemoryServer())
        for case in cases:
            yield run_case(case, size=size, device=device, rounds=rounds, server=server)


def run_case(
    case: Case, *, size: str, device: torch.device, rounds: int, server: memory.MemoryServer | None
) -> CaseResult:
    """server: None on CUDA, and where CPU memory cannot be measured."""
    torch.compiler.reset()  # compiled baselines are specialised to this case's shapes
    inputs = case.make(device)
    found = candidates.find(case, inputs, device.type, compiling=size != "quick" and not is_rehearsal())
    try:
        measure: Yardstick | None = accuracy.yardstick(case, inputs)
    except torch.OutOfMemoryError as error:
        measure, found.missing["error against float64"] = None, one_line(error)
    same = {baseline.label: baseline.same for baseline in case.baselines}
    # the first call of a baseline that compiles says nothing of the others
    bounded = {b.label for b in case.baselines if not b.compiles} if device.type == "cpu" else set()
    checked: dict[str, Accuracy | None] = {}
    for group in (found.backends, found.baselines):
        for label in list(group):
            ours = group is found.backends
            began = time.perf_counter()
            try:
                results = group[label]()
                took = time.perf_counter() - began
                checked[label] = _judge(case, results, measure, ours or same[label])
            except _expected(ours) as error:
                found.missing[label] = one_line(error)
                del group[label]
                continue
            del results
            if label in bounded and took > MOST_SECONDS:
                found.missing[label] = f"one call took {took:.0f} s; above {MOST_SECONDS} s none is timed"
                del group[label]
    del measure
    candidates.leave_reference_untimed(found.backends, found.missing, device.type)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    functions: dict[str, Run] = {**timed_floors(case.floor(inputs)), **found.backends, **found.baselines}
    if case.replayed and device.type == "cuda":
        functions = _replayed(functions, found)
    candidates_here = found.backends | found.baselines
    ms = timing.medians(timing.interleaved(functions, rounds, device))
    peaks = _peaks(case, found, size, device, server, ms)
    floor, floor_ms = fastest_floor(ms)
    rows = tuple(
        Measured(
            label=label,
            backend=label in found.backends,
            same=same.get(label, True),
            ms=ms[label],
            peak_bytes=peaks[label],
            accuracy=checked[label],
        )
        for label in candidates_here
    )
    return CaseResult(
        case=case,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        rounds=rounds,
        order=tuple(functions),
        floor=floor,
        floor_ms=floor_ms,
        rows=rows,
        missing=found.missing,
    )


def _replayed(functions: dict[str, Run], found: Candidates) -> dict[str, Run]:
    """Graphs of all functions; a baseline that cannot be captured is missing."""
    graphs: dict[str, Run] = {}
    for label, function in functions.items():
        try:
            graphs[label] = timing.replay_of(function)
        except candidates.foreign_errors() as error:
            if label not in found.baselines:
                raise
            found.missing[label] = f"cannot be captured in a CUDA graph: {one_line(error)}"
            del found.baselines[label]
    return graphs


def _expected(ours: bool) -> tuple[type[Exception], ...]:
    """Errors that leave a candidate out. A backend of ours may only refuse or run out of memory; the rest are bugs."""
    from rlhf_kernels import BackendUnavailableError

    return (BackendUnavailableError, torch.OutOfMemoryError) if ours else candidates.foreign_errors()


def _judge(case: Case, results: Tensors, measure: Yardstick | None, same: bool) -> Accuracy | None:
    return None if measure is None or not same else accuracy.judge(case, results, measure)


def _peaks(
    case: Case,
    found: Candidates,
    size: str,
    device: torch.device,
    server: memory.MemoryServer | None,
    ms: dict[str, float],
) -> dict[str, int | None]:
    functions = found.backends | found.baselines
    if device.type == "cuda":
        return {label: memory.peak_on_cuda(function) for label, function in functions.items()}
    peaks: dict[str, int | None] = dict.fromkeys(functions)
    if server is None:
        found.missing["peak memory"] = memory.unsupported() or "not asked for"
        return peaks
    for label in functions:
        peak = server.peak(op=case.op, size=size, dtype=case.dtype, case=case.name, candidate=label, ms=ms[label])
        if isinstance(peak, int):
            peaks[label] = peak
        else:
            found.missing[f"peak memory of {label}"] = peak
    return peaks
