"""Cases of the native ops without products of whole weights: rows of logits, attention, losses, what is elementwise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from rlhf_kernels.attention import reference as attention
from rlhf_kernels.decode_attention import reference as decode_attention
from rlhf_kernels.gae import reference as gae
from rlhf_kernels.gather_logprob import reference as gather_logprob
from rlhf_kernels.llama_ops import reference as llama_ops
from rlhf_kernels.llama_ops.native import KINDS
from rlhf_kernels.ppo_loss import PpoOptions, PpoTokens
from rlhf_kernels.ppo_loss import reference as ppo_loss
from rlhf_kernels.vocab.logits import OUTPUTS
from torch import Tensor

from .native_case_file import FP32, FP64, Case, randn, rounded, tier1, tier2, within

ROW_GRADIENTS = ("logprob", "lse", "entropy", "mean_logit", "log_sum_sq_prob")


def gather_logprob_case(g: torch.Generator, dtype: torch.dtype, label: str) -> Case:
    n, V = 9, 1037
    t = {
        "logits": randn(g, n, V, scale=3, dtype=dtype),
        "target": torch.randint(0, V, (n,), generator=g),
        "temperature": torch.rand(n, generator=g) + 0.5,
    }
    t["target"][2] = -100
    t |= {f"g_{name}": randn(g, n) for name in ROW_GRADIENTS}

    def answers(logits: Tensor) -> dict[str, Tensor]:
        wide = FP64 if logits.dtype == FP64 else FP32
        rest = (t["target"], t["temperature"].to(wide), 1.0, -100)
        out = dict(zip(OUTPUTS, gather_logprob.forward(logits, *rest, ",".join(OUTPUTS)), strict=True))
        saved = (out["lse"], out["entropy"], out["log_sum_sq_prob"])
        names = ("logprob", "entropy", "lse", "mean_logit", "log_sum_sq_prob")
        out["d_logits"] = torch.empty_like(logits)
        gather_logprob.backward(logits, *rest, saved, tuple(t[f"g_{k}"].to(wide) for k in names), out["d_logits"])
        return out

    exact, eager = answers(t["logits"].double()), answers(t["logits"])
    return Case("gather_logprob", label, t, {}, {name: rounded(x, eager[name]) for name, x in exact.items()})


def decode_attention_case(g: torch.Generator, dtype: torch.dtype, label: str) -> Case:
    lengths, block_size, heads, kv_heads, dim = (5, 1, 40, 0, 17), 4, 6, 2, 40
    pages = -(-max(lengths) // block_size)
    blocks = len(lengths) * pages + 2
    caches = [torch.full((blocks, block_size, kv_heads, dim), math.nan, dtype=dtype) for _ in range(2)]
    table = torch.randperm(blocks, generator=g)[: len(lengths) * pages].view(-1, pages)
    for row, length in enumerate(lengths):
        for s in range(length):
            for cache in caches:
                cache[table[row, s // block_size], s % block_size] = randn(g, kv_heads, dim, dtype=dtype)
    q = randn(g, len(lengths), heads, dim, dtype=dtype)
    sinks = randn(g, heads, dtype=FP32)
    t = {"q": q, "k": caches[0], "v": caches[1], "lengths": torch.tensor(lengths), "table": table, "sinks": sinks}
    n = {"scale": dim**-0.5, "window": 13, "softcap": 1.5}
    rest = (t["lengths"], table, n["scale"], int(n["window"]), n["softcap"], sinks)
    exact = decode_attention.forward(*(x.double() for x in (q, *caches)), *rest)
    return Case("decode_attention", label, t, n, {"out": rounded(exact, decode_attention.forward(q, *caches, *rest))})


def attention_case(g: torch.Generator, dtype: torch.dtype, label: str) -> Case:
    lengths, parents, heads, kv_heads, dim = (19, 22, 0, 35), (-1, 0, -1, -1), 6, 2, 40
    t = {name: randn(g, sum(lengths), kv_heads, dim, dtype=dtype) for name in "kv"}
    t |= {name: randn(g, sum(lengths), heads, dim, dtype=dtype) for name in ("q", "d_out")}
    t |= {"sinks": randn(g, heads, dtype=FP32)}
    n = {"scale": dim**-0.5, "window": 25, "softcap": 1.5}

    def answers(dtype: torch.dtype) -> dict[str, Tensor]:
        leaves = [t[name].to(dtype).detach().clone().requires_grad_() for name in ("q", "k", "v", "sinks")]
        options = (n["scale"], int(n["window"]), n["softcap"], leaves[3])
        out = attention.in_its_dtype(*leaves[:3], lengths, parents, *options)
        found = torch.autograd.grad(out, leaves, t["d_out"].to(dtype))
        return dict(zip(("out", "d_q", "d_k", "d_v", "d_sinks"), (out.detach(), *found), strict=True))

    exact, eager = answers(FP64), answers(dtype)
    wants = {name: rounded(x, eager[name]) for name, x in exact.items()}
    t |= {"lengths": torch.tensor(lengths), "parents": torch.tensor(parents)}
    return Case("attention", label, t, n, wants)


def _gradient(function: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(function(x), x, dy)[0]


def block_cases(g: torch.Generator, dtype: torch.dtype, label: str) -> Iterator[Case]:
    x, dy, weight = randn(g, 40, 129, dtype=dtype), randn(g, 40, 129, dtype=dtype), randn(g, 129, dtype=dtype)
    wide, eps = x.double(), 1e-3
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    scaled, normal = dy.double() * weight.double(), wide * rstd
    dx = rstd * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))
    wants = {
        "y": rounded(normal * weight.double(), llama_ops.rms_norm(x, weight, eps)),
        "dx": rounded(dx, _gradient(lambda x: llama_ops.rms_norm(x, weight, eps), x, dy)),
        "rstd": rounded(rstd, rstd.float()),
    }
    yield Case("rms_norm", label, {"x": x, "dy": dy, "weight": weight}, {"eps": eps, "plus_one": 0.0}, wants)

    def from_one(x: Tensor) -> Tensor:
        return llama_ops.rms_norm(x, weight, eps, plus_one=True)

    scaled = dy.double() * (1 + weight.double())
    dx = rstd * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))
    wants = {
        "y": rounded(normal * (1 + weight.double()), from_one(x)),
        "dx": rounded(dx, _gradient(from_one, x, dy)),
        "rstd": rounded(rstd, rstd.float()),
    }
    numbers = {"eps": eps, "plus_one": 1.0}
    yield Case("rms_norm", f"{label}-plus-one", {"x": x, "dy": dy, "weight": weight}, numbers, wants)

    shape = (2, 7, 3, 38)  # batch, tokens, heads, features
    x, dy = randn(g, *shape, dtype=dtype), randn(g, *shape, dtype=dtype)
    cos, sin = randn(g, 2, 7, 38, dtype=dtype), randn(g, 2, 7, 38, dtype=dtype)

    def turned(x: Tensor) -> Tensor:
        angles = cos.to(x.dtype), sin.to(x.dtype)
        return llama_ops.rotary(x.transpose(1, 2), x.transpose(1, 2), *angles)[0].transpose(1, 2)

    wants = {
        "y": rounded(turned(x.double()), turned(x)),
        "dx": rounded(_gradient(turned, x.double(), dy.double()), _gradient(turned, x, dy)),
    }
    yield Case("rotary", label, {"x": x, "dy": dy, "cos": cos, "sin": sin}, {}, wants)

    gate, up, dy = randn(g, 4099, scale=4, dtype=dtype), randn(g, 4099, dtype=dtype), randn(g, 4099, dtype=dtype)
    wants = {
        "y": rounded(llama_ops.swiglu(gate.double(), up.double()), llama_ops.swiglu(gate, up)),
        "d_gate": rounded(
            _gradient(lambda x: llama_ops.swiglu(x, up.double()), gate.double(), dy.double()),
            _gradient(lambda x: llama_ops.swiglu(x, up), gate, dy),
        ),
        "d_up": rounded(
            _gradient(lambda x: llama_ops.swiglu(gate.double(), x), up.double(), dy.double()),
            _gradient(lambda x: llama_ops.swiglu(gate, x), up, dy),
        ),
    }
    yield Case("swiglu", label, {"gate": gate, "up": up, "dy": dy}, {}, wants)

    for number, kind in enumerate(KINDS):

        def activated(x: Tensor, kind: str = kind) -> Tensor:
            return llama_ops.activation(x, kind)

        wants = {
            "y": rounded(activated(gate.double()), activated(gate)),
            "dx": rounded(_gradient(activated, gate.double(), dy.double()), _gradient(activated, gate, dy)),
        }
        yield Case("activation", f"{label}-{kind}", {"x": gate, "dy": dy}, {"kind": float(number)}, wants)


def _tokens(g: torch.Generator, n: int, *names: str) -> dict[str, Tensor]:
    t = {name: randn(g, n, scale=0.5) for name in names}
    return t | {"mask": torch.rand(n, generator=g) > 0.3}


def ppo_loss_case(g: torch.Generator, label: str) -> Case:
    t = _tokens(g, 1003, "new_logprob", "old_logprob", "advantage", "ref_logprob", "entropy")
    n = {"denom": 701.0, "clip_low": 0.2, "clip_high": 0.3, "dual_clip": 3.0, "kl_coef": 0.1, "entropy_coef": 0.01}

    def answers(dtype: torch.dtype) -> tuple[Tensor, ...]:
        new, old, advantage, ref, entropy, mask = (x.to(dtype) for x in t.values())
        denom = torch.tensor(n["denom"], dtype=dtype)
        options = PpoOptions(n["clip_low"], n["clip_high"], n["dual_clip"], "k3", n["kl_coef"], n["entropy_coef"])
        out = ppo_loss.forward(new, PpoTokens(old, advantage, mask, denom, ref), entropy, options)
        grads = ppo_loss.backward(torch.ones((), dtype=dtype), out[2], mask, denom, n["entropy_coef"], True, True)
        return *out, grads[1]

    names = ("loss", "statistics", "dloss", "d_entropy")
    wants = {k: tier1(x, plain) for k, x, plain in zip(names, answers(FP64), answers(FP32), strict=True)}
    return Case("ppo_loss", label, t, n, wants)


def value_loss_case(g: torch.Generator, label: str) -> Case:
    t = _tokens(g, 1003, "value", "old_value", "ret")
    n = {"denom": 701.0, "clip": 0.2}

    def answers(dtype: torch.dtype) -> tuple[Tensor, ...]:
        value, old, ret, mask = (x.to(dtype) for x in t.values())
        return ppo_loss.value_forward(value, old, ret, mask, torch.tensor(n["denom"], dtype=dtype), n["clip"])

    names = ("loss", "statistics", "dloss")
    wants = {k: tier1(x, plain) for k, x, plain in zip(names, answers(FP64), answers(FP32), strict=True)}
    return Case("value_loss", label, t, n, wants)


def gae_case(g: torch.Generator, label: str) -> Case:
    n, T = 19, 127
    t = {k: randn(g, n, T) for k in ("reward", "value", "d_advantage", "d_ret")}
    t |= {"bootstrap": randn(g, n), "mask": torch.rand(n, T, generator=g) > 0.3}

    def answers(dtype: torch.dtype) -> tuple[Tensor, ...]:
        reward, value, d_advantage, d_ret, last = (t[k].to(dtype) for k in list(t)[:5])
        forward = gae.forward(reward, value, t["mask"], last, 0.99, 0.95)
        return *forward, *gae.backward(d_advantage, d_ret, t["mask"], 0.99, 0.95)

    names = ("advantage", "ret", "d_reward", "d_value", "d_bootstrap")
    wants = {k: tier1(x, plain) for k, x, plain in zip(names, answers(FP64), answers(FP32), strict=True)}
    return Case("gae", label, t, {"gamma": 0.99, "lam": 0.95}, wants)


def whiten_case(g: torch.Generator, label: str) -> Case:
    t = _tokens(g, 4111, "x", "grad")
    wide = t["x"].double()
    moments = gae.masked_moments(wide, t["mask"])
    y, stats = gae.whiten_forward(wide, t["mask"], None, True, 1e-8)
    wants = {
        "moments": within(moments, 1e-12),
        "y": tier2(y),
        "stats": within(stats, 1e-12),
        "d_x": tier2(gae.whiten_backward(t["grad"].double(), wide, t["mask"], stats, True, False)),
    }
    return Case("whiten", label, t, {"eps": 1e-8}, wants)
