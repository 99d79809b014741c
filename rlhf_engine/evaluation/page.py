"""A page of one evaluation: the table, answers side by side, and answers to be rated without names.

It is one HTML file that needs nothing but a browser, as `runs.page`. It holds neither paths nor addresses. Ratings stay
in the browser until they are saved as a JSONL file with prompt, completion and label, which `rlhf-engine reward` reads.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_engine.evaluation.evaluate import Evaluation, Measured
from rlhf_engine.evaluation.results import figure_of, lines, shown_figure
from rlhf_engine.runs.metrics import write_atomic
from rlhf_engine.runs.page_parts import COLOURS, render
from rlhf_engine.runs.text import show_controls
from rlhf_engine.scoring.rewards import mean_or_none

MOST_PROMPTS = 400
"""Prompts on the page; of more, every so many-th."""


def write_page(evaluation: Evaluation, found: Mapping[str, Measured], results: Mapping[str, Any], out: Path) -> Path:
    """Write the page with the figures that `summarise` returned, at once and whole; its path."""
    judge = results["judge"] or "nobody"  # without its address or path
    judge = "a server" if judge.startswith(("http://", "https://")) else judge.rpartition("/")[2]
    models = results["models"].values()
    table = [
        (row.label, [shown_figure(figure_of(model, row.key), row.form).partition(" [")[::2] for model in models])
        for row in lines(results)
    ]
    text = render(
        "evaluation/page.html.jinja",
        ["runs/page_chart.js", "evaluation/page.js"],
        ["runs/page.css", "evaluation/page.css"],
        written=round(time.time()),
        refresh=None,
        title=show_controls(f"Evaluation of {', '.join(found)}"),
        results=results,
        judge=judge,
        table=table,
        data=_data(evaluation, found, results),
    )
    write_atomic(out, text.encode())
    return out


def _data(evaluation: Evaluation, found: Mapping[str, Measured], results: Mapping[str, Any]) -> dict[str, Any]:
    every = -(-evaluation.n_prompts // MOST_PROMPTS)
    shown = range(0, evaluation.n_prompts, every)
    rows, texts = evaluation.prompts.rows, evaluation.prompts.prompts
    models = []
    for name, of in found.items():
        curve = results["models"][name].get("best_of_n")
        models.append(
            {
                "name": name,
                "answers": [[_answer(of, i, draw) for draw in range(len(of.answers[i]))] for i in shown],
                "best": curve and {"kl": [b["kl"] for b in curve], "reward": [b["reward"][0] for b in curve]},
            }
        )
    prompts = [
        {
            "text": texts[i],
            # ratings are read as the data were: a string, or messages
            "source": row.prompt if isinstance(row.prompt, str) else [dict(message) for message in row.prompt],
        }
        for i, row in ((i, rows[i]) for i in shown)
    ]
    content = json.dumps([prompts, models], sort_keys=True).encode()
    return {
        "colours": COLOURS,
        "runs": models,
        "prompts": prompts,
        "every": every,
        "against": results["against"],
        "key": hashlib.sha256(content).hexdigest()[:16],
    }


def _answer(of: Measured, i: int, draw: int) -> dict[str, Any]:
    its_pairs = [] if of.preferences is None else of.preferences[i][draw :: len(of.answers[i])]
    return {
        "text": of.answers[i][draw].text,
        "reward": None if of.rewards is None else of.rewards[i][draw],
        "preference": mean_or_none(its_pairs),
    }
