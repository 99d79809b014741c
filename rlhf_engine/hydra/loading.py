"""Model folders: what may serve as a backbone, found out from the config before any weights are read."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)
from transformers.utils import logging
from transformers.utils.quantization_config import Mxfp4Config, QuantizationMethod

from rlhf_engine.errors import ConfigError
from rlhf_engine.hub import local_folder
from rlhf_engine.io import check_model, read_json

Quantization = Literal["none", "8bit", "4bit"]

_MISLABELLED_DECODERS = ("gpt_neox", "gpt_neox_japanese")
"""Their configs carry is_decoder=False, and they are decoders all the same."""


_CHUNKED = "chunked_attention"  # kind of a layer whose queries see their own chunk of the sequence, up to themselves


_OF_A_LIE = (RuntimeError, TypeError, AttributeError, ArithmeticError, MemoryError, StrictDataclassError)
"""Errors of transformers and torch where a config names types or sizes that cannot be, or are not its weights'."""


_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "n_embd", "n_head", "n_layer"),
)
"""Numbers of config.json by which transformers divides, or of which a model has at least one."""


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def model_folder(path: str | os.PathLike[str]) -> Path:
    """The folder of a model, which the Hub may have. Raises ValueError for none, and for one of an adapter."""
    folder = local_folder(path)
    if not folder.is_dir():
        raise ValueError(
            f"model_name_or_path: expected a model folder or owner/name of the Hub, got {str(path)!r}, which is neither"
        )
    check_model(folder, ["config.json"])  # and whether files were lost or added
    if (folder / "adapter_config.json").is_file():
        # transformers would load the adapter's base and inject the adapter into it: "off" would then not be off
        raise ValueError(
            f"model_name_or_path: expected a model folder, got {str(path)!r} which holds an adapter; give its base "
            "here and the folder as an adapter"
        )
    if not (folder / "config.json").is_file():
        raise ValueError(f"model_name_or_path: expected a folder with config.json, got {str(path)!r} which has none")
    return folder


def read_config(path: str | os.PathLike[str]) -> PreTrainedConfig:
    """Config of a model folder. Raises ValueError for one that no decoder-only backbone can be made of."""
    folder = model_folder(path)
    raw = read_json(folder, "config.json", "model_name_or_path")
    file = str(folder / "config.json")
    for part in (part for part in (raw, raw.get("text_config")) if isinstance(part, dict)):
        for name in ("attn_implementation", "_attn_implementation"):
            if "/" in str(part.get(name)):  # transformers would have the Hub's kernels by that name, and run them
                raise ValueError(f"model_name_or_path: expected no code of the Hub in {file!r}, got {part[name]!r}")
        for name in _SIZES:
            if type(part.get(name)) is int and part[name] < 1:
                raise ValueError(f"model_name_or_path: expected {name} of at least 1 in {file!r}, got {part[name]}")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except ValueError as error:
        if "auto_map" in raw:
            raise ValueError(
                "model_name_or_path: expected an architecture of transformers, got one whose code lies in "
                f"{str(path)!r}; code of a model folder is never run"
            ) from error
        raise
    except (OSError, *_OF_A_LIE) as error:
        raise ValueError(f"model_name_or_path: config.json in {str(path)!r} cannot be used: {_line(error)}") from error
    require_decoder(config, str(path))
    return config


def require_decoder(config: PreTrainedConfig, name: str) -> None:
    """Raise ValueError for an encoder-decoder model, an encoder, or an architecture without a decoder class."""
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"model_name_or_path: expected a decoder-only model, got {name!r}, a {config.model_type} with an encoder "
            "and a decoder"
        )
    # encoders that can also be built as decoders say which of the two they are
    encodes = getattr(config, "is_decoder", None) is False and config.model_type not in _MISLABELLED_DECODERS
    if encodes or config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(
            f"model_name_or_path: expected a decoder-only language model, got {name!r} of type {config.model_type!r}"
        )


