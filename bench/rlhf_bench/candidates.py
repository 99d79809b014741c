"""The candidates of a case: the backends that serve its ops here, and the baselines that are installed."""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
from rlhf_kernels.runtime import registry

from rlhf_bench.case import Case, NotHereError, Run, Tensors

_BASES = (("triton.errors", "TritonError"), ("cutlass.base_dsl.common", "DSLBaseError"))
"""Modules and their errors that derive from Exception itself."""


class Candidates(NamedTuple):
    """Functions by label in the order in which a round calls them, and why others are not there."""

    backends: dict[str, Run]
    baselines: dict[str, Run]
    missing: dict[str, str]


def backends_here(case: Case, device_type: str) -> tuple[list[str], dict[str, str]]:
    """Backends that serve every op of the case, by `registry.report`, and the others' reasons."""
    table = registry.report(device_type, case.dtype)
    here, missing = [], {}
    for backend in registry.BACKENDS:
        reasons = [table[op][backend] for op in case.kernels if table[op][backend] != "available"]
        if reasons:
            missing[backend] = reasons[0]
        else:
            here.append(backend)
    return here, missing


def find(case: Case, inputs: Tensors, device_type: str, *, compiling: bool, only: str | None = None) -> Candidates:
    """All candidates of a case on its inputs.

    compiling: with the baselines whose first call compiles for seconds. only: no other label is prepared.
    """
    here, missing = backends_here(case, device_type)
    backends = {backend: _backend_run(case, inputs, backend) for backend in here}
    baselines: dict[str, Run] = {}
    for baseline in case.baselines:
        if only not in (None, baseline.label):
            continue
        if baseline.compiles and not compiling:
            missing[baseline.label] = "left out by --quick and in a rehearsal: its first call compiles"
            continue
        try:
            baselines[baseline.label] = baseline.prepare(inputs)
        except NotHereError as error:
            missing[baseline.label] = str(error)
        except foreign_errors() as error:
            missing[baseline.label] = one_line(error)
    return Candidates(backends, baselines, missing)


def foreign_errors() -> tuple[type[Exception], ...]:
    """Return what other people's code raises where it cannot run: no compiler, no driver, an unsupported shape."""
    loaded = [getattr(sys.modules.get(module), name, None) for module, name in _BASES]
    bases = (ImportError, RuntimeError, TypeError, ValueError, AttributeError, AssertionError, OSError)
    return (*bases, *(error for error in loaded if error is not None))


def leave_reference_untimed(backends: dict[str, Run], missing: dict[str, str], device_type: str) -> None:
    """Drop `reference` from the backends that are timed on a GPU: it is the yardstick there, and slow.

    It stays where no other backend serves the case, because `auto` then runs it.

    Args:
        backends: those that have served the case once; changed in place.
        missing: reasons by label; changed in place.
        device_type: of the case's tensors.
    """
    if device_type == "cuda" and len(backends) > 1 and backends.pop("reference", None) is not None:
        missing["reference"] = "not timed on a GPU, where results are compared with it"


def _backend_run(case: Case, inputs: Tensors, backend: str) -> Run:
    return lambda: case.run(inputs, backend)


def one_line(error: BaseException) -> str:
    """An error for a list of reasons."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
