"""Rollout cases → results and records as those of the kernels: interleaved times, the mismatch as the error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rlhf_bench import timing
from rlhf_bench.accuracy import Accuracy
from rlhf_bench.rollout.cases import RolloutCase
from rlhf_bench.runner import CaseResult, Measured, fastest_floor, timed_floors
from rlhf_engine.hydra.attention import BLOCK
from rlhf_engine.rollout import Rollout
from rlhf_engine.scoring.experience import MISMATCH_BOUND


def run_rollout_cases(cases: Sequence[RolloutCase], *, device: torch.device, rounds: int) -> Iterator[CaseResult]:
    """Measure one case after the other."""
    for case in cases:
        yield _run(case, device, rounds)


def _run(case: RolloutCase, device: torch.device, rounds: int) -> CaseResult:
    accuracy, cached = {}, {}
    size = BLOCK * case.models.ours.backbone().cache_bytes_per_position
    for step, run in case.ours.items():
        rollout = run()
        accuracy[step] = _mismatch(case, rollout)
        cached[step] = rollout.stats.most_blocks * size
    for baseline in case.baselines.values():
        baseline()
    ours_and_theirs: dict[str, Any] = {**case.ours, **case.baselines}
    functions = {**timed_floors(case.floor), **ours_and_theirs}
    ms = timing.medians(timing.interleaved(functions, rounds, device))
    rows = tuple(
        Measured(
            label=label,
            backend=label in case.ours,
            same=True,
            ms=ms[label],
            peak_bytes=cached.get(label),
            accuracy=accuracy.get(label),
        )
        for label in ours_and_theirs
    )
    floor, floor_ms = fastest_floor(ms)
    return CaseResult(
        case=case,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        rounds=rounds,
        order=tuple(functions),
        floor=floor,
        floor_ms=floor_ms,
        rows=rows,
        missing=dict(case.missing),
    )


def rollout_records(result: CaseResult) -> list[dict[str, Any]]:
    """The records of a result, with tokens per second."""
    case = result.case
    assert isinstance(case, RolloutCase)
    records = result.records()
    for record in records:
        record["tokens_per_second"] = 1e3 * case.tokens / record["ms"]
        record["baseline_tokens_per_second"] = record["baseline_ms"] and 1e3 * case.tokens / record["baseline_ms"]
    return records


def _mismatch(case: RolloutCase, rollout: Rollout) -> Accuracy:
    """Mean |log-prob of the rollout − log-prob of the training forward| per token."""
    scores = case.models.ours.score(rollout.batch, (case.role,))
    expected = scores.logprobs_M if case.role == "actor" else scores.ref_logprobs_M
    assert expected is not None
    mean = float((rollout.logprobs_M - expected).abs().mean())
    bound = MISMATCH_BOUND[case.dtype]
    return Accuracy("logprob", "mismatch", mean, bound, mean <= bound, "" if mean <= bound else "above the bound")
