"""The model that reward training trains, its loss, and what becomes of it: roles, packed rows, folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf_engine.config import RewardConfig
from rlhf_engine.config.run import adapter_dtype
from rlhf_engine.devices import DTYPES
from rlhf_engine.errors import ConfigError
from rlhf_engine.hydra import (
    OFF,
    HydraModel,
    PackedBatch,
    PairwiseRewardLoss,
    PointwiseRewardLoss,
    RoleSpec,
    peft_io,
    reward_model,
)
from rlhf_engine.hydra.adapters import ScalarHead
from rlhf_engine.hydra.build import loading_device, slot_config
from rlhf_engine.hydra.loading import load_model
from rlhf_engine.hydra.peft_io import merge_adapter, save_slot
from rlhf_engine.hydra.persist import require_savable
from rlhf_engine.training.reward_model.data import RewardExample

REWARD_SLOT = "reward"
CLASSIFIER_FOLDER = "sequence_classification"


def reward_roles(mode: str) -> dict[str, RoleSpec]:
    """The reward role on a slot beside the base, whose hash counts its LM head (`lora`), or on it (`full`)."""
    if mode == "full":
        return {"reward": RoleSpec(head="reward", trainable=True)}
    return {"reference": RoleSpec(slot=OFF), "reward": RoleSpec(slot=REWARD_SLOT, head="reward", trainable=True)}


def build_reward_model(config: RewardConfig) -> HydraModel:
    """The model to train, its head's bias fixed at 0. Raises ConfigError or ValueError for what does not fit."""
    lora = config.mode == "lora"
    model = HydraModel.from_pretrained(
        config.model_name_or_path,
        roles=reward_roles(config.mode),
        slots={REWARD_SLOT: slot_config(config)} if lora else {},
        dtype=DTYPES[config.dtype],
        device=loading_device(config),
        adapter_dtype=DTYPES[adapter_dtype(config.optim)],
        seed=config.seed,
    )
    backbone = model.backbone()
    if lora:
        outside = [p for p, _ in backbone.slot(REWARD_SLOT).items() if not p.startswith(backbone.blocks_prefix)]
        if outside:
            raise ConfigError(
                f"lora_target_modules: expected linears of the blocks, whose hidden states the reward head reads, got "
                f"{outside}"
            )
    require_savable(model)
    bias = model.heads["reward"].bias
    assert isinstance(bias, nn.Parameter)
    with torch.no_grad():
        bias.zero_()
    bias.requires_grad_(False)
    if config.gradient_checkpointing:
        backbone.enable_gradient_checkpointing()
    return model


def packed_batch(
    examples: Sequence[RewardExample], device: torch.device, *, places: Sequence[int] | None = None
) -> PackedBatch:
    """Answers of rows as one batch, first ones, then second ones; `places` in the step key dropout masks."""
    n_answers = len(examples[0].answers)
    ids = range(len(examples)) if places is None else places
    return PackedBatch.from_lists(
        [e.prompt for _ in range(n_answers) for e in examples],
        [e.answers[a] for a in range(n_answers) for e in examples],
        device=device,
        sample_ids=[2 * i + a for a in range(n_answers) for i in ids],
    )


def reward_loss(
    model: HydraModel,
    examples: Sequence[RewardExample],
    *,
    denom: float,
    dropout_seed: int,
    places: Sequence[int] | None = None,
    pos_weight: float = 1.0,
    center: float = 0.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The module's loss of some rows, divided by `denom`, and without gradients loss, accuracy and margin."""
    batch = packed_batch(examples, model.device, places=places)
    output: PairwiseRewardLoss | PointwiseRewardLoss
    if examples[0].label is None:
        output = pairwise_loss([e.margin for e in examples], model.device, denom=denom, center=center)
    else:
        labels = torch.tensor([bool(e.label) for e in examples], device=model.device)
        output = PointwiseRewardLoss(label_N=labels, denom=denom, pos_weight=pos_weight)
    (result,) = model(batch, (output,), dropout_seed=dropout_seed)
    return result.loss, {
        "reward_loss": result.loss.detach(),
        "reward_accuracy": (result.n_correct + 0.5 * result.n_tied) / denom,
        "reward_margin": result.sum_margin / denom,
    }


def pairwise_loss(
    margins: Sequence[float], device: torch.device, *, denom: float, center: float = 0.0
) -> PairwiseRewardLoss:
    """The loss of a batch of first all chosen answers and then all rejected ones, by the margin of each pair."""
    chosen_P, rejected_P = torch.arange(2 * len(margins), device=device).chunk(2)
    margin_P = torch.tensor(margins, device=device) if any(margins) else None
    return PairwiseRewardLoss(chosen_P=chosen_P, rejected_P=rejected_P, denom=denom, center=center, margin_P=margin_P)


def write_reward_model(
    model: HydraModel, tokenizer: PreTrainedTokenizerBase, folder: Path, config: RewardConfig
) -> None:
    """Write a new folder for `rlhf-engine train`: adapter, heads and `export`, or a sequence classifier."""
    folder.mkdir(parents=True)
    backbone, head = model.backbone(), model.heads["reward"]
    assert isinstance(head, ScalarHead)
    if config.mode == "full":
        reward_model.save_classifier(backbone.model, head, folder, tokenizer=tokenizer)
        return
    name = config.model_name_or_path
    save_slot(backbone, REWARD_SLOT, folder, base_name=name)
    peft_io.save_heads(model.heads, {"reward"}, folder)
    tokenizer.save_pretrained(folder)
    classifier = folder / CLASSIFIER_FOLDER
    if config.export == "adapter":
        reward_model.save_classifier_adapter(backbone, REWARD_SLOT, head, classifier, base_name=name)
    elif config.export == "merged":
        merged = merge_adapter(load_model(name, dtype=torch.float32, device="cpu", lm_head=False), folder)
        reward_model.save_classifier(merged, head, classifier, tokenizer=tokenizer)
