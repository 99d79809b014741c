"""Reward models as transformers' sequence classifiers with one label, adapter merged, that give the same scores.

transformers reads the score at the last token that is not the padding token. Rewards are read at the last token, which
mostly ends an answer. So the padding token has to be one that never ends a sequence.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from rlhf_engine.errors import ConfigError
from rlhf_engine.export.merge import merged_model
from rlhf_engine.export.source import Source
from rlhf_engine.hydra.heads import ScalarHead
from rlhf_engine.hydra.loading import can_be_headless, read_config
from rlhf_engine.hydra.reward_model import load_reward_head, save_classifier
from rlhf_engine.tokenizing import read_eos_token_ids


def write_classifier(
    source: Source, folder: Path, *, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype | None
) -> list[str]:
    """Write a source as an AutoModelForSequenceClassification with its tokenizer; notes for the user.

    Raises ConfigError for a source without a head, or of an architecture without such a class.
    """
    kind = read_config(source.base).model_type
    if not can_be_headless(read_config(source.base)):
        served = sorted(set(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES) & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
        raise ConfigError(
            f"to: expected an architecture of which transformers has a sequence classifier, got {kind!r}; it has "
            f"{', '.join(served)}; --to peft with --role reward exports adapter and head"
        )
    if source.head is None:
        raise ConfigError(
            f"source: expected a model with a reward head for sequence_classification, got {str(source.root)!r}, which "
            "has none"
        )
    weight = source.head["weight"]
    head = ScalarHead(weight.shape[-1])
    load_reward_head(head, dict(source.head), str(source.root))
    notes = []
    if head.bias.any():
        notes.append(
            f"scores are lower by {head.bias.item():g}, the head's bias, which a sequence classifier has not; their "
            "differences are the same"
        )
        head.bias.data.zero_()
    notes += _give_padding(tokenizer, source.base)
    model = merged_model(source, dtype=dtype, lm_head=False)
    text = model.config.get_text_config()
    if text.pad_token_id in _ends(tokenizer, source.base):
        text.pad_token_id = None  # or it would be taken where the tokenizer has none
    model.config.num_labels = 1
    save_classifier(model, head, folder, tokenizer=tokenizer)
    return notes


def _ends(tokenizer: PreTrainedTokenizerBase, base: str) -> tuple[int, ...]:
    return read_eos_token_ids(tokenizer, base)


def _give_padding(tokenizer: PreTrainedTokenizerBase, base: str) -> list[str]:
    """Give the tokenizer a padding token that never ends a sequence; a note where there is none."""
    ends = set(_ends(tokenizer, base))
    candidates = (tokenizer.pad_token, tokenizer.unk_token, tokenizer.bos_token)
    found = next((t for t in candidates if t is not None and tokenizer.convert_tokens_to_ids(t) not in ends), None)
    tokenizer.pad_token = found
    tokenizer.padding_side = "right"
    if found is not None:
        return []
    return [
        "the tokenizer has no padding, unknown or beginning-of-sequence token that never ends a sequence: transformers "
        "takes one sequence at a time"
    ]
