"""Trained adapters and reward models in the formats of other libraries: found, checked, written, uploaded.

    W' = round(W + s B A)        W [out, in] of an adapted linear, A [r, in], B [out, r], s the adapter's scale

PEFT merges. A quantised base, an adapter trained on one, and a base with another hash are refused.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_engine.config.commands import ExportConfig
from rlhf_engine.data.tokenize import load_tokenizer, read_eos_token_ids
from rlhf_engine.errors import ConfigError
from rlhf_engine.hub import local_folder, push_folder, require_push
from rlhf_engine.hydra import peft_io, reward_model
from rlhf_engine.hydra.gate import ScalarHead
from rlhf_engine.hydra.loading import load_model, read_config, stored_dtype
from rlhf_engine.hydra.peft_io import merge_adapter, require_base
from rlhf_engine.hydra.persist import read_record
from rlhf_engine.io import check_model, read_json, replacing, write_manifest
from rlhf_engine.runs.folder import MODEL_CONFIG, RECORD_FILE, find_model
from rlhf_engine.tools.card import public_name, read_optional, write_card

_PREFERRED = ("actor", "sft", "reward")  # roles that are exported where none is named, the first that the source has
_QUANTIZED = ("quantization", "load_in_4bit", "load_in_8bit")
"""Options by which a run loads its base quantised, and those of before."""


class Source(NamedTuple):
    """One role of a run, or the one adapter or model of a folder, with hashes of its base where recorded."""

    root: Path  # folder of heads and tokenizer
    adapter: Path | None  # PEFT folder
    base: str  # folder, or name on the Hub
    base_hash: str | None
    decoder_hash: str | None
    lm_head: bool
    head: Mapping[str, torch.Tensor] | None  # weight [1, H] and bias [1] of the role's scalar head
    head_name: str
    role: str | None
    run: Mapping[str, Any]  # the run's record
    options: Mapping[str, Any]  # of the run
    run_folder: Path | None
    quantization: str | None  # option by which the run loaded its base quantised


def export(config: ExportConfig) -> tuple[str | None, list[str]]:
    """Write an export, and upload it if a repository is named; the upload's address or None, and lines for the user."""
    output, name = Path(config.output_dir), config.push_to_hub
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"output_dir: expected a new or empty folder, got {config.output_dir!r}")
    if name is not None:
        require_push(name)
    source = find_source(config)
    # that of its base where the source has none beside it
    tokenizer = load_tokenizer(source.root if (source.root / "tokenizer_config.json").is_file() else source.base)
    dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
    notes: list[str] = []
    with replacing(output.absolute()) as folder:
        folder.mkdir(parents=True)
        if config.to == "sequence_classification":
            notes = _write_classifier(source, folder, tokenizer, dtype or torch.float32)
        elif config.to == "merged":
            merged_model(source, dtype=dtype).save_pretrained(folder)
        else:
            _write_adapter(source, folder, config)
        tokenizer.save_pretrained(folder)
        write_manifest(folder)
        write_card(config, source, folder, notes)  # after the manifest: a card is there to be edited
    return None if name is None else push_folder(output, name, private=config.private), notes


def find_source(config: ExportConfig) -> Source:
    """Find what an export is made of. Raises ConfigError for a role or a base that is not there."""
    root = find_model(local_folder(config.source, "source", weights=True), "source")
    check_model(root)
    run_folder = next((folder for folder in (root, root.absolute().parent) if (folder / RECORD_FILE).is_file()), None)
    run = read_optional(run_folder or root, RECORD_FILE)
    options = run.get("config", {})
    held = read_optional(root, peft_io.ENGINE_FILE)
    fields = _of_role(config, root) if "roles" in held else _of_folder(config, root, held, options)
    base = config.model_name_or_path or fields["base"]
    if base is None:
        raise ConfigError(f"model_name_or_path: expected it for {str(root)!r}, which records no base, got none")
    if not (local_folder(base) / MODEL_CONFIG).is_file():  # a path that leads nowhere looks like a name of the Hub
        raise ConfigError(
            f"model_name_or_path: expected the base that {str(root)!r} records, got {base!r}, where no model is; give "
            "its folder now, or its name on the Hub"
        )
    quantization = next((name for name in _QUANTIZED if options.get(name) not in (None, False, "none")), None)
    fields |= {"base": base, "run": run, "options": options, "run_folder": run_folder, "quantization": quantization}
    return Source(root=root, **fields)


