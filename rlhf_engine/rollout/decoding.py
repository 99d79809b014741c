"""Steps over prompts and new tokens: hidden states of the next token, with keys and values kept in the cache.

`TransformersStep` goes through the model's own forward under the gate, which serves every backbone. `NativeStep` does
the same faster where it can, and `GraphStep` captures either.

The native step has a whole Llama-like model in one call of `rlhf_kernels.decode_step`. A backbone qualifies by what it
is made of, and by a trial: some tokens go through transformers' forward and through the kernel, and hidden states and
arg-max tokens have to agree. Whatever the modules do that the kernel does not know of (a scaled embedding, another
norm) fails the trial, and the backbone keeps to transformers' forward.

On a CPU prompts are rows of a call as well, one for each token; long ones go through transformers' forward, faster
there. On a GPU, where the step is asked for by name, all do; weights of linears with one input are laid side by side.

A CUDA graph is captured once per number of rows. It reads and writes tensors that stay where they are, with places for
as many rows as its bucket has; rows that are not there are idle and write into a block of the cache that is nobody's.
One replay is one token: it draws, makes the drawn token the next input and moves on by one position, all on the device.
Draws with top-k, top-p or min-p, and rows that may not end yet, go through the other step itself. So do rows of several
slots, unless that reads slots from the state, and the last tokens of rows for which no graph is large enough: a capture
takes as long as many steps.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any
from weakref import WeakKeyDictionary

import torch
from rlhf_kernels.decode_step import Decoder, DecoderLayer, DecodeStep, Projection, StepAdapter, join
from rlhf_kernels.runtime import registry
from rlhf_kernels.runtime.device_tables import queued
from rlhf_kernels.runtime.eager import eager
from torch import nn

from rlhf_engine.devices import capturing, is_eager, is_gpu
from rlhf_engine.errors import EngineError
from rlhf_engine.hydra.attention import KVCache, Linears, NewTokens, plan_decode, plan_packed
from rlhf_engine.hydra.backbone import Backbone
from rlhf_engine.hydra.batch import PackedBatch
from rlhf_engine.hydra.gate import AdapterSlot, SlotTable, head_logits
from rlhf_engine.hydra.modules import GatedLinear
from rlhf_engine.rollout.rows import (
    PREFILL_TOKENS,
    LiveRows,
    NextTokens,
    Prompt,
    RowState,
    SampleGroup,
    Sampler,
    slot_table,
)

EXTENDED = 512  # most tokens of one call that extend prompts


class RolloutStep(ABC):
    """Runs rows through a backbone."""

    name: str
    backbone: Backbone
    cache: KVCache
    reads_slots = False  # from the state, so that a captured call serves rows of any slots
    wait_share: int  # one in so many places has to be free before waiting prompts interrupt the decoding of the others

    @abstractmethod
    def prefill(self, prompts: Sequence[Prompt]) -> torch.Tensor:
        """Put prompts into their blocks of the cache; hidden states [N, H] of the last tokens."""

    def extend(self, prompts: Sequence[Prompt], numbers: Sequence[int]) -> torch.Tensor:
        """Put the rests of prompts into their blocks, each token a row; hidden states [N, H] of the last tokens.

        numbers: N numbers of their slots, as in `RowState.slots_N`.
        """
        lengths_N = torch.tensor([len(prompt.prompt) - prompt.cached for prompt in prompts])
        state = RowState.idle(int(lengths_N.sum()), max(len(prompt.blocks) for prompt in prompts), torch.device("cpu"))
        state.tokens_N = torch.tensor([token for prompt in prompts for token in prompt.prompt[prompt.cached :]])
        state.lengths_N = torch.cat([torch.arange(prompt.cached, len(prompt.prompt)) for prompt in prompts])
        state.slots_N = torch.tensor(numbers).repeat_interleave(lengths_N)
        tables = [torch.tensor(prompt.blocks) for prompt in prompts]
        state.table_NB = nn.utils.rnn.pad_sequence(tables, batch_first=True).repeat_interleave(lengths_N, 0)
        slots = [prompt.slot for prompt, n in zip(prompts, lengths_N.tolist(), strict=True) for _ in range(n)]
        hidden = list[torch.Tensor]()
        for first in range(0, len(slots), EXTENDED):
            at = slice(first, first + EXTENDED)
            table = slot_table(slots[at], [1] * len(slots[at]))
            longest = int(state.lengths_N[at].max())
            hidden.append(self.decode(state.at(at).to(self.backbone.device), table, longest))
        return torch.cat(hidden)[queued(lengths_N.cumsum(0) - 1, self.backbone.device)]

    @abstractmethod
    def decode(self, state: RowState, table: SlotTable, longest: int) -> torch.Tensor:
        """Put every row's last token into the cache at its length; its hidden states [N, H]."""

    def decode_many(self, live: LiveRows, n: int, sampler: Sampler) -> list[NextTokens]:
        """n tokens more for every live row, one after another, without waiting for the device in between."""
        drawn = []
        for i in range(n):
            hidden = self.decode(live.state, live.slot_table, live.longest)
            live.state.lengths_N += 1
            live.longest += 1
            drawn.append(sampler(hidden, live.state, live.groups(i)))
            live.state.tokens_N = drawn[-1].tokens
        return drawn


