"""LoRA slots and heads of a backbone, and the gate: which slot serves which rows during one backbone call.

y = x Wᵀ + b + s_i · dropout(x) A_iᵀ B_iᵀ on the rows of slot i;  y = x Wᵀ + b on rows that are off.

Each slot owns its Parameters, per layer A [r, in] and B [out, r].

transformers hands its linears and attention functions tensors only, so the gate has to be ambient. It is a thread-local
that holds one immutable `BackboneCall`, entered with a context manager. Nothing about it lives on modules: two threads
may run different slots through the same modules at once. Gradient checkpointing recomputes layers later, maybe in
another thread, so `checkpoint_contexts` captures the call and the settings of kernels that the layer first ran by.
"""

from __future__ import annotations

import contextlib
import math
import threading
import warnings
from collections.abc import ItemsView, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Self

import torch
from rlhf_kernels.linear import linear
from rlhf_kernels.lora import Segments, group
from rlhf_kernels.runtime import registry
from rlhf_kernels.vocab.logits import HeadLora
from torch import nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from rlhf_engine.hydra.attention import AttentionPlan

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True)
class SlotConfig:
    """Shape and origin of one adapter slot."""

    r: int = 16
    """LoRA rank, at least 1."""
    alpha: float = 32.0
    """LoRA scaling numerator, finite and not 0; the product is scaled by alpha / r (alpha / √r with `use_rslora`)."""
    dropout: float = 0.0
    """Probability in [0, 1) of dropout on the input of A, in training only."""
    target_modules: str | Sequence[str] = ALL_LINEAR
    """`all-linear` (every linear of the blocks) or endings of names as in PEFT, one or several; kept as a tuple."""
    use_rslora: bool = False
    """Scale by alpha / √r."""
    init_from: str | None = None
    """Another slot of the backbone, or a PEFT folder, that this slot starts as; None: A is random and B zero."""

    def __post_init__(self) -> None:
        if type(self.r) is not int or self.r < 1:
            raise ValueError(f"r: expected a LoRA rank of at least 1, got {self.r!r}")
        if not math.isfinite(self.alpha) or self.alpha == 0:
            raise ValueError(f"alpha: expected a finite number other than 0, got {self.alpha}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout: expected a probability in [0, 1), got {self.dropout}")
        if len(self.target_modules) == 0:
            raise ValueError("target_modules: expected at least one name, got none")
        if self.target_modules != ALL_LINEAR:  # a list is no key
            names = self.target_modules
            object.__setattr__(self, "target_modules", (names,) if isinstance(names, str) else tuple(names))

    @property
    def scale(self) -> float:
        """s in the module's formula."""
        return self.alpha / math.sqrt(self.r) if self.use_rslora else self.alpha / self.r


class LoraPair(nn.Module):
    """A [r, in] and B [out, r] of one slot at one linear."""

    def __init__(self, r: int, in_features: int, out_features: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.empty(r, in_features, device=device, dtype=dtype))
        self.B = nn.Parameter(torch.zeros(out_features, r, device=device, dtype=dtype))

    def reset(self, generator: torch.Generator) -> None:
        """PEFT's start: A uniform as a linear's weight, B zero, so that the slot begins as OFF."""
        bound = 1 / math.sqrt(self.A.shape[1])
        with torch.no_grad():
            draw = torch.rand(self.A.shape, generator=generator)
            self.A.copy_((2 * draw - 1) * bound)
            self.B.zero_()


class AdapterSlot(nn.Module):
    """All pairs of one slot, keyed by the linear's name in the causal-LM model."""

    def __init__(self, name: str, config: SlotConfig, pairs: Mapping[str, LoraPair], trainable: bool) -> None:
        super().__init__()
        self.name = name
        self.config = config
        self.trainable = trainable
        self.by_path = dict(pairs)  # in layer order, by the names of the linears that the slot adapts
        # ModuleDict keys must not contain dots
        self.pairs = nn.ModuleDict({path.replace(".", "/"): pair for path, pair in pairs.items()})
        self.requires_grad_(trainable)

    def items(self) -> ItemsView[str, LoraPair]:
        """(name of the linear, its pair), in layer order."""
        return self.by_path.items()

    def copy_from(self, other: AdapterSlot) -> None:
        """Take another slot's weights. Raises ValueError if rank, scale or targets differ."""
        if self.by_path.keys() != other.by_path.keys():
            raise ValueError(f"init_from={other.name!r}: expected the same target modules as {self.name!r}, got others")
        if (self.config.r, self.config.scale) != (other.config.r, other.config.scale):
            raise ValueError(
                f"init_from={other.name!r}: expected r={self.config.r}, scale {self.config.scale} like {self.name!r}, "
                f"got r={other.config.r} and scale {other.config.scale}"
            )
        with torch.no_grad():
            for path, pair in self.items():
                pair.A.copy_(other.by_path[path].A)
                pair.B.copy_(other.by_path[path].B)


