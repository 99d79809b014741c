"""The policies of one base: made, forked, saved, evicted and removed while others draw and train.

    policies = Policies(HydraModel.from_pretrained(folder, roles={"base": RoleSpec()}))
    pirate = policies.add("pirate", slots={"actor": SlotConfig(r=8)}, seed=1)
    policies.engine.submit([Request(prompt=ids, sample_id=0, role=pirate.role)], sampling)

Each policy is a `HydraModel.beside` the host with its own seed, so that it starts as it would alone. The host adopts
its slots under names that are never given twice: what is kept of one policy is never taken for another's.
"""

from __future__ import annotations

import itertools
import math
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rlhf_kernels.runtime import registry

from rlhf_engine.config.run import Optim
from rlhf_engine.errors import BusyError, ConfigError, EngineError, MemoryLimitError, PolicyRemovedError
from rlhf_engine.hydra import HydraModel, RoleSpec, SlotConfig, peft_io
from rlhf_engine.hydra.optimizer import RoleOptimizer, state_layout
from rlhf_engine.hydra.persist import read_record
from rlhf_engine.hydra.roles import LM_HEAD, OFF, Roles
from rlhf_engine.io import finish_replacements, remove
from rlhf_engine.rollout import exactness
from rlhf_engine.rollout.engine import RolloutEngine
from rlhf_engine.rollout.request import EngineOptions
from rlhf_engine.runs.checkpoint import list_checkpoints, load_checkpoint, read_counters, save_checkpoint

BASE = "base"  # name of the policy that is the base itself, and of the host's role for it
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_ACTOR: Roles = {"actor": RoleSpec(slot="actor", trainable=True), "reference": RoleSpec()}


@dataclass(frozen=True, kw_only=True)
class PolicyState:
    """Counters of a policy, for its checkpoints."""

    step: int = 0  # optimizer steps
    seed: int = 0  # seed of its weights at the start, and of stochastic rounding
    optim: Optim = "adamw"  # what the state of its optimizer is made of


@dataclass(eq=False, kw_only=True)
class LivePolicy:
    """One policy: its model beside the base, its optimizer, and who uses it."""

    name: str  # name in the pool
    key: str  # prefix of its slots' names on the host, never given twice
    model: HydraModel  # its roles, slots and heads on the host's backbone
    optimizer: RoleOptimizer | None  # None where nothing is trained
    state: PolicyState = PolicyState()  # counters
    n_bytes: int = 0  # bytes of its weights, with gradients and optimizer state where they are trained
    holders: int = 0  # requests and owners of a snapshot that use it now
    used: int = 0  # when it was used last, in uses of the pool
    waiting: Future[dict[str, float]] | None = None  # an optimizer step that waits for answers of fixed weights

    @property
    def role(self) -> str:
        """The host's role that draws by this policy."""
        slot = self.model.roles["actor"].slot if "actor" in self.model.roles else OFF
        return BASE if slot is OFF else f"{self.key}-{slot}"

    @property
    def own_role(self) -> str:
        """Name of the role of its own model that draws."""
        return BASE if self.key == BASE else "actor"

    def slot_on_host(self, slot: str | None) -> str | None:
        """Name of one of its slots on the host."""
        return None if slot is OFF or self.key == BASE else f"{self.key}-{slot}"

    @property
    def has_gradient(self) -> bool:
        """Whether gradients wait for an optimizer step."""
        groups = () if self.optimizer is None else self.optimizer.groups.values()
        return any(p.grad is not None for group in groups for p in group.values())


