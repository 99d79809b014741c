"""An update: epochs over the answers of a rollout, in minibatches, each the sum of its micro-batches.

What an update follows the gradient of is an `Objective`; every algorithm has one. Denominators are those of a whole
minibatch, so that micro-batches add up to its exact gradient.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from rlhf_engine.data import pack
from rlhf_engine.devices import is_out_of_memory, release_memory
from rlhf_engine.errors import MemoryLimitError, MismatchError, NonFiniteError
from rlhf_engine.hydra import HydraModel, Output, PackedBatch


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How an update goes over its answers."""

    num_epochs: int
    num_mini_batches: int
    """Optimizer steps per epoch."""
    micro_batch_size: int
    """Most answers per forward and backward."""
    max_tokens: int | None = None
    """Most tokens per forward and backward, prompts included; None for any number."""
    max_mismatch: float | None = None
    """Largest |log ratio| of a token in the first minibatch, where no weight has changed; None for any."""
    target_kl: float | None = None
    """A minibatch whose approximate KL to the policy before exceeds it is not applied, and ends the update."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """Answers of one forward and backward, and where they come from."""

    batch: PackedBatch
    indices: Sequence[int]
    """Their places among all answers."""
    rows_M: torch.Tensor
    """int64 [M], places of their tokens among those of all answers."""
    minibatch: Sequence[int]
    """Places of all answers of the minibatch, over which means are taken, whichever process they are learned in."""


class Term(NamedTuple):
    """A loss that the model computes, and its weight in what is minimised."""

    output: Output
    """Its result has a `loss`."""
    weight: float


@dataclass(kw_only=True)
class Measured:
    """What micro-batches tell beside their gradients, by name; 0-d tensors."""

    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    """Shares of the minibatch's numbers, which add up."""
    most: dict[str, torch.Tensor] = field(default_factory=dict)
    """Numbers of which the largest counts."""

    def add(self, other: Measured) -> None:
        """Take in those of another micro-batch."""
        for name, share in other.sums.items():
            self.sums[name] = self.sums[name] + share if name in self.sums else share
        for name, value in other.most.items():
            self.most[name] = torch.maximum(self.most[name], value) if name in self.most else value

    def floats(self) -> dict[str, float]:
        """All of them on the host."""
        return {name: float(value) for name, value in (self.sums | self.most).items()}


class Objective(ABC):
    """What an update follows the gradient of, over the answers of one rollout."""

    batch: PackedBatch
    answers_per_unit: int = 1
    """So many answers next to each other stay together in a micro-batch."""
    discarded_roles: tuple[str, ...] = ()
    """Roles whose gradients are thrown away."""

    @abstractmethod
    def terms(self, micro: MicroBatch) -> list[Term]:
        """The losses of a micro-batch, over denominators of the whole minibatch."""

    @abstractmethod
    def measure(self, micro: MicroBatch, results: Sequence[Any]) -> Measured:
        """What the results of the terms, in their order, tell. `mismatch` is the largest difference of a token's
        log-prob to that before the update, `approx_kl` the mean of ratio − 1 − log ratio per token."""

    def summarise(self, measured: Measured) -> dict[str, float]:
        """Metrics of a whole minibatch."""
        return measured.floats()


class Crew(Protocol):
    """Processes that share the work on each minibatch and know all answers of the rollout."""

    def own(self, sizes: Sequence[int]) -> list[int]:
        """Which of a minibatch's units this process takes; every unit is some process's. sizes: tokens of each."""
        ...

    def together(self, work: Callable[[], tuple[Measured, Schedule]]) -> tuple[Measured, Schedule]:
        """What all processes measure of a minibatch, and the schedule to go on with; the same on all of them."""
        ...


