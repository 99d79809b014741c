"""A page of one evaluation: the table, answers side by side, and answers to be rated without names.

It is one HTML file that needs nothing but a browser, as `runs.page`. It holds neither paths nor addresses. Ratings stay
in the browser until they are saved as a JSONL file with prompt, completion and label, which `rlhf-engine reward` reads.
"""

from __future__ import annotations

import hashlib
import html
import json
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

from rlhf_engine.evaluation.evaluate import Evaluation, Measured
from rlhf_engine.evaluation.results import figure_of, lines, shown_figure
from rlhf_engine.runs.metrics import write_atomic
from rlhf_engine.runs.page_parts import COLOURS, policy
from rlhf_engine.runs.text import show_controls
from rlhf_engine.scoring.rewards import mean_or_none

MOST_PROMPTS = 400
"""Prompts on the page; of more, every so many-th."""


def write_page(evaluation: Evaluation, found: Mapping[str, Measured], results: Mapping[str, Any], out: Path) -> Path:
    """Write the page with the figures that `summarise` returned, at once and whole; its path."""
    data = _data(evaluation, found, results)
    script = "\n".join(["", _asset("rlhf_engine.runs", "page_chart.js"), _asset(__package__, "page.js")])
    text = _PAGE.format(
        policy=policy(script),
        title=html.escape(show_controls(f"Evaluation of {', '.join(found)}")),
        style=_asset("rlhf_engine.runs", "page.css") + _asset(__package__, "page.css"),
        written=datetime.fromtimestamp(round(time.time()), UTC).strftime("%Y-%m-%d %H:%M UTC"),
        about=html.escape(
            f"{results['prompts']} prompts. Win rates are against {results['against']}, judged by "
            f"{_judge_name(results['judge'])}. [low, high]: {results['interval']}."
        ),
        table=_table(results),
        # `</script>` in an answer must not end the element that the data are in
        data=json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c"),
        script=script,
    )
    write_atomic(out, text.encode())
    return out


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
{policy}
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<header><h1 class="named">{title}</h1><span class="unit">written {written}</span><div id="bar"></div></header>
<main>
<div id="figures"><p>{about}</p><div class="scroll" id="comparison">{table}</div></div>
<noscript><p>The answers are drawn with JavaScript; they are in answers.jsonl as well.</p></noscript>
<div id="page"></div>
</main>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def _asset(package: str, name: str) -> str:
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def _judge_name(judge: str | None) -> str:
    """A judge without its address or path."""
    if judge is None:
        return "nobody"
    return "a server" if judge.startswith(("http://", "https://")) else judge.rpartition("/")[2]


def _table(results: Mapping[str, Any]) -> str:
    models = results["models"]
    head = "".join(f'<th class="number">{html.escape(show_controls(name))}</th>' for name in models)
    body = ""
    for row in lines(results):
        figures = (shown_figure(figure_of(model, row.key), row.form).partition(" [") for model in models.values())
        cells = [value + (sign and f'<span class="unit">[{interval}</span>') for value, sign, interval in figures]
        body += (
            f"<tr><th>{html.escape(row.label)}</th>" + "".join(f'<td class="number">{c}</td>' for c in cells) + "</tr>"
        )
    return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>"


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