def _of_role(config: ExportConfig, root: Path) -> dict[str, Any]:
    """Fields of one role of what `save_pretrained` wrote."""
    record = read_record(root)
    roles = record["roles"]
    wanted = ("reward",) if config.to == "sequence_classification" else _PREFERRED
    role = config.role or next((name for name in wanted if name in roles), None)
    if role not in roles:
        raise ConfigError(f"role: expected one of {sorted(roles)} of {str(root)!r}, got {role or wanted[0]!r}")
    spec = roles[role]
    backbone = record["backbones"][spec["backbone"]]
    whole = backbone["folder"]
    adapter = None if spec["slot"] is None else root / record["slots"][spec["slot"]]["folder"]
    if adapter is None and whole is None and spec["head"] == "lm":
        raise ConfigError(
            f"role: expected one that was trained, got {role!r}, which is the base {backbone['source']!r} as it is"
        )
    return {
        "adapter": adapter,
        "base": backbone["source"] if whole is None else str(root / whole),
        "base_hash": backbone["hash"],
        "decoder_hash": None if adapter is None else read_optional(adapter, peft_io.ENGINE_FILE).get("decoder_hash"),
        "lm_head": backbone["lm_head"],
        "head": None if spec["head"] == "lm" else peft_io.read_head(root, spec["head"]),
        "head_name": spec["head"],
        "role": role,
    }


