"""The ceilings of this machine's CPU, measured with the engine's ops in a few seconds.

Every probe is one op on tensors of a size that has nothing to do with the model of a plan; products come at several
numbers of rows. What a probe computes is counted as a plan counts it. Its time, less that of the other work in it,
gives the rate of the work that the probe is for. The costs of calls come from a model of no size, in which nothing else
takes time.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rlhf_kernels.attention import attention
from rlhf_kernels.decode_attention import decode_attention
from rlhf_kernels.decode_step import Decoder, DecoderLayer, DecodeStep, Projection, StepAdapter
from rlhf_kernels.linear import linear
from rlhf_kernels.linear_logprob import linear_logprob
from rlhf_kernels.llama_ops import activation, rms_norm, rotary, swiglu
from rlhf_kernels.lora import DecodeLinear, Segments, lora_delta_, lora_linear
from rlhf_kernels.runtime import native
from rlhf_kernels.runtime.cores import threads
from rlhf_kernels.runtime.cost import GEMMS, Work
from rlhf_kernels.sample import sample
from transformers import LlamaConfig

from rlhf_engine.hydra import HydraModel, LmLoss, PackedBatch, SlotConfig
from rlhf_engine.planning.machines import Ceiling, Curve, Figure, Machine
from rlhf_engine.planning.phases import ROLES, Setting, build_model
from rlhf_engine.planning.tracing import traced
from rlhf_engine.planning.work import optimizer_work
from rlhf_engine.rollout import EngineOptions, Rollout, SamplingConfig, generate
from rlhf_engine.rollout.engine import StepName

_H, _FF, _V, _HEADS, _D = 512, 1536, 8192, 8, 64
_ROWS = (4, 32, 256)
"""Rows of products: a decoding step of few rows, one of many, a backbone forward."""
_FEW = 32
"""Rows up to which a linear with LoRA is measured as that of a decoding step, of the kind `few`."""
_SECONDS, _LEAST, _MOST = 0.08, 3, 25
"""A probe runs for so long, and so often."""


Clock = Callable[[], float]


class _Probe(NamedTuple):
    kind: str
    size: float | None
    """Rows, where the kind's ceiling is in FLOP/s; None: bytes."""
    run: Callable[[], object]
    work: list[Work] | None = None
    """None: as traced."""
    less: Callable[[], object] | None = None
    """Other work that is a part of `run`, timed in turns with it."""


def measure_cpu(
    dtype: torch.dtype, adapter_dtype: torch.dtype, rank: int, *, clock: Clock = time.perf_counter
) -> Machine:
    """This CPU, with the threads that the engine uses.

    Args:
        dtype: of weights and activations.
        adapter_dtype: of the adapters.
        rank: of the adapters.
        clock: what seconds are read from; `time.process_time` leaves out what other processes take from one thread.
    """
    call, decoding, token = _call_seconds(clock)
    ceilings: dict[tuple[str, torch.dtype], Ceiling] = {}
    machine = Machine(
        name=f"this CPU ({native.isa() or 'no native kernels'}, {threads()} threads)",
        ceilings=ceilings,
        call_seconds=call,
        decoding_call_seconds=decoding,
        token_seconds=token,
        overlaps=False,
    )
    generator = torch.Generator().manual_seed(0)
    for either in dict.fromkeys((torch.float32, dtype)):
        for probe in _passes(either, generator):
            _take(machine, ceilings, probe, clock)
    for probe in _products(dtype, adapter_dtype, rank, generator):
        _take(machine, ceilings, probe, clock)
    costs = f"{call * 1e6:.0f} us in a forward, {decoding * 1e6:.0f} us in decoding; native step {token * 1e6:.0f} us"
    figures = [Figure("calls", costs, "measured")]
    for (kind, _), ceiling in ceilings.items():
        named = [(ceiling.flops, 1e9, "GFLOP/s at rows"), (ceiling.bytes, 1e9, "GB/s at bytes")]
        for curve, unit, name in named:
            if curve:
                points = ", ".join(f"{rate / unit:.3g} ({size:.3g})" for size, rate in curve)
                figures.append(Figure(f"{kind}, {name}", points, "measured"))
    return Machine(**{**vars(machine), "figures": tuple(figures)})


