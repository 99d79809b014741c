"""The probe at load: two packed sequences and a decoding step against each sequence alone in the model's own forward.

Let row t have the hidden state h_t alone, by the model's own code with eager attention, and g_t through the engine. The
error is |g_t − h_t| / |h_t|. What rounding may do is measured on the model itself: its own forward runs once more with
every embedding moved by one unit in the last place. Allowed is

    8 · (median error of that second forward) + 2 · eps(dtype), 1e-4 to 1e-3 in 32 and 64 bits, 0.03 to 0.1 below,

for the median row of each sequence, because routing of a mixture of experts may flip in single rows for rounding alone.
The lower end is there for deep models: moved embeddings do not show what the products of every layer add.
The decoding step has to keep to it in both rows. A model that fails is probed with other tokens before it is refused.

The packed row runs in train mode, alone and decoding in eval mode: noise and shortcuts of training would make rollout
and update different models. Logits are compared with head(hidden) by the tiers of `rlhf_kernels.runtime.testing`;
exact is a wider dtype.

While memory is planned, parameters are fake tensors, without numbers. The packed row runs once, for its shapes.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from rlhf_kernels.lora import group
from rlhf_kernels.runtime import testing
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedConfig, PreTrainedModel

from rlhf_engine.devices import is_gpu, is_out_of_memory
from rlhf_engine.errors import UnsupportedModelError
from rlhf_engine.hydra import gate, loading
from rlhf_engine.hydra.attention import KVCache, NewTokens, plan_decode, plan_packed
from rlhf_engine.hydra.gate import head_logits
from rlhf_engine.hydra.modules import GatedHead, GatedLinear

if TYPE_CHECKING:
    from rlhf_engine.hydra.backbone import Backbone


@contextlib.contextmanager
def undone_on_error(*models: nn.Module) -> Iterator[None]:
    """Put the modules of the models back as they were if the block raises, but not numbers in parameters."""
    modules = {id(module): (module, type(module), _state(module)) for model in models for module in model.modules()}
    gradients = [(p, p.requires_grad) for model in models for p in model.parameters()]
    done = False
    try:
        yield
        done = True
    finally:
        if not done:
            for module, kind, state in modules.values():
                module.__class__ = kind
                module.__dict__.clear()
                module.__dict__.update(state)
            for parameter, required in gradients:
                parameter.requires_grad_(required)


def _state(module: nn.Module) -> dict[str, Any]:
    """A module's attributes; of its tables of children, parameters, buffers and hooks a copy."""
    return {name: copy.copy(value) if isinstance(value, dict) else value for name, value in vars(module).items()}


def base_model(model: PreTrainedModel) -> nn.Module:
    """The part of a model that makes hidden states: by `base_model_prefix`, or the innermost with the embeddings."""
    named: nn.Module = model.base_model
    if named is not model:
        return named
    embeddings = model.get_input_embeddings()
    models = [x for x in model.modules() if isinstance(x, PreTrainedModel)]  # parents come before their children
    return [x for x in models if any(part is embeddings for part in x.modules())][-1]


def give_own_configs(model: nn.Module) -> None:
    """Exchange the config objects of a model's modules for copies; modules that shared one share its copy."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig):
                setattr(module, name, copy.deepcopy(value, copies))


_LENGTHS = (5, 8)  # tokens of the two sequences in the packed row; the decoding step adds one to each
TRIES = (1, 20)  # first tokens of the first and the second try
_TIMES_ROUNDING = 8.0
_WORDS = 4096  # rows of the head whose logits are made at a time
_FAILURES = (TypeError, ValueError, RuntimeError, LookupError, AttributeError, AssertionError, ImportError)
"""Errors of a model's code that cannot run on packed rows of tokens."""


