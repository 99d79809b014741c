"""One backbone: a transformers decoder with gated linears, our attention, and a head described for the kernels.

Loading probes the model: our attention must run exactly once per layer, hidden states must be those of the model's own
attention, and log-probs made from hidden states must be those of its own logits. A model that fails one of these is
refused, because it would train silently wrong.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from rlhf_kernels.logits import HeadLora
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_engine.hydra import gate, loading
from rlhf_engine.hydra.attention import ATTENTION_NAME, AttentionPlan, plan_packed
from rlhf_engine.hydra.bank import AdapterSlot, LoraPair, SlotConfig
from rlhf_engine.hydra.block import fuse_blocks
from rlhf_engine.hydra.gated import GatedHead, decoder_prefix, gate_linears, holds_gates, is_quantised, match_targets

_PROBE_TOKENS = 6
_PROBE_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Relative error of a typical row between our attention and the model's own, by dtype; 0.05 below 32 bits."""


@dataclass(frozen=True, kw_only=True)
class LmHead:
    """What the vocabulary kernels need to know of the model's output embedding."""

    weight: torch.Tensor
    """[V, H]"""
    bias: torch.Tensor | None
    """[V] or None"""
    softcap: float | None
    logit_scale: float | None
    lora: HeadLora | None = None
    """Addition of the slot that the head is looked up for."""


class Backbone(nn.Module):
    """A frozen (or, for full fine-tuning, trained) decoder and the adapter slots that live on it."""

    def __init__(self, model: PreTrainedModel, *, frozen: bool = True) -> None:
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
        self.sharded = False
        """Whether this process holds a share of every tensor only, see `sharding`."""
        if self.quantized and not frozen:
            raise ValueError("source: expected weights that can be trained for full fine-tuning, got quantised ones")
        self.slots = nn.ModuleDict()
        model.requires_grad_(not frozen)
        _switch_dropout_off(model)
        self.score = _take_score(model)
        """weight [outputs, H] and maybe bias of the classifier's score that the model came with; not a parameter."""
        expected = self._own_hidden_states()
        self.hidden_size = expected.shape[-1]
        """Width of the hidden states that heads read."""
        model.set_attn_implementation(ATTENTION_NAME)
        if model.config._attn_implementation != ATTENTION_NAME:
            n_layers = model.config.get_text_config().num_hidden_layers
            raise ValueError(_not_ours(type(model).__name__, n_layers, 0))
        self.linears = gate_linears(model)
        fuse_blocks(model)
        self.blocks_prefix = _blocks_prefix(model)
        self._hash: str | None = None
        self._trunk_hash: str | None = None
        self._probe(expected)

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
        """Load a model folder, see `loading.load_model`. Nothing is fetched from a network."""
        model = loading.load_model(path, dtype=dtype, device=device, lm_head=lm_head, quantization=quantization)
        return cls(model, frozen=frozen)

    @property
    def trunk(self) -> nn.Module:
        """The decoder without its LM head."""
        trunk: nn.Module = self.model.base_model
        return trunk

    @property
    def blocks(self) -> nn.ModuleList:
        """The decoder blocks."""
        found = self.model.get_submodule(self.blocks_prefix.removesuffix("."))
        assert isinstance(found, nn.ModuleList)
        return found

    @property
    def has_lm_head(self) -> bool:
        """Whether roles with an LM head can run here."""
        return self.model.get_output_embeddings() is not None

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the hidden states."""
        found: torch.dtype = self.model.dtype
        return found

    @property
    def vocabulary(self) -> int:
        """Number of token ids, which are 0 to one less."""
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def transposed(self) -> bool:
        """Whether linears keep their weight as [in, out], as GPT-2's do."""
        return any(isinstance(module, Conv1D) for module in self.model.modules())

    @property
    def context_length(self) -> int:
        """Most tokens that one sequence may have."""
        return loading.context_length(self.model.config)

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
        gated = [layer for layer in self.linears.values() if isinstance(layer, GatedHead)]
        lora = gated[0].lora(slot) if gated else None
        return dataclasses.replace(self.lm_head, lora=lora)

    def run(
        self,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        table: gate.SlotTable,
        attention: AttentionPlan,
        dropout: gate.DropoutKey | None = None,
        windows: list[int | None] | None = None,
    ) -> torch.Tensor:
        """One traversal: hidden states [T, H] after the final norm; `windows` as in `TrunkCall`.

        Raises RuntimeError if somebody has given the model another attention since it was taken over.
        """
        if self.model.config._attn_implementation != ATTENTION_NAME:
            raise RuntimeError(
                f"backbone: expected the attention {ATTENTION_NAME!r} that it was given, got "
                f"{self.model.config._attn_implementation!r}: two models may share one config object, and setting the "
                "attention of one sets that of the other"
            )
        with gate.enter(gate.TrunkCall(table=table, attention=attention, dropout=dropout, windows=windows)):
            out = self.trunk(input_ids=tokens_T[None], position_ids=positions_T[None], use_cache=False)
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    def add_slot(
        self,
        name: str,
        config: SlotConfig,
        *,
        trainable: bool,
        dtype: torch.dtype,
        generator: torch.Generator,
    ) -> AdapterSlot:
        """Create a slot that starts as OFF (B = 0) and tell the linears about it."""
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
        slot = AdapterSlot(name, config, pairs, trainable)
        self.slots[name] = slot
        for path in pairs:
            self.linears[path].slots[name] = slot
        return slot

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
            self._hash = _digest(self.base_parameters())
        return self._hash

    def trunk_hash(self) -> str:
        """As `base_hash`, of the decoder without its LM head: what a base has in common with its reward models."""
        if self._trunk_hash is None or not self.frozen:
            self._trunk_hash = _digest(self.trunk.named_parameters())
        return self._trunk_hash

    def enable_gradient_checkpointing(self) -> None:
        """Recompute blocks in the backward pass, each under the slots and plan of its original forward."""
        self.model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": gate.checkpoint_contexts}
        )

    def _own_hidden_states(self) -> torch.Tensor:
        """Hidden states [T, H] of the probe's tokens through the plain model's own attention."""
        self.model.set_attn_implementation("eager")  # what every attention keyword of an architecture is written for
        training = self.model.training
        tokens, positions = self._probe_rows()
        with torch.no_grad():
            out = self.model.eval().base_model(input_ids=tokens[None], position_ids=positions[None], use_cache=False)
        self.model.train(training)
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    def _probe_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        vocabulary = self.vocabulary
        positions = torch.arange(_PROBE_TOKENS, device=self.device)
        return (7 * positions + 1) % vocabulary, positions

    def _probe(self, expected: torch.Tensor) -> None:
        """Refuse a model whose attention or head we would get wrong."""
        name = type(self.model).__name__
        n_layers = self.model.config.get_text_config().num_hidden_layers
        tokens, positions = self._probe_rows()
        plan = plan_packed([_PROBE_TOKENS], self.device)
        table = gate.SlotTable.uniform(None, _PROBE_TOKENS)
        windows: list[int | None] = []
        with torch.no_grad():
            hidden = self.run(tokens, positions, table, plan, windows=windows)
        if len(windows) != n_layers:
            raise ValueError(_not_ours(name, n_layers, len(windows)))
        loading.require_windows(self.model.config, windows, name)
        # a padding token may have zeros all the way up
        length_T = expected.float().norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
        error_T = (hidden - expected).float().norm(dim=-1) / length_T
        # the median: routing of a mixture of experts may differ in a row for rounding alone
        if not error_T.median() <= _PROBE_TOLERANCE.get(hidden.dtype, 0.05):
            raise ValueError(
                f"{name}: expected the hidden states of its own attention, got ones that differ by "
                f"{float(error_T.median()):.2g} of their norm; its attention computes something that is not served"
            )
        if not self.has_lm_head:
            return
        with torch.no_grad(), gate.enter(gate.TrunkCall(table=table, attention=plan)):
            logits = self.model(input_ids=tokens[None], position_ids=positions[None], use_cache=False).logits[0]
        ours = head_logits(hidden, self.lm_head)
        if not torch.allclose(ours.float(), logits.float(), rtol=1e-2, atol=1e-2 * logits.abs().max().item()):
            raise ValueError(
                f"{name}: its logits are not head(hidden) with the softcap and scale that its config names, so "
                "log-probs made from hidden states would be wrong"
            )


