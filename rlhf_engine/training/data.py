"""Data for training: rows from local JSON or JSONL, their order as a function of the seed.

Prompt-only rows are {"prompt": str, …}; supervised rows {"prompt", "completion"} or {"prompt", "chosen", "rejected"}
(TRL's prompt-only, prompt-completion and preference types with strings).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rlhf_engine.errors import ConfigError

Row = Mapping[str, Any]


def read_rows(
    path: str | os.PathLike[str],
    columns: Sequence[str],
    *,
    limit: int | None = None,
    argument: str = "dataset_name",
) -> list[Row]:
    """Rows of a .jsonl file (one object per line) or a .json file (a list of objects).

    columns: names that every row must hold as non-empty strings. argument: what messages call the path. Raises
    ConfigError with file and line otherwise.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{argument}: expected a .json or .jsonl file, got {str(path)!r} which is not a file")
    rows: list[Row] = []
    for where, row in _objects(path):
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: expected a JSON object, got {type(row).__name__}")
        for name in columns:
            value = row.get(name)
            if not isinstance(value, str):
                raise ConfigError(f"{where}: expected a string in column {name!r}, got {value!r}")
            if not value.strip():
                raise ConfigError(f"{where}: expected text in column {name!r}, got an empty {name}")
        rows.append(row)
        if limit is not None and len(rows) == limit:
            break
    if not rows:
        raise ConfigError(f"{argument}: expected at least one row in {str(path)!r}, got none")
    return rows


def _objects(path: Path) -> list[tuple[str, Any]]:
    """(place for messages, value) of every row."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            whole = json.loads(text)
            if not isinstance(whole, list):
                raise ConfigError(f"{path}: expected a list of objects, got {type(whole).__name__}")
            return [(f"{path}: row {i}", row) for i, row in enumerate(whole)]
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: expected JSON in UTF-8, got {error}") from error
    found = []
    # not splitlines: JSON strings may hold U+2028 and other characters that it takes for line ends
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                found.append((f"{path}:{number}", json.loads(line)))
            except json.JSONDecodeError as error:
                raise ConfigError(f"{path}:{number}: expected a JSON object, got {error}") from error
    return found


def epoch_order(n: int, seed: int, epoch: int) -> list[int]:
    """The order of n rows in an epoch: a function of (seed, epoch) alone, so that a resumed run goes on in it."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(n, generator=generator).tolist()


def batch_indices(n: int, batch_size: int, step: int, seed: int) -> list[int]:
    """Rows of batch number `step` (from 0): consecutive places of the endless sequence of shuffled epochs."""
    start = step * batch_size
    orders: dict[int, list[int]] = {}
    found = []
    for place in range(start, start + batch_size):
        epoch, offset = divmod(place, n)
        if epoch not in orders:
            orders[epoch] = epoch_order(n, seed, epoch)
        found.append(orders[epoch][offset])
    return found
