"""Modules of a backbone that run on the engine's kernels: linears under the gate, and the ops of a Llama's blocks.

    GatedLinear    nn.Linear, one fused op `lora_linear`; rows that are off keep the bits of `linear`
    GatedConv1D    GPT-2's Conv1D (weight [in, out]): its own product, or `linear` in exact mode, then `lora_delta_`
    GatedOutput    any other linear, such as a quantised one: its own forward untouched, `lora_delta_` on its output
    GatedHead      the LM head, which never runs as a module: the vocabulary kernels take its LoRA as an option

Linears add the LoRA of whatever slots the gate names for a row. They find the slot through the gate, never through
state of their own, and keep their parameters under the names that the plain model gives them: a backbone saves and
hashes as if nothing had happened.

RMS norms, rotary embeddings, gated MLPs and activations run on `rlhf_kernels.llama_ops`. A module whose class computes
what an op computes gets a subclass of that class, with another `forward`; parameters and their names stay. What a class
computes is not guessed from its name: its own `forward` is tried on a stand-in that has nothing but the attributes the
op knows of, and has to give the bits of the op's reference. A class that fails keeps its `forward`. Modules of one
activation class may compute different functions, so each is tried itself: in float32 against float64 values of what the
op can compute.

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
from collections.abc import Callable, Mapping, Sequence
from types import CellType, FunctionType, SimpleNamespace
from typing import Any

import torch
from rlhf_kernels.linear import linear
from rlhf_kernels.llama_ops import activation, reference, rms_norm, rotary, swiglu
from rlhf_kernels.llama_ops.native import KINDS
from rlhf_kernels.lora import DecodeLinear, Dropout, group, lora_delta_, lora_linear
from rlhf_kernels.runtime import registry
from rlhf_kernels.vocab.logits import HeadLora
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_engine.devices import is_eager
from rlhf_engine.errors import UnsupportedModelError
from rlhf_engine.hydra import gate
from rlhf_engine.hydra.attention import DecodePlan, Linears
from rlhf_engine.hydra.gate import ALL_LINEAR, AdapterSlot

_ROUTER = "Router"
"""End of the class names of routers: linears whose forward returns routes beside their product or in its place."""
_QUANTISED = ("Linear4bit", "Linear8bitLt")  # bitsandbytes' linears, by name: the package is optional


class GatedLayer:
    """The place of a linear in the model, and its shape."""

    def __init__(self, path: str, stream: int, in_features: int, out_features: int) -> None:
        self.path = path  # name of the linear in the model
        self.stream = stream  # number that keeps the dropout masks of two layers apart
        self.in_features = in_features
        self.out_features = out_features

    def lora_arguments(self, call: gate.BackboneCall) -> tuple[Any, ...] | None:
        """(A, B, scales, segments, dropout) of the slots that run here in this call; None if there are none."""
        slots, wanted, path = call.slots, call.table.slots, self.path
        present = tuple(name for name in slots if name in wanted and path in slots[name].by_path)
        if not present:
            return None
        # torch.compile does not know list[Any]()
        lists: tuple[list[Any], list[Any], list[float], list[float]] = ([], [], [], [])
        A, B, scales, dropouts = lists
        for name in present:
            pair, config = slots[name].by_path[path], slots[name].config
            A.append(pair.A)
            B.append(pair.B)
            scales.append(config.scale)
            dropouts.append(config.dropout)
        key, dropout = call.dropout, None
        if key is not None and any(dropouts):
            dropout = Dropout(p=tuple(dropouts), seed=key.seed, row_ids=key.row_ids_T, stream=self.stream)
        return A, B, scales, gate.lora_segments(call.table, present), dropout


class GatedLinear(nn.Linear):
    """An nn.Linear on the same weight and bias objects."""

    readers: tuple[GatedLinear, ...] = ()
    """Linears that read its input right after it, as the probe has seen. Not itself: a cycle would keep its weight."""

    def __init__(self, base: nn.Linear, *, path: str, stream: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.gated = GatedLayer(path, stream, base.in_features, base.out_features)
        self.train(base.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        call = gate.current()
        if call is not None and call.dropout is None and isinstance(call.attention, DecodePlan):
            return self._decode(x, call, call.attention.linears)
        if call is not None and group.is_wanted():
            return group.read(x, self, (self, *self.readers), lambda linear: linear.reader(call))
        arguments = None if call is None else self.gated.lora_arguments(call)
        if arguments is None:
            return linear(x, self.weight, self.bias)
        *lora, dropout = arguments
        return lora_linear(x, self.weight, self.bias, *lora, dropout=dropout)

    def reader(self, call: gate.BackboneCall) -> group.Reader:
        """Weights of the linear, and the slots that run here in a call."""
        return group.Reader(self.weight, self.bias, *(self.gated.lora_arguments(call) or ()))

    def _decode(self, x: torch.Tensor, call: gate.BackboneCall, linears: Linears) -> torch.Tensor:
        """Multiply through what the first step with these rows has prepared."""
        key = (self.gated, call.table)
        prepared = linears.get(key)
        if prepared is None:
            arguments = self.gated.lora_arguments(call)
            if arguments is None:
                return linear(x, self.weight, self.bias)
            *lora, _ = arguments
            prepared = linears[key] = DecodeLinear(self.weight, self.bias, *lora)
        return prepared(x)


class GatedConv1D(Conv1D):
    """A Conv1D on the same weight [in, out] and bias objects."""

    def __init__(self, base: Conv1D, *, path: str, stream: int) -> None:
        nn.Module.__init__(self)
        self.nf, self.nx = base.nf, base.nx
        self.weight, self.bias = base.weight, base.bias
        self.gated = GatedLayer(path, stream, base.nx, base.nf)
        self.train(base.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # no product across a weight has been measured against torch's
        takes_own = registry.is_exact() or registry.default_backend() == "triton"
        y = linear(x, self.weight.t(), self.bias) if takes_own else super().forward(x)
        return _add_delta(self.gated, x, y)


class GatedOutput:
    """A forward hook that adds the delta to what a linear of another kind returned."""

    def __init__(self, gated: GatedLayer) -> None:
        self.gated = gated

    def __call__(self, module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        # a copy where gradients flow: autograd refuses to change what a custom Function returned
        return _add_delta(self.gated, args[0], output, copy=torch.is_grad_enabled())


class GatedHead(GatedLayer):
    """The LM head. Its embedding twin, where the weight is tied, is not touched by the head's LoRA."""

    def lora(self, slot: AdapterSlot | None) -> HeadLora | None:
        """LoRA that the vocabulary kernels add to the logits for a slot; None if the slot leaves the head alone."""
        if slot is None or self.path not in slot.by_path:
            return None
        pair = slot.by_path[self.path]
        return HeadLora(pair.A, pair.B, slot.config.scale)


