"""Speed of a machine: ceilings by kind of work, the cost of calls and launches, and the source of each figure.

    seconds of a call = max(FLOPs / (peak · efficiency), bytes / (bandwidth · efficiency)), and its calls and launches

On a GPU the host works ahead: a call takes the longer of its kernels and its calls on the host, and a replayed graph
what its kernels take and the gaps between them. On a CPU both add up. Ceilings of a CPU are measured, see `ceilings`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from rlhf_kernels.runtime.cost import Work

Curve = tuple[tuple[float, float], ...]
"""(size, rate) by growing size: rows of a product, or bytes of a pass. Between them on a line in logarithms."""


How = Literal["forward", "decoding", "replay"]
"""Caller of the ops: a backbone forward, a decoding step through the model, or a replayed graph."""


class Figure(NamedTuple):
    """A number that a prediction stands on."""

    name: str
    value: str
    source: Literal["datasheet", "assumed", "measured"]


@dataclass(frozen=True)
class Ceiling:
    """Rates of a kind of work."""

    flops: Curve = ()
    """FLOP/s by rows; empty where bytes alone count."""
    bytes: Curve = ()
    """Bytes/s by the bytes of the call; empty where FLOPs alone count."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A device and its host."""

    name: str
    ceilings: Mapping[tuple[str, torch.dtype], Ceiling]
    """By kind of work and dtype; a kind that is not here is `mm` or, without FLOPs, `elementwise`."""
    call_seconds: float
    """Host, per call of an op in a backbone forward."""
    decoding_call_seconds: float
    """The same in a decoding step through the model, where linears are prepared."""
    launch_seconds: float = 0.0
    """Between two kernels of a replayed graph."""
    token_seconds: float = 0.0
    """Host, per decoding step of all rows, beside its calls."""
    instantiate_seconds: float = 0.0
    """Host, per kernel of a captured graph."""
    overlaps: bool
    """Whether the host runs ahead of the device."""
    link: float = 0.0
    """Bytes/s into each of the devices that share a step; 0 for one alone."""
    figures: tuple[Figure, ...] = field(default=())

    def busy(self, work: Work) -> float:
        """Seconds that the work itself takes."""
        for key in ((work.kind, work.dtype), ("mm" if work.flops else "elementwise", work.dtype)):
            if key in self.ceilings:
                ceiling = self.ceilings[key]
                break
        else:  # a dtype in which little is done
            ceiling = self.ceilings["elementwise", torch.float32]
        seconds = 0.0
        if work.flops and ceiling.flops:
            seconds = work.flops / interpolate(ceiling.flops, work.rows)
        if work.bytes and ceiling.bytes:
            seconds = max(seconds, work.bytes / interpolate(ceiling.bytes, work.bytes))
        return seconds

    def receiving(self, n_bytes: float) -> float:
        """Seconds until a device has so many bytes from those that share a step with it."""
        return n_bytes / self.link if n_bytes else 0.0

    def waiting(self, work: Work, how: How = "forward") -> float:
        """Seconds of calls and launches that come on top."""
        if how == "replay":
            return work.launches * self.launch_seconds
        host = work.calls * (self.decoding_call_seconds if how == "decoding" else self.call_seconds)
        return max(0.0, host - self.busy(work)) if self.overlaps else host


def interpolate(curve: Curve, size: float) -> float:
    """The rate at a size, that of the nearest end outside of the curve."""
    if size <= curve[0][0]:
        return curve[0][1]
    for (a, low), (b, high) in itertools.pairwise(curve):
        if size <= b:
            share = math.log(size / a) / math.log(b / a)
            return low * (high / low) ** share
    return curve[-1][1]


# ---- data-sheets -----------------------------------------------------------------------------------------------------


class _Sheet(NamedTuple):
    """Published figures of a card."""

    title: str
    half: float
    """Dense FLOP/s in bfloat16 and float16 with tensor cores."""
    single: float
    """FLOP/s in float32, which torch runs without tensor cores."""
    bandwidth: float
    """Bytes/s of the memory."""
    cache: int
    """Bytes of L2."""
    link: float
    """Bytes/s of NVLink, each way."""


