"""RMS norms, rotary embeddings, gated MLPs and activations of a backbone on `rlhf_kernels.llama_ops`.

A module whose class computes what an op computes gets a subclass of that class, with another `forward`; parameters and
their names stay. What a class computes is not guessed from its name: its own `forward` is tried on a stand-in that has
nothing but the attributes the op knows of, and has to give the bits of the op's reference. A class that fails keeps its
`forward`. Modules of one activation class may compute different functions, so each is tried itself: in float32 against
float64 values of what the op can compute.

Where the kernels do not serve (another device or dtype, `--kernels reference`, under autocast or torch.compile), the
modules run their own code; so they do where the registry prefers the reference, as activations on a GPU outside exact
mode. Where the kernels serve, a rotary embedding keeps the module's bits. Norms and gated products have an order of
sums and a logistic function of their own, on a CPU those of decoding. They round where the modules do. Activations and
all gradients are rounded once instead of at every step.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from types import CellType, FunctionType, SimpleNamespace
from typing import Any

import torch
from rlhf_kernels.llama_ops import activation, reference, rms_norm, rotary, swiglu
from rlhf_kernels.llama_ops.native import KINDS
from rlhf_kernels.runtime import registry
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from rlhf_engine.devices import is_eager

_FAILURES = (AttributeError, TypeError, RuntimeError, ValueError, LookupError, AssertionError)
"""Errors of a trial with a class that wants attributes or arguments of its own."""
_ROTARY = "apply_rotary_pos_emb"  # name of the function that turns queries and keys, in the modelling files


def fuse_llama_ops(model: nn.Module) -> int:
    """Exchange the `forward` of every module that one of the ops can serve; how many that were."""
    fused, gates = 0, set[int]()
    for module in model.modules():
        fused_class = _fused_class(type(module))
        gate = type(getattr(module, "act_fn", nn.SiLU()))  # of the instance, not of its class
        if fused_class is not None and gate.__name__ in ("SiLU", "SiLUActivation"):
            module.__class__ = fused_class
            fused += 1
        if getattr(type(module), "fused_forward", False):
            gates.add(id(getattr(module, "act_fn", None)))  # a part of `swiglu`, and without it torch's
    for module in model.modules():
        kind = None if id(module) in gates else _activation_kind(module)
        if kind is not None:
            module.__class__ = _activation_class(type(module), kind)
            fused += 1
    return fused


_FUSED: dict[type[nn.Module], type[nn.Module] | None] = {}  # fused subclass of each class met so far, or None


def _fused_class(cls: type[nn.Module]) -> type[nn.Module] | None:
    if getattr(cls, "fused_forward", False):
        return None
    if cls not in _FUSED:
        with _disable_current_modes():
            candidates = (recognise(cls) for recognise in (_norm_forward, _mlp_forward, _attention_forward))
            forward = next((candidate for candidate in candidates if candidate is not None), None)
        _FUSED[cls] = None if forward is None else _subclass(cls, forward)
    return _FUSED[cls]


def _subclass(cls: type[nn.Module], forward: Callable[..., Any], kind: str | None = None) -> type[nn.Module]:
    members = {
        "forward": forward,
        "fused_forward": True,
        "__reduce__": lambda self: (_remake, (cls, kind), self.__dict__),  # no module holds a class made here
    }
    return type(cls.__name__, (cls,), members)


def _remake(cls: type[nn.Module], kind: str | None = None) -> nn.Module:
    """An empty module of what became of a class, for copies and pickles; kind: of an activation."""
    own_class = (_fused_class(cls) or cls) if kind is None else _activation_class(cls, kind)
    made: nn.Module = own_class.__new__(own_class)
    return made


def _backend(op: str, *tensors: Tensor) -> str | None:
    """The backend whose kernel runs for these tensors, in this process, now; None: the module's own code does."""
    x, default = tensors[0], registry.default_backend()
    if (
        not is_eager()
        or registry.leaves_to_torch(op)
        or torch.is_autocast_enabled(x.device.type)
        or any(other.dtype != x.dtype for other in tensors)
        or (default != "auto" and registry.unsupported(op, default, x.device.type, x.dtype) is not None)
    ):
        return None
    backend = registry.resolve(op, "auto", x, x.shape[-1:] or None)
    return None if backend == "reference" else backend


def _norm_forward(cls: type[nn.Module]) -> Callable[..., Tensor] | None:
    own: Callable[..., Tensor] = cls.forward
    if not cls.__name__.endswith("RMSNorm"):
        return None

    def same(epsilon: str, plus_one: bool, dtype: torch.dtype) -> bool:
        x, weight = _random((3, 40), (40,), dtype=dtype)
        stand_in = SimpleNamespace(weight=weight, **{epsilon: 1e-3})
        if hasattr(cls, "_norm"):
            stand_in._norm = functools.partial(cls._norm, stand_in)
        return torch.equal(own(stand_in, x), reference.rms_norm(x, weight, 1e-3, plus_one))

    forms = itertools.product(("variance_epsilon", "eps"), (False, True))
    form = next((form for form in forms if _agrees(functools.partial(same, *form))), None)
    if form is None:
        return None
    epsilon, plus_one = form

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        backend = _backend("rms_norm", hidden_states, self.weight)
        if backend is not None:
            eps = getattr(self, epsilon)
            return rms_norm(hidden_states, self.weight, eps=eps, plus_one=plus_one, backend=backend)
        return own(self, hidden_states)

    return forward


