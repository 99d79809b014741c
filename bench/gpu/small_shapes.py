#!/usr/bin/env python
"""Runs every kernel backend of every op once on small ragged shapes; meant for compute-sanitizer.

Every op of the benchmarks runs its smallest cases. What these leave out stands here: odd sizes, windows, soft caps.

compute-sanitizer --tool memcheck python bench/gpu/small_shapes.py
TRITON_INTERPRET=1 python bench/gpu/small_shapes.py cpu              # the same calls without a GPU
"""

from __future__ import annotations

import argparse
import os

# Every tensor in an allocation of its own: memcheck then sees an access outside of it.
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch
from rlhf_bench import OPS
from rlhf_bench.ops import load_cases
from rlhf_kernels import (
    HeadLora,
    decode_attention,
    decode_delta_,
    gae,
    gather_logprob,
    linear_logprob,
    masked_moments,
    ppo_loss,
    sample,
    value_loss,
    whiten,
)
from rlhf_kernels.runtime import registry

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("device", nargs="?", choices=("cuda", "cpu"), default="cuda")
DEVICE = parser.parse_args().device


def backends(op: str) -> list[str]:
    """Backends of `op` that have kernels of their own for a GPU."""
    return [b for b in ("cuda", "triton") if registry.unsupported(op, b, DEVICE, torch.float32) is None]


def run_gae(backend: str) -> None:
    for B, T in ((1, 1), (3, 37), (2, 1000), (2, 4100)):
        reward, value = torch.randn(2, B, T, device=DEVICE).requires_grad_().unbind()
        mask = torch.rand(B, T, device=DEVICE) > 0.3
        out = gae(reward, value, mask, gamma=0.99, lam=0.95, bootstrap=torch.randn(B, device=DEVICE), backend=backend)
        (out.advantage.sum() + out.ret.sum()).backward()


def run_whiten(backend: str) -> None:
    for n in (1, 37, 5003):
        x, mask = torch.randn(n, device=DEVICE, requires_grad=True), torch.rand(n, device=DEVICE) > 0.3
        whiten(x, mask, backend=backend).square().sum().backward()
        whiten(x, mask, moments=masked_moments(x, mask, backend=backend), backend=backend)


def run_ppo_loss(backend: str) -> None:
    for n in (1, 37, 5003):
        new, old, advantage, ref, entropy = torch.randn(5, n, device=DEVICE).requires_grad_().unbind()
        mask = torch.rand(n, device=DEVICE) > 0.3
        options = {"ref_logprob": ref, "kl_coef": 0.1, "entropy": entropy, "entropy_coef": 0.1, "dual_clip": 2.0}
        policy = ppo_loss(new, old, advantage, mask, denom=float(n), backend=backend, **options)
        critic = value_loss(new, old, advantage, mask, denom=float(n), clip=0.2, backend=backend)
        (policy.loss + critic.loss).backward()


def run_linear_logprob(backend: str) -> None:
    hidden, weight = torch.randn(17, 72, device=DEVICE, requires_grad=True), torch.randn(1003, 72, device=DEVICE)
    target = torch.randint(0, 1003, (17,), device=DEVICE)
    linear_logprob(hidden, weight, target, backend=backend).logprob.sum().backward()


def run_gather_logprob(backend: str) -> None:
    logits = torch.randn(17, 1003, device=DEVICE, requires_grad=True)
    target = torch.randint(0, 1003, (17,), device=DEVICE)
    gather_logprob(logits, target, backend=backend).logprob.sum().backward()


def run_sample(backend: str) -> None:
    for n, v in ((1, 1), (17, 1003), (70, 300)):
        hidden, weight = torch.randn(n, 72, device=DEVICE), torch.randn(v, 72, device=DEVICE)
        rows = torch.arange(n, device=DEVICE)
        lora = HeadLora(torch.randn(3, 72, device=DEVICE), torch.randn(v, 3, device=DEVICE), 0.5)
        for dtype in (torch.float32, torch.bfloat16):
            options = {"seed": rows, "position": rows, "greedy": rows % 2 == 0, "outputs": ("token", "entropy")}
            sample(hidden.to(dtype), weight.to(dtype), lora=lora, softcap=9.0, backend=backend, **options)


def run_decode_attention(backend: str) -> None:
    for n_heads, n_kv, d in ((4, 2, 8), (7, 1, 80)):
        q = torch.randn(3, n_heads, d, device=DEVICE)
        k_cache, v_cache = (torch.randn(9, n_kv, 130, d, device=DEVICE).transpose(1, 2) for _ in "kv")
        lengths = torch.tensor([390, 0, 7], device=DEVICE)
        table = torch.randperm(9, device=DEVICE).view(3, 3)
        for dtype in (torch.float32, torch.bfloat16):
            caches = (x.to(dtype) for x in (q, k_cache, v_cache))
            decode_attention(*caches, lengths, table, scale=0.3, window=300, softcap=5.0, backend=backend)


def run_lora_decode(backend: str) -> None:
    for n, k, m in ((1, 1, 1), (9, 130, 37), (20, 512, 300)):
        A = [torch.randn(r, k, device=DEVICE) for r in (8, 33)]
        B = [torch.randn(m, r, device=DEVICE) for r in (8, 33)]
        row_slot = torch.arange(n, device=DEVICE) % 3 - 1
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x, y = (torch.randn(n, f, device=DEVICE).to(dtype) for f in (k, m))
            decode_delta_(y, x, A, B, [0.5, 2.0], row_slot, backend=backend)


RUNS = {
    "gae": run_gae,
    "whiten": run_whiten,
    "ppo_loss": run_ppo_loss,
    "linear_logprob": run_linear_logprob,
    "gather_logprob": run_gather_logprob,
    "sample": run_sample,
    "decode_attention": run_decode_attention,
    "lora_decode_delta": run_lora_decode,
}


def ran(what: str) -> None:
    """Wait for the GPU, and say so."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    print(f"{what}: ran", flush=True)


def main() -> None:
    torch.manual_seed(0)
    for op, run in RUNS.items():
        for backend in backends(op):
            run(backend)
            ran(f"{op} {backend}")
    for op in OPS:
        for dtype in (torch.float32, torch.bfloat16):
            for case in load_cases(op, "tiny", DEVICE, dtype):
                for backend in sorted(set.intersection(*(set(backends(kernel)) for kernel in case.kernels))):
                    what = f"{op} {case.name} {str(dtype).removeprefix('torch.')} {backend}"
                    try:
                        case.run(case.make(torch.device(DEVICE)), backend)
                    except registry.BackendUnavailableError as error:  # a filter of sampling, which no kernel serves
                        print(f"{what}: {error}", flush=True)
                    else:
                        ran(what)


if __name__ == "__main__":
    main()
