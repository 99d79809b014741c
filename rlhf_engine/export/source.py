"""Source of an export: the adapter or model that is meant, its base, its head, and the record of its run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlhf_engine.config.export import ExportConfig
from rlhf_engine.errors import ConfigError
from rlhf_engine.hub import is_hub_name, local_folder
from rlhf_engine.hydra import peft_io
from rlhf_engine.hydra.persist import read_record
from rlhf_engine.hydra.reward_model import read_reward_head
from rlhf_engine.io import finish_replacements
from rlhf_engine.manifest import check_model
from rlhf_engine.runs.checkpoint import list_checkpoints
from rlhf_engine.runs.folder import FINAL_FOLDER, METRICS_FILE, RECORD_FILE
from rlhf_engine.runs.metrics import read_metrics

STATE_FILE = "trainer_state.json"
_MODEL_CONFIG = "config.json"
_PREFERRED = ("actor", "sft", "reward")
"""Roles that are exported where none is named, the first that the source has."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """One role of a run, or the one adapter or model of a folder."""

    root: Path
    """Folder of the final model or the checkpoint, where heads and tokenizer lie."""
    adapter: Path | None
    """PEFT folder of the adapter; None for a whole model."""
    base: str
    """Folder of the base, or its name on the Hub; of a whole model its own."""
    base_hash: str | None
    """Hash of the base that the adapter was trained on; None where it is not recorded."""
    decoder_hash: str | None
    """Hash of that base without its LM head; None likewise."""
    lm_head: bool
    """Whether `base_hash` is of the base with its LM head."""
    head: Mapping[str, torch.Tensor] | None
    """weight [1, H] and bias [1] of the role's scalar head; None without one."""
    head_name: str
    """Name that heads.safetensors has for it."""
    role: str | None
    """Role that was asked for or chosen; None for a folder that names none."""
    run: Mapping[str, Any]
    """The run's record; empty where there is none."""
    run_folder: Path | None
    """Folder of the run; None where there is none."""

    @property
    def step(self) -> int | None:
        """Steps of training behind the weights; None where it is not recorded."""
        if (self.root / STATE_FILE).is_file():
            return _number(peft_io.read_json(self.root, STATE_FILE, "source").get("step"))
        result = self.run.get("result", {})
        if result:
            return _number(result.get("final_step", result.get("steps")))
        metrics = None if self.run_folder is None else self.run_folder / METRICS_FILE
        rows = read_metrics(metrics) if metrics is not None and metrics.is_file() else []
        return _number(rows[-1].get("step")) if rows else None


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def find_source(config: ExportConfig) -> Source:
    """Find what an export is made of.

    Raises:
        ConfigError: a folder without a model, a role or a base that is not there.
        CorruptCheckpointError: a folder that differs from its manifest.
    """
    root = _root(config.source)
    check_model(root)
    held = peft_io.read_json(root, peft_io.ENGINE_FILE, "source") if (root / peft_io.ENGINE_FILE).is_file() else {}
    run_folder = next((folder for folder in (root, root.absolute().parent) if (folder / RECORD_FILE).is_file()), None)
    run = {} if run_folder is None else peft_io.read_json(run_folder, RECORD_FILE, "source")
    if "roles" in held:
        found = _of_role(config, root)
    else:
        found = _of_folder(config, root, held, str(run.get("config", {}).get("model_name_or_path")))
    base = _require_base(config.model_name_or_path or found["base"], root)
    return Source(root=root, run=run, run_folder=run_folder, **{**found, "base": base})


