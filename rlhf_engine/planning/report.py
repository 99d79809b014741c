"""`rlhf-engine plan`: predictions as a table, a bar chart and JSON, with what they assume."""

from __future__ import annotations

import json
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rlhf_engine.config import PlanConfig
from rlhf_engine.config.training import FLOAT32_GRADIENTS
from rlhf_engine.planning import table
from rlhf_engine.planning.fit import (
    FULL_SFT,
    GATHERED_BLOCKS,
    IN_SHARES,
    NEVER_WHOLE,
    PHASES,
    WAYS,
    WHOLE,
    Fit,
    Prediction,
)

METHODS = tuple(m for m in typing.get_args(typing.get_type_hints(PlanConfig)["method"]) if m != "all")

PHASE_NAMES = {"generation": "generation", "inference": "inference (scoring)", "update": "update"}
_STATE_NAMES = {
    "frozen_weights": "frozen backbones",
    "trained_weights": "trained backbones",
    "adapters": "adapters",
    "heads": "scalar heads",
    "packed_weights": "packed weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
}


WIDTH = 110
"""Columns of what is printed to a file."""
_SECONDS = (5, 15)
"""Seconds that traces of one method take on an idle core, about."""


def run_plan(config: PlanConfig) -> list[Prediction]:
    """Predict, print and draw what a configuration asks for."""
    budget = config.budget_bytes
    found = []
    advice: list[str] = []
    for fit in _fits(config):
        if config.processes == 1:
            prediction, own = fit.predict(budget), {}
        else:
            ways = fit.ways(budget)
            prediction, said = ways[fit.way], advise(fit, ways, config)
            own = {"way": fit.way, "ways": {way: _of_way(p, budget) for way, p in ways.items()}, "advice": said}
            advice += said
        found.append(prediction)
        if config.json:
            print(json.dumps({**as_json(prediction, config), **own}), flush=True)
    if not config.json:
        console = Console()
        if not console.is_terminal:
            console = Console(width=WIDTH)  # a file has no width, and five methods side by side need theirs
        console.print(plan_table(found, config))
        console.print(*advice, sep="\n", end="\n" if advice else "", markup=False, highlight=False, soft_wrap=True)
        console.print(*assumptions(config, found), sep="\n", markup=False, highlight=False, soft_wrap=True)
    if config.out is not None:
        plot_plan(found, config, config.out)
    return found


def is_tabled(config: PlanConfig) -> bool:
    """Whether a plan is looked up, which needs no torch."""
    return table.fits(config, []) is not None


def _fits(config: PlanConfig) -> Iterator[Fit]:
    """The methods that are asked for, one after another; progress on standard error where they are traced."""
    methods = methods_of(config)
    found = table.fits(config, methods)
    if found is not None:
        note = table.difference()
        if note is not None:
            print(note, file=sys.stderr)
        yield from found
        return
    from rlhf_engine.planning.phases import make_setting
    from rlhf_engine.planning.predict import Planner

    shared: dict[Any, Any] = {}
    planners = [Planner(method, make_setting(config), shared) for method in methods]
    planners[0].state_bytes  # noqa: B018 - refuses modules that are none before anything is said
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    least, most = (len(methods) * n for n in _SECONDS)
    errors.print(f"note: tracing the engine's code on tensors without data, about {least} to {most} s on an idle core")
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=errors,
        disable=not errors.is_terminal,
        transient=True,
    ) as progress:
        task = progress.add_task("methods", total=len(planners))
        for planner in planners:
            progress.update(task, description=planner.method)
            yield planner
            progress.advance(task)


def methods_of(config: PlanConfig) -> list[str]:
    """Methods that are asked for. Several processes share frozen backbones, which full PPO has none of that matter."""
    left_out = (FULL_SFT,) if config.processes == 1 else (FULL_SFT, "full_ppo")
    return [m for m in METHODS if m not in left_out] if config.method == "all" else [config.method]


