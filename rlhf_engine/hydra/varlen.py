"""Attention of packed sequences on a GPU, without padding: flash-attn, torch's varlen attention, FlexAttention.

`choose` takes the first of these that serves a layer, once per process and kind of layer:

    flash-attn 3    capability 9                     flash-attn 2   from capability 8 on
    flash-attn 4    capability 9, 10, 11             torch varlen   from capability 8 on, without a softcap
    FlexAttention   prompts that sequences share; and what has a window, a softcap or sinks and none of the others
                    serves; compiled on its first call

Sinks go through FlexAttention alone: with ℓ the log-sum-exp of a row's scores, its output is scaled by σ(ℓ − sink).

All of them work in bf16 and fp16 and give a sequence the same bits whatever it is packed with: each is asked for one
pass over the keys. The backward pass of FlexAttention has a fixed order, and flash-attn is asked for one. That of torch
varlen adds the gradient of queries by atomics, so its last bits may change from call to call; its order is fixed only
under `torch.use_deterministic_algorithms(True)`.

Elsewhere `choose` gives None and the reason, and attention goes through SDPA (see `attention`): on a CPU, in fp32, and
with the `reference` kernels, whose promise are the bits of the transformers model. In exact mode the op `attention`
serves.

Legend: T rows, N sequences, H query heads, K key/value heads, D head size, E size of a value head.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from rlhf_kernels.runtime import registry
from rlhf_kernels.runtime.device_tables import queued

from rlhf_engine.devices import is_gpu

_HALF = (torch.bfloat16, torch.float16)
_BLOCK = 128  # rows of FlexAttention's blocks; its own default
_FLEX_HEAD = 16  # least head size that FlexAttention compiles for a GPU
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "Sequences", "ScoreRule"], torch.Tensor]
"""query [T, H, D], key [T, K, D], value [T, K, E], where sequences lie, the layer's scores → [T, H, E]."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoreRule:
    """Rule by which a layer turns queries and keys into attention scores."""

    scaling: float | None  # none: 1 / √D
    window: int | None  # keys that a query sees, itself included; None: all before it
    softcap: float | None  # scores ↦ softcap · tanh(scores / softcap); None: as they are
    sinks: torch.Tensor | None
    """[H], a logit of each query head that joins the softmax's denominator and has no value; None: none."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Sequences:
    """Bounds of packed sequences."""

    lengths: tuple[int, ...]
    device: torch.device
    parents: tuple[int, ...] | None = None
    """Parent of each sequence, whose keys come before its own, by its number; −1: none. None: no sequence has one."""
    masks: dict[int | None, Any] = field(default_factory=dict)
    """FlexAttention's block masks by window, made once for all layers."""

    @property
    def longest(self) -> int:
        """Rows of the longest sequence."""
        return max(self.lengths)

    @cached_property
    def starts(self) -> torch.Tensor:
        """int32 [N + 1], the first row of each sequence, and T."""
        return _bounds(self.lengths, self.device)

    @cached_property
    def whole_blocks(self) -> tuple[int, ...]:
        """Rows of each sequence, rounded up to whole blocks of FlexAttention."""
        return tuple(-(-length // _BLOCK) * _BLOCK for length in self.lengths)

    @cached_property
    def blocks(self) -> torch.Tensor:
        """int32 [N + 1], the same where every sequence begins with a block of FlexAttention and ends with one."""
        return _bounds(self.whole_blocks, self.device)

    @cached_property
    def places(self) -> torch.Tensor:
        """int64 [T], the row of each token in `blocks`."""
        lengths = queued(self.lengths, self.device)
        moved = (self.blocks - self.starts)[:-1].repeat_interleave(lengths, output_size=sum(self.lengths))
        return torch.arange(len(moved), device=self.device) + moved

    @cached_property
    def before(self) -> torch.Tensor:
        """int32 [N], the keys of each sequence's parent."""
        lengths = [0 if parent < 0 else self.lengths[parent] for parent in self.parents or [-1] * len(self.lengths)]
        return queued(torch.tensor(lengths, dtype=torch.int32), self.device)


def _bounds(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    return queued(torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32), device)


class Layer(NamedTuple):
    """Properties of a layer that decide which path may serve it."""

    capability: tuple[int, int]
    dtype: torch.dtype
    head_size: int
    value_size: int
    windowed: bool
    softcapped: bool
    sinks: bool
    shared: bool  # whether sequences go on from a prompt that they share


@dataclass(frozen=True, kw_only=True)
class Path:
    """An implementation of attention that may serve a layer."""

    name: str
    unsupported: Callable[[Layer], str | None]
    """Function that gives the reason why the path cannot serve a layer, or None if it can."""
    load: Callable[[], Attend]


def choose(query: torch.Tensor, value: torch.Tensor, rule: ScoreRule, *, shared: bool = False) -> Attend | None:
    """The function that serves such a layer, `shared` prompts included; None where SDPA or the op `attention` does."""
    if not _may_serve(query.device.type, query.dtype):
        return None
    window, softcap, sinks = (x is not None for x in (rule.window, rule.softcap, rule.sinks))
    sizes = query.shape[-1], value.shape[-1]
    return _chosen(Layer(capability(query.device), query.dtype, *sizes, window, softcap, sinks, shared))[1]


def can_share(device_type: str, dtype: torch.dtype, head_size: int) -> bool:
    """Whether `choose` finds who serves layers of such heads, of sequences that share prompts."""
    return _may_serve(device_type, dtype) and head_size >= _FLEX_HEAD


def _may_serve(device_type: str, dtype: torch.dtype) -> bool:
    """Whether attention without padding is to be used at all."""
    in_order = registry.is_exact() or registry.asked("attention") in ("reference", "triton")
    return is_gpu(device_type) and dtype in _HALF and not in_order


@functools.cache
def _chosen(layer: Layer) -> tuple[str, Attend | None]:
    for path in PATHS:
        if path.unsupported(layer) is None:
            return path.name, path.load()
    return SDPA, None


def report() -> dict[str, str]:
    """Name who serves attention of 64-wide heads in bf16, by kind of layer, and say why others do not."""
    if registry.default_backend() == "reference":
        return {"attention": SDPA, "why": "kernels are the reference"}
    at = capability(torch.device("cuda"))
    if at == (0, 0):
        in_cpp = registry.unsupported("attention", "cpu", "cpu", torch.bfloat16) is None
        return {"attention": IN_CPP if in_cpp else SDPA, "why": "there is no CUDA device"}
    if registry.is_exact() or registry.asked("attention") == "triton":
        return {"attention": IN_TRITON, "why": "exact mode or kernels triton: decoding's order in training, too"}
    chosen = {}
    for name in ("attention", "window", "sinks", "shared prompts", "softcap"):
        kinds = [name == kind for kind in ("window", "softcap", "sinks", "shared prompts")]
        layer = Layer(at, torch.bfloat16, 64, 64, *kinds)
        chosen[name] = _chosen(layer)[0]
    reasons = {path.name: path.unsupported(layer) for path in PATHS}
    return {**chosen, "why": "; ".join(f"{name}: {why}" for name, why in reasons.items() if why)}


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU; (0, 0) where CUDA is not there."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (0, 0)


# ---- flash-attn ------------------------------------------------------------------------------------------------------


@functools.cache
def _absent(distribution: str, module: str, install: str) -> str | None:
    """Reason why a package cannot be used, or None if it can."""
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return f"{distribution} is not installed ({install})"
    try:
        importlib.import_module(module)
    except (ImportError, OSError) as error:  # built for another torch, another CUDA
        return f"{distribution} does not load: {' '.join(str(error).split())[:200]}"
    return None


def _flash(name: str, module: str, install: str, first: int, last: int) -> Path:
    """The path of a release of flash-attn, for GPUs of these capabilities."""

    def unsupported(layer: Layer) -> str | None:
        reason = _absent(name.replace(" ", "-").removesuffix("-2"), module, install)
        reason = (
            reason or _needs_capability(layer, first, last) or _needs_equal_heads(layer) or _needs_plain_keys(layer)
        )
        if reason is None and name == "flash-attn 4" and layer.capability[0] > 9 and layer.head_size > 128:
            whole = layer.head_size == 256 and not layer.softcapped
            return None if whole else f"it does not serve heads of {layer.head_size} like these"
        return reason

    return Path(name=name, unsupported=unsupported, load=lambda: _load_flash(module))


def _needs_capability(layer: Layer, first: int, last: int) -> str | None:
    if first <= layer.capability[0] <= last:
        return None
    return f"it needs a GPU of capability {first}{'' if last == first else ' or later'}, not {layer.capability[0]}"


def _needs_equal_heads(layer: Layer) -> str | None:
    sizes = layer.head_size, layer.value_size
    if sizes[0] == sizes[1] and sizes[0] <= 256 and sizes[0] % 8 == 0:
        return None
    return f"it serves keys and values of one size, a multiple of 8 up to 256, not {sizes[0]} and {sizes[1]}"


def _needs_plain_keys(layer: Layer) -> str | None:
    if layer.shared:
        return "it gives every sequence keys of its own"
    return "its gradient does not go through the log-sum-exp that sinks need" if layer.sinks else None


def _load_flash(module: str) -> Attend:
    """The varlen function of any of the three packages: it has the arguments that are named here."""
    function = importlib.import_module(module).flash_attn_varlen_func

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: Sequences, rule: ScoreRule
    ) -> torch.Tensor:
        out = function(
            query, key, value, cu_seqlens_q=sequences.starts, cu_seqlens_k=sequences.starts,
            max_seqlen_q=sequences.longest, max_seqlen_k=sequences.longest, softmax_scale=rule.scaling, causal=True,
            deterministic=True, **({} if rule.window is None else {"window_size": (rule.window - 1, 0)}),
            **({} if rule.softcap is None else {"softcap": rule.softcap}),
        )  # fmt: skip
        result: torch.Tensor = out[0] if isinstance(out, tuple) else out  # some give the log-sum-exp as well
        return result

    return attend


# ---- torch's varlen attention ----------------------------------------------------------------------------------------


def _varlen(layer: Layer) -> str | None:
    if layer.softcapped:
        return "it has no softcap"
    return _needs_capability(layer, 8, 99) or _needs_equal_heads(layer) or _needs_plain_keys(layer)


def _load_varlen() -> Attend:
    function: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    options = inspect.signature(function).parameters  # releases of torch differ
    fixed = {"num_splits": 1} if "num_splits" in options else {}

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: Sequences, rule: ScoreRule
    ) -> torch.Tensor:
        groups = query.shape[1] // key.shape[1]
        shared = {}
        if groups > 1 and "enable_gqa" in options:
            shared = {"enable_gqa": True}
        elif groups > 1:
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        out: torch.Tensor = function(
            query, key, value, sequences.starts, sequences.starts, sequences.longest, sequences.longest,
            scale=rule.scaling, window_size=(-1 if rule.window is None else rule.window - 1, 0), **fixed, **shared,
        )  # fmt: skip
        return out

    return attend


