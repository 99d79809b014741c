"""Roles of RLHF as slots and heads on backbones, and the lanes they fold into.

A role is (backbone, adapter slot or OFF, head, trainable). Roles that share backbone and slot share a *lane*: one
traversal of the trunk whose hidden states feed several heads. The comparison methods of the Hydra paper
(arXiv 2309.00754) differ only in this table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

OFF = None
"""The slot of a role that runs on the plain frozen backbone."""

LM_HEAD = "lm"
"""The head name that stands for the backbone's own output embedding; every other name is a scalar head."""


@dataclass(frozen=True, kw_only=True)
class RoleSpec:
    """One role: where it runs, what reads its hidden states, and whether RL trains it."""

    backbone: str = "base"
    """Name of the backbone that the role runs on."""
    slot: str | None = OFF
    """Adapter slot on that backbone, or OFF for the plain backbone."""
    head: str = LM_HEAD
    """`lm`, or the name of a scalar head (`value`, `reward`, …)."""
    trainable: bool = False
    """Whether the role's slot and scalar head receive gradients."""

    def __post_init__(self) -> None:
        names = {"backbone": self.backbone, "head": self.head, **({} if self.slot is OFF else {"slot": self.slot})}
        for field, name in names.items():
            # names become parameter names and folders; a dot or a slash would be read as a path
            if not isinstance(name, str) or re.fullmatch(r"[A-Za-z0-9_\-]+", name) is None:
                raise ValueError(f"{field}: expected a name of letters, digits, '_' and '-', got {name!r}")


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One traversal of one trunk: the roles that read its hidden states."""

    backbone: str
    slot: str | None
    roles: tuple[str, ...]


Roles = Mapping[str, RoleSpec]


def hydra_roles(*, reference_slot: str | None = OFF, reward_slot: str | None = OFF) -> dict[str, RoleSpec]:
    """Hydra-PPO: one backbone, an actor slot and a critic slot; reference and reward are OFF or frozen slots."""
    return {
        "actor": RoleSpec(slot="actor", trainable=True),
        "reference": RoleSpec(slot=reference_slot),
        "critic": RoleSpec(slot="critic", head="value", trainable=True),
        "reward": RoleSpec(slot=reward_slot, head="reward"),
    }


def j_hydra_roles(*, reference_slot: str | None = OFF, reward_slot: str | None = OFF) -> dict[str, RoleSpec]:
    """Joint Hydra-PPO: actor and critic share one slot, so that one traversal serves both."""
    roles = hydra_roles(reference_slot=reference_slot, reward_slot=reward_slot)
    return {**roles, "critic": RoleSpec(slot="actor", head="value", trainable=True)}


def fold_lanes(roles: Roles, names: Iterable[str]) -> tuple[Lane, ...]:
    """Lanes that serve the named roles, in order of first use. Raises ValueError for an unknown role."""
    grouped: dict[tuple[str, str | None], list[str]] = {}
    for name in names:
        spec = require_role(roles, name)
        members = grouped.setdefault((spec.backbone, spec.slot), [])
        if name not in members:
            members.append(name)
    return tuple(Lane(backbone=b, slot=s, roles=tuple(members)) for (b, s), members in grouped.items())


def require_role(roles: Roles, name: str) -> RoleSpec:
    """The named role, or ValueError with the names there are."""
    if name not in roles:
        raise ValueError(f"role: expected one of {sorted(roles)}, got {name!r}")
    return roles[name]


def trainable_slots(roles: Roles, backbone: str) -> frozenset[str]:
    """Slots of a backbone that some trainable role uses."""
    return frozenset(r.slot for r in roles.values() if r.backbone == backbone and r.slot is not OFF and r.trainable)


def trainable_heads(roles: Roles) -> frozenset[str]:
    """Scalar heads that some trainable role uses."""
    return frozenset(r.head for r in roles.values() if r.head != LM_HEAD and r.trainable)


def base_is_trained(roles: Roles, backbone: str) -> bool:
    """Whether a role trains the backbone itself (slot OFF and trainable), as in full fine-tuning."""
    return any(r.backbone == backbone and r.slot is OFF and r.trainable for r in roles.values())
