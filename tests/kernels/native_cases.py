"""Inputs of every native op with answers in float64, in a file that a C++ program reads on any machine.

`write(path)` makes the file; `native_cases_main.cpp` computes each case with every instruction set that its CPU has and
holds the results to the tiers of `rlhf_kernels.testing`. The limits are computed here, so the program only compares.

The file is a list of entries. Each is a line of text, followed by raw little-endian numbers where it has a shape:
`case OP LABEL`, `number NAME VALUE`, `array NAME DTYPE DIMENSIONS SIZE…`, `want NAME MAX RMS ROW ULP DIMENSIONS SIZE…`
(always float64) and `end`. A want's limits are the largest error, its root mean square, that of the worst row, and the
error in units of the last place; one that does not apply is `inf`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from rlhf_kernels.block import reference as block
from rlhf_kernels.decode_attention import reference as decode_attention
from rlhf_kernels.decode_step import LINEARS
from rlhf_kernels.gae import reference as gae
from rlhf_kernels.gather_logprob import reference as gather_logprob
from rlhf_kernels.logits import OUTPUTS
from rlhf_kernels.lora import reference as lora
from rlhf_kernels.lora.segments import Lanes
from rlhf_kernels.philox import gumbel
from rlhf_kernels.ppo_loss import reference as ppo_loss
from rlhf_kernels.sample.reference import STREAM
from torch import Tensor

from .decode_step_cases import Call, Sizes, make_adapters, make_call, make_decoder, mapped

FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64
NONE = math.inf


class Want(NamedTuple):
    """An answer and how far a result may be from it."""

    exact: Tensor
    limits: tuple[float, float, float, float]


def _norms(actual: Tensor, exact: Tensor) -> tuple[float, float, float]:
    """Largest, root mean square and worst row's error, where the answer is finite."""
    error = torch.where(exact.isfinite(), (actual.double() - exact).abs(), 0.0)
    if error.numel() == 0:
        return 0.0, 0.0, 0.0
    square = error.square()
    rows = square.reshape(square.shape[0], -1) if square.dim() else square[None, None]
    return error.max().item(), square.mean().sqrt().item(), rows.mean(1).max().sqrt().item()


def _size(exact: Tensor) -> float:
    return torch.where(exact.isfinite(), exact, 0.0).abs().max().item() if exact.numel() else 0.0


def tier1(exact: Tensor, plain: Tensor) -> Want:
    return Want(exact, (4 * _norms(plain, exact)[0] + 1e-6 * _size(exact), NONE, NONE, NONE))


def tier2(exact: Tensor) -> Want:
    return Want(exact, (NONE, NONE, NONE, 0.55))


def tier3(exact: Tensor, eager: Tensor) -> Want:
    largest, rms, row = _norms(eager, exact)
    tiny = 1e-7 * _size(exact)
    return Want(exact, (2 * largest + tiny, 1.25 * rms + tiny, 2 * row + tiny, NONE))


def within(exact: Tensor, limit: float) -> Want:
    return Want(exact, (limit * _size(exact), NONE, NONE, NONE))


def rounded(exact: Tensor, eager: Tensor) -> Want:
    """By the tier of the dtype that the result has."""
    return (tier1 if eager.dtype == FP32 else tier3)(exact, eager)


class Case(NamedTuple):
    """One call of an op. Arrays and numbers have the names that the C++ program asks for."""

    op: str
    label: str
    arrays: dict[str, Tensor]
    numbers: dict[str, float]
    wants: dict[str, Want]


def _writer(file: BinaryIO) -> Callable[[str, Tensor], None]:
    def write(head: str, x: Tensor) -> None:
        shape = " ".join(map(str, (x.dim(), *x.shape)))
        file.write(f"{head} {shape}\n".encode())
        x = x.detach().contiguous()
        file.write((x.view(torch.int16) if x.dtype == BF16 else x).numpy().tobytes())

    return write