def _take(machine: Machine, ceilings: dict[Any, Ceiling], probe: _Probe, clock: Clock) -> None:
    """Add the point that a probe measures to the curve of its kind."""
    work = probe.work or traced(probe.run, (), "cpu").work
    own = [w for w in work if w.kind == probe.kind]
    if not own:
        return  # served by torch's own ops, which a plan sees as such
    if probe.less is None:
        (seconds,) = _seconds(clock, probe.run)
        others = sum(machine.busy(w) for w in work if w.kind != probe.kind)
    else:
        seconds, others = _seconds(clock, probe.run, probe.less)
    left = max(seconds - others, seconds / 20)
    key = probe.kind, own[0].dtype
    old = ceilings.get(key, Ceiling())
    if probe.size is not None:
        point: Curve = ((probe.size, sum(w.flops for w in own) / left),)
        ceilings[key] = Ceiling((*old.flops, *point), old.bytes)
    else:
        moved = sum(w.bytes for w in own)
        point = ((max(w.bytes for w in own), moved / left),)
        ceilings[key] = Ceiling(old.flops, (*old.bytes, *point))


def _seconds(clock: Clock, *runs: Callable[[], object]) -> list[float]:
    """Medians of some calls in turns, the first ones aside."""
    found: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    while len(found[0]) < _LEAST or (sum(map(sum, found)) < _SECONDS and len(found[0]) < _MOST):
        for run, seconds in zip(runs, found, strict=True):
            began = clock()
            run()
            seconds.append(clock() - began)
    return list(map(statistics.median, found))


# ---- probes ----------------------------------------------------------------------------------------------------------