class Policies:
    """The policies of one base. Calls from several threads take turns with the steps of the rollout engine."""

    def __init__(
        self,
        host: HydraModel,
        *,
        state: Path | None = None,
        max_policies: int | None = None,
        memory: int | None = None,
        options: EngineOptions | None = None,
        exact: bool | None = None,
    ) -> None:
        """Take a model with the role `base` alone, and the checkpoints that are in the folder `state`.

        max_policies: most policies in memory at once. memory: most bytes of them together, see `LivePolicy.n_bytes`.
        exact: whether a policy has the same bits in any company; None: where that serves the base and costs nothing.
        """
        if dict(host.roles) != {BASE: RoleSpec()}:
            raise ValueError(f"host: expected a model with the role {BASE!r} alone, adapter off, got {host.roles}")
        for name, limit in (("max_policies", max_policies), ("memory", memory)):
            if limit is not None and limit < 1:
                raise ValueError(f"{name}: expected None or at least 1, got {limit}")
        self.host, self.folder, self.max_policies, self.memory = host, state, max_policies, memory
        backbone = host.backbone()
        backbone.kernels = registry.effective().anew()
        reason = exactness.unsupported(backbone) if exact is not False else "it is not wanted"
        if exact and reason is not None:
            raise ValueError(f"exact: expected false for this base, got true: {reason}")
        backbone.kernels.exact = reason is None and (exact is True or exactness.by_default(backbone.device.type))
        self.engine = RolloutEngine(host, options=options)
        self._held = {BASE: LivePolicy(name=BASE, key=BASE, model=host, optimizer=None)}
        self._holding = threading.Lock()
        self.heard: Callable[[LivePolicy], None] = lambda policy: None  # called with a policy that leaves the host
        self._numbers, self._uses = itertools.count(1), itertools.count(1)
        self.paused = set[str]()  # names of policies whose new requests are refused
        self.evicted: dict[str, Path] = {}  # name → checkpoint of the policies that are on disk alone
        for folder in sorted(state.iterdir()) if state is not None and state.is_dir() else ():
            finish_replacements(folder, "checkpoint-*")
            if checkpoints := list_checkpoints(folder):
                self.evicted[folder.name] = checkpoints[-1]

    def __iter__(self) -> Iterator[LivePolicy]:
        """Policies in memory, the base first."""
        return iter(list(self._held.values()))

    def __contains__(self, name: object) -> bool:
        return name in self._held or name in self.evicted

    @property
    def names(self) -> list[str]:
        """Names of all policies, those on disk included."""
        return list(dict.fromkeys([*self._held, *self.evicted]))

    def get(self, name: str) -> LivePolicy:
        """A policy by its name, read from disk where it was evicted. ValueError for one that does not exist."""
        with self.engine.between_steps():
            if name in self.evicted:
                self.restore(name)
            if name not in self._held:
                raise ValueError(f"policy: expected one of {sorted(self.names)}, got {name!r}")
            policy = self._held[name]
            policy.used = next(self._uses)
            return policy

    def hold(self, name: str) -> LivePolicy:
        """A policy by its name as `get` does, which is not evicted before `release`."""
        while True:
            with self._holding:  # no wait for a step where it is in memory
                policy = self._held.get(name)
                if policy is not None:
                    policy.holders += 1
                    policy.used = next(self._uses)
                    return policy
            self.get(name)

    # ---- life ------------------------------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        *,
        roles: Roles = _ACTOR,
        slots: Mapping[str, SlotConfig] | None = None,
        seed: int = 0,
        optim: Optim = "adamw",
        adapter_dtype: torch.dtype = torch.float32,
    ) -> LivePolicy:
        """Make a policy with slots and heads of its own, as they would start alone with that seed."""
        elsewhere = {role.backbone for role in roles.values()} - {"base"}
        if elsewhere:
            raise ValueError(f"roles: expected all of them on the backbone 'base', got {sorted(elsewhere)}")
        with self.engine.between_steps():
            self._require_free(name)
            model = self.host.beside(roles=roles, slots=slots, adapter_dtype=adapter_dtype, seed=seed)
            state = PolicyState(seed=seed, optim=optim)
            return self._enter(name, model, state)

    def load(self, name: str, folder: Path) -> LivePolicy:
        """Read a PEFT folder, such as a checkpoint of a run, as a policy that draws and is not trained."""
        with self.engine.between_steps():
            self._require_free(name)
            roles = {"actor": RoleSpec(slot="actor")}
            config = replace(peft_io.read_slot_config(folder), init_from=str(folder))
            return self._enter(name, self.host.beside(roles=roles, slots={"actor": config}), PolicyState())

    def adopt(self, name: str, model: HydraModel) -> LivePolicy:
        """Draw by a model beside the host that somebody else trains; who changes its weights calls `engine.renew`."""
        with self.engine.between_steps():
            self._require_free(name)
            return self._enter(name, model, PolicyState(), is_trained=False)

    def fork(self, name: str, new: str) -> LivePolicy:
        """Make a policy that goes on from another's weights and optimizer state, each by itself from here on."""
        with self.engine.between_steps():
            origin = self._require_idle(name, "fork")
            self._require_free(new)
            model = self._copy(origin, trainable=True)
            policy = self._enter(new, model, origin.state)
            if policy.optimizer is not None and origin.optimizer is not None:
                policy.optimizer.load_state_tensors(origin.optimizer.state_tensors())
            return policy

    def snapshot(self, name: str) -> LivePolicy:
        """Keep a policy as it is now, as `name@step`; `release` as often as this was called lets go of it."""
        with self.engine.between_steps():
            origin = self.get(name)
            own = f"{name}@{origin.state.step}"
            if own not in self._held:
                self._enter(own, self._copy(origin, trainable=False), origin.state)
            return self.hold(own)

    def release(self, policy: LivePolicy) -> None:
        """One holder less of a policy; a snapshot that nobody holds any more goes."""
        with self._holding:
            policy.holders -= 1
        if policy.holders == 0 and "@" in policy.name:
            with self.engine.between_steps():
                self._leave(policy, only_idle=True)

    def pause(self, name: str, paused: bool = True) -> None:
        """Refuse a policy's new requests, or take them again; those that have begun are finished."""
        self.get(name)
        (self.paused.add if paused else self.paused.discard)(name)

    def remove(self, name: str) -> None:
        """Give a policy up, with its requests and its checkpoints."""
        with self.engine.between_steps():
            if name == BASE:
                raise ValueError(f"policy: expected another than the base, got {name!r}")
            if name not in self:
                raise ValueError(f"policy: expected one of {sorted(self.names)}, got {name!r}")
            if name in self._held:
                self._leave(self._held[name])
            self.evicted.pop(name, None)
            self.paused.discard(name)
            if self.folder is not None and (self.folder / name).is_dir():
                remove(self.folder / name)

    def save(self, name: str) -> Path:
        """Write a checkpoint of a policy into the folder `state`, in place of its earlier ones; where it is."""
        with self.engine.between_steps():
            policy = self._require_idle(name, "save")
            if self.folder is None or policy.optimizer is None:
                lacks = "a folder `state`" if self.folder is None else "a policy that is trained"
                raise ValueError(f"save: expected {lacks}, got {name!r} without")
            return save_checkpoint(self.folder / name, policy.model, policy.optimizer, policy.state, keep=1)

    def evict(self, name: str) -> None:
        """Put a policy on disk alone, until it is used again."""
        with self.engine.between_steps():
            policy = self._require_idle(name, "evict")
            self.evicted[name] = self.save(name)  # before it leaves: who asks meanwhile, without the lock, finds it
            if not self._leave(policy, only_idle=True):
                del self.evicted[name]
                raise ValueError(f"evict: expected a policy that nobody uses, got {name!r} with {policy.holders} users")

    def restore(self, name: str) -> LivePolicy:
        """Read an evicted policy back. ValueError for one that was not evicted."""
        with self.engine.between_steps():
            if name not in self.evicted:
                raise ValueError(f"policy: expected one that was evicted ({sorted(self.evicted)}), got {name!r}")
            try:
                policy = self._read(name, self.evicted[name])
            except (EngineError, OSError) as error:
                if isinstance(error, MemoryLimitError):
                    raise
                warnings.warn(f"policy {name!r}: {error}", stacklevel=2)
                # whoever asked for it need not know where it lies
                raise EngineError(
                    f"policy {name!r}: expected a checkpoint that can be read, got one that cannot"
                ) from error
            del self.evicted[name]  # it is known all the while, to who asks without the lock
            return policy

    # ---- training --------------------------------------------------------------------------------------------------

    def step(
        self,
        name: str,
        *,
        learning_rate: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float | None = 1.0,
    ) -> Future[dict[str, float]]:
        """Apply a policy's gradients, between two tokens of its answers; norms by role once that is done."""
        options = {"eps": eps, "weight_decay": weight_decay, "max_grad_norm": max_grad_norm}
        for option, value in {"learning_rate": learning_rate, **options}.items():
            if value is not None and not 0.0 <= value < math.inf:
                raise ValueError(f"{option}: expected a finite number of at least 0, got {value}")
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas: expected two numbers of at least 0 and below 1, got {betas}")
        policy = self.get(name)
        optimizer = policy.optimizer
        if optimizer is None:
            raise ValueError(f"policy: expected one that is trained, got {name!r}")
        done = promise()

        def apply() -> dict[str, float]:
            optimizer.set_options(betas=betas, **options)
            optimizer.set_lr_factor(learning_rate)
            return optimizer.step()

        def write() -> None:  # within a step of the engine, which is everybody's: errors go to the future
            policy.waiting = None
            fill(done, apply)
            if done.exception() is None:
                policy.state = replace(policy.state, step=policy.state.step + 1)

        with self.engine.between_steps():
            if policy.waiting is not None:
                raise BusyError(f"step: expected the step before of policy {name!r} to be done, got it waiting")
            policy.waiting = done
            slot = policy.slot_on_host(policy.model.roles["actor"].slot)
            self.engine.renew(slot, policy.state.step + 1, write)
        return done

    # ---- parts -----------------------------------------------------------------------------------------------------

    def _require_free(self, name: str) -> None:
        if _NAME.fullmatch(name) is None:
            raise ValueError(
                f"name: expected at most 100 letters, digits, '.', '_' and '-', first a letter or digit; got {name!r}"
            )
        if name in self:
            raise ValueError(f"name: expected one that is free, got {name!r}")

    def _require_idle(self, name: str, what: str) -> LivePolicy:
        policy = self.get(name)
        if policy.waiting or policy.has_gradient:
            raise ValueError(f"{what}: expected a policy without gradients that wait for a step, got {name!r}")
        return policy

    def _copy(self, origin: LivePolicy, *, trainable: bool) -> HydraModel:
        """A model beside the host with the weights of a policy: all of it, or what draws."""
        model = origin.model
        if model is self.host:
            raise ValueError(f"policy: expected another than the base, which never changes, got {origin.name!r}")
        roles = dict(model.roles) if trainable else {"actor": replace(model.roles["actor"], trainable=False)}
        slots = {role.slot: model.backbone().slot(role.slot).config for role in roles.values() if role.slot is not OFF}
        slots = {slot: replace(config, init_from=None) for slot, config in slots.items()}
        copy = self.host.beside(roles=roles, slots=slots, adapter_dtype=model.adapter_dtype, seed=origin.state.seed)
        for slot in slots:
            copy.backbone().slot(slot).copy_from(model.backbone().slot(slot))
        copy.heads.load_state_dict(model.heads.state_dict() if trainable else {})
        copy.trained_heads = set(model.trained_heads) & set(copy.heads)
        return copy

    def _read(self, name: str, folder: Path) -> LivePolicy:
        """Read a checkpoint whose base is the host's."""
        record = read_record(folder)
        roles = {role: RoleSpec(**fields) for role, fields in record["roles"].items()}
        slots = {slot: peft_io.read_slot_config(folder / held["folder"]) for slot, held in record["slots"].items()}
        dtype = getattr(torch, record["adapter_dtype"])
        model = self.host.beside(roles=roles, slots=slots, adapter_dtype=dtype)
        state = read_counters(folder, PolicyState)
        policy = self._enter(name, model, state)
        try:
            assert policy.optimizer is not None
            load_checkpoint(folder, model, policy.optimizer, PolicyState)
        except ConfigError:
            self._leave(policy)
            raise
        return policy

    def _enter(self, name: str, model: HydraModel, state: PolicyState, *, is_trained: bool = True) -> LivePolicy:
        """Give a model's slots to the host, and its parameters an optimizer where it trains any."""
        actor = model.roles.get("actor")
        if actor is None or actor.slot is OFF or actor.head != LM_HEAD:
            raise ValueError(f"roles: expected a role 'actor' with a slot and an LM head, got {dict(model.roles)}")
        trained = {role: 1.0 for role, spec in model.roles.items() if spec.trainable and is_trained}
        n_bytes = _bytes(model, state.optim if trained else None)
        self._make_room(name, n_bytes)
        model.eval()
        optimizer = None
        if trained:
            optimizer = RoleOptimizer(model, trained, optim=state.optim, seed=state.seed)
        key = f"p{next(self._numbers)}"
        policy = LivePolicy(name=name, key=key, model=model, optimizer=optimizer, state=state, n_bytes=n_bytes)
        policy.used = next(self._uses)
        slots = {f"{key}-{slot}": model.backbone().slot(slot) for slot in model.backbone().slots}
        self.host.add_roles({slot: RoleSpec(slot=slot, head=LM_HEAD) for slot in slots}, slots)
        self.engine.renew(policy.slot_on_host(actor.slot), state.step)
        self._held[name] = policy
        return policy

    def _leave(self, policy: LivePolicy, *, only_idle: bool = False) -> bool:
        """Take a policy's slots from the host; whether it has gone, which one in use does not where `only_idle`."""
        with self._holding:
            if self._held.get(policy.name) is not policy or (only_idle and policy.holders):
                return False
            del self._held[policy.name]
        self.heard(policy)
        slots = [f"{policy.key}-{slot}" for slot in policy.model.backbone().slots]
        for slot in slots:
            self.engine.forget(slot)
        self.host.remove_roles(slots)
        if policy.waiting is not None:
            policy.waiting.set_exception(PolicyRemovedError(f"policy {policy.name!r} was removed before its step"))
        return True

    def _make_room(self, name: str, n_bytes: int) -> None:
        """Evict those not used for longest until one more fits; MemoryLimitError, and nobody goes, where it cannot."""
        held = [policy for policy in self._held.values() if policy.name != BASE]
        idle = [p for p in held if not (p.holders or p.waiting or p.has_gradient or p.optimizer is None)]
        idle.sort(key=lambda policy: policy.used)
        count, total, go = len(held) + 1, sum(policy.n_bytes for policy in held) + n_bytes, list[LivePolicy]()
        while (self.max_policies and count > self.max_policies) or (self.memory and total > self.memory):
            if self.folder is None or not idle:
                limits = {"max_policies": self.max_policies, "memory": self.memory}
                within = " and ".join(f"{limit} {value}" for limit, value in limits.items() if value)
                raise MemoryLimitError(
                    f"policy: expected room for {name!r} of {n_bytes} bytes within {within}, got {len(held)} policies, "
                    f"{len(go) + len(idle)} of which could go"
                )
            go.append(idle.pop(0))
            count, total = count - 1, total - go[-1].n_bytes
        for policy in go:
            self.evict(policy.name)


def promise() -> Future[Any]:
    """A future that whoever waits for it cannot cancel: its result is set all the same."""
    future = Future[Any]()
    future.set_running_or_notify_cancel()
    return future


def fill(future: Future[Any], work: Callable[[], Any]) -> None:
    """Put what the work returns, or raises, into the future."""
    try:
        future.set_result(work())
    except (Exception, SystemExit) as error:  # whoever waits for the future gets it
        future.set_exception(error)


def _bytes(model: HydraModel, optim: Optim | None) -> int:
    """Bytes of a model's own weights, and of gradients and optimizer state if it is trained."""
    total = 0
    for p in (*model.backbone().slots.parameters(), *model.heads.parameters()):
        total += p.numel() * p.element_size()
        if optim is not None and p.requires_grad:
            total += p.numel() * p.element_size()
            layout = state_layout(optim, p.shape, p.dtype).values()
            total += sum(shape.numel() * dtype.itemsize for shape, dtype in layout)
    return total
