"""`rlhf-engine plan --time`: seconds of a step as a table and JSON, with the figures that they stand on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from rlhf_engine.config import PlanConfig
from rlhf_engine.devices import DTYPES
from rlhf_engine.planning.ceilings import measure_cpu
from rlhf_engine.planning.duration import PARTS, STEP_PHASES, Duration, DurationPlanner
from rlhf_engine.planning.fit import NEVER_WHOLE
from rlhf_engine.planning.machines import Machine, gpu
from rlhf_engine.planning.phases import make_setting
from rlhf_engine.planning.report import WIDTH, methods_of, sharing

_GENERATION = ("prefill", "decoding", "capture")


def run_time_plan(config: PlanConfig) -> list[Duration]:
    """Predict and print what a configuration asks for. On a CPU its ceilings are measured first."""
    setting = make_setting(config)
    shared: dict[Any, Any] = {}
    machine = make_machine(config)
    found = []
    for method in methods_of(config):
        duration = DurationPlanner(method, setting, machine, shared).predict_seconds(config.budget_bytes)
        found.append(duration)
        if config.json:
            print(json.dumps(as_json(duration, config, machine)), flush=True)
    if not config.json:
        console = Console()
        if not console.is_terminal:
            console = Console(width=WIDTH)
        console.print(time_table(found, config, machine))
        console.print(*notes(found, config, machine), sep="\n", markup=False, highlight=False, soft_wrap=True)
    return found


def make_machine(config: PlanConfig) -> Machine:
    """The data-sheet of a card, or this CPU's measured ceilings."""
    if config.gpu != "cpu":
        return gpu(config.gpu, config.processes)
    return measure_cpu(DTYPES[config.dtype], DTYPES[config.adapter_dtype], config.lora_r)


def by_phase(duration: Duration) -> dict[str, float]:
    """Seconds of generation, scoring and update."""
    phases = duration.phases
    generation = sum(phases[phase] for phase in _GENERATION)
    return {"generation": generation, "scoring": phases["scoring"], "update": phases["update"]}


def as_json(duration: Duration, config: PlanConfig, machine: Machine) -> dict[str, Any]:
    """One method's line."""
    options = {key: value for key, value in config.to_dict().items() if key not in ("method", "json", "out", "time")}
    return {
        "method": duration.method,
        "machine": machine.name,
        "seconds": duration.seconds,
        "phase_seconds": by_phase(duration),
        "generation_seconds": {phase: duration.phases[phase] for phase in _GENERATION},
        "part_seconds": duration.parts,
        "part_shares": {part: seconds / duration.seconds for part, seconds in duration.parts.items()},
        "dominant": duration.dominant,
        "flops": duration.flops,
        "figures": [figure._asdict() for figure in machine.figures],
        "assumed": [figure.name for figure in machine.figures if figure.source == "assumed"],
        "options": options,
        "assumptions": assumptions(config, duration),
        **_of_processes(duration, config),
    }


def _of_processes(duration: Duration, config: PlanConfig) -> dict[str, Any]:
    """Facts of several processes: how they hold the base, and what a server would take to draw; else nothing."""
    if config.processes == 1:
        return {}
    return {
        "way": duration.way,
        "received_bytes_per_token": duration.received_bytes,
        "server": {"gpus": duration.server_gpus, "generation_seconds": duration.served_seconds},
        "advice": advice(duration),
    }


def advice(duration: Duration) -> str:
    """Sentence on the way in which several processes hold the base, and on drawing by a server beside it.

    Args:
        duration: a step of one of the processes.

    Returns:
        The sentence.
    """
    drawing, gpus = by_phase(duration)["generation"], duration.server_gpus
    served = (
        f"a vLLM server on {gpus} more such GPU{'s' if gpus > 1 else ''} (--tensor-parallel-size {gpus}) takes "
        f"at least {_seconds(duration.served_seconds)} s"
    )
    if duration.way != NEVER_WHOLE:
        return f"{duration.method}: with the base held {duration.way}, drawing takes {_seconds(drawing)} s; {served}."
    return (
        f"{duration.method}: with the base in shares at all times (--shard_base always) each process receives "
        f"{duration.received_bytes / 1e9:.3g} GB for every token, and drawing takes {_seconds(drawing)} s; {served}"
        f"{', and is the fast way (--rollout_backend vllm)' if duration.served_seconds < drawing else ''}."
    )


def time_table(durations: Sequence[Duration], config: PlanConfig, machine: Machine) -> Table:
    """Seconds by phase, and by part with its share of the step."""
    title = (
        f"{config.model}, {config.dtype}, batch {config.batch} of {config.max_prompt_length} + "
        f"{config.max_completion_length} tokens, {machine.name}: seconds of a step, predicted"
    )
    if config.processes > 1:
        title += f", {config.processes} processes"
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for duration in durations:
        table.add_column(duration.method, justify="right", no_wrap=True)
    for phase in STEP_PHASES:
        name = f"generation, {phase}" if phase in _GENERATION else phase
        table.add_row(name, *(_seconds(d.phases[phase]) for d in durations))
    table.add_row("step", *(_seconds(d.seconds) for d in durations), style="bold")
    table.add_section()
    for part in PARTS:
        cells = (f"{_seconds(d.parts[part])} {100 * d.parts[part] / d.seconds:5.1f} %" for d in durations)
        table.add_row(part, *cells)
    return table


def notes(durations: Sequence[Duration], config: PlanConfig, machine: Machine) -> list[str]:
    """Notes on the part that dominates and on what the seconds stand on, one line each."""
    lines = [
        f"{d.method}: {d.dominant} dominate, {100 * d.parts[d.dominant] / d.seconds:.0f} % of the step."
        for d in durations
    ]
    if config.processes > 1:
        lines += [advice(d) for d in durations]
    lines += assumptions(config, durations[0])
    for source, heading in (("datasheet", "From the data-sheet"), ("measured", "Measured"), ("assumed", "ASSUMED")):
        lines += [f"{heading}: {f.name}: {f.value}." for f in machine.figures if f.source == source]
    return lines


def assumptions(config: PlanConfig, duration: Duration) -> list[str]:
    """Assumptions about a step, one line each."""
    lines = [
        f"Every prompt has {config.max_prompt_length} tokens and every answer {config.max_completion_length}; one "
        "epoch of updates. Kernels are compiled, weights packed, memory suffices; reading and writing files, reward "
        "functions on the host and evaluation take no time.",
    ]
    if config.num_generations > 1:
        lines.append(sharing(config, duration.shared_phases))
    return lines


def _seconds(n: float) -> str:
    """Three digits, a dash for nothing."""
    return "–" if n == 0 else f"{n:.4f}" if n < 0.1 else f"{n:.3f}" if n < 10 else f"{n:.1f}"
