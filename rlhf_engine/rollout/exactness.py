"""Backbones that exact mode serves: a row's bits in decoding are those in scoring and training, in any company.

A backbone qualifies by what it is made of, and by a trial. Its linears and its attention run on ops whose rows do not
depend on each other. Its other modules have to be of kinds that treat every row, or every element, by itself. Torch's
sigmoid and what is made of it (SiLU, GELU) are none of these: an element at the end of a tensor has other bits there
than inside of a vector. Then some tokens go through the forward pass, and through prefill and decoding in several
companies, and all have to agree to the bit.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

import torch
from rlhf_kernels.runtime import native, registry
from torch import nn

from rlhf_engine.devices import is_gpu
from rlhf_engine.hydra.attention import KVCache, plan_packed
from rlhf_engine.hydra.backbone import Backbone
from rlhf_engine.hydra.batch import PackedBatch
from rlhf_engine.hydra.gate import SlotTable
from rlhf_engine.hydra.modules import GatedConv1D, GatedLinear
from rlhf_engine.rollout import decoding
from rlhf_engine.rollout.decoding import TransformersStep
from rlhf_engine.rollout.rows import Prompt, RowState

MEASURED = ("avx2", "avx512", "avx512_bf16")
"""Instruction sets on which exact mode has been timed; it is the default there, see docs/decisions."""

LOOKS_AT_LENGTHS = ("dynamic", "longrope")
"""Kinds of rotary embedding whose angles depend on the longest row of a batch."""

_OPS = ("linear", "lora", "attention", "decode_attention", "activation", "sample", "linear_logprob", "gather_logprob")
_BY_PLACE = frozenset({"sigmoid", "silu", "gelu", "softplus", "mish", "selu", "elu", "celu", "logsigmoid", "softmax"})
"""Functions of torch that give an element other bits at the end of a tensor, or other sums with other neighbours."""
_PLAIN_LEAVES = (nn.Identity, nn.Dropout, nn.ReLU)
_TRIAL_LENGTHS, _TRIAL_STEPS = (5, 1, 18), 3


def by_default(device_type: str) -> bool:
    """Whether a run that does not say begins in exact mode: on a CPU with kernels that it was timed on."""
    serves = not is_gpu(device_type) and registry.default_backend() in ("auto", "cpu") and native.missing() is None
    return serves and native.isa() in MEASURED


def settle(wanted: bool | None, backbone: Backbone) -> None:
    """Leave exact mode where a new run that did not ask for it has a backbone that is not served."""
    if wanted is None and registry.is_exact() and unsupported(backbone) is not None:
        registry.begin_run()


def unsupported(backbone: Backbone) -> str | None:
    """Reason why exact mode cannot serve a backbone here and now, tried once; None if it can."""
    in_triton = is_gpu(backbone.device) or registry.default_backend() == "triton"
    reason = decoding.without_ops(backbone, _OPS, "triton" if in_triton else "cpu")
    if reason is not None:
        return reason
    known, kind = _verdicts.get(backbone), (backbone.dtype, native.isa())
    if known is None or known[0] != kind:
        with registry.use_exact():
            reason = None
            if decoding.native_unsupported(backbone) is not None:
                reason = _differs(backbone) or _try(backbone)
        _verdicts[backbone] = known = kind, reason
    return known[1]


_verdicts: WeakKeyDictionary[Backbone, tuple[tuple[torch.dtype, str | None], str | None]] = WeakKeyDictionary()
"""Dtype and instruction set under which each backbone was tried, and the reason against it."""


def _differs(backbone: Backbone) -> str | None:
    """First module whose rows may depend on each other; None where every one is of a kind that is known."""
    if backbone.quantized:
        return "the products of its quantised weights depend on the rows that they are batched with"
    modules = list(backbone.base_model.named_modules())
    by_rows = is_gpu(backbone.device)  # where torch adds a row up as their number has it
    for name, module in modules:
        if any(p.dim() > 2 for p in module.parameters(recurse=False)):
            return f"{name} is a {type(module).__name__}, whose stacked experts share products"
    fused = {name for name, module in modules if getattr(module, "fused_forward", False)}
    for name, module in modules:
        if name.rpartition(".")[0] in fused and not any(True for _ in module.parameters()):
            continue  # an activation that the module's own kernel computes
        called = f"{name or 'the decoder'} is a {type(module).__name__}"
        if getattr(module, "rope_type", None) in LOOKS_AT_LENGTHS:
            return f"{called} of the kind {module.rope_type!r}, whose angles depend on the longest row of a batch"
        if not _is_known(module) or (by_rows and _is_norm(module)):
            return f"{called}, whose rows are not known to be independent"
        calls = sorted(_BY_PLACE & set(_names(module)))
        if calls:
            return f"{called}, whose code calls torch's {calls[0]}: bits depend on an element's place there"
    return None


def _is_known(module: nn.Module) -> bool:
    """Whether a module is a container, or a leaf of a kind whose rows are independent."""
    if isinstance(module, (nn.Embedding, GatedLinear, GatedConv1D, nn.LayerNorm, *_PLAIN_LEAVES)):
        return True
    own = list(module.parameters(recurse=False))
    if any(True for _ in module.children()):
        return all(p.dim() <= 1 for p in own)
    if own:
        return all(p.dim() <= 1 for p in own) and "Norm" in type(module).__name__
    return True  # without parameters: its code decides


def _is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm in torch's own ops."""
    fused = getattr(module, "fused_forward", False) or isinstance(module, nn.LayerNorm)
    return "Norm" in type(module).__name__ and not fused and not any(True for _ in module.children())