class TransformersStep(RolloutStep):
    """Steps through the model's own forward: prompts packed, then one token per row."""

    name = "transformers"
    wait_share = 8

    def __init__(self, backbone: Backbone, cache: KVCache) -> None:
        self.backbone, self.cache = backbone, cache
        self._linears: Linears = {}
        self._table: SlotTable | None = None

    def prefill(self, prompts: Sequence[Prompt]) -> torch.Tensor:
        batch = PackedBatch.from_lists([p.prompt for p in prompts], [[]] * len(prompts), device=self.backbone.device)
        new = NewTokens.of_prompts(self.cache, [p.blocks for p in prompts], batch.lengths, batch.device)
        plan = plan_packed(batch.lengths, batch.device, new=new)
        table = slot_table([p.slot for p in prompts], batch.lengths)
        hidden = self.backbone.run(batch.tokens_T, batch.positions_T, table, plan)
        return hidden.index_select(0, batch.last_rows_N)

    def decode(self, state: RowState, table: SlotTable, longest: int) -> torch.Tensor:
        if table != self._table:
            self._linears, self._table = {}, table
        plan = plan_decode(self.cache, state.table_NB, state.lengths_N, longest + 1, self._linears)
        return self.backbone.run(state.tokens_N, state.lengths_N, table, plan)


# ---- the native step -------------------------------------------------------------------------------------------------


_LINEARS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_NORMS = {"input_layernorm", "post_attention_layernorm"}
_FIXED_ANGLES = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose angles depend on the position alone."""
_TRIAL_TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.005, torch.bfloat16: 0.02}
"""Largest error of a hidden state in the trial, relative to what the layers add to the embedding; figures in
docs/decisions. Beyond it a backbone keeps to transformers' forward, which costs time only."""
_LATEST = 2**16  # positions up to which the trial looks at a late one
_TRIAL_PROMPT, _TRIAL_STEPS = (5, 3, 9, 4, 1), 3
_LONG_PROMPT = 320
"""Tokens of a prompt beyond which transformers' forward is faster, measured on 41 M parameters; the figures are in
docs/decisions."""
_MANY_TOKENS = {torch.float32: PREFILL_TOKENS, torch.bfloat16: 768}  # tokens of shorter prompts together, the same
_ROWS = 512  # most prompt tokens of one call of the kernel


