"""Shapes of common models, as their authors published them, and configs from presets, folders or the Hub."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from rlhf_engine.errors import ConfigError
from rlhf_engine.hub import is_hub_name
from rlhf_engine.hydra import loading

_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "max_position_embeddings"),
)
_TIED: dict[str, Any] = {"tie_word_embeddings": True}

PRESETS: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "gpt2": ("gpt2", (), {}),
    "pythia-410m": ("gpt_neox", (1024, 4096, 24, 16, 16, 50304, 2048), {}),
    "pythia-1b": ("gpt_neox", (2048, 8192, 16, 8, 8, 50304, 2048), {}),
    "pythia-2.8b": ("gpt_neox", (2560, 10240, 32, 32, 32, 50304, 2048), {}),
    "pythia-6.9b": ("gpt_neox", (4096, 16384, 32, 32, 32, 50432, 2048), {}),
    "llama-7b": ("llama", (4096, 11008, 32, 32, 32, 32000, 2048), {}),
    "llama-13b": ("llama", (5120, 13824, 40, 40, 40, 32000, 2048), {}),
    "llama-2-70b": ("llama", (8192, 28672, 80, 64, 8, 32000, 4096), {}),
    "llama-3.2-1b": ("llama", (2048, 8192, 16, 32, 8, 128256, 131072), {"head_dim": 64, **_TIED}),
    "llama-3.2-3b": ("llama", (3072, 8192, 28, 24, 8, 128256, 131072), {"head_dim": 128, **_TIED}),
    "llama-8b": ("llama", (4096, 14336, 32, 32, 8, 128256, 8192), {}),
    "llama-70b": ("llama", (8192, 28672, 80, 64, 8, 128256, 8192), {}),
    "qwen2.5-0.5b": ("qwen2", (896, 4864, 24, 14, 2, 151936, 32768), _TIED),
    "qwen2.5-1.5b": ("qwen2", (1536, 8960, 28, 12, 2, 151936, 32768), _TIED),
    "qwen2.5-7b": ("qwen2", (3584, 18944, 28, 28, 4, 152064, 32768), {}),
    "qwen3-0.6b": ("qwen3", (1024, 3072, 28, 16, 8, 151936, 40960), {"head_dim": 128, **_TIED}),
    "qwen3-8b": ("qwen3", (4096, 12288, 36, 32, 8, 151936, 40960), {"head_dim": 128}),
    "mistral-7b": ("mistral", (4096, 14336, 32, 32, 8, 32000, 32768), {"sliding_window": 4096}),
    "gemma-2-2b": ("gemma2", (2304, 9216, 26, 8, 4, 256000, 8192), {"head_dim": 256, **_TIED}),
}
"""Type, `_SIZES` and more by name. Llama 7B and 13B are those of Llama 1 and 2, `llama-8b` and `llama-70b` of 3."""


def find_config(model: str) -> PreTrainedConfig:
    """The config of a preset, a folder or a model of the Hub. Raises ConfigError otherwise, with the nearest preset."""
    if model in PRESETS:
        kind, sizes, more = PRESETS[model]
        shape = dict(zip(_SIZES, sizes, strict=False))
        untied = {"tie_word_embeddings": False} if sizes else {}
        config: PreTrainedConfig = AutoConfig.for_model(kind, **{**untied, **shape, **more})
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
