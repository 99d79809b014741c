"""Past policies: on a frozen base, a policy is the tensors of its adapter slot, a few megabytes.

A snapshot is complete before anybody else can see it and never changes afterwards. So a reader has a policy that was
published as a whole, whatever the learner does meanwhile.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from rlhf_engine.errors import EngineError
from rlhf_engine.hydra.adapters import AdapterSlot


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """A policy as it was. Nobody writes into its tensors."""

    version: int
    """Updates of the policy before it."""
    tensors: Mapping[str, torch.Tensor]
    """Tensors by the names of the slot's parameters."""
    ready: torch.cuda.Event | None = None
    """Passed when the tensors are there, where a device works behind the host's back."""

    @property
    def n_bytes(self) -> int:
        """Bytes that are sent when the policy is published."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def digest(self) -> str:
        """SHA-256 over names and bytes."""
        return digest(self.tensors)


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over names and bytes of tensors, in the order of their names."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        sha.update(name.encode())
        sha.update(tensors[name].detach().contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes())
    return sha.hexdigest()


@torch.no_grad()
def take(slot: AdapterSlot, version: int) -> Snapshot:
    """The slot's policy now."""
    tensors = {name: parameter.detach().clone() for name, parameter in slot.named_parameters()}
    ready = None
    if any(tensor.is_cuda for tensor in tensors.values()):
        ready = torch.cuda.Event()
        ready.record()
    return Snapshot(version=version, tensors=tensors, ready=ready)


@torch.no_grad()
def put(snapshot: Snapshot, slot: AdapterSlot) -> None:
    """Make the slot that policy, in place. Raises EngineError for a policy of another slot's shape."""
    held = dict(slot.named_parameters())
    shapes = {name: tuple(tensor.shape) for name, tensor in snapshot.tensors.items()}
    if shapes != {name: tuple(parameter.shape) for name, parameter in held.items()}:
        raise EngineError(f"policy version {snapshot.version}: its tensors are not those of the slot {slot.name!r}")
    if snapshot.ready is not None:
        torch.cuda.current_stream().wait_event(snapshot.ready)
    for name, parameter in held.items():
        source = snapshot.tensors[name]
        parameter.copy_(source, non_blocking=True)
        if source.is_cuda:
            source.record_stream(torch.cuda.current_stream())


class VersionStore:
    """Snapshots by version, for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, Snapshot] = {}

    def add(self, snapshot: Snapshot) -> None:
        """Show a policy to others from here on."""
        with self._lock:
            self._held[snapshot.version] = snapshot

    def get(self, version: int) -> Snapshot:
        """The policy of a version. Raises EngineError for one that is not held (any more)."""
        with self._lock:
            if version not in self._held:
                raise EngineError(f"policy version {version}: expected one of {sorted(self._held)}, which are held")
            return self._held[version]

    def newest(self) -> Snapshot:
        """The newest policy. Raises EngineError if none is held."""
        with self._lock:
            if not self._held:
                raise EngineError("policy version: expected one that is held, got none")
            return self._held[max(self._held)]

    def versions(self) -> list[int]:
        """Those held, oldest first."""
        with self._lock:
            return sorted(self._held)

    def keep(self, versions: Iterable[int]) -> None:
        """Forget all others."""
        wanted = set(versions)
        with self._lock:
            self._held = {version: snapshot for version, snapshot in self._held.items() if version in wanted}