class ScalarHead(nn.Module):
    """h ↦ w·h + b. A value head starts at zero, so that a fresh critic predicts 0 everywhere."""

    def __init__(self, hidden_size: int, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, device=device))
        self.bias = nn.Parameter(torch.zeros(1, device=device))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [*, H] in any float dtype → fp32 [*]."""
        return F.linear(hidden.to(self.weight.dtype), self.weight, self.bias).squeeze(-1)


def warn_if_zero(head: nn.Module) -> None:
    """Warn of a reward head that was neither loaded nor trained."""
    if not any(weight.any() for weight in head.parameters()):
        warnings.warn(
            "role 'reward': expected a head that was loaded or trained, got one of zeros, so that every reward is 0.0",
            stacklevel=3,
        )


@dataclass(frozen=True, kw_only=True)
class LmHead:
    """Output embedding of the model, as the vocabulary kernels need it."""

    weight: torch.Tensor  # [V, H]
    bias: torch.Tensor | None  # [V] or None
    softcap: float | None
    logit_scale: float | None
    lora: HeadLora | None = None  # addition of the slot that the head is looked up for


def head_logits(hidden: torch.Tensor, head: LmHead, *, backend: str = "auto") -> torch.Tensor:
    """Logits [T, V] as the model defines them, for probes and truncated distributions; `backend` of `linear`."""
    z = linear(hidden, head.weight, head.bias, backend=backend)
    if head.lora is not None:
        low = linear(hidden.to(head.lora.A.dtype), head.lora.A, backend=backend)
        z = z + head.lora.scale * linear(low, head.lora.B, backend=backend).to(z.dtype)
    if head.logit_scale is not None:
        z = z * head.logit_scale
    return z if head.softcap is None else head.softcap * torch.tanh(z / head.softcap)


# ---- the gate --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SlotTable:
    """Row ranges of a backbone call, sorted and disjoint, and the slot that serves each (None: plain backbone)."""

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    slots: tuple[str | None, ...]

    @classmethod
    def uniform(cls, slot: str | None, n_rows: int) -> SlotTable:
        """All rows through one slot."""
        return cls(starts=(0,), ends=(n_rows,), slots=(slot,))


@dataclass(frozen=True, kw_only=True, eq=False)
class DropoutKey:
    """Key of the LoRA dropout masks of one call: masks are a function of (seed, row id, layer, column)."""

    seed: int
    row_ids_T: torch.Tensor  # int64 [T], one id per row of the call


@dataclass(frozen=True, kw_only=True, eq=False)
class BackboneCall:
    """Everything ambient during one backbone forward."""

    table: SlotTable
    attention: AttentionPlan
    slots: Mapping[str, AdapterSlot] = field(default_factory=dict)
    """The slots that the table names; others may be there. Layers hold none, so that models may share a base."""
    dropout: DropoutKey | None = None
    positions_T: torch.Tensor | None = None
    """int64 [T], position of each row in its sequence, for attention that counts positions by itself."""
    windows: list[int | None] | None = None
    """Sliding windows that layers' attention was called with, where they are noted: proof of what ran."""


_local = threading.local()


def current() -> BackboneCall | None:
    """The call that this thread is in, or None outside of one."""
    return getattr(_local, "call", None)


@contextlib.contextmanager
def enter(call: BackboneCall | None, kernels: registry.Settings | None = None) -> Iterator[None]:
    """Make `call` current in this thread, and settings of the kernels if given, for the length of a `with` block."""
    previous = current()
    _local.call = call
    group.held.clear()  # what linears compute for each other is for one call
    try:
        with contextlib.nullcontext() if kernels is None else kernels.used():
            yield
    finally:
        _local.call = previous
        group.held.clear()  # a recompute may end between two linears of a group


class _Recompute(contextlib.ExitStack):
    """The block of `enter` for each recompute of a layer, of which a graph that is kept has several."""

    def __init__(self) -> None:
        super().__init__()
        self._call, self._kernels = current(), registry.effective()

    def __enter__(self) -> Self:
        self.enter_context(enter(self._call, self._kernels))
        return self


def checkpoint_contexts() -> tuple[contextlib.AbstractContextManager[None], contextlib.ExitStack]:
    """`context_fn` for `torch.utils.checkpoint`: the recompute runs under the call of the original forward."""
    return contextlib.nullcontext(), _Recompute()


def lora_segments(table: SlotTable, present: tuple[str, ...]) -> Segments:
    """The kernel's segment table for a layer that has adapters of the slots in `present`."""
    # the compiler traces through a cache, and says so
    return _make_segments(table, present) if torch.compiler.is_compiling() else _cached_segments(table, present)


def _make_segments(table: SlotTable, present: tuple[str, ...]) -> Segments:
    kept = [
        (a, b, present.index(s)) for a, b, s in zip(table.starts, table.ends, table.slots, strict=True) if s in present
    ]
    starts, ends, slots = zip(*kept, strict=True) if kept else ((), (), ())
    return Segments(starts=starts, ends=ends, slots=slots)


_cached_segments = lru_cache(maxsize=512)(_make_segments)
