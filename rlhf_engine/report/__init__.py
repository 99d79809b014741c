"""What a person sees of a run: progress while it lasts, curves, sample answers, and a page that compares runs."""

from rlhf_engine.report.curves import PANELS, Panel, plot_curves, smooth
from rlhf_engine.report.progress import ASYNC_SHOWN, TrainingProgress
from rlhf_engine.report.summary import exit_summary
from rlhf_engine.report.text import format_value, samples_markdown, summary_table

__all__ = [
    "ASYNC_SHOWN",
    "PANELS",
    "Panel",
    "TrainingProgress",
    "exit_summary",
    "format_value",
    "plot_curves",
    "samples_markdown",
    "smooth",
    "summary_table",
]
