"""What tests of several ops share: where they run, loops within an item, threads, memory, traces, red zones."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from rlhf_kernels.runtime import native
from rlhf_kernels.runtime.testing import NumericReport, tier1, tier3
from rlhf_kernels.runtime.triton_support import INTERPRETED
from torch import Tensor

ISAS = [] if native.missing() else native.isas()
"""Instruction sets of this CPU that the native code distinguishes."""
needs_native = pytest.mark.skipif(not ISAS, reason=str(native.missing()))
BACKENDS = ["reference", pytest.param("cpu", marks=needs_native)]


def each(names: str | Sequence[str], values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As `parametrize`, within one item: from the same seed for each value, which a failure names."""
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    cases = [dict(zip(keys, value if len(keys) > 1 else (value,), strict=True)) for value in values]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            skipped = []
            for case in cases:
                torch.manual_seed(0)
                try:
                    test(**fixtures, **case)
                except pytest.skip.Exception as reason:
                    skipped.append(reason)
                except Exception as error:
                    error.add_note(f"with {case}")
                    raise
            if len(skipped) == len(cases):
                raise skipped[0]

        signature = inspect.signature(test)
        kept = [parameter for name, parameter in signature.parameters.items() if name not in keys]
        run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return run

    return decorate


def same_bits(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> None:
    """Fail unless as many tensors are equal bit by bit."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(a, b), f"tensor {i} of {a.dtype} differs"


def in_any_company(run: Callable[..., Iterable[Tensor]], tensors: Sequence[Tensor], companies: Iterable[Any]) -> None:
    """Rows have the bits among some that they have among all; `run` returns tensors of the same rows."""
    whole = list(run(*tensors))
    for rows in companies:
        same_bits(run(*(x[rows] for x in tensors)), [y[rows] for y in whole])


def with_gradients(function: Callable[..., Tensor], leaves: Sequence[Tensor], dy: Tensor) -> list[Tensor]:
    """y and the gradients of the leaves."""
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def alike(backend: str, ours: Iterable[Tensor], theirs: Iterable[Tensor], **close: float) -> None:
    """Of one order of sums: equal bit by bit; close where torch, whose order follows the layout, adds up."""
    if backend != "reference":
        return same_bits(ours, theirs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **close)


def tier_of_dtype(actual: Tensor, exact: Tensor, eager: Tensor) -> NumericReport:
    """T1 for float32, T3 for half types.

    Triton's interpreter cuts fp32 down to bf16 instead of rounding, which may cost an ulp, at most 2⁻⁷ |x|.
    """
    if actual.dtype == torch.float32:
        return tier1(actual, exact, eager)
    if not (INTERPRETED and actual.dtype == torch.bfloat16):
        return tier3(actual, exact, eager)
    error = ((actual.double() - exact).abs() - exact.abs() * 2**-7).max().item()
    bound = 2 * (eager.double() - exact).abs().max().item()
    return NumericReport(tier="T3", error=error, bound=bound, ok=error <= bound)


def with_threads(run: Callable[[], Any], *counts: int) -> list[Any]:
    """What a function returns with each number of threads."""
    before, results = torch.get_num_threads(), []
    try:
        for count in counts:
            torch.set_num_threads(count)
            results.append(run())
    finally:
        torch.set_num_threads(before)
    return results


def threads_change_no_bit(run: Callable[[], Iterable[Tensor]], *counts: int) -> None:
    first, *others = [list(result) for result in with_threads(run, *(counts or (1, 2, 3)))]
    for other in others:
        same_bits(first, other)


def largest_allocation(function: Callable[[], object]) -> int:
    """Bytes of the largest tensor that a function makes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    return max(event.self_cpu_memory_usage for event in profile.events())


def traced_alike(function: Callable[..., Sequence[Tensor]], leaves: Sequence[Tensor], ops: set[str]) -> None:
    """`make_fx` sends a call through the registered ops; its graph holds them and gives the bits of the eager call."""
    traced = torch.fx.experimental.proxy_tensor.make_fx(function)(*leaves)
    assert ops <= {node.target._opname for node in traced.graph.nodes if hasattr(node.target, "_opname")}
    same_bits(function(*leaves), traced(*leaves))


# ---- CUDA graphs, as PyTorch asks for them ----------------------------------------------------------------------


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


def detached(*tensors: Tensor) -> tuple[Tensor, ...]:
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
