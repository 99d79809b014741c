"""The criterion of a right kernel in three tiers, used by every test and benchmark.

exact is the float64 result. Positions of NaN and ±inf must match it exactly before any tier is looked at.

* T1 (fp32 in and out): max|actual − exact| ≤ 4 · max|reference32 − exact| + 1e-6 · max|exact|.
* T2 (one final rounding): every element within 0.55 ulp of the output dtype.
* T3 (rounded intermediates): max error ≤ 2 × the same-dtype eager error, RMS ≤ 1.25 ×, worst row's RMS ≤ 2 ×.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class NumericReport:
    """Result of a tier check; `error` and `bound` are in the tier's own unit (absolute for T1/T3, ulp for T2)."""

    tier: str
    error: float
    bound: float
    ok: bool
    why: str = ""


def _match_nonfinite(actual: torch.Tensor, exact: torch.Tensor) -> str:
    if actual.shape != exact.shape:
        return f"shape {tuple(actual.shape)} instead of {tuple(exact.shape)}"
    for name, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = (test(actual) != test(exact)).sum().item()
        if wrong:
            return f"{wrong} positions differ in {name}"
    return ""


def _finite_error(actual: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    error = (actual.double() - exact).abs()
    return torch.where(torch.isfinite(exact), error, torch.zeros_like(error))


def _max(x: torch.Tensor) -> float:
    return x.max().item() if x.numel() else 0.0


def tier1(actual: torch.Tensor, exact: torch.Tensor, reference32: torch.Tensor) -> NumericReport:
    """T1: fp32 `actual` against float64 `exact`, allowed four times the fp32 reference's own error."""
    exact = exact.double()
    why = _match_nonfinite(actual, exact)
    if why:
        return NumericReport(tier="T1", error=float("inf"), bound=0.0, ok=False, why=why)
    scale = _max(torch.where(torch.isfinite(exact), exact, 0.0).abs())
    bound = 4 * _max(_finite_error(reference32, exact)) + 1e-6 * scale
    error = _max(_finite_error(actual, exact))
    return NumericReport(
        tier="T1", error=error, bound=bound, ok=error <= bound, why="" if error <= bound else "max error"
    )


def tier2(actual: torch.Tensor, exact: torch.Tensor) -> NumericReport:
    """T2: `actual` is `exact` rounded once to its own dtype; error in ulp of that dtype."""
    exact = exact.double()
    why = _match_nonfinite(actual, exact)
    if why:
        return NumericReport(tier="T2", error=float("inf"), bound=0.55, ok=False, why=why)
    info = torch.finfo(actual.dtype)
    magnitude = torch.where(torch.isfinite(exact), exact.abs(), torch.ones_like(exact)).clamp_min(info.tiny)
    ulp = torch.exp2(torch.floor(torch.log2(magnitude))) * info.eps
    error = _max(_finite_error(actual, exact) / ulp)
    return NumericReport(tier="T2", error=error, bound=0.55, ok=error <= 0.55, why="" if error <= 0.55 else "ulp error")


def tier3(actual: torch.Tensor, exact: torch.Tensor, eager: torch.Tensor) -> NumericReport:
    """T3: `actual` with rounded intermediates against the error that plain eager ops of the same dtype make."""
    exact = exact.double()
    why = _match_nonfinite(actual, exact) or _match_nonfinite(eager, exact)
    if why:
        return NumericReport(tier="T3", error=float("inf"), bound=0.0, ok=False, why=why)
    ours, theirs = _finite_error(actual, exact), _finite_error(eager, exact)
    tiny = 1e-7 * _max(torch.where(torch.isfinite(exact), exact, 0.0).abs())

    def rms(e: torch.Tensor) -> float:
        return e.square().mean().sqrt().item() if e.numel() else 0.0

    def worst_row(e: torch.Tensor) -> float:
        return _max(e.reshape(e.shape[0], -1).square().mean(-1).sqrt()) if e.numel() else 0.0

    error, bound = _max(ours), 2 * _max(theirs) + tiny
    for name, got, limit in (
        ("max error", error, bound),
        ("RMS error", rms(ours), 1.25 * rms(theirs) + tiny),
        ("worst row's RMS", worst_row(ours), 2 * worst_row(theirs) + tiny),
    ):
        if got > limit:
            return NumericReport(tier="T3", error=got, bound=limit, ok=False, why=name)
    return NumericReport(tier="T3", error=error, bound=bound, ok=True)


def assert_ok(report: NumericReport, what: str = "") -> NumericReport:
    """Raise AssertionError with the measured figures unless the tier was met; returns the report for tables."""
    if not report.ok:
        raise AssertionError(f"{what} fails {report.tier} ({report.why}): {report.error:.3e} > {report.bound:.3e}")
    return report