# ---- FlexAttention ---------------------------------------------------------------------------------------------------


def _flex(layer: Layer) -> str | None:
    if not (layer.windowed or layer.softcapped or layer.sinks or layer.shared):
        return "SDPA serves what has no window, softcap, sinks or shared prompts"
    if min(layer.head_size, layer.value_size) < _FLEX_HEAD:
        return f"it serves heads of {_FLEX_HEAD} and more, not of {layer.head_size} and {layer.value_size}"
    return None


_VARIANTS = 64  # most variants of FlexAttention, and of its masks, that are compiled


@functools.cache
def _flex_compiled() -> tuple[Any, Any]:
    """FlexAttention and the maker of its masks, compiled: run eagerly, both would make scores of T × T."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # torch compiles 8 variants of a function, and the ninth would be an error: none runs eagerly
    raised = torch._dynamo.config.patch(recompile_limit=_VARIANTS)
    attend = raised(torch.compile(flex_attention, dynamic=True, fullgraph=True))
    return attend, raised(torch.compile(create_block_mask, fullgraph=True))


def _attend_flex(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: Sequences, rule: ScoreRule
) -> torch.Tensor:
    flex_attention, create_block_mask = _flex_compiled()
    # A sequence that begins within a block is summed in other parts than one that begins with it
    rows = max(2 * _BLOCK, sum(sequences.whole_blocks))  # a single block would be compiled for itself
    padded = (x.new_zeros(rows, *x.shape[1:]).index_copy(0, sequences.places, x) for x in (query, key, value))
    if rule.window not in sequences.masks:
        seen = _visible(sequences, rows, rule.window)
        sequences.masks[rule.window] = create_block_mask(seen, None, None, rows, rows, device=str(query.device))
    attended = flex_attention(
        *(x.transpose(0, 1)[None] for x in padded),
        score_mod=None if rule.softcap is None else _capped(rule.softcap, query.device),
        block_mask=sequences.masks[rule.window],
        scale=rule.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        **({} if rule.sinks is None else {"return_aux": _log_sum_exp()}),
    )
    out: torch.Tensor = attended if rule.sinks is None else attended[0]
    if rule.sinks is not None:
        share = torch.sigmoid(attended[1].lse.float() - rule.sinks.float()[None, :, None])  # of the keys in the softmax
        out = (out.float() * share[..., None]).to(query.dtype)
    return out[0].transpose(0, 1).index_select(0, sequences.places)


def _log_sum_exp() -> Any:
    """The request for the log-sum-exp of each row's scores."""
    from torch.nn.attention.flex_attention import AuxRequest

    return AuxRequest(lse=True)


