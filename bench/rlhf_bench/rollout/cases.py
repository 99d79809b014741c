"""Cases that the rollout benchmarks time.

    off, on     the backbone alone, and with the adapter, against eager `generate` (with PEFT for `on`)
    skewed      few long answers among many short ones: continuous batching against batches that run until their longest
                answer ends, of the same engine
    shared      prefill of k samples of one prompt against k prompts of that length, of the same engine

Floor: bare products of every linear, head included, for the prompts once and for every step that draws a token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from rlhf_bench.case import Floors, Run, Subject
from rlhf_bench.floor import gemm_floors, together
from rlhf_bench.rollout import OP
from rlhf_bench.rollout.models import Models, make_models
from rlhf_engine.rollout import EngineOptions, Request, Rollout, SamplingConfig, decoding, generate_requests


@dataclass(frozen=True, kw_only=True)
class RolloutCase(Subject):
    """One comparison. `models` makes weights; the functions are called again and again."""

    role: str
    tokens: int
    """Tokens of all answers that somebody wanted."""
    ours: Mapping[str, Callable[[], Rollout]]
    """By name of the step."""
    baselines: Mapping[str, Run]
    floor: Floors
    missing: Mapping[str, str]
    """Who cannot be timed, and why."""
    models: Models


@dataclass(frozen=True, kw_only=True)
class _Size:
    model: str
    rows: int
    prompt: int
    answer: int

    def __str__(self) -> str:
        return f"{self.rows}x({self.prompt}+{self.answer})"


_TINY = _Size(model="llama-260k", rows=2, prompt=5, answer=4)
_SMALL = (
    _Size(model="llama-260k", rows=16, prompt=8, answer=128),
    _Size(model="llama-260k", rows=64, prompt=8, answer=128),
)
_BIG = _Size(model="llama-41m", rows=16, prompt=64, answer=64)
SIZES: dict[str, tuple[_Size, ...]] = {
    "tiny": (_TINY,),
    "quick": (_Size(model="llama-260k", rows=16, prompt=8, answer=32),),
    "default": (*_SMALL, _BIG),
    "full": (*_SMALL, _BIG, _Size(model="llama-41m", rows=64, prompt=64, answer=64)),
}


def cases(size: str, device: torch.device, dtype: torch.dtype, model: str | None = None) -> list[RolloutCase]:
    """Every comparison at every size. model: folder of a model to take in place of random weights."""
    found = []
    made: dict[str, Models] = {}
    for s in SIZES[size]:
        name = model or s.model
        models = made.setdefault(name, make_models(name, dtype, device))
        found += [_against_generate(models, dtype, s, role) for role in ("reference", "actor")]
        if s in (_TINY, _SMALL[0], _BIG) or size == "quick":
            found += [_skewed(models, dtype, s), _shared(models, dtype, s)]
    return found


# ---- the comparisons -------------------------------------------------------------------------------------------------


def _against_generate(models: Models, dtype: torch.dtype, s: _Size, role: str) -> RolloutCase:
    prompts = _prompts(models, s.rows, s.prompt)
    requests = [Request(prompt=tuple(p), sample_id=i, role=role) for i, p in enumerate(prompts)]
    rows = torch.tensor(prompts, device=models.ours.device)
    theirs = models.plain if role == "reference" else models.peft

    def generate() -> None:
        torch.manual_seed(0)
        with torch.no_grad():
            out = theirs.generate(  # type: ignore[operator]
                input_ids=rows,
                attention_mask=torch.ones_like(rows),
                do_sample=True,
                top_k=0,
                max_new_tokens=s.answer,
                pad_token_id=0,
            )
        assert out.shape == (s.rows, s.prompt + s.answer)

    label = "generate" if role == "reference" else "PEFT + generate"
    return _case(
        models,
        dtype,
        name=f"{'off' if role == 'reference' else 'on'}/{models.name}/{s}",
        role=role,
        tokens=s.rows * s.answer,
        run=lambda options: generate_requests(models.ours, requests, _sampling(s.answer), options=options),
        baselines={label: generate},
        products=[(s.rows * s.prompt, 1, False), (s.rows, s.answer - 1, True), (s.rows, 1, True)],
    )


def _skewed(models: Models, dtype: torch.dtype, s: _Size) -> RolloutCase:
    """Four times as many requests as rows; lengths as u⁴, so that the mean is a fifth of the longest."""
    n, longest = 4 * s.rows, 4 * s.answer
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0)).tolist()
    lengths = [max(1, round(longest * ((i + 0.5) / n) ** 4)) for i in order]
    prompts = _prompts(models, n, s.prompt)

    def requests(length_of: Sequence[int]) -> list[Request]:
        return [
            Request(prompt=tuple(p), sample_id=i, role="actor", max_completion_length=length_of[i])
            for i, p in enumerate(prompts)
        ]

    def padded(step: StepName) -> Run:
        def run() -> None:
            for first in range(0, n, s.rows):
                most = max(lengths[first : first + s.rows])
                batch = requests([most] * n)[first : first + s.rows]
                generate_requests(models.ours, batch, _sampling(longest), options=EngineOptions(decode_step=step))

        return run

    served = _served(models)
    steps = -(-sum(lengths) // s.rows)  # all rows at work until the end
    return _case(
        models,
        dtype,
        name=f"skewed/{models.name}/{n} on {s.rows}",
        role="actor",
        tokens=sum(lengths),
        run=lambda options: generate_requests(
            models.ours,
            requests(lengths),
            _sampling(longest),
            options=EngineOptions(decode_step=options.decode_step, max_rows=s.rows),
        ),
        baselines={"padded batches of the same engine": padded(next(iter(served)))},
        products=[(n * s.prompt, 1, False), (s.rows, steps, True)],
    )


def _shared(models: Models, dtype: torch.dtype, s: _Size) -> RolloutCase:
    k, length = (8, 256) if s is not _TINY else (2, 40)
    alike = _prompts(models, 1, length) * k
    apart = _prompts(models, k, length)

    def run(prompts: list[list[int]], options: EngineOptions) -> Rollout:
        requests = [Request(prompt=tuple(p), sample_id=i, role="actor") for i, p in enumerate(prompts)]
        return generate_requests(models.ours, requests, _sampling(1), options=options)

    return _case(
        models,
        dtype,
        name=f"shared/{models.name}/{k} of {length}",
        role="actor",
        tokens=k,
        run=lambda options: run(alike, options),
        baselines={f"{k} prompts of the same engine": lambda: run(apart, EngineOptions())},
        products=[(length, 1, False), (k, 1, True)],
    )


# ---- parts -----------------------------------------------------------------------------------------------------------


def _case(
    models: Models,
    dtype: torch.dtype,
    *,
    name: str,
    role: str,
    tokens: int,
    run: Callable[[EngineOptions], Rollout],
    baselines: Mapping[str, Run],
    products: Sequence[tuple[int, int, bool]],
) -> RolloutCase:
    """products: (rows, how often, with the head) of every linear."""
    served = _served(models)
    weights = [p.weight for p in _linears(models)]
    head = models.plain.get_output_embeddings().weight
    base_model = sum(w.numel() for w in weights)
    return RolloutCase(
        op=OP,
        name=name,
        dtype=dtype,
        flops=2.0 * sum(rows * times * (base_model + head.numel() * with_head) for rows, times, with_head in products),
        moved_bytes=float(
            dtype.itemsize * sum(times * (base_model + head.numel() * with_head) for _, times, with_head in products)
        ),
        role=role,
        tokens=tokens,
        ours={step: functools.partial(run, EngineOptions(decode_step=step)) for step in served},
        baselines=baselines,
        floor=_floor(weights, head, products),
        missing={step: reason for step, reason in _reasons(models).items() if reason is not None},
        models=models,
    )


StepName = Literal["native", "transformers"]


def _reasons(models: Models) -> dict[StepName, str | None]:
    return {"native": decoding.native_unsupported(models.ours.backbone()), "transformers": None}


def _served(models: Models) -> list[StepName]:
    return [step for step, reason in _reasons(models).items() if reason is None]


def _sampling(longest: int) -> SamplingConfig:
    return SamplingConfig(max_completion_length=longest, eos_token_ids=())


def _prompts(models: Models, n: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(n)
    return torch.randint(3, models.vocabulary, (n, length), generator=generator).tolist()


def _linears(models: Models) -> list[torch.nn.Linear]:
    head = models.plain.get_output_embeddings()
    return [m for m in models.plain.modules() if isinstance(m, torch.nn.Linear) and m is not head]


def _floor(weights: Sequence[torch.Tensor], head: torch.Tensor, products: Sequence[tuple[int, int, bool]]) -> Floors:
    parts = []
    for rows, times, with_head in products:
        used = [*weights, head] if with_head else list(weights)
        inputs = {k: torch.randn(rows, k, device=head.device).to(head.dtype) for k in {w.shape[1] for w in used}}
        parts.append(gemm_floors(*((inputs[w.shape[1]], w.detach().T) for w in used), times=times))
    return together(parts)
