#!/usr/bin/env python
"""A grid of runs, one record each; stopped at any point, it goes on where it was.

    python bench/studies/sweep.py bench/studies/sweeps/sharing_demo.yaml --out bench/results/cpu/sharing_demo
    python bench/studies/sweep.py bench/studies/sweeps/sharing_stories.yaml --out DIR -- --model_name_or_path MODEL
    python bench/studies/sweep.py GRID.yaml --out DIR --jobs 2  # two seeds of a demo or recipe side by side
    python bench/studies/sweep.py GRID.yaml --out DIR --summary  # only the table and the plot of what is there

A grid file names the command (`train`, `demo` or `recipe`), flags that all runs share, and the axes of the grid. It
also names the metrics whose curves are kept and the numbers that the table compares:

    command: train
    flags: {config: examples/stories260k.yaml}
    grid: {method: [lora_ppo, hydra_ppo], seed: [0, 1, 2]}
    curves: [reward, kl]
    final: [eval/reward, eval/kl]
    with: {algorithm: {remax: {num_mini_batches: 1}}}     # flags that come with a value of an axis
    against: [[kl, reward], [seconds, reward]]            # plotted in place of curves over steps: x, y

    reach: {reward: 2.0}                                  # seconds until the smoothed curve of a metric is there

`seconds` is the time of a run's steps so far; it needs `seconds/step` among the curves. A pair of `against` may also
be two numbers of `final`: a point for each run, and the mean of each group with its 95 % interval.

With `command: recipe` a run is a whole recipe of examples/recipes. The flag (or axis) `recipe` names it; the others are
`OPTION` or `STAGE.OPTION`, as of its --set. With a flag `from`, the recipe runs whole once, in runs/sweeps/GRID/start,
and every run takes the stages before `from` from there. Curves are of its `train` stage. `final` names metrics of that
stage's last step, `MODEL/FIGURE` of the evaluation, and `STAGE.METRIC` of the step that a reward model was kept at.

    python bench/studies/sweep.py bench/studies/sweeps/async_ticketing.yaml --out DIR -- --data DIR2 --base MODEL

Flags after `--` go to every run and stay out of the records (folders of this machine). `rlhf-engine sweep` makes the
runs of `train` in one process in runs/sweeps/<grid>: all at once, or one after another where `seconds/step` is among
the curves, since passes of several runs together would be timed as each one's. A `demo` or `recipe` is several commands
and has a process of its own. The record OUT/<run>.json is written when a run ends; a run that has one is not repeated.
`demo` runs of one seed share the supervised model that the first of them trains. --jobs divides seeds, not runs. Writes
OUT/summary.md and OUT/curves.png: lines are means over the seeds, bands span them.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from rlhf_engine.config.parser import config_of
from rlhf_engine.config.sweep import SEED, GridFile, run_name
from rlhf_engine.runs.curves import smooth
from rlhf_engine.runs.metrics import read_metrics, write_json_atomic
from rlhf_engine.runs.statistics import mean_of_runs

WORK = Path("runs/sweeps")
RECIPES = Path(__file__).resolve().parents[2] / "examples" / "recipes"
_OWN = {"command", "curves", "final", "against", "reach"}
"""Fields of a grid file that `rlhf-engine sweep` has not."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A grid file."""

    name: str
    command: str
    flags: dict[str, Any]
    axes: dict[str, list[Any]]
    curves: list[str]
    final: list[str]
    presets: dict[str, dict[Any, dict[str, Any]]]
    """axis → value → flags"""
    against: list[tuple[str, str]]
    """(x, y) of each panel"""
    reach: dict[str, float]
    """metric → level whose time is told"""

    @classmethod
    def read(cls, path: Path) -> Grid:
        """Read a grid file. Raises ValueError for fields that are missing, unknown or empty."""
        found = yaml.safe_load(path.read_text())
        file = config_of(GridFile, {name: value for name, value in found.items() if name not in _OWN}, str(path))
        flags, presets = file.flags or {}, file.with_value or {}
        if found.get("command") not in ("train", "demo", "recipe"):
            raise ValueError(f"{path}: expected command train, demo or recipe, got {found.get('command')!r}")
        recipes = file.grid.get("recipe") or [flags[name] for name in ("recipe",) if name in flags]
        if found["command"] == "recipe" and (not recipes or ("from" in flags and len(recipes) > 1)):
            raise ValueError(f"{path}: recipe: expected a flag or an axis, of one value with `from`, got {recipes}")
        curves = found.get("curves") or []
        known = {"seconds"} if "seconds/step" in curves else set()
        for pair in found.get("against") or []:
            final = found.get("final") or []
            if len(pair) != 2 or not (set(pair) <= known | set(curves) or set(pair) <= set(final)):
                raise ValueError(
                    f"{path}: against: expected pairs of {sorted(known | set(curves))} or of {sorted(final)}, "
                    f"got {pair}"
                )
        reach = found.get("reach") or {}
        if reach and not {"seconds/step", *reach} <= set(curves):
            raise ValueError(
                f"{path}: reach: expected metrics among the curves, with seconds/step, got {sorted(reach)}"
            )
        return cls(
            name=path.stem,
            command=found["command"],
            flags=flags,
            axes=file.grid,
            curves=curves,
            final=found.get("final") or [],
            presets=presets,
            against=[(x, y) for x, y in found.get("against") or []],
            reach=reach,
        )

    def runs(self) -> list[dict[str, Any]]:
        """Every point of the grid; the seed turns slowest, so that a stopped sweep has compared something."""
        names = sorted(self.axes, key=lambda axis: axis != SEED)
        points = itertools.product(*(self.axes[name] for name in names))
        return [dict(zip(names, point, strict=True)) for point in points]

    def run_name(self, point: Mapping[str, Any]) -> str:
        """A file's name for a point, in the order of the grid file."""
        return run_name(self.axes, point)


