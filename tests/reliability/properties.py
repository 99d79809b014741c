"""Random calls of every kernel op: what is drawn, how a call lies in memory, and what its results are held to.

`drawn(choose)` makes a case from choices, by `random.choice` say, or by hypothesis, which makes them smaller where a
case fails. `faults(case)` says what is wrong with the native code's results. The truth is the reference in float64 on
plain tensors. The native code gets the same numbers sliced, turned, stepped or expanded out of buffers of NaN, with NaN
wherever it must not read, and must leave these buffers as they are. Its error is at most twice that of the reference in
the same dtype, beside what rounding an input or a result makes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import rlhf_kernels as ops
import torch
from rlhf_kernels import Dropout, HeadLora, HeadLoras, Segments
from rlhf_kernels.llama_ops.native import KINDS
from rlhf_kernels.runtime import native, registry
from rlhf_kernels.runtime.philox import gumbel
from rlhf_kernels.sample.reference import STREAM
from rlhf_kernels.vocab.logits import OUTPUTS
from torch import Tensor

from tests.kernels import dense
from tests.kernels.decode_step_cases import Call, Sizes, make_adapters, make_call, make_decoder, mapped

FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64
SIZES = (1, 2, 3, 0, 5, 7, 8, 15, 16, 17, 31, 33, 47, 64, 65, 100, 129, 200, 257)
LAYOUTS = ("dense", "offset", "padded", "turned", "stepped", "expanded")
RATIOS = torch.tensor([0.0, 0.1, -0.1, 0.5, -0.6, 1.6])  # logs; none near a clip, where rounding decides
FLUSHED = 1e-15  # where even float64 has nothing left of 1 + tanh
IN_NATS = {"gather_logprob", "linear_logprob", "linear_logprob_pair", "linear_ppo_loss", "ppo_loss", "sample"}
Tensors = dict[str, Tensor]
Run = Callable[[Tensors], Sequence[Tensor | None]]


class Case(NamedTuple):
    """A call, and everything that was drawn for it."""

    said: dict[str, Any]
    run: Run
    tensors: Tensors
    trained: list[str]
    layouts: dict[str, str]
    unread: Tensors  # where a tensor may hold anything
    seed: int

    def __repr__(self) -> str:
        return "Case(" + ", ".join(f"{name}={value!r}" for name, value in self.said.items()) + ")"


class Draw:
    """Choices, and the tensors that were made by them."""

    def __init__(self, choose: Callable[[Sequence[Any]], Any]) -> None:
        self._choose = choose
        self.said: dict[str, Any] = {}
        self.tensors, self.unread = Tensors(), Tensors()
        self.trained: list[str] = []
        self.layouts: dict[str, str] = {}

    def start(self) -> None:
        """What every op has, chosen after the op."""
        self.dtype = self.of("dtype", (FP32, BF16))
        self.scale = self.of("scale", (1.0, 1e-3, 6.0))
        self.trains = self.of("gradients", (True, True, False))
        self.seed = self.of("seed", range(2**16))
        self.g = torch.Generator().manual_seed(self.seed)

    def of(self, name: str, values: Sequence[Any]) -> Any:
        self.said[name] = value = self._choose(values)
        return value

    def flag(self, name: str) -> bool:
        return self.of(name, (False, True))

    def size(self, name: str, most: int, least: int = 0) -> int:
        return self.of(name, [n for n in SIZES if least <= n <= most])

    def put(self, name: str, x: Tensor, dtype: Any = None, layouts: Sequence[str] = LAYOUTS) -> Tensor:
        """A tensor, and how it lies in memory; the numbers of an expanded one are its first ones."""
        x = x if dtype is None else x.to(dtype)
        self.layouts[name] = layout = self.of(name, layouts) if x.dim() else "dense"
        if layout == "expanded":
            x = x[:1].expand(x.shape).clone() if len(x) else x
        self.tensors[name] = x
        return x

    def floats(
        self, name: str, *shape: int, dtype: Any = None, scale: float = 1.0, trained: bool = True, plain: bool = False
    ) -> Tensor:
        x = scale * torch.randn(shape, generator=self.g)
        if trained and self.trains:
            self.trained.append(name)
        return self.put(name, x, dtype or self.dtype, LAYOUTS[:-1] if plain else LAYOUTS)

    def integers(self, name: str, low: int, high: int, *shape: int) -> Tensor:
        return self.put(name, torch.randint(low, max(high, low + 1), shape, generator=self.g))

    def mask(self, name: str, *shape: int, hides: Sequence[str] = ()) -> Tensor:
        """What counts of rows or of rows of sequences; what does not count of some tensors may be anything."""
        kind = self.of(name + " of", ("all", "none", "some", "starts", "ends"))
        drawn = torch.rand(shape, generator=self.g)
        order = torch.arange(shape[-1]) / max(1, shape[-1])
        masks = {"all": drawn >= 0, "none": drawn < 0, "some": drawn < 0.6}
        line = drawn[..., :1].clone()
        masks |= {"starts": order.expand(shape) < line, "ends": order.expand(shape) >= line}
        dtype = self.of(name + "'s dtype", (torch.bool, FP32, torch.int64 if hides else torch.bool))
        mask = self.put(name, masks[kind], dtype)
        self.unread |= {other: mask == 0 for other in hides}
        return mask

    def segments(self, n: int, n_slots: int) -> Segments:
        """Runs of rows, some of them empty, some of no slot."""
        cuts = sorted(torch.randint(0, n + 1, (2 * self.of("runs", (1, 0, 2, 3, 5)),), generator=self.g).tolist())
        if self.flag("runs touch"):
            cuts = [cut for cut in cuts[1:-1] for _ in "ab"] if len(cuts) > 2 else cuts
        slots = torch.randint(-1, n_slots, (len(cuts) // 2,), generator=self.g).tolist()
        return Segments(starts=tuple(cuts[::2]), ends=tuple(cuts[1::2]), slots=tuple(slots))

    def head(self, n: int, h: int, v: int, runs: bool, **names: bool) -> Callable[[Tensors], dict[str, Any]]:
        """What `linear_logprob` and its like know of a head, beside its weight."""
        options: dict[str, Any] = {}
        options["softcap"] = self.of("softcap", (None, 20.0))
        options["logit_scale"] = self.of("logit_scale", (None, 0.7))
        temperature = self.of("temperature", (1.0, 0.6, "rows"))
        if temperature == "rows":
            self.put("temperature", torch.rand(n, generator=self.g) + 0.5)
        else:
            options["temperature"] = temperature
        if self.flag("bias"):
            self.floats("bias", v, dtype=self.of("bias's dtype", (self.dtype, FP32)), trained=names.get("all", True))
        kinds = ("none", "one", "runs") if runs else ("none", "one")
        lora = self.of("lora", kinds)
        n_slots = {"none": 0, "one": 1, "runs": 3}[lora]
        for i in range(n_slots):
            rank = self.of(f"rank {i}", (1, 4, 5, 16, 17))
            dtype = self.of(f"adapter {i}", (self.dtype, FP32))
            self.floats(f"A{i}", rank, h, dtype=dtype, scale=max(1, h) ** -0.5, trained=names.get("all", True))
            self.floats(f"B{i}", v, rank, dtype=dtype, scale=0.3, trained=names.get("all", True))
        segments = self.segments(n, n_slots) if lora == "runs" else None

        def given(t: Tensors) -> dict[str, Any]:
            made = options | {name: t[name] for name in ("bias", "temperature") if name in t}
            loras = tuple(HeadLora(t[f"A{i}"], t[f"B{i}"], 0.5 + i) for i in range(n_slots))
            if segments is not None:
                return made | {"lora": HeadLoras(segments, loras)}
            return made | {"lora": loras[0]} if loras else made

        return given

    def targets(self, *shape: int, v: int, hides: Sequence[str] = ()) -> None:
        """Targets, some of them ignored if a tensor is named whose rows may then be anything."""
        target = self.integers("target", 0, v, *shape)
        if hides and self.flag("ignored rows"):
            off = torch.rand(shape, generator=self.g) < 0.3
            off = off[:1].expand(shape) if self.layouts["target"] == "expanded" else off
            self.tensors["target"] = target.masked_fill(off, -100)
            self.unread |= {name: off[..., None].expand(self.tensors[name].shape) for name in hides}


# ---- one maker for each op: it draws tensors and gives the call ------------------------------------------------------


def _linear(d: Draw) -> Run:
    n, k, m = d.size("N", 65), d.size("K", 257), d.size("M", 129)
    d.floats("x", *d.of("rows", ((n,), (1, n), (n, 2))), k, scale=d.scale)
    d.floats("weight", m, k, scale=max(1, k) ** -0.5)
    if d.flag("bias"):
        d.floats("bias", m)
    return lambda t: [ops.linear(t["x"], t["weight"], t.get("bias"))]


def _lora(d: Draw, way: str) -> Run:
    """`lora_linear`, `lora_delta_` into a y that may lie in a buffer, or a bound linear."""
    d.trains &= way != "decode"
    n, k, m = d.size("N", 65), d.size("K", 129), d.size("M", 100)
    d.floats("x", *(d.of("rows", ((n,), (1, n))) if way == "linear" else (n,)), k, scale=d.scale)
    if way == "delta":
        d.floats("y", n, m, dtype=d.of("y's dtype", (d.dtype, FP32)))
    else:
        d.floats("weight", m, k, scale=max(1, k) ** -0.5)
        if d.flag("bias"):
            d.floats("bias", m)
    n_slots = d.of("slots", (1, 2, 3))
    for i in range(n_slots):
        rank, dtype = d.of(f"rank {i}", (1, 2, 5, 8, 16, 17, 40)), d.of(f"adapter {i}", (d.dtype, FP32))
        d.floats(f"A{i}", rank, k, dtype=dtype, scale=max(1, k) ** -0.5)
        d.floats(f"B{i}", m, rank, dtype=dtype)
    segments = Segments.single(n, 0) if d.flag("all on") else d.segments(n, n_slots)
    sliced, drops = d.flag("y sliced"), way != "decode" and d.flag("dropout")
    if drops:
        d.put("row_ids", torch.randint(-(2**62), 2**62, (n,), generator=d.g))

    def run(t: Tensors) -> list[Tensor]:
        A, B = ([t[f"{name}{i}"] for i in range(n_slots)] for name in "AB")
        rest = A, B, [0.5 + i for i in range(n_slots)], segments
        if way == "decode":
            bound = ops.DecodeLinear(t["weight"], t.get("bias"), *rest)
            return [bound(t["x"]), bound(t["x"])]
        p = (0.4, 0.0, 0.1)[:n_slots]
        dropout = Dropout(p=p, seed=-7, row_ids=t["row_ids"], stream=3) if drops else None
        if way == "linear":
            return [ops.lora_linear(t["x"], t["weight"], t.get("bias"), *rest, dropout=dropout)]
        y = t["y"].new_full((n + 2, m + 5), torch.nan)[1:-1, 2:-3] if sliced else torch.empty_like(t["y"])
        y.copy_(t["y"])
        return [ops.lora_delta_(y, t["x"], *rest, dropout=dropout)]

    return run


def _lora_linear(d: Draw) -> Run:
    return _lora(d, "linear")


def _lora_delta(d: Draw) -> Run:
    return _lora(d, "delta")


def _lora_decode(d: Draw) -> Run:
    return _lora(d, "decode")


def _linear_logprob(d: Draw) -> Run:
    n, h, v = d.size("N", 17), d.size("H", 65), d.size("V", 200, 1)
    d.floats("hidden", n, h, scale=d.scale)
    d.floats("weight", v, h, scale=max(1, h) ** -0.5, trained=d.flag("trained head"))
    d.targets(n, v=v, hides=("hidden",))
    head = d.head(n, h, v, True, all=d.flag("trained rest"))
    outputs = d.of("outputs", (("logprob",), OUTPUTS, ("lse", "entropy"), ("logprob", "is_top1", "log_sum_sq_prob")))
    detach = d.of("detach", ((), outputs[-1:]))
    return lambda t: ops.linear_logprob(
        t["hidden"], t["weight"], t["target"], outputs=outputs, detach=detach, **head(t)
    )


def _linear_logprob_pair(d: Draw) -> Run:
    n, h, v = d.size("N", 17), d.size("H", 65), d.size("V", 200, 1)
    d.floats("hidden_a", n, h, scale=d.scale)
    d.floats("hidden_r", n, h, scale=d.scale, trained=False)
    d.floats("weight", v, h, scale=max(1, h) ** -0.5, trained=False)
    d.targets(n, v=v, hides=("hidden_a", "hidden_r"))
    head = d.head(n, h, v, False, all=False)
    detach = d.of("detach", ((), ("entropy",), ("kl", "entropy")))
    return lambda t: ops.linear_logprob_pair(
        t["hidden_a"], t["hidden_r"], t["weight"], t["target"], detach=detach, **head(t)
    )


def _policy(d: Draw, *shape: int) -> dict[str, Any]:
    """Options of the policy's loss, and its tensors but for log-probs."""
    d.floats("advantage", *shape, trained=False)
    kl = d.of("kl", ("k1", "k2", "k3"))
    options = {"denom": 7.0, "clip_low": 0.2, "clip_high": 0.25, "dual_clip": d.of("dual_clip", (None, 3.0))}
    return options | {"kl": kl, "entropy_coef": d.of("entropy_coef", (0.0, 0.1))}


