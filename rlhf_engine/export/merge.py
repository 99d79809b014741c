"""Adapters merged into their base.

    W' = round(W + s B A)        W [out, in] of an adapted linear, A [r, in], B [out, r], s the adapter's scale

The sum is made in float64 and rounded once, to the dtype that is written. Where that is the dtype of the base's files,
memory holds the base once and blocks of `_ROWS` rows in float64. For another dtype it holds the merged linears, too.

Refused: a quantised base, whose weights are no numbers that anything could be added to without being rounded again; an
adapter that was trained on one, since the sum would be another function; and a base with another hash.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_engine.errors import ConfigError
from rlhf_engine.export.source import Source, read_quantization
from rlhf_engine.hydra import peft_io
from rlhf_engine.hydra.adapters import AdapterSlot, LoraPair
from rlhf_engine.hydra.backbone import _digest
from rlhf_engine.hydra.gated_linear import path_of
from rlhf_engine.hydra.loading import load_model, read_config
from rlhf_engine.hydra.takeover import base_model

_ROWS = 1024
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""dtypes that a run may have loaded its base in: hashes are of the weights in that dtype."""


def merged_model(source: Source, *, dtype: torch.dtype | None, lm_head: bool = True) -> PreTrainedModel:
    """Load a source's base and merge its adapter, if it has one.

    Args:
        source: what to export.
        dtype: dtype of the merged weights; None: that of the base's files.
        lm_head: False loads the base as a sequence classifier without a score.

    Returns:
        The model, on the CPU.

    Raises:
        ConfigError: a base that is quantised or another one, or an adapter that does not fit.
    """
    _refuse_quantised(source)
    stored = stored_dtype(source.base)
    # float32 holds every value of the other dtypes; a narrower one would round before the sum
    loaded = torch.float32 if dtype == torch.float32 else stored
    if lm_head or source.decoder_hash is not None or source.base_hash is None:
        model = load_model(source.base, dtype=loaded, device="cpu", lm_head=lm_head)
        require_base(source, model, "base_hash" if lm_head else "decoder_hash")
    else:  # the hash that is recorded may be one with the LM head
        require_base(source, load_model(source.base, dtype=loaded, device="cpu", lm_head=source.lm_head))
        model = load_model(source.base, dtype=loaded, device="cpu", lm_head=False)
    wanted = dtype or stored
    if source.adapter is not None:
        _merge(model, _slot(model, source), wanted)
    if wanted != loaded:
        model.to(dtype=wanted)  # type: ignore[call-arg]  # transformers' wrapper hides the signature
    return model


def require_base(source: Source, model: PreTrainedModel, kind: str = "base_hash") -> None:
    """Raise ConfigError for a model that is not the base that the source was trained on.

    Where no hash is recorded, another name of a base is warned of. kind: `base_hash`, or `decoder_hash` without the
    LM head.
    """
    recorded = source.base_hash if kind == "base_hash" else source.decoder_hash
    if recorded is None:
        if source.adapter is not None:
            peft_io.warn_of_other_base(peft_io.recorded_base(source.adapter)[0], source.base, "model_name_or_path")
        return
    part = model if kind == "base_hash" else base_model(model)
    own = [(name, p) for name, p in part.named_parameters() if not name.startswith("score.")]
    for dtype in dict.fromkeys((model.dtype, *_DTYPES)):
        if _digest((name, nn.Parameter(p.detach().to(dtype), requires_grad=False)) for name, p in own) == recorded:
            return
    raise ConfigError(
        f"model_name_or_path: expected the base with hash {recorded[:12]}…, which the adapter was trained on, got "
        f"{source.base!r} with another"
    )


def stored_dtype(base: str) -> torch.dtype:
    """dtype of the files of a base."""
    config = read_config(base)
    dtype = config.dtype or config.get_text_config().dtype or torch.float32
    return dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)  # type: ignore[no-any-return]


def _refuse_quantised(source: Source) -> None:
    """Raise ConfigError for a base that is quantised, in its files or by the run."""
    stored = getattr(read_config(source.base), "quantization_config", None)
    if stored is not None:
        kind = stored.get("quant_method") if isinstance(stored, dict) else stored.quant_method
        raise ConfigError(
            f"model_name_or_path: expected weights that are not quantised to merge into, got {source.base!r} in "
            f"{kind}; --to peft exports the adapter"
        )
    how = read_quantization(source.run)
    if how is not None and source.adapter is not None:
        raise ConfigError(
            f"source: expected an adapter trained on plain weights to merge, got one of a run with {how}: on other "
            "weights it is another function; --to peft exports it"
        )


def _slot(model: PreTrainedModel, source: Source) -> AdapterSlot:
    """The adapter as a slot on the linears of a model. Raises ConfigError for one that does not fit."""
    assert source.adapter is not None
    config = peft_io.read_slot_config(source.adapter)
    linears = dict(model.named_modules())
    pairs = {}
    for path in config.target_modules:
        layer = linears.get(path)
        if isinstance(layer, nn.Linear):
            shape = (layer.in_features, layer.out_features)
        elif isinstance(layer, Conv1D):
            shape = (layer.nx, layer.nf)
        else:
            got = "no such part" if layer is None else f"a {type(layer).__name__}"
            raise ConfigError(
                f"source: expected an adapter on linears of a {type(model).__name__}, got one on {path!r}: {got}"
            )
        pairs[path] = LoraPair(config.r, *shape, torch.device("cpu"), torch.float32)
    slot = AdapterSlot(source.role or "adapter", config, pairs, trainable=False)
    peft_io.load_slot(slot, source.adapter, None)
    return slot


def _merge(model: PreTrainedModel, slot: AdapterSlot, dtype: torch.dtype) -> None:
    """Replace the weight of each adapted linear by W' in a dtype."""
    _untie(model, slot.paths)
    linears = dict(model.named_modules())
    with torch.no_grad():
        for path, pair in slot.items():
            layer = linears[path]
            weight = layer.weight
            assert isinstance(weight, nn.Parameter)
            # in place where the dtype stays: pages of the file that are written to become the process's own
            merged = weight.detach() if weight.dtype == dtype else torch.empty_like(weight, dtype=dtype)
            old, new = (weight.T, merged.T) if isinstance(layer, Conv1D) else (weight, merged)
            A = slot.config.scale * pair.A.double()
            for start in range(0, len(old), _ROWS):
                rows = slice(start, start + _ROWS)
                new[rows] = torch.addmm(old[rows].double(), pair.B[rows].double(), A)
            layer.weight = nn.Parameter(merged, requires_grad=False)


def _untie(model: PreTrainedModel, paths: Collection[str]) -> None:
    """Give an adapted LM head a weight of its own: its twin, the embedding, is not adapted."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if not isinstance(head, nn.Linear) or path_of(head, model) not in paths:
        return
    if head.weight is embedding.weight:
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
