"""Roles of RLHF as slots and heads on backbones, and the lanes they fold into.

A role is (backbone, adapter slot or OFF, head, trainable). Roles that share backbone and slot share a *lane*: one
backbone forward whose hidden states feed several heads. The comparison methods of the Hydra paper
(arXiv 2309.00754) differ only in this table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

OFF = None  # the slot of a role that runs on the plain frozen backbone

LM_HEAD = "lm"  # the head name that stands for the backbone's own output embedding; every other name is a scalar head


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
    transient: bool = False
    """Whether the role's slot holds copies of another's for the time being, which nobody saves."""

    def __post_init__(self) -> None:
        names = {"backbone": self.backbone, "head": self.head, **({} if self.slot is OFF else {"slot": self.slot})}
        if self.transient and (self.trainable or self.slot is OFF):
            raise ValueError("transient: expected false for a role that is trained or has no slot, got true")
        for field, name in names.items():
            # names become parameter names and folders; a dot or a slash would be read as a path
            if not isinstance(name, str) or re.fullmatch(r"[A-Za-z0-9_\-]+", name) is None:
                raise ValueError(f"{field}: expected a name of letters, digits, '_' and '-', got {name!r}")


Lane = tuple[str, str | None]
"""One backbone forward: names of the backbone and of its slot."""

Roles = Mapping[str, RoleSpec]


METHODS = ("full_ppo", "lora_ppo", "dynamic_lora_ppo", "j_hydra_ppo", "hydra_ppo")
"""The five methods of the Hydra paper (arXiv 2309.00754, §3 and table 1), from most to least frozen weights."""


def hydra_roles(
    method: str = "hydra_ppo", *, reference_slot: str | None = OFF, reward_slot: str | None = OFF
) -> dict[str, RoleSpec]:
    """Role table of a method of the Hydra paper (arXiv 2309.00754, §3 and table 1).

    | method | backbones | trained |
    |---|---|---|
    | hydra_ppo | one | slots `actor` and `critic` |
    | j_hydra_ppo | one | slot `actor`, for actor and critic: one forward serves both |
    | dynamic_lora_ppo | `base` for actor and reference, `reward` for critic and reward | a slot on each |
    | lora_ppo | one for each role | slots `actor` and `critic` |
    | full_ppo | one for each role | the backbones of actor and critic |

    Args:
        method: one of `METHODS`.
        reference_slot: name of a frozen slot for the reference, or OFF for the plain backbone.
        reward_slot: the same for the reward role.

    Returns:
        Roles `actor`, `reference`, `critic` and `reward`. The actor's backbone is `base`.

    Raises:
        ValueError: another method, or a slot's name with characters other than letters, digits, `_` and `-`.
    """
    if method not in METHODS:
        raise ValueError(f"method: expected one of {METHODS}, got {method!r}")
    apart, whole = method in ("full_ppo", "lora_ppo"), method == "full_ppo"
    of_reward = "reward" if apart or method == "dynamic_lora_ppo" else "base"
    critic = OFF if whole else "actor" if method == "j_hydra_ppo" else "critic"
    return {
        "actor": RoleSpec(slot=OFF if whole else "actor", trainable=True),
        "reference": RoleSpec(backbone="reference" if apart else "base", slot=reference_slot),
        "critic": RoleSpec(backbone="critic" if apart else of_reward, slot=critic, head="value", trainable=True),
        "reward": RoleSpec(backbone=of_reward, slot=reward_slot, head="reward"),
    }


def needs_lm_head(roles: Roles, backbone: str) -> bool:
    """Whether a role reads a backbone's hidden states with its LM head."""
    return any(r.backbone == backbone and r.head == LM_HEAD for r in roles.values())


def fold_lanes(roles: Roles, names: Iterable[str]) -> dict[Lane, list[str]]:
    """The named roles by lane, in order of first use. Raises ValueError for an unknown role."""
    lanes: dict[Lane, list[str]] = {}
    for name in dict.fromkeys(names):
        spec = require_role(roles, name)
        lanes.setdefault((spec.backbone, spec.slot), []).append(name)
    return lanes


def require_role(roles: Roles, name: str) -> RoleSpec:
    """The named role, or ValueError with the names there are."""
    if name not in roles:
        raise ValueError(f"role: expected one of {sorted(roles)}, got {name!r}")
    return roles[name]


def lasting(roles: Roles) -> dict[str, RoleSpec]:
    """Roles that are saved."""
    return {name: role for name, role in roles.items() if not role.transient}


def lasting_slots(roles: Roles) -> frozenset[str]:
    """Slots that are saved: those of some role that is."""
    return frozenset(role.slot for role in lasting(roles).values() if role.slot is not OFF)


def trainable_slots(roles: Roles, backbone: str) -> frozenset[str]:
    """Slots of a backbone that some trainable role uses."""
    return frozenset(r.slot for r in roles.values() if r.backbone == backbone and r.slot is not OFF and r.trainable)


def trainable_heads(roles: Roles) -> frozenset[str]:
    """Scalar heads that some trainable role uses."""
    return frozenset(r.head for r in roles.values() if r.head != LM_HEAD and r.trainable)


def base_is_trained(roles: Roles, backbone: str) -> bool:
    """Whether a role trains the backbone itself (slot OFF and trainable), as in full fine-tuning."""
    return any(r.backbone == backbone and r.slot is OFF and r.trainable for r in roles.values())
