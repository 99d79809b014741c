"""`sample`: one token per row from hidden states, by Gumbel-max and greedily.

Floor: the product of hidden and the head, once. The noise that a baseline adds is made beforehand and costs it nothing;
that of `softmax + multinomial` is torch's own, so it draws other tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from rlhf_kernels.philox import gumbel
from rlhf_kernels.sample import sample
from rlhf_kernels.sample.reference import STREAM

from rlhf_engine.bench.case import Baseline, Case, Tensors
from rlhf_engine.bench.floor import gemm_floors
from rlhf_engine.bench.ops.heads import HeadSize, make_head

TEMPERATURE = 0.9
_CPU = {
    "tiny": [(5, 16, 97)],
    "quick": [(16, 512, 32000)],
    "default": [(16, 512, 32000), (64, 896, 151936)],
    "full": [(n, *hv) for hv in ((512, 32000), (1024, 32768), (896, 151936)) for n in (1, 16, 64)],
}
_CUDA = {
    "tiny": [(5, 16, 97)],
    "quick": [(64, 2048, 151936)],
    "default": [(n, 4096, 128256) for n in (1, 64)],
    "full": [(n, *hv) for hv in ((4096, 128256), (2048, 151936)) for n in (1, 16, 64, 256)],
}


def cases(size: str, device_type: str, dtype: torch.dtype) -> list[Case]:
    """Drawn and greedy at every N × H × V."""
    sizes = (_CUDA if device_type == "cuda" else _CPU)[size]
    return [_case(HeadSize(*s), dtype, greedy) for s in sizes for greedy in (False, True)]


def _case(s: HeadSize, dtype: torch.dtype, greedy: bool) -> Case:
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
            backend=backend,
        )
        assert out.logprob is not None
        return {"logprob": out.logprob}

    def baseline(name: str, score: Callable[[Tensors], Tensors], same: bool) -> Baseline:
        return Baseline(name=name, prepare=lambda inputs: lambda: score(inputs), same=same)

    return Case(
        op="sample",
        name=f"{'greedy' if greedy else 'drawn'}/{s}",
        dtype=dtype,
        kernels=("sample",),
        shape=(s.V, s.H),
        make=make,
        run=run,
        eager=_eager,
        floor=lambda inputs: gemm_floors((inputs["hidden"], inputs["weight"].T)),
        baselines=(
            baseline("log_softmax + given noise", _eager, same=dtype == torch.float32),
            baseline("softmax + multinomial", _multinomial, same=False),
        ),
        flops=2.0 * s.N * s.H * s.V,
        moved_bytes=s.H * (s.V + s.N) * dtype.itemsize,
        tiers={"logprob": "T1"},  # of the token that float64 draws; logits that are rounded to bf16 draw others
    )


def _eager(inputs: Tensors) -> Tensors:
    """All logits in the head's dtype, then upcast."""
    z = (inputs["hidden"] @ inputs["weight"].T).to(inputs["noise"].dtype) / TEMPERATURE
    token = (z + inputs["noise"]).argmax(-1)
    return {"logprob": z.log_softmax(-1).gather(1, token[:, None])[:, 0]}


def _multinomial(inputs: Tensors) -> Tensors:
    log_p = ((inputs["hidden"] @ inputs["weight"].T).float() / TEMPERATURE).log_softmax(-1)
    token = log_p.exp().multinomial(1)
    return {"logprob": log_p.gather(1, token)[:, 0]}
