"""The loop of every training run: steps, and what is written and decided between two of them.

A kind of run says what a step is, when to look at what was learned, and what is left at the end. The loop does the
rest, for one process or for several ranks: the lock of the output folder, the record, metrics, trackers, checkpoints,
stops by signal, and a checkpoint of the last whole step where an error ends the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from rlhf_kernels.runtime import registry
from torch import nn

from rlhf_engine.config.run import TrainingOptions
from rlhf_engine.config.supervised import SupervisedOptions
from rlhf_engine.data import Tally, batch_indices, side_by_side
from rlhf_engine.devices import ALONE, World, fingerprint_of_all, peak_memory_bytes, release_memory
from rlhf_engine.errors import NonFiniteError, RunStopped
from rlhf_engine.generators.work import Snapshot
from rlhf_engine.hydra import HydraModel, PackedBatch
from rlhf_engine.hydra.build import shard_base
from rlhf_engine.hydra.optimizer import RoleOptimizer, lr_factor
from rlhf_engine.io import writing
from rlhf_engine.runs.checkpoint import Counters, load_checkpoint, read_counters, save_checkpoint, saved_on_error
from rlhf_engine.runs.curves import plot_curves
from rlhf_engine.runs.folder import CURVES_FILE, METRICS_FILE, RECORD_FILE, clear_later_steps, locked
from rlhf_engine.runs.metrics import MetricsWriter, Trackers, run_record, write_json_atomic
from rlhf_engine.runs.page import LivePage
from rlhf_engine.runs.progress import TrainingProgress
from rlhf_engine.training.data_parallel import (
    require_same_options,
    require_same_start,
    require_same_weights,
    require_shared_state,
    sum_gradients,
)
from rlhf_engine.training.update import Ranks, Turns, alone, divide, unit_lengths

State = TypeVar("State", bound=Counters)


class Policy(Generic[State]):
    """Model with what is trained of it, its optimizer and its counters."""

    def __init__(
        self,
        config: TrainingOptions,
        model: HydraModel,
        learning_rates: Mapping[str, float],
        state: State,
        *,
        world: World = ALONE,
    ) -> None:
        """Take a model before any step, its counters, and a learning rate of what each role alone trains."""
        self.config, self.model, self.world = config, model, world
        self.optimizer = RoleOptimizer.configured(model, learning_rates, config, world)
        self.state = state
        """Counters."""
        model.eval()

    def load(self, checkpoint: Path, total_steps: int) -> State:
        """Load a checkpoint into model and optimizer; its counters. ConfigError where it does not fit."""
        state = load_checkpoint(checkpoint, self.model, self.optimizer, type(self.state))
        # a record of an older version, or a damaged one, has no rate to compare with
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            record = json.loads((checkpoint.parent / RECORD_FILE).read_text(encoding="utf-8"))
            runs = (record["config"], record["total_steps"]), (vars(self.config), total_steps)
            before, now = (o["learning_rate"] * lr_factor(state.step, o, total) for o, total in runs)
            if self.world.is_main and abs(now - before) > 1e-9 * before:
                old, new = (f"{o['lr_scheduler_type']} over {total} steps" for o, total in runs)
                warnings.warn(
                    f"learning_rate: step {state.step + 1} goes on at {now:g}, by {new}; the run of {checkpoint} had "
                    f"{before:g} for it, by {old}",
                    stacklevel=3,
                )
        return state

    # ---- a step ----------------------------------------------------------------------------------------------------

    def schedule_rates(self, total_steps: int) -> float:
        """Set the learning rates of the next step by its place in the schedule; their common factor, in [0, 1]."""
        factor = lr_factor(self.state.step, vars(self.config), total_steps)
        self.optimizer.set_lr_factor(factor)
        return factor

    def trained(self) -> list[nn.Parameter]:
        """Every parameter that is trained, or this rank's share of it, role by role, each once."""
        return [p for group in self.optimizer.groups.values() for p in group.values()]

    def apply(self) -> dict[str, float]:
        """Make an optimizer step on all ranks' gradients; norms by role, and 1 where clipped."""
        if self.world.size > 1:
            sum_gradients(self.world, self.optimizer.replicated())
        return self.optimizer.step()

    def advance(self, **counters: Any) -> None:
        """Count a step that is done, and set other counters that it changed."""
        state = self.state
        self.state = dataclasses.replace(state, step=state.step + 1, **counters)  # type: ignore[type-var]  # a dataclass
        self.optimizer.is_whole = True

    def require_same(self, step: int) -> None:
        """Check that ranks hold the same parameters."""
        require_same_weights(self.world, fingerprint_of_all(self.optimizer.replicated()), step)

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def save(self, output: Path, *, state: State | None = None, past: Mapping[int, Snapshot] | None = None) -> Path:
        """Write a checkpoint of the counters or `state`, with the `past` policies that the run needs to go on."""
        keep = self.config.save_total_limit
        state = self.state if state is None else state
        return save_checkpoint(output, self.model, self.optimizer, state, keep=keep, policies=past)


