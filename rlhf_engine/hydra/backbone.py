"""One backbone: a transformers decoder with gated linears, our attention, and a head described for the kernels.

Loading probes the model: our attention must run exactly once per layer, and log-probs made from hidden states must be
those of the model's own logits. A model that fails either is refused, because it would train silently wrong.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from rlhf_engine.hydra import gate
from rlhf_engine.hydra.attention import ATTENTION_NAME, AttentionPlan, plan_packed
from rlhf_engine.hydra.bank import AdapterSlot, GatedLinear, LoraPair, SlotConfig, match_targets

_PROBE_TOKENS = 5


@dataclass(frozen=True, kw_only=True)
class LmHead:
    """What the vocabulary kernels need to know of the model's output embedding."""

    weight: torch.Tensor
    """[V, H]"""
    bias: torch.Tensor | None
    """[V] or None"""
    softcap: float | None
    logit_scale: float | None


class Backbone(nn.Module):
    """A frozen (or, for full fine-tuning, trained) decoder and the adapter slots that live on it."""

    def __init__(self, model: PreTrainedModel, *, frozen: bool = True) -> None:
        super().__init__()
        if getattr(model, "_hf_peft_config_loaded", False):
            raise ValueError(
                f"source: expected a plain {type(model).__name__}, got one with an adapter loaded into it, "
                "which could not be switched off; give the base, and the adapter's folder as a slot's init_from"
            )
        if any(isinstance(module, GatedLinear) for module in model.modules()):
            raise ValueError(f"source: expected a plain {type(model).__name__}, got the backbone of another HydraModel")
        self.model = model
        self.frozen = frozen
        self.slots = nn.ModuleDict()
        model.requires_grad_(not frozen)
        _switch_dropout_off(model)
        model.set_attn_implementation(ATTENTION_NAME)
        self.linears = _gate_linears(model)
        self.blocks_prefix = _blocks_prefix(model)
        self._hash: str | None = None
        self._probe()

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        frozen: bool = True,
    ) -> Backbone:
        """Load a causal-LM folder. Raises ValueError if it is none; nothing is fetched from a network."""
        require_model_folder(path)
        try:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"model_name_or_path: {str(path)!r} cannot be loaded: {error}") from error
        model.to(device)  # type: ignore[arg-type]  # transformers' wrapper hides the signature
        return cls(model, frozen=frozen)

    @property
    def trunk(self) -> nn.Module:
        """The decoder without its LM head."""
        trunk: nn.Module = self.model.base_model
        return trunk

    @property
    def hidden_size(self) -> int:
        return int(self.model.config.get_text_config().hidden_size)

    @property
    def context_length(self) -> int:
        """Most tokens that one sequence may have."""
        return _context_length(self.model.config)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def lm_head(self) -> LmHead:
        """The head as it is now (a sharded or moved weight is looked up at each use)."""
        head = self.model.get_output_embeddings()
        config = self.model.config.get_text_config()
        scale = getattr(config, "logit_scale", None)
        divisor = getattr(config, "logits_scaling", None)  # Granite divides where Cohere multiplies
        return LmHead(
            weight=head.weight,
            bias=getattr(head, "bias", None),
            softcap=getattr(config, "final_logit_softcapping", None),
            logit_scale=float(scale) if scale is not None else 1.0 / divisor if divisor is not None else None,
        )

    def run(
        self,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        table: gate.SlotTable,
        attention: AttentionPlan,
        dropout: gate.DropoutKey | None = None,
    ) -> torch.Tensor:
        """One traversal: hidden states [T, H] after the final norm."""
        with gate.enter(gate.TrunkCall(table=table, attention=attention, dropout=dropout)):
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
            linear = self.linears[path]
            pair = LoraPair(config.r, linear.in_features, linear.out_features, linear.weight.device, dtype)
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
            digest = hashlib.sha256()
            for name, p in self.base_parameters():
                digest.update(f"{name} {tuple(p.shape)} {p.dtype}".encode())
                digest.update(p.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
            self._hash = digest.hexdigest()
        return self._hash

    def enable_gradient_checkpointing(self) -> None:
        """Recompute blocks in the backward pass, each under the slots and plan of its original forward."""
        self.model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": gate.checkpoint_contexts}
        )

    def _probe(self) -> None:
        """Refuse a model whose attention or head we would get wrong."""
        config = self.model.config.get_text_config()
        tokens = torch.arange(_PROBE_TOKENS, device=self.device) % config.vocab_size
        positions = torch.arange(_PROBE_TOKENS, device=self.device)
        plan = plan_packed([_PROBE_TOKENS], self.device)
        table = gate.SlotTable.uniform(None, _PROBE_TOKENS)
        counted = _CountingPlan(plan)
        with torch.no_grad(), gate.enter(gate.TrunkCall(table=table, attention=counted)):  # type: ignore[arg-type]
            logits = self.model(input_ids=tokens[None], position_ids=positions[None], use_cache=False).logits[0]
        if counted.reads != config.num_hidden_layers:
            raise ValueError(
                f"{type(self.model).__name__}: expected rlhf-engine's attention to run in each of its "
                f"{config.num_hidden_layers} layers, it ran {counted.reads} times; this architecture does not use "
                "transformers' AttentionInterface"
            )
        with torch.no_grad():
            hidden = self.run(tokens, positions, table, plan)
            ours = head_logits(hidden, self.lm_head)
        if not torch.allclose(ours.float(), logits.float(), rtol=1e-2, atol=1e-2 * logits.abs().max().item()):
            raise ValueError(
                f"{type(self.model).__name__}: its logits are not head(hidden) with the softcap and scale that its "
                "config names, so log-probs made from hidden states would be wrong"
            )


