#!/usr/bin/env python
"""Cost of busy neighbours for an op and its peers: milliseconds of one call, of `linear_logprob` forward and backward.

    python bench/studies/busy.py [--sizes 1024x1024x32768 512x512x8192] [--dtype fp32] [--isa avx2]
        [--rounds 20] [--json FILE]
    python bench/studies/busy.py --op decode_step lora sample [--dtype fp32] …  # the quick cases of `rlhf-engine bench`

Beside it run 0, 1 and 2 processes (--busy) that compute without end, on whichever cores the system gives them. In every
round all arms take turns; a time is the median of the rounds. × is that median over the one without neighbours.

    linear_logprob         ours, backend `cpu`, with a frozen head
    F.linear_cross_entropy per token (none) and as a sum over tokens in chunks; needs torch 2.13
    log_softmax + gather   the textbook way, with all logits
    2 torch.mm             the bare products, logits and gradient of the hidden states, into memory that is there

Other ops stand beside the baselines of their benchmark that need no compiler, and beside their floors.

--json appends one record per arm, size and number of neighbours.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from rich.console import Console
from rlhf_bench.candidates import backends_here
from rlhf_bench.case import Case, NotHereError, Run, Tensors
from rlhf_bench.heads import HeadSize
from rlhf_bench.isa import SETS, is_held, isa_of_peers, run_held
from rlhf_bench.ops import load_cases
from rlhf_bench.ops.linear_logprob import frozen_case
from rlhf_bench.timing import interleaved, medians
from rlhf_kernels.runtime import cores, native
from rlhf_kernels.runtime.registry import BackendUnavailableError

from rlhf_engine.runs.metrics import cpu_name, git_commit
from rlhf_engine.runs.text import summary_table

OURS, GEMMS = "linear_logprob", "2 torch.mm"
PEERS = ("F.linear_cross_entropy(none)", "F.linear_cross_entropy(sum)", "log_softmax + gather")
OPS = (OURS, "decode_step", "lora", "sample")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SIZES = (HeadSize(1024, 1024, 32768), HeadSize(512, 512, 8192))
TINY = (HeadSize(24, 16, 97),)
_CPU = torch.device("cpu")
# It ends with the process that started it, however that ends.
_SPIN = """
import os
parent = os.getppid()
print("busy", flush=True)
while os.getppid() == parent:
    for _ in range(100_000):
        pass
"""


@contextlib.contextmanager
def neighbours(n: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Keep `n` processes busy within the block."""
    processes: list[subprocess.Popen[str]] = []
    try:
        for _ in range(n):
            processes.append(subprocess.Popen([sys.executable, "-c", _SPIN], stdout=subprocess.PIPE, text=True))
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def cases(ops: Sequence[str], dtype: torch.dtype, sizes: Sequence[HeadSize] | None, *, tiny: bool) -> list[Case]:
    """Cases of the ops, in their order. sizes: of `linear_logprob`; None: the script's own."""
    found = []
    for op in ops:
        if op == OURS:
            found += [frozen_case(size, dtype) for size in sizes or (TINY if tiny else SIZES)]
        else:
            found += load_cases(op, "tiny" if tiny else "quick", "cpu", dtype)
    return found


def arms(case: Case, inputs: Tensors) -> tuple[dict[str, Run], dict[str, str]]:
    """Functions by arm, and the reasons why others are not there."""
    runs: dict[str, Run] = {}
    here, missing = backends_here(case, "cpu")
    missing = {case.op: missing["cpu"]} if "cpu" not in here else {}
    try:
        if not missing:
            case.run(inputs, "cpu")
            runs[case.op] = lambda: case.run(inputs, "cpu")
    except BackendUnavailableError as error:  # a filter of sampling, which no kernel serves
        missing = {case.op: str(error)}
    baselines = {baseline.name: baseline for baseline in case.baselines if not baseline.compiles}
    for name in PEERS if case.op == OURS else baselines:
        try:
            runs[name] = baselines[name].prepare(inputs)
        except NotHereError as error:
            missing[name] = str(error)
    if case.op != OURS:
        return {**runs, **{f"floor: {label}": floor for label, floor in case.floor(inputs).items()}}, missing
    hidden, weight = inputs["hidden"], inputs["weight"]
    logits, gradient = hidden.new_empty(hidden.shape[0], weight.shape[0]), torch.empty_like(hidden)

    def gemms() -> None:
        torch.mm(hidden, weight.T, out=logits)
        torch.mm(logits, weight, out=gradient)

    return {**runs, GEMMS: gemms}, missing


