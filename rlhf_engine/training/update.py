"""An update: epochs over the answers of a rollout, in minibatches, each the sum of its micro-batches.

The losses are those of an `Algorithm`. Denominators are those of a whole minibatch, so that micro-batches add up to its
exact gradient.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from rlhf_engine.algorithms.base import Algorithm, Measured, MicroBatch, Term, TokenValues
from rlhf_engine.data import pack, side_by_side
from rlhf_engine.devices import is_out_of_memory, release_memory
from rlhf_engine.distributed.process_group import World, balanced
from rlhf_engine.errors import MemoryLimitError, MismatchError, NonFiniteError
from rlhf_engine.hydra import HiddenStates, HydraModel, Output, PackedBatch

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Epochs, minibatches and limits of an update over its answers."""

    num_epochs: int
    num_mini_batches: int  # optimizer steps per epoch
    micro_batch_size: int  # most answers per forward and backward
    max_tokens: int | None = None  # most tokens per forward and backward, prompts included; None for any number
    max_mismatch: float | None = None
    """Largest |log ratio| of a token in the first minibatch, where no weight has changed; None for any."""


class StepPlan(NamedTuple):
    """Calls of the model by one process in a minibatch."""

    calls: int  # micro-batches
    joint: bool  # whether the terms of every micro-batch share a backbone forward


@dataclass(frozen=True)
class Ranks:
    """The ranks as a step sees them: they share the work on each minibatch, and know all answers of the rollout."""

    world: World
    in_step: bool
    """Whether every call of the model is one of all ranks, as with a sharded base.

    A rank that has fewer micro-batches then adds a short one 0 times, and none can try smaller ones.
    """

    def own(self, sizes: Sequence[int]) -> list[int]:
        """This rank's share of units of these sizes, by index; every unit is some rank's."""
        return balanced(sizes, self.world.size)[self.world.rank]

    def agree(self, plan: StepPlan) -> StepPlan:
        """Most calls of any rank, and terms jointly where they are so on all of them."""
        everyone = self.world.gather((plan.calls, plan.joint))
        return StepPlan(calls=max(calls for calls, _ in everyone), joint=all(joint for _, joint in everyone))

    def together(self, work: Callable[[], tuple[Measured, Schedule]]) -> tuple[Measured, Schedule]:
        """Sums and maxima over the ranks, and the schedule that fits into the memory of all."""
        measured, schedule = self.run("the update", work)
        own = (_floats(measured.sums), _floats(measured.most), schedule.micro_batch_size)
        total, size = Measured(), schedule.micro_batch_size
        for sums, most, fitted in self.world.gather(own):
            total.add(Measured(sums=_tensors(sums), most=_tensors(most)))
            size = min(size, fitted)
        return total, dataclasses.replace(schedule, micro_batch_size=size)

    def run(self, what: str, work: Callable[[], T]) -> T:
        """This rank's result of work with the model, once every rank has its own. what: for messages."""
        return self.world.in_step(work) if self.in_step else self.world.run_on_all_ranks(what, work)

    def add_up(self, shares: Mapping[str, float]) -> dict[str, float]:
        """Sums over the ranks, by name, of what each has measured on its share; a rank may lack names."""
        everyone = self.world.gather(dict(shares))
        names = dict.fromkeys(name for theirs in everyone for name in theirs)
        return {name: sum(theirs.get(name, 0.0) for theirs in everyone) for name in names}


def update(
    model: HydraModel,
    algorithm: Algorithm,
    answers: TokenValues,
    schedule: Schedule,
    step: Callable[[], Mapping[str, float]],
    *,
    seed: int,
    ranks: Ranks | None = None,
) -> dict[str, float]:
    """All epochs over one rollout; returns metrics averaged over the minibatches.

    step: clips and applies the accumulated gradients, clears them, returns gradient norms by role. ranks: others that
    do a share of each minibatch; `step` then sums the gradients.

    A minibatch that runs out of memory is redone from its start with micro-batches of half the size, for this and all
    that follow: the same sum of gradients and, keyed by sample and position, the same dropout masks. Raises, before the
    minibatch is applied, NonFiniteError naming the loss that is not finite and MismatchError for `max_mismatch`, and
    MemoryLimitError where not even one answer fits.
    """
    generator = torch.Generator().manual_seed(seed)
    applied: list[dict[str, float]] = []
    first_mismatch = 0.0
    k = algorithm.answers_per_unit
    if answers.batch.n_sequences % k:
        raise ValueError(f"answers: expected groups of {k}, got {answers.batch.n_sequences}")
    for epoch in range(schedule.num_epochs):
        dealt = answers_by_minibatch(answers.batch, k, schedule.num_mini_batches, generator)
        for number, indices in enumerate(dealt):
            dropout_seed = int(torch.randint(2**62, (), generator=generator))
            minibatch = _Minibatch(model, algorithm, answers, indices, dropout_seed)
            if ranks is None:
                measured, schedule = minibatch.add_up_in_memory(indices, schedule)
            else:
                measured, schedule = minibatch.add_up_with(ranks, schedule)
            stats = algorithm.summarise(measured)
            _require_finite(model, stats, f"epoch {epoch}, minibatch {number}")
            if epoch == 0 and number == 0:
                first_mismatch = stats.get("mismatch", 0.0)
                _require_agreement(model, first_mismatch, schedule.max_mismatch)
            applied.append({**stats, **step()})
    keys = [k for k in (applied[0] if applied else {}) if k != "mismatch"]
    means = {k: sum(s[k] for s in applied) / len(applied) for k in keys}
    return {
        **means,
        "optimizer_steps": float(len(applied)),
        "mismatch/update_max": first_mismatch,
        "micro_batch_size": float(schedule.micro_batch_size),
    }


