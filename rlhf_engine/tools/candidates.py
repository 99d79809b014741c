"""Candidates of an evaluation, and what is kept of them on disk.

A candidate is the base, an adapter on it, another model, a file of answers, or the data's own answers. Each answer and
each verdict is kept as it is made, so that an evaluation goes on.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rlhf_engine.config.commands import BASE, REFERENCES, EvaluateConfig
from rlhf_engine.config.run import SUFFIXES
from rlhf_engine.data.read import read_text
from rlhf_engine.errors import ConfigError
from rlhf_engine.hub import is_hub_name, local_folder
from rlhf_engine.hydra import peft_io
from rlhf_engine.hydra.loading import read_config, require_lm_head
from rlhf_engine.io import LineFile, json_digest
from rlhf_engine.runs.folder import FINAL_FOLDER, MODEL_CONFIG, find_model

ANSWERS_FILE, VERDICTS_FILE, RESULTS_FILE, PAGE_FILE = "answers.jsonl", "verdicts.jsonl", "results.json", "report.html"
_DRAWN_BY = (
    "model_name_or_path", "dtype", "seed", "dataset_name", "max_prompts", "max_prompt_length", "truncation",
    "num_generations", "max_completion_length", "temperature", "top_k", "top_p", "min_p", "greedy", "stop",
)  # fmt: skip
"""Options that an answer depends on."""
_JUDGED_BY = ("judge", "judge_model", "against")
CandidateKind = Literal["base", "adapter", "model", "answers", "references"]


class Candidate(NamedTuple):
    """A model or a set of answers that is compared."""

    name: str  # in tables and files
    kind: CandidateKind  # what draws its answers, or where they are written
    place: str  # folder or file; "" of the base and of the data's own answers

    @property
    def is_drawn(self) -> bool:
        """Whether a model draws its answers here."""
        return self.kind in ("base", "adapter", "model")

    @property
    def role(self) -> str:
        """Name of the role that its adapter has on the base."""
        return "of_" + re.sub(r"[^A-Za-z0-9_\-]", "_", self.name)


def find_candidates(config: EvaluateConfig) -> list[Candidate]:
    """Find what is compared, `against` first, without loading it; ConfigError or ValueError for what is not served."""
    candidates = [_candidate(given) for given in config.models]
    names = [candidate.name for candidate in candidates]
    if config.against not in names:
        if config.against not in (BASE, REFERENCES):
            raise ConfigError(
                f"against: expected {BASE}, {REFERENCES} or one of the models {names}, got {config.against!r}"
            )
        candidates.insert(0, _candidate(config.against))
    if len(candidates) < 2 and config.against == REFERENCES:
        candidates.append(_candidate(BASE))
    roles = [candidate.role for candidate in candidates]
    twice = [candidate.name for candidate in candidates if roles.count(candidate.role) > 1]
    if twice:
        raise ConfigError(
            f"models: expected different names, got {twice[0]!r} and {twice[1]!r}; give them as name=PLACE"
        )
    return sorted(candidates, key=lambda candidate: candidate.name != config.against)


def _candidate(given: str) -> Candidate:
    name, equals, place = given.partition("=")
    if not equals or os.path.sep in name:  # a path may hold the sign
        name, place = "", given
    if not place:
        raise ConfigError(f"models: expected [name=]PLACE, got {given!r}")
    if place == BASE:
        return Candidate(name or BASE, "base", "")
    if place == REFERENCES:
        return Candidate(name or REFERENCES, "references", "")
    name = name or _short_name(place)
    if place.endswith(SUFFIXES):
        if not Path(place).is_file():
            raise ConfigError(f"models: expected a file with prompt and completion, got {place!r}, which is not there")
        return Candidate(name, "answers", place)
    folder = find_model(local_folder(place, "models", weights=True), "models")
    place = place if is_hub_name(place) else str(folder)
    if (folder / peft_io.CONFIG_FILE).is_file():
        peft_io.read_slot_config(folder)  # one that is not served is refused before anything is drawn
        return Candidate(name, "adapter", place)
    if not (folder / MODEL_CONFIG).is_file():
        raise ConfigError(f"models: expected a PEFT folder, a model, a run or a file of answers, got {str(folder)!r}")
    require_lm_head(read_config(folder), place, "models")
    return Candidate(name, "model", place)


def _short_name(place: str) -> str:
    """Last part of a path that says something: `runs/ppo/final` is `ppo`."""
    parts = [part for part in Path(place).parts if part not in (os.path.sep, ".", "..")]
    while len(parts) > 1 and parts[-1] == FINAL_FOLDER:
        parts.pop()
    suffix = next((suffix for suffix in SUFFIXES if place.endswith(suffix)), "")
    return parts[-1].removesuffix(suffix) if parts else place


class CandidateAnswer(NamedTuple):
    """One answer of one candidate."""

    text: str  # without special tokens and stop texts
    ids: tuple[int, ...]  # by the tokenizer of `model_name_or_path`, the ending one included
    finished: bool  # whether it ended by itself


class Kept:
    """Lines of a file that belong to this evaluation, by key."""

    def __init__(self, path: Path, digests: Mapping[str, str], *, resume: bool) -> None:
        """Read what is there."""
        self._file = LineFile(path)
        self._digests = digests
        self.rows: dict[tuple[str, int, int, int], dict[str, Any]] = {}  # (candidate, prompt, draw, order) → line
        if path.exists() and not resume:
            raise ConfigError(
                f"output_dir: expected a folder without {path.name}, got {str(path.parent)!r}; --resume goes on with it"
            )
        for number, row in self._file.read("output_dir"):
            model = str(row.get("model"))
            if digests.get(model) != row.get("settings"):
                raise ConfigError(
                    f"output_dir: {path}:{number}: expected a line of this evaluation, got one of another model or "
                    f"with other options ({model!r})"
                )
            self.rows[model, row["prompt"], row["draw"], row["order"]] = row

    def add(self, model: str, prompt: int, draw: int, order: int = 0, **values: Any) -> None:
        """Keep one line, on disk when this returns."""
        row = {"model": model, "prompt": prompt, "draw": draw, "order": order, **values}
        row["settings"] = self._digests[model]
        self._file.add(row)
        self.rows[model, prompt, draw, order] = row


def answer_digests(
    config: EvaluateConfig,
    candidates: Sequence[Candidate],
    prompts: Sequence[Sequence[int]],
    written: Mapping[str, Sequence[Sequence[CandidateAnswer]]],
) -> dict[str, str]:
    """Digests, by candidate, of what its answers depend on: options, prompts, weights or written answers."""
    options = config.to_dict()
    kept = [{name: options[name] for name in _DRAWN_BY}, list(map(list, prompts))]
    texts = {name: [[answer.text for answer in row] for row in rows] for name, rows in written.items()}
    return {c.name: json_digest([kept, c.kind, c.place, _weights(c), texts.get(c.name)]) for c in candidates}


def verdict_digests(config: EvaluateConfig, of_answers: Mapping[str, str]) -> dict[str, str]:
    """Digests of what the verdicts on each candidate depend on: its answers, those of `against`, and the judge."""
    options = config.to_dict()
    template = None if config.judge_template is None else read_text(config.judge_template, "judge_template")
    judged = [{name: options[name] for name in _JUDGED_BY}, template]
    return {name: json_digest([judged, digest, of_answers[config.against]]) for name, digest in of_answers.items()}


def _weights(candidate: Candidate) -> str | None:
    """Digest of an adapter's weights: a run may go on in the same folder. Of a whole model its place has to do."""
    if candidate.kind != "adapter":
        return None
    folder = local_folder(candidate.place, "models", weights=True)
    return hashlib.sha256((folder / peft_io.WEIGHTS_FILE).read_bytes()).hexdigest()
