"""Models that answer: policies on one backbone, and where asked for a reward model on the same backbone."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PreTrainedModel

from rlhf_engine.config import EvaluateConfig, GenerateConfig
from rlhf_engine.devices import DTYPES, resolve_device
from rlhf_engine.hydra import OFF, HydraModel, RoleSpec, peft_io, reward_model
from rlhf_engine.hydra.heads import ScalarHead


def build_answer_model(
    config: GenerateConfig | EvaluateConfig, adapters: Mapping[str, str | None], *, reward_for: str | None = None
) -> HydraModel:
    """Build the policies of a command, each a slot of the base.

    Args:
        config: options that name the base, the reward model, dtype and device.
        adapters: role → PEFT folder of its adapter, or None for the base alone.
        reward_for: option that wants a role `reward`, for messages; None: there is no such role.

    Returns:
        The model.

    Raises:
        ConfigError: folders that cannot serve.
    """
    dtype, device = DTYPES[config.dtype], resolve_device(config.device)
    roles = {role: RoleSpec(slot=role if folder else OFF) for role, folder in adapters.items()}
    slots = {role: peft_io.read_slot_config(folder) for role, folder in adapters.items() if folder}
    base: str | PreTrainedModel = config.model_name_or_path
    others: dict[str, str | PreTrainedModel] = {}
    if reward_for is None:
        return HydraModel.from_pretrained(base, roles=roles, slots=slots, dtype=dtype, device=device)
    source = config.reward_adapter or config.reward_model_path or config.model_name_or_path
    head = reward_model.require_reward_head(source, reward_for)
    if config.reward_adapter is not None:
        slots["reward"] = peft_io.read_slot_config(config.reward_adapter)
    place = "base"
    if config.reward_model_path is not None:
        base, other = reward_model.load_beside(
            config.model_name_or_path, config.reward_model_path, dtype=dtype, device=device
        )
        if other is not None:
            others, place = {"reward": other}, "reward"
    roles["reward"] = RoleSpec(backbone=place, slot="reward" if config.reward_adapter else OFF, head="reward")
    model = HydraModel.from_pretrained(base, roles=roles, slots=slots, backbones=others, dtype=dtype, device=device)
    scalar_head = model.heads["reward"]
    assert isinstance(scalar_head, ScalarHead)
    reward_model.load_reward_head(scalar_head, head, reward_for)
    return model