_FOR_USERS = {
    WHOLE: "without --shard_base",
    IN_SHARES: "with --shard_base",
    NEVER_WHOLE: "with --shard_base beside --rollout_backend vllm",
}


def advise(fit: Fit, ways: Mapping[str, Prediction], config: PlanConfig) -> list[str]:
    """Sentences on how several processes should hold the base of a method, with the memory of each way.

    Args:
        fit: of the method.
        ways: predictions of one process, by way.
        config: options of the plan.

    Returns:
        One line for the memory, one for the choice, and one for a server where the base is never whole.
    """
    budget, method = config.budget_bytes, ways[WHOLE].method
    peaks = ", ".join(f"{gigabytes(ways[way].peak)} {_FOR_USERS[way]}" for way in WAYS)
    lines = [f"{method}: GB that each of {config.processes} processes takes at its peak: {peaks}."]
    chosen = next((way for way in WAYS if ways[way].peak <= budget), None)
    if chosen is None:
        least = ways[NEVER_WHOLE]
        share = least.base_bytes["update"] - -(-least.state_bytes["frozen_weights"] // config.processes)
        lines.append(
            f"{method}: {config.gpu} hold it in no way; {gigabytes(least.base_bytes['update'])} of the last are the "
            f"base, of which {gigabytes(share)} do not become less with more processes."
        )
    elif chosen != NEVER_WHOLE:
        where = {WHOLE: "all the time", IN_SHARES: "while answers are drawn and scored, and in shares while it learns"}
        lines.append(f"{method}: run it {_FOR_USERS[chosen]}: the base fits whole {where[chosen]}.")
    else:
        lines.append(f"{method}: run it {_FOR_USERS[chosen]}: the base never fits whole beside what else is needed.")
    if chosen in (None, NEVER_WHOLE):
        gpus = server_gpus(fit.drawing_bytes, budget)
        more = f"{gpus} more such GPU{'s' if gpus > 1 else ''} (--tensor-parallel-size {gpus})"
        lines.append(f"{method}: a vLLM server draws the answers, on {more}.")
    return lines


def server_gpus(base_bytes: int, budget: int) -> int:
    """Compute the cards that a server with tensor parallelism needs.

    Args:
        base_bytes: of the base.
        budget: bytes that may be used of a card.

    Returns:
        The smallest power of two of cards that hold the base with a third to spare.
    """
    gpus = 1
    while gpus * budget < 1.5 * base_bytes:
        gpus *= 2
    return gpus


def _of_way(prediction: Prediction, budget: int) -> dict[str, Any]:
    """Numbers of one way, for JSON. max_batch: answers of one process."""
    return {
        "base_bytes": prediction.base_bytes,
        "peak_bytes": prediction.peak_bytes,
        "fits": prediction.peak <= budget,
        "max_batch": prediction.largest_batch,
        "max_micro_batch": prediction.max_batch["update"],
    }


def as_json(prediction: Prediction, config: PlanConfig) -> dict[str, Any]:
    """One method's line: bytes everywhere. max_batch: answers of a step, 0 where no micro-batch fits its update."""
    options = {key: value for key, value in config.to_dict().items() if key not in ("method", "json", "out")}
    return {
        "method": prediction.method,
        "state_bytes": sum(prediction.state_bytes.values()),
        "state_parts": prediction.state_bytes,
        "kv_cache_bytes": prediction.kv_cache_bytes,
        "most_support_bytes": prediction.support_bytes,
        "activation_bytes": prediction.activation_bytes,
        "peak_bytes": prediction.peak_bytes,
        "max_batch": config.processes * prediction.largest_batch,
        "max_micro_batch": prediction.max_batch["update"],
        "budget_bytes": config.budget_bytes,
        "options": options,
        "assumptions": assumptions(config, [prediction]),
    }


def plan_table(predictions: Sequence[Prediction], config: PlanConfig) -> Table:
    """State by part, peak by phase, and what fits; GB of 10^9 bytes."""
    title = (
        f"{config.model}, {config.dtype}, batch {config.batch} of {config.max_prompt_length} + "
        f"{config.max_completion_length} tokens: GB (10^9 bytes)"
    )
    if config.processes > 1:
        title += f" in each of {config.processes} processes"
    shown = Table(title=title, title_justify="left")
    shown.add_column("", no_wrap=True)
    for prediction in predictions:
        shown.add_column(prediction.method, justify="right", no_wrap=True)
    for part, name in _STATE_NAMES.items():
        shown.add_row(name, *(gigabytes(p.state_bytes[part]) for p in predictions))
    shown.add_row("KV cache", *(gigabytes(p.kv_cache_bytes) for p in predictions))
    if config.processes > 1:
        for phase in PHASES:
            shown.add_row(f"of the base, {phase}", *(gigabytes(p.base_bytes[phase]) for p in predictions))
    for phase in PHASES:
        shown.add_row(f"activations, {phase}", *(gigabytes(p.activation_bytes.get(phase, 0)) for p in predictions))
    shown.add_section()
    for phase in PHASES:
        shown.add_row(f"peak, {PHASE_NAMES[phase]}", *(gigabytes(p.peak_bytes.get(phase, 0)) for p in predictions))
    shown.add_row("peak", *(gigabytes(p.peak) for p in predictions), style="bold")
    shown.add_section()
    shown.add_row(f"largest batch in {config.gpu}", *(f"{config.processes * p.largest_batch:,}" for p in predictions))
    shown.add_row(f"largest micro-batch in {config.gpu}", *(f"{p.max_batch['update']:,}" for p in predictions))
    return shown


def gigabytes(n: int) -> str:
    """Two decimals, a dash for nothing, and small numbers not as 0."""
    if n == 0:
        return "–"
    return f"{n / 1e9:.2f}" if n >= 1e7 else f"{n / 1e9:.5f}"


def assumptions(config: PlanConfig, predictions: Sequence[Prediction]) -> list[str]:
    """Assumptions that the numbers stand on, one line each."""
    lines = [
        f"Every prompt has {config.max_prompt_length} tokens and every answer {config.max_completion_length}; the "
        "learned reward (lane), KL by k1, no evaluation.",
        f"Whole backbones train in {config.dtype}, adapters in {config.adapter_dtype}, scalar heads in float32. "
        f"The optimizer ({config.optim}) has {_moments(config)}.",
        "Largest batch: answers per step whose rollout and scoring fit. Largest micro-batch: sequences per forward and "
        f"backward that fit. Both in {config.gpu} less {config.reserve} for driver, libraries and fragmentation. Where "
        "lanes of one backbone share a forward (up to token_budget), a smaller micro-batch can need more than a larger "
        "one beyond it.",
    ]
    if config.num_generations > 1:
        lines.append(sharing(config, predictions[0].shared_phases))
    if config.processes > 1:
        lines.append(
            f"In shares: embeddings, heads and {GATHERED_BLOCKS} blocks at a time are gathered beside a process's "
            "share: the block that runs, the buffer that it came in, and the next one."
        )
    if any(prediction.method != FULL_SFT for prediction in predictions):
        lines.append(
            "Not in here: with top_k, top_p or min_p, the words that every token was drawn among, until the update; at "
            f"most {gigabytes(predictions[0].support_bytes)} GB, a bit per word and token (top_k: 4 bytes per word "
            "kept, where that is less)."
        )
    if config.device == "cuda":
        lines.append(
            "Not in here: the CUDA context and library workspaces. Kernels' own memory on CUDA is read off the code, "
            "not measured; attention is taken to be flash attention"
            + (
                ", which float32 does not get."
                if config.dtype == "float32"
                else "; `rlhf-engine doctor` names what serves it on a machine."
            )
        )
    else:
        from rlhf_kernels.linear import packed

        lines.append(
            f"Packed weights: copies that our own products keep, up to {packed.budget() / 2**20:.0f} MiB "
            f"({packed.ENVIRONMENT_VARIABLE}). Not in here: the interpreter and its libraries, and packed copies that "
            "matrix libraries make."
        )
    if any(prediction.method == FULL_SFT for prediction in predictions):
        lines.append(
            f"{FULL_SFT}: sft --full on rows of one answer, without a reward head; a pair of answers is two sequences "
            "(num_generations 2)."
        )
    return lines


def sharing(config: PlanConfig, phases: Sequence[str]) -> str:
    """Sentences on what answers to a prompt have in common. phases: those in which they share its pass."""
    passes = f" and its pass in {' and '.join(PHASE_NAMES[phase] for phase in phases)}" if phases else ""
    return (
        f"{config.num_generations} answers to every prompt share its full blocks of the KV cache{passes}. Passes are "
        "shared on a CPU alone, in an update without dropout alone. An update of several minibatches is planned "
        "without: answers are dealt to them at random."
    )


def _moments(config: PlanConfig) -> str:
    """State of the optimizer beside the parameters, in words."""
    moments = "8 bits, in float32 for small parameters" if config.optim.startswith("adamw_8bit") else "float32"
    found = f"two moments in {moments}"
    if config.optim == "adafactor":
        found = "second moments by row and column in float32"
    if "bfloat16" not in (config.dtype, config.adapter_dtype):
        return found
    gradients = "float32" if config.optim in FLOAT32_GRADIENTS else "bfloat16"
    stochastic = config.optim.endswith("stochastic")
    masters = "stochastic rounding in place of masters" if stochastic else "float32 master weights"
    return f"{found}; for what is trained in bfloat16, {masters} and gradients in {gradients}"


def plot_plan(predictions: Sequence[Prediction], config: PlanConfig, path: str) -> None:
    """A stacked bar per method and phase, with the device's memory as a line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    labels = [f"{p.method}\n{phase}" for p in predictions for phase in p.peak_bytes]
    stacks: dict[str, list[float]] = {}
    for prediction in predictions:
        for phase in prediction.peak_bytes:
            for name, size in stack(prediction, phase).items():
                stacks.setdefault(name, []).append(size / 1e9)
    figure = Figure(figsize=(2.4 + 0.8 * len(labels), 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    places = [i + i // len(PHASES) * 0.6 for i in range(len(labels))]
    base = [0.0] * len(labels)
    for i, (name, sizes) in enumerate(stacks.items()):
        axes.bar(places, sizes, bottom=base, label=name, color=f"C{i}", width=0.85)
        base = [a + b for a, b in zip(base, sizes, strict=True)]
    limit = config.memory_bytes / 1e9
    axes.axhline(limit, color="0.3", linestyle="--", linewidth=1)
    axes.text(places[-1] + 0.5, limit, f" {config.gpu}", va="bottom", ha="right", fontsize=8, color="0.3")
    axes.set_xticks(places, labels, fontsize=7, rotation=45, ha="right")
    axes.set_ylabel("GB (10^9 bytes)")
    axes.set_title(
        f"{config.model}, {config.dtype}, batch {config.batch}, {config.max_prompt_length} + "
        f"{config.max_completion_length} tokens",
        fontsize=11,
    )
    axes.legend(fontsize=8, frameon=False)
    axes.grid(axis="y", alpha=0.25)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def stack(prediction: Prediction, phase: str) -> dict[str, int]:
    """Parts of a phase's peak, bytes; they add up to it."""
    state = prediction.state_bytes
    update = phase == "update"
    parts = {
        "frozen backbones": prediction.base_bytes[phase],
        "trained backbones": state["trained_weights"],
        "adapters and heads": state["adapters"] + state["heads"],
        "packed weights": state["packed_weights"],
        "optimizer state": state["optimizer"],
        "gradients": state["gradients"] if update else 0,
        "KV cache": prediction.kv_cache_bytes if phase == "generation" else 0,
    }
    return {**parts, "activations": prediction.peak_bytes[phase] - sum(parts.values())}
