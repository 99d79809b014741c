"""State, peaks and largest batches of a method, in bytes, from a model's config alone.

State, with P bytes of a backbone, S adapter parameters in a slot, d the width of the hidden states and a the bytes per
adapter parameter; counted on a model without data:

    frozen_weights, trained_weights   Σ P over backbones, less the LM head where no role reads it
    adapters    n_slots · S · a             heads   2 (d + 1) · 4
    packed_weights    copies of frozen linears that their input gradients keep on a CPU, within their budget
    gradients   trained parameters, in the dtype that `optim` accumulates them in
    optimizer   masters, moments and step counts of `optim`, see `training.adamw`

What the phases allocate is traced: `generate`, prefill and last decoding step; `HydraModel.score` by all roles (the
loop's "scoring"); `training.update`, with gradients, activations and backward pass. `fit` makes peaks of it.
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

from rlhf_engine.hydra import HydraModel, PackedBatch
from rlhf_engine.hydra.backbone import Backbone
from rlhf_engine.hydra.eager import stand_in
from rlhf_engine.hydra.gated_linear import GatedLinear
from rlhf_engine.hydra.kv_cache import BLOCK
from rlhf_engine.hydra.roles import LM_HEAD, base_is_trained, needs_lm_head
from rlhf_engine.hydra.supports import numbers_of_bits
from rlhf_engine.planning.fit import GATHERED_BLOCKS, Fit
from rlhf_engine.planning.fit import PHASES as PHASES
from rlhf_engine.planning.phases import (
    ROLES,
    Planned,
    Setting,
    build_model,
    check_setting,
    layer_period,
    plain_model,
    roles_of,
    shares_prompts,
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


class Planner(Fit):
    """Predicts one method from traces. What was traced is kept, so that a search does not repeat it."""

    cache_block, prefill_tokens = BLOCK, PREFILL_TOKENS

    def __init__(self, method: str, setting: Setting, shared: dict[Any, Any] | None = None) -> None:
        """shared: numbers that methods have in common; the same dict for every planner of one setting."""
        super().__init__(method, setting)
        self.setting = setting
        self._shared: dict[Any, Any] = {} if shared is None else shared
        self.roles = roles_of(method)
        check_setting(setting)
        self._modes: dict[int, FakeTensorMode] = {}
        self._models: dict[int, Planned] = {}
        self._sharing: dict[str, bool] = {}

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
    def gathered_bytes(self) -> int:
        """Bytes of frozen backbones beside its share, where a process gathers blocks as they run."""
        names = dict.fromkeys(role.backbone for role in self.roles.values())
        shapes = [
            self._shape(needs_lm_head(self.roles, name)) for name in names if not base_is_trained(self.roles, name)
        ]
        blocks = max((shape.block_bytes for shape in shapes), default=0)
        return GATHERED_BLOCKS * blocks + sum(shape.weight_bytes - shape.blocks_bytes for shape in shapes)

    @property
    def drawing_bytes(self) -> int:
        """Bytes of the backbone that draws."""
        return self._shape(True).weight_bytes

    @property
    def temporary_bytes(self) -> int:
        """Most bytes that AdamW takes for a parameter while it steps, one parameter at a time."""
        s = self.setting
        return max(temporary_bytes(s.optim, *tensor, s.device_type) for tensor in self._trained_tensors)

    @property
    def cache_bytes_per_position(self) -> int:
        """Keys and values of a token in every layer."""
        return self._shape(True).cache_bytes_per_position

    @property
    def support_bytes_per_token(self) -> int:
        """Most bytes of the words that a token was drawn among: a bit for each of all words, and an offset."""
        return 4 * numbers_of_bits(self._shape(True).head[0]) + 8

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
            blocks = [sum(p.numel() * p.element_size() for p in block.parameters()) for block in backbone.blocks]
            return _Shape(
                block_bytes=max(blocks),
                blocks_bytes=sum(blocks),
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

    def _prefilled_together(self, prompts: int) -> int:
        """Prompts that go through a layer at once; a token takes the native step about what it takes transformers."""
        length, admitted = self.setting.prompt_length, self._admitted(prompts)
        if not self._shape(True).native_step:
            return admitted
        return native_step.tokens_together(self.setting.dtype, length, admitted) // length

    def _allocated(self, phase: str, rows: int, repeats: int, apart: bool) -> int:
        """Most bytes that a phase allocates, traced."""
        key = (phase, rows, repeats, apart, self._lanes(phase))
        if key not in self._shared:
            self._shared[key] = self._trace(phase, rows, repeats, apart)
        found: int = self._shared[key]
        return found

    def _most_lanes(self, phase: str) -> int:
        """Lanes of the phase on the backbone that has most of them."""
        lanes = {lane[:2] for lane in self._lanes(phase)}  # backbone, slot
        return max(Counter(backbone for backbone, _ in lanes).values())

    def _shares(self, phase: str) -> bool:
        """Decision of the model about two answers to one prompt. Of prompts that are prefilled no two are alike."""
        if phase == "generation":
            return False
        if phase not in self._sharing:
            model = self._model(1).train(phase == "update")
            model.alike = 2
            with self._modes[1]:
                self._sharing[phase] = model.shares(PackedBatch.from_lists([[0], [0]], [[0], [0]]))
            model.eval()
        return self._sharing[phase]

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
        model.alike = self._alike(phase)
        # room for one group of `rows` sequences, in one lane or in all
        model.token_budget = self._tokens(phase, rows) * (1 if apart else self._most_lanes(phase))
        run = _TRACES[phase]
        with self._modes[n_layers], stand_in(self.setting.device_type != "cpu"):
            return run(model, self.setting, rows, repeats)

    def _model(self, n_layers: int) -> Planned:
        """The method's model of so many layers without data."""
        if n_layers not in self._models:
            shares, mode = shares_prompts(self.setting), FakeTensorMode()
            with mode, Tracker():
                model = build_model(self.method, self.setting, n_layers, Planned)
            assert isinstance(model, Planned)
            model.shares_prompts = shares
            self._models[n_layers], self._modes[n_layers] = model, mode
        return self._models[n_layers]


@dataclass(frozen=True, kw_only=True)
class _Shape:
    weight_bytes: int
    blocks_bytes: int
    """Of these, in the decoder blocks."""
    block_bytes: int
    """Of the largest block."""
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