def _ratios(d: Draw, name: str, new: Tensor) -> None:
    """Log-probs that differ from new ones by steps between the clips."""
    steps = RATIOS[torch.randint(0, len(RATIOS), new.shape, generator=d.g)]
    d.put(name, new.float() - steps, layouts=LAYOUTS[:-1])


def _linear_ppo_loss(d: Draw) -> Run:
    n, h, v = d.size("N", 17), d.size("H", 65), d.size("V", 200, 1)
    d.floats("hidden", n, h, scale=d.scale, plain=True)
    d.floats("weight", v, h, scale=max(1, h) ** -0.5, trained=d.flag("trained head"))
    d.targets(n, v=v)
    head, options = d.head(n, h, v, False, all=d.flag("trained rest")), _policy(d, n)
    t = {name: x.double() if x.is_floating_point() else x for name, x in d.tensors.items()}
    new = dense.dense(t["hidden"], t["weight"], t["target"], **head(t))["logprob"]
    _ratios(d, "old", new)
    if d.flag("reference"):
        _ratios(d, "ref", new)
        options["kl_coef"] = 0.1
    d.mask("mask", n)
    if d.tensors["mask"].dtype != torch.bool:
        d.tensors["mask"] = d.tensors["mask"].to(FP32)
    off = d.tensors["mask"] == 0
    d.unread |= {name: off for name in ("advantage", "old", "ref", "target") if name in d.tensors}
    d.unread["hidden"] = off[:, None].expand(n, h)

    def run(t: Tensors) -> list[Tensor]:
        rest = (t["target"], t["old"], t["advantage"], t["mask"])
        out = ops.linear_ppo_loss(t["hidden"], t["weight"], *rest, ref_logprob=t.get("ref"), **head(t), **options)
        return [out.loss, out.statistics, out.logprob.masked_fill(t["mask"] == 0, 0.0)]

    return run


