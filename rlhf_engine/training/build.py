"""From a configuration to a model: which roles, which slots, which adapters they start from."""

from __future__ import annotations

import dataclasses

from rlhf_engine.config import PPOConfig, SFTConfig
from rlhf_engine.devices import DTYPES, resolve_device
from rlhf_engine.errors import ConfigError
from rlhf_engine.hydra import HydraModel, RoleSpec, SlotConfig, hydra_roles, j_hydra_roles, peft_io
from rlhf_engine.hydra.bank import ALL_LINEAR
from rlhf_engine.hydra.roles import OFF

_ROLE_TABLES = {"hydra_ppo": hydra_roles, "j_hydra_ppo": j_hydra_roles}


def slot_config(config: PPOConfig | SFTConfig) -> SlotConfig:
    """The shape of a fresh slot."""
    named = config.lora_target_modules
    targets: str | tuple[str, ...] = tuple(named) if isinstance(named, list) else (named,)
    if named == ALL_LINEAR:
        targets = ALL_LINEAR
    return SlotConfig(r=config.lora_r, alpha=config.lora_alpha, dropout=config.lora_dropout, target_modules=targets)


def ppo_roles(config: PPOConfig) -> dict[str, RoleSpec]:
    """The role table of the configured method; the reward role only where the learned reward is asked for."""
    roles = _ROLE_TABLES[config.method](
        reference_slot="sft" if config.reference_adapter else OFF,
        reward_slot="reward" if config.reward_adapter else OFF,
    )
    if "lane" not in config.reward_funcs:
        del roles["reward"]
    return roles


def build_ppo_model(config: PPOConfig) -> HydraModel:
    """Backbone, slots and heads for PPO.

    With `reference_adapter` and no `actor_adapter`, the actor starts as a copy of the reference: "adapter off" is then
    the base model, not the policy that supervised training made.
    """
    roles = ppo_roles(config)
    slots: dict[str, SlotConfig] = {"actor": slot_config(config)}
    if config.reference_adapter is not None:
        slots["sft"] = peft_io.read_slot_config(config.reference_adapter)
    if config.actor_adapter is not None:
        slots["actor"] = peft_io.read_slot_config(config.actor_adapter)
    elif config.reference_adapter is not None:
        slots["actor"] = dataclasses.replace(slots["sft"], init_from="sft", dropout=config.lora_dropout)
    if config.reward_adapter is not None:
        slots["reward"] = peft_io.read_slot_config(config.reward_adapter)
    if roles["critic"].slot == "critic":
        slots["critic"] = slot_config(config)
        if config.critic_init == "actor":
            slots["critic"] = dataclasses.replace(slots["actor"], init_from="actor")
    head_source = config.reward_adapter or config.model_name_or_path
    if "reward" in roles and "reward" not in peft_io.head_names(head_source):
        # also where the base has a reward head: it was not trained on this adapter's hidden states
        raise ConfigError(
            f"reward_funcs: expected a trained reward head for 'lane' in {peft_io.HEADS_FILE} of {head_source!r}, "
            "got none"
        )
    model = HydraModel.from_pretrained(
        config.model_name_or_path,
        roles=roles,
        slots=slots,
        dtype=DTYPES[config.dtype],
        device=resolve_device(config.device),
        token_budget=config.token_budget,
        seed=config.seed,
    )
    if config.reward_adapter is not None:
        model.trained_heads |= peft_io.load_heads_if_present(model.heads, config.reward_adapter)
    if config.gradient_checkpointing:
        model.backbone("base").enable_gradient_checkpointing()
    return model
