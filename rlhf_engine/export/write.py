"""An export from its options to a folder: found, checked, written under another name, put in place, uploaded."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_engine.config.export import ExportConfig
from rlhf_engine.errors import ConfigError
from rlhf_engine.export import gguf
from rlhf_engine.export.card import Card, write_card
from rlhf_engine.export.merge import merged_model, require_base, stored_dtype
from rlhf_engine.export.peft import write_adapter
from rlhf_engine.export.sequence_classification import write_classifier
from rlhf_engine.export.source import Source, find_source, public_name, read_quantization
from rlhf_engine.hub import is_hub_name, push_folder, require_push
from rlhf_engine.hydra.loading import load_model
from rlhf_engine.io import replacing
from rlhf_engine.manifest import write_manifest
from rlhf_engine.tokenizing import load_tokenizer


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Result of an export."""

    path: Path
    """The folder, or the GGUF file."""
    url: str | None
    """Address of the upload; None where nothing was uploaded."""
    notes: list[str]
    """Lines for the user."""


def export(config: ExportConfig) -> Exported:
    """Write an export, and upload it if a repository is named.

    Args:
        config: options of the command.

    Returns:
        The folder or file that was written.

    Raises:
        ConfigError: a source, a base or a folder that cannot serve, or no access to the Hub.
        EngineError: llama.cpp's converter failed.
        CheckpointWriteError: a full disk, or a folder that cannot be written.
    """
    output = Path(config.output_dir)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"output_dir: expected a new or empty folder, got {config.output_dir!r}")
    converter = gguf.find_converter(config.llama_cpp) if config.to == "gguf" else None
    if config.push_to_hub is not None:
        require_push(config.push_to_hub)
    source = find_source(config)
    with replacing(output.absolute()) as temporary:
        temporary.mkdir(parents=True)
        notes = _write(config, source, temporary, converter)
    url = None
    if config.push_to_hub is not None:
        url = push_folder(output, config.push_to_hub, private=config.private)
    return Exported(path=output if converter is None else output / _gguf_name(config), url=url, notes=notes)


def _write(config: ExportConfig, source: Source, folder: Path, converter: Path | None) -> list[str]:
    """Write the files of an export; notes for the user."""
    notes: list[str] = []
    dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
    if converter is not None:
        with tempfile.TemporaryDirectory(dir=folder.parent) as merged:
            _write_merged(source, Path(merged), dtype)
            gguf.convert(converter, Path(merged), folder / _gguf_name(config), outtype=config.outtype)
        return notes
    base, revision = public_name(config.base_model or source.base)
    on_hub = config.base_model is not None or is_hub_name(source.base)
    if source.adapter is None:  # a whole model: its base is what the run began with
        began = source.run.get("config", {}).get("model_name_or_path")
        named = config.base_model or began
        base, revision = public_name(str(named)) if named else ("not recorded", None)
        on_hub = config.base_model is not None or (began is not None and is_hub_name(began))
    if config.to == "merged":
        _write_merged(source, folder, dtype)
    elif config.to == "sequence_classification":
        notes = write_classifier(source, folder, tokenizer=_tokenizer(source), dtype=dtype or torch.float32)
    else:
        if config.model_name_or_path is not None and read_quantization(source.run) is None:
            require_base(source, load_model(source.base, dtype=stored_dtype(source.base), device="cpu"))
        write_adapter(source, folder, tokenizer=_tokenizer(source), base=base, revision=revision)
    write_manifest(folder)
    # after the manifest: a card is there to be edited
    card = Card(
        name=config.push_to_hub or Path(config.output_dir).absolute().name,
        to=config.to,
        place=config.push_to_hub or ".",
        base=base,
        revision=revision,
        base_on_hub=on_hub,
        license=config.license,
        notes=notes,
    )
    write_card(card, source, folder)
    return notes


def _write_merged(source: Source, folder: Path, dtype: torch.dtype | None) -> None:
    """Write a whole causal LM with its tokenizer."""
    merged_model(source, dtype=dtype).save_pretrained(folder)
    _tokenizer(source).save_pretrained(folder)


def _tokenizer(source: Source) -> PreTrainedTokenizerBase:
    """Tokenizer of the source, or that of its base where it has none beside it."""
    return load_tokenizer(source.root if (source.root / "tokenizer_config.json").is_file() else source.base)


def _gguf_name(config: ExportConfig) -> str:
    return f"{Path(config.output_dir).absolute().name}.gguf"
