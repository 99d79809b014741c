"""Work of `linear_logprob_pair`: two rows of logits per token, and sums that are made ahead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf_kernels.runtime.cost import Work
from rlhf_kernels.vocab.cost import head_work


def work(name: str, args: Sequence[Any], out: Any) -> list[Work]:
    """Forward: both logits, and one product per sum made ahead. Backward without them: both logits and d_hidden."""
    products = 2 + len([sums for sums in args[-2].split(",") if sums]) if name == "linear_logprob_pair" else 3
    return [head_work(args[0], args[2], products)]