def flags_of(values: Mapping[str, Any]) -> list[str]:
    """Flags of some options: `--name value …`."""
    return [text for name, value in values.items() for text in (f"--{name}", str(value))]


def command_of(grid: Grid, point: dict[str, Any]) -> list[str]:
    """The command of a run, without folders of this machine."""
    presets = [grid.presets.get(axis, {}).get(value, {}) for axis, value in point.items()]
    extra = {name: value for preset in presets for name, value in preset.items()}
    if grid.command == "recipe":
        values = {**grid.flags, **extra, **point}
        name, first = values.pop("recipe"), values.pop("from", None)
        given = {option: "null" if value is None else value for option, value in values.items()}
        changes = [text for option, value in given.items() for text in ("--set", f"{option}={value}")]
        return [str(name), *([] if first is None else ["--from", str(first)]), *changes]
    return [grid.command, *flags_of({**grid.flags, **extra}), *flags_of(point)]


def shown_command(grid: Grid, point: dict[str, Any]) -> str:
    """A run's command as its record has it."""
    program = ["python", "examples/recipes/run.py"] if grid.command == "recipe" else ["rlhf-engine"]
    return shlex.join([*program, *command_of(grid, point)])


def read_record(grid: Grid, point: dict[str, Any], path: Path) -> dict[str, Any]:
    """A run's record. Raises SystemExit for one that other flags have made."""
    record: dict[str, Any] = json.loads(path.read_text())
    command = shown_command(grid, point)
    if record["command"] != command:
        raise SystemExit(
            f"{path}: expected a record of `{command}`, got one of `{record['command']}`; remove it, or give another "
            "--out"
        )
    return record


def work_folder(grid: Grid, point: dict[str, Any], extra: list[str]) -> Path:
    """The folder of a run while it lasts. A run with other flags is another run and does not resume it."""
    flags = shlex.join([*command_of(grid, point), *extra])
    return WORK / grid.name / f"{grid.run_name(point)}-{hashlib.sha256(flags.encode()).hexdigest()[:8]}"


def run_sweep(grid: Grid, lacking: Mapping[Path, dict[str, Any]], extra: list[str]) -> None:
    """Let `rlhf-engine sweep` make the runs, given by the paths of their records, which it goes on with."""
    folder, file = WORK / grid.name, WORK / f"{grid.name}.yaml"
    values = {axis: [v for v in vs if any(p[axis] == v for p in lacking.values())] for axis, vs in grid.axes.items()}
    given = {flag.removeprefix("--"): yaml.safe_load(value) for flag, value in zip(*[iter(extra)] * 2, strict=True)}
    presets = {a: {v: more for v, more in found.items() if v in values[a]} for a, found in grid.presets.items()}
    at_once = {"runs_at_once": 1} if "seconds/step" in grid.curves else {}
    WORK.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump({"flags": grid.flags | given, "grid": values, "with": presets, **at_once}))
    try:
        run_command(grid, ["sweep", str(file)], folder)
    finally:
        for path, point in lacking.items():
            if (folder / grid.run_name(point) / "final").is_dir():
                write_record(grid, point, path, folder / grid.run_name(point), {})
    shutil.rmtree(folder)


