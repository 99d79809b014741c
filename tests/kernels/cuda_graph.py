"""Capturing a step in a CUDA graph, as PyTorch asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .checks import same_bits


def capture(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of `step`, which has run once before on another stream, and what it returned while captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


def detached(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors without their history: a leaf's node in it would bind a later capture to the stream of this step."""
    return tuple(tensor.detach() for tensor in tensors)


def repeated_and_captured(step: Callable[[], Any], expected: Any) -> None:
    """Run a step nine times, and once in a graph, each time with the same bits."""
    expected = [x.detach().clone() for x in expected]
    for _ in range(9):
        same_bits(step(), expected)
    graph, captured = capture(step)
    for x in captured:
        x.detach().zero_()
    graph.replay()
    torch.cuda.synchronize()
    same_bits(captured, expected)
