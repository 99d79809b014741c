#!/usr/bin/env python
"""`gae` on the CPU: native against reference, one after the other in every round, forward and backward.

    python bench/bench_gae.py [--quick] [--json FILE]

ms is the median over rounds; a round times every backend once, so a busy moment of the machine meets all.
error is max |advantage − exact| against the float64 reference, error_bound is what tier T1 of
`rlhf_kernels.testing` allows. `--json` appends one object per line and case:
{op, case, dtype, backend, ms, baseline, baseline_ms, error, error_bound}.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from rlhf_kernels import native
from rlhf_kernels.gae import gae
from rlhf_kernels.testing import tier1

KNOBS = {"gamma": 0.99, "lam": 0.95}
BASELINE = "reference"


def make_case(B: int, T: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Answers of random length: reward, value [B, T] and a mask that is 1 up to the length."""
    reward, value = torch.randn(2, B, T, generator=generator)
    length = torch.randint(T // 4, T + 1, (B, 1), generator=generator)
    return reward, value, torch.arange(T) < length


def forward(reward, value, mask, backend):
    return gae(reward, value, mask, **KNOBS, backend=backend)


def forward_backward(reward, value, mask, backend):
    value = value.detach().requires_grad_()
    out = gae(reward, value, mask, **KNOBS, backend=backend)
    out.advantage.backward(reward)
    return out


def measure(function, inputs, backends: list[str], rounds: int) -> dict[str, float]:
    """Median ms per backend over interleaved rounds, after one round of warm-up."""
    times: dict[str, list[float]] = {backend: [] for backend in backends}
    for number in range(rounds + 1):
        for backend in backends:
            start = time.perf_counter()
            function(*inputs, backend)
            elapsed = time.perf_counter() - start
            if number > 0:
                times[backend].append(1e3 * elapsed)
    return {backend: statistics.median(samples) for backend, samples in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="20 rounds at 64 × 512 only")
    parser.add_argument("--rounds", type=int, default=50, help="rounds per case without --quick")
    parser.add_argument("--json", type=Path, help="append one JSON object per line to this file")
    options = parser.parse_args()
    shapes = [(64, 512)] if options.quick else [(1, 512), (64, 512), (512, 1024)]
    rounds = 20 if options.quick else options.rounds
    backends = [BASELINE] if native.missing() else [BASELINE, "cpu"]
    if native.missing():
        print(f"no cpu row: {native.missing()}")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, median of {rounds} rounds")
    print(f"{'case':27}{'backend':12}{'ms':>10}{'speed-up':>10}{'error':>11}{'bound':>11}")
    for B, T in shapes:
        inputs = make_case(B, T, torch.Generator().manual_seed(0))
        reward, value, mask = inputs
        exact = gae(reward.double(), value.double(), mask, **KNOBS, backend="reference").advantage
        plain = gae(*inputs, **KNOBS, backend="reference").advantage
        for name, function in (("forward", forward), ("forward+backward", forward_backward)):
            ms = measure(function, inputs, backends, rounds)
            for backend in backends:
                check = tier1(gae(*inputs, **KNOBS, backend=backend).advantage, exact, plain)
                case = f"{name} {B}x{T}"
                row = {"op": "gae", "case": case, "dtype": "float32", "backend": backend, "ms": ms[backend]}
                row |= {"baseline": BASELINE, "baseline_ms": ms[BASELINE]}
                row |= {"error": check.error, "error_bound": check.bound}
                speed_up = f"{ms[BASELINE] / ms[backend]:.1f}x"
                print(f"{case:27}{backend:12}{ms[backend]:10.3f}{speed_up:>10}{check.error:11.2e}{check.bound:11.2e}")
                if options.json:
                    with options.json.open("a") as file:
                        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