def _names(module: nn.Module) -> Iterator[str]:
    """Names that a module's forward uses, and the functions of its own file that it calls."""
    if getattr(module, "fused_forward", False) or isinstance(module, (GatedLinear, GatedConv1D, *_PLAIN_LEAVES)):
        return
    if type(module).__module__.startswith("torch.nn"):
        yield type(module).__name__.lower()
        return
    for value in vars(module).values():  # a function of torch, maybe with some arguments in place
        yield getattr(getattr(value, "func", value), "__name__", "")
    function = inspect.unwrap(type(module).forward)
    if not isinstance(function, types.FunctionType):
        return
    seen: set[types.FunctionType] = set()
    waiting = [function]
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        for name in function.__code__.co_names:
            called = inspect.unwrap(function.__globals__[name]) if callable(function.__globals__.get(name)) else None
            if name == "eager_attention_forward":  # what runs in its place is the engine's
                continue
            yield name
            if isinstance(called, types.FunctionType) and called.__module__ == function.__module__:
                waiting.append(called)


@torch.no_grad()
def _try(backbone: Backbone) -> str | None:
    """Difference between prefill and decoding and the forward pass; None where they agree to the bit."""
    generator = torch.Generator().manual_seed(0)
    most = min(backbone.context_length, max(_TRIAL_LENGTHS) + _TRIAL_STEPS)
    rows = [
        torch.randint(backbone.vocabulary, (min(n + _TRIAL_STEPS, most),), generator=generator).tolist()
        for n in _TRIAL_LENGTHS
    ]
    try:
        expected = _forward(backbone, rows)
        for compute, companies, reason in (
            (_forward, ((2,), (1, 0)), "a row's bits depend on the rows beside it in its forward pass"),
            (_decoded, ((0, 1, 2), (2,), (1, 0)), "its decoding steps have other bits than its forward pass"),
        ):
            for together in companies:
                states = compute(backbone, [rows[i] for i in together])
                if any(not torch.equal(x, expected[i]) for x, i in zip(states, together, strict=True)):
                    return reason
    except (ValueError, TypeError) as error:  # shapes that a kernel does not take
        return f"a kernel refuses it: {error}"
    return None


def _forward(backbone: Backbone, rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Last hidden states [steps, H] of each row, by one forward pass."""
    batch = PackedBatch.from_lists(rows, [[]] * len(rows), device=backbone.device)
    table = SlotTable.uniform(None, batch.n_tokens)
    hidden = backbone.run(batch.tokens_T, batch.positions_T, table, plan_packed(batch.lengths, batch.device))
    return [hidden[end - _TRIAL_STEPS : end] for end in batch.cu_seqlens[1:]]


def _decoded(backbone: Backbone, rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The same by prefill of all but the last tokens, and a decoding step for each of these."""
    columns = -(-max(map(len, rows)) // KVCache(blocks=1).block)
    cache = KVCache(blocks=columns * len(rows))
    step = TransformersStep(backbone, cache)
    blocks = [list(range(i * columns, (i + 1) * columns)) for i in range(len(rows))]
    prompts = [
        Prompt(prompt=tuple(row[:-_TRIAL_STEPS]), slot=None, blocks=own) for row, own in zip(rows, blocks, strict=True)
    ]
    step.prefill(prompts)
    state = RowState.idle(len(rows), columns, backbone.device)
    state.table_NB[:] = torch.tensor(blocks)
    state.lengths_N[:] = torch.tensor([len(prompt.prompt) for prompt in prompts])
    table, hidden = SlotTable.uniform(None, len(rows)), []
    for i in range(_TRIAL_STEPS):
        state.tokens_N = torch.tensor([row[i - _TRIAL_STEPS] for row in rows], device=backbone.device)
        hidden.append(step.decode(state, table, int(state.lengths_N.max())))
        state.lengths_N += 1
    return list(torch.stack(hidden, 1))
