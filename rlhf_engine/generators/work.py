"""Policies that draw answers, and the answers, as they go to and from generators in other threads and processes.

On a frozen base a policy is the tensors of its adapter slot, a few megabytes. A snapshot is complete before others can
see it and never changes afterwards: a reader has a policy that was published as a whole, whatever the learner does
meanwhile. Policies and answers go over as safetensors beside a digest that the receiver checks; nothing is pickled.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from rlhf_engine.config.launch import versions
from rlhf_engine.devices import World
from rlhf_engine.errors import ConfigError, EngineError
from rlhf_engine.hydra import HydraModel, PackedBatch, Scores
from rlhf_engine.hydra.gate import AdapterSlot
from rlhf_engine.hydra.model import join_scores
from rlhf_engine.hydra.roles import LM_HEAD, OFF
from rlhf_engine.hydra.supports import Supports
from rlhf_engine.rollout import Rollout
from rlhf_engine.rollout.request import RolloutStats, Talk

_FROZEN = "frozen/"  # prefix of the names of frozen scores among the tensors of a rollout
_WORDS, _LENGTHS = "supports/words", "supports/lengths"  # names of the parts of supports among them
_PACKAGE = "package "  # prefix of the names of packages among a run's fixed parts


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """A policy as it was. Nobody writes into its tensors."""

    version: int  # updates of the policy before it
    tensors: Mapping[str, torch.Tensor]  # tensors by the names of the slot's parameters
    ready: torch.cuda.Event | None = None
    """Passed when the tensors are there, where a device works behind the host's back."""

    @property
    def n_bytes(self) -> int:
        """Bytes that are sent when the policy is published."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


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

    def keep(self, versions: Iterable[int]) -> None:
        """Forget all others."""
        wanted = set(versions)
        with self._lock:
            self._held = {version: snapshot for version, snapshot in self._held.items() if version in wanted}


def join(shares: Sequence[Rollout]) -> Rollout:
    """The shares of a step, in their order, as one. Frozen scores stay where every share has them."""
    if len(shares) == 1:
        return shares[0]
    frozen = [share.frozen for share in shares if share.frozen is not None]
    return Rollout(
        batch=PackedBatch.concat([share.batch for share in shares]),
        logprobs_M=torch.cat([share.logprobs_M for share in shares]),
        versions_M=torch.cat([share.versions_M for share in shares]),
        finish_reasons=tuple(reason for share in shares for reason in share.finish_reasons),
        filtered=any(share.filtered for share in shares),
        stats=_drawn_together([share.stats for share in shares]),
        frozen=join_scores(frozen) if len(frozen) == len(shares) else None,
        talks=tuple(talk for share in shares for talk in share.talks or ()) or None,
    )


def _drawn_together(every: Sequence[RolloutStats]) -> RolloutStats:
    """Statistics of rollouts at the same time: sums of what was drawn, the longest times, the first one's step."""
    most = ("steps", "prefill_seconds", "decode_seconds", "seconds")
    numbers = {name: [getattr(stats, name) for stats in every] for name in vars(every[0]) if name != "step"}
    return RolloutStats(**{n: max(x) if n in most else sum(x) for n, x in numbers.items()}, step=every[0].step)


def gather_rollout(world: World, rollout: Rollout) -> Rollout:
    """The answers of all ranks, in the ranks' order, as one rollout, without frozen scores."""
    plain, tensors = take_apart(dataclasses.replace(rollout, frozen=None))
    parts = zip(world.gather(plain), world.gather_tensors(tensors), strict=True)
    return join([put_together(values, received) for values, received in parts])


