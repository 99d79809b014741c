"""Adapters as PEFT folders that stand alone: tensors as they are, the base by its name and hash.

`PeftModel.from_pretrained`, transformers' `load_adapter` and vLLM take such a folder. This package's loaders compare
the hash with that of the base that the adapter is put on.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase

from rlhf_engine.errors import ConfigError
from rlhf_engine.export.source import Source, copy_json
from rlhf_engine.hydra import peft_io

VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM takes for --max-lora-rank."""


def write_adapter(
    source: Source, folder: Path, *, tokenizer: PreTrainedTokenizerBase, base: str, revision: str | None
) -> None:
    """Write an adapter with its tokenizer and, of a role with a scalar head, that head.

    Args:
        source: what to export.
        folder: new folder.
        tokenizer: tokenizer to write beside it.
        base: name of the base for others.
        revision: its revision on the Hub; None: none is recorded.

    Raises:
        ConfigError: a whole model, which is no adapter.
        ValueError: an adapter that is not plain LoRA.
    """
    if source.adapter is None:
        raise ConfigError(
            f"to: expected an adapter for peft, got {source.base!r}, a whole model; merged or "
            "sequence_classification writes that"
        )
    peft_io.read_slot_config(source.adapter)
    tokenizer.save_pretrained(folder)
    copy_json(
        source.adapter / peft_io.CONFIG_FILE,
        folder / peft_io.CONFIG_FILE,
        base_model_name_or_path=base,
        revision=revision,
        inference_mode=True,
    )
    shutil.copyfile(source.adapter / peft_io.WEIGHTS_FILE, folder / peft_io.WEIGHTS_FILE)
    if source.head is not None:
        tensors = {f"{source.head_name}.{key}": t.contiguous() for key, t in source.head.items()}
        save_file(tensors, folder / peft_io.HEADS_FILE, metadata={"format": "pt"})
    record = {"base_hash": source.base_hash, "decoder_hash": source.decoder_hash, "slot": source.role}
    (folder / peft_io.ENGINE_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def vllm_obstacle(config: Mapping[str, Any]) -> str | None:
    """Reason why vLLM does not take an adapter with this PEFT config; None where it does.

    A linear outside the blocks, such as an LM head, has no number in its name.
    """
    targets = config.get("target_modules") or []
    outside = [path for path in targets if not any(part.isdigit() for part in path.split("."))]
    if config.get("modules_to_save"):
        return f"it has {config['modules_to_save']} under modules_to_save"
    if config["r"] > VLLM_RANKS[-1]:
        return f"its rank {config['r']} is above {VLLM_RANKS[-1]}"
    if config.get("fan_in_fan_out"):
        return "it is on Conv1D linears"
    if outside:
        return f"it adapts {', '.join(outside)}"
    return None


def vllm_rank(config: Mapping[str, Any]) -> int:
    """Least --max-lora-rank of a vLLM server that takes an adapter."""
    return next(rank for rank in VLLM_RANKS if rank >= config["r"])