class NativeStep(RolloutStep):
    """Prompts and rows through the kernel; long prompts through the model's own forward."""

    name = "native"
    reads_slots = True
    wait_share = 1000

    def __init__(
        self, backbone: Backbone, cache: KVCache, slots: Sequence[str], positions: int, decoder: Decoder | None = None
    ) -> None:
        """slots: those that rows may carry, by the numbers of `RowState.slots_N`. positions: most of any row."""
        self.backbone, self.cache, decoder = backbone, cache, decoder or _examine(backbone)[0]
        assert decoder is not None, "of a backbone that is not `native_unsupported`, or in its trial"
        self._plain = TransformersStep(backbone, cache)
        adapters = [_adapter(backbone, backbone.slot(slot)) for slot in slots]
        self._run = DecodeStep(decoder, adapters, backend=_backend(backbone))
        self._cos, self._sin = _angles(backbone, positions)
        self._numbers: dict[str | None, int] = {None: -1, **dict(zip(slots, range(len(slots)), strict=True))}
        self._n_layers = len(decoder.layers)
        self._like = self._cos.new_empty(0, decoder.n_kv_heads, decoder.head_dim)
        self._caches: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None

    def prefill(self, prompts: Sequence[Prompt]) -> torch.Tensor:
        hidden: list[torch.Tensor] = [torch.empty(0)] * len(prompts)
        short, long = self._split(prompts)
        for prefill, calls in ((self._prefill_rows, short), (self._plain.prefill, long)):
            for places in calls:
                for i, state in zip(places, prefill([prompts[i] for i in places]), strict=True):
                    hidden[i] = state
        return torch.stack(hidden)

    def _split(self, prompts: Sequence[Prompt]) -> tuple[list[list[int]], list[list[int]]]:
        """Places of the prompts of each call of the kernel, and of each call of the model's own forward."""
        calls, long, tokens, every = list[list[int]](), list[int](), _ROWS, 0
        for i, prompt in enumerate(prompts):  # in their order, as many together as one call of the kernel takes
            length = len(prompt.prompt)
            if length > _LONG_PROMPT:
                long.append(i)
                continue
            if tokens + length > _ROWS:
                calls.append([])
                tokens = 0
            calls[-1].append(i)
            tokens += length
            every += length
        if self._run.backend != "cpu" or every > _MANY_TOKENS[self.backbone.dtype]:
            return [], [list(range(len(prompts)))]
        return calls, [long] if long else []

    def _prefill_rows(self, prompts: Sequence[Prompt]) -> torch.Tensor:
        """Every token of the prompts as a row of one call."""
        tokens, positions, slots = list[int](), list[int](), list[int]()
        tables, lengths = list[list[int]](), list[int]()
        columns = max(len(prompt.blocks) for prompt in prompts)
        for prompt in prompts:
            n = len(prompt.prompt)
            tokens += prompt.prompt
            positions += range(n)
            slots += [self._numbers[prompt.slot]] * n
            tables.append(prompt.blocks + [0] * (columns - len(prompt.blocks)))
            lengths.append(n)
        lengths_N = torch.tensor(lengths)
        table_NB = torch.tensor(tables).repeat_interleave(lengths_N, 0)
        hidden = self._rows(torch.tensor(tokens), torch.tensor(positions), torch.tensor(slots), table_NB)
        return hidden.index_select(0, lengths_N.cumsum(0) - 1)

    def decode(self, state: RowState, table: SlotTable, longest: int) -> torch.Tensor:
        return self._rows(state.tokens_N, state.lengths_N, state.slots_N, state.table_NB)

    def _rows(
        self, tokens_N: torch.Tensor, positions_N: torch.Tensor, slots_N: torch.Tensor, table_NB: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states [N, H] of tokens at these positions, which enter the cache."""
        if self._caches is None:
            for layer in range(self._n_layers):
                self.cache.allocate(layer, self._like, self._like)
            keys, values = zip(*map(self.cache.read, range(self._n_layers)), strict=True)
            self._caches = list(keys), list(values)
        return self._run(tokens_N, positions_N, slots_N, self._cos, self._sin, *self._caches, table_NB)


_Kind = tuple[torch.dtype, str, bool]
"""Dtype of the weights, backend, and whether exact mode was on, where the two ways have to agree to the bit."""
_examined: WeakKeyDictionary[Backbone, tuple[_Kind, Decoder | None, str | None]] = WeakKeyDictionary()
"""Kind of each backbone, and its decoder or the reason against one for as long as it is of this kind."""


def native_unsupported(backbone: Backbone) -> str | None:
    """Reason why the native step cannot serve a backbone here and now, or None. Tries a backbone once."""
    if backbone.in_turn is not None:
        return "no process holds all of its weights: blocks are gathered one by one as they run (shard_base)"
    return without_ops(backbone, ("decode_step",), _backend(backbone)) or _examine(backbone)[1]


def _backend(backbone: Backbone) -> str:
    """The kernels that serve a backbone where it is."""
    return "triton" if is_gpu(backbone.device) or registry.default_backend() == "triton" else "cpu"


def without_ops(backbone: Backbone, ops: Iterable[str], backend: str = "cpu") -> str | None:
    """Reason why a backend's ops cannot run here and now, whatever a backbone's modules are; None if all can."""
    if not is_eager():
        return "the CPU stands in for another device, or a graph is being compiled"
    if registry.default_backend() not in ("auto", backend):
        return f"the kernels of {registry.default_backend()!r} were asked for"
    if not eager(next(backbone.model.parameters())):
        return "its weights are not tensors with memory of their own"
    if torch.is_autocast_enabled(backbone.device.type):
        return "autocast is on"
    for op in ops:
        reason = registry.unsupported(op, backend, backbone.device.type, backbone.dtype)
        if reason is not None:
            return reason
    return None


def native_preferred(backbone: Backbone, device_type: str) -> bool:
    """Whether `auto` decides for the native step, of a backbone that it serves; see `rlhf_kernels.runtime.registry`."""
    base_model: Any = backbone.base_model
    shape = base_model.layers[0].get_submodule(_LINEARS["gate"]).weight.shape
    return registry.resolve_for("decode_step", "auto", device_type, backbone.dtype, shape) == "cpu"


def tokens_together(dtype: torch.dtype, prompt_length: int, prompts: int) -> int:
    """Tokens that go through a layer at once, of so many prompts of one length that are admitted together."""
    tokens = prompt_length * prompts
    if prompt_length > _LONG_PROMPT or tokens > _MANY_TOKENS[dtype]:
        return tokens
    return min(tokens, _ROWS // prompt_length * prompt_length)


def _examine(backbone: Backbone) -> tuple[Decoder | None, str | None]:
    known, kind = _examined.get(backbone), (backbone.dtype, _backend(backbone), registry.is_exact())
    if known is None or known[0] != kind:
        reason, decoder = _differs(backbone), None
        if reason is None:
            decoder = _decoder(backbone)
            if _backend(backbone) == "triton":
                join(decoder)
            reason = _try(backbone, decoder)
        _examined[backbone] = known = kind, decoder, reason
    return known[1:]


def _differs(backbone: Backbone) -> str | None:
    """Difference between a backbone's modules and what the kernel computes; None where names and kinds agree."""
    base_model: Any = backbone.base_model
    parts = {name for name, _ in base_model.named_children()}
    if parts != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return f"its backbone is made of {sorted(parts)}"
    if type(base_model.embed_tokens) is not nn.Embedding:
        return f"its embedding is a {type(base_model.embed_tokens).__name__}"
    if getattr(base_model.rotary_emb, "rope_type", None) not in _FIXED_ANGLES:
        return f"its rotary embedding is of the kind {getattr(base_model.rotary_emb, 'rope_type', None)!r}"
    for i, layer in enumerate(base_model.layers):
        parts = {name for name, _ in layer.named_children()}
        if parts != _NORMS | {"self_attn", "mlp"}:
            return f"layer {i} is made of {sorted(parts)}"
        inside = {f"self_attn.{name}" for name, _ in layer.self_attn.named_children()}
        inside |= {f"mlp.{name}" for name, _ in layer.mlp.named_children()}
        others = inside - set(_LINEARS.values()) - {"self_attn.q_norm", "self_attn.k_norm", "mlp.act_fn"}
        missing = set(_LINEARS.values()) - inside
        if others or missing:
            return f"layer {i} has {sorted(others)} and lacks {sorted(missing)}"
        own = [name for part in (layer, layer.self_attn, layer.mlp) for name, _ in part.named_parameters(recurse=False)]
        if own:
            return f"layer {i} has parameters beside its linears and norms: {sorted(own)}"
        if any(type(layer.get_submodule(path)) is not GatedLinear for path in _LINEARS.values()):
            return f"linears of layer {i} are not plain ones"
        if not isinstance(getattr(layer.self_attn, "head_dim", None), int):
            return f"the attention of layer {i} does not say how large its heads are"
        if type(getattr(layer.mlp, "act_fn", None)).__name__ not in ("SiLU", "SiLUActivation"):
            return f"the activation of layer {i} is a {type(getattr(layer.mlp, 'act_fn', None)).__name__}"
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [norm for norm in (getattr(layer.self_attn, f"{x}_norm", None) for x in "qk") if norm is not None]
        if not all(isinstance(getattr(norm, "weight", None), torch.Tensor) for norm in (*norms, base_model.norm)):
            return f"a norm of layer {i} has no weight"
    return None


def _decoder(backbone: Backbone) -> Decoder:
    base_model: Any = backbone.base_model
    first = base_model.layers[0]
    head_dim = first.self_attn.head_dim
    return Decoder(
        embedding=base_model.embed_tokens.weight,
        layers=[_layer(layer, window) for layer, window in zip(base_model.layers, _windows(backbone), strict=True)],
        final_norm=base_model.norm.weight,
        eps=float(getattr(base_model.norm, "variance_epsilon", getattr(base_model.norm, "eps", 0.0))),
        n_heads=first.self_attn.q_proj.out_features // head_dim,
        n_kv_heads=first.self_attn.k_proj.out_features // head_dim,
        head_dim=head_dim,
        scale=float(getattr(first.self_attn, "scaling", head_dim**-0.5)),
    )


def _layer(layer: Any, window: int | None) -> DecoderLayer:
    linears = {name: layer.get_submodule(path) for name, path in _LINEARS.items()}
    norms = {f"{x}_norm": getattr(layer.self_attn, f"{x}_norm", None) for x in "qk"}
    parts: dict[str, Any] = {name: getattr(norm, "weight", None) for name, norm in norms.items()}
    parts |= {name: Projection(weight=p.weight, bias=p.bias) for name, p in linears.items()}
    return DecoderLayer(
        input_norm=layer.input_layernorm.weight,
        mlp_norm=layer.post_attention_layernorm.weight,
        window=window,
        **parts,
    )


def _adapter(backbone: Backbone, slot: AdapterSlot) -> StepAdapter:
    """A slot's pairs by layer and name; what it adapts elsewhere, such as the head, is not the step's."""
    n_layers = backbone.model.config.get_text_config().num_hidden_layers
    layers: list[dict[str, tuple[torch.Tensor, torch.Tensor]]] = []
    for i in range(n_layers):
        layers.append({})
        for name, end in _LINEARS.items():
            pair = slot.by_path.get(f"{backbone.blocks_prefix}{i}.{end}")
            if pair is not None:
                layers[i][name] = pair.A, pair.B
    return StepAdapter(pairs=layers, scale=slot.config.scale)


def _angles(backbone: Backbone, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [positions, D] as the model's own rotary embedding makes them."""
    base_model: Any = backbone.base_model
    like = torch.empty(0, dtype=backbone.dtype, device=backbone.device)
    with torch.no_grad():
        cos, sin = base_model.rotary_emb(like, torch.arange(positions, device=backbone.device)[None])
    return cos[0].contiguous(), sin[0].contiguous()


@torch.no_grad()
def _try(backbone: Backbone, decoder: Decoder) -> str | None:
    """Difference between the kernel's steps and those of transformers' forward; None where they agree."""
    cache = KVCache(blocks=2)
    late = min(backbone.context_length, _LATEST) - 1
    try:
        plain = _trial_steps(TransformersStep(backbone, cache), cache, backbone, late)
        ours = _trial_steps(NativeStep(backbone, cache, (), late + 1, decoder), cache, backbone, late)
    except (ValueError, TypeError) as error:  # shapes and dtypes that the kernel does not take
        return f"the kernel refuses it: {error}"
    if registry.is_exact() and not torch.equal(ours, plain):
        return "its steps have other bits than its forward pass"
    base_model: Any = backbone.base_model
    tokens = _trial_tokens(backbone)
    added = plain - base_model.norm(base_model.embed_tokens(tokens))  # what the layers make of a token
    error_N = (ours - plain).float().norm(dim=-1) / added.float().norm(dim=-1).clamp_min(1e-30)
    if not error_N.max() <= _TRIAL_TOLERANCE[backbone.dtype]:
        return f"its steps differ by {float(error_N.max()):.2g} of what its layers add"
    if backbone.has_lm_head:
        expected, our_logits = (head_logits(h, backbone.lm_head).float() for h in (plain, ours))
        behind = expected.max(-1).values - expected.gather(1, our_logits.argmax(-1, keepdim=True))[:, 0]
        # rounding may swap tokens that are nearly tied
        if (behind > 2 * (our_logits - expected).abs().max(-1).values).any():
            return "its steps choose other tokens"
    return None


def _trial_tokens(backbone: Backbone) -> torch.Tensor:
    return (31 * torch.arange(_TRIAL_STEPS + 1, device=backbone.device) + 7) % backbone.vocabulary


def _trial_steps(step: RolloutStep, cache: KVCache, backbone: Backbone, late: int) -> torch.Tensor:
    """Hidden states [steps + 1, H] of a few tokens after a prompt, and of one at the end of the context."""
    tokens = _trial_tokens(backbone)
    prompt = tuple(token % backbone.vocabulary for token in _TRIAL_PROMPT)
    step.prefill([Prompt(prompt=prompt, slot=None, blocks=[0])])
    table, columns = SlotTable.uniform(None, 1), late // cache.block + 1
    state = RowState.idle(1, columns, backbone.device)
    states = []
    for i, token in enumerate(tokens[:-1]):
        state.tokens_N[:], state.lengths_N[:] = token, len(prompt) + i
        states.append(step.decode(state, table, len(prompt) + i))
    # all blocks of a long row are one and the same, whose numbers are any
    generator = torch.Generator().manual_seed(0)
    for layers in (cache.keys, cache.values):
        for x in layers.values():
            x.copy_(torch.randn(x.shape, generator=generator))
    state.table_NB[:, -1] = 1
    state.tokens_N[:], state.lengths_N[:] = tokens[-1], late
    states.append(step.decode(state, table, late))
    return torch.cat(states)


@torch.no_grad()
def _windows(backbone: Backbone) -> list[int | None]:
    """The sliding window that each layer asks its attention for."""
    tokens = torch.zeros(1, dtype=torch.int64, device=backbone.device)
    windows: list[int | None] = []
    backbone.run(tokens, tokens, SlotTable.uniform(None, 1), plan_packed([1], backbone.device), windows=windows)
    return windows


# ---- CUDA graphs -----------------------------------------------------------------------------------------------------


Capture = Callable[[Callable[[], NextTokens]], tuple[NextTokens, Callable[[], None]]]
"""Function that captures a step → tensors that hold its results from then on, and its replay. May run it before."""

_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WARM_UP = 3  # eager steps before a capture
WORTH = 32  # tokens that are left to sample at least, for a capture to pay
_MOST_GRAPHS = 32  # kept from one rollout to the next
_IDLE_SHARE = 4  # one captured graph serves rows for one in so many of its places, before another is captured


class CaptureError(EngineError):
    """A decoding step that cannot be captured."""


class GraphStep(RolloutStep):
    """Another step, its decoding captured."""

    name = "graph"
    wait_share = TransformersStep.wait_share

    def __init__(self, step: RolloutStep, columns: int, idle_block: int, capture: Capture, *, required: bool) -> None:
        """Capture a step for tables of `columns` blocks; else it runs by itself, or CaptureError if required."""
        self._step, self.backbone, self.cache = step, step.backbone, step.cache
        self._columns, self._idle_block = columns, idle_block
        self._capture: Capture | None = capture
        self._required = required
        self._graphs: dict[tuple[int, tuple[object, ...]], _Graph] = {}
        self.used = set[tuple[int, tuple[object, ...]]]()
        """Graphs that have run since the engine last rested. The choice looks at these alone: rows of one rollout run
        in the same graphs, whatever ran before it."""

    def begin(self) -> None:
        """Begin a rollout: no graph has run in it, and of many, which temperatures make, those of the last one stay."""
        if len(self._graphs) > _MOST_GRAPHS:
            self._graphs = {key: graph for key, graph in self._graphs.items() if key in self.used}
        self.used.clear()

    def prefill(self, prompts: Sequence[Prompt]) -> torch.Tensor:
        return self._step.prefill(prompts)

    def decode(self, state: RowState, table: SlotTable, longest: int) -> torch.Tensor:
        return self._step.decode(state, table, longest)

    def decode_many(self, live: LiveRows, n: int, sampler: Sampler) -> list[NextTokens]:
        graph = self._graph_for(live, sampler)
        return super().decode_many(live, n, sampler) if graph is None else graph.run(live, n)

    def _graph_for(self, live: LiveRows, sampler: Sampler) -> _Graph | None:
        """The graph that serves these rows; None for the step itself."""
        (group, *others), any_slot, rows = live.groups(), self._step.reads_slots, len(live)
        if self._capture is None or others or (len(live.slot_table.slots) > 1 and not any_slot):
            return None
        if group.temperature is None or group.truncates or group.not_yet is not None or len(group.heads.slots) > 1:
            return None
        slot = None if any_slot else live.rows[0].slot
        kind = (slot, group.heads.slots[0], group.temperature)
        left = max(row.left for row in live.rows)
        size = bucket(rows)
        known = min((n for n, other in self.used if n >= rows and other == kind), default=None)
        if known is not None and (known < max(size + 1, rows * _IDLE_SHARE) or left < WORTH):
            return self._graphs[known, kind]
        if left < WORTH:
            return None
        self.used.add((size, kind))
        if (size, kind) in self._graphs:
            return self._graphs[size, kind]
        try:
            made = self._make(self._capture, size, slot, group, sampler)
        except CaptureError as error:
            if self._required:
                raise
            self._capture, self.name = None, self._step.name
            warnings.warn(f"decoding without CUDA graphs: {error}", stacklevel=2)
            return None
        self._graphs[size, kind] = made
        return made

    def _make(self, capture: Capture, size: int, slot: str | None, group: SampleGroup, sampler: Sampler) -> _Graph:
        idle = RowState.idle(size, self._columns, self.backbone.device, block=self._idle_block)
        state = RowState.idle(size, self._columns, self.backbone.device, block=self._idle_block)
        fixed = {f.name: getattr(state, f.name) for f in fields(state)}
        table, longest = SlotTable.uniform(slot, size), self._columns * self.cache.block

        def step() -> NextTokens:
            hidden = self.decode(state, table, longest)
            state.lengths_N += 1
            drawn = sampler(hidden, state, [group])
            state.tokens_N.copy_(drawn.tokens)
            return drawn

        drawn, replay = capture(step)
        if any(getattr(state, name) is not tensor for name, tensor in fixed.items()):
            raise AssertionError("a captured step has to write where its tensors are")
        return _Graph(state, idle, drawn, replay)


class _Graph:
    """One captured step."""

    def __init__(self, state: RowState, idle: RowState, drawn: NextTokens, replay: Callable[[], None]) -> None:
        self._state, self._idle, self._drawn, self._replay = state, idle, drawn, replay

    def run(self, live: LiveRows, n: int) -> list[NextTokens]:
        """n tokens for the live rows."""
        rows = len(live)
        self._state.load(self._idle)
        self._state.load(live.state)
        drawn = []
        for _ in range(n):
            self._replay()
            drawn.append(NextTokens(self._drawn.tokens[:rows].clone(), self._drawn.logprobs[:rows].clone()))
        live.state.tokens_N = drawn[-1].tokens
        live.state.lengths_N += n
        live.longest += n
        return drawn


def bucket(rows: int) -> int:
    """Places of the smallest graph that has room for so many rows."""
    return next((size for size in _BUCKETS if size >= rows), -(-rows // 128) * 128)


class CudaCapture:
    """Captures steps of one device; their graphs share one pool of memory, since one replays at a time.

    `torch.cuda.graph` waits for the device, collects garbage and empties the cache first, while a learner beside works
    on. Here a stream of its own captures, which waits for the current one alone. Kernels of a graph keep the priority
    of the stream that captured them, so it is a high one: a step of decoding is short, and others wait for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device, priority=-1)

    def __call__(self, step: Callable[[], NextTokens]) -> tuple[NextTokens, Callable[[], None]]:
        """Capture the step. Raises CaptureError if something in it waits for the device."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                for _ in range(WARM_UP):  # what is compiled or uploaded at first calls cannot be captured
                    step()
                try:
                    with capturing:
                        drawn = _captured(graph, step, self._pool)
                except RuntimeError as error:
                    raise CaptureError(
                        f"decode_step: expected a model whose step can be captured for 'graph', got: {error}"
                    ) from error
        finally:
            current.wait_stream(self._stream)  # what it has written is read, and its memory used again, on this one
        return drawn, graph.replay


def _captured(graph: torch.cuda.CUDAGraph, step: Callable[[], NextTokens], pool: Any) -> NextTokens:
    """Next tokens of a step that the graph has captured on the current stream."""
    collects = gc.isenabled()
    gc.disable()  # an event or a graph that dies now would end the capture
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            drawn = step()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the stream has to leave the capture; the step's own error counts
                _end(graph, pool)
            raise
        _end(graph, pool)
    finally:
        if collects:
            gc.enable()
    return drawn


def _end(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """End a capture, and see that the allocator leaves it too: torch 2.11 stays in one that fails."""
    try:
        graph.capture_end()
    except RuntimeError:
        end, release = (getattr(torch._C, f"_cuda_{name}", None) for name in ("endAllocateToPool", "releasePool"))
        if end is not None and release is not None:
            with contextlib.suppress(RuntimeError):  # of a later torch, which has left by itself
                end(torch.cuda.current_device(), pool)
                release(torch.cuda.current_device(), pool)
        raise
