"""One backbone: a transformers decoder with gated linears, our attention, and a head described for the kernels.

Loading probes the model, see `probe`. A model that fails is refused, because it would train silently wrong, and is left
as it was.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from rlhf_kernels.runtime import registry
from rlhf_kernels.runtime.eager import eager
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_engine.errors import UnsupportedModelError
from rlhf_engine.hydra import gate, loading, probe
from rlhf_engine.hydra.attention import ATTENTION_NAME, AttentionPlan, plan_packed
from rlhf_engine.hydra.batch import PackedBatch, SharedRows
from rlhf_engine.hydra.gate import AdapterSlot, LmHead, LoraPair, SlotConfig
from rlhf_engine.hydra.modules import (
    GatedHead,
    decoder_prefix,
    fuse_llama_ops,
    gate_linears,
    holds_gates,
    is_quantised,
    match_targets,
    path_of,
)
from rlhf_engine.hydra.probe import base_model, give_own_configs, undone_on_error


class Backbone(nn.Module):
    """A frozen (or, for full fine-tuning, trained) decoder and the adapter slots that live on it."""

    def __init__(self, model: PreTrainedModel, *, frozen: bool = True) -> None:
        """Take a model over. Raises UnsupportedModelError for one that is not served, which is then as it was."""
        super().__init__()
        if getattr(model, "_hf_peft_config_loaded", False):
            raise ValueError(
                f"source: expected a plain {type(model).__name__}, got one with an adapter loaded into it, "
                "which could not be switched off; give the base, and the adapter's folder as a slot's init_from"
            )
        if holds_gates(model):
            raise ValueError(f"source: expected a plain {type(model).__name__}, got the backbone of another HydraModel")
        loading.require_decoder(model.config, type(model).__name__)
        self.model = model
        self.frozen = frozen
        self.quantized = is_quantised(model)
        self.sharded = False  # whether this process holds a share of every tensor only, see `sharding`
        self.in_turn: Callable[[Callable[[], torch.Tensor]], torch.Tensor] | None = None
        """Runs a call where each is one of all processes, with blocks that are gathered for it; None elsewhere."""
        if self.quantized and not frozen:
            raise ValueError("source: expected weights that can be trained for full fine-tuning, got quantised ones")
        self.slots = nn.ModuleDict()
        self._slots: dict[str, AdapterSlot] = {}  # the same, for calls
        self.kernels = registry.current()  # settings of the kernels that run here, whoever calls
        self.source: str | None = None  # folder that the base was loaded from, where heads may lie beside it
        self._hash: str | None = None
        self._decoder_hash: str | None = None
        first, second = probe.TRIES
        try:
            with undone_on_error(model):
                self._take_over(model, first)
        except probe.DifferentNumbers:
            with undone_on_error(model):
                self._take_over(model, second)

    def _take_over(self, model: PreTrainedModel, first_token: int) -> None:
        give_own_configs(model)
        loading.keep_differentiable(model)
        model.requires_grad_(not self.frozen)
        self.base_path = path_of(base_model(model), model)  # name of the decoder in the model
        self.score = _take_score(model)
        """weight [outputs, H] and maybe bias of the classifier's score that the model came with; not a parameter."""
        own = probe.own_states(model, first_token)
        _switch_noise_off(model)
        with loading.quiet_transformers():
            model.set_attn_implementation(ATTENTION_NAME)
        with probe.refusing(model, "taking it over"):
            if model.config._attn_implementation != ATTENTION_NAME:
                raise UnsupportedModelError(probe.not_ours(model.config.get_text_config().num_hidden_layers, 0))
            self.vocabulary = int(model.config.get_text_config().vocab_size)
            """Number of token ids, which are 0 to one less."""
            self.context_length = loading.context_length(model.config)  # most tokens that one sequence may have
            self.linears = gate_linears(model)
            self.gated_head = next((layer for layer in self.linears.values() if isinstance(layer, GatedHead)), None)
            fuse_llama_ops(model)
            self.blocks_prefix = _blocks_prefix(model)
            give_positions(self.blocks)
        self.hidden_size, self.cache_bytes_per_position, self.head_size = probe.check(self, own)
        """Width of the hidden states that heads read; bytes of one token's keys and values; width of an attention head
        in the cache, the least of all layers."""

    def beside(self) -> Backbone:
        """The same base with slots of its own, none so far, to run and train beside; ValueError for a trained one."""
        if not self.frozen or self.sharded:
            state = "trained itself" if not self.frozen else "sharded"
            raise ValueError(f"backbone: expected a frozen base that is whole to share, got one that is {state}")
        other = Backbone.__new__(Backbone)
        nn.Module.__init__(other)
        for name in _OF_BASE:
            setattr(other, name, getattr(self, name))
        other.slots, other._slots = nn.ModuleDict(), {}
        return other

    def train(self, mode: bool = True) -> Backbone:
        """Set train mode where it decides on gradient checkpointing, eval mode elsewhere, as in rollouts."""
        super().train(mode)
        for module in self.model.modules():
            if not hasattr(module, "gradient_checkpointing"):
                module.training = False
        return self

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        frozen: bool = True,
        lm_head: bool = True,
        quantization: loading.Quantization = "none",
    ) -> Backbone:
        """Load a model folder, or a model of the Hub by its name, see `loading.load_model`."""
        model = loading.load_model(path, dtype=dtype, device=device, lm_head=lm_head, quantization=quantization)
        return cls(model, frozen=frozen)

    @property
    def base_model(self) -> nn.Module:
        """The decoder without its LM head."""
        return self.model.get_submodule(self.base_path)

    @property
    def blocks(self) -> nn.ModuleList:
        """The decoder blocks."""
        modules = self.model.get_submodule(self.blocks_prefix.removesuffix("."))
        assert isinstance(modules, nn.ModuleList)
        return modules

    @property
    def has_lm_head(self) -> bool:
        """Whether roles with an LM head can run here."""
        return self.model.get_output_embeddings() is not None

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the hidden states."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def n_words(self) -> int:
        """V, number of logits that the LM head has. Raises ValueError without one."""
        return len(self.lm_head.weight)

    @property
    def transposed(self) -> bool:
        """Whether linears keep their weight as [in, out], as GPT-2's do."""
        return any(isinstance(module, Conv1D) for module in self.model.modules())

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def lm_head(self) -> LmHead:
        """The head as it is now (a sharded or moved weight is looked up at each use). Raises ValueError without one."""
        head = self.model.get_output_embeddings()
        if head is None:
            raise ValueError(f"backbone: expected a model with an LM head, got a {type(self.model).__name__}")
        config = self.model.config.get_text_config()
        scale = getattr(config, "logit_scale", None)
        divisor = getattr(config, "logits_scaling", None)  # Granite divides where Cohere multiplies
        return LmHead(
            weight=head.weight,
            bias=getattr(head, "bias", None),
            softcap=getattr(config, "final_logit_softcapping", None),
            logit_scale=float(scale) if scale is not None else 1.0 / divisor if divisor is not None else None,
        )

    def lm_head_in(self, slot: str | None) -> LmHead:
        """The head as a slot's lane sees it: with the slot's LoRA on it, if it has one there."""
        lora = None if self.gated_head is None or slot is None else self.gated_head.lora(self.slot(slot))
        return dataclasses.replace(self.lm_head, lora=lora)

    def adapts_head(self, slot: str) -> bool:
        """Whether a slot has LoRA on the LM head."""
        return self.gated_head is not None and self.gated_head.path in self.slot(slot).by_path

    def run(
        self,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        table: gate.SlotTable,
        attention: AttentionPlan,
        dropout: gate.DropoutKey | None = None,
        windows: list[int | None] | None = None,
    ) -> torch.Tensor:
        """One backbone forward, hidden states [T, H] after the final norm; RuntimeError for another attention."""
        if self.model.config._attn_implementation != ATTENTION_NAME:
            raise RuntimeError(
                f"backbone: expected the attention {ATTENTION_NAME!r} that it was given, got "
                f"{self.model.config._attn_implementation!r}: two models may share one config object, and setting the "
                "attention of one sets that of the other"
            )
        call = gate.BackboneCall(
            table=table, attention=attention, slots=self._slots, dropout=dropout, positions_T=positions_T,
            windows=windows,
        )  # fmt: skip

        def forward() -> torch.Tensor:
            with gate.enter(call, self.kernels):
                out = self.base_model(input_ids=tokens_T[None], position_ids=positions_T[None], use_cache=False)
            hidden: torch.Tensor = out.last_hidden_state[0]
            return hidden

        return forward() if self.in_turn is None else self.in_turn(forward)

    def run_lanes(
        self, lanes: Sequence[tuple[PackedBatch, SharedRows | None, str | None]], dropout_seed: int | None = None
    ) -> list[torch.Tensor]:
        """Hidden states [T, H] of each batch in its slot, of one forward.

        Where rows are given by which prompts stand once, those go through. dropout_seed: keys the masks of dropout.
        """
        tokens, positions, starts = list[torch.Tensor](), list[torch.Tensor](), [0]
        lengths, parents = list[int](), list[int]()
        for batch, shared, _ in lanes:
            rows = slice(None) if shared is None else shared.rows
            tokens.append(batch.tokens_T[rows])
            positions.append(batch.positions_T[rows])
            starts.append(starts[-1] + len(tokens[-1]))
            before, own = len(lengths), [-1] * batch.n_sequences if shared is None else shared.parents
            parents += [p if p < 0 else p + before for p in own]
            lengths += batch.lengths if shared is None else shared.lengths
        slots = tuple(slot for _, _, slot in lanes)
        table = gate.SlotTable(starts=tuple(starts[:-1]), ends=tuple(starts[1:]), slots=slots)
        dropout = None
        if dropout_seed is not None:
            ids = torch.cat([batch.row_ids_T for batch, _, _ in lanes])
            dropout = gate.DropoutKey(seed=dropout_seed, row_ids_T=ids)
        shares = any(shared is not None for _, shared, _ in lanes)
        plan = plan_packed(lengths, self.device, parents=parents if shares else None)
        hidden = self.run(torch.cat(tokens), torch.cat(positions), table, plan, dropout).split([len(x) for x in tokens])
        pairs = zip(hidden, lanes, strict=True)
        return [h if shared is None else h.index_select(0, shared.places_T) for h, (_, shared, _) in pairs]

    def require_served(self, name: str, batch: PackedBatch) -> None:
        """Raise ValueError for a sequence beyond the context or an id outside the vocabulary, where reading is free."""
        longest, limit = max(batch.lengths), self.context_length
        if longest > limit:
            raise ValueError(
                f"batch: expected sequences of at most {limit} tokens (the context of backbone {name!r}), got one of "
                f"{longest}"
            )
        tokens, vocabulary = batch.tokens_T, self.vocabulary
        if tokens.is_cpu and eager(tokens):
            least, most = map(int, tokens.aminmax())
            if least < 0 or most >= vocabulary:
                wrong = least if least < 0 else most
                raise ValueError(f"batch: expected token ids from 0 to {vocabulary - 1}, got {wrong}")

    def add_slot(
        self, name: str, config: SlotConfig, *, trainable: bool, dtype: torch.dtype, generator: torch.Generator
    ) -> AdapterSlot:
        """Create a slot that starts as OFF (B = 0)."""
        if name in self.slots:
            raise ValueError(f"slot: {name!r} exists already on this backbone")
        pairs = {}
        for path in match_targets(self.linears, self.blocks_prefix, config.target_modules):
            layer = self.linears[path]
            if isinstance(layer, GatedHead) and config.dropout:
                raise ValueError(f"dropout: expected 0 for a slot that targets {path!r}, got {config.dropout}")
            pair = LoraPair(config.r, layer.in_features, layer.out_features, self.device, dtype)
            pair.reset(generator)
            pairs[path] = pair
        return self.adopt_slot(name, AdapterSlot(name, config, pairs, trainable))

    def adopt_slot(self, name: str, slot: AdapterSlot) -> AdapterSlot:
        """Take a slot that was made for this base; ValueError for one of another base."""
        for path, pair in slot.items():
            layer = self.linears.get(path)
            own = None if layer is None else (layer.out_features, layer.in_features)
            if own != (pair.B.shape[0], pair.A.shape[1]):
                raise ValueError(f"slot: expected one that was made for this base, got {name!r} with {path!r}")
        self.slots[name] = slot
        self._slots = {**self._slots, name: slot}  # another dict: a call in another thread may read the one it has
        return slot

    def remove_slot(self, name: str) -> None:
        """Give a slot up. Raises ValueError for one that does not exist."""
        self.slot(name)
        del self.slots[name]
        self._slots = {other: slot for other, slot in self._slots.items() if other != name}

    def slot(self, name: str) -> AdapterSlot:
        """The named slot. Raises ValueError with the names there are."""
        if name not in self.slots:
            raise ValueError(f"slot: expected one of {sorted(self.slots)}, got {name!r}")
        slot = self.slots[name]
        assert isinstance(slot, AdapterSlot)
        return slot

    def base_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of the backbone itself under the names that the plain model gives them."""
        return self.model.named_parameters()

    def base_hash(self, *, refresh: bool = False) -> str:
        """SHA-256 over names, shapes, dtypes and bytes of the backbone's parameters; cached, since it is frozen."""
        if self._hash is None or refresh or not self.frozen:
            self._hash = digest(self.base_parameters())
        return self._hash

    def decoder_hash(self) -> str:
        """`base_hash` of the decoder without its LM head: what a base has in common with its reward models."""
        if self._decoder_hash is None or not self.frozen:
            self._decoder_hash = digest(self.base_model.named_parameters())
        return self._decoder_hash

    def enable_gradient_checkpointing(self) -> None:
        """Recompute blocks in the backward pass, each under the slots and plan of its original forward."""
        self.model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": gate.checkpoint_contexts}
        )


