"""Wrong values for the arguments of a right call, one at a time.

`changes` makes them by the type of a value. The extension's integers need more: `extension_changes` goes by what an
argument stands for, and `EXTENSION` says that for every function.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .direct_calls import MUTATIONS

Change = tuple[str, Any]
"""What was done, and the value that came of it."""
HUGE = 2**62
_DTYPES = ("float64", "bfloat16", "float16", "int16", "int32", "int64", "bool", "complex64")


# ---- by the type of a value ------------------------------------------------------------------------------------------


def changes(value: Any) -> Iterator[Change]:
    """Wrong values in place of one that is right; a list's and a record's parts are made wrong one at a time."""
    if isinstance(value, Tensor):
        yield from _tensor_changes(value.detach())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            for label, wrong in changes(getattr(value, field.name)):
                with_wrong = _built(dataclasses.replace, value, **{field.name: wrong})
                if with_wrong is not None:
                    yield f".{field.name} {label}", with_wrong
    elif isinstance(value, (list, tuple)):
        yield from _sequence_changes(value)
    elif isinstance(value, dict):
        yield "empty", {}
        for key, part in value.items():
            for label, wrong in changes(part):
                yield f"[{key!r}] {label}", {**value, key: wrong}
    elif isinstance(value, bool):
        yield "flipped", not value
    elif isinstance(value, int):
        numbers = {value - 1, value + 1, 0, -1, 2**31, HUGE, -HUGE, 2**63} - {value}
        yield from ((str(number), number) for number in sorted(numbers))
    elif isinstance(value, float):
        yield from ((str(number), number) for number in (math.nan, math.inf, -math.inf, 0.0, -1.0, 1e300))
    elif isinstance(value, str):
        yield from (("no text", ""), ("unknown", "unknown"), ("a number", 3))
    if value is None:
        yield from (("a tensor", torch.zeros(1)), ("a number", 1), ("a scalar", torch.tensor(1.0)))
    else:
        yield "None", None


def _built(make: Any, *args: Any, **named: Any) -> Any:
    """What `make` gives, or None if it refuses the values itself."""
    try:
        return make(*args, **named)
    except (TypeError, ValueError):
        return None


def _sequence_changes(value: list[Any] | tuple[Any, ...]) -> Iterator[Change]:
    names = getattr(value, "_fields", None)
    if names is None and value:
        kind = type(value)
        yield from (("a part less", value[:-1]), ("no parts", kind()), ("a part more", kind([*value, value[-1]])))
    places = range(len(value)) if names or len(value) <= 3 else (0, len(value) - 1)
    for i in places:
        for label, wrong in changes(value[i]):
            parts = [*value[:i], wrong, *value[i + 1 :]]
            where = f".{names[i]}" if names else f"[{i}]"
            yield f"{where} {label}", type(value)(*parts) if names else type(value)(parts)


def _tensor_changes(x: Tensor) -> Iterator[Change]:
    for label, change in MUTATIONS.items():
        wrong = change(x)
        if wrong is not None:
            yield label, wrong
    for d in range(x.dim()):
        size = x.shape[d]
        yield (
            f"a size more in dimension {d}",
            torch.cat([x, x.narrow(d, 0, 1)], d)
            if size
            else x.new_zeros([1 if i == d else n for i, n in enumerate(x.shape)]),
        )
        if 0 < d < x.dim() - 1 and size:
            yield f"a size less in dimension {d}", x.narrow(d, 0, size - 1).clone()
        yield f"none in dimension {d}", x.narrow(d, 0, 0).clone()
        if size:
            huge = [2**40 if i == d else n for i, n in enumerate(x.shape)]
            yield f"2^40 in dimension {d}", x.narrow(d, 0, 1).expand(huge)
    if x.dim() >= 2:
        yield "2^62 elements", x.new_zeros(()).expand(2**31, 2**31, *[1] * (x.dim() - 2))
        yield "a dimension less", x.reshape(-1, *x.shape[2:])
        turned = x.new_empty(x.shape[::-1]).permute(*reversed(range(x.dim())))
        yield "columns first", turned.copy_(x)
    if x.dim() >= 1 and x.numel():
        yield "flat", x.reshape(-1).clone()
        yield "a scalar", x.reshape(-1)[0].clone()
        yield "every second element", torch.stack([x, x], -1)[..., 0]
        yield "one element expanded", x.reshape(-1)[0].clone().expand(x.shape)
    for name in _DTYPES:
        if x.dtype != getattr(torch, name):
            yield name, x.to(getattr(torch, name))
    yield "meta", x.to("meta")
    if x.dim() >= 1:
        yield "sparse", x.to_sparse()
    yield from (("a list", x.tolist()), ("a number", 1))
    if not x.numel():
        return
    if x.dtype in (torch.int32, torch.int64):
        wide = x.dtype == torch.int64
        for number in (-1, 2**31 - 1, *((2**31, HUGE, -HUGE, 2**63 - 1, -(2**63)) if wide else ())):
            for label, index in (("first", 0), ("last", -1)):
                wrong = x.clone()
                wrong.view(-1)[index] = number
                yield f"{label} element {number}", wrong
            yield f"all elements {number}", torch.full_like(x, number)
    elif x.is_floating_point():
        for number in (math.nan, math.inf, -math.inf, 0.0):
            yield f"all elements {number}", torch.full_like(x, number)


# ---- by what an integer of the extension stands for ------------------------------------------------------------------

_MATRIX = "(a s k)"
_SLOT = f"({_MATRIX} {_MATRIX} n f f a a)"
_RUNS = "[(r r n n)]"
_LANES = f"n n [{_SLOT}] {_RUNS} (i a i) t"
_HEAD = "(a s k a n n f f a) (a s k a n a a) [(n n a s k n a s k a a a)]"
_ROTARY = "a s s s a a s n n n n t a"
_CACHES = "[(a s s s)]"
_PACKED = "c (n n n n n) (a s s) (a s s) (a s s)"
EXTENSION = {
    "activation_apply": "a i n t a",
    "activation_gradient": "a a i n t a",
    "attention": f"{_PACKED} a a (f i f a) a a t",
    "attention_gradient": f"{_PACKED} (a s s) a a (f i f a) a a a a a a t",
    "DecodeStep": f"k (n n n n n) a s a f f [(a a a a [(a s a n n)] n)] [(f [({_MATRIX} {_MATRIX} n)])]",
    "DecodeStep.__call__": "n a a a a n a a n a t",
    "DecodeStep.bind": f"n n {_CACHES} {_CACHES}",
    "LoraDecoder": f"{_MATRIX} a n n n [{_SLOT}] {_RUNS}",
    "LoraDecoder.__call__": "a s a t",
    "decode_attention": "c (n n n n) a (s s s) a (s s s s) a (s s s s) a a (n n n) f i f a a t",
    "gae_backward": "a s a s a s n n f f t a a a",
    "gae_forward": "a s a s a s a n n f f t a a",
    "gather_logprob_backward": "a a s s a a f i n n t a a a a a a a a a a s s",
    "gather_logprob_forward": "a a s s a a f i n n t a a a a a a",
    "head_backward": f"{_HEAD} (a a a a a a a a a a a a s) a a c a t",
    "head_forward": f"{_HEAD} (a a a a a a) (a s k a a a) a a t",
    "head_sample": f"{_HEAD} a a a a n a i a a a t",
    "linear_forward": "k a s a s a a s n n n t",
    "linear_input_gradient": "k a s a s a a a s n n n t",
    "linear_is_packed": "k a s a n n i",
    "linear_pack": "k a s a n n t",
    "linear_packed_bytes": "k n n",
    "linear_weight_gradient": "k a s a s a s n n n t",
    "lora_backward": f"{_MATRIX} {_MATRIX} {_MATRIX} {_LANES}",
    "lora_forward": f"{_MATRIX} {_MATRIX} b {_LANES}",
    "masked_moments": "a a n t a",
    "ppo_loss_entropy_gradient": "f a c f f n t a",
    "ppo_loss_forward": "a a a a a c a c f f f f i f f n t a a a",
    "rms_norm_apply": "a a b f n n t a a",
    "rms_norm_gradient": "a a a b a n n t a",
    "rotary_apply": _ROTARY,
    "rotary_gradient": _ROTARY,
    "set_isa": "x",
    "swiglu_apply": "a a n t a",
    "swiglu_gradient": "a a a n t a a",
    "value_loss_forward": "a a a c a c f f n t a a a",
    "whiten_backward": "a a a a n b b t a",
    "whiten_forward": "a a a n b f t a a",
}
"""Arguments of every function of the extension, named without the dtype at its end.

    a address   s stride   n size   r row that a run begins with   t threads   k number of a type   c what memory holds
    i any integer   f number   b flag   x text   (...) tuple   [...] list of such