_PLOT_SECONDS = 60.0
"""Least seconds between two pictures of curves while a run goes on: one takes as long as many steps of a tiny model."""
OnStep = Callable[[int, dict[str, Any]], None]  # called with the number of steps done and the step's metrics


class Run(ABC, Generic[State]):
    """A training run in an output folder, of which a subclass sets six attributes and checks the request."""

    config: TrainingOptions
    output: Path
    policy: Policy[State]
    total_steps: int
    reports: dict[str, Tally]  # rows read, left out and cut, by the option that names their source
    kernels: registry.Settings  # of the kernels of this run, which its base has too
    world: World = ALONE
    _whole_base: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    """Makes the block of `whole_base`."""
    _saved_step: int | None = None  # step of the newest checkpoint that this process has written
    _record: dict[str, Any] | None = None  # contents of run.json for a run that has begun
    _plots_at: float = 0.0  # time of the monotonic clock from which on curves are drawn again
    _page: LivePage | None = None  # page of a run that goes on, on the main rank
    title: str  # title of the progress that is shown
    shown: Mapping[str, str] = TrainingProgress.SHOWN  # metrics of the progress that is shown, and their labels

    @property
    def model(self) -> HydraModel:
        """Model of the policy."""
        return self.policy.model

    @property
    def optimizer(self) -> RoleOptimizer:
        """Optimizer of the policy."""
        return self.policy.optimizer

    @property
    def state(self) -> State:
        """Counters of the policy; their `step` is the number of steps done."""
        return self.policy.state

    @state.setter
    def state(self, state: State) -> None:
        self.policy.state = state

    # ---- what a kind of run is -------------------------------------------------------------------------------------

    @abstractmethod
    def step(self) -> dict[str, Any]:
        """Make one step; its metrics by name. Afterwards `state` counts it and `optimizer.is_whole` is true."""

    def step_in_turns(self) -> Turns[dict[str, Any]]:
        """Do what `step` does, in turns of a pass where the kind of run has them."""
        return self.step()
        yield

    @abstractmethod
    def finished(self) -> bool:
        """Whether every step is done and the result is written."""

    @abstractmethod
    def end(self) -> Any:
        """Write the result of a run whose steps are done; what `run` returns. Called on the main rank alone."""

    def steps_done(self) -> int:
        """Number of steps of which the output folder holds the outcome."""
        done: int = self.state.step
        return done

    def begin(self) -> None:
        """Make the output folder ready. Called on the main rank alone, with the folder locked."""
        clear_later_steps(self.output, step=self.state.step, total_steps=self.total_steps)
        self.write_record()

    def look(self) -> dict[str, Any]:
        """Evaluate, where that is due: before the first step, or after one; metrics by name. Called on all ranks."""
        return {}

    def saves_now(self) -> bool:
        """Whether a checkpoint is due: every `save_steps` steps, after the last one, after the best evaluation."""
        is_best = getattr(self.state, "best_step", None) == self.state.step
        return self._is_regular() or self._is_last() or is_best

    def describe(self) -> dict[str, Any]:
        """Facts of the run for its record, beside its options and this machine: plain values by name."""
        return {}

    def make_saver(self) -> Callable[[], object]:
        """Make a function that writes a checkpoint. It is made before each step, and called if the step fails."""
        return self.save

    def resources(self) -> contextlib.AbstractContextManager[object]:
        """Resources that are held open during the run."""
        return contextlib.nullcontext()

    def steps(self) -> contextlib.AbstractContextManager[object]:
        """Resources that are held open while steps are made."""
        return contextlib.nullcontext()

    def _share_out(self, model: HydraModel, *, rows: Any, step: int) -> None:
        """Have ranks begin alike, with their shares of the base; ConfigError where `rows` or `step` differ."""
        if self.world.size > 1:
            require_same_start(self.world, weights=fingerprint_of_all(model.parameters()), rows=rows, step=step)
        if self.config.shard_base:
            self._whole_base = shard_base(model, self.config, self.world)

    @contextlib.contextmanager
    def whole_base(self) -> Iterator[None]:
        """A block in which each rank calls the model alone, with all of the base or blocks gathered as they run."""
        with contextlib.ExitStack() as stack:
            with self.world.in_step():
                stack.enter_context(self._whole_base())
            yield

    # ---- the loop --------------------------------------------------------------------------------------------------

    def run(self, on_step: OnStep | None = None, *, stop: Callable[[], bool] | None = None) -> Any:
        """Make all remaining steps, write the result, and return what `end` returns, on the main rank.

        Writes run.json, metrics.jsonl, page.html, curves.png, checkpoints and the result into the output folder. An
        error leaves all metrics so far and a checkpoint of the last whole step in place. `on_step` gets each step's
        number and metrics; None: the main rank shows the progress. `stop` is called after each step on each rank: where
        one says true, a checkpoint is written and RunStopped raised.
        """
        with self.kernels.used(), contextlib.closing(self.turns(on_step, stop)) as turns:
            return alone(turns)

    def turns(self, on_step: OnStep | None = None, stop: Callable[[], bool] | None = None) -> Turns[Any]:
        """Do what `run` does, in turns of a pass or a step; `kernels` are in use during each."""
        world = self.world
        with contextlib.ExitStack() as stack:
            with world.together("the output folder"):
                if world.is_main:
                    stack.enter_context(locked(self.output))
                    self._page = stack.enter_context(LivePage(self.output))
            if on_step is None and world.is_main:
                title = self.title if world.size == 1 else f"{self.title}, {world.size} processes"
                progress = TrainingProgress(self.total_steps, title=title, step=self.state.step, shown=self.shown)
                on_step = stack.enter_context(progress).update
            with self.resources():
                with self.whole_base(), world.together("the start of the run"):
                    if world.is_main:
                        self.begin()
                yield from self._remaining_steps(on_step, stop)
                with self.whole_base(), self._whole_state(), world.together("the result"):
                    if not world.is_main:
                        return None
                    with saved_on_error(self.output, self.optimizer, lambda: self.state.step, self.save):
                        return self.end()

    def _remaining_steps(self, on_step: OnStep | None, stop: Callable[[], bool] | None) -> Turns[None]:
        world = self.world
        with self.steps(), contextlib.ExitStack() as stack:
            trackers = writer = None
            with world.together("metrics"):
                if world.is_main:
                    trackers, writer = stack.enter_context(self._trackers()), stack.enter_context(self._writer())
            if self.state.step == 0 and (before := self.look()):
                with world.together("metrics"):
                    self._write(writer, trackers, before)
            while self.state.step < self.total_steps:
                with self._saved_on_error(writer):
                    metrics = yield from self.step_in_turns()
                    try:
                        metrics |= self.look()
                    except BaseException:  # an evaluation that fails costs no row of the step before it
                        self._write(writer, trackers, metrics)
                        raise
                    whole = self._whole_state() if self.saves_now() else contextlib.nullcontext()
                    with whole, world.together("metrics and checkpoints"):
                        self._note(writer, trackers, metrics, on_step)
                yield None
                if stop is not None and not self._is_last() and any(world.gather(stop())):
                    with self._whole_state(), world.together("the last checkpoint"):
                        self._save_once(writer)
                        if writer is not None:
                            self.plot()
                    raise RunStopped(f"stopped at step {self.state.step} of {self.total_steps}")
            if writer is not None and writer.last_step > 0:  # else what was known of a run is gone
                self.plot()

    def _note(
        self, writer: MetricsWriter | None, trackers: Trackers | None, metrics: dict[str, Any], on_step: OnStep | None
    ) -> None:
        """Write what is known of a step that is done. writer, trackers: of the main rank."""
        done = self.state.step
        self._write(writer, trackers, metrics)
        if on_step is not None:
            on_step(done, metrics)
        if self.saves_now():
            self._save_after(writer, self.save)
            if writer is not None and not self._is_last() and time.monotonic() >= self._plots_at:
                self.plot()

    def _write(self, writer: MetricsWriter | None, trackers: Trackers | None, metrics: dict[str, Any]) -> None:
        """Write metrics of the steps that are done, where this is the main rank."""
        if writer is None:
            return
        with writing(writer.path):
            writer.write(self.state.step, metrics)
        if trackers is not None:
            trackers.log(self.state.step, metrics)
        if self._page is not None:
            self._page.refresh()

    def _is_last(self) -> bool:
        done: int = self.state.step
        return done >= self.total_steps

    def _is_regular(self) -> bool:
        return bool(self.config.save_steps) and self.state.step % self.config.save_steps == 0

    @contextlib.contextmanager
    def _whole_state(self) -> Iterator[None]:
        """A block in which the main rank can write a checkpoint; all ranks enter it together."""
        with contextlib.ExitStack() as stack:
            if self.optimizer.is_sharded:
                stack.enter_context(self.whole_base())
                with self.world.in_step():
                    stack.enter_context(self.optimizer.whole())
            yield

    # ---- files -----------------------------------------------------------------------------------------------------

    def save(self) -> Path:
        """Write a checkpoint of the current step, where this is the main rank; its folder."""
        return self._save(self.state)

    def _save(self, state: State, past: Mapping[int, Snapshot] | None = None) -> Path:
        """`save`, of these counters and with the policies of the `past` that the run needs to go on."""
        if self.world.is_main:
            self.policy.save(self.output, state=state, past=past)
            self._saved_step = state.step
        return self.output / f"checkpoint-{state.step}"

    def _save_once(self, writer: MetricsWriter | None) -> None:
        """A checkpoint of the current step, unless there is one."""
        if self._saved_step != self.state.step:
            self._save_after(writer, self.save)

    @staticmethod
    def _save_after(writer: MetricsWriter | None, save: Callable[[], object]) -> None:
        """A checkpoint, once the metrics of the steps before it are on the disk."""
        if writer is not None:
            with writing(writer.path):
                writer.sync()
        save()

    def _saved_on_error(self, writer: MetricsWriter | None) -> contextlib.AbstractContextManager[None]:
        """`saved_on_error` of a step; a failing reward function or server costs the answers of that step."""
        if writer is None or self.optimizer.is_sharded:  # of which no rank alone has a checkpoint
            return contextlib.nullcontext()
        save = functools.partial(self._save_after, writer, self.make_saver())
        return saved_on_error(self.output, self.optimizer, lambda: self.state.step, save)

    def _writer(self) -> MetricsWriter:
        with writing(self.output / METRICS_FILE):
            writer = MetricsWriter(self.output / METRICS_FILE)
            writer.truncate_after(self.state.step or -1)  # before the first step, nothing is known yet
        step = self.state.step
        if writer.last_step < 0 and step and (self.output / f"checkpoint-{step}").is_dir():
            warnings.warn(
                f"{writer.path}: expected metrics of the steps up to {step}, got none; curves begin after them",
                stacklevel=2,
            )
        return writer

    def _trackers(self) -> Trackers:
        return Trackers(self.config.report_to, self.output, self.config.to_dict(), step=self.state.step)

    def plot(self) -> None:
        """Draw the curves of the metrics so far."""
        self._plots_at = time.monotonic() + _PLOT_SECONDS
        plot_curves(self.output / METRICS_FILE, self.output / CURVES_FILE)
        release_memory(
            torch.device("cpu")
        )  # 15 MB of each picture: its parts refer to each other, and malloc keeps them

    def write_record(self, result: dict[str, Any] | None = None) -> None:
        """Write run.json. result: outcome of a run that is done; None before."""
        if self._record is None:
            device = self.model.device
            self._record = run_record(
                config=self.config.to_dict(),
                command=[Path(sys.argv[0]).name, *sys.argv[1:]],
                backends=registry.report(device.type, self.model.backbone().dtype),
                device=device,
            )
            data = {argument: report.to_dict() for argument, report in self.reports.items()}
            begun = {"resumed_at_step": self.state.step, "total_steps": self.total_steps}
            if self.world.size > 1:
                begun["processes"] = self.world.size
            self._record |= {**begun, "data": data, **self.describe()}
        done = {} if result is None else {"result": result}
        with writing(self.output / RECORD_FILE):
            write_json_atomic(self.output / RECORD_FILE, {**self._record, **done})