def write(path: Path, seeds: tuple[int, ...] = (0, 1, 2)) -> None:
    """Every case for each seed."""
    with open(path, "wb") as file:
        put = _writer(file)
        for case in (c for seed in seeds for c in cases(seed)):
            file.write(f"case {case.op} {case.label}\n".encode())
            for name, number in case.numbers.items():
                file.write(f"number {name} {float(number)!r}\n".encode())
            for name, x in case.arrays.items():
                put(f"array {name} {str(x.dtype).removeprefix('torch.')}", x)
            for name, want in case.wants.items():
                put(f"want {name} {' '.join(repr(x) for x in want.limits)}", want.exact.double())
            file.write(b"end\n")


def cases(seed: int) -> Iterator[Case]:
    """One case of every op and dtype, of ragged sizes."""
    g = torch.Generator().manual_seed(seed)
    for dtype in (FP32, BF16):
        name = str(dtype).removeprefix("torch.")
        label = f"{name}-seed{seed}"
        yield _head(g, dtype, f"plain-{label}", (33, 64, 0, 700), False)
        yield _head(g, dtype, f"options-{label}", (15, 38, 6, 517), True)
        yield _sample(g, dtype, label)
        for adapter in (FP32, BF16):
            both = f"{name}-adapters-{str(adapter).removeprefix('torch.')}-seed{seed}"
            yield _lora(g, dtype, adapter, both)
            yield _lora_decode(g, dtype, adapter, both)
        yield _decode_attention(g, dtype, label)
        yield _decode_step(dtype, label, seed)
        yield _gather_logprob(g, dtype, label)
        yield from _block(g, dtype, label)
    yield _ppo_loss(g, f"float32-seed{seed}")
    yield _value_loss(g, f"float32-seed{seed}")
    yield _gae(g, f"float32-seed{seed}")
    yield _whiten(g, f"float32-seed{seed}")


def _randn(g: torch.Generator, *shape: int, scale: float = 1.0, dtype: torch.dtype = FP32) -> Tensor:
    return (scale * torch.randn(shape, generator=g)).to(dtype)


# ---- the vocabulary --------------------------------------------------------------------------------------------------


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
    return {name: x.detach() for name, x in out.items()}


def _head(g: torch.Generator, dtype: torch.dtype, label: str, shape: tuple[int, ...], options: bool) -> Case:
    rows, H, extra, V = shape
    t = {
        "hidden": _randn(g, rows + 3, H, dtype=dtype),  # three rows that do not count
        "other": _randn(g, rows + 3, H, dtype=dtype),
        "weight": _randn(g, V, H, scale=0.3, dtype=dtype),
        "extra_hidden": _randn(g, rows, extra, dtype=dtype),
        "extra_weight": _randn(g, V, extra, scale=0.3, dtype=dtype),
        "bias": _randn(g, V) if options else torch.zeros(V),
        "rows": torch.randperm(rows + 3, generator=g)[:rows].sort().values,
        "temperature": torch.rand(rows, generator=g) + 0.5 if options else torch.ones(rows),
        "target": torch.randint(0, V, (rows,), generator=g),
    }
    t["target"][-1] = V - 1
    t |= {f"g_{name}": _randn(g, rows) for name in _GRADIENTS}
    n = {"softcap": 3.0 if options else 0.0, "scale": 1.3 if options else 1.0}
    exact, plain, eager = (_head_answers(t, n, d) for d in (FP64, FP32, dtype))
    wants = {}
    for name, x in exact.items():
        rows_of_logits = name.startswith(("d_", "expected"))  # what is summed up from rounded operands
        wants[name] = rounded(x, eager[name]) if rows_of_logits else tier1(x, plain[name])
    return Case("head", label, t, n, wants)


