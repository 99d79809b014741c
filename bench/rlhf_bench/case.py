"""Benchmark cases: inputs, the kernels' own run, baselines, the floor, and how its numbers are judged."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlhf_bench import PEERS

Tensors = dict[str, Tensor]
Run = Callable[[], Any]
Floors = dict[str, Run]
"""Ways to do the least that a case needs, by label; see `bench.floor`."""


class NotHereError(Exception):
    """A baseline cannot be measured on this machine or for this case; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Another way to compute (nearly) the same."""

    name: str
    # inputs → a function of no arguments that computes the results; raises NotHereError
    prepare: Callable[[Tensors], Callable[[], Tensors]]
    package: str | None = None  # distribution it comes from; None: torch
    same: bool = True  # False: does not compute the case's results; shown, but never the record's baseline
    compiles: bool = False  # its first call compiles for seconds, so --quick leaves it out

    @property
    def label(self) -> str:
        """Name with the version that is installed."""
        if self.package is None:
            return self.name
        version = installed(self.package)
        return f"{self.package} {version} {self.name}" if version else f"{self.package} {self.name}"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The subject of a group of the table's rows."""

    op: str
    name: str  # "what/sizes", unique within the op
    dtype: torch.dtype
    flops: float  # of the floor's GEMMs, or of the formulas where there are none
    moved_bytes: float  # what has to be read and written at least
    kernels: tuple[str, ...] = ()  # registered ops; a backend is timed if it serves all of them
    shape: tuple[int, ...] | None = None  # by which `auto` chooses, see `rlhf_kernels.runtime.kernel_table`


@dataclass(frozen=True, kw_only=True)
class Case(Subject):
    """One op on one set of sizes. Everything here is cheap to make; `make` allocates the inputs."""

    make: Callable[[torch.device], Tensors]  # equal inputs for equal devices
    run: Callable[[Tensors, str], Tensors]  # (inputs, backend) → results by name; gradients are called d_<input>
    eager: Callable[[Tensors], Tensors]  # plain torch ops in the same dtype: the yardstick of tier T3
    floor: Callable[[Tensors], Floors]  # bare products of the same sizes, or a bare copy of the bytes that must move
    baselines: tuple[Baseline, ...]
    tiers: Mapping[str, str] = field(default_factory=dict)  # result → T1, T2, T3 where not the dtype's own
    replayed: bool = False  # on a GPU every candidate is timed as a CUDA graph, as a rollout runs it

    def tier(self, result: str) -> str:
        """T1 for float32, T3 for rounded dtypes, unless the case says otherwise."""
        return self.tiers.get(result, "T1" if self.dtype == torch.float32 else "T3")


def installed(package: str) -> str | None:
    """Version of an installed distribution."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def require(package: str) -> None:
    """Raise NotHereError unless `package`, one of `PEERS`, is installed."""
    if installed(package) is None:
        raise NotHereError(f"not installed (pip install {package}=={PEERS[package]})")


def differentiate(outputs: Tensors, upstream: Tensors, leaves: Tensors) -> Tensors:
    """Outputs (detached) and the gradients d_<leaf>; `upstream` maps differentiated outputs to their gradients."""
    detached = {name: x.detach() for name, x in outputs.items()}
    if not leaves:
        return detached
    grads = torch.autograd.grad(
        [outputs[name] for name in upstream],
        list(leaves.values()),
        [g.to(outputs[name].dtype) for name, g in upstream.items()],
    )
    return detached | {f"d_{name}": g for name, g in zip(leaves, grads, strict=True)}


def leaves_of(inputs: Tensors, names: tuple[str, ...]) -> Tensors:
    """Fresh leaves that share the inputs' memory."""
    return {name: inputs[name].detach().requires_grad_() for name in names}
