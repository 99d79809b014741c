"""Positions for attention that counts them by itself: a row's place in the call, plus what its cache holds.

Llama 4 scales queries of layers without rotary embeddings by a step function of the position that it counts like that.
In a packed row, and in a decoding step of many rows, the count is not the position. The steps are thousands of tokens
wide, so that the probe at load would not see it.

Such attention is given a stand-in for the cache. It holds what the count lacks, for each row.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from rlhf_engine.hydra import gate

_COUNTS = "get_seq_length"
"""Method of transformers' caches that attention counts by."""


class PastOfRows:
    """Stand-in for a cache, under which attention counts to the position of each row."""

    def __init__(self, positions_T: torch.Tensor) -> None:
        self._positions_T = positions_T

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        """int64 [T], position of each row less its place in the call."""
        positions_T = self._positions_T
        return positions_T - torch.arange(positions_T.shape[0], device=positions_T.device)

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *others: Any, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as they are: the engine's attention keeps them."""
        return key, value


def give_positions(blocks: Iterable[nn.Module]) -> int:
    """Give every such attention in decoder blocks the positions of its rows; how many modules these are."""
    given = 0
    for block in blocks:
        for module in block.modules():
            if _counts_positions(module):
                # not of the block: gradient checkpointing takes caches from blocks
                names = inspect.signature(type(module).forward).parameters
                keyword = "cache" if "cache" in names else "past_key_values"  # of transformers before 5.24
                module.register_forward_pre_hook(functools.partial(_with_past, keyword), with_kwargs=True)
                given += 1
    return given


def _counts_positions(module: nn.Module) -> bool:
    """Whether a module's own forward looks up how many tokens a cache holds."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and _COUNTS in code.co_names


def _with_past(
    keyword: str, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    call = gate.current()
    if call is not None and call.positions_T is not None and keywords.get(keyword) is None:
        keywords = {**keywords, keyword: PastOfRows(call.positions_T)}
    return arguments, keywords