_OF_BASE = (
    *("model", "frozen", "quantized", "sharded", "source", "score", "linears", "blocks_prefix", "hidden_size"),
    *("gated_head", "vocabulary", "context_length", "in_turn", "base_path", "cache_bytes_per_position", "head_size"),
    *("_hash", "_decoder_hash", "kernels"),
)
"""Attributes that backbones on one base share; the slots are each one's own."""


def digest(parameters: Iterable[tuple[str, nn.Parameter]]) -> str:
    digest = hashlib.sha256()
    for name, p in parameters:
        digest.update(f"{name} {tuple(p.shape)} {p.dtype}".encode())
        digest.update(p.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _take_score(model: PreTrainedModel) -> dict[str, torch.Tensor] | None:
    """The numbers of a sequence classifier's score, which leaves the model: heads belong to the HydraModel."""
    score = getattr(model, "score", None)
    if not isinstance(score, nn.Linear):
        return None
    model.score = nn.Identity()
    return {name: p.detach().float().clone() for name, p in score.named_parameters()}


_NOISE = ("dropout", "layerdrop", "pdrop")
"""Parts of names of dropout. Jitter of routers is off because they stay in eval mode; Phi-3.5-MoE's acts there, too."""


def _switch_noise_off(model: nn.Module) -> None:
    """The base has no noise in RLHF: gradient checkpointing needs train mode, and old and new log-probs must agree."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and any(noise in name for noise in _NOISE):
                setattr(module, name, 0.0)


def _blocks_prefix(model: PreTrainedModel) -> str:
    """Name prefix of the decoder blocks: the text decoder's module list with one entry per layer."""
    n_layers = model.config.get_text_config().num_hidden_layers
    prefix = decoder_prefix(model)
    for path, module in model.named_modules():
        if path.startswith(prefix) and isinstance(module, nn.ModuleList) and len(module) == n_layers:
            return path + "."
    raise UnsupportedModelError(f"expected a list of {n_layers} decoder blocks, found none")


# ---- positions -------------------------------------------------------------------------------------------------------


_COUNTS = "get_seq_length"  # method of transformers' caches that attention counts by


class PastOfRows:
    """Stand-in for a cache, under which attention counts to the position of each row."""

    def __init__(self, positions_T: torch.Tensor) -> None:
        self._positions_T = positions_T

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        """int64 [T], position of each row less its place in the call."""
        positions_T = self._positions_T
        return positions_T - torch.arange(positions_T.shape[0], device=positions_T.device)

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *others: Any, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as they are: the engine's attention keeps them."""
        return key, value


def give_positions(blocks: Iterable[nn.Module]) -> int:
    """Give every such attention in decoder blocks the positions of its rows; how many modules these are."""
    given = 0
    for block in blocks:
        for module in block.modules():
            code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
            if code is not None and _COUNTS in code.co_names:  # its forward looks up how many tokens a cache holds
                # not of the block: gradient checkpointing takes caches from blocks
                names = inspect.signature(type(module).forward).parameters
                keyword = "cache" if "cache" in names else "past_key_values"  # of transformers before 5.24
                module.register_forward_pre_hook(functools.partial(_with_past, keyword), with_kwargs=True)
                given += 1
    return given


def _with_past(
    keyword: str, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    call = gate.current()
    if call is not None and call.positions_T is not None and keywords.get(keyword) is None:
        keywords = {**keywords, keyword: PastOfRows(call.positions_T)}
    return arguments, keywords