class DifferentNumbers(UnsupportedModelError):
    """Hidden states are not those that the model computes by itself, at least with these tokens."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnStates:
    """Hidden states of a model's own forward for the probe's sequences, each alone."""

    tokens: tuple[torch.Tensor, ...]  # int64 [length + 1] each
    hidden: tuple[torch.Tensor, ...] | None
    """[length + 1, H] each; None of a fake model, which has no numbers to compare."""
    rounding: float  # median relative change of a row when embeddings move by one unit in the last place


def refusal(
    model: PreTrainedModel, why: object, kind: type[UnsupportedModelError] = UnsupportedModelError
) -> UnsupportedModelError:
    """The error that refuses a model, in one line."""
    return kind(f"{type(model).__name__}: {why} (model type {model.config.model_type!r})")


@contextlib.contextmanager
def refusing(model: PreTrainedModel, what: str) -> Iterator[None]:
    """An error of the model's code as a refusal in one line. Running out of memory is no refusal."""
    try:
        yield
    except UnsupportedModelError as error:  # of the engine's attention
        raise refusal(model, error, type(error)) from error
    except _FAILURES as error:
        if is_out_of_memory(error):
            raise
        text = " ".join(str(error).split())[:300]
        raise refusal(model, f"{what} fails: {type(error).__name__}: {text}") from error


@torch.no_grad()
def own_states(model: PreTrainedModel, first: int) -> OwnStates:
    """Run the probe's sequences, each alone, through a model still its own; `first` is the first token."""
    training = [(module, module.training) for module in model.modules()]
    model.eval()
    with refusing(model, "its own forward"), loading.quiet_transformers():
        model.set_attn_implementation("eager")  # what every attention keyword of an architecture is written for
        states = _own_states(model, first)
    for module, mode in training:
        module.training = mode
    return states


def _own_states(model: PreTrainedModel, first: int) -> OwnStates:
    vocabulary = model.config.get_text_config().vocab_size
    some = next(model.parameters())
    device = some.device
    tokens = tuple((7 * torch.arange(n + 1, device=device) + first + 11 * n) % vocabulary for n in _LENGTHS)
    if isinstance(some, FakeTensor):
        return OwnStates(tokens=tokens, hidden=None, rounding=0.0)

    def run(tokens: torch.Tensor) -> torch.Tensor:
        out = base_model(model)(input_ids=tokens[None], use_cache=False)
        if getattr(out, "last_hidden_state", None) is None:
            raise UnsupportedModelError(f"its {model.base_model_prefix!r} gives no hidden states of a decoder")
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    hidden = tuple(run(x) for x in tokens)
    hook = model.get_input_embeddings().register_forward_hook(_move_by_one_unit)
    try:
        rounding = float(_relative(run(tokens[-1]), hidden[-1]).median())
    finally:
        hook.remove()
    return OwnStates(tokens=tokens, hidden=hidden, rounding=rounding)


def _move_by_one_unit(module: nn.Module, arguments: object, out: torch.Tensor) -> torch.Tensor:
    """Every number up or down by one unit in the last place that products keep of it."""
    kept = {"highest": 0.0, "high": 2.0**-11, "medium": 2.0**-8}[torch.get_float32_matmul_precision()]
    unit = torch.finfo(out.dtype).eps
    if out.dtype == torch.float32:
        unit = max(unit, kept)
    odd = torch.arange(out.numel(), device=out.device).mul(2654435761).bitwise_right_shift(13).remainder(2)
    return out * (1 + unit * (2 * odd.view(out.shape) - 1).to(out.dtype))


@torch.no_grad()
def check(backbone: Backbone, own: OwnStates) -> tuple[int, int, int]:
    """Raise UnsupportedModelError for a backbone that is not served; its widths of states, cached tokens and heads."""
    cache = KVCache(blocks=len(own.tokens))
    modes = [(module, module.training) for module in backbone.modules()]
    with refusing(backbone.model, "its forward on packed rows"):
        width = _check_packed_row(backbone, own, cache)
    for module, mode in modes:
        module.training = mode
    kept = [x for layers in (cache.keys, cache.values) for x in layers.values()]
    return width, sum(x[0, :, 0].nbytes for x in kept), min(x.shape[-1] for x in kept)