def _gather_logprob(d: Draw) -> Run:
    n, v = d.size("N", 33), d.size("V", 257, 1)
    shape = d.of("rows", ((n,), (1, n), (n, 2)))
    d.floats("logits", *shape, v, scale=3 * d.scale)
    d.targets(*shape, v=v, hides=("logits",))
    temperature = d.of("temperature", (1.0, 0.6))
    outputs = d.of("outputs", (("logprob",), OUTPUTS, ("lse", "entropy")))
    inplace = d.flag("in place")

    def run(t: Tensors) -> Sequence[Tensor | None]:
        logits = t["logits"].clone() if inplace else t["logits"]
        options = {"temperature": temperature, "outputs": outputs}
        return ops.gather_logprob(logits, t["target"], inplace_backward=inplace, **options)

    return run


def _sample(d: Draw) -> Run:
    d.trains = False
    n, h, v = d.size("N", 17), d.size("H", 65), d.size("V", 200, 1)
    d.floats("hidden", n, h, scale=d.scale)
    d.floats("weight", v, h, scale=max(1, h) ** -0.5)
    head = d.head(n, h, v, True)
    d.put("seed", torch.randint(-(2**63), 2**63 - 1, (n,), generator=d.g))
    d.put("position", torch.randint(0, 2**40, (n,), generator=d.g))
    if d.flag("greedy"):
        d.put("greedy", torch.rand(n, generator=d.g) < 0.5)
    if v > 2 and d.flag("forbids"):
        d.put("forbids", torch.rand(n, generator=d.g) < 0.5)
        d.integers("forbidden", 0, v - 1, d.of("words", (1, 2, 0)))
    names = ("seed", "position", "greedy", "forbids", "forbidden")
    noise = gumbel(d.tensors["seed"], d.tensors["position"], STREAM, v)

    def run(t: Tensors) -> list[Tensor]:
        out = ops.sample(
            t["hidden"], t["weight"], **head(t), **{name: t[name] for name in names if name in t},
            outputs=("token", "logprob", "entropy"),
        )  # fmt: skip
        wide = {name: t[name].double() if t[name].is_floating_point() else t[name] for name in t}
        options = head(wide)
        temperature = options.pop("temperature")
        z = dense.logits(wide["hidden"], wide["weight"], **options)
        if "forbids" in t:
            banned = torch.zeros(v, dtype=torch.bool).index_fill(0, t["forbidden"], True)
            z = z.masked_fill(banned & t["forbids"][:, None], -torch.inf)
        hot = dense.heated(z, temperature)
        score = hot + noise
        score = torch.where(t["greedy"][:, None], z, score) if "greedy" in t else score
        best = score.argmax(-1)
        exact = torch.log_softmax(hot, -1).gather(1, best[:, None])[:, 0]
        logprob = torch.where(out.token == best, out.logprob, exact.to(out.logprob.dtype))  # of equals any is right
        return [score.gather(1, out.token[:, None])[:, 0].to(out.logprob.dtype), logprob, out.entropy]

    return run


