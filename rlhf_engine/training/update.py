"""An update: epochs over the answers of a rollout, in minibatches, each the sum of its micro-batches.

The losses are those of an `Algorithm`. Denominators are those of a whole minibatch, so that micro-batches add up to its
exact gradient. Before each pass of the model an update yields what it wants: a sweep makes passes of several runs at
once. Who sends no results lets the update make the pass itself.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from rlhf_engine.algorithms.base import Algorithm, Measured, MicroBatch, Term, TokenValues
from rlhf_engine.data import pack, side_by_side
from rlhf_engine.devices import Budget, World, balanced, is_out_of_memory, release_memory
from rlhf_engine.errors import MemoryLimitError, MismatchError, NonFiniteError
from rlhf_engine.hydra import HydraModel, PackedBatch
from rlhf_engine.hydra.roles import fold_lanes

T = TypeVar("T")


Wanted = dict[str, Any]
"""A forward and backward pass that an update goes on after: fields of `policy.joint.Pass` without the policy."""
Results = tuple[Any, ...] | Exception | None
"""Results of a pass, or what it raised; None: it was not made."""
Turns = Generator[Wanted | None, Results, T]
"""Work in turns: yields a pass, which it makes itself unless it is made for it, or None after a step."""


def alone(turns: Turns[T]) -> T:
    """Do work in turns without anybody else; what it returns."""
    while True:
        try:
            next(turns)
        except StopIteration as ended:
            result: T = ended.value
            return result


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Epochs, minibatches and limits of an update over its answers."""

    num_epochs: int
    num_mini_batches: int  # optimizer steps per epoch
    micro_batch_size: int | None  # most answers per forward and backward; None for any number
    max_tokens: int | None = None  # most tokens per forward and backward, prompts included; None for any number
    max_mismatch: float | None = None
    """Largest |log ratio| of a token in the first minibatch, where no weight has changed; None for any."""
    budget: Budget | None = None  # tokens of all lanes in a forward, settled by its owner; None: the model's


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

    def agree(self, calls: int, joint: bool) -> tuple[int, bool]:
        """Most micro-batches of any rank, and whether their terms share a backbone forward on all of them."""
        everyone = self.world.gather((calls, joint))
        return max(calls for calls, _ in everyone), all(joint for _, joint in everyone)

    def together(self, what: str) -> contextlib.AbstractContextManager[None]:
        """A block of this rank's work with the model, which all end together. what: for messages."""
        return self.world.in_step() if self.in_step else self.world.together(what)

    def of_all(self, measured: Measured, size: int) -> tuple[Measured, int]:
        """Sums and maxima over the ranks, and the fewest answers at a time of any."""
        everyone, total = self.world.gather((_floats(measured.sums), _floats(measured.most), size)), Measured()
        for sums, most, _ in everyone:
            total.add(Measured(sums=_tensors(sums), most=_tensors(most)))
        return total, min((size for _, _, size in everyone if size), default=0)

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
) -> Turns[dict[str, float]]:
    """All epochs over one rollout, in turns of a pass; returns metrics averaged over the minibatches.

    step: clips and applies the accumulated gradients, clears them, returns gradient norms by role. ranks: others that
    do a share of each minibatch; `step` then sums the gradients.

    A minibatch that runs out of memory is redone from its start, with halves of the micro-batch that failed and of all
    that are as large: the same sum of gradients and, keyed by sample and position, the same dropout masks. Raises,
    before the minibatch is applied, NonFiniteError naming the loss that is not finite and MismatchError for
    `max_mismatch`, and MemoryLimitError where not even one answer fits.
    """
    sizes = [] if schedule.micro_batch_size is None else [schedule.micro_batch_size]
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
            minibatch = _Minibatch(model, algorithm, answers, schedule, indices, dropout_seed)
            measured, size = yield from (minibatch.add_up() if ranks is None else minibatch.add_up_with(ranks))
            sizes.append(size)
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
        "micro_batch_size": float(min(sizes)),
    }


