"""The model behind `rlhf-engine generate`: a policy, and where asked for a reward model on the same backbone."""

from __future__ import annotations

from transformers import PreTrainedModel

from rlhf_engine.config import GenerateConfig
from rlhf_engine.devices import DTYPES, resolve_device
from rlhf_engine.hydra import OFF, HydraModel, RoleSpec, peft_io, reward_model
from rlhf_engine.hydra.heads import ScalarHead


def build_answer_model(config: GenerateConfig) -> HydraModel:
    """Roles `actor` and, with `best_of`, `reward`. Raises ConfigError for folders that cannot serve."""
    dtype, device = DTYPES[config.dtype], resolve_device(config.device)
    roles = {"actor": RoleSpec(slot="actor" if config.adapter else OFF)}
    slots = {"actor": peft_io.read_slot_config(config.adapter)} if config.adapter else {}
    base: str | PreTrainedModel = config.model_name_or_path
    others: dict[str, str | PreTrainedModel] = {}
    if config.best_of is None:
        return HydraModel.from_pretrained(base, roles=roles, slots=slots, dtype=dtype, device=device)
    source = config.reward_adapter or config.reward_model_path or config.model_name_or_path
    head = reward_model.require_reward_head(source, "best_of")
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
    found = model.heads["reward"]
    assert isinstance(found, ScalarHead)
    reward_model.load_reward_head(found, head, "best_of")
    return model