class HasTokens(Protocol):
    """A tokenized row."""

    @property
    def tokens(self) -> int:
        """Tokens of its sequences."""


class SupervisedRun(Run[State]):
    """A run over epochs of rows, a batch a step with exact denominators; ranks share out its rows."""

    config: SupervisedOptions
    rows: Sequence[Any]
    start: State  # counters of a run that begins
    resume: Path | None  # checkpoint to go on from; None: begin

    def __init__(self, config: SupervisedOptions, world: World = ALONE) -> None:
        """Find everything that can be wrong with the request; RankError is such an error on another rank."""
        require_same_options(config, world)
        self.world = world
        self.config = config
        if world.size > 1:
            is_full = config.mode == "full"
            if is_full:
                require_shared_state(config, world)
            shares = config.shard_base or is_full
            self.config = dataclasses.replace(config, device=str(world.device), shard_base=shares)
        self.output = Path(config.output_dir).absolute()  # a reward function may change the folder
        self.ranks = Ranks(world, in_step=bool(self.config.shard_base))
        self.kernels = registry.effective().anew()
        with self.kernels.used():
            with world.together("the start of the run"):
                model = self.load()
            step = 0 if self.resume is None else read_counters(self.resume, type(self.start)).step
            self._share_out(model, rows=self.start, step=step)
            with world.together("the start of the run"):
                self._prepare(model)
        if world.size > 1:
            self.policy.require_same(self.state.step)

    @abstractmethod
    def load(self) -> HydraModel:
        """Load the data, and the model as it is before any step; the model."""

    def go_on(self, held: State) -> State:
        """Counters to go on with. held: those of the checkpoint, whose model and optimizer have been loaded."""
        return held

    def _prepare(self, model: HydraModel) -> None:
        rates = dict.fromkeys(model.roles, self.config.learning_rate)
        self.policy = Policy(self.config, model, rates, self.start, world=self.world)
        if self.resume is not None:
            self.state = self.go_on(self.policy.load(self.resume, self.total_steps))

    @abstractmethod
    def loss(
        self, rows: Sequence[Any], places: Sequence[int], *, dropout_seed: int
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute the part of a step's loss and metrics that the rows at some places have; all are 0-d."""

    @abstractmethod
    def packed(self, rows: Sequence[Any]) -> PackedBatch:
        """Pack the sequences of rows of one kind: first answers of all rows, then second ones (of pairs)."""

    @property
    def rows_per_step(self) -> int:
        """Rows of one optimizer step, of all ranks together."""
        return self.config.per_device_train_batch_size * self.config.gradient_accumulation_steps

    def next_rows(self) -> list[Any]:
        """Choose the rows of the next step, in the order of its places."""
        places = batch_indices(len(self.rows), self.rows_per_step, self.state.step, self.config.seed)
        return [self.rows[i] for i in places]

    def micro_batches(self, rows: Sequence[HasTokens]) -> list[list[int]]:
        """Divide this rank's rows of a step into micro-batches of places; rows of one prompt share its tokens."""
        batch = self.packed(rows)
        order = side_by_side(batch.prompts_N[: len(rows)])
        units = [range(place, batch.n_sequences, len(rows)) for place in order]
        own = self.ranks.own(unit_lengths(self.model, batch, units))
        parts = divide(
            self.model,
            batch,
            [units[unit] for unit in own],
            max_rows=self.config.per_device_train_batch_size,
            max_tokens=self.config.max_tokens_per_micro_batch,
        )
        return [[order[own[unit]] for unit in part] for part in parts]

    def count_steps(self) -> int:
        """Count the optimizer steps of the whole run, at least 1. Raises ConfigError for a longer warm-up."""
        config = self.config
        epochs = math.ceil(config.num_train_epochs * len(self.rows) / self.rows_per_step)
        total = config.max_steps if config.max_steps is not None else max(1, epochs)
        config.check_warm_up(total)
        return total

    def step(self) -> dict[str, Any]:
        """Make one optimizer step; its metrics by name. A loss or gradient that is not finite applies nothing."""
        config, step = self.config, self.state.step
        began = time.perf_counter()
        rows = self.next_rows()
        self.model.train()
        with self.kernels.used():
            metrics = self._learn(rows, dropout_seed=config.seed * 1_000_003 + step)
        self.model.eval()
        for name in ("lm_loss", "reward_loss"):
            if name in metrics and not math.isfinite(metrics[name]):
                self.model.zero_grad(set_to_none=True)
                raise NonFiniteError(f"{name} is {metrics[name]} at step {step + 1}; nothing of it was applied")
        factor = self.policy.schedule_rates(self.total_steps)
        metrics |= self.policy.apply()
        if self.world.size > 1:
            self.policy.require_same(step + 1)
        self.policy.advance()
        memory = float(peak_memory_bytes(self.model.device))
        most = self.world.most({"seconds/step": time.perf_counter() - began, "peak_memory_bytes": memory})
        seconds = most["seconds/step"]
        return {
            **metrics,
            **most,
            "learning_rate": config.learning_rate * factor,
            "tokens_per_second": sum(row.tokens for row in rows) / seconds,
            "samples_per_second": len(rows) / seconds,
        }

    def _learn(self, rows: Sequence[HasTokens], *, dropout_seed: int) -> dict[str, float]:
        """Add up the gradients of this rank's share of a step; metrics of all of it."""
        parts = self.micro_batches(rows)
        # where every call is one of all ranks, those with fewer parts repeat a row, whose gradient they add 0 times
        spare = self.ranks.agree(len(parts), joint=True)[0] - len(parts) if self.ranks.in_step else 0
        shortest = min(range(len(rows)), key=lambda place: rows[place].tokens)
        totals: dict[str, torch.Tensor] = {}
        with self.ranks.together("the step"):
            for part in parts:
                loss, stats = self.loss(rows, part, dropout_seed=dropout_seed)
                loss.backward()
                for name, value in stats.items():
                    totals[name] = totals.get(name, torch.zeros_like(value)) + value
            for _ in range(spare):
                (0.0 * self.loss(rows, [shortest], dropout_seed=dropout_seed)[0]).backward()
        return self.ranks.add_up({name: float(value) for name, value in totals.items()})
