"""A program that runs each native op once on small tensors and holds it to `reference` by its tier.

`python -m tests.kernels.native_once SET…` also checks that exactly these instruction sets are there, in this order.
It needs torch and `rlhf_kernels` alone, so that it is fast enough under an emulator. Two threads, so that teams form.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from rlhf_kernels.attention import attention
from rlhf_kernels.decode_attention import decode_attention
from rlhf_kernels.gae import gae, masked_moments, whiten
from rlhf_kernels.gather_logprob import gather_logprob
from rlhf_kernels.linear import linear
from rlhf_kernels.linear_logprob import linear_logprob
from rlhf_kernels.linear_logprob_pair import linear_logprob_pair
from rlhf_kernels.linear_ppo_loss import linear_ppo_loss
from rlhf_kernels.llama_ops import activation, rms_norm, rotary, swiglu
from rlhf_kernels.llama_ops.native import KINDS
from rlhf_kernels.lora import DecodeLinear, Segments, lora_linear
from rlhf_kernels.ppo_loss import ppo_loss, value_loss
from rlhf_kernels.runtime import native, registry
from rlhf_kernels.runtime.testing import assert_ok, tier1, tier3
from rlhf_kernels.sample import sample
from rlhf_kernels.vocab.logits import OUTPUTS
from torch import Tensor

from .decode_step_cases import Sizes, make_adapters, make_call, make_decoder

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
Function = Callable[..., Sequence[Tensor | None]]
_held = []


def hold(name: str, function: Function, *inputs: Tensor, gradients: bool = True) -> None:
    """The outputs of `function(*inputs)` and its gradients for all inputs, natively and in float64."""

    def run(backend: str, wide: bool) -> list[Tensor]:
        leaves = [x.double() if wide else x.clone() for x in inputs]
        with registry.use_backend(backend), torch.set_grad_enabled(gradients):
            out = [x for x in function(*(x.requires_grad_(gradients) for x in leaves)) if x is not None]
            if gradients:
                seen = [x for x in out if x.requires_grad]
                weights = [torch.linspace(-1, 1, x.numel(), dtype=FP64).view(x.shape) for x in seen]
                loss = sum((x.double() * w).sum() for x, w in zip(seen, weights, strict=True))
                out += torch.autograd.grad(loss, leaves)
        return [x.detach() for x in out]

    held = zip(run("cpu", False), run("reference", True), run("reference", False), strict=True)
    for i, (ours, exact, eager) in enumerate(held):
        tier = tier1 if ours.dtype in (FP32, FP64) else tier3
        assert_ok(tier(ours, exact, eager), f"{name}, {inputs[0].dtype}, result {i}")
    _held.append(name)


def vocabulary() -> None:
    """What sweeps the vocabulary. Their bf16 gradients have tiers of their own: native_cases_main.cpp."""
    n, H, V = 21, 38, 530
    hidden, other, weight, bias = torch.randn(n, H), torch.randn(n, H), 0.3 * torch.randn(V, H), torch.randn(V)
    target = torch.randint(0, V, (n,))
    target[3] = -100
    old, advantage, mask = torch.full((n,), -6.0), torch.randn(n), torch.arange(n) % 4 != 1
    head = {"temperature": 0.7, "softcap": 20.0}

    def every_output(h: Tensor, w: Tensor, b: Tensor) -> Sequence[Tensor | None]:
        return linear_logprob(h, w, target, bias=b, outputs=OUTPUTS, **head)

    hold("linear_logprob", every_output, hidden, weight, bias)
    hold("linear_logprob", lambda h, w: every_output(h, w, bias), hidden.bfloat16(), weight.bfloat16(), gradients=False)
    hold("linear_logprob_pair", lambda h: linear_logprob_pair(h, other.to(h.dtype), weight, target), hidden)
    hold(
        "linear_ppo_loss",
        lambda h, w: [linear_ppo_loss(h, w, target, old, advantage, mask, denom=9.0, entropy_coef=0.1).loss],
        hidden,
        weight,
    )
    for dtype in (FP32, BF16):
        hold(
            "gather_logprob",
            lambda z: gather_logprob(z, target, outputs=OUTPUTS, temperature=0.7),
            torch.randn(n, V).to(dtype),
        )
        drawn = [
            sample(hidden.to(dtype), weight.to(dtype), seed=torch.arange(n), position=torch.arange(n), backend=backend)
            for backend in ("cpu", "reference")
        ]
        assert torch.equal(drawn[0].token, drawn[1].token), "sample"
        torch.testing.assert_close(drawn[0].logprob, drawn[1].logprob)
    _held.append("sample")


def linears() -> None:
    for dtype in (FP32, BF16, FP16):
        weight, bias = (torch.randn(45, 65) / 8).to(dtype), torch.randn(45).to(dtype)
        for rows in (9, 40):  # a few, and many
            hold("linear", lambda x, w, b: [linear(x, w, b)], torch.randn(rows, 65).to(dtype), weight, bias)


def adapters() -> None:
    n, K, M, r = 13, 64, 45, 6
    segments = Segments(starts=(0, 4), ends=(4, 9), slots=(0, 1))
    everywhere = Segments(starts=(0, 4), ends=(4, n), slots=(0, 1))
    for dtype in (FP32, BF16):
        x, weight, bias = torch.randn(n, K).to(dtype), (torch.randn(M, K) / 8).to(dtype), torch.randn(M).to(dtype)
        A, B = [(torch.randn(r, K) / 8).to(dtype) for _ in "ab"], [torch.randn(M, r).to(dtype) for _ in "ab"]

        def linear(x: Tensor, w: Tensor, b: Tensor, *pairs: Tensor) -> Sequence[Tensor]:
            return [lora_linear(x, w, b, pairs[:2], pairs[2:], [0.5, 2.0], segments)]

        def decoded(x: Tensor, w: Tensor, b: Tensor, *pairs: Tensor) -> Sequence[Tensor]:
            return [DecodeLinear(w, b, pairs[:2], pairs[2:], [0.5, 2.0], everywhere)(x)]

        hold("lora", linear, x, weight, bias, *A, *B)
        hold("lora_decode", decoded, x, weight, bias, *A, *B, gradients=False)


def decoding() -> None:
    lengths, table = torch.tensor([5, 1, 16]), torch.arange(6).view(3, 2)
    sizes = Sizes(H=33, heads=2, kv_heads=1, D=10, mlp=7, V=9, head_norms=True, bias=True)
    for dtype in (FP32, BF16):
        q, cache = torch.randn(3, 4, 20).to(dtype), torch.randn(6, 8, 2, 20).to(dtype)
        hold(
            "decode_attention",
            lambda q, c, s: [decode_attention(q, c, c, lengths, table, scale=0.3, softcap=5.0, sinks=s)],
            q,
            cache,
            torch.randn(4).to(dtype),
            gradients=False,
        )
        hold(
            "attention",
            lambda q, k, v, s: [attention(q, k, v, [9, 14], parents=[-1, 0], scale=0.3, window=11, sinks=s)],
            torch.randn(23, 4, 20).to(dtype),
            *torch.randn(2, 23, 2, 20).to(dtype),
            torch.randn(4).to(dtype),
            gradients=dtype == FP32,  # those of bf16: native_cases_main.cpp
        )
        slots, decoder = make_adapters(sizes), make_decoder(sizes, dtype)
        call = make_call(sizes, 5, dtype, len(slots), longest=6)
        takes = call.take(decoder, slots), call.take_exactly(decoder, slots), call.take(decoder, slots, "reference")
        parts = zip(*takes, strict=True)
        for ours, truth, eager in parts:
            assert_ok((tier1 if dtype == FP32 else tier3)(ours, truth, eager), f"decode_step, {dtype}")
    _held.append("decode_step")


def elements() -> None:
    for dtype in (FP32, BF16):
        x, weight = torch.randn(5, 37).to(dtype), torch.randn(37).to(dtype)
        for plus_one in (False, True):
            hold("rms_norm", lambda x, w, p=plus_one: [rms_norm(x, w, eps=1e-3, plus_one=p)], x, weight)
        q, k = torch.randn(2, 3, 4, 6).to(dtype), torch.randn(2, 1, 4, 6).to(dtype)
        cos, sin = torch.randn(1, 4, 6).bfloat16(), torch.randn(1, 4, 6).bfloat16()

        def turned(q: Tensor, k: Tensor, cos: Tensor = cos, sin: Tensor = sin) -> Sequence[Tensor]:
            return rotary(q, k, cos.to(q.dtype), sin.to(q.dtype))

        hold("rotary", turned, q, k)
        hold("swiglu", lambda gate, up: [swiglu(gate, up)], x, torch.randn(5, 37).to(dtype))
        for kind in KINDS:
            hold("activation", lambda x, k=kind: [activation(x, k)], x)
    new, old, advantage, entropy, reward, value = torch.randn(6, 5, 37)
    mask = torch.rand(5, 37) > 0.3

    def policy(new: Tensor, entropy: Tensor) -> Sequence[Tensor]:
        return [ppo_loss(new, old, advantage, mask, denom=99, entropy=entropy, entropy_coef=0.1, dual_clip=3.0).loss]

    hold("ppo_loss", policy, new, entropy)
    hold("value_loss", lambda v: [value_loss(v, old, reward, mask, denom=99, clip=0.2).loss], value)
    hold("gae", lambda r, v: gae(r, v, mask, gamma=0.99, lam=0.95), reward, value)
    hold("whiten", lambda x: [whiten(x, mask)], value)
    hold("masked_moments", lambda x: [masked_moments(x, mask)], value, gradients=False)


def main(expected: Sequence[str]) -> None:
    """Every op, once with each instruction set of this CPU."""
    if native.missing() is not None:
        raise SystemExit(native.missing())
    if expected and native.isas() != list(expected):
        raise SystemExit(f"expected the instruction sets {list(expected)}, found {native.isas()}")
    torch.set_num_threads(2)
    for name in native.isas():
        torch.manual_seed(0)
        with native.use_isa(name):
            for part in (vocabulary, linears, adapters, decoding, elements):
                part()
        print(name, "agrees with the reference in", ", ".join(dict.fromkeys(_held)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