def require_model_folder(path: str | os.PathLike[str]) -> None:
    """Raise ValueError unless `path` is a folder with a model, and not one of an adapter."""
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"model_name_or_path: expected a local model folder, got {str(path)!r} which is not one")
    if (folder / "adapter_config.json").is_file():
        # transformers would load the adapter's base and inject the adapter into it: "off" would then not be off
        raise ValueError(
            f"model_name_or_path: expected a model folder, got {str(path)!r} which holds an adapter; give its base "
            "here and the folder as an adapter"
        )
    if not (folder / "config.json").is_file():
        raise ValueError(f"model_name_or_path: expected a folder with config.json, got {str(path)!r} which has none")


def read_context_length(path: str | os.PathLike[str]) -> int:
    """`Backbone.context_length` of a model folder, without loading the model."""
    require_model_folder(path)
    return _context_length(AutoConfig.from_pretrained(path, local_files_only=True))


def _context_length(config: PreTrainedConfig) -> int:
    """Longest sequence: what the positions allow, or less where a sliding window, which is not served, would bite."""
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if not isinstance(limit, int):
        raise ValueError(f"{type(config).__name__}: expected max_position_embeddings, got {limit!r}")
    window = getattr(text, "sliding_window", None)
    slides = "sliding_attention" in (getattr(text, "layer_types", None) or ("sliding_attention",))
    return min(limit, window) if isinstance(window, int) and slides else limit


def head_logits(hidden: torch.Tensor, head: LmHead) -> torch.Tensor:
    """Logits [T, V] as the model defines them; for probes and tests, training never makes them."""
    z = F.linear(hidden, head.weight, head.bias)
    if head.logit_scale is not None:
        z = z * head.logit_scale
    return z if head.softcap is None else head.softcap * torch.tanh(z / head.softcap)


class _CountingPlan:
    """A plan that counts how often attention read it: the probe's proof that our function ran in every layer."""

    def __init__(self, plan: AttentionPlan) -> None:
        self._plan = plan
        self.reads = 0

    def __getattr__(self, name: str) -> object:
        if name == "max_length":  # read exactly once per attention call
            self.reads += 1
        return getattr(self._plan, name)


def _switch_dropout_off(model: nn.Module) -> None:
    """Base dropout is 0 in RLHF: gradient checkpointing needs train mode, and old and new log-probs must agree."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _gate_linears(model: PreTrainedModel) -> dict[str, GatedLinear]:
    """Replace every linear except the LM head by a gated one on the same parameters."""
    head = model.get_output_embeddings()
    gated: dict[str, GatedLinear] = {}
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and module is not head:
            gated[path] = GatedLinear(module, path=path, stream=len(gated))
            parent, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(parent), leaf, gated[path])
    return gated


def _blocks_prefix(model: PreTrainedModel) -> str:
    """Name prefix of the decoder blocks: the module list with one entry per layer."""
    n_layers = model.config.get_text_config().num_hidden_layers
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == n_layers:
            return path + "."
    raise ValueError(f"{type(model).__name__}: expected a list of {n_layers} decoder blocks, found none")