def _passes(dtype: torch.dtype, generator: torch.Generator) -> Iterator[_Probe]:
    """Ops that read and write their tensors once."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    for rows in (16, 256, 4096):
        x, y = random(rows, _H), random(rows, _H)
        yield _Probe("elementwise", None, functools.partial(torch.add, x, y))
    x, y, dy = random(512, _FF), random(512, _FF), random(512, _FF)
    yield _Probe("curved", None, functools.partial(torch.tanh, x))
    h, weight = random(512, _H), random(_H)
    yield _Probe("norm", None, lambda: F.layer_norm(h, (_H,), weight, weight))
    q, k, angles = random(1, _HEADS, 512, _D), random(1, _HEADS, 512, _D), random(1, 512, _D)
    passes: dict[str, tuple[list[torch.Tensor], Callable[..., Any]]] = {
        "rms_norm": ([h], lambda h: rms_norm(h, weight, eps=1e-5)),
        "rotary": ([q, k], lambda q, k: rotary(q, k, angles, angles)[0]),
        "swiglu": ([x, y], swiglu),
        "activation": ([x], lambda x: activation(x, "gelu_tanh")),
    }
    for name, (inputs, op) in passes.items():
        yield _Probe(name, None, functools.partial(op, *inputs))
        like = {"rms_norm": h, "rotary": q}.get(name, dy)
        yield _Probe(f"{name}_gradient", None, _back(op, inputs, like))


def _products(
    dtype: torch.dtype, adapter_dtype: torch.dtype, rank: int, generator: torch.Generator
) -> Iterator[_Probe]:
    """Linears, LoRA, heads, attention, the optimizer and the native decoding step."""

    def random(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return (0.05 * torch.randn(shape, generator=generator)).to(dtype)

    weight, head = random(_FF, _H), random(_V, _H)
    turned = weight.T.contiguous()
    A, B = random(rank, _H, dtype=adapter_dtype), random(_FF, rank, dtype=adapter_dtype)
    for n in _ROWS:
        x, y, zeros = random(n, _H), random(n, _FF), torch.zeros(n, dtype=torch.int64)
        lora = ([A], [B], [1.0], Segments.single(n, 0))
        plain = functools.partial(linear, x, weight)
        product = 2.0 * n * weight.numel()  # whichever backend serves
        yield _Probe("linear", n, plain, [Work("linear", GEMMS, product, rows=n, dtype=dtype)])
        yield _Probe("mm", n, functools.partial(torch.mm, x, turned))
        yield _Probe("lora", n, functools.partial(lora_linear, x, weight, None, *lora), less=plain)
        if n <= _FEW:
            both = product + 2.0 * n * (A.numel() + B.numel())
            few = functools.partial(DecodeLinear(weight, None, *lora), x)
            yield _Probe("few", n, few, [Work("few", GEMMS, both, rows=n, dtype=dtype)])
        yield _Probe("lora_delta", n, functools.partial(lora_delta_, y, x, *lora))
        yield _Probe("sample", n, functools.partial(sample, x, head, seed=zeros, position=zeros))
        yield _Probe("head", n, functools.partial(linear_logprob, x, head, zeros))
    segments, dy = Segments.single(n, 0), random(n, _FF)
    back = _back(lambda x: linear(x, weight), [x], dy)
    yield _Probe("linear_backward", n, back, [Work("linear_backward", GEMMS, product, rows=n, dtype=dtype)])
    adapted = _back(lambda x, A, B: lora_linear(x, weight, None, [A], [B], [1.0], segments), [x, A, B], dy)
    yield _Probe("lora_backward", n, adapted, less=back)
    for length in (32, 128, 512):
        qkv, dy = [random(4 * length, _HEADS, _D) for _ in range(3)], random(4 * length, _HEADS, _D)
        attend = functools.partial(attention, lengths=[length] * 4, scale=_D**-0.5)
        yield _Probe("attention", length, functools.partial(attend, *qkv))
        yield _Probe("attention_backward", length, _back(attend, qkv, dy))
    cache, q, lengths = random(64, 16, _HEADS, _D), random(8, _HEADS, _D), torch.full((8,), 128)
    table = torch.arange(64).view(8, 8)
    yield _Probe(
        "decode_attention", None, functools.partial(decode_attention, q, cache, cache, lengths, table, scale=0.1)
    )
    yield _optimizer(random(_FF, _H, dtype=torch.float32))
    if native.missing() is None and dtype in (torch.float32, torch.bfloat16):
        yield from _steps(random, A, B)


def _back(op: Callable[..., torch.Tensor], inputs: list[torch.Tensor], dy: torch.Tensor) -> Callable[[], object]:
    """The backward pass of a call, again and again."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    return functools.partial(torch.autograd.grad, op(*leaves), leaves, dy, retain_graph=True)


def _optimizer(weight: torch.Tensor) -> _Probe:
    parameter = torch.nn.Parameter(weight)
    parameter.grad = torch.ones_like(weight)
    adamw = torch.optim.AdamW([parameter], fused=True)

    def run() -> None:
        torch.nn.utils.clip_grad_norm_([parameter], 1.0)
        adamw.step()

    size = 4 * weight.numel()
    return _Probe("optimizer", None, run, optimizer_work([weight.numel()], 2 * size, size, size))