def measure(case: Case, busy: Sequence[int], rounds: int) -> Iterator[dict[str, Any]]:
    """Records of one case: of every arm beside each number of neighbours."""
    inputs = case.make(_CPU)
    functions, missing = arms(case, inputs)
    for run in functions.values():
        run()
    alone: dict[str, float] = {}
    for n in busy:
        with neighbours(n):
            samples = interleaved(functions, rounds, _CPU)
        ms = medians(samples)
        alone = ms if n == 0 else alone
        for arm in functions:
            yield {
                "op": case.op,
                "case": case.name,
                "dtype": str(case.dtype).removeprefix("torch."),
                "arm": arm,
                "busy": n,
                "ms": ms[arm],
                "slowdown": ms[arm] / alone[arm] if alone else None,
                "rounds": rounds,
                "samples_ms": samples[arm],
                "order": list(functions),
                "missing": missing,
            }


def machine(command: Sequence[str]) -> dict[str, Any]:
    """Entries of every record on where and how it was made."""
    return {
        "device": "cpu",
        "cpu": cpu_name(),
        "isa": native.isa(),
        "isa_of_peers": isa_of_peers(None if native.missing() else native.isas()[-1]),
        **{f"cpu_{name}": value for name, value in cores.find()._asdict().items()},
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "git_commit": git_commit(Path(__file__)),
        "command": shlex.join(command),
    }


def print_case(records: Sequence[dict[str, Any]], console: Console) -> None:
    """Print a table of one case: milliseconds, and how many times those without neighbours they are."""
    busy = list(dict.fromkeys(record["busy"] for record in records))
    columns = [column for n in busy for column in ((f"{n} busy", "×") if n else ("alone",))]
    rows: dict[str, list[Any]] = {}
    for record in records:
        found = [record["ms"], record["slowdown"]] if record["busy"] else [record["ms"]]
        rows.setdefault(record["arm"], []).extend(found)
    console.print(summary_table(f"{records[0]['op']} {records[0]['case']} {records[0]['dtype']}, ms", columns, rows))
    for arm, why in records[0]["missing"].items():
        console.print(f"  no {arm}: {why}", markup=False, highlight=False)


def head_size(text: str) -> HeadSize:
    """Read NxHxV."""
    numbers = [int(part) if part.isdecimal() else 0 for part in text.split("x")]
    if len(numbers) != 3 or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"expected NxHxV of whole numbers above 0, got {text!r}")
    return HeadSize(*numbers)


def at_least(least: int) -> Any:
    """Read a whole number that has a least value."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {text!r}")
        return int(text)

    return read


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 for a request that cannot be served."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=OPS, nargs="+", default=[OURS])
    parser.add_argument("--sizes", type=head_size, nargs="+", help=f"tokens x hidden size x vocabulary of {OURS}")
    parser.add_argument("--tiny", action="store_true", help="one size that takes no time, and 2 rounds")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp32")
    parser.add_argument("--busy", type=at_least(0), nargs="+", default=[0, 1, 2], help="numbers of neighbours")
    parser.add_argument("--rounds", type=at_least(1))
    parser.add_argument("--isa", choices=SETS, help="hold the kernels and torch to one instruction set")
    parser.add_argument("--json", type=Path, help="file to append records to")
    options = parser.parse_args(given)
    if options.sizes and OURS not in options.op:
        parser.error(f"argument --sizes: expected it with --op {OURS}, got --op {' '.join(options.op)}")
    if options.isa is not None and not is_held(options.isa):
        try:
            return run_held(options.isa, given, program=[__file__])
        except ValueError as error:
            print(f"busy: {error}", file=sys.stderr)
            return 2
    console = Console()
    note = cores.limit_threads()
    if note is not None:
        console.print(f"note: {note}", markup=False, highlight=False)
    with contextlib.ExitStack() as stack:
        file: IO[str] | None = None
        try:
            if options.json is not None:
                file = stack.enter_context(options.json.open("a", encoding="utf-8"))
        except OSError as error:
            print(f"busy: json: expected a path that can be written, got {error}", file=sys.stderr)
            return 2
        where = machine(["python", "bench/studies/busy.py", *given])
        for case in cases(options.op, DTYPES[options.dtype], options.sizes, tiny=options.tiny):
            records = []
            for record in measure(case, sorted(set(options.busy)), options.rounds or (2 if options.tiny else 20)):
                records.append(record)
                if file is not None:
                    print(json.dumps({**record, **where}, ensure_ascii=False), file=file, flush=True)
            print_case(records, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
