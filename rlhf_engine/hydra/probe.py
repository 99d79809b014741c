"""The probe at load: two packed sequences and a decoding step against each sequence alone in the model's own forward.

For a row t with hidden state h_t alone (the model's own code, eager attention) and ĥ_t through the engine, the error is
‖ĥ_t − h_t‖ / ‖h_t‖. What rounding may do is measured on the model itself: its own forward once more with every embedding
moved by one unit in the last place. Allowed is

    8 · (median error of that second forward) + 2 · eps(dtype), at most 1e-3 in 32 and 64 bits, 1/4 below,

for the median row of each sequence (routing of a mixture of experts may flip in single rows for rounding alone), and for
both rows of the decoding step. A model that fails is probed with other tokens, for the same reason, before it is refused.

Logits are compared with head(hidden) by the tiers of `rlhf_kernels.testing`, exact in a wider dtype. The trunk in train
mode gives what it gives in eval mode, through the same linears: noise and shortcuts of training would make rollout and
update different models.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from rlhf_kernels import testing
from torch import nn
from transformers import PreTrainedModel

from rlhf_engine.devices import is_out_of_memory
from rlhf_engine.errors import UnsupportedModelError
from rlhf_engine.hydra import gate, loading
from rlhf_engine.hydra.attention import plan_decode, plan_packed
from rlhf_engine.hydra.gated import GatedHead
from rlhf_engine.hydra.kv_cache import KVCache, NewTokens

if TYPE_CHECKING:
    from rlhf_engine.hydra.backbone import Backbone

_LENGTHS = (5, 8)
"""Tokens of the two sequences in the packed row; the decoding step adds one to each."""
_SEEDS = (1, 20)
"""First tokens of the first and the second try."""
_TIMES_ROUNDING = 8.0
_WORDS = 4096
"""Rows of the head whose logits are made at a time."""
_FAILURES = (TypeError, ValueError, RuntimeError, LookupError, AttributeError, AssertionError, ImportError)
"""What a model's code raises that cannot run on packed rows of tokens."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnStates:
    """What a model's own forward gives for the probe's sequences, each alone."""

    tokens: tuple[torch.Tensor, ...]
    """int64 [length + 1] each."""
    hidden: tuple[torch.Tensor, ...]
    """[length + 1, H] each."""
    rounding: float
    """Median relative change of a row when embeddings move by one unit in the last place."""


def name_of(model: PreTrainedModel) -> str:
    """Class and type of a model, as errors name it."""
    return f"{type(model).__name__} ({model.config.model_type})"


@contextlib.contextmanager
def refusing(model: PreTrainedModel, what: str) -> Iterator[None]:
    """An error of the model's code as a refusal in one line. Running out of memory is no refusal."""
    try:
        yield
    except UnsupportedModelError as error:  # of the engine's attention
        raise UnsupportedModelError(f"{name_of(model)}: {error}") from error
    except _FAILURES as error:
        if is_out_of_memory(error):
            raise
        text = " ".join(str(error).split())[:300]
        raise UnsupportedModelError(f"{name_of(model)}: {what} fails: {type(error).__name__}: {text}") from error


@torch.no_grad()
def own_states(model: PreTrainedModel) -> tuple[OwnStates, ...]:
    """Run the probe's sequences through a model that is still its own, once for each try.

    Raises UnsupportedModelError for a model whose forward does not take token ids alone.
    """
    training = [(module, module.training) for module in model.modules()]
    model.eval()
    with refusing(model, "its own forward"), loading.quiet_transformers():
        model.set_attn_implementation("eager")  # what every attention keyword of an architecture is written for
        found = tuple(_own_states(model, seed) for seed in _SEEDS)
    for module, mode in training:
        module.training = mode
    return found


