"""Benchmarks of the kernels: every backend that is there, beside what other libraries offer and a bare-GEMM floor.

Layers, imports downward only:
    runner     cases → records, progress           report, roofline   table, JSON lines, plot
    timing, memory, accuracy                       milliseconds, peak bytes, error against float64
    ops/<op>   inputs, runs, baselines, floor      case               what a case is

Inside one case everything is measured on the same inputs, in one process (memory: one fresh process each), with the
same number of threads and gradients to the same inputs.
"""

# Name on the command line → what it times; the modules of `ops` have the same names.
OPS = (
    "linear_logprob",
    "linear_logprob_pair",
    "gather_logprob",
    "linear_ppo_loss",
    "linear",
    "lora",
    "block",
    "ppo_losses",
    "gae",
    "sample",
    "decode_attention",
    "decode_step",
)
# tiny is for tests, quick for a look, default for a record, full for every size
SIZES = ("tiny", "quick", "default", "full")
