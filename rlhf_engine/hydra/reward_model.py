"""Reward models in folders: what of them a backbone that is there already can serve, and ours as transformers' own.

a PEFT folder, with the score under modules_to_save or our heads.safetensors  → a frozen slot and a head
an AutoModelForSequenceClassification with one label, on the base's backbone      → a head
the same on another backbone                                                      → a backbone of its own and a head

The other way, a head becomes the `score` of a sequence classifier, which has no bias: a head with one is refused.
transformers reads the score at the last token that is not padding. Rewards here are read at the last token, which is
mostly an end-of-sequence token, so a classifier whose padding token is the end-of-sequence token would look at another
one. Whole folders are therefore written with another padding token, or with none, under which transformers takes one
sequence at a time; an adapter's base keeps the config it has.
"""

from __future__ import annotations

import os

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_engine.errors import ConfigError
from rlhf_engine.hub import local_folder
from rlhf_engine.hydra import peft_io
from rlhf_engine.hydra.backbone import Backbone
from rlhf_engine.hydra.gate import ScalarHead
from rlhf_engine.hydra.loading import Quantization, can_be_headless, is_sequence_classifier, load_model, read_config
from rlhf_engine.hydra.peft_io import save_slot
from rlhf_engine.hydra.probe import base_model
from rlhf_engine.hydra.shares import state_of
from rlhf_engine.io import check_model

_SCORE = ("score", "classifier")
"""Names of the module that reads the last hidden state in transformers' sequence classifiers."""


def read_reward_head(folder: str | os.PathLike[str]) -> dict[str, torch.Tensor] | None:
    """weight [1, H] and bias [1] of the reward head in a folder, ValueError for more outputs; None without one."""
    folder = local_folder(folder, "the reward model", weights=True)
    check_model(folder, weights=False)
    if "reward" in peft_io.head_names(folder):
        return peft_io.read_head(folder, "reward")
    adapter = folder / peft_io.WEIGHTS_FILE
    files = [adapter] if adapter.is_file() else []
    if not files and is_sequence_classifier(read_config(folder)):
        files = sorted(folder.glob("model*.safetensors"))
    tensors: dict[str, torch.Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as f:
                for key in f.keys():  # noqa: SIM118 - a safetensors file is not a mapping
                    name, _, leaf = key.removeprefix(peft_io.PREFIX).rpartition(".")
                    if name.removesuffix(".modules_to_save") in _SCORE and leaf in ("weight", "bias"):
                        check_model(folder, [path.name])
                        tensors[leaf] = f.get_tensor(key).float()
        except SafetensorError as error:
            check_model(folder, [path.name])  # says more, where there is a manifest
            raise ValueError(f"{path}: expected a safetensors file, got {error}") from error
    if "weight" not in tensors:
        return None
    if tensors["weight"].dim() != 2 or tensors["weight"].shape[0] != 1:
        raise ValueError(
            f"{str(folder)!r}: expected a reward model with one output (num_labels=1), got a score of shape "
            f"{tuple(tensors['weight'].shape)}"
        )
    return tensors


def require_reward_head(folder: str | os.PathLike[str], argument: str) -> dict[str, torch.Tensor]:
    """`read_reward_head`, or ConfigError for a folder that has none, or that is none. argument: what asks for it."""
    if not local_folder(folder, argument).is_dir():
        what = "the folder of a reward model or owner/name of the Hub"
        raise ConfigError(f"{argument}: expected {what}, got {str(folder)!r}, which is neither")
    folder = str(folder)
    head = read_reward_head(folder)
    if head is None:
        # also where the base has a reward head: it was not trained on an adapter's hidden states
        raise ConfigError(
            f"{argument}: expected a trained reward head in {peft_io.HEADS_FILE} of {folder!r} or as its score, got "
            "none; give a reward_model_path"
        )
    return head


def load_beside(
    base: str, reward: str, *, dtype: torch.dtype, device: torch.device, quantization: Quantization = "none"
) -> tuple[PreTrainedModel, PreTrainedModel | None]:
    """The base, and a whole reward model, which is None where the base has the same backbone and can serve both."""
    plain = load_model(base, dtype=dtype, device=device, quantization=quantization)
    other = load_model(reward, dtype=dtype, device=device, lm_head=False, quantization=quantization)
    return plain, None if same_decoder(plain, other) else other


def load_reward_head(head: ScalarHead, tensors: dict[str, torch.Tensor], origin: str) -> None:
    """Copy a reward head, with bias 0 where it has none. Raises ValueError for one of another shape."""
    tensors = {"bias": torch.zeros(1), **tensors}
    if tensors["weight"].shape != head.weight.shape or tensors["bias"].shape != head.bias.shape:
        raise ValueError(
            f"{origin}: expected a reward head of shape {tuple(head.weight.shape)}, "
            f"got {tuple(tensors['weight'].shape)}"
        )
    head.load_state_dict(tensors)


def same_decoder(a: PreTrainedModel, b: PreTrainedModel) -> bool:
    """Whether two models are the same decoder: equal parameters under equal names, whatever heads they carry."""
    left, right = _decoder_parameters(a), _decoder_parameters(b)
    if left.keys() != right.keys() or type(base_model(a)) is not type(base_model(b)):
        return False
    return all(
        p.shape == right[name].shape and torch.equal(p, right[name].to(p.device, p.dtype)) for name, p in left.items()
    )


def _decoder_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    return dict(base_model(model).named_parameters())


def require_classifier_class(path: str | os.PathLike[str], argument: str) -> None:
    """Raise ValueError, naming the argument, for a model of which transformers has no sequence classifier."""
    config = read_config(path)
    if not can_be_headless(config):
        raise ValueError(
            f"{argument}: expected an architecture of which transformers has a sequence classifier, got "
            f"{config.model_type!r} in {str(path)!r}"
        )


def save_classifier_adapter(
    backbone: Backbone, slot: str, head: ScalarHead, folder: str | os.PathLike[str], *, base_name: str
) -> None:
    """Write a slot and a head as PEFT's adapter of a sequence classifier; ValueError for a head with a bias."""
    save_slot(backbone, slot, folder, base_name=base_name, score=_score_weight(head))


def save_classifier(
    model: PreTrainedModel, head: ScalarHead, folder: str | os.PathLike[str], *, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write a model and a head as a sequence classifier with a score; ValueError for a head with a bias."""
    if not hasattr(model, "score"):
        raise ValueError(f"model: expected a sequence classifier without its score, got a {type(model).__name__}")
    weight = _score_weight(head)
    kept, text = model.score, model.config.get_text_config()
    padding = text.pad_token_id
    score = nn.Linear(weight.shape[1], 1, bias=False)
    score.weight = nn.Parameter(weight.detach().clone())
    text.pad_token_id = next((i for i in (tokenizer.pad_token_id, padding) if i != tokenizer.eos_token_id), None)
    model.score = score
    try:
        model.save_pretrained(folder, state_dict=state_of(model))
        tokenizer.save_pretrained(folder)
    finally:
        model.score, text.pad_token_id = kept, padding


def _score_weight(head: ScalarHead) -> torch.Tensor:
    """Weight of a score, [1, H]."""
    if head.bias.any():
        raise ValueError(f"head: expected a bias of 0, which a sequence classifier has not, got {float(head.bias):g}")
    return head.weight
