"""`rlhf-engine sweep`: many runs of `train` on one base in one process, which take turns of a step.

Each run is what `train` makes of the same options: the same floats, folder and page. The folder of the sweep has these
folders, a page of all, and sweep.json with the options of every run and what was dropped. Whatever ends a sweep, the
same command goes on with the runs that are not done.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import math
import sys
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rlhf_engine.commands.common import check_kernels, prepare, print_what_was_left_out
from rlhf_engine.commands.main import fail
from rlhf_engine.config.sweep import Grid, SweepConfig, group_of, read_grid
from rlhf_engine.data import Tally
from rlhf_engine.devices import DTYPES, resolve_device
from rlhf_engine.errors import ConfigError, EngineError, RunStopped, as_request_errors
from rlhf_engine.hydra import HydraModel, RoleSpec
from rlhf_engine.runs.folder import METRICS_FILE, locked, require_unlocked
from rlhf_engine.runs.headline import numbers
from rlhf_engine.runs.metrics import read_metrics, write_json_atomic
from rlhf_engine.runs.page import PAGE_FILE, LivePage
from rlhf_engine.runs.progress import StopSignals, SweepProgress
from rlhf_engine.training.rl import RlTrainer

SWEEP_FILE = "sweep.json"
_ENDED = object()


def run(config: SweepConfig) -> int:
    """Make what is left of all runs; 1 where one has failed, as its exit code would be."""
    grid = read_grid(config.grid)
    first = next(iter(grid.runs.values()))
    prepare(first.kernels)
    with as_request_errors():
        check_kernels(first.kernels, resolve_device(first.device).type, DTYPES[first.dtype])
        sweep = Sweep(grid, Path(config.output_dir).absolute())
    with StopSignals() as signals:
        sweep.run(signals.asked)
    if signals.asked():
        print("rlhf-engine sweep: stopped; the same command goes on", file=sys.stderr)
        return signals.exit_code
    total, dropped, failed = len(sweep.runs), len(sweep.dropped), len(sweep.failed)
    print(f"{total - dropped - failed} of {total} runs done, {dropped} dropped, {failed} failed")
    print(f"page {sweep.output / PAGE_FILE}")
    return 1 if sweep.failed else 0


class Sweep:
    """The runs of a grid on one base."""

    def __init__(self, grid: Grid, output: Path) -> None:
        """Load the base, and find everything that can be wrong with any run before the first step of one."""
        self.output, self.halving = output, grid.halving
        self.runs = {
            name: replace(run, output_dir=str(output / name), resume_from_checkpoint="auto")
            for name, run in grid.runs.items()
        }
        self.at_once = grid.at_once or len(self.runs)
        self.failed = set[str]()
        self.rungs: dict[str, Any] = {}
        """What became of the runs after the steps of `halving`, by step."""
        require_unlocked(self.output)
        self._read_record()
        first = next(iter(self.runs.values()))
        self.base = HydraModel.from_pretrained(
            first.model_name_or_path,
            roles={"reference": RoleSpec()},
            dtype=DTYPES[first.dtype],
            device=resolve_device(first.device),
            quantization=first.quantization,
        )
        self.base.backbone().base_hash()  # once for all
        self._ready: dict[str, RlTrainer] = {}
        self.progress, reports = SweepProgress(), dict[str, Tally]()
        for name in self._left():
            trainer = RlTrainer(self.runs[name], base=self.base)
            last = self.halving.at[-1] if self.halving else 0
            if last >= trainer.total_steps:
                raise ConfigError(f"halving: expected at below the {trainer.total_steps} steps of {name}, got {last}")
            self.progress.add(name, trainer.total_steps, trainer.state.step)
            reports |= {report.text(): report for report in trainer.reports.values()}
            if len(self._ready) < self.at_once:
                self._ready[name] = trainer
        print_what_was_left_out(reports.values())

    def _read_record(self) -> None:
        """Take up what an earlier process has decided. Raises ConfigError where its runs have other options."""
        options = json.loads(json.dumps({name: run.to_dict() for name, run in self.runs.items()}))
        path = self.output / SWEEP_FILE
        held = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"runs": {}, "rungs": {}}
        for name in options.keys() & held["runs"].keys():
            for option, value in options[name].items():
                if (before := held["runs"][name].get(option)) != value:
                    where = f"of run {name} in {path}; another output_dir begins anew"
                    raise ConfigError(f"{option}: expected {before!r}, that {where}, got {value!r}")
        halving = None if self.halving is None else self.halving.to_dict()
        self.rungs = held["rungs"]
        if self.rungs and halving != held["halving"]:
            raise ConfigError(
                f"halving: expected {held['halving']}, by which runs in {path} were dropped, got {halving}"
            )
        self._record = {"runs": held["runs"] | options, "halving": halving}

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
                self._advance(until, stop, page)
                if stop():
                    return
                if until is not None:
                    self._halve(until)

    def _advance(self, until: int | None, stop: Callable[[], bool], page: LivePage) -> None:
        """Let runs take turns until each has made so many steps, or all; a few at once."""
        waiting, turns = deque(self._left()), dict[str, Generator[None, None, None]]()
        with contextlib.ExitStack() as stack:
            while waiting or turns:
                while waiting and len(turns) < self.at_once:
                    name = waiting.popleft()
                    turns[name] = stack.enter_context(contextlib.closing(self._turns(name, until, stop)))
                for name, turn in list(turns.items()):
                    try:
                        next(turn)
                        page.refresh()
                        continue
                    except (StopIteration, RunStopped):
                        pass
                    except (EngineError, OSError) as error:
                        self.failed.add(name)
                        fail(f"sweep, run {name}", error, 1)
                    del turns[name]
                    gc.collect()  # a trainer and what looks at it hold each other, and the policy

    def _turns(self, name: str, until: int | None, stop: Callable[[], bool]) -> Generator[None, None, None]:
        """The turns of one run, whose policy is in memory until it ends."""
        trainer = self._ready.pop(name, None) or RlTrainer(self.runs[name], base=self.base)
        if stop() or trainer.finished() or (until is not None and trainer.state.step >= until):
            return
        asked = lambda: stop() or (until is not None and trainer.state.step >= until)  # noqa: E731
        with contextlib.closing(trainer.turns(functools.partial(self.progress.note, name), asked)) as turns:
            while True:
                with trainer.kernels.used():
                    if next(turns, _ENDED) is _ENDED:
                        return
                yield

    def _halve(self, step: int) -> None:
        """Drop the groups of runs that did worse than others in the steps since the last time."""
        assert self.halving is not None
        metric, sign = self.halving.by.removeprefix("-"), -1 if self.halving.by.startswith("-") else 1
        since = max([int(before) for before in self.rungs], default=0)
        groups: dict[str, list[str]] = {}
        for name in self._left():
            groups.setdefault(group_of(self.runs[name]), []).append(name)
        means = dict[str, float]()
        for group, names in groups.items():
            rows = [row for name in names for row in read_metrics(self.output / name / METRICS_FILE)]
            if values := [value for at, value in numbers(rows, metric) if since < at <= step]:
                means[group] = fmean(values)
        if not means:
            raise ConfigError(f"halving: expected by to be a metric of steps {since + 1} to {step}, got {metric!r}")
        ranked = sorted(groups, key=lambda group: sign * means.get(group, -sign * math.inf), reverse=True)
        kept = math.ceil(self.halving.keep * len(ranked))
        dropped = [name for group in ranked[kept:] for name in groups[group]]
        told = {name: means.get(group) for group, names in groups.items() for name in names}
        self.rungs[str(step)] = {"dropped": dropped, self.halving.by: told}
        self._write()
        self.progress.tell(f"step {step}: {', '.join(dropped) or 'no run'} dropped by {self.halving.by}")

    def _write(self) -> None:
        write_json_atomic(self.output / SWEEP_FILE, {**self._record, "rungs": self.rungs})