_SHEETS = {
    "h100": _Sheet("H100 SXM 80 GB", 989e12, 67e12, 3.35e12, 50 * 2**20, 450e9),
    "h200": _Sheet("H200 SXM 141 GB", 989e12, 67e12, 4.8e12, 50 * 2**20, 450e9),
    "a100": _Sheet("A100 SXM 80 GB", 312e12, 19.5e12, 2.04e12, 40 * 2**20, 300e9),
}
_NODE = 8
"""Cards of a machine, between which there is NVLink."""
_NETWORK = 50e9
"""Bytes/s of a card's link to other machines, each way: InfiniBand NDR."""
_OF_LINK = 0.75
HOP = 17e-6
"""Seconds until a small all-reduce between the cards of a machine begins to move."""

_EFFICIENCIES = {  # of the peak, and of the bandwidth
    "elementwise": (0.5, 0.85),
    "mm": (0.78, 0.85),
    "linear": (0.78, 0.85),
    "linear_backward": (0.78, 0.85),
    "head": (0.62, 0.85),
    "sample": (0.62, 0.68),
    "attention": (0.55, 0.85),
    "attention_backward": (0.45, 0.85),
    "decode_attention": (0.5, 0.68),
    "lora": (0.25, 0.5),
    "lora_delta": (0.25, 0.5),
    "lora_backward": (0.25, 0.5),
    "optimizer": (0.5, 0.7),
}
_CACHE_SPEEDUP = 1.7
_CALL, _LAUNCH, _INSTANTIATE, _TOKEN = 8e-6, 1.5e-6, 10e-6, 200e-6


def gpu(name: str, processes: int = 1) -> Machine:
    """The machine of a data-sheet, one card of so many that share a step.

    Efficiencies and the costs of calls are assumed.
    """
    sheet = _SHEETS[name]
    peaks = {torch.bfloat16: sheet.half, torch.float16: sheet.half, torch.float32: sheet.single}
    ceilings = {}
    for kind, (of_peak, of_bandwidth) in _EFFICIENCIES.items():
        rate = sheet.bandwidth * of_bandwidth
        curve = ((sheet.cache / 2, rate * _CACHE_SPEEDUP), (2.0 * sheet.cache, rate))
        for dtype, peak in peaks.items():
            ceilings[kind, dtype] = Ceiling(((1.0, peak * of_peak),), curve)
    efficiencies = "; ".join(
        f"{kind} {of_peak:.2f} / {of_bandwidth:.2f}" for kind, (of_peak, of_bandwidth) in _EFFICIENCIES.items()
    )
    figures: tuple[Figure, ...] = (
        Figure("peak", f"{sheet.half / 1e12:.0f} TFLOP/s half, {sheet.single / 1e12:g} TFLOP/s float32", "datasheet"),
        Figure("memory bandwidth", f"{sheet.bandwidth / 1e12:g} TB/s", "datasheet"),
        Figure("L2", f"{sheet.cache / 2**20:.0f} MiB", "datasheet"),
        Figure("efficiencies, of peak / of bandwidth", efficiencies, "assumed"),
        Figure("traffic that L2 holds", f"{_CACHE_SPEEDUP:g} x the bandwidth", "assumed"),
        Figure("call of an op on the host", f"{_CALL * 1e6:g} us", "assumed"),
        Figure("gap between kernels of a graph", f"{_LAUNCH * 1e6:g} us", "assumed"),
        Figure("host work around a decoding step", f"{_TOKEN * 1e6:g} us", "assumed"),
        Figure("capture", f"4 eager steps, then {_INSTANTIATE * 1e6:g} us per kernel; once per rollout", "assumed"),
    )
    link = 0.0
    if processes > 1:
        # all links of a machine carry what comes from others
        sheet_link = sheet.link if processes <= _NODE else min(sheet.link, _NODE * _NETWORK)
        link = sheet_link * _OF_LINK
        figures += (
            Figure("into a card, from the others", f"{sheet_link / 1e9:g} GB/s", "datasheet"),
            Figure("share of the links", f"{_OF_LINK:g}", "assumed"),
            Figure("start of an all-reduce of tensor parallelism", f"{HOP * 1e6:g} us", "assumed"),
        )
    return Machine(
        name=sheet.title,
        link=link,
        ceilings=ceilings,
        call_seconds=_CALL,
        decoding_call_seconds=_CALL,
        launch_seconds=_LAUNCH,
        token_seconds=_TOKEN,
        instantiate_seconds=_INSTANTIATE,
        overlaps=True,
        figures=figures,
    )
