"""The place of a run behind TRL in its rollout: what a checkpoint has beside transformers' files.

progress_{rank}.json        micro-batches so far, what a rollout is cut up by, what has been measured since the log's
                            last line
rollout_{rank}.safetensors  in the middle of a rollout, all of it
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from rlhf_engine.errors import ConfigError


@dataclass(frozen=True, kw_only=True, eq=False)
class Progress:
    """Progress of one process."""

    step: int
    """Micro-batches so far."""
    sizes: Mapping[str, int]
    """Sizes that a rollout is cut up by, by name."""
    metrics: Mapping[str, Sequence[float]]
    """Values measured since the last line of the log, by metric."""
    rollout: Sequence[Mapping[str, torch.Tensor]]
    """Micro-batches of the rollout; none where the next step draws anew."""

    def save(self, folder: Path, rank: int) -> None:
        """Write the files of a process into a checkpoint."""
        plain = {"step": self.step, "sizes": self.sizes, "metrics": self.metrics, "parts": len(self.rollout)}
        (folder / f"progress_{rank}.json").write_text(json.dumps(plain))
        if self.rollout:
            parts = {f"{i}|{name}": x for i, part in enumerate(self.rollout) for name, x in part.items()}
            tensors = {name: x.detach().cpu().clone() for name, x in parts.items()}  # parts may share one
            save_file(tensors, folder / f"rollout_{rank}.safetensors")

    @classmethod
    def load(cls, folder: Path, rank: int) -> Progress:
        """Read them. Raises ConfigError where they are not there."""
        path = folder / f"progress_{rank}.json"
        if not path.is_file():
            raise ConfigError(
                f"resume_from_checkpoint: expected {path.name} in {str(folder)!r}, as in a checkpoint of this trainer "
                "by at least as many processes and without save_only_model; it is not there"
            )
        fields = json.loads(path.read_text())
        parts: list[dict[str, torch.Tensor]] = [{} for _ in range(fields.pop("parts"))]
        for key, x in (load_file(folder / f"rollout_{rank}.safetensors") if parts else {}).items():
            place, _, name = key.partition("|")
            parts[int(place)][name] = x
        return cls(**fields, rollout=parts)
