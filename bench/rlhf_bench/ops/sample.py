"""`sample`: one token per row from hidden states, by Gumbel-max, greedily, and drawn from what top-k and top-p keep.

Floor: the product of hidden and the head, once. The noise that a baseline adds is made beforehand and costs it nothing.
That of `softmax + multinomial` and of the exponential race is torch's own and part of their time; they draw other
tokens. The race is how vLLM samples: with e_v ~ Exp(1), argmax p_v / e_v is a draw from p.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from rlhf_kernels.runtime.philox import gumbel
from rlhf_kernels.sample import sample
from rlhf_kernels.sample.reference import STREAM
from torch import Tensor

from rlhf_bench.case import Baseline, Case, Tensors
from rlhf_bench.floor import gemm_floors
from rlhf_bench.heads import HeadSize, make_head

TEMPERATURE, TOP_K, TOP_P = 0.9, 50, 0.95
_CPU = {
    "tiny": [(5, 16, 97)],
    "quick": [(16, 512, 32000)],
    "default": [(16, 512, 32000), (64, 896, 151936)],
    "full": [(n, *hv) for hv in ((512, 32000), (1024, 32768), (896, 151936)) for n in (1, 16, 64)],
}
_CUDA = {
    "tiny": [(5, 16, 97)],
    "quick": [(64, 2048, 151936)],
    "default": [(n, 4096, 128256) for n in (16, 64)],
    "full": [(n, *hv) for hv in ((4096, 128256), (2048, 151936)) for n in (1, 16, 64, 256)],
}


def cases(size: str, device_type: str, dtype: torch.dtype) -> list[Case]:
    """Drawn, greedy and filtered at every N × H × V; not filtered in the CPU's quick and default sizes."""
    sizes = (_CUDA if device_type == "cuda" else _CPU)[size]
    few = device_type == "cpu" and size in ("quick", "default")
    kinds = ("drawn", "greedy") if few else ("drawn", "greedy", "filtered")
    return [_case(HeadSize(*s), dtype, kind) for s in sizes for kind in kinds]


def _case(s: HeadSize, dtype: torch.dtype, kind: str) -> Case:
    greedy, filters = kind == "greedy", kind == "filtered"

    def make(device: torch.device) -> Tensors:
        inputs, _ = make_head(s, dtype, device)
        del inputs["target"]
        rows = torch.arange(s.N, device=device)
        noise = torch.zeros(s.N, s.V, device=device) if greedy else gumbel(rows + 7, rows, STREAM, s.V)
        return inputs | {
            "seed": rows + 7,
            "position": rows,
            "greedy": torch.full((s.N,), greedy, device=device),
            "noise": noise,
        }

    def run(inputs: Tensors, backend: str) -> Tensors:
        out = sample(
            inputs["hidden"],
            inputs["weight"],
            seed=inputs["seed"],
            position=inputs["position"],
            greedy=inputs["greedy"],
            temperature=TEMPERATURE,
            top_k=TOP_K if filters else None,
            top_p=TOP_P if filters else None,
            backend=backend,
        )
        assert out.logprob is not None
        return {"logprob": out.logprob}

    def baseline(name: str, score: Callable[[Tensors], Tensors], same: bool) -> Baseline:
        return Baseline(name=name, prepare=lambda inputs: lambda: score(inputs), same=same)

    return Case(
        op="sample",
        name=f"{kind}/{s}",
        dtype=dtype,
        kernels=("sample",),
        replayed=kind != "filtered",  # which no kernel serves
        shape=(s.V, s.H),
        make=make,
        run=run,
        eager=lambda inputs: _eager(inputs, filters),
        floor=lambda inputs: gemm_floors((inputs["hidden"], inputs["weight"].T)),
        baselines=(
            baseline("log_softmax + given noise", lambda i: _eager(i, filters), same=dtype == torch.float32),
            baseline("softmax + multinomial", lambda i: _multinomial(i, filters), same=False),
            *([] if greedy else [baseline("argmax p / Exp(1), as vLLM", lambda i: _race(i, filters), same=False)]),
        ),
        flops=2.0 * s.N * s.H * s.V,
        moved_bytes=s.H * (s.V + s.N) * dtype.itemsize,
        tiers={"logprob": "T1"},  # of the token that float64 draws; logits that are rounded to bf16 draw others
    )


def _eager(inputs: Tensors, filters: bool) -> Tensors:
    """All logits in the head's dtype, then upcast."""
    z = _logits(inputs, filters, inputs["noise"].dtype)
    token = (z + inputs["noise"]).argmax(-1)
    return {"logprob": z.log_softmax(-1).gather(1, token[:, None])[:, 0]}


def _multinomial(inputs: Tensors, filters: bool) -> Tensors:
    log_p = _logits(inputs, filters).log_softmax(-1)
    token = log_p.exp().multinomial(1)
    return {"logprob": log_p.gather(1, token)[:, 0]}


def _race(inputs: Tensors, filters: bool) -> Tensors:
    z = _logits(inputs, filters)
    token = race(z, torch.empty_like(z).exponential_())
    return {"logprob": z.log_softmax(-1).gather(1, token[:, None])[:, 0]}


def race(z: Tensor, e: Tensor) -> Tensor:
    """Tokens [N] of the largest p / e per row of logits [N, V]; e ~ Exp(1) is overwritten."""
    return e.reciprocal_().mul_(z.softmax(-1)).argmax(-1)


def _logits(inputs: Tensors, filters: bool, dtype: torch.dtype = torch.float32) -> Tensor:
    z = (inputs["hidden"] @ inputs["weight"].T).to(dtype).div_(TEMPERATURE)
    return kept(z, TOP_K, TOP_P) if filters else z


def kept(z: Tensor, top_k: int, top_p: float) -> Tensor:
    """Logits [N, V] with −∞ for what top-k, then top-p leave out, by one ascending sort for both."""
    ordered, index = z.sort(dim=-1)
    k = min(top_k, z.shape[1])
    ordered = ordered.masked_fill(ordered < ordered[:, -k, None], -torch.inf)
    below = ordered.softmax(-1).cumsum(-1)  # mass up to here, from the least likely token on
    leave = below <= 1 - top_p
    leave[:, -1] = False  # rounding must not leave out the most likely one
    return torch.empty_like(z).scatter_(1, index, ordered.masked_fill(leave, -torch.inf))
