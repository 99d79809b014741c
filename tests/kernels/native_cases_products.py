"""Cases of the native ops that multiply with whole weights: vocabulary, linears, adapters, a decoding step."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from rlhf_kernels.decode_step import LINEARS
from rlhf_kernels.linear import reference as linear
from rlhf_kernels.lora import reference as lora
from rlhf_kernels.lora.segments import LoraCall
from rlhf_kernels.runtime.philox import gumbel
from rlhf_kernels.sample.reference import STREAM
from torch import Tensor

from .decode_step_cases import Sizes, make_adapters, make_call, make_decoder
from .dense import statistics
from .native_case_file import FP32, FP64, Case, judged, randn, rounded, tier1, within


def _logits(t: dict[str, Tensor], n: dict[str, float], dtype: torch.dtype, h: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """(z, c, u): logits after and before the temperature, and dz/dy."""
    c = (h @ w.T + t["bias"].to(dtype)) * n["scale"]
    u = torch.full_like(c, n["scale"])
    if n["softcap"]:
        c = n["softcap"] * torch.tanh(c / n["softcap"])
        u = u * (1 - (c / n["softcap"]).square())
    temperature = t["temperature"].to(dtype)[:, None]
    return c / temperature, c, u / temperature


_GRADIENTS = ("logprob", "lse", "entropy", "mean_logit", "log_sum_sq_prob", "kl")


def _head_answers(t: dict[str, Tensor], n: dict[str, float], dtype: torch.dtype) -> dict[str, Tensor]:
    """Everything of head.h from a matrix of logits."""
    target = t["target"][:, None]
    h = torch.cat([t["hidden"][t["rows"]], t["extra_hidden"]], 1).to(dtype).requires_grad_()
    w = torch.cat([t["weight"], t["extra_weight"]], 1).to(dtype).requires_grad_()
    bias = t["bias"].to(dtype).requires_grad_()
    z, _, u = _logits(t | {"bias": bias}, n, dtype, h, w)
    with torch.no_grad():
        z2 = _logits(t, n, dtype, t["other"][t["rows"]].to(dtype), t["weight"].to(dtype))[0]
        log_r = torch.log_softmax(z2, -1)
    log_p = torch.log_softmax(z, -1)
    p = log_p.exp()
    out = {
        "logprob": log_p.gather(1, target)[:, 0],
        "lse": torch.logsumexp(z, -1),
        "entropy": -(p * log_p).sum(-1),
        "is_top1": (z.argmax(-1) == t["target"]).to(dtype),
        "mean_logit": z.mean(-1),
        "log_sum_sq_prob": torch.logsumexp(2 * log_p, -1),
        "kl": (p * (log_p - log_r)).sum(-1),
        "pair_logprob": log_r.gather(1, target)[:, 0],
        "pair_lse": torch.logsumexp(z2, -1),
    }
    loss = sum((t[f"g_{name}"].to(dtype) * out[name]).sum() for name in _GRADIENTS)
    grads = torch.autograd.grad(loss, (h, w, bias))
    out |= dict(zip(("d_hidden", "d_weight", "d_bias"), grads, strict=True))
    others = (p * u).scatter(1, target, 0.0)
    out["expected"] = others @ w
    out["expected_kl"] = (others * (log_p - log_r - out["kl"][:, None])) @ w
    for name in ("expected", "expected_kl", "d_hidden", "d_weight"):  # the columns that widen come apart
        out[name], out[f"{name}_own"] = out[name].split([t["hidden"].shape[1], t["extra_hidden"].shape[1]], 1)
    return {name: x.detach().contiguous() for name, x in out.items() if x.numel()}


def head_case(g: torch.Generator, dtype: torch.dtype, label: str, shape: tuple[int, ...], options: bool) -> Case:
    rows, H, extra, V = shape
    t = {
        "hidden": randn(g, rows + 3, H, dtype=dtype),  # three rows that do not count
        "other": randn(g, rows + 3, H, dtype=dtype),
        "weight": randn(g, V, H, scale=0.3, dtype=dtype),
        "extra_hidden": randn(g, rows, extra, dtype=dtype),
        "extra_weight": randn(g, V, extra, scale=0.3, dtype=dtype),
        "bias": randn(g, V) if options else torch.zeros(V),
        "rows": torch.randperm(rows + 3, generator=g)[:rows].sort().values,
        "temperature": torch.rand(rows, generator=g) + 0.5 if options else torch.ones(rows),
        "target": torch.randint(0, V, (rows,), generator=g),
    }
    t["target"][-1] = V - 1
    t |= {f"g_{name}": randn(g, rows) for name in _GRADIENTS}
    n = {"softcap": 3.0 if options else 0.0, "scale": 1.3 if options else 1.0}
    exact, plain, eager = (_head_answers(t, n, d) for d in (FP64, FP32, dtype))
    wants = {}
    for name, x in exact.items():
        rows_of_logits = name.startswith(("d_", "expected"))  # what is summed up from rounded operands
        wants[name] = rounded(x, eager[name]) if rows_of_logits else tier1(x, plain[name])
    return Case("head", label, t, n, wants)


def sample_case(g: torch.Generator, dtype: torch.dtype, label: str) -> Case:
    n_rows, H, V = 40, 64, 1100
    t = {
        "hidden": randn(g, n_rows, H, dtype=dtype),
        "weight": randn(g, V, H, scale=0.3, dtype=dtype),
        "bias": randn(g, V),
        "temperature": torch.rand(n_rows, generator=g) + 0.5,
        "seed": torch.randint(-(2**63), 2**63 - 1, (n_rows,), generator=g),
        "position": torch.randint(0, 2**40, (n_rows,), generator=g),
        "greedy": torch.arange(n_rows) % 3 == 2,
        "forbids": torch.arange(n_rows) % 4 != 1,
        "forbidden": torch.tensor([V - 1, V // 3]),
    }
    n = {"softcap": 5.0, "scale": 1.2, "stream": STREAM}

    def logits(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        z, c, _ = _logits(t, n, dtype, t["hidden"].to(dtype), t["weight"].to(dtype))
        banned = torch.zeros(V, dtype=torch.bool).index_fill(0, t["forbidden"], True) & t["forbids"][:, None]
        return z.masked_fill(banned, -math.inf), c.masked_fill(banned, -math.inf)

    z, c = logits(FP64)
    noise = gumbel(t["seed"], t["position"], STREAM, V).double()
    score = torch.where(t["greedy"][:, None], c, z + noise)
    best = score.topk(2).values
    clear = best[:, 0] - best[:, 1] > 1e-3  # of nearly equal scores, rounding decides
    for name in ("hidden", "temperature", "seed", "position", "greedy", "forbids"):
        t[name] = t[name][clear]
    token = score[clear].argmax(-1)

    exact, plain = (statistics(x, token) for x in (z[clear], logits(FP32)[0]))
    wants = {name: tier1(exact[name], plain[name]) for name in ("logprob", "entropy")}
    return Case("sample", label, t, n, {"token": within(token, 0)} | wants)


def linear_case(g: torch.Generator, dtype: torch.dtype, label: str, shape: tuple[int, int, int]) -> Case:
    """Products of two threads over several pieces of the depth. Rows end in NaN that nobody may read."""
    N, K, M = shape
    dense = [randn(g, *sizes, dtype=dtype) for sizes in ((N, K), (M, K), (M,), (N, M))]

    def answers(wide: torch.dtype) -> dict[str, Tensor]:
        x, weight, bias, dy = (t.to(FP32 if wide != FP64 else FP64) for t in dense)  # torch's sums in fp16 may be fp16
        y, dx, dW = linear.forward(x, weight, bias), linear.input_gradient(dy, weight), linear.weight_gradient(dy, x)
        out = {"y": y, "y_without_bias": linear.forward(x, weight, None), "dx": dx, "dW": dW}
        return {name: value.to(wide) for name, value in out.items()}

    t = {
        name: F.pad(x, (0, 3), value=math.nan)
        for name, x in zip(("x", "weight", "dy"), dense[:2] + dense[3:], strict=True)
    }
    return Case("linear", label, t | {"bias": dense[2]}, {"K": K}, judged(answers, dtype))


# ---- adapters and decoding -------------------------------------------------------------------------------------------


def _adapters(g: torch.Generator, K: int, M: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    ranks = (16, 5)
    A = [randn(g, r, K, scale=K**-0.5, dtype=dtype) for r in ranks]
    return A, [randn(g, M, r, scale=r**-0.5, dtype=dtype) for r in ranks]


def _slots(lanes: LoraCall) -> tuple[dict[str, Tensor], dict[str, float]]:
    tensors = {f"A{i}": a for i, a in enumerate(lanes.A)} | {f"B{i}": b for i, b in enumerate(lanes.B)}
    tensors["runs"] = torch.tensor(list(lanes.runs))
    numbers = {f"scale{i}": s for i, s in enumerate(lanes.scales)} | {f"p{i}": p for i, p in enumerate(lanes.p)}
    return tensors, numbers | {"seed": lanes.seed, "stream": lanes.stream}


def _doubled(lanes: LoraCall) -> LoraCall:
    return lanes._replace(A=[a.double() for a in lanes.A], B=[b.double() for b in lanes.B])


def lora_case(g: torch.Generator, dtype: torch.dtype, adapter: torch.dtype, label: str) -> Case:
    n, K, M = 77, 53, 131
    A, B = _adapters(g, K, M, adapter)
    runs = [0, 15, 60], [15, 38, n], [0, 1, 0]
    lanes = LoraCall(A, B, [0.5, 1.5], *runs, [0.4, 0.0], -99, torch.arange(n) * 7 + 2**33, 3)
    t, numbers = _slots(lanes)
    t |= {
        "x": randn(g, n, K, dtype=dtype),
        "y0": randn(g, n, M, dtype=dtype),
        "dy": randn(g, lanes.n_on, M, dtype=dtype),
        "row_ids": lanes.row_ids,
    }
    on = torch.cat([torch.arange(start, end) for start, end, _ in lanes.runs])

    def answers(wide: torch.dtype) -> dict[str, Tensor]:
        x, y, dy = (t[k].to(wide, copy=True) for k in ("x", "y0", "dy"))
        given = _doubled(lanes) if wide == FP64 else lanes
        delta = lora.forward(x, given)
        y[on] = (y[on].to(delta.dtype) + delta).to(y.dtype)
        grads = lora.backward(dy, x, given, True, [True, True], [True, True])
        return {"delta": delta, "y": y, **dict(zip(("dx", "dA0", "dA1", "dB0", "dB1"), grads, strict=True))}

    return Case("lora", label, t, numbers, judged(answers, dtype))


def lora_decode_case(g: torch.Generator, dtype: torch.dtype, adapter: torch.dtype, label: str) -> Case:
    n, K, M = 19, 96, 70
    A, B = _adapters(g, K, M, adapter)
    lanes = LoraCall(A, B, [0.5, 1.5], [0, 6], [6, n], [1, 0], [0.0, 0.0], 0, None, 0)
    t, numbers = _slots(lanes)
    t |= {
        "x": randn(g, n, K, dtype=dtype),
        "weight": randn(g, M, K, scale=K**-0.5, dtype=dtype),
        "bias": randn(g, M, dtype=dtype),
    }
    parts = [t[k] for k in ("x", "weight", "bias")]
    exact = lora.linear_forward(*(x.double() for x in parts), _doubled(lanes))
    wants = {"y": rounded(exact, lora.linear_forward(*parts, lanes))}
    return Case("lora_decode", label, t, numbers, wants)


def decode_step_case(dtype: torch.dtype, label: str, seed: int) -> Case:
    s = Sizes(H=50, heads=3, kv_heads=1, D=10, mlp=33, head_norms=True, bias=True, windows=(4, None))
    decoder, adapters = make_decoder(s, dtype, seed=seed), make_adapters(s)
    call = make_call(s, 19, dtype, len(adapters), seed=seed + 10).dense()

    def answers(wide: torch.dtype) -> dict[str, Tensor]:
        out = call.take_exactly(decoder, adapters) if wide == FP64 else call.take(decoder, adapters, "reference")
        return dict(zip(("hidden", "keys", "values"), out, strict=True))

    t = {k: getattr(call, k) for k in ("tokens", "positions", "slots", "cos", "sin", "table")}
    t |= {"embedding": decoder.embedding, "final_norm": decoder.final_norm}
    n = {"eps": decoder.eps, "scale": decoder.scale, "heads": s.heads, "kv_heads": s.kv_heads, "dim": s.D}
    n |= {"layers": s.layers, "n_slots": len(adapters)}
    for i, layer in enumerate(decoder.layers):
        n[f"{i}.window"] = layer.window or 0
        t |= {f"{i}.keys": call.keys[i], f"{i}.values": call.values[i]}
        norms = {k: getattr(layer, k) for k in ("input_norm", "mlp_norm", "q_norm", "k_norm")}
        t |= {f"{i}.{k}": x for k, x in norms.items() if x is not None}
        for name in LINEARS:
            t |= {f"{i}.{name}.weight": getattr(layer, name).weight, f"{i}.{name}.bias": getattr(layer, name).bias}
    for slot, adapter in enumerate(adapters):
        n[f"scale{slot}"] = adapter.scale
        for i, pairs in enumerate(adapter.pairs):
            for name, (A, B) in pairs.items():
                t |= {f"{slot}.{i}.{name}.A": A, f"{slot}.{i}.{name}.B": B}
    return Case("decode_step", label, t, n, judged(answers, dtype))
