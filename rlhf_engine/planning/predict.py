"""State, peaks and largest batches of a method, in bytes, from a model's config alone.

State, with P bytes of a backbone, S adapter parameters in a slot, d the width of the hidden states and a the bytes per
adapter parameter; counted on a model without data:

    frozen_weights, trained_weights   Σ P over backbones, less the LM head where no role reads it
    adapters    n_slots · S · a             heads   2 (d + 1) · 4
    packed_weights    copies of frozen linears that their input gradients keep on a CPU, within their budget
    gradients   trained parameters, in the dtype that `optim` accumulates them in
    optimizer   masters, moments and step counts of `optim`, see `training.adamw`

Peaks, each = what is resident in the phase + the traced peak of what the phase allocates:

    generation   weights, adapters, heads, optimizer + `generate` of `batch` prompts: prefill and last decoding step
    inference    the same + `HydraModel.score` of these answers by all roles (the loop's "scoring")
    update       the same + `training.update`: gradients, activations of a micro-batch, backward pass
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from rlhf_kernels.linear import packed
from rlhf_kernels.vocab.native import has_whole_tiles
from torch._subclasses.fake_tensor import FakeTensorMode

from rlhf_engine.hydra import HydraModel
from rlhf_engine.hydra.backbone import Backbone
from rlhf_engine.hydra.eager import stand_in
from rlhf_engine.hydra.gated_linear import GatedLinear
from rlhf_engine.hydra.kv_cache import BLOCK
from rlhf_engine.hydra.roles import LM_HEAD, base_is_trained, needs_lm_head
from rlhf_engine.planning.phases import (
    FULL_SFT,
    ROLES,
    Setting,
    build_model,
    check_setting,
    layer_period,
    plain_model,
    roles_of,
    trace_generation,
    trace_inference,
    trace_update,
)
from rlhf_engine.planning.tracing import Timeline, Tracker, extrapolated_peak
from rlhf_engine.planning.workspace import backend_of
from rlhf_engine.policy.adamw import gradient_dtype, state_layout, temporary_bytes
from rlhf_engine.rollout.steps import native as native_step
from rlhf_engine.rollout.steps.transformers import PREFILL_TOKENS

_TRACES: dict[str, Callable[[HydraModel, Setting, int, int], Timeline]] = {
    "generation": trace_generation,
    "inference": trace_inference,
    "update": trace_update,
}
PHASES = tuple(_TRACES)

_TRACED_ROWS = 64
"""Sequences up to which every number is traced: a trace takes time per sequence."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One method's memory, bytes."""

    method: str
    state_bytes: dict[str, int]
    """By part, see the module's docstring."""
    peak_bytes: dict[str, int]
    """By phase."""
    activation_bytes: dict[str, int]
    """By phase: what its peak adds to the resident state, without gradients and KV cache."""
    kv_cache_bytes: int
    max_batch: dict[str, int]
    """Largest numbers that fit the budget, 0 if not even one does. `generation`: prompts per step that can be
    generated and scored. `update`: sequences of a micro-batch."""

    @property
    def peak(self) -> int:
        """The largest peak of all phases."""
        return max(self.peak_bytes.values())

    @property
    def largest_batch(self) -> int:
        """Prompts per step that fit; 0 where the update of not even one does. Without rollouts, the micro-batch."""
        micro_batch = self.max_batch["update"]
        return self.max_batch.get("generation", micro_batch) if micro_batch else 0