def _mlp_forward(cls: type[nn.Module]) -> Callable[..., Tensor] | None:
    own: Callable[..., Tensor] = cls.forward
    if not cls.__name__.endswith("MLP"):
        return None

    def same(dtype: torch.dtype) -> bool:
        (x,) = _random((3, 40), dtype=dtype)
        stand_in = SimpleNamespace(
            gate_proj=lambda x: x, up_proj=lambda x: x.flip(-1), down_proj=lambda x: x + 1, act_fn=nn.functional.silu
        )
        return torch.equal(own(stand_in, x), reference.swiglu(x, x.flip(-1)) + 1)

    if not _agrees(same):
        return None

    def forward(self: Any, x: Tensor) -> Tensor:
        if not is_eager():
            return own(self, x)
        gate, up = self.gate_proj(x), self.up_proj(x)
        backend = _backend("swiglu", gate, up)
        gated = self.act_fn(gate) * up if backend is None else swiglu(gate, up, backend=backend)
        y: Tensor = self.down_proj(gated)
        return y

    return forward


def _activation_kind(module: nn.Module) -> str | None:
    """Kind of `activation` that a module computes, by its own values; None for other modules."""
    cls = type(module)
    named = any(part in cls.__name__.lower() for part in ("gelu", "silu", "swish"))
    if not named or getattr(cls, "fused_forward", False):
        return None
    if [*module.children(), *module.parameters(), *module.buffers()]:
        return None
    with _disable_current_modes(), torch.no_grad():
        x = torch.linspace(-12.0, 12.0, 4801, device="cpu", dtype=torch.float32)
        given = x.clone()
        try:
            y = cls.forward(module, given)
            near = (kind for kind in KINDS if (y.double() - reference.activation(x.double(), kind)).abs().max() <= 1e-5)
            return next(near, None) if torch.equal(given, x) else None
        except _FAILURES:
            return None


_ACTIVATIONS: dict[tuple[type[nn.Module], str], type[nn.Module]] = {}
"""Fused subclass of each activation class met so far and of each kind."""


def _activation_class(cls: type[nn.Module], kind: str) -> type[nn.Module]:
    if (cls, kind) not in _ACTIVATIONS:
        _ACTIVATIONS[cls, kind] = _subclass(cls, _activation_forward(cls, kind), kind)
    return _ACTIVATIONS[cls, kind]


def _activation_forward(cls: type[nn.Module], kind: str) -> Callable[..., Tensor]:
    own: Callable[..., Tensor] = cls.forward

    def forward(self: Any, x: Tensor) -> Tensor:
        backend = _backend("activation", x)
        return own(self, x) if backend is None else activation(x, kind, backend=backend)

    return forward


def _attention_forward(cls: type[nn.Module]) -> Callable[..., Any] | None:
    """The class's own forward, reading one global differently: the function that turns queries and keys."""
    inner = inspect.unwrap(cls.forward)
    if not isinstance(inner, FunctionType) or _ROTARY not in {*inner.__code__.co_names} & {*inner.__globals__}:
        return None
    turn: Callable[..., tuple[Tensor, Tensor]] = inner.__globals__[_ROTARY]

    def same(dtype: torch.dtype) -> bool:
        q, k, cos, sin = _random((2, 3, 5, 8), (2, 1, 5, 8), (2, 5, 8), (2, 5, 8), dtype=dtype)
        ours, theirs = reference.rotary(q, k, cos, sin), turn(q, k, cos, sin)
        return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))

    if not _agrees(same):
        return None

    def rotated(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
        if len(arguments) == 4 and not named:
            q, k, cos, sin = arguments
            whole = q.shape[-1] == k.shape[-1] == cos.shape[-1] and not cos.requires_grad
            backend = _backend("rotary", q, k, cos, sin) if whole else None
            if backend is not None:
                return rotary(q, k, cos, sin, backend=backend)
        return turn(*arguments, **named)

    return _with_global(cls.forward, _ROTARY, rotated)


def _with_global(function: Callable[..., Any], name: str, value: Any) -> Callable[..., Any] | None:
    """The same function under the same decorators, which reads one global differently; None where it cannot."""
    if not isinstance(function, FunctionType):
        return None
    decorated, closure, names = getattr(function, "__wrapped__", None), None, function.__globals__
    if decorated is not None:
        made = _with_global(decorated, name, value)
        cells = function.__closure__ or ()
        if made is None or not any(cell.cell_contents is decorated for cell in cells):
            return None
        closure = tuple(CellType(made) if cell.cell_contents is decorated else cell for cell in cells)
    elif function.__closure__:
        return None
    else:
        # without __name__: torch.compile would look the globals up in the module of that name
        names = {known: own for known, own in names.items() if known != "__name__"} | {name: value}
    copied = FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__annotations__, copied.__doc__ = function.__annotations__, function.__doc__
    if decorated is not None:
        copied.__wrapped__ = made  # type: ignore[attr-defined]
    return copied


def _agrees(same: Callable[[torch.dtype], bool]) -> bool:
    """Whether the trial passes in both dtypes; it also fails where a class wants attributes or arguments of its own."""
    try:
        return same(torch.float32) and same(torch.bfloat16)
    except _FAILURES:
        return False


def _random(*shapes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Tensors of which no two agree."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator, device="cpu", dtype=torch.float32)
    return [draw(shape).to(dtype) for shape in shapes]