def _heads(d: Draw) -> tuple[int, int, int, dict[str, Any]]:
    kv, group, dim = d.of("key heads", (1, 2, 3)), d.of("group", (1, 2, 3, 4)), d.size("D", 65, 1)
    options = {"scale": dim**-0.5, "window": d.of("window", (None, 1, 5, 16)), "softcap": d.of("softcap", (None, 2.0))}
    return kv * group, kv, dim, options


def _attention(d: Draw) -> Run:
    heads, kv, dim, options = _heads(d)
    lengths = [d.size(f"length {i}", 33) for i in range(d.of("sequences", (1, 0, 2, 3, 4)))]
    parents = [d.of(f"parent {i}", (-1, *(j for j in range(i) if j == 0))) for i in range(len(lengths))]
    for name, n_heads in (("q", heads), ("k", kv), ("v", kv)):
        d.floats(name, sum(lengths), n_heads, dim, scale=min(d.scale, 2.0))
    if d.flag("sinks"):
        d.floats("sinks", heads, dtype=d.of("sinks' dtype", (d.dtype, FP32)))
    return lambda t: [ops.attention(t["q"], t["k"], t["v"], lengths, parents=parents, sinks=t.get("sinks"), **options)]


def _decode_attention(d: Draw) -> Run:
    d.trains = False
    heads, kv, dim, options = _heads(d)
    n, block = d.size("N", 8), d.of("block", (1, 3, 4, 16))
    most = d.of("most", (1, 2, 20, 40))
    pages = -(-most // block)
    lengths = d.integers("lengths", 0, most + 1, n)
    table = torch.randperm(n * pages + 1, generator=d.g)[: n * pages].view(n, pages)
    used = torch.zeros((n * pages + 1) * block, dtype=torch.bool)
    at = torch.arange(pages * block)
    window = options["window"] or most
    for row, length in enumerate(lengths.tolist()):
        seen = at[max(0, length - window) : length]
        used[table[row, seen // block] * block + seen % block] = True
    first, page = (lengths - window).clamp_min(0) // block, torch.arange(pages)
    reached = (page >= first[:, None]) & (page * block < lengths[:, None])
    d.put("table", table, d.of("table's dtype", (torch.int64, torch.int32)), LAYOUTS[:-1])
    d.unread["table"] = ~reached
    d.floats("q", n, heads, dim, scale=min(d.scale, 2.0))
    for name in ("k", "v"):
        d.floats(name, len(used) // block, block, kv, dim, plain=True)
        d.unread[name] = ~used.view(-1, block, 1, 1).expand(d.tensors[name].shape)
    if d.flag("sinks"):
        d.floats("sinks", heads)
    return lambda t: [
        ops.decode_attention(t["q"], t["k"], t["v"], t["lengths"], t["table"], sinks=t.get("sinks"), **options)
    ]


def _decode_step(d: Draw) -> Run:
    d.trains = False
    sizes = Sizes(
        H=d.of("H", (8, 33, 64)), heads=2 * d.of("group", (1, 2)), kv_heads=2, D=d.of("D", (2, 8, 10)),
        mlp=d.of("mlp", (1, 7, 33)), layers=d.of("layers", (1, 2)), V=9, bias=d.flag("bias"),
        head_norms=d.flag("head norms"), windows=d.of("windows", ((None,), (3, None), (1,))),
    )  # fmt: skip
    adapters = make_adapters(sizes, d.dtype) if d.flag("adapters") else []
    call = make_call(sizes, d.size("N", 7, 1), d.dtype, len(adapters), d.of("block", (1, 4)), 9, d.seed)
    parts = (make_decoder(sizes, d.dtype, d.seed), adapters, list(call))
    mapped(parts, lambda x: d.put(f"part {len(d.tensors)}", x, layouts=("dense",)))

    def run(t: Tensors) -> list[Tensor]:
        rest = iter(t.values())
        decoder, slots, made = mapped(parts, lambda _: next(rest))
        return Call(*made).take(decoder, slots, "auto")

    return run


def _gae(d: Draw) -> Run:
    n, T = d.size("B", 17), d.size("T", 129)
    for name in ("reward", "value"):
        d.floats(name, n, T)
    if d.flag("bootstrap"):
        d.floats("bootstrap", n, dtype=d.of("bootstrap's dtype", (d.dtype, FP32)))
    d.mask("mask", n, T, hides=("reward", "value"))
    options = {"gamma": d.of("gamma", (0.99, 1.0, 0.0)), "lam": d.of("lam", (0.95, 1.0, 0.0))}
    return lambda t: ops.gae(t["reward"], t["value"], t["mask"], bootstrap=t.get("bootstrap"), **options)


def _whiten(d: Draw) -> Run:
    shape = d.of("shape", ((d.size("N", 257),), (d.size("B", 7), d.size("T", 65)), (2, 3, 5)))
    d.floats("x", *shape, scale=d.scale)
    d.mask("mask", *shape, hides=("x",))
    shift, given = d.flag("shift_mean"), d.flag("moments")

    def run(t: Tensors) -> list[Tensor]:
        moments = ops.masked_moments(t["x"], t["mask"])
        y = ops.whiten(t["x"], t["mask"], shift_mean=shift, moments=moments if given else None, eps=1e-3)
        return [y, moments.to(y.dtype)]

    return run


def _ppo_loss(d: Draw) -> Run:
    shape = d.of("shape", ((d.size("N", 257),), (d.size("B", 7), d.size("T", 65))))
    new = d.floats("new", *shape, plain=True)
    options = _policy(d, *shape)
    _ratios(d, "old", new)
    if d.flag("reference"):
        _ratios(d, "ref", new)
        options["kl_coef"] = 0.1
    if options["entropy_coef"]:
        d.floats("entropy", *shape)
    d.mask("mask", *shape, hides=[name for name in d.tensors if name != "mask"])

    def run(t: Tensors) -> list[Tensor]:
        rest = {"ref_logprob": t.get("ref"), "entropy": t.get("entropy")}
        return list(ops.ppo_loss(t["new"], t["old"], t["advantage"], t["mask"], **rest, **options))

    return run


def _value_loss(d: Draw) -> Run:
    shape = d.of("shape", ((d.size("N", 257),), (d.size("B", 7), d.size("T", 65))))
    value = d.floats("value", *shape, plain=True)
    clip = d.of("clip", (None, 0.3))
    _ratios(d, "old", value)
    d.floats("ret", *shape, trained=False)
    d.mask("mask", *shape, hides=("value", "old", "ret"))
    return lambda t: list(ops.value_loss(t["value"], t["old"], t["ret"], t["mask"], denom=7.0, clip=clip))


def _rms_norm(d: Draw) -> Run:
    n, h = d.size("N", 33), d.size("H", 257, 1)
    d.floats("x", *d.of("rows", ((n,), (1, n), (n, 2), ())), h, scale=d.scale)
    d.floats("weight", h)
    plus_one, eps = d.flag("plus_one"), 1e-5

    def run(t: Tensors) -> list[Tensor]:
        x, weight = t["x"], t["weight"]
        if x.dtype == FP64:  # the reference's inside is float32
            return [x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight + plus_one)]
        return [ops.rms_norm(x, weight, eps=eps, plus_one=plus_one)]

    return run


def _rotary(d: Draw) -> Run:
    batch, T, dim = d.size("B", 3), d.size("T", 33), 2 * d.size("half D", 33, 1)
    for name in ("q", "k"):
        d.floats(name, batch, d.of(f"heads of {name}", (1, 2, 3)), T, dim, scale=d.scale)
    n_angles = d.of("angles", (1, batch))
    for name in ("cos", "sin"):
        d.floats(name, n_angles, T, dim, trained=False)
    return lambda t: ops.rotary(t["q"], t["k"], t["cos"], t["sin"])


def _elements(d: Draw) -> tuple[int, ...]:
    return d.of("shape", ((d.size("N", 257),), (d.size("B", 7), d.size("T", 65)), (2, 3, 5), ()))


def _swiglu(d: Draw) -> Run:
    shape = _elements(d)
    for name in ("gate", "up"):
        d.floats(name, *shape, scale=d.scale)
    return lambda t: [ops.swiglu(t["gate"], t["up"])]


def _activation(d: Draw) -> Run:
    d.floats("x", *_elements(d), scale=d.scale)
    kind = d.of("kind", KINDS)
    return lambda t: [ops.activation(t["x"], kind)]


MAKERS = (
    _activation, _swiglu, _rotary, _rms_norm, _value_loss, _ppo_loss, _whiten, _gae, _decode_step, _decode_attention,
    _attention, _sample, _gather_logprob, _linear_ppo_loss, _linear_logprob_pair, _linear_logprob, _lora_decode,
    _lora_delta, _lora_linear, _linear,
)  # fmt: skip


def drawn(choose: Callable[[Sequence[Any]], Any], makers: Sequence[Callable[[Draw], Run]] = MAKERS) -> Case:
    """A case made by choices; `choose` gives one of some values, first ones being the simplest."""
    d = Draw(choose)
    maker = choose(makers)
    d.said["op"] = maker.__name__[1:]
    d.start()
    run = maker(d)
    d.layouts["cotangents"] = d.of("cotangents", LAYOUTS)
    d.of("threads", (1, 1, 2))
    return Case(d.said, run, d.tensors, d.trained, d.layouts, d.unread, d.seed)


# ---- how a tensor lies, and what a case gives ------------------------------------------------------------------------


def laid(x: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """The same numbers in another place of memory, and the buffer around them, full of what nobody may read."""
    fill: Any = torch.nan if x.is_floating_point() else True if x.dtype == torch.bool else 2**30 + 1
    shape = tuple(x.shape)
    if layout == "offset":
        buffer = x.new_full((x.numel() + 8,), fill)
        view = buffer[3 : 3 + x.numel()].view(shape)
    elif layout == "padded":
        buffer = x.new_full([n + 3 for n in shape], fill)
        view = buffer[tuple(slice(1, 1 + n) for n in shape)]
    elif layout == "turned":
        buffer = x.new_full(shape[::-1], fill)
        view = buffer.permute(*reversed(range(x.dim()))) if x.dim() else buffer
    elif layout == "stepped":
        buffer = x.new_full((*shape, 3), fill)
        view = buffer[..., 1]
    else:
        buffer = x[:1].clone() if layout == "expanded" and x.dim() and len(x) else x.clone()
        return buffer.expand(shape) if layout == "expanded" else buffer, buffer
    view.copy_(x)
    return view, buffer


def answers(case: Case, backend: str, wide: bool = False, hostile: bool = False, jitter: int = 0) -> list[Any]:
    """Results of a case and its gradients, None where there is none.

    wide: in float64. hostile: in the case's layouts, with NaN where nobody may read. jitter: relative 2⁻²³ of every
    number, up or down by this seed.
    """
    g = torch.Generator().manual_seed(jitter)
    buffers, t = [], Tensors()

    def given(name: str, x: Tensor) -> Tensor:
        if wide and x.is_floating_point():
            x = x.double()
            if jitter:
                x = x * (1 + (torch.randint(0, 2, x.shape, generator=g) * 2 - 1) * 2.0**-23)
        if not hostile:
            return x.detach().clone()
        if name in case.unread:
            x = x.masked_fill(case.unread[name], torch.nan if x.is_floating_point() else 2**30 + 1)
            if case.layouts[name] == "expanded":
                x = x.clone()
        layout = case.layouts[name]
        # an expanded tensor has one row: what that row holds is read where any of its rows is
        view, buffer = laid(x, "padded" if layout == "expanded" and name in case.unread else layout)
        buffers.append((name, buffer, buffer.clone()))
        return view.detach()

    for name, x in case.tensors.items():
        t[name] = given(name, x).requires_grad_(name in case.trained)
    leaves = [t[name] for name in case.trained]
    with registry.use_backend(backend), torch.set_grad_enabled(bool(leaves)):
        out = [x for x in case.run(t) if x is not None]
        seen = [x for x in out if x.requires_grad]
        grads: Sequence[Tensor | None] = ()
        if seen:
            h = torch.Generator().manual_seed(case.seed + 1)
            values = [torch.randn(x.shape, generator=h).bfloat16() for x in seen]
            if case.layouts["cotangents"] == "expanded":
                values = [x[:1].expand(x.shape) if x.dim() and len(x) else x for x in values]
            dy = [given("cotangents", value.to(x.dtype)) for value, x in zip(values, seen, strict=True)]
            grads = torch.autograd.grad(seen, leaves, dy, allow_unused=True)
    for name, buffer, before in buffers:
        if not name.startswith("part ") and not torch.allclose(buffer, before, 0.0, 0.0, equal_nan=True):
            raise AssertionError(f"{name}: written to")
    return [x.detach() for x in out] + list(grads)


@contextlib.contextmanager
def _machine(isa: str, threads: int) -> Any:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with native.use_isa(isa):
            yield
    finally:
        torch.set_num_threads(before)


def _most(x: Tensor) -> float:
    return x.nan_to_num(0.0, 0.0, 0.0).abs().max().item() if x.numel() else 0.0


def _moved_on(layout: str, by: int) -> str:
    return layout if layout == "expanded" else LAYOUTS[(LAYOUTS.index(layout) + by) % (len(LAYOUTS) - 1)]


def faults(case: Case) -> tuple[int, list[str]]:
    """How many calls were tried, and what is wrong with the results: one call for each instruction set of this CPU.

    From set to set tensors lie in the next of the layouts.
    """
    exact, eager = answers(case, "reference", wide=True), answers(case, "reference")
    spread: list[list[Any]] = []
    found = []
    for by, isa in enumerate(native.isas()):
        layouts = {name: _moved_on(layout, by) for name, layout in case.layouts.items() if not name.startswith("part ")}
        with _machine(isa, case.said["threads"]):
            ours = answers(case._replace(layouts=case.layouts | layouts), "cpu", hostile=True)
        for i, results in enumerate(zip(ours, exact, eager, strict=True)):
            wrong = _wrong(case, i - len(ours), results, [x for x in exact if x is not None], spread)
            found += [f"{isa}, {layouts}: result {i} of {len(ours)}: {wrong}"] if wrong else []
    return len(native.isas()), found


def _wrong(case: Case, i: int, results: Sequence[Any], truth: list[Tensor], spread: list[list[Any]]) -> str:
    """What is wrong with one of the results, ours, the truth and the eager one; `i` counts from the end."""
    a, b, c = results
    if a is None or b is None or c is None:
        return "" if a is b is c is None else f"there is {'none' if a is None else 'one'}, the reference says otherwise"
    if a.shape != b.shape or a.dtype != c.dtype:
        return f"{a.dtype} {tuple(a.shape)}, expected {c.dtype} {tuple(b.shape)}"
    if not torch.equal(a.isfinite(), b.isfinite()):
        return "not finite where it should be, or the other way"
    eps, size, gradient = torch.finfo(a.dtype).eps, _most(b), i >= -len(case.trained)
    reach = max(1.0, *map(_most, truth), *(_most(x) for x in case.tensors.values() if x.is_floating_point()))
    if case.said["dtype"] == BF16:  # gradients are made of rounded results, a LoRA of a head in two rounded parts
        eps = max(eps, 2.0**-8 if gradient else 2.0**-16 if "lora" in case.said else 0.0)
    if case.said["op"] in IN_NATS:  # differences of logits, and e to their power
        size = size * reach if gradient else reach
    error, bound = _most(a.double() - b), 2 * _most(c.double() - b) + 4 * eps * size + FLUSHED
    if error > bound:  # then a look at what the last bits of the inputs do to the truth
        spread[:] = spread or [answers(case, "reference", wide=True, jitter=j + 1) for j in range(8)]
        moved = max(_most(other[i] - b) for other in spread) * 2.0**23
        bound += eps * (
            32 * moved + (4 * reach * max(1.0, *map(_most, truth)) if size < (1e-12 if eps > 1e-4 else 1e-3) else 0.0)
        )
    return "" if error <= bound else f"error {error:.3e}, at most {bound:.3e} expected"
