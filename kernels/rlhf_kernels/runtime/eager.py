"""Custom ops whose eager calls skip `torch.library`.

A call through `torch.library.custom_op` costs tens of µs, with autograd and lists of tensors hundreds: more than
a small layer. Only tracers and tensor subclasses need it, so

    @eager.custom_op("rlhf_kernels::name", "x: D[N, H], ws: D[H]")
    def _op(x: Tensor, ws: list[Tensor], scale: float) -> Tensor: ...

    @_op.register_fake
    ...
    _op.register_autograd(backward, setup_context=setup)

registers the op as `torch.library.custom_op(..., mutates_args=())` does (`opcheck`, `torch.compile`, `torch.ops`), with
a check of its tensors (`signature`). `_op(...)` calls

* the registered op under torch.compile, make_fx, fake tensors, torch.func, forward-mode AD, tracing, any dispatch
  or function mode; also for tensor subclasses, meta tensors and lazily negated or zero ones (`eager` decides);
* the function itself otherwise, which checks nothing, beneath a plain `autograd.Function` if a gradient is wanted.

Both run the same function, `setup` and `backward`, so their results have the same bits. `setup` and `backward` are
those of `signature.Op`: `ctx.needs_input_grad` and the returned gradients are nested like the flat arguments. The
function has to be functional: it writes to no argument and returns none. Arguments are positional.

No op has a second derivative: with `create_graph=True` its gradients refuse to be differentiated. `torch.library` has
no rules for `torch.func.grad`, which ends in torch's error.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _get_tracing_state, _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from rlhf_kernels.runtime import registry, signature

_PLAIN = (Tensor, torch.nn.Parameter)
_REQUIRES_GRAD = operator.attrgetter("requires_grad")
_NO_TENSORS = frozenset({type(None), bool, float, int, str})


def custom_op(
    name: str, tensors: str, *, also: Callable[[Any], None] | None = None
) -> Callable[[Callable[..., Any]], EagerOp]:
    """Decorator: register a function as a functional custom op `namespace::name`.

    Args:
        name: `namespace::name`.
        tensors: what the registered op checks, see `signature`.
        also: called with all arguments, by name, after that check, to raise where more is wrong.
    """
    return lambda function: EagerOp(name, function, tensors, also)


class EagerOp(signature.Op):
    """A registered custom op, whose function is called directly where nothing traces or transforms the call."""

    setup: Callable[..., None] | None = None
    backward: Callable[..., Any] | None = None

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """Same as `signature.Op`'s; gradients refuse to be differentiated, and are made by the forward's settings."""

        def setup(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.kernels = registry.effective()
            setup_context(ctx, inputs, output)

        def once(ctx: Any, *grads: Tensor) -> Any:
            if not torch.is_grad_enabled():
                return backward(ctx, *grads)
            with torch.no_grad():
                gradients = backward(ctx, *grads)
            if not isinstance(gradients, tuple):
                return self._undifferentiable(gradients)
            return tuple(map(self._undifferentiable, gradients))

        def run(ctx: Any, *grads: Tensor) -> Any:
            if ctx.kernels is registry.effective():
                return once(ctx, *grads)
            with ctx.kernels.used():
                return once(ctx, *grads)

        self.backward, self.setup = run, setup
        super().register_autograd(run, setup_context=setup)

    def _undifferentiable(self, grad: Any) -> Any:
        """A gradient, or a list of them, whose own gradient is an error."""
        if isinstance(grad, list):
            return [self._undifferentiable(g) for g in grad]
        if grad is None:
            return None
        refuse = torch._C._functions.DelayedError(f"{self._registered._qualname} has no second derivative", 1)
        return refuse(grad.detach().requires_grad_())

    def __call__(self, *args: Any) -> Any:
        flat = self.flatten(args)
        if torch.compiler.is_compiling():
            return self._registered(*flat)
        tensors, nesting = _flatten(flat)
        if _watched() or not _plain(tensors):
            return self._registered(*flat)
        if not torch.is_grad_enabled() or not any(map(_REQUIRES_GRAD, tensors)):
            return self._function(*args)
        if self.backward is None:  # its result says on backward that there is no formula
            return self._registered(*flat)
        return _apply(self, args, nesting, *tensors)


def eager(*tensors: Tensor | None) -> bool:
    """True if all tensors are plain ones and nothing watches or transforms the calls made now.

    False while compiling or tracing, in an active torch dispatch or torch function mode, and under `torch.func` and
    forward-mode AD. False too for tensor subclasses, meta tensors and lazily negated or zero ones. None stands for an
    argument that was not given.
    """
    return not torch.compiler.is_compiling() and not _watched() and _plain(tensors)


def is_transformed() -> bool:
    """Whether `torch.func` transforms the calls made now."""
    return peek_interpreter_stack() is not None


def _watched() -> bool:
    """Whether anything but a compiler watches or transforms calls."""
    return (
        _len_torch_dispatch_stack() > 0
        or _len_torch_function_stack() > 0
        or is_transformed()
        or _get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def _plain(tensors: Sequence[Tensor | None]) -> bool:
    for x in tensors:
        if x is not None and (type(x) not in _PLAIN or x.is_meta or x.is_neg() or x._is_zerotensor()):
            return False
    return True


def _flatten(args: Sequence[Any]) -> tuple[list[Tensor], list[int]]:
    """Tensors and lists of tensors among the arguments (a list is all tensors or none), and how they lie there.

    Returns:
        All tensors, and per argument the length of a list of tensors, −1 for a tensor or −2 for anything else.
    """
    flat: list[Tensor] = []
    nesting = []
    for arg in args:
        kind = type(arg)
        if kind in _NO_TENSORS:
            nesting.append(-2)
        elif kind in _PLAIN or isinstance(arg, Tensor):
            flat.append(arg)
            nesting.append(-1)
        elif isinstance(arg, (list, tuple)) and len(arg) > 0 and isinstance(arg[0], Tensor):
            flat += arg
            nesting.append(len(arg))
        else:
            nesting.append(-2)
    return flat, nesting


class _Node(torch.autograd.Function):
    """Autograd function as `torch.library` generates it for an op with an autograd formula, without its dispatch."""

    @staticmethod
    def forward(ctx: Any, op: EagerOp, args: tuple[Any, ...], nesting: list[int], *tensors: Tensor) -> Any:
        output = op._function(*args)
        assert op.setup is not None
        op.setup(ctx, op.inputs(*args), output)
        ctx.eager_op = op
        ctx.eager_nesting = nesting
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        flat_needed = iter(ctx.needs_input_grad[3:])
        saved = ctx.needs_input_grad
        ctx.needs_input_grad = tuple(
            next(flat_needed) if n == -1 else [next(flat_needed) for _ in range(n)] if n >= 0 else False
            for n in ctx.eager_nesting
        )
        try:
            nested = ctx.eager_op.backward(ctx, *grads)
        finally:
            ctx.needs_input_grad = saved
        nested = nested if isinstance(nested, tuple) else (nested,)
        flat: list[Tensor | None] = [None, None, None]
        for n, grad in zip(ctx.eager_nesting, nested, strict=True):
            if n == -1:
                flat.append(grad)
            elif n >= 0:
                flat += [None] * n if grad is None else list(grad)
        return tuple(flat)


# `Function.apply` less its looks for torch.func, which `_watched` has had
_apply = super(torch.autograd.Function, _Node).apply