def nothing_learned(schedule: Schedule) -> dict[str, float]:
    """Metrics of an update that had nothing to learn from."""
    return {"optimizer_steps": 0.0, "mismatch/update_max": 0.0, "micro_batch_size": float(schedule.micro_batch_size)}


def minibatches(n: int, count: int, generator: torch.Generator) -> list[list[int]]:
    """A random partition of n into `count` minibatches of nearly equal size (fewer if n < count)."""
    order = torch.randperm(n, generator=generator).tolist()
    count = min(count, n)
    bounds = [round(i * n / count) for i in range(count + 1)]
    return [order[a:b] for a, b in itertools.pairwise(bounds)]


def answers_by_minibatch(
    batch: PackedBatch, answers_per_unit: int, count: int, generator: torch.Generator
) -> list[list[int]]:
    """Places of the answers of each minibatch of an epoch, dealt at random; those of a prompt are neighbours."""
    k, answers = answers_per_unit, []
    for units in minibatches(batch.n_sequences // k, count, generator):
        order = side_by_side([batch.prompts_N[unit * k] for unit in units])
        answers.append([units[place] * k + i for place in order for i in range(k)])
    return answers


class _Minibatch:
    """The gradients of one minibatch, micro-batch by micro-batch."""

    def __init__(
        self, model: HydraModel, algorithm: Algorithm, answers: TokenValues, indices: Sequence[int], dropout_seed: int
    ) -> None:
        """indices: places of its answers among all of the update. dropout_seed: key of its dropout masks."""
        self.model, self.algorithm, self.answers = model, algorithm, answers
        self.indices, self.dropout_seed = indices, dropout_seed
        lengths = answers.batch.completion_lens
        self.n_tokens, self.n_answers = float(sum(lengths[i] for i in indices)), float(len(indices))

    def add_up_with(self, ranks: Ranks, schedule: Schedule) -> tuple[Measured, Schedule]:
        """Add this process's share of the gradients; what all measure, and the schedule to go on with."""
        units = self._units(self.indices)
        own = [i for unit in ranks.own(self._lengths(units)) for i in units[unit]]
        if not ranks.in_step:
            return ranks.together(functools.partial(self.add_up_in_memory, own, schedule))
        parts = self._micro_batches(own, schedule)
        plan = ranks.agree(StepPlan(calls=len(parts), joint=all(map(self._runs_together, parts))))
        return ranks.together(lambda: (self._follow(plan, parts), schedule))

    def add_up_in_memory(self, indices: Sequence[int], schedule: Schedule) -> tuple[Measured, Schedule]:
        """Add the gradients of some answers, with smaller micro-batches until they fit; the schedule that fitted."""
        least = self.algorithm.answers_per_unit
        while True:
            parts = self._micro_batches(indices, schedule)
            try:
                return self._add_up(parts), schedule
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                size = max(map(len, parts))
                if size <= least:
                    self.model.zero_grad(set_to_none=True)  # of the answers before it
                    single = "sequence" if least == 1 else f"group of {least} sequences"
                    raise MemoryLimitError(
                        f"the update of a single {single} does not fit into memory; shorten answers, lower "
                        "lora_r, or switch gradient_checkpointing on"
                    ) from error
            # here rather than above, where the error still holds the tensors of the failed pass
            self.model.zero_grad(set_to_none=True)
            release_memory(self.model.device)
            schedule = dataclasses.replace(schedule, micro_batch_size=(size + 1) // 2)

    def _follow(self, plan: StepPlan, parts: Sequence[Sequence[int]]) -> Measured:
        """Add up with as many calls of the model as every other process makes."""
        shortest = min(self._units(self.indices), key=lambda unit: self._lengths([unit])[0])
        spare = [shortest] * (plan.calls - len(parts))
        try:
            self._add_up(spare, joint=plan.joint, times=0.0)
            return self._add_up(parts, joint=plan.joint)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise MemoryLimitError(
                f"the update of {max(map(len, parts), default=0)} sequences at a time does not fit into memory, and "
                "processes that go in step cannot try fewer; lower per_device_train_batch_size or "
                "max_tokens_per_micro_batch, or switch gradient_checkpointing on"
            ) from error

    def _micro_batches(self, indices: Sequence[int], schedule: Schedule) -> list[list[int]]:
        """Answers by micro-batch; units stay whole."""
        units = self._units(indices)
        rows = max(1, schedule.micro_batch_size // self.algorithm.answers_per_unit)
        parts = divide(self.model, self.answers.batch, units, max_rows=rows, max_tokens=schedule.max_tokens)
        return [[i for unit in part for i in units[unit]] for part in parts]

    def _units(self, indices: Sequence[int]) -> list[Sequence[int]]:
        k = self.algorithm.answers_per_unit
        return [indices[i : i + k] for i in range(0, len(indices), k)]

    def _lengths(self, units: Sequence[Sequence[int]]) -> list[int]:
        return unit_lengths(self.model, self.answers.batch, units)

    def _micro(self, chosen: Sequence[int]) -> MicroBatch:
        rows_M = self.answers.batch.select_completion_rows(chosen)
        return MicroBatch(
            batch=self.answers.batch.select(chosen),
            mask_M=torch.ones(len(rows_M), dtype=torch.bool, device=rows_M.device),
            n_tokens=self.n_tokens,
            n_answers=self.n_answers,
            **{name: values[rows_M] for name, values in self.answers.token_values().items()},
        )

    def _runs_together(self, chosen: Sequence[int]) -> bool:
        """Whether the lanes of all terms share a backbone forward, for these answers."""
        micro = self._micro(chosen)
        return self.model.runs_together(micro.batch, _roles(self.algorithm.terms(micro)))

    def _add_up(self, parts: Sequence[Sequence[int]], *, joint: bool | None = None, times: float = 1.0) -> Measured:
        """Gradients of micro-batches times a factor, one after another or `joint`; what they tell."""
        total = Measured()
        for chosen in parts:
            micro = self._micro(chosen)
            terms = self.algorithm.terms(micro)
            together = self.model.runs_together(micro.batch, _roles(terms)) if joint is None else joint
            measured, results = Measured(), []
            for group in [terms] if together else [[term] for term in terms]:
                outputs = [_Watched(term.output) if len(terms) > 1 else term.output for term in group]
                outs = self.model(micro.batch, outputs, dropout_seed=self.dropout_seed)
                loss = torch.stack([term.weight * out.loss for term, out in zip(group, outs, strict=True)]).sum()
                (times * loss).backward()
                measured.add(Measured(sums={"loss": loss.detach()}))
                for output in outputs:
                    if isinstance(output, _Watched):
                        measured.add(Measured(sums=output.squares))
                results.extend(outs)
            for role in self.algorithm.discarded_roles:
                for p in self.model.trainable_parameters(role).values():
                    p.grad = None
            total.add(measured)
            total.add(self.algorithm.measure(micro, results))
        return total


class _Watched:
    """An output that also measures the gradient of its loss at the hidden states it reads."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self.squares: dict[str, torch.Tensor] = {}
        """Squared norm of that gradient by role, 0-d fp32, as `hidden_grad_sq/ROLE`; after the backward pass."""

    @property
    def roles(self) -> tuple[str, ...]:
        return self._output.roles

    def compute(self, states: HiddenStates) -> Any:
        own = {role: hidden_T.view_as(hidden_T) for role, hidden_T in states.hidden_T.items() if role in self.roles}
        for role, hidden_T in own.items():
            if hidden_T.requires_grad:
                hidden_T.register_hook(functools.partial(self._measure, role))
        return self._output.compute(dataclasses.replace(states, hidden_T={**states.hidden_T, **own}))

    def _measure(self, role: str, gradient_T: torch.Tensor) -> None:
        norm = torch.linalg.vector_norm(gradient_T.detach(), dtype=torch.float32)
        self.squares[f"hidden_grad_sq/{role}"] = norm.square()


def _roles(terms: Sequence[Term]) -> list[str]:
    return [role for term in terms for role in term.output.roles]


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


def _floats(tensors: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in tensors.items()}


def _tensors(floats: dict[str, float]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in floats.items()}


def divide(
    model: HydraModel, batch: PackedBatch, units: Sequence[Sequence[int]], *, max_rows: int, max_tokens: int | None
) -> list[list[int]]:
    """Divide units, sequences with one prompt each, into micro-batches as `data.pack` does; places of units."""
    shared = None
    if model.shares(batch):
        shared = [(batch.prompts_N[unit[0]], batch.prompt_lens[unit[0]]) for unit in units]
    return pack(unit_lengths(model, batch, units), max_rows=max_rows, max_tokens=max_tokens, shared=shared)


def unit_lengths(model: HydraModel, batch: PackedBatch, units: Sequence[Sequence[int]]) -> list[int]:
    """Count the tokens of each unit, those of a prompt once where the model shares it in its present mode."""
    shares = model.shares(batch)
    copies = [(len(unit) - 1) * batch.prompt_lens[unit[0]] if shares else 0 for unit in units]
    return [sum(batch.lengths[i] for i in unit) - more for unit, more in zip(units, copies, strict=True)]
