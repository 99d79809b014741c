"""Builds a run's model from its configuration: roles, backbones, slots, and what each starts from."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rlhf_kernels.runtime import registry
from torch import distributed as dist
from transformers import PreTrainedModel

from rlhf_engine.config import TrainConfig
from rlhf_engine.config.run import TrainingOptions, adapter_dtype
from rlhf_engine.devices import DTYPES, SECONDS, World, resolve_device, return_freed_memory
from rlhf_engine.errors import ConfigError
from rlhf_engine.hub import plain_name
from rlhf_engine.hydra import HydraModel, RoleSpec, SlotConfig, hydra_roles, peft_io, reward_model
from rlhf_engine.hydra.gate import ScalarHead
from rlhf_engine.hydra.loading import Quantization, read_config, require_bitsandbytes, require_lm_head
from rlhf_engine.hydra.model import default_token_budget
from rlhf_engine.hydra.persist import require_savable
from rlhf_engine.hydra.roles import OFF
from rlhf_engine.hydra.sharding import ShardedBase

BEHAVIOUR = "behaviour"
"""Role and slot that draw answers beside the learner: a copy of the actor's slot, which the learner does not touch."""
PAST = "past"  # role and slot of the policy that drew the answers of a step


def slot_config(config: TrainingOptions) -> SlotConfig:
    """The shape of a fresh slot."""
    return SlotConfig(
        r=config.lora_r,
        alpha=config.lora_alpha,
        dropout=config.lora_dropout,
        target_modules=config.lora_target_modules,
    )


def ppo_roles(config: TrainConfig) -> dict[str, RoleSpec]:
    """The role table of the configured method; critic and reward role only where they are asked for."""
    roles = hydra_roles(
        config.method,
        reference_slot="sft" if config.reference_adapter else OFF,
        reward_slot="reward" if config.reward_adapter else OFF,
    )
    if "reward_model" not in config.reward_funcs:
        del roles["reward"]
    if not config.has_critic:
        del roles["critic"]
    return roles


def build_policy_model(config: TrainConfig, base: HydraModel | None = None) -> HydraModel:
    """Models of an RL run; with a reference_adapter alone the actor starts as a copy of the reference."""
    roles = ppo_roles(config)
    if config.is_async:
        roles |= _copies_of_the_actor(roles["actor"])
    model = _load(config, roles, list(roles), base)
    require_savable(model)
    if config.critic_init == "reward":
        _start_critic_as_reward(model)
    if config.gradient_checkpointing:
        for name in {role.backbone for role in model.roles.values() if role.trainable}:
            model.backbone(name).enable_gradient_checkpointing()
    return model


def loading_device(config: TrainingOptions) -> torch.device:
    """Device that a run's model is loaded on: a base that is to be sharded need not fit into the memory of one."""
    return torch.device("cpu") if config.shard_base else resolve_device(config.device)


def shard_base(
    model: HydraModel, config: TrainingOptions, world: World
) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Share a model's backbones out among the ranks; the result makes the block in which each rank draws alone."""
    group = dist.new_group(timeout=timedelta(seconds=SECONDS))
    base = ShardedBase(model, group, world.device)
    return_freed_memory()
    model.token_budget = default_token_budget(model.device, model.backbone().hidden_size)
    scores_alone = isinstance(config, TrainConfig) and bool(config.vllm_servers)
    return functools.partial(base.in_step, world) if scores_alone else base.whole


def build_generator_model(config: TrainConfig) -> HydraModel:
    """Build the model of a generator process: a fresh slot for the policy that draws, and the frozen roles."""
    roles = ppo_roles(config)
    roles |= _copies_of_the_actor(roles["actor"])
    kept = [BEHAVIOUR, *(["reference"] if config.kl_estimator != "exact" else [])]
    return _load(config, roles, [*kept, "reward"] if "reward" in roles else kept)


