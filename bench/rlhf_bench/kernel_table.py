"""Kernel tables from records of `rlhf-engine bench`, or measured here in half a minute.

Candidates are our own backends on a CPU. Peers, floors, errors and memory of a record play no part.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from rlhf_kernels.runtime import native
from rlhf_kernels.runtime.kernel_table import CANDIDATES, Entry, Shape, fastest

from rlhf_bench import OPS
from rlhf_bench.candidates import backends_here
from rlhf_bench.case import Case
from rlhf_bench.ops import load_cases
from rlhf_bench.timing import interleaved, medians
from rlhf_engine.runs.metrics import cpu_name

Key = tuple[str, str, str, Shape]
"""Op, instruction set, dtype and shape of an entry."""
_CPU = torch.device("cpu")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ROUNDS = 5


class Made(NamedTuple):
    """Entries of a table and what they were measured on."""

    entries: list[Entry]
    machines: dict[str, str]
    """Instruction set → CPU, threads and version of torch."""
    left_out: list[str]
    """Cases for which there was no time."""


def from_records(records: Iterable[Mapping[str, Any]]) -> Made:
    """Entries of all cases that time one op with each candidate. Of several records of a case the last one counts.

    Args:
        records: lines of `rlhf-engine bench --json`, in their order; those of other devices and of exact mode, where
            there is nothing to choose, are passed over.

    Raises:
        ValueError: a record does not name its instruction set, holds its peers to another one, or is of a backend
            whose results are wrong.
    """
    times: dict[Key, dict[str, dict[str, float]]] = {}
    machines: dict[str, str] = {}
    for r in records:
        if r["device"] != "cpu" or r["backend"] not in CANDIDATES or len(r.get("kernels", ())) > 1 or r.get("exact"):
            continue
        where = f"records: {r['op']} {r['case']} {r['dtype']}"
        isa = r.get("isa")
        if isa is None or r.get("isa_of_peers") != isa:
            raise ValueError(
                f"{where}: expected one instruction set for kernels and peers (rlhf-engine bench --isa), got {isa!r} "
                f"and {r.get('isa_of_peers')!r}"
            )
        if r["ok"] is False:
            raise ValueError(f"{where}: expected results within their bound, got {r['backend']}: {r['why']}")
        for op in r["kernels"]:
            key = (op, isa, r["dtype"], None if r["shape"] is None else tuple(r["shape"]))
            times.setdefault(key, {}).setdefault(r["case"], {})[r["backend"]] = r["ms"]
        machines[isa] = f"{r['cpu']}, {r['threads']} threads, torch {r['torch']}"
    return Made(_entries(times), machines, [])


def measure(seconds: float = 22.0) -> Made:
    """Entries of this machine for the instruction set in use, by the quick sizes of the benchmark.

    Args:
        seconds: about how long it may take; the last cases are left out where that is not enough.

    Raises:
        ValueError: there is no native extension, so there is nothing to choose.
    """
    isa = native.isa()
    if isa is None:
        raise ValueError(f"measure: expected the native extension, without which all is reference: {native.missing()}")
    found = [c for op in OPS for dtype in _DTYPES for c in load_cases(op, "quick", "cpu", dtype)]
    cases = {(c.op, c.name, c.dtype): c for c in found if len(c.kernels) == 1}.values()
    left = [case for case in cases if set(CANDIDATES) <= set(backends_here(case, "cpu")[0])]
    times: dict[Key, dict[str, dict[str, float]]] = {}
    end = time.perf_counter() + seconds
    while left and time.perf_counter() < end:
        case = left.pop(0)
        key = (case.kernels[0], isa, str(case.dtype).removeprefix("torch."), case.shape)
        times.setdefault(key, {})[case.name] = _time(case, (end - time.perf_counter()) / (len(left) + 1))
    machine = f"{cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    return Made(_entries(times), {isa: machine}, [f"{case.op} {case.name} {case.dtype}" for case in left])


def _time(case: Case, seconds: float) -> dict[str, float]:
    """Median milliseconds of each candidate, interleaved; of as many rounds as there is time for, at least one."""
    inputs = case.make(_CPU)
    runs = {backend: functools.partial(case.run, inputs, backend) for backend in CANDIDATES}
    began = time.perf_counter()
    for run in runs.values():
        run()
    once = time.perf_counter() - began
    # the first round of `interleaved` is not counted
    return medians(interleaved(runs, max(1, min(_ROUNDS, int(seconds / once) - 2)), _CPU))


def _entries(times: Mapping[Key, Mapping[str, Mapping[str, float]]]) -> list[Entry]:
    entries = []
    for key, cases in times.items():
        ms = {name: dict(found) for name, found in cases.items() if set(found) == set(CANDIDATES)}
        if ms:
            entries.append(Entry(*key, fastest(ms), ms))
    return entries
