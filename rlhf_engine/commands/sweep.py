"""`rlhf-engine sweep`: many runs of `train` on one base, which take turns of a step.

Each run is what `train` makes of the same options: the same floats, folder and page. Passes of updates that runs wait
for at the same time are made together where that leaves the floats as they are. On a CPU with runs for each of its
threads, every thread is a process forked once the base is loaded, with its share of the runs. A run whose method has
several backbones, or trains them, has its own. The folder of the sweep has these folders, a page of all, and sweep.json
with the options of every run and what was dropped. Whatever ends a sweep, the same command goes on with the runs that
are not done.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import itertools
import json
import math
import mmap
import multiprocessing
import signal
import sys
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn

import torch

from rlhf_engine.commands.common import check_kernels, prepare, print_what_was_left_out
from rlhf_engine.commands.main import fail
from rlhf_engine.config.sweep import Grid, SweepConfig, read_grid
from rlhf_engine.devices import DTYPES, is_gpu, resolve_device
from rlhf_engine.errors import ConfigError, EngineError, RunStopped, as_request_errors
from rlhf_engine.hydra import HydraModel, RoleSpec
from rlhf_engine.policy import joint
from rlhf_engine.policy.pool import BASE, LivePolicy, Policies
from rlhf_engine.runs.folder import METRICS_FILE, locked, require_unlocked
from rlhf_engine.runs.metrics import read_columns, write_json_atomic
from rlhf_engine.runs.page import PAGE_FILE, LivePage, groups_of
from rlhf_engine.runs.progress import StopSignals, SweepProgress
from rlhf_engine.training.rl import RlTrainer
from rlhf_engine.training.update import Results, Turns, Wanted

SWEEP_FILE = "sweep.json"
_NOT_EXACT = 3


def run(config: SweepConfig) -> int:
    """Make what is left of all runs; 1 where one has failed, as its exit code would be."""
    output = Path(config.output_dir).absolute()
    grid = read_grid(config.grid, output)
    first = next(iter(grid.runs.values()))
    prepare(first.kernels)
    with as_request_errors():
        check_kernels(first.kernels, resolve_device(first.device).type, DTYPES[first.dtype])
        sweep = Sweep(grid, output)
        code = sweep.prepare()
    if code:
        return code
    with StopSignals() as signals:
        sweep.run(signals.asked)
    if signals.asked() or sweep.stopped:
        print("rlhf-engine sweep: stopped; the same command goes on", file=sys.stderr)
        return signals.exit_code
    total, dropped, failed = len(sweep.runs), len(sweep.dropped), len(sweep.failed)
    print(f"{total - dropped - failed} of {total} runs done, {dropped} dropped, {failed} failed")
    print(f"page {sweep.output / PAGE_FILE}")
    return 1 if sweep.failed else 0


class Sweep:
    """The runs of a grid on one base."""

    def __init__(self, grid: Grid, output: Path) -> None:
        """Load the base."""
        self.output, self.runs, self.halving = output, grid.runs, grid.halving
        self.at_once, self.failed, self.stopped = grid.at_once or len(grid.runs), set[str](), False
        self.progress = SweepProgress()
        require_unlocked(output)
        self._record = self._read_record()
        self.rungs: dict[str, Any] = self._record["rungs"]
        """What became of the runs after the steps of `halving`, by step."""
        first = next(iter(self.runs.values()))
        self.base = HydraModel.from_pretrained(
            first.model_name_or_path,
            roles={BASE: RoleSpec()},
            dtype=DTYPES[first.dtype],
            device=resolve_device(first.device),
            quantization=first.quantization,
        )
        self.base.backbone().base_hash()  # once for all
        self._note: Callable[..., None] = self.progress.note
        self._policies, self._numbers = Policies(self.base, exact=first.exact), itertools.count()
        self._joint: dict[str, LivePolicy] = {}
        """Policies on the base whose bits do not depend on who learns beside them, by the names of their runs."""
        self._ready: dict[str, RlTrainer] = {}
        threads, runs = torch.get_num_threads(), min(len(self._left()), self.at_once)
        forks = sys.platform == "linux" and not is_gpu(self.base.device)  # torch does not fork well elsewhere
        self._processes = threads if forks and 1 < threads <= runs else 1

    def prepare(self) -> int:
        """Find everything that can be wrong with any run before the first step of one; an exit code.

        Where several processes are to be forked, one of them does, and says so itself: what is opened to try a reward
        is of one process.
        """
        if self._processes > 1:
            process = multiprocessing.get_context("fork").Process(target=self._prepare_apart)
            process.start()
            process.join()
            if process.exitcode in (0, 1, 2):
                return process.exitcode
            if process.exitcode != _NOT_EXACT:
                raise EngineError(f"a process ended by itself ({process.exitcode})")
            self._processes = 1
        self._prepare()
        return 0

    def _prepare_apart(self) -> NoReturn:
        _begin_process()
        try:
            with as_request_errors():
                exact = self._prepare()
        except (EngineError, OSError) as error:
            sys.exit(fail("sweep", error, 2 if isinstance(error, ConfigError) else 1))
        # only in exact mode are floats the same on one thread as on all
        sys.exit(0 if exact else _NOT_EXACT)

    def _prepare(self) -> bool:
        """Make every trainer once; whether all are of exact mode."""
        reports, exact = dict[str, Any](), True
        for name in self._left():
            trainer = self._trainer(name)
            last = self.halving.at[-1] if self.halving else 0
            if last >= trainer.total_steps:
                raise ConfigError(f"halving: expected at below the {trainer.total_steps} steps of {name}, got {last}")
            reports |= {report.text(): report for report in trainer.reports.values()}
            exact = exact and trainer.kernels.exact
            if len(self._ready) < self.at_once:
                self._ready[name] = trainer
            else:
                gc.collect()  # a trainer and what looks at it hold each other, and the policy
        print_what_was_left_out(reports.values())
        return exact

    def _read_record(self) -> dict[str, Any]:
        """Take up what an earlier process has decided. Raises ConfigError where its runs have other options."""
        options = json.loads(json.dumps({name: run.to_dict() for name, run in self.runs.items()}))
        for given in options.values():
            del given["output_dir"]  # a sweep may have been moved
        path = self.output / SWEEP_FILE
        held = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"runs": {}, "rungs": {}}
        for name in options.keys() & held["runs"].keys():
            for option, value in options[name].items():
                if (before := held["runs"][name].get(option)) != value:
                    where = f"of run {name} in {path}; another output_dir begins anew"
                    raise ConfigError(f"{option}: expected {before!r}, that {where}, got {value!r}")
        halving = None if self.halving is None else self.halving.to_dict()
        if held["rungs"] and halving != held["halving"]:
            raise ConfigError(
                f"halving: expected {held['halving']}, by which runs in {path} were dropped, got {halving}"
            )
        return {"runs": held["runs"] | options, "halving": halving, "rungs": held["rungs"]}

    @property
    def dropped(self) -> set[str]:
        """Runs that halving has dropped."""
        return {name for rung in self.rungs.values() for name in rung["dropped"]}

    def _left(self) -> list[str]:
        return [name for name in self.runs if name not in self.failed | self.dropped]

    def run(self, stop: Callable[[], bool]) -> None:
        """Make all steps that are left. A run that fails stops alone; `stop` says whether all are to."""
        page = LivePage(self.output, [self.output / name for name in self.runs])
        with locked(self.output), page, self.progress:
            self._write()
            for until in [*(self.halving.at if self.halving else ()), None]:
                if str(until) in self.rungs:
                    continue
                names = self._left()
                if len(names) >= self._processes > 1:
                    self._advance_apart(names, until, stop, page)
                else:
                    self._advance(names, until, stop, page.refresh)
                if stop() or self.stopped or not self._left():
                    return
                if until is not None:
                    self._halve(until)

    def _advance_apart(self, names: list[str], until: int | None, stop: Callable[[], bool], page: LivePage) -> None:
        """Let each of some processes advance a share of the runs."""
        context = multiprocessing.get_context("fork")
        asked, open_ = mmap.mmap(-1, 1), dict[Any, tuple[list[str], Any]]()  # no lock that a killed process keeps
        for i in range(self._processes):
            ours, into = context.Pipe(duplex=False)
            share = names[i :: self._processes]
            process = context.Process(
                target=self._advance_share, args=(share, until, lambda: bool(asked[0]) or stop(), into)
            )
            process.start()
            into.close()
            open_[ours] = share, process
        try:
            while open_:
                for news in list[Any](wait(list(open_), timeout=0.2)):
                    share, process = open_[news]
                    try:
                        kind, *told = json.loads(news.recv_bytes())
                    except EOFError:  # it has ended without having said so
                        kind, told = "end", [[name for name in share if not (self.output / name / "final").is_dir()]]
                        process.join()
                        self.progress.tell(f"a process ended by itself ({process.exitcode}) with {', '.join(*told)}")
                    if kind == "note":
                        self.progress.note(*told)
                        page.refresh()
                    else:
                        del open_[news]
                        self.failed |= set(told[0])
                        self.stopped = self.stopped or told[1:] == [True]
                if stop() or self.stopped:
                    asked[0] = 1
        finally:
            for _, process in open_.values():
                process.kill()

    def _advance_share(self, names: list[str], until: int | None, stop: Callable[[], bool], into: Connection) -> None:
        """Advance some of the runs in a process of their own, on one thread, and tell of it."""
        _begin_process()
        tell = lambda *words: into.send_bytes(json.dumps(words).encode())  # noqa: E731
        self.at_once = max(1, self.at_once // self._processes)
        self._note = functools.partial(tell, "note")
        self._advance(names, until, stop, lambda: None)
        tell("end", sorted(self.failed & {*names}), stop())

    def _advance(
        self, names: list[str], until: int | None, stop: Callable[[], bool], after: Callable[[], None]
    ) -> None:
        """Let runs take turns until each has made so many steps, or all; a few at once."""
        waiting, turns = deque(names), dict[str, Turns[None]]()
        with contextlib.ExitStack() as stack:
            while waiting or turns:
                while waiting and len(turns) < self.at_once:
                    name = waiting.popleft()
                    turns[name] = stack.enter_context(contextlib.closing(self._turns(name, until, stop)))
                self._step(turns)
                after()

    def _trainer(self, name: str) -> RlTrainer:
        shares = self.runs[name].method in ("hydra_ppo", "j_hydra_ppo")
        return RlTrainer(self.runs[name], base=self.base if shares else None)

    def _step(self, turns: dict[str, Turns[None]]) -> None:
        """Let each run make a step, and drop those that end. Passes that they wait for at a time are made together."""
        given = dict[str, Results].fromkeys(turns)
        while given:
            wanted, before = dict[str, Wanted](), len(turns)
            for name, results in given.items():
                try:
                    asked = turns[name].send(results)
                    if asked is not None:
                        wanted[name] = asked
                    continue
                except (StopIteration, RunStopped):
                    pass
                except (EngineError, OSError) as error:
                    self.failed.add(name)
                    fail(f"sweep, run {name}", error, 1)
                del turns[name]
            if len(turns) < before:
                gc.collect()
            given = self._make(wanted)

    def _make(self, wanted: dict[str, Wanted]) -> dict[str, Results]:
        """Make the passes that runs want where it is several that can share one; what becomes of all."""
        given = dict[str, Results].fromkeys(wanted)
        names = [name for name in wanted if name in self._joint]
        if len(names) > 1:
            passes = [joint.Pass(policy=self._joint[name], **wanted[name]) for name in names]
            given |= zip(names, joint.attempt(self.base, passes), strict=True)
        return given

    def _turns(self, name: str, until: int | None, stop: Callable[[], bool]) -> Turns[None]:
        """The turns of one run, whose policy is in memory until it ends."""
        trainer = self._ready.pop(name, None) or self._trainer(name)
        if stop() or trainer.finished() or (until is not None and trainer.state.step >= until):
            return
        asked = lambda: stop() or (until is not None and trainer.state.step >= until)  # noqa: E731
        note = functools.partial(self._note, name, trainer.total_steps)
        with contextlib.ExitStack() as stack:
            shared = trainer.model.backbone().model is self.base.backbone().model
            exact = trainer.kernels.exact and self.base.backbone().kernels.exact
            if shared and exact and not is_gpu(self.base.device):  # no GPU has run passes of several runs at once
                policy = self._policies.adopt(f"run-{next(self._numbers)}", trainer.model)
                stack.callback(self._policies.remove, policy.name)
                self._joint[name] = policy
                stack.callback(self._joint.pop, name)
            turns, results = stack.enter_context(contextlib.closing(trainer.turns(note, asked))), None
            while True:
                with trainer.kernels.used():
                    try:
                        wanted = turns.send(results)
                    except StopIteration:
                        return
                results = yield wanted

    def _halve(self, step: int) -> None:
        """Drop the groups of runs that did worse than others in the steps since the last time."""
        assert self.halving is not None
        metric, sign = self.halving.by.removeprefix("-"), -1 if self.halving.by.startswith("-") else 1
        since = max([int(before) for before in self.rungs], default=0)
        names, means = self._left(), list[tuple[float, list[str]]]()
        for places in groups_of([self.runs[name].to_dict() for name in names]):
            group = [names[place] for place in places]
            points = [p for name in group for p in read_columns(self.output / name / METRICS_FILE).numbers(metric)]
            values = [sign * value for at, value in points if since < at <= step]
            means.append((fmean(values or [-math.inf]), group))
        if all(math.isinf(mean) for mean, _ in means):
            raise ConfigError(f"halving: expected by to be a metric of steps {since + 1} to {step}, got {metric!r}")
        means.sort(key=lambda each: each[0], reverse=True)
        dropped = [name for _, group in means[math.ceil(self.halving.keep * len(means)) :] for name in group]
        self.rungs[str(step)] = {"dropped": dropped}
        self._write()
        self.progress.tell(f"step {step}: {', '.join(dropped) or 'no run'} dropped by {self.halving.by}")

    def _write(self) -> None:
        write_json_atomic(self.output / SWEEP_FILE, self._record)


def _begin_process() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # whatever ends the sweep ends this
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, which the sweep hears as well
    torch.set_num_threads(1)  # OpenMP's other threads are not forked
