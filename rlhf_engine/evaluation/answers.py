"""Answers and verdicts of an evaluation on disk: each is kept as it is made, so that an evaluation goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_engine.config.evaluate import EvaluateConfig
from rlhf_engine.errors import ConfigError
from rlhf_engine.evaluation.candidates import Candidate
from rlhf_engine.hub import local_folder
from rlhf_engine.hydra import peft_io
from rlhf_engine.io import LineFile

ANSWERS_FILE, VERDICTS_FILE, RESULTS_FILE, PAGE_FILE = "answers.jsonl", "verdicts.jsonl", "results.json", "report.html"
_DRAWN_BY = (
    "model_name_or_path", "dtype", "seed", "dataset_name", "max_prompts", "max_prompt_length", "truncation",
    "num_generations", "max_completion_length", "temperature", "top_k", "top_p", "min_p", "greedy", "stop",
)  # fmt: skip
"""Options that an answer depends on."""
_JUDGED_BY = ("judge", "judge_model", "against")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer of one candidate."""

    text: str
    """Text, without special tokens and stop texts."""
    ids: tuple[int, ...]
    """Token ids by the tokenizer of `model_name_or_path`, the ending one included."""
    finished: bool
    """Whether it ended by itself."""


class Kept:
    """Lines of a file that belong to this evaluation, by key."""

    def __init__(self, path: Path, digests: Mapping[str, str], *, resume: bool) -> None:
        """Read what is there.

        Args:
            path: the file.
            digests: candidate → digest of the options that its lines depend on.
            resume: whether lines that are there are gone on with.

        Raises:
            ConfigError: a file that is there without `resume`, or a line of another evaluation.
        """
        self._file = LineFile(path)
        self._digests = digests
        self.rows: dict[tuple[str, int, int, int], dict[str, Any]] = {}
        """(candidate, prompt, draw, order) → line."""
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
        """Keep one line, on disk when this returns.

        Args:
            model: name of the candidate.
            prompt: place of the prompt.
            draw: place of the answer among those to the prompt.
            order: of a verdict: 0 where the candidate's answer stood first, else 1.
            **values: what the line holds.
        """
        row = {"model": model, "prompt": prompt, "draw": draw, "order": order, **values}
        row["settings"] = self._digests[model]
        self._file.add(row)
        self.rows[model, prompt, draw, order] = row


def answer_digests(
    config: EvaluateConfig,
    candidates: Sequence[Candidate],
    prompts: Sequence[Sequence[int]],
    written: Mapping[str, Sequence[Sequence[Answer]]],
) -> dict[str, str]:
    """Digests of what the answers of each candidate depend on: options, prompts, the weights of its adapter.

    Answers that are written already stand for themselves. Returns name → digest.
    """
    options = config.to_dict()
    kept = [{name: options[name] for name in _DRAWN_BY}, list(map(list, prompts))]
    texts = {name: [[answer.text for answer in row] for row in rows] for name, rows in written.items()}
    return {c.name: _digest([kept, c.kind, c.place, _weights(c), texts.get(c.name)]) for c in candidates}


def verdict_digests(config: EvaluateConfig, of_answers: Mapping[str, str]) -> dict[str, str]:
    """Digests of what the verdicts on each candidate depend on: its answers, those of `against`, and the judge."""
    options = config.to_dict()
    template = None if config.judge_template is None else Path(config.judge_template).read_text(encoding="utf-8")
    judged = [{name: options[name] for name in _JUDGED_BY}, template]
    return {name: _digest([judged, digest, of_answers[config.against]]) for name, digest in of_answers.items()}


def _weights(candidate: Candidate) -> str | None:
    """Digest of an adapter's weights: a run may go on in the same folder. Of a whole model its place has to do."""
    if candidate.kind != "adapter":
        return None
    folder = local_folder(candidate.place, "models", weights=True)
    return hashlib.sha256((folder / peft_io.WEIGHTS_FILE).read_bytes()).hexdigest()


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
