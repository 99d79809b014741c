"""Policies, work items and answers as bytes and plain values, for generators in other processes.

A policy goes over as the bytes of a safetensors file beside its version and its digest, which the receiver checks,
and answers beside a digest of their own; nothing is pickled here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from rlhf_engine.distributed.launch import versions
from rlhf_engine.errors import ConfigError, EngineError
from rlhf_engine.generators.policy_store import Snapshot, digest
from rlhf_engine.generators.work import WorkItem, put_together, take_apart
from rlhf_engine.hydra import HydraModel
from rlhf_engine.hydra.roles import LM_HEAD, OFF
from rlhf_engine.rollout import PromptBatch, Rollout, SamplingConfig

_PACKAGE = "package "
"""Prefix of the names of packages among a run's fixed parts."""


class Parcel(NamedTuple):
    """A policy on its way."""

    version: int
    digest: str
    """SHA-256 over names and bytes of its tensors, see `versions.digest`."""
    data: bytes
    """A safetensors file."""


def pack_policy(snapshot: Snapshot) -> Parcel:
    """Waits for the tensors where a device still makes them."""
    if snapshot.ready is not None:
        snapshot.ready.synchronize()
    tensors = {name: tensor.contiguous().cpu() for name, tensor in snapshot.tensors.items()}
    return Parcel(snapshot.version, digest(tensors), save(tensors))


def unpack_policy(parcel: Parcel, device: torch.device | str = "cpu") -> Snapshot:
    """The policy of a parcel. Raises EngineError for one that is not what was sent."""
    try:
        tensors = load(parcel.data)
    except SafetensorError as error:
        raise EngineError(f"policy version {parcel.version} arrived damaged: {error}") from error
    received = digest(tensors)
    if received != parcel.digest:
        raise EngineError(
            f"policy version {parcel.version} arrived damaged: expected tensors of digest {parcel.digest[:12]}…, got "
            f"{received[:12]}…"
        )
    return Snapshot(version=parcel.version, tensors={name: tensor.to(device) for name, tensor in tensors.items()})


def pack_item(item: WorkItem) -> dict[str, Any]:
    """Numbers, texts and tuples of them by name."""
    return dataclasses.asdict(item)


def unpack_item(values: Mapping[str, Any]) -> WorkItem:
    """Work item that `pack_item` was given."""
    prompts, sampling = PromptBatch(**values["prompts"]), SamplingConfig(**values["sampling"])
    return WorkItem(**{**values, "prompts": prompts, "sampling": sampling})


def pack_rollout(rollout: Rollout) -> dict[str, Any]:
    """Plain values by name; tensors as the bytes of one safetensors file under `tensors`, and a digest of it all."""
    plain, tensors = take_apart(rollout)
    values = {"tensors": save({name: x.detach().contiguous().cpu() for name, x in tensors.items()}), **plain}
    return {**values, "digest": _digest(values)}


def unpack_rollout(values: Mapping[str, Any], device: torch.device | str = "cpu") -> Rollout:
    """Rollout that `pack_rollout` was given, on a device. Raises EngineError for answers that are not what was sent."""
    received = _digest(values)
    if received != values.get("digest"):
        expected = str(values.get("digest"))[:12]
        raise EngineError(f"answers arrived damaged: expected ones of digest {expected}…, got {received[:12]}…")
    return put_together(values, {name: x.to(device) for name, x in load(values["tensors"]).items()})


def _digest(values: Mapping[str, Any]) -> str:
    """SHA-256 of what `pack_rollout` makes."""
    plain = {name: value for name, value in values.items() if name not in ("tensors", "digest")}
    sha = hashlib.sha256(json.dumps(plain, sort_keys=True).encode())
    sha.update(values["tensors"])
    return sha.hexdigest()


def fixed_parts(model: HydraModel) -> dict[str, str]:
    """Versions of packages, and SHA-256 of backbones, frozen slots and frozen heads: what no update changes."""
    parts = {f"{_PACKAGE}{name}": version for name, version in versions().items()}
    parts |= {f"backbone {name}": model.backbone(name).base_hash() for name in model.backbones}
    for role in model.roles.values():
        if role.trainable or role.transient:
            continue
        if role.slot is not OFF:
            slot = model.backbone(role.backbone).slot(role.slot)
            parts[f"slot {role.slot}"] = digest(dict(slot.named_parameters()))
        if role.head != LM_HEAD:
            parts[f"head {role.head}"] = digest(model.heads[role.head].state_dict())
    return parts


def require_same_parts(ours: Mapping[str, str], learners: Mapping[str, str]) -> None:
    """Raise ConfigError, naming the part, where a generator's packages or frozen weights are not the learner's."""
    for part, own in ours.items():
        if learners.get(part) != own:
            expected = learners.get(part, "none")
            if part.startswith(_PACKAGE):
                raise ConfigError(
                    f"async ray: expected {part.removeprefix(_PACKAGE)} {expected}, the learner's, on the "
                    f"generator's machine, got {own}"
                )
            raise ConfigError(
                f"model_name_or_path: expected weights on the generator's machine that are the learner's, got a {part} "
                f"of hash {own[:12]}…, not {expected[:12]}…"
            )