def _own_states(model: PreTrainedModel, seed: int) -> OwnStates:
    vocabulary = model.config.get_text_config().vocab_size
    device = next(model.parameters()).device

    def run(tokens: torch.Tensor) -> torch.Tensor:
        out = model.base_model(input_ids=tokens[None], use_cache=False)
        if getattr(out, "last_hidden_state", None) is None:
            raise UnsupportedModelError(f"its {model.base_model_prefix!r} gives no hidden states of a decoder")
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    tokens = tuple((7 * torch.arange(n + 1, device=device) + seed + 11 * n) % vocabulary for n in _LENGTHS)
    hidden = tuple(run(x) for x in tokens)
    hook = model.get_input_embeddings().register_forward_hook(_move_by_one_unit)
    try:
        rounding = _relative(run(tokens[-1]), hidden[-1]).median()
    finally:
        hook.remove()
    return OwnStates(tokens=tokens, hidden=hidden, rounding=float(rounding))


def _move_by_one_unit(module: nn.Module, arguments: object, out: torch.Tensor) -> torch.Tensor:
    """Every number up or down by one unit in the last place that products keep of it."""
    kept = {"highest": 0.0, "high": 2.0**-11, "medium": 2.0**-8}[torch.get_float32_matmul_precision()]
    unit = torch.finfo(out.dtype).eps
    if out.dtype == torch.float32:
        unit = max(unit, kept)
    odd = torch.arange(out.numel(), device=out.device).mul(2654435761).bitwise_right_shift(13).remainder(2)
    return out * (1 + unit * (2 * odd.view(out.shape) - 1).to(out.dtype))


def check(backbone: Backbone, own: tuple[OwnStates, ...]) -> list[int]:
    """Raise UnsupportedModelError for a backbone that the engine would get wrong; see the module.

    Returns the bytes of one token's keys and values by layer.
    """
    model = backbone.model
    for states in own:
        cache = KVCache(blocks=len(states.tokens))
        with torch.no_grad(), refusing(model, "its forward on packed rows"):
            why = _differs(backbone, states, cache)
        if why is None:
            break
    else:
        raise UnsupportedModelError(f"{name_of(model)}: {why}")
    return [sum(x[0, :, 0].nbytes for x in (cache.keys[layer], cache.values[layer])) for layer in cache.keys]


def _differs(backbone: Backbone, own: OwnStates, cache: KVCache) -> str | None:
    """What the engine gets wrong with these sequences, or None."""
    tokens = torch.cat([x[:-1] for x in own.tokens])
    positions = torch.cat([torch.arange(n, device=tokens.device) for n in _LENGTHS])
    new = NewTokens.of_prompts(cache, [[i] for i in range(len(_LENGTHS))], _LENGTHS, tokens.device)
    windows: list[int | None] = []
    table = gate.SlotTable.uniform(None, len(tokens))
    call = gate.TrunkCall(table=table, attention=plan_packed(_LENGTHS, tokens.device, new=new), windows=windows)
    inputs: dict[str, Any] = {"input_ids": tokens[None], "position_ids": positions[None], "use_cache": False}
    with gate.enter(call), _ran(backbone) as in_eval:
        hidden = backbone.trunk(**inputs).last_hidden_state[0]
    n_layers = backbone.model.config.get_text_config().num_hidden_layers
    if len(windows) != n_layers:
        return not_ours(n_layers, len(windows))
    if not any(path.startswith(backbone.blocks_prefix) for path in in_eval):
        return f"expected the decoder's blocks at {backbone.blocks_prefix!r}, got linears that text does not go through"
    why = loading.windows_that_differ(backbone.model.config, windows)
    if why is not None:
        return why
    allowed = _allowed(backbone, own.rounding)
    for part, alone in zip(hidden.split(_LENGTHS), own.hidden, strict=True):
        error = _relative(part, alone[:-1]).median()
        if not _within(error, allowed):
            return _error("a sequence packed beside another", error, allowed)
    why = _decoding_differs(backbone, own, cache, allowed)
    if why is None:
        why = _training_differs(backbone, call, inputs, hidden, allowed, in_eval)
    if why is None and backbone.has_lm_head:
        with gate.enter(call):
            logits = backbone.model(**inputs).logits[0]
        why = _logits_differ(backbone, hidden, logits)
    return why


