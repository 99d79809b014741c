"""Shapes, dtypes and devices of an op's tensors in one line, and their check at calls through `torch.ops`.

    reward: D[B, T], value: D[B, T], mask: bool[B, T], bootstrap: D[B]

A size is a number or a name, which stands for one number throughout a call. `...` stands for any leading sizes, the
same in all tensors of a call, and `*` for their product. A name that ends in `_i` stands for another number in each
tensor of a list. `?` after the brackets allows an empty tensor [0] instead, `|` separates two forms. Tensors
are strided. None is taken where the function's annotation allows it; lora_A and lora_B come together. Dtypes: `D` is
one floating dtype throughout a call, `float` any, `int` is int32 or int64, `mask` is bool or floating, `real` is
anything but complex; others are torch's names.

Public functions check their own arguments, with words of their own, and call an op's function directly (`eager`). What
comes through `torch.ops` may come from anywhere, and is checked here.

An op takes flat arguments. Its Python function may take NamedTuples: each stands for one argument per field (`Op`).
"""

from __future__ import annotations

import collections
import inspect
import math
import re
import typing
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_ARGUMENT = re.compile(r"(\w+): (\w+)((?:\[[^\]]*\]\|?)+)(\??)")
_KINDS: dict[str, tuple[str, Callable[[torch.dtype], bool]]] = {
    "float": ("a floating dtype", lambda dtype: dtype.is_floating_point),
    "int": ("int32 or int64", lambda dtype: dtype in (torch.int32, torch.int64)),
    "mask": ("bool or a floating dtype", lambda dtype: dtype == torch.bool or dtype.is_floating_point),
    "real": ("a real dtype", lambda dtype: not dtype.is_complex),
}


class _Argument(NamedTuple):
    kind: str
    forms: tuple[tuple[str, ...], ...]
    """Sizes, in one or more forms."""
    may_be_none: bool


class _Call:
    """Sizes, dtype and device that earlier tensors of one call have set."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.leading: tuple[int, ...] | None = None
        self.dtype: torch.dtype | None = None
        self.device: torch.device | None = None

    def check(self, name: str, x: Tensor | None, argument: _Argument, place: str) -> None:
        """Raise unless x is as `argument` says; place: of x in a list, or ""."""
        if x is None:  # torch.library takes None for any tensor
            raise TypeError(f"{name}: expected a tensor, got None")
        if x.layout != torch.strided:
            raise TypeError(f"{name}: expected a strided tensor, got {x.layout}")
        self._check_dtype(name, x.dtype, argument.kind)
        self.device = x.device if self.device is None else self.device
        if x.device != self.device:
            raise ValueError(f"{name}: expected a tensor on {self.device}, got one on {x.device}")
        forms = [[re.sub("_i$", place, size) for size in form] for form in argument.forms]
        if not any(self._fits(tuple(x.shape), form) for form in forms):
            expected = " or ".join(f"[{', '.join(map(self._known, form))}]" for form in forms)
            raise ValueError(f"{name}: expected shape {expected}, got {list(x.shape)}")

    def _check_dtype(self, name: str, dtype: torch.dtype, kind: str) -> None:
        if kind == "D":
            if self.dtype is None and dtype.is_floating_point:
                self.dtype = dtype
            expected, fits = str(self.dtype or "a floating dtype"), dtype == self.dtype
        elif kind in _KINDS:
            expected, fits = _KINDS[kind][0], _KINDS[kind][1](dtype)
        else:
            expected, fits = kind, dtype == getattr(torch, kind)
        if not fits:
            raise TypeError(f"{name}: expected {expected}, got {dtype}")

    def _known(self, size: str) -> str:
        """A size as an error names it: the number, once there is one."""
        if size == "*" and self.leading is not None:
            return str(math.prod(self.leading))
        if size == "..." and self.leading is not None:
            return ", ".join(map(str, self.leading))
        return str(self.sizes.get(size, size))

    def _fits(self, shape: tuple[int, ...], form: Sequence[str]) -> bool:
        """Whether a shape has this form; sizes that are new are remembered if it has."""
        sizes, leading = dict(self.sizes), self.leading
        if form and form[0] == "...":
            form = form[1:]
            n_leading = len(shape) - len(form)
            if n_leading < 0 or (leading is not None and leading != shape[:n_leading]):
                return False
            leading, shape = shape[:n_leading], shape[n_leading:]
        if len(shape) != len(form):
            return False
        for size, got in zip(form, shape, strict=True):
            if size == "*" and leading is not None:
                wanted = math.prod(leading)
            else:
                wanted = int(size) if size.isdecimal() else sizes.setdefault(size, got)
            if wanted != got:
                return False
        self.sizes, self.leading = sizes, leading
        return True


class Signature:
    """The check of a function's arguments."""

    def __init__(self, parameters: Sequence[inspect.Parameter], text: str) -> None:
        annotations = {p.name: p.annotation for p in parameters}
        places = {name: place for place, name in enumerate(annotations)}
        self._has_lora = "lora_A" in annotations
        self._arguments: list[tuple[str, int, _Argument]] = []
        for name, kind, forms, maybe_empty in _ARGUMENT.findall(text):
            sizes = [tuple(filter(None, form.split(", "))) for form in re.findall(r"\[([^\]]*)\]", forms)]
            may_be_none = type(None) in typing.get_args(annotations[name])
            argument = _Argument(kind, (*sizes, *((("0",),) if maybe_empty else ())), may_be_none)
            self._arguments.append((name, places[name], argument))

    def check(self, args: Sequence[Any]) -> None:
        """Raise TypeError or ValueError, which names the argument, unless all tensors are as the text says."""
        call = _Call()
        if self._has_lora:
            A, B = (args[place] for name, place, _ in self._arguments if name in ("lora_A", "lora_B"))
            if (A is None) != (B is None):
                missing = "lora_A" if A is None else "lora_B"
                raise ValueError(f"{missing}: expected a tensor with the other of the two, got None")
        for name, place, argument in self._arguments:
            value = args[place]
            if isinstance(value, (list, tuple)):
                for i, x in enumerate(value):
                    call.check(f"{name}[{i}]", x, argument, f"_{i}")
            elif value is not None or not argument.may_be_none:
                call.check(name, value, argument, "")


