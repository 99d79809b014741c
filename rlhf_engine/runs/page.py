"""A page of one run or several: one HTML file, which needs nothing but a browser.

Data go into the page as JSON, texts of a run reach it as text and never as markup. The page loads nothing. It holds
neither paths of the machine nor addresses, so that the file may be given to others as it is. Every text of a run is
escaped by jinja2. A page runs one script, by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from rlhf_engine.errors import ConfigError
from rlhf_engine.io import writing
from rlhf_engine.runs.curves import PANELS, has_signal
from rlhf_engine.runs.folder import METRICS_FILE, RECORD_FILE, SAMPLES_LOG, require_unlocked
from rlhf_engine.runs.headline import Headline, headlines, total_steps
from rlhf_engine.runs.metrics import Columns, SampleLog, Samples, read_columns, write_atomic
from rlhf_engine.runs.text import format_value, show_controls

PAGE_FILE = "page.html"
MOST_POINTS = 500  # most points of a line; where there are more, each point is the mean of several steps
MOST_LOOKS, MOST_TEXT = 40, 1_000_000
"""Most looks at the answers, and most characters in them; where there are more, looks between first and last go."""
SCRIPTS = ("page_chart.js", "page_answers.js", "page.js")  # files of the page's script, in their order
COLOURS = ("#2f6fde", "#d9590f", "#1c9a5b", "#a23bc4", "#b8860b", "#c2185b", "#00838f", "#8a6a5c")
"""Colours of runs, in their order; the script draws with the same."""
_PLACES = ("output_dir", "resume_from_checkpoint", "report_to")
"""Options that say where a run writes; they differ between any two."""
_FEW = 4  # most options that stand before the numbers in a comparison

TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("rlhf_engine", "."), autoescape=True, undefined=jinja2.StrictUndefined,
    trim_blocks=True, lstrip_blocks=True,
)  # fmt: skip
TEMPLATES.filters |= {"visible": show_controls, "number": format_value}
TEMPLATES.tests["contains"] = lambda texts, text: text in texts
TEMPLATES.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "allow_nan": False}
_DRAWN = {name for panel in PANELS for name, _ in panel.lines}
_PATIENCE = 600.0  # seconds without news after which a page no longer reads itself again, unless 20 steps take longer


def write_page(
    runs: Sequence[str | Path],
    out: str | Path,
    *,
    title: str | None = None,
    state: str | None = None,
    refresh: float | None = None,
) -> Path:
    """Write the page of runs' output folders, whole; its path. refresh: seconds after which it is read again."""
    folders = [_run_folder(Path(run)) for run in runs]
    names = _names(folders)
    whole = [_read_run(folder, name, state) for folder, name in zip(folders, names, strict=True)]
    text = _render(whole, title or (names[0] if len(names) == 1 else f"{len(names)} runs"), refresh)
    out = Path(out)
    if out.is_dir():
        raise ConfigError(f"out: expected a file, such as {str(out / 'report.html')!r}, got the folder {str(out)!r}")
    try:
        write_atomic(out, text.encode())
    except OSError as error:
        raise ConfigError(f"out: expected a file that can be written, got {str(out)!r}: {error.strerror}") from error
    return out


def _render(whole: Sequence[tuple[dict[str, Any], list[Headline]]], title: str, refresh: float | None) -> str:
    """The page of some runs, each with its headline numbers."""
    runs, numbers_of = [run for run, _ in whole], [shown for _, shown in whole]
    values: dict[str, list[float]] = {
        name: [x for run in runs if name in run["curves"] for x in run["curves"][name][1]] for name in _DRAWN
    }
    panels = [panel for panel in PANELS if has_signal(panel, [values[name] for name, _ in panel.lines])]
    written = round(time.time())
    seconds = [max(run["curves"]["seconds/step"][1][-20:]) for run in runs if "seconds/step" in run["curves"]]
    names, configs = [run["name"] for run in runs], [run["config"] for run in runs]
    groups = groups_of(configs)
    colours = {place: COLOURS[i % len(COLOURS)] for i, group in enumerate(groups) for place in group}
    return render(
        "runs/runs.html.jinja",
        [f"runs/{name}" for name in SCRIPTS],
        ["runs/page.css"],
        written=written,
        refresh=refresh,
        title=title,
        comparison=comparison(names, configs, numbers_of, colours=colours) if len(runs) > 1 else None,
        groups=comparison(names, configs, numbers_of, groups) if len(groups) < len(runs) else None,
        headline=numbers_of[0],
        data={
            "panels": [{"title": p.title, "unit": p.unit, "lines": [list(line) for line in p.lines]} for p in panels],
            "colours": [colours[place] for place in range(len(runs))],
            "written": written,
            "patience": max([_PATIENCE, *(20 * longest for longest in seconds)]),
            "runs": runs,
        },
    )


