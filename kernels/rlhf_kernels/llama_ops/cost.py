"""Work of RMS norms, rotary embeddings, gated products and activations: inputs and results are moved once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from rlhf_kernels.runtime.cost import ELEMENTWISE, Work, all_bytes


def work(name: str, args: Sequence[Any], out: Any) -> list[Work]:
    """One pass, of the op's own kind: each has its own speed."""
    tensors = [t for t in tree_leaves((args, out)) if isinstance(t, torch.Tensor)]
    numbers = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    dtype = max(numbers, key=torch.Tensor.numel).dtype
    return [Work(name, ELEMENTWISE, 0.0, all_bytes(tensors), 0, dtype)]