def _of_folder(config: ExportConfig, root: Path, held: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Fields of a folder with one adapter, or of a whole model."""
    if config.role not in (None, held.get("slot")):
        raise ConfigError(f"role: expected none for {str(root)!r}, which has one model, got {config.role!r}")
    adapter = root if (root / peft_io.CONFIG_FILE).is_file() else None
    base: str | None = str(root)
    if adapter is not None:
        theirs = read_optional(root, peft_io.CONFIG_FILE)
        base, revision = theirs.get("base_model_name_or_path"), theirs.get("revision")
        if base is not None and revision is not None:
            base = f"{base}@{revision}"
        elif base is not None and str(options.get("model_name_or_path")).startswith(f"{base}@"):
            base = options["model_name_or_path"]
    return {
        "adapter": adapter, "base": base, "base_hash": held.get("base_hash"),
        "decoder_hash": held.get("decoder_hash"), "lm_head": True, "head": reward_model.read_reward_head(root),
        "head_name": "reward", "role": held.get("slot"),
    }  # fmt: skip


def merged_model(source: Source, *, dtype: torch.dtype | None, lm_head: bool = True) -> PreTrainedModel:
    """The base of a source on the CPU, its adapter merged; ConfigError for a quantised or another base."""
    files = getattr(read_config(source.base), "quantization_config", None)
    if files is not None:
        kind = files.get("quant_method") if isinstance(files, dict) else files.quant_method
        raise ConfigError(
            f"model_name_or_path: expected weights that are not quantised to merge into, got {source.base!r} in "
            f"{kind}; --to peft exports the adapter"
        )
    if source.quantization is not None and source.adapter is not None:
        raise ConfigError(
            "source: expected an adapter trained on plain weights to merge, got one of a run with "
            f"{source.quantization}: on other weights it is another function; --to peft exports it"
        )
    stored = stored_dtype(source.base)
    loaded = stored if dtype in (None, stored) else torch.float32  # a narrower one would round before the sum
    decoder = not lm_head and (source.decoder_hash is not None or source.base_hash is None)
    with_head = lm_head or (source.lm_head and not decoder)
    model = load_model(source.base, dtype=loaded, device="cpu", lm_head=with_head)
    recorded = source.decoder_hash if decoder else source.base_hash
    require_base(model, recorded, source.base, source.adapter, decoder=decoder)
    if with_head != lm_head:  # only the hash with the LM head is recorded
        model = load_model(source.base, dtype=loaded, device="cpu", lm_head=False)
    if source.adapter is not None:
        try:
            model = merge_adapter(model, source.adapter)
        except ValueError as error:
            raise ConfigError(str(error).replace("adapter:", "source:", 1)) from error
    return model.to(dtype=dtype or stored)  # type: ignore[call-arg,no-any-return]  # hidden by transformers' wrapper


def _write_adapter(source: Source, folder: Path, config: ExportConfig) -> None:
    """Write a PEFT folder that stands alone: tensors as they are, a scalar head, the base by its name and hash."""
    if source.adapter is None:
        raise ConfigError(
            f"to: expected an adapter for peft, got the whole model {source.base!r}, which --to merged writes"
        )
    if config.model_name_or_path is not None and source.quantization is None:
        model = load_model(source.base, dtype=stored_dtype(source.base), device="cpu")
        require_base(model, source.base_hash, source.base, source.adapter)
    peft_io.read_slot_config(source.adapter)  # refuses what is not plain LoRA
    base, revision = public_name(config.base_model or source.base)
    theirs = read_json(source.adapter, peft_io.CONFIG_FILE, "source")
    theirs |= {"base_model_name_or_path": base, "revision": revision, "inference_mode": True}
    (folder / peft_io.CONFIG_FILE).write_text(json.dumps(theirs, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    shutil.copyfile(source.adapter / peft_io.WEIGHTS_FILE, folder / peft_io.WEIGHTS_FILE)
    if source.head is not None:
        tensors = {f"{source.head_name}.{key}": t.contiguous() for key, t in source.head.items()}
        save_file(tensors, folder / peft_io.HEADS_FILE, metadata={"format": "pt"})
    record = {"base_hash": source.base_hash, "decoder_hash": source.decoder_hash, "slot": source.role}
    (folder / peft_io.ENGINE_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _write_classifier(
    source: Source, folder: Path, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype
) -> list[str]:
    """Write a sequence classifier with the source's rewards, whose padding token never ends a sequence; notes."""
    reward_model.require_classifier_class(source.base, "to")
    if source.head is None:
        raise ConfigError(f"source: expected a model with a reward head, got {str(source.root)!r}, which has none")
    head = ScalarHead(source.head["weight"].shape[-1])
    reward_model.load_reward_head(head, dict(source.head), str(source.root))
    notes = []
    if head.bias.any():
        notes.append(
            f"scores are lower by {head.bias.item():g}, the head's bias, which a sequence classifier has not; their "
            "differences are the same"
        )
        head.bias.data.zero_()
    ends = set(read_eos_token_ids(tokenizer, source.base))
    candidates = (tokenizer.pad_token, tokenizer.unk_token, tokenizer.bos_token)
    padding = [t for t in candidates if t is not None and tokenizer.convert_tokens_to_ids(t) not in ends]
    tokenizer.pad_token, tokenizer.padding_side = next(iter(padding), None), "right"
    if not padding:
        notes.append(
            "the tokenizer has no padding, unknown or beginning-of-sequence token that never ends a sequence: "
            "transformers takes one sequence at a time"
        )
    model = merged_model(source, dtype=dtype, lm_head=False)
    text = model.config.get_text_config()
    if text.pad_token_id in ends:
        text.pad_token_id = None  # or it would be taken where the tokenizer has none
    model.config.num_labels = 1
    reward_model.save_classifier(model, head, folder, tokenizer=tokenizer)
    return notes