def update(
    model: HydraModel,
    objective: Objective,
    schedule: Schedule,
    step: Callable[[], Mapping[str, float]],
    *,
    seed: int,
    crew: Crew | None = None,
) -> dict[str, float]:
    """All epochs over one rollout; returns metrics averaged over the minibatches.

    step: clips and applies the accumulated gradients, clears them, returns gradient norms by role. crew: others that do
    a share of each minibatch; `step` then sums the gradients.

    A minibatch that runs out of memory is redone from its start with micro-batches of half the size, for this and all
    that follow: the same sum of gradients and, keyed by sample and position, the same dropout masks. Raises, before the
    minibatch is applied, NonFiniteError naming the loss that is not finite and MismatchError for `max_mismatch`, and
    MemoryLimitError where not even one answer fits.
    """
    generator = torch.Generator().manual_seed(seed)
    applied: list[dict[str, float]] = []
    stopped = False
    first_mismatch = 0.0
    n_units, together = divmod(objective.batch.n_sequences, objective.answers_per_unit)
    if together:
        raise ValueError(
            f"objective: expected answers in groups of {objective.answers_per_unit}, got {objective.batch.n_sequences}"
        )
    for epoch in range(schedule.num_epochs):
        for number, units in enumerate(minibatches(n_units, schedule.num_mini_batches, generator)):
            k = objective.answers_per_unit
            indices = [unit * k + i for unit in units for i in range(k)]
            dropout_seed = int(torch.randint(2**62, (), generator=generator))
            own = indices if crew is None else _own(crew, objective, indices)
            work = functools.partial(_accumulate_in_memory, model, objective, own, indices, schedule, dropout_seed)
            measured, schedule = work() if crew is None else crew.together(work)
            stats = objective.summarise(measured)
            _require_finite(model, stats, f"epoch {epoch}, minibatch {number}")
            if epoch == 0 and number == 0:
                first_mismatch = stats.get("mismatch", 0.0)
                _require_agreement(model, first_mismatch, schedule.max_mismatch)
            if schedule.target_kl is not None and stats["approx_kl"] > schedule.target_kl:
                model.zero_grad(set_to_none=True)
                stopped = True
                break
            applied.append({**stats, **step()})
        if stopped:
            break
    keys = [k for k in (applied[0] if applied else {}) if k != "mismatch"]
    means = {k: sum(s[k] for s in applied) / len(applied) for k in keys}
    return {
        **means,
        "optimizer_steps": float(len(applied)),
        "stopped_by_target_kl": float(stopped),
        "mismatch/update_max": first_mismatch,
        "micro_batch_size": float(schedule.micro_batch_size),
    }


def nothing_learned(schedule: Schedule) -> dict[str, float]:
    """Metrics of an update that had nothing to learn from."""
    return {
        "optimizer_steps": 0.0,
        "stopped_by_target_kl": 0.0,
        "mismatch/update_max": 0.0,
        "micro_batch_size": float(schedule.micro_batch_size),
    }


def minibatches(n: int, count: int, generator: torch.Generator) -> list[list[int]]:
    """A random partition of n into `count` minibatches of nearly equal size (fewer if n < count)."""
    order = torch.randperm(n, generator=generator).tolist()
    count = min(count, n)
    bounds = [round(i * n / count) for i in range(count + 1)]
    return [order[a:b] for a, b in itertools.pairwise(bounds)]