def _run_folder(folder: Path) -> Path:
    """A run's output folder, or the one of RL within a demo's."""
    for place in (folder, folder / "rl"):
        if (place / METRICS_FILE).is_file() and (place / RECORD_FILE).is_file():
            return place
    raise ConfigError(f"run: expected a folder with {METRICS_FILE} and {RECORD_FILE}, got {str(folder)!r}")


def _names(folders: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as many as it takes to tell them apart."""
    paths = [folder.resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        raise ConfigError(f"run: expected different folders, got {[str(folder) for folder in folders]}")
    parts = 1
    while len({path.parts[-parts:] for path in paths}) < len(paths):
        parts += 1
    return ["/".join(path.parts[-parts:]) for path in paths]


def _read_run(folder: Path, name: str, state: str | None) -> tuple[dict[str, Any], list[Headline]]:
    try:
        return _whole_run(folder, name, state)
    except ConfigError:
        raise
    except (OSError, ValueError, OverflowError, RecursionError, TypeError, AttributeError, KeyError) as error:
        # files that no run has written so
        raise ConfigError(f"run: expected the files of a run in {str(folder)!r}, got: {error}") from error


def _whole_run(folder: Path, name: str, state: str | None) -> tuple[dict[str, Any], list[Headline]]:
    """Read a run: data that the page's script draws, and the headline numbers."""
    columns = read_columns(folder / METRICS_FILE)
    if not columns.steps:
        raise ConfigError(f"run: expected metrics of at least one step, got none in {str(folder)!r}")
    record = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
    state = state or _state(folder, columns.steps[-1], total_steps(record))
    every, curves = _curves(columns)
    looks = SampleLog(folder / SAMPLES_LOG).read()
    kept = _thinned(looks)
    shown = {
        "name": name, "state": state, "steps": columns.steps[-1], "total": total_steps(record), "every": every,
        "curves": curves, "nonfinite": _not_finite(columns), "damaged": columns.damaged,
        "samples": [asdict(look) for look in kept], "looks": len(looks),
        "config": shareable(record.get("config", {})), "facts": _facts(record),
    }  # fmt: skip
    json.dumps(shown, ensure_ascii=False, allow_nan=False).encode()  # or ValueError: NaN, half a character
    return shown, headlines(columns, record, state)


def _state(folder: Path, steps: int, total: int | None) -> str | None:
    """State of the run in a folder; None where its record does not say how many steps there are to be."""
    try:
        require_unlocked(folder)
    except ConfigError:
        return "running"
    return None if total is None else "done" if steps >= total else "stopped"


def _not_finite(columns: Columns) -> dict[str, Any]:
    """Number of steps with a metric that is not finite, the first of them, and the metrics' names; empty if none."""
    bad = columns.nonfinite
    names = dict.fromkeys(name for each in bad.values() for name in each)
    return {"count": len(bad), "first": min(bad), "names": list(names)} if bad else {}


def _thinned(looks: Sequence[Samples]) -> list[Samples]:
    """First look, last look, and as many evenly between them as the page has room for."""
    if len(looks) < 3:
        return list(looks)
    size = sum(len(text) for look in looks for text in (*look.prompts, *look.completions)) / len(looks)
    n = max(2, min(len(looks), MOST_LOOKS, int(MOST_TEXT / max(1.0, size))))
    return [looks[round(i * (len(looks) - 1) / (n - 1))] for i in range(n)]


def _curves(columns: Columns) -> tuple[int, dict[str, list[list[float]]]]:
    """Steps per point, and metric → [steps, values], with least and most where a point is a mean of several."""
    steps = columns.steps
    every = -(-len(steps) // MOST_POINTS)
    curves: dict[str, list[list[float]]] = {}
    for name, column in columns.names.items():
        groups = [[x for x in column[i : i + every] if x == x] for i in range(0, len(column), every)]
        kept = [(steps[min((i + 1) * every, len(steps)) - 1], values) for i, values in enumerate(groups) if values]
        if name == "step" or not kept:
            continue
        lines = [[sum(values) / len(values) for _, values in kept]]
        if every > 1 and name in _DRAWN:
            lines += [[min(values) for _, values in kept], [max(values) for _, values in kept]]
        curves[name] = [[step for step, _ in kept], *([float(f"{value:.6g}") for value in line] for line in lines)]
    return every, curves


def _facts(record: Mapping[str, Any]) -> dict[str, str]:
    commit = record.get("git_commit") or {}
    hidden = {str(record.get("config", {}).get(name)) for name in _ADDRESSES}
    facts = {
        "started": record.get("started"),
        "command": " ".join("…" if word in hidden else shareable(word) for word in map(str, record.get("command", []))),
        "commit": f"{commit['commit'][:12]}{', with changes' if commit.get('dirty') else ''}"
        if commit.get("commit")
        else None,
        "device": record.get("device_name"),
        "processes": record.get("processes"),
        "resumed at step": record.get("resumed_at_step") or None,
        "base": (record.get("base_hash") or "")[:12] or None,
        **record.get("versions", {}),
    }
    backends = record.get("kernel_backends", {})
    chosen = {op: row.get("auto") for op, row in backends.items() if isinstance(row, dict)}
    facts |= {"kernels": ", ".join(f"{op} {backend}" for op, backend in chosen.items() if backend) or None}
    return {name: str(value) for name, value in facts.items() if value is not None}


_PLACE = re.compile(r"(?<![^\s=:,;'\"(\[{])(?:file://|~[^\s/]*|[A-Za-z]:)?(?:/(?!/)|\\)(?:[^/\\,\n'\"]*[/\\])*")
"""A path from the root or a home folder, up to the last name in it."""
_ADDRESS = re.compile(r"\b(https?|ray|grpc|tcp|ssh)://[^\s/,'\"]+")
_ADDRESSES = ("ray_address",)  # options that are an address without a scheme


def shareable(value: Any) -> Any:
    """A value of a record without what names a machine or a person: folders from the root on, hosts of addresses."""
    if isinstance(value, Mapping):
        return {name: "…" if name in _ADDRESSES and part else shareable(part) for name, part in value.items()}
    if isinstance(value, list):
        return [shareable(part) for part in value]
    if not isinstance(value, str):
        return value
    return _PLACE.sub("…/", _ADDRESS.sub(r"\1://…", value))


def render(
    template: str, scripts: Iterable[str], styles: Iterable[str], *, written: int, refresh: float | None, **values: Any
) -> str:
    """A page. scripts, styles: files of the package; written: time; refresh: seconds until it reads itself again."""
    script, style = ("\n".join(["", *map(_read, scripts)]), "".join(map(_read, styles)))
    return TEMPLATES.get_template(template).render(
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=style,
        written=datetime.fromtimestamp(written, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        refresh=None if refresh is None else f"{refresh:.0f}",
        **values,
    )


def _read(name: str) -> str:
    return resources.files("rlhf_engine").joinpath(name).read_text(encoding="utf-8")


def groups_of(configs: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Places of the runs of each group, which differ in their seed alone."""
    options = [name for name in differing_options(configs) if name != "seed"]
    groups: dict[str, list[int]] = {}
    for place, config in enumerate(configs):
        groups.setdefault(repr([config[name] for name in options]), []).append(place)
    return list(groups.values())


def comparison(
    names: Sequence[str],
    configs: Sequence[Mapping[str, Any]],
    numbers_of: Sequence[Sequence[Headline]],
    groups: Sequence[Sequence[int]] | None = None,
    *,
    colours: Mapping[int, str] | None = None,
) -> dict[str, Any]:
    """Columns and rows of the table that compares runs: options in which they differ, then headline numbers.

    groups: places of runs that are a row together, with means and halves of their 95 % intervals; None: each is one.
    """
    from rlhf_engine.runs.statistics import mean_of_runs  # takes SciPy, which most pages do not need

    rows, by_label = groups or [[i] for i in range(len(names))], [{h.label: h for h in one} for one in numbers_of]
    firsts = [configs[places[0]] for places in rows]
    named = {h.label for one in numbers_of for h in one if not h.is_minor}
    shown = {h.label: h for one in numbers_of for h in one if h.label in named}
    options: list[dict[str, Any]] = [
        {"label": name, "is_option": True, "values": [config[name] for config in firsts], "best": None}
        for name in differing_options(firsts)
        if groups is None or name != "seed"
    ]
    reached: list[dict[str, Any]] = []
    for label, h in shown.items():
        found = [[by_label[i][label].value for i in places if label in by_label[i]] for places in rows]
        means = [mean_of_runs(values) if len({*values}) > 1 else None for values in found]
        values = [mean.value if mean else next(iter(own), None) for mean, own in zip(means, found, strict=True)]
        spread = [mean.value - mean.low if mean else None for mean in means]
        distinct = {value for value in values if value is not None} if h.better else set()
        best = None if len(distinct) < 2 else max(distinct) if h.better > 0 else min(distinct)
        column = {"label": label, "unit": h.unit, "is_option": False, "values": values, "best": best}
        reached.append({**column, "spread": spread})
    # a few options name a run; many would push its numbers out of sight
    columns = options + reached if len(options) <= _FEW else reached + options
    titles = [names[places[0]] + f" and {len(places) - 1} more" * (len(places) > 1) for places in rows]
    swatches = [(colours or {}).get(i, COLOURS[i % len(COLOURS)]) for i in range(len(rows))]
    return {"columns": columns, "rows": list(zip(titles, swatches, strict=True)), "is_grouped": groups is not None}


def differing_options(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the options that all runs have, with values that differ, except for where a run writes."""
    shared = [name for name in configs[0] if all(name in config for config in configs)]
    return [name for name in shared if name not in _PLACES and len({repr(config[name]) for config in configs}) > 1]


SHORTEST = 5.0  # least seconds between two pages
SHARE = 0.005  # most of a run's time that its page takes


class LivePage:
    """Context manager of the page of a run, written anew while it goes on in a `SHARE` of the time at most.

    runs: folders of those that the page is of instead, each of which says by its lock whether it goes on.
    """

    def __init__(self, output: Path, runs: Sequence[Path] | None = None) -> None:
        self.path, self._runs, self._has_own = output / PAGE_FILE, runs or [output], runs is None
        self._due, self._gap = 0.0, SHORTEST

    def __enter__(self) -> LivePage:
        with writing(self.path):
            self.path.unlink(missing_ok=True)  # of the run that this one overwrites or goes on with
        return self

    def refresh(self) -> None:
        """Write the page, if it is time to. Called after each step whose metrics are written."""
        began = time.monotonic()
        if began >= self._due:
            self._write("running", refresh=self._gap)
            now = time.monotonic()
            self._gap = max(SHORTEST, (now - began) / SHARE)
            self._due = now + self._gap

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._write("done" if kind is None else "stopped", refresh=None)

    def _write(self, state: str, *, refresh: float | None) -> None:
        """Write the page; where that fails there is a warning: a page can be made again, a run cannot."""
        files = [run / METRICS_FILE for run in self._runs]
        runs = [file.parent for file in files if file.is_file() and file.stat().st_size]
        try:
            if runs:
                write_page(runs, self.path, state=state if self._has_own else None, refresh=refresh)
        except ConfigError as failure:
            warnings.warn(f"{self.path}: the page was not written: {failure}", stacklevel=3)