def _load(
    config: TrainConfig, table: dict[str, RoleSpec], names: list[str], base: HydraModel | None = None
) -> HydraModel:
    """The named roles of a role table, with the slots and backbones that they need."""
    check_sources(config)
    roles = {name: table[name] for name in names}
    head = _reward_head(config, roles)
    used = {role.slot for role in roles.values()}
    slots = {name: slot for name, slot in _slots(config, table).items() if name in used}
    if "actor" not in roles:  # what starts as a copy of its slot gets its weights later
        for role in roles.values():
            if role.transient and role.slot is not None:
                slots[role.slot] = dataclasses.replace(slots[role.slot], init_from=None)
    dtype, quantization = DTYPES[config.dtype], config.quantization
    device = loading_device(config)
    own: dict[str, Any] = {"slots": slots, "adapter_dtype": DTYPES[adapter_dtype(config.optim)], "seed": config.seed}
    if base is not None:
        _require_base(config, base, roles, device)
        model = base.beside(roles=roles, **own)
        for name in model.backbones:
            model.backbone(name).kernels = registry.current()
    else:
        sources = _sources(config, roles, dtype, device, quantization)
        model = HydraModel.from_pretrained(
            sources.base, roles=sources.roles, backbones=sources.others, dtype=dtype, device=device,
            quantization=quantization, **own,
        )  # fmt: skip
    if head is not None:
        reward_model.load_reward_head(_head(model, "reward"), head, "reward_funcs: 'reward_model'")
        model.trained_heads.add("reward")
    return model


def _require_base(config: TrainConfig, base: HydraModel, roles: dict[str, RoleSpec], device: torch.device) -> None:
    """Raise ConfigError for options that ask for another base than the given one."""
    lacking = {role.backbone for role in roles.values()} - base.backbones.keys()
    if lacking:
        raise ConfigError(
            f"method: expected one whose backbones the given model has, {sorted(base.backbones)}, got {config.method!r}"
        )
    backbone = base.backbone()
    source = None if backbone.source is None else plain_name(backbone.source)
    expected = {
        "model_name_or_path": (source, plain_name(config.model_name_or_path)),
        "dtype": (backbone.dtype, DTYPES[config.dtype]),
        "device": (base.device, device),
        "quantization": (backbone.quantized, config.quantization != "none"),
        "reward_model_path": (None, config.whole_reward_model),
        "shard_base": (False, config.shard_base),
    }
    for option, (theirs, ours) in expected.items():
        if theirs != ours:
            raise ConfigError(f"{option}: expected that of the given model, {theirs}, got {ours}")


@dataclass(frozen=True, kw_only=True)
class _Sources:
    """The source of each backbone, and the role table that fits what was found."""

    base: str | PreTrainedModel
    others: dict[str, str | PreTrainedModel]
    roles: dict[str, RoleSpec]


def _sources(
    config: TrainConfig,
    roles: dict[str, RoleSpec],
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization,
) -> _Sources:
    base = config.model_name_or_path
    reward = config.whole_reward_model
    # in the roles' order: slots are initialised backbone by backbone, from one stream of random numbers
    names = [name for name in dict.fromkeys(role.backbone for role in roles.values()) if name != "base"]
    # a backbone without a folder of its own starts as another copy of the base
    others: dict[str, str | PreTrainedModel] = dict.fromkeys(names, base)
    if reward is None:
        return _Sources(base=base, others=others, roles=roles)
    if "reward" in names:
        others["reward"] = reward
        if "critic" in names and config.critic_init == "reward":
            others["critic"] = reward
        return _Sources(base=base, others=others, roles=roles)
    # one backbone: it serves the reward model as well if that has the same backbone
    plain, other = reward_model.load_beside(base, reward, dtype=dtype, device=device, quantization=quantization)
    if other is None:
        return _Sources(base=plain, others={}, roles=roles)
    if config.critic_init == "reward":
        raise ConfigError(
            f"critic_init: expected 'base' or 'actor' for {config.method}, whose critic runs on the base, where the "
            f"reward model {reward!r} has other weights than the base; got 'reward'"
        )
    roles = {**roles, "reward": dataclasses.replace(roles["reward"], backbone="reward")}
    return _Sources(base=plain, others={"reward": other}, roles=roles)