def windows_that_differ(config: PreTrainedConfig, windows: Sequence[int | None]) -> str | None:
    """Difference between the sliding windows that layers were given and those of the config; None if they agree.

    windows: what each layer's attention was asked for, in order. A window as long as the context never bites, and
    chunks never do: see `context_length`.
    """
    text = config.get_text_config()
    window: int | None = _declared(text, "sliding_window")
    kinds = _declared(text, "layer_types")
    if kinds is None:
        slides = window is not None and _declared(text, "use_sliding_window") is not False
        kinds = ["sliding_attention" if slides else "full_attention"] * len(windows)
    never_bites = window is not None and window >= context_length(config)
    for layer, (kind, asked) in enumerate(zip(kinds, windows, strict=True)):
        wanted = window if kind == "sliding_attention" else None
        if kind in (_CHUNKED, "sliding_attention", "full_attention") and (asked == wanted or never_bites):
            continue
        return (
            f"expected layer {layer} to ask for {kind.replace('_', ' ')}"
            f"{'' if wanted is None else f' over {wanted} keys'}, as its config has it, it asked for "
            f"{'full attention' if asked is None else f'{asked} keys'}; this architecture needs masks that are not "
            "served"
        )
    return None


def _declared(config: PreTrainedConfig, name: str) -> Any:
    """A field that the config's class knows of; None for what a checkpoint's config.json merely carries along."""
    known = getattr(type(config), "__dataclass_fields__", {})  # of transformers' newer configs
    if name in known or name in inspect.signature(type(config).__init__).parameters:
        return getattr(config, name, None)
    return None


def has_lm_head(config: PreTrainedConfig) -> bool:
    """Whether the checkpoint that belongs to a config was saved with its LM head (assumed where it does not say)."""
    saved = getattr(config, "architectures", None) or []
    with_head = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()}
    return not saved or any(name in with_head for name in saved)


def require_lm_head(config: PreTrainedConfig, name: str, argument: str = "model_name_or_path") -> None:
    """Raise ValueError for a checkpoint that was saved without its LM head."""
    if not has_lm_head(config):
        raise ValueError(
            f"{argument}: expected a model with an LM head, got {name!r} which was saved as "
            f"{(config.architectures or ['?'])[0]}"
        )


def is_sequence_classifier(config: PreTrainedConfig) -> bool:
    """Whether a folder holds an AutoModelForSequenceClassification."""
    saved = getattr(config, "architectures", None) or []
    return any(name in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values() for name in saved)


def can_be_headless(config: PreTrainedConfig) -> bool:
    """Whether an architecture has a class that carries a scalar head in place of the LM head."""
    return config.model_type in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES


def keep_differentiable(model: torch.nn.Module) -> None:
    """Keep the 4-bit linears of a model in the layout of their weights that has a gradient.

    On a CPU with bf16 products, bitsandbytes turns the weights of a linear that runs in eval mode into another layout,
    for good. A later forward in train mode then has no gradient to its input, and says nothing. What has been turned
    already is turned back.
    """
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
            if getattr(getattr(module.weight, "quant_state", None), "packing_format_for_cpu", False):
                module.state_dict()  # which turns it back


