"""Linears that read one tensor, such as queries, keys and values: their LoRA in one shrink and one expand.

For linears m with x in common, each with the equations of `lora_linear`: y_m = W_m x + b_m + delta_m. On a GPU a step
of training waits for its host, which queues a launch for every linear and step; here a group has one a step.

transformers calls the linears one after another. `Held` lets the first call compute all of them and keeps the others'
results until their calls come.

The group is a backend of the op `lora_group` that is asked for by name (`registry.use_op_backend`, or a default backend
`triton`): no GPU has run it. Wherever it does not serve, each linear runs by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_kernels.lora import lora_linear
from rlhf_kernels.lora.segments import Dropout, LoraCall, Segments, make_call
from rlhf_kernels.runtime import autocast, eager, registry, triton_support

OP = "lora_group"
_T = TypeVar("_T")
MOST = 4
"""Linears of a group at most."""

registry.register(OP, "reference", SimpleNamespace())  # each linear by itself
registry.register(
    OP, "triton", registry.Lazy("rlhf_kernels.lora.triton_group", triton_support.unsupported), by_name=True
)


class Reader(NamedTuple):
    """A linear that reads x, with the arguments of `lora_linear`; without adapters its lists are empty."""

    weight: Tensor  # [M, K]
    bias: Tensor | None  # [M]
    A: Sequence[Tensor] = ()  # per slot [r_i, K]
    B: Sequence[Tensor] = ()  # per slot [M, r_i]
    scales: Sequence[float] = ()
    segments: Segments = Segments(starts=(), ends=(), slots=())
    dropout: Dropout | None = None


def lora_linears(x: Tensor, readers: Sequence[Reader], *, backend: str = "auto") -> tuple[Tensor, ...]:
    """Results of linears that read one x, with their LoRA; each is that of `lora_linear`.

    `triton` takes up to four linears with frozen weights outside of autocast and of what traces or transforms calls; a
    row is in the same run in every linear that has it. Dropout has one seed and one tensor of row ids. Other calls are
    one of `lora_linear` for each linear.

    Args:
        x: [.., K], floating, N rows in two or more dimensions.
        readers: the linears, all with K columns and of x's dtype and device.
        backend: `auto` or the name of a backend, see `rlhf_kernels.runtime.registry`.

    Returns:
        y [.., M] of x's dtype for each linear.

    Raises:
        TypeError: as in `lora_linear`.
        ValueError: as in `lora_linear`, or runs of two linears overlap without being the same.
        BackendUnavailableError: the named backend cannot serve the call.
    """
    frozen = [w for reader in readers for w in (reader.weight, reader.bias)]
    tensors = [x, *frozen, *(w for reader in readers for w in (*reader.A, *reader.B))]
    grad = torch.is_grad_enabled()
    alone = (
        (registry.asked(OP) if backend == "auto" else backend) != "triton"
        or not 0 < len(readers) <= MOST
        or not eager.eager(*tensors)
        or autocast.is_on(x)
        or (grad and any(w is not None and w.requires_grad for w in frozen))
        or any(w is not None and (w.dtype != x.dtype or w.device != x.device) for w in frozen)
    )
    calls = [] if alone else [_call(x, reader) for reader in readers]
    on = [call for call in calls if call is not None]
    draws = {(call.seed, id(call.row_ids)) for call in on if call.row_ids is not None}
    if not on or len(draws) > 1:  # the group draws by one seed and one row's id
        return tuple(lora_linear(x, *reader[:-1], dropout=reader.dropout, backend=backend) for reader in readers)
    registry.resolve(OP, "triton", next((w for c in on for w in (*c.A, *c.B) if w.dtype == torch.float64), x))
    weights, biases = [reader.weight for reader in readers], [reader.bias for reader in readers]
    adapters = [w for call in on for w in call.A] + [w for call in on for w in call.B]
    if not grad or not any(w.requires_grad for w in (x, *adapters)):
        return tuple(_kernels().forward(x, weights, biases, calls)[0])
    return _Group.apply(weights, biases, calls, x, *adapters)  # type: ignore[no-any-return,no-untyped-call]


def _call(x: Tensor, reader: Reader) -> LoraCall | None:
    weight, bias, A, B, scales, segments, dropout = reader
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"weight: expected shape [M, {x.shape[-1]}], got {tuple(weight.shape)}")
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"bias: expected shape [{weight.shape[0]}], got {tuple(bias.shape)}")
    call = make_call(x, weight.shape[0], list(A), list(B), list(scales), segments, dropout)
    return call if call.A else None


def _kernels() -> Any:
    return registry.implementation(OP, "triton")


class _Group(torch.autograd.Function):
    """Results of a group that has adapters; h is kept, and a linear that no gradient reaches gets none."""

    @staticmethod
    def forward(ctx, weights, biases, calls, x, *adapters):  # type: ignore[no-untyped-def]
        ys, h = _kernels().forward(x, weights, biases, calls)
        kept = h if any(ctx.needs_input_grad[4 + len(adapters) // 2 :]) else None  # for dB
        row_ids = next((call.row_ids for call in calls if call is not None and call.row_ids is not None), None)
        ctx.save_for_backward(x, kept, row_ids, *weights, *adapters)
        ctx.calls = [
            None if call is None else call._replace(A=call.A[:0], B=call.B[:0], row_ids=None) for call in calls
        ]
        ctx.counts = [0 if call is None else len(call.A) for call in calls]
        ctx.set_materialize_grads(False)
        ctx.kernels = registry.effective()
        return tuple(ys)

    @staticmethod
    @once_differentiable
    def backward(ctx, *dys):  # type: ignore[no-untyped-def]
        x, h, row_ids, *rest = ctx.saved_tensors
        n_slots, at = sum(ctx.counts), 0
        weights, A, B = rest[: len(dys)], rest[len(dys) : len(dys) + n_slots], rest[len(dys) + n_slots :]
        calls: list[LoraCall | None] = []
        reached: list[bool] = []
        for call, count, dy in zip(ctx.calls, ctx.counts, dys, strict=True):
            own = slice(at, at + count)
            given = None if call is None or not any(call.p) else row_ids
            calls.append(None if call is None else call._replace(A=A[own], B=B[own], row_ids=given))
            reached += [dy is not None] * count
            at += count
        need_x, *need = ctx.needs_input_grad[3:]
        need = [wanted and there for wanted, there in zip(need, reached * 2, strict=True)]
        filled = [
            x.new_zeros(*x.shape[:-1], w.shape[0]) if dy is None else dy for dy, w in zip(dys, weights, strict=True)
        ]
        with ctx.kernels.used():  # as `eager.EagerOp`'s
            grads = iter(_kernels().backward(filled, x, h, weights, calls, need_x, need[:n_slots], need[n_slots:]))
        return None, None, None, *(next(grads) if wanted else None for wanted in (need_x, *need))


class Held(threading.local):
    """Results of a group, by the owner of each, until their calls come; each thread has its own.

    They are for calls with the very tensor x that the first one had, unchanged, in the same grad mode. What another
    tensor asks for drops them.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drop what is held."""
        self._for: tuple[Any, ...] = (None, None, None)
        self._results: dict[int, Tensor] = {}

    def put(self, x: Tensor, results: dict[int, Tensor]) -> None:
        """Hold results.

        Args:
            x: what the linears read.
            results: y of each by the id of its owner.
        """
        self._for, self._results = self._key(x), results

    def take(self, x: Tensor, owner: object) -> Tensor | None:
        """The owner's result for x, which is held no longer; None if there is none.

        Args:
            x: what the owner reads.
            owner: whose id the result was put under.
        """
        if not self._results:
            return None
        own, *state = self._key(x)
        mine = own is self._for[0] and state == [*self._for[1:]]
        y = self._results.pop(id(owner), None) if mine else None
        if y is None or not self._results:
            self.clear()
        return y

    @staticmethod
    def _key(x: Tensor) -> tuple[Any, ...]:
        return x, None if x.is_inference() else x._version, torch.is_grad_enabled()


held = Held()


def is_wanted() -> bool:
    """Whether groups are asked for: their backend is `triton`, and nothing compiles the call."""
    return registry.asked(OP) == "triton" and not torch.compiler.is_compiling()


def read(x: Tensor, owner: _T, group: Sequence[_T], reader_of: Callable[[_T], Reader]) -> Tensor:
    """The owner's y for x, which an earlier linear of its group has computed, or which it computes with the others'.

    Args:
        x: [.., K], floating.
        owner: a linear.
        group: linears that are expected to read x one after another, the owner first.
        reader_of: weights and adapters of one of them.

    Returns:
        y [.., M] as from `lora_linear`.

    Raises:
        TypeError: as in `lora_linear`.
        ValueError: as in `lora_linear`.
        BackendUnavailableError: the backend cannot serve the call.
    """
    y = held.take(x, owner)
    if y is None:
        y, *others = lora_linears(x, [reader_of(member) for member in group])
        held.put(x, {id(member): result for member, result in zip(group[1:], others, strict=True)})
    return y