def _check_packed_row(backbone: Backbone, own: OwnStates, cache: KVCache) -> int:
    """The width of the hidden states. Of a fake model only what needs no numbers is checked."""
    tokens = torch.cat([x[:-1] for x in own.tokens])
    positions = torch.cat([torch.arange(n, device=tokens.device) for n in _LENGTHS])
    inputs: dict[str, Any] = {"input_ids": tokens[None], "position_ids": positions[None], "use_cache": False}
    new = NewTokens.of_prompts(cache, [[i] for i in range(len(_LENGTHS))], _LENGTHS, tokens.device)
    windows: list[int | None] = []
    table, plan = gate.SlotTable.uniform(None, len(tokens)), plan_packed(_LENGTHS, tokens.device, new=new)
    call = gate.BackboneCall(table=table, attention=plan, positions_T=positions, windows=windows)
    devices = [tokens.device] if is_gpu(tokens.device) else []
    backbone.train()
    with torch.random.fork_rng(devices, device_type=tokens.device.type), gate.enter(call), _ran(backbone) as in_train:
        hidden, logits = _run(backbone, inputs)
    backbone.eval()
    config = backbone.model.config
    n_layers = config.get_text_config().num_hidden_layers
    if len(windows) != n_layers:
        raise UnsupportedModelError(not_ours(n_layers, len(windows)))
    why = loading.windows_that_differ(config, windows)
    if why is not None:
        raise UnsupportedModelError(why)
    if own.hidden is None:
        return hidden.shape[-1]
    allowed = _allowed(backbone, own.rounding)
    try:
        _require_states("a sequence packed beside another", hidden, own, allowed)
    except DifferentNumbers:
        with gate.enter(call):
            _require_states("a sequence packed beside another", _run(backbone, inputs)[0], own, allowed)
        raise UnsupportedModelError(
            "expected train mode to compute what eval mode does, it has noise of its own"
        ) from None
    with _ran(backbone) as in_eval:
        _check_decoding(backbone, own, cache, allowed)
    skipped = sorted(in_eval - in_train)
    if skipped:
        raise UnsupportedModelError(f"expected linears of eval mode to run in train mode, it leaves out {skipped[0]}")
    if not any(path.startswith(backbone.blocks_prefix) for path in in_eval):
        raise UnsupportedModelError(
            f"expected the decoder's blocks at {backbone.blocks_prefix!r}, got linears that text does not go through"
        )
    if logits is not None:
        _check_logits(backbone, hidden, logits)
    return hidden.shape[-1]


