"""Models with random weights, as `loading.load_model` makes them of a folder."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel

from rlhf_engine.hydra.loading import can_be_headless


def shallow(config: PreTrainedConfig, n_layers: int) -> PreTrainedConfig:
    """The config of a model with the first `n_layers` layers."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    text.num_hidden_layers = n_layers
    if kinds:
        text.layer_types = list(kinds[:n_layers])
    return config


def plain_model(config: PreTrainedConfig, dtype: torch.dtype, lm_head: bool) -> PreTrainedModel:
    """A model with random weights, without an LM head where that is not wanted and can be left out."""
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
