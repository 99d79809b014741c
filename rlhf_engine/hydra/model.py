"""HydraModel: every role of RLHF on one frozen backbone.

A model has the roles, slots and heads of one policy. Several models may share one base, see `HydraModel.beside`.

    model = HydraModel.from_pretrained("path/to/model", roles=hydra_roles())
    scores = model.score(batch)                                   # log-probs, entropies, values, rewards
    policy, value = model(batch, (PolicyLoss(...), ValueLoss(...)))  # losses, inside forward

Lanes that need no gradient never enter a gradient call; lanes of one call are concatenated row by row, each under its
own slot, up to `token_budget` tokens, and run one after another above it.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from rlhf_engine.devices import is_gpu
from rlhf_engine.hub import local_folder
from rlhf_engine.hydra import peft_io, reward_model
from rlhf_engine.hydra.attention import LEAST_SAVED, SHARING, can_share
from rlhf_engine.hydra.backbone import Backbone
from rlhf_engine.hydra.batch import PackedBatch, SharedRows, split_by_tokens
from rlhf_engine.hydra.gate import AdapterSlot, LmHead, ScalarHead, SlotConfig, warn_if_zero
from rlhf_engine.hydra.loading import Quantization
from rlhf_engine.hydra.modules import is_quantised
from rlhf_engine.hydra.outputs import HiddenStates, LogprobPair, Logprobs, Output, Rewards, Values
from rlhf_engine.hydra.probe import undone_on_error
from rlhf_engine.hydra.roles import (
    LM_HEAD,
    OFF,
    Lane,
    Roles,
    base_is_trained,
    fold_lanes,
    needs_lm_head,
    require_role,
    trainable_heads,
    trainable_slots,
)

_CUDA_TOKEN_BUDGET = 16384
_CPU_HIDDEN_BUDGET = 2**19
"""Numbers in the hidden states of one forward on a CPU: beyond, caches are full and one call only costs memory."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """Scores of a batch by the roles; fields of roles that were not requested are None."""

    logprobs_M: torch.Tensor | None = None
    """fp32 [M], actor."""
    entropies_M: torch.Tensor | None = None
    """fp32 [M], actor, nats."""
    ref_logprobs_M: torch.Tensor | None = None
    """fp32 [M], reference."""
    past_logprobs_M: torch.Tensor | None = None
    """fp32 [M], past or behaviour: the actor as it was."""
    kl_M: torch.Tensor | None = None
    """fp32 [M], exact KL(actor ‖ reference) over the vocabulary, nats; only with `exact_kl=True`."""
    values_M: torch.Tensor | None = None
    """fp32 [M], critic."""
    rewards_N: torch.Tensor | None = None
    """fp32 [N], reward."""

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The fields that are not None, by name."""
        for name, values in vars(self).items():
            if values is not None:
                yield name, values


