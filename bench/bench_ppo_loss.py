#!/usr/bin/env python
"""`ppo_loss` + `value_loss` + `whiten` on the CPU, forward and backward, against eager and compiled torch.

    python bench/bench_ppo_loss.py [--quick] [--threads N] [--json FILE]

One step whitens the advantages, takes both losses with all their statistics and calls backward once, to new_logprob
and value ("+ whiten gradient": also through whiten). Baselines: the same formulas and statistics in eager torch; the
losses alone; and both under one torch.compile. A round runs every candidate a few times in a row; µs is the median over
rounds, so a busy moment of the machine meets all, and beside it the least. error is max |gradient − exact| against
float64, bound what tier T1 allows. `--cpu-time` counts the calling thread's time: for one thread on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path

import torch
from rlhf_kernels import gae, native, ppo_loss, value_loss, whiten
from rlhf_kernels.testing import tier1

LOW, HIGH, KL, CLIP = 0.8, 1.2, 0.05, 0.2


def make_case(B: int, T: int) -> dict[str, torch.Tensor]:
    """Answers of random length, log-probs near each other."""
    g = torch.Generator().manual_seed(0)
    draw = lambda scale=1.0: scale * torch.randn(B, T, generator=g)  # noqa: E731
    old, old_value = draw() - 2, draw()
    mask = torch.arange(T) < torch.randint(T // 4, T + 1, (B, 1), generator=g)
    return {
        "new": old + draw(0.1),
        "old": old,
        "ref": old + draw(0.1),
        "advantage": draw(),
        "value": old_value + draw(0.1),
        "old_value": old_value,
        "ret": old_value + draw(),
        "mask": mask,
        "denom": mask.sum().to(torch.float32),
    }


def eager_step(new, old, ref, advantage, value, old_value, ret, mask, denom, *, with_statistics: bool = True):
    """(policy loss, value loss, whitened advantage, statistics) in plain torch."""
    m = mask.to(new.dtype)
    n = m.sum()
    mean = (advantage * m).sum() / n
    var = ((advantage - mean).square() * m).sum() / (n - 1)
    whitened = (advantage - mean) * torch.rsqrt(var + 1e-8) * m
    a = whitened.detach()
    log_ratio = new - old
    ratio = log_ratio.exp()
    policy = (torch.maximum(-a * ratio, -a * ratio.clamp(LOW, HIGH)) * m).sum() / denom
    d = ref - new
    kl = ((torch.expm1(d) - d) * m).sum() / denom
    error = value - ret
    cut = old_value + (value - old_value).clamp(-CLIP, CLIP) - ret
    value_loss = 0.5 * (torch.maximum(error.square(), cut.square()) * m).sum() / denom
    numbers = []
    if with_statistics:
        with torch.no_grad():
            low = (((a < 0) & (ratio < LOW)) * m).sum() / denom
            high = (((a > 0) & (ratio > HIGH)) * m).sum() / denom
            approx_kl = ((torch.expm1(log_ratio) - log_ratio) * m).sum() / denom
            numbers = [policy.detach(), kl.detach(), low + high, low, high, approx_kl]
            numbers += [(ratio * m).sum() / denom, (ratio * m).amax()]
            numbers += [((cut.square() > error.square()) * m).sum() / denom, n, -(error * m).sum()]
            numbers += [(error.square() * m).sum(), (ret * m).sum(), (ret.square() * m).sum()]
    return policy + KL * kl, value_loss, whitened, numbers


def our_step(new, old, ref, advantage, value, old_value, ret, mask, denom):
    whitened = whiten(advantage, mask)
    policy = ppo_loss(new, old, whitened.detach(), mask, denom=denom, ref_logprob=ref, kl_coef=KL)
    values = value_loss(value, old_value, ret, mask, denom=denom, clip=CLIP)
    return policy.loss, values.loss, whitened, (policy, values)


def losses_step(*args):
    return eager_step(*args, with_statistics=False)


def run(step, case: dict[str, torch.Tensor], through_whiten: bool) -> tuple[torch.Tensor, ...]:
    """Forward and backward; gradients to new, value and, if asked for, advantage."""
    leaves = {name: case[name].detach().requires_grad_() for name in ("new", "value")}
    if through_whiten:
        leaves["advantage"] = case["advantage"].detach().requires_grad_()
    policy, value, whitened, _ = step(*(leaves.get(name, x) for name, x in case.items()))
    roots, grads = [policy, value], [None, None]
    if through_whiten:
        roots, grads = [*roots, whitened], [*grads, case["ret"]]
    torch.autograd.backward(roots, grads)
    return tuple(x.grad for x in leaves.values())


def measure(candidates: dict, rounds: int, repeats: int, clock=time.perf_counter) -> dict[str, tuple[float, float]]:
    """Median and least µs of each candidate over interleaved rounds."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds + 2):
        for name, call in candidates.items():
            call()
            start = clock()
            for _ in range(repeats):
                call()
            if number > 1:
                times[name].append(1e6 * (clock() - start) / repeats)
    return {name: (statistics.median(samples), min(samples)) for name, samples in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="20 rounds")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=10, help="calls in a row per round and candidate")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true", help="time of the calling thread instead of the clock's")
    parser.add_argument("--json", type=Path, help="append one JSON object per line to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rounds = 20 if options.quick else options.rounds
    how = (rounds, options.repeats, time.thread_time if options.cpu_time else time.perf_counter)
    if native.missing():
        print(f"no cpu backend, ours is the reference: {native.missing()}")
    steps = {
        "ours": our_step,
        "compiled, losses only": torch.compile(losses_step, fullgraph=True),
        "compiled": torch.compile(eager_step, fullgraph=True),
        "eager, losses only": losses_step,
        "eager": eager_step,
    }
    case = make_case(64, 512)
    wide = {name: x.double() if x.is_floating_point() else x for name, x in case.items()}
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, 64 x 512, fp32, median of {rounds} rounds")
    print(f"{'case':26}{'candidate':24}{'us':>9}{'least':>9}{'/ ours':>9}{'error':>11}{'bound':>11}")
    for through_whiten in (False, True):
        name = "step + whiten gradient" if through_whiten else "step"
        exact, plain = run(eager_step, wide, through_whiten), run(eager_step, case, through_whiten)
        calls = {key: partial(run, step, case, through_whiten) for key, step in steps.items()}
        times = measure(calls, *how)
        for key, step in steps.items():
            checks = [tier1(*x) for x in zip(run(step, case, through_whiten), exact, plain, strict=True)]
            worst = max(checks, key=lambda check: check.error / check.bound)
            row = {"op": "ppo_loss", "case": name, "dtype": "float32", "backend": key, "us": times[key][0]}
            row |= {"threads": torch.get_num_threads(), "error": worst.error, "error_bound": worst.bound}
            ratio = f"{times[key][0] / times['ours'][0]:.2f}x"
            print(
                f"{name:26}{key:24}{times[key][0]:9.1f}{times[key][1]:9.1f}{ratio:>9}{worst.error:11.2e}{worst.bound:11.2e}"
            )
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    value = case["value"].clone().requires_grad_()

    def estimate(backward: bool) -> None:
        out = gae(case["ret"], value, case["mask"], gamma=0.99, lam=0.95)
        if backward:
            out.advantage.backward(case["ret"])

    with torch.no_grad():
        forward = measure({"gae": partial(estimate, False)}, *how)["gae"][0]
    both = measure({"gae": partial(estimate, True)}, *how)["gae"][0]
    print(f"gae alone: forward {forward:.1f} us, forward + backward {both:.1f} us")


if __name__ == "__main__":
    main()