def run_seed(grid: Grid, runs: Mapping[Path, dict[str, Any]], extra: list[str], jobs: int) -> None:
    """Run one seed's points, given by the paths of their records, one after the other.

    `jobs` seeds share the cores. Each demo starts from the supervised model of the first, whose folder is kept until
    the last has its record: at equal seeds all of them would train the same one.
    """
    start = WORK / grid.name / "start" if "from" in grid.flags else None
    for path, point in runs.items():
        folder = run_point(grid, point, extra, path, jobs, start)
        if grid.command == "demo" and start is None:
            start = folder
        else:
            shutil.rmtree(folder)
    if start is not None and grid.command == "demo":
        shutil.rmtree(start)


def run_point(
    grid: Grid, point: dict[str, Any], extra: list[str], record_path: Path, jobs: int, start: Path | None
) -> Path:
    """Make one run in a process of its own and write its record. Returns the run's folder."""
    print(grid.run_name(point), file=sys.stderr)
    folder, shown = work_folder(grid, point, extra), command_of(grid, point)
    if grid.command == "demo" and folder.exists():
        shutil.rmtree(folder)  # a demo resumes nothing
    began = time.perf_counter()
    run_command(grid, [*shown, *extra, *([] if start is None else ["--start", str(start)])], folder, jobs)
    if grid.command == "demo":
        inner, found = folder / "rl", json.loads((folder / "result.json").read_text())
    else:
        stage = [stage for stage, found in stages_of(shown[0]).items() if found["command"] == "train"][-1]
        inner, found = folder / stage, recipe_numbers(shown[0], folder)
    write_record(grid, point, record_path, inner, found, seconds=time.perf_counter() - began, side_by_side=jobs)
    return folder


def write_record(
    grid: Grid, point: dict[str, Any], path: Path, inner: Path, numbers: Mapping[str, Any], **more: Any
) -> None:
    """Write the record of a run whose RL is in `inner`. numbers: those beside the metrics of its last step."""
    rows = read_metrics(inner / "metrics.jsonl")
    facts = json.loads((inner / "run.json").read_text())
    final: dict[str, Any] = {**rows[-1], **numbers}
    lacking = [name for name in grid.final if name not in final]
    if lacking:
        raise SystemExit(f"final: expected names among {sorted(final)}, got {lacking}")
    write_json_atomic(
        path,
        {
            "run": point,
            "command": shown_command(grid, point),
            "final": {name: final[name] for name in grid.final},
            "curves": {"step": [row["step"] for row in rows], **{n: [row.get(n) for row in rows] for n in grid.curves}},
            **more,
            "git_commit": facts["git_commit"],
            "versions": facts["versions"],
            "device": facts["device_name"],
            "resumed_at_step": facts["resumed_at_step"],
        },
    )


