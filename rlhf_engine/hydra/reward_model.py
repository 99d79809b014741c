"""Existing reward models: what a folder holds, and how much of it a backbone that is there already can serve.

a PEFT folder, with the score under modules_to_save or our heads.safetensors  → a frozen slot and a head
an AutoModelForSequenceClassification with one label, on the base's trunk      → a head
the same on another trunk                                                      → a backbone of its own and a head
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from rlhf_engine.errors import ConfigError
from rlhf_engine.hydra import peft_io
from rlhf_engine.hydra.heads import ScalarHead
from rlhf_engine.hydra.loading import Quantization, is_sequence_classifier, load_model, read_config

_SCORE = ("score", "classifier")
"""Names of the module that reads the last hidden state in transformers' sequence classifiers."""


def read_reward_head(folder: str | os.PathLike[str]) -> dict[str, torch.Tensor] | None:
    """weight [1, H] and bias [1] of the reward head in an adapter's or a model's folder; None if there is none.

    Raises ValueError for a head with more than one output.
    """
    folder = Path(folder)
    if "reward" in peft_io.head_names(folder):
        return peft_io.read_head(folder, "reward")
    adapter = folder / peft_io.WEIGHTS_FILE
    files = [adapter] if adapter.is_file() else []
    if not files and is_sequence_classifier(read_config(folder)):
        files = sorted(folder.glob("model*.safetensors"))
    found: dict[str, torch.Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as f:
                for key in f.keys():  # noqa: SIM118 - a safetensors file is not a mapping
                    name, _, leaf = key.removeprefix(peft_io.PREFIX).rpartition(".")
                    if name.removesuffix(".modules_to_save") in _SCORE and leaf in ("weight", "bias"):
                        found[leaf] = f.get_tensor(key).float()
        except SafetensorError as error:
            raise ValueError(f"{path}: expected a safetensors file, got {error}") from error
    if "weight" not in found:
        return None
    if found["weight"].dim() != 2 or found["weight"].shape[0] != 1:
        raise ValueError(
            f"{str(folder)!r}: expected a reward model with one output (num_labels=1), got a score of shape "
            f"{tuple(found['weight'].shape)}"
        )
    return found


def require_reward_head(folder: str | os.PathLike[str], argument: str) -> dict[str, torch.Tensor]:
    """`read_reward_head`, or ConfigError for a folder that has none, or that is none. argument: what asks for it."""
    folder = str(folder)
    if not Path(folder).is_dir():
        raise ConfigError(f"{argument}: expected the folder of a reward model, got {folder!r}")
    head = read_reward_head(folder)
    if head is None:
        # also where the base has a reward head: it was not trained on an adapter's hidden states
        raise ConfigError(
            f"{argument}: expected a trained reward head in {peft_io.HEADS_FILE} of {folder!r} or as its score, got "
            "none; give a reward_adapter or a reward_model_path"
        )
    return head


def load_beside(
    base: str, reward: str, *, dtype: torch.dtype, device: torch.device, quantization: Quantization = "none"
) -> tuple[PreTrainedModel, PreTrainedModel | None]:
    """The base, and a whole reward model, which is None where the base has the same trunk and can serve both."""
    plain = load_model(base, dtype=dtype, device=device, quantization=quantization)
    other = load_model(reward, dtype=dtype, device=device, lm_head=False, quantization=quantization)
    return plain, None if same_trunk(plain, other) else other


def load_reward_head(head: ScalarHead, tensors: dict[str, torch.Tensor], origin: str) -> None:
    """Copy a reward head, with bias 0 where it has none. Raises ValueError for one of another shape."""
    tensors = {"bias": torch.zeros(1), **tensors}
    if tensors["weight"].shape != head.weight.shape or tensors["bias"].shape != head.bias.shape:
        raise ValueError(
            f"{origin}: expected a reward head of shape {tuple(head.weight.shape)}, "
            f"got {tuple(tensors['weight'].shape)}"
        )
    head.load_state_dict(tensors)


def same_trunk(a: PreTrainedModel, b: PreTrainedModel) -> bool:
    """Whether two models are the same decoder: equal parameters under equal names, whatever heads they carry."""
    left, right = _trunk_parameters(a), _trunk_parameters(b)
    if left.keys() != right.keys() or type(a.base_model) is not type(b.base_model):
        return False
    return all(
        p.shape == right[name].shape and torch.equal(p, right[name].to(p.device, p.dtype)) for name, p in left.items()
    )


def _trunk_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    trunk: nn.Module = model.base_model
    return dict(trunk.named_parameters())