def load_model(
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    lm_head: bool = True,
    quantization: Quantization = "none",
) -> PreTrainedModel:
    """Load a folder as a causal LM, or without an LM head as what carries a scalar head on its backbone."""
    config = read_config(path)
    folder = local_folder(path, weights=True)
    check_model(folder)
    if lm_head:
        require_lm_head(config, str(path))
    headless = not lm_head and can_be_headless(config)
    options: dict[str, Any] = {
        "dtype": dtype,
        "local_files_only": True,
        "output_loading_info": True,
        "trust_remote_code": False,  # None would let transformers ask on the terminal, and take a piped y for an answer
        "use_safetensors": True,  # other formats are pickles
    }
    if headless:
        if is_sequence_classifier(config) and config.num_labels != 1:
            raise ValueError(
                f"model_name_or_path: expected a reward model with one output (num_labels=1) in {str(path)!r}, got "
                f"{config.num_labels}"
            )
        options["num_labels"] = 1
    if _holds_mxfp4(config):
        if quantization != "none":
            raise ValueError(
                f"quantization: expected 'none' for weights in MXFP4, which load dequantised, got {quantization!r}"
            )
        options["quantization_config"] = Mxfp4Config(dequantize=True)  # its own kernels give experts no gradient
    if quantization != "none":
        options |= _quantized(quantization, dtype, device)
    loader = AutoModelForSequenceClassification if headless else AutoModelForCausalLM
    # without an LM head, transformers reports as missing and unexpected what is meant to be; what is not is found below
    quiet = quiet_transformers() if headless else contextlib.nullcontext()
    try:
        with quiet:
            loaded: Any = loader.from_pretrained(folder, **options)
    except (OSError, SafetensorError, *_OF_A_LIE) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        hint = "; do the sizes in config.json belong to its weights?" if isinstance(error, RuntimeError) else ""
        raise ValueError(f"model_name_or_path: {str(path)!r} cannot be loaded: {_line(error)}{hint}") from error
    model: PreTrainedModel = loaded[0]
    model.config._name_or_path = os.fspath(path)  # a name of the Hub rather than a folder of its cache
    info: dict[str, Any] = loaded[1]
    lacking = sorted(key for key in info["missing_keys"] if not (headless and key.startswith("score.")))
    if lacking:
        # transformers would make them up
        raise ValueError(f"model_name_or_path: expected all weights in {str(path)!r}, got none for {lacking[:3]}")
    if headless and info["missing_keys"]:
        model.score = nn.Identity()  # what transformers made up is nobody's head
    if quantization == "none":
        model.to(device)  # type: ignore[arg-type]  # transformers' wrapper hides the signature
    keep_differentiable(model)
    return model


def stored_dtype(path: str | os.PathLike[str]) -> torch.dtype:
    """dtype of the files of a model folder."""
    config = read_config(path)
    dtype = config.dtype or config.get_text_config().dtype or torch.float32
    return dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)  # type: ignore[no-any-return]


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """A block in which transformers logs errors only."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _holds_mxfp4(config: PreTrainedConfig) -> bool:
    """Whether the weights of a folder are stored in MXFP4, as gpt-oss's experts are."""
    stored = getattr(config, "quantization_config", None)
    kind = stored.get("quant_method") if isinstance(stored, Mapping) else getattr(stored, "quant_method", None)
    return kind == QuantizationMethod.MXFP4


def require_bitsandbytes(argument: str, expected: str, got: object) -> None:
    """Raise ConfigError, naming the argument that needs it, where bitsandbytes is not installed."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"{argument}: expected {expected} where bitsandbytes is not installed (pip install 'rlhf-engine[bnb]'), "
            f"got {got!r}"
        )


def _quantized(quantization: Quantization, dtype: torch.dtype, device: torch.device | str) -> dict[str, Any]:
    require_bitsandbytes("quantization", "'none'", quantization)
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=quantization == "4bit",
        load_in_8bit=quantization == "8bit",
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": config, "device_map": {"": device}}


def read_context_length(*paths: str | os.PathLike[str] | None) -> int:
    """Read the shortest `Backbone.context_length` of model folders, without loading the models; None is no folder."""
    return min(context_length(read_config(path)) for path in paths if path is not None)


def read_vocabulary(path: str | os.PathLike[str]) -> int:
    """Number of token ids of a model folder, without loading the model."""
    return int(read_config(path).get_text_config().vocab_size)


def context_length(config: PreTrainedConfig) -> int:
    """Longest sequence that the model's positions allow.

    Longrope turns every row of a call by other angles as soon as one of them is longer than the original context.
    Beyond that length a row's numbers would depend on the others, so it is the limit.
    Chunked attention sees no key before its chunk. Within the first chunk it is full attention, so that is the limit.
    """
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        raise ValueError(f"{type(config).__name__}: expected max_position_embeddings of at least 1, got {limit!r}")
    rope = getattr(text, "rope_parameters", None) or {}
    for rule in (rope, *rope.values()):  # one for all layers, or one for each kind of layer
        if isinstance(rule, Mapping) and rule.get("rope_type") == "longrope":
            limit = min(limit, int(rule.get("original_max_position_embeddings", limit)))
    chunk = _declared(text, "attention_chunk_size")
    if chunk is not None and _CHUNKED in (_declared(text, "layer_types") or ()):
        limit = min(limit, int(chunk))
    return limit