def _digest(parameters: Iterable[tuple[str, nn.Parameter]]) -> str:
    digest = hashlib.sha256()
    for name, p in parameters:
        digest.update(f"{name} {tuple(p.shape)} {p.dtype}".encode())
        digest.update(p.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def head_logits(hidden: torch.Tensor, head: LmHead) -> torch.Tensor:
    """Logits [T, V] as the model defines them; for probes and tests, training never makes them."""
    z = F.linear(hidden, head.weight, head.bias)
    if head.lora is not None:
        z = z + head.lora.scale * F.linear(F.linear(hidden.to(head.lora.A.dtype), head.lora.A), head.lora.B).to(z.dtype)
    if head.logit_scale is not None:
        z = z * head.logit_scale
    return z if head.softcap is None else head.softcap * torch.tanh(z / head.softcap)


def _take_score(model: PreTrainedModel) -> dict[str, torch.Tensor] | None:
    """The numbers of a sequence classifier's score, which leaves the model: heads belong to the HydraModel."""
    score = getattr(model, "score", None)
    if not isinstance(score, nn.Linear):
        return None
    model.score = nn.Identity()
    return {name: p.detach().float().clone() for name, p in score.named_parameters()}


def _not_ours(name: str, n_layers: int, n_ran: int) -> str:
    return (
        f"{name}: expected rlhf-engine's attention to run in each of its {n_layers} layers, it ran {n_ran} times; this "
        "architecture does not use transformers' AttentionInterface"
    )


def _switch_dropout_off(model: nn.Module) -> None:
    """Base dropout is 0 in RLHF: gradient checkpointing needs train mode, and old and new log-probs must agree."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if ("dropout" in name or name == "layerdrop") and isinstance(value, float):
                setattr(module, name, 0.0)


def _blocks_prefix(model: PreTrainedModel) -> str:
    """Name prefix of the decoder blocks: the text decoder's module list with one entry per layer."""
    n_layers = model.config.get_text_config().num_hidden_layers
    prefix = decoder_prefix(model)
    for path, module in model.named_modules():
        if path.startswith(prefix) and isinstance(module, nn.ModuleList) and len(module) == n_layers:
            return path + "."
    raise ValueError(f"{type(model).__name__}: expected a list of {n_layers} decoder blocks, found none")
