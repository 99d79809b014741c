"""Benchmarks of the kernels: every backend that is there, beside what other libraries offer and a bare-GEMM floor.

Layers, imports downward only:
    runner     cases → records, progress           report, roofline   table, JSON lines, plot
    timing, memory, accuracy                       milliseconds, peak bytes, error against float64
    ops/<op>   inputs, runs, baselines, floor      case               what a case is

Inside one case everything is measured on the same inputs, in one process (memory: one fresh process each), with the
same number of threads and gradients to the same inputs.
"""

import pkgutil
from pathlib import Path

OPS = tuple(sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent / "ops")])))
"""Names on the command line: the modules of `ops`, each named after the folder of `rlhf_kernels` that it times."""
# Distribution → the version that comparisons were written for, by reading its source.
PEERS = {
    "liger-kernel": "0.8.5",
    "cut-cross-entropy": "25.1.1",
    "quack-kernels": "0.6.4",  # 0.6.5 does not import with nvidia-cutlass-dsl 4.7 and later
    "trl": "1.16.0",
    "peft": "0.21.2",
    "flash-attn": "2.8.3",
}
# tiny is for tests, quick for a look, default for a record, full for every size
SIZES = ("tiny", "quick", "default", "full")