class Planner:
    """Predicts one method. What was traced is kept, so that a search does not repeat it."""

    def __init__(self, method: str, setting: Setting, shared: dict[Any, Any] | None = None) -> None:
        """shared: numbers that methods have in common; the same dict for every planner of one setting."""
        self.method, self.setting = method, setting
        self._shared: dict[Any, Any] = {} if shared is None else shared
        self.roles = roles_of(method)
        self.phases = ("update",) if method == FULL_SFT else PHASES
        check_setting(setting)
        self._modes: dict[int, FakeTensorMode] = {}
        self._models: dict[int, HydraModel] = {}

    # ---- state -----------------------------------------------------------------------------------------------------

    @cached_property
    def state_bytes(self) -> dict[str, int]:
        """Bytes of the state by part, counted on the whole model."""
        backbones = list(dict.fromkeys(role.backbone for role in self.roles.values()))
        slots = {(r.backbone, r.slot): r.trainable for r in self.roles.values() if r.slot is not None}
        heads = {r.head: r.trainable for r in self.roles.values() if r.head != LM_HEAD}
        shapes = {headed: self._shape(headed) for headed in {needs_lm_head(self.roles, name) for name in backbones}}
        frozen = trained = 0
        for name in backbones:
            weight_bytes = shapes[needs_lm_head(self.roles, name)].weight_bytes
            if base_is_trained(self.roles, name):
                trained += weight_bytes
            else:
                frozen += weight_bytes
        any_shape = next(iter(shapes.values()))
        behind = {r.backbone for r in self.roles.values() if r.trainable and r.slot is not None}  # gradients pass these
        frozen_linears = [
            linear
            for name in backbones
            if name in behind and not base_is_trained(self.roles, name)
            for linear in shapes[needs_lm_head(self.roles, name)].linears
        ]
        slot_bytes = any_shape.slot_parameters * self.setting.adapter_dtype.itemsize
        head_bytes = 4 * (any_shape.hidden_size + 1)
        optim, tensors = self.setting.optim, self._trained_tensors
        return {
            "frozen_weights": frozen,
            "trained_weights": trained,
            "adapters": slot_bytes * len(slots),
            "heads": head_bytes * len(heads),
            "packed_weights": self._packed(frozen_linears),
            "gradients": sum(shape.numel() * gradient_dtype(optim, dtype).itemsize for shape, dtype in tensors),
            "optimizer": sum(
                size.numel() * kind.itemsize
                for shape, dtype in tensors
                for size, kind in state_layout(optim, shape, dtype).values()
            ),
        }

    @cached_property
    def _trained_tensors(self) -> list[tuple[torch.Size, torch.dtype]]:
        """Shape and dtype of everything that is trained."""
        found: list[tuple[torch.Size, torch.dtype]] = []
        for name in dict.fromkeys(role.backbone for role in self.roles.values()):
            if base_is_trained(self.roles, name):
                found += [(size, self.setting.dtype) for size in self._shape(needs_lm_head(self.roles, name)).weights]
        any_shape = self._shape(any(role.head == LM_HEAD for role in self.roles.values()))
        slots = {(r.backbone, r.slot) for r in self.roles.values() if r.trainable and r.slot is not None}
        found += [(size, self.setting.adapter_dtype) for size in any_shape.slot_weights] * len(slots)
        heads = {r.head for r in self.roles.values() if r.trainable and r.head != LM_HEAD}
        return found + [(torch.Size(size), torch.float32) for size in ((1, any_shape.hidden_size), (1,))] * len(heads)

    @property
    def resident(self) -> int:
        """Bytes that stay through all phases."""
        parts = ("frozen_weights", "trained_weights", "adapters", "heads", "packed_weights", "optimizer")
        return sum(self.state_bytes[part] for part in parts)

    def _packed(self, linears: list[tuple[int, int]]) -> int:
        """Bytes of what `rlhf_kernels.linear.packed` keeps for linears [M, K] and trained roles' heads, last first."""
        if self.setting.device_type != "cpu":
            return 0
        dtype = self.setting.dtype
        own = [shape for shape in linears if backend_of("linear", "cpu", dtype, shape) == "cpu"]
        for name in dict.fromkeys(r.backbone for r in self.roles.values() if r.trainable and r.head == LM_HEAD):
            head = self._shape(True).head
            frozen = not base_is_trained(self.roles, name)
            if frozen and has_whole_tiles(head) and backend_of("linear_ppo_loss", "cpu", dtype, head) == "cpu":
                own.append(head)
        return packed.planned((dtype, k, m) for m, k in reversed(own))

    def _shape(self, lm_head: bool) -> _Shape:
        if ("shape", lm_head) not in self._shared:
            self._shared["shape", lm_head] = self._counted(lm_head)
        found: _Shape = self._shared["shape", lm_head]
        return found

    def _counted(self, lm_head: bool) -> _Shape:
        with FakeTensorMode(), Tracker():
            backbone = Backbone(plain_model(self.setting.config, self.setting.dtype, lm_head))
            slot = backbone.add_slot(
                "counted",
                self.setting.slot,
                trainable=False,
                dtype=self.setting.adapter_dtype,
                generator=torch.Generator().manual_seed(0),
            )
            weights = dict(backbone.base_parameters()).values()
            return _Shape(
                weight_bytes=sum(p.numel() * p.element_size() for p in weights),
                weights=tuple(p.shape for p in weights),
                hidden_size=backbone.hidden_size,
                cache_bytes_per_position=backbone.cache_bytes_per_position,
                slot_parameters=sum(p.numel() for p in slot.parameters()),
                slot_weights=tuple(p.shape for p in slot.parameters()),
                native_step=native_step.looks_servable(backbone, self.setting.device_type),
                head=(self.setting.config.get_text_config().vocab_size, backbone.hidden_size),
                linears=tuple(
                    (m.out_features, m.in_features) for m in backbone.modules() if isinstance(m, GatedLinear)
                ),
            )

    # ---- peaks -----------------------------------------------------------------------------------------------------

    def peak(self, phase: str, rows: int | None = None) -> int:
        """Peak of a phase. rows: prompts (generation, inference) or sequences of a micro-batch (update)."""
        s = self.setting
        rows = rows or (s.update_rows if phase == "update" else s.batch)
        resident = self.resident
        if phase == "generation":
            together = self._prefilled_together(rows)
            others = self._cache_bytes(rows) - self._cache_bytes(together)
            return resident + self._traced("generation", together, 1) + others
        if phase == "inference":
            return resident + self._traced("inference", *self._scored_together(rows))
        temporary = (temporary_bytes(s.optim, *tensor, s.device_type) for tensor in self._trained_tensors)
        step = self.state_bytes["gradients"] + max(temporary)  # while AdamW runs, one parameter at a time
        return resident + max(step, self._traced("update", rows, min(2, s.micro_batches)))

    def _prefilled_together(self, rows: int) -> int:
        """Prompts that go through a layer at once; a token takes the native step about what it takes transformers."""
        length, admitted = self.setting.prompt_length, self._admitted(rows)
        if not self._shape(True).native_step:
            return admitted
        return native_step.tokens_together(self.setting.dtype, length, admitted) // length

    def _admitted(self, rows: int) -> int:
        """Prompts that are admitted in one call."""
        return min(rows, max(1, PREFILL_TOKENS // self.setting.prompt_length))

    def _scored_together(self, rows: int) -> tuple[int, int]:
        """(sequences per group, groups to trace: two where there are more, for what the first leaves)."""
        together = max(1, min(rows, self.setting.token_budget // self.setting.length))
        return together, 2 if rows > together else 1

    @property
    def kv_cache_bytes(self) -> int:
        """Keys and values of every layer for `batch` rows of full length, as generation allocates them."""
        return self._cache_bytes(self.setting.batch) if "generation" in self.phases else 0

    def _cache_bytes(self, rows: int) -> int:
        blocks = -(-(self.setting.length - 1) // BLOCK)  # the last token is never read
        return rows * blocks * BLOCK * self._shape(True).cache_bytes_per_position

    def _traced(self, phase: str, rows: int, repeats: int, apart: bool | None = None) -> int:
        """Bytes; beyond `_TRACED_ROWS` on the line through two traces, because allocations are linear in the rows.

        apart: whether lanes go one after another, by default as they do with so many rows; on a line all points agree.
        """
        if apart is None:
            apart = rows > self._rows_together(phase)
        if rows > _TRACED_ROWS:
            half = self._traced(phase, _TRACED_ROWS // 2, repeats, apart)
            whole = self._traced(phase, _TRACED_ROWS, repeats, apart)
            return whole + -(-(whole - half) * (rows - _TRACED_ROWS) // (_TRACED_ROWS - _TRACED_ROWS // 2))
        key = (phase, rows, repeats, apart, self._lanes(phase))
        if key not in self._shared:
            self._shared[key] = self._trace(phase, rows, repeats, apart)
        found: int = self._shared[key]
        return found

    def _most_lanes(self, phase: str) -> int:
        """Lanes of the phase on the backbone that has most of them."""
        lanes = {lane[:2] for lane in self._lanes(phase)}  # backbone, slot
        return max(Counter(backbone for backbone, _ in lanes).values())

    def _rows_together(self, phase: str) -> int:
        """Sequences up to which lanes share a backbone forward; beyond, peaks drop before they rise again."""
        return self.setting.token_budget // (self._most_lanes(phase) * self.setting.length)

    def _lanes(self, phase: str) -> tuple[Any, ...]:
        """Lanes of a phase, whatever its backbones and slots are called: methods that agree in them cost the same."""
        trained = tuple(name for name, role in self.roles.items() if role.trainable)
        names = {"generation": ("actor",), "update": trained}.get(phase, ROLES)
        backbones: dict[str, int] = {}
        slots: dict[str | None, int] = {}
        lanes = []
        for name in names:
            role = self.roles[name]
            number = backbones.setdefault(role.backbone, len(backbones))
            slot = None if role.slot is None else slots.setdefault(role.slot, len(slots))
            whole = base_is_trained(self.roles, role.backbone)
            lanes.append((number, slot, role.head == LM_HEAD, role.trainable, whole))
        return tuple(lanes)

    def _trace(self, phase: str, rows: int, repeats: int, apart: bool) -> int:
        n_layers = self.setting.config.get_text_config().num_hidden_layers
        period = layer_period(self.setting.config)
        if period is not None and 3 * period < n_layers:
            layers = (2 * period, 3 * period)
            short, long = (self._timeline(phase, rows, repeats, n, apart) for n in layers)
            peak = extrapolated_peak(short, long, layers, n_layers)
            if peak is not None:
                return peak
        return self._timeline(phase, rows, repeats, n_layers, apart).peak

    def _timeline(self, phase: str, rows: int, repeats: int, n_layers: int, apart: bool = False) -> Timeline:
        model = self._model(n_layers)
        # room for one group of `rows` sequences, in one lane or in all
        model.token_budget = rows * self.setting.length * (1 if apart else self._most_lanes(phase))
        run = _TRACES[phase]
        with self._modes[n_layers], stand_in(self.setting.device_type != "cpu"):
            return run(model, self.setting, rows, repeats)

    def _model(self, n_layers: int) -> HydraModel:
        """The method's model of so many layers without data."""
        if n_layers not in self._models:
            mode = FakeTensorMode()
            with mode, Tracker():
                self._models[n_layers] = build_model(self.method, self.setting, n_layers)
            self._modes[n_layers] = mode
        return self._models[n_layers]

    # ---- what fits -------------------------------------------------------------------------------------------------

    def predict(self, budget: int) -> Prediction:
        """Everything, with the largest batches within `budget` bytes."""
        peaks = {phase: self.peak(phase) for phase in self.phases}
        held = {phase: self.resident for phase in self.phases}
        if "generation" in held:
            held["generation"] += self.kv_cache_bytes
        held["update"] += self.state_bytes["gradients"]
        return Prediction(
            method=self.method,
            state_bytes=self.state_bytes,
            peak_bytes=peaks,
            activation_bytes={phase: max(0, peaks[phase] - held[phase]) for phase in self.phases},
            kv_cache_bytes=self.kv_cache_bytes,
            max_batch=self.max_batch(budget),
        )

    def max_batch(self, budget: int) -> dict[str, int]:
        """Largest numbers whose peaks are within `budget` bytes."""

        def rollout(n: int) -> int:
            return max(self.peak("generation", n), self.peak("inference", n))

        def update(n: int) -> int:
            return self.peak("update", n)

        def above(phase: str) -> int:
            return self._rows_together(phase) if self._most_lanes(phase) > 1 else 0

        found = {"update": largest_fitting(update, budget, above=above("update"))}
        if "generation" in self.phases:
            found["generation"] = largest_fitting(rollout, budget, above=above("inference"))
        return found


@dataclass(frozen=True, kw_only=True)
class _Shape:
    weight_bytes: int
    weights: tuple[torch.Size, ...]
    hidden_size: int
    cache_bytes_per_position: int
    slot_parameters: int
    slot_weights: tuple[torch.Size, ...]
    native_step: bool
    """Whether rollouts are expected to go through it."""
    linears: tuple[tuple[int, int], ...]
    """Shapes of the weights of gated linears, in the model's order."""
    head: tuple[int, int]
    """(words, hidden size) of the LM head."""


def largest_fitting(peak: Callable[[int], int], budget: int, *, above: int = 0) -> int:
    """Largest n with peak(n) ≤ budget, 0 if there is none. peak rises up to n = `above` and from `above` + 1 on."""
    found = _rising(peak, budget, above + 1, None)
    return found or (_rising(peak, budget, 1, above) or 0 if above else 0)


def _rising(peak: Callable[[int], int], budget: int, first: int, last: int | None) -> int | None:
    """Largest n in first … last with peak(n) ≤ budget: a line through two points first, then bisection."""
    if peak(first) > budget:
        return None
    low, high, step = first, None if last is None else last + 1, 7  # far enough for a slope, cheap to trace
    while high is None or high - low > 1:
        probe = low + step
        slope = (peak(low) - peak(first)) / (low - first) if low > first else 0
        if slope > 0:
            probe = low + max(1, int((budget - peak(low)) / slope))
        if high is not None and not low < probe < high:
            probe = (low + high) // 2
        if peak(probe) > budget:
            high = probe
            continue
        low, step = probe, 2 * step
        if low >= _MOST_ROWS:
            return low
    return low


_MOST_ROWS = 2**20
"""A search ends here: nothing that grows would still fit."""
