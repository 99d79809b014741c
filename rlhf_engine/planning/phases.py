"""The phases of a step run on models without data: what a plan is for, the model of a method, a trace of each phase."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from rlhf_engine.algorithms.base import TokenValues
from rlhf_engine.algorithms.ppo import Ppo
from rlhf_engine.config.algorithm import AlgorithmOptions
from rlhf_engine.config.plan import PlanConfig
from rlhf_engine.config.training import Optim
from rlhf_engine.devices import DTYPES
from rlhf_engine.errors import ConfigError
from rlhf_engine.hydra import METHODS, HydraModel, LmLoss, PackedBatch, RoleSpec, SlotConfig
from rlhf_engine.hydra.attention import SHARING, can_share
from rlhf_engine.hydra.backbone import Backbone
from rlhf_engine.hydra.batch import SharedRows
from rlhf_engine.hydra.loading import can_be_headless, context_length
from rlhf_engine.hydra.model import default_token_budget
from rlhf_engine.hydra.roles import base_is_trained, needs_lm_head
from rlhf_engine.planning.fit import FULL_SFT as FULL_SFT
from rlhf_engine.planning.fit import Step
from rlhf_engine.planning.presets import find_config
from rlhf_engine.planning.tracing import Timeline, traced
from rlhf_engine.policy.adamw import gradient_dtype
from rlhf_engine.rollout import SamplingConfig, generate
from rlhf_engine.training.update import Schedule, update

ROLES = ("actor", "reference", "critic", "reward")


def roles_of(method: str) -> dict[str, RoleSpec]:
    """The role table of a method of RL, or of `full_sft`."""
    return {"sft": RoleSpec(trainable=True)} if method == FULL_SFT else METHODS[method]()


@dataclass(frozen=True, kw_only=True)
class Setting(Step):
    """Setting that a plan is made for; names as in TrainConfig."""

    config: PreTrainedConfig
    dtype: torch.dtype
    adapter_dtype: torch.dtype
    device_type: str
    """`cuda` or `cpu`: which kernels run."""
    slot: SlotConfig
    gradient_checkpointing: bool
    optim: Optim = "adamw"


def make_setting(config: PlanConfig) -> Setting:
    """Setting of the planner for the options. Raises ConfigError for a model that is none."""
    named = config.lora_target_modules
    targets = named if named == "all-linear" else tuple(named) if isinstance(named, list) else (named,)
    found = find_config(config.model)
    budget = config.token_budget
    if budget is None:
        budget = default_token_budget(torch.device(config.device), found.get_text_config().hidden_size)
    return Setting(
        config=found,
        dtype=DTYPES[config.dtype],
        adapter_dtype=DTYPES[config.adapter_dtype],
        optim=config.optim,
        device_type=config.device,
        slot=SlotConfig(r=config.lora_r, dropout=config.lora_dropout, target_modules=targets),
        prompt_length=config.max_prompt_length,
        completion_length=config.max_completion_length,
        batch=config.share,
        processes=config.processes,
        num_generations=config.num_generations,
        num_mini_batches=config.num_mini_batches,
        micro_batch=config.per_device_train_batch_size,
        token_budget=budget,
        gradient_checkpointing=config.gradient_checkpointing,
    )


# ---- models without data ---------------------------------------------------------------------------------------------


def check_setting(setting: Setting) -> None:
    text = setting.config.get_text_config()
    if getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None):
        raise ConfigError(
            f"model: expected an architecture whose memory follows from shapes, got {setting.config.model_type!r}, a "
            "mixture of experts, where it depends on the routing"
        )
    limit = context_length(setting.config)
    if setting.length > limit:
        raise ConfigError(
            f"max_completion_length: expected prompt and answer within the model's context of {limit} tokens, got "
            f"{setting.prompt_length} + {setting.completion_length}"
        )


def layer_period(config: PreTrainedConfig) -> int | None:
    """Number of layers after which a model repeats itself; None where a config does not say so plainly."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    if getattr(text, "first_k_dense_replace", None) or getattr(text, "mlp_only_layers", None):
        return None
    if not kinds:
        return 1
    for period in range(1, len(kinds) // 2 + 1):
        if len(kinds) % period == 0 and all(kind == kinds[i % period] for i, kind in enumerate(kinds)):
            return period
    return None


def shallow(config: PreTrainedConfig, n_layers: int) -> PreTrainedConfig:
    """The config of a model with the first `n_layers` layers."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    if text.num_hidden_layers != n_layers:
        kinds = getattr(text, "layer_types", None)
        text.num_hidden_layers = n_layers
        if kinds:
            text.layer_types = list(kinds[:n_layers])
    return config


def plain_model(config: PreTrainedConfig, dtype: torch.dtype, lm_head: bool) -> PreTrainedModel:
    """A model as `loading.load_model` makes it, with random weights."""
    config = copy.deepcopy(config)
    loader: Any = AutoModelForCausalLM
    headless = not lm_head and can_be_headless(config)
    if headless:
        loader = AutoModelForSequenceClassification
        config.num_labels = 1
    model: PreTrainedModel = loader.from_config(config, dtype=dtype)
    if headless:
        model.score = nn.Identity()
    return model


class Planned(HydraModel):
    """A model without data. Its batches share prompts where a CPU would; tokens without data do not say so."""

    alike: int = 1
    """Neighbours in a batch that are answers to one prompt."""

    def shared_rows(self, batch: PackedBatch) -> SharedRows | None:
        """Rows by which a batch goes through a backbone. See `HydraModel.shared_rows`.

        Args:
            batch: N sequences without data.

        Returns:
            The rows; None where no prompt is shared.
        """
        vars(batch)["prompts_N"] = tuple(i // self.alike for i in range(batch.n_sequences))
        return batch.shared if self.shares_prompts else None


def shares_prompts(setting: Setting) -> bool:
    """Whether answers to one prompt share its pass, where no dropout keeps them apart."""
    if setting.device_type not in SHARING or setting.num_generations < 2:
        return False
    return can_share(torch.empty(0, dtype=torch.int64), setting.dtype, 0)  # on a CPU heads of all sizes


def build_model(method: str, setting: Setting, n_layers: int, kind: type[HydraModel] = HydraModel) -> HydraModel:
    """The method's model with `n_layers` layers, as `training.build` makes it, with random weights."""
    roles = roles_of(method)
    config = shallow(setting.config, n_layers)
    model = kind(
        {
            name: Backbone(
                plain_model(config, setting.dtype, needs_lm_head(roles, name)), frozen=not base_is_trained(roles, name)
            )
            for name in dict.fromkeys(role.backbone for role in roles.values())
        },
        roles=roles,
        slots={role.slot: setting.slot for role in roles.values() if role.slot is not None},
        token_budget=setting.token_budget,
        adapter_dtype=setting.adapter_dtype,
    )
    for p in model.parameters():
        if p.requires_grad:
            p.grad_dtype = gradient_dtype(setting.optim, p.dtype)
    model.shares_prompts = setting.num_generations > 1  # else no two prompts of a plan are alike
    if setting.gradient_checkpointing:
        for name in {role.backbone for role in roles.values() if role.trainable}:
            model.backbone(name).enable_gradient_checkpointing()
    return model.eval()


# ---- phases ----------------------------------------------------------------------------------------------------------


def _known(model: HydraModel) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def trace_generation(model: HydraModel, s: Setting, rows: int, _: int) -> Timeline:
    """Prefill with a cache of full capacity, and the last decoding step."""
    found = trace_prefill(model, s, rows)
    if s.completion_length > 1:
        found.events += trace_token(model, s, rows, s.length - 1).events
    return found


def trace_prefill(model: HydraModel, s: Setting, rows: int) -> Timeline:
    """Prompts up to their first token, which ends them: a traced token is always 0."""
    ends = SamplingConfig(max_completion_length=s.completion_length, eos_token_ids=(0,))
    return traced(lambda: generate(model, _prompts(s, rows, s.prompt_length), ends), _known(model), s.device_type)


def trace_token(model: HydraModel, s: Setting, rows: int, context: int) -> Timeline:
    """The decoding step in which every row has `context` tokens, at least 2, the new one included."""
    goes_on = SamplingConfig(max_completion_length=2, eos_token_ids=())
    whole = traced(lambda: generate(model, _prompts(s, rows, context - 1), goes_on), _known(model), s.device_type)
    draws = [i for i, event in enumerate(whole.events) if event.op.startswith("rlhf_kernels.sample")]
    return Timeline(events=whole.events[draws[-2] + 1 :])


def _prompts(s: Setting, rows: int, length: int) -> list[list[int]]:
    """No two alike: prompts that are would be kept once. Their last tokens count in the model's vocabulary."""
    vocabulary = s.config.get_text_config().vocab_size
    return [[*[0] * (length - 2), *divmod(i, vocabulary)][-length:] for i in range(rows)]


def _batch(s: Setting, rows: int) -> PackedBatch:
    return PackedBatch.from_lists([[0] * s.prompt_length] * rows, [[0] * s.completion_length] * rows)


def trace_inference(model: HydraModel, s: Setting, rows: int, repeats: int) -> Timeline:
    batch = _batch(s, rows * repeats)
    return traced(lambda: model.score(batch, ROLES), _known(model), s.device_type)


def trace_update(model: HydraModel, s: Setting, rows: int, repeats: int) -> Timeline:
    """One minibatch of `repeats` micro-batches. State and temporary tensors of the optimizer are counted elsewhere."""

    def clear() -> dict[str, float]:
        model.zero_grad(set_to_none=True)
        return {}

    def learn() -> object:
        if "sft" not in model.roles:
            return update(model, Ppo(AlgorithmOptions()), _answers(s, rows * repeats), schedule, clear, seed=0)
        for _ in range(repeats):
            batch = _batch(s, rows)
            (loss,) = model(batch, (LmLoss(role="sft", denom=float(batch.n_completion_tokens)),))
            loss.backward()
        return clear()

    schedule = Schedule(num_epochs=1, num_mini_batches=1, micro_batch_size=rows)
    model.train()
    try:
        return traced(learn, _known(model), s.device_type)
    finally:
        model.zero_grad(set_to_none=True)
        model.eval()


def _answers(s: Setting, rows: int) -> TokenValues:
    """Answers that an update of PPO can learn from; shapes are all that counts."""
    batch = _batch(s, rows)
    vars(batch)["prompts_N"] = tuple(range(rows))  # tokens without data do not say so
    per_token = torch.zeros(batch.n_completion_tokens)
    return TokenValues(
        batch=batch,
        old_logprobs_M=per_token,
        values_M=per_token,
        advantages_M=per_token,
        returns_M=per_token,
    )