Memory behind an address ends where the caller says: that a stride, a type or a larger size is wrong nobody can see, so
these are changed only into what no caller can mean.
"""

NO_TENSORS = ("None", "a list", "a number", "a part less", "a part more", "no parts", "empty")
"""Ends of labels of changes that leave another kind of thing, on which Python's own errors are as good as ours."""
_WRONG_KIND: list[Change] = [("None", None), ("text", "1"), ("a fraction", 1.5), ("2^64", 2**64)]
_OF_ROLE: dict[str, list[Any]] = {
    "a": [0, -1],
    "n": [0, -1, HUGE, -HUGE],
    "r": [0, -1, -HUGE],
    "t": [0, -1, 2**31 - 1, -(2**31)],
    "k": [-1, 3],
    "i": [0, -1, HUGE, -HUGE],
}


def parsed(text: str) -> list[Any]:
    """The arguments that a line of `EXTENSION` names: letters, tuples of them, lists of one."""
    stack: list[list[Any]] = [[]]
    for sign in text.replace(" ", ""):
        if sign in "([":
            stack.append([])
        elif sign in ")]":
            done = stack.pop()
            stack[-1].append(tuple(done) if sign == ")" else done)
        else:
            stack[-1].append(sign)
    return stack[0]


def extension_changes(value: Any, role: Any) -> Iterator[Change]:
    """Wrong values in place of an argument of the extension that is right."""
    if isinstance(role, list):
        yield from (("a part less", value[:-1]), ("no parts", []), ("None", None))
        for i in sorted({0, len(value) - 1} if value else ()):
            for label, wrong in extension_changes(value[i], role[0]):
                yield f"[{i}] {label}", [*value[:i], wrong, *value[i + 1 :]]
    elif isinstance(role, tuple):
        if value is None:
            return
        yield from (("a part less", value[:-1]), ("no parts", ()), ("a part more", (*value, 0)), ("a number", 1))
        for i, part in enumerate(role):
            for label, wrong in extension_changes(value[i], part):
                yield f"[{i}] {label}", (*value[:i], wrong, *value[i + 1 :])
    elif role != "c":
        if role == "n" and value > 0:
            yield str(value - 1), value - 1
        for wrong in _OF_ROLE.get(role, ()):
            if wrong != value:
                yield str(wrong), wrong
        if role == "f":
            yield from (("nan", math.nan), ("inf", math.inf), ("text", "1"))
        elif role == "x":
            yield from (("no text", ""), ("unknown", "unknown"), ("None", None))
        elif role == "b":
            yield "flipped", not value
        elif role != "b":
            yield from _WRONG_KIND


def must_be_refused(role: Any, label: str) -> bool:
    """Whether a change of a lone argument leaves nothing that could be meant."""
    return label in ("None", "text", "2^64") if role in "asnrtk" else False