class Op:
    """An op of `torch.library` whose function takes NamedTuples where the op takes a flat argument per field."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        tensors: str,
        also: Callable[[Any], None] | None = None,
        mutates_args: Sequence[str] = (),
    ) -> None:
        types = typing.get_type_hints(function)
        returned = types.pop("return")
        returned = None if returned is type(None) else returned  # `get_type_hints` makes a type of None
        self._function = function
        self.inputs = collections.namedtuple("inputs", types)  # type: ignore[misc]  # by the names of its parameters
        self._groups = [t if hasattr(t, "_fields") else None for t in types.values()]
        self._is_flat = not any(self._groups)
        flat: dict[str, Any] = {}
        for parameter, kind in types.items():
            flat |= typing.get_type_hints(kind) if hasattr(kind, "_fields") else {parameter: kind}
        self.names = tuple(flat)
        parameters = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=_as_tensor(kind))
            for name, kind in flat.items()
        ]
        signature = Signature(parameters, tensors)

        def checked(*args: Any) -> Any:
            signature.check(args)
            inputs = self.nest(args)
            if also is not None:
                also(inputs)
            return function(*inputs)

        checked.__signature__ = inspect.Signature(parameters, return_annotation=returned)  # type: ignore[attr-defined]
        schema = torch.library.infer_schema(checked, mutates_args=mutates_args)
        self._registered = torch.library.custom_op(name, checked, mutates_args=mutates_args, schema=schema)

    def __call__(self, *args: Any) -> Any:
        return self._registered(*self.flatten(args))

    def register_fake(self, fake: Callable[..., Any]) -> None:
        """Same as `torch.library`'s; arguments are those of the function."""
        self._registered.register_fake(lambda *args: fake(*self.nest(args)))

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """Same as `torch.library`'s; inputs are those of the function, by name. Gradients are flat (`gradients`)."""

        def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            setup_context(ctx, self.nest(inputs), output)

        self._registered.register_autograd(backward, setup_context=setup)

    def nest(self, args: Sequence[Any]) -> Any:
        """Arguments of the function, by name, from those of the op."""
        if self._is_flat:
            return self.inputs(*args)
        rest = iter(args)
        groups = self._groups
        return self.inputs(*(next(rest) if g is None else g(*(next(rest) for _ in g._fields)) for g in groups))

    def flatten(self, args: Sequence[Any]) -> Sequence[Any]:
        """Arguments of the op from those of the function."""
        if self._is_flat:
            return args
        flat: list[Any] = []
        for arg, group in zip(args, self._groups, strict=True):
            if group is None:
                flat.append(arg)
            else:
                flat.extend(arg)
        return flat

    def needed(self, ctx: Any, *names: str) -> list[Any]:
        """Entries of `ctx.needs_input_grad` for flat arguments."""
        return [ctx.needs_input_grad[self.names.index(name)] for name in names]

    def gradients(self, **named: Any) -> tuple[Any, ...]:
        """Result of a backward: gradients of flat arguments by name, None for all others."""
        return tuple(named.get(name) for name in self.names)


def _as_tensor(kind: Any) -> Any:
    """The type of an op's argument: where the function also takes a number, the op takes a tensor."""
    return Tensor if set(typing.get_args(kind)) == {Tensor, float} else kind


def custom_op(
    name: str, signature: str, *, also: Callable[[Any], None] | None = None, mutates_args: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Op]:
    """Decorator: `torch.library.custom_op` that checks tensors against `signature`, then calls `also` with all."""
    return lambda function: Op(name, function, signature, also, mutates_args)


def check_window(name: str, window: int | None) -> None:
    """Raise unless a number of visible keys is None or an integer from 1 to 2^56."""
    if window is None:
        return
    if not hasattr(window, "__index__"):
        raise TypeError(f"{name}: expected None or an integer, got {window!r}")
    if not 1 <= window <= 2**56:
        raise ValueError(f"{name}: expected None or an integer from 1 to 2^56, got {window!r}")