def _slots(config: TrainConfig, roles: dict[str, RoleSpec]) -> dict[str, SlotConfig]:
    """Shapes and origins of the slots that the role table uses."""
    slots: dict[str, SlotConfig] = {}
    if config.reference_adapter is not None:
        slots["sft"] = peft_io.read_slot_config(config.reference_adapter)
    if config.reward_adapter is not None:
        slots["reward"] = peft_io.read_slot_config(config.reward_adapter)
    if roles["actor"].slot == "actor":
        slots["actor"] = slot_config(config)
        origin = config.actor_adapter or config.reference_adapter
        if config.actor_adapter is not None:
            slots["actor"] = peft_io.read_slot_config(config.actor_adapter)
        elif origin is not None:
            # from its folder rather than from the slot, which may be on another backbone
            slots["actor"] = dataclasses.replace(peft_io.read_slot_config(origin), dropout=config.lora_dropout)
    if "critic" in roles and roles["critic"].slot == "critic":
        slots["critic"] = slot_config(config)
        if config.critic_init == "actor":
            same_backbone = roles["critic"].backbone == roles["actor"].backbone
            origin = "actor" if same_backbone else slots["actor"].init_from
            slots["critic"] = dataclasses.replace(slots["actor"], init_from=origin)
        elif config.critic_init == "reward" and "reward" in slots:
            # its folder again, because the reward slot may be on another copy of the backbone
            slots["critic"] = dataclasses.replace(slots["reward"], dropout=config.lora_dropout)
    for role in roles.values():
        if role.transient and role.slot is not None:
            slots[role.slot] = dataclasses.replace(slots["actor"], init_from="actor")
    return slots


def _copies_of_the_actor(actor: RoleSpec) -> dict[str, RoleSpec]:
    """Roles of policies as they were: the one that draws, and the one whose answers are learned from."""
    copy = dataclasses.replace(actor, trainable=False, transient=True)
    return {name: dataclasses.replace(copy, slot=name) for name in (BEHAVIOUR, PAST)}


def _reward_head(config: TrainConfig, roles: dict[str, RoleSpec]) -> dict[str, torch.Tensor] | None:
    """The trained reward head that the learned reward needs; None if the learned reward is not asked for."""
    if "reward" not in roles:
        return None
    source = config.reward_model_path or config.model_name_or_path
    return reward_model.require_reward_head(source, "reward_funcs: 'reward_model'")


def _start_critic_as_reward(model: HydraModel) -> None:
    """Copy the reward head's numbers into the value head: two tensors, of which one is trained."""
    value, reward = _head(model, "value"), _head(model, "reward")
    if value.weight.shape != reward.weight.shape:
        raise ConfigError(
            f"critic_init: expected a reward head of the critic's width {tuple(value.weight.shape)}, got "
            f"{tuple(reward.weight.shape)}"
        )
    value.load_state_dict(reward.state_dict())


def _head(model: HydraModel, name: str) -> ScalarHead:
    head = model.heads[name]
    assert isinstance(head, ScalarHead)
    return head


def check_sources(config: TrainConfig) -> None:
    """Raise ConfigError or ValueError for folders that cannot serve, as far as their configs and hashes tell."""
    if config.quantization != "none":
        require_bitsandbytes("quantization", "none", config.quantization)
    base = read_config(config.model_name_or_path)
    require_lm_head(base, config.model_name_or_path)
    if config.method == "full_ppo" and getattr(base, "quantization_config", None) is not None:
        raise ConfigError(
            "model_name_or_path: expected a base that is not quantised for full_ppo, which trains whole backbones, got "
            f"{config.model_name_or_path!r} whose config has a quantization_config"
        )
    _check_adapters(config)


def _check_adapters(config: TrainConfig) -> None:
    """Adapters must all be of one base: by its hash where they have recorded one, else by the last part of its name."""
    given = {option: getattr(config, option) for option in ("actor_adapter", "reference_adapter")}
    given["reward_model_path"] = config.reward_adapter
    recorded = {option: peft_io.recorded_base(folder) for option, folder in given.items() if folder is not None}
    hashes = {option: digest for option, (_, digest) in recorded.items() if digest}
    if len(set(hashes.values())) > 1:
        listed = ", ".join(f"{option} of hash {digest[:12]}…" for option, digest in hashes.items())
        raise ConfigError(f"{next(iter(hashes))}: expected adapters of one base, got {listed}")
    names = {option: Path(name).name for option, (name, _) in recorded.items() if name}
    one_base = {names[option] for option in hashes if option in names}  # equal hashes say that these are one
    for option in names.keys() - hashes.keys():
        if one_base and names[option] not in one_base:
            listed = ", ".join(f"{other} of {name!r}" for other, name in names.items())
            raise ConfigError(
                f"{next(iter(names))}: expected adapters of one base, got {listed}; if these are one and the same, "
                f"correct base_model_name_or_path in {peft_io.CONFIG_FILE}"
            )
        one_base.add(names[option])
