"""Candidates of an evaluation: the base, adapters on it, other models, files of answers, and the data's own answers."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlhf_engine.config.evaluate import BASE, REFERENCES, EvaluateConfig
from rlhf_engine.errors import ConfigError
from rlhf_engine.hub import is_hub_name, local_folder
from rlhf_engine.hydra import peft_io
from rlhf_engine.hydra.loading import read_config, require_lm_head
from rlhf_engine.runs.folder import FINAL_FOLDER

CandidateKind = Literal["base", "adapter", "model", "answers", "references"]
_ANSWERS = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")
_MODEL_CONFIG = "config.json"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One of what is compared."""

    name: str
    """Name in tables and files."""
    kind: CandidateKind
    """What draws its answers: the base, the base with an adapter, another model; or where they are written."""
    place: str
    """Folder or file; "" of the base and of the data's own answers."""

    @property
    def is_drawn(self) -> bool:
        """Whether a model draws its answers here."""
        return self.kind in ("base", "adapter", "model")

    @property
    def role(self) -> str:
        """Name of its role on the base's backbone."""
        return "of_" + re.sub(r"[^A-Za-z0-9_\-]", "_", self.name)


def find_candidates(config: EvaluateConfig) -> list[Candidate]:
    """Find what is compared, without loading it: that which win rates are against first.

    Raises ConfigError for a place that holds neither a model, an adapter nor answers, a name that is given twice, or an
    `against` that is none of the names; ValueError for an adapter that is not served, or a model without an LM head.
    """
    found = [_candidate(given) for given in config.models]
    names = [candidate.name for candidate in found]
    if config.against not in names:
        if config.against not in (BASE, REFERENCES):
            raise ConfigError(
                f"against: expected {BASE}, {REFERENCES} or one of the models {names}, got {config.against!r}"
            )
        found.insert(0, _candidate(config.against))
    if len(found) < 2 and config.against == REFERENCES:
        found.append(_candidate(BASE))
    _require_different(found)
    return sorted(found, key=lambda candidate: candidate.name != config.against)


def _candidate(given: str) -> Candidate:
    name, equals, place = given.partition("=")
    if not equals or os.path.sep in name:  # a path may hold the sign
        name, place = "", given
    if not place:
        raise ConfigError(f"models: expected [name=]PLACE, got {given!r}")
    if place == BASE:
        return Candidate(name=name or BASE, kind="base", place="")
    if place == REFERENCES:
        return Candidate(name=name or REFERENCES, kind="references", place="")
    name = name or _short_name(place)
    if place.endswith(_ANSWERS):
        if not Path(place).is_file():
            raise ConfigError(f"models: expected a file with prompt and completion, got {place!r}, which is not there")
        return Candidate(name=name, kind="answers", place=place)
    folder = local_folder(place, "models", weights=True)
    if (folder / FINAL_FOLDER).is_dir() and not _kind_of(folder):
        folder = folder / FINAL_FOLDER
    kind = _kind_of(folder)
    if kind is None:
        raise ConfigError(
            f"models: expected a folder with {peft_io.CONFIG_FILE} or {_MODEL_CONFIG}, a run, a file of answers, "
            f"{BASE} or {REFERENCES}, got {place!r}"
        )
    if kind == "adapter":  # one that is not served is refused before anything is drawn
        peft_io.read_slot_config(folder)
    else:
        require_lm_head(read_config(folder), place, "models")
    return Candidate(name=name, kind=kind, place=str(folder) if not is_hub_name(place) else place)


def _kind_of(folder: Path) -> CandidateKind | None:
    if (folder / peft_io.CONFIG_FILE).is_file():
        return "adapter"
    return "model" if (folder / _MODEL_CONFIG).is_file() else None


def _short_name(place: str) -> str:
    """Last part of a path that says something: `runs/ppo/final` is `ppo`."""
    parts = [part for part in Path(place).parts if part not in (os.path.sep, ".", "..")]
    while len(parts) > 1 and parts[-1] == FINAL_FOLDER:
        parts.pop()
    return parts[-1].partition(".json")[0].removesuffix(".parquet") if parts else place


def _require_different(candidates: Sequence[Candidate]) -> None:
    for field in ("name", "role"):
        seen: dict[str, Candidate] = {}
        for candidate in candidates:
            key = getattr(candidate, field)
            if key in seen:
                raise ConfigError(
                    f"models: expected different names, got {seen[key].name!r} and {candidate.name!r}; give them as "
                    "name=PLACE"
                )
            seen[key] = candidate
