"""Custom ops whose eager calls skip `torch.library`.

A call through `torch.library.custom_op` costs tens of µs, with autograd and lists of tensors hundreds: more than
a small layer. Nobody but tracers and tensor subclasses needs it, so

    @eager.custom_op("rlhf_kernels::name")
    def _op(x: Tensor, ws: list[Tensor], scale: float) -> Tensor: ...

    @_op.register_fake
    ...
    _op.register_autograd(backward, setup_context=setup)

registers the op exactly as `torch.library.custom_op(..., mutates_args=())` does (`opcheck`, `torch.compile`,
`torch.ops`), and `_op(...)` calls

* the registered op under torch.compile, make_fx, fake tensors, torch.func, forward-mode AD, tracing, any dispatch
  or function mode, and for tensor subclasses, meta tensors and lazily negated or zero ones (`eager` decides);
* the function itself otherwise, beneath a plain `autograd.Function` if a gradient is wanted.

Both run the same function, `setup` and `backward`, so their results have the same bits. `setup` and `backward` are
`torch.library`'s: `ctx.needs_input_grad` and the returned gradients are nested like the arguments. The function has to
be functional: it writes to no argument and returns none. Arguments are positional.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _get_tracing_state, _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

_PLAIN = (Tensor, torch.nn.Parameter)


def custom_op(name: str) -> Callable[[Callable[..., Any]], EagerOp]:
    """Decorator: register a function as a functional custom op `namespace::name`."""
    return lambda function: EagerOp(name, function)


class EagerOp:
    """A registered custom op, called directly where nobody looks on."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._function = function
        self._registered = torch.library.custom_op(name, mutates_args=())(function)
        self._setup: Callable[..., None] | None = None
        self._backward: Callable[..., Any] | None = None

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """Same as `torch.library`'s."""
        return self._registered.register_fake(fake)

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """Same as `torch.library`'s."""
        self._backward, self._setup = backward, setup_context
        self._registered.register_autograd(backward, setup_context=setup_context)

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._registered(*args)
        tensors = _flat_tensors(args)
        if not eager(*tensors):
            return self._registered(*args)
        if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
            return self._function(*args)
        if self._backward is None:  # its result says on backward that there is no formula
            return self._registered(*args)
        return _Node.apply(self, args, *tensors)


def eager(*tensors: Tensor | None) -> bool:
    """True if all tensors are plain ones and nothing watches or transforms the calls made now.

    False while compiling or tracing, in an active torch dispatch or torch function mode, under `torch.func` and
    forward-mode AD, and for tensor subclasses, meta tensors and lazily negated or zero ones. None stands for an
    argument that was not given.
    """
    if (
        torch.compiler.is_compiling()
        or _len_torch_dispatch_stack()
        or _len_torch_function_stack()
        or peek_interpreter_stack() is not None
        or _get_tracing_state() is not None
        or forward_ad._current_level >= 0
    ):
        return False
    for x in tensors:
        if x is not None and (type(x) not in _PLAIN or x.is_meta or x.is_neg() or x._is_zerotensor()):
            return False
    return True


def _flat_tensors(args: Sequence[Any]) -> list[Tensor]:
    """Tensors and lists of tensors among the arguments; a list is all tensors or none."""
    flat = []
    for arg in args:
        if type(arg) in _PLAIN or isinstance(arg, Tensor):
            flat.append(arg)
        elif _holds_tensors(arg):
            flat += arg
    return flat


def _holds_tensors(arg: Any) -> bool:
    return isinstance(arg, (list, tuple)) and len(arg) > 0 and isinstance(arg[0], Tensor)


class _Node(torch.autograd.Function):
    """What `torch.library` generates for an op with an autograd formula, without its dispatch."""

    @staticmethod
    def forward(ctx: Any, op: EagerOp, args: tuple[Any, ...], *tensors: Tensor) -> Any:
        output = op._function(*args)
        assert op._setup is not None
        op._setup(ctx=ctx, inputs=args, output=output)
        ctx.eager_op = op
        # per argument: the length of a list of tensors, −1 for a tensor, −2 for anything else
        ctx.eager_nesting = [-1 if isinstance(arg, Tensor) else len(arg) if _holds_tensors(arg) else -2 for arg in args]
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        flat_needed = iter(ctx.needs_input_grad[2:])
        saved = ctx.needs_input_grad
        ctx.needs_input_grad = tuple(
            next(flat_needed) if n == -1 else [next(flat_needed) for _ in range(n)] if n >= 0 else False
            for n in ctx.eager_nesting
        )
        try:
            nested = ctx.eager_op._backward(ctx, *grads)
        finally:
            ctx.needs_input_grad = saved
        nested = nested if isinstance(nested, tuple) else (nested,)
        flat: list[Tensor | None] = [None, None]
        for n, grad in zip(ctx.eager_nesting, nested, strict=True):
            if n == -1:
                flat.append(grad)
            elif n >= 0:
                flat += [None] * n if grad is None else list(grad)
        return tuple(flat)