def run_command(grid: Grid, argv: list[str], folder: Path, jobs: int = 1) -> None:
    """Run a command of the grid in its folder, with its share of the cores."""
    program = [str(RECIPES / "run.py")] if grid.command == "recipe" else ["-m", "rlhf_engine"]
    share = {"OMP_NUM_THREADS": str(max(len(os.sched_getaffinity(0)) // jobs, 1))} if jobs > 1 else {}
    command = [sys.executable, *program, *argv, "--output_dir", str(folder)]
    done = subprocess.run(command, env=os.environ | share, stdout=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{folder}: `{argv[0]}` ended with exit code {done.returncode}; run this again to go on")


def stages_of(recipe: str) -> dict[str, dict[str, Any]]:
    """Stages of a recipe, by name."""
    found: dict[str, dict[str, Any]] = yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text())["stages"]
    return found


def recipe_numbers(recipe: str, folder: Path) -> dict[str, Any]:
    """`MODEL/FIGURE` of a recipe's evaluation, and `STAGE.METRIC` of the kept step of each reward model that it ran."""
    models = json.loads((folder / "evaluation" / "results.json").read_text())["models"]
    found = {
        f"{model}/{name}": value[0] if isinstance(value, list) else value
        for model, figures in models.items()
        for name, value in figures.items()
    }
    for stage, of in stages_of(recipe).items():
        if of["command"] == "reward" and (folder / stage).is_dir():
            kept = json.loads((folder / stage / "run.json").read_text())["result"]["final_step"]
            for row in read_metrics(folder / stage / "metrics.jsonl"):
                found |= {f"{stage}.{name}": value for name, value in row.items() if row["step"] == kept}
    return found


def run_start(grid: Grid, extra: list[str]) -> Path:
    """Run the grid's recipe whole, for the stages that its runs share. Returns its folder, which stays."""
    whole = replace(grid, flags={name: value for name, value in grid.flags.items() if name != "from"})
    argv = command_of(whole, {"recipe": grid.axes["recipe"][0]} if "recipe" in grid.axes else {})
    folder = WORK / grid.name / "start"
    run_command(grid, [*argv, *extra], folder)
    return folder


def groups(grid: Grid, records: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Records by everything but their seed."""
    found: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        name = " ".join(str(record["run"][axis]) for axis in grid.axes if axis != SEED)
        found.setdefault(name, []).append(record)
    return found


def _axes(grid: Grid) -> str:
    """Names of the axes by which runs are grouped."""
    return " ".join(axis for axis in grid.axes if axis != SEED)


def summarise(grid: Grid, records: list[dict[str, Any]], out: Path) -> str:
    """summary.md and curves.png; returns the table."""
    columns = [*grid.final, *(f"seconds to {metric} {level:g}" for metric, level in grid.reach.items())]
    axes = _axes(grid)
    rows = {}
    for name, members in groups(grid, records).items():
        cells = [_interval([member["final"][metric] for member in members], signed=False) for metric in grid.final]
        cells += [_times([seconds_to(m, metric, level) for m in members]) for metric, level in grid.reach.items()]
        rows[name] = [str(len(members)), *cells]
    table = _table([axes, "runs", *columns], rows)
    found = [record["git_commit"] for record in records if record["git_commit"]]
    commits = sorted({c["commit"][:12] + (" with changed files" if c["dirty"] else "") for c in found})
    text = (
        f"# {grid.name}\n\nMeans over the grid's runs, with the 95 % interval of each mean (Student's t). "
        f"Commit {', '.join(commits)}.\n\n{table}\n"
    )
    first, pairs = _paired(grid, records)
    if pairs and grid.final:
        text += f"\nDifference from `{first}` in runs of the same seed.\n\n"
        text += _table([axes, "pairs", *grid.final], pairs) + "\n"
    (out / "summary.md").write_text(text)
    if grid.against:
        plot_against(grid, records, out / "curves.png")
    elif grid.curves:
        plot(grid, records, out / "curves.png")
    return table


def _interval(values: list[float], *, signed: bool) -> str:
    """A mean and half the width of its 95 % interval; the mean alone of a single run."""
    mean = f"{statistics.fmean(values):{'+' if signed else ''}.4g}"
    return mean if len(values) == 1 else f"{mean} ± {_half_width(values):.2g}"


def _half_width(values: list[float]) -> float:
    """Half the width of the 95 % interval of a mean of two or more values."""
    mean = mean_of_runs(values)
    return mean.value - mean.low


def _paired(grid: Grid, records: list[dict[str, Any]]) -> tuple[str, dict[str, list[str]]]:
    """The first group's name, and a row per other group: differences in runs of the same seed."""
    (first, base), *others = groups(grid, records).items()
    by_seed = {record["run"].get(SEED): record["final"] for record in base}
    rows = {}
    for name, members in others:
        pairs = [(m["final"], by_seed[m["run"].get(SEED)]) for m in members if m["run"].get(SEED) in by_seed]
        if pairs:
            cells = [_interval([own[metric] - its[metric] for own, its in pairs], signed=True) for metric in grid.final]
            rows[name] = [str(len(pairs)), *cells]
    return first, rows


def _table(header: list[str], rows: Mapping[str, list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    return "\n".join([*lines, *(f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows.items())])


def seconds_to(record: dict[str, Any], metric: str, level: float) -> float | None:
    """Seconds of a run's steps until a smoothed curve is at a level or above; None if it never is."""
    reached = [s for s, value in zip(_curve(record, "seconds"), _curve(record, metric), strict=True) if value >= level]
    return reached[0] if reached else None


def _times(found: list[float | None]) -> str:
    times = [seconds for seconds in found if seconds is not None]
    if len(times) < len(found):
        return f"{len(times)} of {len(found)} runs" if times else "never"
    spread = f" ± {statistics.stdev(times):.2g}" if len(times) > 1 else ""
    return f"{statistics.fmean(times):.1f}{spread} ({', '.join(f'{seconds:.1f}' for seconds in times)})"


def _panels(grid: Grid, count: int, size: tuple[float, float], path: Path) -> Iterator[Any]:
    """Axes of panels side by side, whose picture is written after the last."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(size[0] * count, size[1]), layout="constrained")
    FigureCanvasAgg(figure)
    for i in range(count):
        axes = figure.add_subplot(1, count, i + 1)
        yield axes
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, title=_axes(grid), title_fontsize=8)
    figure.savefig(path, dpi=130)


def plot_against(grid: Grid, records: list[dict[str, Any]], path: Path) -> None:
    """One panel per pair: smoothed means of each group's runs, y over x, a dot at the end; thin lines are the runs."""
    for axes, (x, y) in zip(_panels(grid, len(grid.against), (6.0, 4.2), path), grid.against, strict=True):
        for name, members in groups(grid, records).items():
            if x in grid.final and y in grid.final:
                _plot_points(axes, name, [[member["final"][metric] for member in members] for metric in (x, y)])
                continue
            lines = [(_curve(member, x), _curve(member, y)) for member in members]
            mean_x, mean_y = (
                [statistics.fmean(column) for column in zip(*side, strict=True)] for side in zip(*lines, strict=True)
            )
            (drawn,) = axes.plot(mean_x, mean_y, label=name)
            axes.plot(mean_x[-1:], mean_y[-1:], "o", color=drawn.get_color(), markersize=5)
            for line_x, line_y in lines:
                axes.plot(line_x, line_y, color=drawn.get_color(), alpha=0.25, linewidth=0.7)
        axes.set_xlabel(x)
        axes.set_ylabel(y)


def _plot_points(axes: Any, name: str, values: list[list[float]]) -> None:
    """A point for each run, and their mean with the 95 % intervals of both numbers."""
    (drawn,) = axes.plot(*values, ".", alpha=0.4, markersize=5)
    spread = [_half_width(side) if len(side) > 1 else 0.0 for side in values]
    axes.errorbar(
        *([statistics.fmean(side)] for side in values), xerr=spread[0], yerr=spread[1], fmt="o",
        color=drawn.get_color(), markersize=6, capsize=3, label=name,
    )  # fmt: skip


def _curve(record: dict[str, Any], name: str) -> list[float]:
    """A run's curve, smoothed; `seconds` adds up."""
    if name == "seconds":
        return list(itertools.accumulate(record["curves"]["seconds/step"]))
    return smooth(record["curves"][name])


def plot(grid: Grid, records: list[dict[str, Any]], path: Path) -> None:
    """One panel per curve: smoothed mean of each group's runs over the steps, within the span of its runs."""
    for axes, metric in zip(_panels(grid, len(grid.curves), (5.0, 3.6), path), grid.curves, strict=True):
        for name, members in groups(grid, records).items():
            steps = members[0]["curves"]["step"]
            lines = [smooth(member["curves"][metric]) for member in members]
            columns = list(zip(*lines, strict=True))
            (drawn,) = axes.plot(steps, [statistics.fmean(column) for column in columns], label=name)
            span = ([min(column) for column in columns], [max(column) for column in columns])
            axes.fill_between(steps, *span, color=drawn.get_color(), alpha=0.2, linewidth=0)
        axes.set_title(metric, fontsize=11)
        axes.set_xlabel("step")


def main() -> None:
    argv = sys.argv[1:]
    extra = argv[argv.index("--") + 1 :] if "--" in argv else []
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("grid", type=Path, help="YAML file of the grid")
    parser.add_argument("--out", type=Path, required=True, help="folder of the records")
    parser.add_argument("--jobs", type=int, default=1, help="seeds side by side, which share the cores")
    parser.add_argument("--summary", action="store_true", help="start no runs")
    arguments = parser.parse_args(argv[: len(argv) - len(extra) - (1 if "--" in argv else 0)])
    grid = Grid.read(arguments.grid)
    if arguments.jobs < 1 or (arguments.jobs > 1 and grid.command == "train"):
        raise SystemExit(f"--jobs: expected a number above 0, and 1 for train, got {arguments.jobs}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    points = grid.runs()
    paths = [arguments.out / f"{grid.run_name(point)}.json" for point in points]
    # what is there is read before any time is spent
    found = {path: read_record(grid, point, path) for point, path in zip(points, paths, strict=True) if path.exists()}
    if not arguments.summary:
        lacking = {path: point for path, point in zip(paths, points, strict=True) if path not in found}
        if lacking and "from" in grid.flags:
            run_start(grid, extra)
        seeds: dict[Any, dict[Path, dict[str, Any]]] = {}
        if lacking and grid.command == "train":
            run_sweep(grid, lacking, extra)
        for path, point in lacking.items() if grid.command != "train" else ():
            seeds.setdefault(point.get(SEED), {})[path] = point
        with ThreadPoolExecutor(arguments.jobs) as pool:
            try:
                list(pool.map(lambda runs: run_seed(grid, runs, extra, arguments.jobs), seeds.values()))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        found |= {path: read_record(grid, point, path) for path, point in lacking.items()}
    records = [found[path] for path in paths if path in found]
    if not records:
        raise SystemExit(f"out: expected records of this grid in {arguments.out}, got none")
    print(summarise(grid, records, arguments.out))


if __name__ == "__main__":
    main()
