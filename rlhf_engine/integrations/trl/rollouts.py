"""Rollouts behind TRL as rows of tensors, which are shuffled, cut up and saved.

Supports of answers are columns among them:

    support_lens   int32 [N, C], stored numbers of each token, right-padded like the answers
    support_words  int32 [N, K], the stored numbers of each answer, right-padded to the most of an answer

A checkpoint has two files of each process beside transformers' own:

    progress_{rank}.json        micro-batches so far, what a rollout is cut up by, what has been measured since the
                                log's last line
    rollout_{rank}.safetensors  in the middle of a rollout, all of it

Legend: N answers, C the longest answer, see `rlhf_engine.hydra.supports` for what is stored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.utils.rnn import pad_sequence

from rlhf_engine.errors import ConfigError
from rlhf_engine.hydra import PackedBatch
from rlhf_engine.hydra.supports import Supports


def to_columns(batch: PackedBatch, padded: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Spread the supports of a batch over rows by `padded`; no columns where tokens were drawn among all words."""
    supports = batch.supports
    if supports is None:
        return {}
    sizes = supports.offsets[torch.tensor(batch.completion_cu)].diff()
    return {
        "support_lens": padded(supports.lengths.int().to(batch.device)),
        "support_words": pad_sequence(supports.words.split(sizes.tolist()), batch_first=True),
    }


def from_columns(columns: Mapping[str, Any], answer_NC: torch.Tensor, vocabulary: int) -> Supports | None:
    """Take the supports of answers (bool, answer_NC) out of columns; None where there are none."""
    if "support_lens" not in columns:
        return None
    lens_NC, words_NK = columns["support_lens"] * answer_NC, columns["support_words"]
    stored_NK = torch.arange(words_NK.shape[1], device=words_NK.device) < lens_NC.sum(1)[:, None]
    return Supports.of_lengths(words_NK[stored_NK], lens_NC[answer_NC], vocabulary)


def save_progress(
    folder: Path,
    rank: int,
    *,
    step: int,
    sizes: Mapping[str, int],
    metrics: Mapping[str, Sequence[float]],
    rollout: Sequence[Mapping[str, torch.Tensor]],
) -> None:
    """Write the files of a process. rollout: its micro-batches; none where the next step draws anew."""
    plain = {"step": step, "sizes": sizes, "metrics": metrics, "parts": len(rollout)}
    (folder / f"progress_{rank}.json").write_text(json.dumps(plain))
    if rollout:
        parts = {f"{i}|{name}": x for i, part in enumerate(rollout) for name, x in part.items()}
        tensors = {name: x.detach().cpu().clone() for name, x in parts.items()}  # parts may share one
        save_file(tensors, folder / f"rollout_{rank}.safetensors")


def load_progress(folder: Path, rank: int) -> tuple[dict[str, Any], list[dict[str, torch.Tensor]]]:
    """Read step, sizes and metrics by name, and the rollout. Raises ConfigError where they are not there."""
    path = folder / f"progress_{rank}.json"
    if not path.is_file():
        raise ConfigError(
            f"resume_from_checkpoint: expected {path.name} in {str(folder)!r}, as in a checkpoint of this trainer "
            "by at least as many processes and without save_only_model; it is not there"
        )
    plain = json.loads(path.read_text())
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(plain["parts"])]
    for key, x in (load_file(folder / f"rollout_{rank}.safetensors") if parts else {}).items():
        place, _, name = key.partition("|")
        parts[int(place)][name] = x
    return plain, parts
