"""What a launcher (`torchrun`, `accelerate launch`) says of the processes that it has started, from the environment."""

from __future__ import annotations

import os


def launched() -> int:
    """Processes of this run; 1 without a launcher."""
    there = all(name in os.environ for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    return int(os.environ["WORLD_SIZE"]) if there else 1


def launched_rank() -> int:
    """Which of them this is."""
    return int(os.environ["RANK"]) if launched() > 1 else 0
