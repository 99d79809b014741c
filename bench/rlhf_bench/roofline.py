"""Roofline: achieved speed against arithmetic intensity, under the ceilings of this machine.

    speed = flops / time,   intensity = flops / bytes,   ceiling = min(fastest product, bandwidth · intensity)

flops are the floor's GEMMs (or the formulas' operations), bytes what has to move at least. So a kernel that computes or
moves more than that shows as slower, not as busier. Bandwidth counts the bytes that a large copy reads and writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rlhf_bench.floor import copy_floors, gemm_floors, random_normal, worth_timing
from rlhf_bench.timing import interleaved, medians

_MARKERS = {"cuda": "*", "triton": "^", "cpu": "s", "reference": "o"}


class Ceilings(NamedTuple):
    """Ceilings of one device and dtype."""

    gflops: float  # of a large product, the fastest way that is here
    gbytes: float  # per second, of a large copy
    dtype: torch.dtype


def measure_ceilings(device: torch.device, dtype: torch.dtype, *, quick: bool) -> Ceilings:
    """The median of a few calls each, one after the other, on random numbers in `dtype`."""
    n, n_bytes = (8192, 2**31) if device.type == "cuda" else (1024, 2**28) if quick else (2048, 2**29)
    a, weight = random_normal(2, n, n, dtype=dtype, device=device)
    products, copy = worth_timing(gemm_floors((a, weight.T))), copy_floors(n_bytes, device, dtype)
    ms = medians(interleaved(products | copy, 5, device))
    return Ceilings(2e-6 * n**3 / min(ms[label] for label in products), 1e-6 * n_bytes / ms["copy"], dtype)


def plot_roofline(records: Sequence[dict[str, Any]], ceilings: Ceilings, png_path: str | Path, *, device: str) -> None:
    """One marker per op and backend and case: colours are ops, shapes are backends."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    if not records:
        raise ValueError("records: expected at least one, got none")
    figure = Figure(figsize=(8.5, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    ops = list(dict.fromkeys(record["op"] for record in records))
    points = [(r["flops"] / r["moved_bytes"], 1e-6 * r["flops"] / r["ms"]) for r in records]
    for (x, y), record in zip(points, records, strict=True):
        axes.plot(
            x,
            y,
            marker=_MARKERS[record["backend"]],
            color=f"C{ops.index(record['op'])}",
            markeredgecolor="white",
            markeredgewidth=0.5,
            markersize=8,
            linestyle="none",
        )
    ridge = ceilings.gflops / ceilings.gbytes
    left = min(*(x for x, _ in points), ridge) / 2
    right = max(*(x for x, _ in points), ridge) * 2
    axes.plot(
        [left, ridge, right], [left * ceilings.gbytes, ceilings.gflops, ceilings.gflops], color="0.3", linewidth=1.5
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    name = str(ceilings.dtype).removeprefix("torch.")
    axes.set_title(
        f"{device}: product {ceilings.gflops:,.0f} GFLOP/s ({name}), copy {ceilings.gbytes:,.0f} GB/s", fontsize=11
    )
    axes.set_xlabel("arithmetic intensity, FLOP per byte that has to move")
    axes.set_ylabel("GFLOP/s")
    axes.grid(alpha=0.25, which="both")
    used = dict.fromkeys(record["backend"] for record in records)
    handles = [Line2D([], [], color=f"C{i}", marker="s", linestyle="none", label=op) for i, op in enumerate(ops)]
    handles += [Line2D([], [], color="0.3", marker=_MARKERS[b], linestyle="none", label=b) for b in used]
    axes.legend(handles=handles, fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    Path(png_path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png_path, dpi=120)
