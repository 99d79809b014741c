"""`rlhf-engine evaluate`, `export` and `report`: what runs have left is compared, converted and shown."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.progress import TaskID, TimeElapsedColumn
from rlhf_kernels.runtime import registry

from rlhf_engine.commands.common import INTERRUPTED, begin_drawing, prepare, print_what_was_left_out
from rlhf_engine.config import EvaluateConfig, ExportConfig, ReportConfig
from rlhf_engine.devices import DTYPES, resolve_device
from rlhf_engine.errors import as_request_errors
from rlhf_engine.runs.metrics import run_record, write_json_atomic
from rlhf_engine.runs.progress import counting_bar
from rlhf_engine.tools.candidates import PAGE_FILE, RESULTS_FILE
from rlhf_engine.tools.evaluate import Evaluation
from rlhf_engine.tools.results import summarise, table, write_page


def evaluate(config: EvaluateConfig) -> int:
    """Compare several models on the same prompts."""
    prepare(config.kernels)
    with as_request_errors():
        device_type = begin_drawing(config)
        evaluation = Evaluation(config)
    print_what_was_left_out([evaluation.report])
    record = run_record(
        config=config,
        command=[Path(sys.argv[0]).name, *sys.argv[1:]],
        backends=registry.report(device_type, DTYPES[config.dtype]),
        device=resolve_device(config.device),
    )
    errors = Console(file=sys.stderr, highlight=False, soft_wrap=True)
    tasks: dict[str, TaskID] = {}
    with counting_bar(errors, TimeElapsedColumn(), disable=not errors.is_terminal) as bar:

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done)

        try:
            measured = evaluation.run(show)
        except KeyboardInterrupt:
            errors.print(f"rlhf-engine evaluate: stopped; answers are kept in {evaluation.output}, --resume goes on")
            return INTERRUPTED
    results = summarise(evaluation, measured)
    write_json_atomic(evaluation.output / RESULTS_FILE, {**results, "record": record})
    page = write_page(evaluation, measured, results, evaluation.output / PAGE_FILE)
    Console(highlight=False).print(table(results))
    print(f"results {evaluation.output / RESULTS_FILE}\npage {page}")
    return 0


def export(config: ExportConfig) -> int:
    """Write a trained adapter or reward model in the format of another library."""
    prepare("auto")
    from rlhf_engine.tools.export import export as write_export

    with as_request_errors():
        url, notes = write_export(config)
    for note in notes:
        print(f"note: {note}")
    print(f"{config.to:<8} {config.output_dir}")
    if url is not None:
        print(f"pushed   {url}")
    return 0


def report(config: ReportConfig) -> int:
    """Write a page of one run or several."""
    from rlhf_engine.runs.page import write_page

    print(f"page {write_page(config.run, config.out, title=config.title)}")
    return 0