def _root(source: str) -> Path:
    """Folder of a run's final model, its newest checkpoint, or the folder itself where it is of a model."""
    if is_hub_name(source):
        return local_folder(source, "source", weights=True)
    folder = Path(source)
    if not folder.is_dir():
        raise ConfigError(
            f"source: expected the folder of a run, a checkpoint or a model, got {source!r}, not a folder"
        )
    finish_replacements(folder, FINAL_FOLDER)
    if (folder / FINAL_FOLDER).is_dir():
        return folder / FINAL_FOLDER
    if any((folder / name).is_file() for name in (_MODEL_CONFIG, peft_io.CONFIG_FILE, peft_io.ENGINE_FILE)):
        return folder
    checkpoints = list_checkpoints(folder)
    if not checkpoints:
        raise ConfigError(
            f"source: expected a folder with {FINAL_FOLDER}/, checkpoints, {_MODEL_CONFIG} or {peft_io.CONFIG_FILE}, "
            f"got {source!r}, which has none of them"
        )
    return checkpoints[-1]


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
    base_alone = adapter is None and whole is None
    if base_alone and spec["head"] == "lm":
        raise ConfigError(
            f"role: expected one that was trained, got {role!r}, which is the base {backbone['source']!r} as it is"
        )
    slot_record = {}
    if adapter is not None and (adapter / peft_io.ENGINE_FILE).is_file():
        slot_record = peft_io.read_json(adapter, peft_io.ENGINE_FILE, "source")
    return {
        "adapter": adapter,
        "base": backbone["source"] if whole is None else str(root / whole),
        "base_hash": backbone["hash"],
        "decoder_hash": slot_record.get("decoder_hash"),
        "lm_head": backbone["lm_head"],
        "head": None if spec["head"] == "lm" else peft_io.read_head(root, spec["head"]),
        "head_name": spec["head"],
        "role": role,
    }


def _of_folder(config: ExportConfig, root: Path, held: Mapping[str, Any], run_base: str) -> dict[str, Any]:
    """Fields of a folder with one adapter, or of a whole model. run_base: base that the run's record names."""
    if config.role not in (None, held.get("slot")):
        raise ConfigError(f"role: expected none for {str(root)!r}, which has one model, got {config.role!r}")
    is_adapter = (root / peft_io.CONFIG_FILE).is_file()
    base: str | None = str(root)
    if is_adapter:
        theirs = peft_io.read_json(root, peft_io.CONFIG_FILE, "source")
        base, revision = theirs.get("base_model_name_or_path"), theirs.get("revision")
        if base is not None and revision is not None:
            base = f"{base}@{revision}"
        elif base is not None and run_base.startswith(f"{base}@"):
            base = run_base
    return {
        "adapter": root if is_adapter else None,
        "base": base,
        "base_hash": held.get("base_hash"),
        "decoder_hash": held.get("decoder_hash"),
        "lm_head": True,
        "head": read_reward_head(root),
        "head_name": "reward",
        "role": held.get("slot"),
    }


def _require_base(base: str | None, root: Path) -> str:
    """The base, which has to be there: a path that leads nowhere looks like a name of the Hub."""
    if base is None:
        raise ConfigError(f"model_name_or_path: expected it for {str(root)!r}, which records no base, got none")
    if not (local_folder(base) / _MODEL_CONFIG).is_file():
        raise ConfigError(
            f"model_name_or_path: expected the base that {str(root)!r} records, got {base!r}, where no model is; give "
            "its folder now, or its name on the Hub"
        )
    return base


def public_name(name: str) -> tuple[str, str | None]:
    """Name of a base for others, and its revision: that of the Hub, or else its folder's name without the path."""
    if is_hub_name(name):
        owner_name, _, revision = name.partition("@")
        return owner_name, revision or None
    return Path(name).resolve().name, None


def read_quantization(run: Mapping[str, Any]) -> str | None:
    """Option by which a run loaded its base quantised; None where it did not."""
    options = run.get("config", {})
    return next((name for name in ("load_in_4bit", "load_in_8bit") if options.get(name)), None)


def copy_json(path: Path, target: Path, **changes: Any) -> None:
    """Write the object of a JSON file with some values changed."""
    found = json.loads(path.read_text(encoding="utf-8"))
    target.write_text(json.dumps({**found, **changes}, indent=2, sort_keys=True) + "\n", encoding="utf-8")
