"""`rlhf-engine bench`: options in, tables, JSON lines and a plot out."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
from rich.console import Console
from rlhf_kernels.runtime import native, registry

from rlhf_bench import roofline
from rlhf_bench.report import print_results, write_records
from rlhf_bench.rollout import OP
from rlhf_bench.rollout.cases import cases
from rlhf_bench.rollout.runner import rollout_records, run_rollout_cases
from rlhf_bench.runner import CaseResult, named, run_cases, select
from rlhf_engine.config import BenchConfig
from rlhf_engine.devices import resolve_device
from rlhf_engine.errors import ConfigError
from rlhf_engine.runs.metrics import is_rehearsal
from rlhf_engine.runs.progress import TrainingProgress

RESULTS_FILE, ROOFLINE_FILE = "results.jsonl", "roofline.png"
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_ROUNDS, _QUICK_ROUNDS = 20, 5


def run_bench(config: BenchConfig) -> list[CaseResult]:
    """Measure, print, write. Raises ConfigError for what is not there before anything is measured."""
    device = resolve_device(config.device)
    dtype = _DTYPES[config.dtype]
    if config.isa is not None and device.type != "cpu":
        raise ConfigError(f"isa: expected it with device cpu, got {config.isa!r} with {device.type}")
    size, is_quick = "tiny" if is_rehearsal() else config.mode, config.mode == "quick"
    rounds = config.rounds or (_QUICK_ROUNDS if is_quick else _ROUNDS)
    measured: Iterator[CaseResult]
    if config.op == OP:
        rollouts = named(cases(size, device, dtype, config.model_name_or_path), config.case)
        n_cases, measured = len(rollouts), run_rollout_cases(rollouts, device=device, rounds=rounds)
    else:
        chosen = select(op=config.op, case=config.case, size=size, device_type=device.type, dtype=dtype)
        n_cases, measured = len(chosen), run_cases(chosen, size=size, device=device, rounds=rounds)
    results: list[CaseResult] = []
    with _as_request_error(), registry.use_exact(config.exact), contextlib.ExitStack() as stack:
        files = _open_outputs(config, stack)
        console = Console(file=sys.stderr if config.json == "-" else None)
        console.print(
            f"{_describe(device)}, torch {torch.__version__}, median of {rounds} interleaved rounds", highlight=False
        )
        with TrainingProgress(n_cases, title="bench") as progress:
            for result in measured:
                results.append(result)
                for file in files:
                    write_records(_records(result), file)
                progress.update(len(results), {})
        print_results(results, console)
        if config.out is not None:
            ceilings = roofline.measure_ceilings(device, dtype, quick=is_quick)
            path = Path(config.out) / ROOFLINE_FILE
            records = [record for result in results for record in _records(result)]
            roofline.plot_roofline(records, ceilings, path, device=_describe(device))
            console.print(f"records {Path(config.out) / RESULTS_FILE}  plot {path}", markup=False, highlight=False)
    return results


def _records(result: CaseResult) -> list[dict[str, Any]]:
    return rollout_records(result) if result.case.op == OP else result.records()


def _describe(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    isa = native.isa()
    return f"CPU{'' if isa is None else f', {isa}'}, {torch.get_num_threads()} threads"


def _open_outputs(config: BenchConfig, stack: contextlib.ExitStack) -> list[IO[str]]:
    """Open the places where records go; a path that cannot be written is found out now, not after the measurements."""
    files: list[IO[str]] = [sys.stdout] if config.json == "-" else []
    paths = [] if config.json in (None, "-") else [(Path(str(config.json)), "a")]
    if config.out is not None:
        Path(config.out).mkdir(parents=True, exist_ok=True)
        paths.append((Path(config.out) / RESULTS_FILE, "w"))
    for path, mode in paths:
        files.append(stack.enter_context(path.open(mode, encoding="utf-8")))
    return files


@contextlib.contextmanager
def _as_request_error() -> Iterator[None]:
    """Name the options that records are written by where the block cannot write."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"json, out: expected paths that can be written, got {error}") from error
