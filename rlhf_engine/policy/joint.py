"""Forward and backward passes of several policies in one traversal of their base.

Each policy has rows of its own, and a row goes through its policy's slot alone. In exact mode results and gradients
are the bits that a policy has by itself; elsewhere they differ by rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlhf_engine.errors import BusyError, GradientsLostError, PolicyRemovedError
from rlhf_engine.hydra import HydraModel, PackedBatch
from rlhf_engine.hydra.outputs import HiddenStates, Output, TargetLogprobs, compute_targets
from rlhf_engine.hydra.roles import fold_lanes
from rlhf_engine.policy.pool import LivePolicy

Loss = Callable[[tuple[Any, ...]], torch.Tensor]  # makes the 0-d loss of a pass from its results


@dataclass(frozen=True, kw_only=True, eq=False)
class Pass:
    """A policy, a batch, and what is computed from it."""

    policy: LivePolicy  # a policy of the pool, or the base
    batch: PackedBatch  # N sequences
    outputs: tuple[Output, ...]  # requests, of roles of the policy's model
    loss: Loss | None = None  # makes the loss that gradients are of; None: no gradients
    watch: Callable[[str, torch.Tensor], None] | None = None  # see `HydraModel.forward`


def run(host: HydraModel, passes: Sequence[Pass]) -> list[tuple[Any, ...]]:
    """Compute the outputs of every pass, and add the gradients of the losses to those that the policies hold.

    Passes share a traversal of the base as far as their lanes fit the host's token budget. A pass is never divided:
    its gradients do not depend on who is beside it.

    Results of each pass come in the order of its outputs; the graph of those with a loss is spent. Raises
    PolicyRemovedError, ValueError as a forward does, and GradientsLostError: what its policies held is gone.
    """
    outcomes = attempt(host, passes)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes  # type: ignore[return-value]  # none of them is an error


def attempt(host: HydraModel, passes: Sequence[Pass]) -> list[tuple[Any, ...] | Exception]:
    """The results of each pass as of `run`, or what it raised; the others go on without it."""
    outcomes = list[tuple[Any, ...] | Exception]()
    for group in _groups(host, passes):
        try:
            outcomes += _run_together(host, group)
        except GradientsLostError as error:
            outcomes += [error] * len(group)
        except Exception as error:  # whoever asked for a pass gets what it raised
            outcomes += [error] if len(group) == 1 else [o for each in group for o in attempt(host, [each])]
    return outcomes


def _groups(host: HydraModel, passes: Sequence[Pass]) -> Iterator[list[Pass]]:
    """Consecutive passes whose lanes fit the token budget together; one that does not fit goes by itself."""
    group, rows = list[Pass](), 0
    for each in passes:
        try:
            own = each.batch.n_tokens * len(_lanes(each))
        except Exception:  # of a pass that cannot be: by itself, it raises that to who asked for it
            own = host.token_budget + 1
        if group and rows + own > host.token_budget:
            yield group
            group, rows = [], 0
        group.append(each)
        rows += own
    if group:
        yield group


def _lanes(each: Pass) -> dict[tuple[str, str | None], list[str]]:
    if not each.outputs:
        raise ValueError("outputs: expected at least one output of a pass, got none")
    return fold_lanes(each.policy.model.roles, [role for output in each.outputs for role in output.roles])


def _run_together(host: HydraModel, passes: Sequence[Pass]) -> list[tuple[Any, ...]]:
    backbone = host.backbone()
    hidden = [dict[str, torch.Tensor]() for _ in passes]
    lanes = list[tuple[int, str | None, list[str], bool]]()  # pass, slot, roles, whether it is trained
    for i, each in enumerate(passes):
        backbone.require_served("base", each.batch)
        if each.loss is not None and each.policy.waiting is not None:
            raise BusyError(f"policy {each.policy.name!r}: expected its step to be done before further gradients")
        for (_, slot), roles in _lanes(each).items():
            if each.policy.slot_on_host(slot) not in (None, *backbone.slots):
                raise PolicyRemovedError(f"policy {each.policy.name!r} was removed")
            trains = each.loss is not None and slot is not None and each.policy.model.backbone().slot(slot).trainable
            lanes.append((i, slot, roles, trains))
    for trains in (True, False):
        own = [lane for lane in lanes if lane[3] == trains]
        if not own:
            continue
        rows = []
        for i, slot, _, _ in own:
            policy, batch = passes[i].policy, passes[i].batch
            rows.append((batch, policy.model.shared_rows(batch), policy.slot_on_host(slot)))
        with torch.set_grad_enabled(trains):
            for (i, _, roles, _), states in zip(own, backbone.run_lanes(rows), strict=True):
                hidden[i] |= dict.fromkeys(roles, states)
    with backbone.kernels.used():
        reads = [p.policy.model.states(p.batch, own, p.watch) for p, own in zip(passes, hidden, strict=True)]
        results = _compute(passes, reads)
        with torch.enable_grad():
            losses = [each.loss(own) for each, own in zip(passes, results, strict=True) if each.loss is not None]
        if losses:
            _backward(losses, passes)
    return results


def _compute(passes: Sequence[Pass], reads: Sequence[HiddenStates]) -> list[tuple[Any, ...]]:
    """The results of every pass; targets of one temperature, with gradients or without, in one sweep of the vocabulary.

    No GPU has run a sweep for several LoRAs on the head: there each has its own.
    """
    found, together = dict[tuple[int, int], Any](), dict[Any, list[tuple[int, int]]]()
    for i, each in enumerate(passes):
        for k, output in enumerate(each.outputs):
            kind: Any = i, k, "by itself"
            if isinstance(output, TargetLogprobs):
                # beside rows with LoRA on the head, gradients of those without have other bits
                adapts = reads[i].lm_head(output.role).lora is not None
                if not adapts or each.batch.tokens_T.is_cpu:
                    kind = (each.loss is not None, output.temperature, adapts)
            together.setdefault(kind, []).append((i, k))
    for places in together.values():
        (i, k), outputs = places[0], [passes[i].outputs[k] for i, k in places]
        with torch.set_grad_enabled(passes[i].loss is not None):
            if isinstance(outputs[0], TargetLogprobs):
                asked: Any = zip(outputs, (reads[i] for i, _ in places), strict=True)
                found |= dict(zip(places, compute_targets(list(asked)), strict=True))
            else:
                found[i, k] = outputs[0].compute(reads[i])
    return [tuple(found[i, k] for k in range(len(each.outputs))) for i, each in enumerate(passes)]


def _backward(losses: Sequence[torch.Tensor], passes: Sequence[Pass]) -> None:
    try:
        torch.autograd.backward(losses)
    except (RuntimeError, MemoryError) as error:
        trained = [each.policy for each in passes if each.loss is not None]
        for p in (p for policy in trained for p in policy.model.parameters()):
            p.grad = None  # some were added to and others not
        names = [policy.name for policy in trained]
        raise GradientsLostError(f"a backward pass of {names} broke off, their gradients are gone: {error}") from error