def _visible(sequences: Sequences, T: int, window: int | None) -> Callable[..., torch.Tensor]:
    """Whether row i of T in blocks sees row j: its own sequence or its parent, no later one, within the window."""
    starts = sequences.blocks
    rows = torch.arange(T, device=starts.device, dtype=starts.dtype)
    of_row = torch.bucketize(rows, starts[1:], right=True)

    def own(batch: Any, head: Any, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        visible = (of_row[i] == of_row[j]) & (j <= i)
        return visible if window is None else visible & (i - j < window)

    if sequences.parents is None:
        return own
    parents = torch.tensor(sequences.parents, dtype=torch.int32).to(starts.device)[of_row]
    before = sequences.before[of_row]
    position = rows - starts[of_row] + before

    def own_or_shared(batch: Any, head: Any, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        # the rows that fill a parent's last block have positions from its length on
        shared = (parents[i] == of_row[j]) & (position[j] < before[i])
        visible = shared | ((of_row[i] == of_row[j]) & (j <= i))
        return visible if window is None else visible & (position[i] - position[j] < window)

    return own_or_shared


@functools.cache
def _capped(softcap: float, device: torch.device) -> Callable[..., torch.Tensor]:
    """One function per softcap: another one would be compiled anew. Compiled code takes a tensor, not a float."""
    cap = torch.tensor(softcap, device=device)

    def capped(score: torch.Tensor, batch: Any, head: Any, i: Any, j: Any) -> torch.Tensor:
        return cap * torch.tanh(score / cap)

    return capped


SDPA = "SDPA in buckets"
IN_CPP, IN_TRITON = "the op attention in C++", "the op attention in Triton"
PATHS = (
    _flash("flash-attn 3", "flash_attn_interface", "built from its sources", 9, 9),
    _flash("flash-attn 4", "flash_attn.cute", "pip install --pre flash-attn-4", 9, 11),
    _flash("flash-attn 2", "flash_attn.flash_attn_interface", "pip install 'rlhf-engine[flash-attn]'", 8, 99),
    Path(name="torch varlen", unsupported=_varlen, load=_load_varlen),
    Path(name="FlexAttention", unsupported=_flex, load=lambda: _attend_flex),
)
