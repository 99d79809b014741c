"""`rlhf-engine report`: one HTML page of one run or several, which needs nothing but a browser.

Data go into the page as JSON, texts of a run reach it as text and never as markup. The page loads nothing.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

from rlhf_engine.errors import ConfigError
from rlhf_engine.runs.curves import PANELS
from rlhf_engine.runs.folder import METRICS_FILE, RECORD_FILE, SAMPLES_LOG
from rlhf_engine.runs.metrics import read_metrics
from rlhf_engine.runs.samples import SampleLog

MOST_POINTS = 2000
"""Most points of a line; where there are more, each point is the mean of several steps."""


def write_page(runs: Sequence[str | Path], out: str | Path, *, title: str | None = None) -> Path:
    """Write the page of some runs' output folders; its path.

    Raises ConfigError for a folder that holds no run or a damaged one, where two have the same name and cannot be told
    apart, and where `out` cannot be written.
    """
    folders = [_run_folder(Path(run)) for run in runs]
    names = _names(folders)
    data = {
        "panels": [{"title": p.title, "unit": p.unit, "lines": [list(line) for line in p.lines]} for p in PANELS],
        "runs": [_run(folder, name) for folder, name in zip(folders, names, strict=True)],
    }
    heading = title or (names[0] if len(names) == 1 else f"{len(names)} runs")
    # `</script>` in an answer must not end the element that the data are in
    text = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    page = _PAGE.format(title=html.escape(heading), style=_asset("page.css"), data=text, script=_asset("page.js"))
    out = Path(out)
    if out.is_dir():
        raise ConfigError(f"out: expected a file, such as {str(out / 'report.html')!r}, got the folder {str(out)!r}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"out: expected a file that can be written, got {str(out)!r}: {error.strerror}") from error
    return out


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<header><h1>{title}</h1><div id="runs"></div></header>
<main id="page"><noscript>This page draws with JavaScript.</noscript></main>
<script type="application/json" id="data">{data}</script>
<script>
{script}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _run_folder(folder: Path) -> Path:
    """A run's output folder, or the one of RL within a demo's."""
    for found in (folder, folder / "rl"):
        if (found / METRICS_FILE).is_file() and (found / RECORD_FILE).is_file():
            return found
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


def _run(folder: Path, name: str) -> dict[str, Any]:
    try:
        return _whole_run(folder, name)
    except ConfigError:
        raise
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"run: expected the files of a run in {str(folder)!r}, got: {error}") from error


def _whole_run(folder: Path, name: str) -> dict[str, Any]:
    rows = read_metrics(folder / METRICS_FILE)
    if not rows:
        raise ConfigError(f"run: expected metrics of at least one step, got none in {str(folder)!r}")
    record = _record(folder / RECORD_FILE)
    every, curves = _curves(rows)
    found = {
        "name": name,
        "steps": rows[-1]["step"],
        "every": every,
        "curves": curves,
        "nonfinite": {str(row["step"]): row["nonfinite"] for row in rows if "nonfinite" in row},
        "samples": [asdict(look) for look in SampleLog(folder / SAMPLES_LOG).read()],
        "config": record.get("config", {}),
        "facts": _facts(record),
    }
    json.dumps(found, ensure_ascii=False, allow_nan=False).encode()  # or ValueError: NaN, half a character
    return found


_RECORDED: dict[str, type] = {
    "config": dict,
    "versions": dict,
    "command": list,
    "git_commit": dict,
    "kernel_backends": dict,
    "base_hash": str,
}
"""Fields of a run's record that the page takes apart; all but the first may be null or missing."""


def _record(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ConfigError(f"run: expected a JSON object in {path}, got {type(found).__name__}")
    held = {name: found[name] for name in _RECORDED if found.get(name) is not None}
    for name, value in held.items():
        if not isinstance(value, _RECORDED[name]):
            raise ConfigError(f"run: expected {_RECORDED[name].__name__} as {name} in {path}, got {value!r:.80}")
    if not isinstance(held.get("git_commit", {}).get("commit", ""), str):
        raise ConfigError(f"run: expected text as the commit in {path}, got {held['git_commit']['commit']!r:.80}")
    return {**{name: value for name, value in found.items() if name not in _RECORDED}, **held}


def _curves(rows: Sequence[Mapping[str, Any]]) -> tuple[int, dict[str, list[list[float]]]]:
    """Steps per point, and metric → [steps, values] of all that are numbers; the same steps are a point in all."""
    every = -(-len(rows) // MOST_POINTS)
    names = dict.fromkeys(name for row in rows for name, value in row.items() if _is_number(value) and name != "step")
    groups = [rows[i : i + every] for i in range(0, len(rows), every)]
    found: dict[str, list[list[float]]] = {}
    for name in names:
        points = [(group[-1]["step"], [row[name] for row in group if _is_number(row.get(name))]) for group in groups]
        kept = [(step, sum(values) / len(values)) for step, values in points if values]
        found[name] = [[step for step, _ in kept], [value for _, value in kept]]
    return every, found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _facts(record: Mapping[str, Any]) -> dict[str, str]:
    """Facts about what ran where, as text."""
    commit = record.get("git_commit") or {}
    commit = commit if "commit" in commit else {}
    versions = record.get("versions", {})
    found = {
        "started": record.get("started"),
        "command": " ".join(map(str, record.get("command", []))),
        "commit": f"{commit['commit'][:12]}{', with changes' if commit.get('dirty') else ''}" if commit else None,
        "device": record.get("device_name"),
        "processes": record.get("processes"),
        "resumed at step": record.get("resumed_at_step") or None,
        "base": (record.get("base_hash") or "")[:12] or None,
        **{f"{name}": version for name, version in versions.items()},
    }
    backends = record.get("kernel_backends", {})
    chosen = {op: row.get("auto") for op, row in backends.items() if isinstance(row, dict)}
    found |= {"kernels": ", ".join(f"{op} {backend}" for op, backend in chosen.items() if backend) or None}
    return {name: str(value) for name, value in found.items() if value is not None}
