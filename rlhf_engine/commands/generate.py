"""`rlhf-engine generate`: answers of a model, with or without an adapter.

One alone is printed as it is written, several in the order of their prompts. Standard output belongs to the answers,
everything else goes to standard error.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.progress import TextColumn, TimeElapsedColumn

from rlhf_engine.commands.common import INTERRUPTED, begin_drawing, prepare, print_what_was_left_out
from rlhf_engine.config import GenerateConfig
from rlhf_engine.errors import as_request_errors
from rlhf_engine.rollout.answer import AnswerSession, summary
from rlhf_engine.rollout.generate import report_check
from rlhf_engine.runs.progress import counting_bar


def run(config: GenerateConfig) -> int:
    """Write and print every answer; 0, or 130 if it was interrupted. What has finished by then is kept and printed."""
    prepare(config.kernels)
    with as_request_errors():
        begin_drawing(config)
        session = AnswerSession(config)
    print_what_was_left_out([session.report])
    errors = Console(file=sys.stderr, highlight=False, soft_wrap=True)
    if session.done:
        errors.print(f"{len(session.done)} of {len(session.texts)} answers are in {config.out} already")
    printer = _Printer(session)
    try:
        if session.streams and not config.json:
            _stream(session)
        else:
            _collect(session, printer, errors)
    except KeyboardInterrupt:
        printer.flush()
        held = "" if config.out is None else f" in {config.out}; --resume goes on"
        errors.print(f"rlhf-engine generate: stopped with {printer.seen} of {len(session.texts)} answers{held}")
        return INTERRUPTED
    if session.stats.tokens:
        errors.print(summary(session), markup=False)
        if config.verify_rollout:
            errors.print(report_check(session.check()), markup=False)
    return 0


def _stream(session: AnswerSession) -> None:
    """The only answer, as it is written."""
    if session.finished():
        return
    print(f"{session.texts[0]}\n  → ", end="", flush=True)
    shown = 0
    while not session.finished():
        rows = session.step()
        text = rows[0]["completion"] if rows else session.partial_text()
        print(text[shown:], end="", flush=True)
        shown = max(shown, len(text))
    print(flush=True)


def _collect(session: AnswerSession, printer: _Printer, errors: Console) -> None:
    columns = (TextColumn("{task.fields[speed]}"), TimeElapsedColumn())
    with counting_bar(errors, *columns, disable=not errors.is_terminal) as progress:
        task = progress.add_task("answers", total=len(session.texts), completed=len(session.done), speed="")
        while not session.finished():
            for row in session.step():
                printer.add(row)
                progress.advance(task)
            progress.update(task, speed=f"{session.stats.tokens_per_second:,.0f} tokens/s")
    printer.flush()


class _Printer:
    """Prints rows in the order of their places; those that finish early wait."""

    def __init__(self, session: AnswerSession) -> None:
        self._json = session.config.json
        self._order = [i for i in range(len(session.texts)) if i not in session.done]
        self._held: dict[int, dict[str, Any]] = {}
        self.seen = len(session.done)  # answers that have finished, here or before

    def add(self, row: dict[str, Any]) -> None:
        self.seen += 1
        self._held[row["index"]] = row
        while self._order and self._order[0] in self._held:
            self._print(self._held.pop(self._order.pop(0)))

    def flush(self) -> None:
        """Print what still waits for others."""
        for index in sorted(self._held):
            self._print(self._held.pop(index))

    def _print(self, row: dict[str, Any]) -> None:
        text = json.dumps(row, ensure_ascii=False) if self._json else f"{row['prompt']}\n  → {row['completion']}"
        print(text, flush=True)
