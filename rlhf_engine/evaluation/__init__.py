"""Models side by side: answers drawn, scored and judged, with a table, JSON and a page (`rlhf-engine evaluate`)."""

from rlhf_engine.evaluation.evaluate import Evaluation, Measured
from rlhf_engine.evaluation.results import summarise

__all__ = ["Evaluation", "Measured", "summarise"]
