"""Error of a candidate against float64, judged by the tiers of `rlhf_kernels.runtime.testing`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from rlhf_kernels.runtime.testing import NumericReport, tier1, tier2, tier3

from rlhf_bench.case import Case, Tensors


class Yardstick(NamedTuple):
    """Results that candidates of one case are compared with."""

    exact: Tensors  # the float64 reference on upcast inputs
    reference: Tensors | None  # the reference in the case's dtype, where a result is held to T1
    eager: Tensors | None  # plain torch ops in the case's dtype, where a result is held to T3


class Accuracy(NamedTuple):
    """The result that comes closest to its bound, or lies furthest above it."""

    result: str
    tier: str
    error: float
    bound: float
    ok: bool
    why: str


def yardstick(case: Case, inputs: Tensors) -> Yardstick:
    """Compute the exact results and the same-dtype ones that the case's tiers need."""
    wide = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    exact = case.run(wide, "reference")
    del wide
    tiers = {case.tier(name) for name in exact}
    reference = case.run(inputs, "reference") if "T1" in tiers else None
    return Yardstick(exact, reference, case.eager(inputs) if "T3" in tiers else None)


def judge(case: Case, got: Tensors, measure: Yardstick) -> Accuracy:
    """Compare every result that `got` has; the worst one decides."""
    found = []
    for name in measure.exact.keys() & got.keys():
        report = _report(case.tier(name), _at(got, name), _at(measure.exact, name), name, measure)
        found.append((name, report))
    if not found:
        raise ValueError(f"got: expected some of the results {sorted(measure.exact)}, got {sorted(got)}")
    name, worst = max(found, key=lambda pair: (not pair[1].ok, pair[1].error / max(pair[1].bound, 1e-300)))
    return Accuracy(name, worst.tier, worst.error, worst.bound, worst.ok, worst.why)


def _report(tier: str, got: torch.Tensor, exact: torch.Tensor, name: str, measure: Yardstick) -> NumericReport:
    if tier == "T1":
        assert measure.reference is not None
        return tier1(got, exact, _at(measure.reference, name))
    if tier == "T2":
        return tier2(got, exact)
    assert measure.eager is not None
    return tier3(got, exact, _at(measure.eager, name))


def _at(tensors: Tensors, name: str) -> torch.Tensor:
    x = tensors[name]
    return x.reshape(1) if x.dim() == 0 else x  # T3 compares rows