def _add_delta(gated: GatedLayer, x: torch.Tensor, y: torch.Tensor, *, copy: bool = False) -> torch.Tensor:
    call = gate.current()
    arguments = None if call is None else gated.lora_arguments(call)
    if arguments is None:
        return y
    *lora, dropout = arguments
    return lora_delta_(y.clone() if copy else y, x, *lora, dropout=dropout)


def decoder_prefix(model: PreTrainedModel) -> str:
    """Start of the names of what lies in a model's text decoder: a vision or audio tower beside it is left out."""
    path = path_of(model.get_decoder(), model)
    return f"{path}." if path else ""


def path_of(part: nn.Module, model: nn.Module) -> str:
    """Name of a part of a model; "" for the model itself, and for what is none of its parts."""
    return next((name for name, module in model.named_modules() if module is part), "")


def gate_linears(model: PreTrainedModel) -> dict[str, GatedLayer]:
    """Gate every linear of a model's decoder, by name, but the head; UnsupportedModelError for unknown kinds."""
    prefix = decoder_prefix(model)
    head = model.get_output_embeddings()
    layers: dict[str, GatedLayer] = {}
    for path, module in list(model.named_modules()):
        if module is head or not path.startswith(prefix):
            continue
        stream = len(layers)
        if type(module) is nn.Linear or type(module) is Conv1D:
            gated = (GatedLinear if type(module) is nn.Linear else GatedConv1D)(module, path=path, stream=stream)  # type: ignore[arg-type]
            parent, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(parent), leaf, gated)
            layers[path] = gated.gated
        elif type(module).__name__ in _QUANTISED:
            layer = GatedLayer(path, stream, module.in_features, module.out_features)  # type: ignore[arg-type]
            module.register_forward_hook(GatedOutput(layer))
            layers[path] = layer
        elif isinstance(module, (nn.Linear, Conv1D)) and not type(module).__name__.endswith(_ROUTER):
            raise UnsupportedModelError(
                f"{path}: expected nn.Linear, Conv1D or a linear of bitsandbytes, got {type(module).__name__}, whose "
                "forward is not known here"
            )
    if isinstance(head, nn.Linear):
        path = next(name for name, module in model.named_modules() if module is head)
        layers[path] = GatedHead(path, len(layers), head.in_features, head.out_features)
    return layers


def is_quantised(model: PreTrainedModel) -> bool:
    """Whether the model holds linears of bitsandbytes."""
    return any(type(module).__name__ in _QUANTISED for module in model.modules())


def holds_gates(model: nn.Module) -> bool:
    """Whether a HydraModel has taken this model already."""
    return any(
        isinstance(module, (GatedLinear, GatedConv1D))
        or any(isinstance(hook, GatedOutput) for hook in module._forward_hooks.values())
        for module in model.modules()
    )


def match_targets(layers: Mapping[str, GatedLayer], blocks_prefix: str, targets: str | Sequence[str]) -> list[str]:
    """Names of the linears that a slot adapts, matched as in PEFT; `all-linear`: every one of the blocks."""
    if targets == ALL_LINEAR:
        paths = [path for path in layers if path.startswith(blocks_prefix)]
        if not paths:
            raise ValueError(f"target_modules='all-linear': expected linears below {blocks_prefix!r}, got none")
        return paths
    paths = [path for path in layers if any(_matches(path, t) for t in targets)]
    missing = [t for t in targets if not any(_matches(path, t) for path in layers)]
    if missing:
        endings = sorted({path.rsplit(".", 1)[-1] for path in layers})
        raise ValueError(f"target_modules: expected name endings among {endings}, got {missing} which match nothing")
    return paths


def _matches(path: str, target: str) -> bool:
    return path == target or path.endswith("." + target)


# ---- llama ops -------------------------------------------------------------------------------------------------------


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