def _sample(g: torch.Generator, dtype: torch.dtype, label: str) -> Case:
    n_rows, H, V = 40, 64, 1100
    t = {
        "hidden": _randn(g, n_rows, H, dtype=dtype),
        "weight": _randn(g, V, H, scale=0.3, dtype=dtype),
        "bias": _randn(g, V),
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

    def statistics(z: Tensor) -> tuple[Tensor, Tensor]:
        log_p = torch.log_softmax(z, -1)
        finite = log_p.clamp_min(torch.finfo(z.dtype).min)
        return log_p.gather(1, token[:, None])[:, 0], -(log_p.exp() * finite).sum(-1)

    pairs = zip(("logprob", "entropy"), statistics(z[clear]), statistics(logits(FP32)[0]), strict=True)
    return Case("sample", label, t, n, {"token": within(token, 0)} | {k: tier1(x, plain) for k, x, plain in pairs})


def _gather_logprob(g: torch.Generator, dtype: torch.dtype, label: str) -> Case:
    n, V = 9, 1037
    t = {
        "logits": _randn(g, n, V, scale=3, dtype=dtype),
        "target": torch.randint(0, V, (n,), generator=g),
        "temperature": torch.rand(n, generator=g) + 0.5,
    }
    t["target"][2] = -100
    t |= {f"g_{name}": _randn(g, n) for name in _GRADIENTS[:-1]}

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


# ---- adapters --------------------------------------------------------------------------------------------------------


def _adapters(g: torch.Generator, K: int, M: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    ranks = (16, 5)
    A = [_randn(g, r, K, scale=K**-0.5, dtype=dtype) for r in ranks]
    return A, [_randn(g, M, r, scale=r**-0.5, dtype=dtype) for r in ranks]


def _slots(lanes: Lanes) -> tuple[dict[str, Tensor], dict[str, float]]:
    tensors = {f"A{i}": a for i, a in enumerate(lanes.A)} | {f"B{i}": b for i, b in enumerate(lanes.B)}
    tensors["runs"] = torch.tensor(list(lanes.runs))
    numbers = {f"scale{i}": s for i, s in enumerate(lanes.scales)} | {f"p{i}": p for i, p in enumerate(lanes.p)}
    return tensors, numbers | {"seed": lanes.seed, "stream": lanes.stream}


def _doubled(lanes: Lanes) -> Lanes:
    return lanes._replace(A=[a.double() for a in lanes.A], B=[b.double() for b in lanes.B])


def _lora(g: torch.Generator, dtype: torch.dtype, adapter: torch.dtype, label: str) -> Case:
    n, K, M = 77, 53, 131
    A, B = _adapters(g, K, M, adapter)
    runs = [0, 15, 60], [15, 38, n], [0, 1, 0]
    lanes = Lanes(A, B, [0.5, 1.5], *runs, [0.4, 0.0], -99, torch.arange(n) * 7 + 2**33, 3)
    t, numbers = _slots(lanes)
    t |= {
        "x": _randn(g, n, K, dtype=dtype),
        "y0": _randn(g, n, M, dtype=dtype),
        "dy": _randn(g, lanes.n_on, M, dtype=dtype),
        "row_ids": lanes.row_ids,
    }
    on = torch.cat([torch.arange(start, end) for start, end, _ in lanes.runs])

    def answers(wide: bool) -> dict[str, Tensor]:
        x, y, dy = (t[k].double() if wide else t[k] for k in ("x", "y0", "dy"))
        given = _doubled(lanes) if wide else lanes
        delta = lora.forward(x, given)
        y = y.clone()
        y[on] = (y[on].to(delta.dtype) + delta).to(y.dtype)
        grads = lora.backward(dy, x, given, True, [True, True], [True, True])
        return {"delta": delta, "y": y, **dict(zip(("dx", "dA0", "dA1", "dB0", "dB1"), grads, strict=True))}

    exact, eager = answers(True), answers(False)
    return Case("lora", label, t, numbers, {name: rounded(x, eager[name]) for name, x in exact.items()})


def _lora_decode(g: torch.Generator, dtype: torch.dtype, adapter: torch.dtype, label: str) -> Case:
    n, K, M = 19, 96, 70
    A, B = _adapters(g, K, M, adapter)
    lanes = Lanes(A, B, [0.5, 1.5], [0, 6], [6, n], [1, 0], [0.0, 0.0], 0, None, 0)
    t, numbers = _slots(lanes)
    t |= {
        "x": _randn(g, n, K, dtype=dtype),
        "weight": _randn(g, M, K, scale=K**-0.5, dtype=dtype),
        "bias": _randn(g, M, dtype=dtype),
    }
    parts = [t[k] for k in ("x", "weight", "bias")]
    exact = lora.linear_forward(*(x.double() for x in parts), _doubled(lanes))
    wants = {"y": rounded(exact, lora.linear_forward(*parts, lanes))}
    return Case("lora_decode", label, t, numbers, wants)


# ---- decoding --------------------------------------------------------------------------------------------------------


def _decode_attention(g: torch.Generator, dtype: torch.dtype, label: str) -> Case:
    lengths, block_size, heads, kv_heads, dim = (5, 1, 40, 0, 17), 4, 6, 2, 40
    pages = -(-max(lengths) // block_size)
    blocks = len(lengths) * pages + 2
    caches = [torch.full((blocks, block_size, kv_heads, dim), math.nan, dtype=dtype) for _ in range(2)]
    table = torch.randperm(blocks, generator=g)[: len(lengths) * pages].view(-1, pages)
    for row, length in enumerate(lengths):
        for s in range(length):
            for cache in caches:
                cache[table[row, s // block_size], s % block_size] = _randn(g, kv_heads, dim, dtype=dtype)
    q = _randn(g, len(lengths), heads, dim, dtype=dtype)
    t = {"q": q, "k": caches[0], "v": caches[1], "lengths": torch.tensor(lengths), "table": table}
    n = {"scale": dim**-0.5, "window": 13, "softcap": 1.5}
    rest = (t["lengths"], table, n["scale"], int(n["window"]), n["softcap"])
    exact = decode_attention.forward(*(x.double() for x in (q, *caches)), *rest)
    return Case("decode_attention", label, t, n, {"out": rounded(exact, decode_attention.forward(q, *caches, *rest))})


def _decode_step(dtype: torch.dtype, label: str, seed: int) -> Case:
    s = Sizes(H=50, heads=3, kv_heads=1, D=10, mlp=33, head_norms=True, bias=True, windows=(4, None))
    decoder, adapters = make_decoder(s, dtype, seed=seed), make_adapters(s)
    call = make_call(s, 19, dtype, len(adapters), seed=seed + 10)
    call = call._replace(keys=[x.contiguous() for x in call.keys], values=[x.contiguous() for x in call.values])

    def taken(wide: bool) -> dict[str, Tensor]:
        def cast(x: Tensor) -> Tensor:
            return x.double() if wide and x.is_floating_point() else x

        mine = Call(*mapped(list(call), cast))
        out = mine.take(mapped(decoder, cast), mapped(adapters, cast), "reference")
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
    exact, eager = taken(True), taken(False)
    return Case("decode_step", label, t, n, {name: rounded(x, eager[name]) for name, x in exact.items()})


# ---- elements --------------------------------------------------------------------------------------------------------


def _gradient(function: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(function(x), x, dy)[0]


def _block(g: torch.Generator, dtype: torch.dtype, label: str) -> Iterator[Case]:
    if dtype == BF16:
        x = _randn(g, 4099, scale=100, dtype=dtype)
        yield Case("squares", label, {"x": x}, {}, {"y": within(x.double().square(), 0)})

    x, dy, weight = _randn(g, 40, 129, dtype=dtype), _randn(g, 40, 129, dtype=dtype), _randn(g, 129, dtype=dtype)
    wide, eps = x.double(), 1e-3
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    scaled, normal = dy.double() * weight.double(), wide * rstd
    dx = rstd * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))
    wants = {
        "y": rounded(normal * weight.double(), block.rms_norm(x, weight, eps)),
        "dx": rounded(dx, _gradient(lambda x: block.rms_norm(x, weight, eps), x, dy)),
    }
    yield Case("rms_norm", label, {"x": x, "dy": dy, "weight": weight, "rstd": rstd.float()}, {}, wants)

    shape = (2, 7, 3, 38)  # batch, tokens, heads, features
    x, dy = _randn(g, *shape, dtype=dtype), _randn(g, *shape, dtype=dtype)
    cos, sin = _randn(g, 2, 7, 38, dtype=dtype), _randn(g, 2, 7, 38, dtype=dtype)

    def turned(x: Tensor) -> Tensor:
        angles = cos.to(x.dtype), sin.to(x.dtype)
        return block.rotary(x.transpose(1, 2), x.transpose(1, 2), *angles)[0].transpose(1, 2)

    wants = {
        "y": rounded(turned(x.double()), turned(x)),
        "dx": rounded(_gradient(turned, x.double(), dy.double()), _gradient(turned, x, dy)),
    }
    yield Case("rotary", label, {"x": x, "dy": dy, "cos": cos, "sin": sin}, {}, wants)

    gate, up, dy = _randn(g, 4099, scale=4, dtype=dtype), _randn(g, 4099, dtype=dtype), _randn(g, 4099, dtype=dtype)
    wants = {
        "d_gate": rounded(
            _gradient(lambda x: block.swiglu(x, up.double()), gate.double(), dy.double()),
            _gradient(lambda x: block.swiglu(x, up), gate, dy),
        ),
        "d_up": rounded(
            _gradient(lambda x: block.swiglu(gate.double(), x), up.double(), dy.double()),
            _gradient(lambda x: block.swiglu(gate, x), up, dy),
        ),
    }
    yield Case("swiglu", label, {"gate": gate, "up": up, "dy": dy}, {}, wants)


def _tokens(g: torch.Generator, n: int, *names: str) -> dict[str, Tensor]:
    t = {name: _randn(g, n, scale=0.5) for name in names}
    return t | {"mask": torch.rand(n, generator=g) > 0.3}


def _ppo_loss(g: torch.Generator, label: str) -> Case:
    t = _tokens(g, 1003, "new_logprob", "old_logprob", "advantage", "ref_logprob", "entropy")
    n = {"denom": 701.0, "clip_low": 0.2, "clip_high": 0.3, "dual_clip": 3.0, "kl_coef": 0.1, "entropy_coef": 0.01}

    def answers(dtype: torch.dtype) -> tuple[Tensor, ...]:
        new, old, advantage, ref, entropy, mask = (x.to(dtype) for x in t.values())
        denom = torch.tensor(n["denom"], dtype=dtype)
        clips = (n["clip_low"], n["clip_high"], n["dual_clip"], "k3", n["kl_coef"], n["entropy_coef"])
        out = ppo_loss.forward(new, old, advantage, mask, denom, ref, entropy, *clips)
        grads = ppo_loss.backward(torch.ones((), dtype=dtype), out[2], mask, denom, n["entropy_coef"], True, True)
        return *out, grads[1]

    names = ("loss", "statistics", "dloss", "d_entropy")
    wants = {k: tier1(x, plain) for k, x, plain in zip(names, answers(FP64), answers(FP32), strict=True)}
    return Case("ppo_loss", label, t, n, wants)


def _value_loss(g: torch.Generator, label: str) -> Case:
    t = _tokens(g, 1003, "value", "old_value", "ret")
    n = {"denom": 701.0, "clip": 0.2}

    def answers(dtype: torch.dtype) -> tuple[Tensor, ...]:
        value, old, ret, mask = (x.to(dtype) for x in t.values())
        return ppo_loss.value_forward(value, old, ret, mask, torch.tensor(n["denom"], dtype=dtype), n["clip"])

    names = ("loss", "statistics", "dloss")
    wants = {k: tier1(x, plain) for k, x, plain in zip(names, answers(FP64), answers(FP32), strict=True)}
    return Case("value_loss", label, t, n, wants)


def _gae(g: torch.Generator, label: str) -> Case:
    n, T = 19, 127
    t = {k: _randn(g, n, T) for k in ("reward", "value", "d_advantage", "d_ret")}
    t |= {"bootstrap": _randn(g, n), "mask": torch.rand(n, T, generator=g) > 0.3}

    def answers(dtype: torch.dtype) -> tuple[Tensor, ...]:
        reward, value, d_advantage, d_ret, last = (t[k].to(dtype) for k in list(t)[:5])
        forward = gae.forward(reward, value, t["mask"], last, 0.99, 0.95)
        return *forward, *gae.backward(d_advantage, d_ret, t["mask"], 0.99, 0.95)

    names = ("advantage", "ret", "d_reward", "d_value", "d_bootstrap")
    wants = {k: tier1(x, plain) for k, x, plain in zip(names, answers(FP64), answers(FP32), strict=True)}
    return Case("gae", label, t, {"gamma": 0.99, "lam": 0.95}, wants)


def _whiten(g: torch.Generator, label: str) -> Case:
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
