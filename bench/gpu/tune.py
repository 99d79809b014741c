#!/usr/bin/env python
"""Sweep tiles, warps, stages and splits of the Triton kernels on this GPU, and write a tuned table.

    python bench/gpu/tune.py --out FILE [--budget SECONDS] [--op NAME ...] [--dtype bf16 ...]
        [--size quick|default|full]
    python bench/gpu/tune.py --device cpu --rehearse --out FILE

The sweep goes on with the table in FILE: what that has is not swept again. It ends within the budget and names what is
left. RLHF_ENGINE_TUNED_TABLE=FILE uses the table; as kernels/rlhf_kernels/runtime/tuned/<device>.json it is
used unasked.

--rehearse runs everything in Triton's interpreter at the smallest sizes, with figures that nothing has measured. Such a
table is marked, and never used.

Exit code: 0, also where the budget ended the sweep; 2 for what cannot be served, with nothing written.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SIZES = ("quick", "default", "full")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="in all (default: until it is done)")
    parser.add_argument(
        "--op",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="default: all; ops that share kernels are swept together",
    )
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=None, help="default: bf16; fp32 in a rehearsal")
    parser.add_argument("--size", choices=SIZES, default="default", help="of the benchmark's cases")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU: for tests of the sweep")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    if options.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
        warnings.filterwarnings("ignore", category=RuntimeWarning)  # numpy's, of rows that nobody reads
    try:
        return sweep(options, began)
    except ValueError as error:
        print(f"tune: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def sweep(options: argparse.Namespace, began: float) -> int:
    """Sweep the tiles of an op. Raises ValueError for what cannot be served."""
    if options.rehearse and options.device != "cpu":
        raise ValueError(f"--rehearse: expected it with --device cpu, got {options.device}")
    if options.device == "cpu" and not options.rehearse:
        raise ValueError("--device: expected cuda, or --rehearse, on a CPU there is nothing to measure")
    if options.budget is not None and not options.budget > 0:
        raise ValueError(f"--budget: expected seconds above 0, got {options.budget:g}")
    import torch
    from rlhf_bench import tuning
    from rlhf_kernels.runtime.triton_support import INTERPRETED

    from rlhf_engine.runs.metrics import git_commit

    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device: expected a CUDA device, torch {torch.__version__} sees none")
    if options.device == "cuda" and INTERPRETED:
        raise ValueError("--device: expected kernels that are compiled, got TRITON_INTERPRET=1 in the environment")
    unknown = sorted(set(options.op or ()) - set(tuning.OPS))
    if unknown:
        raise ValueError(f"--op: expected some of {', '.join(tuning.OPS)}, got {', '.join(unknown)}")
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    found = git_commit(Path(__file__))
    commit = "unknown" if found is None else f"{found['commit']}{' and changes' if found['dirty'] else ''}"
    made = tuning.Sweep(
        device=device,
        out=options.out,
        table=tuning.begun(options.out, device, commit=commit, rehearsed=options.rehearse),
        timer=tuning.rehearsal_timer if options.rehearse else tuning.median_timer(device),
        end=began + options.budget if options.budget is not None else float("inf"),
        say=lambda line: print(f"{'rehearsed ' if options.rehearse else ''}{line}", flush=True),
    )
    left = made.run(
        options.op or tuning.OPS,
        "tiny" if options.rehearse else options.size,
        [getattr(torch, DTYPES[name]) for name in options.dtype or (["fp32"] if options.rehearse else ["bf16"])],
    )
    if left:
        print(f"no time left for {'; '.join(left)}; the same command goes on")
    elif not options.op and (absent := made.without_a_case()):
        print(f"no case for {', '.join(absent)}: they keep the defaults")
    return 0


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "kernels"), str(ROOT / "bench"), str(ROOT)]
    raise SystemExit(main())