def _accumulate_in_memory(
    model: HydraModel,
    objective: Objective,
    indices: Sequence[int],
    minibatch: Sequence[int],
    schedule: Schedule,
    dropout_seed: int,
) -> tuple[Measured, Schedule]:
    """`_accumulate`, with smaller micro-batches until it fits; what it measured, and the schedule that fitted."""
    least = objective.answers_per_unit
    while True:
        parts = _micro_batches(objective, indices, schedule)
        try:
            return _accumulate(model, objective, minibatch, parts, dropout_seed), schedule
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            size = max(map(len, parts))
            if size <= least:
                model.zero_grad(set_to_none=True)  # of the answers before it
                single = "sequence" if least == 1 else f"group of {least} sequences"
                raise MemoryLimitError(
                    f"the update of a single {single} does not fit into memory; shorten answers, lower token_budget or "
                    "lora_r, or switch gradient_checkpointing on"
                ) from error
        # here rather than above, where the error still holds the tensors of the failed pass
        model.zero_grad(set_to_none=True)
        release_memory(model.device)
        schedule = dataclasses.replace(schedule, micro_batch_size=(size + 1) // 2)


def _micro_batches(objective: Objective, indices: Sequence[int], schedule: Schedule) -> list[list[int]]:
    """A minibatch's answers by micro-batch; units stay whole."""
    k = objective.answers_per_unit
    units = _units(objective, indices)
    rows = max(1, schedule.micro_batch_size // k)
    parts = pack(_unit_lengths(objective, indices), max_rows=rows, max_tokens=schedule.max_tokens)
    return [[i for unit in part for i in units[unit]] for part in parts]


def _units(objective: Objective, indices: Sequence[int]) -> list[Sequence[int]]:
    k = objective.answers_per_unit
    return [indices[i : i + k] for i in range(0, len(indices), k)]


def _unit_lengths(objective: Objective, indices: Sequence[int]) -> list[int]:
    """Tokens of each unit."""
    return [sum(objective.batch.lengths[i] for i in unit) for unit in _units(objective, indices)]


def _own(crew: Crew, objective: Objective, indices: Sequence[int]) -> list[int]:
    """This process's share of a minibatch, of whole units; perhaps nothing."""
    units = _units(objective, indices)
    return [i for unit in crew.own(_unit_lengths(objective, indices)) for i in units[unit]]


def _accumulate(
    model: HydraModel,
    objective: Objective,
    minibatch: Sequence[int],
    parts: Sequence[Sequence[int]],
    dropout_seed: int,
) -> Measured:
    """Gradients of one minibatch, or of a part of it, micro-batch by micro-batch (`parts`); what they tell."""
    total = Measured()
    for chosen in parts:
        micro = MicroBatch(
            batch=objective.batch.select(chosen),
            indices=chosen,
            rows_M=objective.batch.select_completion_rows(chosen),
            minibatch=minibatch,
        )
        loss, results = _backward(model, micro.batch, objective.terms(micro), dropout_seed)
        for role in objective.discarded_roles:
            for p in model.trainable_parameters(role).values():
                p.grad = None
        total.add(Measured(sums={"loss": loss}))
        total.add(objective.measure(micro, results))
    return total


def _backward(
    model: HydraModel, part: PackedBatch, terms: Sequence[Term], dropout_seed: int
) -> tuple[torch.Tensor, list[Any]]:
    """Add a micro-batch's gradients: of all terms at once where their lanes share a traversal, else one by one.

    One by one, only one graph is alive at a time; together they would cost memory for nothing. Returns the weighted sum
    [] whose gradient was taken, and the terms' results.
    """
    roles = [role for term in terms for role in term.output.roles]
    losses: list[torch.Tensor] = []
    results: list[Any] = []
    for group in [terms] if model.runs_together(part, roles) else [[term] for term in terms]:
        found = model(part, [term.output for term in group], dropout_seed=dropout_seed)
        loss = torch.stack([term.weight * out.loss for term, out in zip(group, found, strict=True)]).sum()
        loss.backward()
        losses.append(loss.detach())
        results.extend(found)
    return torch.stack(losses).sum(), results


def _require_finite(model: HydraModel, stats: Mapping[str, float], where: str) -> None:
    for name in ("policy/loss", "value/loss", "loss"):
        if name in stats and not math.isfinite(stats[name]):
            model.zero_grad(set_to_none=True)  # nobody may step on what this minibatch left behind
            raise NonFiniteError(f"{name} is {stats[name]} at {where}; nothing of this minibatch was applied")


def _require_agreement(model: HydraModel, mismatch: float, bound: float | None) -> None:
    if bound is not None and not mismatch <= bound:
        model.zero_grad(set_to_none=True)
        raise MismatchError(
            f"log-probs of the update's first forward differ by up to {mismatch:.3g} from those that the answers were "
            f"scored with, at equal weights; expected at most {bound:g} (rollout_mismatch_bound)"
        )
