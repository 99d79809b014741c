"""Roles of RLHF as slots and heads on backbones, and the lanes they fold into.

A role is (backbone, adapter slot or OFF, head, trainable). Roles that share backbone and slot share a *lane*: one
backbone forward whose hidden states feed several heads. The comparison methods of the Hydra paper
(arXiv 2309.00754) differ only in this table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
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


def hydra_roles(*, reference_slot: str | None = OFF, reward_slot: str | None = OFF) -> dict[str, RoleSpec]:
    """Role table of Hydra-PPO (arXiv 2309.00754, §3 and table 1): one backbone, slots for actor and critic.

    Reference and reward run on the plain backbone or on a frozen slot.

    Args:
        reference_slot: name of a frozen slot for the reference, or OFF for the plain backbone.
        reward_slot: the same for the reward role.

    Returns:
        Roles `actor`, `reference`, `critic` and `reward`, all on backbone `base`.

    Raises:
        ValueError: a slot's name with characters other than letters, digits, `_` and `-`.
    """
    return {
        "actor": RoleSpec(slot="actor", trainable=True),
        "reference": RoleSpec(slot=reference_slot),
        "critic": RoleSpec(slot="critic", head="value", trainable=True),
        "reward": RoleSpec(slot=reward_slot, head="reward"),
    }


def j_hydra_roles(*, reference_slot: str | None = OFF, reward_slot: str | None = OFF) -> dict[str, RoleSpec]:
    """Role table of joint Hydra-PPO (arXiv 2309.00754, §3 and table 1): actor and critic share one slot.

    One backbone forward serves both.

    Args:
        reference_slot: name of a frozen slot for the reference, or OFF for the plain backbone.
        reward_slot: the same for the reward role.

    Returns:
        Roles `actor`, `reference`, `critic` and `reward`, all on backbone `base`.

    Raises:
        ValueError: a slot's name with characters other than letters, digits, `_` and `-`.
    """
    roles = hydra_roles(reference_slot=reference_slot, reward_slot=reward_slot)
    return {**roles, "critic": RoleSpec(slot="actor", head="value", trainable=True)}


def dynamic_lora_roles(*, reference_slot: str | None = OFF, reward_slot: str | None = OFF) -> dict[str, RoleSpec]:
    """Role table of dynamic-LoRA PPO (arXiv 2309.00754, §3 and table 1): two backbones with an adapter each.

    Actor and reference share `base`. Critic and reward share `reward`.

    Args:
        reference_slot: name of a frozen slot for the reference, or OFF for the plain backbone.
        reward_slot: the same for the reward role.

    Returns:
        Roles `actor`, `reference`, `critic` and `reward`, on backbones `base` and `reward`.

    Raises:
        ValueError: a slot's name with characters other than letters, digits, `_` and `-`.
    """
    roles = hydra_roles(reference_slot=reference_slot, reward_slot=reward_slot)
    return {
        **roles,
        "critic": RoleSpec(backbone="reward", slot="critic", head="value", trainable=True),
        "reward": RoleSpec(backbone="reward", slot=reward_slot, head="reward"),
    }


def lora_ppo_roles(*, reference_slot: str | None = OFF, reward_slot: str | None = OFF) -> dict[str, RoleSpec]:
    """Role table of LoRA-PPO (arXiv 2309.00754, §3 and table 1): a backbone per role, adapters on actor and critic.

    Args:
        reference_slot: name of a frozen slot for the reference, or OFF for the plain backbone.
        reward_slot: the same for the reward role.

    Returns:
        Roles `actor` on backbone `base`, and `reference`, `critic` and `reward`, each on a backbone of its own name.

    Raises:
        ValueError: a slot's name with characters other than letters, digits, `_` and `-`.
    """
    return {
        "actor": RoleSpec(slot="actor", trainable=True),
        "reference": RoleSpec(backbone="reference", slot=reference_slot),
        "critic": RoleSpec(backbone="critic", slot="critic", head="value", trainable=True),
        "reward": RoleSpec(backbone="reward", slot=reward_slot, head="reward"),
    }


def full_ppo_roles(*, reference_slot: str | None = OFF, reward_slot: str | None = OFF) -> dict[str, RoleSpec]:
    """Role table of full PPO (arXiv 2309.00754, §3 and table 1): a backbone per role, actor and critic trained whole.

    Args:
        reference_slot: name of a frozen slot for the reference, or OFF for the plain backbone.
        reward_slot: the same for the reward role.

    Returns:
        Roles `actor` on backbone `base`, and `reference`, `critic` and `reward`, each on a backbone of its own name.

    Raises:
        ValueError: a slot's name with characters other than letters, digits, `_` and `-`.
    """
    roles = lora_ppo_roles(reference_slot=reference_slot, reward_slot=reward_slot)
    return {
        **roles,
        "actor": RoleSpec(trainable=True),
        "critic": RoleSpec(backbone="critic", head="value", trainable=True),
    }


METHODS: Mapping[str, Callable[..., dict[str, RoleSpec]]] = {
    "full_ppo": full_ppo_roles,
    "lora_ppo": lora_ppo_roles,
    "dynamic_lora_ppo": dynamic_lora_roles,
    "j_hydra_ppo": j_hydra_roles,
    "hydra_ppo": hydra_roles,
}
"""The five methods of the Hydra paper (arXiv 2309.00754, §3 and table 1) by name, from most to least frozen weights."""


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
