"""Cases of the native ops without products of whole weights: rows of logits, attention, losses, what is elementwise."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import torch
from rlhf_kernels.attention import reference as attention
from rlhf_kernels.decode_attention import reference as decode_attention
from rlhf_kernels.gae import reference as gae
from rlhf_kernels.gather_logprob import reference as gather_logprob
from rlhf_kernels.llama_ops import reference as llama_ops
from rlhf_kernels.llama_ops.native import KINDS
from rlhf_kernels.ppo_loss import PpoOptions, PpoTokens, reference as ppo_loss
from rlhf_kernels.vocab.logits import OUTPUTS
from torch import Tensor

from .native_case_file import FP32, FP64, Case, judged, randn, rounded, tier2, within

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

    def answers(dtype: torch.dtype) -> dict[str, Tensor]:
        logits, wide = t["logits"].to(dtype), FP64 if dtype == FP64 else FP32
        rest = (t["target"], t["temperature"].to(wide), 1.0, -100)
        out = dict(zip(OUTPUTS, gather_logprob.forward(logits, *rest, ",".join(OUTPUTS)), strict=True))
        saved = (out["lse"], out["entropy"], out["log_sum_sq_prob"])
        names = ("logprob", "entropy", "lse", "mean_logit", "log_sum_sq_prob")
        out["d_logits"] = torch.empty_like(logits)
        gather_logprob.backward(logits, *rest, saved, tuple(t[f"g_{k}"].to(wide) for k in names), out["d_logits"])
        return out

    return Case("gather_logprob", label, t, {}, judged(answers, dtype))


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
        gradients = torch.autograd.grad(out, leaves, t["d_out"].to(dtype))
        return dict(zip(("out", "d_q", "d_k", "d_v", "d_sinks"), (out.detach(), *gradients), strict=True))

    wants = judged(answers, dtype)
    t |= {"lengths": torch.tensor(lengths), "parents": torch.tensor(parents)}
    return Case("attention", label, t, n, wants)


def _block_case(
    op: str, label: str, t: dict[str, Tensor], n: dict[str, float], function: Callable[..., Tensor], **gradients: str
) -> Case:
    """y = function(...) of tensors by name, and gradients by name of some of them."""

    def answers(dtype: torch.dtype) -> dict[str, Tensor]:
        own = {name: x.detach().to(dtype, copy=True) for name, x in t.items()}
        leaves = [own[name].requires_grad_() for name in gradients.values()]
        y = function(**{name: x for name, x in own.items() if name != "dy"})
        return {"y": y.detach(), **dict(zip(gradients, torch.autograd.grad(y, leaves, own["dy"]), strict=True))}

    return Case(op, label, t, n, judged(answers, t["dy"].dtype))


def block_cases(g: torch.Generator, dtype: torch.dtype, label: str) -> Iterator[Case]:
    sizes = {"x": (40, 129), "dy": (40, 129), "weight": (129,)}
    t = {name: randn(g, *shape, dtype=dtype) for name, shape in sizes.items()}
    eps = 1e-3
    rstd = torch.rsqrt(t["x"].double().square().mean(-1, keepdim=True) + eps)
    for name, plus_one in (("", False), ("-plus-one", True)):

        def norm(x: Tensor, weight: Tensor, plus_one: bool = plus_one) -> Tensor:
            if x.dtype != FP64:
                return llama_ops.rms_norm(x, weight, eps, plus_one)
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight + plus_one)

        case = _block_case("rms_norm", label + name, t, {"eps": eps, "plus_one": float(plus_one)}, norm, dx="x")
        yield case._replace(wants=case.wants | {"rstd": rounded(rstd, rstd.float())})

    shape = (2, 7, 3, 38)  # batch, tokens, heads, features
    t = {name: randn(g, *shape, dtype=dtype) for name in ("x", "dy")}
    t |= {name: randn(g, 2, 7, 38, dtype=dtype) for name in ("cos", "sin")}

    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return llama_ops.rotary(x.transpose(1, 2), x.transpose(1, 2), cos, sin)[0].transpose(1, 2)

    yield _block_case("rotary", label, t, {}, turned, dx="x")

    t = {name: randn(g, 4099, scale=scale, dtype=dtype) for name, scale in (("gate", 4.0), ("up", 1.0), ("dy", 1.0))}
    yield _block_case("swiglu", label, t, {}, llama_ops.swiglu, d_gate="gate", d_up="up")
    for number, kind in enumerate(KINDS):
        activated = functools.partial(llama_ops.activation, kind=kind)
        t = {"x": t.get("gate", t.get("x")), "dy": t["dy"]}
        yield _block_case("activation", f"{label}-{kind}", t, {"kind": float(number)}, activated, dx="x")


def _tokens(g: torch.Generator, n: int, *names: str) -> dict[str, Tensor]:
    t = {name: randn(g, n, scale=0.5) for name in names}
    return t | {"mask": torch.rand(n, generator=g) > 0.3}


def ppo_loss_case(g: torch.Generator, label: str) -> Case:
    t = _tokens(g, 1003, "new_logprob", "old_logprob", "advantage", "ref_logprob", "entropy")
    n = {"denom": 701.0, "clip_low": 0.2, "clip_high": 0.3, "dual_clip": 3.0, "kl_coef": 0.1, "entropy_coef": 0.01}

    def answers(dtype: torch.dtype) -> dict[str, Tensor]:
        new, old, advantage, ref, entropy, mask = (x.to(dtype) for x in t.values())
        denom = torch.tensor(n["denom"], dtype=dtype)
        options = PpoOptions(n["clip_low"], n["clip_high"], n["dual_clip"], "k3", n["kl_coef"], n["entropy_coef"])
        out = ppo_loss.forward(new, PpoTokens(old, advantage, mask, denom, ref), entropy, options)
        grads = ppo_loss.backward(torch.ones((), dtype=dtype), out[2], mask, denom, n["entropy_coef"], True, True)
        return dict(zip(("loss", "statistics", "dloss", "d_entropy"), (*out, grads[1]), strict=True))

    return Case("ppo_loss", label, t, n, judged(answers, FP32))


def value_loss_case(g: torch.Generator, label: str) -> Case:
    t = _tokens(g, 1003, "value", "old_value", "ret")
    n = {"denom": 701.0, "clip": 0.2}

    def answers(dtype: torch.dtype) -> dict[str, Tensor]:
        value, old, ret, mask = (x.to(dtype) for x in t.values())
        out = ppo_loss.value_forward(value, old, ret, mask, torch.tensor(n["denom"], dtype=dtype), n["clip"])
        return dict(zip(("loss", "statistics", "dloss"), out, strict=True))

    return Case("value_loss", label, t, n, judged(answers, FP32))


def gae_case(g: torch.Generator, label: str) -> Case:
    n, T = 19, 127
    t = {k: randn(g, n, T) for k in ("reward", "value", "d_advantage", "d_ret")}
    t |= {"bootstrap": randn(g, n), "mask": torch.rand(n, T, generator=g) > 0.3}

    def answers(dtype: torch.dtype) -> dict[str, Tensor]:
        reward, value, d_advantage, d_ret, last = (t[k].to(dtype) for k in list(t)[:5])
        out = gae.forward(reward, value, t["mask"], last, 0.99, 0.95)
        out = *out, *gae.backward(d_advantage, d_ret, t["mask"], 0.99, 0.95)
        return dict(zip(("advantage", "ret", "d_reward", "d_value", "d_bootstrap"), out, strict=True))

    return Case("gae", label, t, {"gamma": 0.99, "lam": 0.95}, judged(answers, FP32))


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
