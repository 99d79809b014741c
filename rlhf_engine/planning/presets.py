"""Shapes of common models, as their authors published them, and configs from presets or folders."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from rlhf_engine.errors import ConfigError
from rlhf_engine.hub import is_hub_name
from rlhf_engine.hydra import loading


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One published architecture."""

    model_type: str
    """transformers' name of the architecture."""
    parameters: int
    """Parameters of the causal LM as published, tied weights once; a test builds it and counts."""
    shape: dict[str, Any] = field(default_factory=dict)
    """Arguments of the config class."""


def _llama(parameters: int, hidden: int, ff: int, layers: int, heads: int, kv: int, vocab: int, **more: Any) -> Preset:
    shape = {
        "hidden_size": hidden,
        "intermediate_size": ff,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        **more,
    }
    return Preset(model_type=shape.pop("model_type", "llama"), parameters=parameters, shape=shape)


def _neox(parameters: int, hidden: int, layers: int, heads: int, vocab: int) -> Preset:
    shape = {
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
    }
    return Preset(model_type="gpt_neox", parameters=parameters, shape=shape)


_LLAMA3 = {"max_position_embeddings": 8192}
_LLAMA32 = {"max_position_embeddings": 131072, "tie_word_embeddings": True}
_QWEN2 = {"model_type": "qwen2", "max_position_embeddings": 32768}
_QWEN3 = {"model_type": "qwen3", "max_position_embeddings": 40960, "head_dim": 128}
_MISTRAL = {"model_type": "mistral", "max_position_embeddings": 32768, "sliding_window": 4096}
_GEMMA2 = {"model_type": "gemma2", "max_position_embeddings": 8192, "head_dim": 256, "tie_word_embeddings": True}
_TIED = {"tie_word_embeddings": True}

PRESETS: dict[str, Preset] = {
    "gpt2": Preset(model_type="gpt2", parameters=124_439_808),
    "pythia-410m": _neox(405_334_016, 1024, 24, 16, 50304),
    "pythia-1b": _neox(1_011_781_632, 2048, 16, 8, 50304),
    "pythia-2.8b": _neox(2_775_208_960, 2560, 32, 32, 50304),
    "pythia-6.9b": _neox(6_857_302_016, 4096, 32, 32, 50432),
    "llama-7b": _llama(6_738_415_616, 4096, 11008, 32, 32, 32, 32000, max_position_embeddings=2048),
    "llama-13b": _llama(13_015_864_320, 5120, 13824, 40, 40, 40, 32000, max_position_embeddings=2048),
    "llama-2-70b": _llama(68_976_648_192, 8192, 28672, 80, 64, 8, 32000, max_position_embeddings=4096),
    "llama-3.2-1b": _llama(1_235_814_400, 2048, 8192, 16, 32, 8, 128256, head_dim=64, **_LLAMA32),
    "llama-3.2-3b": _llama(3_212_749_824, 3072, 8192, 28, 24, 8, 128256, head_dim=128, **_LLAMA32),
    "llama-8b": _llama(8_030_261_248, 4096, 14336, 32, 32, 8, 128256, **_LLAMA3),
    "llama-70b": _llama(70_553_706_496, 8192, 28672, 80, 64, 8, 128256, **_LLAMA3),
    "qwen2.5-0.5b": _llama(494_032_768, 896, 4864, 24, 14, 2, 151936, **{**_QWEN2, **_TIED}),
    "qwen2.5-1.5b": _llama(1_543_714_304, 1536, 8960, 28, 12, 2, 151936, **{**_QWEN2, **_TIED}),
    "qwen2.5-7b": _llama(7_615_616_512, 3584, 18944, 28, 28, 4, 152064, **_QWEN2),
    "qwen3-0.6b": _llama(596_049_920, 1024, 3072, 28, 16, 8, 151936, **{**_QWEN3, **_TIED}),
    "qwen3-8b": _llama(8_190_735_360, 4096, 12288, 36, 32, 8, 151936, **_QWEN3),
    "mistral-7b": _llama(7_241_732_096, 4096, 14336, 32, 32, 8, 32000, **_MISTRAL),
    "gemma-2-2b": _llama(2_614_341_888, 2304, 9216, 26, 8, 4, 256000, **_GEMMA2),
}
"""Llama 7B and 13B are those of Llama 1 and 2 (the Hydra paper's), `llama-8b` and `llama-70b` those of Llama 3."""


def find_config(model: str) -> PreTrainedConfig:
    """The config of a preset, a folder or a model of the Hub. Raises ConfigError otherwise, with the nearest preset."""
    if model in PRESETS:
        preset = PRESETS[model]
        config: PreTrainedConfig = AutoConfig.for_model(preset.model_type, **preset.shape)
        return config
    if Path(model).is_dir() or is_hub_name(model):
        try:
            return loading.read_config(model)
        except ValueError as error:
            raise ConfigError(str(error).replace("model_name_or_path", "model", 1)) from error
    close = difflib.get_close_matches(model.lower(), PRESETS, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}?" if close else f"presets: {', '.join(PRESETS)}"
    raise ConfigError(
        f"model: expected a preset, a folder with config.json or owner/name of the Hub, got {model!r}; {hint}"
    )