class HydraModel(nn.Module):
    """Backbones, adapter slots and heads behind one forward."""

    def __init__(
        self,
        backbones: Mapping[str, Backbone],
        *,
        roles: Roles,
        slots: Mapping[str, SlotConfig] | None = None,
        token_budget: int | None = None,
        adapter_dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        """Make slots and heads on backbones that are loaded already. `from_pretrained` loads them as well.

        Args:
            backbones: name → backbone; roles run on `base` unless they name another.
            roles: name → role, at least one, on these backbones.
            slots: slot → its shape and origin; None, or a slot that is left out: the defaults of `SlotConfig`.
            token_budget: most tokens of all lanes in one backbone forward, ≥ 1; None: a default by device and width.
            adapter_dtype: dtype of the LoRA weights.
            seed: seed of the LoRA weights at the start.

        Raises:
            ValueError: no roles, a budget below 1, or roles, slots and backbones that do not fit together.
        """
        super().__init__()
        if not roles:
            raise ValueError("roles: expected at least one role, got none")
        if token_budget is not None and token_budget < 1:
            raise ValueError(f"token_budget: expected a positive number of tokens, got {token_budget}")
        self.backbones = nn.ModuleDict(dict(backbones))
        self.roles = dict(roles)
        first = next(iter(backbones.values()))
        self.token_budget = (
            token_budget if token_budget is not None else default_token_budget(first.device, first.hidden_size)
        )
        self.adapter_dtype = adapter_dtype
        self.shares_prompts: bool | None = None
        """Whether a prompt of several sequences goes through a backbone once; None: on a device of `SHARING`."""
        slots = dict(slots or {})
        _check_names(self, self.roles, slots)
        self._generator = torch.Generator().manual_seed(seed)
        self._add_slots(slots, self.roles)
        self.heads = nn.ModuleDict()
        self.trained_heads: set[str] = set()
        self._add_heads()

    @classmethod
    def from_pretrained(
        cls,
        source: str | os.PathLike[str] | PreTrainedModel | nn.Module,
        *,
        roles: Roles,
        slots: Mapping[str, SlotConfig] | None = None,
        backbones: Mapping[str, str | os.PathLike[str] | PreTrainedModel] | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        quantization: Quantization = "none",
        token_budget: int | None = None,
        adapter_dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> HydraModel:
        """Build from a model folder, a loaded causal LM, or a PeftModel (whose active adapter becomes slot `actor`).

        A folder written by `save_pretrained` or by full fine-tuning brings its heads along. A folder that no role with
        an LM head runs on is loaded without that head. Models that were given are as they were after an error.

        Args:
            source: local folder, transformers model or PeftModel of the backbone `base`.
            roles: name → role, at least one, e.g. `hydra_roles()`.
            slots: slot → its shape and origin; None, or a slot that is left out: the defaults of `SlotConfig`.
            backbones: name → folder or model of a further backbone; None: there is none.
            dtype: dtype of backbones that are loaded from folders.
            device: device of backbones, slots and heads.
            quantization: `8bit` or `4bit` loads frozen backbones through bitsandbytes; `none` as they are.
            token_budget: most tokens of all lanes in one backbone forward, ≥ 1; None: a default by device and width.
            adapter_dtype: dtype of the LoRA weights.
            seed: seed of the LoRA weights at the start.

        Returns:
            The model, with slots and heads on `device`.

        Raises:
            ValueError: a folder, model or adapter that cannot be loaded, or roles, slots and backbones that do not fit
                together.
            UnsupportedModelError: an architecture that the engine would get wrong. It is a ValueError.
            CorruptCheckpointError: a folder that differs from its manifest. It is a ValueError.
            TypeError: a source of another kind.
        """
        sources: dict[str, Any] = {"base": source, **(backbones or {})}
        with undone_on_error(*(origin for origin in sources.values() if isinstance(origin, nn.Module))):
            return cls._from_sources(
                sources,
                roles=roles,
                slots=dict(slots or {}),
                dtype=dtype,
                device=device,
                quantization=quantization,
                token_budget=token_budget,
                adapter_dtype=adapter_dtype,
                seed=seed,
            )

    @classmethod
    def _from_sources(
        cls,
        sources: dict[str, Any],
        *,
        roles: Roles,
        slots: dict[str, SlotConfig],
        dtype: torch.dtype,
        device: torch.device | str,
        quantization: Quantization,
        token_budget: int | None,
        adapter_dtype: torch.dtype,
        seed: int,
    ) -> HydraModel:
        source = sources["base"]
        trained = sorted(name for name in sources if base_is_trained(roles, name))
        if quantization != "none" and trained:
            raise ValueError(
                f"quantization: expected 'none' where backbones are trained themselves ({trained}), "
                f"got {quantization!r}"
            )
        missing = sorted({r.backbone for r in roles.values()} - set(sources))
        if missing:
            raise ValueError(f"backbones: expected a source for {missing}, got {sorted(sources)}")
        adapter = None
        if peft_io.is_peft_model(source):
            if "actor" in slots or not any(r.slot == "actor" and r.backbone == "base" for r in roles.values()):
                raise ValueError(
                    "source: expected a role on slot 'actor' and no entry for it in slots, because a PeftModel brings "
                    f"that slot; got roles {sorted(roles)} and slots {sorted(slots)}"
                )
            adapter = peft_io.take_peft_adapter(source)
            sources["base"] = adapter.base
            slots["actor"] = adapter.config
        base = sources["base"]
        built = {}
        for name, origin in sources.items():
            frozen = not base_is_trained(roles, name)
            if isinstance(origin, PreTrainedModel):
                if not is_quantised(origin):  # bitsandbytes' weights stay where they were loaded
                    origin.to(device)  # type: ignore[arg-type]
                built[name] = Backbone(origin, frozen=frozen)
            elif isinstance(origin, (str, os.PathLike)):
                built[name] = Backbone.from_pretrained(
                    origin,
                    dtype=dtype,
                    device=device,
                    frozen=frozen,
                    lm_head=needs_lm_head(roles, name),
                    quantization=quantization,
                )
            else:
                raise TypeError(
                    "source: expected a folder, a transformers PreTrainedModel or a PeftModel, "
                    f"got {type(origin).__name__}"
                )
        model = cls(built, roles=roles, slots=slots, token_budget=token_budget, adapter_dtype=adapter_dtype, seed=seed)
        if adapter is not None:
            peft_io.load_tensors(model.backbone("base").slot("actor"), adapter.tensors, "the PeftModel's adapter")
        if isinstance(base, (str, os.PathLike)):
            model.backbone().source = os.fspath(base)
        model._load_heads()
        return model

    def _load_heads(self) -> None:
        """Take the heads that lie beside the base, or that a backbone brought along."""
        source = self.backbone().source if "base" in self.backbones else None
        if source is not None:
            self.trained_heads |= peft_io.load_heads_if_present(self.heads, local_folder(source))
        for role in self.roles.values():
            score = self.backbone(role.backbone).score
            if role.head == "reward" and score is not None:
                # the reward model came as a sequence classifier, whose score is the head
                reward_model.load_reward_head(self.heads["reward"], score, f"backbone {role.backbone!r}")  # type: ignore[arg-type]
                self.trained_heads.add("reward")

    def beside(
        self,
        *,
        roles: Roles,
        slots: Mapping[str, SlotConfig] | None = None,
        token_budget: int | None = None,
        adapter_dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> HydraModel:
        """Make another model on the same frozen backbones, with roles, slots and heads of its own: for another policy.

        Names of slots and roles may be those of this model. Neither model sees what is trained in the other. Memory is
        taken for the new slots and heads alone, and is freed with the new model.

        Args:
            roles: name → role, at least one, on backbones of this model.
            slots: slot → its shape and origin; None, or a slot that is left out: the defaults of `SlotConfig`.
            token_budget: most tokens of all lanes in one backbone forward, ≥ 1; None: a default by device and width.
            adapter_dtype: dtype of the LoRA weights.
            seed: seed of the LoRA weights at the start.

        Returns:
            The new model.

        Raises:
            ValueError: a backbone that is trained itself, sharded or missing, or names that do not fit together.
        """
        used = dict.fromkeys(role.backbone for role in roles.values())
        backbones = {name: self.backbone(name).beside() for name in used}
        model = HydraModel(
            backbones, roles=roles, slots=slots, token_budget=token_budget, adapter_dtype=adapter_dtype, seed=seed
        )
        model._load_heads()
        return model

    def add_roles(self, roles: Roles, slots: Mapping[str, SlotConfig | AdapterSlot] | None = None) -> None:
        """Add roles while the model lives, with the slots and heads that they need and that are not there yet.

        Args:
            roles: name → role, on backbones of this model. The names are free.
            slots: new slot → its shape and origin, or a slot of a model `beside` this one, then one of both. None, or a
                slot that is left out: the defaults of `SlotConfig`.

        Raises:
            ValueError: a name that is taken, or anything else that does not fit together; nothing was added then.
        """
        taken = sorted(self.roles.keys() & roles.keys())
        if taken:
            raise ValueError(f"roles: expected names that are free, got {taken}")
        table, slots = {**self.roles, **roles}, dict(slots or {})
        held = {slot for name in self.backbones for slot in self.backbone(name).slots}
        if held & slots.keys():
            raise ValueError(f"slots: expected names that are free, got {sorted(held & slots.keys())}")
        _check_names(self, table, slots)
        before, self.roles = self.roles, table
        added = False
        try:
            self._add_slots(slots, roles)
            self._add_heads()
            added = True
        finally:
            if not added:
                self.roles = before
                self._drop_unused()

    def remove_roles(self, names: Sequence[str]) -> None:
        """Remove roles, and the slots and heads that no other role uses.

        An optimizer that holds their parameters keeps them, and goes on with tensors that nothing reads.

        Args:
            names: roles of the model. At least one other role stays.

        Raises:
            ValueError: a role that does not exist, or all of them.
        """
        for name in names:
            require_role(self.roles, name)
        left = {name: role for name, role in self.roles.items() if name not in names}
        if not left:
            raise ValueError(f"names: expected a role to be left, got all of {sorted(self.roles)}")
        self.roles = left
        self._drop_unused()

    def _drop_unused(self) -> None:
        """Give up slots and heads that no role uses."""
        for name in self.backbones:
            backbone = self.backbone(name)
            used = {role.slot for role in self.roles.values() if role.backbone == name}
            for slot in [slot for slot in backbone.slots if slot not in used]:
                backbone.remove_slot(slot)
        for head in [head for head in self.heads if head not in {role.head for role in self.roles.values()}]:
            del self.heads[head]
            self.trained_heads.discard(head)

    # ---- parts -----------------------------------------------------------------------------------------------------

    def backbone(self, name: str = "base") -> Backbone:
        """Return a backbone by its name.

        Args:
            name: `base`, or one of the further backbones.

        Returns:
            The backbone.

        Raises:
            ValueError: a name that no backbone has.
        """
        if name not in self.backbones:
            raise ValueError(f"backbone: expected one of {sorted(self.backbones)}, got {name!r}")
        backbone = self.backbones[name]
        assert isinstance(backbone, Backbone)
        return backbone

    def role_backbone(self, role: str) -> Backbone:
        """Return the backbone that a role runs on.

        Args:
            role: name of a role.

        Returns:
            The backbone.

        Raises:
            ValueError: a name that no role has.
        """
        return self.backbone(require_role(self.roles, role).backbone)

    @property
    def device(self) -> torch.device:
        """Device of the first backbone."""
        return next(iter(self.backbones.values())).device  # type: ignore[return-value]

    def trainable_parameters(self, role: str) -> dict[str, nn.Parameter]:
        """Parameters that a role trains: its slot's (or backbone's) and its scalar head's.

        Roles that share a slot report the same objects; an optimizer takes each once.

        Args:
            role: name of a role.

        Returns:
            Parameters by name: `backbone.slot.name` (slot OFF: `backbone.name`) and `heads.head.name`. Empty for a
            frozen role.

        Raises:
            ValueError: a name that no role has.
        """
        spec = require_role(self.roles, role)
        if not spec.trainable:
            return {}
        parameters: dict[str, nn.Parameter] = {}
        if spec.slot is OFF:
            parameters |= {f"{spec.backbone}.{n}": p for n, p in self.backbone(spec.backbone).base_parameters()}
        else:
            slot = self.backbone(spec.backbone).slot(spec.slot)
            parameters |= {f"{spec.backbone}.{spec.slot}.{n}": p for n, p in slot.named_parameters()}
        if spec.head != LM_HEAD:
            parameters |= {f"heads.{spec.head}.{n}": p for n, p in self.heads[spec.head].named_parameters()}
        return parameters

    def held_parameters(self) -> dict[str, int]:
        """Count the elements of unique parameter storage.

        Returns:
            Numbers of elements by part: `backbones`, `slots` and `heads`.
        """
        seen: set[int] = set()

        def count(parameters: Iterable[nn.Parameter]) -> int:
            total = 0
            for p in parameters:
                if p.data_ptr() not in seen:
                    seen.add(p.data_ptr())
                    total += p.numel()
            return total

        backbones = [self.backbone(name) for name in self.backbones]
        return {
            "backbones": count(p for b in backbones for _, p in b.base_parameters()),
            "slots": count(p for b in backbones for p in b.slots.parameters()),
            "heads": count(self.heads.parameters()),
        }

    # ---- forward ---------------------------------------------------------------------------------------------------

    def forward(
        self,
        batch: PackedBatch,
        outputs: Sequence[Output],
        *,
        dropout_seed: int | None = None,
        token_budget: int | None = None,
        watch: Callable[[str, torch.Tensor], None] | None = None,
    ) -> tuple[Any, ...]:
        """Run the lanes that the outputs read, then the outputs.

        Under grad mode, lanes with something to train in the backbone share one gradient call, and the rest run
        without. LoRA dropout applies to gradient calls in train mode. Request what will be used: a lane that no output
        reads has no gradient (None). A lane whose outputs stay out of the loss has a zero one, because it went through
        the same call.

        Args:
            batch: N sequences of at most as many tokens as the backbones' context.
            outputs: requests, of roles of this model.
            dropout_seed: keys the masks of LoRA dropout; None: no dropout.
            token_budget: most tokens of all lanes in one backbone forward of this call; None: the model's.
            watch: called in the backward pass with a role and the gradient [T, H] at its hidden states.

        Returns:
            The results, in the order of the requests.

        Raises:
            ValueError: a role that does not exist, a sequence longer than the context, an id outside the vocabulary, or
                what an output refuses.
            RuntimeError: something else has changed the backbone's attention since it was taken over.
        """
        names = [role for output in outputs for role in output.roles]
        lanes = fold_lanes(self.roles, names)
        for name in dict.fromkeys(backbone for backbone, _ in lanes):
            self.backbone(name).require_served(name, batch)
        with_grad, without = list[Lane](), list[Lane]()
        for lane in lanes:
            backbone, slot = self.backbone(lane[0]), lane[1]
            trains = not backbone.frozen if slot is OFF else backbone.slot(slot).trainable
            (with_grad if trains and torch.is_grad_enabled() else without).append(lane)
        hidden: dict[str, torch.Tensor] = {}
        for group, grad in ((with_grad, True), (without, False)):
            with torch.set_grad_enabled(grad and torch.is_grad_enabled()):
                seed = dropout_seed if grad and self.training else None
                for lane, states in self._traverse(batch, group, seed, token_budget).items():
                    hidden |= dict.fromkeys(lanes[lane], states)
        states_by_role = self.states(batch, hidden, watch)
        results = []
        with self.backbone(next(iter(self.backbones))).kernels.used():
            for output in outputs:  # no comprehension, which would be a frame on the way to a kernel
                results.append(output.compute(states_by_role))
        return tuple(results)

    def states(
        self,
        batch: PackedBatch,
        hidden: dict[str, torch.Tensor],
        watch: Callable[[str, torch.Tensor], None] | None = None,
    ) -> HiddenStates:
        """Put the heads of roles beside their hidden states.

        Args:
            batch: N sequences.
            hidden: role → hidden states [T, H] of the batch in the role's lane; taken over.
            watch: see `forward`.

        Returns:
            What outputs compute from.
        """
        if watch is not None:
            for name, states in hidden.items():
                if states.requires_grad:
                    hidden[name] = states.view_as(states)  # its own among the roles of a lane
                    hidden[name].register_hook(functools.partial(watch, name))
        lm_heads, scalar_heads = dict[str, LmHead](), dict[str, ScalarHead]()
        for name in hidden:
            role = self.roles[name]
            if role.head == LM_HEAD:
                lm_heads[name] = self.backbone(role.backbone).lm_head_in(role.slot)
            else:
                scalar_heads[name] = self.heads[role.head]  # type: ignore[assignment]
        return HiddenStates(batch=batch, hidden_T=hidden, lm_heads=lm_heads, scalar_heads=scalar_heads)

    def score(
        self,
        batch: PackedBatch,
        roles: Sequence[str] = ("actor", "reference", "critic", "reward"),
        *,
        temperature: float = 1.0,
        exact_kl: bool = False,
        token_budget: int | None = None,
    ) -> Scores:
        """Compute log-probs, entropies, values and rewards of the named roles, without gradients.

        Role names say what is read: `actor` and `reference` give log-probs, as does one of `past` and `behaviour`.
        `critic` gives values, `reward` rewards. All lanes share one backbone call up to the token budget. Above it,
        lanes go one after another, over groups of sequences of up to that many tokens. Those are fewer and larger
        groups than with lanes together, so that heads read their weight less often.

        Args:
            batch: N sequences of at most as many tokens as the backbones' context.
            roles: at least one name, of roles of this model.
            temperature: number > 0 that logits are divided by.
            exact_kl: also compute KL(actor ‖ reference) over the whole vocabulary; needs both roles.
            token_budget: most tokens of all lanes in one backbone forward of this call; None: the model's.

        Returns:
            [M] per completion token, rewards [N]; None for roles that are not named.

        Raises:
            ValueError: no roles, an unknown role, `exact_kl` without its roles, a sequence longer than the context, or
                a temperature that is not > 0.
        """
        if "reward" in roles and "reward" in self.roles and "reward" not in self.trained_heads:
            warn_if_zero(self.heads["reward"])
        known = ["actor", "critic", "reference", "reward", *(n for n in ("past", "behaviour") if n in self.roles)]
        requests: dict[str, Output] = {}
        for role in roles:
            if role not in known:
                raise ValueError(f"roles: expected names among {sorted(known)}, got {role!r}")
            require_role(self.roles, role)
            if role in ("critic", "reward"):
                requests[role] = Values(role=role) if role == "critic" else Rewards(role=role)
            else:
                wanted = ("logprob", "entropy") if role == "actor" else ("logprob",)
                requests[role] = Logprobs(role=role, temperature=temperature, outputs=wanted)
        if len(roles) == 0:
            raise ValueError("roles: expected at least one role, got none")
        if exact_kl:
            if not {"actor", "reference"} <= set(roles):
                raise ValueError(f"exact_kl: expected roles to hold 'actor' and 'reference', got {tuple(roles)}")
            del requests["actor"], requests["reference"]
            requests["pair"] = LogprobPair(temperature=temperature)
        outputs, parts = tuple(requests.values()), []
        with torch.no_grad():
            for part in self.parts(batch, token_budget):
                results = self(part, outputs, token_budget=token_budget)
                parts.append(_scores(dict(zip(requests, results, strict=True))))
            return join_scores(parts)

    def parts(self, batch: PackedBatch, token_budget: int | None = None) -> list[PackedBatch]:
        """Divide a batch into groups of consecutive sequences within the token budget.

        Args:
            batch: N sequences.
            token_budget: most tokens of a group, those of a shared prompt once; None: the model's.

        Returns:
            The groups, in the order of the batch. A sequence of more tokens is one by itself.
        """
        budget = self.token_budget if token_budget is None else token_budget
        once = (batch.prompts_N, batch.prompt_lens) if self.shared_rows(batch) is not None else None
        groups = split_by_tokens(batch.lengths, budget, once)
        parts = []
        for part in [batch.select(indices) for indices in groups] if len(groups) > 1 else [batch]:
            copied = once is not None and self.shared_rows(part) is None  # it saves too little
            own = split_by_tokens(part.lengths, budget) if copied else []
            parts += [part.select(indices) for indices in own] if len(own) > 1 else [part]
        return parts

    def runs_together(self, batch: PackedBatch, roles: Sequence[str], token_budget: int | None = None) -> bool:
        """Whether one backbone forward serves all the named roles for a batch, within the token budget.

        Args:
            batch: N sequences.
            roles: names of roles of this model.
            token_budget: most tokens of all lanes; None: the model's.

        Returns:
            True where the roles run on one backbone and their lanes fit, or are a single one.

        Raises:
            ValueError: a role that does not exist.
        """
        lanes = fold_lanes(self.roles, roles)
        fits = len(lanes) == 1 or self._fits(batch, len(lanes), token_budget)
        return fits and len({backbone for backbone, _ in lanes}) == 1

    def shared_rows(self, batch: PackedBatch) -> SharedRows | None:
        """Rows by which a batch goes through a backbone without LoRA dropout, where prompts stand once.

        Args:
            batch: N sequences.

        Returns:
            The rows; None where the batch goes through as it is.
        """
        backbone = self.backbone(next(iter(self.backbones)))
        wanted = batch.device.type in SHARING if self.shares_prompts is None else self.shares_prompts
        with backbone.kernels.used():
            shared = batch.shared if wanted and can_share(batch.tokens_T, backbone.dtype, backbone.head_size) else None
        saves = shared is None or not is_gpu(batch.device) or len(shared.rows) <= (1 - LEAST_SAVED) * batch.n_tokens
        return shared if saves else None

    @property
    def drops(self) -> bool:
        """Whether a call with gradients has LoRA dropout now."""
        return self.training and any(
            slot.config.dropout
            for backbone in self.backbones.values()
            for slot in backbone.slots.values()  # type: ignore[union-attr, operator]
        )

    def shares(self, batch: PackedBatch) -> bool:
        """Whether prompts of a batch stand once in the forward of an update: where none of its slots has dropout.

        Args:
            batch: N sequences.

        Returns:
            False also where no two sequences have the same prompt.
        """
        return not self.drops and self.shared_rows(batch) is not None

    def count_rows(self, batch: PackedBatch) -> int:
        """Count the rows of a lane's forward in an update, see `shares`.

        Args:
            batch: N sequences.

        Returns:
            Tokens of the batch, those of a prompt that sequences share once.
        """
        shared = self.shared_rows(batch) if self.shares(batch) else None
        return batch.n_tokens if shared is None else len(shared.rows)

    def _fits(self, batch: PackedBatch, n_lanes: int, budget: int | None = None) -> bool:
        return self.count_rows(batch) * n_lanes <= (self.token_budget if budget is None else budget)

    def _traverse(
        self, batch: PackedBatch, lanes: Sequence[Lane], dropout_seed: int | None, budget: int | None
    ) -> dict[Lane, torch.Tensor]:
        """Hidden states [T, H] by lane: lanes of one backbone in one call while they fit the token budget."""
        by_lane: dict[Lane, torch.Tensor] = {}
        for name in dict.fromkeys(backbone for backbone, _ in lanes):
            group, backbone = [lane for lane in lanes if lane[0] == name], self.backbone(name)
            for call in [group] if self._fits(batch, len(group), budget) else [[lane] for lane in group]:
                slots = [backbone.slot(slot) for _, slot in call if slot is not None]
                drops = dropout_seed is not None and any(slot.config.dropout for slot in slots)
                # a mask belongs to a sequence, so that with dropout the copies of a prompt differ
                shared = None if drops else self.shared_rows(batch)
                rows = [(batch, shared, slot) for _, slot in call]
                by_lane |= dict(zip(call, backbone.run_lanes(rows, dropout_seed if drops else None), strict=True))
        return by_lane

    # ---- building --------------------------------------------------------------------------------------------------

    def _add_slots(self, slots: Mapping[str, SlotConfig | AdapterSlot], roles: Roles) -> None:
        """Make the slots of some roles, as far as they are not there yet."""
        for name in self.backbones:
            backbone = self.backbone(name)
            used = dict.fromkeys(r.slot for r in roles.values() if r.backbone == name and r.slot is not OFF)
            new = [slot for slot in used if slot not in backbone.slots]
            trained = trainable_slots(self.roles, name)
            made = [slot for slot in new if not isinstance(slots.get(slot), AdapterSlot)]
            for slot in [slot for slot in new if slot not in made]:  # in their order, which calls see
                backbone.adopt_slot(slot, slots[slot])  # type: ignore[arg-type]
            for slot in made:
                backbone.add_slot(
                    slot,
                    slots.get(slot, SlotConfig()),  # type: ignore[arg-type]
                    trainable=slot in trained,
                    dtype=self.adapter_dtype,
                    generator=self._generator,
                )
            for slot in made:
                self._initialise(backbone, slot)

    def _add_heads(self) -> None:
        """Make the scalar heads that roles read and that are not there yet."""
        backbone_of = {role.head: role.backbone for role in self.roles.values()}
        trained = trainable_heads(self.roles)
        for name in sorted(backbone_of.keys() - {LM_HEAD} - self.heads.keys()):
            head = ScalarHead(self.backbone(backbone_of[name]).hidden_size, self.device)
            self.heads[name] = head.requires_grad_(name in trained)

    def _initialise(self, backbone: Backbone, name: str, starting: tuple[str, ...] = ()) -> None:
        slot = backbone.slot(name)
        origin = slot.config.init_from
        if origin is None:
            return
        if name in starting:
            raise ValueError(
                f"init_from: expected an origin outside of the slots {starting}, which start from each other"
            )
        if origin in backbone.slots:
            self._initialise(backbone, origin, (*starting, name))
            slot.copy_from(backbone.slot(origin))
        else:
            peft_io.load_slot(slot, origin, backbone)


def _check_names(model: HydraModel, roles: Roles, slots: Mapping[str, object]) -> None:
    """Raise ValueError for roles and slots that do not fit together, or on the model's backbones."""
    used = {r.slot for r in roles.values() if r.slot is not OFF}
    unused = sorted(set(slots) - used)
    if unused:
        raise ValueError(f"slots: expected names that a role uses ({sorted(used)}), got {unused}")
    for name, role in roles.items():
        for part in {role.slot, role.head} - {OFF, LM_HEAD}:
            if hasattr(nn.ModuleDict, str(part)):
                raise ValueError(f"roles[{name!r}]: expected another name than {part!r}, which torch uses itself")
        if role.backbone not in model.backbones:
            raise ValueError(
                f"roles[{name!r}].backbone: expected one of {sorted(model.backbones)}, got {role.backbone!r}"
            )
        if role.head == LM_HEAD and not model.backbone(role.backbone).has_lm_head:
            raise ValueError(f"roles[{name!r}]: expected a backbone with an LM head, got {role.backbone!r}")
        for part in ("slot", "head"):
            part_name = getattr(role, part)
            others = {r.backbone for r in roles.values() if getattr(r, part) == part_name} - {role.backbone}
            if part_name not in (OFF, LM_HEAD) and others:
                raise ValueError(
                    f"roles[{name!r}].{part}: expected {part_name!r} on one backbone, got it on {role.backbone!r} "
                    f"and on {sorted(others)}; a {part} belongs to the backbone that it was made for"
                )


def default_token_budget(device: torch.device, hidden_size: int) -> int:
    """Most tokens of all lanes in one backbone forward by default, as bench/studies/lanes.py measured."""
    return _CUDA_TOKEN_BUDGET if is_gpu(device) else max(1, _CPU_HIDDEN_BUDGET // hidden_size)


def _scores(results: Mapping[str, Any]) -> Scores:
    pair, actor, reference = results.get("pair"), results.get("actor"), results.get("reference")
    past = results.get("past") or results.get("behaviour")
    return Scores(
        logprobs_M=pair.logprob_a if pair else actor.logprob if actor else None,
        entropies_M=pair.entropy if pair else actor.entropy if actor else None,
        ref_logprobs_M=pair.logprob_r if pair else reference.logprob if reference else None,
        past_logprobs_M=past.logprob if past else None,
        kl_M=pair.kl if pair else None,
        values_M=results.get("critic"),
        rewards_N=results.get("reward"),
    )


def join_scores(parts: Sequence[Scores]) -> Scores:
    """Scores of consecutive groups of sequences as scores of all of them."""
    if len(parts) == 1:
        return parts[0]
    joined = {}
    for field in dataclasses.fields(Scores):
        tensors = [getattr(part, field.name) for part in parts]
        joined[field.name] = None if tensors[0] is None else torch.cat(tensors)
    return Scores(**joined)