def _run(backbone: Backbone, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Hidden states [T, H], and of a model with a head the logits [T, V] that it makes of them."""
    model = backbone.model
    if not backbone.has_lm_head:
        return backbone.base_model(**inputs).last_hidden_state[0], None
    seen: list[torch.Tensor] = []

    def note(module: nn.Module, arguments: object, out: Any) -> None:
        if getattr(out, "last_hidden_state", None) is not None:
            seen.append(out.last_hidden_state[0])

    decoders = {id(x): x for x in (backbone.base_model, model.get_decoder())}  # OPT calls the inner one
    hooks = [decoder.register_forward_hook(note) for decoder in decoders.values()]
    try:
        logits = model(**inputs).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    return seen[-1], logits


def _check_decoding(backbone: Backbone, own: OwnStates, cache: KVCache, allowed: float) -> None:
    device, rows = own.tokens[0].device, len(own.tokens)
    positions = torch.tensor(_LENGTHS, device=device)
    plan = plan_decode(cache, torch.arange(rows, device=device)[:, None], positions, max(_LENGTHS) + 1, {})
    assert own.hidden is not None
    hidden = backbone.run(torch.stack([x[-1] for x in own.tokens]), positions, gate.SlotTable.uniform(None, rows), plan)
    error = _relative(hidden, torch.stack([x[-1] for x in own.hidden])).max()
    _require("a decoding step through the cache", error, allowed)


def _require_states(what: str, hidden: torch.Tensor, own: OwnStates, allowed: float) -> None:
    assert own.hidden is not None
    for part, alone in zip(hidden.split(_LENGTHS), own.hidden, strict=True):
        _require(what, _relative(part, alone[:-1]).median(), allowed)


def _require(what: str, error: torch.Tensor, allowed: float) -> None:
    if not error <= allowed:  # a NaN fails
        raise DifferentNumbers(
            f"expected the hidden states of its own attention, got ones that differ by {float(error):.2g} of their "
            f"norm in {what}, where rounding explains {allowed:.2g}"
        )


def _check_logits(backbone: Backbone, hidden: torch.Tensor, logits: torch.Tensor) -> None:
    """The model's logits against head(hidden), by tier."""
    head = backbone.lm_head
    wide = torch.float64 if hidden.dtype in (torch.float32, torch.float64) else torch.float32
    tier: Callable[..., testing.NumericReport] = testing.tier1 if wide == torch.float64 else testing.tier3
    weights = head.weight.split(_WORDS)
    biases = [None] * len(weights) if head.bias is None else [bias.to(wide) for bias in head.bias.split(_WORDS)]
    parts = [replace(head, weight=w, bias=b) for w, b in zip(weights, biases, strict=True)]
    exact = [
        head_logits(hidden.to(wide), replace(part, weight=part.weight.to(wide)), backend="reference") for part in parts
    ]
    ours = head_logits(hidden, head)
    if logits.shape != ours.shape or not tier(logits, torch.cat(exact, -1), ours).ok:
        raise UnsupportedModelError(
            "its logits are not head(hidden) with the softcap and scale that its config names, so log-probs made from "
            "hidden states would be wrong"
        )


@contextlib.contextmanager
def _ran(backbone: Backbone) -> Iterator[set[str]]:
    """Names of the gated linears that run within the block; siblings that read one tensor in turn become a group."""
    names: set[str] = set()
    last: list[Any] = [None, "", ()]  # what was read, whose parts read it, and which did

    def note(module: nn.Module, arguments: tuple[Any, ...], out: object, path: str) -> None:
        names.add(path)
        x, parent = arguments[0] if arguments else None, path.rpartition(".")[0]
        alike = x is last[0] and parent == last[1] and module not in last[2] and len(last[2]) < group.MOST
        last[:] = x, parent, (*last[2], module) if alike else (module,)
        for linear in last[2] if all(isinstance(member, GatedLinear) for member in last[2]) else ():
            linear.readers = last[2][1:] if linear is last[2][0] else ()

    hooks = [
        backbone.model.get_submodule(path).register_forward_hook(functools.partial(note, path=path))
        for path, layer in backbone.linears.items()
        if not isinstance(layer, GatedHead)  # which is no part of the backbone
    ]
    try:
        yield names
    finally:
        for hook in hooks:
            hook.remove()


def _relative(states: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Error of each row in units of its length; a padding token may have zeros all the way up."""
    length = expected.double().norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    return (states.double() - expected.double()).norm(dim=-1) / length


def _allowed(backbone: Backbone, rounding: float) -> float:
    wide = backbone.dtype in (torch.float32, torch.float64)
    least, most = (1e-4, 1e-3) if wide else (0.03, 0.1)
    if backbone.quantized:  # 8-bit products round by the rows that they are batched with
        return 0.05
    return min(most, max(least, _TIMES_ROUNDING * rounding + 2 * torch.finfo(backbone.dtype).eps))


def not_ours(n_layers: int, n_ran: int) -> str:
    """Message about a model whose attention cannot be exchanged."""
    return (
        f"expected rlhf-engine's attention to run in each of its {n_layers} layers, it ran {n_ran} times; this "
        "architecture does not use transformers' AttentionInterface"
    )