def nothing_learned(schedule: Schedule) -> dict[str, float]:
    """Metrics of an update that had nothing to learn from."""
    size = float(schedule.micro_batch_size or 0)
    return {"optimizer_steps": 0.0, "mismatch/update_max": 0.0, "micro_batch_size": size}


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
        self,
        model: HydraModel,
        algorithm: Algorithm,
        answers: TokenValues,
        schedule: Schedule,
        indices: Sequence[int],
        dropout_seed: int,
    ) -> None:
        """indices: places of its answers among all of the update. dropout_seed: key of its dropout masks."""
        self.model, self.algorithm, self.answers = model, algorithm, answers
        self.schedule, self.indices, self.dropout_seed = schedule, indices, dropout_seed
        self.budget = Budget(model.device) if schedule.budget is None else schedule.budget
        lengths = answers.batch.completion_lens
        self.n_tokens, self.n_answers = float(sum(lengths[i] for i in indices)), float(len(indices))

    def add_up_with(self, ranks: Ranks) -> Turns[tuple[Measured, int]]:
        """Add this process's share of the gradients; what all measure, and most answers at a time."""
        units = self._units(self.indices)
        own = [i for unit in ranks.own(self._lengths(units)) for i in units[unit]]
        parts, calls, joint = list[list[int]](), 0, False
        if ranks.in_step:
            parts = self.divide(own)
            calls, joint = ranks.agree(len(parts), all(self._terms(self._micro(part))[1] for part in parts))
        with ranks.together("the update"):
            measured, size = yield from (self._follow(parts, calls, joint) if ranks.in_step else self.add_up(own))
        return ranks.of_all(measured, size)

    def add_up(self, indices: Sequence[int] | None = None) -> Turns[tuple[Measured, int]]:
        """Add the gradients of all or some answers, in micro-batches that fit; most answers at a time."""
        parts = self.divide(self.indices if indices is None else indices)
        limit, least = self.schedule.micro_batch_size, self.algorithm.answers_per_unit
        while True:
            total, part = Measured(), list[int]()
            try:
                for part in parts:
                    total.add((yield from self._add(part)))
                return total, limit or max(map(len, parts), default=0)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if len(part) <= least:
                    self.model.zero_grad(set_to_none=True)  # of the answers before it
                    single = "sequence" if least == 1 else f"group of {least} sequences"
                    raise MemoryLimitError(
                        f"the update of a single {single} does not fit into memory; shorten answers "
                        "(max_completion_length), lower lora_r, or switch gradient_checkpointing on"
                    ) from error
            # here rather than above, where the error still holds the tensors of the failed pass
            self.model.zero_grad(set_to_none=True)
            release_memory(self.model.device)
            failed, limit = self._terms(self._micro(part))[2], None
            self.budget.divide(failed // 2)
            rows = [self._terms(self._micro(other))[2] for other in parts]
            parts = [half for other, n in zip(parts, rows, strict=True) for half in self._halves(other, n >= failed)]

    def _follow(self, parts: list[list[int]], calls: int, joint: bool) -> Turns[tuple[Measured, int]]:
        """Add up with as many `calls` of the model as every other process makes."""
        shortest = min(self._units(self.indices), key=lambda unit: self._lengths([unit])[0])
        total, most = Measured(), max(map(len, parts), default=0)
        try:
            for _ in range(calls - len(parts)):
                yield from self._add(shortest, joint=joint, times=0.0)
            for part in parts:
                total.add((yield from self._add(part, joint=joint)))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise MemoryLimitError(
                f"the update of {most} sequences at a time does not fit into memory, and processes that go in step "
                "cannot try fewer; lower per_device_train_batch_size or max_tokens_per_micro_batch, or switch "
                "gradient_checkpointing on"
            ) from error
        return total, self.schedule.micro_batch_size or most

    def _halves(self, part: list[int], wanted: bool) -> list[list[int]]:
        """The part in two, between its units, where that is wanted and possible."""
        k = self.algorithm.answers_per_unit
        middle = (len(part) // k + 1) // 2 * k
        return [part[:middle], part[middle:]] if wanted and middle < len(part) else [part]

    def divide(self, indices: Sequence[int]) -> list[list[int]]:
        """Answers by micro-batch; units stay whole."""
        units, most = self._units(indices), self.schedule.max_tokens
        rows = max(1, (self.schedule.micro_batch_size or len(indices)) // self.algorithm.answers_per_unit)
        parts = divide(self.model, self.answers.batch, units, max_rows=rows, max_tokens=most)
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

    def _terms(self, micro: MicroBatch, joint: bool | None = None) -> tuple[Sequence[Term], bool, int]:
        """The terms of a micro-batch, whether their lanes share a backbone forward (`joint`), and a forward's rows."""
        terms = self.algorithm.terms(micro)
        roles = [role for term in terms for role in term.output.roles]
        together = self.model.runs_together(micro.batch, roles, self.budget.tokens) if joint is None else joint
        lanes = len(fold_lanes(self.model.roles, roles)) if together else 1
        return terms, together, lanes * self.model.count_rows(micro.batch)

    def _add(self, chosen: Sequence[int], *, joint: bool | None = None, times: float = 1.0) -> Turns[Measured]:
        """Add the gradients of a micro-batch times a factor, its terms one after another or `joint`; what it tells."""
        micro = self._micro(chosen)
        terms, together, rows = self._terms(micro, joint)
        measured, results = Measured(), list[Any]()
        options: dict[str, Any] = {"dropout_seed": self.dropout_seed, "token_budget": self.budget.tokens}

        def watch(role: str, gradient_T: torch.Tensor) -> None:
            norm = torch.linalg.vector_norm(gradient_T.detach(), dtype=torch.float32)
            measured.add(Measured(sums={f"hidden_grad_sq/{role}": norm.square()}))

        watching = watch if len(terms) > 1 else None
        with self.budget.measured(rows):
            for group in [terms] if together else [[term] for term in terms]:
                outputs, loss = tuple(term.output for term in group), functools.partial(_loss, group, times)
                wanted = {"batch": micro.batch, "outputs": outputs, "loss": loss, "watch": watching}
                outs = None if self.model.drops else (yield wanted)  # masks are of one seed a call
                if isinstance(outs, Exception):
                    raise outs
                if outs is None:
                    outs = self.model(micro.batch, outputs, watch=watching, **options)
                    loss(outs).backward()
                measured.add(Measured(sums={"loss": loss(outs).detach()}))
                results.extend(outs)
        measured.add(self.algorithm.measure(micro, results))
        return measured


def _loss(terms: Sequence[Term], times: float, outs: Sequence[Any]) -> torch.Tensor:
    return times * torch.stack([term.weight * out.loss for term, out in zip(terms, outs, strict=True)]).sum()


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
    lengths, shares = batch.lengths, model.shares(batch)
    return [sum(lengths[i] for i in unit) - shares * (len(unit) - 1) * batch.prompt_lens[unit[0]] for unit in units]
