"""The models of the rollout benchmarks: the same weights for our engine, for transformers and for PEFT."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from rlhf_engine.errors import ConfigError
from rlhf_engine.hydra import OFF, HydraModel, RoleSpec, SlotConfig
from rlhf_engine.hydra.loading import load_model, model_folder

RANK = 16
_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

CONFIGS: dict[str, dict[str, Any]] = {
    "llama-41m": {
        "hidden_size": 512,
        "intermediate_size": 1344,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "vocab_size": 32000,
    },
    "llama-260k": {
        "hidden_size": 64,
        "intermediate_size": 172,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 512,
    },
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Models:
    """One set of weights."""

    name: str
    ours: HydraModel
    """Roles `actor`, with a LoRA of rank 16 on every linear of its blocks, and `reference`, without one."""
    plain: PreTrainedModel
    peft: torch.nn.Module
    """`plain`'s weights again, with the actor's adapter."""

    @property
    def vocabulary(self) -> int:
        return int(self.plain.config.vocab_size)


def make_models(name: str, dtype: torch.dtype, device: torch.device) -> Models:
    """A configuration of `CONFIGS` with random weights, or a model folder of the Llama kind."""
    from peft import LoraConfig, get_peft_model

    if name in CONFIGS:
        torch.manual_seed(0)
        config = LlamaConfig(**CONFIGS[name], max_position_embeddings=2048, tie_word_embeddings=True)
        plain = AutoModelForCausalLM.from_config(config, dtype=dtype)
    else:
        try:
            model_folder(name)
            plain = load_model(name, dtype=dtype, device=device)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    plain = plain.to(device).eval()
    plain.generation_config.eos_token_id = None
    theirs = copy.deepcopy(plain)
    ours = HydraModel.from_pretrained(
        copy.deepcopy(plain),
        roles={"actor": RoleSpec(slot="actor", trainable=True), "reference": RoleSpec(slot=OFF)},
        slots={"actor": SlotConfig(r=RANK, alpha=2 * RANK)},
        device=device,
    ).eval()
    peft = get_peft_model(
        theirs, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=_TARGETS, task_type="CAUSAL_LM")
    ).eval()
    _same_adapter(ours, peft)
    return Models(name=name.rstrip("/").rpartition("/")[2], ours=ours, plain=plain, peft=peft)


@torch.no_grad()
def _same_adapter(ours: HydraModel, peft: torch.nn.Module) -> None:
    """A trained adapter's worth of numbers on both sides."""
    generator = torch.Generator().manual_seed(1)
    modules = dict(peft.base_model.model.named_modules())  # type: ignore[union-attr, operator]
    for path, pair in ours.backbone().slot("actor").items():
        for name, parameter in (("lora_A", pair.A), ("lora_B", pair.B)):
            parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
            getattr(modules[path], name)["default"].weight.copy_(parameter)