def _steps(random: Callable[..., torch.Tensor], A: torch.Tensor, B: torch.Tensor) -> Iterator[_Probe]:
    """The native decoding step of two layers, all of whose linears are adapted."""
    shapes = {"q": (_H, _H), "k": (_H, _H), "v": (_H, _H), "o": (_H, _H)}
    shapes |= {"gate": (_FF, _H), "up": (_FF, _H), "down": (_H, _FF)}
    ones, angles, layers = random(_H), random(64, _D), 2

    def linears() -> dict[str, Any]:
        return {name: Projection(weight=random(*shape)) for name, shape in shapes.items()}

    decoder = Decoder(
        embedding=random(_V, _H),
        layers=[DecoderLayer(input_norm=ones, mlp_norm=ones, **linears()) for _ in range(layers)],
        final_norm=ones,
        eps=1e-5,
        n_heads=_HEADS,
        n_kv_heads=_HEADS,
        head_dim=_D,
        scale=0.1,
    )
    rank, kind = A.shape[0], A.dtype
    pairs = {
        k: (random(rank, inside, dtype=kind), random(out, rank, dtype=kind)) for k, (out, inside) in shapes.items()
    }
    step = DecodeStep(decoder, [StepAdapter(pairs=[pairs] * layers, scale=1.0)], backend="cpu")
    per_row = 2.0 * layers * sum(m * k + rank * (m + k) for m, k in shapes.values())
    for n in _ROWS:
        caches = [random(n, 16, _HEADS, _D) for _ in range(layers)]
        zeros, table = torch.zeros(n, dtype=torch.int64), torch.arange(n)[:, None]
        work = [Work("step", GEMMS, per_row * n, 0.0, n, ones.dtype)]
        run = functools.partial(step, zeros, zeros, zeros, angles, angles, caches, caches, table)
        yield _Probe("step", n, run, work)


# ---- calls -----------------------------------------------------------------------------------------------------------


def _call_seconds(clock: Clock) -> tuple[float, float, float]:
    """Seconds per call of an op in a forward, per call in decoding through the model, and of a native decoding step.

    Models of no size. A call costs what further layers add to the seconds, over the calls that they add.
    """
    few, many = (_tiny_model(n) for n in (2, 8))
    batch = PackedBatch.from_lists([[1] * 4] * 4, [[2] * 4] * 4)

    def draw(model: HydraModel, step: StepName, tokens: int) -> Rollout:
        sampling = SamplingConfig(max_completion_length=tokens, eos_token_ids=())
        options = EngineOptions(decode_step=step)
        return generate(model, [[1, i] for i in range(4)], sampling, options=options)

    def per_token(model: HydraModel, step: StepName) -> float:
        short, long = _seconds(clock, *(functools.partial(draw, model, step, n) for n in (8, 24)))
        return max(0.0, long - short) / 16

    seconds, calls, token_seconds, token_calls = [], [], [], []
    for model in (few, many):
        runs: list[Callable[[], object]] = [functools.partial(run, model, batch) for run in (_score, _learn)]
        calls.append(sum(w.calls for run in runs for w in traced(run, (), "cpu").work))
        seconds.append(sum(_seconds(clock, *runs)))
        token_seconds.append(per_token(model, "transformers"))
        long, short = (
            sum(w.calls for w in traced(functools.partial(draw, model, "transformers", n), (), "cpu").work)
            for n in (4, 3)
        )
        token_calls.append(long - short)
    forward = (seconds[1] - seconds[0]) / (calls[1] - calls[0])
    decoding = (token_seconds[1] - token_seconds[0]) / (token_calls[1] - token_calls[0])
    native_token = per_token(few, "auto") if native.missing() is None else 0.0
    return max(1e-7, forward), max(1e-7, decoding), native_token


def _tiny_model(n_layers: int) -> HydraModel:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=n_layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=64,
    )
    setting = Setting(
        config=config,
        dtype=torch.float32,
        adapter_dtype=torch.float32,
        device_type="cpu",
        slot=SlotConfig(r=2),
        prompt_length=4,
        completion_length=4,
        batch=4,
        num_mini_batches=1,
        micro_batch=4,
        token_budget=10**6,
        gradient_checkpointing=False,
    )
    return build_model("hydra_ppo", setting, n_layers)


def _score(model: HydraModel, batch: PackedBatch) -> None:
    model.score(batch, ROLES)


def _learn(model: HydraModel, batch: PackedBatch) -> None:
    model(batch, (LmLoss(role="actor", denom=1.0),))[0].backward()
    model.zero_grad(set_to_none=True)