def _decoding_differs(backbone: Backbone, own: OwnStates, cache: KVCache, allowed: float) -> str | None:
    device = own.tokens[0].device
    rows = len(own.tokens)
    positions = torch.tensor(_LENGTHS, device=device)
    plan = plan_decode(cache, torch.arange(rows, device=device)[:, None], positions, max(_LENGTHS) + 1, {})
    hidden = backbone.run(torch.stack([x[-1] for x in own.tokens]), positions, gate.SlotTable.uniform(None, rows), plan)
    error = _relative(hidden, torch.stack([x[-1] for x in own.hidden])).max()
    return None if _within(error, allowed) else _error("a decoding step through the cache", error, allowed)


def _training_differs(
    backbone: Backbone,
    call: gate.TrunkCall,
    inputs: dict[str, Any],
    hidden: torch.Tensor,
    allowed: float,
    in_eval: set[str],
) -> str | None:
    """What train mode does that eval mode does not, or None."""
    devices = [hidden.device] if hidden.device.type == "cuda" else []
    training = [(module, module.training) for module in backbone.modules()]
    with torch.random.fork_rng(devices), _ran(backbone) as in_train, gate.enter(call):
        backbone.train()
        again = backbone.trunk(**inputs)
    for module, mode in training:
        module.training = mode
    error = _relative(again.last_hidden_state[0], hidden).median()
    if not _within(error, allowed):
        return _error("train mode without any dropout", error, allowed)
    skipped = sorted(in_eval - in_train)
    return f"expected train mode to run every linear that eval mode runs, it leaves out {skipped[0]}" if skipped else None


def _logits_differ(backbone: Backbone, hidden: torch.Tensor, logits: torch.Tensor) -> str | None:
    """How the model's logits differ from head(hidden), by tier; None where they do not."""
    from rlhf_engine.hydra.backbone import head_logits

    head = backbone.lm_head
    wide = torch.float64 if hidden.dtype in (torch.float32, torch.float64) else torch.float32
    tier: Callable[..., testing.NumericReport] = testing.tier1 if wide == torch.float64 else testing.tier3
    ours = head_logits(hidden, head)
    parts = (
        replace(head, weight=w.to(wide), bias=None if head.bias is None else b.to(wide))
        for w, b in zip(head.weight.split(_WORDS), (head.weight if head.bias is None else head.bias).split(_WORDS), strict=True)
    )
    exact = [head_logits(hidden.to(wide), part) for part in parts]
    if logits.shape == ours.shape and tier(logits, torch.cat(exact, -1), ours).ok:
        return None
    return (
        "its logits are not head(hidden) with the softcap and scale that its config names, so log-probs made from hidden "
        "states would be wrong"
    )


# ---- small parts -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _ran(backbone: Backbone) -> Iterator[set[str]]:
    """Names of the trunk's gated linears that run within the block."""
    names: set[str] = set()
    hooks = [
        backbone.model.get_submodule(path).register_forward_hook(lambda *_, path=path: names.add(path))
        for path, layer in backbone.linears.items()
        if not isinstance(layer, GatedHead)  # which is no part of the trunk
    ]
    try:
        yield names
    finally:
        for hook in hooks:
            hook.remove()


def _relative(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Error of each row in units of its length; a padding token may have zeros all the way up."""
    length = expected.double().norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    return (found.double() - expected.double()).norm(dim=-1) / length


def _allowed(backbone: Backbone, rounding: float) -> float:
    wide = backbone.dtype in (torch.float32, torch.float64)
    most = 1e-3 if wide else 0.25
    if backbone.quantized:  # 8-bit products round by the rows that they are batched with
        return 0.05
    return min(most, _TIMES_ROUNDING * rounding + 2 * torch.finfo(backbone.dtype).eps)


def _within(error: torch.Tensor, allowed: float) -> bool:
    return bool(error <= allowed)  # a comparison of tensors, which passes while memory is planned


def _error(what: str, error: torch.Tensor, allowed: float) -> str:
    return (
        f"expected of {what} the hidden states that the model computes for it alone, got ones that differ by "
        f"{float(error):.2g} of their norm where rounding explains {allowed:.2g}"
    )


def not_ours(n_layers: int, n_ran: int) -> str:
    """What is said of a model that does not let its attention be exchanged."""
    return (
        f"expected rlhf-engine's attention to run in each of its {n_layers} layers, it ran {n_ran} times; this "
        "architecture does not use transformers' AttentionInterface"
    )