def take_apart(rollout: Rollout) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Plain values and tensors of a rollout, by name, to be sent."""
    batch, frozen = rollout.batch, rollout.frozen
    plain = {
        "cu_seqlens": batch.cu_seqlens, "prompt_lens": batch.prompt_lens, "sample_ids": batch.sample_ids,
        "finish_reasons": rollout.finish_reasons, "filtered": rollout.filtered,
        "stats": dataclasses.asdict(rollout.stats), "has_frozen": frozen is not None,
        "vocabulary": None if batch.supports is None else batch.supports.vocabulary,
        "turns": batch.turns, "talks": rollout.talks and [vars(talk) for talk in rollout.talks],
    }  # fmt: skip
    tensors = {"tokens": batch.tokens_T, "logprobs": rollout.logprobs_M, "versions": rollout.versions_M}
    if batch.supports is not None:
        tensors |= {_WORDS: batch.supports.words, _LENGTHS: batch.supports.lengths.int().to(batch.device)}
    scores = {} if frozen is None else {f"{_FROZEN}{name}": x for name, x in frozen.items()}
    return plain, {**tensors, **scores}


def put_together(plain: Mapping[str, Any], tensors: Mapping[str, Any]) -> Rollout:
    """The rollout that `take_apart` was given; what else is among the values or tensors is left alone."""
    scores = {name.removeprefix(_FROZEN): x for name, x in tensors.items() if name.startswith(_FROZEN)}
    supports = None
    if plain["vocabulary"] is not None:
        supports = Supports.of_lengths(tensors[_WORDS], tensors[_LENGTHS], plain["vocabulary"])
    return Rollout(
        batch=PackedBatch(
            tokens_T=tensors["tokens"],
            cu_seqlens=tuple(plain["cu_seqlens"]),
            prompt_lens=tuple(plain["prompt_lens"]),
            sample_ids=tuple(plain["sample_ids"]),
            supports=supports,
            turns=plain["turns"] and tuple(tuple(map(tuple, spans)) for spans in plain["turns"]),
        ),
        logprobs_M=tensors["logprobs"],
        versions_M=tensors["versions"],
        finish_reasons=tuple(plain["finish_reasons"]),
        filtered=plain["filtered"],
        stats=RolloutStats(**plain["stats"]),
        frozen=Scores(**scores) if plain["has_frozen"] else None,
        talks=plain["talks"]
        and tuple(Talk(**{**talk, "turn_rewards": tuple(talk["turn_rewards"])}) for talk in plain["talks"]),
    )


def pack_policy(snapshot: Snapshot) -> tuple[str, bytes]:
    """Digest of a policy's tensors and a safetensors file of them; waits where a device still makes them."""
    if snapshot.ready is not None:
        snapshot.ready.synchronize()
    tensors = {name: tensor.contiguous().cpu() for name, tensor in snapshot.tensors.items()}
    return digest(tensors), save(tensors)


def unpack_policy(version: int, sent: str, data: bytes, device: torch.device | str = "cpu") -> Snapshot:
    """The policy of what `pack_policy` made. Raises EngineError for one that is not what was sent."""
    damaged = f"policy version {version} arrived damaged"
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise EngineError(f"{damaged}: {error}") from error
    if (received := digest(tensors)) != sent:
        raise EngineError(f"{damaged}: expected tensors of digest {sent[:12]}…, got {received[:12]}…")
    return Snapshot(version=version, tensors={name: tensor.to(device) for name, tensor in tensors.items()})


def pack_rollout(rollout: Rollout) -> dict[str, Any]:
    """Plain values by name; tensors as the bytes of one safetensors file under `tensors`, and a digest of it all."""
    plain, tensors = take_apart(rollout)
    values = {"tensors": save({name: x.detach().contiguous().cpu() for name, x in tensors.items()}), **plain}
    return {**values, "digest": _digest_of(values)}


def unpack_rollout(values: Mapping[str, Any], device: torch.device | str = "cpu") -> Rollout:
    """Rollout that `pack_rollout` was given, on a device. Raises EngineError for answers that are not what was sent."""
    received = _digest_of(values)
    if received != values.get("digest"):
        expected = str(values.get("digest"))[:12]
        raise EngineError(f"answers arrived damaged: expected ones of digest {expected}…, got {received[:12]}…")
    return put_together(values, {name: x.to(device) for name, x in load(values["tensors"]).items()})


def _digest_of(values: Mapping[str, Any]) -> str:
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
