#!/usr/bin/env python
"""The table of presets of the package, rlhf_engine/planning/plan_table.json, from traces without data.

    rm -rf build/plan_table && python bench/tables/plan_table.py [--parts FOLDER] [--jobs N] [--presets NAME …]

Every preset in float32 and bfloat16 is a part, written to FOLDER (build/plan_table) as soon as it is made, after about
a minute on an idle core. A part that is there is not made again, so the script can be stopped and started. All parts
that are there become the table. It is to be made anew whenever the engine allocates other tensors than before:
tests/planning/test_table.py says so.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from rlhf_engine.config import PlanConfig
from rlhf_engine.hydra import METHODS
from rlhf_engine.hydra.kv_cache import BLOCK
from rlhf_engine.planning.fit import FULL_SFT, TRACED_ROWS
from rlhf_engine.planning.phases import layer_period, make_setting
from rlhf_engine.planning.predict import Planner
from rlhf_engine.planning.presets import PRESETS
from rlhf_engine.planning.rows import Between
from rlhf_engine.planning.table import PATH, STATE, encode
from rlhf_engine.planning.tracing import Timeline, extrapolated_peak
from rlhf_engine.rollout.steps.transformers import PREFILL_TOKENS

ROOT = Path(__file__).resolve().parents[2]
ROWS = range(1, TRACED_ROWS + 1)
OPTIMS = ("adamw", "adamw_8bit", "adamw_stochastic", "adamw_8bit_stochastic")
DTYPES = ("float32", "bfloat16")


def part(preset: str, dtype: str) -> dict[str, Any]:
    """Everything about a preset in a dtype that a plan with default lengths and adapters needs."""
    shared: dict[Any, Any] = {}
    numbers: dict[str, int] = {}  # encoded curve → place

    def planner(method: str, optim: str) -> Planner:
        config: Any = {"model": preset, "dtype": dtype, "optim": optim}
        return Planner(method, make_setting(PlanConfig(**config)), shared)

    methods = {}
    for method in (*METHODS, FULL_SFT):
        by_optim = {optim: planner(method, optim) for optim in OPTIMS}
        usual = by_optim["adamw"]
        curves = _curves(usual, usual.phases, shared)
        other = {}
        if dtype == "bfloat16" and usual.state_bytes["trained_weights"]:  # gradients in bfloat16
            other = _curves(by_optim["adamw_stochastic"], ("update",), {})

        def places(found: dict[str, dict[str, list[int]]]) -> dict[str, dict[str, int]]:
            return {
                phase: {key: numbers.setdefault(json.dumps(encode(peaks)), len(numbers)) for key, peaks in keys.items()}
                for phase, keys in found.items()
            }

        methods[method] = {
            "state": [usual.state_bytes[part] for part in STATE],
            "optim": {
                optim: [p.state_bytes["gradients"], p.state_bytes["optimizer"], p.temporary_bytes]
                for optim, p in by_optim.items()
            },
            "lanes": {phase: usual._most_lanes(phase) for phase in usual.phases},
            "peaks": places(curves),
            "other_optim": places(other),
        }
    if usual._shape(True).native_step:
        raise ValueError("plan_table: expected prompts that go through layers by transformers on CUDA")
    return {
        "cache_bytes_per_position": usual._shape(True).cache_bytes_per_position,
        "support_bytes_per_token": usual.support_bytes_per_token,
        "methods": methods,
        "curves": [json.loads(text) for text in numbers],
    }


def _curves(planner: Planner, phases: tuple[str, ...], shared: dict[Any, Any]) -> dict[str, dict[str, list[int]]]:
    """Phase → "repeats, lanes apart or together" → bytes of each of ROWS."""
    found: dict[str, dict[str, list[int]]] = {}
    for phase in phases:
        found[phase] = {}
        for repeats in (1,) if phase == "generation" else (1, 2):
            for apart in (False, True):
                if apart and planner._most_lanes(phase) == 1:
                    continue  # as together
                if phase == "inference" and repeats == 2 and not apart and planner._most_lanes(phase) > 1:
                    continue  # a second group only follows a full one
                key = ("curve", phase, repeats, apart, planner._lanes(phase))
                if key not in shared:
                    shared[key] = curve(planner, phase, repeats, apart)
                found[phase][f"{repeats} {'apart' if apart else 'together'}"] = shared[key]
    return found


def curve(planner: Planner, phase: str, repeats: int, apart: bool) -> list[int]:
    """Peaks of each of ROWS, bytes."""
    config = planner.setting.config
    n_layers, period = config.get_text_config().num_hidden_layers, layer_period(config)
    ends = (ROWS[0], ROWS[-1])

    def timelines(n: int) -> list[Timeline]:
        few, many = (planner._timeline(phase, rows, repeats, n, apart) for rows in ends)
        return Between(few, many, ends, planner.setting.device_type).timelines(ROWS)

    if period is None or 3 * period >= n_layers:
        return [timeline.peak for timeline in timelines(n_layers)]
    layers = (2 * period, 3 * period)
    peaks = [
        extrapolated_peak(short, long, layers, n_layers) for short, long in zip(*map(timelines, layers), strict=True)
    ]
    if None in peaks:
        raise ValueError(f"plan_table: expected layers that are alike in {phase}, got others")
    return peaks  # type: ignore[return-value]


def joined(parts: Path) -> str:
    """The table of all parts that are there, one line each."""
    setting = make_setting(PlanConfig(model=next(iter(PRESETS))))
    head = {
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "cache_block": BLOCK,
        "prefill_tokens": PREFILL_TOKENS,
        "token_budget": setting.token_budget,
    }
    lines = []
    for preset in PRESETS:
        for dtype in DTYPES:
            path = _path(parts, preset, dtype)
            if path.is_file():
                lines.append(f'"{preset} {dtype}": {path.read_text(encoding="utf-8")}')
    return json.dumps(head)[:-1] + ',\n"presets": {\n' + ",\n".join(lines) + "\n}}\n"


def make(parts: Path, preset: str, dtype: str) -> None:
    """Write a part."""
    torch.set_num_threads(1)
    gc.set_threshold(100_000, 50, 50)  # traces make many small objects and few cycles
    text = json.dumps(part(preset, dtype), separators=(",", ":"))
    _path(parts, preset, dtype).write_text(text, encoding="utf-8")


def _path(parts: Path, preset: str, dtype: str) -> Path:
    return parts / f"{preset}-{dtype}.json"


def main(argv: list[str] | None = None) -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=Path, default=ROOT / "build" / "plan_table")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--presets", nargs="*", default=list(PRESETS))
    parser.add_argument("--table", type=Path, default=PATH, help="another file than the package's")
    options = parser.parse_args(argv)
    options.parts.mkdir(parents=True, exist_ok=True)
    missing = [(preset, dtype) for preset in options.presets for dtype in DTYPES]
    missing = [of for of in missing if not _path(options.parts, *of).is_file()]
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        work = {pool.submit(make, options.parts, *of): of for of in missing}
        for done, future in enumerate(as_completed(work), start=1):
            future.result()
            print(f"{done} of {len(missing)}: {' '.join(work[future])}", file=sys.stderr, flush=True)
    options.table.write_text(joined(options.parts), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
